"""`headrace bench export`: a snapshot's rows written to files, beside a sequential write of as many bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.schemas.errors import ConfigError
from headrace.scripts.bench_report import FolderOption, JsonOption, check_folder, check_json, conclude, show_progress
from headrace.scripts.bench_rows import median
from headrace.scripts.bench_tables_child import run_child

__all__ = ["ExportBenchConfig", "export", "run"]

_FORMATS = ("safetensors", "parquet", "npz", "dcp")
_MEMORY_PARTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportBenchConfig:
    """How much is measured.

    Attributes:
        num_rows: Rows of 64 float32 and a rowwise state.
        format_name: Of the files.
        num_rounds: Both are measured so often, in turn; the medians count.
        folder: Where files go; None for the system's temporary folder.
    """

    num_rows: int = 5_000_000
    format_name: str = "safetensors"
    num_rounds: int = 1
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.format_name not in _FORMATS:
            raise ConfigError(f"--format {self.format_name!r}: one of {', '.join(_FORMATS)}")

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 3 + 2 * self.num_rounds


def export(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rows: Annotated[int, typer.Option("--rows", min=1000, help="Rows of the table.")] = 5_000_000,
    format_name: Annotated[str, typer.Option("--format", metavar="NAME", help="Of the files.")] = "safetensors",
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="How often all is measured, in turn.")] = 1,
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


def run(config: ExportBenchConfig, *, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Measure; files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended.
    """
    few_rows = max(config.num_rows // _MEMORY_PARTS, 1)
    walls: dict[str, list[float]] = {"export": [], "disk": []}
    cpus: list[float] = []
    peaks: list[float] = []
    size_bytes = 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=config.folder) as name:
        folder = Path(name)
        on_stage("making the snapshots")
        few, all_ = (_make_snapshot(folder, kind, rows) for kind, rows in (("few", few_rows), ("all", config.num_rows)))
        on_stage("a fifth of it, for the memory")
        small = run_child("export", snapshot=str(few), to=str(folder / "few.out"), format_name=config.format_name)
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: export")
            to = folder / "all.out"
            done = run_child("export", snapshot=str(all_), to=str(to), format_name=config.format_name)
            size_bytes = sum(file.stat().st_size for file in (to.iterdir() if to.is_dir() else [to]))
            shutil.rmtree(to) if to.is_dir() else to.unlink()
            on_stage(f"round {number + 1}: disk")
            disk = run_child("disk", path=str(folder / "disk"), size_bytes=size_bytes)
            (folder / "disk").unlink()
            walls["export"].append(done["wall_s"])
            walls["disk"].append(disk["wall_s"])
            cpus.append(done["cpu_s"])
            peaks.append(done["peak_rss_bytes"])
        on_stage("removing files")
    return {
        "export_vs_disk": median(walls["disk"]) / median(walls["export"]),
        "format": config.format_name,
        "num_rows": config.num_rows,
        "size_bytes": size_bytes,
        "rows_per_s": config.num_rows / median(walls["export"]),
        "cpu_us_per_row": 1e6 * median(cpus) / config.num_rows,
        "bytes_per_s": {kind: size_bytes / median(seconds) for kind, seconds in walls.items()},
        "peak_rss_bytes": {str(few_rows): small["peak_rss_bytes"], str(config.num_rows): max(peaks)},
        "wall_s": walls,
    }


def _make_snapshot(folder: Path, kind: str, num_rows: int) -> Path:
    source, data, snapshots = folder / f"{kind}.safetensors", folder / f"{kind}.data", folder / f"{kind}.snapshots"
    run_child("source", path=str(source), num_rows=num_rows)
    run_child("backfill", source=str(source), target=str(data))
    source.unlink()
    run_child("snapshot", data=str(data), folder=str(snapshots))
    shutil.rmtree(data)
    return snapshots / "bench"
