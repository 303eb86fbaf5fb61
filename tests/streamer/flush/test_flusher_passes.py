"""More dirty rows than a staging buffer holds: in which parts they go out, and what the marks then promise."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from trainer_tables import SMALL_BYTES, WIDE, Submitted, Trained, rows_of, taken

from headrace.kernels.dirty_sets import DirtyRows


def test_more_than_a_buffer_goes_out_in_parts() -> None:
    """The parts of a large dirty set carry no mark until the last, which is exact when nothing changed meanwhile."""
    table = Trained(num_rows=2000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(2000))
    seen: list[int] = []
    for step in range(1, 10):
        submitted.flusher.on_step(step)
        submitted.release()
        flush = submitted.flushes[-1]
        seen += taken(flush)
        if flush.mark is not None:
            break
    assert len(submitted.flushes) == 3
    assert [flush.mark is None for flush in submitted.flushes] == [True, True, False]
    assert flush.mark is not None
    assert (flush.mark.step, flush.mark.is_exact_cut) == (3, True)
    assert sorted(seen) == list(range(2000))


def test_hot_low_rows_do_not_starve_high_ones() -> None:
    """Rows dirty when a pass began all leave before it is marked, however often others change meanwhile."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(3000))
    sent: set[int] = set()
    marks = []
    for step in range(1, 20):
        table.mark(range(1500))  # more than a buffer, every step
        submitted.flusher.on_step(step)
        submitted.release()
        flush = submitted.flushes[-1]
        sent.update(taken(flush))
        if flush.mark is not None:
            marks.append((flush.mark.step, flush.mark.is_exact_cut, step))
            if len(marks) == 1:
                assert sent == set(range(3000))
    assert marks[0] == (1, False, 4)
    assert len(marks) > 3
    assert all(not is_exact and marked < step for marked, is_exact, step in marks)


def test_row_that_changes_during_a_pass_goes_once_a_flush() -> None:
    """A row that waits in the backlog and changes again is sent once, with its newest value."""
    table = Trained(num_rows=1200, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.update(range(1200), 1.0)
    submitted.flusher.on_step(1)
    submitted.release()
    table.update([3, 1150], 2.0)
    submitted.flusher.on_step(2)
    rows = taken(submitted.flushes[1])
    assert len(rows) == len(set(rows))
    assert {3, 1150} < set(rows)
    values = {row: np.frombuffer(data, "<f4")[0] for _, _, row, data in rows_of(submitted.flushes[1], 1)}
    assert (values[3], values[1150], values[1149]) == (2.0, 2.0, 1.0)


def test_mark_of_an_earlier_step_is_a_message_of_its_own() -> None:
    """The end of a pass is marked by an empty message with the step at which it began."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(3000))
    for step in range(1, 5):
        table.mark(range(1500))
        submitted.flusher.on_step(step)
        submitted.release()
    messages = list(submitted.flushes[-1].messages(0, 2**20))
    assert [(m.step, m.ends_step, bool(m.deltas)) for m in messages] == [(4, False, True), (1, True, False)]
    assert not messages[-1].is_exact_cut


def _pass_steps(submitted: Submitted, now: list[float], num_steps: int) -> list[int]:
    """Make steps of 0.1 s in which a flush takes 10 ms more; return those at which rows went out."""
    submitted.cost = lambda: now.__setitem__(0, now[0] + 0.01)
    steps = []
    for step in range(num_steps):
        now[0] += 0.1
        before = len(submitted.flushes)
        submitted.flusher.on_step(step)
        if any(taken(flush) for flush in submitted.flushes[before:]):
            steps.append(step)
        submitted.release()
    return steps


def test_a_pass_keeps_to_the_budget() -> None:
    """While more is dirty than a buffer holds, flushes do not wait to become older, and cost what they may."""
    now = [100.0]
    table = Trained(num_rows=1000, dim=64)
    submitted = Submitted([table], freshness_s=60, max_cost_percent=5, staging_bytes=2**16, clock=lambda: now[0])
    submitted.flusher.on_step(0)  # the first after a table was added does not wait
    submitted.release()
    table.mark(range(1000))
    now[0] += 60
    assert _pass_steps(submitted, now, 12) == [0, 2, 4, 6, 8]
    assert not submitted.flusher.num_dirty_rows


def test_a_whole_table_is_urgent_once() -> None:
    """All rows of a table that is added, or that a shard has lost, go out at once, and cost later flushes nothing."""
    now = [100.0]
    table = Trained(num_rows=1000, dim=64)
    submitted = Submitted([table], freshness_s=60, max_cost_percent=1, staging_bytes=2**16, clock=lambda: now[0])
    table.mark(range(1000))
    assert _pass_steps(submitted, now, 10) == [0, 1, 2, 3, 4]
    submitted.flusher.mark_all()
    assert _pass_steps(submitted, now, 10) == [0, 1, 2, 3, 4]
    table.mark([5])
    now[0] += 60
    assert _pass_steps(submitted, now, 1) == [0]


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 1199), max_size=400), st.booleans(), st.booleans()), min_size=1, max_size=25
    )
)
def test_marks_keep_their_promise(steps: list[tuple[list[int], bool, bool]]) -> None:
    """At an exact mark the store equals the tables; at any mark no row is older than the marked step left it."""
    tables = [Trained("a.weight", 700, 40), Trained("b.weight", 500, 40)]
    for table in tables:
        table.weights.detach().zero_()  # older than any step
    submitted = Submitted(tables, staging_bytes=SMALL_BYTES)
    stored = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
    history: dict[int, dict[str, list[float]]] = {}
    for step, (rows, releases, is_wide) in enumerate(steps, 1):
        tables[0].update([row for row in rows if row < 700] + (list(range(700)) if is_wide else []), float(step))
        tables[1].update([row - 700 for row in rows if row >= 700], float(step))
        now = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
        history[step] = now
        num_before = len(submitted.flushes)
        submitted.flusher.on_step(step)
        for flush in submitted.flushes[num_before:]:
            for _, fqn, row, data in rows_of(flush, 1):
                stored[fqn][row] = float(np.frombuffer(data, "<f4")[0])
            if flush.mark is not None and flush.mark.is_exact_cut:
                assert stored == now
            elif flush.mark is not None:
                then = history[flush.mark.step]
                assert all(s >= t for fqn in then for s, t in zip(stored[fqn], then[fqn], strict=True))
        if releases:
            submitted.release()
    submitted.release()
    for _ in range(5):
        submitted.flusher.on_step(len(steps) + 1)
        submitted.release()
    assert submitted.flusher.num_dirty_rows == 0


def test_a_pass_takes_no_second_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """More dirty rows than a buffer holds go out of the one bitmap that a table has."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    monkeypatch.setattr(DirtyRows, "__init__", lambda *_: pytest.fail("a second bitmap"))
    table.mark(range(3000))
    for step in range(1, 9):
        table.mark(range(1500))
        submitted.flusher.on_step(step)
        submitted.release()
