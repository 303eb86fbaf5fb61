"""`headrace bench all`: what it runs, what it keeps over runs, and what it says when something fails or is missing."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from headrace.cli import main
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.extras import install_command
from headrace.scripts.benches import suite
from headrace.scripts.benches.harness import OnStage
from headrace.scripts.benches.report import MEASURED
from headrace.scripts.benches.suite import PARTS, Part, Results, choose_parts

RECOVERY = {"ratio_recovery_vs_sustained": 0.5, "rows_per_s": {"sustained": [2.0], "recovered": [1.0]}}


class Fake(Part):
    """A part that runs a function of the test."""

    def make_config(self, scale: float, rounds: int | None, folder: Path | None) -> Any:
        return None

    def measure(self, config: Any, on_stage: OnStage) -> dict[str, Any]:
        return self.tiny["run"]()  # type: ignore[no-any-return]


def fake(name: str, run: Callable[[], dict[str, Any]]) -> Part:
    return Fake(name, f"Part {name}", 2, 20, "", tiny={"run": run})


def fails(error: BaseException) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        raise error

    return run


def test_a_part_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures and missing modules are in the report, exit code 1; a second run measures only what is missing."""
    runs: list[str] = []
    is_repaired = False

    def good() -> dict[str, Any]:
        runs.append("recovery")
        return RECOVERY

    def bad() -> dict[str, Any]:
        runs.append("kernels")
        if is_repaired:
            return {"cpu": {"ratios": {"pack_rows": 2.5}}}
        raise UnavailableError("the bench's writer has ended")

    missing = fails(ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu"))
    parts = (fake("kernels", bad), fake("overhead", missing), fake("recovery", good))
    monkeypatch.setattr(suite, "PARTS", parts)
    report = tmp_path / "deep" / "report"
    assert main(["bench", "all", f"--report={report}"]) == 1
    page = (report / "report.md").read_text()
    assert "**Failed**: the bench's writer has ended" in page
    assert f"Not measured: fbgemm_gpu is not installed: {install_command('torchrec')}" in page
    assert "| `ratio_recovery_vs_sustained` | 0.5 | ≥ 0.8 | **no** |" in page
    assert "1 of 3: kernels, about 20 s; all that is left about 60 s" in capsys.readouterr().err
    results = json.loads((report / "results.json").read_text())
    statuses = {name: part["status"] for name, part in results["parts"].items()}
    assert statuses == {"kernels": "failed", "overhead": "not measured", "recovery": "measured"}
    assert "UnavailableError" in "".join(results["parts"]["kernels"]["traceback"])
    is_repaired = True
    assert main(["bench", "all", f"--report={report}"]) == 0
    assert runs == ["kernels", "recovery", "kernels"]
    assert "| `least_ratio_vs_plain` | 2.5 |" in (report / "report.md").read_text()


def test_a_bug_in_a_bench_is_a_failure_of_that_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception of a bench is reported with its type; so is a missing module that no extra brings."""
    lost = ModuleNotFoundError("No module named 'headrace.nix'", name="headrace.nix")
    monkeypatch.setattr(suite, "PARTS", (fake("wire", fails(KeyError("absent"))), fake("lag", fails(lost))))
    assert main(["bench", "all", f"--report={tmp_path}"]) == 1
    page = (tmp_path / "report.md").read_text()
    assert "**Failed**: KeyError: 'absent'" in page
    assert "**Failed**: ModuleNotFoundError: No module named 'headrace.nix'" in page


def test_what_is_measured_is_kept_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a part leaves the figures of those before it, and their page."""
    parts = (fake("recovery", lambda: RECOVERY), fake("wire", fails(KeyboardInterrupt())))
    monkeypatch.setattr(suite, "PARTS", parts)
    assert main(["bench", "all", f"--report={tmp_path}"]) != 0
    assert list(json.loads((tmp_path / "results.json").read_text())["parts"]) == ["recovery"]
    assert "## Part recovery" in (tmp_path / "report.md").read_text()


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured and nothing made when the charts could not be drawn."""
    monkeypatch.setattr(suite, "PARTS", ())
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["bench", "all", f"--report={tmp_path / 'report'}"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"headrace: error: the report's charts need matplotlib: {install_command('bench')}"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale=0"], "--scale 0: must be above 0"),
        (["--scale=1.5"], "--scale 1.5"),
        (["--only=nix"], "--only nix: must be one of ingest, recovery"),
        (["--folder=/absent"], "--folder /absent"),
        (["--report=/dev/null/x"], "--report /dev/null/x"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value is refused before anything is measured."""
    assert main(["bench", "all", f"--report={tmp_path}", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_parts_and_their_times() -> None:
    """`--only` chooses parts in the order of the list; all take less than an hour."""
    assert [part.name for part in choose_parts(["lag", "ingest"])] == ["ingest", "lag"]
    assert choose_parts([]) == list(PARTS)
    with pytest.raises(ConfigError, match="--only x"):
        choose_parts(["x"])
    assert 20 * 60 < sum(part.expected_s(1, None) for part in PARTS) < 60 * 60


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.001])
@pytest.mark.torchrec
def test_every_part_has_settings_at_every_scale(scale: float) -> None:
    """No scale gives settings that a bench refuses."""
    for part in PARTS:
        config = part.make_config(scale, None, Path("/x"))
        assert config.num_rounds == part.rounds
        assert getattr(config, "folder", Path("/x")) == Path("/x")


def test_amounts_shrink_to_a_least_one() -> None:
    """Numbers and tuples of them shrink, and a sweep at a very small scale has two points."""
    parts = {part.name: part for part in PARTS}
    config = parts["ingest"].make_config(0.1, 2, None)
    assert (config.num_batches, config.num_acked_batches, config.num_rounds) == (96, 8, 2)
    assert parts["ingest"].make_config(0.001, 2, None).num_batches == 4
    assert parts["lag"].make_config(0.1, 2, None).block_s == pytest.approx(0.4)
    assert parts["recovery-size"].make_config(0.1, None, None).mebibytes == (6, 13, 26, 51, 102)
    assert parts["recovery-size"].make_config(0.01, None, None).mebibytes == (4, 10)


def test_a_tiny_run(tmp_path: Path) -> None:
    """A bench and a sweep run for real: the page's links resolve, the charts are images, and no other file is left."""
    report, folder = tmp_path / "report", tmp_path / "files"
    folder.mkdir()
    arguments = ["--scale=0.003", "--rounds=1", "--only=kernels", "--only=recovery-size", f"--folder={folder}"]
    assert main(["bench", "all", f"--report={report}", *arguments]) == 0
    page = (report / "report.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert links == ["figures/recovery-size.png"]
    assert imread(report / links[0]).shape[1] == 800
    assert "| `least_ratio_vs_plain` |" in page
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in report.iterdir()) == ["figures", "report.md", "results.json"]


def _add(results: Results, name: str, status: str, **facts: Any) -> None:
    results.add(name, status, begun=time.time(), load_before=[0.0, 0.0, 0.0], **facts)


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
