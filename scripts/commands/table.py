"""The commands `headrace table`: list, describe, grow and drop the tables of a running server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reading.dense_parts import dense_sets
from headrace.paramserver.reading.table_admin import TableAdmin, TableDescription
from headrace.paramserver.system.text import counted, describe_near, format_size
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl
from headrace.schemas.table_lacks import UPDATED_ONLY
from headrace.schemas.table_names import model_of, path_of
from headrace.schemas.tables import TableSpec
from headrace.scripts.commands.status import states_to_json
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    OnlyModel,
    ServerFlag,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    with_server_flags,
)

__all__ = ["table"]

table = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, describe, grow and drop the tables of a running server.",
)

_T = TypeVar("_T")
_Name = Annotated[str, typer.Argument(metavar="TABLE", help="Name, or path that only one model has.")]
_ANSWER_TIMEOUT_S = 10.0
_MAX_DENSE = 20  # shown without --dense


@table.command(name="list")
@with_server_flags
def list_tables(
    *,
    server: ServerFlag = None,
    model: OnlyModel = None,
    dense: Annotated[bool, option(f"All dense tensors, not the first {_MAX_DENSE}.", None, "--dense")] = False,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """List the embedding tables, with their owners, and the dense tensors."""
    found = _ask(access, server, lambda admin: admin.tables(with_dense=True))
    models = {model_of(each.spec.fqn) for each in found}
    found = [each for each in found if model in (None, model_of(each.spec.fqn))]
    if as_json:
        print(json.dumps([_to_json(each) for each in found], indent=2))
        return 0
    if not found:
        print_line("No tables." if model is None else f"No tables of model {model!r}; {describe_near(model, models)}.")
        return 0
    tensors = [each for each in found if each.spec.is_dense]
    if tables := [each for each in found if not each.spec.is_dense]:
        _show_tables(tables)
    if tensors:
        _show_dense(tensors, most=len(tensors) if dense else _MAX_DENSE)
    return 0


def _show_tables(tables: Sequence[TableDescription]) -> None:
    shown = number_table("table", "rows>", "dim>", "type", "stored, about>", "owner")
    for each in tables:
        rows = f"{each.spec.num_rows:,}" if each.spec.num_rows else "virtual"
        name = f"{each.spec.fqn} ({each.lacks})" if each.lacks else each.spec.fqn
        cells = (escape(name), rows, str(each.spec.dim), each.spec.dtype.name.lower())
        shown.add_row(*cells, f"{each.num_rows_estimate:,}", escape(_owner(each)))
    output_console().print(shown)


def _show_dense(tensors: Sequence[TableDescription], *, most: int) -> None:
    parts = dense_sets((each.spec, each.owner_epoch) for each in tensors)
    current = {name for part in parts.values() for name in part}
    shown = number_table("dense tensor", "shape", "type", "bytes>", "states", "owner")
    for each in tensors[:most]:
        spec = each.spec
        name = spec.fqn if spec.fqn in current else f"{spec.fqn} (left from before)"
        states, size = ", ".join(s.name for s in spec.states), f"{spec.num_elements * spec.dtype.size_bytes:,}"
        cells = (_shape(spec), spec.dtype.name.lower(), size, escape(states))
        shown.add_row(escape(name), *cells, escape(_owner(each)))
    output_console().print(shown)
    if rest := tensors[most:]:
        size_bytes = sum(each.spec.num_elements * each.spec.dtype.size_bytes for each in rest)
        print_line(f"and {counted(len(rest), 'more dense tensor')}, {format_size(size_bytes)}: --dense lists all")


@table.command()
@with_server_flags
def describe(name: _Name, *, server: ServerFlag = None, as_json: AsJson = False, access: Access) -> int:
    """Show one table: shape, optimizer states, owner."""
    found = _ask(access, server, lambda admin: admin.describe(name))
    if as_json:
        print(json.dumps(_to_json(found), indent=2))
        return 0
    spec = found.spec
    states = ", ".join(f"{s.name} ({s.kind.name.lower()}, {s.dtype.name.lower()})" for s in spec.states)
    grown = f", has grown {counted(found.num_growths, 'time')}" if found.num_growths else ""
    facts = {
        "table": spec.fqn,
        **({"complete": _why_incomplete(found)} if found.lacks else {}),
        **({"shape": _shape(spec)} if spec.is_dense else {}),
        "rows": (f"{spec.num_rows:,}" if spec.num_rows else "virtual ids") + grown,
        "stored rows": f"about {found.num_rows_estimate:,}",
        "dim": f"{spec.dim} × {spec.dtype.name.lower()}",
        "states": states or "none",
        "identities": "yes" if spec.has_identities else "no",
        "owner": _owner(found),
    }
    for label, text in facts.items():
        print_line(f"{label:<12} {text}")
    return 0


@table.command()
@with_server_flags
def grow(
    name: _Name,
    rows: Annotated[int, typer.Argument(metavar="ROWS", help="How many it will have.", min=1)],
    *,
    server: ServerFlag = None,
    access: Access,
) -> int:
    """Give a table more rows, while training and replicas go on.

    A trainer whose table has more rows does that by itself when it attaches. Here it is done beforehand, for example so
    that a backfill may fill the new rows.
    """
    spec = _ask(access, server, lambda admin: admin.grow(name, rows))
    print_line(f"{spec.fqn} has {counted(spec.num_rows, 'row')}")
    return 0


@table.command()
@with_server_flags
def drop(
    names: Annotated[list[str], typer.Argument(metavar="TABLE...", help="Names, or paths that only one model has.")],
    *,
    server: ServerFlag = None,
    yes: Annotated[bool, option("Do not ask.", None, "--yes", "-y")] = False,
    force: Annotated[
        bool, option("Also if a connected trainer trains it; that trainer ends.", None, "--force")
    ] = False,
    access: Access,
) -> int:
    """Drop tables with all their rows, on the server and in its replicas.

    No restore brings a row back, and no backfill or trainer that runs now. One that starts later may make a table
    of that name anew. Snapshots from before still have it.
    """
    if not yes:
        found = _ask(access, server, lambda admin: _describe_all(admin, names))
        if not sys.stdin.isatty():
            raise ConfigError("dropping tables cannot be undone: say --yes, as there is no terminal to ask")
        for each in found:
            print_line(f"{each.spec.fqn}: about {counted(each.num_rows_estimate, 'row')}, {_owner(each)}")
        if not typer.confirm(f"Drop {'these tables' if len(found) > 1 else 'this table'} for good?"):
            return 1
    dropped = _ask(access, server, lambda admin: admin.drop(names, force=force))
    for fqn in dropped:
        print_line(f"dropped {fqn}")
    return 0


async def _describe_all(admin: TableAdmin, names: Sequence[str]) -> list[TableDescription]:
    return [await admin.describe(name) for name in names]


def _ask(access: Access, server: str | None, ask: Callable[[TableAdmin], Awaitable[_T]]) -> _T:
    async def ask_server(reached: StatusAccess) -> _T:
        async with await TableAdmin.dial(reached.dial(idl.Role.ADMIN), reached.seeds) as admin:
            return await ask(admin)

    return asyncio.run(ask_server(access(server, timeout_s=_ANSWER_TIMEOUT_S)))


def _shape(spec: TableSpec) -> str:
    return " × ".join(map(str, spec.shape or ())) or "scalar"


def _why_incomplete(found: TableDescription) -> str:
    if found.lacks == UPDATED_ONLY:
        return "no: its trainer sends updated rows only"
    who = f"backfill {found.owner}" if found.is_owner_backfill else "its trainer"
    return f"no: {who} has not sent all rows; replicas by step show no row of it before"


def _owner(found: TableDescription) -> str:
    if found.owner is None:
        return "nobody's"
    if found.has_owner_ended:
        return f"run {found.owner}, ended"
    return f"run {found.owner}, {'connected' if found.is_owner_connected else 'not connected'}"


def _to_json(found: TableDescription) -> dict[str, Any]:
    spec = found.spec
    return {
        "fqn": spec.fqn,
        "model": model_of(spec.fqn),
        "path": path_of(spec.fqn),
        "shape": spec.shape and list(spec.shape),
        "num_rows": spec.num_rows,
        "dim": spec.dim,
        "dtype": spec.dtype.name.lower(),
        "states": states_to_json(spec),
        "has_identities": spec.has_identities,
        "num_rows_estimate": found.num_rows_estimate,
        "num_growths": found.num_growths,
        "lacks": found.lacks or None,
        "owner": found.owner,
        "owner_epoch": found.owner_epoch,
        "is_owner_connected": found.is_owner_connected,
        "has_owner_ended": found.has_owner_ended,
    }
