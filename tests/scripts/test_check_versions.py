"""The script that checks releases of torch: what it installs and runs, and what it makes of one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.paramserver.system.torch_releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
SUITES = ["streamer/taps", "test_res_stand_in", "test_equality"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a Python that has torch 2.13.0, and others where its pip has put them; it notes what it installs and runs.

    Suites fail at FAKE_FAILURE, and pip at FAKE_MISSING. Without its dependencies torch FAKE_BARE does not load.
    """
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/bash\n"
        "folder=${PYTHONPATH%%:*}\n"
        'case "$1 $2" in\n'
        f'"-c from "*) exec {sys.executable} "$@" ;;\n'
        '"-c import torch") [ ! -e "$folder/torch==$FAKE_BARE" ] || [ -e "$folder/dependencies" ] ;;\n'
        '"- "*) [ "$2" = 2.13.0 ] || [ -e "$folder/torch==$2" -a -e "$folder/fbgemm-gpu-cpu==$3" ] ;;\n'
        '"-m pip")\n'
        f'    echo "${{*:9}}" >>"{tmp_path}/installs"\n'
        '    mkdir -p "$8"\n'
        '    case "$*" in *"$FAKE_MISSING"*) exit 1 ;; *--no-deps*) ;; *) touch "$8/dependencies" ;; esac\n'
        '    for each in "${@:9}"; do case $each in *==*) touch "$8/$each" ;; esac; done ;;\n'
        '"-m pytest")\n'
        f'    echo "$* $folder" >>"{tmp_path}/runs"\n'
        '    case "$* $folder" in *$FAKE_FAILURE*) echo "1 failed, 2 passed in 3.21s"; exit 1 ;; esac\n'
        '    echo "======= 7 passed, 1 skipped in 61.23s (0:01:01) =======" ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    return program


def _check(python: Path, *torch: str, **fakes: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python), "PYTHONPATH": str(ROOT), "OVERLAYS": str(python.parent / "o")}
    environment |= {"FAKE_FAILURE": "nothing", "FAKE_MISSING": "nothing", "FAKE_BARE": "none", **fakes}
    command = [ROOT / "scripts" / "check-versions", "results", *torch]
    return subprocess.run(command, env=environment, cwd=python.parent, capture_output=True, text=True, check=False)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_nothing_that_was_checked_is_no_success(python: Path) -> None:
    """A release that is not known, or a Python that does not run, is told."""
    for done in (_check(python, "2.99.0"), _check(python, PYTHON="/bin/false")):
        assert done.returncode == 2
        assert "nothing was checked" in done.stderr


def test_every_release_runs_every_suite(python: Path) -> None:
    """What Python lacks is installed once, torch alone; the table has one line for each release."""
    folder = python.parent
    done = _check(python)
    assert done.returncode == 0, done.stderr
    table = _lines(folder / "results" / "table.md")
    good = "7 passed, 1 skipped"
    assert table[2:] == [f"| {r.torch} | {r.fbgemm} | {r.torchrec} | {good} | {good} | {good} |" for r in RELEASES]
    runs = _lines(folder / "runs")
    assert [suite for run in runs for suite in SUITES if f"{suite} " in run or f"{suite}.py" in run] == 3 * SUITES
    assert [Path(run.split()[-1]).name for run in runs[::3]] == ["2.12", ROOT.name, "2.14"]
    installs = _lines(folder / "installs")
    assert installs[:2] == ["--no-deps torch==2.12.1", "--no-deps fbgemm-gpu-cpu==1.7.0 torchrec==1.7.0"]
    assert len(installs) == 4
    assert _check(python).returncode == 0
    assert len(_lines(folder / "installs")) == 4


def test_a_suite_that_fails(python: Path) -> None:
    """The other suites and releases run all the same; the table and the exit code tell of it."""
    done = _check(python, FAKE_FAILURE="stand_in*2.14")
    assert done.returncode == 1
    assert "torch 2.14.1, stand-in, exit code 1" in done.stderr
    assert len(_lines(python.parent / "runs")) == 9
    (row,) = [line for line in _lines(python.parent / "results" / "table.md") if "FAILED" in line]
    assert row.startswith("| 2.14.1 ") and "| FAILED: 1 failed, 2 passed |" in row


def test_a_release_that_cannot_be_installed(python: Path) -> None:
    """It is named, and the next one runs."""
    done = _check(python, FAKE_MISSING="fbgemm-gpu-cpu==1.7.0")
    assert done.returncode == 1
    assert "torch 2.12.1, fbgemm-gpu-cpu 1.7.0 and torchrec 1.7.0 do not load" in done.stderr
    assert [Path(run.split()[-1]).name for run in _lines(python.parent / "runs")[::3]] == [ROOT.name, "2.14"]


def test_a_torch_that_needs_more(python: Path) -> None:
    """torch that does not load on its own is installed with its dependencies; only the named release is run."""
    assert _check(python, "2.14.1", FAKE_BARE="2.14.1").returncode == 0
    installs = _lines(python.parent / "installs")
    assert installs == ["--no-deps torch==2.14.1", "torch==2.14.1", "--no-deps fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2"]
    assert len(_lines(python.parent / "runs")) == 3
