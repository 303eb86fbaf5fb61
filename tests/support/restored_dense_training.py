"""Whole trainers on ranks, streamed with their dense part, and restored into another number of ranks or sharding.

Functions here run on a rank (see `ranks`).
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from dense_model import DenseModel
from sharded_training import Job, batch, build, copied, live_shards, load_whole, whole_tables
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

__all__ = ["WholeJob", "WholeTrainer", "go_on_with_all_on_rank", "stream_all_on_rank"]

BEFORE, AFTER = range(4), range(4, 8)
# What gloo can send.
_DTYPES = (torch.float64, torch.uint8)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, kw_only=True)
class WholeJob:
    """What to train, and where to stream it or to restore it from.

    Attributes:
        address: The server's; None restores from `snapshot`.
        name: Of the run and the model.
        kind: `plain`, `ddp`, `fsdp` or `dmp`.
        shardings, optimizer: Of `dmp`, as in `Job`.
        snapshot: Directory to restore from.
    """

    address: str | None
    name: str
    kind: str
    shardings: dict[str, tuple[str, dict[str, Any]]] | None = None
    optimizer: str = "adagrad"
    snapshot: str | None = None


class WholeTrainer:
    """One rank's model and optimizer, before any training; its rows and tensors are not those of another seed."""

    def __init__(self, job: WholeJob, *, is_blank: bool = False) -> None:
        self.job, self.rank = job, dist.get_rank()
        self.model, self.core, self.optimizer = self._build_sharded() if job.kind == "dmp" else self._build_dense()
        if is_blank:
            with torch.no_grad():
                for name, tensor in self.core.state_dict(keep_vars=True).items():
                    if "bags" not in name:
                        tensor.fill_(1)

    def _build_dense(self) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        core: nn.Module = DenseModel(dtypes=_DTYPES)
        core.turned = nn.Parameter(core.turned.detach().contiguous())
        core.tied = nn.Linear(13, 120, bias=False)
        model = core
        if self.job.kind == "ddp":
            model = nn.parallel.DistributedDataParallel(core)
        elif self.job.kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(core.bottom)  # type: ignore[arg-type]
            fully_shard(core)
        return model, core, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def _build_sharded(self) -> tuple[Any, Any, Any]:
        assert self.job.shardings is not None
        of_tables = Job(
            run=self.job.name,
            module="core",
            shardings=self.job.shardings,
            optimizer=self.job.optimizer,
            has_dense_optimizer=True,
        )
        model, (optimizer,) = build(of_tables)
        return model, model.module.core, optimizer

    def train(self, steps: range) -> list[float]:
        """Return this rank's losses."""
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            if self.job.kind == "dmp":
                loss = self.model(batch(self.core, 100 * step + self.rank, is_empty=False))
            else:
                generator = torch.Generator().manual_seed(100 * step + self.rank)
                ids = torch.randint(0, 60, (16,), generator=generator)
                loss = self.model(ids, torch.randn(16, 13, generator=generator))
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def whole_state(self) -> dict[str, Any]:
        """Return model and optimizer, whole, by torch's own means; a call of all ranks."""
        if self.job.kind == "dmp":
            dense = {path: self._columns(path) for path, _ in self.core.named_parameters() if "bags" not in path}
            return {"shards": copied(live_shards(self.model)), "dense": dense}
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_WHOLE)
        return {"model": model, "optimizer": optimizer}

    def load(self, results: list[dict[str, Any]]) -> None:
        """Load what `whole_state` has returned on each rank of a run; a call of all ranks."""
        if self.job.kind == "dmp":
            load_whole(self.model, (), whole_tables(results))
            for path, columns in results[0]["dense"].items():
                parameter = self.core.get_parameter(path)
                with torch.no_grad():
                    parameter.copy_(columns.pop("weights"))
                self.optimizer._optimizer.state[parameter] = columns
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=results[0]["model"],
            optim_state_dict=results[0]["optimizer"],
            options=_WHOLE,
        )

    def _columns(self, path: str) -> dict[str, torch.Tensor]:
        parameter = self.core.get_parameter(path)
        columns = {"weights": parameter, **self.optimizer._optimizer.state[parameter]}
        return {name: value.detach().clone() for name, value in columns.items()}


def stream_all_on_rank(rank: int, job: WholeJob) -> dict[str, Any]:
    """Stream a run to its end, then train it on as if it had not ended; return its state at the end, and losses."""
    from headrace import RawEmbeddingStreamer

    trainer = WholeTrainer(job)
    assert job.address is not None
    with RawEmbeddingStreamer(job.address, run=job.name, model=job.name) as streamer:
        streamer.attach(trainer.model, trainer.optimizer, publish="all", dense=True, dense_states=True)
        trainer.train(BEFORE)
        streamer.flush()
        dist.barrier()
    state = io.BytesIO()
    torch.save(trainer.whole_state(), state)  # bytes travel between processes; tensors would share memory
    return {"state": state.getvalue(), "losses": trainer.train(AFTER)}


def go_on_with_all_on_rank(rank: int, job: WholeJob, states: list[bytes]) -> dict[str, Any]:
    """Restore a run and train it on; do so again with a trainer that was loaded with the `states` of its ranks."""
    from headrace import restore

    restored, loaded = WholeTrainer(job, is_blank=True), WholeTrainer(job, is_blank=True)
    warnings: list[str] = []
    logging.getLogger("headrace.streamer.restore").addFilter(lambda record: not warnings.append(record.getMessage()))
    report = restore(
        restored.model, restored.optimizer, job.address, snapshot=job.snapshot, model_name=job.name, dense=True
    )
    loaded.load([torch.load(io.BytesIO(state), weights_only=False) for state in states])
    return {
        "report": report,
        "warnings": warnings,
        "losses": restored.train(AFTER),
        "expected_losses": loaded.train(AFTER),
    }
