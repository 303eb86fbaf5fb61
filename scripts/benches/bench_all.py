"""`headrace bench all`: every bench and the sweeps in one run, and a report of them with tables and charts."""

from __future__ import annotations

import importlib.util
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.scripts.benches.bench_all_parts import PARTS, Part, Plan, missing_peers
from headrace.scripts.benches.bench_report import FolderOption, check_folder, say, show_progress
from headrace.scripts.benches.bench_report_page import Chart, render_page
from headrace.scripts.benches.bench_report_plots import PLOTS
from headrace.scripts.benches.bench_report_results import FAILED, MEASURED, NOT_MEASURED, Results, load_average

__all__ = ["all_benches", "choose_parts", "run_parts", "write_report"]

REPORT_NAME = "report.md"

# What brings a module that a bench needs and that may be missing.
_EXTRAS = {"torch": "torch", "fbgemm_gpu": "torchrec", "torchrec": "torchrec", "safetensors": "tools"}


def all_benches(
    *,
    report: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes; is made if it is not there.")],
    scale: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of the full amounts, above 0 to 1."),
    ] = 1.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this part; may be repeated.", show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Rounds of every part.", show_default="each part's own")
    ] = None,
    folder: FolderOption = None,
) -> int:
    """Run every bench and the sweeps, and write a report with tables and charts.

    At full scale it should take about half an hour on two idle cores. The report is DIR/report.md, its charts are in
    DIR/figures, all raw figures in DIR/results.json, which is written after each part: with the same DIR a second run
    measures only what is missing or has failed. A part that fails is reported, the others still run, and the exit code
    is 1.

    Parts: ingest, recovery, wire, lookup, overhead, freshness, backfill, export, kernels; and the sweeps throughput
    (against shards and the width of rows), lag (against load), recovery-size (against the size of the log) and cost
    (against tables, rows and clients).

    Raises:
        ConfigError: A path cannot be written, a value is wrong, matplotlib is not installed, or DIR has figures of
            other settings.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {scale:g}: must be above 0 and at most 1")
    parts = choose_parts(only or [])
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the report's charts need matplotlib: pip install 'headrace[bench]'")
    plans = [(part, Plan(scale=scale, rounds=rounds or part.rounds, folder=check_folder(folder))) for part in parts]
    results = Results.open(_make_folder(report), scale=scale, rounds=rounds)
    console = Console(stderr=True)
    say(*missing_peers())
    try:
        run_parts(plans, results, console)
    finally:
        # Also after Ctrl-C: what is measured is worth a page.
        page = write_report(report, results)
    console.print(f"{page}", markup=False, highlight=False, soft_wrap=True)
    return 1 if results.failed else 0


def choose_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names, in their order; all without names.

    Raises:
        ConfigError: There is no such part.
    """
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: is none of {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]


def run_parts(plans: Sequence[tuple[Part, Plan]], results: Results, console: Console) -> None:
    """Run the parts that are not measured yet, and keep what each gives.

    Args:
        plans: What to run, and how much of it.
        results: Where figures go.
        console: Where it is said what runs and how long it will take.

    Raises:
        ConfigError: The results cannot be written.
    """
    waiting = [(part, plan) for part, plan in plans if not results.has(part.name)]
    for number, (part, plan) in enumerate(waiting):
        left_s = sum(other.expected_s(of_other) for other, of_other in waiting[number:])
        console.print(
            f"{number + 1} of {len(waiting)}: {part.name}, about {_duration(part.expected_s(plan))}; "
            f"all that is left about {_duration(left_s)}",
            highlight=False,
            soft_wrap=True,
        )
        begun, load_before = time.time(), load_average()
        outcome = _run_part(part, plan)
        if outcome.status != MEASURED:
            console.print(f"{part.name}: {outcome.status}: {outcome.facts['reason']}", markup=False, soft_wrap=True)
        results.note(part.name, outcome.status, begun=begun, load_before=load_before, **outcome.facts)


def write_report(folder: Path, results: Results) -> Path:
    """Draw the charts and write the page; return its path.

    Args:
        folder: Of the report.
        results: What was measured.
    """
    charts: dict[str, list[Chart]] = {}
    for name, part in results.content["parts"].items():
        if part["status"] != MEASURED:
            continue
        for plot in PLOTS.get(name, ()):
            path = f"figures/{plot.name}.png"
            sentence = plot.draw(part["figures"], folder / path)
            charts.setdefault(name, []).append(Chart(title=plot.title, path=path, sentence=sentence))
    page = folder / REPORT_NAME
    titles = {part.name: part.title for part in PARTS}
    page.write_text(render_page(results.content, titles, charts, missing_peers()), "utf-8")
    return page


@dataclass(frozen=True, slots=True)
class _Outcome:
    status: str
    facts: dict[str, Any]


def _run_part(part: Part, plan: Plan) -> _Outcome:
    try:
        prepared = part.prepare(plan)
        with show_progress(part.name, prepared.num_stages) as on_stage:
            return _Outcome(MEASURED, {"figures": prepared.run(on_stage)})
    except ModuleNotFoundError as exc:
        extra = _EXTRAS.get((exc.name or "").partition(".")[0])
        if extra is None:
            return _failure(exc)
        return _Outcome(NOT_MEASURED, {"reason": f"{exc.name} is not installed: pip install 'headrace[{extra}]'"})
    except Exception as exc:  # one bench must not cost the others: it is in the report, and in the exit code
        return _failure(exc)


def _failure(exc: Exception) -> _Outcome:
    reason = str(exc) if isinstance(exc, HeadraceError) else f"{type(exc).__name__}: {exc}"
    return _Outcome(FAILED, {"reason": reason, "traceback": traceback.format_exception(exc)})


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--report {path}: {exc.strerror}") from exc
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--report {path}: not a folder that can be written to")
    return path


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
