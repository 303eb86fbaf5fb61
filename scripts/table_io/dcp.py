"""Read and write torch.distributed.checkpoint directories.

A checkpoint's `.metadata` is a pickle, which could run code or change a class for the whole process. So it is read
with an unpickler that knows only the names in such metadata, and creates stand-in objects for them. A written
directory has one file with parts of some megabytes of each tensor, as `torch.save` writes them; a trainer loads it
however it shards its tables. Beside it lie notes on the tables, for a backfill; torch does not read them.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES
from headrace.schemas.errors import ConfigError, CorruptionError, RequestError
from headrace.schemas.tables import DType
from headrace.scripts.table_io.columns import (
    Column,
    Piece,
    RawColumn,
    RefusedColumn,
    TensorSource,
    is_scalar,
    map_file_errors,
)
from headrace.scripts.table_io.dense import FIRST_STATE, IDENTITIES, check_dense, columns_of, dense_windows
from headrace.scripts.table_io.exported import ExportTable, ExportTensor
from headrace.scripts.table_io.pickles import check_pickle
from headrace.scripts.table_io.torch_reader import load_places, piece_of, scalar_of

__all__ = [
    "DENSE_STATE_KEY",
    "METADATA_NAME",
    "STATE_KEY",
    "WEIGHTS_KEY",
    "open_checkpoint",
    "read_metadata",
    "write_checkpoint",
]

METADATA_NAME = ".metadata"
WEIGHTS_KEY = "{fqn}"
STATE_KEY = "state.{fqn}.{table}.{state}"
"""The names in the `state_dict()` of TorchRec's fused optimizers."""
DENSE_STATE_KEY = "state.{fqn}.{state}"
"""The names of dense parameters' states, as `get_optimizer_state_dict` flattens them."""

_DATA_NAME = "__0_0.distcp"
_NOTES_NAME = "headrace.json"
_PART_BYTES = 16 << 20

_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_STAND_INS = frozenset(
    {
        *((_MODULE, name) for name in _METADATA_NAMES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
_OTHER_DTYPES = ("bool", "int8", "int16", "complex64", "complex128", "float8_e4m3fn")
# The whole process shares these; a pickle that sets an attribute on one is an error.
_IMMUTABLE: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES},
    **{("torch", name): getattr(torch, name) for name in _OTHER_DTYPES},
}


class _StandIn:
    """An object of the metadata, with the attributes that the pickle gives it.

    The opcode BUILD on the class itself calls `__setstate__` without `self`, an error: no pickle can change a class.
    """

    kind = ""
    state: Any = None

    def __new__(cls, *_: Any) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if type(state) is dict else {"state": state})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a {self.kind} without {name}")


class _MetadataUnpickler(pickle.Unpickler):
    """Creates stand-ins for the objects of a checkpoint's metadata, with new classes for each load."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._classes = {key: type(key[1], (_StandIn,), {"kind": key[1]}) for key in _STAND_INS}

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # their module in Python 3.13 only
            module = "pathlib"
        found = self._classes.get((module, name)) or _IMMUTABLE.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return found


def read_metadata(path: Path) -> Any:
    """Return a checkpoint's `.metadata` in objects with the attributes of torch's `Metadata`, unchecked.

    Raises:
        RequestError: It refers to something that no metadata contains; nothing of it was run.
        CorruptionError: It is damaged.
        ConfigError: It does not exist.
    """
    file = path / METADATA_NAME
    try:
        with map_file_errors(file):
            data = file.read_bytes()
    except RequestError as exc:
        raise ConfigError(f"{path}: no {METADATA_NAME} is there: no checkpoint, or not all of it") from exc
    try:
        check_pickle(data)
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as exc:
        if "it refers to" in str(exc):
            raise RequestError(f"{file}: {exc}, which no checkpoint's metadata does; nothing of it was run") from exc
        raise CorruptionError(f"{file}: damaged: {exc}") from exc
    except Exception as exc:  # unpickling damaged bytes raises errors of any kind
        raise CorruptionError(f"{file}: damaged: {type(exc).__name__}: {exc}") from exc
    if getattr(metadata, "kind", None) != "Metadata":
        raise CorruptionError(f"{file}: holds a {type(metadata).__name__}, not a checkpoint's metadata")
    return metadata


def open_checkpoint(path: Path) -> TensorSource:
    """Return the tensors of a checkpoint.

    Raises:
        ConfigError: There is no metadata.
        RequestError: It has more than plain data, or an unsupported format.
        CorruptionError: A part is missing, truncated or damaged.
        StorageError: A file cannot be read.
    """
    metadata = read_metadata(path)
    columns: dict[str, Column] = {}
    scalars: dict[str, tuple[DType, bytes]] = {}
    paths = {path / METADATA_NAME}
    try:
        places = {_place_of(key): info for key, info in metadata.storage_data.items()}
        for name, tensor in metadata.state_dict_metadata.items():
            if type(name) is not str:
                continue
            if is_scalar(name):
                scalars |= _scalars_of(path, places, name)
            if tensor.kind != "TensorStorageMetadata":
                continue
            saved, shape = tensor.properties.state[0], _counts(tensor.size)
            dtype = DTYPES.get(saved) if type(saved) is torch.dtype else None
            if dtype is None or len(shape) not in (1, 2):
                continue
            try:
                pieces = _pieces_of(path, places, name, tensor)
            except RequestError as exc:
                columns[name] = RefusedColumn(dtype, shape, exc)
                continue
            paths |= {piece.path for piece in pieces}
            columns[name] = RawColumn(name, dtype, shape, pieces)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:  # a field is not as torch's
        raise CorruptionError(f"{path}: {METADATA_NAME} is damaged: {exc}") from exc
    return TensorSource(path=path, columns=columns, files=sorted(paths), notes=_read_notes(path), scalars=scalars)


def _read_notes(path: Path) -> dict[str, Any] | None:
    """Return an export's notes; None without, or if another checkpoint was saved over the export since."""
    file = path / _NOTES_NAME
    if not file.exists():
        return None
    with map_file_errors(file):
        text, metadata = file.read_bytes(), (path / METADATA_NAME).read_bytes()
    try:
        notes = json.loads(text)
        return notes if notes["metadata"] == _digest_of(metadata) else None
    except (ValueError, RecursionError, LookupError, TypeError) as exc:
        raise CorruptionError(f"{file}: the notes on tables are damaged; without the file --table names them") from exc


def _digest_of(metadata: bytes) -> str:
    return hashlib.blake2b(metadata, digest_size=16).hexdigest()


def _pieces_of(path: Path, places: Mapping[tuple[Any, Any], Any], name: str, tensor: Any) -> list[Piece]:
    pieces = []
    for chunk in tensor.chunks:
        offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
        if any(first + size > end for first, size, end in zip(offsets, sizes, tensor.size, strict=True)):
            raise CorruptionError(f"{path}: {METADATA_NAME} says that {name!r} has a part beyond its end")
        file, part, base = _load_part(path, places, name, offsets)
        dtype = tensor.properties.state[0]
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
            raise CorruptionError(f"{file}: the part of {name!r} at byte {base} is not what is said of it")
        row, column = (*offsets, 0)[:2]
        pieces.append(piece_of(file, name, part, row=row, column=column, base=base))
    return pieces


def _scalars_of(path: Path, places: Mapping[tuple[Any, Any], Any], name: str) -> dict[str, tuple[DType, bytes]]:
    """Return a single value by its name: a tensor without dimensions, or a number; nothing if it is none."""
    offsets: tuple[int, ...] | None = () if (name, ()) in places else None
    if (name, offsets) not in places:
        return {}
    file, value, base = _load_part(path, places, name, offsets)
    scalar = scalar_of(file, value, base=base)
    return {} if scalar is None else {name: scalar}


def _load_part(
    path: Path, places: Mapping[tuple[Any, Any], Any], name: str, offsets: tuple[int, ...] | None
) -> tuple[Path, Any, int]:
    """Return a file, what `load_places` returns of a part in it, and the part's first byte."""
    info = places.get((name, offsets))
    if info is None:
        raise CorruptionError(f"{path}: {METADATA_NAME} does not say where a part of {name!r} lies")
    file_name = info.relative_path
    if type(file_name) is not str or Path(file_name).name != file_name:
        raise RequestError(f"{path}: {METADATA_NAME} names a file {file_name!r}, which is not in this directory")
    if getattr(info, "transform_descriptors", None):
        raise RequestError(f"{path}: {name!r} is compressed; save the checkpoint without")
    file = path / file_name
    if not file.is_file():
        raise CorruptionError(f"{path}: {file_name} is missing, with a part of {name!r}")
    with map_file_errors(file), open(file, "rb") as opened:
        base, length = _counts((info.offset, info.length))
        return file, load_places(file, cast("IO[bytes]", io.BufferedReader(_FilePart(opened, base, length)))), base


def _place_of(key: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return what tells a part of a tensor in the metadata; the key of bytes has no offset."""
    offset = vars(key).get("offset")
    if type(key.fqn) is not str:
        raise TypeError(f"a {type(key.fqn).__name__} where a name was to be")
    return key.fqn, None if offset is None else _counts(offset)


def _counts(found: Any) -> tuple[int, ...]:
    """Return `found` if it is a tuple of valid counts of bytes or elements.

    What else it may be is not shown: a tuple of tuples has any length.
    """
    if type(found) is not tuple or not all(type(count) is int and 0 <= count < 2**63 for count in found):
        raise TypeError(f"a {type(found).__name__} where counts were to be")
    return found


class _FilePart(io.RawIOBase):
    """A range of a file, as a file."""

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


def write_checkpoint(
    path: Path,
    tables: list[ExportTable],
    *,
    tensors: Sequence[ExportTensor] = (),
    on_rows: Callable[[int], None],
    weights_key: str = WEIGHTS_KEY,
    state_key: str | None = None,
) -> None:
    """Write a new directory. The snapshot is read once per column.

    Args:
        path: REQUIRES: does not exist.
        tables: Ordered by name.
        tensors: Dense tensors; what an optimizer keeps once for one is a state without dimensions.
        on_rows: Called with the number of rows just read.
        weights_key: Name of a table's weights, with `{fqn}` and `{table}`, the second last part of the fqn.
        state_key: Name of a state, with `{state}`, too; None for `STATE_KEY`, in which the first is `FIRST_STATE`, and
            `DENSE_STATE_KEY` of dense tensors.

    Raises:
        ConfigError: A table has virtual ids, or two tensors would have the same name.
        OSError: The disk failed.
        HeadraceError: The snapshot cannot be read.
    """
    check_dense(tables, "dcp")
    path.mkdir()
    metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})

    def claim(fqn: str, field: str, template: str) -> str:
        key = _key_of(fqn, field, weights_key, template)
        if key in metadata.state_dict_metadata:
            raise ConfigError(f"two tensors would have the name {key!r}")
        metadata.planner_data[key] = (key,)
        return key

    notes: dict[str, Any] = {"version": 1, "tables": [], "dense": []}
    with open(path / _DATA_NAME, "xb") as file:
        for table in tables:
            called = {field: field for field in columns_of(table)}
            if state_key is None and table.spec.states and (first := f"state:{table.spec.states[0].name}") in called:
                called[first] = f"state:{FIRST_STATE}"
            names = {field: claim(table.spec.fqn, name, state_key or STATE_KEY) for field, name in called.items()}
            for number, (field, key) in enumerate(names.items()):
                _write_table(file, metadata, key, table, field, None if number else on_rows)
            identities = names.pop(IDENTITIES, None)
            notes["tables"].append(table.note(names, identities))
        for tensor in tensors:
            names = {}
            dtypes = tensor.dtypes | {f"state:{scalar.name}": scalar.dtype for scalar in tensor.scalars}
            scalars = {f"state:{s.name}": np.frombuffer(s.data, s.dtype.numpy).reshape(()) for s in tensor.scalars}
            for field, values in (tensor.columns | scalars).items():
                key = names[field] = claim(tensor.name, field, state_key or DENSE_STATE_KEY)
                dtype = TORCH_DTYPES[dtypes[field]]
                part = torch.from_numpy(np.array(values)).view(dtype)
                _write_tensor(file, metadata, key, dtype, part.shape, [((0,) * part.dim(), part)])
            notes["dense"].append(tensor.note(names))
    # Protocol 4 writes the same bytes in every supported version of Python.
    packed = pickle.dumps(metadata, protocol=4)
    notes["metadata"] = _digest_of(packed)
    (path / _NOTES_NAME).write_text(json.dumps(notes))
    (path / METADATA_NAME).write_bytes(packed)


def _write_table(
    file: io.BufferedWriter,
    metadata: Metadata,
    key: str,
    table: ExportTable,
    field: str,
    on_rows: Callable[[int], None] | None,
) -> None:
    """Write one column of a table, some megabytes at a time."""
    dtype, shape = columns_of(table)[field]
    row_bytes = dtype.size_bytes * (shape[1] if len(shape) == 2 else 1)

    def parts() -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        for first, window in dense_windows(table, field, max(1, _PART_BYTES // row_bytes), on_rows=on_rows):
            values = torch.from_numpy(window if len(shape) == 2 else window[:, 0])
            part = values.view(TORCH_DTYPES[dtype]) if dtype is DType.BFLOAT16 else values
            yield (first, 0) if len(shape) == 2 else (first,), part

    _write_tensor(file, metadata, key, TORCH_DTYPES[dtype], shape, parts())


def _write_tensor(
    file: io.BufferedWriter,
    metadata: Metadata,
    key: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    parts: Iterable[tuple[Sequence[int], torch.Tensor]],
) -> None:
    """Write a tensor in parts, each with its place in it."""
    chunks = []
    for place, part in parts:
        offsets = torch.Size(place)
        start = file.tell()
        buffer = io.BytesIO()
        torch.save(part, buffer)
        file.write(buffer.getbuffer())
        # A new object each time: the pickle would show that two of them are the same one.
        chunks.append(ChunkStorageMetadata(offsets=torch.Size([*offsets]), sizes=torch.Size([*part.shape])))
        info = _StorageInfo(relative_path=_DATA_NAME, offset=start, length=file.tell() - start)
        metadata.storage_data[MetadataIndex(key, offsets, len(chunks) - 1)] = info
    metadata.state_dict_metadata[key] = TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=torch.Size(shape), chunks=chunks
    )


def _key_of(fqn: str, field: str, weights_key: str, state_key: str) -> str:
    parts = fqn.split(".")
    state = f"{IDENTITIES}:" if field == IDENTITIES else field.removeprefix("state:")  # no state has this name
    template = weights_key if field == "weights" else state_key
    try:
        return template.format(fqn=fqn, table=parts[-2] if len(parts) > 1 else fqn, state=state)
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(f"{template!r}: only {{fqn}}, {{table}} and {{state}} can be put in") from exc
