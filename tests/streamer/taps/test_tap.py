"""Which models can be tapped, under which names, and that a tap leaves nothing behind."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from mirror import Mirror
from torch import nn
from torch_tables import Make, TwoKinds, hooks, train

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.tap import tap_model


def test_one_model_alone_has_the_plain_name() -> None:
    """An embedding that is itself the model is named as in its own `state_dict`."""
    model = nn.Embedding(5, 2)
    tap = tap_model(model, torch.optim.SGD(model.parameters()), lambda: None)
    assert [table.spec.fqn for table in tap.tables] == list(model.state_dict())


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


def test_compiled_and_data_parallel_wrappers_keep_the_names() -> None:
    """Tables are named as in the unwrapped model."""
    model = nn.Sequential(nn.Embedding(4, 2))
    compiled = torch.compile(model)
    tap = tap_model(nn.ModuleDict({"m": compiled}), torch.optim.SGD(compiled.parameters()), lambda: None)
    assert [table.spec.fqn for table in tap.tables] == ["m.0.weight"]
