"""Hooks on modules and optimizers, and when a training step is over."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import mirrored
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_tables import TwoKinds, batch, touched, train, watched

from headrace.streamer.taps.hooks import ModuleHook, StepHooks, hook_sync

ALL = list(range(40))


class _Synced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_syncs = 0

    def sync(self, count: int = 1) -> int:
        self.num_syncs += count
        if count < 0:
            raise ValueError("a rank is gone")
        return self.num_syncs


def test_a_sync_is_seen_on_its_module_and_not_on_copies() -> None:
    """Also one that fails; copies and pickles sync themselves, and what stood in for the method before comes back."""
    module, calls = _Synced(), list[int]()
    own = module.__dict__["sync"] = lambda count=1: _Synced.sync(module, count) + 100
    for is_own in (True, False):
        hook = hook_sync(module, lambda: calls.append(module.num_syncs))
        assert module.sync(2) == module.num_syncs + 100 * is_own
        with pytest.raises(ValueError, match="gone"):
            module.sync(-1)
        if not is_own:
            for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                before = module.num_syncs
                assert twin.sync(5) == before + 5
                assert module.num_syncs == before
        hook.remove()
        hook.remove()
        assert module.__dict__.get("sync") is (own if is_own else None)
        module.__dict__.pop("sync", None)
    assert calls == [2, 1, 3, 2]
    assert module.sync() == 3


def test_hook_acts_on_its_module_and_not_on_copies() -> None:
    """The hook runs and returns its result on its module; on deep copies and pickles it does nothing."""
    calls: list[nn.Module] = []

    def double(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        return output * 2

    module = nn.Identity()
    module.register_forward_hook(ModuleHook(double))
    one = torch.ones(1)
    assert module(one).item() == 2
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin(one).item() == 1
        assert pickle.loads(pickle.dumps(twin))(one).item() == 1
    assert calls == [module]


def test_scripting_says_why_it_cannot() -> None:
    """`torch.jit.script` of a hooked module, or of a copy, raises an error that says what to do."""
    module = nn.Identity()
    handle = module.register_forward_hook(ModuleHook(lambda *_: None))
    for streamed in (module, copy.deepcopy(module)):
        with pytest.raises(AttributeError, match=r"script the model before attach\(\) or after the streamer's close"):
            torch.jit.script(streamed)
    handle.remove()
    torch.jit.script(module)


class Trained:
    """A table whose optimizer may have other hooks."""

    def __init__(self, *, is_watched: bool = True) -> None:
        torch.manual_seed(3)
        self.table = nn.Embedding(40, 4)
        self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.1)
        if is_watched:
            self.watch()

    def watch(self) -> None:
        self.tap, self.mirror = mirrored(self.table, self.optimizer)

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
    """A table written by another hook, registered before or after the tap's, is sent whole."""
    trained = Trained(is_watched=not is_first)
    getattr(trained.optimizer, f"register_step_{kind}_hook")(trained.halve)
    if is_first:
        trained.watch()
    for step in range(3):
        trained.step(step, 7)
        trained.tap.end_step()
        trained.mirror.check()
    assert trained.mirror.taken.count({"weight": ALL}) == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_hook_takes_away_are_seen_before(set_to_none: bool) -> None:
    """An earlier post-hook that clears the gradients does not hide the changed rows."""
    trained = Trained(is_watched=False)
    trained.optimizer.register_step_post_hook(lambda *_: trained.optimizer.zero_grad(set_to_none))
    trained.watch()
    trained.step(1, 7)
    assert trained.mirror.taken == [{"weight": [1, 7]}]


def test_a_later_pre_hook_costs_one_step() -> None:
    """A later pre-hook widens one step; then the tap's pre-hook runs after it."""
    trained = Trained()
    trained.optimizer.register_step_pre_hook(lambda *_: None)
    trained.step(1)
    trained.step(2)
    assert trained.mirror.taken == [{"weight": ALL}, {"weight": [2]}]


def test_two_taps_on_one_optimizer_do_not_widen_each_other() -> None:
    """Two taps on one optimizer each mark only the batch's rows, because their hooks write nothing."""
    tables = [nn.Embedding(40, 4), nn.Embedding(40, 4)]
    optimizer = torch.optim.SGD([table.weight for table in tables], lr=0.1)
    mirrors = [mirrored(table, optimizer)[1] for table in tables]
    for step in range(3):
        optimizer.zero_grad()
        sum(table(torch.tensor([step])).sum() for table in tables).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert [mirror.taken for mirror in mirrors] == [[{"weight": [step]} for step in range(3)]] * 2


@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_may_write_the_table(is_named: bool) -> None:
    """A closure's writes are seen; one that only computes the loss widens nothing, and its loss is returned."""
    trained = Trained()

    def step(closure: Callable[[], torch.Tensor]) -> Any:
        return trained.optimizer.step(**{"closure": closure}) if is_named else trained.optimizer.step(closure)  # type: ignore[arg-type]

    def halve() -> torch.Tensor:
        trained.halve()
        return trained.loss(2)

    losses = [step(lambda: trained.loss(1, 7)), step(halve)]
    assert trained.mirror.taken == [{"weight": [1, 7]}, {"weight": ALL}]
    assert all(isinstance(loss, torch.Tensor) for loss in losses)


def test_hooks_go_and_global_ones_come_after() -> None:
    """After `remove` nothing is called; hooks on all optimizers run outside of both."""
    calls: list[str] = []
    trained = Trained(is_watched=False)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        hooks = StepHooks(
            trained.optimizer, before=lambda: calls.append("before"), after=lambda exact: calls.append(f"{exact}")
        )
        trained.step(1)
        hooks.remove()
        hooks.remove()
        trained.step(1)
    finally:
        handle.remove()
    assert calls == ["before", "True", "global", "global"]


def test_skipped_step_of_a_gradient_scaler_marks_nothing() -> None:
    """A step that the scaler skips for an infinite gradient marks no row and is no boundary."""
    model, optimizer, _, mirror = watched(sparse=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(batch(1)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert mirror.taken == [touched(1)]


class TwoOptimizers:
    """Tables and a head, each with an optimizer."""

    def __init__(self) -> None:
        self.model, self.head = TwoKinds(sparse=True), nn.Linear(1, 1)
        self.tables = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dense = torch.optim.Adam(self.head.parameters())
        whole = nn.ModuleDict({"tables": self.model, "head": self.head})
        self.tap, self.mirror = mirrored(whole, [self.tables, self.dense])

    def backward(self, step: int) -> None:
        self.tables.zero_grad()
        self.head(self.model(batch(step)).reshape(1, 1)).sum().backward()

    def check(self, num_steps: int) -> None:
        taken = [taken["tables.user.weight"] for taken in self.mirror.taken]
        assert taken == [touched(step)["user.weight"] for step in range(num_steps)]


def test_boundary_comes_when_all_optimizers_have_stepped() -> None:
    """With several optimizers a step has one boundary, whatever their order."""
    both = TwoOptimizers()
    for step in range(4):
        both.backward(step)
        for optimizer in (both.tables, both.dense) if step % 2 else (both.dense, both.tables):
            optimizer.step()
        both.check(step + 1)


def test_boundary_with_optimizers_of_different_rhythm() -> None:
    """An optimizer that steps again before the others ends the step; nothing is lost or reported twice."""
    both = TwoOptimizers()
    for step in range(4):
        both.backward(step)
        both.tables.step()
        if step == 3:
            both.dense.step()
    both.check(4)
    assert not both.tap.end_step()
    train(both.model, both.tables, range(4, 5))
    both.check(4)
    assert both.tap.end_step()
    both.check(5)


def test_optimizer_applied_in_backward() -> None:
    """Optimizers that run inside `backward()` are found on the parameters; the next forward ends the step."""
    model = TwoKinds(sparse=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
    tap, mirror = mirrored(model)
    for step in range(4):
        model(batch(step)).backward()
        assert len(mirror.taken) == step
    model.eval()
    model(batch(9))
    assert len(mirror.taken) == 3
    assert tap.end_step()
    assert mirror.taken == [touched(step) for step in range(4)]


class LightningOptimizer:
    """Derives from the class of what it wraps, like Lightning's, and has no step hooks of its own."""

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
    """Derives from the base class without initializing it, like Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def of_torchrec(optimizer: torch.optim.Optimizer) -> Any:
    """Return three of TorchRec's wrappers around each other."""
    clipping = pytest.importorskip("torchrec.optim.clipping")
    keyed = pytest.importorskip("torchrec.optim.keyed")
    parameters = {str(place): each for place, each in enumerate(optimizer.param_groups[0]["params"])}
    inner = keyed.KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adagrad(params, lr=0.1))
    clipped = clipping.GradientClippingOptimizer(inner, clipping=clipping.GradientClipping.NORM, max_gradient=0.5)
    return keyed.CombinedOptimizer([("all", clipped)])


@pytest.mark.parametrize(
    "wrap", [LightningOptimizer, AcceleratedOptimizer, pytest.param(of_torchrec, marks=pytest.mark.torchrec)]
)
def test_wrapped_optimizers_of_trainers(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    """The optimizer inside a wrapper of Lightning, Accelerate or TorchRec is hooked."""
    model = TwoKinds(sparse=False)
    wrapped = wrap(torch.optim.Adagrad(model.parameters(), lr=0.1))
    _, mirror = mirrored(model, wrapped)
    train(model, wrapped, range(3))
    assert mirror.taken == [touched(step) for step in range(3)]


def test_updates_without_the_end_of_a_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many backward passes without the end of a step cause a warning that says what to do."""
    monkeypatch.setattr("headrace.streamer.taps.hooks._MANY_BACKWARDS", 5)
    model = nn.ModuleDict({"tables": TwoKinds(sparse=True)})
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    tap, mirror = mirrored(model)

    def train(num_passes: int) -> None:
        for _ in range(num_passes):
            model["tables"](batch(1)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the count restarts with each step
            train(4)
            assert tap.end_step()
    train(4)
    with pytest.warns(RuntimeWarning, match=r"5 backward passes have changed tables and no step has ended"):
        train(1)
    assert len(mirror.taken) == 2
