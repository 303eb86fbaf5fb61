"""Memory of runs: lent once at a time, and again when no view is left."""

from __future__ import annotations

import gc

import numpy as np

from headrace.paramserver.record_pool import RecordPool

RECORD = np.dtype([("id", "<i8"), ("values", "V1016")])
MIB = 1 << 20


def _address(array: np.ndarray[tuple[int], np.dtype[np.void]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again_when_no_view_is_left() -> None:
    """Any view, also of a field or a slice, keeps the memory; the last one's end frees it."""
    pool = RecordPool(max_array_bytes=8 * MIB, max_idle_bytes=8 * MIB, poison=0xDB)
    array = pool.empty(2048, RECORD)
    assert array.shape == (2048,)
    assert array.flags.writeable
    array["id"] = np.arange(2048)
    place, view = _address(array), array["id"][10:].view(np.uint64)[5:20]
    del array
    gc.collect()
    assert pool.idle_bytes == 0
    assert view.tolist() == list(range(15, 30))
    other = pool.empty(2048, RECORD)
    assert _address(other) != place
    del view
    gc.collect()
    assert pool.idle_bytes == 2 * MIB
    again = pool.empty(2000, RECORD)
    assert _address(again) == place
    assert again.size == 2000
    assert pool.idle_bytes == 0


def test_short_and_long_arrays_are_not_kept() -> None:
    """They come from numpy, and an empty one is no exception."""
    pool = RecordPool(max_array_bytes=2 * MIB, max_idle_bytes=8 * MIB)
    for size in (0, 1, 1023, 4096):
        array = pool.empty(size, RECORD)
        assert array.size == size
        del array
    gc.collect()
    assert pool.idle_bytes == 0


def test_idle_memory_is_bounded() -> None:
    """What does not fit beside the rest is freed."""
    pool = RecordPool(max_array_bytes=4 * MIB, max_idle_bytes=5 * MIB)
    arrays = [pool.empty(2048, RECORD) for _ in range(4)]
    assert len({_address(array) for array in arrays}) == 4
    arrays.clear()
    gc.collect()
    assert pool.idle_bytes == 4 * MIB
