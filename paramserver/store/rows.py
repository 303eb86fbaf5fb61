"""A shard's rows and metadata in RocksDB: no log, no queue, no asyncio.

RocksDB's own write-ahead log is off: the update log is the truth, and replaying it restores what a crash takes from
memory. The log position of the rows (`applied_seq`) is in the same atomic write, so it never says more than is stored.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.coalescing import CoalescedRows, SortedRun, entries_of
from headrace.paramserver.store.rocksdb import STALL_POLL_S, RocksDb, StoreConfig, rocks_options
from headrace.paramserver.store.row_counts import FileRowCounts
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.paramserver.system.direct_file import supports_direct_io, write_buffer
from headrace.paramserver.system.durable import disk_error
from headrace.schemas.errors import ConfigError, CorruptionError, InvariantError
from headrace.schemas.row_records import META_PREFIX, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard

__all__ = ["RowStore"]

_Ids = npt.NDArray[np.int64]

# ON DISK: never rename. Metadata keys that begin so are the store's own; the callers' may not.
_OWN_META = b"store/"
_FORMAT_KEY = META_PREFIX + b"store/format"
_SEQ_KEY = META_PREFIX + b"store/applied_seq"
_LAYOUTS_PREFIX = META_PREFIX + b"store/layouts/"
_ERASED_PREFIX = META_PREFIX + b"store/erased/"
_FORMAT = b"1"

# The file being written, in the store's directory. RocksDB ignores such a name.
_INCOMING_NAME = "incoming-rows"
# RocksDB slows writes at this limit, but not the ingestion of files.
_MAX_LEVEL_0_FILES = 20


class RowStore:
    """One shard's RocksDB. Use `open`.

    Reads and writes raise StorageError when the disk failed, CorruptionError when a block does not match its checksum,
    and UnavailableError when the store is closed.

    Attributes:
        path: Its directory.
        applied_seq: Log position up to which everything is stored; 0 at first.
        durable_seq: Position up to which everything survives a crash: recovery needs no older log records.

    Thread: methods block; any thread, but only one at a time may write.
    """

    def __init__(self, db: RocksDb, config: StoreConfig) -> None:
        self.path = db.path
        self._incoming = db.path / _INCOMING_NAME
        self._write_buffer: memoryview | None = None
        self._db = db
        self._config = config
        self._flush_lock = threading.Lock()
        # Writers count what was written, the flusher what of it was flushed: one number for both would lose updates.
        self._put_rows: Counter[int] = Counter()  # by table id, without rows of ingested files
        self._put_rows_flushed: Counter[int] = Counter()
        self._written_bytes = self._flushed_bytes = 0
        self._row_counts = FileRowCounts(db.path)
        self._num_errors = 0  # RocksDB's, at the last ingestion
        self._is_new = False  # the format key is in no file yet
        self._layouts: dict[int, tuple[ColumnShard, ...]] = {}
        self._erased: set[int] = set()
        self.applied_seq = 0
        self.durable_seq = 0

    @classmethod
    def open(cls, path: Path, *, config: StoreConfig | None = None) -> RowStore:
        """Open the store in a directory, creating it if needed.

        Raises ConfigError when the directory cannot be used, belongs to a running process, or has another format; and
        StorageError, or CorruptionError when a file is damaged or missing.
        """
        config = config or StoreConfig()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"store directory {path} cannot be made: {exc.strerror}") from exc
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"store directory {path} is not writable")
        try:
            is_direct = supports_direct_io(path)
        except OSError as exc:
            raise disk_error(f"store directory {path}: {exc.strerror}", exc) from exc
        db = RocksDb.open(path, rocks_options(config, is_direct=is_direct))
        store = cls(db, config)
        try:
            store._incoming.unlink(missing_ok=True)  # left by a crash; ingested files have other names
            store._load()
        except BaseException:
            db.close()
            raise
        return store

    @classmethod
    def open_read_only(cls, path: Path, *, config: StoreConfig | None = None) -> RowStore:
        """Open a checkpoint without changing it; several processes may do so at a time. Raises as `open` does."""
        config = config or StoreConfig()
        if not (path / "CURRENT").is_file():
            raise ConfigError(f"{path}: there is no store")
        db = RocksDb.open(path, rocks_options(config), is_read_only=True)
        store = cls(db, config)
        try:
            if db.get([_FORMAT_KEY]) != [None]:
                store._load()
            elif next(store.scan(b"", limit=1), None) is not None:
                raise ConfigError(f"{path} holds a RocksDB that is not Headrace's")
            # Otherwise a crash came before the first flush: a store at position 0.
        except BaseException:
            db.close()
            raise
        return store

    def _load(self) -> None:
        meta = dict(self._scan_meta())
        stored_format = meta.get(_FORMAT_KEY)
        if stored_format is None:
            if next(self.scan(b"", limit=1), None) is not None:
                raise ConfigError(f"{self.path} holds a RocksDB that is not Headrace's")
            self._write([_FORMAT_KEY], [_FORMAT])
            self._is_new = True
        elif stored_format != _FORMAT:
            raise ConfigError(
                f"store {self.path} has format {stored_format.decode()}, this version reads {_FORMAT.decode()}"
            )
        try:
            self.applied_seq = self.durable_seq = int(meta.get(_SEQ_KEY, b"0"))
            for key, value in meta.items():
                if key.startswith(_LAYOUTS_PREFIX):
                    shards = tuple(ColumnShard(offset=o, width=w) for o, w in msgpack.unpackb(value))
                    self._layouts[int(key[len(_LAYOUTS_PREFIX) :])] = shards
                elif key.startswith(_ERASED_PREFIX):
                    self._erased.add(int(key[len(_ERASED_PREFIX) :]))
        except (ValueError, TypeError) as exc:
            raise CorruptionError(f"store {self.path} has unreadable metadata: {exc}") from exc

    def close(self) -> None:
        """Flush and close. Idempotent; after a StorageError the last rows are still in the update log."""
        with self._flush_lock:
            if self._db.close():
                self.durable_seq = self.applied_seq

    def read_meta(self) -> dict[bytes, bytes]:
        """Return all of the callers' metadata."""
        prefix = len(META_PREFIX)
        meta = {key[prefix:]: value for key, value in self._scan_meta()}
        return {key: value for key, value in meta.items() if not key.startswith(_OWN_META)}

    def layouts(self, table_id: int) -> tuple[ColumnShard, ...]:
        """Return the column shards in which rows of a table were ever stored."""
        return self._layouts.get(table_id, ())

    def write(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        meta: Mapping[bytes, bytes] | None = None,
        applied_seq: int | None = None,
    ) -> None:
        """Write rows, metadata and the log position in one atomic write, which survives a crash after `flush`.

        `keys` are ascending, each once. `meta` is by key, without `META_PREFIX` and not beginning with `store/`; an
        empty value removes a key. Everything up to `applied_seq` is in the store after this write.
        """
        if meta and any(key.startswith(_OWN_META) for key in meta):
            raise ConfigError(f"metadata keys that begin with {_OWN_META.decode()} are the store's own")
        removed = [META_PREFIX + key for key, value in (meta or {}).items() if not value]
        meta_keys = [META_PREFIX + key for key, value in (meta or {}).items() if value]
        meta_values = [value for value in (meta or {}).values() if value]
        if applied_seq is not None:
            meta_keys.append(_SEQ_KEY)
            meta_values.append(b"%d" % applied_seq)
        self._write([*keys, *meta_keys], [*values, *meta_values], removed)
        if applied_seq is not None:
            self.applied_seq = applied_seq

    def write_runs(
        self,
        runs: Sequence[SortedRun | CoalescedRows],
        *,
        meta: Mapping[bytes, bytes],
        applied_seq: int,
    ) -> None:
        """Write runs of different column shards, metadata and the log position.

        A deleted row is removed. If another layout of its table has some of the columns, it stays as a mark: a header
        that hides older records there (`expiry/sweep.py` settles such rows).

        Rows go first, many as a file, few in short writes, because no other Python thread runs during a write. The log
        position goes last: after a crash in between, the batches are replayed over their rows.
        """
        layouts = self._new_layouts(runs)
        if layouts:
            packed = [msgpack.packb([[s.offset, s.width] for s in shards]) for shards in layouts.values()]
            self._write([_LAYOUTS_PREFIX + b"%d" % table_id for table_id in layouts], packed)
            self._layouts.update(layouts)
        runs, removed = self._without_removed(runs)
        if runs and sum(run.size_bytes for run in runs) >= self._config.file_bytes:
            self._ingest_file(sorted(runs, key=lambda run: (run.table_id, run.layout.shard)))
        else:
            self._put(runs)
        for table_id, shard, row_ids in removed:
            for start in range(0, row_ids.size, self._config.rows_per_write):
                self.remove(
                    table_id, encode_keys(table_id, shard, row_ids[start : start + self._config.rows_per_write])
                )
        self.write([], [], meta=meta, applied_seq=applied_seq)

    def _without_removed(
        self, runs: Sequence[SortedRun | CoalescedRows]
    ) -> tuple[list[SortedRun | CoalescedRows], list[tuple[int, ColumnShard, _Ids]]]:
        """Return the rows to write, and the ids of those to remove by table and column shard."""
        written: list[SortedRun | CoalescedRows] = []
        removed = []
        for run in runs:
            shard = run.layout.shard
            if (is_deleted := run.is_deleted) is not None and not any(
                shard.overlaps(other) for other in self.layouts(run.table_id) if other != shard
            ):
                removed.append((run.table_id, shard, run.row_ids[is_deleted]))
                run = run.take(np.flatnonzero(~is_deleted))
            if run.row_ids.size:
                written.append(run)
        return written, removed

    def remove(self, table_id: int, keys: Sequence[bytes]) -> None:
        """Remove keys of a table for good; RocksDB frees their space as it compacts. Other threads must not write."""
        self._write([], [], keys)
        # Until then each removal is an entry of a file, like a row.
        self._put_rows[table_id] += len(keys)

    def erase(self, table_ids: Iterable[int]) -> None:
        """Remove all rows of tables, unless that was done; RocksDB frees their space as it compacts.

        No row of such a number may be written afterwards. Other threads must not write.
        """
        for table_id in table_ids:
            if table_id in self._erased:
                continue
            self._db.delete_range(key_prefix(table_id), key_prefix(table_id + 1))
            # After the rows: a crash in between erases again.
            self._write([_ERASED_PREFIX + b"%d" % table_id], [b"1"], [_LAYOUTS_PREFIX + b"%d" % table_id])
            self._erased.add(table_id)
            self._layouts.pop(table_id, None)

    def _put(self, runs: Sequence[SortedRun | CoalescedRows]) -> None:
        num_rows, num_written = sum(run.row_ids.size for run in runs), 0
        for keys, values in entries_of(runs, self._config.rows_per_write):
            num_written += len(keys)
            if len(keys) != len(values) or num_written > num_rows:
                raise InvariantError(f"store {self.path}: {len(keys)} keys with {len(values)} records to write")
            self._write(keys, values)
        if num_written != num_rows:
            raise InvariantError(f"store {self.path}: {num_rows} rows to write, {num_written} written")
        for run in runs:
            self._put_rows[run.table_id] += run.row_ids.size

    def _ingest_file(self, runs: Sequence[SortedRun | CoalescedRows]) -> None:
        config = self._config
        self._write_buffer = self._write_buffer or write_buffer()
        writer = TableFileWriter(
            block_bytes=config.block_bytes, bloom_bits_per_key=config.bloom_bits_per_key, buffer=self._write_buffer
        )
        try:
            # If RocksDB could not remove this name after the last ingestion, it still names a file of the store.
            self._incoming.unlink(missing_ok=True)
            size_bytes = writer.write(self._incoming, runs)
        except OSError as exc:
            raise disk_error(f"store {self.path}: writing rows: {exc.strerror}", exc) from exc
        while self._is_behind():
            time.sleep(STALL_POLL_S)
        if self._is_new:
            self.flush()  # or a crash would leave rows in a store without a format
        while not self._db.ingest(self._incoming):
            self.flush()
        self._num_errors = int(self.rocksdb_property("rocksdb.background-errors"))
        # Durable already, except for the log position: this bounds the replay, so count it.
        self._written_bytes += size_bytes

    def _is_behind(self) -> bool:
        """Return whether compaction is so far behind that ingestion should wait."""
        if int(self.rocksdb_property("rocksdb.background-errors")) > self._num_errors:
            return False  # it may have stopped compacting; then it refuses the file and says why
        return int(self.rocksdb_property("rocksdb.num-files-at-level0")) >= _MAX_LEVEL_0_FILES

    def rocksdb_property(self, name: str) -> str:
        """Return a RocksDB property such as `rocksdb.num-files-at-level0`; empty when unknown."""
        return self._db.property_value(name)

    def _new_layouts(self, runs: Sequence[SortedRun | CoalescedRows]) -> dict[int, tuple[ColumnShard, ...]]:
        layouts: dict[int, tuple[ColumnShard, ...]] = {}
        for run in runs:
            known = layouts.get(run.table_id, self.layouts(run.table_id))
            if run.layout.shard not in known:
                layouts[run.table_id] = (*known, run.layout.shard)
        return layouts

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
        self._written_bytes += self._db.write(keys, values, removed)

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none. Releases the GIL."""
        return self._db.get(keys)

    def flush(self) -> None:
        """Make everything written so far survive a crash. Releases the GIL; others may write meanwhile."""
        with self._flush_lock:
            seq, put_rows, written_bytes = self.applied_seq, self._put_rows.copy(), self._written_bytes
            self._db.flush()
            self._is_new = False
            self._put_rows_flushed, self._flushed_bytes = put_rows, written_bytes
            self.durable_seq = max(self.durable_seq, seq)

    def checkpoint(self, path: Path) -> None:
        """Copy the store, as hard links, into a new directory on the same file system. Nobody may write meanwhile.

        The GIL is held while RocksDB links files: some milliseconds, because the flush comes before.
        """
        self.flush()
        self._db.checkpoint(path)

    def sorted_runs(self, prefix: bytes) -> list[list[Path]]:
        """Return the files that may hold keys of a prefix, as sorted runs, newest first: a key's first value counts.

        Within a run, files are disjoint and in key order. Rows that are in no file yet are missing.
        """
        end = prefix + b"\xff" * 16
        runs: list[list[Path]] = []
        levels: dict[int, list[tuple[bytes, Path]]] = {}
        for file in self._db.live_files():
            start_key, end_key = file["start_key"] or b"", file["end_key"] or b""
            if start_key <= end and end_key >= prefix:
                place = (start_key, self.path / file["name"].lstrip("/"))
                if file["level"]:
                    levels.setdefault(file["level"], []).append(place)
                else:
                    runs.append([place[1]])  # RocksDB lists them newest first
        return runs + [[path for _, path in sorted(levels[level])] for level in sorted(levels)]

    @property
    def unflushed_bytes(self) -> int:
        """About how many bytes were written since the last flush."""
        return self._written_bytes - self._flushed_bytes

    def num_rows_estimate(self, table_id: int) -> int:
        """Return about how many rows a table has; overwritten rows and removals may count until RocksDB compacts."""
        return self.num_rows_estimates([table_id])[0]

    def num_rows_estimates(self, table_ids: Sequence[int]) -> list[int]:
        """Return `num_rows_estimate` of each table, from one listing of RocksDB's files."""
        in_files = self._row_counts.count(self._db.live_files())
        flushed = self._put_rows_flushed
        return [self._put_rows[table_id] - flushed[table_id] + in_files[table_id] for table_id in table_ids]

    def scan(
        self, prefix: bytes, *, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield at most `limit` pairs of a key prefix, in key order, from `start` on. Other threads wait at each."""
        return self._db.scan(prefix, start=start, limit=limit)

    def scan_chunks(self, prefix: bytes, *, start: bytes, sizes: Iterable[int]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Return an iterator over chunks of the present pairs of a prefix; see `RocksDb.scan_chunks`."""
        return self._db.scan_chunks(prefix, start=start, sizes=sizes)

    def _scan_meta(self) -> Iterator[tuple[bytes, bytes]]:
        return self.scan(META_PREFIX)
