"""The command `headrace status`: one screen about a running server."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.paramserver.address import format_address, parse_address
from headrace.paramserver.client import ParamServerClient
from headrace.paramserver.config import DEFAULT_PORT
from headrace.paramserver.security import client_tls_context, load_token
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl
from headrace.schemas.tables import TableSpec

__all__ = ["status"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardStatus:
    """What one shard has answered: `reply` is the IDL's `StatusReply`, or None with the reason in `error`."""

    shard: int
    address: str
    reply: Any = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    """How to get in: TLS context, token and deadline, as for `ParamServerClient`."""

    ssl_context: Any
    token: str | None
    timeout_s: float


def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Host and port of any shard.", show_default=True)
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    timeout_s: Annotated[
        float, typer.Option(help="How long to wait for each shard, seconds.", min=0.1, metavar="SECONDS")
    ] = 5.0,
    tls: Annotated[
        bool, typer.Option("--tls", help="Speak TLS; implied by the other --tls options.", show_default=False)
    ] = False,
    tls_authority: Annotated[
        Path | None,
        typer.Option(
            help="Trust the authorities in this PEM file, not the system's.", metavar="FILE", show_default=False
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Our certificate chain, for mutual TLS.", metavar="FILE", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Our certificate's private key.", metavar="FILE", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token. Also HEADRACE_TOKEN.", metavar="FILE", show_default=False),
    ] = None,
) -> int:
    """Show what a running server holds: its shards, tables and clients.

    Exit code 1 when a shard does not answer.

    Returns:
        0 when every shard has answered, else 1.

    Raises:
        HeadraceError: Nobody answers at the address, or not to us.
    """
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    token = load_token(path=token_file, environ=os.environ)
    has_tls = tls or any((tls_authority, tls_certificate, tls_key))
    access = _Access(
        ssl_context=client_tls_context(authority=tls_authority, certificate=tls_certificate, key=tls_key)
        if has_tls
        else None,
        token=None if token is None else token.reveal(),
        timeout_s=timeout_s,
    )
    shards = asyncio.run(_ask_all(host, port, access))
    if as_json:
        print(json.dumps(_to_json(shards), indent=2))
    else:
        _show(shards, Console())
    return 0 if all(shard.reply is not None for shard in shards) else 1


async def _ask_all(host: str, port: int, access: _Access) -> list[_ShardStatus]:
    """Learn the shards from one of them, then ask each."""
    async with await ParamServerClient.connect(
        host, port, timeout_s=access.timeout_s, ssl_context=access.ssl_context
    ) as client:
        hello = await _hello(client, access)
    return list(await asyncio.gather(*(_ask(shard, access) for shard in sorted(hello.shards, key=lambda s: s.shard))))


async def _ask(shard: Any, access: _Access) -> _ShardStatus:
    address = format_address(shard.host, shard.port)
    try:
        async with await ParamServerClient.connect(
            shard.host, shard.port, timeout_s=access.timeout_s, ssl_context=access.ssl_context
        ) as client:
            await _hello(client, access)
            reply = await client.status(timeout_s=access.timeout_s)
    except HeadraceError as exc:
        return _ShardStatus(shard=shard.shard, address=address, error=str(exc))
    return _ShardStatus(shard=shard.shard, address=address, reply=reply)


async def _hello(client: ParamServerClient, access: _Access) -> Any:
    request = idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.READER,
        run="",
        client="",
        epoch=0,
        rank=0,
        world_size=1,
        tables=[],
        token=access.token,
    )
    return await client.hello(request, timeout_s=access.timeout_s)


def _describe_spec(spec: TableSpec) -> str:
    """Return a table's states in a few characters: `momentum1 float32[1], exp_avg float32[dim]`."""
    return ", ".join(f"{s.name} {s.dtype.name.lower()}[{s.width or 'dim'}]" for s in spec.states) or "none"


def _tables_of(shards: list[_ShardStatus]) -> list[tuple[TableSpec, int]]:
    """Return each table with its rows on all shards that answer."""
    rows: dict[TableSpec, int] = {}
    for shard in shards:
        for table in shard.reply.tables if shard.reply else ():
            spec = spec_from_idl(table.spec)
            rows[spec] = rows.get(spec, 0) + table.num_rows_estimate
    return sorted(rows.items(), key=lambda item: item[0].fqn)


def _clients_of(shards: list[_ShardStatus]) -> list[dict[str, Any]]:
    """Return each client as all shards together see it: its step is the one that every shard has."""
    clients: dict[tuple[str, str, int], dict[str, Any]] = {}
    for shard in shards:
        for client in shard.reply.clients if shard.reply else ():
            key = (client.run, client.client, client.epoch)
            known = clients.setdefault(
                key,
                {
                    "run": client.run,
                    "client": client.client,
                    "epoch": client.epoch,
                    "step": client.step,
                    "is_connected": False,
                },
            )
            known["step"] = min(known["step"], client.step)
            known["is_connected"] = known["is_connected"] or client.is_connected
    return [clients[key] for key in sorted(clients)]


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


def _to_json(shards: list[_ShardStatus]) -> dict[str, Any]:
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
        "clients": _clients_of(shards),
    }


def _show(shards: list[_ShardStatus], console: Console) -> None:
    answered = next((shard.reply for shard in shards if shard.reply), None)
    if answered is not None:
        version, server_id = escape(answered.version), escape(answered.server_id)
        console.print(f"[bold]headrace {version}[/bold]  {len(shards)} shards  store {server_id}")
    # Problems first: they are why somebody looks.
    for shard in shards:
        if shard.error is not None:
            console.print(f"[bold red]shard {shard.shard} does not answer:[/bold red] {escape(shard.error)}")
    console.print(_shards_table(shards))
    tables, clients = _tables_of(shards), _clients_of(shards)
    console.print(_tables_table(tables) if tables else "No tables yet.")
    console.print(_clients_table(clients) if clients else "No writers yet.")


def _table(title: str, *columns: str) -> Table:
    """Return an empty table; a column whose name ends in `>` is of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _shards_table(shards: list[_ShardStatus]) -> Table:
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
            _show_duration(reply.uptime_s),
            f"{reply.log_seq:,}",
            f"{reply.applied_seq:,}",
            _show_size(reply.inflight_bytes),
            f"{reply.num_rows_written:,}",
        )
    return table


def _tables_table(tables: list[tuple[TableSpec, int]]) -> Table:
    table = _table("Tables", "table", "rows>", "of>", "dim>", "dtype", "states")
    for spec, num_rows in tables:
        table.add_row(
            escape(spec.fqn),
            f"{num_rows:,}",
            f"{spec.num_rows:,}" if spec.num_rows else "any",
            str(spec.dim),
            spec.dtype.name.lower(),
            escape(_describe_spec(spec)),
        )
    return table


def _clients_table(clients: list[dict[str, Any]]) -> Table:
    table = _table("Writers", "run", "client", "epoch>", "step>", "")
    for client in clients:
        table.add_row(
            escape(client["run"]),
            escape(client["client"]),
            str(client["epoch"]),
            f"{client['step']:,}" if client["step"] >= 0 else "none",
            "connected" if client["is_connected"] else "away",
        )
    return table


def _show_duration(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _show_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
