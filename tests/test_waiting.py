"""Tests wait in one way: a poll with a deadline that a busy machine moves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import waiting
from waiting import scaled_s, until, wait_until

TESTS = Path(__file__).parent


def test_nothing_else_sleeps() -> None:
    """No other file of the tests sleeps, in its code or in programs that it starts."""
    sleeps = re.compile(r"time\.slee[p]|from time impor[t]")  # which this file does not match
    assert [path.name for path in sorted(TESTS.rglob("*.py")) if sleeps.search(path.read_text())] == ["waiting.py"]


def test_no_test_of_the_fault_harness_reads_a_clock() -> None:
    """What the harness finds depends on its seed and on what other processes do, and on no time that a test takes."""
    for path in sorted((TESTS / "faults").glob("test_*.py")):
        names = {alias.name for node in ast.walk(ast.parse(path.read_text())) for alias in getattr(node, "names", ())}
        assert not names & {"time", "datetime"}, path


def test_a_busy_machine_moves_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline grows with the load, never shrinks below what was asked, and takes a scale from the environment."""
    monkeypatch.delenv("HEADRACE_WAIT_SCALE", raising=False)
    monkeypatch.setattr(waiting.os, "cpu_count", lambda: 2)
    for load, seconds in ((0.5, 10.0), (2.0, 10.0), (9.0, 45.0)):
        monkeypatch.setattr(waiting.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert scaled_s(10.0) == seconds
    monkeypatch.setenv("HEADRACE_WAIT_SCALE", "3")
    assert scaled_s(10.0) == 30.0


async def test_a_wait_returns_what_it_has_found_or_says_what_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds poll until something is true; a condition that never holds fails with what was waited for."""
    monkeypatch.setenv("HEADRACE_WAIT_SCALE", "0")
    answers = iter([0, "", "found", 0, 0, "found"])
    with pytest.raises(AssertionError, match="the answer did not come"):
        wait_until(lambda: next(answers), "the answer")
    with pytest.raises(AssertionError, match="it did not come"):
        await until(lambda: next(answers))
    assert wait_until(lambda: next(answers), lambda: pytest.fail("asked for")) == "found"

    async def find() -> object:
        return next(answers)

    monkeypatch.setenv("HEADRACE_WAIT_SCALE", "1e6")
    assert await until(find) == "found"
