"""Passes over a table: rows that go, rows that stay, and every interleaving with updates."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from expiry_rig import DELETED, MISSING, PRESENT, SPEC, Rig, open_rig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.paramserver.expiry import scan
from headrace.paramserver.expiry.frequency import FrequencyFile
from headrace.paramserver.expiry.policy import ExpiryPolicy
from headrace.paramserver.expiry.table_pass import TablePass, check_policy
from headrace.paramserver.log.sessions import Session
from headrace.paramserver.store.catalog import Table
from headrace.schemas.errors import ConfigError, OverloadedError
from headrace.schemas.tables import ColumnShard, DType, TableSpec

LEFT, RIGHT = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        yield rig


def _session(rig: Rig) -> Session:
    session = rig.ingest.sessions.find("headrace", "expiry")
    assert session is not None
    return session


async def test_idle_rows_go_and_stay_gone(rig: Rig) -> None:
    """Idle rows are deleted; a later update restores one, and a replay of their past does not."""
    await rig.write(1, 1, range(10))
    await rig.write(1, 50, [3, 4])
    await rig.write(1, 100)
    report = await rig.expire("idle_steps=60")
    assert (report.scanned, report.live, report.expired, report.spared) == (10, 10, 8, 0)
    assert dict(report.by_policy) == {"idle_steps": 8}
    assert await rig.present(range(10)) == [3, 4]
    assert await rig.presence([0, 99]) == [DELETED, MISSING]
    await rig.hello(1, run="replay", client="log", world_size=0)
    await rig.write(1, 1, range(10), run="replay", client="log", version_epoch=1, ends_step=False)
    assert await rig.present(range(10)) == [3, 4]
    await rig.write(1, 100, [7])
    assert await rig.present(range(10)) == [3, 4, 7]
    again = await rig.expire("idle_steps=60")
    assert (again.scanned, again.live, again.expired) == (10, 3, 0)


async def test_nothing_goes_without_a_step(rig: Rig) -> None:
    """While no run has ended a step, nothing expires, and the report says why; rows of the last steps are spared."""
    await rig.write(1, 1, [1], ends_step=False)
    report = await rig.expire("max_rows=0")
    assert (report.expired, "no run has ended a step" in report.note) == (0, True)
    assert rig.ingest.sessions.find("headrace", "expiry") is None
    await rig.write(1, 9, [2])
    await rig.write(1, 10, [3])
    report = await rig.expire("ttl_s=0.5")
    assert (report.expired, report.spared) == (1, 1)
    assert await rig.present([1, 2, 3]) == [2, 3]


async def test_an_update_between_the_scan_and_the_tombstone_wins(rig: Rig) -> None:
    """Rows written after a pass has begun stay, also within an ended step, or in a new epoch."""
    await rig.write(1, 1, range(6))
    await rig.write(1, 100)
    run = TablePass(rig.context(), rig.table, ExpiryPolicy.parse("idle_steps=10"))
    assert await run.begin()
    assert await run.scan()
    await rig.write(1, 100, [0, 1])
    await rig.write(1, 101, [2])
    await rig.hello(2)
    await rig.write(2, 0, [3], ends_step=False)
    await run.delete(is_last=True)
    assert await rig.present(range(6)) == [0, 1, 2, 3]


async def test_an_update_that_is_not_applied_yet_counts(rig: Rig) -> None:
    """A pass waits until the store has every batch of the steps that it judges by."""
    await rig.write(1, 1, [0, 1])
    await rig.applier.wait_applied(rig.ingest.submitted_seq)
    await rig.write(1, 95, [1])
    await rig.write(1, 100)
    await rig.expire("idle_steps=10")
    assert await rig.present([0, 1]) == [1]


async def test_each_row_is_judged_by_its_own_run(tmp_path: Path) -> None:
    """A slow run's rows are safe from the steps of a fast one that trains another table, those of ended epochs too."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1, run="slow")
        await rig.write(1, 1, [0], run="slow")
        await rig.hello(2, run="slow")
        await rig.write(2, 1, [1], run="slow")
        await rig.hello(3, run="fast", specs=())
        await rig.write(3, 1000, run="fast")
        await rig.write(2, 4, run="slow")
        assert (await rig.expire("idle_steps=500")).expired == 0
        run = TablePass(rig.context(), rig.table, ExpiryPolicy.parse("idle_steps=2"))
        assert await run.begin()
        assert await run.scan()
        await rig.write(2, 5, [1], run="slow")
        await run.delete(is_last=True)
        assert await rig.present([0, 1]) == [1]


@pytest.mark.parametrize("piece_rows", [1, 9])
async def test_rows_of_an_ended_epoch_go_whatever_their_steps(rig: Rig, piece_rows: int) -> None:
    """Tombstones are newer than the newest row of the ended epoch, wherever it was found."""
    await rig.write(1, 10, [5])
    await rig.write(1, 50, [0])
    await rig.write(1, 60, [7])
    await rig.hello(2)
    await rig.write(2, 100)
    assert (await rig.expire("idle_steps=45", piece_rows=piece_rows)).expired == 2
    assert await rig.present([0, 5, 7]) == [7]


async def test_a_rank_that_lags_holds_rows_back(tmp_path: Path) -> None:
    """Rows are judged by the slowest rank's steps."""
    async with open_rig(tmp_path) as rig:
        for rank in (0, 1):
            await rig.hello(1, client=f"rank{rank}", rank=rank, world_size=2)
        await rig.write(1, 1, [0], client="rank0")
        await rig.write(1, 100, client="rank0")
        assert (await rig.expire("idle_steps=10")).note
        await rig.write(1, 5, client="rank1")
        assert (await rig.expire("idle_steps=10")).expired == 0
        await rig.write(1, 12, client="rank1")
        assert (await rig.expire("idle_steps=10")).expired == 1


async def test_rows_of_other_shards_do_not_count(rig: Rig) -> None:
    """Rows that have moved away and are still stored neither expire nor use up the budget."""
    await rig.write(1, 1, range(100))
    await rig.write(1, 99)
    known = rig.ingest.partitions.known
    partitions = known.partitions_of_rows(SPEC.seed, np.arange(100))
    await rig.give_away(range(known.num_partitions // 2))
    stay = np.flatnonzero(partitions >= known.num_partitions // 2).tolist()
    report = await rig.expire(f"max_rows={len(stay) - 1}")
    assert (report.live, report.expired) == (len(stay), 1)
    assert len(await rig.present(stay)) == len(stay) - 1
    assert len(await rig.present(range(100))) == 99


@pytest.mark.parametrize("policy", ["idle_steps=10", "max_rows=1"])
async def test_column_shards_go_whole(rig: Rig, policy: str) -> None:
    """A row's newest record decides, and the tombstone is in every column shard that has the row."""
    for shard in (LEFT, RIGHT):
        await rig.write(1, 1, range(5), shard=shard)
    await rig.write(1, 95, [2], shard=RIGHT)
    await rig.write(1, 100)
    report = await rig.expire(policy, piece_rows=2)
    assert report.expired == 4
    assert await rig.present(range(5)) == [2]
    await rig.hello(1, run="replay", client="log", world_size=0)
    for shard in (LEFT, RIGHT):
        await rig.write(1, 1, range(5), run="replay", client="log", version_epoch=1, shard=shard, ends_step=False)
    assert await rig.present(range(5)) == [2]


async def test_the_budget_keeps_the_newest(rig: Rig) -> None:
    """Beyond the budget the least recently updated rows go, ties by row id; other conditions count first."""
    await rig.write(1, 1, range(20))
    await rig.write(1, 2, range(5, 10))
    await rig.write(1, 50, [0, 1])
    await rig.write(1, 100)
    report = await rig.expire("max_rows=10", piece_rows=3)
    assert dict(report.by_policy) == {"max_rows": 10}
    assert await rig.present(range(20)) == [0, 1, 5, 6, 7, 8, 9, 17, 18, 19]
    report = await rig.expire("max_rows=6, idle_steps=98", piece_rows=3)
    assert dict(report.by_policy) == {"idle_steps": 3, "max_rows": 1}
    assert await rig.present(range(20)) == [0, 1, 6, 7, 8, 9]
    assert (await rig.expire("max_rows=6")).expired == 0
    # Each of two shards keeps its half, rounded up: together they keep no fewer than they are told to.
    assert (await rig.expire("max_rows=5", num_shards=lambda: Fraction(2))).expired == 3


async def test_the_budget_spares_what_may_be_written_yet(rig: Rig) -> None:
    """Rows of the last steps count toward the budget and stay."""
    await rig.write(1, 1, [0, 1])
    await rig.write(1, 100, [2, 3])
    report = await rig.expire("max_rows=1", is_dry_run=True)
    assert (report.expired, report.spared) == (2, 1)
    both = await rig.expire("max_rows=1, min_l2_norm=1e9", is_dry_run=True)
    assert (both.expired, both.spared) == (2, 2)  # one of the two is over the budget, too
    assert (await rig.expire("max_rows=1, idle_steps=1")).spared == 1
    assert await rig.present(range(4)) == [2, 3]
    assert (await rig.expire("max_rows=2")).spared == 0
    assert (await rig.expire("max_rows=0")).spared == 2


async def test_norms_and_frequencies(rig: Rig) -> None:
    """Rows with small weights go; a row that changes at every pass stays, and goes a few passes after it stops."""
    await rig.write(1, 1, [0], value=0.1)
    await rig.write(1, 1, [1, 2])
    await rig.write(1, 10)
    assert (await rig.expire("min_l2_norm=1.0")).expired == 1
    assert await rig.present([0, 1, 2]) == [1, 2]
    policy, left = "min_frequency=0.3, decay=0.5", []
    for step in (20, 30, 40):
        await rig.write(1, step, [1])
        await rig.write(1, step + 3)
        dry = await rig.expire(policy, is_dry_run=True)
        left.append((dry.expired, (await rig.expire(policy)).expired))
    assert left == [(0, 0), (0, 0), (1, 1)]
    assert await rig.present([0, 1, 2]) == [1]


async def test_a_dry_run_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    """A dry run counts by policy what would go, and writes neither log nor files."""
    await rig.write(1, 1, range(4))
    await rig.write(1, 50, [0])
    await rig.write(1, 100)
    before = rig.log.last_seq
    report = await rig.expire("idle_steps=60, max_rows=0, min_frequency=0.1", is_dry_run=True)
    assert (report.expired, dict(report.by_policy)) == (4, {"idle_steps": 3, "min_frequency": 0, "max_rows": 1})
    assert rig.log.last_seq == before
    assert not (tmp_path / "expiry").exists()
    assert await rig.present(range(4)) == [0, 1, 2, 3]


async def test_batches_are_bounded_and_numbered_over_restarts(tmp_path: Path) -> None:
    """Tombstones come in bounded batches, each accepted once; numbering continues after a restart."""
    rows = range(20_000)
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, rows)
        await rig.write(1, 100)
        assert (await rig.expire("idle_steps=10", piece_rows=5000)).expired == 20_000
        assert _session(rig).last_client_seq == 4
        bodies = [len(record.body) for record in rig.log.read(1) if record.header.get("client") == "expiry"]
        assert max(bodies) < 8192 * 8 + 1024
        await rig.write(1, 200, rows)
        await rig.write(1, 300)
        log = rig.log
    async with open_rig(tmp_path, log.reopen()) as rig:
        await rig.expire("idle_steps=10")
        assert _session(rig).last_client_seq == 4 + 3
        assert await rig.present(rows) == []
        assert _session(rig).is_trainer is False


async def test_a_lost_store_ends_in_the_same_rows(tmp_path: Path) -> None:
    """A store rebuilt from the log has the same rows, because tombstones are records of the log."""
    async with open_rig(tmp_path / "a") as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 100, [4])
        await rig.expire("idle_steps=10")
        await rig.write(1, 101, [5])
        presence, log = await rig.presence(range(10)), rig.log
    async with open_rig(tmp_path / "b", log.reopen()) as rig:
        assert await rig.presence(range(10)) == presence
    assert presence.count(PRESENT) == 2


async def test_a_run_waits_where_the_shard_has_no_room(rig: Rig) -> None:
    """A batch that is refused as overloaded is sent again, a while later; nothing is lost or doubled."""
    await rig.write(1, 1, range(10))
    await rig.write(1, 100)
    write, refusals = rig.ingest.write, [OverloadedError("full", retry_after_s=2.5)]

    async def refusing(*args: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await write(*args)

    rig.ingest.write = refusing  # type: ignore[method-assign]
    assert (await rig.expire("idle_steps=10")).expired == 10
    assert rig.slept_s == [2.5]
    assert await rig.present(range(10)) == []


async def test_the_rate_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass waits between pieces as its rate demands."""
    frozen = SimpleNamespace(monotonic=lambda: 100.0, sleep=lambda _: None)  # the work takes no time
    monkeypatch.setattr(scan, "time", frozen)
    await rig.write(1, 1, range(100))
    await rig.write(1, 100)
    await rig.expire("idle_steps=1000", rows_per_s=5, piece_rows=10)
    assert rig.slept_s == [2.0 * number for number in range(1, 11)]


async def test_a_cancelled_run_is_as_if_it_had_ended_there(rig: Rig, tmp_path: Path) -> None:
    """A pass canceled between pieces leaves whole batches and no file, and the next one does the rest."""
    await rig.write(1, 1, range(100))
    await rig.write(1, 100)
    context = rig.context(rows_per_s=1, piece_rows=10, sleep=rig.sleep_forever)
    policy = ExpiryPolicy.parse("idle_steps=10, min_frequency=0.1")
    run = asyncio.create_task(TablePass(context, rig.table, policy).run())
    await rig.is_waiting.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert list((tmp_path / "expiry").iterdir()) == []
    assert (await rig.expire("idle_steps=10")).expired == 100


@pytest.mark.parametrize("policy", ["min_frequency=0.1", "max_rows=5, min_frequency=0.1"], ids=["run", "cut"])
async def test_cancelled_while_it_opens_its_file_it_leaves_none_open(
    rig: Rig, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass canceled while it opens its frequency file waits for that, and closes it."""
    opening, may_open = threading.Event(), threading.Event()
    opened, closed = list[FrequencyFile](), list[FrequencyFile]()

    class SlowFile(FrequencyFile):
        def __init__(self, *args: Any, **settings: Any) -> None:
            opening.set()
            assert may_open.wait(60)
            super().__init__(*args, **settings)
            opened.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr("headrace.paramserver.expiry.table_pass.FrequencyFile", SlowFile)
    await rig.write(1, 1, range(10))
    await rig.write(1, 100)
    run = asyncio.create_task(rig.expire(policy))
    assert await asyncio.to_thread(opening.wait, 60)
    run.cancel()
    may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(opened) == 1 and closed == opened
    assert list((tmp_path / "expiry").glob("*")) == []


def test_norms_of_integers_are_refused() -> None:
    """A policy that a table cannot have is refused before anything is read."""
    table = Table(1, TableSpec(fqn="q", num_rows=0, dim=4, dtype=DType.UINT8))
    with pytest.raises(ConfigError, match="min_l2_norm needs floats, not UINT8"):
        check_policy(table, ExpiryPolicy.parse("min_l2_norm=1"))


ROWS = list(range(12))


_POLICIES = ["max_rows=0", "idle_steps=1", "idle_steps=4", "max_rows=4", "min_frequency=1"]


_SOME_ROWS = st.lists(st.sampled_from(ROWS), unique=True, max_size=6)


class ExpiryMachine(RuleBasedStateMachine):
    """A trainer, replays of its past, restarts, and the steps of expiry passes, in any order.

    What must hold is known without knowing when a run judged: a row that was updated since the newest run began is
    there; a row that was deleted is not, unless a trainer has updated it since; a row goes only if it was idle when the
    run began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.stack = AsyncExitStack()
        self.step, self.epoch, self.ended = 0, 1, -1
        self.past: list[tuple[int, int, list[int]]] = []
        # By row: version of the last update; whether it may be absent, as of the runs that have begun.
        self.updated: dict[int, tuple[int, int]] = {}
        self.may_be_gone: set[int] = set()
        self.must_be_gone: set[int] = set()
        self.run: TablePass | None = None
        self.idle_at_begin: set[int] = set()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        async def opening() -> Rig:
            rig = await self.stack.enter_async_context(open_rig(Path(self.folder.name)))
            await rig.hello(1)
            await rig.hello(1, run="replay", client="log", world_size=0)
            return rig

        self.rig: Rig = self._do(opening())
        self.update(ROWS, 1, True)
        self.update([], 4, True)

    @rule(rows=_SOME_ROWS, ahead=st.integers(0, 4), ends=st.sampled_from([True, True, False]))
    def update(self, rows: list[int], ahead: int, ends: bool) -> None:
        """Write rows in the present step or a later one, and perhaps end it."""
        self.step += ahead
        self._do(self.rig.write(self.epoch, self.step, rows, ends_step=ends))
        self.past.append((self.epoch, self.step, rows))
        for row in rows:
            self.updated[row] = (self.epoch, self.step)
            self.may_be_gone.discard(row)
            self.must_be_gone.discard(row)
        if ends:
            self.ended = self.step

    @rule(place=st.integers(0, 100), length=st.integers(1, 8))
    def replay(self, place: int, length: int) -> None:
        """Replay a part of the log."""
        first = place % len(self.past)

        async def sending() -> None:
            for epoch, step, rows in self.past[first : first + length]:
                await self.rig.write(1, step, rows, run="replay", client="log", version_epoch=epoch, ends_step=False)

        self._do(sending())

    @rule(back=st.integers(0, 5), ends=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.ended >= 0)
    def restart_trainer(self, back: int, ends: bool) -> None:
        """Restart the trainer, some steps back, in a higher epoch."""
        self.epoch += 1
        self.step, self.ended = max(self.step - back, 0), -1
        self._do(self.rig.hello(self.epoch))
        if ends:
            self.update([], 3, True)

    @rule(policy=st.sampled_from(_POLICIES), piece=st.sampled_from([13, 5, 1]))
    @precondition(lambda self: self.run is None and self.ended >= 0)
    def begin(self, policy: str, piece: int) -> None:
        """Begin a pass: rows updated from now on must stay."""
        self.run = TablePass(self.rig.context(piece_rows=piece), self.rig.table, ExpiryPolicy.parse(policy))
        assert self._do(self.run.begin())
        self.policy = policy
        self.may_be_gone |= set(self.updated)

    @rule()
    @precondition(lambda self: self.run is not None)
    def scan(self) -> None:
        """Judge the next rows."""
        assert self.run is not None
        if not self._do(self.run.scan()):
            self._end()

    @rule(rows=_SOME_ROWS, ahead=st.integers(0, 1))
    @precondition(lambda self: self.run is not None)
    def race(self, rows: list[int], ahead: int) -> None:
        """Update rows between a scan and its tombstones."""
        self.scan()
        self.update(rows, ahead, False)
        if self.run is not None:
            self.delete()

    @rule()
    @precondition(lambda self: self.run is not None)
    def delete(self) -> None:
        """Write the tombstones found so far, perhaps long after the scan."""
        assert self.run is not None
        self._do(self.run.delete(is_last=True))

    def _end(self) -> None:
        assert self.run is not None
        run, self.run = self.run, None

        async def ending() -> None:
            await run.delete(is_last=True)
            await run.finish()
            await run.close()

        self._do(ending())
        present = set(self._do(self.rig.present(ROWS)))
        assert run.report.live - run.report.expired <= len(present)
        if self.policy == "max_rows=0":
            horizon = run._horizon
            assert horizon is not None
            # Nothing stays but what may be written yet, or has been since.
            for row in present & self.may_be_gone:
                epoch, step = self.updated[row]
                assert not horizon.may_go(np.array([epoch]), np.array([step]))[0], f"row {row} of {epoch, step} stayed"

    @invariant()
    def what_was_updated_stays_and_what_is_gone_stays_gone(self) -> None:
        if not hasattr(self, "rig"):
            return
        found = dict(zip(ROWS, self._do(self.rig.presence(ROWS)), strict=True))
        for row in ROWS:
            if row in self.updated and row not in self.may_be_gone:
                assert found[row] == PRESENT, f"row {row}: the update {self.updated[row]} is lost"
            if row in self.must_be_gone:
                assert found[row] != PRESENT, f"row {row} has come back"
            if found[row] == DELETED:
                self.must_be_gone.add(row)

    def teardown(self) -> None:
        if self.run is not None:
            self._do(self.run.close())
        try:
            if hasattr(self, "rig"):
                self._do(self.stack.aclose())
        finally:
            self.runner.close()
            self.folder.cleanup()


TestExpiryMachine = ExpiryMachine.TestCase
TestExpiryMachine.settings = settings(max_examples=60, stateful_step_count=25)
