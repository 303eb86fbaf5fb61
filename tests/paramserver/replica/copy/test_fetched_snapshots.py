"""The directory of fetched snapshots: what stays, what goes, and that readers keep their files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.replica.copy import fetched_snapshots
from headrace.paramserver.replica.copy.fetched_snapshots import FetchedSnapshots, snapshot_in_use
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder, verify_snapshot
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, GoneError, StorageError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

WAIT_S = 20.0


def described(name: str, *, seq: int = 3, files: Any = ()) -> SnapshotManifest:
    """Return a manifest of a snapshot that may not be here."""
    part = ShardPart(shard=0, server_id="s", seq=seq, epoch=1, step=2, tables=(), files=files)
    return SnapshotManifest(name=name, created_us=1, parts=(part,))


def make(files: SnapshotFiles, name: str, *, seq: int = 3) -> SnapshotManifest:
    """Publish a snapshot as a fetch does; the folder may exist."""
    folder = files.new_folder(name) / "shard-0000"
    folder.mkdir(parents=True)
    (folder / "000001.sst").write_bytes(bytes(range(256)))
    manifest = described(name, seq=seq, files=hash_folder(folder))
    files.publish(manifest)
    return manifest


def fetch(snapshots: FetchedSnapshots, name: str, *, seq: int = 3) -> SnapshotManifest:
    snapshots.prepare(described(name))
    return make(snapshots.files, name, seq=seq)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def duplicates(directory: Path) -> list[int]:
    """Duplicate the open descriptors below a directory, as a fork does."""
    links = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    return [os.dup(fd) for fd, path in links.items() if path.startswith(str(directory.resolve()))]


async def _wanted(snapshots: FetchedSnapshots, ready: asyncio.Event) -> None:
    async with snapshots.alone(lambda: None):
        ready.set()


def test_all_but_one_that_were_fetched_are_removed(tmp_path: Path) -> None:
    """Only fetched snapshots are removed, except the named one."""
    snapshots = FetchedSnapshots(tmp_path)
    make(snapshots.files, "by-hand")
    (tmp_path / ".new-by-hand-2" / "shard-0000").mkdir(parents=True)
    snapshots.prepare(described("by-hand-2"))
    for name in ("one", "two", "three"):
        fetch(snapshots, name)
    snapshots.prepare(described("half"))
    snapshots.remove_others("two")
    assert names(tmp_path) == [".new-by-hand-2", "by-hand", "two"]
    verify_snapshot(tmp_path / "two")


def test_what_is_read_stays(tmp_path: Path) -> None:
    """A snapshot stays until its last reader, in any process, is done."""
    snapshots = FetchedSnapshots(tmp_path)
    for name in ("one", "two"):
        fetch(snapshots, name)
    with snapshot_in_use(tmp_path / "one"):
        with snapshot_in_use(tmp_path / "one"):
            snapshots.remove_others("two")
        snapshots.remove_others("two")
        verify_snapshot(tmp_path / "one")
    snapshots.remove_others("two")
    assert names(tmp_path) == ["two"]


def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A forked child inherits open files but keeps no lock."""
    snapshots = FetchedSnapshots(tmp_path)
    fetch(snapshots, "one")

    async def fetch_and_read() -> list[int]:
        async with snapshots.alone(lambda: None):
            with snapshot_in_use(tmp_path / "one"):
                return duplicates(tmp_path)

    inherited = asyncio.run(fetch_and_read())
    assert len(inherited) == 2
    snapshots.remove_others("two")
    assert names(tmp_path) == []
    for fd in inherited:
        os.close(fd)
    assert duplicates(tmp_path) == []  # nor has it kept any file open itself


def test_what_is_being_removed_is_not_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes during a removal gets an error, never a partial snapshot."""
    snapshots = FetchedSnapshots(tmp_path)
    fetch(snapshots, "one")
    told: list[str] = []
    rename = Path.rename

    def rename_late(path: Path, target: Path) -> Path:
        with pytest.raises(GoneError, match="is being removed"), snapshot_in_use(path):
            pass
        told.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    snapshots.remove_others("two")
    assert told == ["one"] and names(tmp_path) == []


def test_what_was_removed_before_it_could_be_locked_is_not_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that locks the marker after the removal gets an error."""
    snapshots = FetchedSnapshots(tmp_path)
    fetch(snapshots, "one")
    try_lock = FileLock.try_lock

    def lock_late(lock: FileLock, *, is_shared: bool = False) -> bool:
        if is_shared:
            snapshots.remove_others("two")
        return try_lock(lock, is_shared=is_shared)

    monkeypatch.setattr(FileLock, "try_lock", lock_late)
    with pytest.raises(GoneError, match="is being removed"), snapshot_in_use(tmp_path / "one"):
        pass


def test_a_removal_that_is_killed_anywhere_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal killed at any point leaves the marker, so that the next one finishes it."""
    snapshots = FetchedSnapshots(tmp_path)
    removals = {name: getattr(os, name) for name in ("unlink", "rmdir")}
    left = 0

    def remove(call: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(5, "killed here")
        call(*args, **kwargs)

    for num_removed in itertools.count():
        fetch(snapshots, "one")
        for number in range(8):  # in whatever order a file system lists them, some come after the mark
            (tmp_path / "one" / f"{number}").touch()
        left = num_removed
        with monkeypatch.context() as patched:
            for name, call in removals.items():
                patched.setattr(os, name, partial(remove, call))
            with contextlib.suppress(StorageError):
                snapshots.remove_others("two")
        is_whole = left >= 0
        snapshots.remove_others("two")
        files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert files == [".lock"], f"after {num_removed} removals"
        if is_whole:
            break
    assert num_removed == 8 + 5  # a file, its folder, the manifest, the mark, the snapshot


def test_nothing_is_removed_while_another_fetches(tmp_path: Path) -> None:
    """Nothing is removed during another process's fetch, whose folder looks like a leftover."""

    async def run() -> None:
        snapshots = FetchedSnapshots(tmp_path)
        async with snapshots.alone(lambda: None):
            snapshots.prepare(described("one"))
            FetchedSnapshots(tmp_path).remove_others("two")
            assert names(tmp_path) == [".new-one"]
            others = asyncio.Event()
            other = asyncio.create_task(_wanted(FetchedSnapshots(tmp_path), others))
            await asyncio.sleep(0)
            assert not others.is_set()
        await asyncio.wait_for(others.wait(), WAIT_S)
        await other

    asyncio.run(run())


def test_who_waits_for_another_s_fetch_is_asked_whether_to_go_on(tmp_path: Path) -> None:
    """Waiting for another fetch ends when the log is gone meanwhile."""

    def fail() -> None:
        raise GoneError("the log is gone")

    async def run() -> None:
        async with FetchedSnapshots(tmp_path).alone(fail):
            with pytest.raises(GoneError, match="the log is gone"):
                async with FetchedSnapshots(tmp_path).alone(fail):
                    pass

    asyncio.run(run())


def test_leftovers_of_crashes_are_removed_before_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial fetches of other snapshots and partial removals go; a partial fetch of the same one stays."""
    snapshots = FetchedSnapshots(tmp_path)
    fetch(snapshots, "old")

    def fail(path: Path) -> None:
        raise OSError(5, "killed here")

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="killed here"):
        patched.setattr(fetched_snapshots.shutil, "rmtree", fail)
        snapshots.remove_others("none")
    assert names(tmp_path) == [".gone-old"]
    fetch(snapshots, "old")  # with its name again
    snapshots.prepare(described("half"))
    (tmp_path / ".new-half" / "shard-0000").mkdir()
    snapshots.prepare(described("half"))
    assert names(tmp_path) == [".new-half", "old"] and (tmp_path / ".new-half" / "shard-0000").is_dir()
    snapshots.prepare(described("other"))
    assert names(tmp_path) == [".new-other", "old"]


def test_another_snapshot_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """A snapshot of the same name from elsewhere is replaced."""
    snapshots = FetchedSnapshots(tmp_path)
    old = fetch(snapshots, "nightly", seq=3)
    snapshots.prepare(old)
    assert names(tmp_path) == ["nightly"]
    snapshots.prepare(described("nightly"))
    assert names(tmp_path) == [".new-nightly"]


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """An unusable directory is a configuration error that names the setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"snapshot_dir .*file/below cannot be used"):
        FetchedSnapshots(tmp_path / "file" / "below").remove_others("one")


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is a one-line error, and nothing is removed."""
    snapshots = FetchedSnapshots(tmp_path)
    fetch(snapshots, "one")

    def refuse(fd: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match=r"\.lock cannot be locked: No locks available; use a snapshot_dir"):
        snapshots.remove_others("two")
    assert names(tmp_path) == ["one"]
