"""Blocks of files of RocksDB's format: their entries, one by one or very many at once. No I/O.

    block: entry … │ restart points │ their number
    entry: shared │ unshared │ value length │ rest of the key │ value             numbers as varints

`shared` is how many bytes the key has in common with the one before it in the block. A row's key is 16 bytes and 8 more
of RocksDB's own; in numpy, keys of all blocks are made at once, one step an entry of a block.

Source: RocksDB's table/block_based/block.cc and block_builder.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.table_file_format import (
    INNER_KEY_BYTES,
    TRAILER_BYTES,
    TYPE_VALUE,
    entry_dtype,
    entry_head,
    read_varint,
)
from headrace.schemas.row_keys import KEY_BYTES

__all__ = ["any_entries", "equal_entries", "read_entries", "varints_at"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


def read_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block, whatever their lengths.

    Raises:
        IndexError: An entry does not end within the block.
    """
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
    """Return the rows of blocks of one length in which each entry holds its key whole and a whole record; else None.

    Args:
        data: uint8[n], with the blocks and what lies behind each.
        start: Of the first block.
        size: Of each.
        num_blocks: That lie one behind the other.
        prefix: What the keys begin with.
        record_bytes: Length of a record.

    Returns:
        int64[m] row ids and `V{record_bytes}`[m] records, copied.
    """
    head, entry = entry_head(record_bytes) + prefix, entry_dtype(record_bytes)
    num_entries, rest = divmod(size - 4, entry.itemsize + 4)
    if rest or not num_entries:
        return None
    block = np.dtype([("entries", entry, (num_entries,)), ("rest", f"V{4 * num_entries + 4 + TRAILER_BYTES}")])
    blocks = data[start : start + num_blocks * block.itemsize].view(block)
    entries = blocks["entries"]
    # What the entry begins with and the key's prefix in one: to compare them one by one takes a tenth of a scan's time.
    heads = np.ndarray(entries.shape, f"V{len(head)}", data.data, start, entries.strides)
    if not (heads == np.frombuffer(head, heads.dtype)).all():
        return None
    return entries["row"].reshape(-1).astype(np.int64), entries["value"].reshape(-1)


def any_entries(
    data: _Array, starts: _Ids, sizes: _Ids, prefix: bytes, record_bytes: int, header_bytes: int
) -> tuple[_Ids, _Array]:
    """Return the rows of blocks whose keys are written in full or as what differs from the one before.

    Args:
        data: uint8[n], with the blocks and what lies behind each.
        starts: int64[b], of the blocks.
        sizes: int64[b].
        prefix: What the keys begin with; entries of other keys are passed over.
        record_bytes: Length of a record.
        header_bytes: Length of a deleted row's, if it has not been padded.

    Returns:
        int64[m] row ids, ascending, and `V{record_bytes}`[m] records, copied.

    Raises:
        IndexError: An entry does not end within the data.
        ValueError: A block is none, a value is no record, or a row has an entry that is no value.
    """
    num_restarts = _u32_at(data, starts + sizes - 4)
    ends = starts + sizes - 4 * (num_restarts + 1)
    if np.any(ends < starts) or np.any(num_restarts > sizes):
        raise ValueError("restart points beyond a block")
    at, keys = starts.copy(), np.zeros((starts.size, INNER_KEY_BYTES), np.uint8)
    columns = np.arange(INNER_KEY_BYTES)
    windows = np.ndarray((max(data.size - INNER_KEY_BYTES + 1, 0),), f"V{INNER_KEY_BYTES}", data.data, 0, (1,))
    found: list[tuple[_Array, _Array, _Array, _Array]] = []  # block, key, where the value begins, how long it is
    odd = np.zeros(starts.size, bool)
    open_ = np.flatnonzero(at < ends)
    while open_.size:
        here = at[open_]
        shared, unshared = data[here].astype(np.int64), data[here + 1].astype(np.int64)
        length, key_at = varints_at(data, here + 2)
        # A key of another length is none of a row's: the blocks that have one are gone through one by one.
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
    """Return the entries of all steps in the order of the blocks, and within one of its entries."""
    if not found:
        return [np.empty(0, np.int64), np.empty((0, INNER_KEY_BYTES), np.uint8), *[np.empty(0, np.int64)] * 2]
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def _gather(
    data: _Array, entries: list[_Array], prefix: bytes, record_bytes: int, header_bytes: int
) -> tuple[_Ids, _Array]:
    """Return the rows of the prefix among entries (block, key, where the value begins, its length)."""
    _, keys, value_at, length = entries
    wanted = (keys[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1)
    keys, value_at, length = keys[wanted], value_at[wanted], length[wanted]
    is_other = keys[:, KEY_BYTES] != TYPE_VALUE
    if is_other.any():
        raise ValueError(_other_type(int(keys[is_other][0, KEY_BYTES])))
    is_whole, is_header = length == record_bytes, length == header_bytes
    if not (is_whole | is_header).all():
        raise ValueError(f"a value of {int(length[~(is_whole | is_header)][0])} bytes, records have {record_bytes}")
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
    """Return the rows of the prefix in a block in which other keys lie as well."""
    ids, values = [], []
    for key, value in read_entries(raw):
        if len(key) == INNER_KEY_BYTES and key.startswith(prefix):
            if key[KEY_BYTES] != TYPE_VALUE:
                raise ValueError(_other_type(key[KEY_BYTES]))
            if len(value) not in (record_bytes, header_bytes):
                raise ValueError(f"a value of {len(value)} bytes, records have {record_bytes}")
            ids.append(int.from_bytes(key[8:16], "big"))
            values.append(value.ljust(record_bytes, b"\0"))
    return np.array(ids, np.int64), np.frombuffer(b"".join(values), f"V{record_bytes}") if values else np.empty(
        0, f"V{record_bytes}"
    )


def _other_type(kind: int) -> str:
    return f"a row's entry of type {kind}, which is no value: rows are never deleted so"


def _u32_at(data: _Array, at: _Ids) -> _Ids:
    return np.asarray((data[at[:, None] + np.arange(4)].astype(np.int64) << (8 * np.arange(4))).sum(axis=1))


def varints_at(data: _Array, at: _Ids) -> tuple[_Ids, _Ids]:
    """Return (numbers, where each ends), int64[n] both.

    Args:
        data: uint8[m].
        at: int64[n], where they begin.

    Raises:
        IndexError: One does not end within the data.
        ValueError: One is longer than 5 bytes.
    """
    numbers, ends, shift = np.zeros(at.size, np.int64), at.copy(), 0
    more = np.ones(at.size, bool)
    while more.any():
        if shift > 28:
            raise ValueError("a length that has no end")
        byte = data[np.where(more, ends, 0)].astype(np.int64)
        numbers[more] |= (byte[more] & 0x7F) << shift
        ends[more] += 1
        more &= (byte & 0x80) != 0
        shift += 7
    return numbers, ends
