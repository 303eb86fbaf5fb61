"""The command `headrace replay`: send what a server's update logs hold to another server, or to the same one."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from headrace.paramserver.archive.fetched_logs import fetch_logs
from headrace.paramserver.config.data_dir import check_data_dir, is_in_use
from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.inspection import size_of_log
from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.replay.source import ReplayRange, ReplaySource, ReplaySummary
from headrace.paramserver.replay.target import Replay, ReplayTarget
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import is_object_store_url
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import counted, format_size, visible
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.scripts.commands.log import show_range, show_time
from headrace.scripts.commands.terminal import (
    Access,
    OnlyModel,
    OnlyTables,
    ProgressBar,
    ServerOrOtherFlag,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    server_unless,
    show_bytes,
    with_server_flags,
)

__all__ = ["replay", "target_of"]


@with_server_flags
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
    server: ServerOrOtherFlag = None,
    data: Annotated[Path | None, option("Directory to serve meanwhile; may be new.", "DIR")] = None,
    shards: Annotated[int | None, option("Shards of a new --data. Default: 1.", min=1, max=MAX_SHARDS)] = None,
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
    again: Annotated[bool, typer.Option("--again", help="Send also what an earlier run has delivered.")] = False,
    mix_runs: Annotated[
        bool, typer.Option("--mix-runs", help="Send rows also into tables that another run owns there.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Longest absence of a shard.")] = 60.0,
    access: Access,
) -> None:
    """Reapply to a server what update logs hold, or their archive in an object store.

    The source is only read, and its server may be running. Everything in the range is checked before anything is sent.
    Rows keep their versions, and the target takes only rows that are newer than its own. So a replay may be repeated,
    also beside a trainer. An interrupted replay resumes when it is started again.

    Raises:
        HeadraceError: A flag is wrong, the range is empty, a log is damaged, or the target refuses or is away.
    """
    server = server_unless(data, server)
    _check_destination(path, server, data, shards, dry_run=dry_run)
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
    target = None if server is None else target_of(access(server, timeout_s=timeout_s))
    if target is not None and not dry_run:
        asyncio.run(target.ask())  # fail before a long log is checked
    with ExitStack() as stack:
        source = _open_source(stack, path, wanted, shard)
        size_bytes = sum(size_of_log(log.path) for log in source.logs)
        with show_bytes("Checking", size_bytes) as bar:
            summary = source.summarize(on_progress=bar.advance)
        console = output_console()
        _print_summary(console, source, summary, is_fetched=is_object_store_url(path))
        if dry_run:
            return
        if target is None:
            assert data is not None
            address = stack.enter_context(_serve(data, shards)).address
            target = dataclasses.replace(target_of(access(address, timeout_s=timeout_s)), ssl_context=None)
        bar = stack.enter_context(show_bytes("Sending", size_bytes))
        work = Replay(source, target, again=again, mixes_runs=mix_runs)
        asyncio.run(work.run(on_progress=bar.advance))
    where = f"--data {data}" if data is not None else server
    skipped = f"; {counted(work.num_skipped, 'row')} there from an earlier run of it" if work.num_skipped else ""
    sent = counted(work.num_sent, "row")
    console.print(f"{sent} sent and durable at {where}{skipped}.", highlight=False, soft_wrap=True)


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


def target_of(access: StatusAccess) -> ReplayTarget:
    """Return the server to send rows to."""
    (host, port), *others = access.seeds
    return ReplayTarget(
        host=host,
        port=port,
        others=tuple(others),
        ssl_context=access.ssl_context,
        token=access.token,
        timeout_s=access.timeout_s,
    )


def _check_destination(
    source: str, server: str | None, data: Path | None, shards: int | None, *, dry_run: bool
) -> None:
    """Refuse wrong flags, and a directory that cannot be served, before a long log is checked."""
    if not dry_run and (server is None) == (data is None):
        raise ConfigError("say where to: --server HOST:PORT of a running server, or --data DIR; or --dry-run")
    if data is None:
        if shards is not None:
            raise ConfigError("--shards goes with --data: the shards of a running server are fixed")
        return
    ours, theirs = data.resolve(), Path(source).resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ConfigError(f"--data {data}: that is where the log to replay lies; name another directory")
    if not dry_run:
        check_data_dir(data, num_shards=shards)
        if is_in_use(data):
            raise ConfigError(f"--data {data}: a server runs in it; name that with --server")


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
