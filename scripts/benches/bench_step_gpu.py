"""What streaming from a GPU costs a training step: `step_time_ratio_gpu` of `headrace bench kernels`.

A model of plain tables is trained on one GPU with sparse gradients, in turns with and without a streamer that cuts its
tables there and sends to a server of one shard on the same machine. The time is the wall's over many steps, with the
GPU idle before and after: what a step waits for counts, and what the GPU does besides. The dense layers multiply as
float32 (torch's precision "highest"), behind which a host's time may hide, and as TF32 ("high"), where steps are short.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import torch
from torch import nn

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.schemas.near_names import first_of
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.device.device_dirty_rows import DeviceDirtyRows

__all__ = ["STEP_FIGURES", "step_figures"]

_NUM_TABLES, _NUM_ROWS, _DIM, _BATCH, _BAG = 26, 1_000_000, 64, 4096, 4
_HIDDEN, _NUM_LAYERS = 4096, 4
_NUM_STEPS, _NUM_WARM_UPS = 50, 10
_PRECISIONS = ("highest", "high")

STEP_FIGURES: Final = (
    "step_time_ratio_gpu",
    *(f"step_time_ratio_gpu_{precision}" for precision in _PRECISIONS),
    *(f"step_ms_gpu_{precision}" for precision in _PRECISIONS),
)
"""What `step_figures` measures, in its order."""


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


def step_figures(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `STEP_FIGURES`.

    These are the median time of a step with streaming over the median without, the greater one of both precisions and
    that of each; and the median without, milliseconds, of each precision. Some 8 GB are written to the folder of
    temporary files at a time.

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

    def train_streamed() -> float:
        """Return the seconds that steps take whose rows are streamed."""
        # A server each time, whose files go with it, and no flush at the end: all rounds would take tens of gigabytes.
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess.start(Path(folder), shards=1) as server,
            RawEmbeddingStreamer(server.address, run="bench", device_pipeline=True) as streamer,
        ):
            streamer.attach(model, optimizer)
            if by_host := [table.spec.fqn for table in streamer.tables if not isinstance(table.dirty, DeviceDirtyRows)]:
                raise UnavailableError(f"the host would gather {first_of(by_host)}: the log says why")
            train(_NUM_WARM_UPS)
            streamed_s = train(_NUM_STEPS)
            streamer.close(flush=False)
            return streamed_s

    plain_s: dict[str, list[float]] = {precision: [] for precision in _PRECISIONS}
    streamed_s: dict[str, list[float]] = {precision: [] for precision in _PRECISIONS}
    precision_before = torch.get_float32_matmul_precision()
    try:
        for _ in range(num_rounds):
            for precision in _PRECISIONS:
                torch.set_float32_matmul_precision(precision)
                train(_NUM_WARM_UPS)
                plain_s[precision].append(train(_NUM_STEPS))
                streamed_s[precision].append(train_streamed())
    finally:
        torch.set_float32_matmul_precision(precision_before)
    ratios = [median(streamed_s[precision]) / median(plain_s[precision]) for precision in _PRECISIONS]
    return max(ratios), *ratios, *(median(plain_s[precision]) / _NUM_STEPS * 1e3 for precision in _PRECISIONS)
