"""What streaming from a GPU costs a training step: `step_time_ratio_gpu` of `headrace bench kernels`.

A model of plain tables is trained on one GPU with sparse gradients, in turns with and without a streamer that cuts its
tables there and sends to a server of one shard on the same machine. The time is the wall's over many steps, with the
GPU idle before and after: what a step waits for counts, and what the GPU does besides.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["step_time_ratio"]

_NUM_TABLES, _NUM_ROWS, _DIM, _BATCH, _BAG = 26, 1_000_000, 64, 4096, 4
_HIDDEN, _NUM_LAYERS = 4096, 4
_NUM_STEPS, _NUM_WARM_UPS = 50, 10


class _Model(nn.Module):
    """Tables under a few dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum", sparse=True) for _ in range(_NUM_TABLES)
        )
        widths = [_NUM_TABLES * _DIM, *[_HIDDEN] * _NUM_LAYERS, 1]
        self.dense = nn.Sequential(*map(nn.Linear, widths, widths[1:]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = [table(of_table) for table, of_table in zip(self.tables, ids, strict=True)]
        output: torch.Tensor = self.dense(torch.cat(pooled, dim=1))
        return output


def step_time_ratio(device: torch.device, num_rounds: int) -> float:
    """Return the median time of a step with streaming over the median without.

    Args:
        device: A CUDA device with some 10 GB free.
        num_rounds: Turns of each.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = _Model()
        batches = torch.randint(0, _NUM_ROWS, (8, _NUM_TABLES, _BATCH, _BAG))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(num_steps: int) -> float:
        """Return the seconds that steps take."""
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        for number in range(num_steps):
            optimizer.zero_grad()
            model(batches[number % len(batches)]).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    plain_s, streamed_s = [], []
    with tempfile.TemporaryDirectory() as folder, ServerProcess.start(Path(folder), shards=1) as server:
        for number in range(num_rounds):
            train(_NUM_WARM_UPS)
            plain_s.append(train(_NUM_STEPS))
            with RawEmbeddingStreamer(server.address, run=f"bench-{number}", device_pipeline=True) as streamer:
                streamer.attach(model, optimizer)
                train(_NUM_WARM_UPS)
                streamed_s.append(train(_NUM_STEPS))
    return median(streamed_s) / median(plain_s)
