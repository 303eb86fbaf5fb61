"""Tables as one `.npz`, not compressed: an array for the weights and one for each state. bfloat16 as its 16 bits."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.table_sinks.dense import check_dense, check_names, columns_of, dense_windows, names_of
from headrace.scripts.table_sinks.export_table import ExportTable
from headrace.scripts.table_sources.npz_file import NOTES_MEMBER

__all__ = ["write_npz"]

_WINDOW_BYTES = 8 << 20
# The same bytes for the same rows: members are all as old as the format can say.
_DATE = (1980, 1, 1, 0, 0, 0)


def write_npz(path: Path, tables: list[ExportTable], *, on_rows: Callable[[int], None]) -> None:
    """Write a file. The snapshot is read once for each column.

    Args:
        path: Not there yet.
        tables: In the order of their names.
        on_rows: Called with the number of rows that were gone through.

    Raises:
        ConfigError: A table has virtual ids, or two tensors would have one name.
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
    """
    check_dense(tables, "npz")
    check_names(tables, "npz", NOTES_MEMBER)
    notes = []
    with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
        for table in tables:
            names = names_of(table)
            for number, (field, (dtype, shape)) in enumerate(columns_of(table).items()):
                with _member(archive, names[field]) as file:
                    _write_header(file, dtype.numpy, tuple(shape))
                    row_bytes = dtype.size_bytes * (shape[1] if len(shape) == 2 else 1)
                    windows = dense_windows(
                        table, field, max(1, _WINDOW_BYTES // row_bytes), on_rows=None if number else on_rows
                    )
                    for _, window in windows:
                        file.write(window.data)
            identities = names.pop("identities", None)
            notes.append(table.note(names, identities))
        data = np.frombuffer(json.dumps({"version": 1, "tables": notes}).encode(), np.uint8)
        with _member(archive, NOTES_MEMBER) as file:
            _write_header(file, data.dtype, data.shape)
            file.write(data.data)


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    info = zipfile.ZipInfo(f"{name}.npy", _DATE)
    info.external_attr = 0o644 << 16
    return archive.open(info, "w", force_zip64=True)


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    file.write(header.getvalue())
