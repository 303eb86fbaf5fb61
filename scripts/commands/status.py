"""The command `headrace status`: one screen about a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.paramserver.observe.problems import Problem, Severity, find_problems
from headrace.paramserver.observe.sample import (
    DenseSample,
    ShardSample,
    ShardState,
    TableSample,
    WriterSample,
    all_followers,
    merge_dense,
    merge_tables,
    merge_writers,
)
from headrace.paramserver.observe.status_query import StatusAccess, TimeoutFlag, ask_shards
from headrace.paramserver.system.text import counted, format_seconds, format_size
from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.schemas.table_names import model_of, path_of
from headrace.schemas.tables import TableSpec
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ServerFlag,
    escape,
    number_table,
    option,
    output_console,
    with_server_flags,
)

__all__ = ["show_dense", "show_problem", "show_writer", "states_to_json", "status"]

# The last one says whether the writer is connected.
_WRITER_COLUMNS = ("run", "client", "epoch>", "step>", "age>", "cost>", "bound by", "")
_COUNTERS = ("inflight_bytes", "num_connections", "num_refused", "num_rows_written")
_NUMBERS = ("pid", "uptime_s", "log_seq", "applied_seq", *_COUNTERS, "term")
_UPLOAD_FIELDS = ("url", "name", "is_running", "size_bytes", "done_bytes", "sent_bytes", "failure")
_MAX_FOLLOWERS = 20
_WATCH_S = 2.0
_ANY_WIDTH = 10_000
_NEVER_S = 1e9  # what a follower says that has not heard from its source yet
_REPLICA_NUMBERS = ("shard", "visible_seq", "last_seq", "lag_steps", "age_s", "delay_p50_s", "delay_p99_s")


@with_server_flags
def status(
    *,
    server: ServerFlag = None,
    as_json: AsJson = False,
    watch: Annotated[bool, option("Show it anew every 2 s, with rates, until Ctrl-C.", None, "--watch")] = False,
    timeout_s: TimeoutFlag = 5.0,
    access: Access,
) -> int:
    """Show what a running server holds: its problems, shards, tables and clients.

    Exit code 1 when a shard does not answer.
    """
    reached, console = access(server, timeout_s=timeout_s), output_console()
    if watch:
        if as_json or not console.is_terminal:
            raise ConfigError("--watch: it is for a terminal, and without --json")
        asyncio.run(_watch(reached, console))
    states = asyncio.run(ask_shards(reached))
    if as_json:
        print(json.dumps(_to_json(states), indent=2))
    else:
        _show(states, console)
    return 0 if all(state.sample is not None for state in states) else 1


async def _watch(access: StatusAccess, console: Console) -> None:
    """Show the server until Ctrl-C. One that goes away is shown as it was last, with the reason."""
    states, before, seen_s = await ask_shards(access), {}, time.monotonic()
    rates: dict[int, float] = {}
    failure = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            frame = Console(file=io.StringIO(), width=console.width, force_terminal=True)
            if failure:
                frame.print(f"[bold red]no answer, this is old: {escape(failure)}[/bold red]")
            _show(states, frame, rates)
            assert isinstance(frame.file, io.StringIO)
            live.update(Text.from_ansi(frame.file.getvalue()), refresh=True)
            await asyncio.sleep(_WATCH_S)
            try:
                before, states, failure = _rows_written(states), await ask_shards(access), ""
            except HeadraceError as exc:
                failure = str(exc)
                continue
            now_s = time.monotonic()
            written = _rows_written(states)
            # The counters of another process started at zero.
            both = before.keys() & written.keys()
            rates = {key[0]: (written[key] - before[key]) / (now_s - seen_s) for key in both}
            seen_s = now_s


def _rows_written(states: Sequence[ShardState]) -> dict[tuple[int, int], int]:
    """Return the rows that shards have written, by shard and process id."""
    samples = ((state.shard, state.sample) for state in states)
    return {(shard, sample.pid): sample.num_rows_written for shard, sample in samples if sample is not None}


def _to_json(states: Sequence[ShardState]) -> dict[str, Any]:
    samples = [state.sample for state in states if state.sample is not None]
    first = samples[0] if samples else None
    return {
        "server_id": first and first.server_id,
        "version": first and first.version,
        "shards": [_shard_to_json(state) for state in states],
        "tables": [_table_to_json(table) for table in merge_tables(samples)],
        "dense": [dataclasses.asdict(part) for part in merge_dense(samples)],
        "writers": [dataclasses.asdict(writer) for writer in merge_writers(samples)],
        "followers": [{"shard": shard, **dataclasses.asdict(each)} for shard, each in all_followers(samples)],
        "problems": [problem.to_json() for problem in find_problems(states)],
        "replica": _replica_to_json(first.replica) if first and first.replica else None,
    }


def _shard_to_json(state: ShardState) -> dict[str, Any]:
    head = {name: getattr(state, name) for name in ("shard", "node", "address", "error")}
    numbers = {name: getattr(state.sample, name, None) for name in _NUMBERS}
    parts = {name: getattr(state.sample, name, None) for name in ("expiry", "archive", "log", "following")}
    upload = state.sample.upload if state.sample else None
    return {
        **head,
        **numbers,
        **{name: part and dataclasses.asdict(part) for name, part in parts.items()},
        "upload": upload and {name: getattr(upload, name) for name in _UPLOAD_FIELDS},
    }


def _table_to_json(table: TableSample) -> dict[str, Any]:
    spec = table.spec
    names = {"fqn": spec.fqn, "model": model_of(spec.fqn), "path": path_of(spec.fqn), "owner": table.owner or None}
    shape = {"num_rows": spec.num_rows, "dim": spec.dim, "dtype": table.dtype, "states": states_to_json(spec)}
    rows = {"has_identities": spec.has_identities, "num_rows_estimate": table.num_rows_estimate}
    return {**names, "has_owner_ended": table.has_owner_ended, **shape, **rows, "lacks": table.lacks or None}


def states_to_json(spec: TableSpec) -> list[dict[str, Any]]:
    """Return the optimizer states of a table."""
    return [
        {"name": s.name, "kind": s.kind.name.lower(), "dtype": s.dtype.name.lower(), "width": s.width}
        for s in spec.states
    ]


def _replica_to_json(replica: Any) -> dict[str, Any]:
    return {
        "is_ready": replica.is_ready,
        "failure": replica.failure,
        "epoch": replica.visible_epoch,
        "step": replica.visible_step,
        "lag_s": replica.lag_s,
        "lag_steps": replica.lag_steps,
        "shards": [{name: getattr(shard, name) for name in _REPLICA_NUMBERS} for shard in replica.shards],
        "audit": None if replica.audit is None else vars(replica.audit),
    }


def _show(states: Sequence[ShardState], console: Console, rates: Mapping[int, float] | None = None) -> None:
    samples = [state.sample for state in states if state.sample is not None]
    is_replica = bool(samples) and samples[0].replica is not None
    is_follower = bool(samples) and samples[0].following is not None and samples[0].log is None
    if samples:
        version, server_id = escape(samples[0].version), escape(samples[0].server_id)
        what = "replica of" if is_replica else "follower of" if is_follower else f"{counted(len(states), 'shard')} "
        console.print(f"[bold]headrace {version}[/bold]  {what} store {server_id}")
    # Problems first: they are why somebody looks.
    for problem in find_problems(states):
        console.print(show_problem(problem))
    if is_follower:
        _show_following(states, console)
    if is_replica:
        _show_replica(samples[0], console)
    else:
        _show_shards(states, rates, console)
    tables, writers = merge_tables(samples), merge_writers(samples)
    if tables:
        _show_tables(tables, console)
    else:
        console.print("No tables yet.")
    for part in merge_dense(samples):
        console.print(show_dense(part), soft_wrap=True)
    if not is_replica:
        if writers:
            rows = map(show_writer, writers)
            _print_table(console, "Writers", _WRITER_COLUMNS, rows, least=("bound by", "cost>", "age>"))
        else:
            console.print("No writers yet.")
        _show_followers(samples, console)
        for text in (
            _describe_expiry(samples),
            _describe_log(samples),
            _describe_archive(samples),
            _describe_uploads(samples),
        ):
            if text:
                console.print(text, soft_wrap=True)


def _describe_uploads(samples: Sequence[ShardSample]) -> str:
    """Describe the last snapshot that went to the object store; empty without one."""
    uploads = [sample.upload for sample in samples if sample.upload is not None and sample.upload.name]
    if not uploads:
        return ""
    running = [upload for upload in uploads if upload.is_running]
    name = (running or uploads)[-1].name
    parts = [upload for upload in uploads if upload.name == name]
    size = format_size(sum(upload.size_bytes for upload in parts))
    done, sent = (format_size(sum(getattr(u, f"{what}_bytes") for u in parts)) for what in ("done", "sent"))
    text = f"Snapshot {escape(name)} in {escape(parts[0].url)}: {done} of {size}, {sent} sent"
    text += f" by {counted(len(running), 'shard')} now." if running else "."
    failures = [upload.failure for upload in parts if upload.failure]
    return f"{text} [bold yellow]{escape(failures[0])}[/bold yellow]" if failures else text


def _describe_expiry(samples: Sequence[ShardSample]) -> str:
    """Describe what expiry has done since the shards started; empty if nothing."""
    found = [sample.expiry for sample in samples if sample.expiry is not None]
    text = ""
    if any(of.num_runs for of in found):
        last = _time(max(of.last_run_us for of in found))
        text = f"Expired {counted(sum(of.num_rows_expired for of in found), 'row')}; last run ended {last}."
    if any(of.num_failed for of in found):
        text += f" [bold red]{counted(sum(of.num_failed for of in found), 'run')} failed.[/bold red]"
    if any(of.is_running for of in found):
        text += f" A run is under way, at row {sum(of.scanned for of in found):,}."
    return text.strip()


def _describe_log(samples: Sequence[ShardSample]) -> str:
    """Describe the streams and standbys of replicated logs; empty without one."""
    logs = [(sample, sample.log) for sample in samples if sample.log is not None]
    if not logs:
        return ""
    leaders = sorted({log.leader for _, log in logs if log.leader is not None})
    text = f"The log is in NATS, led by {escape(', '.join(leaders))}." if leaders else "No server leads the log."
    lags = [sample.log_seq - standby.applied_seq for sample, log in logs for standby in log.standbys]
    if not lags:
        return f"{text} No standbys."
    return f"{text} {counted(len(lags), 'standby')}, at most {counted(max(0, *lags), 'record')} behind."


def _describe_archive(samples: Sequence[ShardSample]) -> str:
    """Describe how far the archive is behind; empty without one."""
    found = [sample.archive for sample in samples if sample.archive is not None]
    if not found:
        return ""
    behind_bytes, behind_s = sum(of.behind_bytes for of in found), max(of.behind_s for of in found)
    if not behind_bytes:
        return "All of the log is archived."
    if not any(of.is_late for of in found):
        return f"The log is archived but for the newest {format_size(behind_bytes)}, which the next part brings."
    return f"The archive is {format_seconds(behind_s)} and {format_size(behind_bytes)} behind."


def show_problem(problem: Problem) -> str:
    """Return a problem and its advice in rich's markup."""
    style = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow"}.get(problem.severity, "bold")
    return f"[{style}]{escape(problem.text)}[/{style}]\n  {escape(problem.advice)}"


def _show_replica(sample: ShardSample, console: Console) -> None:
    replica = sample.replica
    if replica.is_ready:
        console.print("[bold green]ready[/bold green]")
        if replica.failure:
            console.print(f"[bold yellow]{escape(replica.failure)}[/bold yellow]", soft_wrap=True)
    else:
        console.print(f"[bold red]not ready:[/bold red] {escape(replica.failure or 'no reason is known')}")
    columns: Sequence[str] = ("pid>", "up>", "connections>", "epoch>", "step>", "behind>", "steps behind>")
    row = (
        str(sample.pid),
        show_duration(sample.uptime_s),
        f"{sample.num_connections:,}",
        str(replica.visible_epoch),
        f"{replica.visible_step:,}" if replica.visible_step >= 0 else "none",
        f"{replica.lag_s:.1f} s",
        str(replica.lag_steps),
    )
    _print_table(console, "Replica", columns, [row], least=("connections>", "up>"))
    rows = []
    for shard in replica.shards:
        delays = ("" if s is None else f"{s * 1000:.1f} ms" for s in (shard.delay_p50_s, shard.delay_p99_s))
        age = "" if shard.age_s is None else show_age(shard.age_s)
        rows.append((str(shard.shard), f"{shard.visible_seq:,}", f"{shard.last_seq:,}", age, *delays))
    if rows:
        columns = ("shard>", "visible seq>", "last seq>", "age>", "update to visible p50>", "p99>")
        _print_table(console, "Follows", columns, rows, least=("p99>", "update to visible p50>"))
    if replica.audit is not None:
        console.print(_describe_audit(replica.audit), soft_wrap=True)


def _describe_audit(audit: Any) -> str:
    text = "Not compared with the server yet."
    if audit.ended_us:
        found = f"[bold red]DIFFERENT: {escape(audit.difference)}[/bold red]" if audit.difference else "equal"
        skipped = f" {counted(audit.num_left_out, 'table')} skipped." if audit.num_left_out else ""
        rows = counted(audit.num_rows, "row")
        text = f"Compared with the server at {_time(audit.ended_us)}: {rows}, {found}.{skipped}"
    if audit.failure:
        text += f" [bold yellow]The last audit failed: {escape(audit.failure)}[/bold yellow]"
    return text


def _time(us: int) -> str:
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, least: Sequence[str] = ()
) -> None:
    """Print a table, and leave out columns of `least`, in this order, until it fits the terminal; name those.

    A row with fewer cells than columns is red: its shard does not answer.
    """
    rows, room, left_out = list(rows), console.options.update(max_width=_ANY_WIDTH), list[str]()
    while True:
        shown = [column for column in columns if column not in left_out]
        table = number_table(*shown, box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        for row in rows:
            cells = (cell for column, cell in zip(columns, row, strict=False) if column not in left_out)
            table.add_row(*cells, style="red" if len(row) < len(columns) else None)
        if len(left_out) == len(least) or console.measure(table, options=room).maximum <= console.width:
            break
        left_out.append(least[len(left_out)])
    console.print(table)
    if left_out:
        names = ", ".join(column.rstrip(">") for column in left_out)
        console.print(f"[dim]No room for {names}: a wider terminal or --json has all.[/dim]")


def _show_shards(states: Sequence[ShardState], rates: Mapping[int, float] | None, console: Console) -> None:
    has_terms = any(state.sample is not None and state.sample.term for state in states)
    has_nodes = any(state.node for state in states)
    columns = ["shard>", *(["node"] if has_nodes else []), "address"]
    columns += ["pid>", "up>", "log seq>", "applied>", "in flight>", "rows written>"]
    columns += ["rows/s>"] if rates is not None else []
    columns += ["term>"] if has_terms else []
    rows: list[Sequence[str]] = []
    for state in states:
        sample = state.sample
        head = [str(state.shard), *([escape(state.node or "")] if has_nodes else []), escape(state.address)]
        if sample is None:
            rows.append([*head, "no answer"])
            continue
        rows.append(
            [
                *head,
                str(sample.pid),
                show_duration(sample.uptime_s),
                f"{sample.log_seq:,}",
                f"{sample.applied_seq:,}",
                format_size(sample.inflight_bytes),
                f"{sample.num_rows_written:,}",
                *([f"{rates[state.shard]:,.0f}" if state.shard in rates else ""] if rates is not None else []),
                *([str(sample.term)] if has_terms else []),
            ]
        )
    _print_table(console, "Shards", columns, rows, least=("in flight>", "applied>", "up>"))


def _show_following(states: Sequence[ShardState], console: Console) -> None:
    columns = ("shard>", "follows", "log seq>", "source seq>", "behind>", "heard>")
    rows: list[Sequence[str]] = []
    for state in states:
        if state.sample is None or (following := state.sample.following) is None:
            continue
        heard_s = following.knowledge_age_ms / 1000
        rows.append(
            (
                *(str(state.shard), escape(following.source), f"{state.sample.log_seq:,}"),
                *(f"{following.source_seq:,}", f"{following.lag_ms / 1000:.1f} s"),
                "never" if heard_s > _NEVER_S else f"{show_duration(heard_s)} ago",
            )
        )
    _print_table(console, "Follows", columns, rows, least=("source seq>", "log seq>"))


def _show_tables(tables: Sequence[TableSample], console: Console) -> None:
    rows = []
    for known in tables:
        size = f"{known.spec.num_rows:,}" if known.spec.num_rows else "any"
        num_rows, dim = f"{known.num_rows_estimate:,}", str(known.spec.dim)
        name = f"{known.spec.fqn} ({known.lacks})" if known.lacks else known.spec.fqn
        owner = f"{known.owner}, ended" if known.has_owner_ended else known.owner
        names = escape(name), escape(known.states), escape(owner)
        rows.append((names[0], num_rows, size, dim, known.dtype, *names[1:]))
    columns = ("table", "rows, about>", "of>", "dim>", "dtype", "states", "owner")
    _print_table(console, "Tables", columns, rows, least=("states", "dtype", "dim>", "of>"))


def _show_followers(samples: Sequence[ShardSample], console: Console) -> None:
    followers = all_followers(samples)
    if not followers:
        console.print("No replica, follower or standby is connected.")
        return
    rows = []
    for shard, each in followers[:_MAX_FOLLOWERS]:
        behind = counted(each.records_behind, "record") if each.records_behind else "current"
        age = "" if each.age_s is None else show_age(each.age_s)
        rows.append((escape(each.name or "unnamed"), escape(each.address), str(shard), behind, age))
    columns = ("name", "address", "shard>", "behind>", "age>")
    _print_table(console, "Followers", columns, rows, least=("address", "age>"))
    if len(followers) > _MAX_FOLLOWERS:
        console.print(f"and {len(followers) - _MAX_FOLLOWERS:,} that are no further behind; --json has all")


def show_writer(writer: WriterSample) -> tuple[str, ...]:
    """Return a row of a table of writers with `_WRITER_COLUMNS`."""
    step = f"{writer.step:,}" if writer.step >= 0 else "none"
    cost = bound = ""
    if writer.cost_percent is not None:
        cost, bound = f"{writer.cost_percent:.1f} %", "max_cost_percent" if writer.is_cost_bound else "freshness_s"
    where = "connected" if writer.is_connected else "ended" if writer.has_ended else "away"
    age = "" if writer.age_s is None else show_age(writer.age_s)
    return escape(writer.run), escape(writer.client), str(writer.epoch), step, age, cost, bound, where


def show_dense(part: DenseSample) -> str:
    """Return a line for a model's dense part in rich's markup."""
    owner = f", owner {escape(part.owner)}" if part.owner else ""
    size = f"{counted(part.num_tensors, 'tensor')}, {format_size(part.size_bytes)}"
    return f"Dense part of {escape(part.model)}: {size}{owner}"


def show_age(seconds: float) -> str:
    """Return an age, with tenths of a second below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else show_duration(seconds)


def show_duration(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"
