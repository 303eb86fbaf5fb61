"""One table, or the shard of one that this rank owns, as the tap found it in the training process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

__all__ = ["TablePart", "TappedTable", "dtype_of", "state_spec", "zero_state"]

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float64: DType.FLOAT64,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.uint8: DType.UINT8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """Which rows and columns of which table a tensor `[num_local_rows, num_local_columns]` holds.

    Attributes:
        fqn: Name of the weight parameter in the unwrapped model's `state_dict`.
        num_rows: Rows of the whole table.
        dim: Columns of the whole table.
        row_offset: Global id of the tensor's row 0.
        column_offset: Column of the table that is the tensor's column 0.
    """

    fqn: str
    num_rows: int
    dim: int
    row_offset: int = 0
    column_offset: int = 0


class TappedTable:
    """A table's description, its live values, and which of its rows changed.

    Thread: the training thread's. Values are live tensors: right between two optimizer updates, and to be asked for
    again at each gather, because an optimizer makes its states late and a module may move its weights.

    Attributes:
        spec: The whole table, as the server knows it.
        shard: The columns that this rank has.
        row_offset: Global id of local row 0.
        num_local_rows: Rows that this rank has.
        dirty: Local ids of the rows that changed since they were last taken.
    """

    def __init__(
        self,
        *,
        spec: TableSpec,
        num_local_rows: int,
        weights: Callable[[], torch.Tensor],
        states: Callable[[], dict[str, torch.Tensor]],
        shard: ColumnShard | None = None,
        row_offset: int = 0,
    ) -> None:
        """Describe a table; no row is dirty.

        Args:
            spec: The whole table.
            num_local_rows: Rows that this rank has, ≥ 0.
            weights: Returns the present weights, see `weights`.
            states: Returns the present states, see `states`.
            shard: Columns that this rank has; None for all.
            row_offset: Global id of local row 0.
        """
        self.spec = spec
        self.shard = spec.whole if shard is None else shard
        self.row_offset = row_offset
        self.num_local_rows = num_local_rows
        self.dirty = DirtyRows(num_local_rows)
        self._weights = weights
        self._states = states

    def weights(self) -> torch.Tensor:
        """Return the live weights, `[num_local_rows, shard.width]`, without gradient; not to be written or kept."""
        return self._weights()

    def states(self) -> dict[str, torch.Tensor]:
        """Return the live optimizer states by name, in the spec's order.

        Each is `[num_local_rows, width in this shard]`, without gradient, not to be written or kept. A state that the
        optimizer has not made yet is its initial value, expanded (zero strides): it takes no memory.
        """
        return self._states()

    def __repr__(self) -> str:
        """Name the table and the part that is here."""
        last_row = self.row_offset + self.num_local_rows
        last_column = self.shard.offset + self.shard.width
        return (
            f"TappedTable({self.spec.fqn!r}, rows {self.row_offset}:{last_row} of {self.spec.num_rows}, "
            f"columns {self.shard.offset}:{last_column} of {self.spec.dim}, {self.spec.dtype.name})"
        )


def dtype_of(what: str, dtype: torch.dtype) -> DType:
    """Return the element type that stands for a torch one.

    Args:
        what: The tensor's name, for the error.
        dtype: Its element type.

    Raises:
        UnsupportedModelError: Rows cannot hold this type.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise UnsupportedModelError(f"{what}: element type {dtype} cannot be streamed (can: {known})") from None


def state_spec(fqn: str, name: str, dtype: torch.dtype, rowwise_width: int = 0) -> StateSpec:
    """Describe one optimizer state of a table.

    Args:
        fqn: The table, for the error.
        name: The optimizer's name for the state.
        dtype: Element type.
        rowwise_width: Elements a row of a rowwise state; 0 for a pointwise one.

    Raises:
        UnsupportedModelError: Rows cannot hold this type.
    """
    return StateSpec(
        name=name,
        kind=StateKind.ROWWISE if rowwise_width else StateKind.POINTWISE,
        dtype=dtype_of(f"state {name!r} of table {fqn!r}", dtype),
        width=rowwise_width,
    )


def zero_state(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros `[num_rows, width]` that take the memory of one element."""
    return torch.zeros((1, 1), dtype=dtype, device=device).expand(num_rows, width)
