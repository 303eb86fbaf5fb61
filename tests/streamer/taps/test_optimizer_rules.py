"""Optimizers that change rows without a gradient: what is marked is still all that changed, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from mirror import Mirror
from torch_tables import SIZES, Make, TwoKinds, row_wise_adagrad, touched, train

from headrace.kernels.dirty_rows import DirtyRows
from headrace.streamer.taps.tap import tap_model


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {"weight_decay": 0.1}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), {"weight_decay": 0.1}),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), {"weight_decay": 0.1}),
        (lambda p: torch.optim.Adam(p, lr=0.1), {"weight_decay": 0.1}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"lr": float("inf")}),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), {"lr": float("nan")}),
    ],
)
def test_settings_that_a_schedule_changes_widen_the_dirty_set(make: Make, changed: dict[str, float]) -> None:
    """What comes and goes is followed, a decay as a rate of inf: all rows while it is on, what it has left after it."""
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
