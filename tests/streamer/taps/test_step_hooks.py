"""Hooks next to an optimizer's update: what others do before and after it is seen, whoever came first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mirror import Mirror
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from headrace.streamer.taps.step_hooks import StepHooks
from headrace.streamer.taps.tap import tap_model

ALL = list(range(40))


class Trained:
    """A table whose step may have hooks of others."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.table = nn.Embedding(40, 4)
        self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.1)
        self.mirror = Mirror()

    def watch(self) -> None:
        self.tap = tap_model(self.table, self.optimizer, self.mirror.on_step)
        self.mirror.watch(self.tap)

    def loss(self, *ids: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.table(torch.tensor(ids)).pow(2).sum()
        loss.backward()
        return loss

    def step(self, *ids: int) -> None:
        self.loss(*ids)
        self.optimizer.step()

    def halve(self, *_: object) -> None:
        with torch.no_grad():
            self.table.weight.mul_(0.5)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_writes_of_other_hooks_are_seen(kind: str, is_first: bool) -> None:
    """A hook of others that writes the table, registered before the tap's or after, leaves no row behind."""
    trained = Trained()
    register = getattr(trained.optimizer, f"register_step_{kind}_hook")
    if is_first:
        register(trained.halve)
    trained.watch()
    if not is_first:
        register(trained.halve)
    for step in range(3):
        trained.step(step, 7)
        trained.tap.end_step()
        trained.mirror.check()
    assert trained.mirror.taken.count({"weight": ALL}) == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_hook_takes_away_are_seen_before(set_to_none: bool) -> None:
    """A post-hook that was there first and empties the gradients does not hide which rows changed."""
    trained = Trained()
    trained.optimizer.register_step_post_hook(lambda *_: trained.optimizer.zero_grad(set_to_none))
    trained.watch()
    trained.step(1, 7)
    assert trained.mirror.taken == [{"weight": [1, 7]}]


def test_a_later_pre_hook_costs_one_step() -> None:
    """A pre-hook that only reads widens one step; then the tap's lies behind it again."""
    trained = Trained()
    trained.watch()
    trained.optimizer.register_step_pre_hook(lambda *_: None)
    trained.step(1)
    trained.step(2)
    assert trained.mirror.taken == [{"weight": ALL}, {"weight": [2]}]


def test_two_taps_on_one_optimizer_do_not_widen_each_other() -> None:
    """The hooks of another tap write nothing, so both mark the rows of the batch alone."""
    tables = [nn.Embedding(40, 4), nn.Embedding(40, 4)]
    optimizer = torch.optim.SGD([table.weight for table in tables], lr=0.1)
    mirrors = [Mirror(), Mirror()]
    for table, mirror in zip(tables, mirrors, strict=True):
        mirror.watch(tap_model(table, optimizer, mirror.on_step))
    for step in range(3):
        optimizer.zero_grad()
        sum(table(torch.tensor([step])).sum() for table in tables).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert [mirror.taken for mirror in mirrors] == [[{"weight": [step]} for step in range(3)]] * 2


def by_position(trained: Trained, closure: Callable[[], torch.Tensor]) -> object:
    return trained.optimizer.step(closure)  # type: ignore[arg-type]


def by_name(trained: Trained, closure: Callable[[], torch.Tensor]) -> object:
    return trained.optimizer.step(closure=closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [by_position, by_name])
def test_a_closure_may_write_the_table(step: Callable[..., object]) -> None:
    """What a closure writes is seen; one that only computes the loss widens nothing, and its loss comes back."""
    trained = Trained()
    trained.watch()
    losses = [step(trained, lambda: trained.loss(1, 7))]
    assert trained.mirror.taken == [{"weight": [1, 7]}]

    def closure() -> torch.Tensor:
        trained.halve()
        return trained.loss(2)

    losses.append(step(trained, closure))
    assert trained.mirror.taken[1] == {"weight": ALL}
    assert all(isinstance(loss, torch.Tensor) for loss in losses)


def test_hooks_go_and_global_ones_come_after() -> None:
    """After `remove` nothing is called; a hook on all optimizers runs outside of both."""
    calls: list[str] = []
    trained = Trained()
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        hooks = StepHooks(
            trained.optimizer, before=lambda: calls.append("before"), after=lambda is_next: calls.append(f"{is_next}")
        )
        trained.step(1)
        hooks.remove()
        hooks.remove()
        trained.step(1)
    finally:
        handle.remove()
    assert calls == ["before", "True", "global", "global"]
