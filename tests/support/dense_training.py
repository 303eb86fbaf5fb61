"""Models with dense tensors, trained on ranks and streamed; functions here run on a rank (see `ranks`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from dense_model import DenseModel, train_dense
from torch import nn

from headrace.kernels.dtypes import bits_of

__all__ = ["DenseJob", "dense_refusal_on_rank", "lonely_flush_on_rank", "lonely_record_on_rank", "train_dense_on_rank"]
__all__ += ["values_of"]

NUM_STEPS = 6
# What gloo, and so DistributedDataParallel, can send.
BROADCAST = (torch.float64, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class DenseJob:
    """What to train, and where to stream it.

    Attributes:
        address: The server's.
        run: Name of the run and of the model.
        kind: `ddp`, `fsdp` or `dmp`.
    """

    address: str
    run: str
    kind: str


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


def train_dense_on_rank(rank: int, job: DenseJob) -> dict[str, Any]:
    """Train and stream on one rank; return its tensors, and at which step and how much it has published."""
    from headrace.streamer import RawEmbeddingStreamer

    make = {"ddp": _ddp, "fsdp": _fsdp, "dmp": _dmp}[job.kind]
    model, core, prefix, optimizer, train = make(rank, job)
    settings = {"model": job.run, "dense_interval_s": 0.0, "freshness_s": 0, "max_cost_percent": 100}
    with RawEmbeddingStreamer(job.address, run=job.run, **settings) as streamer:
        streamer.attach(model, optimizer, publish="all", dense=True, dense_states=True)
        published, flusher = set(), streamer._delivery.flusher
        for step in range(NUM_STEPS):
            train(step)
            published.add(streamer.stats().dense_step)
            # The next step can publish once the copy is back.
            assert flusher._pool.wait_until(lambda: flusher.dense.is_free, 60.0)
        streamer.flush()
        dist.barrier()
        stats = streamer.stats()
        tables = [table.path for table in streamer.tables]
    inner = getattr(optimizer, "_optimizer", optimizer)
    dense = {prefix + name: t for name, t in _dense(core) if not name.startswith(("user", "bags")) and t.numel()}
    values = values_of(dense, inner)
    return {
        "values": values,
        "tables": tables,
        "published": sorted(published),
        "dense_step": stats.dense_step,
        "dense_bytes": stats.dense_bytes,
    }


def _batches(rank: int, step: int) -> range:
    return range(100 * step + rank, 100 * step + rank + 1)


def _ddp(rank: int, job: DenseJob) -> Any:
    core = DenseModel(dtypes=BROADCAST)
    model = nn.parallel.DistributedDataParallel(core)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, core, "", optimizer, lambda step: train_dense(model, optimizer, _batches(rank, step))


def _fsdp(rank: int, job: DenseJob) -> Any:
    from torch.distributed.fsdp import fully_shard

    core = DenseModel(dtypes=BROADCAST)
    core.turned = nn.Parameter(core.turned.detach().contiguous())  # what it shards has to be contiguous
    core.tied = nn.Linear(13, 120, bias=False)  # nor may it be shared between its groups
    fully_shard(core.bottom)
    fully_shard(core)
    optimizer = torch.optim.AdamW(core.parameters(), lr=0.1)
    return core, core, "", optimizer, lambda step: train_dense(core, optimizer, _batches(rank, step))


def _dmp(rank: int, job: DenseJob) -> Any:
    import sharded_training as sharded

    shardings = {"users": ("row_wise", {}), "shops": ("table_wise", {"rank": 1})}
    of_tables = sharded.Job(
        address=job.address, run=job.run, module="core", shardings=shardings, has_dense_optimizer=True
    )
    model, optimizer = sharded.build(of_tables)
    core = model.module.core

    def train(step: int) -> None:
        inputs = sharded.batch(core, 100 * step + rank, is_empty=False)
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()

    return model, core, "core.", optimizer, train


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
