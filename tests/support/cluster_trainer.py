"""A trainer whose server comes, goes and moves; it is compared with server and replica, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from watched_server import WAIT_S, wait_until

from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["Trainer"]

_DIM = 4


class Trainer:
    """Trains and streams an embedding, and compares it with the server and a replica."""

    def __init__(self, address: str, *, num_rows: int = 60, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(num_rows, _DIM)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr", retry_max_s=0.2, **settings)
        self.streamer.attach(self.model, self.optimizer, publish="all")

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.weight.pow(2).sum().backward()
        self.optimizer.step()

    def settle(self, replica: EmbeddingReplica) -> None:
        """Train a step and wait until the server and the replica have it, bit for bit."""
        self.step()
        self.streamer.flush(timeout_s=WAIT_S)
        assert self.streamer.audit(only_present=False).is_equal
        wanted = self.model.weight.detach().numpy()
        rows = np.arange(len(wanted))
        wait_until(lambda: bool((replica.lookup("weight", rows).numpy() == wanted).all()), "the replica")
