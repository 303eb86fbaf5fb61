"""Rows that lie in many places of memory, indexed as if they were one array, without copying them together first.

The rows that wait to be written are in the frames in which they came, hundreds of buffers. numpy can index one array:
so here that array is the process's whole address space, in which a row begins at any byte. Where a row lies is where
its array begins and how many rows are before it; both are checked before the memory is touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ScatteredRows"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# numpy takes no buffer that begins at 0. Linux gives a process nothing above unless it asks for it.
_FIRST, _END = 4096, 2**48
_SPACE = memoryview((ctypes.c_ubyte * (_END - _FIRST)).from_address(_FIRST))
# Arrays of a few rows, as batches of many tables have them, are copied together: to ask where each lies takes longer.
_SHORT_BYTES = 2048
# Longer rows would make the array longer than numpy can count, and are few enough to be copied one by one.
_MAX_ROW_BYTES = 2**14


class ScatteredRows:
    """The rows of several arrays. Keeps the arrays, or copies of short ones, so their memory stays.

    Thread: any.
    """

    def __init__(self, arrays: Sequence[_Array], dtype: np.dtype[Any]) -> None:
        """Take the rows of some arrays.

        Args:
            arrays: Each `dtype[n]`, contiguous, any alignment.
            dtype: Of a row; no Python objects.
        """
        assert all(array.dtype == dtype and array.flags.c_contiguous for array in arrays)
        self._arrays = arrays
        self._dtype = dtype
        self._sizes = np.array([array.size for array in arrays], np.int64)
        row_bytes = dtype.itemsize
        if (
            len(arrays) > 1
            and row_bytes <= _MAX_ROW_BYTES
            and self._sizes.sum() * row_bytes <= _SHORT_BYTES * len(arrays)
        ):
            self._arrays = [np.concatenate(arrays)]
            self._places = _place_of(self._arrays[0]) + (np.cumsum(self._sizes) - self._sizes) * row_bytes
        else:
            self._places = np.array([_place_of(array) for array in arrays], np.int64)

    def take(self, which: _Ids, rows: _Ids) -> _Array:
        """Return copies of some rows, `dtype[m]`.

        Args:
            which: int64[m], index of the array of each.
            rows: int64[m], its position there.

        Raises:
            IndexError: There is no such row.
        """
        # Read without a sign, what is below zero is beyond the end.
        if np.any(rows.view(np.uint64) >= self._sizes[which].view(np.uint64)):
            raise IndexError("a row beyond the end of its array")
        size_bytes = self._dtype.itemsize
        if size_bytes > _MAX_ROW_BYTES:
            copies = np.empty(rows.size, self._dtype)
            for at, (array, row) in enumerate(zip(which.tolist(), rows.tolist(), strict=True)):
                copies[at] = self._arrays[array][row]
            return copies
        space = np.ndarray((_END - _FIRST - size_bytes,), self._dtype, _SPACE, 0, (1,))
        found: _Array = space[self._places[which] + rows * size_bytes]
        return found


def _place_of(array: _Array) -> int:
    place: int = array.__array_interface__["data"][0] - _FIRST
    return place
