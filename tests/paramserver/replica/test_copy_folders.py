"""The directory of copies on disk: claimed by one replica, cleared of what a killed one has left."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.paramserver.replica.copy_folders import CopyFolders
from headrace.schemas.errors import ConfigError


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Folders of copies that are there at the beginning go; what is not ours stays; each new copy has its own."""
    for name in ("copy-000001/shard-0000", "copy-000017", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x")
    folders = CopyFolders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "mine"]
    assert [folders.new().name, folders.new().name] == ["copy-000001", "copy-000002"]
    folders.close()
    folders.close()
    assert (tmp_path / "mine" / "file").exists()


def test_two_replicas_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second is refused, with the directory in its line, and removes nothing; it is let in behind the first."""
    folders = CopyFolders(tmp_path / "new")
    folders.new().mkdir()
    with pytest.raises(ConfigError, match=r"new is in use by another replica"):
        CopyFolders(tmp_path / "new")
    assert (tmp_path / "new" / "copy-000001").is_dir()
    folders.close()
    CopyFolders(tmp_path / "new").close()


def test_a_child_that_was_forked_keeps_no_directory(tmp_path: Path) -> None:
    """It has the file of the lock open, as a copy of the descriptor has; the next replica is let in all the same."""
    folders = CopyFolders(tmp_path)
    of_child = os.dup(folders._lock_fd)
    try:
        folders.close()
        CopyFolders(tmp_path).close()
    finally:
        os.close(of_child)


def test_a_temporary_directory_goes_with_its_replica() -> None:
    """Without a directory one is made, and nothing of it is left."""
    folders = CopyFolders(None)
    folders.new().mkdir()
    assert folders.path.is_dir()
    folders.close()
    assert not folders.path.exists()


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_temporary_directory_goes_with_its_process(tmp_path: Path, ending: str) -> None:
    """A process that ends without `close`, but by SIGKILL, leaves nothing; a forked child that ends touches nothing."""
    program = (
        "import os, signal, sys\n"
        "from headrace.paramserver.replica.copy_folders import CopyFolders\n"
        "folders = CopyFolders(None)\n"
        "folders.new().mkdir()\n"
        "if not (child := os.fork()):\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(os.listdir(folders.path), flush=True)\n"
    )
    command = [sys.executable, "-c", program + ending]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert sorted(ast.literal_eval(ended.stdout)) == ["LOCK", "copy-000001"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """What cannot be a directory is one line that names the setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="disk_dir"):
        CopyFolders(tmp_path / "file")
