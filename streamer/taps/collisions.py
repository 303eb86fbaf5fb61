"""Modules that give the rows of tables to raw ids (managed collisions): the id behind each row, and evicted rows.

Multi-probe hashing may keep runtime meta with each id: a count of look-ups, or numbers of the user's.

Source: `torchrec/modules/{mc_modules,hash_mc_modules}.py` and `torchrec/distributed/mc_embedding_modules.py`, torchrec
1.8.0; `fbgemm_gpu/src/faster_hash_ops/faster_hash.cu`, fbgemm-gpu 1.8.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.hooks import Override
from headrace.streamer.taps.model_tree import or_without

__all__ = ["EvictionListener", "Evictions", "IdentitySource", "identities_of"]

# The placeholder of `MCHManagedCollisionModule` for a row without a raw id, and ours, which multi-probe hashing shares.
_NO_RAW_ID = torch.iinfo(torch.int64).max
_NO_IDENTITY = -1


class IdentitySource(Protocol):
    """Knows the raw id behind each local row of a table."""

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows; called once, before the others."""

    def __call__(self) -> torch.Tensor:
        """Return int64[num_rows]: the raw id of each row, -1 for none."""

    def meta(self) -> torch.Tensor | None:
        """Return `[num_rows, width]`, what is kept with each row's raw id, or None if nothing is; always alike."""

    def take_reassigned(self) -> torch.Tensor | None:
        """Return local rows, int64[n], that have to be sent because their raw id has changed; None for no rows."""

    def watch(self, mark: Callable[[torch.Tensor], None]) -> Sequence[Removable]:
        """Have `mark` called with local rows, int64[n], whose raw id or meta may change unseen by `take_reassigned`.

        Return what ends it; nothing if `take_reassigned` sees all.
        """


def identities_of(fqn: str, module: Any, row_offset: int = 0) -> IdentitySource:
    """Return the identities of a table by the module that gives its rows to raw ids; local row 0 is row `row_offset`.

    Raises:
        UnsupportedModelError: The module is of an unknown kind.
    """
    if is_a(module, "MCHManagedCollisionModule"):
        return _MchIdentities(module, row_offset)
    if is_a(module, "HashZchManagedCollisionModule"):
        return _HashZchIdentities(module)
    raise UnsupportedModelError(
        f"table {fqn!r}: {type(module).__name__} does not say which raw id a row stands for; "
        f"use MCHManagedCollisionModule or HashZchManagedCollisionModule{or_without(fqn)}"
    )


class _MchIdentities:
    """The raw ids of an `MCHManagedCollisionModule`, which has a sorted list of ids, each with its row."""

    def __init__(self, module: Any, row_offset: int) -> None:
        self._module = module
        self._row_offset = row_offset
        self._num_rows = 0
        self._version: tuple[int, int] | None = None
        self._identities = torch.empty(0, dtype=torch.int64, device="cpu")
        self._last_taken = self._identities

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows, and refuse ids mapped to others; `take_reassigned` counts from now on."""
        slots = self._module._mch_remapped_ids_mapping - self._row_offset
        if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < num_rows):
            slots_here = f"{int(slots.min())} to {int(slots.max())}"
            raise UnsupportedModelError(
                f"table {fqn!r}: ids are mapped to rows {slots_here} of the {num_rows} here: give its collision module "
                f"the table's zch_size{or_without(fqn)}"
            )
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

    def meta(self) -> None:
        """Return None: the module keeps only what it evicts by."""

    def take_reassigned(self) -> torch.Tensor | None:
        """Return the local rows whose identity has changed since the last call; None for no rows."""
        now = self()
        if now is self._last_taken:
            return None
        slots = (now != self._last_taken).nonzero().reshape(-1)
        self._last_taken = now
        return slots if slots.numel() else None

    def watch(self, mark: Callable[[torch.Tensor], None]) -> tuple[()]:
        """Do nothing: `take_reassigned` sees all."""
        return ()


class _HashZchIdentities:
    """The raw ids of a `HashZchManagedCollisionModule` (multi-probe hashing), which has one for each row.

    A lookup in training mode writes them in a kernel, which torch does not count, and only for rows that it looks up:
    a new id takes an empty row, or evicts another id from its row. So it does with the runtime meta; the user's own is
    also written by lookups in evaluation, or without one.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._num_rows = 0
        self._seen: tuple[int, ...] = ()

    def check(self, fqn: str, num_rows: int) -> None:
        """Take the number of local rows, and refuse another number of ids; `take_reassigned` counts from now on."""
        if self().shape != (num_rows,):
            raise UnsupportedModelError(
                f"table {fqn!r}: {self().numel()} ids are known for the {num_rows} rows here: give its collision "
                f"module the table's zch_size{or_without(fqn)}"
            )
        self._num_rows = num_rows
        self._seen = self._snapshot()

    def __call__(self) -> torch.Tensor:
        """Return int64[num_rows], the live ids: the raw id of each row, -1 for none."""
        identities: torch.Tensor = self._module._hash_zch_identities.detach().view(-1)
        return identities

    def meta(self) -> torch.Tensor | None:
        """Return int64[num_rows, width], live: the number of lookups of each row's id, or the user's numbers."""
        meta: torch.Tensor | None = self._module._hash_zch_runtime_meta
        return None if meta is None else meta.detach()

    def take_reassigned(self) -> torch.Tensor | None:
        """Return all local rows if torch counted a write to ids or meta (a loaded checkpoint); None for no rows."""
        seen, self._seen = self._seen, self._snapshot()
        return None if seen == self._seen else torch.arange(self._num_rows, dtype=torch.int64, device="cpu")

    def watch(self, mark: Callable[[torch.Tensor], None]) -> Sequence[Removable]:
        """Have `mark` called with the rows of each lookup in training mode, and of each write of the user's meta."""
        module = self._module
        num_rows = self._num_rows

        def remap(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
            features = original(*args, **kwargs)
            if module.training:
                first_row = module._output_segments[module._start_bucket]
                for feature in features.values():
                    mark(feature.values() - first_row)
            return features

        def update(original: Callable[..., None], raw_ids: Any, remapped_ids: torch.Tensor, weights: Any) -> None:
            original(raw_ids, remapped_ids, weights)
            mark(remapped_ids % num_rows)  # -1, for an id without a row, writes the last row

        return Override(module, "remap", remap), Override(module, "update_runtime_meta", update)

    def _snapshot(self) -> tuple[int, ...]:
        kept = (self._module._hash_zch_identities, self._module._hash_zch_runtime_meta)
        return tuple(number for each in kept if each is not None for number in (each.data_ptr(), each._version))


class Removable(Protocol):
    """What can be taken away again."""

    def remove(self) -> None:
        """Take it away. Idempotent."""


class EvictionListener(Protocol):
    """Hears of the rows of a sharded module that are reset because they get other raw ids."""

    def before_eviction(self) -> None:
        """Mark what else has been written so far."""

    def after_eviction(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Mark the evicted rows, local int64[n], of each table that has any, by name; not called after a failure."""


class Evictions:
    """The evictions of a sharded managed-collision module.

    Its forward resets the weights and states of evicted rows. torch counts that as a write to the whole table, if at
    all: the listeners need to know before and after.
    """

    def __init__(self, module: Any, prefix: str) -> None:
        """Prepare to listen to a module, whose tables are named `PREFIX.NAME.weight`."""
        self._module = module
        self._prefix = prefix
        self._listeners: list[EvictionListener] = []
        self._override: Override | None = None

    def add(self, listener: EvictionListener) -> None:
        """Tell a listener of all evictions from now on."""
        if not self._listeners:
            self._override = Override(self._module, "_evict", self._call)
        self._listeners.append(listener)

    def remove(self, listener: EvictionListener) -> None:
        """Stop telling it. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners and self._override is not None:
                self._override.remove()

    def _call(self, evict: Any, rows_by_table: Mapping[str, torch.Tensor | None]) -> None:
        rows = {f"{self._prefix}.{name}.weight": rows for name, rows in rows_by_table.items() if rows is not None}
        listeners = list(self._listeners) if rows else []
        for listener in listeners:
            listener.before_eviction()
        evict(rows_by_table)
        for listener in listeners:
            listener.after_eviction(rows)
