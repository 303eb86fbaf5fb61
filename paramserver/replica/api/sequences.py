"""A module like TorchRec's `EmbeddingCollection` that reads from a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.lookups import ReplicaModule, RowLookup, spec_in
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import table_name
from headrace.schemas.tables import as_ids

__all__ = ["EmbeddingTable", "ReplicaEmbeddingCollection", "configs_of", "first_of_names", "output_names", "setting_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingTable:
    """One table of a collection.

    Attributes:
        fqn: Name of the table in the replica, as in the trainer's `state_dict`; with its model's name, as in
            `ctr:sparse.ec.embeddings.user.weight`, if several models have the path.
        features: Features that are looked up in it.
    """

    fqn: str
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(cast("object", self.features), str):
            raise ConfigError(f"table {self.fqn!r}: features is one string, {self.features!r}; give a tuple of names")


class ReplicaEmbeddingCollection(ReplicaModule):
    """Looks rows up in a replica; the results equal those of the trainer's own collection, bit for bit.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ec = ReplicaEmbeddingCollection.like(trained.ec, replica, prefix="sparse.ec")
        rows = ec(features)                         # a KeyedJaggedTensor in, JaggedTensors by feature out

    Attributes:
        tables: As passed in.
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
        super().__init__(replica)
        for table in tables:
            spec_in(replica, table.fqn)
        self.tables = tuple(tables)
        self._need_indices = need_indices
        self._names = output_names(tables)

    @classmethod
    def like(
        cls, collection: Any, replica: EmbeddingReplica, *, prefix: str = "", model: str | None = None
    ) -> ReplicaEmbeddingCollection:
        """Create one with the tables and features of a TorchRec `EmbeddingCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ec`; `model` is that model's name, needed if several have the path.
        """
        start = first_of_names(prefix, model)
        tables = [
            EmbeddingTable(fqn=f"{start}embeddings.{config.name}.weight", features=tuple(config.feature_names))
            for config in configs_of(collection)
        ]
        return cls(replica, tables, need_indices=setting_of(collection, "need_indices"))

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

        inputs = features.to_dict()
        wanted, parts = [], []
        for table in self.tables:
            for feature in table.features:
                if feature not in inputs:
                    raise RequestError(f"feature {feature!r} is missing; there are {', '.join(sorted(inputs))}")
                parts.append(inputs[feature])
                wanted.append((table.fqn, as_ids(parts[-1].values()), RowLookup()))
        return {
            name: JaggedTensor(
                values=rows.float().to(part.values().device),
                lengths=part.lengths(),
                weights=part.values() if self._need_indices else None,
            )
            for name, part, rows in zip(self._names, parts, self._replica.look(wanted), strict=True)
        }


def configs_of(collection: Any) -> list[Any]:
    """Return the configurations of a TorchRec collection's tables."""
    configs: list[Any] = setting_of(collection, "embedding_bag_configs", "embedding_configs")
    return configs


def setting_of(collection: Any, *names: str) -> Any:
    """Return what a TorchRec collection's method returns; sharded ones have an attribute instead."""
    for name in names:
        if hasattr(collection, name):
            return getattr(collection, name)()
        if hasattr(collection, f"_{name}"):
            return getattr(collection, f"_{name}")
    raise ConfigError(f"a {type(collection).__name__} is no EmbeddingBagCollection or EmbeddingCollection of TorchRec")


def first_of_names(prefix: str, model: str | None) -> str:
    """Return what the names of a collection's tables begin with: its path in the trained model, and the model."""
    start = f"{prefix}." if prefix else ""
    return start if model is None else table_name(model, start)


def output_names(tables: Sequence[EmbeddingTable]) -> list[str]:
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
