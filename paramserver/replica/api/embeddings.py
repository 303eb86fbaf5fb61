"""Modules like torch's `nn.Embedding` and `nn.EmbeddingBag` that read from a replica."""

from __future__ import annotations

from typing import Any, cast, get_args

import torch
from torch import nn

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.lookups import (
    BagLookup,
    PoolingMode,
    ReplicaModule,
    RowLookup,
    check_bags,
    spec_in,
)
from headrace.paramserver.replica.api.trained_outputs import table_use
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_uses import Kind, TableUse
from headrace.schemas.tables import as_ids

__all__ = ["ReplicaEmbedding", "ReplicaEmbeddingBag"]


class _OfOneTable(ReplicaModule):
    """What both modules have: the table, by its whole name, and its size."""

    def __init__(self, replica: EmbeddingReplica, fqn: str, padding_idx: int | None, dtype: torch.dtype | None) -> None:
        super().__init__(replica)
        spec = spec_in(replica, fqn)
        self.fqn = spec.fqn
        self._spec = spec
        self.embedding_dim = spec.dim
        self.padding_idx = padding_idx
        if padding_idx is not None and spec.num_rows:
            if not -spec.num_rows <= padding_idx < spec.num_rows:
                raise ConfigError(
                    f"table {self.fqn!r}: padding_idx {padding_idx} is no row, there are {spec.num_rows:,}"
                )
            self.padding_idx = padding_idx % spec.num_rows
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._output_dtype = self._dtype if dtype is None else dtype
        self._configured: TableUse | None = None
        self._uses: str | None = None

    def _follow(self, configured: TableUse) -> None:
        """Refuse, from now on, to look up what the trained module uses otherwise than the given one.

        Raises:
            ConfigError: It does already.
        """
        self._configured = configured
        self._check_use()

    def _check_use(self) -> None:
        if self._configured is None:
            return
        spec = self._replica.spec_of(self._spec)
        if spec.uses != self._uses:
            table_use(spec, self._configured)
            self._uses = spec.uses

    @property
    def num_embeddings(self) -> int:
        """Number of rows, which may grow; 0 for a table of virtual ids."""
        return self._replica.spec_of(self._spec).num_rows

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.fqn!r}{padding}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} of table {self.fqn!r} has no `weight`: its rows are in the replica and change; "
                "call the module, or EmbeddingReplica.lookup"
            )
        return super().__getattr__(name)

    def _check_input(self, given: torch.Tensor) -> None:
        if given.is_nested:
            raise RequestError(f"table {self.fqn!r}: a nested tensor is not looked up: pass its values() and offsets()")


class ReplicaEmbedding(_OfOneTable):
    """Looks rows up in a replica; in place of the trained `nn.Embedding`, with the same results, bit for bit.

        users = ReplicaEmbedding(replica, "user.weight")
        rows = users(ids)                           # [*ids.shape, dim] on the ids' device

    Thread: any, like the replica.

    Attributes:
        fqn: Whole name of the table.
        embedding_dim: Number of columns.
        padding_idx: Row of the padding; None without.
    """

    def __init__(
        self,
        replica: EmbeddingReplica,
        fqn: str,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Read from a replica.

        Args:
            replica: Open; the caller closes it.
            fqn: Table, as for `EmbeddingReplica.spec_of`.
            padding_idx: Row whose ids are padding; negative counts from the end. It is looked up like another: a
                trainer sends it once, because nothing trains it.
            dtype: Of the output; None for the table's, which is another than the model's if the trainer stores rounded
                weights.

        Raises:
            ConfigError: The replica has no such table, or the table no such row.
            RequestError: Several models have the table.
        """
        super().__init__(replica, fqn, padding_idx, dtype)

    @classmethod
    def like(cls, embedding: nn.Embedding, replica: EmbeddingReplica, fqn: str) -> ReplicaEmbedding:
        """Create one with the settings of an `nn.Embedding`, which may be on the meta device.

        Raises:
            ConfigError: The trained module has others.
        """
        created = cls(replica, fqn, padding_idx=embedding.padding_idx, dtype=_dtype_of(embedding))
        created._follow(TableUse(kind=Kind.EMBEDDING, padding_idx=embedding.padding_idx))
        return created

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of integer ids of any shape, `[*input.shape, dim]`, on `input`'s device.

        Raises:
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        rows: torch.Tensor = self._untraced(input)
        return rows

    def _look_up(self, input: torch.Tensor) -> torch.Tensor:
        self._check_use()
        self._check_input(input)
        ids = as_ids(input)
        (rows,) = self._replica.look([(self._spec, ids.reshape(-1), RowLookup())])
        return rows.view(*ids.shape, self.embedding_dim).to(input.device, self._output_dtype)


class ReplicaEmbeddingBag(_OfOneTable):
    """Pools rows of a replica; in place of the trained `nn.EmbeddingBag`, with the same results, bit for bit.

        tags = ReplicaEmbeddingBag(replica, "tags.weight", mode="mean")
        pooled = tags(ids, offsets)                 # [bags, dim] on the ids' device

    Thread: any, like the replica.

    Attributes:
        fqn: Whole name of the table.
        embedding_dim: Number of columns.
        mode: How the rows of a bag are combined.
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: Row that bags leave out; None without.
    """

    def __init__(
        self,
        replica: EmbeddingReplica,
        fqn: str,
        *,
        mode: PoolingMode = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Read from a replica.

        Args:
            replica: Open; the caller closes it.
            fqn: Table, as for `EmbeddingReplica.spec_of`.
            mode: `sum`, `mean` or `max`.
            include_last_offset: Offsets have one more entry, the number of ids.
            padding_idx: Row that bags leave out; negative counts from the end.
            dtype: Of the output; None for the table's, in which rows are pooled.

        Raises:
            ConfigError: The replica has no such table, the table no such row, or there is no such mode.
            RequestError: Several models have the table.
        """
        super().__init__(replica, fqn, padding_idx, dtype)
        if mode not in get_args(PoolingMode):
            raise ConfigError(f"table {self.fqn!r}: mode is {mode!r}, must be sum, mean or max")
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def like(cls, bag: nn.EmbeddingBag, replica: EmbeddingReplica, fqn: str) -> ReplicaEmbeddingBag:
        """Create one with the settings of an `nn.EmbeddingBag`, which may be on the meta device.

        Raises:
            ConfigError: The trained module has others.
        """
        created = cls(
            replica,
            fqn,
            mode=cast("PoolingMode", bag.mode),
            include_last_offset=bag.include_last_offset,
            padding_idx=bag.padding_idx,
            dtype=_dtype_of(bag),
        )
        created._follow(TableUse(kind=Kind.BAG, pooling=bag.mode, padding_idx=bag.padding_idx))
        return created

    def extra_repr(self) -> str:
        """Return what `print` shows of the module."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the pooled bags, `[bags, dim]`, on `input`'s device; zeros for an empty bag.

        Args:
            input: Integer ids: `[bags, n]`, or `[ids]` with offsets.
            offsets: Where each bag begins, `[bags]`; with `include_last_offset` `[bags + 1]`. For ids `[ids]` only.
            per_sample_weights: Of `input`'s shape and the output's dtype; for sums only.

        Raises:
            RequestError: The arguments do not match.
            HeadraceError: As for `EmbeddingReplica.lookup`.
        """
        pooled: torch.Tensor = self._untraced(input, offsets, per_sample_weights)
        return pooled

    def _look_up(
        self, input: torch.Tensor, offsets: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        self._check_use()
        self._check_input(input)
        what = f"table {self.fqn!r}"
        if per_sample_weights is not None and self.mode != "sum":
            raise RequestError(f"{what}: only sums can be weighted, the mode is {self.mode}")
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            shape = tuple(per_sample_weights.shape)
            raise RequestError(f"{what}: ids of shape {tuple(input.shape)} and weights of shape {shape}")
        bounds = self._bounds(input, offsets)
        ids = as_ids(input).reshape(-1)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        check_bags(what, ids, bounds, weights, self._output_dtype)
        weights = None if weights is None else weights.to(self._dtype)
        lookup = BagLookup(bounds, self.mode, weights, self.padding_idx)
        (pooled,) = self._replica.look([(self._spec, ids, lookup)])
        return pooled.to(input.device, self._output_dtype)

    def _bounds(self, given: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Return where bags begin and the last one ends, int64[bags + 1] on the CPU."""
        if given.dim() == 2:
            if offsets is not None:
                raise RequestError(f"table {self.fqn!r}: ids of two dimensions are bags: omit the offsets")
            return torch.arange(given.shape[0] + 1, dtype=torch.int64, device="cpu") * given.shape[1]
        if given.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise RequestError(f"table {self.fqn!r}: ids must be [bags, n], or [ids] with offsets [bags]")
        bounds = torch.from_numpy(as_ids(offsets))
        if self.include_last_offset:
            return bounds
        return torch.cat([bounds, torch.tensor([given.numel()], dtype=torch.int64, device="cpu")])


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    weight = module._parameters.get("weight")
    return None if weight is None else weight.dtype
