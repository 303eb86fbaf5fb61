"""The backlog's windows and holds, on a fake clock."""

from __future__ import annotations

import pytest
from row_batches import LAYOUT, make_batch, parts_of

from headrace.paramserver.store.backlog import Backlog
from headrace.paramserver.store.memtable import PendingRows


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
    """Fewer batches wait until somebody needs the first of them; the applier is woken by the first and the last."""
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
    """A window's size is bounded unless it is one batch, and no requested position lies within it."""
    backlog.add(make_batch(1, size_bytes=900), [])
    _add(backlog, 2, 3, 4, 5)
    assert _take(backlog) == [1]
    assert _take(backlog, 1, 3, 9) == [2, 3]
    assert _take(backlog, 3) == [4, 5]
    assert backlog.hold_ends_s is None


def test_a_window_counts_what_coalescing_takes(backlog: Backlog) -> None:
    """Many short rows make a shorter window: their index takes more memory than their frame."""
    rows = PendingRows(1, LAYOUT)
    for batch in (make_batch(1, range(50), size_bytes=100), make_batch(2, range(50), size_bytes=100)):
        backlog.add(batch, [(rows, part) for part in parts_of(batch)])
    assert [_take(backlog), _take(backlog)] == [[1], [2]]


def test_rows_are_held_for_so_long_and_not_when_nothing_comes(backlog: Backlog, clock: Clock) -> None:
    """A hold ends when the first row has waited two seconds, or the last came half a second ago."""
    assert backlog.hold_ends_s is None
    for clock.now_s in (10.0, 10.4, 10.8, 11.2, 11.6):
        _add(backlog, backlog.newest_seq + 1)
    assert backlog.hold_ends_s == 12.0
    clock.now_s = 11.9
    assert not backlog.end_hold()
    clock.now_s = 12.0
    assert backlog.end_hold()
    assert backlog.hold_ends_s is None
    while backlog.is_window_due:
        backlog.take_entries([])
    _add(backlog, 6)
    assert backlog.hold_ends_s == 12.5
    unheld = Backlog(newest_seq=0, window_bytes=300, hold_s=0.0, quiet_s=0.5, clock=clock)
    assert (_add(unheld, 1), unheld.is_window_due, unheld.hold_ends_s) == ([True], True, None)
