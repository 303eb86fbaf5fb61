"""The charts of the sweeps are images of a page's width, and the same figures give the same image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from headrace.scripts.benches.charts import draw_charts


def _rounds(*medians: float) -> list[list[float]]:
    return [[median, median * 1.1, median * 0.9] for median in medians]


COST = {"series": {"mark_us": _rounds(0.1, 0.2), "shard_us": _rounds(2.0, 3.8), "rows_per_s": _rounds(9e5, 1e5)}}
FIGURES: dict[str, dict[str, Any]] = {
    "throughput": {
        "width": {"x": [16, 128], "rows_per_s": {"applied": _rounds(1e6, 4e5), "fsync": _rounds(4e6, 1e6)}},
        "shards": {"x": [1, 2, 4], "rows_per_s": {"applied": _rounds(4e5, 6e5, 5e5), "acked": _rounds(9e5, 9e5, 9e5)}},
        "shard_dim": 128,
        "row_bytes": [76, 524],
    },
    "lag": {
        "knee": 0.5,
        "capacity_rows_per_s": [200_000.0, 220_000.0, 180_000.0],
        "x": [0.05, 0.5, 1.0, 1.25],
        "p50_ms": _rounds(5.0, 4.0, 40.0, 900.0),
        "p99_ms": _rounds(9.0, 20.0, 200.0, 2000.0),
        "acked_p50_ms": _rounds(3.0, 2.0, 20.0, 500.0),
        "floor_p50_ms": 1.5,
        "floor_p99_ms": 3.0,
    },
    "recovery-size": {
        "seconds_per_byte": 4.0 / 2**30,
        "intercept_s": 0.25,
        "x": [64 << 20, 1 << 30],
        "recovery_s": _rounds(0.5, 4.25),
        "sustained_s": _rounds(0.4, 4.0),
        "rocksdb_s": [[0.3], [3.0]],
    },
    "pace": {
        "x": [1, 100],
        "targets": [
            {"freshness_s": 0.0, "lag_p50_s": _rounds(1.0, 0.1), "step_ratio": _rounds(1.02, 1.2)},
            {"freshness_s": 1.0, "lag_p50_s": _rounds(1.5, 1.0), "step_ratio": _rounds(1.02, 1.05)},
        ],
    },
    "importance": {
        "max_loss_points": 0.5,
        "staleness_share": 0.1,
        "curves": {
            **{
                name: {"x": [1, 2], "bytes_ratio": _rounds(0.1, 0.3), "loss_points": _rounds(1.0, 0.2)}
                for name in ("rarely", "share", "share_of_items")
            },
            "staleness": {"x": [10, 60], "bytes_ratio": _rounds(0.3, 0.2), "released_ratio": _rounds(0.1, 0.01)},
        },
    },
    "cost": {
        "tables": {"x": [1, 1000], **COST},
        "rows": {"x": [10, 20], **COST},
        "connections": {"x": [1, 64], **COST},
    },
}


@pytest.mark.parametrize(
    ("part", "num_charts", "changes"),
    [
        ("throughput", 2, {}),
        ("lag", 1, {}),
        ("lag", 1, {"knee": None}),
        ("recovery-size", 1, {}),
        ("pace", 1, {}),
        ("importance", 1, {}),
        ("cost", 1, {}),
    ],
)
def test_every_chart(tmp_path: Path, part: str, num_charts: int, changes: dict[str, Any]) -> None:
    """A PNG of 800 pixels for each chart, twice the same bytes: nothing of the moment is in it."""
    charts = draw_charts(part, FIGURES[part] | changes, tmp_path / "a")
    assert len(charts) == num_charts
    assert draw_charts(part, FIGURES[part] | changes, tmp_path / "b") == charts
    for _, path in charts:
        assert imread(tmp_path / "a" / path).shape[1] == 800
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
