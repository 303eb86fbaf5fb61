"""The command `headrace backfill`: rows of files into a running server, or into a directory made for a new one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.paramserver.config.server_config import MAX_SHARDS
from headrace.paramserver.files.disk_room import check_room
from headrace.paramserver.snapshots.new_data_dir import check_target
from headrace.paramserver.snapshots.store_builder import StoreBuilder
from headrace.schemas.errors import ConfigError
from headrace.schemas.near_names import first_of
from headrace.schemas.row_records import MAX_EPOCH, RecordLayout
from headrace.schemas.tables import TableSpec
from headrace.scripts.backfill_send import BackfillCounts, BackfillSender, RowPace, ask_server
from headrace.scripts.progress_bar import ProgressBar, show_rows
from headrace.scripts.replay import target_of
from headrace.scripts.server_flags import Access, with_server_flags
from headrace.scripts.table_sources.naming import Naming
from headrace.scripts.table_sources.open_source import OpenSource, open_source
from headrace.scripts.table_sources.source_table import Versions

__all__ = ["BackfillConfig", "backfill", "build_directory"]

_CHUNK_BYTES = 8 << 20
_NON_FINITE = ("refuse", "skip", "keep")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillConfig:
    """Which rows of a source, and as what.

    Attributes:
        maps: Rules `NAME=FQN` and `NAME=FQN/STATE`.
        tables: Only these, by fqn; None for all.
        epoch: Version of all rows, first half; None keeps what the file says, or is 1.
        step: Second half, where the file says none.
        zero_states: States that the source lacks are zeros.
        non_finite: What becomes of NaN and infinities: `refuse` all, `skip` their rows, or `keep` them.
    """

    maps: tuple[str, ...] = ()
    tables: tuple[str, ...] | None = None
    epoch: int | None = None
    step: int = 0
    zero_states: bool = False
    non_finite: str = "refuse"

    def __post_init__(self) -> None:
        if self.epoch is not None and not 1 <= self.epoch <= MAX_EPOCH:
            raise ConfigError(f"--epoch {self.epoch}: not in 1..{MAX_EPOCH}")
        if self.step < 0:
            raise ConfigError(f"--step {self.step}: below 0")
        if self.non_finite not in _NON_FINITE:
            raise ConfigError(f"--non-finite {self.non_finite!r}: one of {', '.join(_NON_FINITE)}")

    @property
    def numbers(self) -> list[int]:
        """What decides the rows' values besides the files; 0 for an epoch that is the file's."""
        return [self.epoch or 0, self.step, int(self.zero_states)]

    def open(self, path: Path, known: dict[str, Any] | None) -> OpenSource:
        """Open a source; `known` are the target's tables, None for a new one."""
        return open_source(
            path,
            naming=Naming(self.maps),
            wanted=None if self.tables is None else list(self.tables),
            known=known,
            zero_states=self.zero_states,
            versions=Versions(epoch=self.epoch, step=self.step),
        )


@with_server_flags
def backfill(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help=".pt, .safetensors, .npz or .parquet file, or a directory: a checkpoint of torch.distributed, or "
            ".parquet files.",
            show_default=False,
        ),
    ],
    *,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Any shard of a running server.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New directory of a server to make.", show_default=False)
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, max=MAX_SHARDS, help="With --data: its shards. Default: 1.", show_default=False)
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME=FQN",
            help="A tensor of the source is this table's weights, or its state with FQN/STATE; * stands for anything.",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="FQN", help="Only this table; may be repeated.", show_default=False)
    ] = None,
    rows_per_s: Annotated[
        float | None, typer.Option(min=1, metavar="N", help="With --server: no faster than this.", show_default=False)
    ] = None,
    epoch: Annotated[
        int | None,
        typer.Option(metavar="E", help="Version of all rows; by default the file's, or 1.", show_default=False),
    ] = None,
    step: Annotated[int, typer.Option(metavar="S", help="Version of rows that have none.")] = 0,
    zero_states: Annotated[
        bool, typer.Option("--zero-states", help="States that the source lacks are zeros, others are left out.")
    ] = False,
    non_finite: Annotated[
        str, typer.Option(metavar="HOW", help="NaN and infinities: refuse all, skip the row, or keep them.")
    ] = "refuse",
    count: Annotated[
        bool, typer.Option("--count/--no-count", help="With --server: count rows that are newer there.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, say what would be written, and end.")] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="With --server: send also what an earlier run of the same backfill has delivered."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="With --server: give up when a shard is away this long, seconds. Default: 60.",
            min=0.1,
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    access: Access,
) -> None:
    """Bring rows of files into a running server, or make a directory for a new one of them.

    Every shape and type is checked before the first row is written. A server takes a row only where it has nothing
    newer, and the same command goes on where it was interrupted. A directory is there whole or not at all. Nothing in
    a file is ever run.

    Raises:
        ConfigError: A flag is wrong, a library is missing, or there is nothing to bring in.
        HeadraceError: The source is damaged or does not fit, the server refuses or is away, or the disk failed.
    """
    if (server is None) == (data is None):
        raise ConfigError("say where to: --server HOST:PORT of a running server, or --data DIR for a new one")
    if data is None and shards is not None:
        raise ConfigError("--shards goes with --data: a running server has the shards that it has")
    if server is None:
        flags = {"rows_per_s": rows_per_s, "no_count": not count, "again": again, "timeout_s": timeout_s}
        for name, value in {**flags, **getattr(access, "keywords", {})}.items():
            if value:
                told = f"--{name.replace('_', '-')} goes with --server"
                raise ConfigError(f"{told}: a directory that is being made serves nobody yet")
    config = BackfillConfig(
        maps=tuple(map_ or ()),
        tables=None if table is None else tuple(table),
        epoch=epoch,
        step=step,
        zero_states=zero_states,
        non_finite=non_finite,
    )
    begin_s = time.perf_counter()
    if data is not None:
        check_target(data.absolute())
        opened = config.open(source, None)
        _describe(opened, as_json=as_json or not dry_run)
        if dry_run:
            _check_rows(opened, config)
            counts: dict[str, BackfillCounts] | None = None
        else:
            with _show("Writing", opened) as bar:
                counts = build_directory(opened, data, num_shards=shards or 1, config=config, on_rows=bar.advance)
    else:
        assert server is not None
        target = target_of(access(server, timeout_s=timeout_s or _TIMEOUT_S))
        facts = asyncio.run(ask_server(target))
        opened = config.open(source, facts.tables)
        _tell_new_tables(opened, facts.tables)
        _describe(opened, as_json=as_json or not dry_run)
        _check_rows(opened, config)
        counts = None
        if not dry_run:
            sender = BackfillSender(
                opened,
                target,
                facts,
                settings=[
                    *map(list, (config.maps, config.tables or ())),
                    *config.numbers,
                    time.time_ns() if again else 0,
                ],
                skips_non_finite=config.non_finite == "skip",
                counts_kept=count,
                pace=RowPace(rows_per_s),
            )
            with _show("Sending", opened) as bar:
                asyncio.run(sender.run(on_rows=bar.advance))
            opened.check_unchanged()
            counts = sender.counts
    _report(opened, counts, str(data if data is not None else server), time.perf_counter() - begin_s, as_json=as_json)


def build_directory(
    source: OpenSource,
    target: Path,
    *,
    num_shards: int,
    config: BackfillConfig,
    on_rows: Callable[[int], None] = lambda _: None,
) -> dict[str, BackfillCounts]:
    """Make a server's directory of a source, whole or not at all; return what has become of the rows.

    Args:
        source: Opened for a new target.
        target: The directory; not there yet, or empty.
        num_shards: Of the server.
        config: What the source was opened with.
        on_rows: Called with the number of rows that were written since the last call.

    Raises:
        ConfigError: There is something already.
        NonFiniteError: A row has a NaN or an infinity, and they are refused.
        HeadraceError: The source is damaged, or the disk failed or has no room for its rows.

    Thread: any; it blocks.
    """
    needed_bytes = sum(
        table.num_rows * RecordLayout(table.spec, table.spec.whole).size_bytes for table in source.tables
    )
    check_room(target, needed_bytes, what="the store")
    counts = {table.spec.fqn: BackfillCounts() for table in source.tables}
    specs = [table.spec for table in source.tables]
    with StoreBuilder(target, num_shards=num_shards, specs=specs, run=f"backfill-{time.time_ns()}") as builder:
        for table in source.tables:
            layout, count = RecordLayout(table.spec, table.spec.whole), counts[table.spec.fqn]
            for chunk in table.chunks(_CHUNK_BYTES):
                num_rows = chunk.row_ids.size
                if config.non_finite == "refuse":
                    chunk.check_finite(table.spec, layout)
                elif config.non_finite == "skip":
                    chunk = chunk.take(chunk.is_finite(layout))
                builder.add(table.spec.fqn, chunk)
                count.num_written += chunk.row_ids.size
                count.num_refused += num_rows - chunk.row_ids.size
                on_rows(num_rows)
        source.check_unchanged()
        builder.finish()
    return counts


def _check_rows(source: OpenSource, config: BackfillConfig) -> None:
    """Read what has to be known before the first row is written: ids that a file lists, and whether all is finite."""
    for table in source.tables:
        table.check_ids()
    if config.non_finite == "refuse":
        with _show("Checking", source) as bar:
            for table in source.tables:
                layout = RecordLayout(table.spec, table.spec.whole)
                for chunk in table.chunks(_CHUNK_BYTES):
                    chunk.check_finite(table.spec, layout)
                    bar.advance(chunk.row_ids.size)


def _show(what: str, source: OpenSource) -> AbstractContextManager[ProgressBar]:
    return show_rows(what, sum(table.num_rows for table in source.tables))


def _tell_new_tables(source: OpenSource, known: Mapping[str, TableSpec]) -> None:
    """Say which tables a server does not have that has others: a name may be misspelled."""
    new = [table.spec.fqn for table in source.tables if table.spec.fqn not in known]
    if new and known:
        print(f"headrace: new to the server: {first_of(new)}", file=sys.stderr)


def _describe(source: OpenSource, *, as_json: bool) -> None:
    if as_json:
        return
    table = Table(box=box.SIMPLE)
    for name in ("table", "from", "rows", "dim", "type", "states"):
        table.add_column(name)
    for found in source.tables:
        spec = found.spec
        states = ", ".join(f"{state.name}:{state.dtype.name.lower()}" for state in spec.states) or "–"
        row = (spec.fqn, found.name, str(found.num_rows), str(spec.dim), spec.dtype.name.lower(), states)
        table.add_row(*map(escape, row))
    Console().print(table)


def _report(
    source: OpenSource, counts: dict[str, BackfillCounts] | None, where: str, seconds: float, *, as_json: bool
) -> None:
    if as_json:
        print(json.dumps(_to_json(source, counts, where, seconds), indent=2))
        return
    if counts is None:
        print(f"{sum(table.num_rows for table in source.tables)} rows would go to {where}; nothing was written.")
        return
    for fqn, count in counts.items():
        line = f"{fqn}: {count.num_written} rows written, {count.num_kept} kept (newer there)"
        line += f", {count.num_refused} refused (NaN or infinite)"
        print(line + (f"; {count.num_earlier} were there from an earlier run of it" if count.num_earlier else ""))
    num_rows = sum(count.num_written for count in counts.values())
    print(f"{where}: {num_rows} rows in {seconds:.1f} s ({num_rows / max(seconds, 1e-9):,.0f} rows/s)")


def _to_json(
    source: OpenSource, counts: dict[str, BackfillCounts] | None, where: str, seconds: float
) -> dict[str, Any]:
    tables: list[dict[str, Any]] = []
    for table in source.tables:
        facts: dict[str, Any] = {"fqn": table.spec.fqn, "from": table.name, "num_rows": table.num_rows}
        if counts is not None:
            facts |= asdict(counts[table.spec.fqn])
        tables.append(facts)
    return {"to": where, "is_dry_run": counts is None, "seconds": seconds, "tables": tables}
