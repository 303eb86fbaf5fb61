"""`headrace bench restore`, with a small table: that it measures, not what."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from headrace import cli
from headrace.scripts.benches.harness import Rounds
from headrace.scripts.benches.restore import RestoreConfig, make_figures


def test_figures() -> None:
    """The ratio is of the medians: a restore that takes longer than a read is below one."""
    took_s = Rounds({"scan": [1.0, 9.0, 1.0], "restore": [2.0, 2.0, 0.5]})
    figures = make_figures(RestoreConfig(num_rows=1000), took_s)
    assert figures["restore_vs_scan"] == 0.5
    assert figures["rows_per_s"] == {"scan": 1000, "restore": 500}


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    """Every row is restored and read in each round; no process and no file is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (folder := tmp_path / "files").mkdir()
    path = tmp_path / "figures.json"
    command = ["bench", "restore", "--rows=1000", "--dim=8", "--rounds=2", f"--json={path}", f"--folder={folder}"]
    exit_code = cli.main(command)
    figures = json.loads(path.read_text())
    assert exit_code == (0 if figures["restore_vs_scan"] >= 0.7 else 1)
    assert {kind: len(rounds) for kind, rounds in figures["took_s"].items()} == {"scan": 2, "restore": 2}
    assert not list(folder.iterdir())
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
