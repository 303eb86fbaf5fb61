"""A server's data directory: its manifest, its shards' directories, and the lock of the server that uses it.

    DIR/headrace.json   manifest: format, server id, number of shards; written once
    DIR/LOCK            flock held by the supervisor and each of its shard processes; holds the supervisor's pid
    DIR/shard-0000/     one directory per shard; its log, there from the start, and its store are the shard's affair

Shard processes inherit the lock's open file description. So the lock is free only when the last of them has ended,
even if the supervisor was killed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.system.durable import fsync_path, write_file
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.snapshot_manifest import shard_folder

__all__ = ["FORMAT_VERSION", "LOCK_NAME", "MANIFEST_NAME", "DataDir", "Manifest", "check_data_dir", "is_in_use"]

MANIFEST_NAME = "headrace.json"
LOCK_NAME = "LOCK"
# ON DISK: raise it when an older Headrace must not open the directory.
FORMAT_VERSION = 1
_FORMAT = "headrace-data"
_TEMPORARY_NAME = MANIFEST_NAME + ".tmp"
_LOG_NAME = "log"
# Besides shard directories without a record, a directory that is not a store yet may hold what the file system or an
# interrupted first start created.
_HARMLESS = frozenset({"lost+found", LOCK_NAME, _TEMPORARY_NAME})
_SHARD_NAME = re.compile(r"shard-[0-9]{4}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of `headrace.json`."""

    format_version: int  # of the directory's layout
    server_id: str  # identity of the store (a UUID)
    num_shards: int  # fixed


class DataDir:
    """A directory claimed by this process.

    `claim` checks the directory, and locks it if it holds a store; it writes nothing. `prepare` then creates what is
    missing. In between a server can bind its ports, and fail with nothing written.

    Attributes:
        path: The directory, absolute.
        manifest: Of the store, or of the one that `prepare` will create.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock | None) -> None:
        """Use `claim`."""
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def claim(cls, path: Path, *, num_shards: int | None) -> Self:
        """Check a directory, which may be missing, and lock it if it holds a store.

        Without `num_shards`, a store keeps its number of shards, and a new one gets 1.

        Raises:
            ConfigError: Not a directory, in use, not accessible, not ours, or of another number of shards.
            CorruptionError: The manifest cannot be read.
        """
        path = path.absolute()
        if not _has_store(path):
            new = Manifest(format_version=FORMAT_VERSION, server_id=str(uuid.uuid4()), num_shards=num_shards or 1)
            return cls(path, new, None)
        lock = _lock(path)
        try:
            manifest = _read_manifest(path, num_shards)
        except BaseException:
            lock.close()
            raise
        return cls(path, manifest, lock)

    @property
    def lock_fd(self) -> int:
        """File descriptor of the lock; a process that inherits it holds the lock too."""
        assert self._lock is not None, "prepare() comes first"
        return self._lock.fd

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard."""
        return self.path / shard_folder(shard)

    def prepare(self) -> None:
        """Create what is missing, durably, and take the lock if it is not taken.

        Raises:
            ConfigError: Not writable, or another server was faster.
            CorruptionError: A shard's directory is gone.
            StorageError: The disk is full or fails.
        """
        try:
            if self._lock is None:
                self._create()
            _check_shards(self.path, self.manifest)
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as exc:
            _fail(self.path, exc)

    def _create(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        if (self.path / MANIFEST_NAME).exists():
            raise ConfigError(f"--data {self.path}: another server made it just now; start again")
        for shard in range(self.manifest.num_shards):
            (self.shard_path(shard) / _LOG_NAME).mkdir(parents=True, exist_ok=True)
            fsync_path(self.shard_path(shard))
        # The manifest comes last: where it exists, every shard's log has existed.
        data = json.dumps({"format": _FORMAT, **asdict(self.manifest)}, indent=2).encode() + b"\n"
        write_file(self.path / MANIFEST_NAME, data, aside=self.path / _TEMPORARY_NAME)
        for path in missing:
            fsync_path(path.parent)

    def close(self) -> None:
        """Give the lock up; shard processes that still run keep it. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_data_dir(path: Path, *, num_shards: int | None) -> Manifest | None:
    """Check a directory as `claim` and `prepare` do, but write nothing and take no lock: a server may be using it.

    Returns:
        The manifest; None if there is no store yet.

    Raises:
        ConfigError: Not a directory, not accessible, not ours, or of another number of shards.
        CorruptionError: The manifest cannot be read, or a shard's directory is gone.
    """
    path = path.absolute()
    if not _has_store(path):
        return None
    manifest = _read_manifest(path, num_shards)
    try:
        _check_shards(path, manifest)
    except OSError as exc:
        _fail(path, exc)
    return manifest


def is_in_use(path: Path) -> bool:
    """Return whether a server, or a process that a killed server left behind, holds the directory.

    Raises:
        ConfigError: Not accessible.
    """
    try:
        with FileLock(path / LOCK_NAME, creates=False) as lock:
            return not lock.try_lock()
    except FileNotFoundError:
        return False
    except OSError as exc:
        _fail(path, exc)


def _has_store(path: Path) -> bool:
    """Return whether there is a store; otherwise check that nothing foreign is there."""
    try:
        names = set(os.listdir(path))
        if MANIFEST_NAME in names:
            return True
        foreign = sorted(name for name in names - _HARMLESS if not _is_empty_shard(path / name))
    except FileNotFoundError:
        return False
    except OSError as exc:
        _fail(path, exc)
    if foreign:
        raise ConfigError(
            f"--data {path}: holds {foreign[0]!r} and no {MANIFEST_NAME}: not a directory of Headrace's; "
            "name a new or an empty one"
        )
    return False


def _check_shards(path: Path, manifest: Manifest) -> None:
    for shard in range(manifest.num_shards):
        # An empty directory is a disk that is not mounted, not a new shard: its acked rows would vanish silently.
        folder = path / shard_folder(shard)
        if not (folder / _LOG_NAME).is_dir():
            what = "log" if folder.is_dir() else "directory"
            raise CorruptionError(f"{folder}: the shard's {what} is missing; is its disk mounted?")


def _is_empty_shard(path: Path) -> bool:
    if not (_SHARD_NAME.fullmatch(path.name) and path.is_dir()):
        return False
    return all(below.name == _LOG_NAME and below.is_dir() and not any(below.iterdir()) for below in path.iterdir())


def _lock(path: Path) -> FileLock:
    try:
        lock = FileLock(path / LOCK_NAME)
    except OSError as exc:
        _fail(path, exc)
    try:
        if lock.try_lock():
            return lock
        holder = os.pread(lock.fd, 20, 0).decode("ascii", "replace").strip()
    except OSError as exc:  # a file system without flock
        lock.close()
        _fail(path, exc)
    lock.close()
    raise ConfigError(f"--data {path}: in use by another server" + (f" (pid {holder})" if holder.isdigit() else ""))


def _read_manifest(path: Path, required_shards: int | None) -> Manifest:
    file = path / MANIFEST_NAME
    try:
        values: Any = json.loads(file.read_bytes())
    except OSError as exc:
        _fail(path, exc)
    except (ValueError, RecursionError) as exc:
        raise CorruptionError(f"{file}: not a manifest: {exc}") from exc
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise CorruptionError(f"{file}: not a manifest of a Headrace server")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(f"{file}: format version {version}, this Headrace reads {FORMAT_VERSION}")
    server_id, num_shards = values.get("server_id"), values.get("num_shards")
    if not isinstance(server_id, str) or type(num_shards) is not int or not 1 <= num_shards <= MAX_SHARDS:
        raise CorruptionError(f"{file}: server_id {server_id!r} or num_shards {num_shards!r} makes no sense")
    if required_shards not in (None, num_shards):
        raise ConfigError(
            f"--shards {required_shards}: {path} was made with {num_shards} shards, and rows stay where "
            "they were hashed to; leave --shards out or name a new directory"
        )
    return Manifest(format_version=FORMAT_VERSION, server_id=server_id, num_shards=num_shards)


def _fail(path: Path, exc: OSError) -> NoReturn:
    """Raise our error for an `OSError` on the directory."""
    if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
        raise ConfigError(f"--data {path}: not writable ({exc.strerror})") from exc
    if isinstance(exc, NotADirectoryError | FileExistsError):
        raise ConfigError(f"--data {path}: not a directory") from exc
    if isinstance(exc, FileNotFoundError):
        raise ConfigError(f"--data {path}: cannot be made there ({exc.strerror})") from exc
    if exc.errno in _FULL:
        raise StorageError(f"{path}: the disk is full ({exc.strerror})") from exc
    raise StorageError(f"{path}: {exc.strerror or exc}") from exc
