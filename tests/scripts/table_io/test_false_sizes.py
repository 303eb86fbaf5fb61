"""Files of a backfill that say that they are large: one line, before any memory is taken for what is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine
from false_sizes import FALSE_SIZES, TABLE
from peak_memory import peak_memory

_MAX_BYTES = 128 << 20
_MAX_S = 20.0


@pytest.mark.parametrize("make", FALSE_SIZES, ids=lambda make: make.__name__.strip("_"))
def test_false_sizes(make: Callable[[Path], Path], tmp_path: Path, run: CommandLine) -> None:
    """A few bytes that stand for a GiB are refused in one line that names the file, as any bad input."""
    path = make(tmp_path)
    run("backfill", tmp_path / "nowhere.pt", "--data", tmp_path / "data", code=1)  # imports what it needs
    began_s = time.process_time()
    with peak_memory() as peak:
        line = run.refused("backfill", path, "--data", tmp_path / "data", "--table", _table_of(path))
    assert str(path) in line and len(line) < 1000
    assert not (tmp_path / "data").exists()
    assert time.process_time() - began_s < _MAX_S
    assert peak.grown_bytes < _MAX_BYTES


def _table_of(path: Path) -> str:
    return path.stem if path.suffix == ".parquet" else TABLE
