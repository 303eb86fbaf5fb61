"""Processes in which kernels that run on the host are watched: by AddressSanitizer, and by ThreadSanitizer for races.

They are to the host what compute-sanitizer's memcheck and racecheck are to a GPU. A sanitizer has to be loaded before
all else, so tests that are watched run in a process of their own, by `run_watched`. What it finds it writes to the
standard error, which is a file, and goes on; `HostKernels.launch` looks there after each kernel, and raises.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

__all__ = [
    "MEMCHECK",
    "RACECHECK",
    "WATCHER",
    "Sanitizer",
    "gxx_version",
    "new_findings",
    "run_watched",
    "without_sanitizer",
]

_ROOT = Path(__file__).resolve().parents[2]
_NAME_VARIABLE, _LOG_VARIABLE = "HEADRACE_TEST_SANITIZER", "HEADRACE_TEST_SANITIZER_LOG"
# AddressSanitizer also says that it knows little of swapcontext. What it does not know is other contexts' stacks.
_FINDING = re.compile(r"ERROR: AddressSanitizer|WARNING: ThreadSanitizer|runtime error:")
_PYTEST_FLAGS = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
_TIMEOUT_S = 220


@dataclass(frozen=True, kw_only=True, slots=True)
class Sanitizer:
    """One of g++'s.

    Attributes:
        name: Of this one, here.
        library: What has to be loaded first.
        flags: For the kernels.
        engine_flags: For them and for what runs them.
        options: The environment that sets it.
    """

    name: str
    library: str
    flags: tuple[str, ...]
    engine_flags: tuple[str, ...]
    options: dict[str, str]


MEMCHECK = Sanitizer(
    name="memcheck",
    library="libasan.so",
    flags=("-fsanitize=address,undefined,bounds-strict", "-fsanitize-recover=all", "-fno-omit-frame-pointer", "-g1"),
    engine_flags=(),
    options={
        # Leaks are Python's own. Each family has a copy of what they share.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:halt_on_error=0",
        "UBSAN_OPTIONS": "halt_on_error=0",
    },
)
RACECHECK = Sanitizer(
    name="racecheck",
    library="libtsan.so",
    flags=("-fsanitize=thread", "-g1"),
    engine_flags=("-DHEADRACE_RACECHECK",),
    # Python and torch are not compiled for it: what they do in order, it does not see. A block's own memory lies where
    # an earlier block's was, so an address that was named once may be named again.
    options={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=0:suppress_equal_addresses=0"},
)

WATCHER = next((tool for tool in (MEMCHECK, RACECHECK) if tool.name == os.environ.get(_NAME_VARIABLE)), None)
"""What watches this process; None where nothing does. In `scripts/check-gpu`, compute-sanitizer's tool of that name."""


@functools.cache
def _log() -> TextIO:
    return Path(os.environ[_LOG_VARIABLE]).open(errors="replace")


def new_findings() -> str:
    """Return what the sanitizer of this process has found since the last call; empty for nothing."""
    found = _log().read()
    return found if _FINDING.search(found) else ""


@functools.cache
def gxx_version() -> int:
    """Return the major version of g++, which brings the sanitizers."""
    asked = subprocess.run(["g++", "-dumpversion"], env=without_sanitizer(), capture_output=True, text=True, check=True)
    return int(asked.stdout.split(".")[0])


def without_sanitizer() -> dict[str, str]:
    """Return the environment for a process that a watched one starts."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run_watched(sanitizer: Sanitizer, log: Path, *pytest_args: str) -> int:
    """Run tests in a process of their own that a sanitizer watches, and return how many have passed.

    Skips the test where the sanitizer is not installed or does not run. What the process says is shown if one of its
    tests fails.

    Args:
        sanitizer: Which.
        log: A file to be made.
        *pytest_args: What to run.
    """
    library = _library(sanitizer)
    where = {"LD_PRELOAD": library, _NAME_VARIABLE: sanitizer.name, _LOG_VARIABLE: str(log)}
    # One thread: those of torch's own operations would only share the cores with the kernels.
    environment = {**os.environ, **sanitizer.options, **where, "OMP_NUM_THREADS": "1"}
    # A sanitizer may not run with the way in which this machine's kernel lays out memory, or with this Python.
    probe = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"Python does not start under {library} (status {probe.returncode}): {probe.stderr[:200]}")
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *_PYTEST_FLAGS, *pytest_args]
    with log.open("w") as stderr:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=_TIMEOUT_S
        )
    found = log.read_text(errors="replace")
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{found[-20_000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0


def _library(sanitizer: Sanitizer) -> str:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels cannot be run on the host")
    asked = ["g++", f"-print-file-name={sanitizer.library}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():  # g++ gives the name back where there is no such file
        pytest.skip(f"{sanitizer.library} is not installed: it comes with g++")
    return path
