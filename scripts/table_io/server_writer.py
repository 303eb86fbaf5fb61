"""Writes rows to the shards of a running server, each to its owner, over as many connections as it takes.

A writer numbers its batches as every client does. The same batches in the same order, under the same names of run and
client, resume where the server's hellos say, after however many kills. It keeps no state of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from headrace.paramserver.rpc.address import Address, format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.paramserver.system.event_loop import task_group
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    OverloadedError,
    ProtocolError,
    SequenceGapError,
    UnavailableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import TableSpec

__all__ = ["CLIENT", "ServerWriter", "ShardWriter", "TargetServer"]

CLIENT = "backfill"

_WINDOW_MESSAGES, _WINDOW_BYTES = 64, 32 * 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetServer:
    """The server to write to: `host` and `port` are those of any shard.

    Attributes:
        others: Addresses of other shards, to ask if that one does not answer.
        ssl_context: For TLS; None without.
        timeout_s: How long a shard may be away before the writer gives up, seconds.
        fills: Tables that lack rows until the writer says that it has brought them in.
    """

    host: str
    port: int
    ssl_context: ssl.SSLContext | None = None
    token: Token | None = None
    timeout_s: float = 60.0
    others: tuple[Address, ...] = ()
    fills: frozenset[str] = frozenset()

    @property
    def connect_timeout_s(self) -> float:
        """Time for one attempt to connect, and for the answer to a hello, seconds. Short, so that attempts repeat."""
        return min(self.timeout_s, _CONNECT_TIMEOUT_S)

    def hello(
        self,
        run: str,
        epoch: int,
        specs: list[TableSpec],
        *,
        complete: Iterable[str] = (),
        claims_tables: bool = False,
        claims_epoch: bool = False,
        ends_run: bool = False,
    ) -> Any:
        """Return the `idl.HelloRequest` of the writer; one with epoch 0 only asks.

        Tables of `fills` that the server does not have are not complete there before a hello says so.
        """
        return idl.HelloRequest(
            fills=[spec.fqn for spec in specs if spec.fqn in self.fills] or None,
            complete=list(complete) or None,
            claims_tables=claims_tables or None,
            claims_epoch=claims_epoch or None,
            ends_run=ends_run or None,
            protocol_version=PROTOCOL_VERSION,
            role=idl.Role.WRITER,
            run=run,
            client=CLIENT,
            epoch=epoch,
            rank=0,
            world_size=0,  # not a trainer: no watermark waits for it
            tables=[spec_to_idl(spec) for spec in specs],
        )

    async def ask(self) -> tuple[Any, ShardPlaces]:
        """Return the server's `idl.HelloReply`, which proves that it is up and accepts this token, and its shards.

        If not, raises `UnavailableError` or `UnauthorizedError`. Cancellation: harmless.
        """
        *unsure, last = self._seeds
        for address in unsure:
            with contextlib.suppress(UnavailableError):
                return await self._ask_with_places(*address)
        return await self._ask_with_places(*last)

    def resolver(self, places: ShardPlaces) -> Resolver:
        """Return what finds the shards again that are not at their places any more."""
        return Resolver(places, self._seeds, self._ask)

    async def connect(self, resolver: Resolver, shard: int) -> ParamServerClient:
        """Return a connection to a shard; another hello follows. A failure looks for the shard before it is raised.

        Raises:
            UnavailableError: The shard is not where it was, or an old copy of it is.
            HeadraceError: It refuses us.

        Cancellation: nothing stays open.
        """
        places = resolver.places
        host, port = places[shard].address
        try:
            client = await ParamServerClient.connect(
                host, port, timeout_s=self.connect_timeout_s, ssl_context=self.ssl_context, token=self.token
            )
            client.places = places
            try:
                # Without a session: what is there now may be another server.
                reply = await client.hello(self.hello("", 0, []), timeout_s=self.connect_timeout_s)
                if (reply.server_id, reply.shard) != (places.server_id, shard):
                    raise UnavailableError(
                        f"{client.address} is now shard {reply.shard} of server {reply.server_id}, not shard {shard} "
                        f"of {places.server_id}"
                    )
            except BaseException:
                await client.close()
                raise
        except UnavailableError:
            resolver.lost(shard, (host, port))
            await resolver.refresh()
            raise
        return client

    @property
    def _seeds(self) -> list[Address]:
        return [(self.host, self.port), *self.others]

    async def _ask_with_places(self, host: str, port: int) -> tuple[Any, ShardPlaces]:
        reply = await self._ask(host, port)
        return reply, ShardPlaces.of_hello(reply, host, port)

    async def _ask(self, host: str, port: int) -> Any:
        async with await ParamServerClient.connect(
            host, port, timeout_s=self.connect_timeout_s, ssl_context=self.ssl_context, token=self.token
        ) as client:
            return await client.hello(self.hello("", 0, []), timeout_s=self.connect_timeout_s)


class ServerWriter:
    """Sends batches to the shards of a server, each row to its owner. Thread: the event loop's.

    The same batches in the same order resume where an earlier writer of the same run was interrupted.
    """

    def __init__(
        self,
        target: TargetServer,
        resolver: Resolver,
        run: str,
        specs: list[TableSpec],
        *,
        max_bytes: int,
        epoch: int,
    ) -> None:
        """Prepare to write rows of the run's tables in an epoch, in messages whose columns have `max_bytes` at most."""
        self._max_bytes = max_bytes
        self._seeds = {spec.fqn: spec.seed for spec in specs}
        self._epoch = epoch
        self._writers = [
            ShardWriter(target, resolver, shard, run, specs, epoch=epoch) for shard in range(len(resolver.places))
        ]

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[Self]:
        """Send while the block lasts, and wait at its end until everything is durable.

        Raises:
            UnavailableError: A shard was away for too long.
            HeadraceError: The server refuses.

        Cancellation: another writer of the same batches resumes.
        """
        async with task_group() as group:
            first, *others = self._writers  # shard 0 decides who has a table: one that it refuses reaches no other
            sending = [group.create_task(first.run())]
            await first.wait_open()
            sending += [group.create_task(writer.run()) for writer in others]
            for writer in others:
                await writer.wait_open()
            yield self
            await self.wait_acked()
            for task in sending:
                task.cancel()

    async def wait_acked(self) -> None:
        """Wait until all batches are durable. Raises as `sending`."""
        for writer in self._writers:
            await writer.wait_acked()

    async def put(self, deltas: list[Any], *, step: int, time_us: int) -> tuple[int, int]:
        """Send `idl.TableDelta`s of one step; return the numbers of rows sent, and of those there from before.

        REQUIRES: `sending`. Waits while a shard's window is full. Raises as `sending`.
        """
        num_sent = num_skipped = 0
        version = {"epoch": self._epoch, "step": step, "time_us": time_us}
        for shard, message in await asyncio.to_thread(self._messages_of, deltas, version):
            is_sent = await self._writers[shard].put(message)
            num_rows = sum(map(_num_rows, message.deltas))
            num_sent += num_rows * is_sent
            num_skipped += num_rows * (not is_sent)
        return num_sent, num_skipped

    def _messages_of(self, deltas: list[Any], version: dict[str, int]) -> list[tuple[int, Any]]:
        """Return (shard, message without a number) of each message that a batch makes. Deterministic."""
        by_shard: list[list[Any]] = [[] for _ in self._writers]
        for delta in deltas:
            for shard, part in enumerate(_route_delta(delta, self._seeds[delta.fqn], len(self._writers))):
                if part is not None:
                    by_shard[shard].append(part)
        return [
            (shard, _message(packed, version))
            for shard, parts in enumerate(by_shard)
            for packed in _pack_deltas(parts, self._max_bytes)
        ]


class ShardWriter:
    """Sends numbered batches to one shard, over as many connections as it takes. Thread: the event loop's.

    The same batches in the same order resume where an earlier writer of the same run was interrupted.
    """

    def __init__(
        self,
        target: TargetServer,
        resolver: Resolver,
        shard: int,
        run: str,
        specs: list[TableSpec],
        *,
        epoch: int,
    ) -> None:
        """Prepare to write to a shard, wherever it is. The run's name identifies the sequence of batches."""
        self._target, self._resolver, self._shard, self._specs = target, resolver, shard, specs
        self._run, self._epoch = run, epoch
        self._unacked: deque[Any] = deque()
        self._unacked_bytes = self._num_taken = 0  # taken: those of the unacked ones sent on this connection
        self._next_seq = 1
        self._durable_seq: int | None = None
        self._changed = asyncio.Event()
        self._failed_since_s: float | None = None
        self._backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)

    async def wait_open(self) -> None:
        """Wait until the shard has told where to resume."""
        await self._wait(lambda: self._durable_seq is not None)

    async def wait_acked(self) -> None:
        """Wait until all batches are durable."""
        await self._wait(lambda: not self._unacked)

    async def put(self, request: Any) -> bool:
        """Number a batch and send it; return False if the shard has it already. Waits while the window is full."""
        request.run, request.client, request.client_seq = self._run, CLIENT, self._next_seq
        self._next_seq += 1
        assert self._durable_seq is not None
        if request.client_seq <= self._durable_seq:
            return False
        size_bytes = sum(map(_size_of_delta, request.deltas))
        max_bytes = _WINDOW_BYTES - size_bytes
        await self._wait(
            lambda: not self._unacked or (len(self._unacked) < _WINDOW_MESSAGES and self._unacked_bytes <= max_bytes)
        )
        self._unacked.append(request)
        self._unacked_bytes += size_bytes
        self._notify()
        return True

    async def run(self) -> NoReturn:
        """Send forever; raise the error that no other connection would mend."""
        while True:
            try:
                await self._run_connection()
            except HeadraceError as exc:
                is_passing = isinstance(exc, SequenceGapError | ProtocolError)
                if not (exc.retriable or is_passing or type(exc) is HeadraceError):
                    raise
                now_s = time.monotonic()
                self._failed_since_s = self._failed_since_s or now_s
                if now_s - self._failed_since_s > self._target.timeout_s:
                    address = format_address(*self._resolver.places[self._shard].address)
                    raise UnavailableError(
                        f"{address} has accepted nothing for {format_seconds(self._target.timeout_s)} ({exc}); start "
                        "the same command again to resume it"
                    ) from exc
                pause_s = self._backoff.next_s(at_least_s=exc.retry_after_s if isinstance(exc, OverloadedError) else 0)
            await asyncio.sleep(pause_s)

    async def _run_connection(self) -> NoReturn:
        target = self._target
        async with await target.connect(self._resolver, self._shard) as client:
            hello = target.hello(self._run, self._epoch, self._specs, claims_tables=True)
            reply = await client.hello(hello)
            self._take_acks(reply.last_client_seq)
            self._num_taken = 0
            async with task_group(_decisive) as group:
                while True:
                    await self._wait(lambda: self._num_taken < len(self._unacked))
                    group.create_task(self._send(client, self._unacked[self._num_taken]))
                    self._num_taken += 1

    async def _send(self, client: ParamServerClient, request: Any) -> None:
        await client.set_embeddings(request)
        self._failed_since_s = None
        self._backoff.reset()
        # A client's acks arrive in order: all batches before this one are durable too.
        self._take_acks(request.client_seq)

    def _take_acks(self, durable_seq: int) -> None:
        while self._unacked and self._unacked[0].client_seq <= durable_seq:
            self._unacked_bytes -= sum(map(_size_of_delta, self._unacked.popleft().deltas))
            self._num_taken -= 1
        self._durable_seq = max(self._durable_seq or 0, durable_seq)
        self._notify()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            changed = self._changed
            await changed.wait()

    def _notify(self) -> None:
        # Waiters hold the old event, so none misses it and none is woken twice.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _message(deltas: list[Any], version: dict[str, int]) -> Any:
    return idl.SetEmbeddingsRequest(ends_step=False, is_exact_cut=False, deltas=deltas, **version)


def _route_delta(delta: Any, seed: int, num_shards: int) -> list[Any | None]:
    """Return the part of an `idl.TableDelta` for each shard, None if it has no rows there."""
    row_shards = shards_of_rows(seed, np.frombuffer(delta.row_ids, "<i8"), num_shards)
    parts: list[Any | None] = []
    for shard in range(num_shards):
        rows = np.flatnonzero(row_shards == shard)
        if not rows.size:
            parts.append(None)
        else:
            parts.append(delta if rows.size == row_shards.size else _select_rows(delta, rows))
    return parts


def _select_rows(delta: Any, rows: npt.NDArray[np.intp]) -> Any:
    """Return a copy of some rows of an `idl.TableDelta`, whose columns are bytes, or views of them.

    Args:
        delta: Not empty.
        rows: int[k], places among its `row_ids`.
    """
    num_rows = _num_rows(delta)

    def select(data: Any) -> Any:
        return None if data is None else np.frombuffer(data, np.uint8).reshape(num_rows, -1)[rows].tobytes()

    return idl.TableDelta(
        fqn=delta.fqn,
        fingerprint=delta.fingerprint,
        column_offset=delta.column_offset,
        width=delta.width,
        row_ids=select(delta.row_ids),
        weights=select(delta.weights),
        states=[
            idl.StateColumn(name=state.name, dtype=state.dtype, width=state.width, data=select(state.data))
            for state in delta.states
        ],
        identities=select(delta.identities),
        scalars=delta.scalars,
    )


def _pack_deltas(parts: list[Any], max_bytes: int) -> Iterator[list[Any]]:
    """Yield the `idl.TableDelta`s of each message; split those over `max_bytes`; raise `ConfigError` if a row is."""
    packed: list[Any] = []
    packed_bytes = 0
    for part in parts:
        for piece, size_bytes in _pieces(part, max_bytes):
            if packed and packed_bytes + size_bytes > max_bytes:
                yield packed
                packed, packed_bytes = [], 0
            packed.append(piece)
            packed_bytes += size_bytes
    if packed:
        yield packed


def _pieces(delta: Any, max_bytes: int) -> Iterator[tuple[Any, int]]:
    size_bytes = _size_of_delta(delta)
    if size_bytes <= max_bytes:
        yield delta, size_bytes
        return
    num_rows = _num_rows(delta)
    rows_per_piece = max_bytes * num_rows // size_bytes
    if not rows_per_piece:
        raise ConfigError(f"a row of table {delta.fqn!r} does not fit the server's frames: raise its --max-frame-bytes")
    for start in range(0, num_rows, rows_per_piece):
        piece = _select_rows(delta, np.arange(start, min(start + rows_per_piece, num_rows)))
        # Scalars are in each piece, so that it may still be too long.
        yield from _pieces(piece, max_bytes) if _num_rows(piece) > 1 else [(piece, _size_of_delta(piece))]


def _size_of_delta(delta: Any) -> int:
    """Return the bytes of a delta's columns."""
    columns = [delta.row_ids, delta.weights, delta.identities]
    columns += [state.data for state in delta.states] + [scalar.data for scalar in delta.scalars or ()]
    return sum(len(column) for column in columns if column is not None)


def _num_rows(delta: Any) -> int:
    return len(delta.row_ids) // 8


def _decisive(errors: Sequence[BaseException]) -> BaseException:
    """Return the error that decides how to continue: the first refusal makes gaps of all later batches."""
    other_than_gaps = [exc for exc in errors if not isinstance(exc, SequenceGapError)]
    final = [exc for exc in other_than_gaps if not (isinstance(exc, HeadraceError) and exc.retriable)]
    return (final or other_than_gaps or errors)[0]
