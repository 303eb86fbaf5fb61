"""A ready file is there while its process is ready, whole, and never one of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.paramserver.ready_file import ReadyFile
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
    assert list(tmp_path.iterdir()) == []


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
