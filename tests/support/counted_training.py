"""A training whose rows say which step they are of, and what a replica of it is compared with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.idl import idl
from headrace.streamer import RawEmbeddingStreamer

WAIT_S = 60.0
ROWS = 300
# On disk with place for few of the rows: most lookups read some from there, and push others out.
STORAGE = pytest.mark.parametrize(
    "storage", [{}, {"*": DiskStorage(memory_bytes=4096)}, {"left.*": DiskStorage()}], ids=["memory", "disk", "mixed"]
)


class Training:
    """Two tables whose every row is the step at which it was last updated: all rows, in both, at each step.

    `name` is that of its model, on a server that has others; None for the only one.
    """

    def __init__(self, address: str, *, name: str | None = None, **settings: Any) -> None:
        self.address, self.name = address, name
        self.model = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=False) for name in ("left", "right")}
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        # Its gradient is one everywhere: each step adds one.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.streamer = RawEmbeddingStreamer(address, run=name or "run", model=name, **settings)
        self.streamer.attach(self.model, self.optimizer, publish="all")
        self.num_steps = 0

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.num_steps += 1

    def flush(self) -> None:
        self.streamer.flush()

    def replica(self, **settings: Any) -> EmbeddingReplica:
        """Return a replica of its model."""
        return EmbeddingReplica(self.address, model=self.name, **settings)

    def close(self) -> None:
        self.streamer.close()


def make_snapshot(server: ServerProcess) -> Path:
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S, role=idl.Role.ADMIN)
    manifest = asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=WAIT_S))
    return server.data_dir / "snapshots" / manifest.name


def assert_equal(replica: EmbeddingReplica, training: Training) -> None:
    for name, bag in training.model.items():
        rows = replica.lookup(f"{name}.weight", torch.arange(ROWS))
        assert torch.equal(rows, bag.weight.detach()), name
        assert replica.num_rows(f"{name}.weight") == ROWS


def settle(replica: EmbeddingReplica, training: Training) -> None:
    """Return when the replica shows what the trainer has flushed."""
    training.flush()
    replica.wait_for(training.num_steps, WAIT_S, epoch=training.streamer.epoch)
