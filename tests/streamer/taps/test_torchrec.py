"""TorchRec models under DistributedModelParallel: what is marked at a boundary is all that changed, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mirror import mirrored
from sparse_model import (
    FQNS,
    FUSED,
    ROWS,
    Batch,
    Model,
    column_wise,
    one_rank,
    row_wise,
    sharded,
    step_batches,
    table_wise,
)
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard
from headrace.streamer.taps.attach import tap_model

pytestmark = pytest.mark.torchrec

torchrec = pytest.importorskip("torchrec")
plans = pytest.importorskip("torchrec.distributed.sharding_plan")
optimizers = pytest.importorskip("torchrec.optim")
keyed = pytest.importorskip("torchrec.optim.keyed")


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """Run one process with its own store, without a port."""
    with one_rank():
        yield


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
@pytest.mark.parametrize("sharding", [table_wise, row_wise, column_wise])
@pytest.mark.parametrize("optimizer", list(FUSED))
def test_mirror_equals_tables_at_every_boundary(optimizer: str, sharding: Any, dtype: str) -> None:
    """A copy of only the dirty rows equals all weights and states, and exactly the batch's rows are dirty."""
    model = sharded(optimizer, sharding, dtype)
    tap, mirror = mirrored(model)
    assert {table.spec.fqn for table in tap.tables} == set(FQNS.values())
    assert {table.spec.fqn for table in tap.tables} < set(model.state_dict())
    batches = [Batch(seed) for seed in range(6)]
    step_batches(model, batches)
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
    tap.close()


def test_tables_of_lookups_that_are_made_anew_are_told() -> None:
    """The next flush raises after resharding has given a module new lookups."""
    dmp = sharded("sgd", table_wise)
    tap, _ = mirrored(dmp)
    assert not tap.end_step()
    for module in dmp.modules():
        if hasattr(module, "_lookups"):
            module._lookups.clear()
            module._create_lookups()
    with pytest.raises(UnsupportedModelError, match=r"is not what was attached: the model has another module"):
        tap.end_step()


def test_values_are_those_of_the_state_dict() -> None:
    """The tap reads the values that a checkpoint would hold."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, _ = mirrored(model)
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
    tap, mirror = mirrored(model)
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
    """Tables of the kernel DENSE, also data-parallel ones, are tapped through their optimizer."""
    model = sharded(None, sharding, dtype)
    make, settings = FUSED[kind]
    optimizer = keyed.KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: make(p, **settings))
    tap, mirror = mirrored(model, optimizer)
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
    """With fused optimizers for the tables and a wrapped one for the rest, the wrapped one's step is the boundary."""
    model = sharded("row-wise-adagrad", table_wise)
    rest = dict(optimizers.optimizers.in_backward_optimizer_filter(model.named_parameters()))
    dense = keyed.KeyedOptimizerWrapper(rest, torch.optim.Adam)
    both = keyed.CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
    tap, mirror = mirrored(model, both)
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
    """With only the fused optimizer, whose step does nothing, the next forward in training mode ends the step."""
    model = sharded("sgd", table_wise)
    tap, mirror = mirrored(model, model.fused_optimizer)
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


def test_unsharded_collections_are_plain_tables() -> None:
    """Without `DistributedModelParallel`, the collections' tables are tapped through a torch optimizer."""
    model = Model(torchrec.modules.embedding_configs.DataType.FP32)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-3)
    tap, mirror = mirrored(model, optimizer)
    assert {table.spec.fqn for table in tap.tables} == set(FQNS.values())
    for batch in [Batch(seed) for seed in range(3)]:
        optimizer.zero_grad()
        step_batches(model, [batch])
        optimizer.step()
    assert len(mirror.taken) == 3


def test_table_without_an_optimizer_is_refused() -> None:
    """A data-parallel table without an optimizer is refused, and gets no hook."""
    model = sharded("sgd", plans.data_parallel)  # TorchRec has no fused optimizer for these
    with pytest.raises(UnsupportedModelError, match=r"user\.weight' is trained by none .* makes it data-parallel"):
        tap_model(model, [], lambda: None)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("base", "name", "message"),
    [
        ("Module", "GenericITEPModule", "gives them to other ids"),
        ("Module", "ShardedManagedCollisionEmbeddingBagCollection", "zero-collision hashing"),
        ("Module", "ManagedCollisionEmbeddingCollection", "zero-collision hashing"),
    ],
)
def test_kinds_of_modules_that_are_refused(base: str, name: str, message: str) -> None:
    """Modules whose rows are on several ranks, or get other ids, are refused."""
    module = type(name, (type(base, (nn.Module,), {}),), {})()
    module._dmp_wrapped_module = nn.EmbeddingBag(3, 2)
    with pytest.raises(UnsupportedModelError, match=message):
        tap_model(nn.ModuleList([module]), [torch.optim.SGD(module.parameters())], lambda: None)


def test_close_and_second_tap() -> None:
    """A second tap is refused; closing removes every hook, and a closed tap marks nothing."""
    model = sharded("sgd", table_wise)
    tap, mirror = mirrored(model)
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


ALL = {FQNS[name]: list(range(rows)) for name, rows in ROWS.items()}


def tables_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "dense" not in name}


def by_parameter(model: Any, _: Path) -> None:
    with torch.no_grad():
        for parameter in tables_of(model).values():
            parameter[3] = 7.0


def by_shard(model: Any, _: Path) -> None:
    with torch.no_grad():
        for name in tables_of(model):
            model.state_dict()[name].local_shards()[0].tensor[3] = 7.0


def states(model: Any, _: Path) -> None:
    for state in model.fused_optimizer.state_dict()["state"].values():
        for value in state.values():
            value.local_shards()[0].tensor[3] = 2.5


def loaded_states(model: Any, _: Path) -> None:
    state_dict = copy.deepcopy(model.fused_optimizer.state_dict())
    for state in state_dict["state"].values():
        for value in state.values():
            value.local_shards()[0].tensor[3] = 2.5
    model.fused_optimizer.load_state_dict(state_dict)


def checkpoint(model: Any, folder: Path) -> None:
    """Save, train, and load in place with `torch.distributed.checkpoint`."""
    dcp.save({"model": model.state_dict(), "states": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    step_batches(model, [Batch(5)])
    dcp.load({"model": model.state_dict(), "states": model.fused_optimizer.state_dict()}, checkpoint_id=folder)


def second_optimizer(model: Any, _: Path) -> None:
    """Train the tables with an optimizer of all parameters too, through a penalty on the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = torch.stack([parameter.pow(2).sum() for parameter in tables_of(model).values()]).sum()
    (model(*Batch(1).inputs) + penalty).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [by_parameter, by_shard, states, loaded_states, checkpoint, second_optimizer],
    ids=lambda write: write.__name__,
)
def test_every_row_goes(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """A write to the memory of fused tables, through any of TorchRec's views, sends every row."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, mirror = mirrored(model)
    step_batches(model, [Batch(0)])
    assert tap.end_step()
    write(model, tmp_path)
    assert tap.end_step()
    assert mirror.taken[1:] == [ALL]


def test_an_optimizer_of_all_parameters_trains_no_fused_table() -> None:
    """An optimizer of all parameters marks no fused table, whose parameters get no gradient."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, mirror = mirrored(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=0.1)
    batches = [Batch(seed) for seed in range(3)]
    for batch in batches:
        optimizer.zero_grad()
        step_batches(model, [batch])
        optimizer.step()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
