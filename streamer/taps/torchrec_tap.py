"""The tables of TorchRec's sharded embedding modules: where they are, and which part of them this rank has.

Source: `torchrec/distributed/{embedding,embeddingbag,embedding_lookup,batched_embedding_kernel}.py`, torchrec 1.8.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.fbgemm_tap import FusedTables, is_table_batched
from headrace.streamer.taps.local_parts import Replicas, owned_part, replicas_in
from headrace.streamer.taps.model_tree import is_a
from headrace.streamer.taps.row_identities import RowIdentities
from headrace.streamer.taps.selection import Selection
from headrace.streamer.taps.tapped_table import TablePart
from headrace.streamer.taps.torch_optim_tap import TableParameter

__all__ = ["is_sharded", "managed_collisions", "sharded_tables"]

# Sharded modules, and the name under which they hold their tables in the `state_dict`.
_TABLES_AT = {"ShardedEmbeddingBagCollection": "embedding_bags", "ShardedEmbeddingCollection": "embeddings"}
# Sharded modules that hold one of those as a child and lend its lookups.
_CONTAINERS = ("ShardedFeatureProcessedEmbeddingBagCollection",)
# Modules that are not sharded and hold table-batched ones in a plain list.
_WITH_HIDDEN_TABLES = ("FusedEmbeddingBagCollection", "FusedEmbeddingCollection")


def is_sharded(path: str, module: nn.Module) -> bool:
    """Return whether a module is a sharded embedding module of TorchRec.

    Args:
        path: The module's path in the model, for the error.
        module: Any module.

    Raises:
        UnsupportedModelError: It is one that cannot be streamed.
    """
    if any(is_a(module, name) for name in _TABLES_AT):
        return True
    kind = type(module).__name__
    if is_a(module, "DMPCollection"):
        raise UnsupportedModelError(
            "a model in DMPCollection (2D parallel) has each row on several ranks: not streamed"
        )
    if is_a(module, "GenericITEPModule"):
        raise UnsupportedModelError(
            f"module {path!r} ({kind}) prunes rows while training and gives them to other ids (ITEP), which does not "
            f"show in the tables: not streamed"
        )
    if any(is_a(module, name) for name in _WITH_HIDDEN_TABLES):
        raise UnsupportedModelError(
            f"module {path!r} ({kind}) keeps its tables where they are not found: use EmbeddingBagCollection or "
            f"EmbeddingCollection under DistributedModelParallel"
        )
    if "ManagedCollisionEmbedding" in kind and not _is_managed(module):
        raise UnsupportedModelError(
            f"module {path!r} ({kind}) re-assigns rows to other ids (zero-collision hashing): only under "
            f"DistributedModelParallel, as ShardedManagedCollisionEmbedding[Bag]Collection, is it streamed"
        )
    if _is_managed(module):
        return False
    if hasattr(module, "_lookups") and not any(is_a(module, name) for name in _CONTAINERS):
        raise UnsupportedModelError(
            f"module {path!r} ({kind}) is a sharded module that is not streamed: use EmbeddingBagCollection or "
            f"EmbeddingCollection"
        )
    return False


def managed_collisions(module: Any) -> tuple[nn.Module, Any] | None:
    """Return the sharded module whose ids a module maps to rows, and the collection that maps them; None for others."""
    if not _is_managed(module):
        return None
    return module._embedding_module, module._managed_collision_collection


def _is_managed(module: nn.Module) -> bool:
    return is_a(module, "BaseShardedManagedCollisionEmbeddingCollection")


def sharded_tables(
    path: str, module: Any, selection: Selection, collisions: Any = None
) -> tuple[list[FusedTables], list[TableParameter]]:
    """Return the tables of a sharded module: those with a fused optimizer, and those that torch optimizers train.

    Args:
        path: The module's path in the unwrapped model.
        module: One for which `is_sharded` is true.
        selection: Says which of them are streamed.
        collisions: The collection that maps raw ids to its rows; None when the ids are rows.

    Raises:
        UnsupportedModelError: A table cannot be streamed.
    """
    tables_at = next(name for kind, name in _TABLES_AT.items() if is_a(module, kind))
    prefix = f"{path}.{tables_at}" if path else tables_at
    fused: list[FusedTables] = []
    parameters: list[TableParameter] = []
    for kernel, group in _kernels(module):
        if is_table_batched(kernel._emb_module):
            found = [_part(prefix, table) for table in kernel._config.embedding_tables]
            parts = tuple(part if selection.takes(part.fqn) else None for part in found)
            if any(parts):
                identities = {
                    part.fqn: RowIdentities(
                        part.fqn, collisions._managed_collision_modules[table.name], part.row_offset
                    )
                    for part, table in zip(parts, kernel._config.embedding_tables, strict=True)
                    if part is not None and collisions is not None
                }
                fused.append(
                    FusedTables(
                        module=kernel._emb_module,
                        parts=parts,
                        identities=identities,
                        is_in_use=functools.partial(_has_kernel, module, kernel),
                    )
                )
        elif collisions is None and (is_a(kernel, "BatchedDenseEmbedding") or is_a(kernel, "BatchedDenseEmbeddingBag")):
            parameters += _dense_tables(prefix, module, tables_at, kernel, group, selection)
        else:
            fqns = [f"{prefix}.{table.name}.weight" for table in kernel._config.embedding_tables]
            if not any([selection.takes(fqn) for fqn in fqns]):
                continue
            names = ", ".join(map(repr, fqns))
            raise UnsupportedModelError(
                f"tables {names}: kernel {type(kernel).__name__} is not streamed; use the kernel FUSED or DENSE"
            )
    return fused, parameters


def _has_kernel(module: Any, kernel: Any) -> bool:
    """Return whether a kernel is still that of a sharded module, which resharding makes anew."""
    return any(other is kernel for other, _ in _kernels(module))


def _kernels(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what holds the groups of tables, and the process group that keeps them equal if they are data-parallel."""
    for lookup in module._lookups:
        group = None
        while is_a(lookup, "DistributedDataParallel"):
            lookup, group = lookup.module, lookup.process_group
        for kernel in lookup._emb_modules:
            yield kernel, group


def _part(prefix: str, table: Any) -> TablePart:
    """Describe a table, or the shard of it that is here.

    Args:
        prefix: Path of the tables in the unwrapped model.
        table: `ShardedEmbeddingTable`.
    """
    fqn = f"{prefix}.{table.name}.weight"
    if table.local_metadata is None:  # data-parallel: all of it is here
        return TablePart(fqn=fqn, num_rows=table.num_embeddings, dim=table.embedding_dim)
    row_offset, column_offset = table.local_metadata.shard_offsets
    num_rows, dim = table.global_metadata.size
    return TablePart(fqn=fqn, num_rows=num_rows, dim=dim, row_offset=row_offset, column_offset=column_offset)


def _dense_tables(
    prefix: str, module: Any, tables_at: str, kernel: Any, group: Any, selection: Selection
) -> Iterator[TableParameter]:
    """Yield the tables of a kernel without an optimizer of its own, as the parameters that the model shows."""
    for table in kernel._config.embedding_tables:
        part = _part(prefix, table)
        if not selection.takes(part.fqn):
            continue
        if kernel.table_name_to_count[table.name] > 1:
            raise UnsupportedModelError(
                f"table {part.fqn!r} has several shards of the kernel DENSE on one rank: use the kernel FUSED"
            )
        parameter = getattr(module, tables_at)[table.name].weight
        if table.local_metadata is None:
            part = owned_part(part, parameter.shape[0], _replicas(part.fqn, group))
        is_in_use = functools.partial(_has_kernel, module, kernel)
        yield TableParameter(parts=(part,), parameter=parameter, is_sparse=False, is_in_use=is_in_use)


def _replicas(fqn: str, group: Any) -> Replicas:
    """Return the ranks that hold a data-parallel table."""
    if group is not None:
        return replicas_in(fqn, group)
    if torch.distributed.get_world_size() > 1:
        raise UnsupportedModelError(
            f"table {fqn!r} is data-parallel on {torch.distributed.get_world_size()} ranks and not inside "
            f"DistributedDataParallel: nothing keeps its copies equal; wrap the model in DistributedModelParallel"
        )
    return Replicas(0, 1)
