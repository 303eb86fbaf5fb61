"""`headrace bench freshness`, with a small table and few steps: that it measures, not what."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.freshness import Floor, FreshnessConfig, make_figures


def test_figures() -> None:
    """The ratio is of the medians, the rate of all blocks."""
    block = {"took_s": 0.5, "num_rows_sent": 100, "num_flushes": 2, "load": 1.0}
    answers = {"ack_p50_ms": 3.0, "histogram_p50_ms": 3.5}
    blocks = [{**block, **answers, "delays_ms": delays_ms} for delays_ms in ([4.0, 4.0], [40.0])]
    figures = make_figures(FreshnessConfig(num_steps=2), blocks, [2.0, 2.0, 9.0])
    assert (figures["p50_ms"], figures["floor_p50_ms"], figures["p50_vs_floor"]) == (4.0, 2.0, 2.0)
    assert figures["p99_ms"] > 30
    assert figures["rows_per_s"] == 200
    assert figures["flushes_per_step"] == pytest.approx(4 / 3)
    assert figures["block_p50_ms"] == [4.0, 40.0]
    assert figures["config"]["settings"] == {"freshness_s": 0, "max_cost_percent": 100}
    json.dumps(figures)


def test_a_small_run(bench: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Every step is seen in the replica, and the exit code tells whether the bound held."""
    sizes = ["--rounds=1", "--steps=20", "--rows=1000", "--rows-per-step=100", "--rows-per-s=10000", "--dim=8"]
    figures, exit_code = bench("freshness", *sizes, "--consistency=step")
    assert exit_code == (0 if figures["p50_vs_floor"] <= 5 else 1)
    assert ("MISSED" in capsys.readouterr().out) == bool(exit_code)
    assert (figures["num_steps"], figures["step_bytes"]) == (20, 100 * 40)
    for name in ("p50_ms", "p99_ms", "p50_vs_floor", "floor_p50_ms", "rows_per_s", "update_to_acked_p50_ms"):
        assert 0 < figures[name] < math.inf
    assert figures["p50_ms"] <= figures["p99_ms"]
    # Two clocks and two ways: the replica's own histogram, whose buckets are a fifth wide, counts other warm steps,
    # which may be the slow ones of a busy machine.
    assert figures["replica_histogram_p50_ms"] < 10 * figures["p99_ms"] + 50
    assert figures["rows_per_s"] <= 10_500


def test_the_floor_syncs_what_it_gets(tmp_path: Path) -> None:
    """Each round appends one message to the file before it is answered."""
    with Floor(tmp_path, 5000) as floor:
        found_ms = floor.measure(4, interval_s=0.001)
        assert len(found_ms) == 4
        assert min(found_ms) > 0
        assert (tmp_path / "floor").read_bytes() == floor._data * 4


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong sizes and paths are one line, before anything starts."""
    with pytest.raises(ConfigError, match="--rows-per-step 15: must be a multiple of 10"):
        FreshnessConfig(rows_per_step=15)
    with pytest.raises(ConfigError, match="consistency"):
        FreshnessConfig(consistency="loose")
    for option in ("--json=/absent/file", "--folder=/absent"):
        assert cli.main(["bench", "freshness", option]) == 1
        assert "/absent" in capsys.readouterr().err
