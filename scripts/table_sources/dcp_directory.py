"""Tensors of a directory of torch.distributed.checkpoint, read part by part.

Its `.metadata` is a pickle, which could run code. It is read with an unpickler that knows the classes of such metadata
and nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from headrace.kernels.torch_dtypes import DTYPES
from headrace.schemas.errors import ConfigError, CorruptionError, RequestError
from headrace.scripts.table_sources.columns import Column, Piece, RawColumn, RefusedColumn, map_file_errors
from headrace.scripts.table_sources.tensors import TensorSource
from headrace.scripts.table_sources.torch_file import load_places, piece_of

__all__ = ["METADATA_NAME", "open_checkpoint", "read_metadata"]

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *(
            (_MODULE, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES),
        *(("torch", name) for name in ("bool", "int8", "int16", "complex64", "complex128", "float8_e4m3fn")),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of a checkpoint's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has them, and no other
            module = "pathlib"
        # A name with a dot would reach into a class that is allowed.
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Return what a checkpoint's `.metadata` says.

    Raises:
        RequestError: It refers to something that metadata never does; nothing of it was run.
        CorruptionError: It is damaged.
        ConfigError: It is not there.
    """
    file = path / METADATA_NAME
    try:
        with map_file_errors(file):
            data = file.read_bytes()
    except RequestError as exc:
        raise ConfigError(f"{path}: no {METADATA_NAME} is there: no checkpoint, or not all of it") from exc
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as exc:
        if "it refers to" in str(exc):
            raise RequestError(f"{file}: {exc}, which no checkpoint's metadata does; nothing of it was run") from exc
        raise CorruptionError(f"{file}: damaged: {exc}") from exc
    except Exception as exc:  # unpickling damaged bytes raises errors of any kind
        raise CorruptionError(f"{file}: damaged: {type(exc).__name__}: {exc}") from exc
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "storage_data", None), dict):
        raise CorruptionError(f"{file}: holds a {type(metadata).__name__}, not a checkpoint's metadata")
    return metadata


def open_checkpoint(path: Path) -> TensorSource:
    """Return the tensors of a checkpoint.

    Raises:
        ConfigError: There is no metadata.
        RequestError: It holds something else than plain data, or is of a format that is not read.
        CorruptionError: A part is missing, cut or damaged.
        StorageError: A file cannot be read.
    """
    metadata = read_metadata(path)
    columns: dict[str, Column] = {}
    paths = {path / METADATA_NAME}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not isinstance(name, str):
            continue
        dtype, shape = DTYPES.get(tensor.properties.dtype), tuple(tensor.size)
        if dtype is None or len(shape) not in (1, 2):
            continue
        try:
            pieces = _pieces_of(path, metadata, name, tensor)
        except RequestError as exc:
            columns[name] = RefusedColumn(dtype, shape, exc)
            continue
        paths |= {piece.path for piece in pieces}
        columns[name] = RawColumn(name, dtype, shape, pieces)
    return TensorSource(path=path, columns=columns, files=sorted(paths))


def _pieces_of(path: Path, metadata: Metadata, name: str, tensor: TensorStorageMetadata) -> list[Piece]:
    pieces = []
    for number, chunk in enumerate(tensor.chunks):
        info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets, number)) or next(
            (i for key, i in metadata.storage_data.items() if key.fqn == name and key.offset == chunk.offsets), None
        )
        if info is None:
            raise CorruptionError(f"{path}: {METADATA_NAME} does not say where a part of {name!r} lies")
        file_name = info.relative_path
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise RequestError(f"{path}: {METADATA_NAME} names a file {file_name!r}, which is not in this directory")
        if getattr(info, "transform_descriptors", None):
            raise RequestError(f"{path}: {name!r} is compressed; save the checkpoint without")
        file = path / file_name
        if not file.is_file():
            raise CorruptionError(f"{path}: {file_name} is missing, with a part of {name!r}")
        with map_file_errors(file), open(file, "rb") as opened:
            view = cast("IO[bytes]", io.BufferedReader(_FilePart(opened, int(info.offset), int(info.length))))
            part = load_places(file, view)
            if (
                not hasattr(part, "shape")
                or list(part.shape) != list(chunk.sizes)
                or part.dtype != tensor.properties.dtype
            ):
                raise CorruptionError(f"{file}: the part of {name!r} at byte {info.offset} is not what is said of it")
            row, column = (*chunk.offsets, 0)[:2]
            pieces.append(piece_of(file, name, part, row=row, column=column, base=int(info.offset)))
    return pieces


class _FilePart(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset = file, offset
        size = file.seek(0, io.SEEK_END)
        self._length = max(min(length, size - offset), 0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(min(len(view), self._length - self._at), 0)
        self._file.seek(self._offset + self._at)
        data = self._file.read(wanted)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
