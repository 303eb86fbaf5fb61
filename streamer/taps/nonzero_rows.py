"""Which rows of a gradient or a state are not all zero, bit for bit."""

from __future__ import annotations

import torch

__all__ = ["rows_with_any_bit"]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    is_changed = gradient.detach().contiguous().view(_INT_OF_SIZE[size]).any(dim=1)
    if waits:
        return is_changed.nonzero().reshape(-1)
    return torch.where(is_changed, torch.arange(is_changed.numel(), device=is_changed.device), -1)
