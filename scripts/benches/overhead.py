"""`headrace bench overhead`: what streaming costs a trainer, in step time and memory, with the server up and stopped.

The model is like DLRM, with the sizes of the reference implementation's Criteo configuration: 26 tables in one of
FBGEMM's table-batched modules with fused rowwise Adagrad, pairwise dot products, a bottom MLP of 512-256-dim and a top
one of 512-256-1 with SGD.

Blocks of training steps with streaming off and on take turns in one process, on one processor, with the server on
another. In a third kind of block the server's processes are stopped, as if the network had gone; training must not
notice.

Memory is measured in a second trainer, whose C library returns large blocks as soon as they are freed. By default it
keeps some of them in its heap, and what steps of the trainer alone leave there varies by tens of MiB. Returning memory
costs page faults, so the second trainer's time does not count. The first trainer's C library keeps all: by default the
page faults of a step vary from block to block, with streaming and without, and a tenth of the step's time with them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child, Worker, on_processor
from headrace.scripts.benches.harness import FolderOption, OnStage, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.workload import zipf_ranks
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS
from headrace.streamer.taps.fbgemm import FbgemmTap
from headrace.streamer.taps.hooks import StepBoundary

__all__ = ["ModelConfig", "OverheadConfig", "PaceConfig", "make_figures", "measure", "measure_pace", "overhead"]

# For glibc; others ignore it. The value is its default, but without the variable it grows with use.
_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
# Its largest value, and more than a step of the trainer frees.
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}

# Of the streamer's memory, what is neither bitmaps nor staging buffers: `StreamerConfig` documents it.
_STREAMER_BYTES = 8 << 20
_NUM_DENSE = 13
_MAX_WARM_STEPS = 100
_PAGE_BYTES = resource.getpagesize()
# The hooks, which are the part of Headrace that runs on the training thread. They are looked up by name, so that a
# renamed one is an error instead of a smaller share.
_TIMED: tuple[tuple[type, str], ...] = (
    (FbgemmTap, "_after_forward"),
    (FbgemmTap, "_before_forward"),
    (FbgemmTap, "_mark"),
    (FbgemmTap, "sweep"),
    (StepBoundary, "_before_step"),
    (StepBoundary, "_after_step"),
)

_DEFAULTS = StreamerConfig.load(environ={})

_Block = dict[str, Any]  # what `_train` answers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the model."""

    num_tables: int = 26
    num_rows: int = 100_000  # of each table
    dim: int = 64
    batch_size: int = 2048  # samples a step; each looks up one row of every table
    num_batches: int = 64  # made before, and used in turn
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadConfig:
    """How much `headrace bench overhead` measures."""

    model: ModelConfig = field(default_factory=ModelConfig)
    # Four blocks each: off, on, off, on with the server stopped; then two for memory: on, on with the server stopped.
    num_rounds: RoundsOption = 4
    num_steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps of a block.")] = 60
    num_warm_steps: int = 4  # before them: a streamer's first flush, and caches after a switch
    freshness_s: Annotated[float, typer.Option(min=0, help="The streamer's setting.")] = _DEFAULTS.freshness_s
    max_cost_percent: Annotated[int, typer.Option(min=1, max=100, help="The streamer's setting.")] = (
        _DEFAULTS.max_cost_percent
    )
    settings: dict[str, Any] = field(default_factory=dict)  # others of the streamer
    folder: FolderOption = None


def measure(config: OverheadConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure what streaming costs a trainer: step time and memory, with the server up and stopped.

    The trainer, a DLRM of 26 tables in FBGEMM's table-batched module with fused rowwise Adagrad, has one processor and
    the server another. The exit code is 1 if a figure misses its bound.
    """
    measured = {name: value for name, value in asdict(config).items() if name != "folder"}
    settings = {name: measured.pop(name) for name in ("freshness_s", "max_cost_percent")} | config.settings
    staging_bytes = StreamerConfig.load(**settings).staging_bytes
    timed: dict[str, list[_Block]] = {"off": [], "on": [], "outage": []}
    memory: dict[str, list[_Block]] = {"off": [], "on": [], "outage": []}
    with _trainer_and_server(config.model, config.folder) as (start_trainer, server):

        def train(trainer: Child, kind: str) -> _Block:
            address = None if kind == "off" else server.address
            stopped = [server.pid, *server.shard_pids] if kind == "outage" else []
            return _run_block(trainer, config, address, settings, stopped=stopped)

        with start_trainer(_KEEPS_MEMORY) as trainer:
            for number in range(config.num_rounds):
                for kind in ("off", "on", "off", "outage"):
                    on_stage(f"round {number + 1}: streaming {kind}")
                    timed[kind].append(train(trainer, kind))
        with start_trainer(_RETURNS_MEMORY) as trainer:
            # Before the first streamer, so that nothing a streamer leaves behind counts as the trainer's own.
            on_stage("memory: streaming off")
            memory["off"].append(train(trainer, "off"))
            for number in range(config.num_rounds):
                for kind in ("on", "outage"):
                    on_stage(f"memory, round {number + 1}: streaming {kind}")
                    memory[kind].append(train(trainer, kind))
    bitmap_bytes = config.model.num_tables * config.model.num_rows // 8
    bound_bytes = bitmap_bytes + NUM_STAGING_BUFFERS * staging_bytes + _STREAMER_BYTES
    return make_figures(timed, memory, bound_bytes) | {"config": measured | {"settings": settings}}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceConfig:
    """How much the sweep of the two settings measures."""

    model: ModelConfig = field(default_factory=ModelConfig)
    max_cost_percents: tuple[int, ...] = (1, 3, 10, 30, 100)
    freshness_s: tuple[float, ...] = (0.0, 1.0)  # each with every percentage
    num_steps: int = 60  # of a block
    num_warm_steps: int = 4
    num_rounds: int = 2
    folder: Path | None = None


def measure_pace(config: PaceConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure lag and step time for each pair of the two settings, on the processors of `measure`.

    Returns:
        `x`, the percentages; `targets`, one for each target, with `freshness_s` and, for each x, the values of all
        rounds: `lag_p50_s`, from an update until it is durable, and `step_ratio`, mean time of a step with streaming /
        without, which comes before and after.
    """
    x = list(config.max_cost_percents)
    targets: list[dict[str, Any]] = [
        {"freshness_s": s, "lag_p50_s": [[] for _ in x], "step_ratio": [[] for _ in x]} for s in config.freshness_s
    ]
    with (
        _trainer_and_server(config.model, config.folder) as (start_trainer, server),
        start_trainer(_KEEPS_MEMORY) as trainer,
    ):
        off = _run_block(trainer, config, None, {})
        for number, target, (at, percent) in itertools.product(range(config.num_rounds), targets, enumerate(x)):
            on_stage(f"round {number + 1}: {target['freshness_s']:g} s at {percent} %")
            settings = {"freshness_s": target["freshness_s"], "max_cost_percent": percent}
            on = _run_block(trainer, config, server.address, settings)
            before, off = off, _run_block(trainer, config, None, {})
            target["lag_p50_s"][at].append(on["lag_p50_s"])
            ratio = 2 * sum(on["step_s"]) / (sum(before["step_s"]) + sum(off["step_s"]))
            target["step_ratio"][at].append(ratio)
    return {"x": x, "targets": targets}


def make_figures(timed: dict[str, list[_Block]], memory: dict[str, list[_Block]], bound_bytes: int) -> dict[str, Any]:
    """Return the figures of blocks by kind: `off`, `on`, `outage`; `memory` has those of the second trainer.

    There are as many blocks of a kind in each round.

    `bound_bytes` is the most memory that streaming may add: a bit a row, the staging buffers, and the streamer.
    """
    # Means, as not every step has a flush; and medians of them, as a round may be disturbed.
    step_s = {kind: [float(np.mean(block["step_s"])) for block in blocks] for kind, blocks in timed.items()}
    num_rounds = len(step_s["on"])
    off_s = [float(np.mean(of_round)) for of_round in np.array_split(step_s["off"], num_rounds)]
    peak = {kind: max(block["memory_bytes"] for block in blocks) for kind, blocks in memory.items()}

    def step_time_ratio(kind: str) -> float:
        return median([with_it / without for with_it, without in zip(step_s[kind], off_s, strict=True)])

    def total(kind: str, key: str) -> float:
        return sum(float(np.sum(block[key])) for block in timed[kind])

    def cpu_of_step_s(kind: str) -> float:
        return total(kind, "cpu_s") / sum(len(block["step_s"]) for block in timed[kind])

    return {
        "step_time_ratio": step_time_ratio("on"),
        "training_thread_share": total("on", "ours_s") / total("on", "step_s"),
        "extra_bytes": peak["on"] - peak["off"],
        "extra_bytes_bound": bound_bytes,
        "outage_step_time_ratio": step_time_ratio("outage"),
        "outage_training_thread_share": total("outage", "ours_s") / total("outage", "step_s"),
        "outage_extra_bytes": peak["outage"] - peak["off"],
        "outage_growth_bytes": peak["outage"] - peak["on"],
        "training_thread_cpu_share": total("on", "ours_cpu_s") / total("on", "thread_cpu_s"),
        "other_threads_cpu_share": 1 - total("on", "thread_cpu_s") / total("on", "cpu_s"),
        "cpu_time_ratio": cpu_of_step_s("on") / cpu_of_step_s("off"),
        "outage_cpu_time_ratio": cpu_of_step_s("outage") / cpu_of_step_s("off"),
        "step_off_ms": median(step_s["off"]) * 1000,
        "step_on_ms": median(step_s["on"]) * 1000,
        "outage_step_ms": median(step_s["outage"]) * 1000,
        "num_rows_sent": sum(block["num_rows_sent"] for block in timed["on"]),
        "outage_num_dirty_rows": max(block["num_dirty_rows"] for block in timed["outage"]),
        "block_step_ms": {kind: [s * 1000 for s in of_blocks] for kind, of_blocks in step_s.items()},
        "block_memory_bytes": {kind: [block["memory_bytes"] for block in memory[kind]] for kind in memory}
        | {f"default_heap_{kind}": [block["memory_bytes"] for block in timed[kind]] for kind in timed},
    }


overhead = bench_command("overhead", OverheadConfig, measure, has_bounds=True)


@contextmanager
def _trainer_and_server(
    model: ModelConfig, place: Path | None
) -> Iterator[tuple[Callable[[dict[str, str]], Child], ServerProcess]]:
    """Start a server on the last processor; yield what starts a trainer on the first one, with variables, and it."""
    usable = sorted(os.sched_getaffinity(0))

    def start_trainer(environ: dict[str, str]) -> Child:
        with on_processor(usable[0]):
            return Child(f"{__name__}:_train", "the bench's trainer", environ=environ, **asdict(model))

    with bench_folder(place) as folder:
        with on_processor(usable[-1]):
            server = ServerProcess.start(folder / "data", shards=1)
        with server:
            yield start_trainer, server


def _run_block(
    trainer: Child,
    config: OverheadConfig | PaceConfig,
    address: str | None,
    settings: dict[str, Any],
    *,
    stopped: Sequence[int] = (),
) -> _Block:
    """Run a block of `_train`, streaming if there is an address, while some processes are stopped."""
    trainer.ask(address=address, num_warm_steps=config.num_warm_steps, settings=settings)
    with _stopped(stopped):
        block: _Block = trainer.ask(num_steps=config.num_steps)
    return block | trainer.ask()


@contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    """Keep processes from running. They run again also after an error: stopped ones could not end."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _train(**model: Any) -> Worker:
    """Train block after block; the first order is a `ModelConfig`.

    A block takes three orders. The first one warms up: `num_warm_steps`, with a streamer with `settings` if there is an
    `address`. The second one measures `num_steps`. Its answer has `step_s` and `ours_s`, the clock's time of each step
    and the part of it that the training thread spent in Headrace; over all steps, `ours_cpu_s`, its processor time, and
    `thread_cpu_s` and `cpu_s`, that of the training thread and of all threads; `memory_bytes`, the largest resident
    memory after a step; `num_dirty_rows`, not sent yet after the last step; and `lag_p50_s`. The third one flushes, and
    its answer has `num_rows_sent`, acked by then.
    """
    # Each block is a run of its own on the store that the first one filled, and the streamer would warn every time.
    logging.getLogger(RawEmbeddingStreamer.__module__).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    trainer, clock = _Trainer(ModelConfig(**model)), _Clock()
    answer: dict[str, Any] = {}
    streamer: RawEmbeddingStreamer | None = None
    while True:
        order = yield answer
        streamer = None  # the last block's, which may hold what it could not send
        gc.collect()
        with ExitStack() as stack:
            if order["address"] is not None:
                streamer = RawEmbeddingStreamer(order["address"], run="bench", **order["settings"])
                stack.callback(streamer.close, flush=False)
                streamer.attach(trainer.model, trainer.optimizer, publish="updated")
            trainer.train(order["num_warm_steps"])
            if streamer is not None:
                # The first flushes touch new memory, and until the first step is complete they come whatever they cost.
                for _ in range(_MAX_WARM_STEPS):
                    stats = streamer.stats()
                    if stats.num_flushes >= 2 * NUM_STAGING_BUFFERS and stats.acked_step >= 0:
                        break
                    trainer.train(1)
            order = yield {}
            measured = _measure_steps(trainer, clock, order["num_steps"])
            if streamer is not None:
                stats = streamer.stats()
                measured |= {"num_dirty_rows": stats.num_dirty_rows, "lag_p50_s": stats.lag_p50_s}
            yield measured
            if streamer is not None:
                streamer.flush()
            answer = {"num_rows_sent": streamer.stats().num_rows_sent if streamer else 0}


def _measure_steps(trainer: _Trainer, clock: _Clock, num_steps: int) -> dict[str, Any]:
    step_s, ours_s, memory_bytes = [], [], 0
    begin_cpu_s, begin_thread_s, begin_ours_s = time.process_time(), time.thread_time(), clock.cpu_s
    for _ in range(num_steps):
        begin_s, ours_before_s = time.perf_counter(), clock.total_s
        trainer.train(1)
        step_s.append(time.perf_counter() - begin_s)
        ours_s.append(clock.total_s - ours_before_s)
        memory_bytes = max(memory_bytes, _resident_bytes())
    return {
        "step_s": step_s,
        "ours_s": ours_s,
        "ours_cpu_s": clock.cpu_s - begin_ours_s,
        "thread_cpu_s": time.thread_time() - begin_thread_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "memory_bytes": memory_bytes,
    }


class _Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        table = (config.num_rows, config.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * config.num_tables, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.05
        )
        self.tables.init_embedding_weights_uniform(-0.05, 0.05)
        num_vectors = config.num_tables + 1
        self.bottom = _mlp(_NUM_DENSE, 512, 256, config.dim)
        self.top = _mlp(config.dim + num_vectors * (num_vectors - 1) // 2, 512, 256, 1)
        self.pairs = torch.tril_indices(num_vectors, num_vectors, -1)
        self.offsets = torch.arange(config.num_tables * config.batch_size + 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits float32[b] of `dense` float32[b, 13] and `ids` int64[tables × b], table after table."""
        rows = self.tables(ids, self.offsets).view(-1, self.config.num_tables, self.config.dim)
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return logits


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Trainer:
    def __init__(self, config: ModelConfig) -> None:
        torch.manual_seed(config.seed)
        self.model = _Model(config)
        self.optimizer = torch.optim.SGD([*self.model.bottom.parameters(), *self.model.top.parameters()], lr=0.01)
        self._batches = itertools.cycle(list(_make_batches(config)))

    def train(self, num_steps: int) -> None:
        for dense, ids, labels in itertools.islice(self._batches, num_steps):
            self.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), labels)
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            self.optimizer.step()


class _Clock:
    """Counts the time that the training thread spends in our hooks: `total_s`, and `cpu_s` of the processor."""

    def __init__(self) -> None:
        """Time the hooks that are registered from now on, to the end of the process."""
        self.total_s = self.cpu_s = 0.0
        self._depth = 0
        for owner, name in _TIMED:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # hooks call each other
                    self.total_s += time.perf_counter() - begin_s
                    self.cpu_s += time.thread_time() - begin_cpu_s

        return timed


def _make_batches(config: ModelConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (dense features, row ids, labels)."""
    rng = np.random.default_rng(config.seed)
    # Hot rows lie anywhere in a table, at other places in each.
    places = [rng.permutation(config.num_rows) for _ in range(config.num_tables)]
    for _ in range(config.num_batches):
        ranks = zipf_ranks(rng, config.num_rows, (config.num_tables, config.batch_size))
        ids = np.concatenate([place[of_table] for place, of_table in zip(places, ranks, strict=True)])
        dense = rng.standard_normal((config.batch_size, _NUM_DENSE), np.float32)
        labels = rng.integers(0, 2, config.batch_size).astype(np.float32)
        yield torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
