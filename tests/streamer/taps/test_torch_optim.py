"""Tables that torch optimizers train: what is marked at a step boundary is all that changed, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from fake_device import FakeDevice
from mirror import Mirror, mirrored
from torch import nn
from torch_tables import Make, TwoKinds, batch, row_wise_adagrad, touched, train, watched

from headrace.kernels.dirty_sets import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import DType, StateKind
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.tapped_table import TablePart

EXACT: list[tuple[str, Make, dict[str, object], bool]] = [
    ("sgd-sparse", torch.optim.SGD, {}, True),
    ("sgd-dense", torch.optim.SGD, {}, False),
    ("sgd-dense-foreach", torch.optim.SGD, {"foreach": True}, False),
    ("sgd-dense-fused", torch.optim.SGD, {"fused": True}, False),
    ("sgd-sparse-maximize", torch.optim.SGD, {"maximize": True}, True),
    ("adagrad-sparse", torch.optim.Adagrad, {"eps": 1e-5, "lr_decay": 0.01}, True),
    ("adagrad-dense", torch.optim.Adagrad, {"eps": 1e-5, "lr_decay": 0.01}, False),
    ("adagrad-dense-foreach", torch.optim.Adagrad, {"eps": 1e-5, "foreach": True}, False),
    ("adagrad-dense-fused", torch.optim.Adagrad, {"eps": 1e-5, "fused": True}, False),
    ("adagrad-init", torch.optim.Adagrad, {"eps": 1e-5, "initial_accumulator_value": 0.5}, False),
    ("sparse-adam", torch.optim.SparseAdam, {"eps": 1e-5}, True),
    ("row-wise-adagrad", row_wise_adagrad, {"eps": 1e-5}, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("make", "settings", "sparse"), [e[1:] for e in EXACT], ids=[e[0] for e in EXACT])
def test_mirror_equals_tables_at_every_boundary(
    make: Make, settings: dict[str, object], sparse: bool, dtype: torch.dtype
) -> None:
    """A copy of only the dirty rows equals all weights and states, and only looked-up rows are dirty."""
    model, optimizer, tap, mirror = watched(make, sparse=sparse, dtype=dtype, **settings)
    train(model, optimizer, range(8))
    assert len(mirror.taken) == 8
    for step, taken in enumerate(mirror.taken):
        assert taken.keys() == touched(step).keys()
        for fqn, rows in taken.items():
            assert set(rows) <= set(touched(step)[fqn])
            assert not sparse or rows == touched(step)[fqn]
    assert sum(len(rows) for taken in mirror.taken for rows in taken.values()) > 50
    tap.close()


@pytest.mark.parametrize("sparse", [True, False])
def test_comparison_notices_a_lost_mark(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror test fails if one row of a batch is not marked."""
    mark = DirtyRows.mark
    monkeypatch.setattr(DirtyRows, "mark", lambda self, ids: mark(self, ids.flatten().unique()[1:]))
    model, optimizer, _, _ = watched(sparse=sparse)
    with pytest.raises(AssertionError, match=r"weight weights: rows \[\d+\] differ"):
        train(model, optimizer, range(1))


def test_table_descriptions() -> None:
    """Specs carry the parameter's name, shape, type and the optimizer's row states, not its step count."""
    model = TwoKinds(sparse=True, dtype=torch.float16)
    tap = tap_model(model, torch.optim.SparseAdam(list(model.parameters())), lambda: None)
    spec = tap.tables[0].spec
    assert (spec.fqn, spec.num_rows, spec.dim, spec.dtype) == ("user.weight", 97, 8, DType.FLOAT16)
    assert [(s.name, s.kind, s.dtype) for s in spec.states] == [
        ("exp_avg", StateKind.POINTWISE, DType.FLOAT16),
        ("exp_avg_sq", StateKind.POINTWISE, DType.FLOAT16),
    ]
    assert [table.spec.fqn for table in tap.tables] == [name for name, _ in model.named_parameters()]
    assert tap.tables[0].row_offset == 0
    assert tap.tables[0].shard == spec.whole
    states = tap.tables[0].states()  # not made by the optimizer yet: zeros that take the memory of a row
    assert states["exp_avg"].shape == (97, 8)
    assert states["exp_avg"].stride() == (0, 1)
    assert not states["exp_avg"].any()
    row_wise = tap_model(m := TwoKinds(sparse=False), row_wise_adagrad(m.parameters()), lambda: None).tables[0]
    assert [(s.name, s.kind, s.width) for s in row_wise.spec.states] == [("sum", StateKind.ROWWISE, 1)]
    assert row_wise.states()["sum"].shape == (97, 1)


@pytest.mark.parametrize("sparse", [True, False])
def test_accumulated_gradients_mark_all_their_batches(sparse: bool) -> None:
    """A step after three backwards marks the rows of all three batches, once."""
    model, optimizer, _, mirror = watched(torch.optim.Adagrad, sparse=sparse)
    for step in range(3):
        model(batch(step)).backward()
    assert mirror.taken == []
    optimizer.step()
    assert mirror.taken == [touched(0, 1, 2)]


def test_forward_without_update_marks_nothing() -> None:
    """Forwards in evaluation, under `no_grad`, or with a discarded gradient mark no row."""
    model, optimizer, _, mirror = watched()
    with torch.no_grad():
        model(batch(1))
    model.eval()
    model(batch(2))
    model.train()
    model(batch(3)).backward()
    optimizer.zero_grad()
    optimizer.step()  # a step without gradients is a step that changes nothing
    assert mirror.taken == [{"user.weight": [], "item.weight": [], "tag.weight": [], "idle.weight": []}]
    train(model, optimizer, range(4, 5))
    assert mirror.taken[1] == touched(4)


def plain(*shape: int, **settings: Any) -> tuple[nn.Embedding, torch.optim.Optimizer, Tap, Mirror]:
    """Return one tapped table, its optimizer (SGD), the tap and a mirror."""
    table = nn.Embedding(*shape, **settings)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    return table, optimizer, *mirrored(table, optimizer)


def test_nan_and_negative_zero_gradients_mark() -> None:
    """A NaN in a gradient marks its row, and so does -0.0, which turns a weight of -0.0 into 0.0."""
    table, optimizer, _, mirror = plain(4, 3)
    with torch.no_grad():
        table.weight.fill_(-0.0)
    optimizer.step()
    table.weight.grad = torch.zeros(4, 3)
    table.weight.grad[1, 2] = -0.0
    table.weight.grad[3, 0] = float("nan")
    assert mirror.changed(optimizer.step) == {"weight": [1, 3]}
    assert mirror.taken[1:] == [{"weight": [1, 3]}]


def test_odd_dim_and_expanded_gradient() -> None:
    """Rows are found in gradients of any row size and stride."""
    table, optimizer, _, mirror = plain(6, 3, dtype=torch.float16)
    table.weight.grad = torch.zeros(1, 1, dtype=torch.float16).expand(6, 3)
    optimizer.step()
    table.weight.grad = torch.zeros(3, 6, dtype=torch.float16).t()
    table.weight.grad[4, 1] = 1
    optimizer.step()
    assert mirror.taken == [{"weight": []}, {"weight": [4]}]


@pytest.mark.parametrize("sparse", [True, False])
def test_padding_row_is_not_streamed(sparse: bool) -> None:
    """The padding row gets no gradient, so it is not marked although batches look it up."""
    table, optimizer, _, mirror = plain(9, 4, padding_idx=2, sparse=sparse)
    table(torch.tensor([2, 3, 5])).sum().backward()
    optimizer.step()
    assert mirror.taken == [{"weight": [3, 5]}]


def test_tied_weights_are_one_table() -> None:
    """A weight shared by two embeddings and a linear layer is one table with the gradients of all three."""
    model = nn.ModuleDict(
        {"a": nn.Embedding(30, 4, sparse=True), "b": nn.EmbeddingBag(30, 4), "head": nn.Linear(4, 30)}
    )
    model["b"].weight = model["head"].weight = model["a"].weight
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tap, mirror = mirrored(model, optimizer)
    assert [table.spec.fqn for table in tap.tables] == ["a.weight"]
    hidden = model["a"](torch.tensor([1, 2])).sum() + model["b"](torch.tensor([[7, 8]])).sum()
    hidden.backward()
    optimizer.step()
    assert mirror.taken[-1] == {"a.weight": [1, 2, 7, 8]}
    optimizer.zero_grad()
    model["head"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert mirror.taken[-1] == {"a.weight": list(range(30))}


def _after_a_step() -> tuple[TwoKinds, torch.optim.Optimizer, Tap, Mirror]:
    model, optimizer, tap, mirror = watched(torch.optim.Adagrad)
    train(model, optimizer, range(1))
    return model, optimizer, tap, mirror


@pytest.mark.parametrize("through", ["data", "numpy"])
def test_a_write_that_is_counted_by_hand_is_seen(through: str) -> None:
    """Incrementing the version after an uncounted write, through `.data` or numpy, marks all rows."""
    model, _, tap, mirror = _after_a_step()
    row = next(row for row in range(97) if row not in touched(0)["user.weight"])
    if through == "data":
        model.user.weight.data[row] = 9.0
    else:
        model.user.weight.detach().numpy()[row] = 9.0
    assert not tap.end_step()
    torch.autograd.graph.increment_version(model.user.weight)
    assert tap.end_step()
    assert mirror.taken[1]["user.weight"] == list(range(97))
    assert mirror.taken[1]["tag.weight"] == []


@pytest.mark.parametrize("write", ["load", "load states", "clamp", "state", "data"])
def test_writes_by_others_mark_the_whole_table(write: str) -> None:
    """A write to a table or its states outside of the optimizer's step marks all its rows at the next boundary."""
    model, optimizer, tap, mirror = _after_a_step()
    if write == "load":
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    elif write == "clamp":
        with torch.no_grad():
            model.user.weight.clamp_(max=0.01)
    elif write == "load states":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif write == "state":
        optimizer.state[model.user.weight]["sum"] += 1
    else:
        model.user.weight.data = model.user.weight.detach() * 2
    train(model, optimizer, range(1, 2))
    assert mirror.taken[1]["user.weight"] == list(range(97))
    assert mirror.taken[1]["tag.weight"] == (
        list(range(130)) if write in ("load", "load states") else touched(1)["tag.weight"]
    )
    train(model, optimizer, range(2, 3))
    assert mirror.taken[2] == touched(2)
    with torch.no_grad():
        model.idle.weight[3] = 0
    assert tap.end_step()
    assert mirror.taken[3]["idle.weight"] == list(range(20))
    assert not tap.end_step()


@pytest.mark.parametrize(("sparse", "settings"), [(True, {}), (False, {}), (False, {"weight_decay": 0.1})])
def test_averages_that_are_copied_through_data_mark_the_whole_table(sparse: bool, settings: dict[str, float]) -> None:
    """Values copied into the tables through `.data`, which torch does not count, are seen in probed rows."""
    model, optimizer, tap, mirror = watched(torch.optim.Adagrad, sparse=sparse, **settings)
    average = torch.optim.swa_utils.AveragedModel(model)
    whole = {"user.weight": list(range(97)), "tag.weight": list(range(130))}
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
    assert not tap.end_step()
    for parameter, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.copy_(averaged.data)
    assert tap.end_step()
    assert {name: mirror.taken[-1].get(name) for name in whole} == whole
    assert not tap.end_step()
    train(model, optimizer, range(3, 4))
    if not settings:
        assert mirror.taken[-1] == touched(3)


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_a_table_whose_memory_comes_back_is_another(num_rows: int) -> None:
    """A second new tensor in `weight.data` may get the address of the table before both; all rows are marked."""
    came_back = 0
    for _ in range(50):
        model, _, tap, mirror = plain(num_rows, 8)
        before = model.weight.data_ptr()
        model.weight.data = model.weight.data * 0.5
        model.weight.data = model.weight.data.clamp(-0.1, 0.1)
        came_back += model.weight.data_ptr() == before
        assert tap.end_step()
        assert mirror.taken == [{"weight": list(range(num_rows))}]
    if not came_back:
        pytest.skip("the allocator gave no address twice")


def test_one_look_tells_of_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a probed table marks every row of all tables, because not all have a probe."""
    monkeypatch.setattr("headrace.streamer.taps.torch_optim._MAX_PROBED", 1)
    model = nn.ModuleDict({name: nn.Embedding(5, 2) for name in "abc"})
    tap, mirror = mirrored(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    assert tap.end_step()
    assert mirror.taken == [{f"{name}.weight": list(range(5)) for name in "abc"}]
    assert not tap.end_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_gradients_that_lie_anywhere_in_a_bucket(dtype: torch.dtype, offset: int) -> None:
    """A gradient that is a view into a larger tensor, as in DistributedDataParallel's buckets, shows its rows."""
    table, optimizer, _, mirror = plain(9, 8, dtype=dtype)
    bucket = torch.ones(9 * 8 + 8, dtype=dtype)
    table.weight.grad = bucket[offset : offset + 9 * 8].view(9, 8)
    table.weight.grad.zero_()
    table.weight.grad[4, 7] = 1.0
    optimizer.step()
    assert mirror.taken == [{"weight": [4]}]


@pytest.mark.parametrize("shape", [(3, 9), (9, 3)])
def test_gradients_that_are_sparse_by_columns_too(shape: tuple[int, int]) -> None:
    """A gradient with row and column ids marks only the rows, however many columns there are."""
    table, optimizer, _, mirror = plain(*shape)
    gradient = torch.zeros(shape)
    gradient[1, shape[1] - 1] = 1.0
    table.weight.grad = gradient.to_sparse()
    optimizer.step()
    assert mirror.taken == [{"weight": [1]}]


@pytest.mark.parametrize("shape", [(60,), (59, 4), (60, 3), (), (60, 4, 1)])
def test_a_state_of_another_shape_is_told(shape: tuple[int, ...]) -> None:
    """An optimizer state of another shape is a one-line error at a boundary and after `attach`."""
    table = nn.Embedding(60, 4)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    tap, mirror = mirrored(table, optimizer)
    table(torch.tensor([3])).sum().backward()
    optimizer.step()
    optimizer.state[table.weight]["exp_avg"] = torch.ones(shape)
    told = "state 'exp_avg' of table 'weight' is " + re.escape(f"{list(shape)}, its weights are [60, 4]")
    with pytest.raises(UnsupportedModelError, match=told):
        tap.end_step()
    tap.close()
    with pytest.raises(UnsupportedModelError, match=told):
        tap_model(table, optimizer, mirror.on_step).tables[0].states()


def test_an_interrupt_amid_the_marks_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C between an update and its marks, every row is sent."""
    model, optimizer, tap, mirror = plain(20, 4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model(torch.tensor([3, 5])).sum().backward()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DirtyRows, "mark", interrupt)
        optimizer.step()
    assert tap.end_step()
    assert mirror.taken == [{"weight": list(range(20))}]


@pytest.mark.parametrize(
    ("settings", "sparse"), [({}, True), ({}, False), ({"momentum": 0.9}, False), ({"weight_decay": 0.1}, False)]
)
def test_marks_on_a_device_are_those_of_the_host_and_nobody_waits(settings: dict[str, float], sparse: bool) -> None:
    """A step marks the same rows on a device as on the host, and only queues work, whatever the optimizer's reach."""

    def marked(fake: FakeDevice | None) -> list[list[list[int]]]:
        model, steps = TwoKinds(sparse=sparse), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)  # type: ignore[arg-type]
        tap = tap_model(model, optimizer, lambda: steps.append([table.dirty.take().tolist() for table in tap.tables]))
        for table in tap.tables if fake is not None else ():
            bitmap = DeviceBitmap(fake, slots_of(table.num_local_rows))
            table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap))
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).backward()
            if fake is not None and step:  # the first step moves what the optimizer has touched to the device
                with fake.training():
                    next(iter(optimizer._optimizer_step_post_hooks.values()))(optimizer, (), {})
            optimizer.step()
        tap.close()
        return steps

    on_host = marked(None)
    assert marked(FakeDevice(trains_at_once=True)) == on_host
    assert [any(rows for rows in step) for step in on_host] == [True] * 4


def _bags_on(fake: FakeDevice, kinds: str) -> tuple[torch.optim.Optimizer, Tap, list[list[list[int]]]]:
    """Return (optimizer, tap, the rows of each step by table) of a model with gradients.

    `kinds` has a letter per table: "s" for sparse gradients on the device, "d" for dense ones there, "h" for the host.
    """
    model = nn.ModuleList(nn.Embedding(60 + place, 2, sparse=kind != "d") for place, kind in enumerate(kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[list[list[int]]] = []
    tap = tap_model(model, optimizer, lambda: steps.append([table.dirty.take().tolist() for table in tap.tables]))
    bitmap = DeviceBitmap(fake, len(kinds) * 128)
    for place, (kind, table) in enumerate(zip(kinds, tap.tables, strict=True)):
        if kind == "h":
            fake.on_host.add(table.weights().data_ptr())
        else:
            table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap, place * 128))
        model[place](torch.tensor([place, 59, 2 * place, place])).sum().backward()
    return optimizer, tap, steps


@pytest.mark.parametrize("kinds", ["s" * 26, "shd" * 8 + "ss"])
def test_tables_on_a_device_are_marked_together(kinds: str) -> None:
    """A step queues one mark for all tables with sparse gradients, and one for each other table."""
    fake = FakeDevice()
    optimizer, tap, steps = _bags_on(fake, kinds)
    hook = next(iter(optimizer._optimizer_step_post_hooks.values()))
    with mock.patch.object(fake, "enqueue", wraps=fake.enqueue) as enqueue, fake.training():
        hook(optimizer, (), {})
    assert enqueue.call_count == 1 + kinds.count("d")
    assert fake.num_waits == 0
    optimizer.step()
    tap.close()
    assert steps == [[sorted({place, 59, 2 * place}) for place in range(len(kinds))]]


@pytest.mark.parametrize("is_marked", [False, True])
def test_an_interrupt_amid_the_marks_on_a_device_loses_no_row(is_marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C before or after the queued marks, every row is sent."""
    optimizer, tap, steps = _bags_on(FakeDevice(), "sss")
    mark = DeviceBitmap.mark_tables

    def interrupt(bitmap: DeviceBitmap, marks: Sequence[tuple[DeviceDirtyRows, torch.Tensor]]) -> None:
        if is_marked:
            mark(bitmap, marks)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DeviceBitmap, "mark_tables", interrupt)
        optimizer.step()
    assert tap.end_step()
    assert steps == [[list(range(60 + place)) for place in range(3)]]


def test_a_part_of_a_table_on_a_device() -> None:
    """Row ids are relative to the part's first row; other ranks' ids are dropped, or -1."""
    part = TablePart(fqn="t", num_rows=9, dim=1, first_row=3, num_local_rows=4)
    ids = torch.tensor([8, 3, 6, 2, 7, -1])
    assert part.row_ids_or_none(ids).tolist() == [-1, 0, 3, -1, -1, -1]
    assert part.row_ids(ids).tolist() == [0, 3]


def test_touched_rows_follow_their_table_to_the_host_and_back() -> None:
    """Rows that moments keep moving stay marked when a table's dirty rows move to a device and back."""
    model, optimizer, tap, mirror = watched(sparse=False, momentum=0.9)
    fake = FakeDevice(trains_at_once=True)
    for step in range(6):
        for table in tap.tables:
            if step == 2:
                bitmap = DeviceBitmap(fake, slots_of(table.num_local_rows))
                table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap))
            if step == 4:
                table.leave_device()
        train(model, optimizer, range(step, step + 1))
    assert mirror.taken[-1] == {fqn: sorted(rows) for fqn, rows in touched(*range(6)).items()}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_an_empty_sparse_gradient_may_be_kept(make: Make) -> None:
    """The next backward may add to an empty sparse gradient, so the tap must not hold its memory."""
    table = nn.Embedding(30, 4, sparse=True)
    optimizer = make(table.parameters(), lr=0.1)
    _, mirror = mirrored(table, optimizer)
    for ids in ([], [3, 4], [4, 5]):
        table(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert mirror.taken[-2:] == [{"weight": [3, 4]}, {"weight": [3, 4, 5]}]


def test_momentum_over_gradients_that_turn_sparse_is_told() -> None:
    """If gradients with momentum become sparse, all rows are sent without the momentum, with one warning."""
    table = nn.Embedding(30, 4)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    tap = tap_model(table, optimizer, lambda: None)
    table.sparse = True
    unrelated = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for number in range(3):
        table(torch.tensor([3, 4])).sum().backward()
        with pytest.warns(RuntimeWarning) if not number else contextlib.nullcontext():
            optimizer.step()
        unrelated.step()
        optimizer.zero_grad()
    assert tap.tables[0].dirty.count == 30
    tap.close()
