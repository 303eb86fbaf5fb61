"""A sender to a fake store, and a flusher of one table that feeds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from fake_shard import WAIT_S, FakeStore, hosted
from trainer_tables import WRITER, Submitted, Trained

from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.sender import Sender

__all__ = ["NUM_ROWS", "Sending", "sending_to"]

NUM_ROWS = 200


class Sending:
    """A sender that has started; `open` opens its sessions.

    Attributes:
        table: What is sent.
    """

    def __init__(self, store: FakeStore, **settings: Any) -> None:
        self.store = store
        settings = {"retry_min_s": 0.001, "retry_max_s": 0.01, "connect_timeout_s": WAIT_S, **settings}
        self.table = Trained(num_rows=NUM_ROWS, dim=16)
        # Its flusher submits to the sender, its pool is the one that the sender gives back to.
        submitted = Submitted([self.table], num_shards=store.num_shards, **settings)
        self.pool, self.flusher = submitted.pool, submitted.flusher
        self.sender = Sender(config=StreamerConfig.load(environ={}, **settings), pool=self.pool)
        self.flusher._submit, self.flusher._withdraw = self.sender.submit, self.sender.withdraw
        self.sender.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.stop(WAIT_S)

    def open(self) -> None:
        found = self.sender.find_store([("127.0.0.1", self.store.shards[0].port)], WRITER)
        self.sender.open(found, WRITER)
        self.sender.register([self.table.tapped.spec])

    def send(self, *steps: int) -> None:
        for step in steps:
            self.table.update(range(NUM_ROWS), float(step))
            self.flusher.on_step(step)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens on another thread."""
        changed = self.sender._outstanding._changed
        deadline_s = time.monotonic() + WAIT_S
        with changed:
            while not condition():
                assert time.monotonic() < deadline_s
                changed.wait(0.01)


@contextmanager
def sending_to(num_shards: int, **settings: Any) -> Iterator[Sending]:
    with hosted(FakeStore(num_shards=num_shards)) as store, Sending(store, **settings) as sending:
        sending.open()
        yield sending
