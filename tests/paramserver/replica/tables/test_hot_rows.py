"""The cache in front of a table on disk: what stays, what goes, and that nothing stale enters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import numpy as np
import pytest

from headrace.paramserver.replica.tables.hot_rows import HotRows, HotRowStats, capacity_for, size_of_hot_rows

ROW_BYTES = 8


def _rows(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64).reshape(-1).view(f"V{ROW_BYTES}")


def _admit(hot: HotRows, ids: Any, *, values: Any = None, **settings: Any) -> list[bool]:
    ids = np.asarray(ids, np.int64)
    rows = _rows(ids * 10 if values is None else values)
    return hot.admit(ids, rows, np.ones(ids.size, bool), hot.ticket(ids), **settings).tolist()


def _look(hot: HotRows, ids: Any) -> list[int | None]:
    ids = np.asarray(ids, np.int64)
    out = np.zeros(ids.size, f"V{ROW_BYTES}")
    is_here, _ = hot.gather(ids, out)
    return [int(value) if here else None for value, here in zip(out.view(np.int64), is_here, strict=True)]


def test_a_free_place_is_taken_at_once() -> None:
    """While there is room a row enters with its first miss."""
    hot = HotRows(8, ROW_BYTES)
    assert _look(hot, [1, 2]) == [None, None]
    ids = np.array([1, 2])
    assert hot.admit(ids, _rows([5, 6]), np.array([True, False]), hot.ticket(ids)).all()
    out = np.zeros(4, f"V{ROW_BYTES}")
    is_here, is_present = hot.gather(np.array([2, 1, 3, 1]), out)
    assert is_here.tolist() == [True, True, False, True]
    assert is_present.tolist() == [False, True, False, True]
    assert out.view(np.int64).tolist() == [6, 5, 0, 5]
    assert hot.stats == HotRowStats(capacity=8, hits=3, misses=3, admitted=2, evicted=0)
    assert hot.stats.hit_rate == 0.5 and HotRows(8, ROW_BYTES).stats.hit_rate == 0.0


def test_rows_that_come_once_push_nothing_out() -> None:
    """A full set admits a row only at its second miss, or on request."""
    hot = HotRows(8, ROW_BYTES)
    assert all(_admit(hot, range(8)))
    assert _admit(hot, [100]) == [False] and _look(hot, range(8)) == [i * 10 for i in range(8)]
    assert _admit(hot, [100]) == [True] and _look(hot, [100, 0]) == [1000, None]
    assert _admit(hot, [200], is_wanted=True) == [True] and _look(hot, [1]) == [None]
    assert (hot.stats.admitted, hot.stats.evicted) == (10, 2)


def test_the_longest_unused_row_goes() -> None:
    """Each set behaves like a least-recently-used list, for any batches."""
    rng = np.random.default_rng(3)
    hot = HotRows(8, ROW_BYTES)
    model: OrderedDict[int, int] = OrderedDict()
    for _ in range(300):
        used = int(rng.integers(0, 20))
        assert _look(hot, [used]) == [model.get(used)]
        if used in model:
            model.move_to_end(used)
        new = [int(i) for i in np.unique(rng.integers(0, 20, rng.integers(1, 5))) if i not in model]
        if new:
            assert all(_admit(hot, new, is_wanted=True))
            for _ in range(max(len(model) + len(new) - 8, 0)):
                model.popitem(last=False)
            # Of one batch all are equally old: look at them one by one, so that the model's order is theirs.
            for row in new:
                model[row] = row * 10
                assert _look(hot, [row]) == [row * 10]


def test_many_sets_hold_what_they_say() -> None:
    """After random batches each cached row is the admitted one, within the capacity."""
    rng = np.random.default_rng(4)
    hot = HotRows(128, ROW_BYTES)
    newest: dict[int, int] = {}
    for turn in range(200):
        ids = np.unique(rng.integers(0, 1000, rng.integers(1, 300)))
        here = hot.has(ids)
        entered = np.array(_admit(hot, ids, values=ids * 1000 + turn, is_wanted=bool(turn % 2)))
        assert not (entered & here).any()
        newest |= {int(row): int(row) * 1000 + turn for row in ids[entered]}
        found = _look(hot, range(1000))
        assert all(value in (None, newest.get(row)) for row, value in enumerate(found))
        assert sum(value is not None for value in found) <= hot.capacity
    stats = hot.stats
    assert sum(value is not None for value in found) == stats.admitted - stats.evicted > 100


def test_what_was_read_before_a_write_stays_out() -> None:
    """A ticket from before or during a write admits nothing; a later one does."""
    hot = HotRows(8, ROW_BYTES)
    ids, present = np.array([1, 2]), np.ones(2, bool)
    before = hot.ticket(ids)
    hot.begin_write(ids[:1])
    during = hot.ticket(ids)
    assert hot.admit(ids[:1], _rows([0]), present[:1], before[:1]).tolist() == [False]
    assert hot.admit(ids[:1], _rows([0]), present[:1], during[:1]).tolist() == [False]
    hot.end_write(ids[:1], _rows([7]), ids[:1], present[:1])
    assert hot.admit(ids, _rows([0, 2]), present, before).tolist() == [False, True]
    assert hot.admit(ids[:1], _rows([0]), present[:1], during[:1]).tolist() == [False]
    assert _look(hot, ids) == [None, 2]
    assert _admit(hot, [1], values=[7]) == [True] and _look(hot, ids) == [7, 2]


def test_a_write_changes_the_rows_that_are_here() -> None:
    """Cached rows of a write are hidden until they have changed; others do not enter."""
    hot = HotRows(8, ROW_BYTES)
    _admit(hot, [1, 2])
    ids = np.array([2, 3])
    hot.begin_write(ids)
    # The disk may have its new value already, and a reader may have seen that.
    assert _look(hot, [1, 2]) == [10, None]
    hot.end_write(ids, _rows([21, 31]), ids, np.array([False, True]))
    assert _look(hot, [1, 2, 3]) == [10, 21, None]
    assert hot.gather(ids[:1], np.zeros(1, f"V{ROW_BYTES}"))[1].tolist() == [False]


@pytest.mark.parametrize("there", [[], list(range(8))])
def test_who_is_interrupted_leaves_no_row_under_another_id(there: list[int]) -> None:
    """An interrupted admission leaves no row under a wrong id, and the row enters the next time."""

    class Interrupted:
        def __getitem__(self, _: object) -> None:
            raise KeyboardInterrupt

    hot, ids = HotRows(8, ROW_BYTES), np.array([100])
    _admit(hot, there)
    with pytest.raises(KeyboardInterrupt):
        hot.admit(ids, cast("Any", Interrupted()), np.ones(1, bool), hot.ticket(ids), is_wanted=True)
    assert _look(hot, [100, *there[1:]]) == [None, *(row * 10 for row in there[1:])]
    assert _admit(hot, [100]) == [True] and _look(hot, [100, *there[1:]]) == [1000, *(row * 10 for row in there[1:])]
    assert _admit(hot, range(200, 207)) == [not there] * 7  # and it is known how many places are free


def test_pinned_rows_stay() -> None:
    """A pinned row stays until all its pins are gone; a fully pinned set admits nothing."""
    hot = HotRows(8, ROW_BYTES)
    _admit(hot, range(4))
    assert hot.pin(np.array([0, 1, 50])).tolist() == [True, True, False]
    assert hot.pin(np.array([0])).tolist() == [True]
    for base in range(100, 200, 8):
        _admit(hot, range(base, base + 8), is_wanted=True)
    assert _look(hot, [0, 1, 2]) == [0, 10, None]
    assert sum(_admit(hot, range(300, 308), is_wanted=True, is_pinned=True)) == 6
    assert not any(_admit(hot, range(400, 408), is_wanted=True))
    hot.unpin(np.array([0, 1]))
    _admit(hot, range(500, 508), is_wanted=True)
    assert _look(hot, [0, 1]) == [0, None]
    hot.unpin(np.array([0]))
    _admit(hot, range(600, 608), is_wanted=True)
    assert _look(hot, [0]) == [None]


def test_memory_is_as_planned() -> None:
    """The capacity fits the memory with its bookkeeping, in whole sets, and little beyond the table."""
    capacity = capacity_for(1 << 20, 256, 0)
    assert capacity % 8 == 0 and 0.8 * (1 << 20) < capacity * 256 < 1 << 20
    assert capacity_for(1, 256, 0) == 8 and capacity_for(1 << 30, 4, 100) == 200
    hot = HotRows(capacity, 256)
    arrays = [value for value in vars(hot).values() if isinstance(value, np.ndarray)]
    assert hot.size_bytes == size_of_hot_rows(capacity, 256) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("factor", [1, 2, 7])
def test_a_larger_cache_has_all_rows_and_pins(factor: int) -> None:
    """Growing keeps rows, pins and tickets, and makes room."""
    hot, ids = HotRows(64, ROW_BYTES), np.arange(200)
    _admit(hot, ids)
    here, gone = ids[hot.has(ids)], ids[~hot.has(ids)]
    before_write = hot.ticket(gone)
    hot.begin_write(gone)
    hot.end_write(gone, _rows([77]), here[:1], np.array([True]))
    assert hot.pin(here).all()
    hot.grow(factor)
    assert hot.capacity == 64 * factor
    assert _look(hot, here) == [77, *(here[1:] * 10).tolist()]
    assert not hot.admit(gone, _rows(gone), np.ones(gone.size, bool), before_write, is_wanted=True).any()
    assert sum(_admit(hot, gone, is_wanted=True)) >= (0, 0, 32, 0, 0, 0, 0, gone.size // 2)[factor]
    assert hot.has(here).all()
    hot.unpin(here)
