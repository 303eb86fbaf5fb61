"""The model that the demo trains: a factorization with one embedding row a user and one an item.

The score of a user and an item is the dot product of their rows, and training tells each event's item from random ones.
The tables are TorchRec's, sharded by `DistributedModelParallel` over one process, and FBGEMM's fused rowwise Adagrad
updates them in the backward pass: what a production trainer runs, but small.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from headrace.scripts.demo_ranking import pair_with_random_items

__all__ = ["ITEM_FQN", "USER_FQN", "DemoModel", "ModelConfig", "process_group"]

USER_FQN = "ebc.embedding_bags.user.weight"
ITEM_FQN = "ebc.embedding_bags.item.weight"
_CPU = torch.device("cpu")
_Ids = npt.NDArray[np.int64]

# First word of a generator's seed; another than that of ranking.
_TRAINING_STREAM = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and training settings. The defaults suit the sample log: tuned on it, for the live tables' hit rate.

    Attributes:
        num_users: Rows of the user table, ≥ 1.
        num_items: Rows of the item table, ≥ 1.
        seed: Seed of the first rows and of the random items, ≥ 0.
        dim: Columns of both tables.
        learning_rate: Of rowwise Adagrad, > 0.
        init_std: Standard deviation of the normal distribution of the first rows, > 0. A user or item that has not been
            trained on yet is scored by its first row.
        num_random_items: Random items that an event's item is told from.
        num_passes: Optimizer steps a batch, each with other random items.
    """

    num_users: int
    num_items: int
    seed: int
    dim: int = 32
    learning_rate: float = 0.3
    init_std: float = 0.1
    num_random_items: int = 32
    num_passes: int = 2


@contextmanager
def process_group() -> Iterator[None]:
    """Make this process the whole of a torch.distributed group for the block. It needs no network port."""
    # gloo asks for the host's own name and complains where that does not resolve; loopback is always there.
    is_named = "GLOO_SOCKET_IFNAME" in os.environ
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the module's `__all__`
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        if not is_named:
            del os.environ["GLOO_SOCKET_IFNAME"]


class DemoModel:
    """The model under `DistributedModelParallel`, and its training step.

    Attributes:
        config: As given.
        dmp: The sharded model, to be attached to a streamer.
        tables: The live rows by fqn, float32[num_rows, dim]: views of the trainer's memory, not copies.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build and shard the model. REQUIRES: a process group of one, as `process_group` makes it."""
        self.config = config
        torch.manual_seed(config.seed)
        ebc = EmbeddingBagCollection(
            device=_CPU,
            tables=[_table("user", config.num_users, config), _table("item", config.num_items, config)],
        )
        self.dmp = _shard(_Factorization(ebc), ebc, config)
        self.tables = {
            fqn: parameter.local_shards()[0].tensor.numpy() for fqn, parameter in self.dmp.state_dict().items()
        }
        assert set(self.tables) == {USER_FQN, ITEM_FQN}, sorted(self.tables)

    def train(self, batch: int, users: _Ids, items: _Ids, num_items_seen: _Ids) -> float:
        """Train on one batch and return its loss, a mean over the events, at the first pass.

        Args:
            batch: Number of the batch, which with the seed decides the random items.
            users: int64[b], each event's user row.
            items: int64[b], each event's item row.
            num_items_seen: int64[b], as `Replay.num_items_seen` has them.
        """
        rng = np.random.default_rng((_TRAINING_STREAM, self.config.seed, batch))
        losses = []
        for _ in range(self.config.num_passes):
            pairs = pair_with_random_items(rng, items, num_items_seen, self.config.num_random_items)
            with _quiet("torch.fx._symbolic_trace"):
                logits = self.dmp(_to_features(users, pairs)).view(pairs.shape)
            # Summed, not averaged: a row's step does not depend on how many others share its batch.
            loss = nn.functional.softplus(-logits[:, 0]).sum() + nn.functional.softplus(logits[:, 1:]).sum()
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            losses.append(loss.item() / users.size)
        return losses[0]


class _Factorization(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return float32[n]: the score of each of n pairs of a user and an item."""
        rows = self.ebc(features).to_dict()
        scores: torch.Tensor = (rows["user"] * rows["item"]).sum(dim=1)
        return scores


def _table(name: str, num_rows: int, config: ModelConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=num_rows,
        embedding_dim=config.dim,
        feature_names=[name],
        init_fn=functools.partial(nn.init.normal_, std=config.init_std),
    )


def _shard(model: _Factorization, ebc: EmbeddingBagCollection, config: ModelConfig) -> Any:
    """Return the model under `DistributedModelParallel`, both tables whole on this rank."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": config.learning_rate}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    # Without the kernel's name a hand-made plan takes the dense one, which has no fused optimizer.
    placement = {name: table_wise(rank=0, compute_kernel="fused") for name in ("user", "item")}
    plan = construct_module_sharding_plan(
        ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type=_CPU.type
    )
    return DistributedModelParallel(model, device=_CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder])


def _to_features(users: _Ids, pairs: _Ids) -> KeyedJaggedTensor:
    """Return a batch of b × k bags a feature, one id in each: every event's user against each item of its row."""
    values = np.concatenate([np.repeat(users, pairs.shape[1]), pairs.ravel()])
    return KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.from_numpy(values),
        lengths=torch.ones(values.size, dtype=torch.int32),
    )


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Hold back a library's remark about how it uses torch, which the user can do nothing about."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
