"""One table, or the shard of one that this rank owns, as the tap found it in the training process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.kernels.dirty_ids import VIRTUAL_ROWS, DirtyIds, bitmap_bytes, dirty_set
from headrace.kernels.dirty_rows import DirtyRows
from headrace.kernels.torch_dtypes import DTYPES
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.streamer.device.device_dirty_rows import DeviceDirtyRows, TableDirtySet
from headrace.streamer.taps.deleted_rows import DeletedRows
from headrace.streamer.taps.row_meta import RowMeta

__all__ = ["DEFAULT_BITMAP_BYTES", "RowIndex", "TablePart", "TappedTable", "dtype_of", "state_spec", "zero_state"]

DEFAULT_BITMAP_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """Which rows and columns of which table a local tensor holds, or a rectangle of it.

    Attributes:
        fqn: Name of the weight parameter in the unwrapped model's `state_dict`.
        num_rows: Rows of the whole table.
        dim: Columns of the whole table.
        row_offset: Global id of the rectangle's row 0.
        column_offset: Column of the table that is the rectangle's column 0.
        first_row: The tensor's row at which the rectangle begins.
        num_local_rows: Rows of the rectangle; None for all of the tensor's.
        first_column: The tensor's column at which it begins.
        num_local_columns: Columns of it; None for all of the tensor's.
    """

    fqn: str
    num_rows: int
    dim: int
    row_offset: int = 0
    column_offset: int = 0
    first_row: int = 0
    num_local_rows: int | None = None
    first_column: int = 0
    num_local_columns: int | None = None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rectangle's rows of a tensor `[local rows, any]`, a view."""
        if self.num_local_rows is None:
            return tensor
        return tensor.narrow(0, self.first_row, self.num_local_rows)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rectangle's columns of a tensor `[any, local columns]`, a view."""
        if self.num_local_columns is None:
            return tensor
        return tensor.narrow(1, self.first_column, self.num_local_columns)

    def row_ids(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Return those of a tensor's row ids that lie in the rectangle, counted from its first row."""
        if self.num_local_rows is None:
            return local_ids
        is_inside = (local_ids >= self.first_row) & (local_ids < self.first_row + self.num_local_rows)
        return local_ids[is_inside] - self.first_row

    def row_ids_or_none(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Do what `row_ids` does, with -1 for those outside: so nobody has to wait for their number."""
        if self.num_local_rows is None:
            return local_ids
        is_inside = (local_ids >= self.first_row) & (local_ids < self.first_row + self.num_local_rows)
        return torch.where(is_inside, local_ids - self.first_row, -1)


class RowIndex(Protocol):
    """Where the rows of a table with virtual ids lie, in a tensor that holds those that there are now.

    Thread: the training thread's.
    """

    def find(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each row in `TappedTable.weights` and `states`, int64[n]; -1 for a row that is not held.

        Args:
            row_ids: int64[n] on the CPU, ≥ 0.
        """

    def row_ids(self) -> torch.Tensor:
        """Return the ids of all rows that are held now, int64[n], each once, in any order."""


class TappedTable:
    """A table's description, its live values, and which of its rows changed.

    Thread: the training thread's. Values are live tensors: right between two optimizer updates, and to be asked for
    again at each gather, because an optimizer makes its states late and a module may move its weights.

    Attributes:
        spec: The whole table, as the server knows it.
        shard: The columns that this rank has.
        row_offset: Global id of local row 0.
        num_local_rows: Rows that this rank has; 0 where `index` tells which there are.
        index: Where rows with virtual ids lie; None where a row's id is its place. With one, local ids are the global
            ones.
        dirty: Local ids of the rows that changed since they were last taken; on the table's device where a
            `DevicePipeline` has it.
        deleted: Rows that were evicted.
        meta: Bytes that travel with rows; None for no such table.
        on_move: Called when `dirty` is on a device now and was not, or the other way round; None calls nothing.
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
        identities: Callable[[], torch.Tensor] | None = None,
        scalars: Callable[[], dict[str, torch.Tensor]] = dict,
        is_in_use: Callable[[], bool] = lambda: True,
        index: RowIndex | None = None,
        meta: RowMeta | None = None,
    ) -> None:
        """Describe a table; no row is dirty.

        Args:
            spec: The whole table.
            num_local_rows: Rows that this rank has, ≥ 0; 0 with an index.
            weights: Returns the present weights, see `weights`.
            states: Returns the present states, see `states`.
            shard: Columns that this rank has; None for all.
            row_offset: Global id of local row 0.
            identities: Returns the present identities, see `identities`; for tables that have them.
            scalars: Returns the present values that the table has once, see `scalars`.
            is_in_use: Returns whether the model uses these weights still.
            index: Where rows with virtual ids lie. REQUIRES: the spec has 0 rows.
            meta: Bytes that travel with rows.
        """
        assert (identities is not None) == spec.has_identities
        assert index is None or not (spec.num_rows or row_offset or num_local_rows)
        self.spec = spec
        self.shard = spec.whole if shard is None else shard
        self.row_offset = row_offset
        self.num_local_rows = num_local_rows
        self.index = index
        self.meta = meta
        self._num_ids = num_local_rows if index is None else VIRTUAL_ROWS
        self.dirty: TableDirtySet = dirty_set(self._num_ids, max_bitmap_bytes=DEFAULT_BITMAP_BYTES)
        self.on_move: Callable[[], None] | None = None
        self.deleted = DeletedRows(self._num_ids, is_lasting=index is None)
        self._weights = weights
        self._states = states
        self._identities = identities
        self._scalars = scalars
        self._is_in_use = is_in_use

    def mark_all(self, *, spares_evicted: bool = False) -> None:
        """Make every row dirty that this rank has.

        Args:
            spares_evicted: But those that were evicted and not used since.
        """
        if self.index is not None:
            self.dirty.mark(self.index.row_ids())
            return
        unused = self.deleted.unused(self.dirty) if spares_evicted else None
        if isinstance(self.dirty, DirtyIds):  # of all rows, a bitmap is the smaller set
            self.dirty = DirtyRows(self.num_local_rows)
        self.dirty.mark_all()
        if unused is not None:
            self.dirty.discard(unused)

    def limit_bitmap(self, max_bytes: int) -> None:
        """Keep changed rows in a bitmap of at most so many bytes, else as a set of ids while that is smaller."""
        assert not isinstance(self.dirty, DeviceDirtyRows)
        size_bytes = bitmap_bytes(self._num_ids)
        if isinstance(self.dirty, DirtyRows):
            # Rows that are marked already stay as they are: the bitmap has its memory.
            if size_bytes > max_bytes and self.dirty.is_empty:
                self.dirty = DirtyIds(self._num_ids)
        elif size_bytes <= max(max_bytes, self.dirty.size_bytes):
            bitmap = DirtyRows(self._num_ids)
            for part in self.dirty.parts():
                bitmap.mark(part)
            self.dirty = bitmap

    def join_device(self, dirty: DeviceDirtyRows) -> None:
        """Keep changed rows, those that are marked now too, in a set on the table's device."""
        if not self.dirty.is_empty:
            dirty.add(self.dirty)
        self.dirty = dirty
        if self.on_move is not None:
            self.on_move()

    def leave_device(self) -> None:
        """Keep changed rows on the host, where they are not; waits for the device."""
        if isinstance(self.dirty, DeviceDirtyRows):
            self.dirty = self.dirty.to_host()
            if self.on_move is not None:
                self.on_move()

    def evict(self, row_ids: torch.Tensor) -> None:
        """Have rows deleted, unless they are marked again before the next flush.

        A table on a device is gathered by the host from then on. REQUIRES: of such a table no flush is on its way from
        the device.

        Args:
            row_ids: int64[n], local, on the CPU.
        """
        self.leave_device()
        self.deleted.add(row_ids, self.dirty)

    def ids_here(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return the local ids of those of some rows that this rank has; with an index, all.

        Args:
            row_ids: int64[n], global, on the CPU.
        """
        if self.index is not None:
            return row_ids
        end_row = self.row_offset + self.num_local_rows
        return row_ids[(row_ids >= self.row_offset) & (row_ids < end_row)] - self.row_offset

    def places(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Return where rows lie in `weights` and `states`, int64[n] on the CPU; -1 for a row that is not held.

        Args:
            local_ids: int64[n] on the CPU.
        """
        return local_ids if self.index is None else self.index.find(local_ids).cpu()

    def weights(self) -> torch.Tensor:
        """Return the live weights, `[num_local_rows, shard.width]`, without gradient; not to be written or kept.

        With an index, `[places, shard.width]`.

        Raises:
            UnsupportedModelError: They are of another type or shape than the table was, as `module.to(dtype)` or a
                write to `.data` leaves them; or the model has another module or parameter in their place.
        """
        if not self._is_in_use():
            raise UnsupportedModelError(
                f"table {self.spec.fqn!r} is not what was attached: the model has another module or parameter in its "
                f"place now; change a model before `attach`, or attach it to a new streamer"
            )
        weights = self._weights()
        self._check_same(f"table {self.spec.fqn!r}", weights, self.spec.dtype, self.shard.width)
        return weights

    def states(self) -> dict[str, torch.Tensor]:
        """Return the live optimizer states by name, in the spec's order.

        Each is `[num_local_rows, width in this shard]`, without gradient, not to be written or kept. A state that the
        optimizer has not made yet is its initial value, expanded (zero strides): it takes no memory.

        Raises:
            UnsupportedModelError: One is of another type or shape than it was.
        """
        states = self._states()
        for state in self.spec.states:
            what = f"state {state.name!r} of table {self.spec.fqn!r}"
            self._check_same(what, states[state.name], state.dtype, state.width_in(self.shard))
        return states

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the values that the optimizer keeps once for the table, such as its count of steps; one element each.

        Empty before the optimizer has made them. They travel with the table's rows.
        """
        return self._scalars()

    def identities(self) -> torch.Tensor:
        """Return the raw id that is mapped to each row now, int64[num_local_rows]; -1 where none is.

        REQUIRES: the table has identities.
        """
        assert self._identities is not None
        return self._identities()

    def _check_same(self, what: str, values: torch.Tensor, dtype: DType, width: int) -> None:
        num_rows = values.shape[0] if self.index is not None else self.num_local_rows
        if values.shape != (num_rows, width) or DTYPES.get(values.dtype) is not dtype:
            raise UnsupportedModelError(
                f"{what} was {dtype.name.lower()}{[num_rows, width]} when it was attached and is "
                f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)} now: change a model before `attach`"
            )

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
        return DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
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
    """Return zeros `[num_rows, width]` that take the memory of one row, contiguous along it."""
    return torch.zeros((1, width), dtype=dtype, device=device).expand(num_rows, width)
