"""Tensors of a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from headrace.schemas.errors import CorruptionError
from headrace.schemas.tables import DType
from headrace.scripts.table_sources.columns import Column, Piece, RawColumn, map_file_errors
from headrace.scripts.table_sources.tensors import TensorSource

__all__ = ["DTYPE_NAMES", "NOTES_KEY", "open_safetensors"]

NOTES_KEY = "headrace"
DTYPE_NAMES = {
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT64: "F64",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.UINT8: "U8",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def open_safetensors(path: Path) -> TensorSource:
    """Return the tensors of a file.

    Raises:
        CorruptionError: It is cut, damaged, or none.
        StorageError: It cannot be read.
    """
    with map_file_errors(path):
        try:
            # The library checks the header; where in the file a tensor lies it does not tell.
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as exc:
            raise CorruptionError(f"{path}: no safetensors file, or not all of it: {exc}") from exc
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        columns: dict[str, Column] = {}
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] not in _DTYPES or len(tensor["shape"]) not in (1, 2):
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
            notes = json.loads((header.get("__metadata__") or {}).get(NOTES_KEY, "null"))
        except (ValueError, RecursionError) as exc:
            raise CorruptionError(f"{path}: its notes on tables are damaged") from exc
        return TensorSource(path=path, columns=columns, files=[path], notes=notes)
