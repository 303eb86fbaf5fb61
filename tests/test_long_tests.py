"""The rule that divides the suite into a core part and a long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import long_tests
import pytest
from long_tests import RECORD, divide, is_there, judge, kind_of

_CONFTEST = """
from pathlib import Path

import pytest
from long_tests import LongTests


def pytest_addoption(parser):
    parser.addoption("--measure", action="store_true")
    parser.addoption("--share")


def pytest_configure(config):
    config.addinivalue_line("markers", "nats: needs NATS")
    config.addinivalue_line("markers", "long: long")
    config.pluginmanager.register(LongTests(config, Path(__file__).with_name("long_tests.json")))
"""
_TESTS = """
import subprocess
import sys

import pytest


def serve():
    subprocess.run([sys.executable, "-c", "", "serve"], check=True)


@pytest.fixture(scope="module")
def shared():
    serve()


@pytest.fixture
def own():
    serve()


def test_one_and_a_shared_one(shared, own): ...


def test_two(own):
    serve()


@pytest.mark.parametrize("case", [0, 1])
def test_browser_in_one_case(case):
    if case:
        subprocess.run(["chromium"], executable=sys.executable, check=True, stdin=subprocess.DEVNULL)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_them.py").write_text(_TESTS)
    return tmp_path


def run(suite: Path, *options: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options],
        cwd=suite,
        env=os.environ | {"PYTHONPATH": str(Path(long_tests.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


def test_a_core_test_that_starts_more_than_the_rule_allows_fails_until_it_is_recorded(suite: Path) -> None:
    """One run with --measure records them by function, with why; the core part runs without them then."""
    (suite / "long_tests.json").write_text('{"test_them.py::test_gone": {"why": "starts NATS", "seconds": 1.0}}')
    found = run(suite)
    assert "starts 2 servers" in found and "starts a browser" in found and "2 failed, 2 passed" in found
    assert "4 passed" in run(suite, "--measure")
    recorded = json.loads((suite / "long_tests.json").read_text())
    assert {name: test["why"] for name, test in recorded.items()} == {
        "test_them.py::test_two": "starts 2 servers",
        "test_them.py::test_browser_in_one_case": "starts a browser",
    }
    assert "1 passed, 3 deselected" in run(suite, "-m", "not long")


def test_a_share_leaves_out_the_long_tests_of_others(suite: Path) -> None:
    """A function's cases stay together, and core tests belong to no share."""
    recorded = {"test_them.py::test_two": 2.0, "test_them.py::test_browser_in_one_case": 1.0}
    tests = {name: {"why": "starts NATS", "seconds": seconds} for name, seconds in recorded.items()}
    (suite / "long_tests.json").write_text(json.dumps(tests))
    assert "1 passed, 3 deselected" in run(suite, "-m", "long", "--share", "0/2")
    assert "2 passed, 2 deselected" in run(suite, "--share", "1/2", "-k", "browser")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ([sys.executable, "-m", "headrace", "serve", "--watch-stdin"], "server"),
        ([".venv/bin/headrace", "serve"], "server"),
        ([sys.executable, "-m", "headrace", "status", "serve"], None),
        (["/opt/nats-server-2.10", "-c", "file"], "NATS"),
        (["/usr/bin/chromium", "--headless"], "a browser"),
        ("headrace serve", "server"),
        ([], None),
    ],
)
def test_kinds_of_commands(command: str | list[str], kind: str | None) -> None:
    """What a test starts is told from its command."""
    assert kind_of(command) == kind


def test_a_function_is_long_when_one_of_its_cases_is() -> None:
    """Its seconds are those of all cases, since all of them leave the core part."""
    assert judge([("", 1.0), ("", 2.5)]) is None
    assert judge([("", 1.0), ("", 3.5)]) == {"why": "takes more than 3 s", "seconds": 4.5}
    assert judge([("starts NATS", 0.5), ("", 3.5)]) == {"why": "starts NATS", "seconds": 4.0}


def test_shares_last_about_equally_long() -> None:
    """Each long test is in one share, the longest first."""
    recorded = {
        name: long_tests.LongTest(why="starts NATS", seconds=seconds)
        for name, seconds in {"a": 30.0, "b": 60.0, "c": 50.0, "d": 10.0}.items()
    }
    assert divide(recorded, 2) == {"b": 0, "c": 1, "a": 1, "d": 0}


def test_each_recorded_test_is_there() -> None:
    """A test that was renamed or removed is measured again, or its record is removed."""
    assert [name for name in json.loads(RECORD.read_text()) if not is_there(name, RECORD.parents[1])] == []
