"""A TorchRec model on ranks whose states go out with flushes alone; `train_on_rank` runs on a rank (see `ranks`)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from sharded_training import Job, ShardedTables

__all__ = ["train_on_rank"]


def train_on_rank(rank: int, address: str, job: Job) -> dict[str, Any]:
    """Train and stream; return whether the store is equal, and what the tap had."""
    from headrace.streamer import RawEmbeddingStreamer
    from headrace.streamer.compare import compare_with_store

    trainer = ShardedTables(job)
    with RawEmbeddingStreamer(address, run=job.run, freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(trainer.model, publish="all", states="on_flush")
        for step in range(6):
            trainer.train(step)
        num_owed = streamer.stats().num_owed_rows
        streamer.flush()
        dist.barrier()
        return {
            "num_owed": num_owed,
            "checkpoint": streamer.state_dict(),
            "is_equal": compare_with_store(streamer.tables, address).is_equal,
            "tables": [table.spec.fqn for table in streamer.tables],
        }
