"""Tables as a directory of Parquet files, a file a table, each row with its id and version, sorted by id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.scripts.table_sinks.export_table import ExportRows, ExportTable, file_name_of
from headrace.scripts.table_sources.parquet_tables import NOTES_KEY, column_type

__all__ = ["write_parquet"]

_GROUP_BYTES = 16 << 20
_MAX_GROUP_ROWS = 65_536


def write_parquet(path: Path, tables: list[ExportTable], *, on_rows: Callable[[int], None]) -> None:
    """Write a directory.

    Args:
        path: Not there yet.
        tables: In the order of their names.
        on_rows: Called with the number of rows that were gone through.

    Raises:
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
    """
    path.mkdir()
    for table in tables:
        schema = _schema_of(table)
        group_rows = max(1, min(_GROUP_BYTES // table.row_bytes, _MAX_GROUP_ROWS))
        with pq.ParquetWriter(
            path / file_name_of(table.spec, ".parquet"),
            schema,
            compression="none",
            use_dictionary=False,
            # Of ids and versions they help readers; of weights nobody asks for the least one.
            write_statistics=[name for name in schema.names if name != "weights" and ":" not in name],
            store_schema=True,
        ) as writer:
            for batch in _groups(table, schema, group_rows, on_rows):
                writer.write_table(batch, row_group_size=group_rows)


def _schema_of(table: ExportTable) -> pa.Schema:
    fields = [pa.field("row_id", pa.int64(), nullable=False)]
    if table.spec.has_identities:
        fields.append(pa.field("identity", pa.int64(), nullable=False))
    fields += [pa.field(name, pa.int64(), nullable=False) for name in ("epoch", "step", "time_us")]
    if table.has_deleted:
        fields.append(pa.field("deleted", pa.bool_(), nullable=False))
    for name, (dtype, width) in table.fields.items():
        is_rowwise = name != "weights" and not table.is_pointwise(name)
        fields.append(pa.field(name, column_type(dtype, width, is_rowwise=is_rowwise), nullable=False))
    note = table.note({field: field for field in table.fields}, "identity" if table.spec.has_identities else None)
    return pa.schema(fields, metadata={NOTES_KEY: json.dumps(note).encode()})


def _groups(
    table: ExportTable, schema: pa.Schema, group_rows: int, on_rows: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield the rows in equal groups but for the last, however the snapshot has cut them."""
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for rows in table.rows(on_rows=on_rows):
        waiting.append(_batch_of(table, schema, rows))
        num_waiting += waiting[-1].num_rows
        if num_waiting >= group_rows:
            joined = pa.Table.from_batches(waiting)
            full = num_waiting - num_waiting % group_rows
            for start in range(0, full, group_rows):
                yield joined.slice(start, group_rows).combine_chunks()
            waiting, num_waiting = joined.slice(full).to_batches(), num_waiting - full
    if num_waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _batch_of(table: ExportTable, schema: pa.Schema, rows: ExportRows) -> pa.RecordBatch:
    values: dict[str, Any] = {
        "row_id": rows.row_ids,
        "identity": rows.identities,
        "epoch": rows.epochs,
        "step": rows.steps,
        "time_us": rows.times_us,
        "deleted": rows.is_deleted,
    }
    arrays = []
    for field in schema:
        if field.name in values:
            arrays.append(pa.array(values[field.name], field.type))
            continue
        column = np.ascontiguousarray(rows.columns[field.name])
        flat = pa.array(column.reshape(-1))
        arrays.append(
            pa.FixedSizeListArray.from_arrays(flat, type=field.type)
            if pa.types.is_fixed_size_list(field.type)
            else flat
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
