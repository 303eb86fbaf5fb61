"""`headrace bench export`: a snapshot's rows written to files, beside a sequential write of as many bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.schemas.errors import ConfigError
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

__all__ = ["ExportBenchConfig", "export", "run"]

_FORMATS = ("safetensors", "parquet", "npz", "dcp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportBenchConfig(TablesConfig):
    """How much is measured, as for the bench of backfill.

    Attributes:
        format_name: Of the files.
    """

    format_name: str = "safetensors"

    def __post_init__(self) -> None:
        if self.format_name not in _FORMATS:
            raise ConfigError(f"--format {self.format_name!r}: one of {', '.join(_FORMATS)}")


def export(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rows: RowsOption = 5_000_000,
    format_name: Annotated[str, typer.Option("--format", metavar="NAME", help="Of the files.")] = "safetensors",
    rounds: RoundsOption = 1,
) -> None:
    """Measure how fast a snapshot is exported, and that its memory does not grow with the table.

    It is held against a sequential write of as many bytes, synced at its end.

    Raises:
        ConfigError: A path cannot be written, or there is no such format.
        UnavailableError: A process has ended.
    """
    check_json(json_path)
    config = ExportBenchConfig(num_rows=rows, format_name=format_name, num_rounds=rounds, folder=check_folder(folder))
    with show_progress("export", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result, json_path)


def run(config: ExportBenchConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended.
    """
    rounds, size_bytes = ChildRounds(config), 0
    with bench_folder(config.folder) as folder:
        on_stage("making the snapshots")
        kinds = (("few", config.few_rows), ("all", config.num_rows))
        few, all_ = (_make_snapshot(folder, kind, rows) for kind, rows in kinds)
        on_stage("a fifth of it, for the memory")
        small = run_child("export", snapshot=str(few), to=str(folder / "few.out"), format_name=config.format_name)
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: export")
            to = folder / "all.out"
            rounds.add("export", run_child("export", snapshot=str(all_), to=str(to), format_name=config.format_name))
            size_bytes = sum(file.stat().st_size for file in (to.iterdir() if to.is_dir() else [to]))
            shutil.rmtree(to) if to.is_dir() else to.unlink()
            on_stage(f"round {number + 1}: disk")
            rounds.add("disk", run_child("disk", path=str(folder / "disk"), size_bytes=size_bytes))
            (folder / "disk").unlink()
        on_stage("removing files")
    return {
        "export_vs_disk": rounds.wall_ratio("export", "disk"),
        "format": config.format_name,
        "num_rows": config.num_rows,
        "size_bytes": size_bytes,
        "rows_per_s": rounds.per_s(config.num_rows)["export"],
        "cpu_us_per_row": rounds.cpu_us_per_row("export"),
        "bytes_per_s": rounds.per_s(size_bytes),
        "peak_rss_bytes": rounds.peak_rss_bytes("export", small),
        "wall_s": rounds.walls,
    }


def _make_snapshot(folder: Path, kind: str, num_rows: int) -> Path:
    source, data, snapshots = folder / f"{kind}.safetensors", folder / f"{kind}.data", folder / f"{kind}.snapshots"
    run_child("source", path=str(source), num_rows=num_rows)
    run_child("backfill", source=str(source), target=str(data))
    source.unlink()
    run_child("snapshot", data=str(data), folder=str(snapshots))
    shutil.rmtree(data)
    return snapshots / "bench"
