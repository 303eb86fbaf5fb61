"""Detect writes to a table's memory by something other than its optimizer: aliased memory and uncounted writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import UninitializedParameter

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.local_parts import local_tensor
from headrace.streamer.taps.model_tree import or_without

__all__ = ["RowProbe", "check_not_aliased", "check_not_shared"]

_NUM_PROBED_ROWS = 8


def check_not_shared(names: Sequence[str], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse memory shared between processes: torch counts only the writes of this process."""
    # is_shared() is always true on a GPU.
    on_cpu = [local_tensor(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    if any(tensor.is_shared() for tensor in on_cpu):  # type: ignore[no-untyped-call]
        raise UnsupportedModelError(
            f"table {', '.join(map(repr, names))} is in memory shared with other processes, whose writes cannot be "
            f"detected: attach a copy of the model (copy.deepcopy) that only this process trains{or_without(*names)}"
        )


def check_not_aliased(tables: Iterable[tuple[str, torch.nn.Parameter]], others: Iterable[torch.nn.Parameter]) -> None:
    """Refuse tables whose memory overlaps another trained parameter, because nothing observes that one's updates.

    `others` are all trained parameters, the tables' among them.
    """
    names = {id(parameter): name for name, parameter in tables}
    # A lazy module's parameter has no memory before its first forward, and gets its own then.
    trained = [each for each in others if each.requires_grad and not isinstance(each, UninitializedParameter)]
    spans = {id(each): _span(local_tensor(each)) for each in trained}
    farthest, farthest_end = 0, 0  # of the parameters so far, the one that ends last
    for parameter, (first, end) in sorted(spans.items(), key=lambda item: item[1]):
        name = names.get(farthest) or names.get(parameter)
        if first < farthest_end and first < end and name is not None:
            raise UnsupportedModelError(
                f"table {name!r} shares memory with another parameter, whose updates would be missed: tie them with "
                f"one nn.Parameter (b.weight = a.weight), or give each its own memory{or_without(name)}"
            )
        if end > farthest_end:
            farthest, farthest_end = parameter, end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's address range; of a non-contiguous tensor (columns of a wider one) only its first element."""
    if not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    num_elements = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.element_size()


class RowProbe:
    """Compares a few rows of a table with their last known values, to detect writes through `weight.data`.

    Such a write changes no version counter. The common ones (averages that a trainer copies into the model, a
    checkpoint loaded that way) change the whole table, so they change the rows trained last, which are probed; before
    the first step rows from all over the table are. A write to a few other rows is missed: the probe catches common
    mistakes only.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._row_ids = np.empty(0, np.int64)
        self._bits = b""

    def watch(self, row_ids: torch.Tensor) -> None:
        """Probe some of these rows, int64[n], local, from the next `remember` on."""
        if row_ids.numel():
            # Copy: a view would keep all ids alive.
            self._row_ids = row_ids[:: _stride(row_ids.numel())].cpu().numpy().copy()

    def remember(self, weights: torch.Tensor) -> None:
        """Store the probed rows' values in the local weights, `[rows, columns]` without gradient."""
        num_rows = weights.shape[0]
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._row_ids = np.arange(0, num_rows, _stride(num_rows))
        self._bits = _bits(weights, self._row_ids)

    def has_changed(self, weights: torch.Tensor) -> bool:
        """Return whether a probed row differs from what was last remembered; False before the first `remember`.

        REQUIRES: `weights` has the shape that it had then.
        """
        return self._bits != b"" and _bits(weights, self._row_ids) != self._bits


def _stride(num_rows: int) -> int:
    return max(1, -(-num_rows // _NUM_PROBED_ROWS))


def _bits(weights: torch.Tensor, row_ids: npt.NDArray[np.int64]) -> bytes:
    """Return rows as bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    if weights.device.type != "cpu" or weights.stride(-1) != 1:
        weights, row_ids = weights[torch.from_numpy(row_ids)].cpu().contiguous(), np.arange(len(row_ids))
    # numpy indexes in a few µs, torch in tens.
    return weights.view(torch.uint8).numpy()[row_ids].tobytes()
