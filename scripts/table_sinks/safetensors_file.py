"""Tables as one safetensors file: a tensor for the weights and one for each state.

The library writes tensors that are in memory. Here a table's rows come a few megabytes at a time, each column at a
place of its own: the header is made first, then every piece is written where it belongs, by a thread of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.table_sinks.dense import (
    IDENTITIES,
    blank_column,
    check_dense,
    check_names,
    columns_of,
    dense_pieces,
    names_of,
)
from headrace.scripts.table_sinks.export_table import ExportTable
from headrace.scripts.table_sources.safetensors_file import DTYPE_NAMES, NOTES_KEY

__all__ = ["write_safetensors"]

_METADATA = "__metadata__"  # the format's own
_ALIGNMENT = 8
_MAX_WRITES = 16
_ROWS_PER_WRITE = 1 << 17
# Synced after so much, while more is written, so that the disk is not idle until the end.
_SYNC_BYTES = 64 << 20


def write_safetensors(path: Path, tables: list[ExportTable], *, on_rows: Callable[[int], None]) -> None:
    """Write a file.

    Args:
        path: Not there yet.
        tables: In the order of their names.
        on_rows: Called with the number of rows that were gone through.

    Raises:
        ConfigError: A table has virtual ids, or two tensors would have one name.
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
    """
    check_dense(tables, "safetensors")
    check_names(tables, "safetensors", _METADATA)
    header, offsets, size_bytes = _header_of(tables)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(1, "headrace-export") as pool, ThreadPoolExecutor(1, "headrace-sync") as syncing:
            _write_all(fd, 0, memoryview(header))
            # Rows that are not there are holes, which read as zeros.
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
            writes.wait()
    finally:
        os.close(fd)


def _put_no_identities(writes: _Writes, offset: int, num_rows: int) -> None:
    """Write that no row has an identity: a hole would say that it has 0. Those that have one are written after it."""
    for first in range(0, num_rows, _ROWS_PER_WRITE):
        blank = blank_column(IDENTITIES, min(_ROWS_PER_WRITE, num_rows - first), 1, np.int64)
        writes.put(offset + first * blank.itemsize, blank)


def _header_of(tables: list[ExportTable]) -> tuple[bytes, dict[str, dict[str, int]], int]:
    """Return (header with its length, where in the data each field of each table begins, bytes of the data)."""
    tensors: dict[str, Any] = {}
    offsets: dict[str, dict[str, int]] = {}
    notes, end = [], 0
    for table in tables:
        names = names_of(table)
        places = offsets[table.spec.fqn] = {}
        for field, (dtype, shape) in columns_of(table).items():
            size_bytes = dtype.size_bytes * int(np.prod(shape, dtype=object))
            places[field] = end
            tensors[names[field]] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": shape,
                "data_offsets": [end, end + size_bytes],
            }
            end += size_bytes
        identities = names.pop("identities", None)
        notes.append(table.note(names, identities))
    content = {_METADATA: {NOTES_KEY: json.dumps({"version": 1, "tables": notes})}, **tensors}
    packed = json.dumps(content, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % _ALIGNMENT)
    return len(packed).to_bytes(8, "little") + packed, offsets, end


class _Writes:
    """Writes to a file by another thread, a few of them waiting at most, and has it synced by a third."""

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
                self._synced.result()  # no more than one on its way, and its error is not lost
            self._synced = self._syncing.submit(os.fdatasync, self._fd)
            self._unsynced = 0


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        offset, data = offset + written, data[written:]
