"""Modules like TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection` that read from a replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from headrace.kernels.dtypes import is_smaller_float, value_dtype
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.lookups import (
    BagLookup,
    Found,
    Pooling,
    ReplicaModule,
    RowLookup,
    check_bags,
    spec_in,
)
from headrace.paramserver.replica.tables.base import Ids, ReplicaTable
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import table_name
from headrace.schemas.tables import as_ids

__all__ = ["BagTable", "EmbeddingTable", "ReplicaEmbeddingBagCollection", "ReplicaEmbeddingCollection", "configs_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingTable:
    """One table of a collection.

    Attributes:
        fqn: Name of the table in the replica, as in the trainer's `state_dict`; with its model's name, as in
            `ctr:sparse.ec.embeddings.user.weight`, if several models have the path.
        features: Features that are looked up in it.
        dim: Number of columns, to read an earlier generation while a later one has another; None for what it is now.
    """

    fqn: str
    features: tuple[str, ...]
    dim: int | None = None

    def __post_init__(self) -> None:
        if isinstance(cast("object", self.features), str):
            raise ConfigError(f"table {self.fqn!r}: features is one string, {self.features!r}; give a tuple of names")


@dataclass(frozen=True, kw_only=True, slots=True)
class BagTable(EmbeddingTable):
    """One table of a collection that pools.

    Attributes:
        fqn: Name of the table in the replica, as for `EmbeddingTable`.
        features: Features that are looked up in it.
        dim: As for `EmbeddingTable`.
        pooling: How to combine the rows of a bag.
    """

    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        EmbeddingTable.__post_init__(self)  # a dataclass with slots is not the class that `super()` means
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.fqn!r}: pooling is {self.pooling!r}, must be sum or mean")


_Table = TypeVar("_Table", bound=EmbeddingTable)
_Input = TypeVar("_Input")


class _Collection(ReplicaModule, Generic[_Table]):
    """What both modules have: tables, in the order of the output, and their features."""

    def __init__(self, replica: EmbeddingReplica, tables: Sequence[_Table]) -> None:
        super().__init__(replica)
        self.specs = {table.fqn: spec_in(replica, table.fqn, dim=table.dim) for table in tables}
        self.tables = tuple(tables)
        self._names = _output_names(tables)

    def _inputs_of(self, given: Mapping[str, _Input]) -> Iterator[tuple[_Table, str, _Input]]:
        """Yield each table's features with what is given for them; raise `RequestError` if one is missing."""
        for table in self.tables:
            for feature in table.features:
                if feature not in given:
                    raise RequestError(f"feature {feature!r} is missing; there are {', '.join(sorted(given))}")
                yield table, feature, given[feature]


class ReplicaEmbeddingBagCollection(_Collection[BagTable]):
    """Pools rows of a replica; the results equal those of the trainer's own collection, bit for bit.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ebc = ReplicaEmbeddingBagCollection.like(trained.ebc, replica, prefix="sparse.ebc")
        pooled = ebc(features)                      # a KeyedJaggedTensor in, a KeyedTensor out

    Attributes:
        tables: As passed in.
        specs: What they were then, by their names as passed in.
    """

    def __init__(self, replica: EmbeddingReplica, tables: Sequence[BagTable], *, is_weighted: bool = False) -> None:
        """Read from a replica.

        Args:
            replica: Open; the caller closes it.
            tables: In the order of the output.
            is_weighted: Ids come with weights; for sum pooling only.

        Raises:
            ConfigError: The replica has no such table, or `is_weighted` with mean pooling.
        """
        super().__init__(replica, tables)
        for table in tables:
            if is_weighted and table.pooling != "sum":
                raise ConfigError(f"table {table.fqn!r}: only sums can be weighted")
        self._is_weighted = is_weighted
        self._dims = [self.specs[table.fqn].num_columns for table in tables for _ in table.features]

    @classmethod
    def like(
        cls, collection: Any, replica: EmbeddingReplica, *, prefix: str = "", model: str | None = None
    ) -> ReplicaEmbeddingBagCollection:
        """Create one with the tables, features and pooling of a TorchRec `EmbeddingBagCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ebc`; `model` is that model's name, needed if several have the path.
        """
        start = _first_of_names(prefix, model)
        tables = [
            BagTable(
                fqn=f"{start}embedding_bags.{config.name}.weight",
                features=tuple(config.feature_names),
                dim=config.embedding_dim,
                pooling="sum" if config.pooling.value == "SUM" else "mean",
            )
            for config in configs_of(collection)
        ]
        return cls(replica, tables, is_weighted=_setting_of(collection, "is_weighted"))

    def forward(self, features: Any) -> Any:
        """Return a TorchRec `KeyedTensor` of the pooled features of a `KeyedJaggedTensor`, float32, on its device."""
        return self._untraced(features)

    def _look_up(self, features: Any) -> Any:
        # Here: `pool` works without torchrec.
        from torchrec.modules.embedding_modules import process_pooled_embeddings, reorder_inverse_indices
        from torchrec.sparse.jagged_tensor import KeyedTensor

        jagged = features.to_dict()
        inputs = {
            name: (part.values(), part.offsets(), part.weights() if self._is_weighted else None)
            for name, part in jagged.items()
        }
        pooled = [each.to(features.device()) for each in self._pool(inputs)]
        names = [feature for table in self.tables for feature in table.features]
        inverse = reorder_inverse_indices(features.inverse_indices_or_none(), names)
        values = process_pooled_embeddings(pooled, inverse)
        return KeyedTensor(keys=self._names, values=values, length_per_key=self._dims)

    def pool(
        self,
        features: Mapping[str, tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Pool plain ids, without TorchRec's classes; return `[batch, sum of the features' dims]`, float32.

        Args:
            features: By name, ids `[n]` and offsets `[batch + 1]`, int64; bag i is `ids[offsets[i]:offsets[i + 1]]`.
                A weighted collection also needs weights `[n]` in the table's dtype, or float32
                for a smaller one.

        Raises:
            RequestError: A feature is missing, its ids are not integers or do not match the offsets, or weights are
                given to an unweighted collection or missing for a weighted one.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        inputs: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        for name, parts in features.items():
            if len(parts) != 2 + self._is_weighted:
                wants = "weighted, give (ids, offsets, weights)" if self._is_weighted else "not, give (ids, offsets)"
                raise RequestError(f"feature {name!r}: {len(parts)} tensors; of a collection that is {wants}")
            inputs[name] = (parts[0], parts[1], parts[2] if len(parts) == 3 else None)
        return torch.cat(self._pool(inputs), dim=1)

    def _pool(self, inputs: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        wanted = []
        for table, feature, (given, offsets, weights) in self._inputs_of(inputs):
            ids = as_ids(given)
            dtype = value_dtype(self.specs[table.fqn])
            if weights is not None and weights.dtype is torch.float32 and is_smaller_float(dtype, weights.dtype):
                weights = weights.to(dtype)
            check_bags(f"feature {feature!r}", ids, offsets, weights, dtype)
            bags = BagLookup(offsets.long().cpu(), table.pooling, weights)
            wanted.append((self.specs[table.fqn], ids, _FloatBags(bags)))
        return self._replica.look(wanted)


@dataclass(frozen=True, slots=True)
class _FloatBags:
    """Pools one feature to float32, as TorchRec does whatever the table's dtype is."""

    bags: BagLookup

    def __call__(self, source: ReplicaTable, ids: Ids) -> Found:
        pooled, missing = self.bags(source, ids)
        return pooled.float(), missing


class ReplicaEmbeddingCollection(_Collection[EmbeddingTable]):
    """Looks rows up in a replica; the results equal those of the trainer's own collection, bit for bit.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ec = ReplicaEmbeddingCollection.like(trained.ec, replica, prefix="sparse.ec")
        rows = ec(features)                         # a KeyedJaggedTensor in, JaggedTensors by feature out

    Attributes:
        tables: As passed in.
        specs: What they were then, by their names as passed in.
    """

    def __init__(
        self, replica: EmbeddingReplica, tables: Sequence[EmbeddingTable], *, need_indices: bool = False
    ) -> None:
        """Read from a replica.

        Args:
            replica: Open; the caller closes it.
            tables: In the order of the output.
            need_indices: Return the ids as the weights of the outputs.

        Raises:
            ConfigError: The replica has no such table.
        """
        super().__init__(replica, tables)
        self._need_indices = need_indices

    @classmethod
    def like(
        cls, collection: Any, replica: EmbeddingReplica, *, prefix: str = "", model: str | None = None
    ) -> ReplicaEmbeddingCollection:
        """Create one with the tables and features of a TorchRec `EmbeddingCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ec`; `model` is that model's name, needed if several have the path.
        """
        start = _first_of_names(prefix, model)
        tables = [
            EmbeddingTable(
                fqn=f"{start}embeddings.{config.name}.weight",
                features=tuple(config.feature_names),
                dim=config.embedding_dim,
            )
            for config in configs_of(collection)
        ]
        return cls(replica, tables, need_indices=_setting_of(collection, "need_indices"))

    def forward(self, features: Any) -> dict[str, Any]:
        """Return a TorchRec `JaggedTensor` of each feature's rows, float32, from a `KeyedJaggedTensor`.

        Raises:
            RequestError: A feature is missing.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        rows: dict[str, Any] = self._untraced(features)
        return rows

    def _look_up(self, features: Any) -> dict[str, Any]:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        inputs = [(self.specs[table.fqn], part) for table, _, part in self._inputs_of(features.to_dict())]
        wanted = [(spec, as_ids(part.values()), RowLookup()) for spec, part in inputs]
        return {
            name: JaggedTensor(
                values=rows.float().to(part.values().device),
                lengths=part.lengths(),
                weights=part.values() if self._need_indices else None,
            )
            for name, (_, part), rows in zip(self._names, inputs, self._replica.look(wanted), strict=True)
        }


def configs_of(collection: Any) -> list[Any]:
    """Return the configurations of a TorchRec collection's tables."""
    configs: list[Any] = _setting_of(collection, "embedding_bag_configs", "embedding_configs")
    return configs


def _setting_of(collection: Any, *names: str) -> Any:
    """Return what a TorchRec collection's method returns; sharded ones have an attribute instead."""
    for name in names:
        if hasattr(collection, name):
            return getattr(collection, name)()
        if hasattr(collection, f"_{name}"):
            return getattr(collection, f"_{name}")
    raise ConfigError(f"a {type(collection).__name__} is no EmbeddingBagCollection or EmbeddingCollection of TorchRec")


def _first_of_names(prefix: str, model: str | None) -> str:
    """Return what the names of a collection's tables begin with: its path in the trained model, and the model."""
    start = f"{prefix}." if prefix else ""
    return start if model is None else table_name(model, start)


def _output_names(tables: Sequence[EmbeddingTable]) -> list[str]:
    """Return TorchRec's names of the outputs: the feature, with its table if several tables have it."""
    counts: dict[str, int] = {}
    for table in tables:
        for feature in table.features:
            counts[feature] = counts.get(feature, 0) + 1
    names = []
    for table in tables:
        name = table.fqn.removesuffix(".weight").rpartition(".")[2]
        names += [feature if counts[feature] == 1 else f"{feature}@{name}" for feature in table.features]
    return names
