"""Fixtures: a log's directory and the file system under it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_file_ops import FaultyFileOps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def ops() -> FaultyFileOps:
    return FaultyFileOps()
