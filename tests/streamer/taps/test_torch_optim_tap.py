"""Tables that torch optimizers train: what is marked at a step boundary is all that changed, bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from fake_device import FakeDevice
from mirror import Mirror
from torch import nn
from torch_tables import Make, TwoKinds, batch, row_wise_adagrad, touched, train

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import DType, StateKind
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.taps.tap import Tap, tap_model
from headrace.streamer.taps.tapped_table import TablePart

EXACT: list[tuple[str, Make, dict[str, object], bool]] = [
    ("sgd-sparse", torch.optim.SGD, {"lr": 0.1}, True),
    ("sgd-dense", torch.optim.SGD, {"lr": 0.1}, False),
    ("sgd-dense-foreach", torch.optim.SGD, {"lr": 0.1, "foreach": True}, False),
    ("sgd-dense-fused", torch.optim.SGD, {"lr": 0.1, "fused": True}, False),
    ("sgd-sparse-maximize", torch.optim.SGD, {"lr": 0.1, "maximize": True}, True),
    ("adagrad-sparse", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "lr_decay": 0.01}, True),
    ("adagrad-dense", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "lr_decay": 0.01}, False),
    ("adagrad-dense-foreach", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "foreach": True}, False),
    ("adagrad-dense-fused", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "fused": True}, False),
    ("adagrad-init", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "initial_accumulator_value": 0.5}, False),
    ("sparse-adam", torch.optim.SparseAdam, {"lr": 0.1, "eps": 1e-5}, True),
    ("row-wise-adagrad", row_wise_adagrad, {"lr": 0.1, "eps": 1e-5}, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("make", "settings", "sparse"), [e[1:] for e in EXACT], ids=[e[0] for e in EXACT])
def test_mirror_equals_tables_at_every_boundary(
    make: Make, settings: dict[str, object], sparse: bool, dtype: torch.dtype
) -> None:
    """A copy that takes only the dirty rows equals all weights and states, and only looked-up rows are dirty."""
    model = TwoKinds(sparse=sparse, dtype=dtype)
    optimizer = make(model.parameters(), **settings)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    train(model, optimizer, range(8))
    assert len(mirror.taken) == 8
    for step, taken in enumerate(mirror.taken):
        assert taken.keys() == touched(step).keys()
        for fqn, rows in taken.items():
            assert set(rows) <= set(touched(step)[fqn])
            if sparse:
                assert rows == touched(step)[fqn]
    assert sum(len(rows) for taken in mirror.taken for rows in taken.values()) > 50
    tap.close()


@pytest.mark.parametrize("sparse", [True, False])
def test_comparison_notices_a_lost_mark(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror test fails when one row of a batch is not marked, so its success means something."""
    mark = DirtyRows.mark
    monkeypatch.setattr(DirtyRows, "mark", lambda self, ids: mark(self, ids.flatten().unique()[1:]))
    model = TwoKinds(sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
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
    """With one step after three backwards, the rows of all three batches are dirty, once."""
    model = TwoKinds(sparse=sparse)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    for step in range(3):
        model(batch(step)).backward()
    assert mirror.taken == []
    optimizer.step()
    assert mirror.taken == [touched(0, 1, 2)]


def test_forward_without_update_marks_nothing() -> None:
    """Forwards in evaluation, under `no_grad`, or whose gradient is thrown away leave no row dirty."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    with torch.no_grad():
        model(batch(1))
    model.eval()
    model(batch(2))
    model.train()
    model(batch(3)).backward()
    optimizer.zero_grad()
    optimizer.step()  # a step without gradients is a step, of which nothing changed
    assert mirror.taken == [{"user.weight": [], "item.weight": [], "tag.weight": [], "idle.weight": []}]
    train(model, optimizer, range(4, 5))
    assert mirror.taken[1] == touched(4)


def test_nan_and_negative_zero_gradients_mark() -> None:
    """A NaN in a gradient marks its row, and so does -0.0, which turns a weight of -0.0 into 0.0."""
    model = nn.Embedding(4, 3)
    with torch.no_grad():
        model.weight.fill_(-0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    model.weight.grad = torch.zeros(4, 3)
    model.weight.grad[1, 2] = -0.0
    model.weight.grad[3, 0] = float("nan")
    assert mirror.changed(optimizer.step) == {"weight": [1, 3]}
    assert mirror.taken == [{"weight": [1, 3]}]


def test_odd_dim_and_expanded_gradient() -> None:
    """Rows are found in gradients of any row size and stride."""
    model = nn.Embedding(6, 3, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    model.weight.grad = torch.zeros(1, 1, dtype=torch.float16).expand(6, 3)
    optimizer.step()
    model.weight.grad = torch.zeros(3, 6, dtype=torch.float16).t()
    model.weight.grad[4, 1] = 1
    optimizer.step()
    assert mirror.taken == [{"weight": []}, {"weight": [4]}]


def test_padding_row_is_not_streamed() -> None:
    """The padding row gets no gradient, so it is not dirty although batches name it."""
    for sparse in (True, False):
        model = nn.Embedding(9, 4, padding_idx=2, sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mirror = Mirror()
        mirror.watch(tap_model(model, optimizer, mirror.on_step))
        model(torch.tensor([2, 3, 5])).sum().backward()
        optimizer.step()
        assert mirror.taken == [{"weight": [3, 5]}]


def test_tied_weights_are_one_table() -> None:
    """A weight shared by two embeddings and a linear layer is one table, all of whose gradients count."""
    model = nn.ModuleDict(
        {"a": nn.Embedding(30, 4, sparse=True), "b": nn.EmbeddingBag(30, 4), "head": nn.Linear(4, 30)}
    )
    model["b"].weight = model["head"].weight = model["a"].weight
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    assert [table.spec.fqn for table in tap.tables] == ["a.weight"]
    hidden = model["a"](torch.tensor([1, 2])).sum() + model["b"](torch.tensor([[7, 8]])).sum()
    hidden.backward()
    optimizer.step()
    assert mirror.taken[-1] == {"a.weight": [1, 2, 7, 8]}
    optimizer.zero_grad()
    model["head"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert mirror.taken[-1] == {"a.weight": list(range(30))}


def _after_a_step() -> tuple[TwoKinds, torch.optim.Optimizer, Mirror, Tap]:
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    train(model, optimizer, range(1))
    return model, optimizer, mirror, tap


@pytest.mark.parametrize("through", ["data", "numpy"])
def test_a_write_that_is_counted_by_hand_is_seen(through: str) -> None:
    """Torch does not count a write to a row through `.data` or numpy; with its version raised, all rows are marked."""
    model, _, mirror, tap = _after_a_step()
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
    """What changes a table or its states outside of the optimizer's step marks all its rows at the next boundary."""
    model, optimizer, mirror, tap = _after_a_step()
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
    """What copies another model into the tables through `.data`, which torch does not count, is seen by its rows."""
    model = TwoKinds(sparse=sparse)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, **settings)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
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
    """Two new tensors in `weight.data` may leave the second where the first was: its rows are marked all the same."""
    came_back = 0
    for _ in range(50):
        model = nn.Embedding(num_rows, 8)
        mirror = Mirror()
        tap = tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), mirror.on_step)
        mirror.watch(tap)
        before = model.weight.data_ptr()
        model.weight.data = model.weight.data * 0.5
        model.weight.data = model.weight.data.clamp(-0.1, 0.1)
        came_back += model.weight.data_ptr() == before
        assert tap.end_step()
        assert mirror.taken == [{"weight": list(range(num_rows))}]
    if not came_back:
        pytest.skip("the allocator gave no address twice")


def test_one_look_tells_of_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each of many tables is looked at: a copy into a table that is marks every row of all."""
    monkeypatch.setattr("headrace.streamer.taps.torch_optim_tap._MAX_PROBED", 1)
    model = nn.ModuleDict({name: nn.Embedding(5, 2) for name in "abc"})
    mirror = Mirror()
    tap = tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), mirror.on_step)
    mirror.watch(tap)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    assert tap.end_step()
    assert mirror.taken == [{f"{name}.weight": list(range(5)) for name in "abc"}]
    assert not tap.end_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_gradients_that_lie_anywhere_in_a_bucket(dtype: torch.dtype, offset: int) -> None:
    """A gradient that is a view into a wider tensor, as of DistributedDataParallel's buckets, tells its rows."""
    model = nn.Embedding(9, 8, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    bucket = torch.ones(9 * 8 + 8, dtype=dtype)
    model.weight.grad = bucket[offset : offset + 9 * 8].view(9, 8)
    model.weight.grad.zero_()
    model.weight.grad[4, 7] = 1.0
    optimizer.step()
    assert mirror.taken == [{"weight": [4]}]


@pytest.mark.parametrize("shape", [(3, 9), (9, 3)])
def test_gradients_that_are_sparse_by_columns_too(shape: tuple[int, int]) -> None:
    """Of a gradient with row and column ids only the rows are marked, however many columns there are."""
    model = nn.Embedding(*shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    gradient = torch.zeros(shape)
    gradient[1, shape[1] - 1] = 1.0
    model.weight.grad = gradient.to_sparse()
    optimizer.step()
    assert mirror.taken == [{"weight": [1]}]


@pytest.mark.parametrize("shape", [(60,), (59, 4), (60, 3), (), (60, 4, 1)])
def test_a_state_of_another_shape_is_told(shape: tuple[int, ...]) -> None:
    """A state that was replaced by one of another shape is an error of one line, at a boundary and after `attach`."""
    table = nn.Embedding(60, 4)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(table, optimizer, mirror.on_step)
    mirror.watch(tap)
    table(torch.tensor([3])).sum().backward()
    optimizer.step()
    optimizer.state[table.weight]["exp_avg"] = torch.ones(shape)
    told = "state 'exp_avg' of table 'weight' is " + re.escape(f"{list(shape)} now, of weights [60, 4]")
    with pytest.raises(UnsupportedModelError, match=told):
        tap.end_step()
    tap.close()
    with pytest.raises(UnsupportedModelError, match=told):
        tap_model(table, optimizer, mirror.on_step).tables[0].states()


def test_an_interrupt_amid_the_marks_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when an update is done and its rows are not marked yet leaves every row to be sent."""
    model = nn.Embedding(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model(torch.tensor([3, 5])).sum().backward()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DirtyRows, "mark", interrupt)
        optimizer.step()
    assert tap.end_step()
    assert mirror.taken == [{"weight": list(range(20))}]


REACHES: list[tuple[dict[str, float], bool]] = [
    ({}, True),
    ({}, False),
    ({"momentum": 0.9}, False),
    ({"weight_decay": 0.1}, False),
]


@pytest.mark.parametrize(("settings", "sparse"), REACHES, ids=str)
def test_marks_on_a_device_are_those_of_the_host_and_nobody_waits(settings: dict[str, float], sparse: bool) -> None:
    """A step marks the same rows of tables on a device, and only queues work, whatever the optimizer's reach."""

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

    Args:
        fake: The device.
        kinds: A letter for each table: "s" of sparse gradients on the device, "d" of dense ones there, "h" on the host.
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
    """A step queues the marks of all tables with sparse gradients once, and those of each other one by itself."""
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
    """Ctrl-C before the marks that are queued together, or right after them, leaves every row to be sent."""
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
    """Of a table that ranks share, the rows of this one are marked, counted from its first."""
    part = TablePart(fqn="t", num_rows=9, dim=1, first_row=3, num_local_rows=4)
    ids = torch.tensor([8, 3, 6, 2, 7, -1])
    assert part.row_ids_or_none(ids).tolist() == [-1, 0, 3, -1, -1, -1]
    assert part.row_ids(ids).tolist() == [0, 3]


def test_touched_rows_follow_their_table_to_the_host_and_back() -> None:
    """Where a table's changed rows are marked elsewhere, so are the rows that moments go on to move."""
    model = TwoKinds(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
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
