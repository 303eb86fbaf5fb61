"""The map of ids to slots, against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.paramserver.replica.tables.id_map import IdMap, _first_cells

_ids = st.one_of(st.integers(0, 50), st.integers(0, 2**63 - 1))


@settings(max_examples=60)
@given(st.lists(st.lists(_ids, unique=True, max_size=80), max_size=12), st.lists(_ids, max_size=40))
def test_agrees_with_a_dict(batches: list[list[int]], others: list[int]) -> None:
    """Each id keeps its first slot, and unknown ids are not found."""
    ids_of, found = IdMap(capacity=1), {}
    for batch in batches:
        slots = ids_of.insert(np.array(batch, np.int64))
        for row, slot in zip(batch, slots.tolist(), strict=True):
            assert found.setdefault(row, slot) == slot
    assert len(ids_of) == len(found) and sorted(found.values()) == list(range(1, len(found) + 1))
    wanted = np.array([*found, *others, *others], np.int64)
    assert ids_of.find(wanted).tolist() == [found.get(row, 0) for row in wanted.tolist()]


def test_grows_to_a_million() -> None:
    """A million ids in runs are all found, and cells stay at most half full."""
    ids_of = IdMap()
    ids = np.arange(1_000_000, dtype=np.int64) * 64 + (1 << 40)
    for start in range(0, ids.size, 100_000):
        ids_of.insert(ids[start : start + 100_000])
    assert np.array_equal(ids_of.find(ids), np.arange(1, ids.size + 1))
    assert 32 * ids.size <= ids_of.size_bytes <= 64 * ids.size
    assert (ids_of.find(ids + 1) == 0).all()


def test_long_chains_are_followed_to_their_end() -> None:
    """Ids that share their first cell are found, across the end of the cells, and absent ones are not."""
    ids_of = IdMap(capacity=4096)
    candidates = np.arange(4_000_000, dtype=np.int64)
    cells_of = ids_of._cells
    cells = _first_cells(candidates, cells_of)
    same = candidates[cells == len(cells_of) - 3]
    assert same.size > 200
    assert ids_of.insert(same[:150]).tolist() == list(range(1, 151))
    assert ids_of.find(same[:150]).tolist() == list(range(1, 151))
    assert (ids_of.find(same[150:]) == 0).all()


def test_ids_that_differ_high_up_do_not_meet() -> None:
    """Ids that agree in their low or high half spread over the cells."""
    for ids in (np.arange(4096, dtype=np.int64) << 32, np.arange(4096, dtype=np.int64) << 51, np.arange(4096) * 4097):
        cells = _first_cells(ids, IdMap(capacity=4096)._cells)
        assert np.unique(cells).size > 2000
