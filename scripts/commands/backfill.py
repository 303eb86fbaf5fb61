"""`headrace backfill`: load rows from files into a running server or into a new server's directory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.snapshots.new_data_dir import StoreBuilder, check_target
from headrace.paramserver.store.catalog import Scalar
from headrace.paramserver.system.durable import owner_only
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.text import counted, first_of
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import TableSpec
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    OnlyTables,
    ProgressBar,
    ServerOrOtherFlag,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    refuse_server_flags,
    server_unless,
    show_rows,
    with_server_flags,
)
from headrace.scripts.table_io.sending import BackfillCounts, BackfillSender, RowPace, ask_server
from headrace.scripts.table_io.server_writer import TargetServer
from headrace.scripts.table_io.source import BackfillConfig, OpenSource

__all__ = ["backfill", "build_directory"]

_CHUNK_BYTES = 8 << 20
_TIMEOUT_S = 60.0
_MOST_NAMED = 20
_Done = tuple[OpenSource, dict[str, BackfillCounts] | None, float]
"""The source; counts by table, None for a dry run; and the seconds for its rows, without imports."""


@with_server_flags
def backfill(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help=".pt, .safetensors or .parquet file, or a directory: a checkpoint of torch.distributed, or "
            ".parquet files.",
            show_default=False,
        ),
    ],
    *,
    server: ServerOrOtherFlag = None,
    data: Annotated[Path | None, option("Directory of a new server to make.", "DIR")] = None,
    shards: Annotated[int | None, option("With --data: shards. Default: 1.", min=1, max=MAX_SHARDS)] = None,
    map_: Annotated[
        list[str] | None,
        option(
            "Use a tensor as this table's weights, or as its state with FQN/STATE; * matches anything.",
            "NAME=FQN",
            "--map",
        ),
    ] = None,
    table: OnlyTables = None,
    model: Annotated[
        str | None,
        option("Model of the tables. Default: the server's table of that path, or the default model.", "MODEL"),
    ] = None,
    rows_per_s: Annotated[float | None, option("With --server: at most this many rows a second.", "N", min=1)] = None,
    zero_states: Annotated[
        bool, typer.Option("--zero-states", help="Fill missing states with zeros, and skip unknown ones.")
    ] = False,
    non_finite: Annotated[
        str, typer.Option(metavar="HOW", help="NaN and infinities: refuse (all), skip (the row) or keep.")
    ] = "refuse",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and write nothing.")] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="With --server: send again what an earlier run of this backfill delivered."),
    ] = False,
    timeout_s: Annotated[
        float | None,
        option(
            "With --server: give up when a shard does not answer for this long, seconds. Default: 60.",
            "SECONDS",
            min=0.1,
        ),
    ] = None,
    as_json: AsJson = False,
    access: Access,
) -> None:
    """Load rows from files into a running server, or into the directory of a new one.

    Every shape and type is checked before the first row is written. A server refuses tables of a trainer that has not
    ended; the same command continues where it was interrupted, unless a trainer has taken a table since. A directory is
    complete or not made. No code in a file is ever run.

    Raises:
        ConfigError: A flag is wrong, a library is missing, or there is nothing to load.
        HeadraceError: The source is damaged or does not fit, the server refuses or is away, or the disk failed.
    """
    server = server_unless(data, server)
    if (server is None) == (data is None):
        raise ConfigError("say where to: --server HOST:PORT of a running server, or --data DIR for a new one")
    if data is None and shards is not None:
        raise ConfigError("--shards goes with --data: a running server has the shards that it has")
    if server is None:
        flags = {"rows_per_s": rows_per_s, "again": again, "timeout_s": timeout_s}
        refuse_server_flags(access, "a directory that is being made serves nobody yet", **flags)
    config = BackfillConfig(
        maps=tuple(map_ or ()),
        tables=None if table is None else tuple(table),
        model=model,
        zero_states=zero_states,
        non_finite=non_finite,
    )
    if data is not None:
        opened, counts, seconds = _fill_directory(
            source, data, config, num_shards=shards or 1, dry_run=dry_run, as_json=as_json
        )
    else:
        target = _target_of(access(server, timeout_s=timeout_s or _TIMEOUT_S))
        opened, counts, seconds = _send(
            source,
            target,
            config,
            rows_per_s=rows_per_s,
            again=again,
            dry_run=dry_run,
            as_json=as_json,
        )
    _report(opened, counts, str(data if data is not None else server), seconds, as_json=as_json)


def _fill_directory(
    path: Path, data: Path, config: BackfillConfig, *, num_shards: int, dry_run: bool, as_json: bool
) -> _Done:
    check_target(data.absolute())
    source = config.open(path, None)
    _name_left_out(source)
    _describe(source, as_json=as_json or not dry_run)
    begin_s = time.perf_counter()
    if dry_run:
        _check_rows(source)
        return source, None, time.perf_counter() - begin_s
    with _show("Writing", source) as bar:
        counts = build_directory(source, data, num_shards=num_shards, on_rows=bar.advance)
    return source, counts, time.perf_counter() - begin_s


def _send(
    path: Path,
    target: TargetServer,
    config: BackfillConfig,
    *,
    rows_per_s: float | None,
    again: bool,
    dry_run: bool,
    as_json: bool,
) -> _Done:
    facts = asyncio.run(ask_server(target))
    source = config.open(path, facts.tables)
    facts.check_owners(table.spec.fqn for table in source.tables)
    _name_left_out(source)
    _name_new_tables(source, facts.tables)
    _describe(source, as_json=as_json or not dry_run)
    begin_s = time.perf_counter()
    _check_rows(source)
    if dry_run:
        return source, None, time.perf_counter() - begin_s
    sender = BackfillSender(
        source,
        target,
        facts,
        again=again,
        pace=RowPace(rows_per_s),
    )
    with _show("Sending", source) as bar:
        asyncio.run(sender.run(on_rows=bar.advance))
    source.check_unchanged()
    return source, sender.counts, time.perf_counter() - begin_s


def build_directory(
    source: OpenSource,
    target: Path,
    *,
    num_shards: int,
    on_rows: Callable[[int], None] = lambda _: None,
) -> dict[str, BackfillCounts]:
    """Make a server's directory from a source, complete or not at all, and return the counts by table.

    REQUIRES: the source was opened for a new target. `on_rows` is called with the number of rows just written.

    Raises:
        ConfigError: The target is not empty.
        NonFiniteError: A row has a NaN or an infinity, and those are refused.
        HeadraceError: The source is damaged, or the disk failed or has no room.

    Thread: any; blocks.
    """
    needed_bytes = sum(
        table.num_rows * RecordLayout(table.spec, table.spec.whole).size_bytes for table in source.tables
    )
    check_room(target, needed_bytes, what="the store")
    counts = {table.spec.fqn: BackfillCounts() for table in source.tables}
    specs = [table.spec for table in source.tables]
    run = f"backfill-{time.time_ns()}"
    with owner_only(), StoreBuilder(target, num_shards=num_shards, specs=specs, run=run) as builder:
        for table in source.tables:
            layout, count = RecordLayout(table.spec, table.spec.whole), counts[table.spec.fqn]
            newest = (0, 0)
            for chunk in table.chunks(_CHUNK_BYTES):
                num_rows = chunk.row_ids.size
                if source.config.non_finite == "refuse":
                    chunk.check_finite(table.spec, layout)
                elif source.config.non_finite == "skip":
                    chunk = chunk.take(chunk.is_finite(layout))
                builder.add(table.spec.fqn, chunk)
                newest = max(newest, chunk.newest_version)
                count.num_written += chunk.row_ids.size
                count.num_refused += num_rows - chunk.row_ids.size
                on_rows(num_rows)
            builder.set_scalars(table.spec.fqn, [Scalar(*scalar, *newest) for scalar in table.scalars])
        source.check_unchanged()
        builder.finish()
    return counts


def _check_rows(source: OpenSource) -> None:
    """Check ids that a file lists, and that all values are finite, before the first row is written."""
    for table in source.tables:
        table.check_ids()
    if source.config.non_finite == "refuse":
        with _show("Checking", source) as bar:
            for table in source.tables:
                layout = RecordLayout(table.spec, table.spec.whole)
                for chunk in table.chunks(_CHUNK_BYTES):
                    chunk.check_finite(table.spec, layout)
                    bar.advance(chunk.row_ids.size)


def _show(what: str, source: OpenSource) -> AbstractContextManager[ProgressBar]:
    return show_rows(what, sum(table.num_rows for table in source.tables))


def _name_new_tables(source: OpenSource, known: Mapping[str, TableSpec]) -> None:
    """Print the tables that a non-empty server does not have yet, because a name may be misspelled."""
    new = [table.spec.fqn for table in source.tables if table.spec.fqn not in known]
    if new and known:
        print_line(f"headrace: new to the server: {first_of(new)}", to_stderr=True)


def _name_left_out(source: OpenSource) -> None:
    """Print what is left out: dense tensors, which a server takes from trainers alone, and what looks like no table.

    And print what is taken for a table only because a rule with `*` matches it.
    """
    if source.dense:
        names = first_of(source.dense)
        print_line(f"headrace: left out, for a trainer to load and publish: dense tensors {names}", to_stderr=True)
    if source.not_taken:
        print_line(
            "headrace: not taken, as they look like layers' weights, with a bias beside them, or optimizer states: "
            f"{first_of(source.not_taken, most=_MOST_NAMED)}; name a table with --table, and map a state with --map "
            "NAME=FQN/STATE",
            to_stderr=True,
        )
    if source.guessed:
        print_line(
            "headrace: taken for tables because a rule with * matches them: "
            f"{first_of(source.guessed, most=_MOST_NAMED)}; a layer without a bias looks the same, and a trainer that "
            "publishes it could not attach: choose the tables with --table",
            to_stderr=True,
        )


def _describe(source: OpenSource, *, as_json: bool) -> None:
    if as_json:
        return
    table = number_table("table", "from", "rows", "dim", "type", "states")
    for found in source.tables:
        spec = found.spec
        states = ", ".join(f"{state.name}:{state.dtype.name.lower()}" for state in spec.states) or "–"
        row = (spec.fqn, found.name, str(found.num_rows), str(spec.dim), spec.dtype.name.lower(), states)
        table.add_row(*map(escape, row))
    output_console().print(table)


def _report(
    source: OpenSource, counts: dict[str, BackfillCounts] | None, where: str, seconds: float, *, as_json: bool
) -> None:
    if as_json:
        print(json.dumps(_to_json(source, counts, where, seconds), indent=2))
        return
    if counts is None:
        num_rows = sum(table.num_rows for table in source.tables)
        print_line(f"{counted(num_rows, 'row')} would go to {where}; nothing was written.")
        return
    for fqn, count in counts.items():
        line = f"{fqn}: {counted(count.num_written, 'row')} written, {count.num_refused:,} refused (NaN or infinite)"
        print_line(
            line
            + (
                f"; {count.num_earlier:,} were there from an earlier run of it (--again sends them anew)"
                if count.num_earlier
                else ""
            )
        )
    num_rows = sum(count.num_written for count in counts.values())
    print_line(f"{where}: {counted(num_rows, 'row')} in {seconds:.1f} s ({num_rows / max(seconds, 1e-9):,.0f} rows/s)")


def _to_json(
    source: OpenSource, counts: dict[str, BackfillCounts] | None, where: str, seconds: float
) -> dict[str, Any]:
    tables: list[dict[str, Any]] = []
    for table in source.tables:
        facts: dict[str, Any] = {"fqn": table.spec.fqn, "from": table.name, "num_rows": table.num_rows}
        if counts is not None:
            facts |= asdict(counts[table.spec.fqn])
        tables.append(facts)
    names = {"left_out": source.dense, "not_taken": source.not_taken, "guessed": source.guessed}
    return {"to": where, "is_dry_run": counts is None, "seconds": seconds, "tables": tables, **names}


def _target_of(access: StatusAccess) -> TargetServer:
    """Return the server to send rows to."""
    (host, port), *others = access.seeds
    return TargetServer(
        host=host,
        port=port,
        others=tuple(others),
        ssl_context=access.ssl_context,
        token=access.token,
        timeout_s=access.timeout_s,
    )
