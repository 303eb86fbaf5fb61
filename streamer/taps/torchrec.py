"""Find the tables of TorchRec's sharded embedding modules, and the parts of them on this rank.

Source: `torchrec/distributed/{embedding,embeddingbag,embedding_lookup,batched_embedding_kernel}.py`, torchrec 1.8.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.collisions import Evictions, IdentitySource, identities_of
from headrace.streamer.taps.fbgemm import FusedTables, is_table_batched
from headrace.streamer.taps.guards.unstreamed_modules import Unstreamed
from headrace.streamer.taps.local_parts import Replicas, replica_part, replicas_in
from headrace.streamer.taps.model_tree import Selection, or_without
from headrace.streamer.taps.synced_copies import SyncedTables
from headrace.streamer.taps.tapped_table import TablePart
from headrace.streamer.taps.torch_optim import TableParameter

__all__ = [
    "has_kernel",
    "has_sharded",
    "is_sharded",
    "managed_collisions",
    "sharded_tables",
    "table_part",
    "unsharded_collisions",
]

# Sharded modules, and the name of their tables in the `state_dict`.
_TABLES_AT = {"ShardedEmbeddingBagCollection": "embedding_bags", "ShardedEmbeddingCollection": "embeddings"}
# Sharded modules that hold one of those as a child and use its lookups.
_CONTAINERS = ("ShardedFeatureProcessedEmbeddingBagCollection",)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded embedding module of TorchRec whose tables `sharded_tables` finds."""
    return any(is_a(module, name) for name in _TABLES_AT)


def has_sharded(module: nn.Module) -> bool:
    """Return whether a module holds a sharded one as a child and uses its lookups."""
    return _is_managed(module) or any(is_a(module, name) for name in _CONTAINERS)


def managed_collisions(module: Any) -> tuple[nn.Module, Any] | None:
    """Return a managed-collision module's sharded module of tables, and itself; None for others."""
    return (module._embedding_module, module) if _is_managed(module) else None


def unsharded_collisions(module: Any) -> dict[nn.Module, Any]:
    """Return, by the modules of its tables, what gives their rows to raw ids in an unsharded managed-collision module.

    None of other modules.
    """
    if not is_a(module, "BaseManagedCollisionEmbeddingCollection"):
        return {}
    inner = module._embedding_module
    tables = inner.embedding_bags if is_a(inner, "EmbeddingBagCollection") else inner.embeddings
    by_name = module._managed_collision_collection._managed_collision_modules
    return {tables[name]: by_name[name] for name in by_name}


def _is_managed(module: nn.Module) -> bool:
    return is_a(module, "BaseShardedManagedCollisionEmbeddingCollection")


def sharded_tables(
    path: str, module: Any, selection: Selection, collisions: Any = None, synced_by: Any = None
) -> tuple[list[FusedTables], list[TableParameter], list[Unstreamed], list[SyncedTables]]:
    """Return the selected tables of a sharded module: those with a fused optimizer, those of torch optimizers, others.

    And, of those with a fused optimizer, those that are in several groups of ranks, on each rank.

    `collisions` is the managed-collision module around it, which maps raw ids to rows; None if ids are rows.
    `synced_by` is the `DMPCollection` around the module: each row is then in several groups of ranks, of which the
    first streams it. The others are tables of kernels that cannot be streamed.
    """
    is_replicated = is_a(getattr(module, "_env", None), "ShardingEnv2D")
    tables_at = next(name for kind, name in _TABLES_AT.items() if is_a(module, kind))
    prefix = f"{path}.{tables_at}" if path else tables_at
    fused: list[FusedTables] = []
    parameters: list[TableParameter] = []
    unstreamed: list[Unstreamed] = []
    synced: list[SyncedTables] = []
    evictions = None if collisions is None else Evictions(collisions, prefix)
    for kernel, group in _kernels(module):
        if is_table_batched(kernel._emb_module):
            found = [table_part(_fqn(prefix, table), table) for table in kernel._config.embedding_tables]
            parts = tuple(part if selection.takes(part.fqn) else None for part in found)
            owns_rows = any(parts)
            if owns_rows and is_replicated:
                owns_rows = _owns_rows(path, module._env, collisions, synced_by)
                ranks = tuple(sorted(torch.distributed.get_process_group_ranks(module._env.replica_pg)))
                synced.append(SyncedTables(module=kernel._emb_module, parts=parts, ranks=ranks, synced_by=synced_by))
            if owns_rows:
                identities: dict[str, IdentitySource] = {}
                for part, table in zip(parts, kernel._config.embedding_tables, strict=True):
                    if part is not None and collisions is not None:
                        collision = collisions._managed_collision_collection._managed_collision_modules[table.name]
                        identities[part.fqn] = identities_of(part.fqn, collision, part.row_offset)
                is_in_use = functools.partial(has_kernel, module, kernel)
                tables = FusedTables(
                    module=kernel._emb_module,
                    parts=parts,
                    identities=identities,
                    evictions=evictions,
                    is_in_use=is_in_use,
                    synced_by=synced_by,
                )
                fused.append(tables)
        elif (
            collisions is None
            and (group is not None or not is_replicated)
            and (is_a(kernel, "BatchedDenseEmbedding") or is_a(kernel, "BatchedDenseEmbeddingBag"))
        ):
            parameters += _dense_tables(prefix, module, tables_at, kernel, group, selection)
        else:
            reason = "rows of its kernel cannot be read: use the kernel FUSED or DENSE"
            kind = type(kernel).__name__
            fqns = [_fqn(prefix, table) for table in kernel._config.embedding_tables]
            unstreamed += [Unstreamed(path=fqn, kind=kind, reason=reason, names=(fqn,)) for fqn in fqns]
    return fused, parameters, unstreamed, synced


def _owns_rows(path: str, env: Any, collisions: Any, synced_by: Any) -> bool:
    """Return whether this rank's group is the one that streams the rows of a module of a `DMPCollection`."""
    reason = ""
    if synced_by is None:
        reason = "its rows are synced by a DMPCollection: attach that, not a part of it"
    elif collisions is not None:
        reason = (
            "DMPCollection merges the ids of zero-collision hashing in each sync, so rows get other ids: shard it with "
            "DistributedModelParallel"
        )
    elif env.sharding_strategy.name == "FULLY_SHARDED":
        reason = "FULLY_SHARDED cuts its rows over the groups between steps: use another sharding_strategy"
    if reason:
        raise UnsupportedModelError(f"module {path!r} is not streamed: {reason}{or_without(f'{path}.*')}")
    return torch.distributed.get_rank(env.replica_pg) == 0


def has_kernel(module: Any, kernel: Any) -> bool:
    """Return whether a sharded module still has a kernel; resharding creates new ones."""
    return any(other is kernel for other, _ in _kernels(module))


def _kernels(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each kernel (a group of tables), and the process group that keeps it equal if it is data-parallel."""
    for lookup in module._lookups:
        group = None
        while is_a(lookup, "DistributedDataParallel"):
            lookup, group = lookup.module, lookup.process_group
        for kernel in lookup._emb_modules:
            yield kernel, group


def _fqn(prefix: str, table: Any) -> str:
    return f"{prefix}.{table.name}.weight"


def table_part(fqn: str, table: Any) -> TablePart:
    """Describe a table, or the shard of it on this rank, from a `ShardedEmbeddingTable`."""
    if table.local_metadata is None:  # data-parallel: this rank has all of it
        return TablePart(fqn=fqn, num_rows=table.num_embeddings, dim=table.embedding_dim)
    row_offset, column_offset = table.local_metadata.shard_offsets
    num_rows, dim = table.global_metadata.size
    return TablePart(fqn=fqn, num_rows=num_rows, dim=dim, row_offset=row_offset, column_offset=column_offset)


def _dense_tables(
    prefix: str, module: Any, tables_at: str, kernel: Any, group: Any, selection: Selection
) -> Iterator[TableParameter]:
    """Yield the tables of a kernel without a fused optimizer, as the parameters that the model shows."""
    for table in kernel._config.embedding_tables:
        part = table_part(_fqn(prefix, table), table)
        if not selection.takes(part.fqn):
            continue
        if kernel.table_name_to_count[table.name] > 1:
            raise UnsupportedModelError(
                f"table {part.fqn!r} has several DENSE shards on one rank: use FUSED{or_without(part.fqn)}"
            )
        parameter = getattr(module, tables_at)[table.name].weight
        if table.local_metadata is None:
            part = replica_part(part, parameter.shape[0], _replicas(part.fqn, group))
        is_in_use = functools.partial(has_kernel, module, kernel)
        yield TableParameter(
            parts=(part,),
            parameter=parameter,
            is_sparse=False,
            why_unfused=_why_unfused(table, group),
            replica_groups=() if group is None else (group,),
            is_in_use=is_in_use,
        )


def _why_unfused(table: Any, group: Any) -> str:
    if group is not None:
        return " (TorchRec's plan makes it data-parallel, so no fused optimizer trains it)"
    return f" (TorchRec's plan gives it the compute kernel {table.compute_kernel.value}, without a fused optimizer)"


def _replicas(fqn: str, group: Any) -> Replicas:
    if group is not None:
        return replicas_in(fqn, group)
    if torch.distributed.get_world_size() > 1:
        raise UnsupportedModelError(
            f"table {fqn!r} is data-parallel on {torch.distributed.get_world_size()} ranks and not inside "
            f"DistributedDataParallel: nothing keeps its copies equal: wrap the model in DistributedModelParallel"
            f"{or_without(fqn)}"
        )
    return Replicas(0, 1)
