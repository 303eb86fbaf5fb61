"""Columns of tables as they lie in files: read by ranges of rows, so that memory does not grow with the table."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import CorruptionError, RequestError, StorageError
from headrace.schemas.tables import DType

__all__ = ["Column", "NpyColumn", "Piece", "RawColumn", "RefusedColumn", "map_file_errors"]

_Array = npt.NDArray[Any]
_SKIP_BYTES = 4 << 20
# What parsers and decompressors raise of bytes that are damaged: names that are no UTF-8, numbers beyond any file.
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)
# Of decompressors by name, since their modules need not be there: Python has Zstandard's from 3.14 on.
_DAMAGE_NAMES = frozenset({"LZMAError", "ZstdError"})


class Column(Protocol):
    """A tensor of one or two dimensions, the first of which counts rows."""

    dtype: DType
    shape: tuple[int, ...]
    num_column_shards: int
    """Parts side by side that it was saved in."""

    def read(self, first: int, end: int) -> _Array:
        """Return rows `first` to `end`, `dtype.numpy`[end - first, width], contiguous; width 1 of one dimension.

        Raises:
            CorruptionError: The file is cut or damaged.
            StorageError: It cannot be read.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of a column, row after row in a file.

    Attributes:
        row: First row.
        column: First column.
        num_rows: Rows.
        width: Columns.
        path: File.
        offset: Of its first element, bytes.
        row_bytes: From one row to the next.
    """

    row: int
    column: int
    num_rows: int
    width: int
    path: Path
    offset: int
    row_bytes: int


class RawColumn:
    """A column whose elements lie in files as they are, in one piece or many."""

    def __init__(self, name: str, dtype: DType, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Check that the pieces are all of it.

        Args:
            name: For messages.
            dtype: Of the elements.
            shape: Of the whole.
            pieces: In any order.

        Raises:
            CorruptionError: A part is missing, is there twice, or lies beyond its file or the whole.
        """
        self.dtype, self.shape, self._name = dtype, shape, name
        self._pieces = sorted(pieces, key=lambda piece: (piece.row, piece.column))
        self._width = shape[1] if len(shape) == 2 else 1
        self.num_column_shards = len({piece.column for piece in pieces})
        self._check()

    def _check(self) -> None:
        size = self.dtype.size_bytes
        lengths = {piece.path: piece.path.stat().st_size for piece in self._pieces}
        for piece in self._pieces:
            end = piece.offset + (piece.num_rows - 1) * piece.row_bytes + piece.width * size
            if (
                piece.offset < 0
                or piece.row_bytes < piece.width * size
                or (piece.num_rows and end > lengths[piece.path])
            ):
                raise CorruptionError(f"{piece.path}: tensor {self._name!r} ends beyond the file; it is cut")
        boxes = np.array([[p.row, p.row + p.num_rows, p.column, p.column + p.width] for p in self._pieces], np.int64)
        boxes = boxes.reshape(-1, 4)
        area = int(((boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])).sum())
        is_inside = np.all(boxes[:, [0, 2]] >= 0) and np.all(boxes[:, 1] <= self.shape[0])
        if not is_inside or np.any(boxes[:, 3] > self._width) or area != self.shape[0] * self._width:
            raise CorruptionError(f"tensor {self._name!r}: its parts do not make up its shape {list(self.shape)}")
        for number, (top, bottom, left, right) in enumerate(boxes.tolist()):
            rest = boxes[number + 1 :]
            overlaps = (rest[:, 0] < bottom) & (rest[:, 1] > top) & (rest[:, 2] < right) & (rest[:, 3] > left)
            if overlaps.any():
                raise CorruptionError(f"tensor {self._name!r}: two of its parts overlap")

    def read(self, first: int, end: int) -> _Array:
        """See `Column`."""
        pieces = [piece for piece in self._pieces if piece.row < end and piece.row + piece.num_rows > first]
        if len(pieces) == 1 and pieces[0].width == self._width:
            return self._read_piece(pieces[0], first, end)
        out = np.zeros((end - first, self._width), self.dtype.numpy)
        for piece in pieces:
            top, bottom = max(first, piece.row), min(end, piece.row + piece.num_rows)
            part = self._read_piece(piece, top, bottom)
            out[top - first : bottom - first, piece.column : piece.column + piece.width] = part
        return out

    def _read_piece(self, piece: Piece, first: int, end: int) -> _Array:
        size = self.dtype.size_bytes
        wanted = max((end - first - 1) * piece.row_bytes + piece.width * size, 0) if end > first else 0
        with map_file_errors(piece.path), open(piece.path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), wanted, piece.offset + (first - piece.row) * piece.row_bytes)
        if len(data) != wanted:
            raise CorruptionError(f"{piece.path}: tensor {self._name!r} ends beyond the file; it is cut")
        return np.ndarray((end - first, piece.width), self.dtype.numpy, data, 0, (piece.row_bytes, size)).copy()


class RefusedColumn:
    """A column that cannot be read: an error for who wants it, and nobody else's affair.

    Attributes:
        refusal: Why.
    """

    num_column_shards = 1

    def __init__(self, dtype: DType, shape: tuple[int, ...], refusal: RequestError) -> None:
        """Keep why it cannot be read."""
        self.dtype, self.shape, self.refusal = dtype, shape, refusal

    def read(self, first: int, end: int) -> _Array:
        """See `Column`.

        Raises:
            RequestError: Always.
        """
        raise self.refusal


class NpyColumn:
    """A column in a member of an `.npz`, compressed or not, read from its beginning to its end."""

    num_column_shards = 1

    def __init__(self, path: Path, member: str, dtype: DType, stored: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Read `member` of `path`; `stored` is its element type with the byte order that it has there."""
        self.dtype, self.shape = dtype, shape
        self._path, self._member, self._stored = path, member, stored
        self._width = shape[1] if len(shape) == 2 else 1
        self._row_bytes = self._width * stored.itemsize
        self._archive: zipfile.ZipFile | None = None
        self._file: Any = None
        self._next = 0

    def read(self, first: int, end: int) -> _Array:
        """See `Column`; rows before the last ones that were read cost a pass over what is before them."""
        with map_file_errors(self._path):
            if self._file is None or first < self._next:
                self._open()
            self._skip((first - self._next) * self._row_bytes)
            data = self._file.read((end - first) * self._row_bytes)
            if len(data) != (end - first) * self._row_bytes:
                raise CorruptionError(f"{self._path}: {self._member!r} ends before its last row")
            self._next = end
            if end == self.shape[0]:
                if self._file.read(1):  # at the end of a member its checksum is looked at
                    raise CorruptionError(f"{self._path}: {self._member!r} goes on after its last row")
                self.close()
        return np.frombuffer(data, self._stored).reshape(end - first, self._width).astype(self.dtype.numpy, copy=False)

    def _open(self) -> None:
        self.close()
        self._archive = zipfile.ZipFile(self._path)
        self._file = self._archive.open(self._member)
        version = np.lib.format.read_magic(self._file)
        if version == (1, 0):
            np.lib.format.read_array_header_1_0(self._file)
        else:
            np.lib.format.read_array_header_2_0(self._file)
        self._next = 0

    def _skip(self, size: int) -> None:
        while size:
            data = self._file.read(min(size, _SKIP_BYTES))
            if not data:
                raise CorruptionError(f"{self._path}: {self._member!r} ends before its last row")
            size -= len(data)

    def close(self) -> None:
        """Close the file; reading opens it anew."""
        if self._archive is not None:
            self._file.close()
            self._archive.close()
            self._archive = self._file = None
            self._next = 0

    def __del__(self) -> None:
        with suppress(Exception):  # while the interpreter ends, anything may be gone
            self.close()


class map_file_errors:
    """Turn what reading a file raises into our errors, naming the file."""

    def __init__(self, path: Path) -> None:
        """Name `path`."""
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        if isinstance(exc, FileNotFoundError):
            raise RequestError(f"{exc.filename or self._path}: there is no such file") from exc
        # A decompressor's OSError, as bz2's of bytes that are not its own, has no number of the system's; EINVAL
        # tells of a place that no file has, as one before its beginning.
        if isinstance(exc, OSError) and exc.errno not in (None, errno.EINVAL):
            raise StorageError(f"{self._path}: {exc.strerror or exc}") from exc
        if isinstance(exc, _DAMAGE) or type(exc).__name__ in _DAMAGE_NAMES:
            raise CorruptionError(f"{self._path}: damaged: {exc}") from exc
