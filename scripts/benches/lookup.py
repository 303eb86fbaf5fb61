"""`headrace bench lookup`: how fast a replica answers lookups while updates arrive, next to torch and Redis."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.scripts.benches.harness import (
    OnStage,
    Rounds,
    RoundsOption,
    bench_command,
    bench_folder,
    one_torch_thread,
)
from headrace.scripts.benches.ingest import admin_dial, serve
from headrace.scripts.benches.peers import has_redis, redis_hints, redis_server
from headrace.scripts.benches.workload import RowsConfig, WriterProcess, draw_ids

__all__ = ["lookup", "measure"]

_TIMEOUT_S = 600.0
_NUM_BATCHES, _BATCH_ROWS, _FILL_ROWS = 64, 4096, 16_384
_PIPELINED_BATCHES = 4
_FQN = "bench.weight"
_ROWS_PER_S, _UPDATE_S = 100_000, 2.0  # updates are written in blocks, and between them the pace has a short gap
_MAX_REDIS_ROWS = 1_000_000

_Ids = npt.NDArray[np.int64]


def measure(
    on_stage: OnStage,
    *,
    # The process holds the table three times during the switch: two copies and torch's.
    num_rows: Annotated[int, typer.Option("--rows", min=_BATCH_ROWS, help="Rows of the table in memory.")] = 10_000_000,
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Its columns, float32.")] = 64,
    num_lookups: Annotated[int, typer.Option("--lookups", min=1, help="Batches of 4096 ids in a block.")] = 500,
    num_rounds: RoundsOption = 3,
) -> dict[str, Any]:
    """Measure how fast a replica answers lookups while updates arrive, next to torch and Redis.

    First Zipf ids in batches of 4096, the same for torch.nn.functional.embedding and pipelined MGETs; then the slowest
    percent while the replica switches to a snapshot.
    """
    with one_torch_thread(), bench_folder() as folder, serve(folder / "data") as server, ExitStack() as stack:
        on_stage("filling the table")
        sizes: dict[str, Any] = {"dim": dim, "num_rows": num_rows}
        each = RowsConfig(ids="each", num_batches=-(-num_rows // _BATCH_ROWS), **sizes)
        with WriterProcess(each) as filler:
            filler.write(server.address, num_batches=each.num_batches)
        mget = stack.enter_context(_fill_redis(folder, min(num_rows, _MAX_REDIS_ROWS), dim)) if has_redis() else None
        on_stage("loading a snapshot")
        dial = admin_dial(_TIMEOUT_S)
        manifest = asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=_TIMEOUT_S))
        snapshot = server.data_dir / "snapshots" / manifest.name
        replica = EmbeddingReplica(server.address, snapshot=snapshot, open_timeout_s=_TIMEOUT_S)
        stack.enter_context(replica)
        zipf = RowsConfig(ids="zipf", num_batches=_NUM_BATCHES, seed=1, **sizes)
        stack.enter_context(_updates(stack.enter_context(WriterProcess(zipf)), server.address))
        rates, plain, rng = Rounds(), torch.ones(num_rows, dim), np.random.default_rng(2)
        asked = [draw_ids(rng, "zipf", num_rows, _BATCH_ROWS) for _ in range(_NUM_BATCHES)]
        for number in range(num_rounds):
            on_stage(f"round {number + 1}: lookups while updates arrive")
            embed = functools.partial(torch.nn.functional.embedding, weight=plain)
            rates.add("torch", _rate(embed, asked, num_lookups))
            rates.add("headrace", _rate(functools.partial(replica.lookup, _FQN), asked, num_lookups))
            if mget is not None:
                rates.add("redis", mget([asked[at % _NUM_BATCHES] for at in range(max(num_lookups // 20, 4))]))
        on_stage("switching to a snapshot")
        before_ms, during_ms = _measure_switch(replica, snapshot, asked, num_lookups)
        assert not sum(replica.num_missing.values())
    p99_before_ms, p99_swap_ms = (float(np.percentile(times_ms, 99)) for times_ms in (before_ms, during_ms))
    return {
        "ratio_vs_torch": rates.ratio("headrace", "torch"),
        "ratio_vs_redis": rates.ratio("headrace", "redis"),
        "swap_p99_ratio": p99_swap_ms / p99_before_ms,
        "p99_before_ms": p99_before_ms,
        "p99_swap_ms": p99_swap_ms,
        "median_rows_per_s": rates.medians(),
    }


lookup = bench_command("lookup", measure, hints=redis_hints)


def _rate(ask: Callable[[torch.Tensor], object], batches: list[_Ids], num_lookups: int) -> float:
    """Return the rows a second of a block of lookups."""
    tensors = [torch.from_numpy(ids) for ids in batches]
    begin_s = time.perf_counter()
    for number in range(num_lookups):
        ask(tensors[number % _NUM_BATCHES])
    return num_lookups * _BATCH_ROWS / (time.perf_counter() - begin_s)


@contextmanager
def _updates(writer: WriterProcess, address: str) -> Iterator[None]:
    """Have rows written at the pace meanwhile."""
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            num_batches = round(_UPDATE_S * _ROWS_PER_S / _BATCH_ROWS)
            writer.write(address, num_batches=num_batches, rows_per_s=_ROWS_PER_S)

    with ThreadPoolExecutor(1, "updates") as pool:
        writing = pool.submit(write)
        try:
            yield
        finally:
            is_over.set()
    writing.result()


def _measure_switch(
    replica: EmbeddingReplica, snapshot: Path, batches: list[_Ids], num_lookups: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each lookup before a switch to a snapshot, and during it."""
    before_ms, during_ms = list[float](), list[float]()

    def ask(times_ms: list[float]) -> None:
        ids, begin_s = batches[len(times_ms) % _NUM_BATCHES], time.perf_counter()
        replica.lookup(_FQN, ids)
        times_ms.append((time.perf_counter() - begin_s) * 1e3)

    for _ in range(2 * num_lookups):
        ask(before_ms)
    with ThreadPoolExecutor(1, "switch") as pool:
        switch = pool.submit(replica.load_snapshot, snapshot, timeout_s=_TIMEOUT_S)
        while not switch.done() or not during_ms:
            ask(during_ms)
        switch.result()
    return before_ms, during_ms


@contextmanager
def _fill_redis(folder: Path, num_rows: int, dim: int) -> Iterator[Callable[[list[_Ids]], float]]:
    """Run a Redis with rows as strings of their bytes; yield the rows a second of pipelined MGETs, one a batch.

    Ids beyond Redis's rows wrap around. Keys are made before the clock starts, and values stay a list of bytes: the
    least that a client gets.
    """
    import redis

    with redis_server(folder) as port, redis.Redis("127.0.0.1", port) as client:
        width = 4 * dim
        values = np.random.default_rng(3).bytes(_FILL_ROWS * width)
        for first in range(0, num_rows, _FILL_ROWS):
            rows = range(min(_FILL_ROWS, num_rows - first))
            client.mset({b"%d" % (first + row): values[row * width : (row + 1) * width] for row in rows})

        def rate(batches: list[_Ids]) -> float:
            keys = [[b"%d" % row for row in (ids % num_rows).tolist()] for ids in batches]
            begin_s = time.perf_counter()
            for first in range(0, len(keys), _PIPELINED_BATCHES):
                pipeline = client.pipeline(transaction=False)
                for batch in keys[first : first + _PIPELINED_BATCHES]:
                    pipeline.mget(batch)
                pipeline.execute()
            return len(batches) * _BATCH_ROWS / (time.perf_counter() - begin_s)

        yield rate
