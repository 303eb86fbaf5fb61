"""Step marks: a policy that sees each flush's outcome, in order, and decides which step it completes.

A flush that leaves nothing dirty is an exact cut at its step. One that leaves rows begins a *flush pass*: each
following flush continues where the last one ended. When all that was dirty at the beginning of the pass has gone out,
that step is complete, but not exact, because some newer values have gone out too.

A flush after which rows wait, held back because they hardly changed, completes no step and is no part of a pass. What
waits goes out with a *release*: flushes that hold nothing back until one has a mark.

While there are dense parameters, only a flush that has them all is an exact cut.

A flush has a host part and a device part. Each walks its own rows with a cursor. What was dirty when a pass began has
gone out once the cursor reaches the end; if it stood in the middle then, once it reaches the end twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from headrace.streamer.flush.layout import StepMark

__all__ = ["NO_REMAINDER", "FlushOutcome", "Judgment", "Remainder", "StepMarkPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remainder:
    """What a flush has left of its host or device part, whether its cursor reached the end, and where it began."""

    is_clean: bool
    has_wrapped: bool
    began_at_start: bool


NO_REMAINDER = Remainder(is_clean=True, has_wrapped=True, began_at_start=True)
"""Of a part without tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushOutcome:
    """When one flush took its rows, and what it left.

    Attributes:
        step, time_us, now_s: Step, wall clock (microseconds since 1970) and monotonic time at which it took its rows.
        changed_s: Monotonic time of the first step after the flush before.
        remainders: Of the host part and of the device part.
        restarts: A running pass has to begin anew.
        holds_back: Rows wait. REQUIRES: they become dirty before a flush without this.
        lacks_dense: There is a dense part, and the flush does not have it, so it is no exact cut.
        is_recorded: Of its step, there is a recording.
    """

    step: int
    time_us: int
    now_s: float
    changed_s: float
    remainders: tuple[Remainder, Remainder]
    restarts: bool = False
    holds_back: bool = False
    lacks_dense: bool = False
    is_recorded: bool = False

    def wall_us(self, at_s: float) -> int:
        """Return the wall clock at an earlier monotonic time, microseconds since 1970."""
        return self.time_us - round((self.now_s - at_s) * 1e6)


@dataclass(frozen=True, slots=True)
class _Pass:
    mark: StepMark
    began_s: float
    rounds_left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _State:
    # The running pass, and the time since when rows may be dirty; both None after an exact cut.
    running: _Pass | None = None
    dirty_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Judgment:
    """The decision on one flush; it takes effect with `StepMarkPolicy.accept`. See `Flush` for its attributes."""

    mark: StepMark | None
    dirty_since_s: float
    state: _State


class StepMarkPolicy:
    """Decides on flushes' step marks. No I/O, no clock.

    Thread: one at a time: the training thread, or, with tables on a device, the thread that completes flushes.

    Attributes:
        num_complete: Accepted flushes with a mark. Thread: any.
    """

    def __init__(self) -> None:
        """Begin with nothing dirty."""
        self._state = _State()
        self.num_complete = 0

    @property
    def is_in_pass(self) -> bool:
        """Whether more was dirty than the last flush held. Thread: any."""
        return self._state.running is not None

    def judge(self, outcome: FlushOutcome) -> Judgment:
        """Return the decision on a flush that follows all accepted ones, without noting it."""
        since_s = outcome.changed_s if self._state.dirty_since_s is None else self._state.dirty_since_s
        if outcome.holds_back:
            # What goes out changed lately; what waits counts with the release.
            return Judgment(None, outcome.changed_s, _State(None, since_s))
        if all(part.is_clean for part in outcome.remainders):
            is_exact = not outcome.lacks_dense
            mark = StepMark(outcome.step, outcome.time_us, is_exact, is_exact and outcome.is_recorded)
            return Judgment(mark, since_s, _State())
        running = None if outcome.restarts else self._state.running
        if running is None:
            return Judgment(None, since_s, _State(_begin(outcome), since_s))
        rounds_left = tuple(
            0 if part.is_clean else left - part.has_wrapped
            for part, left in zip(outcome.remainders, running.rounds_left, strict=True)
        )
        if any(left > 0 for left in rounds_left):
            return Judgment(None, since_s, _State(dataclasses.replace(running, rounds_left=rounds_left), since_s))
        # What is left became dirty after the pass began.
        return Judgment(running.mark, since_s, _State(_begin(outcome), running.began_s))

    def accept(self, judgment: Judgment) -> None:
        """Note that a flush goes out as judged."""
        self._state = judgment.state
        self.num_complete += judgment.mark is not None


def _begin(outcome: FlushOutcome) -> _Pass:
    # A part whose cursor is in the middle takes two rounds, because rows before the cursor belong to the pass too.
    rounds = tuple(
        0 if part.is_clean else 1 if part.has_wrapped or part.began_at_start else 2 for part in outcome.remainders
    )
    return _Pass(StepMark(outcome.step, outcome.time_us, False), outcome.now_s, rounds)
