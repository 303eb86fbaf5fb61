"""TorchRec models under `DistributedModelParallel`: what is marked at a boundary is all that changed, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard
from headrace.streamer.tap import Tap, tap_model

pytestmark = pytest.mark.torchrec

torchrec = pytest.importorskip("torchrec")
parallel = pytest.importorskip("torchrec.distributed.model_parallel")
plans = pytest.importorskip("torchrec.distributed.sharding_plan")
types = pytest.importorskip("torchrec.distributed.types")
bags = pytest.importorskip("torchrec.distributed.embeddingbag")
sequences = pytest.importorskip("torchrec.distributed.embedding")
optimizers = pytest.importorskip("torchrec.optim")
pipelines = pytest.importorskip("torchrec.distributed.train_pipeline.train_pipelines")
Pipelineable: Any = pytest.importorskip("torchrec.streamable").Pipelineable
keyed = pytest.importorskip("torchrec.optim.keyed")

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


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
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
    plan = {
        f"sparse.{name}": plans.construct_module_sharding_plan(
            module,
            {fqn.split(".")[-2]: sharding() for key, fqn in FQNS.items() if key.startswith(f"{name}.")},
            sharder=sharders[name == "sequence"],
            world_size=1,
            local_size=1,
            device_type="cpu",
        )
        for name, module in model.sparse.named_children()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parallel.DistributedModelParallel(model, device=CPU, plan=types.ShardingPlan(plan), sharders=sharders)


def tapped(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[Tap, Mirror]:
    mirror = Mirror()
    tap = tap_model(model, optimizers, mirror.on_step)
    mirror.watch(tap)
    return tap, mirror


def step_batches(model: nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        model(*batch.inputs).backward()


def table_wise() -> Any:
    return plans.table_wise(rank=0)


def row_wise() -> Any:
    return plans.row_wise()


def column_wise() -> Any:
    return plans.column_wise(ranks=[0])


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
@pytest.mark.parametrize("sharding", [table_wise, row_wise, column_wise])
@pytest.mark.parametrize("optimizer", list(FUSED))
def test_mirror_equals_tables_at_every_boundary(optimizer: str, sharding: Any, dtype: str) -> None:
    """A copy that takes only the dirty rows equals all weights and states, and the batch's rows are the dirty ones."""
    model = sharded(optimizer, sharding, dtype)
    tap, mirror = tapped(model, [])
    assert {table.spec.fqn for table in tap.tables} == set(FQNS.values())
    assert {table.spec.fqn for table in tap.tables} < set(model.state_dict())
    batches = [Batch(seed) for seed in range(6)]
    step_batches(model, batches)
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
    tap.close()


@pytest.mark.parametrize("kind", ["TrainPipelineBase", "TrainPipelineSparseDist"])
def test_a_train_pipeline_is_a_training_loop(kind: str) -> None:
    """The next batch's ids are dealt out before a step has ended; its rows are marked in the step that changes them."""
    model = sharded("row-wise-adagrad", row_wise, kind_of_model=PipelinedModel)
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if "dense" in name], lr=0.1)
    tap, mirror = tapped(model, [])
    batches = [Batch(seed) for seed in range(6)]
    pipeline = getattr(pipelines, kind)(model, dense, CPU)
    inputs = iter([PipelinedBatch(*batch.inputs) for batch in batches])
    for _ in batches:
        pipeline.progress(inputs)
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
    assert bool(getattr(pipeline, "_pipelined_modules", ())) == (kind == "TrainPipelineSparseDist")
    tap.close()


def test_comparison_notices_a_lost_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror test fails when one row of a batch is not marked, so its success means something."""
    mark = DirtyRows.mark
    monkeypatch.setattr(DirtyRows, "mark", lambda self, ids: mark(self, ids.flatten().unique()[1:]))
    model = sharded("sgd", table_wise)
    tap, _ = tapped(model, [])
    step_batches(model, [Batch(1)])
    with pytest.raises(AssertionError, match=r"weights: rows \[\d+\] differ"):
        tap.end_step()


def test_tables_of_lookups_that_are_made_anew_are_told() -> None:
    """Resharding gives a module new lookups, and the attached ones train no more: the next flush says so."""
    dmp = sharded("sgd", table_wise)
    tap, _ = tapped(dmp, [])
    assert not tap.end_step()
    for module in dmp.modules():
        if hasattr(module, "_lookups"):
            module._lookups.clear()
            module._create_lookups()
    with pytest.raises(UnsupportedModelError, match=r"is not what was attached: the model has another module"):
        tap.end_step()


def test_values_are_those_of_the_state_dict() -> None:
    """The tap reads the same numbers that a checkpoint would hold."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, _ = tapped(model, [])
    step_batches(model, [Batch(1), Batch(2)])
    stored = model.state_dict()
    for table in tap.tables:
        shard = stored[table.spec.fqn].local_shards()[0].tensor
        assert torch.equal(table.weights(), shard)
        assert (table.spec.num_rows, table.spec.dim) == shard.shape
        assert list(table.states()) == ["sum"]


def test_two_column_shards_on_one_rank() -> None:
    """Column shards of one table are parts of the same table, each with its own states and offset."""
    model = sharded("row-wise-adagrad", lambda: plans.column_wise(ranks=[0, 0]))
    tap, mirror = tapped(model, [])
    item = [table for table in tap.tables if table.spec.fqn == FQNS["bags.item"]]
    assert [table.shard for table in item] == [ColumnShard(offset=0, width=32), ColumnShard(offset=32, width=32)]
    assert item[0].spec == item[1].spec
    assert (item[0].spec.dim, item[0].spec.num_rows) == (64, 131)
    batch = Batch(1)
    step_batches(model, [batch])
    assert tap.end_step()
    fqn = FQNS["bags.item"]
    assert mirror.taken[0][f"{fqn}[0:32]"] == mirror.taken[0][f"{fqn}[32:64]"] == batch.rows[fqn]
    whole = torch.cat([table.weights() for table in item], dim=1)
    shards = model.state_dict()[fqn].local_shards()
    assert torch.equal(whole, torch.cat([shard.tensor for shard in shards], dim=1))


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("sharding", [plans.data_parallel, table_wise], ids=["data-parallel", "table-wise"])
def test_tables_with_a_torch_optimizer(sharding: Any, kind: str, dtype: str) -> None:
    """Tables of the kernel DENSE, data-parallel ones too, are followed through their optimizer."""
    model = sharded(None, sharding, dtype)
    make, settings = FUSED[kind]
    optimizer = keyed.KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: make(p, **settings))
    tap, mirror = tapped(model, [optimizer])
    assert {table.spec.fqn for table in tap.tables} == set(FQNS.values())
    batches = [Batch(seed) for seed in range(5)]
    for batch in batches:
        optimizer.zero_grad()
        step_batches(model, [batch])
        optimizer.step()
    assert len(mirror.taken) == len(batches)
    for taken, batch in zip(mirror.taken, batches, strict=True):
        assert all(set(rows) <= set(batch.rows[fqn]) for fqn, rows in taken.items())
        assert any(taken.values())


def test_usual_optimizers_of_a_training_loop() -> None:
    """With fused optimizers for the tables and a wrapped one for the rest, the latter's step is the boundary."""
    model = sharded("row-wise-adagrad", table_wise)
    rest = dict(optimizers.optimizers.in_backward_optimizer_filter(model.named_parameters()))
    dense = keyed.KeyedOptimizerWrapper(rest, torch.optim.Adam)
    both = keyed.CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
    tap, mirror = tapped(model, [both])
    batches = [Batch(seed) for seed in range(4)]
    for step, batch in enumerate(batches):
        both.zero_grad()
        step_batches(model, [batch])
        assert len(mirror.taken) == step
        both.step()
        assert len(mirror.taken) == step + 1
    assert mirror.taken == [batch.rows for batch in batches]
    assert not tap.end_step()


def test_fused_optimizer_alone_leaves_the_boundary_to_the_forward() -> None:
    """Given the fused optimizer only, whose step does nothing, the next forward in training mode ends the step."""
    model = sharded("sgd", table_wise)
    tap, mirror = tapped(model, [model.fused_optimizer])
    first, second = Batch(1), Batch(2)
    step_batches(model, [first])
    model.fused_optimizer.step()
    model.eval()
    model(*second.inputs)
    assert mirror.taken == []
    model.train()
    step_batches(model, [second])
    assert mirror.taken == [first.rows]
    assert tap.end_step()
    assert mirror.taken == [first.rows, second.rows]


def test_loading_a_checkpoint_marks_everything() -> None:
    """After `load_state_dict` all rows of the loaded tables are dirty at the next boundary."""
    model = sharded("row-wise-adagrad", table_wise)
    tap, mirror = tapped(model, [])
    stored = copy.deepcopy(model.state_dict())
    step_batches(model, [Batch(1)])
    assert tap.end_step()
    model.load_state_dict(stored)
    assert tap.end_step()
    assert mirror.taken[1] == {FQNS[name]: list(range(rows)) for name, rows in ROWS.items()}


def test_unsharded_collections_are_plain_tables() -> None:
    """Without `DistributedModelParallel`, the collections' tables are followed through a torch optimizer."""
    model = Model(torchrec.modules.embedding_configs.DataType.FP32)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-3)
    tap, mirror = tapped(model, [optimizer])
    assert {table.spec.fqn for table in tap.tables} == set(FQNS.values())
    for batch in [Batch(seed) for seed in range(3)]:
        optimizer.zero_grad()
        step_batches(model, [batch])
        optimizer.step()
    assert len(mirror.taken) == 3


def test_table_without_an_optimizer_is_refused() -> None:
    """A data-parallel table that none of the given optimizers trains is refused, and no hook is left."""
    model = sharded("sgd", plans.data_parallel)  # TorchRec has no fused optimizer for these
    with pytest.raises(UnsupportedModelError, match=r"embedding_bags\.user\.weight' is trained by none"):
        tap_model(model, [], lambda: None)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("base", "name", "message"),
    [
        ("DistributedModelParallel", "DMPCollection", "2D parallel"),
        ("Module", "ShardedManagedCollisionEmbeddingBagCollection", "zero-collision hashing"),
        ("Module", "ManagedCollisionEmbeddingCollection", "zero-collision hashing"),
    ],
)
def test_kinds_of_modules_that_are_refused(base: str, name: str, message: str) -> None:
    """Modules whose rows are on several ranks, or change their ids, are refused by their kind."""
    module = type(name, (type(base, (nn.Module,), {}),), {})()
    module._dmp_wrapped_module = nn.EmbeddingBag(3, 2)
    with pytest.raises(UnsupportedModelError, match=message):
        tap_model(nn.ModuleList([module]), [torch.optim.SGD(module.parameters())], lambda: None)


def test_close_and_second_tap() -> None:
    """A second tap is refused; closing removes every hook, and a closed tap marks nothing."""
    model = sharded("sgd", table_wise)
    tap, mirror = tapped(model, [])
    with pytest.raises(UnsupportedModelError, match=r"'sparse\.bags' is streamed already"):
        tap_model(model, [], lambda: None)
    tap.close()
    step_batches(model, [Batch(1), Batch(2)])
    assert mirror.taken == []
    assert all(table.dirty.is_empty for table in tap.tables)
    assert not model._forward_pre_hooks
    for module in (model.module.sparse.bags, model.module.sparse.sequence):
        for lookup in module._lookups:
            assert all(not kernel._emb_module._forward_hooks for kernel in lookup._emb_modules)
    tap_model(model, [], lambda: None).close()
