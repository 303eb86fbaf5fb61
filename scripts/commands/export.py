"""`headrace export`: write a server's tables and dense tensors at one step to files of a common format."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.snapshots.bucket import is_object_store_url, local_snapshot
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.dense_part import dense_specs
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot, remove_snapshot
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.system.durable import fsync_tree, move_into_place
from headrace.paramserver.system.file_lock import FileLock
from headrace.paramserver.system.text import counted, describe_near, format_size
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.table_lacks import merged_lack, what_lacks
from headrace.schemas.table_names import is_among, model_of, path_of
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    OnlyModel,
    OnlyTables,
    ServerOrOtherFlag,
    option,
    print_line,
    refuse_server_flags,
    server_unless,
    show_bytes,
    show_rows,
    with_server_flags,
)
from headrace.scripts.table_io.exported import ExportConfig, ExportTable, ExportTensor, tensors_of
from headrace.scripts.table_io.source import import_with_extra

__all__ = ["ExportResult", "export", "export_snapshot", "work_folder", "written_aside"]

# For one answer of a shard: a listener that is no server must not take as long as a step may.
_ANSWER_TIMEOUT_S = 10.0
_TIMEOUT_S = 60.0

# The server removes the snapshot of a killed export when nothing of it was fetched for this long, seconds.
_LEASE_S = 3600

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# Format: module and function.
_WRITERS = {
    "safetensors": "safetensors_file:write_safetensors",
    "parquet": "parquet:write_parquet",
    "dcp": "dcp:write_checkpoint",
}
_OF_ROWS = frozenset({"parquet"})  # formats without a place for dense tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What was written."""

    snapshot: str  # name of the exported snapshot
    epoch: int  # of its consistent cut; 0 for none
    step: int  # of its consistent cut; −1 for none
    num_rows: dict[str, int]  # written rows by table; in dense formats all other rows of the range are zeros
    num_dense: dict[str, int]  # written dense tensors by model
    num_left_out: int  # dense tensors that the format has no place for
    lacks: dict[str, str]  # tables of which rows were never sent: `incomplete` or `updated rows only`
    size_bytes: int  # of all files
    seconds: float


@with_server_flags
def export(
    *,
    server: ServerOrOtherFlag = None,
    snapshot: Annotated[
        str | None, option("Directory of one snapshot, or an object store's URL, for its newest.", "DIR|URL")
    ] = None,
    to: Annotated[Path, option("File or directory to make.", "PATH")],
    format_name: Annotated[str, typer.Option("--format", metavar="NAME", help="safetensors, parquet or dcp.")],
    table: OnlyTables = None,
    model: OnlyModel = None,
    rows: Annotated[str | None, option("Row ids A to B − 1; either may be omitted.", "A:B")] = None,
    since_step: Annotated[int | None, option("Only rows last updated at this step or later; parquet.", min=0)] = None,
    since_epoch: Annotated[int | None, option("Epoch of --since-step; by default the snapshot's.", min=1)] = None,
    dtype: Annotated[str | None, option("Weights as fp32, fp16 or int8.", "TYPE")] = None,
    with_states: Annotated[bool, typer.Option("--with-states", help="Include optimizer states.")] = False,
    dense: Annotated[
        bool, typer.Option("--dense/--no-dense", help="Include dense parameters, whole; not in parquet.")
    ] = True,
    weights_key: Annotated[str | None, option("dcp: name of weights; {fqn} by default.", "KEY")] = None,
    state_key: Annotated[
        str | None, option("dcp: name of states; state.{fqn}.{table}.{state} by default.", "KEY")
    ] = None,
    now: Annotated[bool, option("With --server: take each shard as it is, at no common step.", None, "--now")] = False,
    timeout_s: Annotated[
        float | None,
        option("With --server: how long to wait for a step, seconds. Default: 60.", "SECONDS", min=0.1),
    ] = None,
    as_json: AsJson = False,
    access: Access,
) -> None:
    """Write a server's tables and dense parameters, all at one step, to files of a common format.

    With --server, the command makes a snapshot, fetches it and removes it again; training continues. The same rows make
    the same bytes. The file or directory of --to is complete or not made.

    Raises:
        ConfigError: A flag is wrong, or a library is missing.
        HeadraceError: The snapshot is damaged, the server is away, or the disk failed.
    """
    server = server_unless(snapshot, server)
    if (server is None) == (snapshot is None):
        raise ConfigError("say what: --server HOST:PORT of a running server, or --snapshot DIR or URL")
    if server is None:
        refuse_server_flags(access, "a snapshot is cut already, and is here", now=now, timeout_s=timeout_s)
    first_row, end_row = _parse_rows(rows)
    config = ExportConfig(
        first_row=first_row,
        end_row=end_row,
        since_step=since_step,
        since_epoch=since_epoch,
        precision=dtype,
        with_states=with_states,
    )
    options = {name: key for name, key in (("weights_key", weights_key), ("state_key", state_key)) if key is not None}
    _check_format(format_name, config, options)
    _check_place(to.absolute())
    with contextlib.ExitStack() as stack:
        if server is not None:
            timeout_s = timeout_s or _TIMEOUT_S
            dial = access(server, timeout_s=min(timeout_s, _ANSWER_TIMEOUT_S)).dial(idl.Role.ADMIN)
            fetched = _fetched(server, to.absolute(), dial, table, model, at_step=not now, timeout_s=timeout_s)
            folder = stack.enter_context(fetched)
        else:
            assert snapshot is not None
            folder = stack.enter_context(_here(snapshot, to.absolute()))
        with show_rows("Exporting") as bar:
            result = export_snapshot(
                folder,
                to,
                format_name,
                config,
                tables=table,
                model=model,
                has_dense=dense,
                on_progress=bar.update,
                **options,
            )
    _print(to, result, as_json=as_json)


def export_snapshot(
    folder: Path,
    to: Path,
    format_name: str,
    config: ExportConfig,
    *,
    tables: list[str] | None = None,
    model: str | None = None,
    has_dense: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options: str,
) -> ExportResult:
    """Write the tables and dense tensors of a snapshot to a file or a directory, which is complete or not made.

    Dense tensors are whole and in their own type, whatever rows and types are chosen; Parquet leaves them out. What is
    of one model is named as in its `state_dict`, what is of several by whole names.

    Args:
        folder: Directory with `manifest.json`.
        to: File or directory to make.
        format_name: `safetensors`, `parquet` or `dcp`.
        config: Rows and columns to export.
        tables: Only these tables and dense tensors, by name or path; None for all.
        model: Only those of this model; None for all.
        has_dense: False leaves dense tensors out.
        on_progress: Called with (rows so far, estimated number of all rows).
        options: Options of the format.

    Raises:
        ConfigError: There is no such table or snapshot, a model's dense tensors are not of one step, `to` exists, or a
            library is missing.
        CorruptionError: The snapshot is damaged.
        StorageError: The disk failed.

    Thread: any; blocks.
    """
    begin_s = time.perf_counter()
    write = _writer_of(format_name)
    with SnapshotReader(folder) as reader:
        current = dense_specs(reader) if has_dense else {}
        known = {fqn: spec for fqn, spec in reader.tables.items() if not spec.is_dense}
        known |= {fqn: spec for specs in current.values() for fqn, spec in specs.items()}
        chosen = _chosen(reader, known, folder, tables, model)
        of_tables = [fqn for fqn in chosen if not known[fqn].is_dense]
        of_dense = [fqn for fqn in chosen if known[fqn].is_dense]
        if format_name in _OF_ROWS and not of_tables:
            raise ConfigError(f"--format {format_name}: has tables only, and these are dense tensors; take safetensors")
        has_paths = len({model_of(fqn) for fqn in chosen}) == 1
        found = [ExportTable(reader, fqn, config, name=path_of(fqn) if has_paths else fqn) for fqn in of_tables]
        tensors: list[ExportTensor] = []
        for specs in current.values() if format_name not in _OF_ROWS else ():
            if wanted := {fqn: spec for fqn, spec in specs.items() if fqn in of_dense}:
                tensors += tensors_of(reader, wanted, with_states=config.with_states, has_paths=has_paths)
        of_format: dict[str, Any] = {**options, "tensors": tensors} if tensors else {**options}
        total = sum(table.num_rows_estimate for table in found)
        num_rows = 0

        def on_rows(count: int) -> None:
            nonlocal num_rows
            num_rows += count
            on_progress(num_rows, total)

        with written_aside(to) as aside:
            write(aside, found, on_rows=on_rows, **of_format)
        return ExportResult(
            snapshot=reader.manifest.name,
            epoch=reader.manifest.parts[0].epoch,
            step=reader.manifest.parts[0].step,
            num_rows={table.spec.fqn: table.num_rows_read for table in found},
            num_dense=dict(Counter(model_of(tensor.spec.fqn) for tensor in tensors)),
            num_left_out=len(of_dense) - len(tensors),
            lacks=_lacks(reader, of_tables),
            size_bytes=sum(file.stat().st_size for file in (to.rglob("*") if to.is_dir() else [to]) if file.is_file()),
            seconds=time.perf_counter() - begin_s,
        )


def _lacks(reader: SnapshotReader, tables: Collection[str]) -> dict[str, str]:
    """Return which of some tables lack rows that no trainer has sent, and how."""
    catalogs = [Catalog(store.read_meta()) for store in reader.stores]
    found = {fqn: merged_lack(what_lacks(catalog.find(fqn).filling) for catalog in catalogs) for fqn in tables}
    return {fqn: lack for fqn, lack in found.items() if lack}


def _chosen(
    reader: SnapshotReader, known: Collection[str], folder: Path, tables: list[str] | None, model: str | None
) -> list[str]:
    """Return the names of a user's choice among the known ones."""
    models = set(map(model_of, known))
    known = [fqn for fqn in sorted(known) if model in (None, model_of(fqn))]
    if not known:
        of_model = "" if model is None else f" of model {model!r}; {describe_near(model, models)}"
        raise ConfigError(f"{folder}: the snapshot has no tables{of_model}")
    hidden = [fqn for fqn in reader.tables if fqn not in known and reader.tables[fqn].is_dense]
    for wanted in tables or ():
        if any(is_among(fqn, (wanted,)) for fqn in hidden) and not any(is_among(fqn, (wanted,)) for fqn in known):
            raise ConfigError(f"--table {wanted!r}: a dense tensor that --no-dense leaves out, or of an earlier start")
    _check_tables(tables, known, "the snapshot")
    return [fqn for fqn in known if tables is None or is_among(fqn, tables)]


def _check_tables(tables: list[str] | None, known: Collection[str], place: str) -> None:
    for wanted in tables or ():
        if not any(is_among(fqn, (wanted,)) for fqn in known):
            raise ConfigError(f"--table {wanted!r}: no such table in {place}; {describe_near(wanted, known)}")


async def _run_of(server: str, dial: Dial, tables: list[str] | None, model: str | None) -> str | None:
    """Return the run that owns all chosen tables, whose steps count; None for the newest run."""
    async with await EmbeddingReader.connect(
        server,
        model=model,
        timeout_s=2 * dial.timeout_s,  # half of it is for one answer
        ssl_context=dial.ssl_context,
        server_hostname=dial.server_hostname,
        token=dial.token,
        waits=False,
    ) as reader:
        _check_tables(tables, reader.tables, "the server")  # before a snapshot is waited for
        runs = {
            table.owner.run
            for status in await reader.status()
            for table in status.tables
            if table.owner is not None
            and not table.owner.is_backfill
            and table.spec.fqn in reader.tables
            and (tables is None or is_among(table.spec.fqn, tables))
        }
    return runs.pop() if len(runs) == 1 else None


@contextlib.contextmanager
def _here(snapshot: str, to: Path) -> Iterator[Path]:
    """Yield a snapshot's directory; one of an object store is fetched for the block."""
    if not is_object_store_url(snapshot):
        yield Path(snapshot)
        return
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(work_folder(to, "snapshot"))
        with show_bytes("Fetching") as bar:
            folder = stack.enter_context(local_snapshot(snapshot, scratch=scratch, on_progress=bar.update))
        yield folder


@contextlib.contextmanager
def _fetched(
    server: str, to: Path, dial: Dial, tables: list[str] | None, model: str | None, *, at_step: bool, timeout_s: float
) -> Iterator[Path]:
    """Yield the directory of a new snapshot of a server, and remove it on both sides afterwards.

    Its step is one of the run that owns the chosen tables.
    """
    name = f"export-{time.time_ns()}"
    with work_folder(to, "snapshot") as folder:
        run = asyncio.run(_run_of(server, dial, tables, model)) if at_step else None
        asyncio.run(
            create_snapshot(
                server, dial=dial, name=name, at_step=at_step, run=run, timeout_s=timeout_s, lease_s=_LEASE_S
            )
        )
        try:
            with show_bytes("Fetching") as bar:
                asyncio.run(fetch_snapshot(server, folder, dial=dial, name=name, on_progress=bar.update))
        finally:
            try:
                asyncio.run(remove_snapshot(server, name, dial=dial))
            except HeadraceError as exc:
                print_line(f"headrace: snapshot {name!r} stays on the server for an hour: {exc}", to_stderr=True)
        yield folder / name


def _check_format(format_name: str, config: ExportConfig, options: dict[str, str]) -> None:
    _writer_of(format_name)
    if options and format_name != "dcp":
        raise ConfigError(f"--{next(iter(options)).replace('_', '-')} goes with --format dcp")
    if format_name != "parquet" and config.since_step is not None:
        raise ConfigError(
            f"--since-step goes with --format parquet: in {format_name} a row that is left out would be zeros"
        )
    if format_name == "dcp" and (config.precision == "int8" or config.first_row or config.end_row is not None):
        raise ConfigError("--format dcp is for trainers: whole tables of floats; leave --rows and --dtype int8 out")


def _writer_of(format_name: str) -> Callable[..., None]:
    if format_name not in _WRITERS:
        raise ConfigError(f"--format {format_name!r}: one of {', '.join(_WRITERS)}")
    return import_with_extra(_WRITERS[format_name], what=f"--format {format_name}")


def _parse_rows(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    first, sign, end = text.partition(":")
    if not sign or not (first + end).isdecimal():
        raise ConfigError(f"--rows {text!r}: not A:B, such as 0:1000 or 1000:")
    try:
        return int(first or "0"), int(end) if end else None
    except ValueError as exc:  # more digits than Python converts
        raise ConfigError(f"--rows {text[:20]}…: row ids end below 2^63") from exc


def _print(to: Path, result: ExportResult, *, as_json: bool) -> None:
    for fqn, lack in result.lacks.items():
        print_line(
            f"headrace: {fqn} is {lack}: rows that no trainer has sent are not here; where a format has all rows of a "
            "table, they are zeros",
            to_stderr=True,
        )
    if as_json:
        facts = asdict(result)
        facts["tables"] = facts.pop("num_rows")
        facts["dense_tensors"] = facts.pop("num_dense")
        facts["dense_tensors_left_out"] = facts.pop("num_left_out")
        print(json.dumps({"to": str(to), **facts}, indent=2))
        return
    for fqn, num_rows in result.num_rows.items():
        print_line(f"{fqn}: {counted(num_rows, 'row')}")
    for model, num_tensors in result.num_dense.items():
        print_line(f"dense tensors of model {model}: {num_tensors}")
    if result.num_left_out:
        print_line(
            f"{counted(result.num_left_out, 'dense tensor')} left out: take --format safetensors or dcp for them"
        )
    where = f"epoch {result.epoch}, step {result.step}" if result.step >= 0 else "no common step"
    rate = sum(result.num_rows.values()) / max(result.seconds, 1e-9)
    print_line(f"{to}: {format_size(result.size_bytes)} at {where}, in {result.seconds:.1f} s ({rate:,.0f} rows/s)")


def _check_place(target: Path) -> None:
    """Raise ConfigError if a target already exists or its directory does not."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target}: there is something already; nothing is written over, name another place")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {target}: there is no directory {target.parent}")


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path for a new file or directory, and rename it to `target` if the block succeeds.

    A failure leaves nothing behind; the next attempt removes what a killed process left.

    Raises:
        ConfigError: The target exists already, or its place is not writable.
        StorageError: The disk failed; nothing was made.
    """
    target = target.absolute()
    _check_place(target)
    with work_folder(target, "export") as folder, _mapped_errors(target):
        made = folder / target.name
        yield made
        fsync_tree(made)
        _check_place(target)
        move_into_place(made, target)


@contextlib.contextmanager
def work_folder(target: Path, work: str) -> Iterator[Path]:
    """Yield `.NAME.WORK` beside a target: an empty directory for this process only, removed at the end.

    Args:
        target: Absolute path.
        work: Suffix that names the work.

    Raises:
        ConfigError: Another process uses it, or its place is not writable.
        StorageError: The disk failed.
    """
    folder = target.parent / f".{target.name}.{work}"
    with _mapped_errors(target):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)  # a killed process may have left it
        busy = f"--to {target}: another export is making it just now"
        lock = FileLock.acquire(folder, busy=busy, is_directory=True)
    try:
        with _mapped_errors(target):
            for path in folder.iterdir():
                _remove(path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # leftovers do no harm
        lock.close()


@contextlib.contextmanager
def _mapped_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except HeadraceError:
        raise
    except PermissionError as exc:
        raise ConfigError(f"--to {target}: {exc.filename or target.parent} is not writable") from exc
    except OSError as exc:
        full = "the disk is full: " if exc.errno in _FULL else ""
        raise StorageError(f"{target}: {full}{exc.strerror or exc}; nothing was made") from exc


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
