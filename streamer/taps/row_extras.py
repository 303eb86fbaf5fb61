"""Data that travels with rows beside weights and states: identities, and opaque bytes that RES calls runtime meta.

Source: `torchrec/modules/mc_modules.py` (`MCHManagedCollisionModule`), torchrec 1.8.0.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import RequestError, UnsupportedModelError

__all__ = ["MAX_META_BYTES", "IdentitySource", "RowIdentities", "RowMeta", "check_meta"]

MAX_META_BYTES = 4096
"""Longest meta of one row; each staging buffer has room for it."""

# The module's placeholder for a row without a raw id, and ours.
_NO_RAW_ID = torch.iinfo(torch.int64).max
_NO_IDENTITY = -1

_Ids = npt.NDArray[np.int64]


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


class RowMeta:
    """The newest meta of each row of one table.

    Takes no memory before the first `put`, then 4 bytes plus the longest meta per row.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._widths: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._data: npt.NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._known_widths: set[int] = set()

    @property
    def max_row_bytes(self) -> int:
        """Length of the longest meta so far, bytes."""
        return int(self._data.shape[1])

    @property
    def num_widths(self) -> int:
        """Number of different lengths so far."""
        return len(self._known_widths)

    def put(self, local_ids: _Ids, meta: torch.Tensor) -> None:
        """Set the meta, `[n, any]` of any type and device, of unique rows, int64[n].

        Raises:
            RequestError: It is longer than `MAX_META_BYTES` per row; nothing was set.
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
        """Group rows, int64[n], by the bytes of their meta (0 for none): a message holds rows of one length."""
        if not self._widths.size:
            return [(0, local_ids)]
        widths = self._widths[local_ids]
        return [(int(width), local_ids[widths == width]) for width in np.unique(widths)]

    def gather(self, local_ids: _Ids, out: torch.Tensor) -> None:
        """Copy the meta of rows, int64[n], into `out`, uint8[n, width]. REQUIRES: all have that length."""
        np.take(self._data[:, : out.shape[1]], local_ids, axis=0, out=out.numpy(), mode="clip")


def check_meta(meta: torch.Tensor) -> None:
    """Raise RequestError if the meta of some rows, `[n, any]`, is longer than `MAX_META_BYTES` per row."""
    row_bytes = meta.numel() // max(1, meta.shape[0]) * meta.element_size()
    if row_bytes > MAX_META_BYTES:
        raise RequestError(f"runtime meta of {row_bytes} bytes a row: at most {MAX_META_BYTES} are accepted")
