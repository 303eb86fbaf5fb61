"""A replicated table that is trained on ranks, and goes on from a checkpoint on as many, more or fewer of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace.streamer import RawEmbeddingStreamer

__all__ = ["ROWS", "Saved", "replicated_table", "resume_on_rank", "resumed_on_rank", "train_on_rank"]

ROWS = 100


@dataclass
class Saved:
    """A rank's part of a checkpoint.

    Attributes:
        state: The streamer's.
        all_states: Those of all ranks.
        weights: The whole table.
    """

    state: dict[str, Any]
    all_states: str
    weights: npt.NDArray[np.float32]


def replicated_table(run: str) -> tuple[Any, nn.Embedding, torch.optim.Optimizer]:
    """Return a model that replicates one table, the table, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Module()
    model.add_module(run, nn.Embedding(ROWS, 4, sparse=True))
    table: Any = model.get_submodule(run)
    model.forward = table.forward  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (DistributedDataParallel(model) if dist.is_initialized() else model), table, optimizer


def train_on_rank(rank: int, address: str, run: str, paused_rank: int, evicted: list[int]) -> Saved:
    """Train every fifth row, of which one rank sends nothing, evict some, and make a checkpoint."""
    parallel, table, optimizer = replicated_table(run)
    streamer = RawEmbeddingStreamer(address, run=run)
    streamer.attach(parallel, optimizer, publish="updated")
    if rank == paused_rank:
        streamer.pause()
    optimizer.zero_grad()
    parallel(torch.arange(0, ROWS, 5)).pow(2).sum().backward()
    optimizer.step()
    if evicted:
        streamer.evict(f"{run}.weight", torch.tensor(evicted))
    if rank != paused_rank:
        streamer.flush()
    saved = Saved(streamer.state_dict(), streamer.state_of_all_ranks(), table.weight.detach().numpy().copy())
    dist.barrier()
    streamer.close(flush=False)
    return saved


@contextmanager
def resumed_on_rank(address: str, run: str, weights: npt.NDArray[np.float32]) -> Iterator[RawEmbeddingStreamer]:
    """Give the streamer of a trainer that has loaded a checkpoint's weights."""
    parallel, table, optimizer = replicated_table(run)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(weights))
    with RawEmbeddingStreamer(address, run=run) as streamer:
        streamer.attach(parallel, optimizer, publish="updated")
        yield streamer


def resume_on_rank(rank: int, address: str, run: str, weights: npt.NDArray[np.float32], states: list[Any]) -> int:
    """Go on from a rank's own state, `states[rank]`, flush, and return how many rows were marked."""
    with resumed_on_rank(address, run, weights) as streamer:
        return streamer.load_state_dict(states[rank])
