"""The description of a table that is streamed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, DType, StateKind, TableSpec
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, tap_part, zero_state

PART = TablePart(fqn="t", num_rows=3, dim=2)


def tapped(dtype: torch.dtype = torch.float32, *, states_of: Any = (), states: Any = dict) -> TappedTable:
    """Return a table of three rows and two columns."""
    return tap_part(
        PART,
        num_local_rows=3,
        num_columns=2,
        dtype=dtype,
        states_of=states_of,
        weights=lambda: torch.zeros(3, 2, dtype=dtype),
        states=states,
    )


def test_every_element_type_of_a_row_has_a_torch_type() -> None:
    """Each element type that a trainer's rows can hold is that of some torch dtype, with the same size."""
    found = {}
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        with contextlib.suppress(UnsupportedModelError):
            found[
                tap_part(PART, num_local_rows=3, num_columns=2, dtype=dtype, weights=dict, states=dict).spec.dtype
            ] = dtype
    assert {known: dtype.itemsize for known, dtype in found.items()} == {known: known.size_bytes for known in DType}


def test_other_element_types_are_refused() -> None:
    """A dtype that rows cannot hold is refused with the tensor's name and the supported dtypes."""
    with pytest.raises(UnsupportedModelError, match=r"table 't': element type torch\.complex64 .*float32, float16"):
        tapped(torch.complex64)
    with pytest.raises(UnsupportedModelError, match=r"state 'sum' of table 't': element type torch\.complex64"):
        tapped(states_of=[("sum", torch.complex64, False)])


def test_state_kinds() -> None:
    """A rowwise state has one value per row, a pointwise state has the table's width."""
    pointwise, rowwise = tapped(states_of=[("a", torch.float32, False), ("b", torch.float32, True)]).spec.states
    assert (pointwise.kind, rowwise.kind, rowwise.width) == (StateKind.POINTWISE, StateKind.ROWWISE, 1)


def test_zero_state_takes_the_memory_of_a_row() -> None:
    """Zeros of a state that the optimizer has not made read like zeros, share one row and are contiguous along it."""
    state = zero_state(10**12, 4, torch.float16, torch.device("cpu"))
    assert state.shape == (10**12, 4)
    assert state.untyped_storage().nbytes() == 4 * 2
    assert state.stride() == (0, 1)
    assert state[torch.tensor([5, 10**11])].tolist() == [[0.0] * 4] * 2


def test_part_of_a_table() -> None:
    """A part knows its rows and columns, reads live values, and starts with no row dirty."""
    weights = torch.zeros(3, 2)
    table = TappedTable(
        spec=TableSpec(fqn="t.weight", num_rows=10, dim=6, dtype=DType.FLOAT32),
        shard=ColumnShard(offset=4, width=2),
        row_offset=7,
        num_local_rows=3,
        weights=lambda: weights,
        states=dict,
    )
    assert repr(table) == "TappedTable('t.weight', rows 7:10 of 10, columns 4:6 of 6, FLOAT32)"
    assert table.dirty.num_rows == 3
    assert table.dirty.is_empty
    weights[1] = 5
    assert table.weights()[1].tolist() == [5, 5]
    assert table.states() == {}


@pytest.mark.parametrize("now", [torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 1)], ids=["type", "shape"])
def test_a_state_that_is_another_now_is_refused(now: torch.Tensor) -> None:
    """A state of another type or shape than it was is an error that names it, not other rows in the store."""
    states = {"sum": torch.zeros(3, 2)}
    table = tapped(states_of=[("sum", torch.float32, False)], states=lambda: states)
    assert table.states() is states
    states["sum"] = now
    with pytest.raises(
        UnsupportedModelError, match=r"state 'sum' of table 't' was float32\[3, 2\] when it was attached"
    ):
        table.states()
