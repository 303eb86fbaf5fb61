"""Optimizers that are not known to change only some rows: all rows are marked, or those that the user says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import mirrored
from torch_tables import SIZES, TwoKinds, touched, train, watched
from whole_optimizers import Around, Decaying, Lion

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import tap_model

ALL = {f"{name}.weight": list(range(rows)) for name, (rows, _) in SIZES.items()}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("make", [Lion, Decaying, Around])
def test_every_row_is_marked_after_each_step(make: Any, sparse: bool) -> None:
    """The mirror has all rows at each boundary, one a step, whatever the optimizer writes, and how."""
    torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])  # so that its `step` calls hooks too
    model, optimizer, tap, mirror = watched(make, sparse=sparse)
    train(model, optimizer, range(4))
    assert mirror.taken == [ALL] * 4
    assert all(not table.spec.states for table in tap.tables)


def test_a_step_that_raises_inside_another_is_no_step() -> None:
    """The next step of a derived optimizer is one step again, and marks all rows."""
    torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])
    model, optimizer, _, mirror = watched(Decaying, sparse=False)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fail)
    train(model, optimizer, range(2))
    assert mirror.taken == [ALL] * 2


# Optimizers of torch whose states are streamed: settings, and the names of the states and scalars.
NAMED: list[tuple[Any, dict[str, Any], list[str], list[str]]] = [
    (torch.optim.RMSprop, {}, ["square_avg"], ["step"]),
    (
        torch.optim.RMSprop,
        {"momentum": 0.9, "centered": True, "foreach": True},
        ["square_avg", "momentum_buffer", "grad_avg"],
        ["step"],
    ),
    (torch.optim.NAdam, {"weight_decay": 0.1}, ["exp_avg", "exp_avg_sq"], ["step", "mu_product"]),
    (torch.optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, ["exp_avg", "exp_avg_sq"], ["step"]),
]


@pytest.mark.parametrize(("make", "settings", "states", "scalars"), NAMED)
def test_states_of_optimizers_that_change_every_row(
    make: Any, settings: dict[str, Any], states: list[str], scalars: list[str]
) -> None:
    """Their states travel with all rows; restoring may make them before the first step."""
    model, optimizer, tap, mirror = watched(make, sparse=False, **settings)
    assert [state.name for state in tap.tables[0].spec.states] == states
    train(model, optimizer, range(3))
    assert mirror.taken == [{**ALL, "idle.weight": []}] * 3  # without a gradient it is passed over
    assert list(tap.tables[0].scalars()) == scalars
    made, fresh = TwoKinds(sparse=False), TwoKinds(sparse=False)
    made_optimizer = make(made.parameters(), lr=0.1, **settings)
    for table in tap_model(made, made_optimizer, lambda: None).tables:
        assert table.holder is not None
        table.holder.create_states()
    fresh_optimizer = make(fresh.parameters(), lr=0.1, **settings)
    assert made_optimizer.state[made.user.weight].keys() == optimizer.state[model.user.weight].keys()
    for each, each_optimizer in ((made, made_optimizer), (fresh, fresh_optimizer)):
        train(each, each_optimizer, range(2))
    assert torch.equal(made.user.weight, fresh.user.weight)
    assert torch.equal(made.tag.weight, fresh.tag.weight)


class Plain(torch.optim.SGD):
    pass


@pytest.mark.parametrize(("dirty", "sparse"), [("gradients", False), ("gradients", True), ("lookups", True)])
def test_the_users_word_on_an_unknown_optimizer(dirty: Any, sparse: bool) -> None:
    """Only rows with a gradient, or those looked up, are marked if the user says so."""
    model = TwoKinds(sparse=sparse)
    optimizer = Plain(model.parameters(), lr=0.1)
    _, mirror = mirrored(model, optimizer, dirty=dirty)
    train(model, optimizer, range(4))
    for step, taken in enumerate(mirror.taken):
        assert set(taken["user.weight"]) == set(touched(step)["user.weight"])


def test_lookups_that_a_dense_gradient_does_not_tell() -> None:
    """The word `lookups` is refused for a dense gradient, and if one turns dense later all rows are sent."""
    model = TwoKinds(sparse=False)
    optimizer = Plain(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModelError, match='does not say which rows were looked up: say dirty="gradients"'):
        tap_model(model, optimizer, lambda: None, dirty="lookups")
    model = TwoKinds(sparse=True)
    optimizer = Plain(model.parameters(), lr=0.1)
    _, mirror = mirrored(model, optimizer, dirty="lookups")
    for module in (model.user, model.item, model.tag):
        module.sparse = False
    with pytest.warns(RuntimeWarning, match="does not say which rows were looked up"):
        train(model, optimizer, range(1))
    assert mirror.taken[0]["user.weight"] == ALL["user.weight"]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_all_rows_of_known_optimizers(make: Any) -> None:
    """With `all` each step of any optimizer sends every row, states included; other words change nothing."""
    model = TwoKinds(sparse=False)
    optimizer = make(model.parameters(), lr=0.1)
    _, mirror = mirrored(model, optimizer, dirty="all")
    train(model, optimizer, range(2))
    assert mirror.taken == [ALL] * 2
    model = TwoKinds(sparse=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _, mirror = mirrored(model, optimizer, dirty="gradients")
    train(model, optimizer, range(3))
    assert set(touched(0)["user.weight"]) & set(mirror.taken[2]["user.weight"]) - set(touched(2)["user.weight"])


def test_the_log_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    """One line an optimizer has its tables, and the rows and bytes of a step."""
    model = TwoKinds(sparse=False)
    first = Lion([model.user.weight, model.item.weight])
    second = torch.optim.RMSprop([model.tag.weight, model.idle.weight])
    with caplog.at_level(logging.WARNING):
        tap_model(model, [first, second], lambda: None).close()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("torch_optim")]
    size = 4 * (97 * 8 + 64 * 16) / 1024
    assert lines == [
        f"it is not known which rows a step of Lion changes, so each streams all rows of user.weight, item.weight: 161 "
        f"rows, {size:.1f} KiB, without states of the optimizer; if you know, say dirty='gradients'",
        f"each step of RMSprop may change every row of a table, and streams these: tag.weight, idle.weight: 150 rows, "
        f"{8 * (130 * 3 + 20 * 5) / 1024:.1f} KiB",
    ]
    caplog.clear()
    model = TwoKinds(sparse=False)
    tap_model(model, Lion(model.parameters()), lambda: None, dirty="gradients").close()
    assert not [record for record in caplog.records if record.name.endswith("torch_optim")]


class Hookless(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params)}], {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class PostLocalSGDOptimizer(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [(Hookless, "runs no step hooks"), (PostLocalSGDOptimizer, "keeps different rows on each rank")],
)
def test_optimizers_that_no_word_helps(make: Callable[..., Any], message: str) -> None:
    """An optimizer whose steps no hook sees, or whose ranks differ, is refused."""
    model = TwoKinds(sparse=False)
    with pytest.raises(UnsupportedModelError, match=message):
        tap_model(model, make(model.parameters()), lambda: None, dirty="all")
