"""`headrace bench all`: run every bench and the sweeps, and write a report with tables and charts.

results.json is written anew after each part, and report.md is made from it. A second run with the same directory
continues where the first one stopped. It must measure the same amounts: figures of two scales do not belong into one
report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from headrace import __version__
from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.schemas.extras import install_command
from headrace.scripts.benches.charts import draw_charts
from headrace.scripts.benches.harness import FolderOption, OnStage, check_folder, machine_facts, say, show_progress
from headrace.scripts.benches.peers import missing_peers
from headrace.scripts.benches.report import FAILED, MEASURED, NOT_MEASURED, render_page

__all__ = ["PARTS", "Part", "Results", "all_benches", "choose_parts", "load_average"]

_RESULTS_NAME, _VERSION = "results.json", 1
_PACKAGES = "torch torchrec fbgemm-gpu-cpu numpy rocksdict thriftpy2 grpcio redis hiredis matplotlib"
_TINY_SCALE = 0.05
_START_S = 10  # processes start at any scale
# The extra that brings a module which may be missing.
_EXTRAS = {"torch": "torch", "fbgemm_gpu": "torchrec", "torchrec": "torchrec", "safetensors": "tools", "nats": "nats"}


@dataclass(frozen=True, slots=True)
class Part:
    """A bench or a sweep."""

    name: str  # for `--only` and the results
    title: str
    rounds: int  # its own number, without `--rounds`
    full_s: float  # duration at full scale on two cores, correct to half a minute
    function: str  # `module:function` that measures; imported late, so a report needs only the modules of its parts
    least: dict[str, int] = field(default_factory=dict)  # settings that shrink with the scale, and their least values
    tiny: dict[str, Any] = field(default_factory=dict)  # settings at a very small scale: a sweep has two points
    full: dict[str, Any] = field(default_factory=dict)  # settings at full scale that are not the bench's own

    def make_config(self, scale: float, rounds: int | None, folder: Path | None) -> Any:
        """Return the settings at a scale from 0 to 1; without `rounds`, of the part's own rounds."""
        config_class = get_type_hints(self._function)["config"]
        settings = {each.name: each.default for each in fields(config_class)}
        changes: dict[str, Any] = {"num_rounds": rounds or self.rounds} | self.full
        changes |= self.tiny if scale < _TINY_SCALE else {}
        for name, least in self.least.items():
            changes[name] = _shrink(changes.get(name, settings[name]), scale, least)
        return config_class(**changes, **({"folder": folder} if "folder" in settings else {}))

    def measure(self, config: Any, on_stage: OnStage) -> dict[str, Any]:
        """Measure, and return the figures."""
        return self._function(config, on_stage)

    @property
    def _function(self) -> Callable[[Any, OnStage], dict[str, Any]]:
        function: Callable[[Any, OnStage], dict[str, Any]]
        function = pkgutil.resolve_name(f"headrace.scripts.benches.{self.function}")
        return function

    def expected_s(self, scale: float, rounds: int | None) -> float:
        """Return about how long it will take, seconds."""
        return _START_S + (self.full_s - _START_S) * scale * (rounds or self.rounds) / self.rounds


def _shrink(value: Any, scale: float, least: int) -> Any:
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(_shrink(each, scale, least) for each in value))
    return value * scale if isinstance(value, float) else max(least, round(value * scale))


_FILES = {"num_rows": 5000}

PARTS: tuple[Part, ...] = (
    Part(
        *("ingest", "Ingest", 3, 180, "ingest:measure_ingest"),
        {"num_batches": 4, "num_acked_batches": 2, "num_redis_batches": 1},
    ),
    Part("recovery", "Recovery", 3, 60, "ingest:measure_recovery", {"mebibytes": 4}),
    Part("wire", "Wire", 9, 100, "wire:measure", {"num_writes": 4, "num_reads": 32, "num_idle": 40}),
    Part(
        *("lookup", "Lookup", 3, 180, "lookup:measure"),
        {"num_rows": 10_000, "redis_rows": 10_000, "disk_rows": 10_000, "num_lookups": 5},
    ),
    Part("overhead", "Overhead", 4, 150, "overhead:measure", {"num_steps": 2}),
    Part("freshness", "Freshness", 3, 60, "freshness:measure", {"num_steps": 20}),
    Part("relay", "Relay", 3, 60, "fan_out:measure", {"num_batches": 5, "num_followers": 2}),
    Part(
        *("archive", "Archive and restore from it", 3, 330, "archive:measure"),
        {"num_rows": 10_000, "num_batches": 4, "num_hot_batches": 4, "block_s": 0},
    ),
    Part(
        *("replicated", "Replicated log", 3, 240, "replicated:measure"),
        {"num_batches": 4, "num_lone": 4, "num_failovers": 1},
        full={"num_failovers": 4},  # a hundred take most of an hour
    ),
    Part("reshard", "Partitions that move", 1, 100, "partition_moves:measure", {"num_rows": 20_000}),
    Part("restore", "Restore", 5, 40, "restore:measure", {"num_rows": 5000}),
    Part(
        "dense", "Dense parameters", 3, 160, "dense_cost:measure", {"num_rows": 1000, "width": 16}, {"interval_s": 0.2}
    ),
    Part("backfill", "Backfill", 1, 60, "table_files:measure_backfill", _FILES),
    Part("export", "Export", 1, 60, "table_files:measure_export", _FILES),
    Part("kernels", "Row kernels", 7, 40, "kernels:measure", {"num_rows": 100_000, "step_ids": 1000}),
    Part(
        *("throughput", "Throughput against shards and the width of a row", 3, 420, "sweeps:measure_throughput"),
        {"run_bytes": 2**20, "max_batches": 4},
        {"dims": (16, 128), "shards": (1, 4)},
    ),
    Part(
        *("lag", "Lag against load", 2, 180, "sweeps:measure_lag"),
        {"block_s": 0, "min_batches": 10, "capacity_batches": 40, "num_rows": 20_000},
        {"loads": (0.05, 1.25)},
    ),
    Part(
        *("recovery-size", "Recovery time against the size of the log", 2, 120, "sweeps:measure_sizes"),
        {"mebibytes": 4},
        {"mebibytes": (64, 1024)},
    ),
    Part(
        *("pace", "Lag and step time against the two settings", 2, 350, "overhead:measure_pace"),
        {"num_steps": 2},
        {"max_cost_percents": (1, 100)},
    ),
    Part(
        *("importance", "Bytes and hit rate where rows wait", 3, 300, "importance:measure"),
        {"max_events": 1200},
        {"shares": (0.05, 0.4), "intervals": (2, 16), "staleness_s": (10, 200)},
        {"max_events": 23_466},
    ),
    Part(
        *("cost", "Cost against tables, rows and clients", 2, 240, "sweeps:measure_cost"),
        {"num_batches": 8, "num_steps": 2},
        {"tables": (1, 1000), "rows": (10**5, 10**8), "connections": (1, 64)},
    ),
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

    At full scale this takes about an hour on two idle cores. The report is DIR/report.md, its charts are in
    DIR/figures, and all raw figures in DIR/results.json, which is written after each part: a second run with the same
    DIR measures only what is missing or has failed. A part that fails is reported, the others still run, and the exit
    code is 1.

    Parts: ingest, recovery, wire, lookup, overhead, freshness, relay, archive, replicated, reshard, restore, dense,
    backfill, export and kernels; and the sweeps throughput (against shards and the width of rows), lag (against load),
    recovery-size (against the size of the log), pace (lag and step time against the trainer's two settings),
    importance (bytes and hit rate where rows wait) and cost (against tables, rows and clients).
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {scale:g}: must be above 0 and at most 1")
    parts = choose_parts(only or [])
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"the report's charts need matplotlib: {install_command('bench')}")
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
            return NOT_MEASURED, {"reason": f"{module} is not installed: {install_command(_EXTRAS[module])}"}
        reason = str(exc) if isinstance(exc, HeadraceError) else f"{type(exc).__name__}: {exc}"
        return FAILED, {"reason": reason, "traceback": traceback.format_exception(exc)}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Results:
    """What was measured so far, and the file that keeps it; `content` is the whole JSON."""

    def __init__(self, folder: Path, *, scale: float, rounds: int | None) -> None:
        """Read the results in a report's directory, or begin new ones; without `rounds`, with each part's own.

        Raises:
            ConfigError: The results there have other settings or come from another machine, or are not results.
        """
        self._path = folder / _RESULTS_NAME
        wanted = {"version": _VERSION, "scale": scale, "rounds": rounds, "machine": machine_facts()}
        if not self._path.exists():
            facts = {"processor": _processor(), "packages": _packages(), "begun": _now()}
            self.content: dict[str, Any] = {**wanted, **facts, "load_at_start": load_average(), "parts": {}}
            return
        try:
            self.content = json.loads(self._path.read_text("utf-8"))
            found = {name: self.content[name] for name in wanted}
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"--report {folder}: {_RESULTS_NAME} there is not of this bench: choose another directory"
            ) from exc
        for name, value in wanted.items():
            if found[name] != value:
                raise ConfigError(
                    f"--report {folder}: has figures of {name} {found[name]}, not {value}: choose another directory, "
                    f"or remove its {_RESULTS_NAME}"
                )

    def has(self, name: str) -> bool:
        """Return whether a part is measured."""
        return bool(self.content["parts"].get(name, {}).get("status") == MEASURED)

    @property
    def failed(self) -> list[str]:
        """Parts that failed."""
        return [name for name, part in self.content["parts"].items() if part["status"] == FAILED]

    def add(self, name: str, status: str, *, begun: float, load_before: list[float], **facts: Any) -> None:
        """Add the outcome of a part that began at `begun`, seconds since 1970, and write the file.

        `facts` are `figures` of a `MEASURED` part, otherwise the `reason`.
        """
        load = load_average()
        part = {"status": status, "seconds": time.time() - begun, "load_before": load_before, "load_after": load}
        self.content["parts"][name] = part | facts
        self.content["ended"], self.content["load_at_end"] = _now(), load
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
            os.replace(new, self._path)
        except OSError as exc:
            raise ConfigError(f"--report: {self._path} cannot be written: {exc.strerror}") from exc


def load_average() -> list[float]:
    """Return the load average of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _packages() -> dict[str, str]:
    versions = {"headrace": __version__}
    for name in _PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
    return versions


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
