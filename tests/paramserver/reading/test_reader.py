from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_service import WAIT_S, FakeService
from held_ports import hold_ports
from loop_clock import ClockAhead

from headrace.paramserver.reading.reader import EmbeddingReader, read_deadline, scalars_by_table
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.rpc.security import AccessPolicy, Token
from headrace.paramserver.rpc.server import Call, ThriftServer
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    OverloadedError,
    ProtocolError,
    RequestError,
    RowRangeError,
    UnauthorizedError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

KIB = 2**10
LIMITS = ServerLimits(max_frame_bytes=64 * KIB, max_client_bytes=256 * KIB, retry_after_s=0.01)
SPEC = TableSpec(
    fqn="user.weight",
    num_rows=100_000,
    dim=8,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT64, width=2),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT16),
    ),
    has_identities=True,
)
PLAIN = TableSpec(fqn="item.weight", num_rows=0, dim=3, dtype=DType.BFLOAT16)


class FakeShard(FakeService):
    """A shard that derives a row's values from its id and accepts only ids routed to it."""

    def __init__(self, shard: int, shards: list[tuple[str, int]]) -> None:
        super().__init__()
        self.shard = shard
        self.shards = shards
        self.tables = [SPEC, PLAIN]
        self.server_id = "server"
        self.failures: list[HeadraceError] = []
        self.num_reads = 0
        self.widens = 0
        self.seqs: list[int] = []

    async def hello(self, call: Call, request: Any) -> Any:
        assert request.role == idl.Role.READER
        reply = await super().hello(call, request)
        reply.server_id, reply.shard = self.server_id, self.shard
        reply.shards = [idl.ShardAddress(shard=n, host=h, port=p) for n, (h, p) in enumerate(self.shards)]
        reply.tables = [spec_to_idl(spec) for spec in self.tables]
        return reply

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        reply = await self._get(request)
        if request.more is not None:
            flags = {"with_states": request.with_states, "with_versions": request.with_versions}
            asked = [idl.GetEmbeddingsRequest(fqn=of.fqn, row_ids=of.row_ids, **flags) for of in request.more]
            reply.more = [_found(await self._get(one)) for one in asked]
            self.num_reads -= len(asked)
        return reply

    async def _get(self, request: Any) -> Any:
        self.num_reads += 1
        if request.fqn in self.gates:
            await self._wait(self.gates[request.fqn])
        if self.failures:
            raise self.failures.pop()
        spec = next(spec for spec in self.tables if spec.fqn == request.fqn)
        ids = np.frombuffer(request.row_ids, np.int64)
        assert (shards_of_rows(table_seed(spec.fqn), ids, len(self.shards)) == self.shard).all()
        reply = idl.GetEmbeddingsReply(presence=presence_of(ids), weights=weights_of(spec, ids), states=[], seq=0)
        reply.seq = self.seqs.pop(0) if self.seqs else 0
        if request.with_states:
            reply.states = [
                idl.StateColumn(name=s.name, dtype=int(s.dtype), width=s.width, data=state_of(spec, s, ids))
                for s in reversed(spec.states)
            ]
        if request.with_versions:
            reply.epochs, reply.steps, reply.times_us = ids + 1, ids + 2, ids + 3
        if spec.has_identities:
            reply.identities = ids + 4
        reply.presence = np.append(reply.presence, np.zeros(self.widens, np.uint8))
        return reply


def _found(reply: Any) -> Any:
    names = [name for _, name, *_ in idl.RowsFound.thrift_spec.values()]
    return idl.RowsFound(**{name: getattr(reply, name) for name in names})


def presence_of(ids: Any) -> Any:
    return (ids % 3).astype(np.uint8)


def weights_of(spec: TableSpec, ids: Any) -> Any:
    return (ids[:, None] * 7 + np.arange(spec.dim)).astype(spec.dtype.numpy)


def state_of(spec: TableSpec, state: StateSpec, ids: Any) -> Any:
    return (ids[:, None] % 100 + np.arange(state.width_in(spec.whole))).astype(state.dtype.numpy)


class Shards:
    """A server of fake shards that can be stopped and restarted."""

    def __init__(self, number: int, access: AccessPolicy | None) -> None:
        self.addresses = [("127.0.0.1", hold_ports()) for _ in range(number)]
        self.shards = [FakeShard(n, self.addresses) for n in range(number)]
        self.access = access
        self.servers: list[ThriftServer] = []

    async def start(self) -> None:
        for address, shard in zip(self.addresses, self.shards, strict=True):
            shard.limits = LIMITS
            self.servers.append(ThriftServer(shard, limits=LIMITS, access=self.access))
            await self.servers[-1].start(socket.create_server(address))

    async def stop(self, number: int) -> None:
        for gate in self.shards[number].gates.values():
            gate.set()
        await self.servers[number].close(drain_s=WAIT_S)

    async def restart(self, number: int) -> None:
        self.servers[number] = ThriftServer(self.shards[number], limits=LIMITS)
        await self.servers[number].start(socket.create_server(self.addresses[number]))

    def address(self, number: int = 0) -> str:
        return f"127.0.0.1:{self.addresses[number][1]}"


@asynccontextmanager
async def running(number: int = 3, access: AccessPolicy | None = None) -> AsyncIterator[Shards]:
    shards = Shards(number, access)
    await shards.start()
    async with AsyncExitStack() as stack:
        for shard in range(number):
            stack.push_async_callback(shards.stop, shard)
        yield shards


def some_ids(number: int) -> Any:
    """Return unordered ids, some of them repeated."""
    return np.random.default_rng(0).integers(0, 100_000, number)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 5000])
async def test_rows_come_in_the_order_of_the_request(number: int, num_rows: int) -> None:
    """Each value is at its id's position, whatever the shard and however the read is split."""
    async with running(number) as shards, await EmbeddingReader.connect(shards.address()) as reader:
        ids = some_ids(num_rows)
        rows = await reader.get(SPEC.fqn, ids, with_states=True, with_versions=True)
        assert np.array_equal(rows.row_ids, ids)
        assert np.array_equal(rows.presence, presence_of(ids))
        assert np.array_equal(rows.weights, weights_of(SPEC, ids))
        assert rows.weights.dtype == np.float32
        assert list(rows.states) == ["momentum1", "exp_avg"]
        for state in SPEC.states:
            assert np.array_equal(rows.states[state.name], state_of(SPEC, state, ids))
        versions = (rows.epochs, rows.steps, rows.times_us, rows.identities)
        for column, plus in zip(versions, (1, 2, 3, 4), strict=True):
            assert column is not None
            assert np.array_equal(column, ids + plus)
        if num_rows > 1000:
            assert all(shard.num_reads > 1 for shard in shards.shards)


async def test_rows_that_lack_what_was_told_are_read_again() -> None:
    """A shard may be found at a copy of it that is behind what its owner has told."""
    async with running(1) as shards, await EmbeddingReader.connect(shards.address()) as reader:
        (link,), (shard,) = reader.links, shards.shards
        link.least_seq, shard.seqs = 5, [3, 4, 6]
        await reader.get(SPEC.fqn, [1])
        assert (shard.num_reads, link.newest_seq) == (3, 6)


async def test_many_tables_are_read_with_few_requests() -> None:
    """Small tables share requests."""
    specs = [dataclasses.replace(SPEC, fqn=f"table{n}.weight") for n in range(70)]
    async with running(2) as shards:
        for shard in shards.shards:
            shard.tables = specs
        async with await EmbeddingReader.connect(shards.address()) as reader:
            wanted = [(spec.fqn, np.arange(n, n + 9)) for n, spec in enumerate(specs)]
            found = await reader.get_many([*wanted, wanted[0]], with_versions=True)
            for (_, ids), rows in zip([*wanted, wanted[0]], found, strict=True):
                assert np.array_equal(rows.row_ids, ids) and np.array_equal(rows.weights, weights_of(SPEC, ids))
                assert np.array_equal(rows.steps, ids + 2) and np.array_equal(rows.identities, ids + 4)
            assert all(shard.num_reads <= 10 for shard in shards.shards)
            with pytest.raises(UnknownTableError):
                await reader.get_many([wanted[0], ("table.weight", [1])])
            assert await reader.get_many([]) == []


async def test_columns_that_were_not_requested_are_none() -> None:
    """States and versions come only on request, and identities only if the table has them."""
    async with running() as shards, await EmbeddingReader.connect(shards.address(2)) as reader:
        rows = await reader.get(PLAIN.fqn, [2**62, 5])
        assert (rows.states, rows.epochs, rows.steps, rows.times_us, rows.identities) == ({}, None, None, None, None)
        assert rows.weights.shape == (2, 3)
        assert rows.weights.dtype == np.uint16


async def test_bad_arguments_are_refused_without_a_request() -> None:
    """Errors name the nearest table, or the limit of an id."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        with pytest.raises(UnknownTableError, match=r"'user\.wieght'.*'user\.weight'"):
            await reader.get("user.wieght", [1])
        for wrong in ([True, False], [1.5]):
            with pytest.raises(RequestError, match="not integers"):
                await reader.get(PLAIN.fqn, wrong)
        with pytest.raises(RowRangeError, match="100000"):
            await reader.get(SPEC.fqn, [100_000])
        assert not any(shard.num_reads for shard in shards.shards)


async def test_a_table_registered_after_connect_is_found() -> None:
    """The reader asks every shard again about an unknown table."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        late = dataclasses.replace(PLAIN, fqn="late.weight")
        shards.shards[1].tables.append(late)
        with pytest.raises(UnknownTableError):
            await reader.get("later.weight", [1])
        for shard in shards.shards:
            shard.tables = [SPEC, PLAIN, late]
        assert (await reader.get("late.weight", np.arange(20))).weights.shape == (20, 3)


async def test_retriable_errors_are_retried() -> None:
    """An overloaded shard is asked again; a permanent error is raised."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        shards.shards[0].failures = [OverloadedError("full", retry_after_s=0.01), UnavailableError("stopping")]
        ids = some_ids(100)
        assert np.array_equal((await reader.get(SPEC.fqn, ids)).weights, weights_of(SPEC, ids))
        shards.shards[0].failures = [UnknownTableError("gone")]
        with pytest.raises(UnknownTableError, match="gone"):
            await reader.get(SPEC.fqn, ids)


async def test_a_restarted_shard_is_reconnected() -> None:
    """The next call, or one that waits, replaces a lost connection."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        ids = some_ids(100)
        await reader.get(SPEC.fqn, ids)
        await shards.stop(1)
        with pytest.raises(UnavailableError):
            await reader.get(SPEC.fqn, ids, timeout_s=0.1)
        call = asyncio.create_task(reader.get(SPEC.fqn, ids))
        await asyncio.sleep(0)  # lets it start
        await shards.restart(1)
        assert np.array_equal((await call).weights, weights_of(SPEC, ids))


class Failures(OutageLog):
    """Signals when an attempt to connect has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = asyncio.Event()

    def failed(self, address: str, error: HeadraceError, *, began_s: float) -> None:
        super().failed(address, error, began_s=began_s)
        self.has_failed.set()


async def test_a_shard_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read past its deadline names the address that it could not reach."""
    clock, failures = ClockAhead(monkeypatch), Failures()
    async with running() as shards, await EmbeddingReader.connect(shards.address(), reach_log=failures) as reader:
        await shards.stop(1)
        ids = some_ids(100)
        ids = ids[shards_of_rows(table_seed(SPEC.fqn), ids, 3) == 1]
        calls: list[tuple[Callable[[], Coroutine[Any, Any, Any]], str]] = [
            (lambda: reader.get(SPEC.fqn, ids), rf"within 10 s.*{shards.address(1)}"),
            (reader.status, "no status"),
            (lambda: EmbeddingReader.connect(shards.address(), reach_log=failures), shards.address(1)),
        ]
        for call, says in calls:
            failures.has_failed.clear()
            calling = asyncio.create_task(call())
            await asyncio.wait_for(failures.has_failed.wait(), WAIT_S)
            await clock.pass_by(11)
            with pytest.raises(UnavailableError, match=says):
                await calling


async def test_another_server_at_a_known_address_is_refused() -> None:
    """A shard that returns as part of another server is not read."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        await shards.stop(1)
        shards.shards[1].server_id = "another"
        await shards.restart(1)
        with pytest.raises(ConfigError, match="another"):
            await reader.get(SPEC.fqn, some_ids(100))


async def test_status_of_every_shard() -> None:
    """Status replies come in the order of the shards."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        for n, shard in enumerate(shards.shards):
            shard.begun = [0] * n
        assert [status.log_seq for status in await reader.status()] == [0, 1, 2]


async def test_the_token_is_sent() -> None:
    """A server that requires a token gets it; without one it refuses the reader at once."""
    token = Token("correct-horse-battery")
    async with running(access=AccessPolicy(token)) as shards:
        async with await EmbeddingReader.connect(shards.address(), token=token) as reader:
            await reader.get(SPEC.fqn, [1])
        with pytest.raises(UnauthorizedError, match="token"):
            await EmbeddingReader.connect(shards.address())


async def test_a_closed_reader_fails_at_once() -> None:
    """After `close`, which is idempotent, calls fail without waiting."""
    async with running() as shards:
        reader = await EmbeddingReader.connect(shards.address())
        await reader.close()
        await reader.close()
        with pytest.raises(UnavailableError, match="the reader is closed"):
            await reader.get(SPEC.fqn, [1])


async def test_cancelled_read_leaves_the_reader_usable() -> None:
    """Cancelling a read loses no connection."""
    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        shard = shards.shards[1]
        shard.gates[SPEC.fqn] = gate = asyncio.Event()
        call = asyncio.create_task(reader.get(SPEC.fqn, some_ids(100)))
        await shard.wait_running(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.set()
        ids = some_ids(200)
        assert np.array_equal((await reader.get(SPEC.fqn, ids)).weights, weights_of(SPEC, ids))
        assert all(server.num_connections == 1 for server in shards.servers)


async def test_a_slow_read_continues_while_replies_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may take longer than the reader's timeout, but not longer than the caller's total."""
    async with running(1) as shards, await EmbeddingReader.connect(shards.address()) as reader:
        loop = asyncio.get_running_loop()
        time, ahead_s, answer = loop.time, 0.0, shards.shards[0].get_embeddings
        monkeypatch.setattr(loop, "time", lambda: time() + ahead_s)

        async def slow(call: Call, request: Any) -> Any:
            nonlocal ahead_s
            ahead_s += 1.0
            return await answer(call, request)

        monkeypatch.setattr(shards.shards[0], "get_embeddings", slow)
        await shards.stop(0)
        await shards.restart(0)
        ids = some_ids(16_000)
        assert np.array_equal((await reader.get(SPEC.fqn, ids)).weights, weights_of(SPEC, ids))
        assert ahead_s > 10
        with pytest.raises(UnavailableError, match=r"no answer about .* within 10 s"):
            await reader.get(SPEC.fqn, ids, timeout_s=10.0)


@pytest.fixture(autouse=True)
def _no_leaked_sockets() -> Iterator[None]:
    """Collect garbage in the test that leaks a socket: the warning is an error."""
    yield
    import gc

    gc.collect()


async def test_the_newest_scalar_of_all_shards_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard has the scalars of its last batch; the newest ones are the table's."""

    def status(*stored: tuple[TableSpec, str, float, int, int]) -> Any:
        tables = [
            SimpleNamespace(
                spec=spec_to_idl(spec),
                scalars=[
                    SimpleNamespace(
                        scalar=idl.TableScalar(name=name, dtype=1, data=np.float32(value).tobytes()),
                        epoch=epoch,
                        step=step,
                    )
                ],
            )
            for spec, name, value, epoch, step in stored
        ]
        return SimpleNamespace(tables=[*tables, SimpleNamespace(spec=spec_to_idl(SPEC), scalars=None)])

    answers = [
        status((SPEC, "step", 1.0, 2, 7), (SPEC, "lr", 0.5, 1, 1)),
        status((SPEC, "step", 2.0, 2, 8), (PLAIN, "step", 9.0, 9, 9)),
        status((SPEC, "step", 3.0, 1, 99)),
    ]

    async def newest(*, timeout_s: float | None = None) -> Any:
        return answers

    async with running() as shards, await EmbeddingReader.connect(shards.address()) as reader:
        monkeypatch.setattr(reader, "status", newest)
        for _ in range(2):
            assert await reader.scalars(SPEC.fqn) == {"step": np.float32(2.0), "lr": np.float32(0.5)}
            assert await reader.scalars(PLAIN.fqn) == {"step": np.float32(9.0)}
            answers.reverse()  # the order of the shards does not matter
        assert await reader.scalars("nowhere") == {}


async def test_shards_that_contradict_each_other_are_refused() -> None:
    """An incomplete shard map, or a table with two shapes, is refused before any read."""
    async with running(2) as shards:
        addresses = shards.shards[1].shards
        shards.shards[1].shards = addresses[:1]
        with pytest.raises(ProtocolError, match=r"incomplete shard map: this is shard 1, and it lists \[0\]"):
            await EmbeddingReader.connect(shards.address(1))
        shards.shards[1].shards = addresses
        shards.shards[1].tables = [dataclasses.replace(SPEC, dim=SPEC.dim + 1), PLAIN]
        with pytest.raises(ProtocolError, match=r"table 'user\.weight' differs between shards: dim 8 ≠ 9"):
            await EmbeddingReader.connect(shards.address())
        assert [shard.num_reads for shard in shards.shards] == [0, 0]


FLAGS = {"with_presence": False, "only_weights": None}


@pytest.mark.parametrize("next_row", [100, 99, 0])
async def test_digests_that_make_no_progress_are_an_error(next_row: int) -> None:
    """A shard that would repeat the same rows forever is refused."""
    asked: list[int] = []
    num_rows: list[int] = []

    async def answer(request: Any) -> Any:
        asked.append(request.first_row)
        return idl.DigestRowsReply(seq=1, next_row=next_row, counts=np.array([3, 4]).tobytes())

    link = SimpleNamespace(
        digest_rows=answer, hello=SimpleNamespace(shard=0), address="somewhere:1", max_reply_bytes=64 * KIB
    )
    digest = SimpleNamespace(spec=SPEC, columns=SPEC.whole, add=lambda reply, **rows: None, seqs={}, is_steady=True)
    async with running(1) as shards, await EmbeddingReader.connect(shards.address()) as reader:
        with pytest.raises(ProtocolError, match=f"goes on at row {next_row} after row 100"):
            await reader._digest(digest, link, (100, 200), FLAGS, num_rows.append)  # type: ignore[arg-type]
    assert asked == [100]


@pytest.mark.parametrize(("seqs", "is_steady"), [([5, 5], True), ([5, 6], False)])
async def test_digests_of_several_log_positions_are_not_steady(seqs: list[int], is_steady: bool) -> None:
    """Digests are steady only if all replies have the same seq; progress counts each reply's rows."""
    num_rows: list[int] = []
    answers = [
        idl.DigestRowsReply(seq=seq, next_row=row, counts=np.array([row]).tobytes())
        for seq, row in zip(seqs, (150, 200), strict=True)
    ]

    async def answer(request: Any) -> Any:
        return answers.pop(0)

    link = SimpleNamespace(digest_rows=answer, hello=SimpleNamespace(shard=3), max_reply_bytes=64 * KIB)
    digest = SimpleNamespace(spec=SPEC, columns=SPEC.whole, add=lambda reply, **rows: None, seqs={}, is_steady=True)
    async with running(1) as shards, await EmbeddingReader.connect(shards.address()) as reader:
        await reader._digest(digest, link, (100, 200), FLAGS, num_rows.append)  # type: ignore[arg-type]
    assert (digest.is_steady, digest.seqs, answers) == (is_steady, {3: seqs[1]}, [])
    assert num_rows == [150, 200]


async def test_a_reply_at_the_last_moment_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply may come while the deadline expires."""
    clock = ClockAhead(monkeypatch)

    async def read() -> None:
        async with read_deadline(None, 10.0, "nothing within {}".format) as answered:
            try:
                await asyncio.Event().wait()
            finally:
                answered()

    reading = asyncio.create_task(read())
    await clock.pass_by(0)
    await clock.pass_by(11)
    with pytest.raises(UnavailableError):
        await reading


@pytest.mark.parametrize(("dtype", "data"), [(99, b"1234"), (DType.FLOAT32, b""), (DType.FLOAT32, bytes(8))])
def test_a_scalar_that_is_none_is_refused(dtype: int, data: bytes) -> None:
    """What a server calls a scalar is one element of a data type, or the reply is wrong."""
    scalar = idl.StoredScalar(scalar=idl.TableScalar(name="step", dtype=dtype, data=data), epoch=1, step=1)
    status = idl.StatusReply(tables=[idl.TableStatus(spec=spec_to_idl(SPEC), scalars=[scalar])])
    with pytest.raises(ProtocolError):
        scalars_by_table([status])
