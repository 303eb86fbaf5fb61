"""From a `TableDelta` as it came over the wire to a `RowDelta` that is safe to apply.

Everything that a client could get wrong is refused here, before a batch is accepted, so that nothing in the update log
can fail to apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.catalog import Catalog, Table
from headrace.paramserver.store.pending import RowDelta
from headrace.schemas.errors import NonFiniteError, RequestError, SpecMismatchError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType

__all__ = ["check_rows", "decode_delta", "decode_identities", "decode_row_ids"]


def decode_delta(catalog: Catalog, delta: Any, *, reject_non_finite: bool = False) -> RowDelta:
    """Return the checked form of a `TableDelta`; its columns are views of the struct's buffers.

    Args:
        catalog: The registered tables.
        delta: Struct from the IDL.
        reject_non_finite: Refuse NaN and Inf in weights and states.

    Raises:
        RequestError: Or one of its kinds, naming the table and what is wrong.
    """
    table = catalog.find(delta.fqn)
    if delta.fingerprint != table.spec.fingerprint:
        raise SpecMismatchError(
            f"table {delta.fqn!r}: fingerprint {delta.fingerprint} is not the registered {table.spec.fingerprint}; "
            "the table's dim, dtype, rows or optimizer states have changed"
        )
    layout = table.layout_at(delta.column_offset, delta.width)
    row_ids = decode_row_ids(table, delta.row_ids)
    deleted = None if delta.deleted_row_ids is None else decode_row_ids(table, delta.deleted_row_ids)
    columns = _columns(table, layout, delta, row_ids.size)
    if reject_non_finite:
        _check_finite(table, layout, columns, row_ids)
    return RowDelta(
        table_id=table.table_id,
        spec=table.spec,
        layout=layout,
        row_ids=row_ids,
        columns=columns,
        identities=_identities(table, delta, row_ids.size),
        deleted_row_ids=deleted,
        scalars=_scalars(table, delta.scalars) if delta.scalars else (),
    )


def check_rows(delta: RowDelta, *, shard: int, num_shards: int) -> None:
    """Refuse rows that are another shard's, where no reader would find them, and rows that are given twice.

    Args:
        delta: Decoded.
        shard: Index of this shard.
        num_shards: Of the server.

    Raises:
        RequestError: Naming a row.
    """
    fqn, row_ids = delta.spec.fqn, delta.row_ids
    if delta.deleted_row_ids is not None and delta.deleted_row_ids.size:
        row_ids = np.concatenate((row_ids, delta.deleted_row_ids))
    # Trainers send rows in order: then one pass tells.
    if (row_ids[1:] <= row_ids[:-1]).any():
        ordered = np.sort(row_ids)
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if again.size:
            raise RequestError(f"table {fqn!r}: row {ordered[again[0]]} is given twice")
    if num_shards > 1:
        shards = shards_of_rows(table_seed(fqn), row_ids, num_shards)
        astray = np.flatnonzero(shards != shard)
        if astray.size:
            row_id, owner = row_ids[astray[0]], shards[astray[0]]
            raise RequestError(
                f"table {fqn!r}: row {row_id} belongs to shard {owner} of {num_shards}, this is shard {shard}"
            )


def decode_row_ids(table: Table, data: memoryview) -> npt.NDArray[np.int64]:
    """Return row ids as int64[n], a view of `data`.

    Raises:
        RequestError: The bytes are not whole ids, or an id is no row of the table.
    """
    if len(data) % 8:
        raise RequestError(f"table {table.spec.fqn!r}: {len(data)} bytes of row ids are not a multiple of 8")
    row_ids = np.frombuffer(data, "<i8")
    table.spec.check_row_ids(row_ids)
    return row_ids


def decode_identities(table: Table, data: memoryview) -> npt.NDArray[np.int64]:
    """Return identities to look for as int64[n], a view of `data`.

    Raises:
        RequestError: The bytes are not whole identities, or the table has none.
    """
    if not table.spec.has_identities:
        raise RequestError(f"table {table.spec.fqn!r} has no identities; its rows are found by their row ids")
    if len(data) % 8:
        raise RequestError(f"table {table.spec.fqn!r}: {len(data)} bytes of identities are not a multiple of 8")
    return np.frombuffer(data, "<i8")


def _columns(table: Table, layout: RecordLayout, delta: Any, num_rows: int) -> dict[str, memoryview]:
    given: dict[str, memoryview] = {"weights": delta.weights}
    for state in delta.states:
        name = layout.fields_of_states.get(state.name)
        if name is None or name in given:
            raise SpecMismatchError(f"table {table.spec.fqn!r}: state {state.name!r} is unknown or given twice")
        column = layout.columns[name]
        if state.dtype != column.dtype or state.width != column.width:
            raise SpecMismatchError(
                f"table {table.spec.fqn!r}: state {state.name!r} is {_dtype_name(state.dtype)}[{state.width}] a row, "
                f"registered as {column.dtype.name}[{column.width}]"
            )
        given[name] = state.data
    # A batch that only deletes carries no columns.
    if num_rows and len(given) < len(layout.columns):
        missing = layout.columns.keys() - given.keys()
        names = ", ".join(sorted(name.removeprefix("state:") for name in missing))
        raise SpecMismatchError(f"table {table.spec.fqn!r}: states missing: {names}")
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
        raise SpecMismatchError(f"table {table.spec.fqn!r} {wants} identities")
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
        # By halves: row after row, a large batch would hold up the loop for seconds.
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
