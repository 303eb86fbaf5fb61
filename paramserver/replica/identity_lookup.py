"""Rows by identity out of one copy of the tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.replica.generation import Generation
from headrace.schemas.errors import RequestError

__all__ = ["look_by_identity"]

_Ids = npt.NDArray[np.int64]


def look_by_identity(
    generation: Generation, fqn: str, identities: _Ids, default: torch.Tensor
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Return the rows that identities are mapped to, all as of one moment, and which are missing.

    Args:
        generation: The copy.
        fqn: A table of it.
        identities: int64[n], any order, also repeated.
        default: `[dim]` in the table's dtype: what is returned where no row has the identity.

    Returns:
        `[n, dim]`, a copy; and bool[n], which identities have no row.

    Raises:
        RequestError: The table has no identities.

    Thread: any.
    """
    if fqn not in generation.identities:
        raise RequestError(f"table {fqn!r} has no identities; its rows are looked up by their row ids")

    def look() -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        row_ids = generation.identities[fqn].find(identities)
        is_found = row_ids >= 0
        if is_found.all():
            return generation.tables[fqn].gather(row_ids)
        found, is_gone = generation.tables[fqn].gather(row_ids[is_found])
        rows = default.repeat(identities.size, 1)
        rows[torch.from_numpy(is_found)] = found
        missing = ~is_found
        missing[is_found] = is_gone
        return rows, missing

    return generation.gate.read(look)
