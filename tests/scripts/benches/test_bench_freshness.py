"""`headrace bench freshness`, with a small table and few steps: that it measures, not what."""

from __future__ import annotations

import json
import math
from pathlib import Path

import psutil
import pytest

from headrace import cli
from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.scripts.benches.bench_freshness import FreshnessConfig, FreshnessResult, delays_of, run
from headrace.scripts.benches.bench_freshness_floor import Floor

MS = 1_000_000
SMALL = {"num_rows": 2000, "dim": 8, "rows_per_step": 100, "rows_per_s": 10_000, "num_steps": 30, "num_warm_steps": 5}


def test_a_step_is_visible_with_the_first_that_is_not_below_it() -> None:
    """Steps that become visible together have one moment; each counts from its own update."""
    updated_ns = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    seen = [(4, 5 * MS), (5, 13 * MS), (7, 36 * MS), (9, 41 * MS)]
    assert delays_of(5, updated_ns, seen) == [3.0, 16.0, 6.0, 1.0]
    assert delays_of(5, [], []) == []


def test_a_step_that_was_never_visible_is_an_error() -> None:
    """What the replica has not shown is not left out in silence."""
    with pytest.raises(ProtocolError, match="the replica has not shown step 6"):
        delays_of(5, [MS, MS], [(5, 2 * MS)])
    with pytest.raises(ProtocolError, match="step 5"):
        delays_of(5, [MS], [])


def test_figures() -> None:
    """The ratio is of the medians, the rate of all blocks."""
    block = {"took_s": 0.5, "num_rows_sent": 100, "num_flushes": 2, "p50_ms": 4.0, "load": 1.0}
    told = {"ack_p50_ms": 3.0, "histogram_p50_ms": 3.5}
    result = FreshnessResult(delays_ms=[4.0, 4.0, 40.0], floor_ms=[2.0, 2.0, 9.0], blocks=[{**block, **told}] * 2)
    figures = result.to_json(FreshnessConfig(num_steps=2))
    assert (figures["p50_ms"], figures["floor_p50_ms"], figures["p50_vs_floor"]) == (4.0, 2.0, 2.0)
    assert figures["p99_ms"] > 30
    assert figures["rows_per_s"] == 200
    assert figures["flushes_per_step"] == pytest.approx(4 / 3)
    json.dumps(figures)


def test_a_small_run(tmp_path: Path) -> None:
    """Every step is seen in the replica, in each consistency; no process and no file is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    for consistency in ("latest", "step"):
        stages: list[str] = []
        config = FreshnessConfig(**SMALL, num_rounds=1, consistency=consistency, folder=tmp_path)
        figures = run(config, on_stage=stages.append).to_json(config)
        assert len(stages) == config.num_stages
        assert figures["num_steps"] == 30
        assert figures["step_bytes"] == 100 * 40
        for name in ("p50_ms", "p99_ms", "p50_vs_floor", "floor_p50_ms", "rows_per_s", "update_to_acked_p50_ms"):
            assert 0 < figures[name] < math.inf
        assert figures["p50_ms"] <= figures["p99_ms"]
        # Two clocks and two ways: the replica's own histogram, whose buckets are a fifth wide, counts other warm steps,
        # which may be the slow ones of a busy machine.
        assert figures["replica_histogram_p50_ms"] < 10 * figures["p99_ms"] + 50
        assert figures["rows_per_s"] <= 10_500
    assert not list(tmp_path.iterdir())
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_the_command_writes_its_file(tmp_path: Path) -> None:
    """All keys are in the file; the exit code says whether the bound was met."""
    path = tmp_path / "figures.json"
    sizes = ["--rounds=1", "--steps=20", "--rows=1000", "--rows-per-step=100", "--rows-per-s=10000", "--dim=8"]
    exit_code = cli.main(["bench", "freshness", *sizes, f"--json={path}", f"--folder={tmp_path}"])
    figures = json.loads(path.read_text())
    assert exit_code == (0 if figures["p50_vs_floor"] <= 5 else 1)
    assert {"p50_ms", "p99_ms", "p50_vs_floor", "floor_p50_ms", "load_average", "machine"} <= figures.keys()
    assert list(tmp_path.iterdir()) == [path]


def test_the_floor_syncs_what_it_gets(tmp_path: Path) -> None:
    """Each round appends one message to the file before it is answered."""
    with Floor(tmp_path, 5000) as floor:
        found_s = floor.measure(4, interval_s=0.001)
        assert len(found_s) == 4
        assert min(found_s) > 0
        assert (tmp_path / "floor").read_bytes() == floor._data * 4


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong sizes and paths are one line, before anything starts."""
    with pytest.raises(ConfigError, match="--rows-per-step: 15 is no multiple of 10"):
        FreshnessConfig(rows_per_step=15)
    with pytest.raises(ConfigError, match="consistency"):
        FreshnessConfig(consistency="loose")
    for option in ("--json=/absent/file", "--folder=/absent"):
        assert cli.main(["bench", "freshness", option]) == 1
        assert "/absent" in capsys.readouterr().err
