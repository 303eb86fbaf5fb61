"""A table whose rows are given to other raw ids while it trains (zero-collision hashing), streamed from ranks."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec_models import fuse, parallel, plan_of

__all__ = [
    "BATCH",
    "DIM",
    "ROWS",
    "Kind",
    "collision_model",
    "drifting_ids",
    "marks_and_changes",
    "train_collisions_on_rank",
    "unsharded_model",
    "values_of",
]

ROWS = {"mch": 41, "mpzch": 40, "mpzch-counts": 40, "mpzch-numbers": 40}
DIM = 8
BATCH = 12
_BUCKETS = 4

Kind = Literal["mch", "mpzch", "mpzch-counts", "mpzch-numbers"]
"""What gives rows to raw ids: by frequency over some steps, or in each lookup (emulated, see `hash_zch`).

The last two have runtime meta: how often each id was looked up, or two numbers that come with it.
"""


def collision_module(kind: Kind, name: str, eviction_interval: int) -> Any:
    """Return a module that gives rows to the raw ids of a table `name`, and evicts ids."""
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

    cpu = torch.device("cpu")
    if kind == "mch":
        return MCHManagedCollisionModule(
            zch_size=ROWS[kind], device=cpu, eviction_policy=LFU_EvictionPolicy(), eviction_interval=eviction_interval
        )
    from hash_zch import EmulatedHashZch
    from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EmulatedHashZch(
            zch_size=ROWS[kind],
            device=cpu,
            total_num_buckets=_BUCKETS,
            eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION,
            eviction_config=HashZchEvictionConfig(features=["u"], single_ttl=1),
            name=name,
            track_id_freq=kind == "mpzch-counts",
            write_runtime_meta_dim=2 * (kind == "mpzch-numbers"),
        )


def collision_model(
    name: str, is_bag: bool, eviction_interval: int, *, kind: Kind = "mch", optimizer: str = "adagrad"
) -> Any:
    """Return a sharded model whose module is named `name`; it gives its loss."""
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder

    root = unsharded_model(name, is_bag, eviction_interval, kind=kind)
    module = getattr(root, name)
    fuse(optimizer, module._embedding_module.parameters())
    sharder = (
        ManagedCollisionEmbeddingBagCollectionSharder() if is_bag else ManagedCollisionEmbeddingCollectionSharder()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parallel(root, {name: plan_of(module, {"users": plans.row_wise()}, sharder)}, sharder)


def unsharded_model(name: str, is_bag: bool, eviction_interval: int, *, kind: Kind) -> Any:
    """Return the model without a sharding."""
    import torchrec
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    cpu = torch.device("cpu")
    config = torchrec.EmbeddingBagConfig if is_bag else torchrec.EmbeddingConfig
    tables = [config(name="users", num_embeddings=ROWS[kind], embedding_dim=DIM, feature_names=["u"])]
    collection = (torchrec.EmbeddingBagCollection if is_bag else torchrec.EmbeddingCollection)(
        tables=tables, device=cpu
    )
    collisions = ManagedCollisionCollection({"users": collision_module(kind, "users", eviction_interval)}, tables)
    make = ManagedCollisionEmbeddingBagCollection if is_bag else ManagedCollisionEmbeddingCollection
    module = make(collection, collisions, return_remapped_features=False)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, module)

        def forward(self, features: Any) -> torch.Tensor:
            output, _ = getattr(self, name)(features)
            values = output.values() if is_bag else torch.cat([of.values() for of in output.values()])
            return (values - 1).pow(2).sum()  # type: ignore[no-any-return]

    return Root()


def drifting_ids(step: int, generator: torch.Generator, *, has_numbers: bool = False) -> Any:
    """Return a batch of raw ids: those of the first steps are not asked for again, and lose their rows.

    With numbers, each has four float32, of which two are one of the runtime meta.
    """
    import torchrec

    ids = (torch.rand(BATCH, generator=generator) * 40).long() * 7_777_777_777 + step // 3 * 2**45
    ids += torch.arange(BATCH) % 2 * 2**62  # for both of two ranks
    numbers = torch.rand(BATCH, 4, generator=generator) if has_numbers else None
    lengths = torch.ones(BATCH, dtype=torch.int64)
    return torchrec.KeyedJaggedTensor(keys=["u"], values=ids, lengths=lengths, weights=numbers)


def train_collisions_on_rank(
    rank: int,
    address: str,
    name: str,
    is_bag: bool,
    publish: str,
    num_steps: int,
    eviction_interval: int,
    kind: Kind = "mch",
    optimizer: str = "adagrad",
    is_sharded: bool = True,
) -> dict[str, Any]:
    """Train on raw ids of which more come than there are rows; return rows, states and the id of each row.

    Without a sharding torch's Adagrad trains the table.
    """
    from hash_zch import Hours

    from headrace.streamer import RawEmbeddingStreamer

    hours = Hours(pytest.MonkeyPatch())
    steps: list[torch.optim.Optimizer] = []
    if is_sharded:
        model = collision_model(name, is_bag, eviction_interval, kind=kind, optimizer=optimizer)
    else:
        model = unsharded_model(name, is_bag, eviction_interval, kind=kind)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        steps.append(torch.optim.Adagrad(trained, lr=0.1))
    generator = torch.Generator().manual_seed(rank)
    seen: list[set[int]] = []
    marked: list[tuple[int, int]] = []
    with RawEmbeddingStreamer(address, run=name, flush_interval_s=3600.0) as streamer:  # marks stay until they are seen
        streamer.attach(model, steps, publish=publish)  # type: ignore[arg-type]
        (table,) = streamer.tables
        streamer.flush()
        for step in range(num_steps):
            before = values_of(table)
            model.zero_grad()
            model(drifting_ids(step, generator, has_numbers=kind == "mpzch-numbers")).backward()
            for each in steps:
                each.step()
            hours.now += 1
            seen.append({int(i) for i in table.identities() if i >= 0})
            marked.append(marks_and_changes(table, before))
            # Each step's rows on their own: later marks would make up for marks that were lost.
            if is_sharded:
                streamer.step()
            streamer.flush()
        dist.barrier()
        step = streamer.stats().step
    state = model.state_dict()
    fqn = f"{name}._embedding_module.{'embedding_bags' if is_bag else 'embeddings'}.users.weight"
    assert fqn == table.spec.fqn
    weights, row_offset = state[fqn], 0
    if is_sharded:
        (shard,) = weights.local_shards()
        weights, row_offset = shard.tensor, shard.metadata.shard_offsets[0]
    return {
        "fqn": fqn,
        "step": step,
        "row_offset": row_offset,
        "weights": weights.detach().numpy().copy(),
        "states": {name: state.numpy().copy() for name, state in table.states().items()},
        "rows_of_ids": rows_of_ids(kind, state, f"{name}._managed_collision_collection.", row_offset),
        "lost_ids": sorted(set().union(*seen) - seen[-1]),
        "marked": marked,
    }


def rows_of_ids(kind: Kind, state: dict[str, Any], prefix: str, row_offset: int) -> dict[int, int]:
    """Return the row of each raw id, by a module's `state_dict`; of the shard on this rank if it is sharded."""

    def local(name: str) -> torch.Tensor:
        value = state[f"{prefix}_managed_collision_modules.users.{name}"]
        return torch.cat([s.tensor for s in value.local_shards()]) if hasattr(value, "local_shards") else value

    if kind != "mch":
        raw_ids = local("_hash_zch_identities").view(-1)
        slots, has_id = torch.arange(raw_ids.numel()) + row_offset, raw_ids != -1
    else:
        raw_ids, slots = local("_mch_sorted_raw_ids"), local("_mch_remapped_ids_mapping")
        has_id = raw_ids != torch.iinfo(torch.int64).max
    return dict(zip(raw_ids[has_id].tolist(), slots[has_id].tolist(), strict=True))


def values_of(table: Any) -> list[torch.Tensor]:
    """Return copies of a tapped table's columns: weights, states with the runtime meta, identities."""
    return [table.weights().clone(), *(s.clone() for s in table.states().values()), table.identities().clone()]


def marks_and_changes(table: Any, before: list[torch.Tensor]) -> tuple[int, int]:
    """Return how many rows are marked, and how many have changed; each that has is marked."""
    has_changed = torch.zeros(table.num_local_rows, dtype=torch.bool)
    for old, new in zip(before, values_of(table), strict=True):
        has_changed |= (old.view(len(old), -1) != new.view(len(new), -1)).any(dim=1)
    is_marked = torch.as_tensor(table.dirty.contains(torch.arange(table.num_local_rows)))
    assert bool(is_marked[has_changed].all()), "a row has changed that is not marked"
    return int(is_marked.sum()), int(has_changed.sum())
