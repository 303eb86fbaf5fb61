"""`headrace bench overhead`: what streaming costs a trainer, in step time and memory, with the server up and stopped.

The model has the sizes of DLRM's Criteo configuration: 26 tables in one of FBGEMM's table-batched modules with fused
rowwise Adagrad, a bottom MLP of 512-256-dim and a top one of 512-256-1 with SGD.

Blocks of training steps with streaming off and on take turns in one process, on one processor, with the server on
another. In a third kind of block the server's processes are stopped, as if the network had gone; training must not
notice. Memory is measured in a second trainer, whose C library returns large blocks as soon as they are freed: what
steps leave in its heap otherwise varies by tens of MiB. That costs page faults, so its time does not count. The first
trainer's C library keeps all: page faults vary by block, and a tenth of a step's time with them.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child, Worker, on_processor
from headrace.scripts.benches.dlrm import NUM_DENSE, Dlrm, FusedTables
from headrace.scripts.benches.harness import OnStage, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.workload import zipf_ranks
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS
from headrace.streamer.taps.fbgemm import FbgemmTap
from headrace.streamer.taps.hooks import StepBoundary

__all__ = ["ModelConfig", "make_figures", "measure", "overhead"]

# For glibc; others ignore it. The value is its default, but without the variable it grows with use.
_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
# Its largest value, and more than a step of the trainer frees.
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}

# Of the streamer's memory, what is neither bitmaps nor staging buffers: `StreamerConfig` documents it.
_STREAMER_BYTES = 8 << 20
_NUM_BATCHES = 64  # made before, and used in turn
_WARM_STEPS, _MAX_WARM_STEPS = 4, 100  # before a block: a streamer's first flush, and caches after a switch
_PAGE_BYTES = resource.getpagesize()
# The hooks, which are the part of Headrace that runs on the training thread. They are looked up by name, so that a
# renamed one is an error instead of a smaller share.
_TIMED: tuple[tuple[type, str], ...] = (
    *((FbgemmTap, name) for name in ("_after_forward", "_before_forward", "_mark", "sweep")),
    *((StepBoundary, name) for name in ("_before_step", "_after_step")),
)

_Block = dict[str, Any]  # what `_train` answers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the model."""

    num_tables: int = 26
    num_rows: int = 100_000  # of each table
    dim: int = 64
    batch_size: int = 2048  # samples a step; each looks up one row of every table


_DLRM = ModelConfig()


def measure(
    on_stage: OnStage,
    *,
    # Four blocks each: off, on, off, on with the server stopped; then two for memory: on, on with the server stopped.
    num_rounds: RoundsOption = 4,
    num_steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps of a block.")] = 60,
    model: ModelConfig = _DLRM,
) -> dict[str, Any]:
    """Measure what streaming costs a trainer: step time and memory, with the server up and stopped.

    The trainer, a DLRM of 26 tables in FBGEMM's table-batched module with fused rowwise Adagrad, has one processor and
    the server another. The streamer has its defaults, and what HEADRACE_STREAMER_MAX_COST_PERCENT and such say. The
    exit code is 1 if a figure misses its bound.
    """
    settings = asdict(StreamerConfig.load())
    timed: dict[str, list[_Block]] = {"off": [], "on": [], "outage": []}
    memory: dict[str, list[_Block]] = {"off": [], "on": [], "outage": []}
    with bench_folder() as folder:
        usable = sorted(os.sched_getaffinity(0))
        with on_processor(usable[-1]):
            server = ServerProcess.start(folder / "data", shards=1)

        def trainer_with(environ: dict[str, str]) -> Child:
            with on_processor(usable[0]):
                return Child(f"{__name__}:_train", "the bench's trainer", environ=environ, **asdict(model))

        def train(trainer: Child, kind: str) -> _Block:
            trainer.ask(address=None if kind == "off" else server.address)
            with _stopped([server.pid, *server.shard_pids] if kind == "outage" else []):
                return trainer.ask(num_steps=num_steps)

        with server:
            with trainer_with(_KEEPS_MEMORY) as trainer:
                for number in range(num_rounds):
                    for kind in ("off", "on", "off", "outage"):
                        on_stage(f"round {number + 1}: streaming {kind}")
                        timed[kind].append(train(trainer, kind))
            with trainer_with(_RETURNS_MEMORY) as trainer:
                # Before the first streamer, so that nothing a streamer leaves behind counts as the trainer's own.
                on_stage("memory: streaming off")
                memory["off"].append(train(trainer, "off"))
                for number in range(num_rounds):
                    for kind in ("on", "outage"):
                        on_stage(f"memory, round {number + 1}: streaming {kind}")
                        memory[kind].append(train(trainer, kind))
    bitmap_bytes = model.num_tables * model.num_rows // 8
    bound_bytes = bitmap_bytes + NUM_STAGING_BUFFERS * settings["staging_bytes"] + _STREAMER_BYTES
    shown = {name: settings[name] for name in ("freshness_s", "max_cost_percent", "staging_bytes")}
    return make_figures(timed, memory, bound_bytes) | {"settings": shown}


def make_figures(timed: dict[str, list[_Block]], memory: dict[str, list[_Block]], bound_bytes: int) -> dict[str, Any]:
    """Return the figures of blocks by kind: `off`, `on`, `outage`; `memory` has those of the second trainer.

    There are as many blocks of a kind in each round.

    `bound_bytes` is the most memory that streaming may add: a bit a row, the staging buffers, and the streamer.
    """
    # Means, as not every step has a flush; and medians of them, as a round may be disturbed.
    step_s = {kind: [float(np.mean(block["step_s"])) for block in blocks] for kind, blocks in timed.items()}
    off_s = [float(np.mean(of_round)) for of_round in np.array_split(step_s["off"], len(step_s["on"]))]
    peak = {kind: max(block["memory_bytes"] for block in blocks) for kind, blocks in memory.items()}

    def step_time_ratio(kind: str) -> float:
        return median([with_it / without for with_it, without in zip(step_s[kind], off_s, strict=True)])

    on = timed["on"]
    return {
        "step_time_ratio": step_time_ratio("on"),
        "outage_step_time_ratio": step_time_ratio("outage"),
        "training_thread_share": sum(block["ours_s"] for block in on) / sum(sum(block["step_s"]) for block in on),
        "extra_bytes": peak["on"] - peak["off"],
        "outage_extra_bytes": peak["outage"] - peak["off"],
        "extra_bytes_bound": bound_bytes,
        "step_off_ms": median(step_s["off"]) * 1000,
        "step_on_ms": median(step_s["on"]) * 1000,
        "outage_step_ms": median(step_s["outage"]) * 1000,
        "outage_num_dirty_rows": max(block["num_dirty_rows"] for block in timed["outage"]),
        "block_step_ms": {kind: [s * 1000 for s in of_blocks] for kind, of_blocks in step_s.items()},
        "block_memory_bytes": {kind: [block["memory_bytes"] for block in memory[kind]] for kind in memory},
    }


overhead = bench_command("overhead", measure)


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

    A block takes two orders. The first one warms up, with a streamer if there is an `address`. The second one
    measures `num_steps`. Its answer has `step_s`, the clock's time of each step; `ours_s`, the part of it that the
    training thread spent in Headrace; `memory_bytes`, the largest resident memory after a step; and `num_dirty_rows`,
    not sent yet after the last step.
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
                streamer = RawEmbeddingStreamer(order["address"], run="bench")
                stack.callback(streamer.close, flush=False)
                streamer.attach(trainer.model, trainer.optimizer, publish="updated")
            trainer.train(_WARM_STEPS)
            if streamer is not None:
                # The first flushes touch new memory, and until the first step is complete they come whatever they cost.
                for _ in range(_MAX_WARM_STEPS):
                    stats = streamer.stats()
                    if stats.num_flushes >= 2 * NUM_STAGING_BUFFERS and stats.acked_step >= 0:
                        break
                    trainer.train(1)
            order = yield {}
            step_s, ours_before_s, memory_bytes = [], clock.total_s, 0
            for _ in range(order["num_steps"]):
                begin_s = time.perf_counter()
                trainer.train(1)
                step_s.append(time.perf_counter() - begin_s)
                memory_bytes = max(memory_bytes, _resident_bytes())
            measured = {"step_s": step_s, "ours_s": clock.total_s - ours_before_s, "memory_bytes": memory_bytes}
            answer = measured | {"num_dirty_rows": streamer.stats().num_dirty_rows if streamer else 0}


class _Trainer:
    def __init__(self, config: ModelConfig) -> None:
        torch.manual_seed(0)
        sizes = {"bottom": (512, 256), "top": (512, 256)}
        tables = FusedTables(**asdict(config), device=torch.device("cpu"))
        self.model = Dlrm(tables, config.num_tables, config.dim, **sizes)
        self.optimizer = torch.optim.SGD([*self.model.bottom.parameters(), *self.model.top.parameters()], lr=0.01)
        self._batches = itertools.cycle(list(_make_batches(config)))

    def train(self, num_steps: int) -> None:
        for dense, ids, labels in itertools.islice(self._batches, num_steps):
            self.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), labels)
            torch.autograd.backward(loss)  # the fused optimizer updates the rows here
            self.optimizer.step()


class _Clock:
    """Counts the time that the training thread spends in our hooks."""

    def __init__(self) -> None:
        """Time the hooks that are registered from now on, to the end of the process."""
        self.total_s = 0.0
        self._depth = 0
        for owner, name in _TIMED:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # hooks call each other
                    self.total_s += time.perf_counter() - begin_s

        return timed


def _make_batches(config: ModelConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (dense features, row ids, labels)."""
    rng = np.random.default_rng(0)
    # Hot rows lie anywhere in a table, at other places in each.
    places = [rng.permutation(config.num_rows) for _ in range(config.num_tables)]
    for _ in range(_NUM_BATCHES):
        ranks = zipf_ranks(rng, config.num_rows, (config.num_tables, config.batch_size))
        ids = np.concatenate([place[of_table] for place, of_table in zip(places, ranks, strict=True)])
        dense = rng.standard_normal((config.batch_size, NUM_DENSE), np.float32)
        labels = rng.integers(0, 2, config.batch_size).astype(np.float32)
        yield torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
