"""Tables that torch optimizers train: what is marked at a step boundary is all that changed, bit for bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from fake_device import FakeDevice
from mirror import Mirror
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import DType, StateKind
from headrace.streamer.device_dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.tap import tap_model
from headrace.streamer.tapped_table import TablePart

SIZES = {"user": (97, 8), "item": (64, 16), "tag": (130, 3), "idle": (20, 5)}


class TwoKinds(nn.Module):
    """Plain tables and pooled tables of several dims, one of which no batch uses."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.user = nn.Embedding(*SIZES["user"], sparse=sparse, dtype=dtype)
        self.item = nn.EmbeddingBag(*SIZES["item"], sparse=sparse, dtype=dtype, mode="sum")
        self.tag = nn.EmbeddingBag(*SIZES["tag"], sparse=sparse, dtype=dtype, mode="mean")
        self.idle = nn.Embedding(*SIZES["idle"], sparse=sparse, dtype=dtype)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        user, item, tag = self.user(ids["user"]), self.item(ids["item"]), self.tag(ids["tag"])
        return (user.float() * item.float()[:, :8]).sum() + tag.float().pow(2).sum() + (user.float() ** 2).sum()


def batch(step: int, size: int = 6) -> dict[str, torch.Tensor]:
    """Return ids of a step, the same in every run, skewed so that rows repeat within and across batches."""
    generator = torch.Generator().manual_seed(step)

    def ids(name: str, *shape: int) -> torch.Tensor:
        skewed = torch.rand(*shape, generator=generator) ** 3
        return (skewed * SIZES[name][0]).long()

    return {"user": ids("user", size), "item": ids("item", size, 3), "tag": ids("tag", size, 2)}


def touched(*steps: int) -> dict[str, list[int]]:
    """Return the rows that batches look up."""
    rows: dict[str, list[int]] = {"idle.weight": []}
    for name in ("user", "item", "tag"):
        rows[f"{name}.weight"] = sorted({i for step in steps for i in batch(step)[name].flatten().tolist()})
    return rows


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, size: int = 6) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, size)).backward()
        optimizer.step()


def row_wise_adagrad(parameters: object, **settings: object) -> torch.optim.Optimizer:
    module = pytest.importorskip("torchrec.optim.rowwise_adagrad")
    optimizer: torch.optim.Optimizer = module.RowWiseAdagrad(parameters, **settings)
    return optimizer


Make = Callable[..., torch.optim.Optimizer]
HALF = (torch.float16, torch.bfloat16)
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


def test_one_model_alone_has_the_plain_name() -> None:
    """An embedding that is itself the model is named as in its own `state_dict`."""
    model = nn.Embedding(5, 2)
    tap = tap_model(model, torch.optim.SGD(model.parameters()), lambda: None)
    assert [table.spec.fqn for table in tap.tables] == list(model.state_dict())


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


def test_skipped_step_of_a_gradient_scaler_marks_nothing() -> None:
    """When the scaler skips a step for an infinite gradient, nothing is dirty and no boundary is told."""
    model = TwoKinds(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(batch(1)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert mirror.taken == [touched(1)]


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


def test_frozen_tables_are_left_out_and_thawing_is_reported() -> None:
    """A frozen table is not streamed; when it is trained after all, a warning says that it is not."""
    model = TwoKinds(sparse=True)
    model.item.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    assert [table.spec.fqn for table in tap.tables] == ["user.weight", "tag.weight", "idle.weight"]
    train(model, optimizer, range(2))
    model.item.weight.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=r"'item\.weight' was frozen"):
        train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("write", ["load", "load states", "clamp", "state", "data"])
def test_writes_by_others_mark_the_whole_table(write: str) -> None:
    """What changes a table or its states outside of the optimizer's step marks all its rows at the next boundary."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    train(model, optimizer, range(1))
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


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {"weight_decay": 0.1}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), {"weight_decay": 0.1}),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), {"weight_decay": 0.1}),
        (lambda p: torch.optim.Adam(p, lr=0.1), {"weight_decay": 0.1}),
    ],
)
def test_settings_that_a_schedule_changes_widen_the_dirty_set(make: Make, changed: dict[str, float]) -> None:
    """Weight decay that comes and goes is followed: all rows while it is on, and what it has left behind after it."""
    model = TwoKinds(sparse=False)
    optimizer = make(model.parameters())
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    train(model, optimizer, range(2))
    optimizer.param_groups[0].update(changed)
    train(model, optimizer, range(2, 5))
    assert mirror.taken[4]["user.weight"] == list(range(97))
    optimizer.param_groups[0].update({name: 0.0 for name in changed})
    train(model, optimizer, range(5, 8))
    mirror.check()


def test_states_that_appear_later_are_reported() -> None:
    """Momentum switched on after attaching has a state that the table was not attached with: one warning a table."""
    model = TwoKinds(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.warns(RuntimeWarning, match="SGD changed: states were none and are momentum_buffer") as caught:
        train(model, optimizer, range(2, 5))
    assert len(caught) == 3  # one for each table with a gradient
    assert mirror.taken[4]["user.weight"] == list(range(97))


# Optimizers that change rows without a gradient: every row that has ever had one, or all of them.
WIDENED: list[tuple[str, Make, dict[str, object], bool]] = [
    ("sgd-momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, False),
    ("sgd-nesterov", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, False),
    ("sgd-momentum-dampening", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, False),
    ("sgd-momentum-foreach", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, False),
    ("sgd-momentum-fused", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, False),
    ("adam", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5}, False),
    ("adam-amsgrad", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5, "amsgrad": True}, False),
    ("adam-foreach", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5, "foreach": True}, False),
    ("adam-fused", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5, "fused": True}, False),
    ("adam-w-without-decay", torch.optim.AdamW, {"lr": 0.1, "eps": 1e-5, "weight_decay": 0.0}, False),
    ("sgd-weight-decay", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}, True),
    ("sgd-maximize", torch.optim.SGD, {"lr": 0.1, "maximize": True}, True),
    ("sgd-momentum-weight-decay", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, True),
    ("adagrad-weight-decay", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "weight_decay": 0.01}, True),
    ("adagrad-maximize", torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-5, "maximize": True}, True),
    ("row-wise-adagrad-weight-decay", row_wise_adagrad, {"lr": 0.1, "eps": 1e-5, "weight_decay": 0.01}, True),
    ("adam-weight-decay", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5, "weight_decay": 0.01}, True),
    ("adam-maximize", torch.optim.Adam, {"lr": 0.1, "eps": 1e-5, "maximize": True}, True),
    ("adam-w", torch.optim.AdamW, {"lr": 0.1, "eps": 1e-5}, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "settings", "moves_all"), [e[1:] for e in WIDENED], ids=[e[0] for e in WIDENED])
def test_mirror_equals_tables_with_a_widened_dirty_set(
    make: Make, settings: dict[str, object], moves_all: bool, dtype: torch.dtype
) -> None:
    """Optimizers that move rows without a gradient: all that were ever touched are dirty, or all; copies are equal."""
    if settings.get("fused") and dtype is torch.float16:
        settings = {**settings, "eps": 1e-3} if "eps" in settings else settings
    model = TwoKinds(sparse=False, dtype=dtype)
    with torch.no_grad():
        model.user.weight[::3] = -0.0  # what is added to these, even 0.0, may show
    optimizer = make(model.parameters(), **settings)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    train(model, optimizer, range(6))
    for step, taken in enumerate(mirror.taken):
        for fqn, rows in taken.items():
            if fqn == "idle.weight":
                assert rows == []  # no gradient at all: the optimizer passes over it
            elif moves_all or (settings.get("fused") and "momentum" in settings and dtype is not torch.float32):
                assert len(rows) == SIZES[fqn.split(".")[0]][0]
            else:
                assert set(rows) <= set(touched(*range(step + 1))[fqn])
    tap.close()


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_attached_or_loaded_amid_training_with_moments(make: Make) -> None:
    """Rows that have moments when the tap comes, or after a checkpoint is loaded, go on moving and are followed."""
    model = TwoKinds(sparse=False)
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    stored = copy.deepcopy(optimizer.state_dict())
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    train(model, optimizer, range(2, 4))
    assert set(touched(0)["user.weight"]) & set(mirror.taken[0]["user.weight"])
    optimizer.load_state_dict(stored)
    train(model, optimizer, range(4, 7))
    mirror.check()


def test_each_group_has_its_own_settings() -> None:
    """Of one optimizer, the group with weight decay streams all rows of its tables, the other the batch's only."""
    model = TwoKinds(sparse=False)
    with_decay = [model.user.weight, model.idle.weight]
    rest = [model.item.weight, model.tag.weight]
    optimizer = torch.optim.SGD([{"params": with_decay, "weight_decay": 0.1}, {"params": rest}], lr=0.1)
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    train(model, optimizer, range(4))
    for step, taken in enumerate(mirror.taken):
        assert taken["user.weight"] == list(range(97))
        assert set(taken["item.weight"]) <= set(touched(step)["item.weight"])


def test_the_second_bitmap_costs_one_bit_a_row() -> None:
    """Only moments need to remember which rows were touched, and they do so in one bit a row."""
    table = DirtyRows(1_000_000)
    assert table.size_bytes <= 1_000_000 / 8 * 1.01


REFUSED: list[tuple[str, Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]], str]] = []


def refused(
    message: str,
) -> Callable[
    [Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]]],
    Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]],
]:
    """Collect a model with optimizers that must be refused, and what the error says."""

    def add(
        case: Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]],
    ) -> Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]]:
        REFUSED.append((case.__name__, case, message))
        return case

    return add


def with_optimizer(make: Make, **settings: object) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=False)
    return model, [make(model.parameters(), **settings)]


@refused("eps 0 is 0 in float32")
def adagrad_without_eps() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return with_optimizer(torch.optim.Adagrad, eps=0)


@refused("eps 1e-10 is 0 in float16")
def adagrad_with_eps_too_small_for_its_type() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=False, dtype=torch.float16)
    return model, [torch.optim.Adagrad(model.parameters())]


@refused(r"'user.weight': optimizer NAdam cannot be streamed exactly: it is not known which rows.*use SGD")
def optimizer_without_a_rule() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return with_optimizer(torch.optim.NAdam)


@refused("with SGD cannot be streamed exactly: momentum 0.9 of a sparse gradient is not kept row by row")
def momentum_of_sparse_gradients() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=True)
    return model, [torch.optim.SGD(model.parameters(), momentum=0.9)]


@refused("eps 1e-08 is 0 in float16")
def adam_with_eps_too_small_for_its_type() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=False, dtype=torch.float16)
    return model, [torch.optim.Adam(model.parameters())]


@refused("optimizer Mine cannot be streamed exactly: it is not known which rows")
def derived_optimizer() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    class Mine(torch.optim.SGD):
        pass

    return with_optimizer(Mine)


@refused("table 'idle.weight' is trained by none of the optimizers given")
def uncovered_table() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=True)
    return model, [torch.optim.SGD([model.user.weight, model.item.weight, model.tag.weight])]


@refused("updated by 2 optimizers \\(SGD and Adagrad\\)")
def table_with_two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = TwoKinds(sparse=True)
    return model, [torch.optim.SGD(model.parameters()), torch.optim.Adagrad(model.parameters())]


@refused("table 'weight': max_norm rescales rows in the forward")
def max_norm() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Embedding(5, 2, max_norm=1.0)
    return model, [torch.optim.SGD(model.parameters())]


@refused("no embedding table that is trained")
def no_table() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Linear(5, 2)
    return model, [torch.optim.SGD(model.parameters())]


@refused("no embedding table that is trained")
def all_frozen() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Embedding(5, 2).requires_grad_(False)
    return model, []


@refused("element type torch.complex64 cannot be streamed")
def complex_table() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Embedding(5, 2, dtype=torch.complex64)
    return model, [torch.optim.SGD(model.parameters())]


@refused("'weight' is not a parameter but computed")
def parametrized_table() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.utils.parametrizations.weight_norm(nn.Embedding(5, 2))
    return model, [torch.optim.SGD(model.parameters())]


@pytest.mark.parametrize(("case", "message"), [e[1:] for e in REFUSED], ids=[e[0] for e in REFUSED])
def test_refused_with_a_reason_and_no_hooks(
    case: Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]], message: str
) -> None:
    """What cannot be streamed exactly is refused with one line that says why, and leaves no hook behind."""
    model, optimizers = case()
    before = hooks(model, *optimizers)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        tap_model(model, optimizers, lambda: None)
    assert "\n" not in str(caught.value)
    assert hooks(model, *optimizers) == before


def hooks(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """Count the hooks on modules and optimizers."""
    on_modules = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
    return on_modules + sum(
        len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers
    )


def test_second_tap_is_refused_until_the_first_is_closed() -> None:
    """A model, or a part of it, that has a tap cannot have a second; closing removes every hook."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.SGD(model.parameters())
    tap = tap_model(model, optimizer, lambda: None)
    assert hooks(model, optimizer)
    with pytest.raises(UnsupportedModelError, match=r"'user' is streamed already"):
        tap_model(model, optimizer, lambda: None)
    with pytest.raises(UnsupportedModelError, match=r"is streamed already"):
        tap_model(model.item, torch.optim.SGD(model.item.parameters()), lambda: None)
    tap.close()
    tap.close()
    assert hooks(model, optimizer) == 0
    tap_model(model, optimizer, lambda: None).close()


def test_closed_tap_marks_nothing() -> None:
    """After `close` steps are neither marked nor told."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    tap.close()
    train(model, optimizer, range(2))
    assert mirror.taken == []
    assert not tap.end_step()
    assert all(table.dirty.is_empty for table in tap.tables)


def test_copies_of_model_and_optimizer_are_not_tapped() -> None:
    """Copies, pickles and state dicts are as they are without a tap, and training a copy marks nothing."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    mirror = Mirror()
    mirror.watch(tap_model(model, optimizer, mirror.on_step))
    assert list(model.state_dict()) == keys
    stored = io.BytesIO()
    torch.save((model, optimizer), stored)
    stored.seek(0)
    for twin, twin_optimizer in (copy.deepcopy((model, optimizer)), torch.load(stored, weights_only=False)):
        assert hooks(twin, twin_optimizer) == 0
        train(twin, twin_optimizer, range(2))
    assert mirror.taken == []
    train(model, optimizer, range(2))
    assert len(mirror.taken) == 2


def test_boundary_comes_when_all_optimizers_have_stepped() -> None:
    """With several optimizers, in any order, a step has one boundary, and the mirror is right at it."""
    model = TwoKinds(sparse=True)
    head = nn.Linear(1, 1)
    tables = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    dense = torch.optim.Adam(head.parameters())
    whole = nn.ModuleDict({"tables": model, "head": head})
    mirror = Mirror()
    mirror.watch(tap_model(whole, [tables, dense], mirror.on_step))
    for step in range(4):
        tables.zero_grad()
        head(model(batch(step)).reshape(1, 1)).sum().backward()
        for optimizer in (tables, dense) if step % 2 else (dense, tables):
            optimizer.step()
        assert len(mirror.taken) == step + 1
    assert mirror.taken[3]["tables.user.weight"] == touched(3)["user.weight"]


def test_boundary_with_optimizers_of_different_rhythm() -> None:
    """An optimizer that steps again before the others ends the step; nothing is lost or told twice."""
    model = TwoKinds(sparse=True)
    head = nn.Linear(1, 1)
    tables = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = torch.optim.Adam(head.parameters())
    mirror = Mirror()
    tap = tap_model(nn.ModuleDict({"tables": model, "head": head}), [tables, dense], mirror.on_step)
    mirror.watch(tap)
    for step in range(4):
        tables.zero_grad()
        head(model(batch(step)).reshape(1, 1)).sum().backward()
        tables.step()
        if step == 3:
            dense.step()
    assert [taken["tables.user.weight"] for taken in mirror.taken] == [touched(i)["user.weight"] for i in range(4)]
    assert not tap.end_step()
    train(model, tables, range(4, 5))
    assert len(mirror.taken) == 4
    assert tap.end_step()
    assert mirror.taken[4]["tables.user.weight"] == touched(4)["user.weight"]


def test_optimizer_applied_in_backward() -> None:
    """Optimizers that run inside `backward()` are found on the parameters; the next forward ends the step."""
    model = TwoKinds(sparse=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
    mirror = Mirror()
    tap = tap_model(model, [], mirror.on_step)
    mirror.watch(tap)
    for step in range(4):
        model(batch(step)).backward()
        assert len(mirror.taken) == step
    model.eval()
    model(batch(9))
    assert len(mirror.taken) == 3
    assert tap.end_step()
    assert mirror.taken == [touched(step) for step in range(4)]


def test_compiled_and_data_parallel_wrappers_keep_the_names() -> None:
    """Tables are named as in the unwrapped model."""
    model = nn.Sequential(nn.Embedding(4, 2))
    compiled = torch.compile(model)
    tap = tap_model(nn.ModuleDict({"m": compiled}), torch.optim.SGD(compiled.parameters()), lambda: None)
    assert [table.spec.fqn for table in tap.tables] == ["m.0.weight"]


@pytest.mark.torchrec
def test_wrapped_optimizers_of_torchrec() -> None:
    """The optimizers inside of TorchRec's wrappers are the ones that are hooked."""
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    model = TwoKinds(sparse=False)
    keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.Adagrad(p, lr=0.1))
    clipped = GradientClippingOptimizer(keyed, clipping=GradientClipping.NORM, max_gradient=0.5)
    combined = CombinedOptimizer([("all", clipped)])
    mirror = Mirror()
    mirror.watch(tap_model(model, combined, mirror.on_step))
    train(model, combined, range(3))
    assert mirror.taken == [touched(step) for step in range(3)]


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
