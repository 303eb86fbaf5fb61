"""A model of TorchRec's sharded modules on one rank, its batches, and a tap on it that a mirror compares with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec_models
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec_models import plan_of

torchrec = pytest.importorskip("torchrec")
parallel = pytest.importorskip("torchrec.distributed.model_parallel")
plans = pytest.importorskip("torchrec.distributed.sharding_plan")
bags = pytest.importorskip("torchrec.distributed.embeddingbag")
sequences = pytest.importorskip("torchrec.distributed.embedding")
optimizers = pytest.importorskip("torchrec.optim")
Pipelineable: Any = pytest.importorskip("torchrec.streamable").Pipelineable

CPU = torch.device("cpu")
ROWS = {"bags.user": 60, "bags.item": 131, "more.user": 45, "sequence.item": 80}
FEATURES = {"bags.user": ["u"], "bags.item": ["i", "j"], "more.user": ["u"], "sequence.item": ["s"]}
FQNS = {
    "bags.user": "sparse.bags.embedding_bags.user.weight",
    "bags.item": "sparse.bags.embedding_bags.item.weight",
    "more.user": "sparse.more.embedding_bags.user.weight",
    "sequence.item": "sparse.sequence.embeddings.item.weight",
}
FUSED = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "row-wise-adagrad": (optimizers.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}),
}


@contextmanager
def one_rank() -> Iterator[None]:
    """One process and its own store: no port is taken."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Sparse(nn.Module):
    """Two modules with tables of the same short name, of bags and of sequences, of several dims."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        bag, one = torchrec.EmbeddingBagConfig, torchrec.EmbeddingConfig

        def config(kind: Any, name: str, dim: int) -> Any:
            return kind(
                name=name.split(".")[1],
                num_embeddings=ROWS[name],
                embedding_dim=dim,
                feature_names=FEATURES[name],
                data_type=dtype,
            )

        tables = [config(bag, "bags.user", 8), config(bag, "bags.item", 64)]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables, device=CPU)
        self.more = torchrec.EmbeddingBagCollection(tables=[config(bag, "more.user", 12)], device=CPU, is_weighted=True)
        self.sequence = torchrec.EmbeddingCollection(tables=[config(one, "sequence.item", 64)], device=CPU)


class Model(nn.Module):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.sparse = Sparse(dtype)
        self.dense = nn.Linear(8 + 2 * 64 + 12, 1)
        self.has_sequence = True

    def forward(self, bags: Any, more: Any, sequence: Any) -> torch.Tensor:
        pooled = torch.cat([self.sparse.bags(bags).values(), self.sparse.more(more).values()], dim=1)
        loss = self.dense(pooled.float()).pow(2).sum()
        if self.has_sequence:
            loss = loss + self.sparse.sequence(sequence)["s"].values().float().pow(2).sum()
        return loss


class PipelinedModel(Model):
    """The model as a train pipeline calls it: with one batch, giving its loss and what is to be shown."""

    def forward(self, batch: Any) -> Any:
        loss = super().forward(batch.bags, batch.more, batch.sequence)
        return loss, loss.detach()


class PipelinedBatch(Pipelineable):
    """A batch that a train pipeline can move."""

    def __init__(self, bags: Any, more: Any, sequence: Any) -> None:
        self.bags, self.more, self.sequence = bags, more, sequence

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelinedBatch:
        return self

    def record_stream(self, stream: Any) -> None:
        """There is none on a CPU."""

    def pin_memory(self) -> PipelinedBatch:
        return self


class Batch:
    """Random ids of a step: bags of 0 to 3, skewed so that rows repeat."""

    def __init__(self, seed: int, size: int = 4) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._size = size
        self._ids: dict[str, list[int]] = {name: [] for name in ROWS}
        self.inputs = (
            self._jagged(["bags.user", "bags.item"]),
            self._jagged(["more.user"], is_weighted=True),
            self._jagged(["sequence.item"]),
        )
        self.rows = {FQNS[name]: sorted(set(ids)) for name, ids in self._ids.items()}

    def _jagged(self, names: list[str], *, is_weighted: bool = False) -> Any:
        keys, values, lengths = [], [], []
        for name in names:
            for feature in FEATURES[name]:
                keys.append(feature)
                lengths.append(torch.randint(0, 4, (self._size,), generator=self._generator))
                skewed = torch.rand(int(lengths[-1].sum()), generator=self._generator) ** 2
                values.append((skewed * ROWS[name]).long())
                self._ids[name] += values[-1].tolist()
        return torchrec.KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.rand(sum(map(len, values)), generator=self._generator) + 0.1 if is_weighted else None,
        )


def sharded(optimizer: str | None, sharding: Any, dtype: str = "FP32", kind_of_model: type[Model] = Model) -> Any:
    """Make a model with fused optimizers (or none) under `DistributedModelParallel` on one rank.

    Args:
        optimizer: Key of `FUSED`; None leaves the tables to a torch optimizer.
        sharding: Makes each table's sharding.
        dtype: Name of TorchRec's data type.
        kind_of_model: What is made.
    """
    model = kind_of_model(getattr(torchrec.modules.embedding_configs.DataType, dtype))
    model.has_sequence = optimizer is not None  # on the CPU, FBGEMM's kernel DENSE pools where it should not
    sharders = [bags.EmbeddingBagCollectionSharder(), sequences.EmbeddingCollectionSharder()]
    if optimizer is not None:
        kind, settings = FUSED[optimizer]
        _apply_optimizer_in_backward(kind, model.sparse.parameters(), dict(settings))  # TorchRec adds to it
    shardings = {
        name: {fqn.split(".")[-2]: sharding() for key, fqn in FQNS.items() if key.startswith(f"{name}.")}
        for name, _ in model.sparse.named_children()
    }
    plan = {
        f"sparse.{name}": plan_of(module, shardings[name], sharders[name == "sequence"])
        for name, module in model.sparse.named_children()
    }
    return torchrec_models.parallel(model, plan, *sharders)


def step_batches(model: nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        model(*batch.inputs).backward()


def table_wise() -> Any:
    return plans.table_wise(rank=0)


def row_wise() -> Any:
    return plans.row_wise()


def column_wise() -> Any:
    return plans.column_wise(ranks=[0])
