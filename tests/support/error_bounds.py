"""By how much a column of a quantized row may differ from the value that was quantized."""

from __future__ import annotations

import torch

from headrace.kernels.precisions import Precision

__all__ = ["error_bound"]

_INT8_EPSILON = 1e-8


def error_bound(rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return the largest possible error of a column of each row, float64 `[n]`.

    Args:
        rows: `[n, dim]`, finite, within the range of the precision (|x| ≤ 65,504 for float16, and for the bias and
            scale of int4).
        precision: Precision of the stored rows.
    """
    wide = rows.to(torch.float64)
    largest = wide.abs().amax(dim=1)
    if precision == "fp32":
        return torch.zeros_like(largest)
    if precision == "fp16":
        return largest * 2**-11 + 2**-25
    if precision == "bf16":
        return largest * 2**-8 + 2**-134
    extent = wide.amax(dim=1) - wide.amin(dim=1)
    if precision == "int8":
        # Half a step, the effect of epsilon on the highest code, and float32 arithmetic.
        return extent / 255 / 2 + _INT8_EPSILON + (largest + extent) * 2**-22
    # Half a step; the scale (and so the range) and the bias are rounded to float16.
    return extent / 15 / 2 * (1 + 2**-10) + extent * 2**-10 + largest * 2**-11 + 2**-20
