"""A rank that waits for others says so, in the log."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from fake_shard import FakeStore
from streamed_training import FAST

from headrace.streamer import RawEmbeddingStreamer, rank_wait
from headrace.streamer.rank_wait import told_when_late


class Told(logging.Handler):
    """Keeps what is logged, and lets others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.has_any = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.has_any.set()


class LateWorld:
    """Rank 0 of two; the other one comes once this one has said that it waits."""

    rank, size = 0, 2

    def __init__(self, told: Told) -> None:
        self.told = told

    def share(self, value: Any) -> Any:
        assert self.told.has_any.wait(timeout=60), "nothing was said"
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    handler = Told()
    logger = logging.getLogger(rank_wait.__name__)
    logger.addHandler(handler)
    monkeypatch.setattr(rank_wait, "_LATE_S", 0.05)
    yield handler
    logger.removeHandler(handler)


def timers() -> list[threading.Timer]:
    """Return the threads that wait to tell of something; those of other kinds come and go as they like."""
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_streamer_that_waits_for_another_rank_says_so(store: FakeStore, told: Told) -> None:
    """Where only one rank makes its streamer, it names the call that the others have to make, once, and goes on."""
    with RawEmbeddingStreamer(store.address, run="test", world=LateWorld(told), **FAST) as streamer:
        assert streamer.epoch == 1
    (message,) = told.messages
    assert message.startswith(
        "rank 0 of 2 has waited in RawEmbeddingStreamer(...) for 0.05 s: every rank has to make this call"
    )


def test_nothing_is_said_of_calls_that_end_and_of_one_rank(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends in time leaves no thread and no line behind, nor does a long one of a run of one rank."""
    with told_when_late("attach(...)", rank=0, world_size=1):
        assert not timers()
    monkeypatch.setattr(rank_wait, "_LATE_S", 3600.0)
    with pytest.raises(ValueError, match="refused"), told_when_late("attach(...)", rank=0, world_size=2):
        # Nor does it keep a process alive that ends without unwinding.
        assert [timer.daemon for timer in timers()] == [True]
        raise ValueError("refused")
    assert not timers()
    assert told.messages == []
