"""An unattached optimizer that trains a table is an error; wrappers and optimizers of other parameters are not."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_shard import FakeStore
from mirror import mirrored
from streamed_training import Training, streaming
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import tap_model
from headrace.streamer.taps.guards import unattached_steps
from headrace.streamer.taps.guards.unattached_steps import UnattachedSteps

Make = Callable[..., torch.optim.Optimizer]
TOLD = r"table 'table.weight' is trained by another optimizer \(Adagrad\) than the one attached \(SGD\)"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)
        self.head = nn.Linear(4, 1)

    def loss(self) -> torch.Tensor:
        self.zero_grad()
        loss: torch.Tensor = self.head(self.table(torch.tensor([1, 7]))).sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_new_optimizer_is_told_at_its_first_step(is_wrapped: bool) -> None:
    """Its first step raises, wrapped or not, and so does every later flush."""
    model = Model()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    tap, _ = mirrored(model, old)
    model.loss()
    old.step()
    new: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if is_wrapped:
        new = Clamping(new)
    model.loss()
    with pytest.raises(UnsupportedModelError, match=TOLD):
        new.step()
    with pytest.raises(UnsupportedModelError, match=TOLD):
        tap.tables[0].weights()
    tap.close()
    model.loss()
    new.step()


def test_a_table_that_is_given_to_another_optimizer_is_told() -> None:
    """A table that moves from one attached optimizer to another is an error."""
    model = Model()
    tables = torch.optim.SGD(model.table.parameters(), lr=0.1)
    head = torch.optim.Adagrad(model.head.parameters(), lr=0.1)
    tap, _ = mirrored(model, [tables, head])
    tables.param_groups[0]["params"] = []
    head.add_param_group({"params": list(model.table.parameters())})
    model.loss()
    with pytest.raises(UnsupportedModelError, match=TOLD):
        head.step()
    tap.close()


def test_a_table_that_is_given_to_another_tables_optimizer_is_told() -> None:
    """That holds too if the other optimizer is attached for another table."""
    model = nn.ModuleDict({"table": nn.Embedding(40, 4), "other": nn.Embedding(40, 4)})
    tables = torch.optim.SGD(model["table"].parameters(), lr=0.1)
    others = torch.optim.Adagrad(model["other"].parameters(), lr=0.1)
    tap = tap_model(model, [tables, others], lambda: None)
    tables.param_groups[0]["params"] = []
    others.add_param_group({"params": list(model["table"].parameters())})
    (model["table"](torch.tensor([1])) + model["other"](torch.tensor([1]))).sum().backward()
    others.step()
    tables.step()
    with pytest.raises(UnsupportedModelError, match=TOLD):
        [table.weights() for table in tap.tables]
    tap.close()


def test_an_optimizer_of_others_does_not_touch_a_table() -> None:
    """An optimizer of other parameters sweeps no table, because it may step on another thread."""
    model = Model()
    tap, _ = mirrored(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.table.weight.clamp_(-0.1, 0.1)
    unrelated = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    unrelated.step()
    assert tap.tables[0].dirty.is_empty
    tap.sweep()
    assert tap.tables[0].dirty.count == 40
    tap.close()


def test_a_new_optimizer_in_backward_is_told() -> None:
    """A new optimizer applied in backward is an error; the attached one is not."""
    model = Model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    tap, mirror = mirrored(model, [])
    for _ in range(2):
        model.loss()
        tap.end_step()
    assert mirror.taken == [{"table.weight": [1, 7]}] * 2
    _apply_optimizer_in_backward(torch.optim.Adagrad, model.table.parameters(), {"lr": 0.1})
    with pytest.raises(UnsupportedModelError, match=TOLD):
        model.loss()


def test_a_compiled_step_of_a_new_optimizer_is_told() -> None:
    """A compiled step of a new optimizer raises too."""
    model = Model()
    tap, _ = mirrored(model, torch.optim.SGD(model.parameters(), lr=0.1))
    new = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model.loss()
    with pytest.raises(UnsupportedModelError, match=TOLD):
        torch.compile(new.step, backend="eager")()
    tap.close()


class Clamping(torch.optim.Optimizer):
    """A wrapper with the same parameters as the wrapped optimizer, which writes them too."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.5, 0.5)


def keyed(model: Model, make: Make) -> Any:
    """Return nested wrappers of TorchRec as they are after a copy: with step hooks."""
    keyed_module = pytest.importorskip("torchrec.optim.keyed")
    warmup = pytest.importorskip("torchrec.optim.warmup")
    inner = keyed_module.KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: make(params, lr=0.1))
    stages = [warmup.WarmupStage(policy=warmup.WarmupPolicy.LINEAR, max_iters=3)]
    copied = type("Copied", (keyed_module.CombinedOptimizer,), {})
    combined = copied([warmup.WarmupOptimizer(inner, stages, lr=0.1)])
    combined._patch_step_function()  # as unpickling does, for the whole class
    return combined


def test_wrappers_of_the_attached_optimizer_are_not_told() -> None:
    """A wrapper may write the table after the wrapped step, and have it in its groups."""
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    tap, mirror = mirrored(model, inner)
    outer = Clamping(Clamping(inner))
    for _ in range(3):
        model.loss()
        outer.step()
        tap.end_step()
        mirror.check()
    assert len(mirror.taken) >= 3


@pytest.mark.parametrize("makes_anew", [False, True])
def test_wrappers_of_torchrec(makes_anew: bool) -> None:
    """TorchRec's wrappers are accepted, and a new optimizer inside them is an error."""
    model = Model()
    optimizer = keyed(model, torch.optim.SGD)
    _, mirror = mirrored(model, optimizer)
    for _ in range(2):
        model.loss()
        optimizer.step()
    assert mirror.taken == [{"table.weight": [1, 7]}] * 2
    if makes_anew:
        optimizer = keyed(model, torch.optim.Adagrad)
        model.loss()
        with pytest.raises(UnsupportedModelError, match=TOLD):
            optimizer.step()


def test_other_optimizers_are_not_told() -> None:
    """Optimizers of other parameters or of a copy, and steps without an update of the table, are accepted."""
    model = Model()
    own = torch.optim.SGD(model.table.parameters(), lr=0.1)
    tap, mirror = mirrored(model, own)
    twin = copy.deepcopy(model)
    others = [
        torch.optim.Adagrad(model.head.parameters(), lr=0.1),
        torch.optim.Adagrad(twin.parameters(), lr=0.1),
        torch.optim.Adagrad(model.parameters(), lr=0.1),
    ]
    for _ in range(3):
        model.loss()
        twin.loss()
        own.step()
        with torch.no_grad():
            model.table.weight.mul_(0.5)
        model.table.weight.grad = None
        for other in others:
            other.step()
        tap.end_step()
        mirror.check()


def test_a_tap_that_nobody_has_is_not_kept() -> None:
    """The global hooks keep no model, optimizer or tap alive, and forget closed taps."""
    model, before = Model(), set(unattached_steps._watchers.values())
    tap, _ = mirrored(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (own,) = set(unattached_steps._watchers.values()) - before  # other tests' taps may go meanwhile
    reference = weakref.ref(model)
    del model, tap, _
    gc.collect()
    assert reference() is None and own() is None
    assert own not in unattached_steps._watchers.values()
    other, before = Model(), set(unattached_steps._watchers.values())
    mirrored(other, torch.optim.SGD(other.parameters(), lr=0.1))[0].close()
    assert set(unattached_steps._watchers.values()) <= before
    assert len(unattached_steps._hooks) == 2


def test_taps_that_are_collected_during_a_step_do_not_break_it() -> None:
    """The garbage collector may free a forgotten tap while another optimizer's step looks at all taps."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # collections are of this test's objects alone
    try:
        for num_allocations in range(12):  # one of them is the copy of the list of taps
            gc.collect()
            gc.disable()
            for _ in range(40):
                cycle: list[Any] = []
                cycle.append(UnattachedSteps([], sweep=cycle.append, on_step=lambda tables, kind: None))
            gc.set_threshold(gc.get_count()[0] + num_allocations)
            gc.enable()
            unattached_steps._before_step(optimizer)  # a whole step allocates too much before it gets here
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_streamer_says_so(
    store: FakeStore, training: Training, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under `raise` the new optimizer's step raises, under `log` it is logged once; a flush raises and sends none."""
    with streaming(store, training, on_error=on_error) as streamer, caplog.at_level(logging.ERROR, "headrace"):
        training.step()
        streamer.flush()
        training.optimizer = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
        num_batches = len(store.received)
        for _ in range(3):
            if on_error == "raise":
                with pytest.raises(UnsupportedModelError, match="attach the model and its new optimizer to a new"):
                    training.step()
            else:
                training.step()
        with pytest.raises(UnsupportedModelError, match=r"'user\.weight' is trained by another optimizer"):
            streamer.flush()
        told = [record for record in caplog.records if "streaming has stopped" in record.getMessage()]
        assert len(told) == (on_error == "log")
        assert not any(batch.rows for batch in store.received[num_batches:])
