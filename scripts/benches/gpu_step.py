"""What streaming from a GPU costs a training step: the last part of `headrace bench kernels`.

The model is a DLRM of 64 tables: bottom and top MLP and pairwise dot products, with the widths of MLPerf's. The tables
are plain ones with sparse gradients, or one table-batched module of FBGEMM, as in TorchRec. It is trained on one GPU in
turns with and without a streamer, which sends to a server of one shard on the same machine. Every table is looked up
once a sample, at any row, so a step changes more rows than a staging buffer holds and each free buffer is filled.

A turn's time is the clock's over many steps, with the GPU idle before and after: what a step waits for counts, and what
the GPU does besides. With plain tables the dense layers multiply as float32 (torch's precision "highest"), which may
hide the host's time, and as TF32 ("high"), where steps are short; with fused tables as TF32.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.dlrm import NUM_DENSE, Dlrm, FusedTables
from headrace.scripts.benches.harness import Rounds, bench_folder
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.device.dirty_rows import DeviceDirtyRows

__all__ = ["FUSED_FIGURES", "STEP_FIGURES", "measure_fused_step", "measure_step"]

_NUM_TABLES, _NUM_ROWS, _DIM, _BATCH = 64, 400_000, 128, 16_384
_BOTTOM, _TOP = (512, 256), (1024, 1024, 512, 256)
_NUM_BATCHES = 8
# Short turns, because the server writes to disk what it gets: some hundreds of megabytes in each.
_NUM_STEPS, _NUM_WARM_UPS = 40, 10
_PRECISIONS = ("highest", "high")

STEP_FIGURES: Final = (
    *(f"step_time_ratio_gpu_{precision}" for precision in _PRECISIONS),
    *(f"step_ms_gpu_{precision}" for precision in _PRECISIONS),
    "step_time_ratio_gpu_by_host",
)
"""What `measure_step` returns, in its order."""

FUSED_FIGURES: Final = ("step_time_ratio_gpu_fused", "step_ms_gpu_fused")
"""What `measure_fused_step` returns, in its order."""


class _PlainTables(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum", sparse=True) for _ in range(_NUM_TABLES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `[batch, tables, dim]` of ids, `[tables, batch, 1]`."""
        return torch.stack([table(of_table) for table, of_table in zip(self, ids, strict=True)], 1)


class _Trainer:
    def __init__(self, device: torch.device, *, is_fused: bool = False) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            sizes = (_NUM_TABLES, _NUM_ROWS, _DIM, _BATCH)
            tables = FusedTables(*sizes, device) if is_fused else _PlainTables()
            self.model = Dlrm(tables, _NUM_TABLES, _DIM, bottom=_BOTTOM, top=_TOP)
            self._features = torch.randn(_NUM_BATCHES, _BATCH, NUM_DENSE)
            self._labels = torch.randint(0, 2, (_NUM_BATCHES, _BATCH)).float()
            self._ids = torch.randint(0, _NUM_ROWS, (_NUM_BATCHES, _NUM_TABLES, _BATCH, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.trains_tables = not is_fused
        self._device = device

    def train(self, num_steps: int) -> float:
        """Return the seconds of steps."""
        torch.cuda.synchronize(self._device)
        begin_s = time.perf_counter()
        for number in range(num_steps):
            batch = number % _NUM_BATCHES
            self.optimizer.zero_grad()
            output = self.model(self._features[batch], self._ids[batch])
            loss = functional.binary_cross_entropy_with_logits(output, self._labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s


@contextlib.contextmanager
def _streaming(trainer: _Trainer, server: ServerProcess, *, by_host: bool = False) -> Iterator[RawEmbeddingStreamer]:
    """Stream a trainer's tables, beyond the first flushes; at the end without the rows that are not sent yet.

    Raises:
        UnavailableError: The host would gather rows in the pipeline's place.
    """
    with RawEmbeddingStreamer(server.address, run="bench", device_pipeline=not by_host) as streamer:
        optimizer = trainer.optimizer if trainer.trains_tables else None
        streamer.attach(trainer.model, optimizer, publish="updated")
        of_host = [table.spec.fqn for table in streamer.tables if not isinstance(table.dirty, DeviceDirtyRows)]
        if of_host and not by_host:
            raise UnavailableError(f"the host would gather {first_of(of_host)}: the log says why")
        trainer.train(_NUM_WARM_UPS)
        yield streamer
        streamer.close(flush=False)


@contextlib.contextmanager
def _bench(device: torch.device, *, is_fused: bool = False) -> Iterator[tuple[_Trainer, ServerProcess]]:
    """Return a trainer and a server; torch's precision is as before at the end."""
    precision_before = torch.get_float32_matmul_precision()
    try:
        with bench_folder() as folder, ServerProcess.start(folder, shards=1) as server:
            yield _Trainer(device, is_fused=is_fused), server
    finally:
        torch.set_float32_matmul_precision(precision_before)


def _turns(
    trainer: _Trainer,
    server: ServerProcess,
    num_rounds: int,
    *,
    precision: str = _PRECISIONS[-1],
    by_host: bool = False,
) -> tuple[float, float]:
    """Return the median time of a step with streaming over that without, and the latter, milliseconds.

    Raises:
        UnavailableError: Nothing was streamed.
    """
    torch.set_float32_matmul_precision(precision)
    seconds, num_rows = Rounds(), 0
    for _ in range(num_rounds):
        trainer.train(_NUM_WARM_UPS)
        seconds.add("plain", trainer.train(_NUM_STEPS))
        with _streaming(trainer, server, by_host=by_host) as streamer:
            seconds.add("streamed", trainer.train(_NUM_STEPS))
        num_rows += streamer.stats().num_rows_sent
    if not num_rows:
        raise UnavailableError("no row was acked")
    medians = seconds.medians(1e3 / _NUM_STEPS)
    return medians["streamed"] / medians["plain"], medians["plain"]


def measure_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `STEP_FIGURES`; needs some 20 GB of device memory, and a few of temporary files.

    These are the time of a step with the device pipeline over that without streaming, of each precision; the latter,
    milliseconds; and the ratio of one round in which the host gathers.
    """
    with _bench(device) as (trainer, server):
        turns = [_turns(trainer, server, num_rounds, precision=precision) for precision in _PRECISIONS]
        by_host, _ = _turns(trainer, server, 1, by_host=True)
    ratios, plain_ms = zip(*turns, strict=True)
    return *ratios, *plain_ms, by_host


def measure_fused_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `FUSED_FIGURES`: as those of `measure_step`, with FBGEMM's tables and as TF32.

    Raises:
        ModuleNotFoundError: fbgemm_gpu is not installed.
    """
    with _bench(device, is_fused=True) as (trainer, server):
        return _turns(trainer, server, num_rounds)
