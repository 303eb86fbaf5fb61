"""The charts: every one is drawn as an image of a page's width, and its sentence says what its figures say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from headrace.scripts.benches.bench_all_parts import PARTS
from headrace.scripts.benches.bench_report_plots import PLOTS


def rounds(*medians: float) -> list[list[float]]:
    return [[median, median * 1.1, median * 0.9] for median in medians]


LAG: dict[str, Any] = {
    "knee": 0.5,
    "knee_factor": 3.0,
    "capacity_rows_per_s": [200_000.0, 220_000.0, 180_000.0],
    "x": [0.05, 0.5, 1.0, 1.25],
    "p50_ms": rounds(5.0, 4.0, 40.0, 900.0),
    "p99_ms": rounds(9.0, 20.0, 200.0, 2000.0),
    "acked_p50_ms": rounds(3.0, 2.0, 20.0, 500.0),
    "floor_p50_ms": 1.5,
    "floor_p99_ms": 3.0,
}
COST = {"series": {"mark_us": rounds(0.1, 0.2), "shard_us": rounds(2.0, 3.8), "rows_per_s": rounds(9e5, 1e5)}}
FIGURES: dict[str, dict[str, Any]] = {
    "ingest": {
        "ratio_acked_vs_fsync": 0.94,
        "ratio_uniform_vs_rocksdb": 1.1,
        "median_rows_per_s": {"headrace_uniform": 511_400.0},
        "rows_per_s": {
            "fsync": [1.5e6, 2e6],
            "acked": [1.4e6],
            "headrace_uniform": [5e5],
            "redis_zipf": [3e5],
            "headrace_snapshot": [4e5],
        },
    },
    "wire": {
        "ratio_vs_loopback": 0.84,
        "ratio_vs_thriftpy2": 7.5,
        "ratio_vs_grpc": None,
        "rounds": {
            "write_bytes_per_s": {"headrace": [1e9], "loopback": [1.2e9], "thriftpy2": [1.5e8]},
            "reads_per_s": {"headrace": [7e3], "thriftpy2": [2e3]},
        },
    },
    "lookup": {
        "ratio_vs_torch": 0.89,
        "ratio_vs_redis": 26.8,
        "median_rows_per_s": {"torch": 1.5e7, "headrace": 1.3e7, "redis": 5e5, "miss": 5e4, "rocksdb": 7e4},
    },
    "throughput": {
        "width": {"x": [16, 128], "rows_per_s": {"applied": rounds(1e6, 4e5), "fsync": rounds(4e6, 1e6)}},
        "shards": {"x": [1, 2, 4], "rows_per_s": {"applied": rounds(4e5, 6e5, 5e5), "acked": rounds(9e5, 9e5, 9e5)}},
        "shard_dim": 128,
        "row_bytes": [76, 524],
    },
    "lag": LAG,
    "recovery-size": {
        "seconds_per_byte": 4.0 / 2**30,
        "intercept_s": 0.25,
        "x": [64 << 20, 1 << 30],
        "recovery_s": rounds(0.5, 4.25),
        "sustained_s": rounds(0.4, 4.0),
        "rocksdb_s": [[0.3], [3.0]],
    },
    "cost": {
        "tables": {"x": [1, 1000], **COST},
        "rows": {"x": [10, 20], **COST},
        "connections": {"x": [1, 64], **COST},
    },
}
SENTENCES = {
    "ingest": "0.94 of what the disk alone takes; applied, uniform ids: 511,000 rows a second, 1.10 of the",
    "wire": "Long writes run at 0.84 of a bare loopback's rate, 7.5 times thriftpy2's.",
    "lookup": "0.89 of the rows that a plain tensor gives and 27 times what Redis gives.",
    "throughput-shards": "400,000 with 1, 600,000 with 2, 500,000 with 4; 1.25 times as many with the most.",
    "throughput-width": "1,000,000 rows a second (76 MB/s) of 16 columns and 400,000 rows a second (210 MB/s) of 128",
    "lag-load": "At 50 % of 200,000 rows a second a write is visible after 4.0 ms in the median, 20 ms at the 99th",
    "recovery-size": "Recovery takes 4.00 s for each GiB of log (268 MB/s); the line begins at 0.25 s.",
    "cost": "From 1 to 1,000 tables a row's processor time, all that is drawn together, goes from 2.1 to 4.0 µs.",
}


@pytest.mark.parametrize("plot", [(name, plot) for name in PLOTS for plot in PLOTS[name]], ids=lambda p: p[1].name)
def test_every_chart(tmp_path: Path, plot: Any) -> None:
    """A PNG of 800 pixels and at most 60 KB, and a sentence with the figures' own numbers."""
    part, chart = plot
    path = tmp_path / "new" / f"{chart.name}.png"
    assert SENTENCES[chart.name] in chart.draw(FIGURES[part], path)
    assert imread(path).shape[1] == 800
    assert path.stat().st_size < 60_000


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    """Nothing of the moment is in a chart."""
    (chart,) = PLOTS["lag"]
    for name in ("a", "b"):
        chart.draw(LAG, tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_knee_that_was_not_found_is_said(tmp_path: Path) -> None:
    """Where every load stays below the factor, the sentence says so."""
    (chart,) = PLOTS["lag"]
    assert "stays within 3 times that up to 50 % of the capacity" in chart.draw(LAG, tmp_path / "a.png")
    assert "stays within 3 times that at every load" in chart.draw({**LAG, "knee": None}, tmp_path / "b.png")


def test_charts_are_of_parts() -> None:
    """Every chart belongs to a part that can run, and no two have one file."""
    assert PLOTS.keys() <= {part.name for part in PARTS}
    names = [plot.name for plots in PLOTS.values() for plot in plots]
    assert len(set(names)) == len(names)
