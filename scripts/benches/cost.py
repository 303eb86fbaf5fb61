"""The sweep of cost: processor time of a row in trainer and shard, against tables, rows and connections.

On a machine with shared processors, processor time says more about cost than the clock. Measured are the training
thread, the process that sends, and all threads of a shard.

The trainer's tables have no memory of their own: one row of values stands for all. So the figures do not include the
cache misses of a gather (`headrace bench overhead` does), and a table may have more rows than fit into memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from headrace.scripts.benches.harness import OnStage, bench_folder, one_torch_thread
from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.workload import RowsConfig
from headrace.scripts.benches.writer import WriterProcess
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.layout import Flush
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["CostConfig", "measure", "measure_trainer", "process_cpu_s"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_DRAWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CostConfig:
    """How much the sweep measures."""

    tables: tuple[int, ...] = (1, 10, 100, 1000)  # numbers of tables, of `table_rows` rows each
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)  # of one table
    connections: tuple[int, ...] = (1, 4, 16, 64)  # to one shard
    table_rows: int = 1_000_000
    dim: int = 64
    num_batches: int = 128  # of 4096 lookups, for a shard
    step_lookups: int = 65_536  # ids that a trainer's step looks up in all tables together
    num_steps: int = 8  # of the trainer
    num_rounds: int = 2
    folder: Path | None = None


def measure(config: CostConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure trainer and shard for each number of tables, rows and connections.

    Returns:
        `tables`, `rows` and `connections`, each with `x` and `series`: by what was measured, for each x, the values of
        all rounds: `mark_us`, `flush_us`, `send_us` and `shard_us`, processor time of a row; `rows_per_s`;
        `bitmap_bytes`.
    """
    plain = RowsConfig(ids="uniform", num_batches=config.num_batches, dim=config.dim, num_rows=config.table_rows)
    results: dict[str, dict[str, Any]] = {
        name: {"x": list(getattr(config, name)), "series": {}} for name in ("tables", "rows", "connections")
    }
    for number in range(config.num_rounds):
        for name, result in results.items():
            for at, x in enumerate(result["x"]):
                on_stage(f"round {number + 1}: {x:,} {name}")
                if name == "connections":
                    found = _measure_shard(plain, config.folder, num_clients=x)
                else:
                    rows = replace(plain, **{"num_tables" if name == "tables" else "num_rows": x})
                    steps = replace(rows, num_lookups=config.step_lookups)
                    found = measure_trainer(steps, num_steps=config.num_steps) | _measure_shard(rows, config.folder)
                for what, value in found.items():
                    result["series"].setdefault(what, [[] for _ in result["x"]])[at].append(value)
    return results


def process_cpu_s(pid: int) -> float:
    """Return the processor time that all threads of a process have used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _measure_shard(rows: RowsConfig, folder: Path | None, *, num_clients: int = 1) -> dict[str, float]:
    with (
        bench_folder(folder) as place,
        WriterProcess(rows, num_clients=num_clients) as writer,
        serve(place / "data") as server,
    ):
        (pid,) = server.shard_pids
        before_s = process_cpu_s(pid)
        written = writer.write(server.address, num_batches=rows.num_batches)
        used_s = process_cpu_s(pid) - before_s
        server.kill()
    return {
        "send_us": written.cpu_s / written.num_rows * 1e6,
        "shard_us": used_s / written.num_rows * 1e6,
        "rows_per_s": written.num_rows / written.applied_s,
    }


def measure_trainer(rows: RowsConfig, *, num_steps: int) -> dict[str, float]:
    """Return the training thread's `mark_us` and `flush_us`, processor time of a row, and all tables' `bitmap_bytes`.

    A step looks up the ids of a batch in all tables together; the median of the steps after the first one counts.
    """
    tables = [_make_table(rows, number) for number in range(rows.num_tables)]
    config = StreamerConfig.load(environ={}, flush_percent=100)
    pool = StagingPool(config.staging_bytes)
    num_flushed = 0

    def submit(flush: Flush) -> None:
        nonlocal num_flushed
        num_flushed += flush.num_rows
        assert flush.staging is not None
        pool.release(flush.staging)

    flusher = Flusher(config=config, num_shards=1, pool=pool, submit=submit, describe_delay=lambda: "nothing is late")
    flusher.add_tables(tables)
    steps = [_draw(rows, seed) for seed in range(_NUM_DRAWS)]
    marks_us, flushes_us = [], []
    with one_torch_thread():
        for step in range(1 + num_steps):
            begin_s = time.thread_time()
            for table, ids in zip(tables, steps[step % _NUM_DRAWS], strict=True):
                table.dirty.mark(ids)
            marked_s, before = time.thread_time(), num_flushed
            flusher.flush_all(step, timeout_s=1.0)
            num_rows = num_flushed - before
            flushes_us.append((time.thread_time() - marked_s) / num_rows * 1e6)
            marks_us.append((marked_s - begin_s) / num_rows * 1e6)
    return {
        "mark_us": median(marks_us[1:]),
        "flush_us": median(flushes_us[1:]),
        "bitmap_bytes": float(sum(table.dirty.size_bytes for table in tables)),
    }


def _make_table(rows: RowsConfig, number: int) -> TappedTable:
    weights = torch.ones(1, rows.dim).expand(rows.num_rows, rows.dim)
    state = torch.ones(1, 1).expand(rows.num_rows, 1)
    spec = rows.specs[number]
    return TappedTable(
        spec=spec, num_local_rows=rows.num_rows, weights=lambda: weights, states=lambda: {spec.states[0].name: state}
    )


def _draw(rows: RowsConfig, seed: int) -> list[torch.Tensor]:
    """Return the ids of a step, a tensor a table."""
    ids = np.random.default_rng(seed).integers(0, rows.num_rows, rows.num_lookups)
    return [torch.from_numpy(part) for part in np.array_split(ids, rows.num_tables)]
