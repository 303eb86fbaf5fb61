"""The trainer that `headrace bench overhead` measures, in a process of its own.

A model like DLRM, of the sizes of the reference implementation's Criteo configuration: 26 tables in one of FBGEMM's
table-batched modules with fused rowwise Adagrad, pairwise dot products, a bottom MLP of 512-256-dim and a top one of
512-256-1 with SGD. `TrainerProcess` is the parent's end. The first order is a `ModelConfig`, each further one a
block of steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from headrace.scripts.benches.bench_child import BenchChild, give_answer, orders
from headrace.scripts.benches.bench_rows import zipf_ranks
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS
from headrace.streamer.taps.fbgemm_tap import FbgemmTap
from headrace.streamer.taps.step_boundary import StepBoundary

__all__ = ["Block", "BlockConfig", "ModelConfig", "TrainerProcess"]

_NUM_DENSE = 13
_MAX_WARM_STEPS = 100
_PAGE_BYTES = resource.getpagesize()
# What of ours runs on the training thread: the hooks, and what they call. Looked up by name, so that a renamed one is
# an error and not a smaller share.
_TIMED: tuple[tuple[type, str], ...] = (
    (FbgemmTap, "_after_forward"),
    (FbgemmTap, "_before_forward"),
    (FbgemmTap, "_mark"),
    (FbgemmTap, "sweep"),
    (StepBoundary, "_before_step"),
    (StepBoundary, "_after_step"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        num_tables: Embedding tables.
        num_rows: Rows of each.
        dim: Columns of each.
        batch_size: Samples a step; each looks up one row of every table.
        num_batches: Batches that are made before; steps go round them.
        seed: Of the random numbers.
    """

    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64
    batch_size: int = 2048
    num_batches: int = 64
    seed: int = 0

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return self.num_tables * self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    """One block of steps.

    Attributes:
        address: Of the server; None trains without streaming.
        num_warm_steps: Steps that are not measured; with streaming, as many more as fill each staging buffer twice.
        num_steps: Steps that are.
        stopped_pids: The server's processes, stopped during the measured steps.
        settings: Of the streamer.
    """

    address: str | None
    num_warm_steps: int
    num_steps: int
    stopped_pids: Sequence[int]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What one block has shown.

    Attributes:
        step_s: Wall-clock time of each measured step, seconds.
        ours_s: The part of each that the training thread spent in Headrace.
        ours_cpu_s: Its processor time in all of them.
        thread_cpu_s: Processor time of the training thread in all of them.
        cpu_s: Processor time of all threads of the trainer in the measured steps.
        memory_bytes: Most resident memory after a measured step.
        num_rows_sent: Rows acked by the end of the block.
        num_dirty_rows: Rows that had not been sent after the last measured step.
    """

    step_s: list[float]
    ours_s: list[float]
    ours_cpu_s: float
    thread_cpu_s: float
    cpu_s: float
    memory_bytes: int
    num_rows_sent: int
    num_dirty_rows: int


class TrainerProcess(BenchChild):
    """The process that trains; use it with `with`."""

    def __init__(self, model: ModelConfig, *, environ: Mapping[str, str] | None = None) -> None:
        """Start it, on the processors that this thread may use, and have it build its model.

        Args:
            model: Its sizes.
            environ: Variables of its environment beside this process's.

        Raises:
            UnavailableError: It has ended.
        """
        super().__init__(__name__, "trainer", asdict(model), environ=environ)

    def train(self, block: BlockConfig) -> Block:
        """Train one block.

        Raises:
            UnavailableError: The process has ended.
        """
        return Block(**self.ask(asdict(block)))


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
        self._config = config
        self._model = _Model(config)
        self._optimizer = torch.optim.SGD([*self._model.bottom.parameters(), *self._model.top.parameters()], lr=0.01)
        self._batches = list(_batches(config))
        self._step = 0
        self._clock = _Clock()

    def train(self, block: BlockConfig) -> Block:
        gc.collect()
        if block.address is None:
            for _ in range(block.num_warm_steps):
                self._train_step()
            return self._measure(block, None)
        streamer = RawEmbeddingStreamer(block.address, run="bench", **block.settings)
        try:
            with self._clock.watching():
                streamer.attach(self._model, self._optimizer)
                for _ in range(block.num_warm_steps):
                    self._train_step()
                # The first flushes meet memory that nobody has touched, once in a training run.
                for _ in range(_MAX_WARM_STEPS):
                    if streamer.stats().num_flushes >= 2 * NUM_STAGING_BUFFERS:
                        break
                    self._train_step()
                measured = self._measure(block, streamer)
            streamer.flush()
            return replace(measured, num_rows_sent=streamer.stats().num_rows_sent)
        finally:
            streamer.close(flush=False)

    def _measure(self, block: BlockConfig, streamer: RawEmbeddingStreamer | None) -> Block:
        step_s, ours_s, memory_bytes = [], [], 0
        with _stopped(block.stopped_pids):
            begin_cpu_s, begin_thread_s, begin_ours_s = time.process_time(), time.thread_time(), self._clock.cpu_s
            for _ in range(block.num_steps):
                begin_s, ours_before_s = time.perf_counter(), self._clock.total_s
                self._train_step()
                step_s.append(time.perf_counter() - begin_s)
                ours_s.append(self._clock.total_s - ours_before_s)
                memory_bytes = max(memory_bytes, _resident_bytes())
            cpu_s, thread_cpu_s = time.process_time() - begin_cpu_s, time.thread_time() - begin_thread_s
            stats = streamer.stats() if streamer else None
        return Block(
            step_s=step_s,
            ours_s=ours_s,
            ours_cpu_s=self._clock.cpu_s - begin_ours_s,
            thread_cpu_s=thread_cpu_s,
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            num_rows_sent=0,
            num_dirty_rows=stats.num_dirty_rows if stats else 0,
        )

    def _train_step(self) -> None:
        dense, ids, labels = self._batches[self._step % len(self._batches)]
        self._step += 1
        self._optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self._model(dense, ids), labels)
        torch.autograd.backward(loss)  # the fused optimizer updates the rows here
        self._optimizer.step()


class _Clock:
    """Counts the time that the training thread spends inside of our hooks.

    Attributes:
        total_s: So far, seconds.
        cpu_s: Processor time of it, seconds.
    """

    def __init__(self) -> None:
        self.total_s = self.cpu_s = 0.0
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Put the hooks' methods under the clock for the block: hooks that are registered in it are counted."""
        plain = [(owner, name, getattr(owner, name)) for owner, name in _TIMED]
        for owner, name, function in plain:
            setattr(owner, name, self._timed(function))
        try:
            yield
        finally:
            for owner, name, function in plain:
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # one of these calls another
                    self.total_s += time.perf_counter() - begin_s
                    self.cpu_s += time.thread_time() - begin_cpu_s

        return timed


@contextlib.contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    """Keep processes from running for the block."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def _batches(config: ModelConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (dense features, row ids, labels)."""
    rng = np.random.default_rng(config.seed)
    # Hot rows lie anywhere in a table, elsewhere in each.
    places = [rng.permutation(config.num_rows) for _ in range(config.num_tables)]
    for _ in range(config.num_batches):
        ranks = zipf_ranks(rng, config.num_rows, (config.num_tables, config.batch_size))
        ids = np.concatenate([place[of_table] for place, of_table in zip(places, ranks, strict=True)])
        dense = rng.standard_normal((config.batch_size, _NUM_DENSE), np.float32)
        labels = rng.integers(0, 2, config.batch_size).astype(np.float32)
        yield torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES


def _main() -> None:
    # Each block is a run of its own on the store that the first has filled, as the streamer would warn every time.
    logging.getLogger(RawEmbeddingStreamer.__module__).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    given = orders()
    trainer = _Trainer(ModelConfig(**next(given)))
    give_answer({})
    for block in given:
        give_answer(asdict(trainer.train(BlockConfig(**block))))


if __name__ == "__main__":
    _main()
