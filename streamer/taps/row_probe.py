"""A look at some rows of a table, for writes that torch counts nowhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["RowProbe"]

_NUM_ROWS = 8


class RowProbe:
    """A few rows of a table, as they were when it was last seen.

    A write through `weight.data` leaves no trace on the parameter. Those that are common are of the whole table:
    averages (EMA) that a trainer copies into the model, or a checkpoint that is loaded so. They change the rows that
    were trained last, so these are looked at; before the first step, some from all over the table. A write to few rows
    is not seen, unless one of them is looked at: this saves from a common mistake, and proves nothing.

    Sees nothing before the first `keep`.

    Thread: the training thread's.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._row_ids = np.empty(0, np.int64)
        self._bits = b""

    def aim(self, row_ids: torch.Tensor) -> None:
        """Look at some of these rows, from the next `keep` on.

        Args:
            row_ids: int64[n], local; may repeat.
        """
        if row_ids.numel():
            # A copy, since a view would hold all of them.
            self._row_ids = row_ids[:: _stride(row_ids.numel())].cpu().numpy().copy()

    def keep(self, weights: torch.Tensor) -> None:
        """Remember the rows as they are now.

        Args:
            weights: `[rows, columns]`, local, without gradient.
        """
        num_rows = weights.shape[0]
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._row_ids = np.arange(0, num_rows, _stride(num_rows))
        self._bits = _bits(weights, self._row_ids)

    def is_off(self, weights: torch.Tensor) -> bool:
        """Return whether one of the rows has changed since the last `keep`. REQUIRES: the shape is that of then."""
        return self._bits != b"" and _bits(weights, self._row_ids) != self._bits


def _stride(num_rows: int) -> int:
    """Return the distance at which up to `_NUM_ROWS` of so many rows lie."""
    return max(1, -(-num_rows // _NUM_ROWS))


def _bits(weights: torch.Tensor, row_ids: npt.NDArray[np.int64]) -> bytes:
    """Return copies of rows, as bytes: so NaN equals itself, and 0.0 does not equal -0.0."""
    if weights.device.type != "cpu" or weights.stride(-1) != 1:
        weights, row_ids = weights[torch.from_numpy(row_ids)].cpu().contiguous(), np.arange(len(row_ids))
    # numpy's indexing takes a few µs, torch's some tens.
    return weights.view(torch.uint8).numpy()[row_ids].tobytes()
