"""Passes over a table: rows that go, rows that stay, and every interleaving with updates."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from expiry_rig import PRESENT, Rig, RigCommands, open_rig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from text_scripts import Script, scripts

from headrace.paramserver.expiry import scan
from headrace.paramserver.expiry.frequency import FrequencyFile
from headrace.paramserver.expiry.policy import ExpiryPolicy
from headrace.paramserver.expiry.table_pass import TablePass, check_policy
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.schemas.errors import ConfigError, OverloadedError
from headrace.schemas.tables import DType, TableSpec


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        yield rig


@scripts(__file__, "passes")
async def test_passes(script: Script, tmp_path: Path) -> None:
    """Rows that expire go, and no others; updates, restarts and moves come before, after and meanwhile."""
    async with RigCommands(tmp_path) as commands:
        await script.run_async(commands)


async def test_a_run_waits_where_the_shard_has_no_room(rig: Rig) -> None:
    """A batch that is refused as overloaded is sent again, a while later; nothing is lost or doubled."""
    await rig.write(1, 1, range(10))
    await rig.write(1, 100)
    refusals = [OverloadedError("full", retry_after_s=2.5)]

    def find_room() -> None:
        if refusals:
            raise refusals.pop()

    rig.ingest.check_room = find_room
    assert (await rig.expire("idle_steps=10")).expired == 10
    assert rig.slept_s == [2.5]
    assert await rig.present(range(10)) == []


async def test_rows_that_any_accepted_batch_has_touched_stay(rig: Rig) -> None:
    """A batch keeps its rows that is accepted before the deletion: applied, not durable yet, or after the last look."""
    await rig.write(1, 1, range(8))
    await rig.write(1, 100)
    writing, is_late = list[asyncio.Task[None]](), asyncio.Event()

    class LateApplier(Applier):
        async def read(self, *args: Any) -> Any:
            found = await rig.applier.read(*args)
            rig.log.hold()
            writing.append(await rig.accept(1, 102, [2], deleted=[3]))
            is_late.set()
            return found

    context = rig.context(applier=LateApplier(rig.store))
    begun = TablePass(context, rig.table, ExpiryPolicy.parse("idle_steps=10"))
    context.applier.wait_applied = rig.applier.wait_applied  # type: ignore[method-assign]
    assert await begun.begin() and await begun.scan()
    await rig.write(1, 101, [0])
    rig.log.hold()
    writing.append(await rig.accept(1, 101, [1]))
    deleting = asyncio.create_task(begun.delete(is_last=True))
    await asyncio.sleep(0)
    assert rig.log.last_seq < rig.ingest.accepted_seq  # it waits for what is accepted
    rig.log.release()
    await is_late.wait()
    rig.log.release()
    await asyncio.gather(deleting, *writing)
    await rig.write(1, 103, [7])  # on its way until now
    assert begun.report.expired == 4
    assert await rig.present(range(8)) == [0, 1, 2, 7]


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
    """A trainer, its restarts and the shard's, and the steps of expiry passes, in any order.

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
            return rig

        self.rig: Rig = self._do(opening())
        self.update(ROWS, 1, True)
        self.update([], 4, True)

    @rule(rows=_SOME_ROWS, ahead=st.integers(0, 4), ends=st.sampled_from([True, True, False]))
    def update(self, rows: list[int], ahead: int, ends: bool) -> None:
        """Write rows in the present step or a later one, and perhaps end it."""
        self.step += ahead
        self._do(self.rig.write(self.epoch, self.step, rows, ends_step=ends))
        for row in rows:
            self.updated[row] = (self.epoch, self.step)
            self.may_be_gone.discard(row)
            self.must_be_gone.discard(row)
        if ends:
            self.ended = self.step

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
        """Update rows between a scan and its deletions."""
        self.scan()
        self.update(rows, ahead, False)
        if self.run is not None:
            self.delete()

    @rule()
    @precondition(lambda self: self.run is not None)
    def delete(self) -> None:
        """Delete the rows found so far, perhaps long after the scan."""
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
            # Nothing stays but rows of steps that a rank has not ended.
            for row in present & self.may_be_gone:
                epoch, step = self.updated[row]
                assert not horizon.settled(np.array([epoch]), np.array([step]))[0], f"row {row} of {epoch, step} stayed"

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
            if row in self.updated and found[row] != PRESENT:
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
