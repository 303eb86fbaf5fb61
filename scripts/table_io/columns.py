"""Read columns of tables from files by ranges of rows, so that memory does not grow with the table."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import CorruptionError, RequestError, StorageError
from headrace.schemas.tables import DType

__all__ = [
    "Column",
    "Piece",
    "RawColumn",
    "RefusedColumn",
    "TensorSource",
    "is_scalar",
    "map_file_errors",
    "read_element",
]

_Array = npt.NDArray[Any]
# Damaged bytes make parsers and decompressors raise these: names that are not UTF-8, numbers beyond any file.
_DAMAGE = (zipfile.BadZipFile, EOFError, OSError, OverflowError, RuntimeError, ValueError, struct.error, zlib.error)
# Of the optimizers that are streamed.
_SCALARS = ("step", "iter", "mu_product")
# Decompressors whose modules may be missing go by name; Python has Zstandard from 3.14 on.
_DAMAGE_NAMES = frozenset({"LZMAError", "ZstdError"})


class Column(Protocol):
    """A tensor of one or two dimensions; the first counts rows."""

    dtype: DType
    shape: tuple[int, ...]
    num_column_shards: int
    """Number of parts, side by side, that it was saved in."""

    def read(self, first: int, end: int) -> _Array:
        """Return rows `first` to `end`, `dtype.numpy`[end - first, width], contiguous; width 1 for one dimension.

        Raises:
            CorruptionError: The file is truncated or damaged.
            StorageError: It cannot be read.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of a column, stored row after row in a file."""

    row: int  # the first one
    column: int  # the first one
    num_rows: int
    width: int  # number of columns
    path: Path
    offset: int  # of the first element in the file, bytes
    row_bytes: int  # distance between two rows, bytes


class RawColumn:
    """A column stored uncompressed, in one piece or many."""

    def __init__(self, name: str, dtype: DType, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Check that the pieces, in any order, cover the tensor of this shape; `name` is for messages.

        Raises:
            CorruptionError: A part is missing, overlaps another, or lies beyond its file or the tensor.
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
            is_beyond = piece.num_rows and end > lengths[piece.path]
            if piece.offset < 0 or piece.row_bytes < piece.width * size or is_beyond:
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


def is_scalar(name: str) -> bool:
    """Return whether a name is that of a value that an optimizer has once per table, such as Adam's `step`."""
    return name.rpartition(".")[2] in _SCALARS


def read_element(path: Path, offset: int, dtype: DType) -> bytes:
    """Return one element that lies at an offset in a file.

    Raises:
        CorruptionError: It lies beyond the file's end.
        StorageError: The file cannot be read.
    """
    with map_file_errors(path), open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), dtype.size_bytes, offset)
    if len(data) != dtype.size_bytes:
        raise CorruptionError(f"{path}: ends before a value that lies at byte {offset}; it is cut")
    return data


class RefusedColumn:
    """A column that cannot be read; reading it raises `refusal`, so only those who want it fail."""

    num_column_shards = 1

    def __init__(self, dtype: DType, shape: tuple[int, ...], refusal: RequestError) -> None:
        """Keep the reason in `refusal`."""
        self.dtype, self.shape, self.refusal = dtype, shape, refusal

    def read(self, first: int, end: int) -> _Array:
        """See `Column`."""
        raise self.refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Named tensors of a file or a directory, whatever its format."""

    path: Path  # the file or directory
    columns: Mapping[str, Column]  # tensors by name, of one or two dimensions and a type that a table can have
    files: list[Path]  # the files that it was opened from
    scalars: Mapping[str, tuple[DType, bytes]] = field(default_factory=dict)  # those of `is_scalar`, by name
    notes: dict[str, Any] | None = None  # notes of `headrace export` on its tables; None in other files

    @property
    def noted_dense(self) -> tuple[str, ...]:
        """Names of the dense tensors in the notes.

        Raises:
            CorruptionError: The notes are damaged.
        """
        try:
            return tuple(str(note["weights"]) for note in (self.notes or {}).get("dense", ()))
        except (AttributeError, KeyError, TypeError) as exc:
            raise CorruptionError(f"{self.path}: its notes on dense tensors are damaged: {exc!r}") from exc


class map_file_errors:
    """Turn errors of reading a file into ours, with its name."""

    def __init__(self, path: Path) -> None:
        """Name `path` in messages."""
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        if isinstance(exc, FileNotFoundError):
            raise RequestError(f"{exc.filename or self._path}: there is no such file") from exc
        # The OSError of a decompressor, such as bz2's about foreign bytes, has no errno. EINVAL means an impossible
        # offset, such as one before the beginning.
        if isinstance(exc, OSError) and exc.errno not in (None, errno.EINVAL):
            raise StorageError(f"{self._path}: {exc.strerror or exc}") from exc
        if isinstance(exc, _DAMAGE) or type(exc).__name__ in _DAMAGE_NAMES:
            text = " ".join(str(exc).split())  # a parser may show what it has found
            raise CorruptionError(f"{self._path}: damaged: {text[:200]}") from exc
