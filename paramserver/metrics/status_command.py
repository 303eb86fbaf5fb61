"""The command `headrace status`: one screen about a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.paramserver.metrics.metrics_problems import Problem, Severity, find_problems
from headrace.paramserver.metrics.metrics_sample import TableSample, WriterSample
from headrace.paramserver.metrics.status_client import (
    DEFAULT_ADDRESS,
    AddressArgument,
    AuthorityFlag,
    CertificateFlag,
    KeyFlag,
    ShardAnswer,
    StatusAccess,
    TimeoutFlag,
    TlsFlag,
    TokenFlag,
    ask_shards,
)
from headrace.paramserver.metrics.status_document import merge_writers
from headrace.schemas.idl import spec_from_idl
from headrace.schemas.sizes import format_size
from headrace.schemas.tables import TableSpec

__all__ = ["show_duration", "show_problem", "status"]


def status(
    address: AddressArgument = DEFAULT_ADDRESS,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    timeout_s: TimeoutFlag = 5.0,
    tls: TlsFlag = False,
    tls_authority: AuthorityFlag = None,
    tls_certificate: CertificateFlag = None,
    tls_key: KeyFlag = None,
    token_file: TokenFlag = None,
) -> int:
    """Show what a running server holds: its problems, shards, tables and clients.

    Exit code 1 when a shard does not answer.

    Returns:
        0 when every shard has answered, else 1.

    Raises:
        HeadraceError: Nobody answers at the address, or not to us.
    """
    access = StatusAccess.load(
        address,
        timeout_s=timeout_s,
        tls=tls,
        tls_authority=tls_authority,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        token_file=token_file,
    )
    shards = asyncio.run(ask_shards(access))
    if as_json:
        print(json.dumps(_to_json(shards), indent=2))
    else:
        _show(shards, Console())
    return 0 if all(shard.reply is not None for shard in shards) else 1


def _tables_of(shards: list[ShardAnswer]) -> list[tuple[TableSpec, int]]:
    """Return each table with its rows on all shards that answer."""
    rows: dict[TableSpec, int] = {}
    for shard in shards:
        for table in shard.reply.tables if shard.reply else ():
            spec = spec_from_idl(table.spec)
            rows[spec] = rows.get(spec, 0) + table.num_rows_estimate
    # A row that was written again may count twice until the store has merged its files.
    known = [(spec, min(num_rows, spec.num_rows or num_rows)) for spec, num_rows in rows.items()]
    return sorted(known, key=lambda item: item[0].fqn)


def _writers_of(shards: list[ShardAnswer]) -> list[WriterSample]:
    return merge_writers(shard.state.sample for shard in shards if shard.state.sample is not None)


_NUMBERS = (
    "pid",
    "uptime_s",
    "log_seq",
    "applied_seq",
    "inflight_bytes",
    "num_connections",
    "num_refused",
    "num_rows_written",
)


def _to_json(shards: list[ShardAnswer]) -> dict[str, Any]:
    answered = next((shard.reply for shard in shards if shard.reply), None)
    return {
        "server_id": answered.server_id if answered else None,
        "version": answered.version if answered else None,
        "shards": [
            {
                "shard": shard.shard,
                "address": shard.address,
                "error": shard.error,
                **{name: getattr(shard.reply, name, None) for name in _NUMBERS},
                "expiry": vars(shard.reply.expiry) if shard.reply and shard.reply.expiry else None,
            }
            for shard in shards
        ],
        "tables": [
            {
                "fqn": spec.fqn,
                "num_rows": spec.num_rows,
                "dim": spec.dim,
                "dtype": spec.dtype.name.lower(),
                "states": [
                    {"name": s.name, "kind": s.kind.name.lower(), "dtype": s.dtype.name.lower(), "width": s.width}
                    for s in spec.states
                ],
                "has_identities": spec.has_identities,
                "num_rows_estimate": num_rows,
            }
            for spec, num_rows in _tables_of(shards)
        ],
        "writers": [dataclasses.asdict(writer) for writer in _writers_of(shards)],
        "problems": [problem.to_json() for problem in find_problems([shard.state for shard in shards])],
        "replica": _replica_to_json(answered.replica) if answered and answered.replica else None,
    }


def _replica_to_json(replica: Any) -> dict[str, Any]:
    numbers = ("shard", "visible_seq", "last_seq", "lag_steps", "delay_p50_s", "delay_p99_s")
    return {
        "is_ready": replica.is_ready,
        "failure": replica.failure,
        "epoch": replica.visible_epoch,
        "step": replica.visible_step,
        "lag_s": replica.lag_s,
        "lag_steps": replica.lag_steps,
        "shards": [{name: getattr(shard, name) for name in numbers} for shard in replica.shards],
        "audit": None if replica.audit is None else vars(replica.audit),
    }


def _show(shards: list[ShardAnswer], console: Console) -> None:
    answered = next((shard.reply for shard in shards if shard.reply), None)
    if answered is not None:
        version, server_id = escape(answered.version), escape(answered.server_id)
        what = "replica of" if answered.replica is not None else f"{len(shards)} shards "
        console.print(f"[bold]headrace {version}[/bold]  {what} store {server_id}")
    # Problems first: they are why somebody looks.
    for problem in find_problems([shard.state for shard in shards]):
        console.print(show_problem(problem))
    tables, writers = _tables_of(shards), _writers_of(shards)
    replica = None if answered is None else answered.replica
    if replica is None:
        console.print(_shards_table(shards))
    else:
        _show_replica(answered, console)
    console.print(_tables_table(tables) if tables else "No tables yet.")
    if replica is None:
        console.print(_writers_table(writers) if writers else "No writers yet.")
        if text := _describe_expiry(shards):
            console.print(text)


def _describe_expiry(shards: list[ShardAnswer]) -> str:
    """Say what expiry of rows has done since the shards began; empty when it has done nothing."""
    found = [shard.reply.expiry for shard in shards if shard.reply and shard.reply.expiry]
    text = ""
    if any(of.num_runs for of in found):
        last = _time(max(of.last_run_us for of in found))
        text = f"Expired {sum(of.num_rows_expired for of in found):,} rows; last run ended {last}."
    if any(of.num_failed for of in found):
        text += f" [bold red]{sum(of.num_failed for of in found)} runs failed.[/bold red]"
    if any(of.is_running for of in found):
        text += f" A run is on its way, at row {sum(of.scanned for of in found):,}."
    return text.strip()


def show_problem(problem: Problem) -> str:
    """Return a problem and what to do about it, in rich's markup."""
    style = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow"}.get(problem.severity, "bold")
    return f"[{style}]{escape(problem.text)}[/{style}]\n  {escape(problem.advice)}"


def _show_replica(reply: Any, console: Console) -> None:
    """Show what a replica tells in the place of a server's shards: it has no log, and nobody writes to it."""
    replica = reply.replica
    if replica.is_ready:
        console.print("[bold green]ready[/bold green]")
        if replica.failure:
            console.print(f"[bold yellow]{escape(replica.failure)}[/bold yellow]", soft_wrap=True)
    else:
        console.print(f"[bold red]not ready:[/bold red] {escape(replica.failure or 'no reason is told')}")
    table = _table("Replica", "pid>", "up>", "connections>", "epoch>", "step>", "behind>", "steps behind>")
    table.add_row(
        str(reply.pid),
        show_duration(reply.uptime_s),
        f"{reply.num_connections:,}",
        str(replica.visible_epoch),
        f"{replica.visible_step:,}" if replica.visible_step >= 0 else "none",
        f"{replica.lag_s:.1f} s",
        str(replica.lag_steps),
    )
    console.print(table)
    table = _table("Follows", "shard>", "visible seq>", "last seq>", "update to visible p50>", "p99>")
    for shard in replica.shards:
        delays = ("" if s is None else f"{s * 1000:.1f} ms" for s in (shard.delay_p50_s, shard.delay_p99_s))
        table.add_row(str(shard.shard), f"{shard.visible_seq:,}", f"{shard.last_seq:,}", *delays)
    if replica.shards:
        console.print(table)
    if replica.audit is not None:
        console.print(_describe_audit(replica.audit), soft_wrap=True)


def _describe_audit(audit: Any) -> str:
    """Say what a replica's last audit of itself has found."""
    text = "Not compared with the server yet."
    if audit.ended_us:
        found = f"[bold red]DIFFERENT: {escape(audit.difference)}[/bold red]" if audit.difference else "equal"
        left_out = f" {audit.num_left_out} tables were left out." if audit.num_left_out else ""
        text = f"Compared with the server at {_time(audit.ended_us)}: {audit.num_rows:,} rows, {found}.{left_out}"
    if audit.failure:
        text += f" [bold yellow]The last audit failed: {escape(audit.failure)}[/bold yellow]"
    return text


def _time(us: int) -> str:
    """Return a moment, microseconds since 1970, for people."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _table(title: str, *columns: str) -> Table:
    """Return an empty table; a column whose name ends in `>` is of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _shards_table(shards: list[ShardAnswer]) -> Table:
    table = _table("Shards", "shard>", "address", "pid>", "up>", "log seq>", "applied>", "in flight>", "rows written>")
    for shard in shards:
        reply = shard.reply
        if reply is None:
            table.add_row(str(shard.shard), escape(shard.address), "no answer", style="red")
            continue
        table.add_row(
            str(shard.shard),
            escape(shard.address),
            str(reply.pid),
            show_duration(reply.uptime_s),
            f"{reply.log_seq:,}",
            f"{reply.applied_seq:,}",
            format_size(reply.inflight_bytes),
            f"{reply.num_rows_written:,}",
        )
    return table


def _tables_table(tables: list[tuple[TableSpec, int]]) -> Table:
    table = _table("Tables", "table", "rows>", "of>", "dim>", "dtype", "states")
    for told in (TableSample.of_spec(spec, num_rows) for spec, num_rows in tables):
        table.add_row(
            escape(told.fqn),
            f"{told.num_rows_estimate:,}",
            f"{told.num_rows:,}" if told.num_rows else "any",
            str(told.dim),
            told.dtype,
            escape(told.states),
        )
    return table


def _writers_table(writers: list[WriterSample]) -> Table:
    table = _table("Writers", "run", "client", "epoch>", "step>", "")
    for writer in writers:
        table.add_row(
            escape(writer.run),
            escape(writer.client),
            str(writer.epoch),
            f"{writer.step:,}" if writer.step >= 0 else "none",
            "connected" if writer.is_connected else "away",
        )
    return table


def show_duration(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"
