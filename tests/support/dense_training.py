"""Models with dense tensors, trained on ranks and streamed; functions here run on a rank (see `ranks`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from restored_dense_training import WholeJob, WholeTrainer
from torch import nn

from headrace.kernels.dtypes import bits_of

__all__ = ["dense_refusal_on_rank", "lonely_flush_on_rank", "lonely_record_on_rank", "train_dense_on_rank", "values_of"]

NUM_STEPS = 6


def values_of(
    tensors: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Return the bits of whole tensors and of their states, by path and `weights` or the state's name."""
    found = {}
    for path, tensor in tensors.items():
        state = optimizer.state.get(tensor, {}) if tensor.requires_grad else {}
        columns = {"weights": tensor} | {name: value for name, value in state.items() if name != "step"}
        found[path] = {name: bits_of(_whole(value)).copy() for name, value in columns.items()}
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _dense(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict())


def train_dense_on_rank(rank: int, job: WholeJob) -> dict[str, Any]:
    """Train and stream on one rank; return its tensors, and at which step and how much it has published."""
    from headrace.streamer import RawEmbeddingStreamer

    assert job.address is not None
    trainer = WholeTrainer(job)
    settings = {"model": job.name, "dense_interval_s": 0.0, "freshness_s": 0, "max_cost_percent": 100}
    with RawEmbeddingStreamer(job.address, run=job.name, **settings) as streamer:
        streamer.attach(trainer.model, trainer.optimizer, publish="all", dense=True, dense_states=True)
        published, flusher = set(), streamer._delivery.flusher
        for step in range(NUM_STEPS):
            trainer.train(range(step, step + 1))
            published.add(streamer.stats().dense_step)
            # The next step can publish once the copy is back.
            assert flusher._pool.wait_until(lambda: flusher.dense.is_free, 60.0)
        streamer.flush()
        dist.barrier()
        stats = streamer.stats()
        tables = [table.path for table in streamer.tables]
    prefix = "core." if job.kind == "dmp" else ""
    dense = {
        prefix + name: tensor
        for name, tensor in _dense(trainer.core)
        if not name.startswith(("user", "bags")) and tensor.numel()
    }
    return {
        "values": values_of(dense, getattr(trainer.optimizer, "_optimizer", trainer.optimizer)),
        "tables": tables,
        "published": sorted(published),
        "dense_step": stats.dense_step,
        "dense_bytes": stats.dense_bytes,
    }


def dense_refusal_on_rank(rank: int, address: str, case: str) -> str:
    """Return the error with which attaching a model is refused."""
    from headrace.schemas.errors import HeadraceError
    from headrace.streamer import RawEmbeddingStreamer

    layers = {"layer": nn.Linear(3, 2)}
    if case == "different" and rank:
        layers["other"] = nn.Linear(2, 2)
    if case == "flattened":
        from torch.distributed.fsdp import FullyShardedDataParallel

        layers["layer"] = FullyShardedDataParallel(layers["layer"], device_id=torch.device("cpu"))  # type: ignore[assignment]
    model = nn.ModuleDict(layers)
    names = ["layer.*", "nowhere"] if case == "unknown" and rank else True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(address, run=case, model=case) as streamer:
        try:
            streamer.attach(model, optimizer, dense=names, publish="updated")
        except HeadraceError as exc:
            return str(exc)
    return "not refused"


def lonely_flush_on_rank(rank: int, address: str) -> list[str]:
    """Flush DTensors on rank 1 alone, then again when rank 0 comes late, then on both; return the errors."""
    from torch.distributed.fsdp import fully_shard

    from headrace.schemas.errors import UnavailableError
    from headrace.streamer import RawEmbeddingStreamer

    model = nn.Linear(6, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    with RawEmbeddingStreamer(address, run="lonely", model="lonely") as streamer:
        streamer.attach(model, optimizer, dense=True, publish="updated")

        def flush(timeout_s: float) -> None:
            try:
                streamer.flush(timeout_s)
            except UnavailableError as exc:
                errors.append(str(exc))

        if rank == 1:
            flush(0.1)
        dist.barrier()
        if rank == 0:
            flush(60.0)
        dist.barrier()
        flush(60.0)
        # FSDP's own exchanges are in order still.
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return errors


def lonely_record_on_rank(rank: int, address: str, folder: str) -> tuple[list[bool], list[str]]:
    """Record on rank 0 alone, then on both, then when rank 1 cannot; return what was recorded, and what is told."""
    from torch.distributed.fsdp import fully_shard

    from headrace.streamer import RawEmbeddingStreamer

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headrace.streamer.recorder").addHandler(handler)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"recordings": folder, "record_every_steps": 1, "on_error": "log", "non_finite": "reject"}
    recorded = []
    streamer = RawEmbeddingStreamer(address, run="records", model="records", **settings)
    streamer.attach(model, optimizer, dense=True, publish="updated")

    def train(*, is_recorded: bool = True) -> None:
        optimizer.zero_grad()
        model(torch.tensor([0, 4])).sum().backward()  # a row of each rank
        optimizer.step()
        if is_recorded:
            recorded.append(streamer.record(torch.ones(1), torch.ones(1)))

    train(is_recorded=rank == 0)
    dist.barrier()
    streamer.flush()
    train()
    streamer.pause()
    train(is_recorded=False)
    if rank == 1:
        model[0].weight.to_local().detach()[0] = float("nan")  # type: ignore[union-attr,operator]
    streamer.resume()
    streamer.step()
    recorded.append(streamer.record(torch.ones(1), torch.ones(1)))
    streamer.close(flush=False)
    return recorded, told
