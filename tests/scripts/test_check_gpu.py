"""The script that checks a GPU: which parts it runs, and what it makes of one that fails."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A Python, with a GPU if FAKE_GPU says so, and a sanitizer; both note their calls, and fail at FAKE_FAILURE."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    for name in ("python", "compute-sanitizer"):
        program = folder / name
        program.write_text(
            "#!/bin/bash\n"
            '[ "$1" = -c ] && exit $((1 - FAKE_GPU))\n'
            f'echo "{name} ${{PYTORCH_NO_CUDA_MEMORY_CACHING:+uncached }}$*" >>"{tmp_path}/calls"\n'
            f'echo "$PYTHONPATH" >>"{tmp_path}/python-paths"\n'
            'case "$*" in *"$FAKE_FAILURE"*) echo "it broke"; exit 3;; esac\n'
            'echo "all passed"\n'
        )
        program.chmod(0o755)
    return folder


def _check(
    stand_ins: Path, *parts: str, has_gpu: bool = True, failure: str = "nothing", limit_s: float = 540
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "PYTHON": str(stand_ins / "python"),
        "FAKE_GPU": str(int(has_gpu)),
        "FAKE_FAILURE": failure,
        "LIMIT_S": str(limit_s),
    }
    command = [ROOT / "scripts" / "check-gpu", "results", *parts]
    return subprocess.run(command, env=environment, cwd=stand_ins.parent, capture_output=True, text=True, check=False)


def test_all_parts_run_although_one_fails(stand_ins: Path, tmp_path: Path) -> None:
    """Tests, both tools and the bench run; the one that failed shows its log, and the exit code says so."""
    done = _check(stand_ins, failure="--tool memcheck")
    assert done.returncode == 1
    said = [line.split(",")[0] for line in done.stdout.splitlines()]
    assert said == ["tests: ok", "bench: ok", "memcheck: FAILED with exit code 3", "it broke", "racecheck: ok"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split(" ")[0] for call in calls] == ["python", "python", "compute-sanitizer", "compute-sanitizer"]
    assert all("-m pytest -m gpu" in call for call in (calls[0], *calls[2:]))
    # Torch's allocator would hide from memcheck what lies behind a tensor.
    assert ["uncached" in call for call in calls] == [False, False, True, True]
    # What cuda-bindings asks a driver for in vain is no error of ours.
    assert ["--report-api-errors no" in call for call in calls] == [False, False, True, True]
    assert calls[1].endswith(f"-m headrace bench kernels --json {tmp_path}/results/kernels.json")
    assert (tmp_path / "results" / "memcheck.log").read_text() == "it broke\n"


def test_all_is_well(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every part passed the exit code is 0; the caller's own packages are looked for behind the checkout."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert _check(stand_ins).returncode == 0
    monkeypatch.delenv("PYTHONPATH")
    assert _check(stand_ins, "tests").returncode == 0
    assert (tmp_path / "python-paths").read_text().splitlines() == [*[f"{ROOT}:/packages"] * 4, str(ROOT)]


def test_a_part_that_takes_too_long_is_stopped(stand_ins: Path) -> None:
    """Each part has as long as it is given."""
    (stand_ins / "python").write_text('#!/bin/bash\n[ "$1" = -c ] && exit 0\nexec sleep 600\n')
    done = _check(stand_ins, "tests", limit_s=0.2)
    assert done.stdout.startswith("tests: FAILED with exit code 124, ")


def test_every_gpu_test_is_run(stand_ins: Path, tmp_path: Path) -> None:
    """A file with tests for a GPU lies below a path that the script gives to pytest."""
    assert _check(stand_ins, "tests").returncode == 0
    words = shlex.split((tmp_path / "calls").read_text())
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    # Marked there, or by parameters of `tests/support/kernel_inputs.py`; the pattern does not match itself.
    marks = re.compile(r"\bmark[.]gpu\b|LAUNCHER[S]\b")
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if marks.search(file.read_text("utf-8"))]
    assert files
    assert [file for file in files if not any(file.is_relative_to(path) for path in paths)] == []
    assert [path for path in paths if not any(file.is_relative_to(path) for file in files)] == []


def test_parts_that_are_named(stand_ins: Path, tmp_path: Path) -> None:
    """Only these run, in the order given; a name that is none is an error before anything runs."""
    done = _check(stand_ins, "racecheck", "tests")
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["racecheck", "tests"]
    (tmp_path / "calls").unlink()
    done = _check(stand_ins, "tests", "benches")
    assert done.returncode == 2
    assert done.stderr.strip() == "check-gpu: benches is none of the parts: tests bench memcheck racecheck"
    assert not (tmp_path / "calls").exists()


def test_without_a_gpu_it_says_so(stand_ins: Path, tmp_path: Path) -> None:
    """Nothing is run that would be skipped: one line, and another exit code."""
    done = _check(stand_ins, has_gpu=False)
    assert done.returncode == 2
    assert done.stderr.strip() == f"check-gpu: torch in {stand_ins}/python sees no GPU"
    assert not (tmp_path / "calls").exists()
