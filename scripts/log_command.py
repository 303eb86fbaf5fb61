"""The command `headrace log`: what the update logs of a server hold, and whether they are whole."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.paramserver.log.log_inspect import LogReport, SegmentReport, find_logs, inspect_log, size_of_log
from headrace.schemas.errors import CorruptionError
from headrace.schemas.sizes import format_size
from headrace.scripts.progress_bar import show_bytes

__all__ = ["log", "show_range", "show_time"]


class _Action(enum.StrEnum):
    INSPECT = "inspect"


def log(
    action: Annotated[
        _Action,
        typer.Argument(
            metavar="inspect", help="Show segments, ranges and sizes, and check every checksum.", show_default=False
        ),
    ],
    path: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Directory of a server, of a shard or of a log.", show_default=False),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> None:
    """Look into update logs.

    Reads only, and takes no lock: the server may be running. The exit code is 1 when something is damaged.

    Raises:
        ConfigError: There is no update log.
        CorruptionError: Something is damaged; all of it has been printed.
        StorageError: A file cannot be read.
    """
    assert action is _Action.INSPECT
    reports = _inspect(find_logs(path))
    if as_json:
        print(json.dumps({"logs": [_to_json(report) for report in reports]}, indent=2))
    else:
        console = Console()
        for report in reports:
            _print_report(console, report)
    found = [line for report in reports for line in report.damage]
    if found:
        raise CorruptionError(found[0] if len(found) == 1 else f"{found[0]}; and {len(found) - 1} more")


def _inspect(paths: list[Path]) -> list[LogReport]:
    with show_bytes("Checking", sum(size_of_log(path) for path in paths)) as bar:
        return [inspect_log(path, on_progress=bar.advance) for path in paths]


def _to_json(report: LogReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "is_whole": not report.damage,
        "damage": report.damage,
        "segments": [asdict(segment) | {"path": segment.path.name} for segment in report.segments],
    }


def _print_report(console: Console, report: LogReport) -> None:
    records = sum(segment.num_records for segment in report.segments)
    size = format_size(sum(segment.size_bytes for segment in report.segments))
    title = escape(str(report.path))
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, collapse_padding=True)
    # In 80 columns nothing is cut: what is too wide goes on in the next line, as a time does behind its date.
    for name in ("seqs", "records", "steps", "epochs", "size"):
        table.add_column(name, justify="right", overflow="fold", no_wrap=name == "size")
    table.add_column("from, UTC", overflow="fold")
    table.add_column("to, UTC", overflow="fold")
    table.add_column("state", no_wrap=True)
    for segment in report.segments:
        table.add_row(*_row(segment))
    console.print(table)
    if not report.damage:
        console.print(f"{records} records, {size}: all checksums are right.\n", highlight=False)
    for line in report.damage:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _row(segment: SegmentReport) -> tuple[str, ...]:
    low_us, high_us = segment.times_us or (None, None)
    state = "damaged" if segment.damage else "open" if segment.sealed_us is None else "sealed"
    return (
        _show_seqs(segment),
        str(segment.num_records),
        show_range(segment.steps),
        show_range(segment.epochs),
        format_size(segment.size_bytes),
        show_time(low_us),
        show_time(high_us),
        f"[red]{state}[/]" if segment.damage else state,
    )


def _show_seqs(segment: SegmentReport) -> str:
    if segment.first_seq is None:
        return "?"
    if segment.last_seq is None or segment.last_seq < segment.first_seq:
        return f"{segment.first_seq}–"  # none yet, or none that can be read
    return show_range((segment.first_seq, segment.last_seq))


def show_range(values: tuple[int, int] | None) -> str:
    """Return the lowest and the highest of some numbers, as text; None when there are none."""
    if values is None:
        return "–"
    low, high = values
    return str(low) if low == high else f"{low}–{high}"


def show_time(time_us: int | None) -> str:
    """Return a time in UTC, given in microseconds since 1970, as text."""
    if time_us is None:
        return "–"
    try:
        return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return str(time_us)  # a client's clock may say anything
