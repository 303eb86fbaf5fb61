"""The format of RocksDB's table files, as far as it is written and read here: its numbers and small codecs. No I/O.

    block … │ filter │ index │ properties │ metaindex │ footer
    block: entries │ restart points │ their number │ how it is compressed │ checksum
    entry: shared │ unshared │ value length │ rest of the key │ tag │ value       the first three as varints

Source: RocksDB's table/format.cc, table/block_based/block_builder.cc and util/crc32c.h.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.row_keys import KEY_BYTES

__all__ = [
    "CRC32C",
    "FORMAT_VERSION",
    "INDEX_ENTRY",
    "INDEX_HEAD",
    "INNER_KEY_BYTES",
    "MAGIC",
    "OFFSET_DIGITS",
    "PROPERTIES_NAME",
    "SIZE_DIGITS",
    "TAG_BYTES",
    "TRAILER_BYTES",
    "TYPE_VALUE",
    "entry_dtype",
    "entry_head",
    "mask_crc",
    "read_handle",
    "read_varint",
    "varint",
]


# ON DISK: RocksDB's, all of them.
MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
FORMAT_VERSION = 5
CRC32C = 1
PROPERTIES_NAME = b"rocksdb.properties"
TRAILER_BYTES = 5
"""Behind each block: how it is compressed, and its checksum."""
TAG_BYTES = 8
"""Behind each key: sequence number and type."""
INNER_KEY_BYTES = KEY_BYTES + TAG_BYTES
TYPE_VALUE = 1  # the tag's first byte

# Numbers in an index entry of ours are padded to these lengths, so that all entries are equally long: 2⁴² and 2²⁸.
OFFSET_DIGITS, SIZE_DIGITS = 6, 4
# An entry of such an index: the last key of a block, and where it lies.
INDEX_ENTRY = np.dtype(
    [
        ("head", "V3"),
        ("prefix", "V8"),
        ("row", ">u8"),
        ("offset", "u1", (OFFSET_DIGITS,)),
        ("size", "u1", (SIZE_DIGITS,)),
    ]
)
INDEX_HEAD = bytes((0, KEY_BYTES, OFFSET_DIGITS + SIZE_DIGITS))


def varint(number: int) -> bytes:
    """Return a number as RocksDB writes it."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (number, where it ends).

    Raises:
        IndexError: It does not end within the data.
    """
    number = shift = 0
    while (byte := data[at]) & 0x80:
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return number | byte << shift, at + 1


def read_handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Return (offset, size, where the handle ends).

    Raises:
        IndexError: It does not end within the data.
    """
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return offset, size, at


def mask_crc(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return checksums as RocksDB stores them, since a checksum of data that holds checksums would be a weak one."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def entry_head(value_bytes: int) -> bytes:
    """Return what an entry that holds its key whole begins with."""
    return bytes((0, INNER_KEY_BYTES)) + varint(value_bytes)


@functools.lru_cache(maxsize=64)
def entry_dtype(value_bytes: int) -> np.dtype[Any]:
    """Return the layout of an entry that holds a row's key whole."""
    head = f"V{len(entry_head(value_bytes))}"
    return np.dtype([("head", head), ("prefix", "V8"), ("row", ">u8"), ("tag", "<u8"), ("value", f"V{value_bytes}")])
