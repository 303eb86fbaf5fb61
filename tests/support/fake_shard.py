"""A store in memory with the semantics of a real one's shards, and faults on demand, over real loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
from held_ports import hold_ports

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    OverloadedError,
    ReshardedError,
    SequenceGapError,
    SpecMismatchError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl, spec_to_idl
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import ColumnShard, TableSpec

WAIT_S = 60.0
"""Deadline of everything a test waits for: long, since it is only reached when the test fails."""
_T = TypeVar("_T")


@dataclass
class Received:
    """A batch that took effect."""

    client_seq: int
    epoch: int
    step: int
    time_us: int
    ends_step: bool
    is_exact_cut: bool
    rows: dict[str, list[int]]
    cost: tuple[float | None, bool | None] = (None, None)


@dataclass
class Row:
    """One column shard of a row."""

    epoch: int
    step: int
    time_us: int
    weights: bytes
    states: dict[str, bytes]


@dataclass
class Session:
    epoch: int
    last_client_seq: int = 0
    ended_step: int = -1


@dataclass
class Fault:
    """What becomes of the next batch.

    `error` is answered; otherwise the connection is dropped. With `takes_effect` the batch has taken effect before.
    """

    error: HeadraceError | None = None
    takes_effect: bool = False


class FakeShard:
    """The service of one shard. All of it lives on the store's loop.

    Attributes:
        gate: While clear, batches take effect and are not answered: the shard stalls.
        faults: One for each of the next batches; None for none.
        refusals: Of the next writers' hellos.
        received: Batches that took effect, in order.
        num_requests: `setEmbeddings` that arrived.
        num_hellos: Writers' hellos.
        cuts: By step, the rows when a writer ended it with an exact cut.
    """

    def __init__(self, store: FakeStore, shard: int) -> None:
        self.store, self.shard = store, shard
        self.limits = ServerLimits()
        self.sessions: dict[tuple[str, str], Session] = {}
        self.tables: dict[str, TableSpec] = {}
        self.rows: dict[str, dict[int, dict[ColumnShard, Row]]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.faults: deque[Fault | None] = deque()
        self.refusals: deque[HeadraceError] = deque()
        self.received: list[Received] = []
        self.num_requests = self.num_hellos = self.num_inflight = self.max_inflight = 0
        self.server: ThriftServer | None = None
        self.port = 0
        self.may_be_set_back = False
        self.cuts: dict[int, dict[str, dict[int, dict[ColumnShard, Row]]]] = {}
        self.claimed_epoch = 0

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self.port = self.port or hold_ports()
        sock = socket.create_server(("127.0.0.1", self.port))
        self.server = ThriftServer(self, limits=self.limits)
        await self.server.start(sock)

    async def stop(self) -> None:
        """Close the port and every connection at once."""
        if self.server is not None:
            server, self.server = self.server, None
            self.drop_connections(server)
            await server.close(drain_s=0)

    def drop_connections(self, server: ThriftServer | None = None) -> None:
        server = server or self.server
        assert server is not None
        for connection in list(server._context.connections):
            connection.abort()

    def forget(self) -> None:
        """Be an empty store."""
        self.sessions.clear()
        self.tables.clear()
        self.rows.clear()
        self.received.clear()

    def set_back(self, writer: Any, *, last_client_seq: int) -> None:
        """Forget a writer's later batches, as an older copy has, and drop connections. The rows stay."""
        self.sessions[writer.run, writer.client].last_client_seq = last_client_seq
        self.drop_connections()

    async def hello(self, call: Call, request: Any) -> Any:
        self.store.check_open()
        last_client_seq = 0
        if request.role != idl.Role.READER and request.epoch:
            if not request.checks_only:
                self.num_hellos += 1
                if self.refusals:
                    raise self.refusals.popleft()
            last_client_seq = self._open(request).last_client_seq
            call.peer.session = True
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=self.store.server_id,
            shard=self.shard,
            shards=[
                idl.ShardAddress(shard=shard.shard, host=self.store.host, port=shard.port)
                for shard in self.store.shards
            ],
            limits=self.limits.to_idl(),
            highest_epoch=self._highest_epoch,
            last_client_seq=last_client_seq,
            tables=[spec_to_idl(spec) for spec in self.tables.values()],
            filling=[],
            may_be_set_back=self.may_be_set_back or None,
        )

    def _open(self, request: Any) -> Session:
        self._fence(request)
        highest = self._highest_epoch
        if request.claims_epoch and request.epoch <= highest:
            raise FencedError(f"epoch {request.epoch} has been taken", epoch=highest)
        if request.claims_epoch:
            self.claimed_epoch = request.epoch
            return Session(request.epoch)
        specs = [spec_from_idl(spec) for spec in request.tables]
        for spec in specs:
            known = self.tables.get(spec.fqn, spec)
            if known != spec:
                raise SpecMismatchError(f"table {spec.fqn!r}: {known.describe_difference(spec)}")
        if request.checks_only:
            return Session(request.epoch)
        self.tables.update((spec.fqn, spec) for spec in specs)
        session = self.sessions.get((request.run, request.client))
        if session is None or session.epoch != request.epoch:
            session = self.sessions[request.run, request.client] = Session(request.epoch)
        return session

    @property
    def _highest_epoch(self) -> int:
        return max([self.claimed_epoch, *(session.epoch for session in self.sessions.values())])

    def _fence(self, request: Any) -> None:
        current = max((s.epoch for (run, _), s in self.sessions.items() if run == request.run), default=0)
        if request.epoch < current:
            raise FencedError(f"run {request.run!r}: epoch {current} has taken over", epoch=current)

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        self.store.check_open()
        assert call.peer.session
        self.num_requests += 1
        fault = self.faults.popleft() if self.faults else None
        if fault is not None:
            if fault.takes_effect:
                self._take(request)
            if fault.error is not None:
                raise fault.error
            self.drop_connections()
            raise OverloadedError("nobody reads this: the connection is gone")
        is_new = self._take(request)
        self.num_inflight += 1
        self.max_inflight = max(self.max_inflight, self.num_inflight)
        try:
            await self.gate.wait()
        finally:
            self.num_inflight -= 1
        return idl.SetEmbeddingsReply(seq=len(self.received), is_duplicate=not is_new)

    def _take(self, request: Any) -> bool:
        self._fence(request)
        session = self.sessions[request.run, request.client]
        expected = session.last_client_seq + 1
        if request.client_seq > expected:
            raise SequenceGapError(f"batch {request.client_seq}, expected {expected}", expected_seq=expected)
        if request.client_seq < expected:
            return False
        assert request.step >= session.ended_step, "a client's steps only rise"
        session.ended_step = request.step if request.ends_step else session.ended_step
        rows = {delta.fqn: self._write(request, delta) for delta in request.deltas}
        self.received.append(
            Received(
                client_seq=request.client_seq,
                epoch=request.epoch,
                step=request.step,
                time_us=request.time_us,
                ends_step=request.ends_step,
                is_exact_cut=request.is_exact_cut,
                rows=rows,
                cost=(request.cost_percent, request.is_cost_bound),
            )
        )
        session.last_client_seq = request.client_seq
        if request.is_exact_cut:
            self.cuts[request.step] = {
                fqn: {row: dict(parts) for row, parts in rows.items()} for fqn, rows in self.rows.items()
            }
        return True

    def _write(self, request: Any, delta: Any) -> list[int]:
        spec = self.tables.get(delta.fqn)
        if spec is None:
            raise UnknownTableError(f"no table {delta.fqn!r}")
        if spec.fingerprint != delta.fingerprint:
            raise SpecMismatchError(f"table {delta.fqn!r}: fingerprint")
        ids: list[int] = np.frombuffer(delta.row_ids, "<i8").tolist()
        assert len(set(ids)) == len(ids), "a row comes twice in one delta"
        spec.check_row_ids(np.array(ids, np.int64))
        deleted = np.frombuffer(delta.deleted_row_ids or b"", "<i8").tolist()
        homes = shards_of_rows(spec.seed, np.array([*ids, *deleted], np.int64), len(self.store.shards))
        assert (homes == self.shard).all(), "a row of another shard"
        assert not {*ids} & {*deleted}
        shard = ColumnShard(offset=delta.column_offset, width=delta.width)
        widths = {state.name: state.width_in(shard) * state.dtype.size_bytes for state in spec.states}
        assert [state.name for state in delta.states] == (list(widths) if ids else [])  # deletions have no columns
        row_bytes = shard.width * spec.dtype.size_bytes
        assert len(delta.weights) == len(ids) * row_bytes
        table = self.rows.setdefault(delta.fqn, {})
        for row in deleted:
            table.pop(row, None)
        for at, row in enumerate(ids):
            table.setdefault(row, {})[shard] = Row(
                request.epoch,
                request.step,
                request.time_us,
                bytes(delta.weights[at * row_bytes : (at + 1) * row_bytes]),
                {s.name: bytes(s.data[at * widths[s.name] : (at + 1) * widths[s.name]]) for s in delta.states},
            )
        return ids

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        spec = self.tables.get(request.fqn)
        if spec is None:
            raise UnknownTableError(f"no table {request.fqn!r}")
        ids = np.frombuffer(request.row_ids, "<i8").tolist()
        weights = np.zeros((len(ids), spec.dim), spec.dtype.numpy)
        states = {s.name: np.zeros((len(ids), s.width_in(spec.whole)), s.dtype.numpy) for s in spec.states}
        presence = np.zeros(len(ids), np.uint8)
        versions = np.zeros((3, len(ids)), np.int64)
        for at, row in enumerate(ids):
            for shard, value in self.rows.get(request.fqn, {}).get(row, {}).items():
                presence[at] = 1
                versions[:, at] = value.epoch, value.step, value.time_us
                columns = slice(shard.offset, shard.offset + shard.width)
                weights[at, columns] = np.frombuffer(value.weights, weights.dtype)
                for state in spec.states:
                    array, stored = states[state.name], value.states[state.name]
                    place = slice(None) if state.width else columns
                    array[at, place] = np.frombuffer(stored, array.dtype)
        reply = idl.GetEmbeddingsReply(presence=presence, weights=weights, states=[], seq=len(self.received))
        if request.with_states:
            reply.states = [
                idl.StateColumn(name=s.name, dtype=int(s.dtype), width=s.width_in(spec.whole), data=states[s.name])
                for s in spec.states
            ]
        if request.with_versions:
            reply.epochs, reply.steps, reply.times_us = versions
        return reply

    async def status(self, call: Call) -> Any:
        raise NotImplementedError

    def disconnected(self, peer: Peer) -> None:
        peer.session = None


@dataclass
class FakeStore:
    """Shards on one loop.

    Use `async with` on the test's own loop, or `hosted` to have it on a thread of its own.
    """

    num_shards: int = 1
    server_id: str = "store-1"
    host: str = "127.0.0.1"  # as it tells clients; it listens there
    shards: list[FakeShard] = field(default_factory=list)
    is_closed: bool = False  # between its end and the beginning of the one that takes its place
    successor: FakeStore | None = None  # which has
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.shards[0].port}"

    @property
    def received(self) -> list[Received]:
        """Batches of all shards, each shard's in order."""
        return [batch for shard in self.shards for batch in shard.received]

    def check_open(self) -> None:
        if self.successor is not None:
            shard = self.successor.shards[-1]
            raise ReshardedError("the server has a successor", successor=(self.successor.host, shard.port))
        if self.is_closed:
            raise UnavailableError("the server is about to have a successor")

    def rebuilt(self, num_shards: int, server_id: str) -> FakeStore:
        """Return a store with the same rows on another number of shards, which is not served yet."""
        store = FakeStore(num_shards, server_id)
        store.shards = [FakeShard(store, shard) for shard in range(num_shards)]
        for old in self.shards:
            for new in store.shards:
                new.tables |= old.tables
                new.sessions |= {key: Session(session.epoch) for key, session in old.sessions.items()}
                new.claimed_epoch = max(new.claimed_epoch, old.claimed_epoch)
            for fqn, rows in old.rows.items():
                homes = shards_of_rows(old.tables[fqn].seed, np.array([*rows], np.int64), num_shards)
                for home, (row, values) in zip(homes.tolist(), rows.items(), strict=True):
                    store.shards[home].rows.setdefault(fqn, {})[row] = dict(values)
        return store

    def weights(self, fqn: str, *, at_cut: int | None = None) -> dict[int, bytes]:
        """Return the weights of whole rows of a table by id, now or when a step was ended."""
        tables = [shard.rows if at_cut is None else shard.cuts[at_cut] for shard in self.shards]
        return {row: next(iter(parts.values())).weights for rows in tables for row, parts in rows.get(fqn, {}).items()}

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        if not self.shards:
            self.shards = [FakeShard(self, shard) for shard in range(self.num_shards)]
        for shard in self.shards:
            await shard.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.gate.set()
            await shard.stop()

    def do(self, action: Callable[[], _T]) -> _T:
        """Run a function, or a coroutine function, on the store's loop, from another thread."""
        assert self.loop is not None

        async def call() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT_S)


@contextmanager
def hosted(store: FakeStore) -> Iterator[FakeStore]:
    """Serve a store from a thread of its own."""
    started, stop = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        async with store:
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as exc:
            failures.append(exc)
            started.set()

    thread = threading.Thread(target=run, name="fake-store")
    thread.start()
    assert started.wait(WAIT_S)
    try:
        yield store
    finally:
        if store.loop is not None and not failures:
            store.loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
    assert not failures, failures


def replaced_at(address: str, *, by: str) -> FakeStore:
    """Return what answers at an address of this machine that the server at another one has taken its place."""
    store, successor = FakeStore(), FakeStore(host=by.rpartition(":")[0])
    for each, at in ((store, address), (successor, by)):
        each.shards = [FakeShard(each, 0)]
        each.shards[0].port = int(at.rpartition(":")[2])
    store.successor = successor
    return store
