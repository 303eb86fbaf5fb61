"""Which steps are complete when two parts of the tables go round at their own pace."""

from __future__ import annotations

from headrace.streamer.flush.layout import StepMark
from headrace.streamer.flush.step_marks import NO_REMAINDER, FlushOutcome, Remainder, StepMarkPolicy

GOES_ON = Remainder(is_clean=False, has_wrapped=False, began_at_start=False)
BEGINS = Remainder(is_clean=False, has_wrapped=False, began_at_start=True)
WRAPS = Remainder(is_clean=False, has_wrapped=True, began_at_start=False)


def marks_of(*cuts: tuple[Remainder, Remainder], restarts_at: int = 0) -> list[tuple[int, bool] | None]:
    """Return (step, whether it is exact) of each flush's mark; steps count from 1."""
    marks = StepMarkPolicy()
    found: list[tuple[int, bool] | None] = []
    for step, remainders in enumerate(cuts, 1):
        cut = FlushOutcome(
            step=step, time_us=step, now_s=step, changed_s=step, remainders=remainders, restarts=step == restarts_at
        )
        marked = marks.judge(cut)
        marks.accept(marked)
        found.append(None if marked.mark is None else (marked.mark.step, marked.mark.is_exact_cut))
    return found


def test_nothing_left_is_an_exact_cut() -> None:
    """A flush after which neither part is dirty marks its own step as exact, also amid a pass."""
    assert marks_of((NO_REMAINDER, NO_REMAINDER)) == [(1, True)]
    assert marks_of((BEGINS, NO_REMAINDER), (NO_REMAINDER, NO_REMAINDER)) == [None, (2, True)]


def test_only_an_exact_cut_is_of_a_recorded_step() -> None:
    """The mark says that its step is recorded, unless the dense part is missing, or rows are."""
    fields = {"step": 4, "time_us": 4, "now_s": 4, "changed_s": 4, "is_recorded": True}
    marks = StepMarkPolicy()
    exact = marks.judge(FlushOutcome(**fields, remainders=(NO_REMAINDER, NO_REMAINDER)))
    assert exact.mark == StepMark(4, 4, True, True)
    without_dense = marks.judge(FlushOutcome(**fields, remainders=(NO_REMAINDER, NO_REMAINDER), lacks_dense=True))
    assert without_dense.mark == StepMark(4, 4, False, False)
    assert marks.judge(FlushOutcome(**fields, remainders=(BEGINS, NO_REMAINDER))).mark is None


def test_a_pass_ends_when_both_parts_have_come_to_their_end() -> None:
    """What was dirty at a step is out when each part has gone round, whichever is the slower."""
    assert marks_of((BEGINS, BEGINS), (WRAPS, GOES_ON), (BEGINS, GOES_ON), (GOES_ON, WRAPS)) == [
        None,
        None,
        None,
        (1, False),
    ]
    assert marks_of((BEGINS, NO_REMAINDER), (GOES_ON, WRAPS), (WRAPS, WRAPS))[-1] == (1, False)


def test_a_part_in_the_middle_goes_round_twice() -> None:
    """When a pass ends while the other part is amid its rows, what lies before its cursor needs a second round."""
    first = [(BEGINS, BEGINS), (GOES_ON, WRAPS), (WRAPS, GOES_ON)]
    # The second pass begins at step 3, where the device stands in the middle.
    assert marks_of(*first, (WRAPS, WRAPS), (WRAPS, WRAPS)) == [None, None, (1, False), None, (3, False)]


def test_a_restart_forgets_the_running_pass() -> None:
    """After rows were taken back, a pass begins anew at the next flush."""
    assert marks_of((BEGINS, BEGINS), (WRAPS, WRAPS), restarts_at=2) == [None, None]
    assert marks_of((BEGINS, BEGINS), (WRAPS, WRAPS), (WRAPS, WRAPS), restarts_at=2)[2] == (2, False)


def test_rows_that_wait_complete_nothing() -> None:
    """A flush that holds rows back has no mark and ends the pass; the next pass begins without what came before."""
    marks = StepMarkPolicy()
    found = []
    for step, (host, holds_back) in enumerate(
        [(BEGINS, False), (WRAPS, True), (BEGINS, False), (WRAPS, False), (NO_REMAINDER, False)], 1
    ):
        cut = FlushOutcome(
            step=step, time_us=0, now_s=step, changed_s=step, remainders=(host, NO_REMAINDER), holds_back=holds_back
        )
        judgment = marks.judge(cut)
        marks.accept(judgment)
        found.append((judgment.mark and (judgment.mark.step, judgment.mark.is_exact_cut), judgment.dirty_since_s))
    assert found == [(None, 1), (None, 2), (None, 1), ((3, False), 1), ((5, True), 3)]


def test_dirty_since_is_the_oldest_change() -> None:
    """Lag is counted from the pass's beginning for what it left, and from the next change after an exact cut."""
    marks = StepMarkPolicy()
    seen = []
    for step, remainders in enumerate(
        [(BEGINS, NO_REMAINDER), (WRAPS, NO_REMAINDER), (NO_REMAINDER, NO_REMAINDER), (NO_REMAINDER, NO_REMAINDER)], 1
    ):
        marked = marks.judge(
            FlushOutcome(step=step, time_us=0, now_s=step, changed_s=step - 0.5, remainders=remainders)
        )
        marks.accept(marked)
        seen.append(marked.dirty_since_s)
    assert seen == [0.5, 0.5, 1, 3.5]


def test_a_judgement_that_is_not_accepted_changes_nothing() -> None:
    """A flush that was not sent has not ended a pass, nor begun one."""
    marks = StepMarkPolicy()
    cut = FlushOutcome(step=1, time_us=5, now_s=1.0, changed_s=1.0, remainders=(BEGINS, NO_REMAINDER))
    assert marks.judge(cut).mark is None
    assert not marks.is_in_pass
    marks.accept(marks.judge(cut))
    assert marks.is_in_pass
    end = FlushOutcome(step=2, time_us=6, now_s=2.0, changed_s=2.0, remainders=(WRAPS, NO_REMAINDER))
    assert marks.judge(end).mark == marks.judge(end).mark == StepMark(1, 5, False)
