"""The report's page, from results that were made by hand."""

from __future__ import annotations

from typing import Any

from headrace.scripts.benches.bench_report_page import Chart, render_page

CONTENT: dict[str, Any] = {
    "scale": 0.5,
    "rounds": None,
    "machine": {"cores": 2, "memory_bytes": 24 * 2**30, "system": "Linux", "python": "3.11"},
    "processor": "A processor",
    "packages": {"headrace": "0.1.0"},
    "begun": "2026-01-01 10:00:00 UTC",
    "ended": "2026-01-01 10:20:00 UTC",
    "load_at_start": [0.5, 1.0, 1.5],
    "load_at_end": [2.0, 1.0, 1.5],
    "parts": {
        "freshness": {
            "status": "measured",
            "seconds": 61.4,
            "load_before": [0.5, 1, 1],
            "load_after": [2.5, 1, 1],
            "figures": {"p50_vs_floor": 5.5, "p50_ms": 11.0, "floor_p50_ms": 2.0, "p99_ms": 1234.5},
        },
        "lag": {"status": "failed", "seconds": 1.0, "load_before": [], "load_after": [], "reason": "no disk"},
    },
}
TITLES = {"lag": "Lag", "freshness": "Freshness", "cost": "Cost"}


def test_the_whole_page() -> None:
    """Machine, versions, dates and loads; a summary; then each part, with its table and its charts."""
    charts = {"freshness": [Chart(title="A chart", path="figures/a.png", sentence="It rises.")]}
    page = render_page(CONTENT, TITLES, charts, ["Redis is left out: do this"])
    lines = page.splitlines()
    assert lines[0] == "# Headrace on this machine"
    assert "- 2 processors, A processor, 24.0 GiB; Linux; Python 3.11" in lines
    assert "- headrace 0.1.0" in lines
    assert "at the start 0.5, 1.0, 1.5, at the end 2.0, 1.0, 1.5" in page
    assert "- scale 0.5, each bench's own rounds; each part's own load is below its table" in lines
    assert "- Redis is left out: do this" in lines
    assert "| Lag | **failed** | | |" in lines
    assert "| Freshness | 1 | 0 | `p50_vs_floor` |" in lines
    assert "| `p50_vs_floor` | 5.5 | ≤ 5 | **no** | 11 of 2 ms |" in lines
    assert "| `p99_ms` | 1,234 |  |  |  |" in lines
    assert "`freshness` took 61 s; load before 0.5, 1.0, 1.0, after 2.5, 1.0, 1.0." in lines
    assert "**Failed**: no disk" in lines
    assert "It rises." in lines
    assert lines[-1] == "![A chart](figures/a.png)"
    assert lines.index("## Lag") < lines.index("## Freshness")
    assert "Cost" not in page


def test_rounds_and_hints_are_only_told_where_there_are_any() -> None:
    """A run with given rounds says how many; with all peers there nothing is said of what is missing."""
    page = render_page({**CONTENT, "rounds": 2}, TITLES, {}, [])
    assert "- scale 0.5, 2 rounds;" in page
    assert "not installed" not in page
