"""A shard's rows and metadata in RocksDB, and nothing else: no log, no queue, no asyncio.

RocksDB's own write-ahead log is off: the update log is the truth, and what a crash takes from the memtable is replayed
from it. The position in the log up to which rows are here (`applied_seq`) lies among the rows, in the same atomic
write, so it never says more than is there.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgpack

from headrace.paramserver.files.direct_file import supports_direct_io, write_buffer
from headrace.paramserver.store.pending import CoalescedRun, Run
from headrace.paramserver.store.rocks_db import STALL_POLL_S, RocksDb
from headrace.paramserver.store.row_counts import FileRowCounts
from headrace.paramserver.store.run_entries import entries_of
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.paramserver.store.table_file import TableFileWriter
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.identity_claims import CLAIMS_SHARD
from headrace.schemas.row_keys import META_PREFIX
from headrace.schemas.tables import ColumnShard

__all__ = ["RowStore"]

# ON DISK: never rename. Metadata keys that begin so are the store's own; the callers' may not.
_OWN_META = b"store/"
_FORMAT_KEY = META_PREFIX + b"store/format"
_SEQ_KEY = META_PREFIX + b"store/applied_seq"
_LAYOUTS_PREFIX = META_PREFIX + b"store/layouts/"
_FORMAT = b"1"

# In the store's directory: the file that is being written. RocksDB takes no notice of such a name.
_INCOMING_NAME = "incoming-rows"
# RocksDB's own limit, at which it slows down writers; a file that is taken in is not held up by it.
_MAX_LEVEL_0_FILES = 20

_T = TypeVar("_T")


class RowStore:
    """One shard's RocksDB. Use `open`.

    Attributes:
        path: Its directory.
        applied_seq: Position in the update log up to which everything is here; 0 before the first.
        durable_seq: Position up to which everything survives a crash: older log records are not needed to recover.

    Thread: methods block and may be called from any thread; only one at a time may write.
    """

    def __init__(self, db: RocksDb, config: StoreConfig) -> None:
        """Take over an open RocksDB."""
        self.path = db.path
        self._incoming = db.path / _INCOMING_NAME
        self._write_buffer: memoryview | None = None
        self._db = db
        self._config = config
        self._flush_lock = threading.Lock()
        # What was ever written is counted by whoever writes, what of it was flushed by whoever flushes: of numbers that
        # both change, one thread would undo what the other has just done.
        self._put_rows: Counter[int] = Counter()  # by table id; those of files that were taken in are not among them
        self._put_rows_flushed: Counter[int] = Counter()
        self._written_bytes = self._flushed_bytes = 0
        self._row_counts = FileRowCounts(db.path)
        self._num_errors = 0  # RocksDB's, when it last took in a file
        self._is_new = False  # what tells that the store is ours is in no file yet
        self._layouts: dict[int, tuple[ColumnShard, ...]] = {}
        self.applied_seq = 0
        self.durable_seq = 0

    @classmethod
    def open(cls, path: Path, *, config: StoreConfig | None = None) -> RowStore:
        """Open the store in a directory, made when it is not there.

        Raises:
            ConfigError: The directory cannot be used, belongs to a running process, or holds a newer format.
            CorruptionError: A file is damaged or missing.
            StorageError: The disk failed.
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
            raise StorageError(f"store directory {path}: {exc.strerror}") from exc
        db = RocksDb.open(path, rocks_options(config, is_direct=is_direct))
        store = cls(db, config)
        try:
            store._incoming.unlink(missing_ok=True)  # of a crash; what RocksDB has taken in has another name
            store._load()
        except BaseException:
            db.close()
            raise
        return store

    @classmethod
    def open_read_only(cls, path: Path, *, config: StoreConfig | None = None) -> RowStore:
        """Open a checkpoint without changing it; others may have it open so too.

        Raises:
            ConfigError: There is no store, it holds a newer format, or may not be read.
            CorruptionError: A file is damaged or missing.
            StorageError: The disk failed.
        """
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
            # Else a crash came before the first flush: a store at position 0.
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
        except (ValueError, TypeError) as exc:
            raise CorruptionError(f"store {self.path} has unreadable metadata: {exc}") from exc

    def close(self) -> None:
        """Flush and close. Idempotent.

        Raises:
            StorageError: The last rows could not be written; they are in the update log.
        """
        with self._flush_lock:
            if self._db.close():
                self.durable_seq = self.applied_seq

    def read_meta(self) -> dict[bytes, bytes]:
        """Return all of the callers' metadata.

        Raises:
            StorageError: It cannot be read.
        """
        prefix = len(META_PREFIX)
        meta = {key[prefix:]: value for key, value in self._scan_meta()}
        return {key: value for key, value in meta.items() if not key.startswith(_OWN_META)}

    def layouts(self, table_id: int) -> tuple[ColumnShard, ...]:
        """Return the column shards that rows of a table have ever been stored in."""
        return self._layouts.get(table_id, ())

    def write(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        meta: Mapping[bytes, bytes] | None = None,
        applied_seq: int | None = None,
    ) -> None:
        """Write rows, metadata and the log position in one atomic write; it survives a crash after `flush`.

        Args:
            keys: Row keys, ascending, each once.
            values: Records.
            meta: By key, without `META_PREFIX`; not beginning with `store/`. An empty value removes a key.
            applied_seq: Everything up to here is in the store once this is written.

        Raises:
            StorageError: Nothing of it was written, or the disk failed.
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
        runs: Sequence[Run | CoalescedRun],
        *,
        claims: Sequence[Run | CoalescedRun] = (),
        meta: Mapping[bytes, bytes],
        applied_seq: int,
    ) -> None:
        """Write coalesced rows, metadata and the log position.

        The rows go first: many of them as a file, fewer in writes that are short because no other Python thread runs
        meanwhile. The log position goes last. A crash in between leaves rows of batches that are then replayed: no
        harm.

        Args:
            runs: Rows, each run of another column shard, none of them conditional.
            claims: Entries of the index of identities (`identity_index.py`), likewise.
            meta: As in `write`.
            applied_seq: Everything up to here is in the store once this is written.

        Raises:
            StorageError: The disk failed; rows may have been written, the log position was not.
        """
        layouts = self._new_layouts(runs)
        if layouts:
            self._write(
                [_LAYOUTS_PREFIX + b"%d" % table_id for table_id in layouts], [*map(_pack_shards, layouts.values())]
            )
            self._layouts.update(layouts)
        runs = [run for run in (*runs, *claims) if run.row_ids.size]
        if runs and sum(run.size_bytes for run in runs) >= self._config.file_bytes:
            self._take_in(sorted(runs, key=lambda run: (run.table_id, run.layout.shard)))
        else:
            self._put(runs)
        self.write([], [], meta=meta, applied_seq=applied_seq)

    def _put(self, runs: Sequence[Run | CoalescedRun]) -> None:
        for keys, values in entries_of(runs, self._config.rows_per_write):
            self._write(keys, values)
        for run in runs:
            if run.layout.shard != CLAIMS_SHARD:
                self._put_rows[run.table_id] += run.row_ids.size

    def _take_in(self, runs: Sequence[Run | CoalescedRun]) -> None:
        """Write rows to a file of RocksDB's format and have RocksDB make it one of its own."""
        config = self._config
        self._write_buffer = self._write_buffer or write_buffer()
        writer = TableFileWriter(
            block_bytes=config.block_bytes, bloom_bits_per_key=config.bloom_bits_per_key, buffer=self._write_buffer
        )
        try:
            # Where RocksDB could not remove the name under which it took the last file in, it is a file of the store.
            self._incoming.unlink(missing_ok=True)
            size_bytes = writer.write(self._incoming, runs)
        except OSError as exc:
            raise StorageError(f"store {self.path}: writing rows: {exc.strerror}") from exc
        while self._is_behind():
            time.sleep(STALL_POLL_S)
        if self._is_new:
            self.flush()  # or a crash would leave a file of rows that nobody knows
        while not self._db.ingest(self._incoming):
            self.flush()
        self._num_errors = int(self.rocksdb_property("rocksdb.background-errors"))
        # Durable already, but for the log position that follows: a flush shall come after so much to replay.
        self._written_bytes += size_bytes

    def _is_behind(self) -> bool:
        """Say whether RocksDB has so much to compact that one should wait for it."""
        if int(self.rocksdb_property("rocksdb.background-errors")) > self._num_errors:
            return False  # it may have stopped compacting; then it refuses the file too, and says why
        return int(self.rocksdb_property("rocksdb.num-files-at-level0")) >= _MAX_LEVEL_0_FILES

    def rocksdb_property(self, name: str) -> str:
        """Return a property of RocksDB's, such as `rocksdb.num-files-at-level0`; empty when it has none of the name.

        Raises:
            UnavailableError: The store is closed.
        """
        return self._db.property_value(name)

    def _new_layouts(self, runs: Sequence[Run | CoalescedRun]) -> dict[int, tuple[ColumnShard, ...]]:
        layouts: dict[int, tuple[ColumnShard, ...]] = {}
        for run in runs:
            known = layouts.get(run.table_id, self.layouts(run.table_id))
            if run.layout.shard not in known:
                layouts[run.table_id] = (*known, run.layout.shard)
        return layouts

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
        self._written_bytes += self._db.write(keys, values, removed)

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key; None where there is none. Other threads run meanwhile.

        Raises:
            CorruptionError: A block read from a file does not match its checksum.
            StorageError: The disk failed.
        """
        return self._db.get(keys)

    def flush(self) -> None:
        """Make everything written so far survive a crash. Other threads run, and may write, meanwhile.

        Raises:
            StorageError: The disk failed.
        """
        with self._flush_lock:
            seq, put_rows, written_bytes = self.applied_seq, self._put_rows.copy(), self._written_bytes
            self._db.flush()
            self._is_new = False
            self._put_rows_flushed, self._flushed_bytes = put_rows, written_bytes
            self.durable_seq = max(self.durable_seq, seq)

    def checkpoint(self, path: Path) -> None:
        """Make a copy of the store as it is now in a directory that is not there yet; files are shared by hard links.

        All Python threads wait while RocksDB links the files: some milliseconds, because the rows in memory are flushed
        before, during which other threads run. Nobody may write meanwhile.

        Args:
            path: On the same file system; its parent exists.

        Raises:
            StorageError: The disk failed, or the directory exists.
        """
        self.flush()
        self._db.checkpoint(path)

    def sorted_runs(self, prefix: bytes) -> list[list[Path]]:
        """Return the files that may hold keys of a prefix, in runs, newest first: a key's value is that of the first.

        Within a run files do not overlap, and are in the order of their keys. What is in no file yet is left out.

        Args:
            prefix: What the keys begin with (`key_prefix`).
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
        """About how many bytes have been written since the last flush."""
        return self._written_bytes - self._flushed_bytes

    def num_rows_estimate(self, table_id: int) -> int:
        """Return about how many rows a table has: overwritten ones may count more than once, deleted ones count."""
        return self.num_rows_estimates([table_id])[0]

    def num_rows_estimates(self, table_ids: Sequence[int]) -> list[int]:
        """Return `num_rows_estimate` of each table; RocksDB is asked once, whose list is one of all files."""
        in_files = self._row_counts.count(self._db.live_files())
        flushed = self._put_rows_flushed
        return [self._put_rows[table_id] - flushed[table_id] + in_files[table_id] for table_id in table_ids]

    def scan(
        self, prefix: bytes, *, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return an iterator over keys and values in their order, for audits and exports. Other threads wait at each.

        Args:
            prefix: What the keys begin with (`key_prefix`).
            start: First key; the prefix's first when None.
            limit: Most pairs.

        Raises:
            CorruptionError: A block does not match its checksum.
            StorageError: The disk failed.
        """
        return self._db.scan(prefix, start=start, limit=limit)

    def scan_now(self, prefix: bytes, *, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return an iterator over the pairs that there are now, whatever is written before it is used.

        Args:
            prefix: What the keys begin with; those that follow the last of them may come too.
            start: First key.

        Raises:
            StorageError: The disk failed. What the iterator raises is rocksdict's own: see `map_errors`.
        """
        pairs: Iterator[tuple[bytes, bytes]] = self._db.map_errors(
            lambda: self._db.raw.items(from_key=max(start, prefix))
        )
        return pairs

    def check_end(self, last_key: bytes) -> None:
        """Make sure that pairs of `scan_now` that are over ended with the last of the store, and not at damage.

        Rocksdict's iterator just ends there.

        Args:
            last_key: The last one that came, or the first one wanted when none did.

        Raises:
            CorruptionError: A block does not match its checksum.
            StorageError: The disk failed.
        """
        for _ in self._db.scan(b"", start=last_key, limit=2):
            pass  # the damage may be in the block of the first, or of the one behind it

    def map_errors(self, work: Callable[[], _T]) -> _T:
        """Call something that uses what `scan_now` has returned, with rocksdict's errors turned into ours.

        Raises:
            CorruptionError: A block does not match its checksum.
            StorageError: The disk failed.
        """
        return self._db.map_errors(work)

    def _scan_meta(self) -> Iterator[tuple[bytes, bytes]]:
        return self.scan(META_PREFIX)


def _pack_shards(shards: Sequence[ColumnShard]) -> bytes:
    packed: bytes = msgpack.packb([[shard.offset, shard.width] for shard in shards])
    return packed
