"""Dense parts: the dense tensors of one model, all of one version, put together from rows that come one by one. No I/O.

A trainer publishes all rows of all dense tensors with the version of the step, so a part is whole when every row of
every tensor has that version. Rows of several versions, in any order and repeated, are kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import RequestError, UnknownTableError
from headrace.schemas.row_records import PRESENT
from headrace.schemas.table_names import model_of, path_of
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import Version

__all__ = ["DenseAssemblies", "DensePart", "choose_model", "dense_sets", "part_bytes"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# Parts that are put together at the same time. Beyond that number the oldest is given up, unless all are small.
MAX_ASSEMBLIES, _SMALL_BYTES = 8, 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePart:
    """The dense tensors of one model at one step.

    Attributes:
        epoch: With `step`, the version of all rows.
        step: The trainer's step that published them.
        specs: By path.
        tensors: By path, of the tensor's shape and dtype (bfloat16 as uint16).
        states: Optimizer states by path and name, likewise; empty unless requested.
    """

    epoch: int
    step: int
    specs: dict[str, TableSpec]
    tensors: dict[str, _Array]
    states: dict[str, dict[str, _Array]]

    @property
    def version(self) -> Version:
        """(epoch, step)."""
        return self.epoch, self.step

    def rows_of(self, path: str, row_ids: _Ids) -> _Array:
        """Return rows of a tensor as they travel, dtype[n, dim]: the last row has zeros behind the last element."""
        dim, elements = self.specs[path].dim, self.tensors[path].reshape(-1)
        num_full = elements.size // dim
        rows, is_full = np.zeros((row_ids.size, dim), elements.dtype), row_ids < num_full
        rows[is_full] = elements[: num_full * dim].reshape(num_full, dim)[row_ids[is_full]]
        rows[~is_full, : elements.size % dim] = elements[num_full * dim :]
        return rows


def dense_sets(tables: Iterable[tuple[TableSpec, int]]) -> dict[str, dict[str, TableSpec]]:
    """Return each model's current dense tensors, by model and name.

    These are the ones whose owner has the newest epoch: every start of a trainer names all of them, and tensors of an
    older architecture stay behind.

    Args:
        tables: Spec and epoch of the owner (0 without one) of each table; the tables of several shards may be chained.
    """
    specs: dict[str, TableSpec] = {}
    epochs: dict[str, int] = {}
    for spec, epoch in tables:
        if spec.is_dense:
            specs[spec.fqn], epochs[spec.fqn] = spec, max(epoch, epochs.get(spec.fqn, 0))
    newest: dict[str, int] = {}
    for name, epoch in epochs.items():
        newest[model_of(name)] = max(epoch, newest.get(model_of(name), 0))
    return {
        model: {name: specs[name] for name in sorted(specs) if (model_of(name), epochs[name]) == (model, epoch)}
        for model, epoch in newest.items()
    }


def choose_model(models: Collection[str], wanted: str | None) -> str:
    """Return the model whose dense tensors a user means; `models` are those that have some.

    Raises:
        UnknownTableError: The model has none, or no model has.
        RequestError: Several models have some and none is named.
    """
    known = ", ".join(sorted(models)) or "none"
    if wanted is None and len(models) > 1:
        raise RequestError(f"several models have dense tensors ({known}): name one (model=…)")
    if wanted is None and models:
        return next(iter(models))
    if wanted is None or wanted not in models:
        who = "no model has" if wanted is None else f"model {wanted!r} has no"
        raise UnknownTableError(
            f"{who} dense tensors here (models with some: {known}); a trainer publishes them with dense=[…] at attach"
        )
    return wanted


def part_bytes(specs: Iterable[TableSpec]) -> int:
    """Return the memory of the weights of dense tensors."""
    return sum(spec.num_rows * spec.dim * spec.dtype.size_bytes for spec in specs)


class _Tensor:
    """The rows of one tensor, of one version, as far as they have come."""

    __slots__ = ("_columns", "_is_here", "num_missing", "spec")

    def __init__(self, spec: TableSpec, columns: Iterable[str]) -> None:
        dtypes = {"weights": spec.dtype, **{state.name: state.dtype for state in spec.states}}
        self.spec = spec
        self.num_missing = spec.num_rows
        self._is_here = np.zeros(spec.num_rows, bool)
        self._columns = {name: np.zeros((spec.num_rows, spec.dim), dtypes[name].numpy) for name in columns}

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values()) + self._is_here.nbytes

    def add(self, row_ids: _Ids, columns: Mapping[str, Any]) -> None:
        for name, column in self._columns.items():
            column[row_ids] = np.frombuffer(columns[name], column.dtype).reshape(row_ids.size, self.spec.dim)
        self._is_here[row_ids] = True
        self.num_missing = self._is_here.size - int(np.count_nonzero(self._is_here))

    def values(self, name: str) -> _Array:
        assert self.spec.shape is not None
        return self._columns[name].reshape(-1)[: self.spec.num_elements].reshape(self.spec.shape)


class DenseAssemblies:
    """Parts of one model that are being put together, the newest few of them.

    Thread: one adds; others may read the counts.
    """

    def __init__(self, *, with_states: bool = False) -> None:
        """Begin without any rows; `with_states` keeps optimizer states, too."""
        self.newest_given_up: Version = (0, -1)  # of the parts that were given up for newer ones
        self._with_states = with_states
        self._tensors: dict[Version, dict[str, _Tensor]] = {}

    @property
    def versions(self) -> list[Version]:
        """Versions of the parts of which rows are here, ascending."""
        return sorted(list(self._tensors))

    @property
    def size_bytes(self) -> int:
        """Memory of all parts."""
        return sum(sum(tensor.size_bytes for tensor in list(part.values())) for part in list(self._tensors.values()))

    def add(self, spec: TableSpec, row_ids: _Ids, columns: Mapping[str, Any], version: Version) -> None:
        """Add rows of one tensor and version, int64[n]; a row that is here already is replaced.

        `columns` has n × dim contiguous elements for `weights` and, if they are kept, for each state by its name.
        """
        if version <= self.newest_given_up or not row_ids.size:
            return
        part = self._tensors.setdefault(version, {})
        if spec.fqn not in part:
            kept = ("weights", *(state.name for state in spec.states if self._with_states))
            part[spec.fqn] = _Tensor(spec, kept)
        part[spec.fqn].add(row_ids, columns)
        while len(self._tensors) > MAX_ASSEMBLIES and self.size_bytes > _SMALL_BYTES:
            self.newest_given_up = min(self._tensors)
            del self._tensors[self.newest_given_up]

    def load(
        self, spec: TableSpec, row_ids: _Ids, columns: Mapping[str, _Array], presence: Any, epochs: Any, steps: Any
    ) -> None:
        """Add rows of any versions as they were read from a store: int64[n] ids, arrays `[n, …]` of the others."""
        is_here = np.asarray(presence) == PRESENT
        versions = np.stack([np.asarray(epochs, np.int64), np.asarray(steps, np.int64)], axis=1)
        for epoch, step in np.unique(versions[is_here], axis=0).tolist():
            which = is_here & (versions == (epoch, step)).all(axis=1)
            some = {name: np.ascontiguousarray(column[which]) for name, column in columns.items()}
            self.add(spec, row_ids[which], some, (epoch, step))

    def is_whole(self, version: Version, specs: Mapping[str, TableSpec]) -> bool:
        """Return whether every row of all tensors of `specs`, by name, is here at a version."""
        if len(self._tensors.get(version, ())) < len(specs):  # mostly so; the rest costs more
            return False
        return not self._lacking(version, specs)

    def whole(self, specs: Mapping[str, TableSpec], *, up_to: Version | None = None) -> DensePart | None:
        """Return the newest part, not newer than `up_to`, that has every row of all tensors; None if there is none."""
        for version in reversed(self.versions):
            if (up_to is None or version <= up_to) and self.is_whole(version, specs):
                tensors = {path_of(name): self._tensors[version][name] for name in specs}
                states = [] if not self._with_states else [s for s in tensors.items() if s[1].spec.states]
                return DensePart(
                    epoch=version[0],
                    step=version[1],
                    specs={path: tensor.spec for path, tensor in tensors.items()},
                    tensors={path: tensor.values("weights") for path, tensor in tensors.items()},
                    states={path: {s.name: t.values(s.name) for s in t.spec.states} for path, t in states},
                )
        return None

    def forget(self, up_to: Version) -> None:
        """Drop parts that are not newer than a version."""
        for version in [version for version in self.versions if version <= up_to]:
            del self._tensors[version]
        self.newest_given_up = max(self.newest_given_up, up_to)

    def describe(self, specs: Mapping[str, TableSpec]) -> str:
        """Return which steps have come in part, for people."""
        seen = [
            f"step {version[1]} of epoch {version[0]} lacks rows of {len(self._lacking(version, specs))} of "
            f"{len(specs)} tensors"
            for version in self.versions
        ]
        return "; ".join(seen) or "no rows have come"

    def _lacking(self, version: Version, specs: Mapping[str, TableSpec]) -> list[str]:
        part = self._tensors.get(version, {})
        return [name for name in specs if name not in part or part[name].num_missing]
