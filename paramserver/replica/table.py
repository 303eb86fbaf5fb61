"""One table of a replica, in memory: dense by row id, or sparse through a map of ids to slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.pending import RowDelta
from headrace.paramserver.replica.id_map import IdMap
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, DType, TableSpec

__all__ = ["TORCH_DTYPES", "ReplicaTable", "size_of_table"]

_Ids = npt.NDArray[np.int64]

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
}
_MISSING, _PRESENT, _DELETED = 0, 1, 2
_VERSION_BYTES = 12
_PRESENCE_BYTES = 1
_FIRST_SLOTS = 1024


def size_of_table(spec: TableSpec) -> int:
    """Return the memory that a dense table takes, bytes; of a sparse one, which grows, what it begins with."""
    row_bytes = spec.dim * spec.dtype.size_bytes + _PRESENCE_BYTES + _VERSION_BYTES
    return (spec.num_rows or _FIRST_SLOTS) * row_bytes


class _Versions:
    """(epoch, step) and presence of each slot, of one column shard."""

    def __init__(self, num_slots: int) -> None:
        self.epochs = np.zeros(num_slots, np.uint32)
        self.steps = np.zeros(num_slots, np.int64)
        self.presence = np.zeros(num_slots, np.uint8)

    def grown(self, num_slots: int) -> _Versions:
        grown = _Versions(num_slots)
        for name in ("epochs", "steps", "presence"):
            old = getattr(self, name)
            getattr(grown, name)[: old.size] = old
        return grown


class ReplicaTable:
    """Rows of one table as lookups see them.

    A missing or deleted row holds the table's default, so that a lookup is one gather, whatever is missing. Slot 0 of a
    sparse table is for all ids that it does not have.

    Thread: one applies; lookups overlap with it and are of use only when nothing was applied meanwhile (`VersionGate`).

    Attributes:
        spec: What the table is.
        weights: `[slots, dim]` on the CPU.
        num_present: Rows that are present.
    """

    def __init__(self, spec: TableSpec, *, default: torch.Tensor | None = None) -> None:
        """Make an empty table.

        Args:
            spec: What it is; a table of virtual ids (`num_rows` 0) is sparse.
            default: `[dim]`, what missing rows look like; zeros when None.

        Raises:
            ConfigError: The default is of another shape.
        """
        dtype = TORCH_DTYPES[spec.dtype]
        if default is not None and default.shape != (spec.dim,):
            raise ConfigError(f"table {spec.fqn!r}: a default of shape {tuple(default.shape)}, its dim is {spec.dim}")
        self.spec = spec
        self.num_present = 0
        self._default = torch.zeros(spec.dim, dtype=dtype) if default is None else default.to("cpu", dtype)
        self._map = None if spec.num_rows else IdMap()
        num_slots = spec.num_rows or _FIRST_SLOTS
        self.weights = self._new_weights(num_slots)
        self._presence = np.zeros(num_slots, np.uint8)
        self._versions: dict[ColumnShard, _Versions] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        versions = sum(v.epochs.nbytes + v.steps.nbytes + v.presence.nbytes for v in self._versions.values())
        return self.weights.nbytes + self._presence.nbytes + versions + (self._map.size_bytes if self._map else 0)

    def slots_of(self, ids: _Ids) -> _Ids:
        """Return where rows lie in `weights`.

        Args:
            ids: int64[n], valid ids of the table.
        """
        return ids if self._map is None else self._map.find(ids) + 1

    def missing(self, slots: _Ids) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which of some slots hold no present row."""
        missing: npt.NDArray[np.bool_] = self._presence[slots] != _PRESENT
        return missing

    def apply(self, delta: RowDelta, *, epoch: int, step: int, is_conditional: bool) -> None:
        """Take a delta's rows and deletions as the store does: later ones win, conditional ones when not older."""
        self._write(delta.layout, delta.row_ids, delta.columns["weights"], _PRESENT, epoch, step, is_conditional)
        if delta.deleted_row_ids is not None:
            self._write(delta.layout, delta.deleted_row_ids, None, _DELETED, epoch, step, is_conditional)

    def load(self, row_ids: _Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Take rows that are read from a store, with a version of their own each.

        Args:
            row_ids: int64[n], each once.
            weights: Contiguous bytes of `n` rows of the shard's columns.
            presence: uint8[n], `RowPresence`; rows that are missing are passed over.
            epochs: One a row.
            steps: One a row.
            shard: Columns that are given.
        """
        for wanted in (_PRESENT, _DELETED):
            at = np.flatnonzero(presence == wanted)
            if at.size:
                layout = RecordLayout(self.spec, shard)
                rows = np.frombuffer(weights, layout.dtype["weights"])[at]
                data = rows.tobytes() if wanted == _PRESENT else None
                self._write(layout, row_ids[at], data, wanted, epochs[at], steps[at], False)

    def _write(
        self, layout: RecordLayout, ids: _Ids, data: Any, presence: int, epoch: Any, step: Any, is_conditional: bool
    ) -> None:
        if not ids.size:
            return
        shard = layout.shard
        slots = self._slots_for(ids)
        versions = self._versions_of(shard)
        keep: Any = None
        if is_conditional:
            old_epochs, old_steps = versions.epochs[slots], versions.steps[slots]
            keep = (old_epochs < epoch) | ((old_epochs == epoch) & (old_steps <= step))
            slots = slots[keep]
        versions.epochs[slots], versions.steps[slots] = epoch, step
        # As opaque bytes: one memcpy a row, whatever the type, and from buffers that torch would not take.
        item_bytes = self.spec.dtype.size_bytes
        first, width = shard.offset * item_bytes, shard.width * item_bytes
        rows = _as_bytes(self.weights)[:, first : first + width].view(f"V{width}")[:, 0]
        if data is None:
            rows[slots] = _as_bytes(self._default[None])[:, first : first + width].view(f"V{width}")[0, 0]
        else:
            values = np.frombuffer(data, f"V{width}")
            rows[slots] = values if keep is None else values[keep]
        versions.presence[slots] = presence
        self._set_presence(slots)

    def _set_presence(self, slots: _Ids) -> None:
        """A row is present where any of its column shards is."""
        of_shards = [versions.presence[slots] for versions in self._versions.values()]
        now = of_shards[0] if len(of_shards) == 1 else np.where((np.stack(of_shards) == _PRESENT).any(axis=0), 1, 2)
        self.num_present += int((now == _PRESENT).sum()) - int((self._presence[slots] == _PRESENT).sum())
        self._presence[slots] = now

    def _versions_of(self, shard: ColumnShard) -> _Versions:
        versions = self._versions.get(shard)
        if versions is None:
            versions = self._versions[shard] = _Versions(self._presence.size)
        return versions

    def _slots_for(self, ids: _Ids) -> _Ids:
        if self._map is None:
            return ids
        slots = self._map.insert(ids) + 1
        if len(self._map) + 1 > self._presence.size:
            self._grow(2 * (len(self._map) + 1))
        return slots

    def _grow(self, num_slots: int) -> None:
        weights = self._new_weights(num_slots)
        weights[: self.weights.shape[0]] = self.weights
        presence = np.zeros(num_slots, np.uint8)
        presence[: self._presence.size] = self._presence
        self._versions = {shard: versions.grown(num_slots) for shard, versions in self._versions.items()}
        self.weights, self._presence = weights, presence

    def _new_weights(self, num_slots: int) -> torch.Tensor:
        if not self._default.any():
            return torch.zeros(num_slots, self.spec.dim, dtype=self._default.dtype)
        return self._default.repeat(num_slots, 1)


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return uint8[rows, bytes] over the memory of a contiguous `[rows, width]` tensor."""
    view: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return view
