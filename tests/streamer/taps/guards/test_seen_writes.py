"""Tables of one optimizer that are looked at together: each write to one of them is still seen, and only that one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mirror import mirrored
from torch import nn

WRITES: dict[str, Callable[[nn.Parameter, dict[str, torch.Tensor]], object]] = {
    "weight in place": lambda weight, state: weight.detach().zero_(),
    "weight replaced": lambda weight, state: setattr(weight, "data", weight.data.clone()),
    "state in place": lambda weight, state: state["sum"].zero_(),
    "state replaced": lambda weight, state: state.update(sum=state["sum"].clone()),
    "state removed": lambda weight, state: state.pop("sum"),
}


@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_one_of_many_tables(
    write: Callable[[nn.Parameter, dict[str, torch.Tensor]], object], at: int
) -> None:
    """It marks all rows of its table and none of the others', in the same boundary."""
    model = nn.ModuleList(nn.Embedding(7, 2, sparse=True) for _ in range(10))
    optimizer = torch.optim.Adagrad(model.parameters())
    tap, _ = mirrored(model, optimizer)
    sum(table(torch.tensor([1])).sum() for table in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    weight = model[at].weight
    assert isinstance(weight, nn.Parameter)
    write(weight, optimizer.state[weight])
    tap.sweep()
    assert [table.dirty.count for table in tap.tables] == [7 if number == at else 0 for number in range(10)]
    for table in tap.tables:
        table.dirty.clear()
    tap.sweep()
    assert all(table.dirty.is_empty for table in tap.tables)
    tap.close()
