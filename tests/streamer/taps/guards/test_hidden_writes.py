"""Writes to a table's memory that its optimizer does not make."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.guards.hidden_writes import RowProbe


def tapped(model: nn.Module) -> Tap:
    return tap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)


def two_tables(a: torch.Tensor, b: torch.Tensor) -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.Embedding(30, 4)})
    model["a"].weight, model["b"].weight = nn.Parameter(a), nn.Parameter(b)
    return model


def table_and_layer() -> nn.ModuleDict:
    """Return a table and a linear layer that share their memory."""
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.Linear(4, 30)})
    model["b"].weight.data = model["a"].weight.data
    return model


@pytest.mark.parametrize("kind", ["one tensor", "overlapping rows", "a layer's data"])
def test_memory_of_two_parameters_is_refused(kind: str) -> None:
    """Two parameters with common memory are refused: each changes the other's rows without a gradient for it."""
    values = torch.randn(40, 4)
    model = (
        table_and_layer()
        if kind == "a layer's data"
        else two_tables(values[:30], values[:30] if kind == "one tensor" else values[10:])
    )
    with pytest.raises(UnsupportedModelError, match=r"'a.weight' shares memory with .*one nn.Parameter"):
        tapped(model)


def test_parts_of_one_tensor_that_do_not_overlap_are_tables() -> None:
    """Neighboring rows or columns of one tensor can be tables of their own."""
    values = torch.randn(40, 8)
    parts = {"top": values[:20, :4], "rest": values[20:], "side": values[:20, 4:]}
    model = nn.ModuleDict({name: nn.Embedding(20, part.shape[1]) for name, part in parts.items()})
    for name, part in parts.items():
        model[name].weight = nn.Parameter(part)
    tap = tapped(model)
    assert len(tap.tables) == 3
    tap.close()


def test_frozen_memory_may_be_in_two_places() -> None:
    """A frozen parameter may share a table's memory, because nothing writes to it."""
    model = table_and_layer()
    model["b"].weight.requires_grad_(False)
    tapped(model).close()


def test_memory_shared_with_other_processes_is_refused() -> None:
    """Shared memory is refused, because torch counts only this process's writes; a copy is accepted."""
    model = nn.Embedding(30, 4).share_memory()
    with pytest.raises(UnsupportedModelError, match=r"'weight' is in memory shared .*copy\.deepcopy"):
        tapped(model)
    tapped(copy.deepcopy(model)).close()


def test_a_lazy_modules_parameter_has_no_memory_yet() -> None:
    """A model can be attached before its lazy modules have run."""
    model = nn.ModuleDict({"a": nn.Embedding(30, 4), "b": nn.LazyLinear(3)})
    tap = tapped(model)
    model["b"](model["a"](torch.tensor([1]))).sum().backward()
    assert len(tap.tables) == 1
    tap.close()


def remembering(weights: torch.Tensor) -> RowProbe:
    probe = RowProbe()
    assert not probe.has_changed(weights)
    probe.remember(weights)
    assert not probe.has_changed(weights)
    return probe


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 1000])
def test_a_write_to_the_whole_table_is_seen(num_rows: int) -> None:
    """Before the first step, rows from all over the table are probed."""
    weights = torch.arange(1, num_rows * 2.0 + 1).reshape(num_rows, 2)
    probe = remembering(weights)
    weights.data.mul_(0.5)
    assert probe.has_changed(weights)
    probe.remember(weights)
    assert not probe.has_changed(weights)


def test_watched_rows_are_probed() -> None:
    """All of a few watched rows are probed, and some of many; an empty list changes nothing."""
    weights = torch.zeros(1000, 2)
    probe = remembering(weights)
    for few in ([998], [5, 5, 17], list(range(100, 108))):
        probe.watch(torch.tensor(few))
        probe.watch(torch.tensor([], dtype=torch.int64))
        probe.remember(weights)
        for row in few:
            weights[row] += 1
            assert probe.has_changed(weights)
            probe.remember(weights)
    probe.watch(torch.arange(500, 900))
    probe.remember(weights)
    weights[:500] += 1
    assert not probe.has_changed(weights)
    weights[500:900] += 1
    assert probe.has_changed(weights)


def test_bits_are_compared() -> None:
    """NaN equals itself, and 0.0 differs from -0.0."""
    weights = torch.tensor([[float("nan")], [0.0]])
    probe = remembering(weights)
    weights[1] = -0.0
    assert probe.has_changed(weights)


@pytest.mark.parametrize(
    "weights", [torch.zeros(3, 30).T, torch.zeros(30, 6)[:, 1:4], torch.zeros(30, 3, dtype=torch.bfloat16)]
)
def test_layouts_and_element_types(weights: torch.Tensor) -> None:
    """Rows of any layout and element type can be probed."""
    probe = remembering(weights)
    probe.watch(torch.tensor([17]))
    probe.remember(weights)
    weights[17, 2] = 1
    assert probe.has_changed(weights)


def test_a_table_of_another_size() -> None:
    """A probe of a table that has changed its size looks at rows that exist; an empty table never changes."""
    probe = remembering(torch.zeros(50, 2))
    probe.watch(torch.tensor([49]))
    for num_rows in (3, 0, 4):
        weights = torch.zeros(num_rows, 2)
        probe.remember(weights)
        assert not probe.has_changed(weights)
    weights[3] = 1
    assert probe.has_changed(weights)
