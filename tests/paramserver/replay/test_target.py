"""Replay: another server gets every row of a server's logs, in their order."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from chaos_proxy import FrameProxy, Route, Trouble
from fake_shard import FakeStore
from held_ports import hold_ports
from hellos import hello_of_nobody, hello_of_writer
from log_files import flip
from shard_servers import serve_shards

from headrace.paramserver.log.segment_reader import LogReader
from headrace.paramserver.log.segments import list_segments, segment_name
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replay import target as replay
from headrace.paramserver.replay.source import ReplayRange, ReplaySource
from headrace.paramserver.replay.target import Replay, ReplayTarget, ServerWriter, ShardWriter
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    OwnedError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.log_records import SEAL_BYTES
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

IDS = TableSpec(
    fqn="ids.weight",
    num_rows=0,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
    has_identities=True,
)
SPLIT = TableSpec(
    fqn="split.weight",
    num_rows=200,
    dim=6,
    dtype=DType.BFLOAT16,
    states=(StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),),
    has_identities=False,
)
SPECS = (IDS, SPLIT)
ROWS = np.arange(0, 200, 3, dtype=np.int64)
NUM_STEPS = 20
TIME_US = 1_700_000_000_000_000


def _delta(spec: TableSpec, rows: Any, deleted: Any, rng: np.random.Generator, first: int, width: int) -> Any:
    def column(dtype: DType, columns: int) -> bytes:
        return rng.integers(0, 255, (rows.size, columns * dtype.size_bytes)).astype(np.uint8).tobytes()

    def state(each: StateSpec, columns: int) -> Any:
        return idl.StateColumn(name=each.name, dtype=each.dtype, width=columns, data=column(each.dtype, columns))

    return idl.TableDelta(
        fqn=spec.fqn,
        fingerprint=spec.fingerprint,
        column_offset=first,
        width=width,
        row_ids=rows.tobytes(),
        weights=column(spec.dtype, width),
        states=[state(each, each.width or width) for each in spec.states],
        identities=rng.integers(0, 2**60, rows.size).tobytes() if spec.has_identities else None,
        deleted_row_ids=deleted.tobytes(),
    )


class _Client:
    """A writer to every shard of a server."""

    def __init__(self, ports: list[int], *, epoch: int, seed: int) -> None:
        self._ports, self._epoch, self._seq = ports, epoch, 0
        self._rng = np.random.default_rng(seed)

    async def write(self, steps: range, *, num_rows: int = 12, specs: Sequence[TableSpec] = SPECS) -> None:
        """Set and delete some rows at each step."""
        clients = [await ParamServerClient.connect("127.0.0.1", port) for port in self._ports]
        for client in clients:
            await client.hello(hello_of_writer(*specs, epoch=self._epoch))
        for step in steps:
            self._seq += 1
            some = self._rng.choice(ROWS, (2, num_rows), replace=num_rows * 2 > ROWS.size)
            deltas = [
                (spec, np.unique(rows)[:-2], np.unique(rows)[-2:]) for spec, rows in zip(SPECS, some, strict=True)
            ]
            for shard, client in enumerate(clients):
                await client.set_embeddings(self._request(step, deltas, shard))
        for client in clients:
            await client.close()

    def _request(self, step: int, deltas: Any, shard: int) -> Any:
        mine = []
        for spec, *both in deltas:
            rows, deleted = (ids[shards_of_rows(table_seed(spec.fqn), ids, len(self._ports)) == shard] for ids in both)
            parts = ((0, 2), (2, 4)) if spec is SPLIT else ((0, spec.dim),)
            mine += [_delta(spec, rows, deleted, self._rng, *part) for part in parts]
        request = idl.SetEmbeddingsRequest(run="run", client="rank0", epoch=self._epoch, client_seq=self._seq)
        request.step, request.time_us, request.deltas = step, TIME_US + step * 1_000_000, mine
        request.ends_step = request.is_exact_cut = True
        return request


async def _content(port: int) -> dict[str, list[bytes]]:
    """Return everything that a server has of all rows."""
    content = {}
    async with await EmbeddingReader.connect(f"127.0.0.1:{port}") as reader:
        for spec in SPECS:
            rows = await reader.get(spec.fqn, ROWS, with_states=True, with_versions=True)
            columns = [rows.presence, rows.weights, *rows.states.values(), rows.epochs, rows.steps, rows.times_us]
            columns += [] if rows.identities is None else [rows.identities]
            content[spec.fqn] = [np.ascontiguousarray(column).tobytes() for column in columns]
    return content


async def _replay(source: Path, port: int, wanted: ReplayRange | None = None, **settings: Any) -> Replay:
    logs = ReplaySource(source, wanted or ReplayRange())
    logs.summarize()
    # No deadline: the outcome must not depend on the machine's pace.
    replay = Replay(logs, ReplayTarget(host="127.0.0.1", port=port, timeout_s=math.inf), **settings)
    await replay.run()
    return replay


@pytest.fixture
async def content(tmp_path: Path) -> dict[str, list[bytes]]:
    """Write to a server of two shards in two runs, stop it, and return the content it had."""
    async with serve_shards(tmp_path / "source", 2) as ports:
        await _Client(ports, epoch=1, seed=1).write(range(NUM_STEPS))
        await _Client(ports, epoch=4, seed=2).write(range(5))
        return await _content(ports[0])


@pytest.fixture
def source(tmp_path: Path, content: Any) -> Path:
    """Return the directory of that server."""
    del content
    return tmp_path / "source"


@pytest.mark.parametrize("num_shards", [1, 2, 3])
async def test_another_server_gets_every_row(source: Path, content: Any, tmp_path: Path, num_shards: int) -> None:
    """Values, states, identities, split columns, deletes and versions arrive, whatever the number of shards."""
    async with serve_shards(tmp_path / "target", num_shards) as ports:
        replay = await _replay(source, ports[-1])
        assert await _content(ports[0]) == content
    assert replay.num_sent > 0 and replay.num_skipped == 0


async def test_a_second_time_nothing_is_sent(source: Path, content: Any, tmp_path: Path) -> None:
    """A repeated replay finds everything delivered, and nothing changes."""
    async with serve_shards(tmp_path / "target", 3) as ports:
        first = await _replay(source, ports[0])
        second = await _replay(source, ports[0])
        assert await _content(ports[0]) == content
    assert (second.num_sent, second.num_skipped) == (0, first.num_sent)


async def test_another_range_is_another_replay(source: Path, tmp_path: Path) -> None:
    """A replay with other bounds sends all of its rows, whatever an earlier one has delivered."""
    path = source / "shard-0000"
    async with serve_shards(tmp_path / "target", 1) as (port,):
        bounds: list[dict[str, Any]] = [{}, {"from_step": 2}, {"from_step": 3}, {"to_step": 2}, {"to_step": 3}]
        bounds += [
            {"since_us": TIME_US + 2_000_000},
            {"until_us": TIME_US + 2_000_000},
            {"until_us": TIME_US + 3_000_000},
        ]
        bounds += [{"from_seq": 2}, {"from_seq": 5}]
        bounds += [{"tables": frozenset({fqn})} for fqn in ("ids.weight", "split.weight")]
        for wanted in (ReplayRange(**each) for each in bounds):
            other = await _replay(path, port, wanted)
            num_rows = ReplaySource(path, wanted).summarize().num_rows
            assert (other.num_sent, other.num_skipped) == (num_rows, 0) and num_rows > 0


async def test_a_rows_order_is_its_logs(tmp_path: Path) -> None:
    """Of rows that were written, expired and were written again in sessions of their own, the last record counts.

    So it is wherever the replay is interrupted.
    """
    policy = idl.ExpireRowsRequest(fqn="*", is_dry_run=False, wait_ms=60_000, policy="max_rows=24")
    async with serve_shards(tmp_path / "source", 2) as ports:
        for epoch in (2, 4):
            trainer = _Client(ports, epoch=epoch, seed=epoch)
            for steps in (range(3), range(3, 6)):
                await trainer.write(steps, num_rows=20)
                for port in ports:
                    async with await ParamServerClient.connect("127.0.0.1", port) as client:
                        await client.hello(hello_of_writer(role=idl.Role.ADMIN, epoch=0))
                        assert (await client.expire_rows(policy)).expired > 0
        content = await _content(ports[0])
    rows = (logs := ReplaySource(tmp_path / "source", ReplayRange())).summarize().num_rows
    async with serve_shards(tmp_path / "target", 3) as ports:
        for most in (2, 23):
            calls = itertools.count(1)

            def interrupt(_: int, calls: Iterator[int] = calls, most: int = most) -> None:
                if next(calls) == most:
                    raise asyncio.CancelledError

            with pytest.raises(asyncio.CancelledError):
                await Replay(logs, ReplayTarget(host="127.0.0.1", port=ports[0])).run(on_progress=interrupt)
        rest = await _replay(tmp_path / "source", ports[0], max_sessions=2)
        assert await _content(ports[0]) == content
    assert rest.num_skipped > 0 and rest.num_skipped + rest.num_sent == rows


async def test_an_interrupted_replay_goes_on(source: Path, content: Any, tmp_path: Path) -> None:
    """A replay that was interrupted resumes: it sends only what was not delivered, and all rows arrive."""
    logs = ReplaySource(source, ReplayRange())
    rows = logs.summarize().num_rows
    calls = itertools.count(1)

    def interrupt(_: int) -> None:
        if next(calls) == 12:
            raise asyncio.CancelledError

    async with serve_shards(tmp_path / "target", 3) as ports:
        replay = Replay(logs, ReplayTarget(host="127.0.0.1", port=ports[0]))
        with pytest.raises(asyncio.CancelledError):
            await replay.run(on_progress=interrupt)
        rest = await _replay(source, ports[0])
        assert await _content(ports[0]) == content
    assert rest.num_skipped > 0 and rest.num_sent > 0 and rest.num_skipped + rest.num_sent == rows


async def test_a_bad_network_changes_nothing(
    source: Path, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything arrives over connections that are reset and whose frames are duplicated and reordered."""
    monkeypatch.setattr(replay, "_LONGEST_PAUSE_S", replay._FIRST_PAUSE_S)  # many connections fail before one is good
    async with serve_shards(tmp_path / "target", 2, advertise_host="127.0.0.2") as ports:
        with FrameProxy([Route("127.0.0.2", "127.0.0.1", ports)], seed=5) as proxy:
            # The order of the frames is not the seed's alone, but among some hundred, one is reset and one reordered.
            proxy.make(Trouble(reset=0.15, duplicate=0.2, reorder=0.15))
            await _replay(source, ports[0])
            proxy.make(Trouble())
            assert await _content(ports[0]) == content
    assert proxy.counts["reset"] > 0 and proxy.counts["reorder"] > 0


async def test_long_batches_are_cut(tmp_path: Path) -> None:
    """A batch longer than the target's frames arrives in pieces."""
    spec = TableSpec(fqn="long", num_rows=500, dim=256, dtype=DType.FLOAT32, states=(), has_identities=False)
    rows, deleted = np.arange(300), np.arange(300, 500)
    rng = np.random.default_rng(0)
    async with (
        serve_shards(tmp_path / "source", 1) as ports,
        await ParamServerClient.connect("127.0.0.1", ports[0]) as client,
    ):
        await client.hello(hello_of_writer(spec))
        request = _Client(ports, epoch=1, seed=0)._request(1, [], 0)
        request.client_seq, request.deltas = 1, [_delta(spec, rows, deleted, rng, 0, 256)]
        await client.set_embeddings(request)
    async with serve_shards(tmp_path / "target", 2, max_frame_bytes=64 << 10) as ports:
        replay = await _replay(tmp_path / "source", ports[0])
        async with await EmbeddingReader.connect(f"127.0.0.1:{ports[0]}") as reader:
            found = await reader.get("long", np.arange(500))
    assert replay.num_sent == 500
    assert found.presence.tolist() == [1] * 300 + [0] * 200
    assert found.weights[:300].tobytes() == bytes(request.deltas[0].weights)


async def test_ranges_take_what_they_say(source: Path) -> None:
    """Seqs, steps, times and tables are bounds, both ends included."""
    shard = source / "shard-0001"

    def steps_of(where: Path, **bounds: Any) -> list[tuple[int, int]]:
        logs = ReplaySource(where, ReplayRange(**bounds))
        return [(batch.epoch, batch.step) for log in logs.logs for batch in logs.batches(log)]

    last_seq = LogReader(shard / "log").last_seq
    assert steps_of(shard, from_seq=3, to_seq=4) == [(1, 1), (1, 2)]
    assert steps_of(shard, from_seq=last_seq) == [(4, 4)]
    assert steps_of(source, from_step=3, to_step=4) == [(1, 3), (1, 4), (4, 3), (4, 4)] * 2
    assert steps_of(shard, since_us=TIME_US + 18_000_000) == [(1, 18), (1, 19)]
    assert steps_of(shard, until_us=TIME_US) == [(1, 0), (4, 0)]
    only = ReplaySource(source, ReplayRange(tables=frozenset({"split.weight"})))
    assert list(only.summarize().tables) == ["split.weight"]


async def test_tables_registered_before_the_range_are_known(source: Path, tmp_path: Path) -> None:
    """A range after the registration of its tables is replayed, even if only the store has their specs."""
    async with serve_shards(tmp_path / "target", 1) as ports:
        replay = await _replay(source / "shard-0000", ports[0], ReplayRange(from_seq=5))
        assert replay.num_sent > 0
    logs = ReplaySource(source / "shard-0000", ReplayRange(from_seq=5))
    logs.logs[0].read_before = lambda: iter(())  # type: ignore[method-assign]
    logs.summarize()
    assert logs.specs.keys() == {"ids.weight", "split.weight"}


@pytest.mark.parametrize("from_seq", [None, 3])
async def test_the_newest_trainer_says_how_its_model_uses_a_table(tmp_path: Path, from_seq: int | None) -> None:
    """Of trainers that differ only in the uses of a table, the target takes the newest one's, as the source has."""

    async def said_by(port: int) -> str:
        async with await ParamServerClient.connect("127.0.0.1", port) as client:
            reply = await client.hello(hello_of_nobody())
        return str(next(table.uses for table in reply.tables if table.fqn == SPLIT.fqn))

    async with serve_shards(tmp_path / "source", 1) as ports:
        for epoch, uses in ((2, "first"), (3, "second")):
            async with await ParamServerClient.connect("127.0.0.1", ports[0]) as client:
                await client.hello(hello_of_writer(SPLIT.described(uses), epoch=epoch))
        await _Client(ports, epoch=3, seed=1).write(range(1), specs=(IDS, SPLIT.described("second")))
        assert await said_by(ports[0]) == "second"
    async with serve_shards(tmp_path / "target", 1) as ports:
        await _replay(tmp_path / "source" / "shard-0000", ports[0], ReplayRange(from_seq=from_seq))
        assert await said_by(ports[0]) == "second"


async def test_mistakes_are_one_clear_line(source: Path) -> None:
    """A replay that is not possible raises an error of one line."""
    unknown = "--table 'ids.weigth': no such table in the log; the nearest are 'ids.weight'"
    cases: list[tuple[type[HeadraceError], str, dict[str, Any]]] = [
        (UnknownTableError, unknown, {"tables": frozenset({"ids.weigth"})}),
        (ConfigError, "nothing to replay", {"from_step": 1000}),
        (ConfigError, "--from-seq and --to-seq count in one shard's log", {"from_seq": 1}),
        (ConfigError, "--from-step is above --to-step", {"from_step": 2, "to_step": 1}),
    ]
    for error, words, bounds in cases:
        with pytest.raises(error, match=words) as raised:
            ReplaySource(source, ReplayRange(**bounds)).summarize()
        assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="holds no update log"):
        ReplaySource(source / "shard-0000" / "store", ReplayRange())


async def test_damage_is_found_before_anything_is_sent(source: Path) -> None:
    """A damaged record is named with its file and offset; a range without it can be replayed."""
    segment = list_segments(source / "shard-0000" / "log")[0]
    flip(segment, segment.stat().st_size // 2)
    with pytest.raises(CorruptionError, match=rf"{segment.name}: damaged at offset \d+"):
        ReplaySource(source, ReplayRange()).summarize()
    assert ReplaySource(source / "shard-0000", ReplayRange(to_seq=4)).summarize().num_records == 3


@pytest.mark.parametrize("at", ["record", "seal", "header"])
async def test_damage_behind_the_range_keeps_nothing_back(source: Path, at: str) -> None:
    """Damage after the requested range does not matter; damage within it is named."""
    log = source / "shard-0000" / "log"
    (segment,) = list_segments(log)
    data = bytearray(segment.read_bytes())
    if at == "record":  # without a seal, as after a kill
        del data[-SEAL_BYTES:]
        data[len(data) // 2] ^= 1
    elif at == "seal":
        data[-1] ^= 1
    else:
        last_seq = LogReader(log).last_seq
        (log / segment_name(last_seq + 1)).write_bytes(bytes(4096))
    segment.write_bytes(data)
    assert ReplaySource(log, ReplayRange(to_seq=4)).summarize().num_records == 3
    if at == "record":
        with pytest.raises(CorruptionError, match=rf"{segment.name}: damaged at offset \d+"):
            ReplaySource(log, ReplayRange(to_seq=20))
    if at != "seal":  # an open log has none
        with pytest.raises(CorruptionError, match=r": damaged at offset \d+"):
            ReplaySource(log, ReplayRange())


async def test_a_target_that_is_away_is_named(source: Path) -> None:
    """An error names the address of a target that is away."""
    port = hold_ports()
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"):
        await _replay(source, port)


def test_one_attempt_is_shorter_than_all() -> None:
    """One attempt takes at most ten seconds, or less if the whole timeout is shorter."""
    for timeout_s, attempt_s in ((600.0, 10.0), (0.5, 0.5)):
        assert ReplayTarget(host="h", port=1, timeout_s=timeout_s).connect_timeout_s == attempt_s


async def test_what_is_on_its_way_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and bytes that wait for a shard's ack are bounded; a larger batch goes alone."""
    monkeypatch.setattr(replay, "_WINDOW_MESSAGES", 3)
    monkeypatch.setattr(replay, "_WINDOW_BYTES", 1000)
    writer = ShardWriter(cast("Any", None), cast("Any", None), 0, "run", [], client="c", epoch=1, claims_tables=False)
    puts: list[asyncio.Task[bool]] = []

    async def num_sent(*sizes: int, acked: int) -> int:
        for size in sizes:
            delta = idl.TableDelta(row_ids=bytes(size), weights=b"", states=[])
            puts.append(asyncio.create_task(writer.put(idl.SetEmbeddingsRequest(deltas=[delta]))))
        for _ in range(5):
            await asyncio.sleep(0)
        writer._take_acks(acked)
        for _ in range(5):
            await asyncio.sleep(0)
        return sum(put.done() for put in puts)

    writer._take_acks(0)  # its hello
    assert await num_sent(10, 10, 10, 10, acked=0) == 3
    assert [await num_sent(acked=acked) for acked in (1, 4)] == [4, 4]
    assert await num_sent(600, 400, 1, acked=4) == 6
    assert await num_sent(acked=5) == 7
    assert await num_sent(5000, acked=6) == 7
    assert await num_sent(acked=7) == 8
    assert await num_sent(1, acked=7) == 8
    assert await num_sent(acked=8) == 9


async def test_who_is_refused_a_table_reaches_no_other_shard() -> None:
    """Shard 0 decides between two writers of a table: the others hear only of the one that it lets in."""
    async with FakeStore(num_shards=2) as store:
        target = ReplayTarget(host="127.0.0.1", port=store.shards[0].port)
        places = (await target.ask())[1]
        writer = ServerWriter(target, target.resolver(places), "b", [SPLIT], max_bytes=1 << 20, epoch=1)
        store.shards[0].refusals += [UnavailableError("not now"), OwnedError("another backfill has it")]
        with pytest.raises(OwnedError):
            async with writer.sending():
                raise AssertionError("it was let in")
        assert [shard.num_hellos for shard in store.shards] == [2, 0]


async def test_a_running_server_is_a_source_too(tmp_path: Path) -> None:
    """The logs of a running server are replayed up to their end at the time."""
    async with serve_shards(tmp_path / "source", 2) as ports, serve_shards(tmp_path / "target", 2) as others:
        await _Client(ports, epoch=1, seed=1).write(range(3))
        await _replay(tmp_path / "source", others[0])
        assert await _content(others[0]) == await _content(ports[0])
