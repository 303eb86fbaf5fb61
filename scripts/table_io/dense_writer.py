"""Turn exported rows into tensors of all rows of a range. Missing rows are zeros and have no identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import DType
from headrace.scripts.table_io.exported import ExportRows, ExportTable

__all__ = [
    "IDENTITIES",
    "blank_column",
    "check_dense",
    "check_names",
    "columns_of",
    "dense_pieces",
    "dense_windows",
    "names_of",
]

_Array = npt.NDArray[Any]
_Columns = dict[str, _Array]

IDENTITIES = "identities"
_NO_IDENTITY = -1
# A piece never spans more rows than this, if some are missing.
_ROWS_PER_PIECE = 65_536


def check_dense(tables: list[ExportTable], format_name: str) -> None:
    """Raise ConfigError for a table with virtual ids, which cannot be a tensor."""
    for table in tables:
        if table.end_row is None:
            raise ConfigError(
                f"--format {format_name}: table {table.spec.fqn!r} has virtual ids, and would be 2^63 rows long; take "
                "parquet, or some --rows"
            )


def check_names(tables: list[ExportTable], format_name: str, reserved: str) -> None:
    """Check that each tensor has a name of its own.

    Args:
        tables: Tables to export.
        format_name: Format, for the message.
        reserved: Name that the format uses itself.

    Raises:
        ConfigError: Two tensors have the same name, or one has the reserved name.
    """
    taken = {reserved}
    for table in tables:
        for name in names_of(table).values():
            if name in taken:
                raise ConfigError(
                    f"--format {format_name}: table {table.spec.fqn!r} needs the name {name!r}, which something else "
                    "in the file has; take parquet, or other tables with --table"
                )
            taken.add(name)


def columns_of(table: ExportTable) -> dict[str, tuple[DType, list[int]]]:
    """Return type and shape of each tensor of a table, by field, with `identities` if it has them."""
    columns = {field: (dtype, table.shape_of(field)) for field, (dtype, _) in table.fields.items()}
    if table.spec.has_identities:
        columns[IDENTITIES] = (DType.INT64, [table.num_rows])
    return columns


def names_of(table: ExportTable) -> dict[str, str]:
    """Return the tensors' names by field: `FQN`, `FQN/STATE` and `FQN/identities:`, which no state is called."""
    fqn = table.spec.fqn
    names = {field: fqn if field == "weights" else f"{fqn}/{field.removeprefix('state:')}" for field in table.fields}
    if table.spec.has_identities:
        names[IDENTITIES] = f"{fqn}/{IDENTITIES}:"
    return names


def blank_column(field: str, num_rows: int, width: int, dtype: npt.DTypeLike) -> _Array:
    """Return a column `[num_rows, width]` of missing rows: zeros, or -1 for identities, because 0 is a valid one."""
    return np.full((num_rows, width), _NO_IDENTITY if field == IDENTITIES else 0, dtype)


def dense_pieces(rows: ExportRows) -> Iterator[tuple[int, _Columns]]:
    """Yield (row id of the first row, columns) of pieces without gaps, ascending."""
    columns = dict(rows.columns)
    if rows.identities is not None:
        columns[IDENTITIES] = rows.identities[:, None]
    ids = rows.row_ids
    if ids[-1] - ids[0] + 1 == ids.size:
        yield int(ids[0]), columns
        return
    windows = ids // _ROWS_PER_PIECE
    bounds = np.flatnonzero(np.diff(windows, prepend=-1, append=-1)).tolist()
    for start, end in pairwise(bounds):
        first, span = int(ids[start]), int(ids[end - 1] - ids[start] + 1)
        at = ids[start:end] - first
        piece = {}
        for field, column in columns.items():
            piece[field] = blank_column(field, span, column.shape[1], column.dtype)
            piece[field][at] = column[start:end]
        yield first, piece


def dense_windows(
    table: ExportTable, field: str, rows_per_window: int, *, on_rows: Callable[[int], None] | None = None
) -> Iterator[tuple[int, _Array]]:
    """Yield (first row within the range, values) of one column, window after window, to the end of the range.

    Args:
        table: REQUIRES: it has an end.
        field: Column, or `identities`.
        rows_per_window: Rows of each window except the last.
        on_rows: See `ExportTable.rows`.
    """
    dtype, width = (DType.INT64, 1) if field == IDENTITIES else table.fields[field]
    wanted = [] if field == IDENTITIES else [field]

    def blank(first: int) -> _Array:
        return blank_column(field, min(rows_per_window, table.num_rows - first), width, dtype.numpy)

    first, window = 0, blank(0)
    for rows in table.rows(wanted, on_rows=on_rows):
        for row, columns in dense_pieces(rows):
            values, at = columns[field], row - table.first_row
            while len(values):
                while at >= first + rows_per_window:
                    yield first, window
                    first += rows_per_window
                    window = blank(first)
                end = min(at + len(values), first + rows_per_window)
                window[at - first : end - first] = values[: end - at]
                values, at = values[end - at :], end
    while first < table.num_rows:
        yield first, window
        first += rows_per_window
        if first < table.num_rows:
            window = blank(first)
