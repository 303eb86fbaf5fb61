"""Log lines: one per fact, as text or JSON; repeated warnings are counted instead of written."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.paramserver.system.log_lines import (
    RepeatFilter,
    WarningThrottle,
    configure_logging,
    fact,
    resolve_log_format,
)

LOGGER = logging.getLogger("test_log_format")


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def _configure(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level=level, log_format=log_format, stream=stream, always={"shard": 3})
    return stream


def test_lines() -> None:
    """A JSON line has time, level, logger, message and the fields; no field replaces the first four.

    A text line is one line, whatever the fields hold."""
    stream = _configure("json")
    fact(LOGGER, logging.WARNING, "gate is open", height=1.5, path="a\nb", level="mine")
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "test_log_format",
        "message": "gate is open",
        "shard": 3,
        "height": 1.5,
        "path": "a\nb",
    }
    assert stream.getvalue().count("\n") == 1
    stream = _configure("text")
    fact(LOGGER, logging.INFO, "gate is\nopen", height=1.23456, path="a\nb", name="", plain="x/y")
    line = stream.getvalue()
    assert line.endswith(' info    gate is open  shard=3  height=1.23  path="a\\nb"  name=""  plain=x/y\n')
    assert line.count("\n") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("named", ["run", "client", "follower", "method"])
def test_names_cannot_forge_lines_nor_write_on_a_terminal(named: str, log_format: str) -> None:
    """Control characters of a name are written out, in a field, a message or a traceback; JSON holds them still."""
    odd = "a\x1b[2Jb\nc\x7fd\x9b31me\x85f\u202eg"
    stream = _configure(log_format)
    fact(LOGGER, logging.INFO, "somebody came", **{named: odd})
    fact(LOGGER, logging.INFO, "somebody came", **{named: "a\x1b[2J\x7f\x9bb"})
    LOGGER.warning("127.0.0.1:9: unknown %s %s", named, odd)
    try:
        raise ValueError(odd)
    except ValueError:
        LOGGER.exception("somebody failed")
    written = stream.getvalue()
    assert re.findall(r"[^\n -\x7e]", written) == []
    lines = written.split("\n")
    if log_format == "json":
        assert json.loads(lines[0])[named] == odd
    else:
        assert lines[0].endswith(rf'{named}="a\u001b[2Jb\nc\x7fd\x9b31me\x85f\u202eg"')
        assert lines[1].endswith(rf"{named}=a\x1b[2J\x7f\x9bb")
        assert rf"unknown {named} a\x1b[2Jb c\x7fd\x9b31me f\u202eg  shard=3" in lines[2]
        assert r"ValueError: a\x1b[2Jb" in written


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_plain_records_levels_and_percent_signs(log_format: str) -> None:
    """Plain logging calls look the same, with their traceback; a fact's message is no format string; levels count."""
    stream = _configure(log_format)
    try:
        raise ValueError("stuck")
    except ValueError:
        LOGGER.exception("gate %d failed", 7)
    text = stream.getvalue()
    assert "gate 7 failed" in text and "ValueError: stuck" in text
    assert (text.count("\n") == 1) == (log_format == "json")
    fact(LOGGER, logging.INFO, "100 %s full")
    assert "100 %s full" in stream.getvalue()
    stream = _configure(log_format, level="error")
    fact(LOGGER, logging.WARNING, "gate creaks")
    assert stream.getvalue() == ""
    assert [resolve_log_format(wanted, stream) for wanted in ("auto", log_format)] == ["json", log_format]
    stream.isatty = lambda: True  # type: ignore[method-assign]
    assert [resolve_log_format(wanted, stream) for wanted in ("auto", log_format)] == ["text", log_format]


def test_levels_have_colours_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings and errors stand out on a terminal, unless its user wants no colours; files and JSON have none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def logged(log_format: str, *, is_terminal: bool = True) -> str:
        stream = io.StringIO()
        stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
        configure_logging(level="info", log_format=log_format, stream=stream)
        fact(LOGGER, logging.WARNING, "gate creaks")
        fact(LOGGER, logging.INFO, "gate is open")
        return stream.getvalue()

    first, second = logged("auto").splitlines()
    assert " \x1b[33mwarning\x1b[0m gate creaks" in first
    assert "\x1b" not in second + logged("text", is_terminal=False) + logged("json")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in logged("text")


_log = logging.getLogger("headrace.test")


@pytest.fixture
def stream() -> io.StringIO:
    written = io.StringIO()
    configure_logging(level="info", log_format="json", stream=written)
    return written


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["logger"].startswith("headrace.")]  # asyncio's own may come at any time


def test_burst_passes_and_the_rest_is_counted(stream: io.StringIO) -> None:
    """Three of ten equal warnings are written; the next window begins with the number of the others.

    Facts at info are events of their own, a fatal error is always logged, and many kinds end a window early, so that
    few are remembered.
    """
    now_s = 0.0
    repeats = RepeatFilter(burst=3, window_s=10, clock_s=lambda: now_s)
    logging.getLogger().handlers[0].addFilter(repeats)
    for level in (logging.WARNING, logging.INFO, logging.CRITICAL):
        for i in range(10):
            fact(_log, level, "refused", peer=i)
    fact(_log, logging.WARNING, "another", peer=0)
    now_s = 10.0
    fact(_log, logging.INFO, "goes on")
    lines = [(line["level"], line["message"], line.get("peer")) for line in _lines(stream)]
    assert lines[:3] == [("warning", "refused", i) for i in range(3)]
    assert lines[3:24] == [
        *(("info", "refused", i) for i in range(10)),
        *(("critical", "refused", i) for i in range(10)),
        ("warning", "another", 0),
    ]
    assert lines[24:] == [("warning", "repeated", None), ("info", "goes on", None)]
    assert _lines(stream)[24] | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "headrace.paramserver.system.log_lines",
        "message": "repeated",
        "what": "refused",
        "of": "headrace.test",
        "times": 7,
        "within_s": 10.0,
    }
    for i in range(1000):
        fact(_log, logging.ERROR, f"message {i}")
    assert len(repeats._counts) <= 256 and len(_lines(stream)) == 1026


def test_threads_share_one_count() -> None:
    """Of equal records from many threads exactly a burst passes, and no call fails while windows end."""
    same = RepeatFilter(burst=1_000, window_s=1e9)
    others = RepeatFilter(burst=1, window_s=1e9)

    def say(thread: int) -> int:
        passed = 0
        for number in range(6_000):
            passed += same.filter(_record("the same"))
            others.filter(_record(f"{thread} {number}"))
        return passed

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            passed = sum(pool.map(say, range(8)))
    finally:
        sys.setswitchinterval(interval_s)
    assert passed == 1_000


def _record(message: str) -> logging.LogRecord:
    return logging.LogRecord("headrace.test", logging.WARNING, __file__, 1, message, None, None)


def test_warnings_about_peers_are_throttled(caplog: pytest.LogCaptureFixture) -> None:
    """One warning per kind and interval is written; the next one has the number of the others."""
    now_s = 0.0
    throttle = WarningThrottle(_log, clock_s=lambda: now_s)
    assert throttle.quiet_s is None
    for peer in ("a:1", "b:2", "c:3"):
        throttle.warn("slow", peer, "no frame")
    throttle.warn("malformed", "a:1", "no call")
    now_s = 1.0
    throttle.warn("slow", "d:4", "no frame")
    assert caplog.messages == [
        "a:1: slow: no frame",
        "a:1: malformed: no call",
        "d:4: slow: no frame (2 more since the last such line)",
    ]
    now_s = 3.5
    assert throttle.quiet_s == 2.5
