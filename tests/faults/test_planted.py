"""The suite's own test: each planted fault makes a core test fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import scaled_s

_ROOT = Path(__file__).resolve().parents[2]
_FAULTS = tomllib.loads((Path(__file__).parent / "planted.toml").read_text())
_TREE = ("docs", "examples", "headrace", "kernels", "paramserver", "schemas", "scripts", "streamer", "tests")

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Fault:
    """A fault: in `file`, `new` in place of `old`; one of the core tests in `tests` must find it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def faults_of(room: str) -> pytest.MarkDecorator:
    """Return the faults planted in a room, each a case of a test."""
    faults = [Fault(**fields) for fields in _FAULTS[room]]
    return pytest.mark.parametrize("fault", faults, ids=[fault.name for fault in faults])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree."""
    copy = tmp_path_factory.mktemp("planted")
    left_out = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in _TREE:
        shutil.copytree(_ROOT / name, copy / name, symlinks=True, ignore=left_out)
    for file in _ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    return copy


@pytest.fixture
def find(tree: Path, record_property: Callable[[str, object], None]) -> Iterator[Callable[[Fault], None]]:
    """Return what plants a fault, and fails unless a test finds it; the tree is whole again afterwards."""
    changed: list[Path] = []

    def start(*args: str) -> subprocess.Popen[str]:
        # Under some faults a test hangs, and so would its end: a time-out of this method ends the process.
        options = ["-v", "-p", "no:cacheprovider", "--timeout", str(scaled_s(30)), "--timeout-method", "thread"]
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *args],
            cwd=tree,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
            | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def first_failure(*tests: str) -> tuple[str | None, str]:
        """Return the first test that fails, if one does, and what pytest has said so far."""
        said: list[str] = []
        with start("-x", "-m", "not long", *tests) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if failed := re.match(r"(tests/.+?) (?:FAILED|\+{9,} Timeout)", line):
                    process.kill()
                    return failed[1], "".join(said)
        return None, "".join(said)

    def find(fault: Fault) -> None:
        file = tree / fault.file
        before = file.stat()
        changed.append(file)
        file.write_text(file.read_text().replace(fault.old, fault.new))
        # Python compiles a file again when size or whole seconds of its time have changed.
        os.utime(file, (before.st_atime, before.st_mtime + 2 + len(fault.name)))
        found_by, said = first_failure(*fault.tests)
        assert found_by, f"{fault.name}: no test has found it\n{said[-3000:]}"
        shutil.copy2(_ROOT / fault.file, file)
        with start(found_by) as control:
            said, _ = control.communicate()
        assert control.returncode == 0, f"{found_by} fails without the fault too\n{said[-3000:]}"
        record_property("fault", f"{fault.name}: {found_by}")

    yield find
    for file in changed:
        shutil.copy2(_ROOT / file.relative_to(tree), file)


def test_each_fault_fits_the_code() -> None:
    """What a fault replaces stands once in its file, and the tests that must find it are there."""
    for fault in (Fault(**fields) for faults in _FAULTS.values() for fields in faults):
        assert (_ROOT / fault.file).read_text().count(fault.old) == 1, fault
        assert all((_ROOT / tests).exists() for tests in fault.tests), fault


@faults_of("log")
def test_log(fault: Fault, find: Callable[[Fault], None]) -> None:
    """What makes the log durable, checked and whole."""
    find(fault)


@faults_of("sessions")
def test_sessions(fault: Fault, find: Callable[[Fault], None]) -> None:
    """What makes writes exactly once, in order, and steps exact."""
    find(fault)


@faults_of("ingest")
def test_ingest(fault: Fault, find: Callable[[Fault], None]) -> None:
    """What an ack promises, and what followers are told."""
    find(fault)


@faults_of("store")
def test_store(fault: Fault, find: Callable[[Fault], None]) -> None:
    """Which of several records of a row counts, and when memory may be used again."""
    find(fault)


@faults_of("expiry")
def test_expiry(fault: Fault, find: Callable[[Fault], None]) -> None:
    """Which rows may go, and which log."""
    find(fault)


@faults_of("requests")
def test_requests(fault: Fault, find: Callable[[Fault], None]) -> None:
    """Bounds of requests, routing, and digests."""
    find(fault)


@faults_of("streamer")
def test_streamer(fault: Fault, find: Callable[[Fault], None]) -> None:
    """Which rows go out, when a step counts as complete, and what is sent again."""
    find(fault)


@faults_of("followers")
def test_followers(fault: Fault, find: Callable[[Fault], None]) -> None:
    """What makes a follower's log and rows those of its source."""
    find(fault)


@faults_of("replicas")
def test_replicas(fault: Fault, find: Callable[[Fault], None]) -> None:
    """At which step a copy stands."""
    find(fault)


@faults_of("promotion")
def test_promotion(fault: Fault, find: Callable[[Fault], None]) -> None:
    """That a shard has one writer, whoever takes it over, and no row is read that is stale."""


@faults_of("reshard")
def test_reshard(fault: Fault, find: Callable[[Fault], None]) -> None:
    """A server with another number of shards has all rows, and its place alone."""
    find(fault)
