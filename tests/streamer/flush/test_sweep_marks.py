"""Which steps are complete when two halves of the tables go round at their own pace."""

from __future__ import annotations

from headrace.streamer.flush.flush import StepMark
from headrace.streamer.flush.sweep_marks import NOTHING_CUT, Cut, Half, SweepMarks

GOES_ON = Half(is_clean=False, has_wrapped=False, began_at_start=False)
BEGINS = Half(is_clean=False, has_wrapped=False, began_at_start=True)
WRAPS = Half(is_clean=False, has_wrapped=True, began_at_start=False)


def marks_of(*cuts: tuple[Half, Half], restarts_at: int = 0) -> list[tuple[int, bool] | None]:
    """Return (step, whether it is exact) of each flush's mark; steps count from 1."""
    marks = SweepMarks()
    found: list[tuple[int, bool] | None] = []
    for step, halves in enumerate(cuts, 1):
        cut = Cut(step=step, time_us=step, now_s=step, changed_s=step, halves=halves, restarts=step == restarts_at)
        marked = marks.judge(cut)
        marks.accept(marked)
        found.append(None if marked.mark is None else (marked.mark.step, marked.mark.is_exact_cut))
    return found


def test_nothing_left_is_an_exact_cut() -> None:
    """A flush after which neither half is dirty marks its own step as exact, also amid a sweep."""
    assert marks_of((NOTHING_CUT, NOTHING_CUT)) == [(1, True)]
    assert marks_of((BEGINS, NOTHING_CUT), (NOTHING_CUT, NOTHING_CUT)) == [None, (2, True)]


def test_a_sweep_ends_when_both_halves_have_come_to_their_end() -> None:
    """What was dirty at a step is out when each half has gone round, whichever is the slower."""
    assert marks_of((BEGINS, BEGINS), (WRAPS, GOES_ON), (BEGINS, GOES_ON), (GOES_ON, WRAPS)) == [
        None,
        None,
        None,
        (1, False),
    ]
    assert marks_of((BEGINS, NOTHING_CUT), (GOES_ON, WRAPS), (WRAPS, WRAPS))[-1] == (1, False)


def test_a_half_in_the_middle_goes_round_twice() -> None:
    """When a sweep ends while the other half is amid its rows, what lies before its cursor needs a second round."""
    first = [(BEGINS, BEGINS), (GOES_ON, WRAPS), (WRAPS, GOES_ON)]
    # The second sweep begins at step 3, where the device stands in the middle.
    assert marks_of(*first, (WRAPS, WRAPS), (WRAPS, WRAPS)) == [None, None, (1, False), None, (3, False)]


def test_a_restart_forgets_the_running_sweep() -> None:
    """After rows were taken back, a sweep begins anew at the next flush."""
    assert marks_of((BEGINS, BEGINS), (WRAPS, WRAPS), restarts_at=2) == [None, None]
    assert marks_of((BEGINS, BEGINS), (WRAPS, WRAPS), (WRAPS, WRAPS), restarts_at=2)[2] == (2, False)


def test_dirty_since_is_the_oldest_change() -> None:
    """Lag is counted from the sweep's beginning for what it left, and from the next change after an exact cut."""
    marks = SweepMarks()
    seen = []
    for step, halves in enumerate(
        [(BEGINS, NOTHING_CUT), (WRAPS, NOTHING_CUT), (NOTHING_CUT, NOTHING_CUT), (NOTHING_CUT, NOTHING_CUT)], 1
    ):
        marked = marks.judge(Cut(step=step, time_us=0, now_s=step, changed_s=step - 0.5, halves=halves))
        marks.accept(marked)
        seen.append(marked.dirty_since_s)
    assert seen == [0.5, 0.5, 1, 3.5]


def test_a_judgement_that_is_not_accepted_changes_nothing() -> None:
    """A flush that was not sent has not ended a sweep, nor begun one."""
    marks = SweepMarks()
    cut = Cut(step=1, time_us=5, now_s=1.0, changed_s=1.0, halves=(BEGINS, NOTHING_CUT))
    assert marks.judge(cut).mark is None
    assert not marks.is_sweeping
    marks.accept(marks.judge(cut))
    assert marks.is_sweeping
    end = Cut(step=2, time_us=6, now_s=2.0, changed_s=2.0, halves=(WRAPS, NOTHING_CUT))
    assert marks.judge(end).mark == marks.judge(end).mark == StepMark(1, 5, False)
