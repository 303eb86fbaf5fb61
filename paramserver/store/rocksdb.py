"""One RocksDB: its settings, its reads and writes, and our errors in place of rocksdict's."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import rocksdict

from headrace.paramserver.system.durable import ADVICE_WHEN_FULL, FULL_DISK
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, StorageError, UnavailableError

__all__ = ["STALL_POLL_S", "RocksDb", "StoreConfig", "largest_compaction_bytes", "rocks_options"]

# Poll interval while RocksDB is behind with flushes or compactions.
STALL_POLL_S = 0.005

_T = TypeVar("_T")

# Rocksdict writes it whenever it opens a directory, even for reading. It holds nothing that `rocks_options` does not.
_ROCKSDICT_FILE = "rocksdict-config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Settings of a shard's RocksDB.

    Attributes:
        block_cache_bytes: Memory for blocks, indexes and filters; the rest is read from files. `ShardConfig` sets a
            shard's.
        write_buffer_bytes: Memory of one RocksDB memtable; up to three exist. Larger ones leave fewer files to compact.
        block_bytes: Bytes that one point lookup reads and checks. Larger blocks need a smaller index.
        bloom_bits_per_key: 10 makes one lookup in a hundred read a block in vain; each bit costs 1/8 byte per row.
        max_background_jobs: Threads that flush and compact.
        rows_per_write: Rows of one write, during which no other Python thread runs: about 1.2 µs per row.
        max_open_files: Files that RocksDB keeps open (`system/limits.py`); reading another costs one more disk
            read.
        file_bytes: Writes of at least this many bytes go to RocksDB as a file, smaller ones through its memtable. A
            file takes a third of the time per row, but a few milliseconds to ingest and a later compaction.
    """

    block_cache_bytes: int = 32 << 20
    write_buffer_bytes: int = 64 << 20
    block_bytes: int = 8 << 10
    bloom_bits_per_key: int = 10
    max_background_jobs: int = 2
    rows_per_write: int = 2048
    max_open_files: int = 512
    file_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_cache_bytes", 1 << 20, 1 << 50),
            ("write_buffer_bytes", 1 << 16, 1 << 40),
            ("block_bytes", 1 << 10, 1 << 22),
            ("bloom_bits_per_key", 1, 30),
            ("max_background_jobs", 2, 256),
            ("rows_per_write", 1, 1 << 20),
            ("max_open_files", 20, 1 << 30),
            ("file_bytes", 0, 1 << 50),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"store setting {name} is {value}, not in {low}..{high}")


_LEVEL_0_FILES = 8
_LEVEL_1_BYTES = 1 << 30
_SUBCOMPACTIONS = 2


def largest_compaction_bytes(file_bytes: int) -> int:
    """Return about what RocksDB's largest compaction writes before it removes anything: of files of a size each."""
    return _LEVEL_0_FILES * file_bytes + _LEVEL_1_BYTES


def rocks_options(config: StoreConfig, *, is_direct: bool = False) -> Any:
    """Return RocksDB's options; `is_direct` bypasses the page cache and needs `supports_direct_io`."""
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(config.block_cache_bytes))
    table.set_block_size(config.block_bytes)
    table.set_bloom_filter(config.bloom_bits_per_key, False)
    table.set_format_version(5)
    # Whole keys, as in the files that we write: then blocks are decoded at once (`sst/table_reader.py`), and a scan of
    # rows of 284 bytes takes a fifth of the time, for 6 % more bytes.
    table.set_block_restart_interval(1)
    # The checksum of our own files and of the log, so all readers of blocks need one kind.
    table.set_checksum_type(rocksdict.ChecksumType.crc32c())
    # Indexes and filters count against the cache; those of the newest files stay there.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    # Trained floats hardly compress, and decompression costs reads.
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_write_buffer_size(config.write_buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_background_jobs(config.max_background_jobs)
    # Ingested files are long: by RocksDB's defaults every fourth would rewrite level 1, which is smaller than two of
    # them. A lookup asks at most this many files' bloom filters.
    options.set_level_zero_file_num_compaction_trigger(_LEVEL_0_FILES)
    options.set_max_bytes_for_level_base(_LEVEL_1_BYTES)
    # Ingestion waits while level 0 is full, and one compaction at a time empties it: several threads share it.
    options.set_max_subcompactions(_SUBCOMPACTIONS)
    # Sync files as they are written: one large sync would delay the update log's.
    options.set_bytes_per_sync(1 << 20)
    # Keep the page cache for lookups.
    options.set_use_direct_io_for_flush_and_compaction(is_direct)
    options.set_max_open_files(config.max_open_files)
    options.enable_statistics()  # the metrics need the cache's hits and misses
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(16 << 20)
    return options


class RocksDb:
    """Keys and values of one RocksDB, without its write-ahead log. Use `open`.

    Methods raise what `map_errors` does, and `UnavailableError` once closed.

    Thread: methods block; any thread, but only one at a time may write.
    """

    def __init__(self, path: Path, db: Any, links: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._db = db
        self._links = links
        # The type stub declares the properties as methods.
        self._options = cast(Any, rocksdict.WriteOptions())
        self._options.disable_wal = True
        # A stalled write returns at once instead of blocking with the GIL held.
        self._options.no_slowdown = True
        self._ingest_options = rocksdict.IngestExternalFileOptions()
        self._ingest_options.set_move_files(True)
        # A flush here would hold the GIL; the caller flushes, see `ingest`.
        self._ingest_options.set_allow_blocking_flush(False)

    @classmethod
    def open(cls, path: Path, options: Any, *, is_read_only: bool = False) -> RocksDb:
        """Open the RocksDB in a directory; create it unless `is_read_only`, which several processes may use at a time.

        For reading it opens a directory of links to the files, so nothing is written where others read.

        Raises ConfigError when the directory cannot be used or belongs to a running process; else as `map_errors`.
        """
        if not is_read_only:
            try:
                return cls(path, rocksdict.Rdict(str(path), options, access_type=rocksdict.AccessType.read_write()))
            except Exception as exc:
                raise _error_of(path, exc, path) from exc
        links = tempfile.TemporaryDirectory(prefix="headrace-read-")
        db = cls(path, None, links)
        try:
            for file in path.resolve().iterdir():
                if file.name != _ROCKSDICT_FILE:
                    (Path(links.name) / file.name).symlink_to(file)
            db._db = rocksdict.Rdict(links.name, options, access_type=rocksdict.AccessType.read_only())
        except Exception as exc:
            links.cleanup()
            raise db._error_of(exc) from exc
        return db

    @property
    def raw(self) -> Any:
        """Rocksdict's own object; wrap its calls in `map_errors`."""
        if self._db is None:
            raise UnavailableError("the store is closed")
        return self._db

    def close(self) -> bool:
        """Flush and close, releasing the directory even on failure. Return False when already closed."""
        db, self._db = self._db, None
        if db is None:
            return False
        try:
            self.map_errors(db.close)
        finally:
            if self._links is not None:
                self._links.cleanup()
        return True

    def map_errors(self, work: Callable[[], _T]) -> _T:
        """Call `work`, with rocksdict's errors mapped to ours.

        Raises:
            CorruptionError: A block does not match its checksum.
            StorageError: The disk failed.
        """
        try:
            return work()
        except HeadraceError:
            raise
        except Exception as exc:
            raise self._error_of(exc) from exc

    def _error_of(self, exc: Exception) -> HeadraceError:
        return _error_of(self.path, exc, self.path if self._links is None else Path(self._links.name))

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], removed: Sequence[bytes] = ()) -> int:
        """Write pairs and remove keys in one atomic write, waiting out stalls; return its approximate size in bytes."""
        while True:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(keys, values, strict=True):
                batch[key] = value
            for key in removed:
                batch.delete(key)
            size_bytes = int(batch.size_in_bytes())
            if self.map_errors(lambda: self._try(lambda: self.raw.write(batch, self._options))):  # noqa: B023
                return size_bytes
            time.sleep(STALL_POLL_S)  # a batch cannot be written twice, so make a new one

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as exc:
            if str(exc).startswith("Result incomplete"):
                return False
            raise
        return True

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove the keys from `begin` on and before `end`, waiting out stalls."""
        while not self.map_errors(lambda: self._try(lambda: self.raw.delete_range(begin, end, self._options))):
            time.sleep(STALL_POLL_S)

    def ingest(self, file: Path) -> bool:
        """Move a table file into the database; return False when RocksDB must flush first.

        Its memtable's rows are older than the file's, and would otherwise be taken for newer.
        """
        return self.map_errors(lambda: self._try_ingest(file))

    def _try_ingest(self, file: Path) -> bool:
        try:
            self.raw.ingest_external_file([str(file)], self._ingest_options)
        except Exception as exc:
            if "requires flush" in str(exc):
                return False
            raise
        return True

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none. Releases the GIL."""
        values: list[bytes | None] = self.map_errors(lambda: self.raw.get(keys)) if keys else []
        return values

    def scan(
        self, prefix: bytes, *, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield pairs of keys with a prefix, in order: from `start`, at most `limit`. Holds the GIL at each."""
        iterator = self.map_errors(lambda: self.raw.iter())
        self.map_errors(lambda: iterator.seek(max(start or prefix, prefix)))
        left = -1 if limit is None else limit
        while left != 0 and iterator.valid():
            key = iterator.key()
            if not key.startswith(prefix):
                return
            yield key, iterator.value()
            left -= 1
            self.map_errors(iterator.next)
        # After an error an iterator claims to be at its end.
        self.map_errors(iterator.status)

    def scan_chunks(self, prefix: bytes, *, start: bytes, sizes: Iterable[int]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Return an iterator over chunks of the pairs with a prefix that are there now; later writes do not show.

        It makes the objects of a chunk at once with the GIL held, which is several times faster than `scan`.

        Args:
            prefix: Of the keys.
            start: First key, if it is after the prefix.
            sizes: How many pairs to read at a time; the iterator ends after the last.
        """
        pairs = self.map_errors(lambda: self.raw.items(from_key=max(start, prefix)))

        def chunks() -> Iterator[list[tuple[bytes, bytes]]]:
            last_key = start
            for size in sizes:
                chunk = self.map_errors(lambda: list(itertools.islice(pairs, size)))  # noqa: B023
                last_key = chunk[-1][0] if chunk else last_key
                if is_last := len(chunk) < size:
                    # Rocksdict's iterator just ends at damage, which may be in this key's block or in the next one.
                    deque(self.scan(b"", start=last_key, limit=2), maxlen=0)
                if chunk and not last_key.startswith(prefix):
                    chunk, is_last = [pair for pair in chunk if pair[0].startswith(prefix)], True
                if chunk:
                    yield chunk
                if is_last:
                    return

        return chunks()

    def flush(self) -> None:
        """Write RocksDB's memtable to files. Releases the GIL; others may write meanwhile."""
        self.map_errors(lambda: self.raw.flush())

    def checkpoint(self, path: Path) -> None:
        """Hard-link all files into a new directory. Holds the GIL."""
        self.map_errors(lambda: rocksdict.Checkpoint(self.raw).create_checkpoint(str(path)))

    def live_files(self) -> list[dict[str, Any]]:
        """Return RocksDB's description of each of its files; those of level 0 newest first."""
        files: list[dict[str, Any]] = self.map_errors(lambda: self.raw.live_files())
        return files

    def property_value(self, name: str) -> str:
        """Return a property such as `rocksdb.num-files-at-level0`; empty when unknown."""
        return self.map_errors(lambda: self.raw.property_value(name)) or ""


def _error_of(path: Path, exc: Exception, opened: Path) -> HeadraceError:
    """Return our error for one of rocksdict's, which differ mostly in their text; `opened` is its name of `path`."""
    text = " ".join(str(exc).split()).replace(str(opened), str(path))
    if isinstance(exc, rocksdict.DbClosedError):
        return UnavailableError(f"store {path} is closed")
    if "lock hold by" in text or "While lock file" in text:
        return ConfigError(f"store directory {path} is in use by another process")
    if re.search(r"Permission denied|Read-only file system|Not a directory", text):
        return ConfigError(f"store directory {path} cannot be used: {text}")
    if text.startswith("Corruption"):
        return CorruptionError(f"store {path} is damaged: {text}")
    is_full = any(os.strerror(number) in text for number in FULL_DISK)
    return StorageError(f"store {path}: {text}{ADVICE_WHEN_FULL * is_full}", is_disk_full=is_full)
