"""Arrays of an `.npz`. Arrays of objects are pickles, which can run code: they are refused."""

from __future__ import annotations

import json
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.tables import DType
from headrace.scripts.table_sources.columns import Column, NpyColumn, map_file_errors
from headrace.scripts.table_sources.tensors import TensorSource

__all__ = ["NOTES_MEMBER", "open_npz"]

NOTES_MEMBER = "headrace"
_MAX_NOTES_BYTES = 64 << 20
_DTYPES = {dtype.numpy: dtype for dtype in DType if dtype is not DType.BFLOAT16}


def open_npz(path: Path) -> TensorSource:
    """Return the arrays of a file.

    Raises:
        RequestError: An array holds objects.
        CorruptionError: The file is cut, damaged, or none.
        StorageError: It cannot be read.
    """
    columns: dict[str, Column] = {}
    notes: dict[str, Any] | None = None
    with map_file_errors(path), zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist()]
        if len(set(names)) != len(names):
            raise CorruptionError(f"{path}: two members have one name")
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            name = info.filename.removesuffix(".npy")
            stored, shape, is_fortran, header_bytes = _header_of(path, archive, info)
            if stored.hasobject:
                raise RequestError(
                    f"{path}: {name!r} is an array of objects, which could run code; save it as an array of numbers"
                )
            if header_bytes + stored.itemsize * int(np.prod(shape, dtype=object)) != info.file_size:
                raise CorruptionError(f"{path}: {name!r} is not as long as its header says")
            if name == NOTES_MEMBER and stored == np.uint8 and info.file_size <= _MAX_NOTES_BYTES:
                notes = _read_notes(path, archive, info)
                continue
            dtype = _DTYPES.get(stored.newbyteorder("<"), DType.BFLOAT16 if stored.str[1:] == "u2" else None)
            if dtype is None or len(shape) not in (1, 2):
                continue
            if is_fortran and len(shape) == 2 and 1 not in shape:
                raise RequestError(f"{path}: {name!r} lies column by column; save it as numpy.ascontiguousarray(…)")
            columns[name] = NpyColumn(path, info.filename, dtype, stored, shape)
    return TensorSource(path=path, columns=columns, files=[path], notes=notes)


def _header_of(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    try:
        file = archive.open(info)
    except RuntimeError as exc:  # NotImplementedError is one
        raise RequestError(f"{path}: {info.filename!r} is encrypted, or of a compression that is not read") from exc
    with file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
        # A header is Python's, and is parsed as such.
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as exc:
            raise CorruptionError(f"{path}: {info.filename!r} is no array: {exc}") from exc
        return dtype, shape, is_fortran, file.tell()


def _read_notes(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    with archive.open(info) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    try:
        notes: dict[str, Any] = json.loads(array.tobytes())
    except (ValueError, RecursionError) as exc:
        raise CorruptionError(f"{path}: its notes on tables are damaged") from exc
    return notes
