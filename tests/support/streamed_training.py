"""A model that trains a step at a time and is streamed to a fake store over loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fake_shard import WAIT_S, FakeStore
from store_comparison import Comparison, compare_with_store
from torch import nn

from headrace.streamer import RawEmbeddingStreamer

FAST: dict[str, Any] = {
    "freshness_s": 0,
    "max_cost_percent": 100,
    "retry_min_s": 0.001,
    "retry_max_s": 0.01,
    "connect_timeout_s": WAIT_S,
    "flush_timeout_s": WAIT_S,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(300, 8, sparse=True)
        self.items = nn.EmbeddingBag(200, 6, sparse=True)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.user(users).pow(2).sum() + self.items(items).sum()


class Training:
    """A model that can be trained a step at a time."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, *, users: list[int] | None = None) -> None:
        ids = torch.randint(0, 300, (32,), generator=self.generator) if users is None else torch.tensor(users)
        items = torch.randint(0, 200, (16, 3), generator=self.generator)
        self.optimizer.zero_grad()
        self.model(ids, items).backward()
        self.optimizer.step()


@contextmanager
def streaming(store: FakeStore, training: Training, **settings: Any) -> Iterator[RawEmbeddingStreamer]:
    streamer = RawEmbeddingStreamer(store.address, run="test", **{**FAST, **settings})
    try:
        streamer.attach(training.model, training.optimizer, publish="updated")
        yield streamer
    finally:
        streamer.close(flush=False)


def attached(address: str, trainer: Any, *, run: str, **settings: Any) -> RawEmbeddingStreamer:
    """Return a streamer of a trainer's `model` and `optimizer`."""
    streamer = RawEmbeddingStreamer(address, run=run, **settings)
    try:
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
    except BaseException:
        streamer.close(flush=False)
        raise
    return streamer


def compare(streamer: RawEmbeddingStreamer, store: FakeStore) -> Comparison:
    return compare_with_store(streamer.tables, store.address, only_present=True, timeout_s=WAIT_S)


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headrace-sender"]
