"""Opaque bytes that travel with rows: what RES calls runtime meta."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.schemas.errors import RequestError

__all__ = ["MAX_META_BYTES", "RowMeta", "check_meta"]

MAX_META_BYTES = 4096
"""Longest meta of one row; room for it is kept in every buffer."""

_Ids = npt.NDArray[np.int64]


class RowMeta:
    """The newest meta of each row of one table.

    Takes nothing before the first, then 4 bytes a row and the longest meta for each row. Not thread-safe: the training
    thread's.
    """

    def __init__(self, num_rows: int) -> None:
        """Begin with rows that have none."""
        self._num_rows = num_rows
        self._widths: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._data: npt.NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._known_widths: set[int] = set()

    @property
    def max_row_bytes(self) -> int:
        """Bytes of the longest so far."""
        return int(self._data.shape[1])

    @property
    def num_widths(self) -> int:
        """How many different lengths have come so far."""
        return len(self._known_widths)

    def put(self, local_ids: _Ids, meta: torch.Tensor) -> None:
        """Set the meta of some rows; its shape and type may differ from call to call.

        Args:
            local_ids: int64[n], each once.
            meta: `[n, any]`, any type and device.

        Raises:
            RequestError: It is longer than `MAX_META_BYTES` a row; nothing was set.
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
        """Return rows by the length of their meta, in their order: those of one message have equally long ones.

        Args:
            local_ids: int64[n].

        Returns:
            Pairs of bytes a row, 0 for none, and int64 ids.
        """
        if not self._widths.size:
            return [(0, local_ids)]
        widths = self._widths[local_ids]
        return [(int(width), local_ids[widths == width]) for width in np.unique(widths)]

    def gather(self, local_ids: _Ids, out: torch.Tensor) -> None:
        """Copy the meta of rows that have equally long ones.

        Args:
            local_ids: int64[n].
            out: uint8[n, width], to be filled.
        """
        np.take(self._data[:, : out.shape[1]], local_ids, axis=0, out=out.numpy(), mode="clip")


def check_meta(meta: torch.Tensor) -> None:
    """Check the meta of some rows, `[n, any]`.

    Raises:
        RequestError: It is longer than `MAX_META_BYTES` a row.
    """
    row_bytes = meta.numel() // max(1, meta.shape[0]) * meta.element_size()
    if row_bytes > MAX_META_BYTES:
        raise RequestError(f"runtime meta of {row_bytes} bytes a row; {MAX_META_BYTES} are the most")
