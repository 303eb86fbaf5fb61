"""Sparse gradients that are empty and kept, or that come where dense ones were: training goes on as without a tap."""

from __future__ import annotations

import contextlib

import pytest
import torch
from mirror import Mirror
from torch import nn
from torch_tables import Make

from headrace.streamer.taps.tap import tap_model


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_an_empty_sparse_gradient_may_be_kept(make: Make) -> None:
    """The next backward adds to it: nothing of the tap's may hold its memory."""
    table = nn.Embedding(30, 4, sparse=True)
    model = nn.ModuleDict({"table": table})
    optimizer = make(model.parameters(), lr=0.1)
    mirror = Mirror()
    tap = tap_model(model, optimizer, mirror.on_step)
    mirror.watch(tap)
    for ids in ([], [3, 4], [4, 5]):
        table(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert [sorted(row for rows in taken.values() for row in rows) for taken in mirror.taken[-2:]] == [
        [3, 4],
        [3, 4, 5],
    ]
    tap.close()


def test_momentum_over_gradients_that_turn_sparse_is_told() -> None:
    """All rows are sent from then on, without the momentum, and nobody's step fails."""
    table = nn.Embedding(30, 4)
    model = nn.ModuleDict({"table": table})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tap = tap_model(model, optimizer, lambda: None)
    table.sparse = True
    unrelated = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for number in range(3):
        table(torch.tensor([3, 4])).sum().backward()
        with pytest.warns(RuntimeWarning) if not number else contextlib.nullcontext():
            optimizer.step()
        unrelated.step()
        optimizer.zero_grad()
    assert tap.tables[0].dirty.count == 30
    tap.close()
