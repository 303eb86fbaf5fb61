"""Tables whose memory others write too are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.tap import tap_model


def two_parameters() -> nn.ModuleDict:
    values = torch.randn(30, 4)
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.Embedding(30, 4)})
    model["a"].weight, model["b"].weight = nn.Parameter(values), nn.Parameter(values)
    return model


def data_of_a_linear_layer() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.Linear(4, 30)})
    model["b"].weight.data = model["a"].weight.data
    return model


def rows_in_common() -> nn.ModuleDict:
    values = torch.randn(40, 4)
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.Embedding(30, 4)})
    model["a"].weight, model["b"].weight = nn.Parameter(values[:30]), nn.Parameter(values[10:])
    return model


@pytest.mark.parametrize("make", [two_parameters, data_of_a_linear_layer, rows_in_common])
def test_memory_of_two_parameters_is_refused(make: Callable[[], nn.ModuleDict]) -> None:
    """Two parameters in one place change each other's rows, which no gradient tells."""
    model = make()
    with pytest.raises(
        UnsupportedModelError, match=r"'a.weight' has the memory of another parameter .*one nn.Parameter"
    ):
        tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)


def test_parts_of_one_tensor_that_do_not_overlap_are_tables() -> None:
    """Rows, or columns, of one tensor side by side are each a table's own."""
    values = torch.randn(40, 8)
    parts = {"top": values[:20, :4], "rest": values[20:], "side": values[:20, 4:]}
    model = nn.ModuleDict({name: nn.Embedding(20, part.shape[1]) for name, part in parts.items()})
    for name, part in parts.items():
        model[name].weight = nn.Parameter(part)
    tap = tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)
    assert len(tap.tables) == 3
    tap.close()


def test_frozen_memory_may_be_in_two_places() -> None:
    """A parameter that is not trained writes nothing, so its place is no matter."""
    model = data_of_a_linear_layer()
    model["b"].weight.requires_grad_(False)
    tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None).close()


def test_memory_shared_with_other_processes_is_refused() -> None:
    """Torch counts writes in each process by itself, so those of another would never be seen."""
    model = nn.Embedding(30, 4).share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModelError, match=r"'weight' lies in memory that is shared .*copy\.deepcopy"):
        tap_model(model, optimizer, lambda: None)
    model = copy.deepcopy(model)
    tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None).close()


def test_a_lazy_modules_parameter_has_no_memory_yet() -> None:
    """A model may be attached before its lazy modules have run."""
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.LazyLinear(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tap = tap_model(model, optimizer, lambda: None)
    model["b"](model["a"](torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert len(tap.tables) == 1
    tap.close()
