"""Which rows of a gradient or a state are not all zero, bit for bit."""

from __future__ import annotations

import torch

from headrace.streamer.taps.local_parts import is_dtensor, local_tensor

__all__ = ["changed_rows", "rows_with_any_bit"]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_rows(gradient: torch.Tensor, parameter: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Return int64 ids, local, of the rows that have a gradient.

    Args:
        gradient: Of a whole parameter; may be sparse, or a DTensor.
        parameter: It.
        waits: As for `rows_with_any_bit`.
    """
    if gradient.is_sparse:
        if not gradient._nnz():  # numpy's view of its indices would keep the next backward from growing them
            return torch.empty(0, dtype=torch.int64)
        return gradient._indices()[0]  # a gradient may be sparse by its columns too
    if is_dtensor(gradient):
        # Every rank is here: the optimizer's step has just done the same.
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return rows_with_any_bit(local_tensor(gradient), waits=waits)


def rows_with_any_bit(gradient: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Return int64 ids of the rows of `[rows, dim]` that are not all +0.0.

    Bits, not values: NaN counts, and -0.0 too, since subtracting it turns a weight of -0.0 into 0.0.

    Args:
        gradient: Or a state.
        waits: Wait for a device, whose answer says how many they are; else there is an id for each row, -1 for one that
            is all +0.0.
    """
    if not gradient.numel():
        return torch.empty(0, dtype=torch.int64)
    row_bytes = gradient.shape[1] * gradient.element_size()
    whole = gradient.detach().contiguous()
    # DistributedDataParallel's buckets hold gradients side by side, so one may begin at half of a larger element.
    offset_bytes = whole.storage_offset() * whole.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0 and offset_bytes % size == 0)
    is_changed = whole.view(_INT_OF_SIZE[size]).any(dim=1)
    if waits:
        return is_changed.nonzero().reshape(-1)
    return torch.where(is_changed, torch.arange(is_changed.numel(), device=is_changed.device), -1)
