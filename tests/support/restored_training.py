"""Models on several ranks that are streamed, and others that are restored from the server and trained on.

Functions here run on a rank (see `ranks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from replicated_training import PLACEMENTS, place_whole
from sharded_training import Job, batch, build, copied_shards, load_whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["go_on_with_plain_tables_on_rank", "go_on_with_sharded_tables_on_rank", "stream_sharded_tables_on_rank"]

NUM_STEPS = 4


class _Plain(nn.Module):
    """Two plain tables, one of them with fewer rows than ranks."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(53, 6, mode="sum", sparse=is_sparse)
        self.one = nn.Embedding(3, 6, sparse=is_sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.bag(ids) + self.one(ids[:, 0] % 3) - 1).pow(2).mean()


def _plain(kind: str, optimizer: str, *, is_sparse: bool, is_blank: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under DDP, `fully_shard` or of DTensors, and its optimizer; a blank one has other weights."""
    model: nn.Module = _Plain(is_sparse=is_sparse)
    if is_blank:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 5.0)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        for table in (model.bag, model.one):
            table.weight = nn.Parameter(place_whole(table.weight.detach(), kind))
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)


def _train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, steps: range) -> list[float]:
    """Train and return losses; tables that are DTensors get equal gradients on all ranks instead."""
    rank = dist.get_rank()
    losses = []
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step if kind in PLACEMENTS else 100 * step + rank)
        ids = torch.randint(0, 53, (8, 2), generator=generator)
        if kind in PLACEMENTS:
            for index, table in enumerate((model.bag, model.one)):
                gradient = torch.zeros(table.weight.shape)
                rows = ids.flatten() % table.num_embeddings
                gradient[rows] = torch.randn(rows.numel(), 6, generator=generator) + index
                table.weight.grad = place_whole(gradient, kind)
        else:
            loss = model(ids)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return this rank's part of weights and states, in order."""
    found = []
    for parameter in model.parameters():
        for name, value in [("weights", parameter), *sorted(optimizer.state[parameter].items())]:
            local = value.to_local() if hasattr(value, "to_local") else value
            found.append((name, local.detach().clone().numpy() if isinstance(local, torch.Tensor) else local))
    return found


def go_on_with_plain_tables_on_rank(
    rank: int, address: str, kind: str, optimizer: str, is_sparse: bool
) -> dict[str, Any]:
    """Stream a model, restore another one from it, and train both on; return losses and values of both.

    `kind` is `ddp`, `fsdp`, or a key of `PLACEMENTS` for DTensors.
    """
    from headrace import RawEmbeddingStreamer, restore

    name = f"{kind}-{optimizer}"
    endless = _plain(kind, optimizer, is_sparse=is_sparse, is_blank=False)
    with RawEmbeddingStreamer(address, run=name, model=name) as streamer:
        streamer.attach(*endless, publish="all")
        _train_plain(*endless, kind, range(NUM_STEPS))
        streamer.flush()
        dist.barrier()
    restored = _plain(kind, optimizer, is_sparse=is_sparse, is_blank=True)
    report = restore(*restored, address, model_name=name)
    result: dict[str, Any] = {"report": report, "start": (_values(*restored), _values(*endless))}
    steps = range(NUM_STEPS, 2 * NUM_STEPS)
    result["losses"] = _train_plain(*restored, kind, steps), _train_plain(*endless, kind, steps)
    result["end"] = _values(*restored), _values(*endless)
    return result


def _train_sharded(model: Any, optimizer: Any, job: Job, steps: range) -> list[float]:
    core = getattr(model.module, job.module)
    losses = []
    for step in steps:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = model(batch(core, job.seed + 1000 * step + dist.get_rank(), is_empty=False))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def stream_sharded_tables_on_rank(rank: int, job: Job) -> dict[str, Any]:
    """Stream a TorchRec model, then train it on; return its shards before that, and the losses of that."""
    from headrace import RawEmbeddingStreamer

    model, optimizer = build(job)
    assert job.address is not None
    with RawEmbeddingStreamer(job.address, run=job.run, model=job.run) as streamer:
        streamer.attach(model, optimizer, publish="all")
        _train_sharded(model, optimizer, job, range(job.num_steps))
        streamer.step()
        streamer.flush()
        dist.barrier()
    shards = copied_shards(model, optimizer)
    return {
        "shards": shards,
        "losses": _train_sharded(model, optimizer, job, range(job.num_steps, 2 * job.num_steps)),
        "end": copied_shards(model, optimizer),
    }


def go_on_with_sharded_tables_on_rank(rank: int, job: Job, snapshot: str | None = None) -> dict[str, Any]:
    """Restore a TorchRec model and train it on; with `job.start`, train a model loaded with that as well."""
    from headrace import restore

    steps = range(job.num_steps, 2 * job.num_steps)
    model, optimizer = build(job)
    address = job.address if snapshot is None else None
    report = restore(model, optimizer, address, snapshot=snapshot, model_name=job.run)
    result: dict[str, Any] = {"report": report, "shards": copied_shards(model, optimizer)}
    result["losses"] = _train_sharded(model, optimizer, job, steps)
    result["end"] = copied_shards(model, optimizer)
    if job.start is not None:
        loaded, optimizer = build(job)
        load_whole(loaded, optimizer, job.start)
        result["expected_losses"] = _train_sharded(loaded, optimizer, job, steps)
        result["expected_end"] = copied_shards(loaded, optimizer)
    return result
