"""The dense tensors of a replica's copy: one whole part per model, and those that are being put together behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from headrace.paramserver.reading.dense_parts import (
    DenseAssemblies,
    DensePart,
    choose_model,
    dense_sets,
    part_bytes,
)
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.errors import UnavailableError
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.table_names import model_of, table_name
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import Version

__all__ = ["MAX_STEPS_AHEAD", "DenseTensors", "memory_of_dense"]

MAX_STEPS_AHEAD = 4
"""Dense steps that a shard may be ahead of another before no more of it is fetched."""

_BEFORE_ANY: Version = (0, -1)


def memory_of_dense(specs: Iterable[TableSpec]) -> int:
    """Return the memory of dense tensors while all shards are up: the visible part, and the next one."""
    return 2 * part_bytes(specs)


class DenseTensors:
    """The dense tensors of the models of one copy.

    A part becomes visible as a whole, and only a newer one replaces it. A visible part never changes.

    Thread: one thread adds and shows; any may read `part`.
    """

    def __init__(self) -> None:
        self._sets: dict[str, dict[str, TableSpec]] = {}
        self._holders: dict[str, frozenset[int]] = {}  # shards that have rows of a model's tensors
        self._assemblies: dict[str, DenseAssemblies] = {}
        self._visible: dict[str, DensePart] = {}
        self._newest_of: dict[tuple[str, int], Version] = {}  # the newest rows of a model in a shard's log

    def follow(self, catalogs: Sequence[Catalog], wants: Callable[[str], bool]) -> None:
        """Take the tensors that the copy wants, and their owners, from the shards' catalogs, after each change."""
        self._sets = dense_sets(
            (table.spec, 0 if table.owner is None else table.owner.epoch)
            for catalog in catalogs
            for table in catalog
            if wants(table.spec.fqn)
        )
        for model, specs in self._sets.items():
            self._holders[model] = frozenset(
                int(shard)
                for spec in specs.values()
                for shard in np.unique(shards_of_rows(spec.seed, np.arange(spec.num_rows), len(catalogs)))
            )
            for shard, catalog in enumerate(catalogs):
                owners = [owner.epoch for name in specs if (owner := catalog.owner_of(name)) is not None]
                # The owner's hello fences older epochs: no older rows follow in this log.
                self._note(model, shard, (max(owners, default=0), -1))

    @property
    def models(self) -> list[str]:
        """Models that have dense tensors."""
        return sorted(self._sets)

    @property
    def size_bytes(self) -> int:
        """Memory of the visible parts and of those behind them."""
        behind = sum(assemblies.size_bytes for assemblies in list(self._assemblies.values()))
        return behind + sum(part_bytes(part.specs.values()) for part in list(self._visible.values()))

    def specs_of(self, model: str) -> dict[str, TableSpec]:
        """Return the specs of a model's current tensors, by name."""
        return self._sets.get(model, {})

    def take(self, shard: int, deltas: Iterable[RowDelta], version: Version) -> None:
        """Add rows of a record of a shard's log."""
        for delta in deltas:
            model = model_of(delta.spec.fqn)
            self._note(model, shard, version)
            self._assemblies_of(model).add(delta.spec, delta.row_ids, delta.columns, version)

    def load(self, spec: TableSpec, row_ids: Any, weights: Any, presence: Any, epochs: Any, steps: Any) -> None:
        """Add rows that were read from a store, with a presence and version each; see `ReplicaTable.load`."""
        columns = {"weights": np.asarray(weights)}
        self._assemblies_of(model_of(spec.fqn)).load(spec, row_ids, columns, presence, epochs, steps)

    def show(self, cut: Version | None) -> None:
        """Make each model's newest whole part visible: at a cut not one that is newer. Enter the seqlock before."""
        for model, part in self._next(cut):
            self._visible[model] = part
            self._assemblies[model].forget(part.version)

    def has_next(self, cut: Version | None) -> bool:
        """Return whether `show` would show anything."""
        return bool(self._next(cut))

    def _next(self, cut: Version | None) -> list[tuple[str, DensePart]]:
        # Before any step, rows come from a restored server, and belong to no step.
        up_to = cut if cut is not None and cut[0] else None
        parts = [(model, self._assemblies_of(model).whole(specs, up_to=up_to)) for model, specs in self._sets.items()]
        return [(model, part) for model, part in parts if part is not None]

    def can_show(self, cut: Version) -> bool:
        """Return whether no model has a newer part of exactly this cut that is not whole: steps would be mixed."""
        for model, assemblies in self._assemblies.items():
            is_whole = assemblies.is_whole(cut, self.specs_of(model))
            is_begun = cut in assemblies.versions or cut <= assemblies.newest_given_up
            if cut > self._version(model) and is_begun and not is_whole:
                return False
        return True

    def adopt(self, other: DenseTensors) -> None:
        """Take over visible parts of another copy of the same store that are newer. Enter the seqlock before."""
        for model, part in other._visible.items():
            if model in self._sets and part.version > self._version(model):
                self._visible[model] = part
                self._assemblies_of(model).forget(part.version)

    def is_ahead(self, shard: int) -> bool:
        """Return whether a shard has brought so many dense steps more than another that they take too much memory."""
        return any(self._is_ahead(model, shard) for model in list(self._assemblies))

    def _is_ahead(self, model: str, shard: int) -> bool:
        holders = self._holders.get(model, frozenset())
        if shard not in holders:
            return False
        newest = {holder: self._newest_of.get((model, holder), _BEFORE_ANY) for holder in holders}
        slowest = min(newest.values())
        ahead = [version for version in self._assemblies[model].versions if slowest < version <= newest[shard]]
        return len(ahead) >= MAX_STEPS_AHEAD

    def part(self, model: str | None) -> DensePart:
        """Return a model's visible part, which never changes; None names the only model that has one.

        Raises:
            UnavailableError: No part is visible yet.
            UnknownTableError, RequestError: As for `choose_model`.
        """
        model = choose_model(self._sets.keys() | self._visible.keys(), model)
        part = self._visible.get(model)
        if part is None:
            seen = self._assemblies.get(model, DenseAssemblies()).describe(self.specs_of(model))
            raise UnavailableError(
                f"no whole dense part of model {model!r} yet ({seen}): one comes with the trainer's next dense step"
            )
        return part

    def find(self, name: str) -> str | None:
        """Return the dense tensor that a name, or a path in the only model with it, means; None if it means none."""
        names = {name, *(table_name(model, name) for model in self._sets)}
        return next((each for specs in self._sets.values() for each in specs if each in names), None)

    def _version(self, model: str) -> Version:
        return self._visible[model].version if model in self._visible else _BEFORE_ANY

    def _note(self, model: str, shard: int, version: Version) -> None:
        self._newest_of[model, shard] = max(version, self._newest_of.get((model, shard), _BEFORE_ANY))

    def _assemblies_of(self, model: str) -> DenseAssemblies:
        return self._assemblies.setdefault(model, DenseAssemblies())
