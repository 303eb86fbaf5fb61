"""Locks between processes exclude each other and end with their holders."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from open_files import files_open_in

from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError


@pytest.mark.parametrize("is_directory", [False, True])
def test_one_holder_at_a_time(tmp_path: Path, is_directory: bool) -> None:
    """A second exclusive lock is refused in the caller's words until the first is released."""
    path = tmp_path if is_directory else tmp_path / "LOCK"
    with FileLock.acquire(path, busy="taken", is_directory=is_directory) as first:
        with pytest.raises(ConfigError, match=r"^taken$"):
            FileLock.acquire(path, busy="taken", is_directory=is_directory)
        assert first.is_in_place()
    FileLock.acquire(path, busy="taken", is_directory=is_directory).close()
    first.release()  # again is harmless


def test_shared_locks_go_together(tmp_path: Path) -> None:
    """Shared locks exclude only an exclusive one."""
    path = tmp_path / "LOCK"
    with FileLock(path) as one, FileLock(path) as two, FileLock(path) as three:
        assert one.try_lock(is_shared=True)
        assert two.try_lock(is_shared=True)
        assert not three.try_lock()
    with FileLock(path) as lock:
        assert lock.try_lock()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_child_shares_the_lock(tmp_path: Path, is_released: bool) -> None:
    """`close` leaves the lock to a child that has the file open; `release` unlocks it for the child, too."""
    path = tmp_path / "LOCK"
    lock = FileLock.acquire(path, busy="taken")
    childs_fd = os.dup(lock.fd)  # the same open file description, as after a fork
    lock.release() if is_released else lock.close()
    with FileLock(path) as other:
        assert other.try_lock() is is_released
    os.close(childs_fd)
    FileLock.acquire(path, busy="taken").close()


@pytest.mark.parametrize("is_directory", [False, True])
def test_missing_files(tmp_path: Path, is_directory: bool) -> None:
    """Neither a directory nor, where that is refused, a file is created."""
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "LOCK", creates=False, is_directory=is_directory)
    assert os.listdir(tmp_path) == []


def test_locks_that_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a directory that its last holder has removed does not count; an error names the file, and closes it."""
    flock, folder = fcntl.flock, tmp_path / "folder"
    folder.mkdir()

    def replace_first(fd: int, operation: int) -> None:
        folder.rename(tmp_path / "removed")
        folder.mkdir()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with pytest.raises(ConfigError, match="taken"):
        FileLock.acquire(folder, busy="taken", is_directory=True)

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"No locks available: .*LOCK"):
        FileLock.acquire(tmp_path / "LOCK", busy="taken")
    assert not files_open_in(tmp_path)
