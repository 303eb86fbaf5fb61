"""Row deltas and batches: decode a `TableDelta` from the wire into a checked `RowDelta`.

Everything that a client can get wrong is refused here, before a batch is accepted, so nothing in the update log can
fail to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.catalog import Catalog, Table
from headrace.schemas.errors import NonFiniteError, RequestError, SpecMismatchError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import DType, TableSpec

__all__ = [
    "Batch",
    "Part",
    "RowDelta",
    "check_rows",
    "decode_delta",
    "decode_row_ids",
]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_ASK = "the writer's table is not the server's: attach the model to a new streamer"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDelta:
    """Rows of one column shard of one table, decoded and checked.

    Attributes:
        table_id: Number of the table in the shard's catalog, from 1.
        spec: The table's spec.
        layout: Record layout of the column shard.
        row_ids: int64[n], each once.
        columns: `n × width` elements for each field of the layout, `weights` and each `state:NAME`; bytes-like,
            contiguous.
        identities: int64[n] where the table has identities.
        deleted_row_ids: int64[k], each once, disjoint from `row_ids`.
        scalars: Name, element type and bytes of each of the table's scalars.
    """

    table_id: int
    spec: TableSpec
    layout: RecordLayout
    row_ids: _Ids
    columns: dict[str, Any]
    identities: _Ids | None = None
    deleted_row_ids: _Ids | None = None
    scalars: tuple[tuple[str, DType, bytes], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The changes of one durable record of the update log.

    Attributes:
        seq: Its position in the log, from 1.
        epoch: Epoch of all its rows, 1 to 2³² − 1.
        step: Step of all its rows, from 0.
        time_us: The trainer's wall clock at that step, microseconds since 1970.
        deltas: Rows; the buffers stay unchanged until `release`.
        meta: Metadata to store in the same atomic write, keys without `META_PREFIX`.
        size_bytes: Memory that the batch holds.
        dropped: Numbers of tables whose rows are erased once this record is applied.
        release: Called once, on the loop's thread, when the buffers are no longer needed.
        tally: Of its rows and deleted rows, as the record has them; None where nobody has counted.
    """

    seq: int
    epoch: int
    step: int
    time_us: int
    deltas: tuple[RowDelta, ...] = ()
    meta: dict[bytes, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    dropped: tuple[int, ...] = ()
    release: Callable[[], None] = lambda: None
    tally: RowTally | None = None


class Part:
    """Rows of one batch for one column shard, as views of the request's frame.

    Of `ids`, int64[n + k], each once, the first `num_present` = n have `columns`, `layout.dtype[field]`[n] for each
    field after the header; the others are deleted.
    """

    __slots__ = ("columns", "epoch", "ids", "layout", "num_present", "step", "time_us")

    def __init__(self, layout: RecordLayout, ids: _Ids, columns: Mapping[str, _Array], batch: Batch) -> None:
        self.layout, self.ids, self.columns = layout, ids, columns
        self.epoch, self.step, self.time_us = batch.epoch, batch.step, batch.time_us
        self.num_present = next(iter(columns.values())).size if columns else 0

    @classmethod
    def of_delta(cls, delta: RowDelta, batch: Batch) -> Part:
        """Return the rows of a delta."""
        ids = np.ascontiguousarray(delta.row_ids, np.int64)
        columns = delta.layout.views(delta.columns) if ids.size else {}
        if ids.size and delta.identities is not None:
            columns["identity"] = np.ascontiguousarray(delta.identities, "<i8")
        if delta.deleted_row_ids is not None and len(delta.deleted_row_ids):
            ids = np.concatenate((ids, delta.deleted_row_ids))
        return cls(delta.layout, ids, columns, batch)


def tally_of(request: Any) -> RowTally:
    """Return the tally of all rows of a `setEmbeddings` request, those that it deletes included."""
    return RowTally.of(column for delta in request.deltas for column in (delta.row_ids, delta.deleted_row_ids))


def tally_of_deltas(deltas: Iterable[RowDelta]) -> RowTally:
    """Return the tally of all rows of some deltas, those that they delete included."""
    return RowTally.of(ids for delta in deltas for ids in (delta.row_ids, delta.deleted_row_ids))


def decode_delta(catalog: Catalog, delta: Any, *, reject_non_finite: bool = False) -> RowDelta:
    """Check a `TableDelta` and return its decoded form, whose columns are views of the struct's buffers.

    Raises:
        RequestError: Or a subclass, naming the table and the mistake.
    """
    table = catalog.find(delta.fqn)
    spec = table.spec  # once: it may grow while this runs in a thread
    if delta.fingerprint != spec.fingerprint and delta.fingerprint not in table.earlier:
        raise SpecMismatchError(
            f"table {delta.fqn!r}: fingerprint {delta.fingerprint} is not the registered {spec.fingerprint}; "
            "the table's dim, dtype, rows or optimizer states have changed: attach the model to a new streamer"
        )
    layout = table.layout_at(delta.column_offset, delta.width)
    if spec.is_dense and (delta.width != spec.dim or delta.deleted_row_ids):
        raise RequestError(f"table {delta.fqn!r} is a dense tensor: its rows have all columns, and none is deleted")
    row_ids = decode_row_ids(table, delta.row_ids)
    deleted = None if delta.deleted_row_ids is None else decode_row_ids(table, delta.deleted_row_ids)
    columns = _columns(table, layout, delta, row_ids.size)
    if reject_non_finite:
        _check_finite(table, layout, columns, row_ids)
    return RowDelta(
        table_id=table.table_id,
        spec=spec,
        layout=layout,
        row_ids=row_ids,
        columns=columns,
        identities=_identities(table, delta, row_ids.size),
        deleted_row_ids=deleted,
        scalars=_scalars(table, delta.scalars) if delta.scalars else (),
    )


def check_rows(delta: RowDelta) -> _Ids:
    """Refuse rows given twice; return all rows of a delta, deleted ones included, int64[n + k].

    Raises:
        RequestError: Naming a row.
    """
    fqn, row_ids = delta.spec.fqn, delta.row_ids
    if delta.deleted_row_ids is not None and delta.deleted_row_ids.size:
        row_ids = np.concatenate((row_ids, delta.deleted_row_ids))
    # Trainers send rows in order; then this one pass is enough.
    if (row_ids[1:] <= row_ids[:-1]).any():
        ordered = np.sort(row_ids)
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if again.size:
            raise RequestError(f"table {fqn!r}: row {ordered[again[0]]} is given twice")
    return row_ids


def decode_row_ids(table: Table, data: memoryview) -> npt.NDArray[np.int64]:
    """Return row ids as int64[n], a view of `data`. Raises RequestError for a bad length or an id out of range."""
    if len(data) % 8:
        raise RequestError(f"table {table.spec.fqn!r}: {len(data)} bytes of row ids are not a multiple of 8")
    row_ids = np.frombuffer(data, "<i8")
    table.spec.check_row_ids(row_ids)
    return row_ids


def _columns(table: Table, layout: RecordLayout, delta: Any, num_rows: int) -> dict[str, memoryview]:
    given: dict[str, memoryview] = {"weights": delta.weights}
    for state in delta.states:
        name = layout.fields_of_states.get(state.name)
        if name is None or name in given:
            raise SpecMismatchError(f"table {table.spec.fqn!r}: state {state.name!r} is unknown or given twice; {_ASK}")
        column = layout.columns[name]
        if state.dtype != column.dtype or state.width != column.width:
            raise SpecMismatchError(
                f"table {table.spec.fqn!r}: state {state.name!r} is {_dtype_name(state.dtype)}[{state.width}] a row, "
                f"registered as {column.dtype.name}[{column.width}]; {_ASK}"
            )
        given[name] = state.data
    # A batch that only deletes has no columns.
    if num_rows and len(given) < len(layout.columns):
        missing = layout.columns.keys() - given.keys()
        names = ", ".join(sorted(name.removeprefix("state:") for name in missing))
        raise SpecMismatchError(f"table {table.spec.fqn!r}: states missing: {names}; {_ASK}")
    for name, data in given.items():
        column = layout.columns[name]
        if len(data) != num_rows * column.size_bytes:
            raise RequestError(
                f"table {table.spec.fqn!r}: {column.name} has {len(data)} bytes, {num_rows} rows of "
                f"{column.dtype.name}[{column.width}] have {num_rows * column.size_bytes}"
            )
    return given


def _identities(table: Table, delta: Any, num_rows: int) -> npt.NDArray[np.int64] | None:
    data = delta.identities
    if (data is not None) != table.spec.has_identities and num_rows:
        wants = "has" if table.spec.has_identities else "has no"
        raise SpecMismatchError(f"table {table.spec.fqn!r} {wants} identities; {_ASK}")
    if data is None:
        return None
    if len(data) != num_rows * 8:
        raise RequestError(f"table {table.spec.fqn!r}: {len(data)} bytes of identities for {num_rows} rows")
    return np.frombuffer(data, "<i8")


def _scalars(table: Table, scalars: Iterable[Any]) -> tuple[tuple[str, DType, bytes], ...]:
    found = []
    for scalar in scalars:
        if scalar.dtype not in set(DType) or len(scalar.data) != DType(scalar.dtype).size_bytes:
            raise RequestError(
                f"table {table.spec.fqn!r}: scalar {scalar.name!r} has {len(scalar.data)} bytes, which is not one "
                f"element of {_dtype_name(scalar.dtype)}"
            )
        # Copied out of the frame: it outlives the batch.
        found.append((scalar.name, DType(scalar.dtype), bytes(scalar.data)))
    if len({name for name, _, _ in found}) != len(found):
        raise RequestError(f"table {table.spec.fqn!r}: a scalar is given twice")
    return tuple(found)


def _check_finite(
    table: Table, layout: RecordLayout, columns: dict[str, memoryview], row_ids: npt.NDArray[np.int64]
) -> None:
    for name, data in columns.items():
        column = layout.columns[name]
        values = np.frombuffer(data, column.dtype.numpy).reshape(-1, column.width)
        if column.dtype.is_finite(values):
            continue
        # Bisect: checking row by row would block the loop for seconds on a large batch.
        first, end = 0, row_ids.size
        while end - first > 1:
            middle = (first + end) // 2
            if column.dtype.is_finite(values[first:middle]):
                first = middle
            else:
                end = middle
        raise NonFiniteError(f"table {table.spec.fqn!r}: {column.name} of row {row_ids[first]} is NaN or Inf")


def _dtype_name(value: int) -> str:
    names: Iterable[DType] = DType
    return next((dtype.name for dtype in names if dtype == value), f"type {value}")
