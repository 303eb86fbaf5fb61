"""`headrace bench dense`, with a small model: that it measures, not what."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from headrace import cli
from headrace.scripts.benches.dense_cost import make_figures
from headrace.scripts.benches.harness import Rounds


def test_figures() -> None:
    """The ratio is the median of the rounds' own ratios, so a slow round counts for both kinds."""
    step_s = Rounds({"dense": [1.1, 9.0, 2.0], "rows": [1.0, 9.0, 1.0]})
    figures = make_figures(step_s, [0.1, 0.3, 7.0], 100)
    assert figures["dense_step_ratio"] == 1.1
    assert figures["dense_visible_extra_p50_s"] == 0.3


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    """Each dense step of each block becomes visible; no process and no file is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (folder := tmp_path / "files").mkdir()
    path = tmp_path / "figures.json"
    sizes = ["--layers=1", "--width=64", "--batch=8", "--rows=1000", "--interval-s=0.2", "--rounds=2"]
    exit_code = cli.main(["bench", "dense", *sizes, "--intervals=2", f"--json={path}", f"--folder={folder}"])
    figures = json.loads(path.read_text())
    is_met = figures["dense_step_ratio"] <= 1.01 and figures["dense_visible_extra_p50_s"] <= 0.5
    assert exit_code == (0 if is_met else 1)
    assert len(figures["delays_s"]) == 4 and all(delay > 0 for delay in figures["delays_s"])
    row_ids = 4 + 1 + 4 + 1 + 1 + 1  # a row has up to 1,024 elements
    assert figures["dense_bytes"] == 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 + 1) + 8 * row_ids
    assert not list(folder.iterdir())
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
