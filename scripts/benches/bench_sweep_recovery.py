"""The sweep of recovery: how long a killed shard takes to apply its log again, against the size of the log."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.benches import bench_recovery
from headrace.scripts.benches.bench_ingest import SHARD_STORE
from headrace.scripts.benches.bench_peers import time_rocksdb
from headrace.scripts.benches.bench_recovery import RecoveryConfig
from headrace.scripts.benches.bench_report import OnStage, bench_folder
from headrace.scripts.benches.bench_rows import WIRE_ROW_BYTES, BenchRows, RowsConfig

__all__ = ["RecoverySweepConfig", "fit_line", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySweepConfig:
    """How much is measured.

    Attributes:
        log_bytes: Sizes of the log that a start finds unapplied, ascending, bytes.
        num_rounds: Each size is measured so often.
        folder: Where files go; None for the system's temporary folder.
    """

    log_bytes: tuple[int, ...] = (64 << 20, 128 << 20, 256 << 20, 512 << 20, 1 << 30)
    num_rounds: int = 2
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return len(self.log_bytes) * (2 * self.num_rounds + 1)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (slope, intercept) of the least-squares line; through one point, the line from the origin."""
    if len(set(x)) < 2:
        return float(np.mean(y)) / x[0], 0.0
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def run(config: RecoverySweepConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Returns:
        `x`, the bytes of the rows in the log; `recovery_s`, `sustained_s` and `rocksdb_s`: for each size, of all
        rounds, how long recovering took, how long it took to send, log and apply the rows before, and how long RocksDB
        alone takes to write them; and of the line through all recoveries `seconds_per_byte` and `intercept_s`.

    Raises:
        UnavailableError: A process has ended or does not start.
        HeadraceError: The server did not say how long it took.
    """
    sizes: list[int] = []
    seconds: dict[str, list[list[float]]] = {"recovery_s": [], "sustained_s": [], "rocksdb_s": []}
    for log_bytes in config.log_bytes:
        size = f"{log_bytes >> 20} MiB"
        recovery = RecoveryConfig(log_bytes=log_bytes, num_rounds=config.num_rounds, folder=config.folder)
        found = bench_recovery.run(recovery, on_stage=functools.partial(_prefixed, on_stage, size))
        on_stage(f"{size}, RocksDB alone")
        num_rows = found.log_bytes / WIRE_ROW_BYTES
        sizes.append(found.log_bytes)
        seconds["recovery_s"].append([num_rows / rate for rate in found.recovered])
        seconds["sustained_s"].append([num_rows / rate for rate in found.sustained])
        seconds["rocksdb_s"].append([_time_rocksdb(recovery.num_batches, config.folder)])
    points = [(size, value) for size, values in zip(sizes, seconds["recovery_s"], strict=True) for value in values]
    slope, intercept_s = fit_line([size for size, _ in points], [value for _, value in points])
    return {"seconds_per_byte": slope, "intercept_s": intercept_s, "x": sizes, **seconds}


def _prefixed(on_stage: OnStage, size: str, what: str) -> None:
    on_stage(f"{size}, {what}")


def _time_rocksdb(num_batches: int, folder: Path | None) -> float:
    rows = BenchRows(RowsConfig(ids="uniform", num_batches=num_batches))
    with bench_folder(folder) as place:
        return time_rocksdb(rows, place, SHARD_STORE)
