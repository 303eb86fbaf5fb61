"""Check what the pages of a Parquet file say of their sizes before Arrow takes memory for them.

Encodings and compression make any number of equal values a few bytes, and Arrow takes the memory for a whole row at
once: in a file of 700 bytes one row can have a billion values. Arrow goes by the pages' own headers, which may differ
from what the file's footer says of them. So the headers of all pages are read, and nothing else.

Source: parquet.thrift of apache/parquet-format, and column_reader.cc of Arrow.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import IO, Any, cast

from thriftpy2.protocol.compact import TCompactProtocol
from thriftpy2.thrift import TException, TPayload, TType

from headrace.schemas.errors import CorruptionError

__all__ = ["check_pages"]

# Of one column in one group of rows. Arrow takes about as much for a value with its levels.
_VALUE_BYTES = 8
_ALWAYS_BYTES = 256 << 20
# Beyond that, so many times the bytes in the file. Weights from training become hardly shorter.
_MAX_RATIO = 100
_HEADER_BYTES = 64 << 10
_END_BYTES, _MAGIC = 8, b"PAR1"  # the end of the file: the footer's length, and this


def _struct(name: str, spec: dict[int, tuple[Any, ...]]) -> Any:
    """Return thriftpy2's class of a struct with the fields that count; the reader skips all others."""
    make: Any = type(TPayload)
    return make(name, (TPayload,), {"thrift_spec": spec, "default_spec": [(each[1], None) for each in spec.values()]})


_DATA_PAGE = _struct("DataPageHeader", {1: (TType.I32, "num_values", False)})
_PAGE = _struct(
    "PageHeader",
    {
        2: (TType.I32, "uncompressed_page_size", False),
        3: (TType.I32, "compressed_page_size", False),
        5: (TType.STRUCT, "data_page", _DATA_PAGE, False),
        8: (TType.STRUCT, "data_page_v2", _DATA_PAGE, False),
    },
)
_COLUMN = _struct(
    "ColumnMetaData",
    {
        3: (TType.LIST, "path_in_schema", TType.STRING, False),
        5: (TType.I64, "num_values", False),
        7: (TType.I64, "total_compressed_size", False),
        9: (TType.I64, "data_page_offset", False),
        11: (TType.I64, "dictionary_page_offset", False),
    },
)
_CHUNK = _struct("ColumnChunk", {3: (TType.STRUCT, "meta_data", _COLUMN, False)})
_GROUP = _struct("RowGroup", {1: (TType.LIST, "columns", (TType.STRUCT, _CHUNK), False)})
_FOOTER = _struct("FileMetaData", {4: (TType.LIST, "row_groups", (TType.STRUCT, _GROUP), False)})


def check_pages(path: Path) -> None:
    """Check the pages of all columns of a file: which one is read, Arrow tells by its place, not by its name.

    Not by Arrow's view of the footer: where a column there is damaged, `pyarrow` ends the process.

    Raises:
        CorruptionError: It is no Parquet file, its sizes make no sense, or a column takes far more memory than bytes of
            the file.
    """
    with open(path, "rb") as file:
        size_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(size_bytes - _END_BYTES, 0))
        end = file.read()
        footer_bytes = int.from_bytes(end[:4], "little")
        if len(end) < _END_BYTES or end[4:] != _MAGIC or footer_bytes > size_bytes - _END_BYTES:
            raise CorruptionError(f"{path}: no Parquet file, or not all of it")
        file.seek(size_bytes - _END_BYTES - footer_bytes)
        footer = _read_struct(f"{path}: its footer", file.read(footer_bytes), _FOOTER)[0]
        for group in footer.row_groups or ():
            for chunk in group.columns or ():
                column = chunk.meta_data
                if column is None:
                    raise CorruptionError(f"{path}: its footer has a column without a place")
                _check_chunk(
                    f"{path}: column {'.'.join(map(str, column.path_in_schema or ()))!r}", file, column, size_bytes
                )


def _check_chunk(where: str, file: IO[bytes], column: Any, size_bytes: int) -> None:
    start, compressed, most = column.data_page_offset, column.total_compressed_size, column.num_values
    if any(number is None or number < 0 for number in (start, compressed, most)):
        raise CorruptionError(f"{where} has no place, or no number of values")
    if 0 < (column.dictionary_page_offset or 0) < start:
        start = column.dictionary_page_offset
    at, end, num_values, largest = start, start + compressed, 0, 0
    if end > size_bytes:
        raise CorruptionError(f"{where} ends beyond the file; it is cut or damaged")
    while at < end and num_values < most:
        file.seek(at)
        header, header_bytes = _read_struct(f"{where}: its page at byte {at}", file.read(_HEADER_BYTES), _PAGE)
        page = header.data_page or header.data_page_v2
        counts = (header.uncompressed_page_size, header.compressed_page_size, 0 if page is None else page.num_values)
        if any(count is None or count < 0 for count in counts):
            raise CorruptionError(f"{where}: its page at byte {at} has no sizes")
        at += header_bytes + header.compressed_page_size
        num_values += counts[2]
        largest = max(largest, header.uncompressed_page_size, num_values * _VALUE_BYTES)
    if largest > max(_ALWAYS_BYTES, _MAX_RATIO * (end - start)):
        raise CorruptionError(
            f"{where} has {end - start} bytes in a group of rows, and takes {largest} bytes of memory; if that is "
            "meant, write the file again with smaller row groups"
        )


def _read_struct(where: str, data: bytes, struct_type: Any) -> tuple[Any, int]:
    """Return the struct at the beginning of some bytes, and its length."""
    stream, found, protocol = io.BytesIO(data), struct_type(), cast("Any", TCompactProtocol)
    try:
        protocol(stream).read_struct(found)
    except (TException, EOFError, LookupError, RecursionError, TypeError, ValueError, struct.error) as exc:
        raise CorruptionError(f"{where} is damaged: {type(exc).__name__}") from exc
    return found, stream.tell()
