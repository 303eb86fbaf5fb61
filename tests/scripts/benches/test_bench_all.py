"""`headrace bench all`: what it runs, what it keeps, and what it says when something fails or is missing."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from headrace.cli import main
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.scripts.benches import bench_all
from headrace.scripts.benches.bench_all import choose_parts
from headrace.scripts.benches.bench_all_parts import PARTS, OnStage, Part, Plan, Prepared

RECOVERY = {
    "ratio_recovery_vs_sustained": 0.5,
    "rows_per_s": {"sustained": [2.0], "recovered": [1.0]},
}


def fake(name: str, run: Callable[[OnStage], dict[str, Any]]) -> Part:
    return Part(name, f"Part {name}", 2, 10, 1, lambda plan: Prepared(1, run))


def no_module(on_stage: OnStage) -> dict[str, Any]:
    raise ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu")


def test_a_part_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures and missing modules are in the report, exit code 1; a second run measures only what is missing."""
    runs: list[str] = []
    is_mended = False

    def good(on_stage: OnStage) -> dict[str, Any]:
        on_stage("at it")
        runs.append("recovery")
        return RECOVERY

    def bad(on_stage: OnStage) -> dict[str, Any]:
        runs.append("kernels")
        if is_mended:
            return {"cpu": {"ratios": {"pack_rows": 2.5}}}
        raise UnavailableError("the bench's writer has ended")

    parts = (fake("kernels", bad), fake("overhead", no_module), fake("recovery", good))
    monkeypatch.setattr(bench_all, "PARTS", parts)
    report = tmp_path / "deep" / "report"
    assert main(["bench", "all", f"--report={report}"]) == 1
    page = (report / "report.md").read_text()
    assert "**Failed**: the bench's writer has ended" in page
    assert "Not measured: fbgemm_gpu is not installed: pip install 'headrace[torchrec]'" in page
    assert "| `ratio_recovery_vs_sustained` | 0.5 | ≥ 0.8 | **no** |" in page
    assert "1 of 3: kernels, about 10 s; all that is left about 30 s" in capsys.readouterr().err
    results = json.loads((report / "results.json").read_text())
    assert {name: part["status"] for name, part in results["parts"].items()} == {
        "kernels": "failed",
        "overhead": "not measured",
        "recovery": "measured",
    }
    assert "UnavailableError" in "".join(results["parts"]["kernels"]["traceback"])
    is_mended = True
    assert main(["bench", "all", f"--report={report}"]) == 0
    assert runs == ["kernels", "recovery", "kernels"]
    assert "| `least_ratio_vs_plain` | 2.5 |" in (report / "report.md").read_text()


def test_a_bug_in_a_bench_is_a_failure_of_that_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception of a bench is told with its type; a module that no extra brings is a failure too."""

    def bug(on_stage: OnStage) -> dict[str, Any]:
        return {}["absent"]

    def lost(on_stage: OnStage) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'headrace.nix'", name="headrace.nix")

    monkeypatch.setattr(bench_all, "PARTS", (fake("wire", bug), fake("lag", lost)))
    assert main(["bench", "all", f"--report={tmp_path}"]) == 1
    page = (tmp_path / "report.md").read_text()
    assert "**Failed**: KeyError: 'absent'" in page
    assert "**Failed**: ModuleNotFoundError: No module named 'headrace.nix'" in page


def test_what_is_measured_is_kept_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a part leaves the figures of those before it, and their page."""

    def interrupted(on_stage: OnStage) -> dict[str, Any]:
        raise KeyboardInterrupt

    parts = (fake("recovery", lambda on_stage: RECOVERY), fake("wire", interrupted))
    monkeypatch.setattr(bench_all, "PARTS", parts)
    assert main(["bench", "all", f"--report={tmp_path}"]) != 0
    assert list(json.loads((tmp_path / "results.json").read_text())["parts"]) == ["recovery"]
    assert "## Part recovery" in (tmp_path / "report.md").read_text()


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured and nothing made when the charts could not be drawn."""
    monkeypatch.setattr(bench_all, "PARTS", ())
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["bench", "all", f"--report={tmp_path / 'report'}"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "headrace: error: the report's charts need matplotlib: pip install 'headrace[bench]'"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale=0"], "--scale 0: must be above 0"),
        (["--scale=1.5"], "--scale 1.5"),
        (["--only=nix"], "--only nix: is none of ingest, recovery"),
        (["--folder=/absent"], "--folder /absent"),
        (["--report=/dev/null/x"], "--report /dev/null/x"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value is told before anything is measured."""
    assert main(["bench", "all", f"--report={tmp_path}", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_parts_keep_their_order() -> None:
    """`--only` chooses, in the order of the list; without it all run."""
    assert [part.name for part in choose_parts(["lag", "ingest"])] == ["ingest", "lag"]
    assert choose_parts([]) == list(PARTS)
    with pytest.raises(ConfigError, match="--only x"):
        choose_parts(["x"])


def test_full_scale_takes_less_than_40_minutes() -> None:
    """The sum that the help speaks of is that of the parts."""
    plans = [(part, Plan(scale=1, rounds=part.rounds, folder=None)) for part in PARTS]
    assert 20 * 60 < sum(part.expected_s(plan) for part, plan in plans) < 40 * 60


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    """A bench and a sweep run for real: the page's links resolve, the charts are images, and no other file is left."""
    report, folder = tmp_path / "report", tmp_path / "files"
    folder.mkdir()
    arguments = ["--scale=0.004", "--rounds=1", "--only=kernels", "--only=recovery-size", f"--folder={folder}"]
    assert main(["bench", "all", f"--report={report}", *arguments]) == 0
    page = (report / "report.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert links == ["figures/recovery-size.png"]
    assert imread(report / links[0]).shape[1] == 800
    assert "Recovery takes" in page
    assert "| `least_ratio_vs_plain` |" in page
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in report.iterdir()) == ["figures", "report.md", "results.json"]
