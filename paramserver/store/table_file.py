"""Files of RocksDB's own format, written straight from arrays of rows, for RocksDB to take in whole.

A put through RocksDB's memtable costs a Python call a row, with no other Python thread running, and a second copy when
the memtable is flushed. A file costs numpy a copy of the rows, with the others running.

    data block … │ filter │ index │ properties │ metaindex │ footer
    block: rows_per_block × entry │ restarts │ their number │ compression = none │ crc32c, masked
    entry: shared = 0 │ unshared = 24 │ value length │ key (16) │ sequence and type (8) │ record

All records of a table are equally long (a deleted row is padded), so every block but a run's last has the same layout,
and blocks are filled many at a time. Every entry is a restart point. The file says that it comes from outside
(`external_sst_file`), so RocksDB gives all of its rows one sequence number when it takes it in.

Source: RocksDB's table/block_based (block_based_table_builder.cc, block_builder.cc, format.cc: footer version 5) and
table/meta_blocks.cc.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.paramserver.files.direct_file import DirectFileWriter, write_buffer
from headrace.paramserver.store.pending import CoalescedRun, Run
from headrace.paramserver.store.row_filter import build_filter, hash_keys
from headrace.paramserver.store.table_file_format import (
    CRC32C,
    FORMAT_VERSION,
    INDEX_ENTRY,
    INDEX_HEAD,
    INNER_KEY_BYTES,
    MAGIC,
    OFFSET_DIGITS,
    PROPERTIES_NAME,
    SIZE_DIGITS,
    TRAILER_BYTES,
    TYPE_VALUE,
    entry_dtype,
    entry_head,
    mask_crc,
    varint,
)
from headrace.schemas.row_keys import key_prefix

__all__ = ["TableFileWriter"]

_Array = npt.NDArray[Any]

# ON DISK: RocksDB's.
_HANDLES_BYTES = 40
_NO_COMPRESSION = b"\0"
_FILTER_NAME = b"fullfilter.rocksdb.BuiltinBloomFilter"
_UNKNOWN_COLUMN_FAMILY = 0x7FFFFFFF

# What is filled and written at a time: it should stay in the processor's cache.
_CHUNK_BYTES = 1 << 20


class TableFileWriter:
    """Writes one file; used once: `write`, or `begin`, `add` and `finish`.

    Thread: any; it blocks, and other Python threads run meanwhile, but for fractions of a millisecond.
    """

    def __init__(self, *, block_bytes: int, bloom_bits_per_key: int, buffer: memoryview | None = None) -> None:
        """Start with nothing.

        Args:
            block_bytes: Size of a block, about: one row at least.
            bloom_bits_per_key: See `StoreConfig`.
            buffer: See `DirectFileWriter`; one of its own when None.
        """
        self._block_bytes = block_bytes
        self._bloom_bits_per_key = bloom_bits_per_key
        self._buffer = buffer or write_buffer()
        self._file: DirectFileWriter | None = None
        self._offset = 0
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._index: list[tuple[bytes, _Array, int]] = []  # prefix, last row of each block, bytes of a block
        self._num_blocks = self._num_rows = self._value_bytes = 0
        self._chunks: dict[int, _Array] = {}  # by rows of a block
        self._chunk_value_bytes = -1

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def write(self, path: Path, runs: Sequence[Run | CoalescedRun]) -> int:
        """Write rows to a new file and sync it; return its size in bytes.

        Args:
            path: Where; replaced when it is there.
            runs: One row at least; in the order of their keys, none of them conditional.

        Raises:
            OSError: The disk failed; what is there is no table.
        """
        try:
            self.begin(path)
            for run in runs:
                self.add(run)
            return self.finish()
        finally:
            self.close()

    def begin(self, path: Path) -> None:
        """Make the file, or empty the one that is there. `finish` or `close` it.

        Raises:
            OSError: The disk failed.
        """
        self._file = DirectFileWriter(path, self._buffer)

    def add(self, run: Run | CoalescedRun) -> None:
        """Write rows whose keys are above all before; of each, 8 bytes stay in memory, and some more of each block.

        Raises:
            OSError: The disk failed; what is there is no table.
        """
        assert self._file is not None, "a file that has begun"
        self._write_run(self._file, run)

    def finish(self) -> int:
        """Write what a table ends with, sync it, and return its size in bytes. REQUIRES: one row at least.

        Raises:
            OSError: The disk failed; what is there is no table.
        """
        assert self._file is not None, "a file that has begun"
        self._write_tail(self._file)
        self._file.sync()
        self.close()
        return self._offset

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_run(self, file: DirectFileWriter, run: Run | CoalescedRun) -> None:
        prefix = key_prefix(run.table_id, run.layout.shard)
        size, value_bytes = run.row_ids.size, run.layout.dtype.itemsize
        entry = entry_dtype(value_bytes)
        rows_per_block = max(1, self._block_bytes // (entry.itemsize + 4))
        blocks_per_chunk = max(1, _CHUNK_BYTES // _block_dtype(value_bytes, rows_per_block).itemsize)
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
        self._hashes.append(hash_keys(prefix, run.row_ids))
        self._num_rows += size
        self._value_bytes += size * value_bytes

    def _blocks(self, value_bytes: int, num_blocks: int, num_rows: int) -> _Array:
        """Return blocks with all in them that depends on neither table nor rows; those of many small tables are one."""
        if value_bytes != self._chunk_value_bytes:  # or each kind of table would keep some
            self._chunks.clear()
            self._chunk_value_bytes = value_bytes
        blocks = self._chunks.get(num_rows)
        if blocks is None or blocks.size < num_blocks:
            blocks = self._chunks[num_rows] = _new_chunk(value_bytes, num_blocks, num_rows)
        return blocks[:num_blocks]

    def _add_index(self, prefix: bytes, last_rows: _Array, block_bytes: int) -> None:
        """Note blocks that lie one after the other from here on."""
        self._index.append((prefix, last_rows, block_bytes))
        self._num_blocks += last_rows.size

    def _index_block(self) -> bytes:
        # All at once, and not with each run's blocks: of many small tables that would take longer than their rows.
        counts = [last_rows.size for _, last_rows, _ in self._index]
        sizes = np.repeat(np.array([block_bytes for _, _, block_bytes in self._index], np.int64), counts)
        index = np.zeros(self._num_blocks, INDEX_ENTRY)
        index["head"] = np.frombuffer(INDEX_HEAD, "V3")
        index["prefix"] = np.repeat(np.frombuffer(b"".join(prefix for prefix, _, _ in self._index), "V8"), counts)
        index["row"] = np.concatenate([last_rows for _, last_rows, _ in self._index])
        index["offset"] = _padded_varints(np.cumsum(sizes) - sizes, OFFSET_DIGITS)
        index["size"] = _padded_varints(sizes - TRAILER_BYTES, SIZE_DIGITS)
        return index.tobytes() + _restarts(np.arange(self._num_blocks) * INDEX_ENTRY.itemsize)

    def _write_tail(self, file: DirectFileWriter) -> None:
        data_bytes = self._offset
        filter_block = build_filter(np.concatenate(self._hashes), bits_per_key=self._bloom_bits_per_key)
        filter_handle = self._put_block(file, filter_block)
        index_block = self._index_block()
        index_handle = self._put_block(file, index_block)
        properties = self._properties(data_bytes, len(index_block), len(filter_block))
        properties_handle = self._put_block(file, _plain_block(properties))
        metaindex = _plain_block({_FILTER_NAME: filter_handle, PROPERTIES_NAME: properties_handle})
        metaindex_handle = self._put_block(file, metaindex)
        handles = (metaindex_handle + index_handle).ljust(_HANDLES_BYTES, b"\0")
        footer = bytes((CRC32C,)) + handles + FORMAT_VERSION.to_bytes(4, "little") + MAGIC
        self._put(file, footer)

    def _properties(self, data_bytes: int, index_bytes: int, filter_bytes: int) -> dict[bytes, bytes]:
        numbers = {
            "column.family.id": _UNKNOWN_COLUMN_FAMILY,
            "creation.time": 0,
            "data.size": data_bytes,
            "deleted.keys": 0,
            "filter.size": filter_bytes,
            "fixed.key.length": 0,
            "format.version": FORMAT_VERSION,
            "index.key.is.user.key": 1,
            "index.size": index_bytes,
            "index.value.is.delta.encoded": 0,
            "merge.operands": 0,
            "num.data.blocks": self._num_blocks,
            "num.entries": self._num_rows,
            "num.filter_entries": self._num_rows,
            "num.range-deletions": 0,
            "oldest.key.time": 0,
            "raw.key.size": self._num_rows * INNER_KEY_BYTES,
            "raw.value.size": self._value_bytes,
            "tail.start.offset": data_bytes,
        }
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
        named = texts | {name: varint(number) for name, number in numbers.items()}
        return {b"rocksdb." + name.encode(): named[name] for name in sorted(named)}

    def _put_block(self, file: DirectFileWriter, contents: bytes) -> bytes:
        """Write a block and return its handle."""
        handle = varint(self._offset) + varint(len(contents))
        sealed = contents + _NO_COMPRESSION
        self._put(file, sealed + mask_crc(np.array([crc32c(sealed)], np.uint32)).tobytes())
        return handle

    def _put(self, file: DirectFileWriter, data: bytes | memoryview) -> None:
        file.write(data)
        self._offset += len(data)


def _padded_varints(numbers: Any, digits: int) -> _Array:
    """Return numbers as varints of equal length, uint8[…, digits]: leading zeros are legal in them."""
    shifted = np.asarray(numbers)[..., None] >> (7 * np.arange(digits))
    varints: _Array = (shifted & 0x7F | 0x80).astype(np.uint8)
    varints[..., -1] &= 0x7F
    return varints


@functools.lru_cache(maxsize=256)
def _block_dtype(value_bytes: int, num_rows: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("entries", entry_dtype(value_bytes), (num_rows,)),
            ("restarts", "<u4", (num_rows,)),
            ("num_restarts", "<u4"),
            ("compression", "V1"),
            ("crc", "<u4"),
        ]
    )


def _new_chunk(value_bytes: int, num_blocks: int, num_rows: int) -> _Array:
    blocks = np.zeros(num_blocks, _block_dtype(value_bytes, num_rows))
    head = entry_head(value_bytes)
    blocks["entries"]["head"] = np.frombuffer(head, f"V{len(head)}")
    blocks["entries"]["tag"] = TYPE_VALUE  # with sequence number 0, to which RocksDB adds the file's
    blocks["restarts"] = np.arange(num_rows) * entry_dtype(value_bytes).itemsize
    blocks["num_restarts"] = num_rows
    return blocks


def _seal_blocks(blocks: _Array) -> None:
    """Write the checksums."""
    size, data = blocks.dtype.itemsize, blocks.view(np.uint8).data
    crcs = [crc32c(data[at : at + size - 4]) for at in range(0, len(data), size)]
    blocks["crc"] = mask_crc(np.array(crcs, np.uint32))


def _chunks(num_rows: int, rows_per_block: int, blocks_per_chunk: int) -> list[tuple[int, int, int]]:
    """Return (first row, number of blocks, rows in each) of equal blocks to be written together."""
    chunks = []
    num_full = num_rows // rows_per_block
    for block in range(0, num_full, blocks_per_chunk):
        chunks.append((block * rows_per_block, min(blocks_per_chunk, num_full - block), rows_per_block))
    if num_rows % rows_per_block:
        chunks.append((num_full * rows_per_block, 1, num_rows % rows_per_block))
    return chunks


def _plain_block(entries: dict[bytes, bytes]) -> bytes:
    """Return a block of a few entries, whose keys are no rows'; given in their order."""
    block, starts = b"", []
    for key, value in entries.items():
        starts.append(len(block))
        block += b"\0" + varint(len(key)) + varint(len(value)) + key + value
    return block + _restarts(np.array(starts))


def _restarts(offsets: _Array) -> bytes:
    return np.append(offsets, offsets.size).astype("<u4").tobytes()
