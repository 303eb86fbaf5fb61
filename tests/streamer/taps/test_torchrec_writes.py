"""Fused tables that are written without their optimizer: every row goes with the next step, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sparse_model import FQNS, ROWS, Batch, one_rank, row_wise, sharded, step_batches, tapped

pytestmark = pytest.mark.torchrec

ALL = {FQNS[name]: list(range(rows)) for name, rows in ROWS.items()}


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """One process and its own store: no port is taken."""
    with one_rank():
        yield


def tables_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "dense" not in name}


def by_parameter(model: Any, _: Path) -> None:
    with torch.no_grad():
        for parameter in tables_of(model).values():
            parameter[3] = 7.0


def by_shard(model: Any, _: Path) -> None:
    with torch.no_grad():
        for name in tables_of(model):
            model.state_dict()[name].local_shards()[0].tensor[3] = 7.0


def states(model: Any, _: Path) -> None:
    for state in model.fused_optimizer.state_dict()["state"].values():
        for value in state.values():
            value.local_shards()[0].tensor[3] = 2.5


def loaded_states(model: Any, _: Path) -> None:
    state_dict = copy.deepcopy(model.fused_optimizer.state_dict())
    for state in state_dict["state"].values():
        for value in state.values():
            value.local_shards()[0].tensor[3] = 2.5
    model.fused_optimizer.load_state_dict(state_dict)


def checkpoint(model: Any, folder: Path) -> None:
    """Saved, trained on, and loaded in place by `torch.distributed.checkpoint`."""
    dcp.save({"model": model.state_dict(), "states": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    step_batches(model, [Batch(5)])
    dcp.load({"model": model.state_dict(), "states": model.fused_optimizer.state_dict()}, checkpoint_id=folder)


def second_optimizer(model: Any, _: Path) -> None:
    """A penalty on the weights gives them gradients, by which an optimizer of all parameters trains them too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = torch.stack([parameter.pow(2).sum() for parameter in tables_of(model).values()]).sum()
    (model(*Batch(1).inputs) + penalty).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [by_parameter, by_shard, states, loaded_states, checkpoint, second_optimizer],
    ids=lambda write: write.__name__,
)
def test_every_row_goes(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """torch counts the writes to the memory that all of TorchRec's views of a table share."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, mirror = tapped(model, [])
    step_batches(model, [Batch(0)])
    assert tap.end_step()
    write(model, tmp_path)
    assert tap.end_step()
    assert mirror.taken[1:] == [ALL]


def test_an_optimizer_of_all_parameters_trains_no_fused_table() -> None:
    """The fused tables' parameters get no gradient, so its steps mark nothing."""
    model = sharded("row-wise-adagrad", row_wise)
    tap, mirror = tapped(model, [])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=0.1)
    batches = [Batch(seed) for seed in range(3)]
    for batch in batches:
        optimizer.zero_grad()
        step_batches(model, [batch])
        optimizer.step()
    assert tap.end_step()
    assert mirror.taken == [batch.rows for batch in batches]
