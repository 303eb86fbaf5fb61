"""FBGEMM tables with a fused optimizer: what is marked after backward() is all that changed, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from mirror import mirrored
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import DType, StateKind
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.fbgemm import FbgemmTap

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
    """Return a module on the CPU with random weights."""
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


class Batch:
    """Random ids of one step: bags of 0 to 3 per feature, skewed so that rows repeat."""

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


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).sum() / 10


def step(module: Any, batch: Batch) -> None:
    loss(module(batch.indices, batch.offsets)).backward()


def check_steps(module: Any, num_steps: int = 5) -> None:
    """Train a module; check that each step marks exactly its batch's rows, and that no other row changes."""
    tap, mirror = mirrored(module)
    batches = [Batch(seed) for seed in range(num_steps)]
    for batch in batches:
        step(module, batch)
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]


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
    """A copy of only the dirty rows equals all weights and states, and exactly the batch's rows are dirty."""
    module = make(optimizer, weights, pooling_mode=getattr(common.PoolingMode, pooling))
    tap, mirror = mirrored(module)
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


def counting_steps() -> dict[str, Any]:
    """Return settings with which the optimizer needs the module's count of steps."""
    decay = ops.CounterBasedRegularizationDefinition(counter_weight_decay_mode=ops.CounterWeightDecayMode.ADAGRADW)
    return {
        "weight_decay": 0.1,
        "weight_decay_mode": ops.WeightDecayMode.COUNTER,
        "counter_based_regularization": decay,
    }


def test_count_of_steps_is_a_scalar_of_each_table() -> None:
    """Each table has the module's present count of steps if the optimizer needs it; otherwise none has."""
    module = make("EXACT_ROWWISE_ADAGRAD", **counting_steps())
    tap, _ = mirrored(module)
    for seed in range(3):
        step(module, Batch(seed))
        assert [int(table.scalars()["iter"]) for table in tap.tables] == [seed + 1] * 3
    module.set_optimizer_step(41)
    assert int(tap.tables[2].scalars()["iter"]) == 41
    assert mirrored(make("EXACT_ADAGRAD"))[0].tables[0].scalars() == {}


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
        lambda: {
            "weight_decay": 0.1,
            "weight_decay_mode": ops.WeightDecayMode.COWCLIP,
            "cowclip_regularization": ops.CowClipDefinition(
                counter_weight_decay_mode=ops.CounterWeightDecayMode.DECOUPLE, lower_bound=0.01
            ),
        },
        lambda: {"max_norm": 0.5},
        lambda: {"gradient_clipping": True},
        lambda: {"output_dtype": configs.SparseType.FP16},
    ],
    ids=["l2", "decouple", "counter", "cowclip", "max-norm", "clipping", "fp16-output"],
)
def test_settings_that_stay_within_the_batch(settings: Callable[[], dict[str, Any]]) -> None:
    """Weight decay, norms and clipping inside the fused update change only rows of the batch, states included."""
    check_steps(make("EXACT_ROWWISE_ADAGRAD", **settings()))


EVERYTHING = {f"table_{t}": list(range(rows)) for t, (rows, _) in enumerate(SHAPES)}


def averaging() -> Any:
    """Return a module that averages one half of each row into the other, of all rows, in each second forward."""
    mode = ops.EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.5)
    return make("EMAINPLACE_ROWWISE_ADAGRAD", emainplace_mode=mode)


def test_an_optimizer_that_changes_rows_outside_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """All rows are marked after each update, and after a forward without one; the log says what it costs."""
    module = averaging()
    tap, mirror = mirrored(module)
    size = sum(rows * (dim + 1) * 4 for rows, dim in SHAPES)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "it is not known which rows a step of EMAINPLACE_ROWWISE_ADAGRAD changes, so each streams all rows of table_0, "
        f"table_1, table_2: 437 rows, {size / 1024:.1f} KiB; if you know, say dirty='lookups'"
    )
    for seed in range(4):
        step(module, Batch(seed))
    assert tap.end_step()
    assert mirror.taken == [EVERYTHING] * 4
    lost = Batch(5)

    def look_up() -> None:
        with torch.no_grad():
            for _ in range(2):
                module(lost.indices, lost.offsets)

    assert mirror.changed(look_up) == EVERYTHING
    assert [table.dirty.count for table in tap.tables] == [rows for rows, _ in SHAPES]
    tap.tables[0].dirty.take()
    module.eval()
    look_up()
    assert tap.tables[0].dirty.is_empty


def test_the_users_word_on_what_an_update_changes() -> None:
    """The user's word is taken for an unknown optimizer; only `all` is for known ones too."""
    module = averaging()
    module.eval()  # else the word would be wrong
    _, mirror = mirrored(nn.ModuleList([module]), dirty="lookups")
    batch = Batch(1)
    step(module, batch)
    mirror.on_step()
    assert list(mirror.taken[0].values()) == list(batch.rows.values())
    for word, rows in (("gradients", batch.rows), ("all", EVERYTHING)):
        known = make("EXACT_ADAGRAD")
        tap, mirror = mirrored(known, dirty=word)
        step(known, batch)
        assert tap.end_step()
        assert mirror.taken == [rows]


@pytest.mark.parametrize("optimizer", ["LARS_SGD", "NONE", "ENSEMBLE_ROWWISE_ADAGRAD"])
def test_optimizers_of_a_gpu(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their tables are taken whole, with the states that FBGEMM has names for."""
    module = make("EXACT_SGD" if optimizer == "NONE" else "EXACT_ADAGRAD")
    module.optimizer = configs.EmbOptimType[optimizer]
    if optimizer == "ENSEMBLE_ROWWISE_ADAGRAD":
        states = [{"sum": torch.zeros(rows), "sparse_ema": torch.zeros(rows, dim)} for rows, dim in SHAPES]
        module.get_optimizer_state = lambda: states
    tap = tap_model(module, [], lambda: None)
    names = ["sum", "sparse_ema"] if optimizer == "ENSEMBLE_ROWWISE_ADAGRAD" else []
    assert [state.name for state in tap.tables[0].spec.states] == names
    assert f"a step of {optimizer} changes" in caplog.text
    assert ("without states of the optimizer" in caplog.text) == (not names)


def test_global_weight_decay(caplog: pytest.LogCaptureFixture) -> None:
    """Tables with global weight decay are taken whole."""
    decay = ops.GlobalWeightDecayDefinition(start_iter=0, lower_bound=0.1)
    mode = ops.WeightDecayMode.DECOUPLE_GLOBAL
    module = make("EXACT_ROWWISE_ADAGRAD", weight_decay=0.1, weight_decay_mode=mode, global_weight_decay=decay)
    tap = tap_model(module, [], lambda: None)  # FBGEMM's CPU build has no lookup with it
    assert [state.name for state in tap.tables[0].spec.states] == ["sum", "prev_iter"]
    assert "EXACT_ROWWISE_ADAGRAD with global weight decay changes" in caplog.text


def test_table_descriptions() -> None:
    """Specs carry names, shapes, types and FBGEMM's names of the row states."""
    module = make("EXACT_ROWWISE_ADAGRAD", "FP16", table_names=["a", "b", "c"])
    tap, _ = mirrored(nn.ModuleDict({"sparse": nn.ModuleList([module])}))
    spec = tap.tables[1].spec
    assert (spec.fqn, spec.num_rows, spec.dim, spec.dtype) == ("sparse.0.b", 40, 12, DType.FLOAT16)
    assert [(s.name, s.kind, s.dtype, s.width) for s in spec.states] == [("sum", StateKind.ROWWISE, DType.FLOAT32, 1)]
    assert tap.tables[1].states()["sum"].shape == (40, 1)
    tap.close()
    tap, _ = mirrored(make("EXACT_ROWWISE_ADAGRAD", **counting_steps()))
    assert [s.name for s in tap.tables[0].spec.states] == ["sum", "prev_iter", "row_counter"]
    assert [t.spec.states for t in mirrored(make("EXACT_SGD"))[0].tables] == [(), (), ()]
    assert [s.kind for s in mirrored(make("EXACT_ADAGRAD"))[0].tables[0].spec.states] == [StateKind.POINTWISE]


def test_forward_without_backward_marks_nothing() -> None:
    """Forwards in evaluation, under `no_grad`, or with a discarded output mark no row."""
    module = make()
    tap, mirror = mirrored(module)
    lost, used = Batch(1), Batch(2)
    with torch.no_grad():
        module(lost.indices, lost.offsets)
    module.eval()
    module(lost.indices, lost.offsets)
    module.train()
    module(lost.indices, lost.offsets)
    assert all(table.dirty.is_empty for table in tap.tables)
    step(module, used)
    assert tap.end_step()
    nothing: dict[str, list[int]] = {name: [] for name in used.rows}
    assert mirror.taken == [nothing, used.rows]  # the thrown away one was a step


def test_several_forwards_before_one_backward() -> None:
    """One loss of several forwards marks all their rows, and so does a later backward."""
    module = make("EXACT_ADAGRAD")
    module.eval()  # no boundary between the forwards
    tap, mirror = mirrored(module)
    first, second, third = Batch(1), Batch(2), Batch(3)
    later = module(third.indices, third.offsets)
    (loss(module(first.indices, first.offsets)) + loss(module(second.indices, second.offsets))).backward()
    assert tap.end_step()
    loss(later).backward()
    assert tap.end_step()
    assert mirror.taken == [union(first, second), third.rows]


def test_output_used_twice_and_backward_run_twice() -> None:
    """An output in two terms, and a graph that runs twice, update and mark the batch's rows."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = mirrored(module)
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
    """`torch.autograd.grad` marks nothing if it does not run the fused update."""
    module = make()
    tap, mirror = mirrored(module)
    batch, scale = Batch(1), torch.ones(1, requires_grad=True)
    total = (module(batch.indices, batch.offsets) * scale).sum()
    changed = mirror.changed(lambda: torch.autograd.grad(total, scale, retain_graph=True))
    assert changed == {"table_0": [], "table_1": [], "table_2": []}
    assert all(table.dirty.is_empty for table in tap.tables)
    total.backward()
    assert tap.end_step()
    assert mirror.taken == [batch.rows]


def test_recomputed_forward_marks_once() -> None:
    """With activation checkpointing the forward runs twice, and the update's rows are marked once."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = mirrored(nn.ModuleList([module]))
    batch = Batch(1)
    scale = torch.ones(1, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(
        lambda scale: module(batch.indices, batch.offsets) * scale, scale, use_reentrant=False
    )
    loss(output).backward()
    assert tap.end_step()
    assert list(mirror.taken[0].values()) == list(batch.rows.values())


def test_empty_batches() -> None:
    """Batches without ids or without bags mark nothing."""
    module = make("EXACT_ROWWISE_ADAGRAD")
    tap, mirror = mirrored(module)
    none = torch.empty(0, dtype=torch.int64)
    module(none, torch.zeros(5, dtype=torch.int64)).sum().backward()
    module(none, torch.zeros(1, dtype=torch.int64)).sum().backward()
    batch = Batch(1)
    step(module, batch)
    assert tap.end_step()
    assert [taken for taken in mirror.taken if any(taken.values())] == [batch.rows]


def test_batch_size_by_feature() -> None:
    """Features with batches of different sizes mark the rows of their own tables."""
    module = make("EXACT_ROWWISE_ADAGRAD")
    tap, mirror = mirrored(module)
    output = module(
        torch.tensor([5, 6, 7, 8, 9, 10]),
        torch.tensor([0, 1, 2, 3, 5, 6]),
        batch_size_per_feature_per_rank=[[2], [1], [1], [1]],
    )
    loss(output).backward()
    assert tap.end_step()
    assert mirror.taken == [{"table_0": [5, 6, 7], "table_1": [8, 9], "table_2": [10]}]


def test_ids_out_of_range_mark_the_row_that_is_used_instead() -> None:
    """With the bounds check `WARNING` an invalid id is looked up as row 0, which is marked."""
    module = make(embedding_table_index_type=torch.int32)
    tap, mirror = mirrored(module)
    loss(module(torch.tensor([5, 97, 7, 8]), torch.tensor([0, 1, 2, 3, 4]))).backward()
    assert tap.end_step()
    assert mirror.taken == [{"table_0": [0, 5], "table_1": [7], "table_2": [8]}]


def test_writes_by_others_mark_the_whole_module() -> None:
    """Loading weights marks all rows at the next boundary; fused updates do not."""
    module = make("EXACT_ADAGRAD")
    tap, mirror = mirrored(module)
    first, second, third = Batch(1), Batch(2), Batch(3)
    step(module, first)
    for table in module.split_embedding_weights():
        table.mul_(2)
    step(module, second)
    step(module, third)
    assert tap.end_step()
    everything = {f"table_{t}": list(range(rows)) for t, (rows, _) in enumerate(SHAPES)}
    assert mirror.taken == [everything, second.rows, third.rows]
    module.get_optimizer_state()[1]["sum"].add_(1)
    assert tap.end_step()
    assert mirror.taken[3] == everything


def test_fp16_module_moved_and_many_tables() -> None:
    """After a module's memory was replaced, views are renewed and all rows are marked; many tables work too."""
    module = make("EXACT_ADAGRAD", "FP16")
    tap, mirror = mirrored(module)
    before = tap.tables[0].weights()
    module.weights_host.data = module.weights_host.detach() * 2
    assert torch.equal(tap.tables[0].weights(), before * 2)
    assert tap.end_step()
    assert mirror.taken[0]["table_2"] == list(range(300))
    many = make(shapes=tuple((3 + i % 5, 4) for i in range(150)), features=list(range(150)))
    tap, mirror = mirrored(many)
    loss(many(torch.full((150,), 2), torch.arange(151))).backward()
    assert tap.end_step()
    assert mirror.taken == [{f"table_{i}": [2] for i in range(150)}]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(table_names=["a", "a", "b"]), "two tables are named 'a'"),
        (lambda: make(weights="INT8"), "INT8 weights are not streamed"),
    ],
    ids=["same-names", "int8"],
)
def test_refused_with_a_reason_and_no_hooks(build: Callable[[], Any], message: str) -> None:
    """A module that cannot be streamed exactly is refused with a reason, and gets no hook."""
    module = build()
    with pytest.raises(UnsupportedModelError, match=message):
        tap_model(module, [], lambda: None)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_close_copies_and_second_taps() -> None:
    """A closed tap and a copied module mark nothing, a second tap is refused, and closing leaves no hook."""
    module = make()
    tap, mirror = mirrored(module)
    with pytest.raises(UnsupportedModelError, match="is streamed already"):
        tap_model(nn.ModuleList([module]), [], lambda: None)
    batch = Batch(1)
    twin = copy.deepcopy(module)
    step(twin, batch)
    step(twin, batch)
    assert not tap.end_step()
    pending = loss(module(batch.indices, batch.offsets))
    tap.close()
    tap.close()
    pending.backward()
    step(module, batch)
    assert mirror.taken == []
    assert all(table.dirty.is_empty for table in tap.tables)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    tap_model(module, [], lambda: None).close()


def test_some_tables_of_a_fused_module() -> None:
    """Only the selected tables of a table-batched module are streamed, and exactly."""
    module = make(table_names=["a", "b", "c"])
    tap, mirror = mirrored(nn.ModuleDict({"t": module}), tables=["t.b", "t.c"])
    assert [table.spec.fqn for table in tap.tables] == ["t.b", "t.c"]
    loss(module(torch.tensor([7, 8, 9, 3]), torch.tensor([0, 1, 2, 3, 4]))).backward()
    assert tap.end_step()
    assert mirror.taken == [{"t.b": [9], "t.c": [3]}]


@pytest.mark.parametrize("num_on_device", [1, len(SHAPES)])
def test_marks_on_a_device_are_the_batches_rows_and_nobody_waits(
    num_on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel marks all features of tables on a device; the host does not read where they begin."""
    module = make()
    tap, mirror = mirrored(module)
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
        step(module, batch)
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]


ALL = list(range(60))


class Called:
    """A module of one table, a model around it, and a mirror."""

    def __init__(self, optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> None:
        self.module = make(optimizer, shapes=((60, 4),), features=[0], table_names=["t"])
        self.model = nn.ModuleDict({"m": self.module})

    def tap(self) -> Tap:
        tap, self.mirror = mirrored(self.model)
        return tap


def look_up(call: Any, *ids: int) -> torch.Tensor:
    output: torch.Tensor = call(torch.tensor(ids), torch.arange(len(ids) + 1))
    return output.pow(2).sum()


def test_a_forward_that_runs_no_hook_is_noticed() -> None:
    """A direct call of `forward` runs no hook: one warning, then all rows go, also for its later backward."""
    called = Called()
    tap = called.tap()
    loss = look_up(called.module.forward, 1, 2)
    with pytest.warns(RuntimeWarning, match=r"tables 'm\.t': all rows .*its forward\(\) was called directly"):
        assert tap.end_step()
    loss.backward()
    look_up(called.module, 3).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}] * 2


@pytest.mark.parametrize("requires_grad", [True, False], ids=["on the CPU", "as on a GPU"])
def test_a_lookup_before_attach_is_noticed(requires_grad: bool) -> None:
    """A backward after `attach` of an earlier lookup, whose batch is unknown, sends all rows once."""
    called = Called()
    for name in ("weights_host", "momentum1_host"):  # buffers on a GPU
        getattr(called.module, name).requires_grad_(requires_grad)
    losses = [look_up(called.module, 1, 2), look_up(called.module, 3)]
    tap = called.tap()
    for loss in losses:
        loss.backward()
        assert tap.end_step()
        look_up(called.module, 7).backward()
        assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}, {"m.t": [7]}] * 2


def test_a_tap_that_nobody_has_is_not_kept() -> None:
    """The hook at the end of each backward keeps neither the tap nor the module alive."""
    called = Called()
    tap = called.tap()
    look_up(called.module, 1).backward()
    reference = weakref.ref(called.module)
    del called, tap
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("place", ["prepare_inputs", "_report_io_size_count"])
def test_a_forward_that_fails_is_no_forward_without_hooks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call, counted by the module or not, does not count as a call without hooks."""
    called = Called()
    tap = called.tap()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(called.module, place, fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                look_up(called.module, 1, 2)
    look_up(called.module, 5).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": [5]}]


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_a_compiled_module_sends_all_rows(optimizer: str, compiled_first: bool) -> None:
    """A compiled module does not keep its batch, so all rows go, with a warning."""
    torch.compiler.reset()
    called = Called(optimizer)
    compiled = torch.compile(called.module, backend="eager")
    look_up(called.module, 50, 51).backward()
    if compiled_first:
        look_up(compiled, 1, 2).backward()
    tap = called.tap()
    with pytest.warns(RuntimeWarning, match="a compiled module does not keep its batch"):
        look_up(compiled, 3, 4).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}]


@pytest.mark.parametrize("at", ["after_update", "_mark"])
def test_an_interrupt_amid_the_update_loses_no_row(at: str) -> None:
    """After Ctrl-C during an update, which is raised in the hook after it, every row is sent."""
    called = Called()
    tap = called.tap()
    loss = look_up(called.module, 1, 2)

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == at:
            sys.settrace(None)
            raise KeyboardInterrupt

    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        sys.settrace(tracing)
    assert tap.end_step()
    look_up(called.module, 7).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}, {"m.t": [7]}]


def test_memory_shared_with_other_processes_is_refused() -> None:
    """Fused tables in shared memory are refused, because other processes' updates cannot be seen."""
    called = Called()
    called.model.share_memory()
    with pytest.raises(UnsupportedModelError, match=r"'m\.t' is in memory shared with other processes"):
        called.tap()


def test_a_module_that_is_replaced_is_told() -> None:
    """The next flush after a module was replaced raises."""
    called = Called()
    tap = called.tap()
    called.model["m"] = Called().module
    with pytest.raises(UnsupportedModelError, match=r"'m\.t' is not what was attached"):
        tap.end_step()
