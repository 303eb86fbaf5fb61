"""`headrace bench backfill`: a directory made of a file, beside the same rows put into RocksDB one after the other."""

from __future__ import annotations

import shutil
from typing import Any

from headrace.scripts.benches.bench_report import (
    FolderOption,
    JsonOption,
    OnStage,
    RoundsOption,
    bench_folder,
    check_folder,
    check_json,
    conclude,
    show_progress,
)
from headrace.scripts.benches.bench_tables_child import run_child
from headrace.scripts.benches.bench_tables_rounds import ChildRounds, RowsOption, TablesConfig

__all__ = ["backfill", "run"]


def backfill(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rows: RowsOption = 5_000_000,
    rounds: RoundsOption = 1,
) -> None:
    """Measure how fast a new directory is made of a file, and that its memory does not grow with the table.

    It is held against a loop that puts the same records, sorted, into RocksDB without a log of its own.

    Raises:
        ConfigError: A path cannot be written.
        UnavailableError: A process has ended.
    """
    check_json(json_path)
    config = TablesConfig(num_rows=rows, num_rounds=rounds, folder=check_folder(folder))
    with show_progress("backfill", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result, json_path)


def run(config: TablesConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended.
    """
    rounds = ChildRounds(config)
    with bench_folder(config.folder) as folder:
        on_stage("making the file")
        run_child("source", path=str(folder / "few.safetensors"), num_rows=config.few_rows)
        run_child("source", path=str(folder / "all.safetensors"), num_rows=config.num_rows)
        on_stage("a fifth of it, for the memory")
        few = run_child("backfill", source=str(folder / "few.safetensors"), target=str(folder / "few"))
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: backfill")
            target = folder / "data"
            rounds.add("backfill", run_child("backfill", source=str(folder / "all.safetensors"), target=str(target)))
            shutil.rmtree(target)
            on_stage(f"round {number + 1}: RocksDB")
            rounds.add("rocksdb", run_child("rocksdb", path=str(folder / "rocksdb"), num_rows=config.num_rows))
            shutil.rmtree(folder / "rocksdb")
        on_stage("removing files")
    return {
        "offline_vs_rocksdb": rounds.wall_ratio("backfill", "rocksdb"),
        "offline_vs_rocksdb_cpu": rounds.cpu_ratio("backfill", "rocksdb"),
        "num_rows": config.num_rows,
        "rows_per_s": rounds.per_s(config.num_rows),
        "cpu_us_per_row": {kind: rounds.cpu_us_per_row(kind) for kind in rounds.walls},
        "peak_rss_bytes": rounds.peak_rss_bytes("backfill", few),
        "wall_s": rounds.walls,
    }
