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
import functools
import importlib
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.harness import Rounds
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.taps.hooks import StepBoundary, StepHooks

__all__ = [
    "FUSED_FIGURES",
    "PROFILE_FIGURES",
    "STEP_FIGURES",
    "measure_fused_step",
    "measure_step",
    "profile_step",
    "step_figures_of",
]

_NUM_TABLES, _NUM_ROWS, _DIM, _BATCH = 64, 400_000, 128, 16_384
_NUM_DENSE, _BOTTOM, _TOP = 13, (512, 256), (1024, 1024, 512, 256)
_FUSED_PLACE = "DEVICE", "CUDA"
_NUM_BATCHES = 8
# Short turns, because the server writes to disk what it gets: some hundreds of megabytes in each.
_NUM_STEPS, _NUM_WARM_UPS = 40, 10
_NUM_PROFILED = 40  # a buffer is free, and a drain queued, about every tenth
_PRECISIONS = ("highest", "high")
_PIPELINE: Final = {"device_pipeline": True}
_BY_HOST: Final = {"device_pipeline": False}

STEP_FIGURES: Final = (
    "step_time_ratio_gpu",
    *(f"step_time_ratio_gpu_{precision}" for precision in _PRECISIONS),
    *(f"step_ms_gpu_{precision}" for precision in _PRECISIONS),
    "step_time_ratio_gpu_by_host",
    "step_bytes_sent",
)
"""What `measure_step` returns, in its order."""

FUSED_FIGURES: Final = ("step_time_ratio_gpu_fused", "step_ms_gpu_fused", "step_bytes_sent_fused")
"""What `measure_fused_step` returns, in its order."""

PROFILE_FIGURES: Final = ("num_syncs_per_step", "num_device_syncs_per_step", "step_host_ms", "step_kernel_ms")
"""What `profile_step` returns, in its order."""

# The hooks through which a step runs the streamer, on the training thread.
_HOOKS: tuple[tuple[type, str], ...] = (
    (StepHooks, "_before_step"),
    (StepHooks, "_after_step"),
    (StepBoundary, "_before_step"),
    (StepBoundary, "_after_step"),
)
_OURS, _STEP = "headrace", "headrace bench step"
# Freeing memory, and pinning it, may wait for the whole device.
_WAITS = re.compile(
    r"cu(da)?(\w*Synchronize|Memcpy(?!\w*Async)\w*|(Mem)?Host(Alloc|(Un)?[Rr]egister)\w*|(Mem)?Free(?!\w*Async)\w*)"
)
_DEVICE_WAITS = re.compile(r"cudaDeviceSynchronize|cuCtxSynchronize(_v\d+)?")
_KERNELS = re.compile(r"(mark_dirty|count_dirty|plan_drain|take_rows|route_rows|pack_rows)\w*_kernel")
_DRAIN = "plan_drain_kernel"


class _PlainTables(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum", sparse=True) for _ in range(_NUM_TABLES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `[batch, tables, dim]` of ids, `[tables, batch, 1]`."""
        return torch.stack([table(of_table) for table, of_table in zip(self, ids, strict=True)], 1)


class _FusedTables(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tbe = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        optimizer = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
        location, computes = _FUSED_PLACE
        spec = (_NUM_ROWS, _DIM, common.EmbeddingLocation[location], tbe.ComputeDevice[computes])
        self.tables = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * _NUM_TABLES, optimizer=optimizer, learning_rate=1e-3, device=device
        )
        self.tables.init_embedding_weights_uniform(-0.1, 0.1)
        self._offsets = torch.arange(_NUM_TABLES * _BATCH + 1, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tables(ids.flatten(), self._offsets)
        return output.view(_BATCH, _NUM_TABLES, _DIM)


class _Dlrm(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = _perceptron(_NUM_DENSE, *_BOTTOM, _DIM)
        num_vectors = _NUM_TABLES + 1
        self.top = _perceptron(_DIM + num_vectors * (num_vectors - 1) // 2, *_TOP, 1)
        first, second = torch.tril_indices(num_vectors, num_vectors, -1)
        self.pairs = first * num_vectors + second

    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(features)
        vectors = torch.cat([dense.unsqueeze(1), self.tables(ids)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        output: torch.Tensor = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return output


def _perceptron(*widths: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class _Trainer:
    def __init__(self, device: torch.device, *, is_fused: bool = False) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = _Dlrm(_FusedTables(device) if is_fused else _PlainTables())
            self._features = torch.randn(_NUM_BATCHES, _BATCH, _NUM_DENSE)
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
            self.step(number)
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s

    def step(self, number: int) -> None:
        batch = number % _NUM_BATCHES
        self.optimizer.zero_grad()
        output = self.model(self._features[batch], self._ids[batch])
        loss = functional.binary_cross_entropy_with_logits(output, self._labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


@contextlib.contextmanager
def _streaming(trainer: _Trainer, server: ServerProcess, settings: dict[str, Any]) -> Iterator[RawEmbeddingStreamer]:
    """Stream a trainer's tables, beyond the first flushes; at the end without the rows that are not sent yet.

    Raises:
        UnavailableError: The host would gather rows in the pipeline's place.
    """
    with RawEmbeddingStreamer(server.address, run="bench", **settings) as streamer:
        optimizer = trainer.optimizer if trainer.trains_tables else None
        streamer.attach(trainer.model, optimizer, publish="updated")
        by_host = [table.spec.fqn for table in streamer.tables if not isinstance(table.dirty, DeviceDirtyRows)]
        if settings["device_pipeline"] and by_host:
            raise UnavailableError(f"the host would gather {first_of(by_host)}: the log says why")
        trainer.train(_NUM_WARM_UPS)
        yield streamer
        streamer.close(flush=False)


@contextlib.contextmanager
def _bench(device: torch.device, *, is_fused: bool = False) -> Iterator[tuple[_Trainer, ServerProcess]]:
    """Return a trainer and a server; torch's precision is as before at the end."""
    precision_before = torch.get_float32_matmul_precision()
    try:
        with tempfile.TemporaryDirectory() as folder, ServerProcess.start(Path(folder), shards=1) as server:
            yield _Trainer(device, is_fused=is_fused), server
    finally:
        torch.set_float32_matmul_precision(precision_before)


def measure_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `STEP_FIGURES`; needs some 20 GB of device memory, and a few of temporary files.

    These are the median time of a step with the device pipeline over the median without streaming, the greater one of
    both precisions and that of each; the median without, milliseconds, of each precision; the ratio of one turn in
    which the host gathers; and the bytes of all rows that were acked.
    """
    plain_s, streamed_s, num_rows = Rounds(), Rounds(), 0
    with _bench(device) as (trainer, server):

        def train_streamed(settings: dict[str, Any]) -> float:
            nonlocal num_rows
            with _streaming(trainer, server, settings) as streamer:
                streamed_s = trainer.train(_NUM_STEPS)
            num_rows += streamer.stats().num_rows_sent
            return streamed_s

        for _ in range(num_rounds):
            for precision in _PRECISIONS:
                torch.set_float32_matmul_precision(precision)
                trainer.train(_NUM_WARM_UPS)
                plain_s.add(precision, trainer.train(_NUM_STEPS))
                streamed_s.add(precision, train_streamed(_PIPELINE))
        by_host_s = train_streamed(_BY_HOST)
    return step_figures_of(plain_s, streamed_s, by_host_s, num_rows * (8 + 4 * _DIM))


def measure_fused_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `FUSED_FIGURES`: as those of `measure_step`, with FBGEMM's tables and as TF32.

    Raises:
        ModuleNotFoundError: fbgemm_gpu is not installed.
    """
    plain_s, streamed_s, num_rows = Rounds(), Rounds(), 0
    with _bench(device, is_fused=True) as (trainer, server):
        torch.set_float32_matmul_precision(_PRECISIONS[-1])
        for _ in range(num_rounds):
            trainer.train(_NUM_WARM_UPS)
            plain_s.add("fused", trainer.train(_NUM_STEPS))
            with _streaming(trainer, server, _PIPELINE) as streamer:
                streamed_s.add("fused", trainer.train(_NUM_STEPS))
            num_rows += streamer.stats().num_rows_sent
    plain, streamed = (rounds.medians(1e3 / _NUM_STEPS)["fused"] for rounds in (plain_s, streamed_s))
    return streamed / plain, plain, num_rows * (8 + 4 * _DIM + 4)  # the last 4 are rowwise Adagrad's


def step_figures_of(plain_s: Rounds, streamed_s: Rounds, by_host_s: float, num_bytes: int) -> tuple[float, ...]:
    """Return the figures of `STEP_FIGURES` from the seconds of turns, by precision."""
    plain, streamed = plain_s.medians(1e3 / _NUM_STEPS), streamed_s.medians(1e3 / _NUM_STEPS)
    ratios = [streamed[precision] / plain[precision] for precision in _PRECISIONS]
    # It was measured with the last precision.
    by_host = by_host_s * 1e3 / _NUM_STEPS / plain[_PRECISIONS[-1]]
    return max(ratios), *ratios, *(plain[precision] for precision in _PRECISIONS), by_host, num_bytes


def profile_step(device: torch.device) -> tuple[float, ...]:
    """Return the figures of `PROFILE_FIGURES`: what a step with the device pipeline does, from torch's profiler.

    These are the calls by which the streamer has the training thread wait for the GPU, or which may wait; all calls of
    any thread that wait for the whole device; and the milliseconds that the training thread spends in the streamer, and
    the GPU in its kernels on the training stream.

    Raises:
        UnavailableError: The profile has no calls of CUDA, or none of our kernels, or no drain.
    """
    clock = _Clock()
    with (
        contextlib.ExitStack() as patches,
        _bench(device) as (trainer, server),
        tempfile.TemporaryDirectory() as folder,
    ):
        for owner, name in _HOOKS:
            patches.enter_context(mock.patch.object(owner, name, clock.timed(getattr(owner, name))))
        torch.set_float32_matmul_precision(_PRECISIONS[-1])
        with _streaming(trainer, server, _PIPELINE):
            clock.total_s = 0.0
            trainer.train(_NUM_STEPS)
            host_ms = clock.total_s / _NUM_STEPS * 1e3
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                for number in range(_NUM_PROFILED):
                    with torch.profiler.record_function(_STEP):
                        trainer.step(number)
                torch.cuda.synchronize(device)
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text("utf-8"))["traceEvents"]
    num_syncs, num_device_syncs, kernel_ms = _count(events)
    return num_syncs / _NUM_PROFILED, num_device_syncs / _NUM_PROFILED, host_ms, kernel_ms / _NUM_PROFILED


class _Clock:
    """Counts the seconds in hooks, and names them in a profile."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            with torch.profiler.record_function(_OURS):
                result = hook(*args, **kwargs)
            self.total_s += time.perf_counter() - begin_s
            return result

        return timed


def _count(events: Sequence[dict[str, Any]]) -> tuple[int, int, float]:
    """Return (waits of our hooks, waits for the whole device, milliseconds of our kernels) within the steps."""
    ours = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == _OURS]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == _STEP]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    kernels = [event for event in events if event.get("cat") == "kernel" and _KERNELS.fullmatch(event["name"])]
    if not ours or not steps or not kernels or not calls:
        numbers = (
            f"{len(steps)} steps, {len(ours)} of our hooks, {len(calls)} calls of CUDA, {len(kernels)} of our kernels"
        )
        raise UnavailableError(f"the profile says nothing of waits: it has {numbers}")
    if all(kernel["name"] != _DRAIN for kernel in kernels):
        raise UnavailableError("the profile says nothing of waits: no step has drained rows")

    def within(call: dict[str, Any], spans: list[dict[str, Any]]) -> bool:
        return any(span["ts"] <= call["ts"] < span["ts"] + span["dur"] for span in spans)

    own = [call for call in calls if call["tid"] == ours[0]["tid"] and within(call, ours)]
    if not own:
        raise UnavailableError("the profile says nothing of waits: our hooks call nothing of CUDA")
    num_syncs = sum(_WAITS.fullmatch(call["name"]) is not None for call in own)
    of_device = [call for call in calls if _DEVICE_WAITS.fullmatch(call["name"])]
    return num_syncs, sum(within(call, steps) for call in of_device), sum(kernel["dur"] for kernel in kernels) / 1e3
