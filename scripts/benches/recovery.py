"""`headrace bench recovery`, and the sweep of it: how fast a killed shard applies its log to an empty store."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.ingest import SHARD_STORE, admin_dial, serve
from headrace.scripts.benches.peers import time_rocksdb
from headrace.scripts.benches.workload import WIRE_ROW_BYTES, BenchRows, RowsConfig
from headrace.scripts.benches.writer import WriterProcess

__all__ = ["RecoveryConfig", "SweepConfig", "fit_line", "measure", "measure_sizes", "recovery"]

_TIMEOUT_S, _POLL_S = 60.0, 0.01
_BATCH_BYTES = 4095 * WIRE_ROW_BYTES  # of uniform ids, about


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """How much `headrace bench recovery` measures."""

    mebibytes: Annotated[int, typer.Option(min=1, help="Unapplied log at the start of the server, MiB.")] = 1024
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    @property
    def rows(self) -> RowsConfig:
        """The rows that make a log of that size."""
        return RowsConfig(ids="uniform", num_batches=max(1, (self.mebibytes << 20) // _BATCH_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """How much the sweep measures, for each of several sizes of the log (MiB, ascending)."""

    mebibytes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    num_rounds: int = 2
    folder: Path | None = None


def measure(config: RecoveryConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a shard that was killed applies its log to an empty store.

    The rate is compared with that at which the same rows came in: sent, on disk and applied. The store is removed while
    the server is down, so the whole log is unapplied.
    """
    rates, log_bytes, num_batches = Rounds(), 0, config.rows.num_batches
    with bench_folder(config.folder) as folder, WriterProcess(config.rows) as writer:
        for number in range(config.num_rounds):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                data_dir = Path(place) / "data"
                on_stage(f"{config.mebibytes} MiB, round {number + 1}: writing")
                with serve(data_dir) as server:
                    written = writer.write(server.address, num_batches=num_batches)
                    server.kill()
                log_bytes = written.wire_bytes
                rates.add("sustained", written.num_rows / written.applied_s)
                for store in data_dir.glob("shard-*/store"):
                    shutil.rmtree(store)
                on_stage(f"{config.mebibytes} MiB, round {number + 1}: recovering")
                with serve(data_dir, timeout_s=600.0) as server:
                    rates.add("recovered", written.num_rows / _recovery_s(server))
                    server.kill()
    return {
        "ratio_recovery_vs_sustained": rates.ratio("recovered", "sustained"),
        "log_bytes": log_bytes,
        "recovery_s": median([log_bytes / WIRE_ROW_BYTES / rate for rate in rates["recovered"]]),
        "median_rows_per_s": rates.medians(),
        "median_bytes_per_s": rates.medians(WIRE_ROW_BYTES),
        "rows_per_s": rates,
    }


recovery = bench_command("recovery", RecoveryConfig, measure)


def measure_sizes(config: SweepConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure recovery for several sizes of the log.

    Returns:
        `x`, the bytes of the rows in the log; `recovery_s`, `sustained_s` and `rocksdb_s`: for each size, the seconds
        of all rounds to recover, to send, log and apply before, and to write the rows with RocksDB alone; and
        `seconds_per_byte` and `intercept_s` of the line through all recoveries.
    """
    sizes: list[int] = []
    seconds: dict[str, list[list[float]]] = {"recovery_s": [], "sustained_s": [], "rocksdb_s": []}
    for mebibytes in config.mebibytes:
        of_size = RecoveryConfig(mebibytes=mebibytes, num_rounds=config.num_rounds, folder=config.folder)
        figures = measure(of_size, on_stage)
        on_stage(f"{mebibytes} MiB: RocksDB alone")
        num_rows = figures["log_bytes"] / WIRE_ROW_BYTES
        sizes.append(figures["log_bytes"])
        seconds["recovery_s"].append([num_rows / rate for rate in figures["rows_per_s"]["recovered"]])
        seconds["sustained_s"].append([num_rows / rate for rate in figures["rows_per_s"]["sustained"]])
        with bench_folder(config.folder) as place:
            seconds["rocksdb_s"].append([time_rocksdb(BenchRows(of_size.rows), place, SHARD_STORE)])
    points = [(size, value) for size, values in zip(sizes, seconds["recovery_s"], strict=True) for value in values]
    slope, intercept_s = fit_line([size for size, _ in points], [value for _, value in points])
    return {"seconds_per_byte": slope, "intercept_s": intercept_s, "x": sizes, **seconds}


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (slope, intercept) of the least-squares line; for a single x, of the line from the origin."""
    if len(set(x)) < 2:
        return float(np.mean(y)) / x[0], 0.0
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def _recovery_s(server: ServerProcess) -> float:
    """Return the seconds from opening the log until the store has all of it."""
    asyncio.run(_wait_applied(server.address))
    end = time.time()
    for fact in server.read_log():
        if fact.get("message") == "recovered":
            # The server serves as soon as all is in memory, and applies the rest meanwhile.
            return end - datetime.fromisoformat(fact["time"]).timestamp() + float(fact["seconds"])
    raise HeadraceError("the server found nothing to recover; its log has no line about it")


async def _wait_applied(address: str) -> None:
    client, _ = await admin_dial(_TIMEOUT_S).connect(*parse_address(address))
    async with client:
        while (status := await client.status()).applied_seq < status.log_seq:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(_POLL_S)
