"""The script that checks a GPU: which parts it runs, and what it makes of one that fails."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of tests for a GPU: marked there, or by parameters of `tests/support/kernel_inputs.py`. It does not match itself.
MARKS = re.compile(r"\bmark[.]gpu\b|LAUNCHER[S]\b")


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
            'found=0; case "$*" in *planted_on_gpu*) found=$FAKE_PLANTED;; esac\n'
            'case "$*" in *"$FAKE_FAILURE"*) found=1; code=3;; esac\n'
            '[ "$code" ] && echo "it broke" || echo "all passed"\n'
            '[ "$1" = --tool ] && echo "========= ${FAKE_SUMMARY-ERROR SUMMARY: $found errors}"\n'
            "exit ${code-0}\n"
        )
        program.chmod(0o755)
    return folder


def _check(
    stand_ins: Path,
    *parts: str,
    has_gpu: bool = True,
    failure: str = "nothing",
    planted: int = 1,
    limit_s: float = 540,
    **others: str,
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "PYTHON": str(stand_ins / "python"),
        "FAKE_GPU": str(int(has_gpu)),
        "FAKE_FAILURE": failure,
        "FAKE_PLANTED": str(planted),
        "LIMIT_S": str(limit_s),
        **others,
    }
    command = [ROOT / "scripts" / "check-gpu", "results", *parts]
    return subprocess.run(command, env=environment, cwd=stand_ins.parent, capture_output=True, text=True, check=False)


def _said(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What became of each process, by its name."""
    lines = [line.split(":")[:2] for line in done.stdout.splitlines() if re.match(r"[a-z/_]+: ", line)]
    return {name: rest.split(",")[0].strip() for name, rest in lines}


def test_all_parts_run_although_one_fails(stand_ins: Path, tmp_path: Path) -> None:
    """Tests, the bench and both tools run; what failed is said with its reason and log, and by the exit code."""
    done = _check(stand_ins, failure="tests/kernels/test_packing.py")
    assert done.returncode == 1
    said = _said(done)
    assert list(said)[:3] == ["tests", "bench", "memcheck/test_dirty_drain"]
    failed = {name for name, what in said.items() if what != "ok"}
    assert failed == {"memcheck/test_packing", "racecheck/test_packing"}
    assert said["memcheck/test_packing"] == "FAILED with exit code 3"
    assert "SUMMARY: 1 errors" in done.stdout
    assert "it broke" in (tmp_path / "results" / "memcheck" / "test_packing.log").read_text()
    assert not list((tmp_path / "results").rglob("*.status"))


def test_what_each_process_is(stand_ins: Path, tmp_path: Path) -> None:
    """Tests run in several processes; each file of the kernels' tests is a process of each tool."""
    assert _check(stand_ins, JOBS="3").returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    tests, bench, *watched = calls
    assert "-m pytest -m gpu" in tests and "-n 3 --dist worksteal" in tests
    assert bench.endswith(f"-m headrace bench kernels --rounds 5 --json {tmp_path}/results/kernels.json")
    files = [
        file.relative_to(ROOT)
        for file in (ROOT / "tests" / "kernels").rglob("test_*.py")
        if MARKS.search(file.read_text())
    ]
    assert len(files) > 5
    for tool in ("memcheck", "racecheck"):
        of_tool = [call for call in watched if f"--tool {tool}" in call]
        assert sorted(call.split()[-1] for call in of_tool) == sorted([*map(str, files), tool])
        # Torch's allocator would hide from memcheck what lies behind a tensor; cuda-bindings asks drivers in vain.
        assert all("uncached" in call and "--report-api-errors no" in call for call in of_tool)
        assert all("-m pytest -m gpu" in call or "planted_on_gpu.py" in call for call in of_tool)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"planted": 0}, "memcheck/planted"),
        ({"FAKE_SUMMARY": "nothing is said"}, "memcheck/test_digests"),
        ({"FAKE_SUMMARY": "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"}, "memcheck/test_digests"),
    ],
)
def test_a_sanitizer_that_is_blind_has_failed(stand_ins: Path, change: dict[str, Any], failed: str) -> None:
    """A tool has to find the planted fault, and to say that it has found nothing else, warnings included."""
    done = _check(stand_ins, "memcheck", **change)
    assert done.returncode == 1
    assert _said(done)[failed] == "FAILED with exit code 0"


def test_files_without_a_chosen_test_have_not_failed(stand_ins: Path) -> None:
    """With pytest's options a file may have no test; without them this is a failure."""
    (stand_ins / "compute-sanitizer").write_text("#!/bin/bash\nexit 5\n")
    assert "memcheck/test_digests: no tests chosen" in _check(stand_ins, "memcheck", PYTEST_ADDOPTS="-k x").stdout
    assert _said(_check(stand_ins, "memcheck"))["memcheck/test_digests"] == "FAILED with exit code 5"


def test_all_is_well(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every part passed the exit code is 0; the caller's own packages are looked for behind the checkout."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert _check(stand_ins).returncode == 0
    monkeypatch.delenv("PYTHONPATH")
    assert _check(stand_ins, "tests").returncode == 0
    *of_all, of_tests = (tmp_path / "python-paths").read_text().splitlines()
    assert set(of_all) == {f"{ROOT}:/packages"} and of_tests == str(ROOT)


def test_a_part_that_takes_too_long_is_stopped(stand_ins: Path) -> None:
    """Each part has as long as it is given."""
    (stand_ins / "python").write_text('#!/bin/bash\n[ "$1" = -c ] && exit 0\nexec sleep 600\n')
    done = _check(stand_ins, "tests", limit_s=0.2)
    assert done.stdout.startswith("tests: FAILED, stopped after 0.2 s: ")


def test_every_gpu_test_is_run(stand_ins: Path, tmp_path: Path) -> None:
    """A file with tests for a GPU lies below a path that the script gives to pytest."""
    assert _check(stand_ins, "tests").returncode == 0
    words = shlex.split((tmp_path / "calls").read_text())
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if MARKS.search(file.read_text("utf-8"))]
    assert files
    assert [file for file in files if not any(file.is_relative_to(path) for path in paths)] == []
    assert [path for path in paths if not any(file.is_relative_to(path) for file in files)] == []


def test_figures_of_an_earlier_run_do_not_stay(stand_ins: Path, tmp_path: Path) -> None:
    """A bench that fails at once leaves no figures in the folder that could be taken for its own."""
    figures = tmp_path / "results" / "kernels.json"
    figures.parent.mkdir()
    figures.write_text("{}")
    assert _check(stand_ins, "bench", failure="headrace bench").returncode == 1
    assert not figures.exists()


def test_parts_that_are_named(stand_ins: Path, tmp_path: Path) -> None:
    """Only these run; a name that is none is an error before anything runs."""
    done = _check(stand_ins, "racecheck", "tests")
    assert done.returncode == 0
    assert {name.split("/")[0] for name in _said(done)} == {"racecheck", "tests"}
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
