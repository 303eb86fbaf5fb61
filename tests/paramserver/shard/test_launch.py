"""`ServerProcess`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from headrace.paramserver.config.data_dir import is_in_use
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where `ServerProcess` puts its own files."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_passes_settings_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings become flags, and HEADRACE_SERVE_ variables of this process do not reach the server.

    Stopping and closing it again is harmless.
    """
    monkeypatch.setenv("HEADRACE_SERVE_SHARDS", "7")
    with ServerProcess.start(tmp_path / "data", shards=1, non_finite="reject", insecure_bind=True) as server:
        command = psutil.Process(server.pid).cmdline()
        assert {"--non-finite=reject", "--insecure-bind", "--shards=1", "--port=0"} <= set(command)
        assert len(server.shard_pids) == 1
        assert server.address.startswith("127.0.0.1:")
        assert server.is_running
        assert server.stop() == server.stop() == 0
        server.kill()
        server.close()
        assert not server.is_running


def test_a_failed_start_has_a_reason(tmp_path: Path, scratch: Path) -> None:
    """The error has the server's last line, and nothing is left."""
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=r"exit code 1: headrace: error: --data .*/file: not a directory$"):
        ServerProcess.start(tmp_path / "file")
    assert list(scratch.iterdir()) == []


def test_gives_up_in_time(tmp_path: Path, scratch: Path) -> None:
    """A server that is not ready by the deadline is killed."""
    with pytest.raises(UnavailableError, match=r"^the server is not ready after 0 s: "):
        ServerProcess.start(tmp_path / "data", timeout_s=0.0)
    assert list(scratch.iterdir()) == []
    assert not is_in_use(tmp_path / "data")


def test_error_in_the_block(tmp_path: Path, scratch: Path) -> None:
    """An error in the `with` block gets through, and the server is gone."""
    with pytest.raises(ZeroDivisionError), ServerProcess.start(tmp_path / "data") as server:
        _ = 1 // 0
    assert not server.is_running
    assert list(scratch.iterdir()) == []
    assert not is_in_use(tmp_path / "data")
