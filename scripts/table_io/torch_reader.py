"""Find the tensors in files of `torch.save` without loading them or running code from the file.

`torch.load` with `weights_only=True` refuses anything but plain data. With fake tensors it reads no elements and
reports where in the file they lie.
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from headrace.kernels.dtypes import DTYPES
from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.tables import DType
from headrace.scripts.table_io.columns import (
    Column,
    Piece,
    RawColumn,
    RefusedColumn,
    TensorSource,
    is_scalar,
    map_file_errors,
    read_element,
)
from headrace.scripts.table_io.pickles import check_pickle

__all__ = ["load_places", "open_torch_file", "piece_of", "scalar_of"]

_MAX_DEPTH = 32
_MAX_ORDER_BYTES = 16


def open_torch_file(path: Path) -> TensorSource:
    """Return the tensors and numbers of a `state_dict`; keys of nested dicts and places in lists are joined by dots.

    Raises:
        RequestError: The file has more than plain data, or an unsupported format.
        CorruptionError: It is truncated or damaged.
        StorageError: It cannot be read.
    """
    with map_file_errors(path), open(path, "rb") as file:
        content = load_places(path, file)
        if not isinstance(content, Mapping):
            raise RequestError(f"{path}: holds a {type(content).__name__}, not a dict of tensors")
        columns: dict[str, Column] = {}
        scalars: dict[str, tuple[DType, bytes]] = {}
        # Each entry takes a byte or more, but what holds the same one many times has any number of tensors.
        entries = iter(range(path.stat().st_size))
        for name, tensor in _flatten(path, content, "", 0, entries):
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                if is_scalar(name) and (scalar := scalar_of(path, tensor, base=0)) is not None:
                    scalars[name] = scalar
            elif tensor.dtype in DTYPES and tensor.dim() in (1, 2):
                if name in columns:
                    raise RequestError(f"{path}: two tensors have the name {name!r}, keys and places joined by dots")
                dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
                try:
                    piece = piece_of(path, name, tensor, row=0, column=0, base=0)
                except RequestError as exc:
                    columns[name] = RefusedColumn(dtype, shape, exc)
                else:
                    columns[name] = RawColumn(name, dtype, shape, [piece])
        return TensorSource(path=path, columns=columns, files=[path], scalars=scalars)


def load_places(path: Path, file: IO[bytes]) -> Any:
    """Return a file's content, with fake tensors that know their place in it.

    `file` may be a part of the file at `path` that is a file of its own.

    Raises:
        RequestError: The file has more than plain data, or an unsupported format.
        CorruptionError: It is truncated or damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise RequestError(f"{path}: its tensors are compressed; save it with torch.save")
            _check_members(path, file, members)
            orders = [archive.read(member) for member in members if member.filename.endswith("/byteorder")]
            for member in members:
                if member.filename.endswith("/data.pkl"):
                    check_pickle(archive.read(member))
    except zipfile.BadZipFile as exc:
        raise CorruptionError(
            f"{path}: not a file of torch.save, not all of it, or of its old format: load it where you trust it and "
            "save it again"
        ) from exc
    except (LookupError, ValueError) as exc:
        raise CorruptionError(f"{path}: its pickle is damaged: {exc}") from exc
    if any(order.strip() != b"little" for order in orders):
        raise RequestError(f"{path}: its numbers are big-endian; load it with torch and save it again")
    file.seek(0)
    try:
        with FakeTensorMode(), _CompressedAsEmpty(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch raises many kinds of errors for a bad file
        text = " ".join(str(exc).split())
        if "Weights only load failed" in text or "Unsupported" in text:
            what = text.rpartition("Unsupported ")[2] or text
            raise RequestError(
                f"{path}: holds more than tensors, and nothing in it is run; save a plain state_dict ({what[:160]})"
            ) from exc
        raise CorruptionError(f"{path}: cannot be read: {text[:200]}") from exc


def _check_members(path: Path, file: IO[bytes], members: list[zipfile.ZipInfo]) -> None:
    """Check the lengths of an archive's members before torch, or Python, takes memory for them."""
    size_bytes, names = file.seek(0, io.SEEK_END), {member.filename for member in members}
    is_cut = any(
        member.file_size != member.compress_size or member.header_offset + member.file_size > size_bytes
        for member in members
    )
    is_long = any(member.filename.endswith("/byteorder") and member.file_size > _MAX_ORDER_BYTES for member in members)
    if is_cut or is_long or len(names) < len(members):
        raise CorruptionError(f"{path}: its directory names members that are not in the file, or one of them twice")


class _CompressedAsEmpty(TorchFunctionMode):
    """Creates empty tensors in place of compressed sparse ones, a layout that fake tensors lack; none is read."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.sparse_compressed_tensor:
            _, _, values, size = args
            return torch.empty(size, dtype=values.dtype, layout=torch.sparse_coo, device="cpu")
        return func(*args, **(kwargs or {}))


def piece_of(path: Path, name: str, tensor: Any, *, row: int, column: int, base: int) -> Piece:
    """Return where the elements of a tensor from `load_places`, of one or two dimensions, lie.

    Its first element is at `row` and `column` of the whole tensor. The part of the file that it was loaded from begins
    at byte `base`.

    Raises:
        RequestError: The elements do not lie row after row.
    """
    if tensor.layout is not torch.strided:
        raise RequestError(f"{path}: tensor {name!r} is sparse; save it as tensor.to_dense()")
    is_plain = not tensor.is_quantized and not hasattr(tensor, "placements")
    two = tensor.dim() == 2
    width, strides = (tensor.shape[1] if two else 1), tensor.stride() if is_plain else (0, 0)
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if is_plain else None
    if offset is None or (two and width > 1 and strides[1] != 1) or (strides[0] < width):
        raise RequestError(f"{path}: tensor {name!r} does not lie row after row; save it as tensor.contiguous()")
    size = tensor.dtype.itemsize
    return Piece(
        row=row,
        column=column,
        num_rows=tensor.shape[0],
        width=width,
        path=path,
        offset=base + int(offset) + tensor.storage_offset() * size,
        row_bytes=strides[0] * size,
    )


def scalar_of(path: Path, value: Any, *, base: int) -> tuple[DType, bytes] | None:
    """Return a number, or what a tensor without dimensions from `load_places` holds; None for anything else.

    Raises as `read_element`; for `base` see `piece_of`.
    """
    if isinstance(value, torch.Tensor):
        is_plain = not value.dim() and value.layout is torch.strided and value.dtype in DTYPES
        offset = getattr(value.untyped_storage(), "_checkpoint_offset", None) if is_plain else None
        if offset is None:
            return None
        dtype = DTYPES[value.dtype]
        return dtype, read_element(path, base + int(offset) + int(value.storage_offset()) * dtype.size_bytes, dtype)
    if type(value) is int and abs(value) < 2**63:
        return DType.INT64, value.to_bytes(8, "little", signed=True)
    return (DType.FLOAT64, struct.pack("<d", value)) if type(value) is float else None


def _flatten(
    path: Path, content: Mapping[Any, Any] | Sequence[Any], prefix: str, depth: int, entries: Iterator[int]
) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path}: dicts and lists nest deeper than {_MAX_DEPTH} at {prefix!r}")
    for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
        if next(entries, None) is None:
            raise RequestError(f"{path}: its dicts and lists have more entries than bytes, at {prefix!r}")
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor | int | float):
            yield name, value
        elif isinstance(value, Mapping | list | tuple):
            yield from _flatten(path, value, f"{name}.", depth + 1, entries)
