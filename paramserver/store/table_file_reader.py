"""Rows straight out of files of RocksDB's format, a few megabytes at a time, with no Python object a row.

An iterator of RocksDB costs Python 1.4 µs a row. Here the blocks of a file are read as they lie on the disk, checked
against their checksums, and their entries found for many blocks at once: in numpy, one step an entry of a block. Blocks
in which every entry is equally long (`table_file.py` writes no others) need not even that.

What is read: block-based tables of format version 5 without compression, merges and deletions of ranges, with crc32c
checksums and an index of one level; so all that a store writes unless it compresses. For anything else
`TableFileReader.open` returns None, and the caller has RocksDB's iterator. Metadata may be deleted; a row's key never
is, and a file that says so is damaged.

Source: RocksDB's table/block_based (block.cc, format.cc) and table/table_properties.cc.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headrace.paramserver.store.table_file_blocks import any_entries, equal_entries, read_entries, varints_at
from headrace.paramserver.store.table_file_format import (
    CRC32C,
    FORMAT_VERSION,
    INDEX_ENTRY,
    INDEX_HEAD,
    MAGIC,
    OFFSET_DIGITS,
    PROPERTIES_NAME,
    SIZE_DIGITS,
    TAG_BYTES,
    TRAILER_BYTES,
    mask_crc,
    read_handle,
    read_varint,
)
from headrace.schemas.errors import CorruptionError, StorageError
from headrace.schemas.row_keys import KEY_BYTES

__all__ = ["TableFileReader"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# ON DISK: RocksDB's.
_FOOTER_BYTES = 53
_TRAILER = np.dtype([("compression", "u1"), ("sum", "<u4")])

# What is read and decoded at a time: it, and what is made of it, should stay in the processor's cache.
_REGION_BYTES = 1 << 20
# Fewer blocks of one length in a row are decoded with their neighbours.
_MIN_EQUAL_BLOCKS = 8


class TableFileReader:
    """One file, open. Use `open`, and with `with`.

    Attributes:
        path: The file.
        num_entries: Keys that it holds, rows or not.

    Thread: any, one at a time; reading and copying let other Python threads run.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Made by `open`."""
        self.path = path
        self.num_entries = 0
        self._fd = fd
        self._file_bytes = 0
        self._index_at = (0, 0)
        self._meta_blocks: list[tuple[int, int]] = []  # offset and size of all blocks without rows
        self._has_user_keys = False
        self._separators: list[bytes] = []  # not below any key of the block, below every key of the next
        self._offsets = self._sizes = np.empty(0, np.int64)

    @classmethod
    def open(cls, path: Path) -> TableFileReader | None:
        """Open a file; None when it is of a kind that is not read here.

        Raises:
            CorruptionError: It is no table.
            StorageError: It cannot be read.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise StorageError(f"{path}: {exc.strerror}") from exc
        reader = cls(path, fd)
        try:
            if reader._read_tail():
                return reader
        except (IndexError, ValueError) as exc:
            reader.close()
            raise CorruptionError(f"{path}: not a table of RocksDB's: {exc}") from exc
        except BaseException:
            reader.close()
            raise
        reader.close()
        return None

    def close(self) -> None:
        """Close; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read(
        self,
        prefix: bytes,
        *,
        first_row: int,
        last_row: int,
        record_bytes: int,
        header_bytes: int,
        region_bytes: int = _REGION_BYTES,
    ) -> Iterator[tuple[_Ids, _Array]]:
        """Yield the rows of a column shard in the order of their ids, some megabytes at a time.

        Args:
            prefix: What their keys begin with, of table and column shard.
            first_row: Least row id.
            last_row: Greatest row id, itself included.
            record_bytes: Length of a record.
            header_bytes: Length of a deleted row's, if it has not been padded.
            region_bytes: How much of the file is read at a time, about; what is made of it takes twice as much.

        Yields:
            int64[n] row ids, and `V{record_bytes}`[n] records, deleted ones padded with zeros.

        Raises:
            CorruptionError: A block is damaged, a value is no record of the table, or a row's key is deleted.
            StorageError: The file cannot be read.
        """
        self._need_index()
        low, high = (prefix + row.to_bytes(8, "big") for row in (first_row, last_row))
        first = bisect.bisect_left(self._separators, low)
        end = min(bisect.bisect_left(self._separators, high) + 1, len(self._separators))
        buffer = np.empty(0, np.uint8)
        for begin, stop in self._regions(first, end, region_bytes):
            size = int(self._offsets[stop - 1] + self._sizes[stop - 1]) + TRAILER_BYTES - int(self._offsets[begin])
            if buffer.size < size:
                buffer = np.empty(max(size, region_bytes), np.uint8)
            data = buffer[:size]  # overwritten by the next region: what is yielded are copies
            self._read_region(begin, stop, data)
            for ids, records in self._decode(data, begin, stop, prefix, record_bytes, header_bytes):
                if ids.size and (ids[0] < first_row or ids[-1] > last_row):
                    keep = slice(int(np.searchsorted(ids, first_row)), int(np.searchsorted(ids, last_row, "right")))
                    ids, records = ids[keep], records[keep]
                if ids.size:
                    yield ids, records

    def count_by_prefix(self, prefix_bytes: int) -> Counter[bytes]:
        """Return about how many entries have keys that begin with the same so many bytes.

        Blocks with keys of several prefixes are counted; of a row of blocks with one, the first, as dense as the rest.

        Raises:
            CorruptionError: A block is damaged.
            StorageError: The file cannot be read.
        """
        self._need_index()
        counts: Counter[bytes] = Counter()
        prefixes = [separator[:prefix_bytes] for separator in self._separators]
        # A block's keys lie between the separators before and behind it. RocksDB may shorten these: an odd one says
        # nothing of the keys but where they end.
        whole = [prefix if prefix == before else b"" for before, prefix in pairwise([b"", *prefixes])]
        for prefix, group in groupby(range(len(whole)), key=whole.__getitem__):
            blocks = list(group)
            for block in blocks[:1] if prefix else blocks:
                size = int(self._sizes[block])
                found = Counter(key[:prefix_bytes] for key, _ in self._entries_of(int(self._offsets[block]), size))
                if prefix:
                    found[prefix] = found[prefix] * int(self._sizes[blocks].sum()) // size
                counts.update(found)
        return counts

    def blocks(self) -> tuple[_Ids, _Ids]:
        """Return offset and size of each block of the file, in their order, int64[n] both; a size is without trailer.

        Raises:
            CorruptionError: The index is damaged.
            StorageError: The file cannot be read.
        """
        self._need_index()
        meta = np.array(self._meta_blocks, np.int64).T
        offsets, sizes = np.append(self._offsets, meta[0]), np.append(self._sizes, meta[1])
        order = np.argsort(offsets)
        return offsets[order], sizes[order]

    def check_blocks(self, data: memoryview, start: int, offsets: _Ids, sizes: _Ids) -> None:
        """Check blocks of the file against their checksums, in a quarter of the time that one by one would take.

        Args:
            data: A piece of the file, with all of the blocks and what lies behind each.
            start: Where in the file the piece begins.
            offsets: int64[n], where in the file the blocks begin.
            sizes: int64[n].

        Raises:
            CorruptionError: One does not match; it is named.
        """
        begins = offsets - start
        ends = begins + sizes
        trailers = np.ndarray((len(data) - TRAILER_BYTES + 1,), _TRAILER, data, 0, (1,))[ends]
        # Of the byte behind a block too.
        crcs = [crc32c(data[begin : end + 1]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        bad = np.flatnonzero((mask_crc(np.array(crcs, np.uint32)) != trailers["sum"]) | (trailers["compression"] != 0))
        if bad.size:
            raise CorruptionError(f"{self.path}: the block at byte {offsets[bad[0]]} does not match its checksum")

    def _entries_of(self, offset: int, size: int) -> list[tuple[bytes, bytes]]:
        try:
            return list(read_entries(self._read_block(offset, size)))
        except (IndexError, ValueError) as exc:
            raise CorruptionError(f"{self.path}: the block at byte {offset} holds no entries: {exc}") from exc

    def _regions(self, first: int, end: int, region_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of blocks that lie one behind the other, of some megabytes each."""
        while first < end:
            stop = int(np.searchsorted(self._offsets, self._offsets[first] + region_bytes))
            stop = min(max(stop, first + 1), end)
            yield first, stop
            first = stop

    def _read_region(self, begin: int, stop: int, data: _Array) -> None:
        start, view = int(self._offsets[begin]), data.data
        try:
            size = os.preadv(self._fd, [view], start)
        except OSError as exc:
            raise StorageError(f"{self.path}: {exc.strerror}") from exc
        if size != data.size:
            raise CorruptionError(f"{self.path}: ends at byte {start + size}, before byte {start + data.size}")
        self.check_blocks(view, start, self._offsets[begin:stop], self._sizes[begin:stop])

    def _decode(
        self, data: _Array, begin: int, stop: int, prefix: bytes, record_bytes: int, header_bytes: int
    ) -> Iterator[tuple[_Ids, _Array]]:
        offsets, sizes = self._offsets[begin:stop] - self._offsets[begin], self._sizes[begin:stop]
        layout = prefix, record_bytes, header_bytes
        # Blocks of one length in a row; what has been passed over since `done` is of any lengths.
        bounds = np.flatnonzero((np.diff(sizes) != 0) | (np.diff(offsets) != sizes[:-1] + TRAILER_BYTES)) + 1
        done = 0
        for first, end in zip([0, *bounds.tolist()], [*bounds.tolist(), sizes.size], strict=True):
            if end - first < _MIN_EQUAL_BLOCKS:
                continue
            equal = equal_entries(data, int(offsets[first]), int(sizes[first]), end - first, prefix, record_bytes)
            if equal is not None:
                if done < first:
                    yield self._decode_any(data, begin + done, offsets[done:first], sizes[done:first], layout)
                yield equal
                done = end
        if done < sizes.size:
            yield self._decode_any(data, begin + done, offsets[done:], sizes[done:], layout)

    def _decode_any(
        self, data: _Array, first: int, offsets: _Ids, sizes: _Ids, layout: tuple[bytes, int, int]
    ) -> tuple[_Ids, _Array]:
        try:
            return any_entries(data, offsets, sizes, *layout)
        except (IndexError, ValueError) as exc:
            at = int(self._offsets[first])
            raise CorruptionError(f"{self.path}: the blocks from byte {at} on hold no records: {exc}") from exc

    def _read_tail(self) -> bool:
        """Read footer, properties and index; return whether the file is of the kind that is read here."""
        self._file_bytes = size = os.fstat(self._fd).st_size
        footer = self._pread(max(size - _FOOTER_BYTES, 0), min(size, _FOOTER_BYTES))
        if len(footer) != _FOOTER_BYTES or footer[-8:] != MAGIC:
            raise CorruptionError(f"{self.path}: not a table of RocksDB's, or not all of it")
        if int.from_bytes(footer[41:45], "little") != FORMAT_VERSION or footer[0] != CRC32C:
            return False
        (meta_offset, meta_size, at) = read_handle(footer, 1)
        (index_offset, index_size, _) = read_handle(footer, at)
        meta = dict(read_entries(self._read_block(meta_offset, meta_size)))
        properties_offset, properties_size, _ = read_handle(meta.get(PROPERTIES_NAME, b""), 0)
        properties = dict(read_entries(self._read_block(properties_offset, properties_size)))
        if not _is_plain(properties):
            return False
        self._index_at = index_offset, index_size
        handles = [read_handle(handle, 0)[:2] for handle in meta.values()]
        self._meta_blocks = [self._index_at, (meta_offset, meta_size), *handles]
        self.num_entries = _number(properties, b"num.entries")
        self._has_user_keys = _number(properties, b"index.key.is.user.key") == 1
        return True

    def _need_index(self) -> None:
        if not self._separators:
            try:
                self._read_index()
            except (IndexError, ValueError) as exc:
                raise CorruptionError(f"{self.path}: its index cannot be read: {exc}") from exc

    def _read_index(self) -> None:
        index = self._read_block(*self._index_at)
        num_blocks = int.from_bytes(index[-4:], "little")
        entries = index[: len(index) - 4 * num_blocks - 4]
        if num_blocks and len(entries) == num_blocks * INDEX_ENTRY.itemsize:
            rows = np.frombuffer(entries, INDEX_ENTRY)
            # As `table_file.py` writes it: numbers padded to one length.
            if (rows["head"] == np.frombuffer(INDEX_HEAD, "V3")).all():
                keys = np.ndarray(rows.shape, f"V{KEY_BYTES}", entries, len(INDEX_HEAD), rows.strides)
                self._separators = keys.tolist()
                self._offsets, self._sizes = (
                    ((rows[name] & 0x7F).astype(np.int64) << (7 * np.arange(digits))).sum(axis=1)
                    for name, digits in (("offset", OFFSET_DIGITS), ("size", SIZE_DIGITS))
                )
                return
        # Every entry is a restart point, so it holds its key and handle whole, in either way of writing values.
        data = np.frombuffer(index, np.uint8)
        starts = np.frombuffer(index, "<u4", num_blocks, len(entries)).astype(np.int64)
        shared, at = varints_at(data, starts)
        if shared.any():
            raise ValueError("an index entry without its whole key")
        key_bytes, at = varints_at(data, at)
        keys_end = at + key_bytes
        self._offsets, values_at = varints_at(data, keys_end)
        self._sizes, _ = varints_at(data, values_at)
        ends = keys_end if self._has_user_keys else keys_end - TAG_BYTES
        self._separators = [entries[start:end] for start, end in zip(at.tolist(), ends.tolist(), strict=True)]

    def _read_block(self, offset: int, size: int) -> bytes:
        data = self._pread(offset, size + TRAILER_BYTES)
        self.check_blocks(memoryview(data), offset, np.array([offset]), np.array([size]))
        return data[:size]

    def _pread(self, offset: int, size: int) -> bytes:
        end = self._file_bytes
        # Before it is read: damage may ask for more than there is memory.
        if offset + size <= end:
            try:
                data = os.pread(self._fd, size, offset)
            except OSError as exc:
                raise StorageError(f"{self.path}: {exc.strerror}") from exc
            if len(data) == size:
                return data
            end = offset + len(data)
        raise CorruptionError(f"{self.path}: ends at byte {end}, {size} bytes from {offset} are used")


def _is_plain(properties: dict[bytes, bytes]) -> bool:
    if properties.get(b"rocksdb.compression") != b"NoCompression":
        return False
    if int.from_bytes(properties.get(b"rocksdb.block.based.table.index.type", bytes(4)), "little"):
        return False
    return not any(_number(properties, name) for name in (b"merge.operands", b"num.range-deletions"))


def _number(properties: dict[bytes, bytes], name: bytes) -> int:
    return read_varint(properties.get(b"rocksdb." + name, b"\0"), 0)[0]
