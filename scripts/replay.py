"""The command `headrace replay`: send what a server's update logs hold to another server, or to the same one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.paramserver.config.data_dir import check_data_dir, is_in_use
from headrace.paramserver.config.server_config import MAX_SHARDS
from headrace.paramserver.log.log_inspect import size_of_log
from headrace.paramserver.metrics.status_client import StatusAccess
from headrace.paramserver.reading.replay import Replay, ReplayTarget
from headrace.paramserver.reading.replay_source import ReplayRange, ReplaySource, ReplaySummary
from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.sizes import format_size
from headrace.scripts.log_command import show_range, show_time
from headrace.scripts.progress_bar import show_bytes
from headrace.scripts.server_flags import Access, with_server_flags

__all__ = ["replay", "target_of"]


@with_server_flags
def replay(
    path: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Directory of a server, of a shard or of a log.", show_default=False),
    ],
    *,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Any shard of a running server.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory that is served for the time of the replay; new or not.", show_default=False
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_SHARDS, help="With --data: shards of a new directory. Default: 1.", show_default=False
        ),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="FQN", help="Only this table; may be repeated.", show_default=False)
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option(min=1, help="First record, of one shard's log.", show_default=False)
    ] = None,
    to_seq: Annotated[int | None, typer.Option(min=1, help="Last record.", show_default=False)] = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="First step of the trainer.", show_default=False)] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Last step.", show_default=False)] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Earliest trainer's time: ISO 8601, or seconds since 1970.", show_default=False
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Latest time.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and end.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Send also what an earlier run of the same replay has delivered.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(help="Give up when a shard is away this long, seconds.", min=0.1, metavar="SECONDS")
    ] = 60.0,
    access: Access,
) -> None:
    """Reapply what update logs hold to a server.

    The source is only read, and its server may be running. Everything in the range is checked before anything is sent.
    Rows keep the version that they had, and are taken only where the target has nothing as new: a replay may be run
    again, beside a trainer too. One that was interrupted goes on where it was.

    Raises:
        ConfigError: A flag is wrong, or there is nothing in the range.
        HeadraceError: A log is damaged, or the target refuses or is away.
    """
    if not dry_run and (server is None) == (data is None):
        raise ConfigError("say where to: --server HOST:PORT of a running server, or --data DIR; or --dry-run")
    if shards is not None and data is None:
        raise ConfigError("--shards goes with --data: a running server has the shards that it has")
    if data is not None and _is_same_place(data, path):
        raise ConfigError(f"--data {data}: that is where the log to replay lies; name another directory")
    if data is not None and not dry_run:
        _check_place(data, shards)  # before a long log is gone through in vain
    wanted = ReplayRange(
        from_seq=from_seq,
        to_seq=to_seq,
        from_step=from_step,
        to_step=to_step,
        since_us=None if since is None else _parse_time("--since", since),
        until_us=None if until is None else _parse_time("--until", until),
        tables=frozenset(table or ()),
    )
    source = ReplaySource(path, wanted)
    target = None
    if server is not None:
        target = target_of(access(server, timeout_s=timeout_s))
        if not dry_run:
            asyncio.run(target.ask())  # for the same reason
    size_bytes = sum(size_of_log(log.path) for log in source.logs)
    with show_bytes("Checking", size_bytes) as bar:
        summary = source.summarize(on_progress=bar.advance)
    console = Console()
    _print_summary(console, source, summary)
    if dry_run:
        return
    with _served(data, shards) as address, show_bytes("Sending", size_bytes) as bar:
        # What is served for this replay is on loopback, and speaks no TLS.
        target = target or dataclasses.replace(target_of(access(address, timeout_s=timeout_s)), ssl_context=None)
        work = Replay(source, target, again=again)
        asyncio.run(work.run(on_progress=bar.advance))
    where = f"--data {data}" if data is not None else server
    skipped = f"; {work.num_skipped} rows were there from an earlier run of it" if work.num_skipped else ""
    console.print(f"{work.num_sent} rows sent and durable at {where}{skipped}.", highlight=False, soft_wrap=True)


def target_of(access: StatusAccess) -> ReplayTarget:
    """Return a server that rows are sent to."""
    return ReplayTarget(
        host=access.host,
        port=access.port,
        ssl_context=access.ssl_context,
        token=access.token,
        timeout_s=access.timeout_s,
    )


@contextmanager
def _served(data: Path | None, shards: int | None) -> Iterator[str]:
    """Serve a directory for this replay, on loopback alone, and yield the address; nothing without one."""
    if data is None:
        yield ""
        return
    try:
        server = ServerProcess.start(data, shards=shards)
    except UnavailableError as exc:
        raise UnavailableError(str(exc).replace("headrace: error: ", "")) from exc  # what it has printed itself
    with server:
        yield server.address


def _check_place(data: Path, shards: int | None) -> None:
    """Check that a server can have the directory.

    Raises:
        HeadraceError: It cannot.
    """
    check_data_dir(data, num_shards=shards)
    if is_in_use(data):
        raise ConfigError(f"--data {data}: a server runs in it; name that with --server")


def _is_same_place(data: Path, path: Path) -> bool:
    target, source = data.resolve(), path.resolve()
    return target == source or target in source.parents or source in target.parents


def _parse_time(flag: str, text: str) -> int:
    """Return microseconds since 1970."""
    try:
        return round(float(text) * 1e6)
    except (ValueError, OverflowError):
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(f"{flag} {text!r}: neither ISO 8601, such as 2026-05-01T12:30:00Z, nor seconds") from exc
    try:
        return round(when.timestamp() * 1e6)  # local time, where it says no zone
    except (ValueError, OverflowError) as exc:  # of the years 1 and 9999, where a zone may lead out of the calendar
        raise ConfigError(f"{flag} {text!r}: too far from 1970") from exc


def _print_summary(console: Console, source: ReplaySource, summary: ReplaySummary) -> None:
    table = Table(box=box.SIMPLE)
    table.add_column("table", overflow="fold")
    for name in ("rows", "deletes", "epochs", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for fqn, found in sorted(summary.tables.items()):
        table.add_row(
            escape(fqn), str(found.num_rows), str(found.num_deleted), show_range(found.epochs), show_range(found.steps)
        )
    console.print(table)
    for log in source.logs:
        if source.wanted.from_seq is None and log.first_seq > 1:
            text = f"{log.path} begins at seq {log.first_seq}: what was written before is not in it, and is not sent."
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    first_us, last_us = summary.times_us or (0, 0)
    console.print(
        f"{summary.num_records} records, {format_size(summary.size_bytes)}, of {len(source.logs)} "
        f"log{'s' * (len(source.logs) > 1)}; trainer's time {show_time(first_us)} to {show_time(last_us)} UTC.",
        highlight=False,
        soft_wrap=True,
    )
