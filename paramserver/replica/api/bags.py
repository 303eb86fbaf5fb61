"""A module like TorchRec's `EmbeddingBagCollection` that reads from a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.tables.base import Found, Ids, Pooling, ReplicaTable, as_ids
from headrace.schemas.errors import ConfigError, RequestError, UnknownTableError

__all__ = ["BagTable", "ReplicaEmbeddingBagCollection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BagTable:
    """One table of a collection.

    Attributes:
        fqn: Name of the table in the replica, as in the trainer's `state_dict`.
        features: Features that are looked up in it.
        pooling: How to combine the rows of a bag.
    """

    fqn: str
    features: tuple[str, ...]
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.fqn!r}: pooling is {self.pooling!r}, must be sum or mean")
        if isinstance(cast("object", self.features), str):
            raise ConfigError(f"table {self.fqn!r}: features is one string, {self.features!r}; give a tuple of names")


class ReplicaEmbeddingBagCollection(nn.Module):
    """Pools rows of a replica; the results equal those of the trainer's own collection, bit for bit.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ebc = ReplicaEmbeddingBagCollection.like(trained.ebc, replica, prefix="sparse.ebc")
        pooled = ebc(features)                      # a KeyedJaggedTensor in, a KeyedTensor out

    Attributes:
        tables: As passed in.
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
        super().__init__()
        for table in tables:
            try:
                replica.spec_of(table.fqn)
            except UnknownTableError as exc:
                raise ConfigError(str(exc)) from exc
            if is_weighted and table.pooling != "sum":
                raise ConfigError(f"table {table.fqn!r}: only sums can be weighted")
        self.tables = tuple(tables)
        self._replica = replica
        self._is_weighted = is_weighted
        self._dims = [replica.spec_of(table.fqn).dim for table in tables for _ in table.features]
        self._names = _output_names(tables)

    @classmethod
    def like(cls, collection: Any, replica: EmbeddingReplica, *, prefix: str = "") -> ReplicaEmbeddingBagCollection:
        """Create one with the tables, features and pooling of a TorchRec `EmbeddingBagCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ebc`.
        """
        start = f"{prefix}." if prefix else ""
        tables = [
            BagTable(
                fqn=f"{start}embedding_bags.{config.name}.weight",
                features=tuple(config.feature_names),
                pooling="sum" if config.pooling.value == "SUM" else "mean",
            )
            for config in collection.embedding_bag_configs()
        ]
        return cls(replica, tables, is_weighted=collection.is_weighted())

    def forward(self, features: Any) -> Any:
        """Return a TorchRec `KeyedTensor` of the pooled features of a `KeyedJaggedTensor`, float32."""
        from torchrec.sparse.jagged_tensor import KeyedTensor  # here: `pool` works without torchrec

        jagged = features.to_dict()
        inputs = {
            name: (part.values(), part.offsets(), part.weights() if self._is_weighted else None)
            for name, part in jagged.items()
        }
        return KeyedTensor(keys=self._names, values=self._pool(inputs), length_per_key=self._dims)

    def pool(
        self,
        features: Mapping[str, tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Pool plain ids, without TorchRec's classes; return `[batch, sum of the features' dims]`, float32.

        Args:
            features: By name, ids `[n]` and offsets `[batch + 1]`, int64; bag i is `ids[offsets[i]:offsets[i + 1]]`.
                A weighted collection also needs weights `[n]` in the table's dtype.

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
        return self._pool(inputs)

    def _pool(self, inputs: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
        wanted = []
        for table in self.tables:
            for feature in table.features:
                if feature not in inputs:
                    raise RequestError(f"feature {feature!r} is missing; there are {', '.join(sorted(inputs))}")
                given, offsets, weights = inputs[feature]
                ids = as_ids(given)
                _check_bags(feature, ids, offsets, weights, TORCH_DTYPES[self._replica.spec_of(table.fqn).dtype])
                wanted.append((table.fqn, ids, _Bags(offsets.long().cpu(), weights, table)))
        return torch.cat(self._replica.look(wanted), dim=1)


@dataclass(frozen=True, slots=True)
class _Bags:
    """Pools one feature; a function for `EmbeddingReplica.look`."""

    offsets: torch.Tensor
    weights: torch.Tensor | None
    table: BagTable

    def __call__(self, source: ReplicaTable, ids: Ids) -> Found:
        # The same kernel on the same rows in the same order gives the same bits.
        pooled, missing = source.pool(ids, self.offsets, self.table.pooling, self.weights)
        return pooled.float(), missing


def _check_bags(
    feature: str, ids: Ids, offsets: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Check what the kernels for packed rows trust; wrong offsets would make them read beyond the ids."""
    bounds = as_ids(offsets)
    is_good = ids.ndim == bounds.ndim == 1 and bounds.size > 0 and bounds[0] == 0 and bounds[-1] == ids.size
    if not is_good or (np.diff(bounds) < 0).any():
        raise RequestError(
            f"feature {feature!r}: offsets of {ids.size} ids must rise from 0 to {ids.size}, one per bag"
        )
    if weights is not None and weights.shape != ids.shape:
        raise RequestError(f"feature {feature!r}: {ids.size} ids and weights of shape {tuple(weights.shape)}")
    if weights is not None and weights.dtype is not dtype:
        raise RequestError(f"feature {feature!r}: weights are {weights.dtype}, must be {dtype} like the table's rows")


def _output_names(tables: Sequence[BagTable]) -> list[str]:
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
