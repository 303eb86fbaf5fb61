"""FBGEMM tables with a fused optimizer: what is marked after `backward()` is all that changed, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from mirror import Mirror
from torch import nn

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import DType, StateKind
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.taps.fbgemm_tap import FbgemmTap
from headrace.streamer.taps.tap import Tap, tap_model

pytestmark = pytest.mark.torchrec

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
OPTIMIZERS = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
# Rows and dim of each table; features 0 and 1 share table 0, and table 2 is used last.
SHAPES = ((97, 8), (40, 12), (300, 4))
FEATURES = [0, 0, 1, 2]


def make(
    optimizer: str = "EXACT_SGD",
    weights: str = "FP32",
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    features: list[int] | None = None,
    **settings: Any,
) -> Any:
    """Make a module on the CPU with random weights."""
    torch.manual_seed(3)
    module = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for rows, dim in shapes],
        feature_table_map=features or FEATURES,
        optimizer=getattr(configs.EmbOptimType, optimizer),
        weights_precision=getattr(configs.SparseType, weights),
        device=torch.device("cpu"),
        learning_rate=0.1,
        eps=1e-3,
        **settings,
    )
    for table in module.split_embedding_weights():
        table.copy_(torch.randn(table.shape))
    return module


def in_a_cache(module: Any) -> Any:
    """Say that one table's rows are cached on a device, which a build for the CPU cannot have."""
    (rows, dim, _, compute), *others = module.embedding_specs
    module.embedding_specs = [(rows, dim, common.EmbeddingLocation.MANAGED_CACHING, compute), *others]
    return module


class Batch:
    """Random ids of a step: bags of 0 to 3 of each feature, skewed so that rows repeat."""

    def __init__(self, seed: int, size: int = 5, index_type: torch.dtype = torch.int64) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (len(FEATURES), size), generator=generator)
        ids = [
            (torch.rand(int(n), generator=generator) ** 2 * SHAPES[table][0]).long()
            for table, n in zip(FEATURES, lengths.sum(dim=1), strict=True)
        ]
        self.indices = torch.cat(ids).to(index_type)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]).to(index_type)
        self.rows = {
            f"table_{t}": sorted(
                {i for table, part in zip(FEATURES, ids, strict=True) if table == t for i in part.tolist()}
            )
            for t in range(len(SHAPES))
        }


def tapped(model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None) -> tuple[Tap, Mirror]:
    mirror = Mirror()
    tap = tap_model(model, optimizers or [], mirror.on_step)
    mirror.watch(tap)
    return tap, mirror


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).sum() / 10


def union(*batches: Batch) -> dict[str, list[int]]:
    return {name: sorted({row for batch in batches for row in batch.rows[name]}) for name in batches[0].rows}


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("weights", ["FP32", "FP16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mirror_equals_tables_at_every_boundary(
    optimizer: str, weights: str, pooling: str, is_weighted: bool, index_type: torch.dtype
) -> None:
    """A copy that takes only the dirty rows equals all weights and states, and the batch's rows are the dirty ones."""
    module = make(optimizer, weights, pooling_mode=getattr(common.PoolingMode, pooling))
    tap, mirror = tapped(module)
    batches = [Batch(seed, index_type=index_type) for seed in range(6)]
    for batch in batches:
        output = module(
            batch.indices,
            batch.offsets,
            per_sample_weights=torch.rand(batch.indices.numel()) + 0.1 if is_weighted else None,
        )
        loss(output).backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]


def test_count_of_steps_is_a_scalar_of_each_table() -> None:
    """Where the optimizer needs the module's count of steps, each table has it as it is now; else none has."""
    decay = ops.CounterBasedRegularizationDefinition(counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW)
    module = make(
        "EXACT_ROWWISE_ADAGRAD",
        weight_decay=0.1,
        weight_decay_mode=ops.WeightDecayMode.COUNTER,
        counter_based_regularization=decay,
    )
    tap, _ = tapped(module)
    for seed in range(3):
        batch = Batch(seed)
        loss(module(batch.indices, batch.offsets)).backward()
        assert [{name: int(value) for name, value in table.scalars().items()} for table in tap.tables] == [
            {"iter": seed + 1}
        ] * 3
    module.set_optimizer_step(41)
    assert int(tap.tables[2].scalars()["iter"]) == 41
    assert tapped(make("EXACT_ADAGRAD"))[0].tables[0].scalars() == {}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sequence_embeddings(optimizer: str) -> None:
    """Unpooled tables, with one dim for all, are mirrored too."""
    module = make(optimizer, shapes=((97, 8), (40, 8), (300, 8)), pooling_mode=common.PoolingMode.NONE)
    tap, mirror = tapped(module)
    batches = [Batch(seed) for seed in range(4)]
    for batch in batches:
        loss(module(batch.indices, batch.offsets)).backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]


@pytest.mark.parametrize(
    "settings",
    [
        lambda: {"weight_decay": 0.1, "weight_decay_mode": ops.WeightDecayMode.L2},
        lambda: {"weight_decay": 0.1, "weight_decay_mode": ops.WeightDecayMode.DECOUPLE},
        lambda: {
            "weight_decay": 0.1,
            "weight_decay_mode": ops.WeightDecayMode.COUNTER,
            "counter_based_regularization": ops.CounterBasedRegularizationDefinition(),
        },
        lambda: {"max_norm": 0.5},
        lambda: {"gradient_clipping": True},
        lambda: {"output_dtype": configs.SparseType.FP16},
    ],
    ids=["l2", "decouple", "counter", "max-norm", "clipping", "fp16-output"],
)
def test_settings_that_stay_within_the_batch(settings: Callable[[], dict[str, Any]]) -> None:
    """Weight decay, norms and clipping inside the fused update touch rows of the batch only, states included."""
    module = make("EXACT_ROWWISE_ADAGRAD", **settings())
    tap, mirror = tapped(module)
    batches = [Batch(seed) for seed in range(5)]
    for batch in batches:
        loss(module(batch.indices, batch.offsets)).backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]


def test_comparison_notices_a_lost_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror test fails when one row of a batch is not marked, so its success means something."""
    mark = DirtyRows.mark
    monkeypatch.setattr(DirtyRows, "mark", lambda self, ids: mark(self, ids.flatten().unique()[1:]))
    module = make()
    tap, _ = tapped(module)
    batch = Batch(1)
    loss(module(batch.indices, batch.offsets)).backward()
    with pytest.raises(AssertionError, match=r"table_0 weights: rows \[\d+\] differ"):
        tap.end_step()


def test_table_descriptions() -> None:
    """Specs carry names, shapes, types and FBGEMM's names of the row states."""
    module = make("EXACT_ROWWISE_ADAGRAD", "FP16", table_names=["a", "b", "c"])
    tap, _ = tapped(nn.ModuleDict({"sparse": nn.ModuleList([module])}))
    spec = tap.tables[1].spec
    assert (spec.fqn, spec.num_rows, spec.dim, spec.dtype) == ("sparse.0.b", 40, 12, DType.FLOAT16)
    assert [(s.name, s.kind, s.dtype, s.width) for s in spec.states] == [("sum", StateKind.ROWWISE, DType.FLOAT32, 1)]
    assert tap.tables[1].states()["sum"].shape == (40, 1)
    tap.close()
    counter = make(
        "EXACT_ROWWISE_ADAGRAD",
        weight_decay_mode=ops.WeightDecayMode.COUNTER,
        counter_based_regularization=ops.CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW
        ),
    )
    tap, _ = tapped(counter)
    assert [s.name for s in tap.tables[0].spec.states] == ["sum", "prev_iter", "row_counter"]
    assert [t.spec.states for t in tapped(make("EXACT_SGD"))[0].tables] == [(), (), ()]
    assert [s.kind for s in tapped(make("EXACT_ADAGRAD"))[0].tables[0].spec.states] == [StateKind.POINTWISE]


def test_forward_without_backward_marks_nothing() -> None:
    """Forwards in evaluation, under `no_grad`, or whose output is thrown away leave no row dirty."""
    module = make()
    tap, mirror = tapped(module)
    lost, used = Batch(1), Batch(2)
    with torch.no_grad():
        module(lost.indices, lost.offsets)
    module.eval()
    module(lost.indices, lost.offsets)
    module.train()
    module(lost.indices, lost.offsets)
    assert all(table.dirty.is_empty for table in tap.tables)
    loss(module(used.indices, used.offsets)).backward()
    assert tap.end_step()
    nothing: dict[str, list[int]] = {name: [] for name in used.rows}
    assert mirror.taken == [nothing, used.rows]  # the thrown away one was a step


def test_several_forwards_before_one_backward() -> None:
    """Outputs of several forwards in one loss mark all their rows; so do backwards that follow later."""
    module = make("EXACT_ADAGRAD")
    module.eval()  # no boundary between the forwards
    tap, mirror = tapped(module)
    first, second, third = Batch(1), Batch(2), Batch(3)
    later = module(third.indices, third.offsets)
    (loss(module(first.indices, first.offsets)) + loss(module(second.indices, second.offsets))).backward()
    assert tap.end_step()
    loss(later).backward()
    assert tap.end_step()
    assert mirror.taken == [union(first, second), third.rows]


def test_output_used_twice_and_backward_run_twice() -> None:
    """One output in two terms, and a graph that is kept and run again, update and mark as they should."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = tapped(module)
    batch = Batch(1)
    output = module(batch.indices, batch.offsets)
    both = loss(output) + output.sum()
    both.backward(retain_graph=True)
    assert tap.end_step()
    changed = mirror.changed(both.backward)
    assert changed == batch.rows
    assert tap.end_step()
    assert mirror.taken == [batch.rows, batch.rows]


def test_gradient_of_something_else_marks_nothing() -> None:
    """`torch.autograd.grad` that does not run the fused update marks nothing."""
    module = make()
    tap, mirror = tapped(module)
    batch, scale = Batch(1), torch.ones(1, requires_grad=True)
    total = (module(batch.indices, batch.offsets) * scale).sum()
    changed = mirror.changed(lambda: torch.autograd.grad(total, scale, retain_graph=True))
    assert changed == {"table_0": [], "table_1": [], "table_2": []}
    assert all(table.dirty.is_empty for table in tap.tables)
    total.backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows]


def test_recomputed_forward_marks_once() -> None:
    """Under activation checkpointing the forward runs twice, and the rows are those of the update."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = tapped(nn.ModuleList([module]))
    batch = Batch(1)
    scale = torch.ones(1, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(
        lambda scale: module(batch.indices, batch.offsets) * scale, scale, use_reentrant=False
    )
    loss(output).backward()
    assert tap.end_step()
    assert list(mirror.taken[0].values()) == list(batch.rows.values())


def test_empty_batches() -> None:
    """Batches without ids, and without bags, mark nothing and break nothing."""
    module = make("EXACT_ROWWISE_ADAGRAD")
    tap, mirror = tapped(module)
    none = torch.empty(0, dtype=torch.int64)
    module(none, torch.zeros(5, dtype=torch.int64)).sum().backward()
    module(none, torch.zeros(1, dtype=torch.int64)).sum().backward()
    batch = Batch(1)
    loss(module(batch.indices, batch.offsets)).backward()
    assert tap.end_step()
    assert [taken for taken in mirror.taken if any(taken.values())] == [batch.rows]


def test_batch_size_by_feature() -> None:
    """Features with batches of different sizes mark the rows of their own tables."""
    module = make("EXACT_ROWWISE_ADAGRAD")
    tap, mirror = tapped(module)
    output = module(
        torch.tensor([5, 6, 7, 8, 9, 10]),
        torch.tensor([0, 1, 2, 3, 5, 6]),
        batch_size_per_feature_per_rank=[[2], [1], [1], [1]],
    )
    loss(output).backward()
    assert tap.end_step()
    assert mirror.taken == [{"table_0": [5, 6, 7], "table_1": [8, 9], "table_2": [10]}]


def test_ids_out_of_range_mark_the_row_that_is_used_instead() -> None:
    """Under the bounds check `WARNING` a bad id is looked up as row 0, whose update must not be lost."""
    module = make(embedding_table_index_type=torch.int32)
    tap, mirror = tapped(module)
    loss(module(torch.tensor([5, 97, 7, 8]), torch.tensor([0, 1, 2, 3, 4]))).backward()
    assert tap.end_step()
    assert mirror.taken == [{"table_0": [0, 5], "table_1": [7], "table_2": [8]}]


def test_writes_by_others_mark_the_whole_module() -> None:
    """Loading weights marks all rows at the next boundary; fused updates by themselves do not."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = tapped(module)
    first, second, third = Batch(1), Batch(2), Batch(3)
    loss(module(first.indices, first.offsets)).backward()
    for table in module.split_embedding_weights():
        table.mul_(2)
    loss(module(second.indices, second.offsets)).backward()
    loss(module(third.indices, third.offsets)).backward()
    assert tap.end_step()
    everything = {f"table_{t}": list(range(rows)) for t, (rows, _) in enumerate(SHAPES)}
    assert mirror.taken == [everything, second.rows, third.rows]
    module.get_optimizer_state()[1]["sum"].add_(1)
    assert tap.end_step()
    assert mirror.taken[3] == everything


def test_boundary_with_an_optimizer_for_the_rest() -> None:
    """With a torch optimizer for the dense part, its step is the boundary, and the next forward is none."""
    model = nn.ModuleDict({"sparse": make("EXACT_ROWWISE_ADAGRAD"), "dense": nn.Linear(32, 1)})
    optimizer = torch.optim.Adam(model["dense"].parameters())
    _, mirror = tapped(model, [optimizer])
    batches = [Batch(seed) for seed in range(4)]
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss(model["dense"](model["sparse"](batch.indices, batch.offsets))).backward()
        assert len(mirror.taken) == step
        optimizer.step()
        assert len(mirror.taken) == step + 1
    assert [list(taken.values()) for taken in mirror.taken] == [list(batch.rows.values()) for batch in batches]


def test_fp16_module_moved_and_many_tables() -> None:
    """Views are read again when the module's memory was replaced, and all rows are marked."""
    module = make("EXACT_ADAGRAD", "FP16")
    tap, mirror = tapped(module)
    before = tap.tables[0].weights()
    module.weights_host.data = module.weights_host.detach() * 2
    assert torch.equal(tap.tables[0].weights(), before * 2)
    assert tap.end_step()
    assert mirror.taken[0]["table_2"] == list(range(300))
    many = make(shapes=tuple((3 + i % 5, 4) for i in range(150)), features=list(range(150)))
    tap, mirror = tapped(many)
    loss(many(torch.full((150,), 2), torch.arange(151))).backward()
    assert tap.end_step()
    assert mirror.taken == [{f"table_{i}": [2] for i in range(150)}]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: make("EMAINPLACE_ROWWISE_ADAGRAD"),
            "'table_0', 'table_1', 'table_2': the fused optimizer EMAINPLACE_ROWWISE_ADAGRAD may change rows outside",
        ),
        (
            lambda: make(
                "EXACT_ROWWISE_ADAGRAD",
                weight_decay_mode=ops.WeightDecayMode.DECOUPLE_GLOBAL,
                global_weight_decay=common.GlobalWeightDecayDefinition()
                if hasattr(common, "GlobalWeightDecayDefinition")
                else ops.GlobalWeightDecayDefinition(),
            ),
            "global weight decay",
        ),
        (lambda: make(table_names=["a", "a", "b"]), "two tables are named 'a'"),
        (lambda: make(weights="INT8"), "INT8 weights are not streamed"),
        (lambda: in_a_cache(make()), "MANAGED_CACHING keeps the newest rows in a cache"),
    ],
    ids=["ema", "global-decay", "same-names", "int8", "cached"],
)
def test_refused_with_a_reason_and_no_hooks(build: Callable[[], Any], message: str) -> None:
    """What cannot be streamed exactly is refused with one line that says why, and leaves no hook behind."""
    module = build()
    with pytest.raises(UnsupportedModelError, match=message):
        tap_model(module, [], lambda: None)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_close_copies_and_second_taps() -> None:
    """A closed tap and a copied module mark nothing, a second tap is refused, and closing leaves no hook."""
    module = make()
    tap, mirror = tapped(module)
    with pytest.raises(UnsupportedModelError, match="is streamed already"):
        tap_model(nn.ModuleList([module]), [], lambda: None)
    batch = Batch(1)
    twin = copy.deepcopy(module)
    loss(twin(batch.indices, batch.offsets)).backward()
    loss(twin(batch.indices, batch.offsets)).backward()
    assert not tap.end_step()
    pending = loss(module(batch.indices, batch.offsets))
    tap.close()
    tap.close()
    pending.backward()
    loss(module(batch.indices, batch.offsets)).backward()
    assert mirror.taken == []
    assert all(table.dirty.is_empty for table in tap.tables)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    tap_model(module, [], lambda: None).close()


@pytest.mark.parametrize("num_on_device", [1, len(SHAPES)])
def test_marks_on_a_device_are_the_batches_rows_and_nobody_waits(
    num_on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel marks all features of tables on a device, without the host's knowing where they begin."""
    module = make()
    tap, mirror = tapped(module)
    fake = FakeDevice(trains_at_once=True)
    slots = [slots_of(table.num_local_rows) for table in tap.tables]
    bitmap = DeviceBitmap(fake, sum(slots))
    for number, table in enumerate(tap.tables[:num_on_device]):
        table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap, sum(slots[:number])))
    mark = FbgemmTap._mark

    def mark_without_waiting(*args: Any) -> None:
        with fake.training() if num_on_device == len(SHAPES) else contextlib.nullcontext():
            mark(*args)

    batches = [Batch(seed) for seed in range(6)]
    for number, batch in enumerate(batches):
        if number == 1:  # the first batch looks where the tables are
            monkeypatch.setattr(FbgemmTap, "_mark", mark_without_waiting)
        loss(module(batch.indices, batch.offsets)).backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
