"""A ready file is there while its process is ready, whole, and never one of an earlier run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from headrace.paramserver.system.ready_file import ReadyFile
from headrace.schemas.errors import ConfigError, StorageError


def test_there_while_ready(tmp_path: Path) -> None:
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


def test_a_write_that_is_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_place_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    """It is one line that names the flag, before anything is started."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--ready-file {tmp_path}/{name}: "):
        ReadyFile(tmp_path / name)


def test_a_place_that_goes(tmp_path: Path) -> None:
    """A directory that is gone by the time is the disk's error, in one line."""
    (tmp_path / "folder").mkdir()
    file = ReadyFile(tmp_path / "folder" / "ready")
    (tmp_path / "folder").rmdir()
    with pytest.raises(StorageError, match=r"--ready-file .* cannot be written: No such file"):
        file.write({})
