"""Evictions on several ranks, and a tap on tables with virtual ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from resumed_training import replicated_table

from headrace.streamer import RawEmbeddingStreamer

__all__ = ["VirtualTap", "evict_on_rank"]


class VirtualTap:
    """A tap on tables that tell by themselves what changed; the caller ends the steps."""

    def __init__(self, tables: list[Any], on_step: Callable[[], None]) -> None:
        self.tables = tables
        self.names = frozenset(table.spec.fqn for table in tables)
        self.unstreamed: dict[str, str] = {}
        self._on_step = on_step

    def copies(self) -> list[Any]:
        return []

    def new_tables(self) -> list[str]:
        return []

    def end_step(self) -> bool:
        self._on_step()
        return True

    def sweep(self) -> None:
        """The tables tell by themselves what changed."""

    def close(self) -> None:
        """There is no hook to remove."""


def evict_on_rank(rank: int, address: str, run: str) -> dict[str, Any]:
    """Train a replicated table, evict the same rows on all ranks, train one again; return what this rank did."""
    parallel, table, optimizer = replicated_table(run)
    with RawEmbeddingStreamer(address, run=run) as streamer:
        streamer.attach(parallel, optimizer, publish="updated")

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
