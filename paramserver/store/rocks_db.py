"""One RocksDB, with our errors in place of rocksdict's, which has no classes for most of what RocksDB reports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import rocksdict

from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, StorageError, UnavailableError

__all__ = ["STALL_POLL_S", "RocksDb"]

# While RocksDB is behind with flushes or compactions, it is asked again this often.
STALL_POLL_S = 0.005

_T = TypeVar("_T")


class RocksDb:
    """Keys and values of one RocksDB, whose own write-ahead log is off. Use `open`.

    Every method raises what `map_errors` does, and `UnavailableError` once it is closed.

    Attributes:
        path: Its directory.

    Thread: methods block and may be called from any thread; only one at a time may write.
    """

    def __init__(self, path: Path, db: Any) -> None:
        """Take over an open RocksDB."""
        self.path = path
        self._db = db
        # Its type stub takes the properties for methods.
        self._options = cast(Any, rocksdict.WriteOptions())
        self._options.disable_wal = True
        # A write that RocksDB would hold up returns at once instead: it would hold up all of Python with it.
        self._options.no_slowdown = True
        self._ingest_options = rocksdict.IngestExternalFileOptions()
        self._ingest_options.set_move_files(True)
        # RocksDB would flush with all of Python held up; the caller does it, see `ingest`.
        self._ingest_options.set_allow_blocking_flush(False)

    @classmethod
    def open(cls, path: Path, options: Any, *, is_read_only: bool = False) -> RocksDb:
        """Open what is in a directory.

        Args:
            path: The directory.
            options: As `rocks_options` makes them.
            is_read_only: Change nothing; others may have it open so too. Else it is made where there is none.

        Raises:
            ConfigError: The directory cannot be used, or belongs to a running process.
            CorruptionError: A file is damaged or missing.
            StorageError: The disk failed.
        """
        access = rocksdict.AccessType.read_only() if is_read_only else rocksdict.AccessType.read_write()
        try:
            return cls(path, rocksdict.Rdict(str(path), options, access_type=access))
        except Exception as exc:
            raise _error_of(path, exc) from exc

    @property
    def raw(self) -> Any:
        """Rocksdict's own object; what it raises is for `map_errors`."""
        if self._db is None:
            raise UnavailableError(f"store {self.path} is closed")
        return self._db

    def close(self) -> bool:
        """Flush and close; it lets go of the directory even when that fails. Return False when it was closed before."""
        db, self._db = self._db, None
        if db is None:
            return False
        self.map_errors(db.close)
        return True

    def map_errors(self, work: Callable[[], _T]) -> _T:
        """Call something with rocksdict's errors turned into ours.

        Raises:
            CorruptionError: A block does not match its checksum.
            StorageError: The disk failed.
        """
        try:
            return work()
        except HeadraceError:
            raise
        except Exception as exc:
            raise _error_of(self.path, exc) from exc

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], removed: Sequence[bytes] = ()) -> int:
        """Write pairs, and remove keys, in one atomic write; return about how many bytes that was.

        As soon as RocksDB keeps up.
        """
        while True:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(keys, values, strict=True):
                batch[key] = value
            for key in removed:
                batch.delete(key)
            size_bytes = int(batch.size_in_bytes())
            if self.map_errors(lambda: self._try_write(batch)):  # noqa: B023
                return size_bytes
            time.sleep(STALL_POLL_S)  # and the batch is used up

    def _try_write(self, batch: Any) -> bool:
        try:
            self.raw.write(batch, self._options)
        except Exception as exc:
            if str(exc).startswith("Result incomplete"):
                return False
            raise
        return True

    def ingest(self, file: Path) -> bool:
        """Make a file of RocksDB's format one of its own; return False when it has to be flushed before.

        Rows in its memory are older than those of the file, and would be taken for newer.
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
        """Return the value of each key; None where there is none. Other threads run meanwhile."""
        values: list[bytes | None] = self.map_errors(lambda: self.raw.get(keys)) if keys else []
        return values

    def scan(
        self, prefix: bytes, *, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values in the order of the keys. Other threads wait a little at each.

        Args:
            prefix: What the keys begin with.
            start: First key; the prefix's first when None.
            limit: Most pairs.
        """
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
        # An iterator that met an error says that it is at its end.
        self.map_errors(iterator.status)

    def flush(self) -> None:
        """Write what is in memory to files. Other threads run, and may write, meanwhile."""
        self.map_errors(lambda: self.raw.flush())

    def checkpoint(self, path: Path) -> None:
        """Link its files into a directory that is not there yet. All Python threads wait meanwhile."""
        self.map_errors(lambda: rocksdict.Checkpoint(self.raw).create_checkpoint(str(path)))

    def live_files(self) -> list[dict[str, Any]]:
        """Return what RocksDB tells of each of its files; those of level 0 newest first."""
        files: list[dict[str, Any]] = self.map_errors(lambda: self.raw.live_files())
        return files

    def property_value(self, name: str) -> str:
        """Return a property of RocksDB's, such as `rocksdb.num-files-at-level0`; empty when it has none of the name."""
        return self.map_errors(lambda: self.raw.property_value(name)) or ""


def _error_of(path: Path, exc: Exception) -> HeadraceError:
    """Return our error for one of rocksdict's, which are told apart by their words only."""
    text = " ".join(str(exc).split())
    if isinstance(exc, rocksdict.DbClosedError):
        return UnavailableError(f"store {path} is closed")
    if "lock hold by" in text or "While lock file" in text:
        return ConfigError(f"store directory {path} is in use by another process")
    if re.search(r"Permission denied|Read-only file system|Not a directory", text):
        return ConfigError(f"store directory {path} cannot be used: {text}")
    if text.startswith("Corruption"):
        return CorruptionError(f"store {path} is damaged: {text}")
    return StorageError(f"store {path}: {text}")
