"""Rows of many buffers, indexed as if they were one array."""

from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.store.scattered_rows import ScatteredRows


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4, 8, 16, 31, 520, 2**14, 2**14 + 1, 2**17]),
    st.integers(0, 7),
    st.data(),
)
def test_rows_are_those_of_their_arrays(sizes: list[int], row_bytes: int, offset: int, data: st.DataObject) -> None:
    """Rows of any length and alignment are gathered in any order, also repeated."""
    rng = np.random.default_rng(row_bytes + offset)
    arrays = []
    for size in sizes:
        frame = memoryview(rng.bytes(offset + size * row_bytes))[offset:]
        arrays.append(np.frombuffer(frame, f"V{row_bytes}") if size else np.empty(0, f"V{row_bytes}"))
    rows = ScatteredRows(arrays, np.dtype(f"V{row_bytes}"))
    there = [(which, row) for which, size in enumerate(sizes) for row in range(size)]
    wanted = data.draw(st.lists(st.sampled_from(there), max_size=20)) if there else []
    which, at = np.array([pair[0] for pair in wanted], np.int64), np.array([pair[1] for pair in wanted], np.int64)
    expected = [arrays[pair[0]][pair[1]].tobytes() for pair in wanted]
    found = rows.take(which, at)
    assert (found.dtype, [row.tobytes() for row in found]) == (np.dtype(f"V{row_bytes}"), expected)
    assert found.base is None or found.flags.owndata


@pytest.mark.parametrize("row_bytes", [8, 4096, 2**15])
@pytest.mark.parametrize(("which", "row"), [(0, 3), (0, -1), (1, 0), (0, 2**60), (2, 0), (-3, 0)])
def test_an_index_outside_the_buffers_is_an_error(row_bytes: int, which: int, row: int) -> None:
    """Memory outside the buffers is not touched, however the rows are copied: together, in place or one by one."""
    arrays = [np.zeros(3, f"V{row_bytes}"), np.zeros(0, f"V{row_bytes}")]
    rows = ScatteredRows(arrays, np.dtype(f"V{row_bytes}"))
    with pytest.raises(IndexError):
        rows.take(np.array([0, which]), np.array([2, row]))


def test_memory_of_the_arrays_stays() -> None:
    """The buffers live as long as the object that indexes them."""

    def scattered() -> ScatteredRows:
        pages = mmap.mmap(-1, 1 << 20)  # unmapped, and so not readable, once nothing refers to it
        pages[:] = b"\x07" * (1 << 20)
        return ScatteredRows([np.frombuffer(pages, "V4096")], np.dtype("V4096"))

    rows = scattered()
    gc.collect()
    assert rows.take(np.array([0, 0]), np.array([0, 255])).tobytes() == b"\x07" * 8192
