"""`headrace bench all`: run every bench and the sweeps, and write a report with tables and charts."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.scripts.benches.charts import draw_charts
from headrace.scripts.benches.harness import FolderOption, OnStage, check_folder, say, show_progress
from headrace.scripts.benches.peers import missing_peers
from headrace.scripts.benches.report import FAILED, MEASURED, NOT_MEASURED, Results, load_average, render_page

__all__ = ["PARTS", "Part", "all_benches", "choose_parts"]

_TINY_SCALE = 0.05
_START_S = 10  # processes start at any scale
# The extra that brings a module which may be missing.
_EXTRAS = {"torch": "torch", "fbgemm_gpu": "torchrec", "torchrec": "torchrec", "safetensors": "tools"}


@dataclass(frozen=True, slots=True)
class Part:
    """A bench or a sweep."""

    name: str  # for `--only` and the results
    title: str
    rounds: int  # its own number, without `--rounds`
    full_s: float  # duration at full scale on two cores, correct to half a minute
    config: str  # `module:class` of its settings, imported late: a report needs no module of a part that it leaves out
    least: dict[str, int] = field(default_factory=dict)  # settings that shrink with the scale, and their least values
    tiny: dict[str, Any] = field(default_factory=dict)  # settings at a very small scale: a sweep has two points
    function: str = "measure"  # in the same module

    def make_config(self, scale: float, rounds: int | None, folder: Path | None) -> Any:
        """Return the settings at a scale from 0 to 1; without `rounds`, of the part's own rounds."""
        config_class = pkgutil.resolve_name(f"headrace.scripts.benches.{self.config}")
        settings = {each.name: each.default for each in fields(config_class)}
        changes: dict[str, Any] = {"num_rounds": rounds or self.rounds} | (self.tiny if scale < _TINY_SCALE else {})
        for name, least in self.least.items():
            changes[name] = _shrink(changes.get(name, settings[name]), scale, least)
        return config_class(**changes, **({"folder": folder} if "folder" in settings else {}))

    def measure(self, config: Any, on_stage: OnStage) -> dict[str, Any]:
        """Measure, and return the figures."""
        module = f"headrace.scripts.benches.{self.config.partition(':')[0]}"
        figures: dict[str, Any] = pkgutil.resolve_name(f"{module}:{self.function}")(config, on_stage)
        return figures

    def expected_s(self, scale: float, rounds: int | None) -> float:
        """Return about how long it will take, seconds."""
        return _START_S + (self.full_s - _START_S) * scale * (rounds or self.rounds) / self.rounds


def _shrink(value: Any, scale: float, least: int) -> Any:
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(_shrink(each, scale, least) for each in value))
    return value * scale if isinstance(value, float) else max(least, round(value * scale))


_INGEST = {"num_batches": 4, "num_acked_batches": 2, "num_redis_batches": 1}
_LOOKUP = {"num_rows": 10_000, "redis_rows": 10_000, "disk_rows": 10_000, "num_lookups": 5}
_LAG = {"block_s": 0, "min_batches": 10, "capacity_batches": 40, "num_rows": 20_000}
_FEW_COSTS = {"tables": (1, 1000), "rows": (10**5, 10**8), "connections": (1, 64)}
_FEW_WIDTHS = {"dims": (16, 128), "shards": (1, 4)}
_FEW_SIZES = {"mebibytes": (64, 1024)}
_WIDTHS = "Throughput against shards and the width of a row"
_SIZES = "Recovery time against the size of the log"
_COSTS = "Cost against tables, rows and clients"
_FILES = {"num_rows": 5000}

PARTS: tuple[Part, ...] = (
    Part("ingest", "Ingest", 3, 180, "ingest:IngestConfig", _INGEST),
    Part("recovery", "Recovery", 3, 60, "recovery:RecoveryConfig", {"mebibytes": 4}),
    Part("wire", "Wire", 9, 100, "wire:WireConfig", {"num_writes": 4, "num_reads": 32, "num_idle": 40}),
    Part("lookup", "Lookup", 3, 180, "lookup:LookupConfig", _LOOKUP),
    Part("overhead", "Overhead", 4, 150, "overhead:OverheadConfig", {"num_steps": 2}),
    Part("freshness", "Freshness", 3, 60, "freshness:FreshnessConfig", {"num_steps": 20}),
    Part("backfill", "Backfill", 1, 60, "table_files:BackfillConfig", _FILES, function="measure_backfill"),
    Part("export", "Export", 1, 60, "table_files:ExportBenchConfig", _FILES, function="measure_export"),
    Part("kernels", "Row kernels", 7, 40, "kernels:KernelsConfig", {"num_rows": 100_000, "step_ids": 1000}),
    Part(
        "throughput",
        _WIDTHS,
        3,
        420,
        "throughput:ThroughputConfig",
        {"run_bytes": 2**20, "max_batches": 4},
        _FEW_WIDTHS,
    ),
    Part("lag", "Lag against load", 2, 180, "lag:LagConfig", _LAG, {"loads": (0.05, 1.25)}),
    Part("recovery-size", _SIZES, 2, 120, "recovery:SweepConfig", {"mebibytes": 4}, _FEW_SIZES, "measure_sizes"),
    Part("cost", _COSTS, 2, 240, "cost:CostConfig", {"num_batches": 8, "num_steps": 2}, _FEW_COSTS),
)
"""In the order in which they run."""


def all_benches(
    *,
    report: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the report; created if it does not exist.")],
    scale: Annotated[float, typer.Option(metavar="SHARE", help="Share of the full amounts, above 0 to 1.")] = 1.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this part; may be repeated.", show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Rounds of every part.", show_default="each part's own")
    ] = None,
    folder: FolderOption = None,
) -> int:
    """Run every bench and the sweeps, and write a report with tables and charts.

    At full scale this takes about half an hour on two idle cores. The report is DIR/report.md, its charts are in
    DIR/figures, and all raw figures in DIR/results.json, which is written after each part: a second run with the same
    DIR measures only what is missing or has failed. A part that fails is reported, the others still run, and the exit
    code is 1.

    Parts: ingest, recovery, wire, lookup, overhead, freshness, backfill, export, kernels; and the sweeps throughput
    (against shards and the width of rows), lag (against load), recovery-size (against the size of the log) and cost
    (against tables, rows and clients).
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {scale:g}: must be above 0 and at most 1")
    parts = choose_parts(only or [])
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the report's charts need matplotlib: pip install 'headrace[bench]'")
    check_folder(folder)
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--report {report}: {exc.strerror}") from exc
    if not os.access(report, os.W_OK):
        raise ConfigError(f"--report {report}: not a folder that can be written to")
    results = Results(report, scale=scale, rounds=rounds)
    waiting = [part for part in parts if not results.has(part.name)]
    console = Console(stderr=True)
    say(*missing_peers())
    try:
        for number, part in enumerate(waiting):
            its_s, left_s = part.expected_s(scale, rounds), sum(p.expected_s(scale, rounds) for p in waiting[number:])
            progress = f"{number + 1} of {len(waiting)}: {part.name}, about {_duration(its_s)}"
            console.print(f"{progress}; all that is left about {_duration(left_s)}", highlight=False, soft_wrap=True)
            begun, load_before = time.time(), load_average()
            status, facts = _run(part, scale, rounds, folder)
            if status != MEASURED:
                console.print(f"{part.name}: {status}: {facts['reason']}", markup=False, soft_wrap=True)
            results.add(part.name, status, begun=begun, load_before=load_before, **facts)
    finally:
        # Also after Ctrl-C: a page of what is measured is better than none.
        measured = {name: part for name, part in results.content["parts"].items() if part["status"] == MEASURED}
        charts = {name: draw_charts(name, part["figures"], report) for name, part in measured.items()}
        titles, page = {part.name: part.title for part in PARTS}, report / "report.md"
        page.write_text(render_page(results.content, titles, charts, missing_peers()), "utf-8")
    console.print(f"{page}", markup=False, highlight=False, soft_wrap=True)
    return 1 if results.failed else 0


def choose_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, in the order of `PARTS`; without names, all."""
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: must be one of {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]


def _run(part: Part, scale: float, rounds: int | None, folder: Path | None) -> tuple[str, dict[str, Any]]:
    """Return the status of a part, and its figures or the reason why there are none."""
    try:
        config = part.make_config(scale, rounds, folder)
        with show_progress(part.name) as on_stage:
            return MEASURED, {"figures": part.measure(config, on_stage)}
    except Exception as exc:  # one bench must not stop the others; the report and the exit code show it
        module = (exc.name or "").partition(".")[0] if isinstance(exc, ModuleNotFoundError) else ""
        if module in _EXTRAS:
            return NOT_MEASURED, {"reason": f"{module} is not installed: pip install 'headrace[{_EXTRAS[module]}]'"}
        reason = str(exc) if isinstance(exc, HeadraceError) else f"{type(exc).__name__}: {exc}"
        return FAILED, {"reason": reason, "traceback": traceback.format_exception(exc)}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
