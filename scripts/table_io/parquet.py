"""Read and write tables as Parquet files, one per table.

Each row has its id and, in files of `headrace export`, its version; export sorts rows by id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.paramserver.store.catalog import unpack_spec
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, RequestError, SpecMismatchError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, TableSpec
from headrace.scripts.table_io.columns import map_file_errors
from headrace.scripts.table_io.exported import ExportRows, ExportTable, file_name_of
from headrace.scripts.table_io.parquet_pages import check_pages
from headrace.scripts.table_io.source import Selection, SourceTable, TableScalars, noted_scalars, state_of

__all__ = ["parquet_tables", "write_parquet"]

_GROUP_BYTES = 16 << 20
_MAX_GROUP_ROWS = 65_536
_NOTES_KEY = b"headrace"
_STATE = "state:"
_ARROW_TYPES = {
    DType.FLOAT32: pa.float32(),
    DType.FLOAT16: pa.float16(),
    DType.BFLOAT16: pa.uint16(),
    DType.FLOAT64: pa.float64(),
    DType.INT64: pa.int64(),
    DType.INT32: pa.int32(),
    DType.UINT8: pa.uint8(),
    DType.INT16: pa.int16(),
    DType.INT8: pa.int8(),
}
_DTYPES = {arrow: dtype for dtype, arrow in _ARROW_TYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    path: Path
    spec: TableSpec
    num_rows: int
    names: frozenset[str]
    scalars: TableScalars = ()


def parquet_tables(paths: list[Path], selection: Selection) -> list[SourceTable]:
    """Return the tables of some files, with every column's type checked.

    Args:
        paths: One file per table; the file's name without its ending is the table's, unless its notes name it.
        selection: Which tables to take.

    Raises:
        ConfigError: A requested table is missing, or is there twice.
        SpecMismatchError: A table differs from the target's.
        CorruptionError: A file is damaged.
    """
    files = [_open(path, selection) for path in paths]
    names = [file.spec.fqn for file in files]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two files hold a table {repeated[0]!r}")
    selection.check_wanted(set(names), ", ".join(map(str, paths[:3])))
    tables = []
    for file in files:
        if not selection.takes(file.spec.fqn):
            continue
        selection.check_fits(file.spec, str(file.path))
        tables.append(_ready(file, selection))
    return tables


def _open(path: Path, selection: Selection) -> _File:
    with map_file_errors(path):
        check_pages(path)
    with _mapped_errors(path), pq.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise RequestError(f"{path}: two columns have the name {repeated[0]!r}")
        notes = (schema.metadata or {}).get(_NOTES_KEY)
        scalars: TableScalars = ()
        if notes is not None:
            try:
                note = json.loads(notes)
                precision, packed = note["precision"], list(note["spec"])
                fqn = packed[0] = selection.naming.target_of(packed[0]) or packed[0]
                spec, scalars = unpack_spec(packed), noted_scalars(note)
            except (ValueError, KeyError, TypeError, RecursionError) as exc:
                raise CorruptionError(f"{path}: its notes on the table are damaged: {exc!r}") from exc
            if precision is not None:
                raise RequestError(f"{path}: exported as {precision}, which is for serving; it cannot be brought back")
        else:
            name = path.name.removesuffix(".parquet")
            fqn = selection.naming.target_of(name) or name
            target = selection.known.get(fqn)
            spec = _spec_of(path, schema, fqn, 0 if target is None else target.num_rows, _list_lengths(file))
        _check_schema(path, schema, spec)
        return _File(path=path, spec=spec, num_rows=num_rows, names=frozenset(schema.names), scalars=scalars)


def _list_lengths(file: pq.ParquetFile) -> dict[str, int]:
    """Return the number of values in the first row of each list column; lists need not have a fixed size."""
    names = [field.name for field in file.schema_arrow if _is_list(field.type)]
    for batch in file.iter_batches(batch_size=1, columns=names, use_threads=False):
        return {name: len(batch.column(name)[0].as_py() or ()) for name in names}
    return {}


def _spec_of(path: Path, schema: pa.Schema, fqn: str, num_rows: int, lengths: Mapping[str, int]) -> TableSpec:
    """Return the spec of a file without notes; without a known table its ids are virtual."""
    if "weights" not in schema.names:
        raise SpecMismatchError(f"{path}: no column `weights`; there is {', '.join(schema.names[:8])}")
    dtype, dim = _type_of(path, schema.field("weights"), lengths)
    states = []
    for field in schema:
        if field.name.startswith(_STATE):
            state_dtype, width = _type_of(path, field, lengths)
            is_pointwise = width == dim and _is_list(field.type)
            states.append(state_of(field.name.removeprefix(_STATE), state_dtype, width, is_pointwise=is_pointwise))
    return TableSpec(
        fqn=fqn,
        num_rows=num_rows,
        dim=dim,
        dtype=dtype,
        states=tuple(states),
        has_identities="identity" in schema.names,
    )


def _type_of(path: Path, field: pa.Field, lengths: Mapping[str, int]) -> tuple[DType, int]:
    is_list = _is_list(field.type)
    dtype = _DTYPES.get(field.type.value_type if is_list else field.type)
    if dtype is None:
        raise SpecMismatchError(f"{path}: column {field.name!r} is {field.type}, not a list of numbers")
    if pa.types.is_fixed_size_list(field.type):
        return dtype, field.type.list_size
    if is_list and not lengths.get(field.name):
        raise SpecMismatchError(f"{path}: column {field.name!r} is {field.type}, and no first row says how long")
    return dtype, lengths[field.name] if is_list else 1


def _is_list(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(arrow) or pa.types.is_list(arrow) or pa.types.is_large_list(arrow))


def _check_schema(path: Path, schema: pa.Schema, spec: TableSpec) -> None:
    layout = RecordLayout(spec, spec.whole)
    expected = {"row_id": [pa.int64()]}
    for name, column in layout.columns.items():
        # A rowwise state of one element is a number in our files, and may be a list in others.
        kinds = [True, False] if _is_rowwise(spec, name) else [False]
        expected[name] = [_column_type(column.dtype, column.width, is_rowwise=kind) for kind in kinds]
    if spec.has_identities:
        expected["identity"] = [pa.int64()]
    optional = {"epoch": pa.int64(), "step": pa.int64(), "time_us": pa.int64()}
    for name, types in expected.items():
        if name not in schema.names:
            raise SpecMismatchError(f"{path}: column {name!r} is missing")
        if not any(_is_alike(schema.field(name).type, arrow) for arrow in types):
            raise SpecMismatchError(f"{path}: column {name!r} is {schema.field(name).type}, not {types[0]}")
    for name, arrow in optional.items():
        if name in schema.names and schema.field(name).type != arrow:
            raise SpecMismatchError(f"{path}: column {name!r} is {schema.field(name).type}, not {arrow}")
    if "deleted" in schema.names:
        # Headrace 0.2 exported deleted rows too, as zeros with this mark; they must not come in as rows of zeros.
        raise RequestError(f"{path}: column 'deleted' marks rows that are gone; leave those rows and the column out")
    if ("epoch" in schema.names) != ("step" in schema.names):
        raise SpecMismatchError(f"{path}: `epoch` without `step`, or the other way round")


def _is_rowwise(spec: TableSpec, field: str) -> bool:
    return any(f"{_STATE}{state.name}" == field and state.kind is StateKind.ROWWISE for state in spec.states)


def _column_type(dtype: DType, width: int, *, is_rowwise: bool) -> pa.DataType:
    """Return a column's type; a rowwise state of one element is a plain number."""
    arrow = _ARROW_TYPES[dtype]
    return arrow if is_rowwise and width == 1 else pa.list_(pa.field("item", arrow, nullable=False), width)


def _is_alike(found: pa.DataType, expected: pa.DataType) -> bool:
    if _is_list(found) and pa.types.is_fixed_size_list(expected):
        # Lists without a fixed size are checked row by row when they are read.
        has_size = not pa.types.is_fixed_size_list(found) or found.list_size == expected.list_size
        return bool(has_size and found.value_type == expected.value_type)
    return bool(found == expected)


def _ready(file: _File, selection: Selection) -> SourceTable:
    layout = RecordLayout(file.spec, file.spec.whole)
    names = ["row_id", *["identity"] * file.spec.has_identities]
    names += [name for name in ("epoch", "step", "time_us") if name in file.names]

    def chunks(max_bytes: int) -> Iterator[RowChunk]:
        for batch in _batches(file.path, [*names, *layout.columns], max(1, max_bytes // layout.size_bytes)):
            yield _chunk_of(file, layout, batch, selection)

    def check_ids() -> None:
        last = -1
        for batch in _batches(file.path, names, 1 << 20):
            bare = _chunk_of(file, None, batch, selection)
            try:
                bare.check(file.spec, after_row=last)
            except HeadraceError as exc:
                raise type(exc)(f"{file.path}: {exc}") from exc
            last = int(bare.row_ids[-1])

    return SourceTable(
        name=file.path.name,
        spec=file.spec,
        num_rows=file.num_rows,
        chunks=chunks,
        check_ids=check_ids,
        scalars=file.scalars,
    )


def _batches(path: Path, names: list[str], num_rows: int) -> Iterator[pa.RecordBatch]:
    with _mapped_errors(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=num_rows, columns=names, use_threads=False):
            if batch.num_rows:
                yield batch


def _chunk_of(file: _File, layout: RecordLayout | None, batch: pa.RecordBatch, selection: Selection) -> RowChunk:
    def ids(name: str) -> npt.NDArray[np.int64]:
        return _numbers(file.path, batch, name, DType.INT64, 1)[:, 0]

    has_versions = "epoch" in file.names
    return RowChunk(
        row_ids=ids("row_id"),
        columns={
            name: _numbers(file.path, batch, name, column.dtype, column.width)
            for name, column in (layout.columns.items() if layout is not None else ())
        },
        epochs=ids("epoch") if has_versions else 1,
        steps=ids("step") if has_versions else 0,
        times_us=ids("time_us") if "time_us" in file.names else selection.time_us,
        identities=ids("identity") if file.spec.has_identities else None,
    )


def _numbers(path: Path, batch: pa.RecordBatch, name: str, dtype: DType, width: int) -> npt.NDArray[Any]:
    """Return a column as [n, width]."""
    array = batch.column(name)
    values = array.flatten() if _is_list(array.type) else array
    if array.null_count or values.null_count:
        raise RequestError(f"{path}: column {name!r} has empty values")
    if _is_list(array.type) and not pc.all(pc.equal(pc.list_value_length(array), width)).as_py():
        raise RequestError(f"{path}: column {name!r} has rows of other than {width} values")
    found = values.to_numpy(zero_copy_only=True)
    return np.asarray(found.astype(dtype.numpy, copy=False).reshape(len(array), width))


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    with map_file_errors(path):
        try:
            yield
        except pa.ArrowException as exc:
            text = " ".join(str(exc).split())
            raise CorruptionError(f"{path}: no Parquet file, or a damaged one: {text[:200]}") from exc


def write_parquet(path: Path, tables: list[ExportTable], *, on_rows: Callable[[int], None]) -> None:
    """Write a new directory `path` with one file per table; call `on_rows` with the number of rows just read.

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
            # Statistics of ids and versions help readers; nobody asks for the least weight.
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
    for name, (dtype, width) in table.fields.items():
        arrow = _column_type(dtype, width, is_rowwise=_is_rowwise(table.spec, name))
        fields.append(pa.field(name, arrow, nullable=False))
    note = table.note({field: field for field in table.fields}, "identity" if table.spec.has_identities else None)
    return pa.schema(fields, metadata={_NOTES_KEY: json.dumps(note).encode()})


def _groups(
    table: ExportTable, schema: pa.Schema, group_rows: int, on_rows: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield the rows in groups of equal size except the last, whatever pieces the snapshot has."""
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
