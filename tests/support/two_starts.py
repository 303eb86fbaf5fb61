"""A run on several ranks that starts again, with the same model or with another one in a rank's rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["start_on_rank"]


def start_on_rank(rank: int, address: str, is_other: bool) -> str:
    """Train nothing new, and return `equal` or why it is refused; rank 1 has the rows from 500 on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(1000, 4), *([nn.Linear(4, 2)] if is_other else [])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if is_other:
        with torch.no_grad():
            model.module[0].weight[900] += 1
    with RawEmbeddingStreamer(address, run="ranks") as streamer:
        streamer.attach(model, optimizer, dense=is_other)
        try:
            model(torch.arange(10) + rank).sum().backward()
            optimizer.step()
        except ConfigError as exc:
            streamer.close()
            return str(exc)
        return "equal" if streamer.audit().is_equal else "differs"
