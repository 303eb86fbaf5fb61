"""A flush: the values of changed rows at one step, ordered by shard, and the messages that carry them.

The flusher fills a flush, and the shards' channels send it. Nothing here reads a clock, a socket or a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.schemas.idl import idl
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import ColumnShard, DType, StateSpec, TableSpec
from headrace.streamer.flush.staging import StagingBuffer

__all__ = [
    "Column",
    "Flush",
    "FlushedDeletions",
    "FlushedTable",
    "Message",
    "Pending",
    "StepMark",
    "TableFormat",
]

# Upper bounds for Thrift's headers, numbers and lengths; names come on top.
_MESSAGE_BYTES = 256
_DELTA_BYTES = 128
_STATE_BYTES = 48
_SCALARS_BYTES = 48  # for one, such as `step`; no table has more


class TableFormat:
    """The layout on the wire of rows of one column shard of a table.

    Attributes:
        states: (spec, elements per row) of each state.
        row_bytes: Bytes of one row with its id and states.
        overhead_bytes: Upper bound for a `TableDelta` without its rows.
        num_columns: Ids, weights, states, and identities if the table has them.
    """

    def __init__(self, spec: TableSpec, shard: ColumnShard) -> None:
        """Lay out the columns `shard` of a table."""
        self.spec, self.shard = spec, shard
        self.states: tuple[tuple[StateSpec, int], ...] = tuple((s, s.width_in(shard)) for s in spec.states)
        state_bytes = sum(width * state.dtype.size_bytes for state, width in self.states)
        self.row_bytes = 8 + shard.width * spec.dtype.size_bytes + state_bytes + (8 if spec.has_identities else 0)
        names = sum(_STATE_BYTES + len(state.name.encode()) for state in spec.states)
        self.overhead_bytes = _DELTA_BYTES + _SCALARS_BYTES + len(spec.fqn.encode()) + names
        self.num_columns = 2 + len(self.states) + spec.has_identities


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table in a flush: a uint8 view of `num_rows × row_bytes`."""

    data: memoryview
    row_bytes: int

    def rows(self, first: int, last: int) -> memoryview:
        """Return the rows `first` to `last - 1`, a view."""
        return self.data[first * self.row_bytes : last * self.row_bytes]


@dataclass(frozen=True, slots=True)
class FlushedTable:
    """Rows of one table in a flush, ordered by shard, so that each shard's rows are contiguous in every column.

    Attributes:
        bounds: int[num_shards + 1]; shard `s` has the rows `bounds[s]` to `bounds[s + 1] - 1`.
        row_ids: int64, global.
        weights: Elements of the spec's type, `shard.width` per row.
        states: In the spec's order.
        identities: int64, the raw ids behind the rows; None if the table has none.
        scalars: The table's scalars: name, element type and bytes.
        tallies: Of each shard's rows, as they were taken; None where nobody has counted.
    """

    format: TableFormat
    bounds: Sequence[int]
    row_ids: Column
    weights: Column
    states: tuple[Column, ...]
    identities: Column | None = None
    scalars: tuple[tuple[str, DType, bytes], ...] = ()
    tallies: Sequence[RowTally] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with everything that travels with it."""
        return self.format.row_bytes

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns: ids, weights, states, then identities if present."""
        others = () if self.identities is None else (self.identities,)
        return (self.row_ids, self.weights, *self.states, *others)

    def with_columns(self, columns: Sequence[Column]) -> FlushedTable:
        """Return the same rows in other columns."""
        row_ids, weights, *rest = columns
        identities = None if self.identities is None else rest.pop()
        return dataclasses.replace(self, row_ids=row_ids, weights=weights, states=tuple(rest), identities=identities)

    def delta(self, first: int, last: int) -> Any:
        """Return the rows `first` to `last - 1` as an `idl.TableDelta`, whose columns are views."""
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
        )


@dataclass(frozen=True, slots=True)
class FlushedDeletions:
    """Rows of one table that a flush deletes, ordered by shard; no `FlushedTable` of the flush has them.

    The attributes are those of `FlushedTable`.
    """

    format: TableFormat
    bounds: Sequence[int]
    row_ids: Column
    tallies: Sequence[RowTally] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one deletion."""
        return 8

    @property
    def columns(self) -> tuple[Column, ...]:
        """The ids."""
        return (self.row_ids,)

    def with_columns(self, columns: Sequence[Column]) -> FlushedDeletions:
        """Return the same rows in other columns."""
        (row_ids,) = columns
        return dataclasses.replace(self, row_ids=row_ids)

    def delta(self, first: int, last: int) -> Any:
        """Return an `idl.TableDelta` that deletes the rows `first` to `last - 1`."""
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
    """The statement that every change up to a step, at `time_us`, has been sent; and nothing newer if it is exact.

    With `is_recorded`, there is a recording of what the model answers at this step.
    """

    step: int
    time_us: int
    is_exact_cut: bool
    is_recorded: bool = False


@dataclass(slots=True)
class Message:
    """One `setEmbeddings` request before it has a client seq.

    Attributes:
        step, time_us: Step at which the values were read, or which an empty message ends; and its wall clock.
        ends_step: It is the last message up to `step`.
        is_exact_cut: With `ends_step`: no newer value was sent.
        deltas: IDL structs; their columns are views into the flush.
        size_bytes: Upper bound for its bytes on the wire, without the names of run and client.
        oldest_us: As of its flush.
    """

    step: int
    time_us: int
    ends_step: bool
    is_exact_cut: bool
    deltas: list[Any]
    size_bytes: int
    oldest_us: int


class Pending(Protocol):
    """The part of a flush that is still on its way from a device: `device_pipeline.DeviceDrain`."""

    def complete(self, flush: Flush) -> Flush | None:
        """Wait for it, and return the whole flush; None if neither the flush nor its buffer is used any more."""

    def abandon(self) -> None:
        """Note that nobody will complete the flush."""


@dataclass(slots=True)
class Flush:
    """One flush.

    Attributes:
        step, time_us: Step at which the values were read, and its wall clock, microseconds since 1970.
        tables: Tables with changed rows, and with deleted ones.
        mark: What the flush completes; None if more has to follow first.
        dirty_since_s, oldest_us: Monotonic time and wall clock of the oldest change that it may hold, or that its mark
            covers.
        num_rows, size_bytes: Rows of all tables, including deletions, and their bytes.
        staging: Holds the columns; None once they are elsewhere. A flush without rows has a buffer too, which bounds
            the number of flushes.
        num_losses: How many losses of the server's had been marked to be sent again; see `Sender.losses`.
        pending: The device part. Until it is complete, tables, mark and numbers are those of the host part. None if
            everything is here.
        is_taken: The sender owns the flush and its staging buffer.
        cost_percent: What streaming has lately taken of the steps' time, percent; shards are told with the step mark.
        is_cost_bound: The flush is later than wanted, because of its cost. None, as the percentage, from no trainer.
        num_unstreamed: Tables and modules that are trained and not streamed; shards are told with the step mark.
    """

    step: int
    time_us: int
    tables: list[FlushedTable | FlushedDeletions]
    mark: StepMark | None
    dirty_since_s: float
    oldest_us: int
    num_rows: int
    size_bytes: int
    staging: StagingBuffer | None
    num_losses: int = 0
    pending: Pending | None = None
    is_taken: bool = False
    cost_percent: float | None = None
    is_cost_bound: bool | None = None
    num_unstreamed: int | None = None

    def messages(self, shard: int, max_bytes: int) -> Iterator[Message]:
        """Yield a shard's messages in order; none if it gets neither rows nor a mark.

        `max_bytes` is the limit for `Message.size_bytes`, which only a single row may exceed.

        Raises:
            InvariantError: The rows are not those that were taken for the shard; none of the table's was yielded.
        """
        mark, last, oldest_us = self.mark, None, self.oldest_us
        for deltas, size_bytes in self._parts(shard, max_bytes):
            if last is not None:
                yield last
            last = Message(self.step, self.time_us, False, False, deltas, size_bytes, oldest_us)
        if mark is not None:
            if last is None or mark.step != self.step:
                # A mark of an earlier step is a message of its own, because rows carry the step at which they were
                # read.
                if last is not None:
                    yield last
                last = Message(mark.step, mark.time_us, True, mark.is_exact_cut, [], _MESSAGE_BYTES, oldest_us)
            else:
                last.ends_step, last.is_exact_cut = True, mark.is_exact_cut
        if last is not None:
            yield last

    def _parts(self, shard: int, max_bytes: int) -> Iterator[tuple[list[Any], int]]:
        """Yield (deltas, size in bytes): small tables together, large ones in ranges of rows."""
        deltas: list[Any] = []
        size_bytes = _MESSAGE_BYTES
        for table in self.tables:
            row_bytes, overhead_bytes = table.row_bytes, table.format.overhead_bytes
            first, end = table.bounds[shard], table.bounds[shard + 1]
            if table.tallies is not None:
                what = f"step {self.step}, flush → messages to shard {shard}, table {table.format.spec.fqn!r}"
                table.tallies[shard].check(RowTally.of([table.row_ids.rows(first, end)]), what)
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
