"""Interleavings of everything with runs of expiry: no update is lost, and no row comes back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from expiry_rig import DELETED, PRESENT, Rig, open_rig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from headrace.paramserver.expiry.expiry_policy import ExpiryPolicy
from headrace.paramserver.expiry.expiry_run import TableRun

ROWS = list(range(12))
_POLICIES = ["max_rows=0", "idle_steps=1", "idle_steps=4", "max_rows=4", "min_frequency=1"]
_SOME_ROWS = st.lists(st.sampled_from(ROWS), unique=True, max_size=6)


class ExpiryMachine(RuleBasedStateMachine):
    """A trainer, replays of its past, restarts, and runs of expiry cut into their steps, in any order.

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
        self.run: TableRun | None = None
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
        """The trainer writes rows, in the step that it is at or a later one, and perhaps ends it."""
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
        """Somebody sends a part of the log again."""
        first = place % len(self.past)

        async def sending() -> None:
            for epoch, step, rows in self.past[first : first + length]:
                await self.rig.write(1, step, rows, run="replay", client="log", version_epoch=epoch, ends_step=False)

        self._do(sending())

    @rule(back=st.integers(0, 5), ends=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.ended >= 0)
    def restart_trainer(self, back: int, ends: bool) -> None:
        """The trainer begins anew, some steps back, in a higher epoch."""
        self.epoch += 1
        self.step, self.ended = max(self.step - back, 0), -1
        self._do(self.rig.hello(self.epoch))
        if ends:
            self.update([], 3, True)

    @rule(policy=st.sampled_from(_POLICIES), piece=st.sampled_from([13, 5, 1]))
    @precondition(lambda self: self.run is None and self.ended >= 0)
    def begin(self, policy: str, piece: int) -> None:
        """A run begins: whatever is updated from now on must stay."""
        self.run = TableRun(self.rig.context(piece_rows=piece), self.rig.table, ExpiryPolicy.parse(policy))
        assert self._do(self.run.begin())
        self.policy = policy
        self.may_be_gone |= set(self.updated)

    @rule()
    @precondition(lambda self: self.run is not None)
    def scan(self) -> None:
        """The run looks at its next rows."""
        assert self.run is not None
        if not self._do(self.run.scan()):
            self._end()

    @rule(rows=_SOME_ROWS, ahead=st.integers(0, 1))
    @precondition(lambda self: self.run is not None)
    def race(self, rows: list[int], ahead: int) -> None:
        """The trainer updates rows between a scan and its tombstones."""
        self.scan()
        self.update(rows, ahead, False)
        if self.run is not None:
            self.delete()

    @rule()
    @precondition(lambda self: self.run is not None)
    def delete(self) -> None:
        """Tombstones of what was seen are written, perhaps long after it was seen."""
        assert self.run is not None
        self._do(self.run.delete(is_last=True))

    def _end(self) -> None:
        assert self.run is not None
        run, self.run = self.run, None

        async def ending() -> None:
            await run.delete(is_last=True)
            await run._finish()
            if run._frequencies is not None:
                run._frequencies.close()

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
        if self.run is not None and self.run._frequencies is not None:
            self.run._frequencies.close()
        try:
            if hasattr(self, "rig"):
                self._do(self.stack.aclose())
        finally:
            self.runner.close()
            self.folder.cleanup()


TestExpiryMachine = ExpiryMachine.TestCase
TestExpiryMachine.settings = settings(max_examples=60, stateful_step_count=25)
