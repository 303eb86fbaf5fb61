"""Write table files in RocksDB's format straight from arrays of rows, for RocksDB to ingest whole.

A put through RocksDB's memtable costs a Python call per row with the GIL held, and a second copy at the flush. A file
costs numpy one copy of the rows, without the GIL.

    block: rows_per_block × entry │ restarts │ their number │ compression = none │ crc32c, masked
    entry: shared = 0 │ unshared = 24 │ value length │ key (16) │ sequence and type (8) │ record

All records of a table are equally long (marks of deletions are padded), so every block except a run's last has the same
layout, and many blocks are filled at once. Every entry is a restart point. The file is marked as external
(`external_sst_file`), so RocksDB gives all rows one sequence number on ingestion.

The bloom filter is RocksDB's `FastLocalBloom`, in which a key touches one 64-byte line; the bytes equal RocksDB's.

Source: RocksDB's table/block_based (block_based_table_builder.cc, block_builder.cc, filter_policy.cc, format.cc: footer
version 5), table/meta_blocks.cc, util/bloom_impl.h (`FastLocalBloomImpl`) and util/xxph3.h (`XXPH3_len_9to16_64b`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.paramserver.store.coalescing import CoalescedRows, SortedRun
from headrace.paramserver.store.sst import format as sst
from headrace.paramserver.system.direct_file import DirectFileWriter, write_buffer
from headrace.schemas.errors import InvariantError
from headrace.schemas.row_records import key_prefix

__all__ = ["TableFileWriter", "build_filter", "hash_keys"]

_Array = npt.NDArray[Any]

# ON DISK: RocksDB's.
_HANDLES_BYTES = 40
_NO_COMPRESSION = b"\0"
_FILTER_NAME = b"fullfilter.rocksdb.BuiltinBloomFilter"
_UNKNOWN_COLUMN_FAMILY = 0x7FFFFFFF

# Filled and written at a time: should fit in the processor's cache.
_CHUNK_BYTES = 1 << 20


class TableFileWriter:
    """Writes one file, once: call `write`, or `begin`, `add` and `finish`.

    `StoreConfig` explains the block size and the filter, `DirectFileWriter` the buffer. Methods raise OSError when the
    disk failed; the file is then not a table.

    Thread: any; blocks, and holds the GIL only for fractions of a millisecond.
    """

    def __init__(self, *, block_bytes: int, bloom_bits_per_key: int, buffer: memoryview | None = None) -> None:
        self._block_bytes = block_bytes
        self._bloom_bits_per_key = bloom_bits_per_key
        self._buffer = buffer or write_buffer()
        self._file: DirectFileWriter | None = None
        self._offset = 0
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._index: list[tuple[bytes, _Array, int]] = []  # prefix, last row of each block, bytes of a block
        self._num_blocks = self._num_rows = self._value_bytes = 0
        self._chunks: dict[int, _Array] = {}  # by rows per block
        self._chunk_value_bytes = -1

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def write(self, path: Path, runs: Sequence[SortedRun | CoalescedRows]) -> int:
        """Write settled runs, in key order and with at least one row, to a new file and sync it; return its size."""
        try:
            self.begin(path)
            for run in runs:
                self.add(run)
            return self.finish()
        finally:
            self.close()

    def begin(self, path: Path) -> None:
        """Create or empty the file. End with `finish` or `close`."""
        self._file = DirectFileWriter(path, self._buffer)

    def add(self, run: SortedRun | CoalescedRows) -> None:
        """Write rows with keys above all before. Memory: 8 bytes for each row, and some for each block."""
        assert self._file is not None, "call begin first"
        self._write_run(self._file, run)

    def finish(self) -> int:
        """Write the file's tail, sync it, and return its size in bytes. REQUIRES: at least one row."""
        assert self._file is not None, "call begin first"
        self._write_tail(self._file)
        self._file.sync()
        self.close()
        return self._offset

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_run(self, file: DirectFileWriter, run: SortedRun | CoalescedRows) -> None:
        prefix = key_prefix(run.table_id, run.layout.shard)
        size, value_bytes = run.row_ids.size, run.layout.dtype.itemsize
        entry = sst.entry_dtype(value_bytes)
        rows_per_block = max(1, self._block_bytes // (entry.itemsize + 4))
        blocks_per_chunk = max(1, _CHUNK_BYTES // _block_dtype(value_bytes, rows_per_block).itemsize)
        num_written = 0
        for start, num_blocks, per_block in _chunks(size, rows_per_block, blocks_per_chunk):
            blocks = self._blocks(value_bytes, num_blocks, per_block)
            blocks["entries"]["prefix"] = np.frombuffer(prefix, "V8")
            end = start + num_blocks * per_block
            row_ids = run.row_ids[start:end].reshape(num_blocks, per_block)
            values = run.records_at(slice(start, end)).view(f"V{value_bytes}")
            blocks["entries"]["row"] = row_ids
            blocks["entries"]["value"] = values.reshape(num_blocks, per_block)
            _seal_blocks(blocks)
            self._add_index(prefix, row_ids[:, -1].copy(), blocks.dtype.itemsize)
            self._put(file, blocks.view(np.uint8).data)
            num_written += values.size
        if num_written != size:
            raise InvariantError(f"store, table {run.table_id}: {size} rows to write, {num_written} written to a file")
        self._hashes.append(hash_keys(prefix, run.row_ids))
        self._num_rows += size
        self._value_bytes += size * value_bytes

    def _blocks(self, value_bytes: int, num_blocks: int, num_rows: int) -> _Array:
        """Return blocks with everything filled in that depends on neither table nor rows; reused between calls."""
        if value_bytes != self._chunk_value_bytes:  # or each kind of table would keep its own
            self._chunks.clear()
            self._chunk_value_bytes = value_bytes
        blocks = self._chunks.get(num_rows)
        if blocks is None or blocks.size < num_blocks:
            blocks = self._chunks[num_rows] = _new_chunk(value_bytes, num_blocks, num_rows)
        return blocks[:num_blocks]

    def _add_index(self, prefix: bytes, last_rows: _Array, block_bytes: int) -> None:
        self._index.append((prefix, last_rows, block_bytes))
        self._num_blocks += last_rows.size

    def _index_block(self) -> bytes:
        # All at once: for many small tables, doing it per run would take longer than their rows.
        counts = [last_rows.size for _, last_rows, _ in self._index]
        sizes = np.repeat(np.array([block_bytes for _, _, block_bytes in self._index], np.int64), counts)
        index = np.zeros(self._num_blocks, sst.INDEX_ENTRY)
        index["head"] = np.frombuffer(sst.INDEX_HEAD, "V3")
        index["prefix"] = np.repeat(np.frombuffer(b"".join(prefix for prefix, _, _ in self._index), "V8"), counts)
        index["row"] = np.concatenate([last_rows for _, last_rows, _ in self._index])
        index["offset"] = _padded_varints(np.cumsum(sizes) - sizes, sst.OFFSET_DIGITS)
        index["size"] = _padded_varints(sizes - sst.TRAILER_BYTES, sst.SIZE_DIGITS)
        return index.tobytes() + _restarts(np.arange(self._num_blocks) * sst.INDEX_ENTRY.itemsize)

    def _write_tail(self, file: DirectFileWriter) -> None:
        data_bytes = self._offset
        filter_block = build_filter(np.concatenate(self._hashes), bits_per_key=self._bloom_bits_per_key)
        filter_handle = self._put_block(file, filter_block)
        index_block = self._index_block()
        index_handle = self._put_block(file, index_block)
        properties = self._properties(data_bytes, len(index_block), len(filter_block))
        properties_handle = self._put_block(file, _plain_block(properties))
        metaindex = _plain_block({_FILTER_NAME: filter_handle, sst.PROPERTIES_NAME: properties_handle})
        metaindex_handle = self._put_block(file, metaindex)
        handles = (metaindex_handle + index_handle).ljust(_HANDLES_BYTES, b"\0")
        footer = bytes((sst.CRC32C,)) + handles + sst.FORMAT_VERSION.to_bytes(4, "little") + sst.MAGIC
        self._put(file, footer)

    def _properties(self, data_bytes: int, index_bytes: int, filter_bytes: int) -> dict[bytes, bytes]:
        numbers = {
            "column.family.id": _UNKNOWN_COLUMN_FAMILY,
            "data.size": data_bytes,
            "filter.size": filter_bytes,
            "format.version": sst.FORMAT_VERSION,
            "index.key.is.user.key": 1,
            "index.size": index_bytes,
            "num.data.blocks": self._num_blocks,
            "num.entries": self._num_rows,
            "num.filter_entries": self._num_rows,
            "raw.key.size": self._num_rows * sst.INNER_KEY_BYTES,
            "raw.value.size": self._value_bytes,
            "tail.start.offset": data_bytes,
        }
        zeros = "creation.time deleted.keys fixed.key.length index.value.is.delta.encoded merge.operands"
        numbers |= dict.fromkeys(f"{zeros} num.range-deletions oldest.key.time".split(), 0)
        texts = {
            "block.based.table.index.type": bytes(4),
            "block.based.table.prefix.filtering": b"0",
            "block.based.table.whole.key.filtering": b"1",
            "comparator": b"leveldb.BytewiseComparator",
            "compression": b"NoCompression",
            "external_sst_file.global_seqno": bytes(8),
            "external_sst_file.version": (2).to_bytes(4, "little"),
            "filter.policy": b"bloomfilter",
            "merge.operator": b"nullptr",
            "prefix.extractor.name": b"nullptr",
            "property.collectors": b"[]",
        }
        named = texts | {name: sst.varint(number) for name, number in numbers.items()}
        return {b"rocksdb." + name.encode(): named[name] for name in sorted(named)}

    def _put_block(self, file: DirectFileWriter, contents: bytes) -> bytes:
        """Write a block and return its handle."""
        handle = sst.varint(self._offset) + sst.varint(len(contents))
        sealed = contents + _NO_COMPRESSION
        self._put(file, sealed + sst.mask_crc(np.array([crc32c(sealed)], np.uint32)).tobytes())
        return handle

    def _put(self, file: DirectFileWriter, data: bytes | memoryview) -> None:
        file.write(data)
        self._offset += len(data)


def _padded_varints(numbers: Any, digits: int) -> _Array:
    """Return numbers as varints of equal length, uint8[…, digits]; the format allows leading zeros."""
    shifted = np.asarray(numbers)[..., None] >> (7 * np.arange(digits))
    varints: _Array = (shifted & 0x7F | 0x80).astype(np.uint8)
    varints[..., -1] &= 0x7F
    return varints


@functools.lru_cache(maxsize=256)
def _block_dtype(value_bytes: int, num_rows: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("entries", sst.entry_dtype(value_bytes), (num_rows,)),
            ("restarts", "<u4", (num_rows,)),
            ("num_restarts", "<u4"),
            ("compression", "V1"),
            ("crc", "<u4"),
        ]
    )


def _new_chunk(value_bytes: int, num_blocks: int, num_rows: int) -> _Array:
    blocks = np.zeros(num_blocks, _block_dtype(value_bytes, num_rows))
    head = sst.entry_head(value_bytes)
    blocks["entries"]["head"] = np.frombuffer(head, f"V{len(head)}")
    blocks["entries"]["tag"] = sst.TYPE_VALUE  # with sequence number 0; RocksDB adds the file's
    blocks["restarts"] = np.arange(num_rows) * sst.entry_dtype(value_bytes).itemsize
    blocks["num_restarts"] = num_rows
    return blocks


def _seal_blocks(blocks: _Array) -> None:
    size, data = blocks.dtype.itemsize, blocks.view(np.uint8).data
    crcs = [crc32c(data[at : at + size - 4]) for at in range(0, len(data), size)]
    blocks["crc"] = sst.mask_crc(np.array(crcs, np.uint32))


def _chunks(num_rows: int, rows_per_block: int, blocks_per_chunk: int) -> list[tuple[int, int, int]]:
    """Return (first row, number of blocks, rows in each) for equal blocks that are written together."""
    chunks = []
    num_full = num_rows // rows_per_block
    for block in range(0, num_full, blocks_per_chunk):
        chunks.append((block * rows_per_block, min(blocks_per_chunk, num_full - block), rows_per_block))
    if num_rows % rows_per_block:
        chunks.append((num_full * rows_per_block, 1, num_rows % rows_per_block))
    return chunks


def _plain_block(entries: dict[bytes, bytes]) -> bytes:
    """Return a block of a few entries, given in order, whose keys are not rows'."""
    block, starts = b"", []
    for key, value in entries.items():
        starts.append(len(block))
        block += b"\0" + sst.varint(len(key)) + sst.varint(len(value)) + key + value
    return block + _restarts(np.array(starts))


def _restarts(offsets: _Array) -> bytes:
    return np.append(offsets, offsets.size).astype("<u4").tobytes()


_U64 = npt.NDArray[np.uint64]
# ON DISK: RocksDB's numbers, all of them.
_SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")
_SECRET_LOW, _SECRET_HIGH = (np.uint64(int.from_bytes(_SECRET[at : at + 8], "little")) for at in (0, 8))
_KEY_BYTES = np.uint64(16)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_GOLDEN_RATIO = np.uint32(0x9E3779B9)
_LINE_BYTES = 64
# The best number of probes, from one on, up to so many thousandths of a bit per key.
_PROBES_UP_TO = (2080, 3580, 5100, 6640, 8300, 10070, 11720, 14001, 16050, 18300, 22001, 25501)
_NEW_FORMAT, _FAST_LOCAL = 0xFF, 0


def build_filter(hashes: _U64, *, bits_per_key: int) -> bytes:
    """Return the filter block, without trailer, of hashes from `hash_keys`: at least one, each key once.

    Each of `bits_per_key`, 1 to 30, costs 1/8 byte per key. Releases the GIL, except for some milliseconds.
    """
    num_lines = (hashes.size * bits_per_key + 8 * _LINE_BYTES - 1) // (8 * _LINE_BYTES)
    size_bytes = num_lines * _LINE_BYTES
    num_probes = _num_probes(round(size_bytes * 8000 / hashes.size))
    # The low half of a hash picks the line without a division.
    first_bits = ((hashes & np.uint64(0xFFFFFFFF)) * np.uint64(num_lines)) >> np.uint64(32)
    first_bits <<= np.uint64(9)
    probe = (hashes >> np.uint64(32)).astype(np.uint32)
    bits = np.zeros(size_bytes * 8, bool)
    for _ in range(num_probes):
        bits[first_bits + (probe >> np.uint32(23))] = True
        probe *= _GOLDEN_RATIO
    return np.packbits(bits, bitorder="little").tobytes() + bytes((_NEW_FORMAT, _FAST_LOCAL, num_probes, 0, 0))


def hash_keys(prefix: bytes, row_ids: npt.NDArray[np.int64]) -> _U64:
    """Return RocksDB's hashes, uint64[n], of row keys with an eight-byte prefix and int64[n] row ids."""
    low = np.uint64(int.from_bytes(prefix, "little")) ^ _SECRET_LOW
    high = row_ids.astype(">u8").view("<u8") ^ _SECRET_HIGH
    with np.errstate(over="ignore"):  # scalars warn on overflow, arrays do not
        hashed = (_KEY_BYTES + low) + high
        hashed += _multiply_and_fold(low, high)
        hashed ^= hashed >> np.uint64(37)
        hashed *= _PRIME_3
    hashed ^= hashed >> np.uint64(32)
    return hashed


def _multiply_and_fold(left: np.uint64, right: _U64) -> _U64:
    """Return the high half xor the low half of the 128-bit product."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    left_low, left_high = left & mask, left >> half
    right_low, right_high = right & mask, right >> half
    middle = right_low * left_high
    cross = right_high * left_low
    cross += (right_low * left_low) >> half
    cross += middle & mask  # at most 2⁶⁴ − 1
    high = right_high * left_high
    high += middle >> half
    high += cross >> half
    high ^= right * left
    return high


def _num_probes(millibits_per_key: int) -> int:
    for number, most in enumerate(_PROBES_UP_TO, 1):
        if millibits_per_key <= most:
            return number
    return 24 if millibits_per_key > 50_000 else (millibits_per_key - 1) // 2000 - 1
