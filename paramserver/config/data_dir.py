"""The directory of a server: who it belongs to, what is in it, and who uses it now.

    DIR/headrace.json   manifest: format, server id, number of shards; written once
    DIR/LOCK            flock held by the supervisor and by each of its shard processes; names the supervisor's pid
    DIR/shard-0000/     one directory a shard; its log, there from the start, and its store are the shard's affair

The lock is taken on one open file description that the shard processes inherit. So it is free only when the last of
them is gone, also after a supervisor that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from headrace.paramserver.config.server_config import MAX_SHARDS
from headrace.paramserver.files.durable_files import fsync_path
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
# What may lie in a directory that is not ours yet: a file system's own, and what an interrupted first start leaves
# (that, and directories of shards without a record).
_HARMLESS = frozenset({"lost+found", LOCK_NAME, _TEMPORARY_NAME})
_SHARD_NAME = re.compile(r"shard-[0-9]{4}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What `headrace.json` holds.

    Attributes:
        format_version: Version of the directory's layout.
        server_id: Identity of the store (a UUID): another value means another store.
        num_shards: Number of shards, fixed.
    """

    format_version: int
    server_id: str
    num_shards: int


class DataDir:
    """A directory claimed by this process.

    `claim` checks and, where there is a store already, takes the lock; it writes nothing. `prepare` then makes what is
    missing. In between a server can bind its ports, and fail with nothing written.

    Attributes:
        path: The directory, absolute.
        manifest: Of the store; of the one that `prepare` will make when there is none yet.
    """

    def __init__(self, path: Path, manifest: Manifest, lock_fd: int | None) -> None:
        """Use `claim`."""
        self.path = path
        self.manifest = manifest
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, path: Path, *, num_shards: int | None) -> Self:
        """Return the directory, checked, and locked when it holds a store.

        Args:
            path: Directory, or where one is to be made.
            num_shards: As asked for; None takes what the directory has, or 1 for a new one.

        Raises:
            ConfigError: Not a directory, in use, not accessible, somebody else's, or of another number of shards.
            CorruptionError: The manifest cannot be read.
        """
        path = path.absolute()
        if not _has_store(path):
            new = Manifest(format_version=FORMAT_VERSION, server_id=str(uuid.uuid4()), num_shards=num_shards or 1)
            return cls(path, new, None)
        lock_fd = _lock(path)
        try:
            manifest = _read_manifest(path, num_shards)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, manifest, lock_fd)

    @property
    def lock_fd(self) -> int:
        """File descriptor that holds the lock; a process that inherits it holds the lock too."""
        assert self._lock_fd is not None, "prepare() comes first"
        return self._lock_fd

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard."""
        return self.path / shard_folder(shard)

    def prepare(self) -> None:
        """Make what is missing, durably, and take the lock if it is not taken.

        Raises:
            ConfigError: Not writable, or another server was faster.
            CorruptionError: A shard's directory is gone.
            StorageError: The disk is full or fails.
        """
        try:
            if self._lock_fd is None:
                self._make()
            _check_shards(self.path, self.manifest)
            assert self._lock_fd is not None
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as exc:
            _fail(self.path, exc)

    def _make(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(self.path)
        if (self.path / MANIFEST_NAME).exists():
            raise ConfigError(f"--data {self.path}: another server made it just now; start again")
        for shard in range(self.manifest.num_shards):
            (self.shard_path(shard) / _LOG_NAME).mkdir(parents=True, exist_ok=True)
            fsync_path(self.shard_path(shard))
        # Last: where there is a manifest, every shard's log has been there.
        _write_manifest(self.path, self.manifest)
        for path in missing:
            fsync_path(path.parent)

    def close(self) -> None:
        """Give the lock up; idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_data_dir(path: Path, *, num_shards: int | None) -> Manifest | None:
    """Check a directory as `claim` and `prepare` do, but write nothing and take no lock: a server may run in it.

    Args:
        path: Directory, or where one is to be made.
        num_shards: As asked for; None takes what the directory has.

    Returns:
        What its manifest holds; None where there is no store yet.

    Raises:
        ConfigError: Not a directory, not accessible, somebody else's, or of another number of shards.
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
    """Return whether a server, or a process that a killed one has left for the moment, holds the directory.

    Raises:
        ConfigError: Not accessible.
    """
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as exc:
        _fail(path, exc)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _has_store(path: Path) -> bool:
    """Return whether there is a store, or else nothing of anybody's.

    Raises:
        ConfigError: Not a directory, not accessible, or somebody else's.
    """
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
        # An empty one is a disk that is not mounted, and no new shard: its acked rows would be gone in silence.
        folder = path / shard_folder(shard)
        if not (folder / _LOG_NAME).is_dir():
            what = "log" if folder.is_dir() else "directory"
            raise CorruptionError(f"{folder}: the shard's {what} is missing; is its disk mounted?")


def _is_empty_shard(path: Path) -> bool:
    if not (_SHARD_NAME.fullmatch(path.name) and path.is_dir()):
        return False
    return all(below.name == _LOG_NAME and below.is_dir() and not any(below.iterdir()) for below in path.iterdir())


def _lock(path: Path) -> int:
    """Return a file descriptor that holds the directory's lock."""
    try:
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        _fail(path, exc)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip()
        os.close(lock_fd)
        raise ConfigError(
            f"--data {path}: in use by another server" + (f" (pid {holder})" if holder.isdigit() else "")
        ) from exc
    except OSError as exc:  # a file system without flock
        os.close(lock_fd)
        _fail(path, exc)
    return lock_fd


def _read_manifest(path: Path, asked_shards: int | None) -> Manifest:
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
    if asked_shards not in (None, num_shards):
        raise ConfigError(
            f"--shards {asked_shards}: {path} was made with {num_shards} shards, and rows stay where "
            "they were hashed to; leave --shards out or name a new directory"
        )
    return Manifest(format_version=FORMAT_VERSION, server_id=server_id, num_shards=num_shards)


def _write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest beside its place and move it there: it is whole or absent."""
    temporary = path / _TEMPORARY_NAME
    data = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=2).encode() + b"\n"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path / MANIFEST_NAME)
    fsync_path(path)


def _fail(path: Path, exc: OSError) -> NoReturn:
    """Raise the error that an `OSError` on the directory means."""
    if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
        raise ConfigError(f"--data {path}: not writable ({exc.strerror})") from exc
    if isinstance(exc, NotADirectoryError | FileExistsError):
        raise ConfigError(f"--data {path}: not a directory") from exc
    if isinstance(exc, FileNotFoundError):
        raise ConfigError(f"--data {path}: cannot be made there ({exc.strerror})") from exc
    if exc.errno in _FULL:
        raise StorageError(f"{path}: the disk is full ({exc.strerror})") from exc
    raise StorageError(f"{path}: {exc.strerror or exc}") from exc
