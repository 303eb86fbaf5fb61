"""`headrace bench backfill`: a directory made of a file, beside the same rows put into RocksDB one after the other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.scripts.bench_report import FolderOption, JsonOption, check_folder, check_json, conclude, show_progress
from headrace.scripts.bench_rows import median
from headrace.scripts.bench_tables_child import run_child

__all__ = ["BackfillBenchConfig", "backfill", "run"]

RowsOption = Annotated[int, typer.Option("--rows", min=1000, help="Rows of the table.")]
_MEMORY_PARTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillBenchConfig:
    """How much is measured.

    Attributes:
        num_rows: Rows of 64 float32 and a rowwise state.
        num_rounds: Both are measured so often, in turn; the medians count.
        folder: Where files go; None for the system's temporary folder.
    """

    num_rows: int = 5_000_000
    num_rounds: int = 1
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 3 + 2 * self.num_rounds


def backfill(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rows: RowsOption = 5_000_000,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="How often all is measured, in turn.")] = 1,
) -> None:
    """Measure how fast a new directory is made of a file, and that its memory does not grow with the table.

    It is held against a loop that puts the same records, sorted, into RocksDB without a log of its own.

    Raises:
        ConfigError: A path cannot be written.
        UnavailableError: A process has ended.
    """
    check_json(json_path)
    config = BackfillBenchConfig(num_rows=rows, num_rounds=rounds, folder=check_folder(folder))
    with show_progress("backfill", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result, json_path)


def run(config: BackfillBenchConfig, *, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Measure; files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended.
    """
    few_rows = max(config.num_rows // _MEMORY_PARTS, 1)
    walls: dict[str, list[float]] = {"backfill": [], "rocksdb": []}
    cpus: dict[str, list[float]] = {"backfill": [], "rocksdb": []}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=config.folder) as name:
        folder = Path(name)
        on_stage("making the file")
        run_child("source", path=str(folder / "few.safetensors"), num_rows=few_rows)
        run_child("source", path=str(folder / "all.safetensors"), num_rows=config.num_rows)
        on_stage("a fifth of it, for the memory")
        few = run_child("backfill", source=str(folder / "few.safetensors"), target=str(folder / "few"))
        peaks = []
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: backfill")
            done = run_child("backfill", source=str(folder / "all.safetensors"), target=str(folder / "data"))
            shutil.rmtree(folder / "data")
            on_stage(f"round {number + 1}: RocksDB")
            peer = run_child("rocksdb", path=str(folder / "rocksdb"), num_rows=config.num_rows)
            shutil.rmtree(folder / "rocksdb")
            peaks.append(done["peak_rss_bytes"])
            for kind, result in (("backfill", done), ("rocksdb", peer)):
                walls[kind].append(result["wall_s"])
                cpus[kind].append(result["cpu_s"])
        on_stage("removing files")
    return {
        "offline_vs_rocksdb": median(walls["rocksdb"]) / median(walls["backfill"]),
        "offline_vs_rocksdb_cpu": median(cpus["rocksdb"]) / median(cpus["backfill"]),
        "num_rows": config.num_rows,
        "rows_per_s": {kind: config.num_rows / median(seconds) for kind, seconds in walls.items()},
        "cpu_us_per_row": {kind: 1e6 * median(seconds) / config.num_rows for kind, seconds in cpus.items()},
        "peak_rss_bytes": {str(few_rows): few["peak_rss_bytes"], str(config.num_rows): max(peaks)},
        "wall_s": walls,
    }
