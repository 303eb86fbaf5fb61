"""Which steps are complete: a policy that sees each flush's cut, in order, and says what its mark is.

A flush that leaves nothing dirty is an exact cut at its step. One that leaves something begins a *sweep*: the following
flushes go on from where the last one has ended, and when all that was dirty at the sweep's beginning is out, that step
is complete, but not exact: some newer values are out too.

A cut has two halves, the host's tables and the device's. Each goes round its own rows by a cursor, and what was dirty
when a sweep began is out once the cursor has come to the end; for a cursor that stood in the middle then, twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from headrace.streamer.flush.flush import StepMark

__all__ = ["NOTHING_CUT", "Cut", "Half", "Marked", "SweepMarks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """What a cut has left of one half of the tables.

    Attributes:
        is_clean: Nothing is dirty.
        has_wrapped: The cursor has come to the end.
        began_at_start: It stood at the beginning before.
    """

    is_clean: bool
    has_wrapped: bool
    began_at_start: bool


NOTHING_CUT = Half(is_clean=True, has_wrapped=True, began_at_start=True)
"""Of a half without tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One flush's cut.

    Attributes:
        step: At which it was made.
        time_us: Wall clock then, microseconds since 1970.
        now_s: Monotonic time then.
        changed_s: Monotonic time of the first step after the cut before.
        halves: What is left, of the host's tables and of the device's.
        restarts: What was counted of a running sweep does not hold any more.
    """

    step: int
    time_us: int
    now_s: float
    changed_s: float
    halves: tuple[Half, Half]
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class _Sweep:
    mark: StepMark
    began_s: float
    rounds_left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """After a flush: the sweep that runs, and since when what is dirty may be so; both None after an exact cut."""

    sweep: _Sweep | None = None
    dirty_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Marked:
    """What is said of one flush; it holds once `SweepMarks.accept` has got it.

    Attributes:
        mark: What the flush completes; None when more has to follow first.
        dirty_since_s: Monotonic time of the oldest change that it may hold.
        state: The policy's, after it.
    """

    mark: StepMark | None
    dirty_since_s: float
    state: _State


class SweepMarks:
    """Marks flushes. No I/O, no clock.

    Thread: one at a time: the training thread's, or with a device's tables the thread that completes flushes.
    """

    def __init__(self) -> None:
        """Begin with nothing dirty."""
        self._state = _State()

    @property
    def is_sweeping(self) -> bool:
        """Whether more was dirty than the last flush held.

        Thread: any.
        """
        return self._state.sweep is not None

    def judge(self, cut: Cut) -> Marked:
        """Return what a flush completes that comes after all accepted ones; nothing is noted."""
        since_s = cut.changed_s if self._state.dirty_since_s is None else self._state.dirty_since_s
        if all(half.is_clean for half in cut.halves):
            return Marked(StepMark(cut.step, cut.time_us, True), since_s, _State())
        sweep = None if cut.restarts else self._state.sweep
        if sweep is None:
            return Marked(None, since_s, _State(_begin(cut), since_s))
        rounds_left = tuple(
            0 if half.is_clean else left - half.has_wrapped
            for half, left in zip(cut.halves, sweep.rounds_left, strict=True)
        )
        if any(left > 0 for left in rounds_left):
            return Marked(None, since_s, _State(dataclasses.replace(sweep, rounds_left=rounds_left), since_s))
        # What is left became dirty after the sweep had begun.
        return Marked(sweep.mark, since_s, _State(_begin(cut), sweep.began_s))

    def accept(self, marked: Marked) -> None:
        """Note that a flush goes out as judged."""
        self._state = marked.state


def _begin(cut: Cut) -> _Sweep:
    """Return the sweep that begins with a cut: of a half whose cursor is in the middle, also what lies before it."""
    rounds = tuple(0 if half.is_clean else 1 if half.has_wrapped or half.began_at_start else 2 for half in cut.halves)
    return _Sweep(StepMark(cut.step, cut.time_us, False), cut.now_s, rounds)
