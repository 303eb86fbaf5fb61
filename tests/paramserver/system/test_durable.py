"""Files and directories are whole or absent after a crash; a ready file is there while its process is ready."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from headrace.paramserver.system.durable import ReadyFile, fsync_tree, move_into_place, write_file
from headrace.schemas.errors import ConfigError, StorageError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record each sync and rename, with the name of its file or target."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        calls.append(("rename", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return calls


@pytest.mark.parametrize("content", [b"new", lambda file: file.write(b"new")])
@pytest.mark.parametrize(("aside", "is_durable"), [(None, True), ("b.new", True), (None, False)])
def test_write_file_syncs_before_and_after_the_rename(
    tmp_path: Path,
    calls: list[tuple[str, str]],
    content: bytes | Callable[[BinaryIO], object],
    aside: str | None,
    is_durable: bool,
) -> None:
    """The content is on disk before the file has its name, and the name before the call returns; or neither matters."""
    path, beside = tmp_path / "b", aside or "b.tmp"
    path.write_bytes(b"the old content")
    (tmp_path / beside).write_bytes(b"the longer rest of a write that was killed")
    write_file(path, content, aside=None if aside is None else tmp_path / aside, is_durable=is_durable)
    expected = [("fsync", beside), ("rename", "b"), ("fsync", tmp_path.name)]
    assert calls == (expected if is_durable else expected[1:2])
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize("step", ["content", "fsync", "replace"])
def test_write_file_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """After an error the file is as before, and nothing lies beside it."""
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step != "content":
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, fail if step == "content" else b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_directory_is_synced_whole_and_moved(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """Everything in a directory is synced before the directory itself, and the new name last."""
    made = tmp_path / "made"
    (made / "below").mkdir(parents=True)
    (made / "below" / "file").write_bytes(b"1")
    fsync_tree(made)
    move_into_place(made, tmp_path / "there")
    synced = [("fsync", name) for name in ("file", "below", "made")]
    assert calls == [*synced, ("rename", "there"), ("fsync", tmp_path.name)]
    assert (tmp_path / "there" / "below" / "file").read_bytes() == b"1"


def test_a_ready_file_is_there_while_ready(tmp_path: Path) -> None:
    """What an earlier run has left goes at once; facts are written whole, over and over, and removed, also twice."""
    path = tmp_path / "ready"
    path.write_text("a lie")
    file = ReadyFile(path)
    assert not path.exists()
    for pid in (1, 2):
        file.write({"pid": pid})
        assert json.loads(path.read_text()) == {"pid": pid}
    assert [found.name for found in tmp_path.iterdir()] == ["ready"]
    file.remove()
    file.remove()
    file.write({"pid": 3})  # a thread that was late
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_whose_write_is_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a disk holds up one write, another begins only behind it: both are whole, and the later one stays."""
    path, rename, others = tmp_path / "ready", os.replace, list[threading.Thread]()
    file = ReadyFile(path)

    def slow_rename(source: Path, target: Path) -> None:
        if not others:
            others.append(threading.Thread(target=file.write, args=({"pid": 2},)))
            others[0].start()
            others[0].join(0.2)  # without the rest of this one it does not end
            assert others[0].is_alive()
            assert json.loads(source.read_text()) == {"pid": 1}
        rename(source, target)

    monkeypatch.setattr(os, "replace", slow_rename)
    file.write({"pid": 1})
    others[0].join(20)
    assert json.loads(path.read_text()) == {"pid": 2}


@pytest.mark.parametrize("name", ["absent/ready", "folder", "file/ready"])
def test_a_ready_file_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    """One line names the flag, before anything is started; a directory that goes later is the disk's error."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--ready-file {tmp_path}/{name}: "):
        ReadyFile(tmp_path / name)
    file = ReadyFile(tmp_path / "folder" / "ready")
    (tmp_path / "folder").rmdir()
    with pytest.raises(StorageError, match=r"--ready-file .* cannot be written: No such file"):
        file.write({})
