"""Which raw id each row of a zero-collision-hash table stands for, and which rows were given to another id.

Source: `torchrec/modules/mc_modules.py` (`MCHManagedCollisionModule`), torchrec 1.8.0.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.model_tree import is_a

__all__ = ["RowIdentities"]

_NO_ID = torch.iinfo(torch.int64).max
_NOTHING = -1


class RowIdentities:
    """The identities of the rows of one table, or of the shard of it that is here.

    Thread: the training thread's.
    """

    def __init__(self, fqn: str, module: Any, row_offset: int) -> None:
        """Look at the module that maps raw ids to rows.

        Args:
            fqn: The table, for the error.
            module: `MCHManagedCollisionModule`.
            row_offset: Global id of local row 0.

        Raises:
            UnsupportedModelError: It is of another kind.
        """
        if not is_a(module, "MCHManagedCollisionModule"):
            raise UnsupportedModelError(
                f"table {fqn!r}: {type(module).__name__} does not say which raw id a row stands for; "
                f"use MCHManagedCollisionModule"
            )
        self._module = module
        self._row_offset = row_offset
        self._num_rows = 0
        self._version: tuple[int, int] | None = None
        self._of_row = torch.empty(0, dtype=torch.int64)
        self._told = self._of_row

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows; from now on, rows that are given to another id are remembered.

        Raises:
            UnsupportedModelError: The module maps ids to other rows than those.
        """
        slots = self._module._mch_remapped_ids_mapping - self._row_offset
        if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < num_rows):
            raise UnsupportedModelError(
                f"table {fqn!r}: ids are mapped to rows {int(slots.min())} to {int(slots.max())} of the {num_rows} here"
            )
        self._num_rows = num_rows
        self._told = self()

    def __call__(self) -> torch.Tensor:
        """Return int64[num_rows]: the raw id of each row, -1 where none is mapped to it."""
        raw_ids, slots = self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping
        # Both are written in place, and torch counts that.
        version = (raw_ids._version, slots._version)
        if version != self._version:
            of_row = torch.full((self._num_rows,), _NOTHING, dtype=torch.int64, device=raw_ids.device)
            is_mapped = raw_ids != _NO_ID
            of_row[slots[is_mapped] - self._row_offset] = raw_ids[is_mapped]
            self._of_row, self._version = of_row, version
        return self._of_row

    def take_reassigned(self) -> torch.Tensor | None:
        """Return the local rows whose identity has changed since this was last asked; None if there are none."""
        now = self()
        if now is self._told:
            return None
        slots = (now != self._told).nonzero().reshape(-1)
        self._told = now
        return slots if slots.numel() else None
