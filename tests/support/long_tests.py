"""Which tests are long, by a rule: more than one server, NATS, a browser, or more than `LONG_S` seconds.

`tests/long_tests.json` holds what the rule found, by test function, and `--measure` writes it anew for the files that a
run covers. What starts processes cannot hide: a core test that starts more than the rule allows fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, TypedDict

import pytest

LONG_S = 3.0
RECORD = Path(__file__).resolve().parents[1] / "long_tests.json"


class LongTest(TypedDict):
    """What is recorded of a long test: why it is long, and how long all its cases take together, in seconds."""

    why: str
    seconds: float


class LongTests:
    """Marks the recorded tests `long`, counts what each test starts, and keeps core tests to the rule."""

    def __init__(self, config: pytest.Config, record: Path = RECORD) -> None:
        self._record = record
        self._is_measuring: bool = config.getoption("--measure")
        self._share = _parse_share(config.getoption("--share"))
        self._is_controller = not hasattr(config, "workerinput")
        self._recorded: dict[str, LongTest] = json.loads(record.read_text()) if record.exists() else {}
        self._started: Counter[str] = Counter()  # by the test or the fixture that runs now
        self._shared: dict[pytest.FixtureDef[Any], Counter[str]] = {}
        self._shared_s = 0.0  # spent in fixtures that tests share, since the present test began
        self._measured: dict[str, list[tuple[str, float]]] = {}
        self._own_s: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._core_s: dict[str, float] = {}
        sys.addaudithook(self._count)

    @pytest.hookimpl(tryfirst=True)  # before -m selects
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Mark long tests, and leave out those of other shares."""
        for item in items:
            if function_of(item.nodeid) in self._recorded or item.get_closest_marker("nats"):
                item.add_marker("long")
        if self._share is None:
            return
        share_of = divide(self._recorded, self._share[1])
        left_out = [
            item
            for item in items
            if item.get_closest_marker("long") and share_of.get(function_of(item.nodeid), 0) != self._share[0]
        ]
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Keep apart what a fixture starts that several tests share."""
        if fixturedef.scope == "function":
            return (yield)
        outside, self._started = self._started, Counter()
        began_s, inner_s = time.perf_counter(), self._shared_s
        try:
            return (yield)
        finally:
            self._shared[fixturedef], self._started = self._started, outside
            self._shared_s = inner_s + time.perf_counter() - began_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begin to count for a test."""
        self._started.clear()
        self._shared_s = 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a core test that has started what only long tests may."""
        result = yield
        why = self._why(item)
        item.user_properties += [("why_long", why), ("shared_s", self._shared_s)]
        if why and not self._is_measuring and item.get_closest_marker("long") is None:
            pytest.fail(f"this test {why}, so it is long: record it with scripts/test --measure {item.location[0]}")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a process of the suite tells of a test."""
        if not self._is_controller or report.when == "teardown":
            return
        name = function_of(report.nodeid)
        if report.failed:
            self._failed.add(name)
        told = dict(report.user_properties)
        self._own_s[report.nodeid] += report.duration - float(told.get("shared_s", 0.0))
        if report.when == "call":
            self._measured.setdefault(name, []).append((str(told.get("why_long", "")), self._own_s[report.nodeid]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what a run with `--measure` has found; a file that was run in part keeps the rest of its record."""
        if not self._is_measuring or not self._is_controller:
            return
        kept = {
            name: test
            for name, test in self._recorded.items()
            if (name not in self._measured or name in self._failed) and is_there(name, session.config.rootpath)
        }
        found = {
            name: test
            for name, cases in self._measured.items()
            if name not in self._failed and (test := judge(cases)) is not None
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(test)}" for name, test in sorted((kept | found).items())]
        self._record.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name core tests that took as long as long ones: the machine is busy, or they are to be recorded."""
        slow = sorted(
            (max(seconds for _, seconds in cases), name)
            for name, cases in self._measured.items()
            if name not in self._recorded and max(seconds for _, seconds in cases) > LONG_S
        )
        if slow and not self._is_measuring:
            terminalreporter.section(f"core tests that took more than {LONG_S:g} s (busy machine, or --measure)")
            for seconds, name in reversed(slow):
                terminalreporter.line(f"{seconds:6.1f} s  {name}")

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and (kind := kind_of(args[1])) is not None:
            self._started[kind] += 1

    def _why(self, item: pytest.Item) -> str:
        """Return what makes this test a long one, apart from its time, in words that follow its name."""
        started = +self._started
        for fixture, shared in self._shared.items():
            if fixture.argname in getattr(item, "fixturenames", ()) and item.nodeid.startswith(fixture.baseid):
                started |= Counter({kind: count for kind, count in shared.items() if kind != "server"})
        if item.get_closest_marker("nats") or started["NATS"]:
            return "starts NATS"
        if started["a browser"]:
            return "starts a browser"
        return f"starts {started['server']} servers" if started["server"] > 1 else ""


def kind_of(command: str | Iterable[Any]) -> str | None:
    """Return what a started command is: "server", "NATS", "a browser", or None for anything else."""
    words = command.split() if isinstance(command, str) else [str(word) for word in command]
    name = Path(words[0]).name if words else ""
    if name.startswith("nats-server"):
        return "NATS"
    if name.startswith(("chromium", "google-chrome")):
        return "a browser"
    return "server" if "serve" in words[1:4] else None


def judge(cases: list[tuple[str, float]]) -> LongTest | None:
    """Return what to record of a test function of these cases, each with its reason or "" and its seconds."""
    longest_s = max(seconds for _, seconds in cases)
    why = next((why for why, _ in cases if why), f"takes more than {LONG_S:g} s" if longest_s > LONG_S else "")
    return LongTest(why=why, seconds=round(sum(seconds for _, seconds in cases), 1)) if why else None


def divide(recorded: dict[str, LongTest], num_shares: int) -> dict[str, int]:
    """Return the share of each long test: the longest first, each to the share that is the shortest so far."""
    share_s = [0.0] * num_shares
    shares = {}
    for name, test in sorted(recorded.items(), key=lambda pair: (-pair[1]["seconds"], pair[0])):
        shares[name] = min(range(num_shares), key=share_s.__getitem__)
        share_s[shares[name]] += test["seconds"]
    return shares


def is_there(name: str, root: Path) -> bool:
    """Return whether a file below `root` has this test function, or this state machine of Hypothesis."""
    file = root / file_of(name)
    *_, of, test = name.split("::")
    return file.exists() and (f"{of} = " if test == "runTest" else f"def {test}(") in file.read_text()


def function_of(nodeid: str) -> str:
    """Return the name of a test without its case."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def _parse_share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise pytest.UsageError(f"--share {text}: give K/N, with K from 0 to N - 1")
    return int(index), int(count)
