"""A rank that waits for others logs a warning."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from fake_shard import FakeStore
from streamed_training import FAST

from headrace.streamer import RawEmbeddingStreamer, world
from headrace.streamer.world import warn_when_late


class Log(logging.Handler):
    """Keeps messages, and lets others wait for the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.has_any = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.has_any.set()


class LateWorld:
    """Rank 0 of two; the other one comes once this one has warned."""

    rank, size = 0, 2

    def __init__(self, log: Log) -> None:
        self.log = log

    def share(self, value: Any) -> Any:
        assert self.log.has_any.wait(timeout=60), "nothing was said"
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    handler = Log()
    logger = logging.getLogger(world.__name__)
    logger.addHandler(handler)
    monkeypatch.setattr(world, "_LATE_S", 0.05)
    yield handler
    logger.removeHandler(handler)


def timers() -> list[threading.Timer]:
    """Return the timers among the threads."""
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_streamer_that_waits_for_another_rank_says_so(store: FakeStore, log: Log) -> None:
    """A rank that waits for another one names the call that all have to make, once, and goes on."""
    with RawEmbeddingStreamer(store.address, run="test", world=LateWorld(log), **FAST) as streamer:
        assert streamer.epoch == 1
    (message,) = log.messages
    assert message.startswith(
        "rank 0 of 2 has waited in RawEmbeddingStreamer(...) for 0.05 s: every rank has to make this call"
    )


def test_nothing_is_said_of_calls_that_end_and_of_one_rank(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends in time, or of a run of one rank, leaves no thread and no warning."""
    with warn_when_late("attach(...)", rank=0, world_size=1):
        assert not timers()
    monkeypatch.setattr(world, "_LATE_S", 3600.0)
    with pytest.raises(ValueError, match="refused"), warn_when_late("attach(...)", rank=0, world_size=2):
        # Nor does it keep a process alive that ends without unwinding.
        assert [timer.daemon for timer in timers()] == [True]
        raise ValueError("refused")
    assert not timers()
    assert log.messages == []
