"""A flush: the values of changed rows at one step, ordered by shard, and the messages that carry them.

Nothing here reads a clock, a socket or a tensor: the flusher fills a flush, the shards' channels send it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.schemas.idl import idl
from headrace.schemas.tables import ColumnShard, DType, StateSpec, TableSpec
from headrace.streamer.flush.staging import StagingBuffer

__all__ = ["Column", "Flush", "FlushedDeletions", "FlushedTable", "Message", "Pending", "StepMark", "TableFormat"]

# What Thrift's headers, numbers and lengths take, with a margin; names come on top.
_MESSAGE_BYTES = 256
_DELTA_BYTES = 128
_STATE_BYTES = 48
_SCALARS_BYTES = 48  # of one, such as `step`; no table has more


class TableFormat:
    """How rows of one column shard of a table are laid out on the wire.

    Attributes:
        spec: The whole table.
        shard: Columns that are sent.
        row_bytes: Bytes of one row with its id and states.
        overhead_bytes: Bound on what a `TableDelta` takes besides its rows.
        num_columns: Ids, weights, states, and identities if the table has them.
    """

    def __init__(self, spec: TableSpec, shard: ColumnShard) -> None:
        """Describe `shard` of the table `spec`."""
        self.spec, self.shard = spec, shard
        self.states: tuple[tuple[StateSpec, int], ...] = tuple((s, s.width_in(shard)) for s in spec.states)
        state_bytes = sum(width * state.dtype.size_bytes for state, width in self.states)
        self.row_bytes = 8 + shard.width * spec.dtype.size_bytes + state_bytes + (8 if spec.has_identities else 0)
        names = sum(_STATE_BYTES + len(state.name.encode()) for state in spec.states)
        self.overhead_bytes = _DELTA_BYTES + _SCALARS_BYTES + len(spec.fqn.encode()) + names
        self.num_columns = 2 + len(self.states) + spec.has_identities


@dataclass(frozen=True, slots=True)
class Column:
    """Bytes of one column of all rows of a table in a flush.

    Attributes:
        data: uint8 view, `num_rows × row_bytes`.
        row_bytes: Bytes of one row.
    """

    data: memoryview
    row_bytes: int

    def rows(self, first: int, last: int) -> memoryview:
        """Return the rows `first` to `last - 1`, a view."""
        return self.data[first * self.row_bytes : last * self.row_bytes]


@dataclass(frozen=True, slots=True)
class FlushedTable:
    """Rows of one table in a flush, ordered by shard, so that each shard's rows lie side by side in every column.

    Attributes:
        format: The table and its columns.
        bounds: int[num_shards + 1]; shard `s` has the rows `bounds[s]` to `bounds[s + 1] - 1`.
        row_ids: int64, global.
        weights: Elements of the spec's type, `shard.width` a row.
        states: In the spec's order.
        identities: int64, the raw ids behind the rows; None when the table has none.
        scalars: Values that the table has once: name, element type and bytes.
        runtime_meta: Opaque bytes of each row; None when they have none.
    """

    format: TableFormat
    bounds: Sequence[int]
    row_ids: Column
    weights: Column
    states: tuple[Column, ...]
    identities: Column | None = None
    scalars: tuple[tuple[str, DType, bytes], ...] = ()
    runtime_meta: Column | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with all that travels with it."""
        return self.format.row_bytes + (self.runtime_meta.row_bytes if self.runtime_meta else 0)

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns: ids, weights, states, and identities and runtime meta if there are any."""
        others = (column for column in (self.identities, self.runtime_meta) if column is not None)
        return (self.row_ids, self.weights, *self.states, *others)

    def with_columns(self, columns: Sequence[Column]) -> FlushedTable:
        """Return the same rows with their bytes elsewhere."""
        row_ids, weights, *rest = columns
        runtime_meta = None if self.runtime_meta is None else rest.pop()
        identities = None if self.identities is None else rest.pop()
        return dataclasses.replace(
            self,
            row_ids=row_ids,
            weights=weights,
            states=tuple(rest),
            identities=identities,
            runtime_meta=runtime_meta,
        )

    def delta(self, first: int, last: int) -> Any:
        """Return the IDL's `TableDelta` of the rows `first` to `last - 1`; its columns are views."""
        fmt = self.format
        return idl.TableDelta(
            fqn=fmt.spec.fqn,
            fingerprint=fmt.spec.fingerprint,
            column_offset=fmt.shard.offset,
            width=fmt.shard.width,
            row_ids=self.row_ids.rows(first, last),
            weights=self.weights.rows(first, last),
            states=[
                idl.StateColumn(name=state.name, dtype=int(state.dtype), width=width, data=column.rows(first, last))
                for (state, width), column in zip(fmt.states, self.states, strict=True)
            ],
            identities=None if self.identities is None else self.identities.rows(first, last),
            scalars=[idl.TableScalar(name=name, dtype=int(dtype), data=data) for name, dtype, data in self.scalars]
            or None,
            runtime_meta=None if self.runtime_meta is None else self.runtime_meta.rows(first, last),
        )


@dataclass(frozen=True, slots=True)
class FlushedDeletions:
    """Rows of one table that a flush deletes, ordered by shard; none of them is in a `FlushedTable` of the flush.

    Attributes:
        format: The table and its columns.
        bounds: int[num_shards + 1], as of `FlushedTable`.
        row_ids: int64, global.
    """

    format: TableFormat
    bounds: Sequence[int]
    row_ids: Column

    @property
    def row_bytes(self) -> int:
        """Bytes of one deletion."""
        return 8

    @property
    def columns(self) -> tuple[Column, ...]:
        """The ids."""
        return (self.row_ids,)

    def with_columns(self, columns: Sequence[Column]) -> FlushedDeletions:
        """Return the same rows with their bytes elsewhere."""
        (row_ids,) = columns
        return dataclasses.replace(self, row_ids=row_ids)

    def delta(self, first: int, last: int) -> Any:
        """Return the IDL's `TableDelta` that deletes the rows `first` to `last - 1`."""
        fmt = self.format
        return idl.TableDelta(
            fqn=fmt.spec.fqn,
            fingerprint=fmt.spec.fingerprint,
            column_offset=fmt.shard.offset,
            width=fmt.shard.width,
            row_ids=b"",
            weights=b"",
            states=[],
            deleted_row_ids=self.row_ids.rows(first, last),
        )


@dataclass(frozen=True, slots=True)
class StepMark:
    """Says that every change up to a step has been sent.

    Attributes:
        step: The step.
        time_us: Wall clock at that step, microseconds since 1970.
        is_exact_cut: No value newer than `step` has been sent either.
    """

    step: int
    time_us: int
    is_exact_cut: bool


@dataclass(slots=True)
class Message:
    """One `setEmbeddings` before it has a number.

    Attributes:
        step: Step at which the values were read, or which an empty message ends.
        time_us: Wall clock at that step, microseconds since 1970.
        ends_step: It is the last one up to `step`.
        is_exact_cut: With `ends_step`: no newer value was sent.
        deltas: IDL structs; their columns are views into the flush.
        size_bytes: Bound on its bytes on the wire, without the names of run and client.
    """

    step: int
    time_us: int
    ends_step: bool
    is_exact_cut: bool
    deltas: list[Any]
    size_bytes: int


class Pending(Protocol):
    """What of a flush is still on its way from a device: `device_cut.DeviceCut`."""

    def complete(self, flush: Flush) -> Flush | None:
        """Wait for it and return the whole flush; None when the flush comes to nothing, its buffer too."""

    def abandon(self) -> None:
        """Say that nobody will complete the flush."""


@dataclass(slots=True)
class Flush:
    """What one flush carries.

    Attributes:
        step: Step at which the values were read.
        time_us: Wall clock at that step, microseconds since 1970.
        tables: Tables with changed rows, and with deleted ones.
        mark: What the flush completes; None when more has to follow first.
        dirty_since_s: Monotonic time of the oldest change that it may hold.
        num_rows: Rows of all tables, deleted ones included.
        size_bytes: Bytes of all rows.
        staging: Holds the columns; None once they lie elsewhere. A flush without rows has a buffer too: that bounds how
            many there are.
        generation: How often all rows had been marked for a new store; see `ShardChannel`.
        pending: What has to come first; till then tables, mark and numbers are those of the host's half. None when all
            is here.
        is_taken: It is the sender's, and so is the staging buffer.
    """

    step: int
    time_us: int
    tables: list[FlushedTable | FlushedDeletions]
    mark: StepMark | None
    dirty_since_s: float
    num_rows: int
    size_bytes: int
    staging: StagingBuffer | None
    generation: int = 0
    pending: Pending | None = None
    is_taken: bool = False

    def messages(self, shard: int, max_bytes: int) -> Iterator[Message]:
        """Yield what one shard gets, in order; nothing when there are neither rows nor a mark for it.

        Args:
            shard: 0 to num_shards - 1.
            max_bytes: Bound on `Message.size_bytes`, as far as a single row fits.
        """
        mark, held = self.mark, None
        for deltas, size_bytes in self._cut(shard, max_bytes):
            if held is not None:
                yield held
            held = Message(self.step, self.time_us, False, False, deltas, size_bytes)
        if mark is not None:
            if held is None or mark.step != self.step:
                # A mark of an earlier step is a message of its own: the rows carry the step at which they were read.
                if held is not None:
                    yield held
                held = Message(mark.step, mark.time_us, True, mark.is_exact_cut, [], _MESSAGE_BYTES)
            else:
                held.ends_step, held.is_exact_cut = True, mark.is_exact_cut
        if held is not None:
            yield held

    def _cut(self, shard: int, max_bytes: int) -> Iterator[tuple[list[Any], int]]:
        """Yield (deltas, size in bytes), small tables together and large ones in ranges of rows."""
        deltas: list[Any] = []
        size_bytes = _MESSAGE_BYTES
        for table in self.tables:
            row_bytes, overhead_bytes = table.row_bytes, table.format.overhead_bytes
            first, end = table.bounds[shard], table.bounds[shard + 1]
            while first < end:
                num_rows = min(end - first, (max_bytes - size_bytes - overhead_bytes) // row_bytes)
                if num_rows < 1:
                    if deltas:
                        yield deltas, size_bytes
                        deltas, size_bytes = [], _MESSAGE_BYTES
                        continue
                    num_rows = 1  # longer than a message should be; `attach` has checked that a frame can hold it
                deltas.append(table.delta(first, first + num_rows))
                size_bytes += overhead_bytes + num_rows * row_bytes
                first += num_rows
        if deltas:
            yield deltas, size_bytes
