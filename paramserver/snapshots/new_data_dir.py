"""A server's directory on its way: made aside, and there whole or not at all.

    .NAME.WORK/ready/shard-0000/{log,store}    while it is made; counts for nothing
    .NAME.WORK/ready/headrace.json             when all shards are in
    NAME                                       is `ready`, renamed

A directory without `headrace.json` is none that a server starts on. So after a crash NAME is there whole or not at all;
what lies in `.NAME.WORK` the next attempt removes.

Each log begins at seq 2, with the tables' registration, and the store says that it has applied it. A store that is lost
is then missed: the log says that something came before.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.config.data_dir import MANIFEST_NAME, DataDir
from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.ingest.ingest import KIND_HELLO
from headrace.paramserver.ingest.sessions import Session, Sessions
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.store.catalog import pack_spec
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["FIRST_SEQ", "NewDataDir", "check_target"]

FIRST_SEQ = 2
_EPOCH = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NewDataDir:
    """A server's directory that is being made. Use it with `with`: unless `publish` returns, nothing is left.

    Thread: any without an event loop, one at a time; it blocks.

    Attributes:
        num_shards: Of the server.
    """

    def __init__(self, target: Path, *, num_shards: int, work: str) -> None:
        """Begin.

        Args:
            target: The directory to make; not there yet, or empty.
            num_shards: Of the server.
            work: What makes it, in a word; also the client's name in the session that stands for it.

        Raises:
            ConfigError: The target is not empty, or is being made by another process.
            StorageError: The disk failed.
        """
        self.num_shards = num_shards
        self._target = target.absolute()
        self._work = work
        self._aside = self._target.parent / f".{self._target.name}.{work}"
        self._ready = self._aside / "ready"
        self._lock_fd = -1
        check_target(self._target)
        try:
            with self.mapped_errors():
                self._claim()
                for shard in range(num_shards):
                    self.shard_path(shard).mkdir(parents=True)
        except BaseException:
            self._close()  # nobody comes to enter this
            raise

    def _claim(self) -> None:
        self._aside.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(self._aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock until now has removed the directory at the end.
            is_ours = os.path.samestat(os.fstat(lock_fd), self._aside.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except BaseException:
            os.close(lock_fd)
            raise
        if not is_ours:
            os.close(lock_fd)
            raise ConfigError(f"--data {self._target}: another {self._work} is making it just now")
        self._lock_fd = lock_fd
        for path in self._aside.iterdir():  # of one that was killed
            shutil.rmtree(path)

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard, which is there."""
        return self._ready / shard_folder(shard)

    def open_session(self, sessions: Sessions, run: str) -> Session:
        """Return the session, in which nothing is ever written, of the record that each log begins with."""
        return sessions.open(run, self._work, _EPOCH, 0, 0)

    def publish(self, run: str, specs: Iterable[TableSpec]) -> None:
        """Begin the logs of all shards, whose stores are complete, and give the directory its name, durably.

        Args:
            run: As given to `open_session`.
            specs: The server's tables.

        Raises:
            ConfigError: Somebody has made it meanwhile.
            StorageError: The disk failed; it is not there.
        """
        header = {
            **{"kind": KIND_HELLO, "run": run, "client": self._work, "rank": 0, "world_size": 0},
            "tables": [pack_spec(spec) for spec in specs],
        }
        with self.mapped_errors():
            for shard in range(self.num_shards):
                asyncio.run(_begin_log(self.shard_path(shard) / "log", header))
                fsync_path(self.shard_path(shard))
            skeleton = self._aside / "skeleton"
            with DataDir.claim(skeleton, num_shards=self.num_shards) as directory:
                directory.prepare()
            (skeleton / MANIFEST_NAME).rename(self._ready / MANIFEST_NAME)
            fsync_path(self._ready)
            check_target(self._target)
            self._ready.rename(self._target)
            fsync_path(self._target.parent)

    @contextlib.contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Turn the file system's errors into ours.

        Raises:
            ConfigError: Something is not writable.
            StorageError: Any other error.
        """
        try:
            yield
        except HeadraceError:
            raise
        except PermissionError as exc:
            raise ConfigError(f"{exc.filename or self._aside}: not writable") from exc
        except OSError as exc:
            full = "the disk is full; " if exc.errno in _FULL else ""
            raise StorageError(f"{self._aside}: {full}{exc.strerror or exc}; nothing was made") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def _close(self) -> None:
        """Remove what is not published, and let go of the lock. Idempotent."""
        if self._lock_fd >= 0:
            shutil.rmtree(self._aside, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


async def _begin_log(path: Path, header: dict[str, Any]) -> None:
    """Make a log that begins at `FIRST_SEQ`."""
    for seq in range(1, FIRST_SEQ + 1):
        # Each opening begins a new segment, so that the ones before can be removed.
        log = FileUpdateLog.open(path)
        try:
            await log.append(epoch=_EPOCH, header=header, body=[]).durable
            if seq == FIRST_SEQ:
                log.trim(FIRST_SEQ)
                assert (log.first_seq, log.last_seq) == (FIRST_SEQ, FIRST_SEQ)
        finally:
            await log.close()


def check_target(target: Path) -> None:
    """Check that a directory can be made whole in one step: another one is renamed to it.

    Raises:
        ConfigError: There is something already, or nowhere to make it, or it is what no rename may replace.
    """
    if target.is_symlink():
        raise ConfigError(f"--data {target}: a symbolic link, which cannot be replaced: name what it points to")
    if os.path.ismount(target):
        raise ConfigError(f"--data {target}: a mount point, which cannot be replaced: name a directory below it")
    # Replaced, it would be gone under the feet of the shell. By stat: a name for what is gone already there is not.
    if target.is_dir() and target.samefile("."):
        raise ConfigError(f"--data {target}: the working directory, which is in use: name a new directory below it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"--data {target}: there is something already; a server's directory is made whole, where nothing is yet: "
            "name another one"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"--data {target}: there is no directory {target.parent}")
