"""The results' file: written after each part, read back only by a run of the same kind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.bench_report_results import FAILED, MEASURED, Results


def note(results: Results, name: str, status: str, **facts: Any) -> None:
    results.note(name, status, begun=time.time(), load_before=[0.0, 0.0, 0.0], **facts)


def test_parts_are_kept_over_runs(tmp_path: Path) -> None:
    """A part is on the disk as soon as it is noted; only measured ones count as there."""
    results = Results.open(tmp_path, scale=0.5, rounds=None)
    note(results, "wire", MEASURED, figures={"a": 1})
    note(results, "lag", FAILED, reason="no disk")
    again = Results.open(tmp_path, scale=0.5, rounds=None)
    assert again.content["parts"]["wire"]["figures"] == {"a": 1}
    assert (again.has("wire"), again.has("lag"), again.has("cost")) == (True, False, False)
    assert again.failed == ["lag"]
    note(again, "lag", MEASURED, figures={})
    assert Results.open(tmp_path, scale=0.5, rounds=None).failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(("settings", "what"), [({"scale": 1.0}, "scale 0.5, not 1.0"), ({"rounds": 3}, "rounds None")])
def test_other_settings_are_refused(tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    """Figures of two scales never meet in one report; the message says what to do."""
    note(Results.open(tmp_path, scale=0.5, rounds=None), "wire", MEASURED, figures={})
    with pytest.raises(ConfigError, match=f"{what}.*remove its results.json"):
        Results.open(tmp_path, **{"scale": 0.5, "rounds": None, **settings})


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """A file that this bench has not written is left alone."""
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=r"results\.json there is not of this bench"):
        Results.open(tmp_path, scale=1, rounds=None)
    assert (tmp_path / "results.json").read_text() == text


def test_another_machine_is_refused(tmp_path: Path) -> None:
    """A directory that was brought from elsewhere is not gone on with."""
    note(Results.open(tmp_path, scale=1, rounds=None), "wire", MEASURED, figures={})
    path = tmp_path / "results.json"
    content = json.loads(path.read_text())
    content["machine"]["cores"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="machine"):
        Results.open(tmp_path, scale=1, rounds=None)
