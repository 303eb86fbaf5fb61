"""The command `headrace replay`: make a server's directory of what update logs hold."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from headrace.paramserver.archive.fetched_logs import fetch_logs
from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.inspection import size_of_log
from headrace.paramserver.replay.source import ReplayRange, ReplaySource, ReplaySummary
from headrace.paramserver.replay.target import Replay, ReplayTarget
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import is_object_store_url
from headrace.paramserver.snapshots.new_data_dir import check_target
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import counted, format_size, visible
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.scripts.commands.log import show_range, show_time
from headrace.scripts.commands.terminal import (
    OnlyModel,
    OnlyTables,
    ProgressBar,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    show_bytes,
)

__all__ = ["replay"]


def replay(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIR|URL",
            help="Directory of a server, of a shard or of a log; or a server's object store, for its archive.",
            show_default=False,
        ),
    ],
    *,
    data: Annotated[Path | None, option("Directory of a new server to make.", "DIR")] = None,
    shards: Annotated[int | None, option("Its shards. Default: 1.", min=1, max=MAX_SHARDS)] = None,
    table: OnlyTables = None,
    model: OnlyModel = None,
    shard: Annotated[
        list[int] | None, option("With a URL: only this shard's log; may be repeated.", "N", "--shard", min=0)
    ] = None,
    from_seq: Annotated[int | None, option("First record, of one shard's log.", min=1)] = None,
    to_seq: Annotated[int | None, option("Last record.", min=1)] = None,
    from_step: Annotated[int | None, option("First step of the trainer.", min=0)] = None,
    to_step: Annotated[int | None, option("Last step.", min=0)] = None,
    since: Annotated[str | None, option("Earliest time: ISO 8601 or seconds since 1970.", "TIME")] = None,
    until: Annotated[str | None, option("Latest time of the trainer.", "TIME")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and end.")] = False,
) -> None:
    """Make the directory of a new server from what update logs hold, or their archive in an object store.

    The source is only read, and its server may be running. Everything in the range is checked before anything is made.
    Rows keep their versions. The directory has its name once it is whole; the same command continues one that was
    interrupted.

    Raises:
        HeadraceError: A flag is wrong, the range is empty, a log is damaged, or the disk failed.
    """
    if data is None and not dry_run:
        raise ConfigError("say where to: --data DIR for a new server, or --dry-run")
    if data is not None:
        _check_destination(path, data)
    if shard is not None and not is_object_store_url(path):
        raise ConfigError("--shard goes with a URL; of a directory name the shard's, such as DIR/shard-0000")
    wanted = ReplayRange(
        from_seq=from_seq,
        to_seq=to_seq,
        from_step=from_step,
        to_step=to_step,
        since_us=_parse_time("--since", since),
        until_us=_parse_time("--until", until),
        tables=frozenset(table or ()),
        model=model,
    )
    with ExitStack() as stack:
        source = _open_source(stack, path, wanted, shard)
        size_bytes = sum(size_of_log(log.path) for log in source.logs)
        with show_bytes("Checking", size_bytes) as bar:
            summary = source.summarize(on_progress=bar.advance)
        console = output_console()
        _print_summary(console, source, summary, is_fetched=is_object_store_url(path))
        if dry_run or data is None:
            return
        work = _replay_into(data, source, shards, size_bytes)
    skipped = f"; {counted(work.num_skipped, 'row')} there from an earlier run of it" if work.num_skipped else ""
    console.print(
        f"{counted(work.num_sent, 'row')} written to --data {data}{skipped}.", highlight=False, soft_wrap=True
    )


def _replay_into(data: Path, source: ReplaySource, shards: int | None, size_bytes: int) -> Replay:
    """Fill a directory beside the new one, served on loopback meanwhile, and give it its name once it is whole."""
    # The same for the same command, which continues it.
    what = repr((sorted(log.log_id for log in source.logs), source.wanted))
    unfinished = data.with_name(f".{data.name}.{hashlib.sha256(what.encode()).hexdigest()[:8]}")
    with _serve(unfinished, shards) as server, show_bytes("Writing", size_bytes) as bar:
        host, port = parse_address(server.address)
        work = Replay(source, ReplayTarget(host=host, port=port))
        asyncio.run(work.run(on_progress=bar.advance))
    os.replace(unfinished, data)
    fsync_path(data.parent)
    return work


def _open_source(stack: ExitStack, path: str, wanted: ReplayRange, shards: list[int] | None) -> ReplaySource:
    """Return the logs in a directory, or of an archive, fetched until the stack is closed."""
    if not is_object_store_url(path):
        return ReplaySource(Path(path), wanted)
    store = ObjectStore.of_url(path)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-replay-")))
    with ExitStack() as fetching:
        bar: ProgressBar | None = None

        def begin(size_bytes: int) -> None:
            nonlocal bar
            bar = fetching.enter_context(show_bytes("Fetching", size_bytes))

        def count(num_bytes: int) -> None:
            assert bar is not None
            bar.advance(num_bytes)

        fetched = fetch_logs(
            store,
            folder,
            shards=shards,
            from_seq=wanted.from_seq,
            to_seq=wanted.to_seq,
            on_size=begin,
            on_progress=count,
        )
    for line in fetched.gaps:
        print_line(f"headrace: {line}", to_stderr=True)
    return ReplaySource(folder, wanted, tables=fetched.tables)


def _check_destination(source: str, data: Path) -> None:
    """Refuse a directory that cannot be made, before a long log is checked."""
    ours, theirs = data.resolve(), Path(source).resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ConfigError(f"--data {data}: that is where the log to replay lies; name another directory")
    check_target(data)


def _serve(data: Path, shards: int | None) -> ServerProcess:
    """Serve a directory on loopback, without TLS."""
    try:
        return ServerProcess.start(data, shards=shards)
    except UnavailableError as exc:
        raise UnavailableError(str(exc).replace("headrace: error: ", "")) from exc  # the server's own prefix


def _parse_time(flag: str, text: str | None) -> int | None:
    """Return microseconds since 1970."""
    if text is None:
        return None
    with suppress(ValueError, OverflowError):
        return round(float(text) * 1e6)
    try:
        when = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(f"{flag} {text!r}: neither ISO 8601, such as 2026-05-01T12:30:00Z, nor seconds") from exc
    try:
        return round(when.timestamp() * 1e6)  # local time without a zone
    except (ValueError, OverflowError) as exc:  # in years 1 and 9999, where a zone may leave the calendar
        raise ConfigError(f"{flag} {text!r}: too far from 1970") from exc


def _print_summary(console: Console, source: ReplaySource, summary: ReplaySummary, *, is_fetched: bool) -> None:
    table = number_table("table", "rows>", "deletes>", "epochs>", "steps>")
    for fqn, found in sorted(summary.tables.items()):
        counts, ranges = (found.num_rows, found.num_deleted), (found.epochs, found.steps)
        table.add_row(escape(fqn), *map(str, counts), *map(show_range, ranges))
    console.print(table)
    for log in source.logs:
        if source.wanted.from_seq is None and log.first_seq > 1:
            name = f"The archive of {log.path.parent.name}" if is_fetched else log.path
            text = f"{name} begins at seq {log.first_seq}: what was written before is not in it, and is not sent."
            console.print(visible(text), highlight=False, markup=False, soft_wrap=True)
    records, logs = counted(summary.num_records, "record"), counted(len(source.logs), "log")
    first, last = map(show_time, summary.times_us or (0, 0))
    text = f"{records}, {format_size(summary.size_bytes)}, of {logs}; trainer's time {first} to {last} UTC."
    console.print(text, highlight=False, soft_wrap=True)
