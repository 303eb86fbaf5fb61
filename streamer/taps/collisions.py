"""The raw id behind each row of a table whose rows a module gives to raw ids (managed collisions).

Source: `torchrec/modules/mc_modules.py` (`MCHManagedCollisionModule`), torchrec 1.8.0.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import UnsupportedModelError

__all__ = ["IdentitySource", "RowIdentities"]

# The module's placeholder for a row without a raw id, and ours.
_NO_RAW_ID = torch.iinfo(torch.int64).max
_NO_IDENTITY = -1


class IdentitySource(Protocol):
    """Knows the raw id behind each local row of a table."""

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows; called once, before the others."""

    def __call__(self) -> torch.Tensor:
        """Return int64[num_rows]: the raw id of each row, -1 for none."""

    def take_reassigned(self) -> torch.Tensor | None:
        """Return local rows, int64[n], that have to be sent because their raw id has changed; None for no rows."""


class RowIdentities:
    """The raw id behind each local row of a zero-collision-hash table."""

    def __init__(self, fqn: str, module: Any, row_offset: int) -> None:
        """Take the module that maps raw ids to rows; refuse other kinds. Local row 0 is row `row_offset`."""
        if not is_a(module, "MCHManagedCollisionModule"):
            raise UnsupportedModelError(
                f"table {fqn!r}: {type(module).__name__} does not say which raw id a row stands for; "
                f"use MCHManagedCollisionModule"
            )
        self._module = module
        self._row_offset = row_offset
        self._num_rows = 0
        self._version: tuple[int, int] | None = None
        self._identities = torch.empty(0, dtype=torch.int64)
        self._last_taken = self._identities

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows, and refuse ids mapped to others; `take_reassigned` counts from now on."""
        slots = self._module._mch_remapped_ids_mapping - self._row_offset
        if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < num_rows):
            slots_here = f"{int(slots.min())} to {int(slots.max())}"
            raise UnsupportedModelError(f"table {fqn!r}: ids are mapped to rows {slots_here} of the {num_rows} here")
        self._num_rows = num_rows
        self._last_taken = self()

    def __call__(self) -> torch.Tensor:
        """Return int64[num_rows]: the raw id of each row, -1 for none."""
        raw_ids, slots = self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping
        # The module writes both in place, which torch counts.
        version = (raw_ids._version, slots._version)
        if version != self._version:
            identities = torch.full((self._num_rows,), _NO_IDENTITY, dtype=torch.int64, device=raw_ids.device)
            is_mapped = raw_ids != _NO_RAW_ID
            identities[slots[is_mapped] - self._row_offset] = raw_ids[is_mapped]
            self._identities, self._version = identities, version
        return self._identities

    def take_reassigned(self) -> torch.Tensor | None:
        """Return the local rows whose identity has changed since the last call; None for no rows."""
        now = self()
        if now is self._last_taken:
            return None
        slots = (now != self._last_taken).nonzero().reshape(-1)
        self._last_taken = now
        return slots if slots.numel() else None
