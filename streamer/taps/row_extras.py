"""Opaque bytes that travel with rows beside weights, states and identities; RES calls them runtime meta."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.schemas.errors import RequestError

__all__ = ["MAX_META_BYTES", "RowMeta", "check_meta"]

MAX_META_BYTES = 4096
"""Longest meta of one row; each staging buffer has room for it."""

_Ids = npt.NDArray[np.int64]


class RowMeta:
    """The newest meta of each row of one table.

    Takes no memory before the first `put`, then 4 bytes plus the longest meta per row.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._widths: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._data: npt.NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._known_widths: set[int] = set()

    @property
    def max_row_bytes(self) -> int:
        """Length of the longest meta so far, bytes."""
        return int(self._data.shape[1])

    @property
    def num_widths(self) -> int:
        """Number of different lengths so far."""
        return len(self._known_widths)

    def put(self, local_ids: _Ids, meta: torch.Tensor) -> None:
        """Set the meta, `[n, any]` of any type and device, of unique rows, int64[n].

        Raises:
            RequestError: It is longer than `MAX_META_BYTES` per row; nothing was set.
        """
        check_meta(meta)
        if not meta.numel():
            return
        rows = meta.detach().reshape(local_ids.size, -1).contiguous().cpu().view(torch.uint8).numpy()
        width = rows.shape[1]
        if not self._widths.size:
            self._widths = np.zeros(self._num_rows, np.int32)
        if width > self.max_row_bytes or not self._data.size:
            data = np.zeros((self._num_rows, max(width, self.max_row_bytes)), np.uint8)
            data[: self._data.shape[0], : self._data.shape[1]] = self._data
            self._data = data
        self._known_widths.add(width)
        self._widths[local_ids] = width
        self._data[local_ids, :width] = rows

    def by_width(self, local_ids: _Ids) -> list[tuple[int, _Ids]]:
        """Group rows, int64[n], by the bytes of their meta (0 for none): a message holds rows of one length."""
        if not self._widths.size:
            return [(0, local_ids)]
        widths = self._widths[local_ids]
        return [(int(width), local_ids[widths == width]) for width in np.unique(widths)]

    def gather(self, local_ids: _Ids, out: torch.Tensor) -> None:
        """Copy the meta of rows, int64[n], into `out`, uint8[n, width]. REQUIRES: all have that length."""
        np.take(self._data[:, : out.shape[1]], local_ids, axis=0, out=out.numpy(), mode="clip")


def check_meta(meta: torch.Tensor) -> None:
    """Raise RequestError if the meta of some rows, `[n, any]`, is longer than `MAX_META_BYTES` per row."""
    row_bytes = meta.numel() // max(1, meta.shape[0]) * meta.element_size()
    if row_bytes > MAX_META_BYTES:
        raise RequestError(f"runtime meta of {row_bytes} bytes a row: at most {MAX_META_BYTES} are accepted")
