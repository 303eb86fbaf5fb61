"""Ids as callers give them: tensors, arrays, lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import RequestError

__all__ = ["row_ids_of"]


def row_ids_of(given: Any, what: str = "row ids") -> npt.NDArray[np.int64]:
    """Return ids as one contiguous array, int64[n]; it may share the memory of what was given.

    Args:
        given: Integers of any shape and type: a list, an array, or a torch tensor on any device.
        what: They are, for messages.

    Raises:
        RequestError: They are no integers. A mask is none: cast to int64, it would name the rows 0 and 1.
    """
    try:
        # A torch tensor, without an import of torch.
        ids = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as exc:  # ragged lists; types that numpy does not have
        raise RequestError(f"{what} of a {type(given).__name__} are not integers: {exc}".split("\n")[0]) from exc
    if ids.size and ids.dtype.kind not in "iu":
        advice = "; of a mask give the places, as mask.nonzero() has them" if ids.dtype.kind == "b" else ""
        raise RequestError(f"{what} are {ids.dtype} and not integers{advice}")
    return np.ascontiguousarray(ids.reshape(-1), np.int64)
