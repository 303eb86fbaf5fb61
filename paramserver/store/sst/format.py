"""RocksDB's table file format, as far as it is used here: constants, numbers, and the entries of blocks. No I/O.

    file: block … │ filter │ index │ properties │ metaindex │ footer
    block: entries │ restart points │ their number │ compression │ checksum
    entry: shared │ unshared │ value length │ rest of the key │ tag │ value       the first three as varints

`shared` is the number of bytes that a key has in common with the key before it in the block. A row's key is 16 bytes,
and 8 more are RocksDB's tag. Keys of many blocks are decoded at once, in numpy, one step for each entry of a block.

Source: RocksDB's table/format.cc, table/block_based (block.cc, block_builder.cc) and util/crc32c.h.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.row_records import KEY_BYTES

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
    "TYPE_DELETION",
    "TYPE_VALUE",
    "any_entries",
    "entry_dtype",
    "entry_head",
    "equal_entries",
    "mask_crc",
    "read_entries",
    "read_handle",
    "read_varint",
    "varint",
    "varints_at",
]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# ON DISK: RocksDB's, never change.
MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
FORMAT_VERSION = 5
CRC32C = 1
PROPERTIES_NAME = b"rocksdb.properties"
TRAILER_BYTES = 5
"""After each block: compression and checksum."""
TAG_BYTES = 8
"""After each key: sequence number and type."""
INNER_KEY_BYTES = KEY_BYTES + TAG_BYTES
# The tag's first byte.
TYPE_DELETION, TYPE_VALUE = 0, 1

# Our index entries pad numbers to these lengths, so all are equally long: up to 2⁴² and 2²⁸.
OFFSET_DIGITS, SIZE_DIGITS = 6, 4
# An entry of our index: the last key of a block, and the block's place.
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
    """Encode a number as RocksDB does."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number; return it and where it ends. Raises IndexError when it is cut off, ValueError beyond 2⁷⁰."""
    number = shift = 0
    while (byte := data[at]) & 0x80:
        if shift > 63:
            raise ValueError("a varint is longer than 10 bytes")
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return number | byte << shift, at + 1


def read_handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Return (offset, size, where the handle ends). Raises IndexError when it is cut off."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return offset, size, at


def mask_crc(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return checksums as RocksDB stores them: a checksum over data that holds plain checksums would be weak."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def entry_head(value_bytes: int) -> bytes:
    """Return the first bytes of an entry that holds its key whole."""
    return bytes((0, INNER_KEY_BYTES)) + varint(value_bytes)


@functools.lru_cache(maxsize=64)
def entry_dtype(value_bytes: int) -> np.dtype[Any]:
    """Return the layout of an entry that holds a row's key whole."""
    head = f"V{len(entry_head(value_bytes))}"
    return np.dtype([("head", head), ("prefix", "V8"), ("row", ">u8"), ("tag", "<u8"), ("value", f"V{value_bytes}")])


def read_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block, of any lengths. Raises IndexError when an entry is cut off."""
    end = len(block) - 4 * int.from_bytes(block[-4:], "little") - 4
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at)
        unshared, at = read_varint(block, at)
        size, at = read_varint(block, at)
        key = key[:shared] + block[at : at + unshared]
        yield key, block[at + unshared : at + unshared + size]
        at += unshared + size


def equal_entries(
    data: _Array, start: int, size: int, num_blocks: int, prefix: bytes, record_bytes: int
) -> tuple[_Ids, _Array] | None:
    """Decode adjacent, equally long blocks in which each entry holds its whole key and a whole record.

    Returns:
        int64[m] row ids and `V{record_bytes}`[m] records, copied; None for other blocks.
    """
    head, entry = entry_head(record_bytes) + prefix, entry_dtype(record_bytes)
    num_entries, rest = divmod(size - 4, entry.itemsize + 4)
    if rest or not num_entries:
        return None
    block = np.dtype([("entries", entry, (num_entries,)), ("rest", f"V{4 * num_entries + 4 + TRAILER_BYTES}")])
    blocks = data[start : start + num_blocks * block.itemsize].view(block)
    entries = blocks["entries"]
    # Compare an entry's head and its key's prefix in one: comparing each apart takes a tenth of a scan's time.
    heads = np.ndarray(entries.shape, f"V{len(head)}", data.data, start, entries.strides)
    if not (heads == np.frombuffer(head, heads.dtype)).all():
        return None
    return entries["row"].reshape(-1).astype(np.int64), entries["value"].reshape(-1)


def any_entries(
    data: _Array, starts: _Ids, sizes: _Ids, prefix: bytes, record_bytes: int, header_bytes: int
) -> tuple[_Ids, _Array]:
    """Decode blocks at `starts`, int64[b], with whole or abbreviated keys; entries of other prefixes are skipped.

    A mark's value may be a header alone, without padding. An entry that removes a row gives a record of zeros,
    which is no row's.

    Returns:
        int64[m] row ids, ascending, and `V{record_bytes}`[m] records, copied.

    Raises:
        IndexError: An entry is cut off.
        ValueError: A block is malformed, a value is not a record, or an entry neither has nor removes a row.
    """
    num_restarts = _u32_at(data, starts + sizes - 4)
    ends = starts + sizes - 4 * (num_restarts + 1)
    if np.any(ends < starts) or np.any(num_restarts > sizes):
        raise ValueError("restart points beyond a block")
    at, keys = starts.copy(), np.zeros((starts.size, INNER_KEY_BYTES), np.uint8)
    columns = np.arange(INNER_KEY_BYTES)
    windows = np.ndarray((max(data.size - INNER_KEY_BYTES + 1, 0),), f"V{INNER_KEY_BYTES}", data.data, 0, (1,))
    found: list[tuple[_Array, _Array, _Array, _Array]] = []  # block, key, value offset, value length
    odd = np.zeros(starts.size, bool)
    open_ = np.flatnonzero(at < ends)
    while open_.size:
        here = at[open_]
        shared, unshared = data[here].astype(np.int64), data[here + 1].astype(np.int64)
        length, key_at = varints_at(data, here + 2)
        # Rows' keys have one length: blocks with other keys are decoded one by one.
        is_odd = shared + unshared != INNER_KEY_BYTES
        odd[open_[is_odd]] = True
        plain = ~is_odd
        open_, shared, unshared, length, key_at = (
            column[plain] for column in (open_, shared, unshared, length, key_at)
        )
        new = np.ascontiguousarray(windows[key_at - shared]).view(np.uint8).reshape(-1, INNER_KEY_BYTES)
        keys[open_] = np.where(columns >= shared[:, None], new, keys[open_])
        value_at = key_at + unshared
        if np.any(value_at + length > ends[open_]):
            raise ValueError("an entry ends beyond its block")
        found.append((open_, keys[open_], value_at, length))
        at[open_] = value_at + length
        open_ = open_[at[open_] < ends[open_]]
    entries = _joined(found)
    is_plain = ~odd[entries[0]]
    parts = [_gather(data, [column[is_plain] for column in entries], prefix, record_bytes, header_bytes)]
    for block in np.flatnonzero(odd).tolist():
        raw = data[starts[block] : starts[block] + sizes[block]].tobytes()
        parts.append(_gather_odd(raw, prefix, record_bytes, header_bytes))
    ids = np.concatenate([ids for ids, _ in parts])
    records = np.concatenate([records for _, records in parts])
    if len(parts) > 1:
        order = np.argsort(ids, kind="stable")
        ids, records = ids[order], records[order]
    return ids, records


def _joined(found: list[tuple[_Array, _Array, _Array, _Array]]) -> list[_Array]:
    """Return the entries of all steps in the order of the blocks and of their entries."""
    if not found:
        return [np.empty(0, np.int64), np.empty((0, INNER_KEY_BYTES), np.uint8), *[np.empty(0, np.int64)] * 2]
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def _gather(
    data: _Array, entries: list[_Array], prefix: bytes, record_bytes: int, header_bytes: int
) -> tuple[_Ids, _Array]:
    """Return the rows of the prefix from entries (block, key, value offset, value length)."""
    _, keys, value_at, length = entries
    wanted = (keys[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1)
    keys, value_at, length = keys[wanted], value_at[wanted], length[wanted]
    is_removed = keys[:, KEY_BYTES] == TYPE_DELETION
    is_other = ~is_removed & (keys[:, KEY_BYTES] != TYPE_VALUE)
    if is_other.any():
        raise ValueError(_other_type(int(keys[is_other][0, KEY_BYTES])))
    is_whole, is_header = length == record_bytes, length == header_bytes
    if (is_odd := ~(is_whole | is_header | is_removed)).any():
        raise ValueError(f"a value of {int(length[is_odd][0])} bytes, records have {record_bytes}")
    ids = np.ascontiguousarray(keys[:, 8:16]).view(">i8").reshape(-1).astype(np.int64)
    wholes = np.ndarray((max(data.size - record_bytes + 1, 0),), f"V{record_bytes}", data.data, 0, (1,))
    if is_whole.all():
        return ids, wholes[value_at]
    records = np.zeros(ids.size, f"V{record_bytes}")
    records[is_whole] = wholes[value_at[is_whole]]
    headers = np.ndarray((max(data.size - header_bytes + 1, 0),), f"V{header_bytes}", data.data, 0, (1,))
    as_bytes = records.view(np.uint8).reshape(-1, record_bytes)
    as_bytes[is_header, :header_bytes] = headers[value_at[is_header]].view(np.uint8).reshape(-1, header_bytes)
    return ids, records


def _gather_odd(raw: bytes, prefix: bytes, record_bytes: int, header_bytes: int) -> tuple[_Ids, _Array]:
    """Return the rows of the prefix from a block that also has keys of other lengths."""
    ids, values = [], []
    for key, value in read_entries(raw):
        if len(key) == INNER_KEY_BYTES and key.startswith(prefix):
            if key[KEY_BYTES] not in (TYPE_DELETION, TYPE_VALUE):
                raise ValueError(_other_type(key[KEY_BYTES]))
            if key[KEY_BYTES] == TYPE_VALUE and len(value) not in (record_bytes, header_bytes):
                raise ValueError(f"a value of {len(value)} bytes, records have {record_bytes}")
            ids.append(int.from_bytes(key[8:16], "big"))
            values.append(value.ljust(record_bytes, b"\0"))
    return np.array(ids, np.int64), np.frombuffer(b"".join(values), f"V{record_bytes}") if values else np.empty(
        0, f"V{record_bytes}"
    )


def _other_type(kind: int) -> str:
    return f"a row's entry has type {kind}, neither a value nor a deletion"


def _u32_at(data: _Array, at: _Ids) -> _Ids:
    return np.asarray((data[at[:, None] + np.arange(4)].astype(np.int64) << (8 * np.arange(4))).sum(axis=1))


def varints_at(data: _Array, at: _Ids) -> tuple[_Ids, _Ids]:
    """Decode varints of at most 5 bytes at many places; return (numbers, where each ends), int64[n] both.

    Raises IndexError when one is cut off, ValueError when one is too long.
    """
    numbers, ends, shift = np.zeros(at.size, np.int64), at.copy(), 0
    more = np.ones(at.size, bool)
    while more.any():
        if shift > 28:
            raise ValueError("a varint is longer than 5 bytes")
        byte = data[np.where(more, ends, 0)].astype(np.int64)
        numbers[more] |= (byte[more] & 0x7F) << shift
        ends[more] += 1
        more &= (byte & 0x80) != 0
        shift += 7
    return numbers, ends
