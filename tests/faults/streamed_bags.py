"""A trainer of bags that is streamed, for tests of servers that are away or full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from waiting import WAIT_S

from headrace import RawEmbeddingStreamer

__all__ = ["StreamedBags"]


class StreamedBags:
    """Tables under Adagrad, with a few random rows a step.

    Attributes:
        model: The tables by name.
        streamer: Sends all of their rows.
    """

    def __init__(self, address: str, names: Sequence[str], *, num_rows: int, dim: int, **settings: Any) -> None:
        torch.manual_seed(3)
        self._num_rows, self._generator = num_rows, torch.Generator().manual_seed(4)
        self.model = nn.ModuleDict({name: nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True) for name in names})
        self._optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        # Every step that finds a free buffer flushes: on a busy machine flushes are slow, and would be held back.
        often: dict[str, Any] = {"freshness_s": 0, "max_cost_percent": 100, "connect_timeout_s": WAIT_S}
        self.streamer = RawEmbeddingStreamer(address, run="bags", **often | settings)
        self.streamer.attach(self.model, self._optimizer, publish="all")

    def train(self, num_steps: int = 1) -> None:
        """Make some steps."""
        for _ in range(num_steps):
            ids = torch.randint(0, self._num_rows, (16, 3), generator=self._generator)
            self._optimizer.zero_grad()
            torch.stack([bag(ids).pow(2).mean() for bag in self.model.values()]).sum().backward()
            self._optimizer.step()

    def weights(self, name: str) -> torch.Tensor:
        """Return a copy of a table's rows."""
        return self.model.get_parameter(f"{name}.weight").detach().clone()

    def flush_and_check(self) -> None:
        """Send everything, and check that the store has all rows as they are here."""
        self.streamer.flush(WAIT_S)
        report = self.streamer.audit(timeout_s=WAIT_S)
        assert report.is_equal, str(report)
