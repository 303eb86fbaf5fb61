"""A module like TorchRec's managed collision collections: raw ids lead to the rows that a replica knows them by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headrace.paramserver.replica.api.embedding_collections import (
    ReplicaEmbeddingBagCollection,
    ReplicaEmbeddingCollection,
    configs_of,
)
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.lookups import ReplicaModule
from headrace.schemas.errors import ConfigError, RequestError

__all__ = ["ReplicaManagedCollisionCollection"]


class ReplicaManagedCollisionCollection(ReplicaModule):
    """Looks raw ids up by identity; in place of a `ManagedCollisionEmbeddingBagCollection` or `…EmbeddingCollection`.

    A raw id leads to the row that the trainer has mapped it to (zero-collision hashing). An id without a row leads to
    the table's last one, as in the trainer: its module gives no id that row, and trains it with all ids that it does
    not know. Rows and identities of one call are of one moment.

        users = ReplicaManagedCollisionCollection.like(trained.users, replica, prefix="users")
        pooled, _ = users(features)                 # a KeyedJaggedTensor of raw ids in

    Attributes:
        collection: Reads the rows.
    """

    def __init__(
        self,
        replica: EmbeddingReplica,
        collection: ReplicaEmbeddingBagCollection | ReplicaEmbeddingCollection,
        *,
        hashes: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        return_remapped_features: bool = False,
    ) -> None:
        """Read from a replica.

        Args:
            replica: Open; the caller closes it.
            collection: Of the same replica; its features are raw ids here.
            hashes: By a table's fqn, the trainer's function that is applied to raw ids first (`input_hash_func`).
            return_remapped_features: Return the row ids too.

        Raises:
            ConfigError: A table has no identities: the trainer does not hash its ids.
        """
        super().__init__(replica)
        for table in collection.tables:
            if not collection.specs[table.fqn].has_identities:
                raise ConfigError(f"table {table.fqn!r} has no identities: serve it as a collection of its own")
        self.collection = collection
        self._hashes = dict(hashes or {})
        self._return_remapped_features = return_remapped_features

    @classmethod
    def like(
        cls,
        module: Any,
        replica: EmbeddingReplica,
        *,
        prefix: str = "",
        model: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> ReplicaManagedCollisionCollection:
        """Create one with the settings of a TorchRec managed collision collection, sharded or not.

        `prefix` is its path in the trained model; `model` is that model's name, needed if several have the path;
        `names` are names on the server of tables and modules, by path in the trained model, where these were renamed.
        """
        inner = module._embedding_module
        kind: Any = ReplicaEmbeddingBagCollection if hasattr(inner, "embedding_bags") else ReplicaEmbeddingCollection
        path = f"{prefix}._embedding_module" if prefix else "_embedding_module"
        collection = kind.like(inner, replica, prefix=path, model=model, names=names)
        hashes = {}
        for table, config in zip(collection.tables, configs_of(inner), strict=True):
            name = config.name
            by_table = module._managed_collision_collection._managed_collision_modules
            if name not in by_table:
                raise ConfigError(f"table {table.fqn!r} is on another rank: give the module before it was sharded")
            function = getattr(by_table[name], "_input_hash_func", None)
            if function is not None:
                hashes[table.fqn] = functools.partial(_hashed, function, by_table[name].input_size())
        is_remapped = module._return_remapped_features
        return cls(replica, collection, hashes=hashes, return_remapped_features=is_remapped)

    def forward(self, features: Any, mutate_miss_lengths: bool = True) -> tuple[Any, Any | None]:
        """Return what the collection returns for raw ids, and the features with row ids instead, or None.

        Args:
            features: A `KeyedJaggedTensor` of raw ids.
            mutate_miss_lengths: Without effect, as in the modules of the trainer that can be streamed.

        Raises:
            RequestError: A feature is missing.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        output: Any
        output, remapped = self._untraced(features)
        return output, remapped if self._return_remapped_features else None

    def _look_up(self, features: Any) -> tuple[Any, Any]:
        def look() -> tuple[Any, Any]:
            remapped = self._remapped(features)
            return self.collection(remapped), remapped

        return self._replica.at_one_moment(look)

    def _remapped(self, features: Any) -> Any:
        """Return the collection's features, in its order, with row ids in place of raw ids."""
        names = [feature for table in self.collection.tables for feature in table.features]
        given = features.keys()
        for name in names:
            if name not in given:
                raise RequestError(f"feature {name!r} is missing; there are {', '.join(sorted(given))}")
        ordered = features.permute([given.index(name) for name in names])
        ids = list(torch.split(ordered.values(), ordered.length_per_key()))
        at = 0
        for table in self.collection.tables:
            spec = self.collection.specs[table.fqn]
            last_row = self._replica.spec_of(spec).num_rows - 1
            hashed = self._hashes.get(table.fqn)
            for _ in table.features:
                raw_ids = ids[at] if hashed is None else hashed(ids[at])
                rows = torch.from_numpy(self._replica.find_rows(spec, raw_ids)).to(raw_ids)
                ids[at] = torch.where(rows < 0, last_row, rows)
                at += 1
        return type(features)(
            keys=ordered.keys(),
            values=torch.cat(ids),
            lengths=ordered.lengths(),
            weights=ordered.weights_or_none(),
            stride=ordered.stride(),
            stride_per_key_per_rank=ordered._stride_per_key_per_rank,
            inverse_indices=ordered.inverse_indices_or_none(),
        )


def _hashed(function: Callable[[torch.Tensor, int], torch.Tensor], size: int, ids: torch.Tensor) -> torch.Tensor:
    return function(ids, size)
