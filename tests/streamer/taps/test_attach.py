"""Which models and tables can be tapped, under which names, and that a tap leaves nothing behind."""

from __future__ import annotations

import ast
import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import mirrored
from torch import nn
from torch_tables import TwoKinds, hooks, train, watched

from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.streamer.taps.attach import tap_model


def names_of(model: nn.Module, tables: list[str] | None = None) -> list[str]:
    tap = tap_model(model, torch.optim.SGD(model.parameters()), lambda: None, tables=tables)
    tap.close()
    return [table.spec.fqn for table in tap.tables]


def test_names() -> None:
    """Tables have their names in the unwrapped model's `state_dict`, also if an embedding is the whole model."""
    assert names_of(nn.Embedding(5, 2)) == ["weight"]
    assert names_of(nn.ModuleDict({"m": torch.compile(nn.Sequential(nn.Embedding(4, 2)))})) == ["m.0.weight"]


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        (None, ["user", "item", "tag", "idle"]),
        (["user.weight"], ["user"]),
        (["*.weight"], ["user", "item", "tag", "idle"]),
        (["i*", "item.weight"], ["item", "idle"]),
        (["[uv]ser.weigh?"], ["user"]),
        (["!user.weight", "!i*"], ["tag"]),
        (["*.weight", "!user.weight"], ["item", "tag", "idle"]),
    ],
)
def test_names_and_patterns(tables: list[str] | None, found: list[str]) -> None:
    """`tables` selects the tables that match a name or pattern, each once, but none that matches one behind `!`."""
    assert names_of(TwoKinds(sparse=True), tables) == [f"{name}.weight" for name in found]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (["users.weight"], r"no table is named or matches 'users.weight'; the nearest are 'user.weight'"),
        (["user.weight", "x*"], r"matches 'x\*'; there are 'idle.weight', 'item.weight'"),
        (["!users.weight"], r"no table is named or matches 'users.weight'; the nearest are 'user.weight'"),
        ([], "tables is empty"),
        ("user.weight", "is not a list"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tables: list[str], message: str) -> None:
    """A name without a table is an error that lists the nearest, and leaves no hook."""
    model = TwoKinds(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        tap_model(model, optimizer, lambda: None, tables=tables)
    assert not optimizer._optimizer_step_post_hooks


def test_tables_that_are_not_selected_may_be_of_any_kind() -> None:
    """Tables that cannot be streamed are refused only if they are selected."""
    model = TwoKinds(sparse=True)
    model.item = nn.EmbeddingBag(40, 4, mode="sum", max_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="max_norm"):
        names_of(model)
    assert names_of(model, ["user*"]) == ["user.weight"]


def test_frozen_tables_are_left_out_and_thawing_is_reported() -> None:
    """A frozen table is not streamed; if it is trained later, a warning says so."""
    model = TwoKinds(sparse=True)
    model.item.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tap, _ = mirrored(model, optimizer)
    assert [table.spec.fqn for table in tap.tables] == ["user.weight", "tag.weight", "idle.weight"]
    train(model, optimizer, range(2))
    model.item.weight.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=r"'item\.weight' was frozen"):
        train(model, optimizer, range(2, 4))


def trained(model: nn.Module, *makes: Any, **settings: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return model, [make(model.parameters(), **settings) for make in makes or (torch.optim.SGD,)]


def dense(*makes: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return trained(TwoKinds(sparse=False, dtype=dtype), *makes, **settings)


def without_idle() -> Any:
    model = TwoKinds(sparse=True)
    return model, [torch.optim.SGD([model.user.weight, model.item.weight, model.tag.weight])]


optim = torch.optim
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no eps": (lambda: dense(optim.Adagrad, eps=0), "eps 0 is 0 in float32"),
    "small eps": (lambda: dense(optim.Adagrad, dtype=torch.float16), "eps 1e-10 is 0 in float16"),
    "small eps of Adam": (lambda: dense(optim.Adam, dtype=torch.float16), "eps 1e-08 is 0 in float16"),
    "sparse momentum": (
        lambda: trained(TwoKinds(sparse=True), momentum=0.9),
        "with SGD cannot be streamed exactly: momentum 0.9 of a sparse gradient is not kept row by row",
    ),
    "no optimizer": (without_idle, "table 'idle.weight' is trained by none of the given optimizers"),
    "two optimizers": (lambda: dense(optim.SGD, optim.Adagrad), r"updated by 2 optimizers \(SGD and Adagrad\)"),
    "max_norm": (lambda: trained(nn.Embedding(5, 2, max_norm=1.0)), "'weight': max_norm rescales rows in the forward"),
    "no table": (lambda: trained(nn.Linear(5, 2)), "no embedding table that is trained"),
    "frozen": (lambda: (nn.Embedding(5, 2).requires_grad_(False), []), "no embedding table that is trained"),
    "complex, with an eps": (
        lambda: dense(optim.Adagrad, dtype=torch.complex64),
        "element type torch.complex64 cannot",
    ),
    "complex": (lambda: trained(nn.Embedding(5, 2, dtype=torch.complex64)), "element type torch.complex64 cannot"),
    "parametrized": (
        lambda: trained(nn.utils.parametrizations.weight_norm(nn.Embedding(5, 2))),
        "'weight' is computed in each forward",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason_and_no_hooks(case: str) -> None:
    """A model that cannot be streamed exactly is refused in one line, which says why, and gets no hook."""
    make, message = REFUSED[case]
    model, optimizers = make()
    before = hooks(model, *optimizers)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        tap_model(model, optimizers, lambda: None)
    assert "\n" not in str(caught.value)
    assert hooks(model, *optimizers) == before


@pytest.mark.parametrize("case", REFUSED)
def test_the_way_on_works(case: str) -> None:
    """`attach` with what its refusals name streams the rest of the model."""
    model, optimizers = REFUSED[case][0]()
    rest = nn.Embedding(3, 2)
    whole = nn.ModuleDict({"of": model, "rest": rest})
    optimizers = [*optimizers, torch.optim.SGD(rest.parameters(), lr=0.1)]
    left_out: list[str] = []
    while True:
        try:
            tap = tap_model(whole, optimizers, lambda: None, tables=left_out or None)
            break
        except UnsupportedModelError as exc:
            named = re.search(r"or leave (?:it|them) out, tables=(\[.*?\])\s\(docs/taps\.md\)", str(exc))
            assert named is not None, f"no way on: {exc}"
            assert not set(ast.literal_eval(named[1])) <= set(left_out), f"the way led nowhere: {exc}"
            left_out += ast.literal_eval(named[1])
    assert "rest.weight" in [table.spec.fqn for table in tap.tables]
    tap.close()


def test_second_tap_is_refused_until_the_first_is_closed() -> None:
    """A tapped model, or a part of it, cannot be tapped again; closing removes every hook and marks nothing more."""
    model, optimizer, tap, mirror = watched()
    assert hooks(model, optimizer)
    with pytest.raises(UnsupportedModelError, match=r"'user' is streamed already"):
        tap_model(model, optimizer, lambda: None)
    with pytest.raises(UnsupportedModelError, match=r"is streamed already"):
        tap_model(model.item, torch.optim.SGD(model.item.parameters()), lambda: None)
    tap.close()
    tap.close()
    assert hooks(model, optimizer) == 0
    train(model, optimizer, range(2))
    assert mirror.taken == []
    assert not tap.end_step()
    assert all(table.dirty.is_empty for table in tap.tables)
    tap_model(model, optimizer, lambda: None).close()


def test_copies_of_model_and_optimizer_are_not_tapped() -> None:
    """Copies, pickles and state dicts are the same as without a tap; training a copy marks nothing."""
    keys = list(TwoKinds(sparse=True).state_dict())
    model, optimizer, _, mirror = watched(torch.optim.Adagrad)
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
