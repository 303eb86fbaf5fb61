"""`headrace bench recovery` and its sweep, small: that they measure, and the line through the sweep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headrace import cli
from headrace.scripts.benches.recovery import RecoveryConfig, SweepConfig, fit_line, measure_sizes

MIB = 2**20


def test_sizes() -> None:
    """By default the log is a GiB."""
    assert RecoveryConfig().mebibytes == 1024
    assert RecoveryConfig().rows.num_batches == 2**30 // (4095 * 524)


def test_a_line_through_points() -> None:
    """Least squares; one size alone gives a line from the origin."""
    slope, intercept = fit_line([1, 2, 3], [3.0, 5.0, 7.0])
    assert (slope, intercept) == (pytest.approx(2.0), pytest.approx(1.0))
    assert fit_line([4, 4], [1.0, 3.0]) == (0.5, 0.0)


@pytest.mark.slow
def test_a_small_recovery_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard whose store is gone recovers all of its log, and the command writes the ratio to its file."""
    path = tmp_path / "figures.json"
    arguments = ["bench", "recovery", "--rounds=1", "--mebibytes=4", f"--folder={tmp_path}", f"--json={path}"]
    assert cli.main(arguments) == 0
    assert "ratio_recovery_vs_sustained" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert 0 < figures["ratio_recovery_vs_sustained"] < math.inf
    assert figures["log_bytes"] >= 2 * MIB
    assert figures["machine"]["cores"] >= 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_small_sweep(tmp_path: Path) -> None:
    """Each size has times of all rounds."""
    found = measure_sizes(SweepConfig(mebibytes=(3, 5), num_rounds=1, folder=tmp_path), lambda stage: None)
    assert found["x"][0] < found["x"][1] <= 5 * MIB
    for name in ("recovery_s", "sustained_s", "rocksdb_s"):
        assert all(of_size[0] > 0 for of_size in found[name])
    assert list(tmp_path.iterdir()) == []
