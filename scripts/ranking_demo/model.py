"""The demo's model: a factorization with one embedding row for each user and one for each item.

The score of a user and an item is the dot product of their rows; training tells each event's item from random ones.
FBGEMM's fused rowwise Adagrad updates the TorchRec tables in the backward pass, as in production, but small.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

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

from headrace.scripts.ranking_demo.events import TABLES, draw

__all__ = ["DemoModel", "process_group"]

# Tuned on the sample log, for the hit rate of the live tables. A row that was not trained on yet scores by its first
# values, from a normal distribution with this standard deviation.
_DIM, _LEARNING_RATE, _INIT_STD = 32, 0.3, 0.1
_NUM_RANDOM_ITEMS, _NUM_PASSES = 32, 2  # each pass over a batch is an optimizer step with other random items
_TRAINING_STREAM = 2  # first word of a generator's seed, different from that of ranking

_Ids = npt.NDArray[np.int64]


@contextmanager
def process_group() -> Iterator[None]:
    """Make this process the whole of a torch.distributed group. It needs no network port."""
    # gloo looks up the host's own name and complains if it does not resolve; loopback is always there.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the module's `__all__`
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class DemoModel:
    """The model under `DistributedModelParallel`, `dmp`, and its training step.

    `tables` are the live rows by fqn, float32[num_rows, dim]: views of the trainer's memory, not copies.
    """

    def __init__(self, *, num_users: int, num_items: int, seed: int) -> None:
        """Build and shard the model. REQUIRES: a process group of one, as `process_group` makes it."""
        self._seed = seed
        torch.manual_seed(seed)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of how TorchRec uses torch
        ebc = EmbeddingBagCollection(
            device=torch.device("cpu"), tables=[_make_table("user", num_users), _make_table("item", num_items)]
        )
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _LEARNING_RATE}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        # Without a kernel's name the plan takes the dense one, which has no fused optimizer.
        placement = {name: table_wise(rank=0, compute_kernel="fused") for name in ("user", "item")}
        plan = construct_module_sharding_plan(
            ebc, placement, sharder=sharder, world_size=1, local_size=1, device_type="cpu"
        )
        self.dmp = DistributedModelParallel(
            _Factorization(ebc), device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
        )
        states = self.dmp.state_dict()
        self.tables = {fqn: parameter.local_shards()[0].tensor.numpy() for fqn, parameter in states.items()}
        assert set(self.tables) == set(TABLES), sorted(self.tables)

    def train(self, batch: int, users: _Ids, items: _Ids, num_items_seen: _Ids) -> float:
        """Train on one batch, int64[b] each, and return the loss of its first pass, a mean over the events."""
        rng = np.random.default_rng((_TRAINING_STREAM, self._seed, batch))
        losses = []
        for _ in range(_NUM_PASSES):
            pairs = draw(rng, items, num_items_seen, _NUM_RANDOM_ITEMS)
            values = np.concatenate([np.repeat(users, pairs.shape[1]), pairs.ravel()])
            lengths = torch.ones(values.size, dtype=torch.int32)  # bags of one id: each user against each of its items
            features = KeyedJaggedTensor(keys=["user", "item"], values=torch.from_numpy(values), lengths=lengths)
            logits = self.dmp(features).view(pairs.shape)
            # A sum, not a mean: a row's step does not depend on how many others share its batch.
            loss = nn.functional.softplus(-logits[:, 0]).sum() + nn.functional.softplus(logits[:, 1:]).sum()
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            losses.append(loss.item() / users.size)
        return losses[0]


class _Factorization(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ebc(features).to_dict()
        scores: torch.Tensor = (rows["user"] * rows["item"]).sum(dim=1)
        return scores


def _make_table(name: str, num_rows: int) -> EmbeddingBagConfig:
    init = functools.partial(nn.init.normal_, std=_INIT_STD)
    sizes = {"num_embeddings": num_rows, "embedding_dim": _DIM}
    return EmbeddingBagConfig(name=name, feature_names=[name], init_fn=init, **sizes)
