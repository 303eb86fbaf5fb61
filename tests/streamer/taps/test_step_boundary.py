"""When a step is over: with one optimizer or several, skipped steps, and updates inside of `backward()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import Mirror
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch_tables import TwoKinds, batch, touched, train

from headrace.streamer.taps.tap import tap_model


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


class LightningOptimizer:
    """Takes the class of what it wraps as a base, as Lightning's does, and has no step hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Lightning{kind.__name__}", (LightningOptimizer, kind), {})
        self.param_groups = optimizer.param_groups

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps as Accelerate's does: derived from the base class, which it does not initialize."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [LightningOptimizer, AcceleratedOptimizer])
def test_wrapped_optimizers_of_trainers(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    """The optimizer inside of a wrapper of Lightning or Accelerate is the one that is hooked."""
    model = TwoKinds(sparse=False)
    wrapped = wrap(torch.optim.Adagrad(model.parameters(), lr=0.1))
    mirror = Mirror()
    mirror.watch(tap_model(model, wrapped, mirror.on_step))
    train(model, wrapped, range(3))
    assert mirror.taken == [touched(step) for step in range(3)]


def test_updates_without_the_end_of_a_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a part of the model is called and nobody says that a step is over, a warning says what is missing."""
    monkeypatch.setattr("headrace.streamer.taps.step_boundary._MANY_BACKWARDS", 5)
    model = nn.ModuleDict({"tables": TwoKinds(sparse=True)})
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    mirror = Mirror()
    tap = tap_model(model, [], mirror.on_step)
    mirror.watch(tap)

    def train(num_passes: int) -> None:
        for _ in range(num_passes):
            model["tables"](batch(1)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the count begins anew with each step
            train(4)
            assert tap.end_step()
    train(4)
    with pytest.warns(RuntimeWarning, match=r"5 backward passes have changed tables and no step has ended"):
        train(1)
    assert len(mirror.taken) == 2
