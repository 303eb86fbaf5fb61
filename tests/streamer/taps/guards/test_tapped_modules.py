"""Modules that were replaced after `attach` are detected; modules that were wrapped or removed are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import mirrored
from torch import nn
from torch.nn.utils import parametrize

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.guards.tapped_modules import ModulePlaces, UsedPlaces, WeightPlace


def test_places() -> None:
    """A module keeps its place until another one has it, also if it or a parent is wrapped, moved or removed."""
    table = nn.Embedding(3, 2)
    model = nn.ModuleDict({"tower": nn.ModuleDict({"table": table})})
    place = ModulePlaces(model).of(table)
    assert place.is_kept()
    model["tower"] = nn.ModuleDict({"inner": model["tower"]})
    assert place.is_kept()
    model["tower"]["inner"]["table"] = nn.Embedding(3, 2)
    assert not place.is_kept()
    model["elsewhere"] = table
    assert place.is_kept()
    del model["elsewhere"]
    assert place.is_kept()
    model["elsewhere"] = nn.Embedding(3, 2)
    assert not place.is_kept()
    assert ModulePlaces(table).of(table).is_kept()


def test_places_of_many_tables() -> None:
    """All are in use until one module or one weight is another, and again when each has its place back."""
    model = nn.ModuleDict({name: nn.Embedding(3, 2) for name in "abc"})
    places = ModulePlaces(model)
    modules: list[Any] = [model[name] for name in "abc"]
    used = UsedPlaces([*(WeightPlace(each.weight, places.of(each)) for each in modules), lambda: is_other_used])
    is_other_used = True
    assert used.are_in_use()
    model["b"] = nn.Embedding(3, 2)
    assert not used.are_in_use()
    model["elsewhere"] = modules[1]
    assert used.are_in_use()
    model["b"] = modules[0]  # the place that was b's: it is found under `elsewhere`
    assert used.are_in_use()
    weight, modules[2].weight = modules[2].weight, nn.Parameter(torch.zeros(3, 2))
    assert not used.are_in_use()
    modules[2].weight = weight
    assert used.are_in_use()
    is_other_used = False
    assert not used.are_in_use()


def grown(model: Any) -> None:
    model["tower"]["table"] = nn.Embedding(90, 4)


def with_another_parameter(model: Any) -> None:
    model["tower"]["table"].weight = nn.Parameter(torch.zeros(60, 4))


def assigned_by_load(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model["tower"]["table"], "weight", nn.Identity())


@pytest.mark.parametrize("change", [grown, with_another_parameter, assigned_by_load, parametrized])
def test_a_table_that_is_replaced_is_told(change: Callable[[nn.Module], None]) -> None:
    """The next flush reads the rows of a replaced table, and raises."""
    model = nn.ModuleDict({"tower": nn.ModuleDict({"table": nn.Embedding(60, 4), "other": nn.Embedding(5, 4)})})
    tap, _ = mirrored(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not tap.end_step()
    change(model)
    with pytest.raises(UnsupportedModelError, match=r"'tower.table.weight' is not what was attached"):
        tap.end_step()


def test_an_optimizer_may_lose_a_table() -> None:
    """A table that its optimizer no longer trains keeps its values and does not affect other tables."""
    model = nn.ModuleDict({"a": nn.Embedding(9, 2), "b": nn.Embedding(9, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _, mirror = mirrored(model, optimizer)
    optimizer.param_groups[0]["params"] = [model["b"].weight]
    for _ in range(2):
        (model["a"](torch.tensor([1])).sum() + model["b"](torch.tensor([2])).sum()).backward()
        optimizer.step()
        assert mirror.taken[-1] == {"a.weight": [], "b.weight": [2]}
    with torch.no_grad():
        model["a"].weight[3] = 1
    optimizer.step()
    assert mirror.taken[-1]["a.weight"] == list(range(9))
