"""What streaming costs a training thread by itself: marking rows and cutting flushes, of tables without a model.

The tables have no memory of their own: one row of values stands for all, so what a gather misses in the caches of a
machine is not in these figures (`headrace bench overhead` has it), and a table may have more rows than memory.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from headrace.scripts.benches.bench_rows import RowsConfig
from headrace.scripts.one_torch_thread import one_torch_thread
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.flush import Flush
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["measure_trainer"]

_NUM_DRAWS = 4


def measure_trainer(rows: RowsConfig, *, num_steps: int) -> dict[str, float]:
    """Return the processor time of the training thread, and the memory of its bitmaps.

    Args:
        rows: Tables, and how many ids a step looks up in all of them together.
        num_steps: Steps whose median counts, after one that does not.

    Returns:
        `mark_us_per_row` and `flush_us_per_row`, microseconds a row; `bitmap_bytes` of all tables.
    """
    with one_torch_thread():
        return _measure(rows, num_steps)


def _measure(rows: RowsConfig, num_steps: int) -> dict[str, float]:
    tables = [_fake_table(rows, number) for number in range(rows.num_tables)]
    config = StreamerConfig.load(environ={}, flush_percent=100)
    pool = StagingPool(config.staging_bytes)
    num_flushed = 0

    def submit(flush: Flush) -> None:
        nonlocal num_flushed
        num_flushed += flush.num_rows
        assert flush.staging is not None
        pool.release(flush.staging)

    flusher = Flusher(config=config, num_shards=1, pool=pool, submit=submit, describe_delay=lambda: "nobody is behind")
    flusher.add_tables(tables)
    steps = [_draw(rows, seed) for seed in range(_NUM_DRAWS)]
    marks_us, flushes_us = [], []
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
        "mark_us_per_row": median(marks_us[1:]),
        "flush_us_per_row": median(flushes_us[1:]),
        "bitmap_bytes": float(sum(table.dirty.size_bytes for table in tables)),
    }


def _fake_table(rows: RowsConfig, number: int) -> TappedTable:
    weights = torch.ones(1, rows.dim).expand(rows.num_rows, rows.dim)
    state = torch.ones(1, 1).expand(rows.num_rows, 1)
    spec = rows.specs[number]
    return TappedTable(
        spec=spec,
        num_local_rows=rows.num_rows,
        weights=lambda: weights,
        states=lambda: {spec.states[0].name: state},
    )


def _draw(rows: RowsConfig, seed: int) -> list[torch.Tensor]:
    """Return the ids of a step, a tensor a table."""
    ids = np.random.default_rng(seed).integers(0, rows.num_rows, rows.num_lookups)
    return [torch.from_numpy(part) for part in np.array_split(ids, rows.num_tables)]
