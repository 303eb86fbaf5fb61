"""The description of a table that is streamed."""

from __future__ import annotations

import pytest
import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, DType, StateKind, TableSpec
from headrace.streamer.taps.tapped_table import TappedTable, dtype_of, state_spec, zero_state


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type_of_a_row_has_a_torch_type(dtype: DType) -> None:
    """Each type that rows can hold is that of some tensor, of the same size."""
    matching = [t for t in vars(torch).values() if isinstance(t, torch.dtype) and _name(t) == dtype]
    assert {t.itemsize for t in matching} == {dtype.size_bytes}


def _name(dtype: torch.dtype) -> DType | None:
    try:
        return dtype_of("table", dtype)
    except UnsupportedModelError:
        return None


def test_other_element_types_are_refused() -> None:
    """A type that rows cannot hold is refused with the tensor's name and what can be held."""
    with pytest.raises(UnsupportedModelError, match=r"table 'a': element type torch\.bool .*float32, float16"):
        dtype_of("table 'a'", torch.bool)


def test_state_kinds() -> None:
    """A state with a width of its own is rowwise, any other pointwise."""
    assert state_spec("t", "sum", torch.float32).kind is StateKind.POINTWISE
    row_wise = state_spec("t", "sum", torch.float32, rowwise_width=1)
    assert (row_wise.kind, row_wise.width) == (StateKind.ROWWISE, 1)


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
    table = TappedTable(
        spec=TableSpec(
            fqn="t", num_rows=3, dim=2, dtype=DType.FLOAT32, states=(state_spec("t", "sum", torch.float32),)
        ),
        num_local_rows=3,
        weights=lambda: torch.zeros(3, 2),
        states=lambda: states,
    )
    assert table.states() is states
    states["sum"] = now
    with pytest.raises(
        UnsupportedModelError, match=r"state 'sum' of table 't' was float32\[3, 2\] when it was attached"
    ):
        table.states()
