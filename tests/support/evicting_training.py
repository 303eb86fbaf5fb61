"""A trainer that evicts rows, alone or on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Evicting", "VirtualTap", "evict_on_rank"]


class Evicting:
    """A table that is trained with SGD, one row at a time if need be.

    Attributes:
        fqn: The table's name.
    """

    def __init__(self, name: str, num_rows: int = 100, dim: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.add_module(name, nn.Embedding(num_rows, dim, sparse=True))
        self.table: nn.Embedding = self.model.get_submodule(name)  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.fqn = f"{name}.weight"

    def step(self, rows: Iterable[int]) -> None:
        self.optimizer.zero_grad()
        self.table(torch.tensor(list(rows))).pow(2).sum().backward()
        self.optimizer.step()


class VirtualTap:
    """A tap on tables that tell by themselves what changed; the caller ends the steps."""

    def __init__(self, tables: list[Any], on_step: Callable[[], None]) -> None:
        self.tables = tables
        self.names = frozenset(table.spec.fqn for table in tables)
        self._on_step = on_step

    def end_step(self) -> bool:
        self._on_step()
        return True

    def sweep(self) -> None:
        """The tables tell by themselves what changed."""

    def close(self) -> None:
        """There is no hook to remove."""


def evict_on_rank(rank: int, address: str, run: str) -> dict[str, Any]:
    """Train a replicated table, evict the same rows on all ranks, train one again; return what this rank did."""
    from torch.nn.parallel import DistributedDataParallel

    from headrace.streamer import RawEmbeddingStreamer

    torch.manual_seed(0)
    model = nn.Module()
    model.add_module(run, nn.Embedding(100, 4, sparse=True))
    table: Any = model.get_submodule(run)
    model.forward = table.forward  # type: ignore[method-assign]
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(address, run=run) as streamer:
        streamer.attach(parallel, optimizer)

        def step(rows: list[int]) -> None:
            optimizer.zero_grad()
            parallel(torch.tensor(rows)).pow(2).sum().backward()
            optimizer.step()

        step(list(range(0, 100, 5)))
        streamer.flush()
        seen: list[list[int]] = []
        streamer.register_pre_eviction_hook(lambda fqn, ids: seen.append(ids.tolist()))
        num_evicted = streamer.evict(f"{run}.weight", torch.tensor([10, 95, 5, 10, 33, 60]))
        step([60, 61])
        streamer.flush()
        dist.barrier()
        parts = [(part.row_offset, part.row_offset + part.num_local_rows) for part in streamer.tables]
    return {"num_evicted": num_evicted, "seen": seen, "parts": parts, "weights": table.weight.detach().numpy()}
