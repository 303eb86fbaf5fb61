"""A served copy of a model that trains: its outputs are the trainer's at the step that it shows, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headrace.paramserver.replica import EmbeddingReplica, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer

_TABLES = {"user": (60, 8), "item": (90, 4)}
_WAIT_S = 60.0


class _Ranker(nn.Module):
    """Bags of two tables, a norm with buffers, and a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(*_TABLES["user"], mode="sum", sparse=True)
        self.item = nn.EmbeddingBag(*_TABLES["item"], mode="mean", sparse=True)
        self.norm = nn.BatchNorm1d(12)
        self.top = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.top(self.norm(torch.cat([self.user(users), self.item(items)], dim=1)))
        return outputs


def _outputs(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(*batch)
    model.train()
    return outputs


@pytest.mark.parametrize("consistency", ["step", "latest"])
def test_a_served_copy_computes_what_the_trainer_does(tmp_path: Path, consistency: str) -> None:
    """After each flush the copy's rows and dense part are those of the trainer's step, and so are its outputs."""
    torch.manual_seed(0)
    some = np.random.default_rng(0)
    model = _Ranker()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    probe = [torch.from_numpy(some.integers(0, rows, (16, 3))) for rows, _ in _TABLES.values()]
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        RawEmbeddingStreamer(server.address, run="nightly", model="ctr", dense_interval_s=0.05) as streamer,
    ):
        streamer.attach(model, optimizer, publish="all", dense=True)
        streamer.flush()
        with EmbeddingReplica(server.address, model="ctr", consistency=consistency) as replica:  # type: ignore[arg-type]
            served = serve_model(_Ranker(), replica, model="ctr")
            for _ in range(5):
                for _ in range(7):
                    batch = [torch.from_numpy(some.integers(0, rows, (8, 3))) for rows, _ in _TABLES.values()]
                    optimizer.zero_grad()
                    (model(*batch) - 1).pow(2).mean().backward()
                    optimizer.step()
                streamer.flush()
                step = streamer.stats().step
                replica.wait_for(step, _WAIT_S, epoch=streamer.epoch)
                dense = replica.dense()
                assert (dense.epoch, dense.step) == (streamer.epoch, step)
                assert torch.equal(served(*probe), _outputs(model, probe))
