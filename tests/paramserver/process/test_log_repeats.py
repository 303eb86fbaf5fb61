"""Repeated warnings are counted instead of written."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.paramserver.process.log_format import configure_logging, fact
from headrace.paramserver.process.log_repeats import RepeatFilter, limit_repeats

_log = logging.getLogger("headrace.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written = io.StringIO()
    configure_logging(level="info", log_format="json", stream=written)
    yield written
    root.handlers[:], level = before
    root.setLevel(level)
    logging.captureWarnings(False)


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["logger"].startswith("headrace.")]  # asyncio's own may come at any time


def test_burst_passes_and_the_rest_is_counted(stream: io.StringIO) -> None:
    """Three of ten equal warnings are written, and the next window begins with how many were not."""
    now_s = 0.0
    logging.getLogger().handlers[0].addFilter(RepeatFilter(burst=3, window_s=10, clock_s=lambda: now_s))
    for i in range(10):
        fact(_log, logging.WARNING, "refused", peer=i)
    fact(_log, logging.WARNING, "another", peer=0)
    now_s = 10.0
    fact(_log, logging.INFO, "goes on")
    told = [(line["message"], line.get("peer"), line.get("times")) for line in _lines(stream)]
    assert told[:4] == [("refused", 0, None), ("refused", 1, None), ("refused", 2, None), ("another", 0, None)]
    assert told[4:] == [("repeated", None, 7), ("goes on", None, None)]
    assert _lines(stream)[4] | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "headrace.paramserver.process.log_repeats",
        "message": "repeated",
        "what": "refused",
        "of": "headrace.test",
        "times": 7,
        "within_s": 10.0,
    }


def test_info_and_critical_are_never_held_back(stream: io.StringIO) -> None:
    """Each fact of info is an event of its own, and what ends a process is always said."""
    limit_repeats()
    for level in (logging.INFO, logging.CRITICAL):
        for _ in range(100):
            fact(_log, level, "said")
    assert len(_lines(stream)) == 200


def test_kinds_take_bounded_memory(stream: io.StringIO) -> None:
    """Messages that all differ end the window early instead of being remembered."""
    repeats = RepeatFilter(burst=1, window_s=1e9, clock_s=lambda: 0.0)
    logging.getLogger().handlers[0].addFilter(repeats)
    for i in range(1000):
        fact(_log, logging.ERROR, f"message {i}")
    assert len(repeats._counts) <= 256
    assert len(_lines(stream)) == 1000


def test_threads_share_one_count() -> None:
    """Of what many threads say at once exactly a burst goes out, and no call that logs fails, though windows end."""
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
