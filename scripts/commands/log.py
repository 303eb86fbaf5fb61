"""The command `headrace log`: show what the update logs of a server hold, and check them."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.paramserver.log.inspection import LogReport, find_logs, inspect_log, size_of_log
from headrace.paramserver.system.text import counted, format_size, visible
from headrace.schemas.errors import CorruptionError
from headrace.scripts.commands.terminal import escape, output_console, show_bytes

__all__ = ["log", "show_time"]


def log(
    action: Annotated[
        Literal["inspect"], typer.Argument(metavar="inspect", help="Show segments and check every checksum.")
    ],
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a server, of a shard or of a log.", show_default=False)
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> None:
    """Look into update logs.

    Reads only and takes no lock, so the server may be running. The exit code is 1 if something is damaged.

    Raises:
        ConfigError: There is no update log.
        StorageError: A file cannot be read, or something is damaged; then all of it has been printed.
    """
    paths = find_logs(path)
    with show_bytes("Checking", sum(map(size_of_log, paths))) as bar:
        reports = [inspect_log(log, on_progress=bar.advance) for log in paths]
    if as_json:
        print(json.dumps({"logs": [_to_json(report) for report in reports]}, indent=2))
    else:
        for report in reports:
            _print_report(output_console(), report)
    if found := [line for report in reports for line in report.damage]:
        raise CorruptionError(found[0] if len(found) == 1 else f"{found[0]}; and {len(found) - 1} more")


def _to_json(report: LogReport) -> dict[str, Any]:
    segments, damage = [asdict(each) | {"path": each.path.name} for each in report.segments], report.damage
    return {"path": str(report.path), "is_whole": not damage, "damage": damage, "segments": segments}


def _print_report(console: Console, report: LogReport) -> None:
    title = escape(str(report.path))
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, collapse_padding=True)
    # Nothing is truncated in 80 columns: a wide cell continues in the next line, such as a time after its date.
    for name in ("seqs", "records", "steps", "epochs", "size"):
        table.add_column(name, justify="right", overflow="fold", no_wrap=name == "size")
    table.add_column("from, UTC", overflow="fold")
    table.add_column("to, UTC", overflow="fold")
    table.add_column("state", no_wrap=True)
    for segment in report.segments:
        first, last = segment.first_seq, segment.last_seq
        seqs = "?" if first is None else f"{first}–"  # without a record that can be read
        if first is not None and last is not None and last >= first:
            seqs = _show_range((first, last))
        counts = (str(segment.num_records), _show_range(segment.steps), _show_range(segment.epochs))
        times = map(show_time, segment.times_us or (None, None))
        state = "[red]damaged[/]" if segment.damage else "open" if segment.sealed_us is None else "sealed"
        table.add_row(seqs, *counts, format_size(segment.size_bytes), *times, state)
    console.print(table)
    if not report.damage:
        records = sum(segment.num_records for segment in report.segments)
        size = format_size(sum(segment.size_bytes for segment in report.segments))
        console.print(f"{counted(records, 'record')}, {size}: all checksums are right.\n", highlight=False)
    for line in report.damage:
        console.print(visible(line), style="red", markup=False, highlight=False, soft_wrap=True)


def _show_range(values: tuple[int, int] | None) -> str:
    """Return a (least, greatest) pair as text."""
    if values is None:
        return "–"
    return str(values[0]) if values[0] == values[1] else f"{values[0]}–{values[1]}"


def show_time(time_us: int | None) -> str:
    """Return a time in UTC, given in microseconds since 1970, as text."""
    if time_us is None:
        return "–"
    try:
        return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return str(time_us)  # a client's clock may be far off
