"""The freshness bench's trainer: a small torch model that is trained at a steady pace and streamed at each step.

Orders on stdin: first its `TrainerConfig`, then how many steps to train. The clock is the machine's monotonic one,
which all its processes share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.scripts.benches.bench_child import give_answer, orders
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig

__all__ = ["FQN", "TrainerConfig"]

FQN = "rows.weight"
_NUM_BATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """What is trained.

    Attributes:
        address: Of the server.
        num_rows: Rows of the table.
        dim: Columns of it, float32.
        rows_per_step: Different rows that a step updates.
        rows_per_s: Pace, rows a second.
        settings: Of the streamer, beside flushing at each step.
        seed: Of the rows that are chosen.
    """

    address: str
    num_rows: int
    dim: int
    rows_per_step: int
    rows_per_s: int
    settings: dict[str, Any]
    seed: int = 0


class _Trainer:
    def __init__(self, config: TrainerConfig) -> None:
        torch.manual_seed(config.seed)
        rng = np.random.default_rng(config.seed)
        self._interval_s = config.rows_per_step / config.rows_per_s
        self._batches = [
            torch.from_numpy(rng.choice(config.num_rows, config.rows_per_step, replace=False).reshape(-1, 10))
            for _ in range(_NUM_BATCHES)
        ]
        rows = nn.EmbeddingBag(config.num_rows, config.dim, mode="sum", sparse=True)
        self._model = nn.ModuleDict({"rows": rows, "top": nn.Linear(config.dim, 1)})
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        # Registered before the streamer's own hook, which cuts the flush: this is the moment of the update.
        self._updated_ns: list[int] = []
        self._optimizer.register_step_post_hook(lambda *_: self._updated_ns.append(time.monotonic_ns()))
        settings = {"flush_percent": 100, **config.settings}
        self._streamer = RawEmbeddingStreamer(config.address, run="bench", config=StreamerConfig(**settings))
        self._streamer.attach(self._model, self._optimizer, publish="all")
        self._streamer.flush()

    def train(self, num_steps: int) -> dict[str, Any]:
        """Train, and return when each step's update was done and what was sent."""
        self._updated_ns.clear()
        before = self._streamer.stats()
        began_ns = time.monotonic_ns()
        next_s = time.monotonic()
        for step in range(num_steps):
            self._train_step(self._batches[step % _NUM_BATCHES])
            # A step that comes late is not made up for: two at once would measure a burst.
            next_s = max(next_s + self._interval_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        self._streamer.flush()
        after = self._streamer.stats()
        assert after.step >= before.step + num_steps
        return {
            "first_step": before.step + 1,
            "updated_ns": list(self._updated_ns),
            "took_s": took_s,
            "num_rows_sent": after.num_rows_sent - before.num_rows_sent,
            "num_flushes": after.num_flushes - before.num_flushes,
            "ack_p50_ms": None if after.lag_p50_s is None else after.lag_p50_s * 1000,
        }

    def _train_step(self, ids: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        logits = self._model["top"](self._model["rows"](ids)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        torch.autograd.backward(loss)
        self._optimizer.step()


def _main() -> None:
    torch.set_num_threads(1)
    given = orders()
    trainer = _Trainer(TrainerConfig(**next(given)))
    give_answer({})
    for order in given:
        give_answer(trainer.train(**order))


if __name__ == "__main__":
    _main()
