"""Modules like TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection` that read from a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from headrace.kernels.dtypes import TORCH_DTYPES, is_smaller_float
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
from headrace.paramserver.replica.api.trained_outputs import CollectionOutput, configured_outputs, trained_outputs
from headrace.paramserver.replica.tables.base import Ids, ReplicaTable
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import name_in, table_name
from headrace.schemas.table_uses import Divisor, Kind, Output, TableUse
from headrace.schemas.tables import TableSpec, as_ids

__all__ = ["BagTable", "EmbeddingTable", "ReplicaEmbeddingBagCollection", "ReplicaEmbeddingCollection", "configs_of"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BagTable(EmbeddingTable):
    """One table of a collection that pools.

    Attributes:
        fqn: Name of the table in the replica, as for `EmbeddingTable`.
        features: Features that are looked up in it.
        pooling: How to combine the rows of a bag.
    """

    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        EmbeddingTable.__post_init__(self)  # a dataclass with slots is not the class that `super()` means
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.fqn!r}: pooling is {self.pooling!r}, must be sum or mean")


_Table = TypeVar("_Table", bound=EmbeddingTable)
_Input = TypeVar("_Input")
_EPSILON = 1e-6  # what TorchRec adds to a divisor


class _Collection(ReplicaModule, Generic[_Table]):
    """What both modules have: tables with their features, and the outputs in their order."""

    _kind: ClassVar[Kind]

    def __init__(self, replica: EmbeddingReplica, tables: Sequence[_Table]) -> None:
        super().__init__(replica)
        self.specs = {table.fqn: spec_in(replica, table.fqn) for table in tables}
        self.tables = tuple(tables)
        self._settings: dict[str, Any] | None = None
        self._uses: list[str | None] = []
        self._known_outputs = configured_outputs(tables)

    def _follow(self, **settings: Any) -> None:
        """Return from now on what the trained module does. `settings` are the given one's, as `TableUse` has them.

        Raises:
            ConfigError: The trained module has others, or what it returns cannot be computed here.
        """
        self._settings = settings
        self._outputs()

    def _outputs(self) -> list[CollectionOutput]:
        """Return what the module returns, in its order.

        Raises:
            ConfigError: The trainer has another module by now.
        """
        if self._settings is None:
            return self._known_outputs
        specs = [self._replica.spec_of(self.specs[table.fqn]) for table in self.tables]
        uses = [spec.uses for spec in specs]
        if uses != self._uses:
            configured = [self._configured(table, self._settings) for table in self.tables]
            self._known_outputs, self._uses = trained_outputs(self.tables, specs, configured), uses
        return self._known_outputs

    def _configured(self, table: _Table, settings: Mapping[str, Any]) -> TableUse:
        outputs = tuple(Output(feature=feature, position=0) for feature in table.features)
        return TableUse(kind=self._kind, outputs=outputs, **settings)

    def _inputs_of(
        self, outputs: Sequence[CollectionOutput], given: Mapping[str, _Input]
    ) -> list[tuple[CollectionOutput, _Table, _Input]]:
        """Return outputs with their tables and what is given for them; raise `RequestError` if one is missing."""
        for output in outputs:
            if output.feature not in given:
                raise RequestError(f"feature {output.feature!r} is missing; there are {', '.join(sorted(given))}")
        return [(output, self.tables[output.table], given[output.feature]) for output in outputs]


class ReplicaEmbeddingBagCollection(_Collection[BagTable]):
    """Pools rows of a replica; the results equal those of the trainer's own collection, bit for bit.

    One that is made by `like` returns what the trained module does: sharding changes the order of the outputs, among
    others. If a trainer starts with another sharding, the module follows at its next call.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ebc = ReplicaEmbeddingBagCollection.like(trained.ebc, replica, prefix="sparse.ebc")
        pooled = ebc(features)                      # a KeyedJaggedTensor in, a KeyedTensor out

    Attributes:
        tables: As passed in.
        specs: What they were then, by their names as passed in.
    """

    _kind = Kind.BAG_COLLECTION

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

    @classmethod
    def like(
        cls,
        collection: Any,
        replica: EmbeddingReplica,
        *,
        prefix: str = "",
        model: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> ReplicaEmbeddingBagCollection:
        """Create one with the tables, features and pooling of a TorchRec `EmbeddingBagCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ebc`; `model` is that model's name, needed if several have the path; `names` are
        names on the server of tables and modules, by their path in the trained model, where modules were renamed.

        Raises:
            ConfigError: The trained module has other settings, or what it returns cannot be computed here.
        """
        tables = [
            BagTable(
                fqn=_name_of(prefix, f"embedding_bags.{config.name}.weight", model, names),
                features=tuple(config.feature_names),
                pooling="sum" if config.pooling.value == "SUM" else "mean",
            )
            for config in configs_of(collection)
        ]
        is_weighted = bool(_setting_of(collection, "is_weighted"))
        created = cls(replica, tables, is_weighted=is_weighted)
        created._follow(is_weighted=is_weighted)
        return created

    def _configured(self, table: BagTable, settings: Mapping[str, Any]) -> TableUse:
        return super()._configured(table, {**settings, "pooling": table.pooling})

    def forward(self, features: Any) -> Any:
        """Return a TorchRec `KeyedTensor` of the pooled features of a `KeyedJaggedTensor`, on its device.

        It is float32, or of the `output_dtype` of the trained module.

        Raises:
            RequestError: A feature is missing, or what the trained module does with weighted inputs is not served.
            ConfigError: The trainer has another module by now.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        return self._untraced(features)

    def _look_up(self, features: Any) -> Any:
        # Here: `pool` works without torchrec.
        from torchrec.modules.embedding_modules import process_pooled_embeddings, reorder_inverse_indices
        from torchrec.sparse.jagged_tensor import KeyedTensor

        outputs, jagged = self._outputs(), features.to_dict()
        wanted = [
            self._bags(output, table, part.values(), part.offsets(), self._weights(output, part))
            for output, table, part in self._inputs_of(outputs, jagged)
        ]
        pooled = [each.to(features.device()) for each in self._replica.look(wanted)]
        inverse = reorder_inverse_indices(features.inverse_indices_or_none(), [each.feature for each in outputs])
        values = process_pooled_embeddings(pooled, inverse)
        dims = [self.specs[self.tables[output.table].fqn].dim for output in outputs]
        return KeyedTensor(keys=[output.name for output in outputs], values=values, length_per_key=dims)

    def _weights(self, output: CollectionOutput, part: Any) -> torch.Tensor | None:
        """Return the weights of a `JaggedTensor` that count: those of a sharded module whatever its configuration."""
        if not output.is_sharded:
            weights: torch.Tensor | None = part.weights() if self._is_weighted else None
            return weights
        given: torch.Tensor | None = part.weights_or_none()
        return None if given is None or not given.is_floating_point() else given.float()

    def pool(
        self,
        features: Mapping[str, tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Pool plain ids, without TorchRec's classes; return `[batch, sum of the features' dims]`, typed as `forward`.

        Args:
            features: By name, ids `[n]` and offsets `[batch + 1]`, int64; bag i is `ids[offsets[i]:offsets[i + 1]]`.
                A weighted collection also needs weights `[n]` in the table's dtype, or float32
                for a smaller one.

        Raises:
            RequestError: A feature is missing, its ids are not integers or do not match the offsets, or weights are
                given to an unweighted collection or missing for a weighted one.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        wanted = []
        for output, table, parts in self._inputs_of(self._outputs(), features):
            if len(parts) != 2 + self._is_weighted and not (output.is_sharded and len(parts) in (2, 3)):
                wants = "weighted, give (ids, offsets, weights)" if self._is_weighted else "not, give (ids, offsets)"
                raise RequestError(f"feature {output.feature!r}: {len(parts)} tensors; of a collection that is {wants}")
            weights = parts[2] if len(parts) == 3 else None
            wanted.append(self._bags(output, table, parts[0], parts[1], weights))
        return torch.cat(self._replica.look(wanted), dim=1)

    def _bags(
        self,
        output: CollectionOutput,
        table: BagTable,
        given: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> tuple[TableSpec, Ids, _Bags]:
        what, spec, ids = f"feature {output.feature!r}", self.specs[table.fqn], as_ids(given)
        if output.use is None or not output.use.is_sharded:
            dtype = TORCH_DTYPES[spec.dtype]
            if weights is not None and weights.dtype is torch.float32 and is_smaller_float(dtype, weights.dtype):
                weights = weights.to(dtype)
            check_bags(what, ids, offsets, weights, dtype)
            return spec, ids, _Bags(BagLookup(offsets.long().cpu(), table.pooling, weights))
        is_mean = output.use.kernel_pooling == "mean"
        if weights is not None and (is_mean or output.divisor is Divisor.LENGTH):
            raise RequestError(
                f"{what}: means of weighted rows are not served as TorchRec's sharded modules compute them: give ids "
                "without weights"
            )
        check_bags(what, ids, offsets, weights, torch.float32)
        bags = BagLookup(offsets.long().cpu(), "sum", weights, dtype=torch.float32)
        return spec, ids, _Bags(bags, is_mean=is_mean, dtype=output.dtype, divisor=output.divisor)


@dataclass(frozen=True, slots=True)
class _Bags:
    """Pools one feature as TorchRec does.

    An unsharded module returns float32 whatever the table's dtype is. FBGEMM's kernels, on the CPU, multiply the sum of
    a bag by the reciprocal of its length, where torch divides: the last bit may differ.
    """

    bags: BagLookup
    is_mean: bool = False
    dtype: torch.dtype = torch.float32
    divisor: Divisor = Divisor.NONE

    def __call__(self, source: ReplicaTable, ids: Ids) -> Found:
        pooled, missing = self.bags(source, ids)
        lengths = self.bags.offsets.diff().float().unsqueeze(1)
        if self.is_mean:
            pooled = pooled * (1 / lengths.clamp(min=1))
        pooled = pooled.to(self.dtype)
        if self.divisor is not Divisor.NONE:
            # In float32, as the callback of TorchRec divides.
            pooled = pooled / ((lengths if self.divisor is Divisor.LENGTH else torch.ones_like(lengths)) + _EPSILON)
        return pooled, missing


class ReplicaEmbeddingCollection(_Collection[EmbeddingTable]):
    """Looks rows up in a replica; the results equal those of the trainer's own collection, bit for bit.

    One call reads all its tables from one moment; with `consistency="step"`, from one step.

        ec = ReplicaEmbeddingCollection.like(trained.ec, replica, prefix="sparse.ec")
        rows = ec(features)                         # a KeyedJaggedTensor in, JaggedTensors by feature out

    Attributes:
        tables: As passed in.
        specs: What they were then, by their names as passed in.
    """

    _kind = Kind.COLLECTION

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
        cls,
        collection: Any,
        replica: EmbeddingReplica,
        *,
        prefix: str = "",
        model: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> ReplicaEmbeddingCollection:
        """Create one with the tables and features of a TorchRec `EmbeddingCollection`.

        The collection may be sharded or on the meta device: only its settings are read. `prefix` is its path in the
        trained model, such as `sparse.ec`; `model` is that model's name, needed if several have the path; `names` are
        names on the server of tables and modules, by their path in the trained model, where modules were renamed.

        Raises:
            ConfigError: The trained module has other settings, or what it returns cannot be computed here.
        """
        tables = [
            EmbeddingTable(
                fqn=_name_of(prefix, f"embeddings.{config.name}.weight", model, names),
                features=tuple(config.feature_names),
            )
            for config in configs_of(collection)
        ]
        need_indices = bool(_setting_of(collection, "need_indices"))
        created = cls(replica, tables, need_indices=need_indices)
        created._follow(need_indices=need_indices)
        return created

    def forward(self, features: Any) -> dict[str, Any]:
        """Return a TorchRec `JaggedTensor` of each feature's rows, from a `KeyedJaggedTensor`.

        They are float32, or of the `output_dtype` of the trained module.

        Raises:
            RequestError: A feature is missing.
            ConfigError: The trainer has another module by now.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        rows: dict[str, Any] = self._untraced(features)
        return rows

    def _look_up(self, features: Any) -> dict[str, Any]:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        inputs = self._inputs_of(self._outputs(), features.to_dict())
        wanted = [(self.specs[table.fqn], as_ids(part.values()), RowLookup()) for _, table, part in inputs]
        return {
            output.name: JaggedTensor(
                values=rows.float().to(part.values().device, output.dtype),
                lengths=part.lengths(),
                weights=part.values() if self._need_indices else None,
            )
            for (output, _, part), rows in zip(inputs, self._replica.look(wanted), strict=True)
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


def _name_of(prefix: str, path: str, model: str | None, names: Mapping[str, str] | None) -> str:
    """Return a table's name: that of its path in the collection, which is at a prefix of the trained model."""
    whole = f"{prefix}.{path}" if prefix else path
    known = name_in(names or {}, whole) or whole
    return known if model is None else table_name(model, known)
