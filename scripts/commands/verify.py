"""`headrace verify`: compare digests of a server's rows with another server's, with saved ones or with a snapshot's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from headrace.paramserver.reading.differences import (
    differing_rows,
    first_differing_rows,
    for_each_table,
    rows_that_differ,
)
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.snapshots.bucket import is_object_store_url, local_snapshot
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.system.durable import write_file
from headrace.paramserver.system.text import counted, describe_near, format_seconds
from headrace.schemas.errors import ConfigError, RequestError, UnavailableError
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest
from headrace.schemas.row_records import FLAG_DELETED, RecordLayout
from headrace.schemas.snapshot_manifest import MANIFEST_NAME
from headrace.schemas.table_names import is_among, model_of
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    OnlyModel,
    OnlyTables,
    ProgressBar,
    ServerFlag,
    option,
    show_bytes,
    show_rows,
    with_server_flags,
)

__all__ = ["verify"]

_FORMAT = "headrace digests"
_FORMAT_VERSION = 1
_MAX_NAMED = 10

_Ids = npt.NDArray[np.int64]
_Saved = tuple[int, dict[int, tuple[int, int]]]  # a table's fingerprint, and (digest, number of rows) by bucket


@dataclass(kw_only=True, slots=True)
class _TableResult:
    """The result for one table."""

    fqn: str
    digest: TableDigest | None = None  # of the first server's rows; None if it has no such table
    is_steady: bool = True  # nothing was written meanwhile
    left_out: str | None = None  # why a replica has no digest of the table
    problem: str | None = None  # why the table cannot be compared
    differing: list[int] | None = None  # buckets; None if nothing was compared
    row_ids: list[int] = field(default_factory=list)  # the first rows that differ, if both sides are servers

    @property
    def is_equal(self) -> bool:
        return self.problem is None and not self.differing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """One side of a comparison."""

    reader: EmbeddingReader  # connected to it
    is_replica: bool  # it has weights only
    may_leave_out: bool  # the user named no tables, so those without a digest on a replica are skipped

    async def digest(self, result: _TableResult, *, only_weights: bool, on_progress: _Progress) -> TableDigest | None:
        """Return the digest of a table; None if this replica has none, with the reason in the result."""
        try:
            digest = await self.reader.digest(result.fqn, only_weights=only_weights, on_progress=on_progress)
        except RequestError as exc:
            if not (self.is_replica and self.may_leave_out):
                raise
            result.left_out = str(exc)
            return None
        result.is_steady &= digest.is_steady
        return digest


@with_server_flags
def verify(
    *,
    server: ServerFlag = None,
    against: Annotated[
        str | None,
        option(
            "Compare with another server, saved digests, a snapshot's directory, or the newest in an object store.",
            "HOST:PORT|FILE|DIR|URL",
        ),
    ] = None,
    save: Annotated[Path | None, option("Save the digests to this file.", "FILE")] = None,
    table: OnlyTables = None,
    model: OnlyModel = None,
    as_json: AsJson = False,
    timeout_s: Annotated[
        float, typer.Option(help="Give up after this long without an answer, seconds.", min=0.1, metavar="SECONDS")
    ] = 600.0,
    access: Access,
) -> int:
    """Compute digests of all rows of a server, and compare them with another server's, or with those of a snapshot.

    A digest covers each row's id, weights and optimizer states, but not its version. If either side is a replica, it
    covers weights only. To compare a running trainer with its server, call `streamer.audit()`. The exit code is 1 if
    something differs.
    """
    if save is not None:
        _check_place(save)
    reached = access(server, timeout_s=timeout_s)
    saved = None if against is None else _saved_in(against)
    if saved is not None:
        saved = {fqn: found for fqn, found in saved.items() if model in (None, model_of(fqn))}
    begin_s, reach_log = time.perf_counter(), OutageLog()
    connect = partial(
        EmbeddingReader.connect,
        model=model,
        ssl_context=reached.ssl_context,
        token=reached.token,
        waits=False,
        reach_log=reach_log,
    )

    async def compare(bar: ProgressBar) -> list[_TableResult]:
        async with asyncio.timeout(timeout_s) as deadline, await connect(reached.address) as reader:
            progress = _Progress(bar, deadline, timeout_s)
            side = await progress.begin(reader, table)
            if against is None or saved is not None:
                results = await _digest_all(side, table, saved, progress)
            else:
                async with await _connect_to_other(connect, against) as other:
                    results = await _compare_servers(side, await progress.begin(other, table), table, progress)
            if not results and model is not None:
                raise ConfigError(f"--model {model!r}: has no tables here; {describe_near(model, progress.models)}")
            return results

    try:
        with show_rows("Adding up") as bar:
            results = asyncio.run(compare(bar))
    except TimeoutError as exc:
        why = reach_log.trouble() or "give it more with --timeout-s"
        raise ConfigError(f"nothing has come for {format_seconds(timeout_s)}: {why}") from exc
    seconds = time.perf_counter() - begin_s
    try:
        if save is not None:
            _save(save, results)
    finally:  # print the result even if the digests cannot be saved
        if as_json:
            typer.echo(json.dumps(_to_json(results, seconds), indent=2))
        else:
            typer.echo("\n".join(_lines(results, seconds, is_compared=against is not None)))
    if results and all(result.left_out for result in results):
        raise ConfigError("nothing was compared: every table was left out")
    return 0 if all(result.is_equal for result in results) else 1


async def _connect_to_other(connect: Callable[[str], Awaitable[EmbeddingReader]], against: str) -> EmbeddingReader:
    try:
        return await connect(against)
    except (ConfigError, UnavailableError) as exc:
        what = "" if ":" in against else "no such file, nor a server of that name: "
        raise type(exc)(f"--against {against}: {what}{exc}") from exc


class _Progress:
    """Shows the number of digested rows, and moves the deadline on each report, so that a large store gets its time."""

    def __init__(self, bar: ProgressBar, deadline: asyncio.Timeout, timeout_s: float) -> None:
        self._bar, self._deadline, self._timeout_s = bar, deadline, timeout_s
        self._done = self._total = 0
        self.models: set[str] = set()  # of all tables of the sides, whatever the user wants

    async def begin(self, reader: EmbeddingReader, only: list[str] | None) -> _Side:
        """Add a server's rows to the total, and return it as a side."""
        shards = await reader.status()
        told = [table for status in shards for table in status.tables]
        self.models.update(model_of(table.spec.fqn) for table in told)
        tables = [table for table in told if table.spec.fqn in reader.tables]
        wanted = [table for table in tables if only is None or is_among(table.spec.fqn, only)]
        self._total += sum(table.num_rows_estimate for table in wanted)
        is_replica = any(status.replica is not None for status in shards)
        return _Side(reader=reader, is_replica=is_replica, may_leave_out=only is None)

    def __call__(self, num_rows: int) -> None:
        self._done += num_rows
        self._total = max(self._total, self._done)  # the total is an estimate
        self._bar.update(self._done, self._total)
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


async def _digest_all(
    side: _Side, only: list[str] | None, saved: dict[str, _Saved] | None, progress: _Progress
) -> list[_TableResult]:
    reader = side.reader

    async def digest(fqn: str) -> _TableResult:
        result = _TableResult(fqn=fqn)
        if fqn not in reader.tables:
            result.problem = "not on the server"
            return result
        result.digest = await side.digest(result, only_weights=side.is_replica, on_progress=progress)
        if saved is not None and result.digest is not None:
            _compare_saved(result, result.digest, saved.get(fqn))
        return result

    fqns = _chosen(reader.tables.keys() | (saved or {}).keys(), only)
    return await for_each_table(fqns, digest, num_rows_of=partial(_num_rows_of, reader))


def _compare_saved(result: _TableResult, digest: TableDigest, saved: _Saved | None) -> None:
    if saved is None:
        result.problem = "not in the file"
        return
    fingerprint, buckets = saved
    if fingerprint != digest.spec.fingerprint:
        result.problem = "another shape, type or set of states than in the file"
    else:
        before = TableDigest(spec=digest.spec, columns=digest.columns, buckets=buckets)
        result.differing = digest.differing_buckets(before)


async def _compare_servers(
    first: _Side, second: _Side, only: list[str] | None, progress: _Progress
) -> list[_TableResult]:
    only_weights = first.is_replica or second.is_replica
    # A replica has its server's id.
    server_ids = {side.reader.links[0].hello.server_id for side in (first, second)}
    is_replica_of = only_weights and len(server_ids) == 1
    tables, other_tables = first.reader.tables, second.reader.tables

    async def compare(fqn: str) -> _TableResult:
        result = _TableResult(fqn=fqn)
        missing = [which for which, of in (("first", tables), ("second", other_tables)) if fqn not in of]
        if missing:
            side = first if missing[0] == "first" else second
            if side.is_replica and side.may_leave_out:
                result.left_out = "the replica does not keep it"
            else:
                result.problem = f"not on the {missing[0]} server"
            return result
        specs = [of[fqn].of_weights if only_weights else of[fqn] for of in (tables, other_tables)]
        if difference := specs[0].describe_difference(specs[1]):
            result.problem = difference
            return result
        ours, theirs = await asyncio.gather(
            *(side.digest(result, only_weights=only_weights, on_progress=progress) for side in (first, second))
        )
        if ours is None or theirs is None:
            return result
        if is_replica_of:  # it counts its server's records
            result.is_steady &= sum(ours.seqs.values()) == sum(theirs.seqs.values())
        result.digest, result.differing = ours, ours.differing_buckets(theirs)
        result.row_ids = await first_differing_rows(
            result.differing,
            lambda bucket: _differing_in(first.reader, second.reader, fqn, bucket, only_weights=only_weights),
            limit=_MAX_NAMED,
        )
        return result

    fqns = _chosen(tables.keys() | other_tables.keys(), only)
    return await for_each_table(fqns, compare, num_rows_of=partial(_num_rows_of, first.reader))


def _num_rows_of(reader: EmbeddingReader, fqn: str) -> int:
    return reader.tables[fqn].num_rows if fqn in reader.tables else 0


async def _differing_in(
    first: EmbeddingReader, second: EmbeddingReader, fqn: str, bucket: int, *, only_weights: bool
) -> _Ids:
    """Return the rows of a bucket that differ or that only one server has."""
    first_row, end_row = bucket * BUCKET_ROWS, (bucket + 1) * BUCKET_ROWS

    async def present_rows(reader: EmbeddingReader) -> _Ids:
        digest = await reader.digest(
            fqn, first_row=first_row, end_row=end_row, with_presence=True, only_weights=only_weights
        )
        return digest.present_rows(bucket)

    async def compare(row_ids: _Ids) -> npt.NDArray[np.bool_]:
        ours, theirs = await asyncio.gather(
            first.get(fqn, row_ids, with_states=not only_weights),
            second.get(fqn, row_ids, with_states=not only_weights),
        )
        return rows_that_differ(_columns(ours), _columns(theirs))

    ours, theirs = await present_rows(first), await present_rows(second)
    in_both = await differing_rows(np.intersect1d(ours, theirs, assume_unique=True), compare)
    return np.union1d(np.setxor1d(ours, theirs, assume_unique=True), in_both)


def _columns(rows: Rows) -> list[npt.NDArray[Any]]:
    return [rows.presence, rows.weights, *rows.states.values()]


def _chosen(fqns: set[str], only: list[str] | None) -> list[str]:
    """Return the tables to compare; raise ConfigError for a name that no side has a table of."""
    for name in only or ():
        if not any(is_among(fqn, (name,)) for fqn in fqns):
            raise ConfigError(f"--table {name!r}: no such table here; {describe_near(name, fqns)}")
    return sorted(fqn for fqn in fqns if only is None or is_among(fqn, only))


def _target_of(path: Path) -> tuple[Path, bool]:
    """Return a path's target, and whether it is a device or a pipe, whose name in /proc resolves to no file."""
    is_device = path.exists() and not path.is_file()
    return (path if is_device else path.resolve()), is_device


def _check_place(path: Path) -> None:
    """Check that the digests can be written, before reading all rows."""
    try:
        target, is_device = _target_of(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not is_device:
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as exc:
        raise ConfigError(f"--save {path}: {exc.strerror}") from exc


def _save(path: Path, results: list[_TableResult]) -> None:
    tables = [
        {
            "fqn": result.fqn,
            "fingerprint": result.digest.spec.fingerprint,
            "buckets": [
                [bucket, f"{digest:016x}", count] for bucket, (digest, count) in sorted(result.digest.buckets.items())
            ],
        }
        for result in results
        if result.digest is not None
    ]
    text = json.dumps({"format": _FORMAT, "version": _FORMAT_VERSION, "bucket_rows": BUCKET_ROWS, "tables": tables})
    target, is_device = _target_of(path)
    try:
        if is_device:
            target.write_text(text + "\n", "utf-8")
        else:
            write_file(target, f"{text}\n".encode(), aside=target.with_name(f"{target.name}.new"))
    except OSError as exc:
        raise ConfigError(f"--save {path}: {exc.strerror}") from exc


def _saved_in(place: str) -> dict[str, _Saved] | None:
    """Return the digests that are saved in a file, or of the rows in a snapshot; None if the place is neither."""
    if is_object_store_url(place):
        with show_bytes("Fetching") as bar, local_snapshot(place, on_progress=bar.update) as folder:
            return _digest_snapshot(folder)
    if (Path(place) / MANIFEST_NAME).is_file():
        return _digest_snapshot(Path(place))
    return _load(Path(place)) if Path(place).is_file() else None


def _digest_snapshot(folder: Path) -> dict[str, _Saved]:
    saved: dict[str, _Saved] = {}
    with SnapshotReader(folder) as reader, show_rows("Adding up the snapshot") as bar:
        num_rows, total = 0, sum(map(reader.num_rows_estimate, reader.tables))
        for fqn, spec in reader.tables.items():
            layout, digest = RecordLayout(spec, spec.whole), TableDigest(spec=spec, columns=spec.whole)
            for ids, records in reader.rows(fqn):
                is_there = (records["flags"] & FLAG_DELETED) == 0
                records = records[is_there]
                columns = [
                    np.ascontiguousarray(records[field]).view(of.dtype.numpy).reshape(records.size, of.width)
                    for field, of in layout.columns.items()
                ]
                digest.add_rows(ids[is_there], columns)
                num_rows += ids.size
                bar.update(num_rows, max(total, num_rows))
            saved[fqn] = spec.fingerprint, digest.buckets
    return saved


def _load(path: Path) -> dict[str, _Saved]:
    try:
        content = json.loads(path.read_text("utf-8"))
        if (content["format"], content["version"], content["bucket_rows"]) != (_FORMAT, _FORMAT_VERSION, BUCKET_ROWS):
            raise ConfigError(f"{path} has digests of another format or version")
        return {
            table["fqn"]: (
                int(table["fingerprint"]),
                {int(bucket): (int(digest, 16), int(count)) for bucket, digest, count in table["buckets"]},
            )
            for table in content["tables"]
        }
    except (ArithmeticError, OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ConfigError(f"{path} is no file that --save has made") from exc


def _lines(results: list[_TableResult], seconds: float, *, is_compared: bool) -> Iterator[str]:
    for result in results:
        digest = result.digest
        text = f"{result.fqn}: "
        text += f"{counted(digest.num_rows, 'row')}, digest {digest.total:016x}" if digest is not None else "no digest"
        if result.left_out is not None:
            text = f"{result.fqn}: left out: {result.left_out}"
        elif result.problem is not None:
            text += f"; DIFFERENT: {result.problem}"
        elif result.differing:
            ranges = [f"{bucket * BUCKET_ROWS}–{(bucket + 1) * BUCKET_ROWS - 1}" for bucket in result.differing]
            text += f"; DIFFERENT in {counted(len(ranges), 'bucket')}: rows {', '.join(ranges[:_MAX_NAMED])}"
            text += ", …" if len(ranges) > _MAX_NAMED else ""
            text += f"; first {', '.join(map(str, result.row_ids))}" if result.row_ids else ""
        elif is_compared:
            text += "; equal"
        if not result.is_steady:
            text += "; written to meanwhile"
        yield text
    num_rows = sum(result.digest.num_rows for result in results if result.digest is not None)
    text = f"{counted(num_rows, 'row')} of {counted(len(results), 'table')}"
    num_different = sum(not result.is_equal for result in results)
    num_left_out = sum(result.left_out is not None for result in results)
    if num_different:
        text += f", {counted(num_different, 'table')} DIFFERENT"
    elif is_compared and num_left_out < len(results):
        text += ", equal"
    if num_left_out:
        text += f", {counted(num_left_out, 'table')} left out"
    yield f"{text}, in {seconds:.1f} s ({num_rows / seconds:,.0f} rows/s)"


def _to_json(results: list[_TableResult], seconds: float) -> dict[str, Any]:
    return {
        "is_equal": all(result.is_equal for result in results),
        "seconds": seconds,
        "tables": [
            {
                "fqn": result.fqn,
                "num_rows": result.digest.num_rows if result.digest else None,
                "digest": f"{result.digest.total:016x}" if result.digest else None,
                "is_steady": result.is_steady if result.digest else None,
                "left_out": result.left_out,
                "problem": result.problem,
                "differing_buckets": result.differing,
                "differing_row_ids": result.row_ids,
            }
            for result in results
        ],
    }
