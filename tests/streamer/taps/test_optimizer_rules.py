"""Optimizers that change rows without a gradient: what is marked is still all that changed, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from mirror import mirrored
from torch_tables import SIZES, Make, TwoKinds, row_wise_adagrad, touched, train, watched


@pytest.mark.parametrize(
    ("make", "settings", "changed"),
    [
        (torch.optim.SGD, {}, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.5}, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}, {"weight_decay": 0.1}),
        (torch.optim.Adam, {}, {"weight_decay": 0.1}),
        (torch.optim.SGD, {}, {"lr": float("inf")}),
        (torch.optim.Adagrad, {}, {"lr": float("nan")}),
    ],
)
def test_settings_that_a_schedule_changes_widen_the_dirty_set(
    make: Make, settings: dict[str, float], changed: dict[str, float]
) -> None:
    """Weight decay, or a rate of inf, sends all rows while it is on; later steps send the rows that it still moves."""
    model, optimizer, _, mirror = watched(make, sparse=False, **settings)
    train(model, optimizer, range(2))
    optimizer.param_groups[0].update(changed)
    train(model, optimizer, range(2, 5))
    assert mirror.taken[4]["user.weight"] == list(range(97))
    optimizer.param_groups[0].update({name: 0.0 for name in changed})
    train(model, optimizer, range(5, 8))
    mirror.check()


def test_states_that_appear_later_are_reported() -> None:
    """Momentum that is switched on after `attach` adds a state to the tables: one warning per table."""
    model, optimizer, _, mirror = watched(sparse=False)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.warns(RuntimeWarning, match="SGD changed: states were none and are momentum_buffer") as caught:
        train(model, optimizer, range(2, 5))
    assert len(caught) == 3  # one for each table with a gradient
    assert mirror.taken[4]["user.weight"] == list(range(97))


# Optimizers that change rows without a gradient: every row that has ever had one, or all of them.
WIDENED: list[tuple[str, Make, dict[str, object], bool]] = [
    ("sgd-momentum", torch.optim.SGD, {"momentum": 0.9}, False),
    ("sgd-nesterov", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, False),
    ("sgd-momentum-dampening", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, False),
    ("sgd-momentum-foreach", torch.optim.SGD, {"momentum": 0.9, "foreach": True}, False),
    ("sgd-momentum-fused", torch.optim.SGD, {"momentum": 0.9, "fused": True}, False),
    ("adam", torch.optim.Adam, {"eps": 1e-5}, False),
    ("adam-amsgrad", torch.optim.Adam, {"eps": 1e-5, "amsgrad": True}, False),
    ("adam-foreach", torch.optim.Adam, {"eps": 1e-5, "foreach": True}, False),
    ("adam-fused", torch.optim.Adam, {"eps": 1e-5, "fused": True}, False),
    ("adam-w-without-decay", torch.optim.AdamW, {"eps": 1e-5, "weight_decay": 0.0}, False),
    ("sgd-weight-decay", torch.optim.SGD, {"weight_decay": 0.01}, True),
    ("sgd-maximize", torch.optim.SGD, {"maximize": True}, True),
    ("sgd-momentum-weight-decay", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}, True),
    ("adagrad-weight-decay", torch.optim.Adagrad, {"eps": 1e-5, "weight_decay": 0.01}, True),
    ("adagrad-maximize", torch.optim.Adagrad, {"eps": 1e-5, "maximize": True}, True),
    ("row-wise-adagrad-weight-decay", row_wise_adagrad, {"eps": 1e-5, "weight_decay": 0.01}, True),
    ("adam-weight-decay", torch.optim.Adam, {"eps": 1e-5, "weight_decay": 0.01}, True),
    ("adam-maximize", torch.optim.Adam, {"eps": 1e-5, "maximize": True}, True),
    ("adam-w", torch.optim.AdamW, {"eps": 1e-5}, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "settings", "moves_all"), [e[1:] for e in WIDENED], ids=[e[0] for e in WIDENED])
def test_mirror_equals_tables_with_a_widened_dirty_set(
    make: Make, settings: dict[str, object], moves_all: bool, dtype: torch.dtype
) -> None:
    """Optimizers that move rows without a gradient mark all rows that were ever touched, or all rows."""
    if settings.get("fused") and dtype is torch.float16:
        settings = {**settings, "eps": 1e-3} if "eps" in settings else settings
    model = TwoKinds(sparse=False, dtype=dtype)
    with torch.no_grad():
        model.user.weight[::3] = -0.0  # what is added to these, even 0.0, may show
    optimizer = make(model.parameters(), lr=0.1, **settings)
    tap, mirror = mirrored(model, optimizer)
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
    """Rows with moments from before `attach`, or from a loaded checkpoint, keep moving and are marked."""
    model = TwoKinds(sparse=False)
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    stored = copy.deepcopy(optimizer.state_dict())
    _, mirror = mirrored(model, optimizer)
    train(model, optimizer, range(2, 4))
    assert set(touched(0)["user.weight"]) & set(mirror.taken[0]["user.weight"])
    optimizer.load_state_dict(stored)
    train(model, optimizer, range(4, 7))
    mirror.check()


def test_each_group_has_its_own_settings() -> None:
    """A group with weight decay sends all rows of its tables; another group of the optimizer only the batch's."""
    model = TwoKinds(sparse=False)
    with_decay = [model.user.weight, model.idle.weight]
    rest = [model.item.weight, model.tag.weight]
    optimizer = torch.optim.SGD([{"params": with_decay, "weight_decay": 0.1}, {"params": rest}], lr=0.1)
    _, mirror = mirrored(model, optimizer)
    train(model, optimizer, range(4))
    for step, taken in enumerate(mirror.taken):
        assert taken["user.weight"] == list(range(97))
        assert set(taken["item.weight"]) <= set(touched(step)["item.weight"])
