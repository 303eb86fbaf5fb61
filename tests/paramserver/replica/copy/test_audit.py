"""The replica's audit: equal when it is, also under training, and one flipped bit is found and named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from replica_of import replica_of
from torch import nn
from virtual_loop import run_virtual

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.copy import audit as audit_module
from headrace.paramserver.replica.copy.audit import LONGEST_HOLD_S, ReplicaAuditReport, _spans, audit_copy, skip_reason
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.errors import ConfigError, RequestError, UnavailableError
from headrace.schemas.row_digest import TableDigest
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer import RawEmbeddingStreamer

WAIT_S = 60.0
# Three buckets, the last of them not full, in two ranges that are looked at one after the other.
ROWS = 300_000


class Training:
    """A large table of which each step changes some rows, and a small one in bfloat16."""

    def __init__(self, address: str) -> None:
        torch.manual_seed(7)
        self.model = nn.ModuleDict(
            {
                "large": nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True),
                "small": nn.EmbeddingBag(50, 3, mode="sum", sparse=True, dtype=torch.bfloat16),
            }
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.streamer = RawEmbeddingStreamer(address, run="run")
        self.streamer.attach(self.model, self.optimizer, publish="all")
        self.num_steps = 0

    def step(self) -> None:
        ids = torch.randint(0, ROWS, (64, 4))
        loss = self.model["large"](ids).sum() + self.model["small"](ids % 50).float().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def settle(self, replica: EmbeddingReplica) -> None:
        self.streamer.flush()
        replica.wait_for(self.num_steps, WAIT_S)


@pytest.fixture(scope="module")
def training(server: ServerProcess) -> Iterator[Training]:
    training = Training(server.address)
    training.step()
    training.streamer.flush()
    yield training
    training.streamer.close()


def put(replica: EmbeddingReplica, fqn: str, row: int, *, flipped_bit: int | None) -> None:
    """Write over a row behind the replica's back: with a bit of its first weight flipped, or with a deletion."""
    assert replica._copies.current is not None
    table = replica._copies.current.tables[fqn]
    row_ids, spec = np.array([row]), table.spec
    if flipped_bit is None:
        layout, no_ids = RecordLayout(spec, spec.whole), np.empty(0, np.int64)
        gone = RowDelta(
            table_id=1, spec=spec, layout=layout, row_ids=no_ids, columns={"weights": b""}, deleted_row_ids=row_ids
        )
        table.apply(gone, epoch=1, step=0)
        return
    data = bytearray(table.gather(row_ids)[0].tobytes())
    data[flipped_bit // 8] ^= 1 << flipped_bit % 8
    table.load(row_ids, bytes(data), np.array([PRESENT]), np.array([1]), np.array([0]), spec.whole)


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_a_flipped_bit_is_found(server: ServerProcess, training: Training, consistency: Any) -> None:
    """Replica and store are equal bit for bit; each bit that is not is found, with its bucket and row."""
    with EmbeddingReplica(server.address, consistency=consistency) as replica:
        training.step()
        training.settle(replica)
        report = replica.audit(timeout_s=WAIT_S)
        assert report.is_equal, str(report)
        assert report.num_rows == ROWS + 50 and len(report.tables) == 2
        flips = [("large.weight", 3, 31), ("large.weight", 299_999, 0), ("small.weight", 49, 15)]
        for fqn, row, bit in flips:
            put(replica, fqn, row, flipped_bit=bit)
        report = replica.audit(timeout_s=WAIT_S)
        large, small = report.tables
        assert not report.is_equal
        assert (large.differing_buckets, large.differing_row_ids) == ([0, 4], [3, 299_999])
        assert (small.differing_buckets, small.differing_row_ids) == ([0], [49])
        assert "DIFFERENT in buckets 0, 4: rows 3, 299999" in str(report)
        assert replica.audit(tables=["small.weight"], timeout_s=WAIT_S).tables == (small,)
        for fqn, row, bit in flips:
            put(replica, fqn, row, flipped_bit=bit)
        assert replica.audit(timeout_s=WAIT_S).is_equal


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_training_goes_on_meanwhile(server: ServerProcess, training: Training, consistency: Any) -> None:
    """While rows are updated all the time, an audit compares the two at the same records; then the replica goes on."""
    has_stepped, is_over = threading.Event(), threading.Event()
    with EmbeddingReplica(server.address, consistency=consistency) as replica:

        def train() -> None:
            while not is_over.is_set():
                training.step()
                has_stepped.set()
                training.streamer.flush()
                is_over.wait(0.05)  # by step, an audit needs a moment in which nothing comes

        thread = threading.Thread(target=train)
        thread.start()
        try:
            for _ in range(3):
                has_stepped.clear()
                assert has_stepped.wait(WAIT_S)  # however long a disk holds up the step before
                report = replica.audit(timeout_s=WAIT_S)
                assert report.is_equal, str(report)
        finally:
            is_over.set()
            thread.join()
        training.settle(replica)
        assert torch.equal(replica.lookup("large.weight", range(ROWS)), training.model["large"].weight.detach())


def test_small_tables_are_compared_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty cost three turns of holding the replica, and each that differs is named with its row, in its place."""
    turns: list[int] = []
    paused = LiveCopy.paused

    def count(copy: LiveCopy) -> Any:
        turns.append(1)
        return paused(copy)

    model = nn.ModuleDict({f"t{n:02d}": nn.EmbeddingBag(20 + n, 2, mode="sum") for n in range(40)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fqns = [f"{name}.weight" for name in model]
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        RawEmbeddingStreamer(server.address, run="many") as streamer,
    ):
        streamer.attach(model, optimizer, publish="all")
        streamer.flush()
        with EmbeddingReplica(server.address) as replica:
            put(replica, fqns[3], 22, flipped_bit=1)
            put(replica, fqns[39], 0, flipped_bit=None)
            monkeypatch.setattr(LiveCopy, "paused", count)
            report = replica.audit(timeout_s=WAIT_S)
            assert len(turns) == 3
            assert [table.fqn for table in report.tables] == fqns
            assert [table.num_rows for table in report.tables] == [*range(20, 59), 58]
            differing = {table.fqn: table.differing_row_ids for table in report.tables if table.differing_buckets}
            assert differing == {fqns[3]: [22], fqns[39]: [0]}
            assert [replica.digest(fqn).total for fqn in fqns[:5]] == [table.digest for table in report.tables[:5]]


class _CopyAtSeqs:
    """A copy of two shards, whose digests are of the positions that the test has put there."""

    def __init__(self, seqs: dict[str, list[tuple[int, int]]]) -> None:
        spec = TableSpec(fqn="t", num_rows=9, dim=1, dtype=DType.FLOAT32)
        specs = {fqn: dataclasses.replace(spec, fqn=fqn) for fqn in seqs}
        self.table_set = SimpleNamespace(
            incomplete=[],
            tables={fqn: MemoryTable(spec) for fqn, spec in specs.items()},
            tails=[SimpleNamespace(shard=0, visible_seq=2), SimpleNamespace(shard=1, visible_seq=1)],
            any_table=lambda fqn: self.table_set.tables[fqn],
            visible=(0, -1),
        )
        self.reader = self
        self.shown: list[tuple[int, ...]] = []
        self._seqs = seqs

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.shown.append(())
        yield

    async def digest(self, fqn: str, *, timeout_s: float, **_: Any) -> TableDigest:
        assert timeout_s < LONGEST_HOLD_S, "the message that names the shard comes first"
        spec = self.table_set.tables[fqn].spec
        digest = TableDigest(spec=spec, columns=spec.whole)
        digest.seqs = dict(enumerate(self._seqs[fqn].pop(0)))
        digest.is_steady = digest.seqs[0] > 0
        return digest

    async def show_up_to(self, seqs: tuple[int, ...]) -> bool:
        self.shown.append(seqs)
        return True


def audited(copy: _CopyAtSeqs) -> ReplicaAuditReport:
    """Audit a copy in virtual time."""
    return run_virtual(audit_copy(cast("Any", copy), ReplicaConfig(), None))


def test_the_replica_is_taken_from_position_to_position() -> None:
    """Never back: a table of which one shard was later than the others', or not at one position, is compared again."""
    copy = _CopyAtSeqs({"a": [(2, 3)], "b": [(5, 1), (5, 4)], "c": [(2, 3)], "d": [(0, 0), (6, 6)], "e": [(3, 4)]})
    assert [audit.fqn for audit in audited(copy).tables] == list("abcde")
    assert copy.shown == [(), (2, 3), (3, 4), (), (5, 4), (), (6, 6)]
    # A shard that was set back tells of older rows: following it finds that, and an audit asks again.
    copy = _CopyAtSeqs({"a": [(1, 9), (9, 0), (2, 1)]})
    assert audited(copy).is_equal
    assert copy.shown == [(), (), (), (2, 1)]


def test_a_shard_that_is_stuck_does_not_hold_the_replica_up() -> None:
    """The range is given up, with the names of its tables, and what came meanwhile becomes visible."""

    class Stuck(_CopyAtSeqs):
        async def digest(self, fqn: str, *, timeout_s: float, **_: Any) -> TableDigest:
            return await asyncio.Future()

        @contextlib.asynccontextmanager
        async def paused(self) -> AsyncIterator[None]:
            try:
                yield
            finally:
                self.shown.append((9, 9))

    copy = Stuck({"a": [], "b": [], "c": []})
    words = r"rows of 'a', 'b', 'c' were not compared within 20 s, in which the replica stands still"
    with pytest.raises(UnavailableError, match=words):
        audited(copy)
    assert copy.shown == [(9, 9)]


def test_the_replica_is_held_for_less_than_it_may_be_behind() -> None:
    """A range that is given up takes no readiness; settings by which it would are refused."""
    assert EndpointConfig(server="h", audit_interval_s=60.0).max_lag_s > LONGEST_HOLD_S
    assert EndpointConfig(server="h", audit_interval_s=60.0, max_lag_s=0).max_lag_s == 0
    assert EndpointConfig(server="h", max_lag_s=1.0).audit_interval_s is None
    with pytest.raises(ConfigError, match=r"max_lag_s: an audit .* may pause the replica for 20 s"):
        EndpointConfig(server="h", audit_interval_s=60.0, max_lag_s=20.0)


async def test_what_came_while_a_range_was_given_up_is_shown(
    server: ServerProcess, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that gives no digests holds nothing up for longer: also not where who asked for the audit gives up."""
    answers = asyncio.Event()

    async def never(*_: Any, **__: Any) -> TableDigest:
        loop.call_soon_threadsafe(answers.set)
        return await asyncio.Future()

    loop = asyncio.get_running_loop()
    async with replica_of(server.address) as replica:
        monkeypatch.setattr(EmbeddingReader, "digest", never)
        auditing = asyncio.ensure_future(asyncio.to_thread(replica.audit, timeout_s=1.0))
        await answers.wait()
        await asyncio.to_thread(training.step)
        await asyncio.to_thread(training.streamer.flush)
        with pytest.raises(UnavailableError, match="the audit has not ended in 1 s"):
            await auditing
        monkeypatch.undo()
        await asyncio.to_thread(training.settle, replica)
        assert (await asyncio.to_thread(replica.audit, timeout_s=WAIT_S)).is_equal


@pytest.mark.parametrize("differs", [True, False])
def test_a_difference_is_told_though_not_all_could_be_compared(monkeypatch: pytest.MonkeyPatch, differs: bool) -> None:
    """A shard that goes away later takes nothing back, and what it left open is named. Without one it is an error."""

    class Fails(_CopyAtSeqs):
        async def digest(self, fqn: str, *, timeout_s: float, **_: Any) -> TableDigest:
            if fqn == "z":
                raise UnavailableError("a shard is away")
            digest = await super().digest(fqn, timeout_s=timeout_s)
            if differs:
                digest.add_rows(np.array([3]), [np.ones((1, 1), np.float32)])
            return digest

        async def get(self, fqn: str, ids: Any, **_: Any) -> Any:
            raise UnavailableError("rows cannot be named")

    monkeypatch.setattr(audit_module, "table_groups", lambda spans, **_: [[span] for span in spans])
    copy = Fails({"a": [(2, 3)], "z": []})
    if not differs:
        with pytest.raises(UnavailableError, match="a shard is away"):
            audited(copy)
        return
    report = audited(copy)
    assert [(table.fqn, table.differing_buckets) for table in report.tables] == [("a", [0])]
    assert report.left_out.keys() == {"a", "z"} and report.left_out["z"].endswith("rows cannot be named")


def test_rows_that_come_all_the_time_end_an_audit() -> None:
    """After so many attempts it says so, and does not hold the replica up again and again."""
    copy = _CopyAtSeqs({"a": [(0, 0)] * 1000})
    with pytest.raises(UnavailableError, match=r"'a' were not compared in \d+ attempts: each time rows came"):
        audited(copy)
    assert set(copy.shown) == {()} and len(copy.shown) < 300


@pytest.mark.parametrize(("dim", "num_rows_held"), [(1, 262_144), (1000, 131_072), (20_000, 65_536)])
def test_wide_rows_are_held_up_in_smaller_numbers(dim: int, num_rows_held: int) -> None:
    """A range takes a shard about a second, and as many tables are looked at together as have so many rows."""
    spec = TableSpec(fqn="t", num_rows=300_000, dim=dim, dtype=DType.FLOAT32)
    copy = SimpleNamespace(table_set=SimpleNamespace(any_table=lambda _: SimpleNamespace(spec=spec)))
    spans = list(_spans(cast("Any", copy), "t"))
    assert spans[0].end_row == num_rows_held and spans[-1].end_row == 300_000
    assert spans[0].num_rows() == 262_144


def test_what_cannot_be_compared_is_left_out_and_named(server: ServerProcess, training: Training) -> None:
    """A table in another precision is named in the report with the reason, and refused when it is asked for."""
    storage = {"large.weight": MemoryStorage(precision="fp16")}
    with EmbeddingReplica(server.address, storage=storage) as replica:
        training.settle(replica)
        report = replica.audit(timeout_s=WAIT_S)
        assert report.is_equal and [table.fqn for table in report.tables] == ["small.weight"]
        assert "large.weight: left out: its rows are kept in fp16" in str(report)
        for call in (replica.digest, lambda fqn: replica.audit(tables=[fqn], timeout_s=WAIT_S)):
            with pytest.raises(RequestError, match=r"'large\.weight' cannot be compared"):
                call("large.weight")
    with EmbeddingReplica(server.address, precision="int8", tables=["large.weight"]) as replica:
        report = replica.audit(timeout_s=WAIT_S)
        assert report.tables == () and set(report.left_out) == {"large.weight"}


def test_virtual_ids_cannot_be_compared() -> None:
    """There is no going through them in order; a table that is kept as it is can be compared."""
    spec = TableSpec(fqn="t", num_rows=0, dim=2, dtype=DType.FLOAT32)
    assert "virtual ids" in (skip_reason(spec, ReplicaConfig()) or "")
    assert skip_reason(dataclasses.replace(spec, num_rows=9), ReplicaConfig()) is None
