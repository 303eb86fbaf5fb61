"""When windows of batches are written, on a clock of the test's; `test_applier.py` has it with a store."""

from __future__ import annotations

import pytest
from row_batches import SPEC, make_batch

from headrace.paramserver.store.apply_backlog import Backlog
from headrace.paramserver.store.pending import Part, PendingRows
from headrace.schemas.row_records import RecordLayout

LAYOUT = RecordLayout(SPEC, SPEC.whole)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    """A backlog of windows of 300 bytes, three batches each."""
    return Backlog(newest_seq=0, window_bytes=300, hold_s=2.0, quiet_s=0.5, clock=clock)


def _add(backlog: Backlog, *seqs: int) -> list[bool]:
    return [backlog.add(make_batch(seq, size_bytes=100), []) for seq in seqs]


def _take(backlog: Backlog, *stop_seqs: int) -> list[int]:
    return [entry.batch.seq for entry in backlog.take_entries(stop_seqs)]


def test_a_window_is_due_when_it_is_full_or_asked_for(backlog: Backlog) -> None:
    """Fewer batches wait for others until somebody wants the first of them; the applier looks at the first and last."""
    assert _add(backlog, 1, 2, 3) == [True, False, True]
    assert backlog.is_window_due
    assert _take(backlog) == [1, 2, 3]
    _add(backlog, 4, 5)
    assert not backlog.is_window_due
    backlog.apply_now(3)
    assert not backlog.is_window_due
    backlog.apply_now(4)
    assert backlog.is_window_due


def test_a_window_has_one_batch_at_least_and_ends_where_somebody_looks(backlog: Backlog) -> None:
    """Its size is bounded but for a single batch, and no position that is asked for lies within it."""
    backlog.add(make_batch(1, size_bytes=900), [])
    _add(backlog, 2, 3, 4, 5)
    assert _take(backlog) == [1]
    assert _take(backlog, 1, 3, 9) == [2, 3]
    assert _take(backlog, 3) == [4, 5]
    assert backlog.hold_ends_s is None


def test_a_window_counts_what_coalescing_takes(backlog: Backlog) -> None:
    """Many short rows make a shorter window: their index takes more memory than their frame."""
    rows = PendingRows(1, LAYOUT)
    batches = [make_batch(seq, range(50), size_bytes=100) for seq in (1, 2)]
    for batch in batches:
        backlog.add(batch, [(rows, Part.of_delta(batch.deltas[0], batch))])
    assert _take(backlog) == [1]
    assert _take(backlog) == [2]


def test_rows_are_held_for_so_long_and_not_when_nothing_comes(backlog: Backlog, clock: Clock) -> None:
    """The first of them has waited two seconds, or the last came half a second ago; then nothing is held."""
    assert backlog.hold_ends_s is None
    for clock.now_s in (10.0, 10.4, 10.8, 11.2, 11.6):
        _add(backlog, backlog.newest_seq + 1)
    assert backlog.hold_ends_s == 12.0
    clock.now_s = 11.9
    assert not backlog.apply_held()
    clock.now_s = 12.0
    assert backlog.apply_held()
    assert backlog.hold_ends_s is None
    while backlog.is_window_due:
        backlog.take_entries([])
    _add(backlog, 6)
    assert backlog.hold_ends_s == 12.5


def test_nothing_is_held_where_nothing_is_to_wait(clock: Clock) -> None:
    """With a hold of 0 each batch is due at once."""
    backlog = Backlog(newest_seq=0, window_bytes=300, hold_s=0.0, quiet_s=0.5, clock=clock)
    assert _add(backlog, 1) == [True]
    assert backlog.is_window_due
    assert backlog.hold_ends_s is None
