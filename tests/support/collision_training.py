"""A table whose rows are given to other raw ids while it trains (zero-collision hashing), streamed from ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec_models import fuse, parallel, plan_of

__all__ = ["BATCH", "DIM", "ROWS", "collision_model", "drifting_ids", "train_collisions_on_rank"]

ROWS = 41
DIM = 8
BATCH = 12


def collision_model(name: str, is_bag: bool, eviction_interval: int) -> Any:
    """Return a sharded model whose module is named `name`; it gives its loss."""
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule

    cpu = torch.device("cpu")
    config = torchrec.EmbeddingBagConfig if is_bag else torchrec.EmbeddingConfig
    tables = [config(name="users", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["u"])]
    collection = (torchrec.EmbeddingBagCollection if is_bag else torchrec.EmbeddingCollection)(
        tables=tables, device=cpu
    )
    collisions = ManagedCollisionCollection(
        {
            "users": MCHManagedCollisionModule(
                zch_size=ROWS, device=cpu, eviction_policy=LFU_EvictionPolicy(), eviction_interval=eviction_interval
            )
        },
        tables,
    )
    make = ManagedCollisionEmbeddingBagCollection if is_bag else ManagedCollisionEmbeddingCollection
    module = make(collection, collisions, return_remapped_features=False)
    fuse("adagrad", module._embedding_module.parameters())
    sharder = (
        ManagedCollisionEmbeddingBagCollectionSharder() if is_bag else ManagedCollisionEmbeddingCollectionSharder()
    )

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, module)

        def forward(self, features: Any) -> torch.Tensor:
            output, _ = getattr(self, name)(features)
            values = output.values() if is_bag else torch.cat([of.values() for of in output.values()])
            return (values - 1).pow(2).sum()  # type: ignore[no-any-return]

    return parallel(Root(), {name: plan_of(module, {"users": plans.row_wise()}, sharder)}, sharder)


def drifting_ids(step: int, generator: torch.Generator) -> Any:
    """Return a batch of raw ids: those of the first steps are not asked for again, and lose their rows."""
    import torchrec

    ids = (torch.rand(BATCH, generator=generator) * 40).long() * 7_777_777_777 + step // 3 * 2**45
    return torchrec.KeyedJaggedTensor(keys=["u"], values=ids, lengths=torch.ones(BATCH, dtype=torch.int64))


def train_collisions_on_rank(
    rank: int, address: str, name: str, is_bag: bool, publish: str, num_steps: int, eviction_interval: int
) -> dict[str, Any]:
    """Train on raw ids of which more come than there are rows; return rows, states and the id of each row."""
    from headrace.streamer import RawEmbeddingStreamer

    model = collision_model(name, is_bag, eviction_interval)
    generator = torch.Generator().manual_seed(rank)
    seen: list[set[int]] = []
    with RawEmbeddingStreamer(address, run=name) as streamer:
        streamer.attach(model, publish=publish)  # type: ignore[arg-type]
        (table,) = streamer.tables
        for step in range(num_steps):
            model(drifting_ids(step, generator)).backward()
            seen.append({int(i) for i in table.identities() if i >= 0})
            # Each step's rows on their own: an eviction marks all rows, and would make up for marks that were lost.
            streamer.step()
            streamer.flush()
        dist.barrier()
        step = streamer.stats().step
    state = model.state_dict()
    prefix = f"{name}._managed_collision_collection._managed_collision_modules.users."
    raw_ids, slots = (
        torch.cat([shard.tensor for shard in state[prefix + part].local_shards()])
        for part in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
    )
    (fqn,) = [key for key in state if key.endswith("users.weight")]
    assert fqn == table.spec.fqn
    (shard,) = state[fqn].local_shards()
    has_id = raw_ids != torch.iinfo(torch.int64).max
    return {
        "fqn": fqn,
        "step": step,
        "row_offset": shard.metadata.shard_offsets[0],
        "weights": shard.tensor.detach().numpy().copy(),
        "sum": table.states()["sum"].numpy().copy(),
        "rows_of_ids": dict(zip(raw_ids[has_id].tolist(), slots[has_id].tolist(), strict=True)),
        "lost_ids": sorted(set().union(*seen) - seen[-1]),
    }
