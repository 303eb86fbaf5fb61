"""Log lines: one a fact, the same facts as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.paramserver.process.log_format import configure_logging, fact, resolve_log_format

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


def test_json() -> None:
    """A JSON line has time, level, logger, message and the fields; a field cannot hide one of the first."""
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


def test_text() -> None:
    """A text line is one line whatever the fields hold."""
    stream = _configure("text")
    fact(LOGGER, logging.INFO, "gate is\nopen", height=1.23456, path="a\nb", name="", plain="x/y")
    line = stream.getvalue()
    assert line.endswith(' info    gate is open  shard=3  height=1.23  path="a\\nb"  name=""  plain=x/y\n')
    assert line.count("\n") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_plain_records_and_tracebacks(log_format: str) -> None:
    """Records of plain logging calls look the same, with their traceback."""
    stream = _configure(log_format)
    try:
        raise ValueError("stuck")
    except ValueError:
        LOGGER.exception("gate %d failed", 7)
    text = stream.getvalue()
    assert "gate 7 failed" in text
    assert "ValueError: stuck" in text
    assert (text.count("\n") == 1) == (log_format == "json")


def test_percent_in_a_message_is_itself() -> None:
    """A fact's message is no format string."""
    stream = _configure("json")
    fact(LOGGER, logging.INFO, "100 %s full")
    assert json.loads(stream.getvalue())["message"] == "100 %s full"


def test_level() -> None:
    """What is below the level is not written."""
    stream = _configure("text", level="error")
    fact(LOGGER, logging.WARNING, "gate creaks")
    assert stream.getvalue() == ""


def test_auto() -> None:
    """`auto` is text on a terminal and JSON elsewhere."""
    stream = io.StringIO()
    assert resolve_log_format("auto", stream) == "json"
    stream.isatty = lambda: True  # type: ignore[method-assign]
    assert resolve_log_format("auto", stream) == "text"
    assert resolve_log_format("json", stream) == "json"
