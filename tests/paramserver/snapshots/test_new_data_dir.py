"""A server's directory on its way: one process makes it; the commands that do are tested with theirs."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from open_files import files_open_in

from headrace.paramserver.snapshots import new_data_dir
from headrace.paramserver.snapshots.new_data_dir import NewDataDir, check_target
from headrace.schemas.errors import ConfigError, StorageError


def test_one_process_makes_it(tmp_path: Path) -> None:
    """Another one is refused while it is being made, and leaves what the first has made."""
    with NewDataDir(tmp_path / "data", num_shards=1, work="restore") as first:
        (first.shard_path(0) / "a").touch()
        with pytest.raises(ConfigError, match="another restore is making it just now"):
            NewDataDir(tmp_path / "data", num_shards=1, work="restore")
        assert (first.shard_path(0) / "a").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_no_rename_replaces_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a mount point and the working directory are refused before any work, each with what to name instead."""
    target, link, dangling = tmp_path / "data", tmp_path / "link", tmp_path / "dangling"
    target.mkdir()
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (link, dangling):
        with pytest.raises(ConfigError, match=rf"--data {path}: a symbolic link, .*: name what it points to"):
            check_target(path)
    monkeypatch.chdir(target)
    for path in (target, Path.cwd(), Path(), tmp_path / "data" / ".." / "data"):
        with pytest.raises(ConfigError, match=r"the working directory, .*: name a new directory below it"):
            check_target(path)
    monkeypatch.chdir(tmp_path)
    check_target(target)
    monkeypatch.setattr(new_data_dir.os.path, "ismount", lambda path: path == target)
    with pytest.raises(ConfigError, match=rf"--data {target}: a mount point, .*: name a directory below it"):
        check_target(target)
    assert sorted(tmp_path.iterdir()) == [dangling, target, link]


def test_a_working_directory_that_is_gone_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a directory that was removed, one can be made elsewhere by its whole name."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_target(tmp_path / "data")


def test_a_folder_that_was_removed_while_it_was_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a directory that its last holder has removed meanwhile is no claim to what a third makes there now."""
    lock, aside = new_data_dir.fcntl.flock, tmp_path / ".data.restore"

    def remove_first(fd: int, operation: int) -> None:
        aside.rename(tmp_path / "removed")
        (aside / "ready").mkdir(parents=True)
        lock(fd, operation)

    monkeypatch.setattr(new_data_dir.fcntl, "flock", remove_first)
    with pytest.raises(ConfigError, match="another restore is making it just now"):
        NewDataDir(tmp_path / "data", num_shards=1, work="restore")
    assert (aside / "ready").is_dir()


def test_what_fails_halfway_holds_no_lock_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a shard's directory cannot be made, the directory aside is removed, and its lock is let go of."""
    make = Path.mkdir

    def fail_at_the_second(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "shard-0001":
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", fail_at_the_second)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        NewDataDir(tmp_path / "data", num_shards=2, work="restore")
    del caught
    assert list(tmp_path.iterdir()) == []
    assert not files_open_in(tmp_path)
    monkeypatch.undo()
    with NewDataDir(tmp_path / "data", num_shards=2, work="restore"):
        pass
