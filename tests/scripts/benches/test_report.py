"""The results' file, which only a run of the same kind continues, and the page that is made of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.report import FAILED, MEASURED, Results, render_page

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
    charts = {"freshness": [("A chart", "figures/a.png")]}
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
    assert lines[-1] == "![A chart](figures/a.png)"
    assert lines.index("## Lag") < lines.index("## Freshness")
    assert "Cost" not in page
    page = render_page({**CONTENT, "rounds": 2}, TITLES, {}, [])
    assert "- scale 0.5, 2 rounds;" in page and "not installed" not in page


def _add(results: Results, name: str, status: str, **facts: Any) -> None:
    results.add(name, status, begun=time.time(), load_before=[0.0, 0.0, 0.0], **facts)


def test_parts_are_kept_over_runs(tmp_path: Path) -> None:
    """A part is on disk as soon as it is added; only measured ones count as done."""
    results = Results(tmp_path, scale=0.5, rounds=None)
    _add(results, "wire", MEASURED, figures={"a": 1})
    _add(results, "lag", FAILED, reason="no disk")
    again = Results(tmp_path, scale=0.5, rounds=None)
    assert again.content["parts"]["wire"]["figures"] == {"a": 1}
    assert (again.has("wire"), again.has("lag"), again.has("cost")) == (True, False, False)
    assert again.failed == ["lag"]
    _add(again, "lag", MEASURED, figures={})
    assert Results(tmp_path, scale=0.5, rounds=None).failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(("settings", "what"), [({"scale": 1.0}, "scale 0.5, not 1.0"), ({"rounds": 3}, "rounds None")])
def test_other_settings_are_refused(tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    """Figures of two scales never meet in one report; the message says what to do."""
    _add(Results(tmp_path, scale=0.5, rounds=None), "wire", MEASURED, figures={})
    with pytest.raises(ConfigError, match=f"{what}.*remove its results.json"):
        Results(tmp_path, **{"scale": 0.5, "rounds": None, **settings})
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"cores": ', '"cores": 1'))
    with pytest.raises(ConfigError, match="machine"):  # the directory of another one
        Results(tmp_path, scale=0.5, rounds=None)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """A file that this bench has not written is left alone."""
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=r"results\.json there is not of this bench"):
        Results(tmp_path, scale=1, rounds=None)
    assert (tmp_path / "results.json").read_text() == text
