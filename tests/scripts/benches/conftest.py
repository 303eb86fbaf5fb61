"""A fixture that runs a small bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import cli


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], int]]:
    """A function that runs a bench and returns its figures and exit code; no process and no file of it may be left."""

    def run(name: str, *options: str) -> tuple[dict[str, Any], int]:
        (folder := tmp_path / "files").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        before, path = _children(), tmp_path / "figures.json"
        exit_code = cli.main(["bench", name, *options, f"--json={path}"])
        assert not list(folder.iterdir())
        assert _children() <= before
        figures: dict[str, Any] = json.loads(path.read_text())
        assert figures["machine"]["cores"] >= 1
        return figures, exit_code

    return run
