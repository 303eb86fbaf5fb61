"""`headrace bench restore`: how fast a new trainer gets its tables back, next to a plain read of the same rows.

A trainer publishes one table with its optimizer's states and ends. A new one restores it, and reads all of its rows
with an `EmbeddingReader`, in turns and in one process: as many rows at a time, with states and versions both times. So
the ratio is what finding, checking and writing add to the wire.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.harness import (
    FolderOption,
    OnStage,
    Rounds,
    RoundsOption,
    bench_command,
    bench_folder,
    one_torch_thread,
)

__all__ = ["RestoreConfig", "make_figures", "measure", "restore"]

_RUN, _FQN = "bench", "bench:rows.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig:
    """How much `headrace bench restore` measures."""

    num_rows: Annotated[int, typer.Option("--rows", min=100, help="Rows of the table.")] = 500_000
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Its columns, float32, with a state of each.")] = 64
    num_rounds: RoundsOption = 5
    folder: FolderOption = None


def measure(config: RestoreConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a trainer's table is restored from a server, next to a plain read of all of its rows.

    The exit code is 1 if restoring is slower than 0.7 of the read.
    """
    sizes: dict[str, Any] = {"num_rows": config.num_rows, "dim": config.dim}
    took_s = Rounds()
    with bench_folder(config.folder) as folder:
        on_stage("publishing the table")
        with ServerProcess.start(folder / "data", shards=1) as server:
            with Child(f"{__name__}:_publish", "the bench's trainer", address=server.address, **sizes):
                pass
            with Child(f"{__name__}:_restore", "the bench's new trainer", address=server.address, **sizes) as trainer:
                for number in range(config.num_rounds):
                    for kind in ("scan", "restore"):
                        on_stage(f"round {number + 1}: {kind}")
                        took_s.add(kind, trainer.ask(kind=kind)["took_s"])
    return make_figures(config, took_s)


def make_figures(config: RestoreConfig, took_s: Rounds) -> dict[str, Any]:
    """Return the figures of the seconds of each round, by `restore` and `scan`."""
    return {
        "restore_vs_scan": took_s.ratio("scan", "restore"),
        "rows_per_s": {kind: config.num_rows / seconds for kind, seconds in took_s.medians().items()},
        "num_rows": config.num_rows,
        "dim": config.dim,
        "took_s": took_s,
    }


restore = bench_command("restore", RestoreConfig, measure, has_bounds=True)


def _model(num_rows: int, dim: int) -> tuple[Any, Any]:
    import torch

    model = torch.nn.ModuleDict({"rows": torch.nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True)})
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def _publish(address: str, num_rows: int, dim: int) -> Worker:
    """Send the whole table, with its states, to a server."""
    from headrace.streamer import RawEmbeddingStreamer

    model, optimizer = _model(num_rows, dim)
    with one_torch_thread(), RawEmbeddingStreamer(address, run=_RUN, model=_RUN) as streamer:
        streamer.attach(model, optimizer, publish="all")
        streamer.flush()
    yield {}


def _restore(address: str, num_rows: int, dim: int) -> Worker:
    """Read or restore the table; an order is its `kind`, the answer how long it took. Each is done once before."""
    from headrace.streamer.restore import restore as restore_model

    model, optimizer = _model(num_rows, dim)

    def restore_all() -> int:
        return restore_model(model, optimizer, address).num_restored

    work = {"scan": lambda: asyncio.run(_scan(address, num_rows)), "restore": restore_all}
    with one_torch_thread():
        for do in work.values():  # touches the memory
            do()
        answer: dict[str, Any] = {}
        while True:
            order = yield answer
            begin_s = time.perf_counter()
            assert work[order["kind"]]() == num_rows
            answer = {"took_s": time.perf_counter() - begin_s}


async def _scan(address: str, num_rows: int) -> int:
    """Read all rows, as many at a time as a restore does; return how many there were."""
    import numpy as np

    from headrace.paramserver.reading.reader import EmbeddingReader
    from headrace.streamer.restore_source import rows_at_once

    found = 0
    async with await EmbeddingReader.connect(address) as reader:
        step = rows_at_once(reader.tables[_FQN])
        for first in range(0, num_rows, step):
            row_ids = np.arange(first, min(first + step, num_rows))
            rows = await reader.get(_FQN, row_ids, with_states=True, with_versions=True)
            found += int(np.count_nonzero(rows.presence))
    return found
