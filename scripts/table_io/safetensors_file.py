"""Read and write safetensors files: a tensor for the weights of a table and one for each state; dense tensors whole.

The library writes tensors that are in memory. Here a table's rows come a few megabytes at a time, and each column has
its own place in the file. So the header is written first, and a thread then writes each piece to its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.schemas.errors import CorruptionError
from headrace.schemas.tables import DType
from headrace.scripts.table_io.columns import Column, Piece, RawColumn, TensorSource, map_file_errors
from headrace.scripts.table_io.dense import (
    IDENTITIES,
    blank_column,
    check_dense,
    check_names,
    columns_of,
    dense_pieces,
    names_of,
    names_of_tensor,
)
from headrace.scripts.table_io.exported import ExportTable, ExportTensor

__all__ = ["open_safetensors", "write_safetensors"]

_METADATA = "__metadata__"  # defined by the format
_NOTES_KEY = "headrace"
_DTYPE_NAMES = {
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT64: "F64",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
    DType.INT16: "I16",
    DType.INT8: "I8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_ALIGNMENT = 8
_MAX_WRITES = 16
_ROWS_PER_WRITE = 1 << 17
# Sync after this many bytes while writing continues, so that the disk is not idle until the end.
_SYNC_BYTES = 64 << 20


def open_safetensors(path: Path) -> TensorSource:
    """Return the tensors of a file.

    Raises:
        CorruptionError: It is truncated, damaged, or of another format.
        StorageError: It cannot be read.
    """
    with map_file_errors(path):
        try:
            # The library checks the header, but does not say where in the file a tensor lies.
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as exc:
            raise CorruptionError(f"{path}: no safetensors file, or not all of it: {exc}") from exc
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        columns: dict[str, Column] = {}
        for name, tensor in header.items():
            if name == _METADATA or tensor["dtype"] not in _DTYPES or len(tensor["shape"]) not in (1, 2):
                continue
            dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
            width = shape[1] if len(shape) == 2 else 1
            piece = Piece(
                row=0,
                column=0,
                num_rows=shape[0],
                width=width,
                path=path,
                offset=8 + header_bytes + tensor["data_offsets"][0],
                row_bytes=width * dtype.size_bytes,
            )
            columns[name] = RawColumn(name, dtype, shape, [piece])
        try:
            notes = json.loads((header.get(_METADATA) or {}).get(_NOTES_KEY, "null"))
        except (ValueError, RecursionError) as exc:
            raise CorruptionError(f"{path}: its notes on tables are damaged") from exc
        return TensorSource(path=path, columns=columns, files=[path], notes=notes)


def write_safetensors(
    path: Path, tables: list[ExportTable], *, tensors: Sequence[ExportTensor] = (), on_rows: Callable[[int], None]
) -> None:
    """Write tables and dense tensors to a new file `path`; call `on_rows` with the number of rows just read.

    Raises:
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
        ConfigError: A table has virtual ids, or two tensors would have the same name.
    """
    check_dense(tables, "safetensors")
    check_names(tables, tensors, "safetensors", _METADATA)
    header, offsets, size_bytes = _header_of(tables, tensors)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(1, "headrace-export") as pool, ThreadPoolExecutor(1, "headrace-sync") as syncing:
            _write_all(fd, 0, memoryview(header))
            # Missing rows are holes, which read as zeros.
            os.ftruncate(fd, len(header) + size_bytes)
            writes = _Writes(fd, pool, syncing)
            for table in tables:
                places = offsets[table.spec.fqn]
                if IDENTITIES in places:
                    _put_no_identities(writes, len(header) + places[IDENTITIES], table.num_rows)
                for rows in table.rows(on_rows=on_rows):
                    for first, columns in dense_pieces(rows):
                        for field, column in columns.items():
                            at = (first - table.first_row) * column.shape[1] * column.itemsize
                            writes.put(len(header) + places[field] + at, column)
            for tensor in tensors:
                for field, values in tensor.columns.items():
                    writes.put(len(header) + offsets[tensor.spec.fqn][field], values)
            writes.wait()
    finally:
        os.close(fd)


def _put_no_identities(writes: _Writes, offset: int, num_rows: int) -> None:
    """Write -1 for all rows, because a hole would mean identity 0; rows that have one are written afterwards."""
    for first in range(0, num_rows, _ROWS_PER_WRITE):
        blank = blank_column(IDENTITIES, min(_ROWS_PER_WRITE, num_rows - first), 1, np.int64)
        writes.put(offset + first * blank.itemsize, blank)


def _header_of(
    tables: list[ExportTable], tensors: Sequence[ExportTensor]
) -> tuple[bytes, dict[str, dict[str, int]], int]:
    """Return (header with its length, offset of each field of each table in the data, size of the data in bytes).

    The fields of a dense tensor are there under its name in the snapshot.
    """
    entries: dict[str, Any] = {}
    offsets: dict[str, dict[str, int]] = {}
    end = 0

    def place(fqn: str, field: str, name: str, dtype: DType, shape: Sequence[int]) -> None:
        nonlocal end
        size_bytes = dtype.size_bytes * int(np.prod(shape, dtype=object))
        offsets.setdefault(fqn, {})[field] = end
        span = [end, end + size_bytes]
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": [*shape], "data_offsets": span}
        end += size_bytes

    notes: dict[str, Any] = {"version": 1, "tables": []}
    for table in tables:
        names = names_of(table)
        for field, (dtype, shape) in columns_of(table).items():
            place(table.spec.fqn, field, names[field], dtype, shape)
        identities = names.pop("identities", None)
        notes["tables"].append(table.note(names, identities))
    for tensor in tensors:
        names = names_of_tensor(tensor)
        for field, dtype in tensor.dtypes.items():
            place(tensor.spec.fqn, field, names[field], dtype, tensor.columns[field].shape)
        notes.setdefault("dense", []).append(tensor.note(names))
    content = {_METADATA: {_NOTES_KEY: json.dumps(notes)}, **entries}
    packed = json.dumps(content, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % _ALIGNMENT)
    return len(packed).to_bytes(8, "little") + packed, offsets, end


class _Writes:
    """Writes to a file in a second thread, with a bounded number of writes waiting, and syncs it in a third."""

    def __init__(self, fd: int, pool: ThreadPoolExecutor, syncing: ThreadPoolExecutor) -> None:
        self._fd, self._pool, self._syncing = fd, pool, syncing
        self._synced: Future[None] | None = None
        self._waiting: list[Future[None]] = []
        self._unsynced = 0

    def put(self, offset: int, column: Any) -> None:
        if len(self._waiting) >= _MAX_WRITES:
            self._waiting.pop(0).result()
        data = np.ascontiguousarray(column).view(np.uint8).reshape(-1).data
        self._waiting.append(self._pool.submit(self._write, offset, data))

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0).result()
        if self._synced is not None:
            self._synced.result()

    def _write(self, offset: int, data: memoryview) -> None:
        _write_all(self._fd, offset, data)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES:
            if self._synced is not None:
                self._synced.result()  # at most one sync at a time; raises its error
            self._synced = self._syncing.submit(os.fdatasync, self._fd)
            self._unsynced = 0


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        offset, data = offset + written, data[written:]
