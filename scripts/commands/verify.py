"""`headrace verify`: compare digests of a server's rows with another server's, or with saved ones."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
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
from headrace.paramserver.system.durable import write_file
from headrace.paramserver.system.text import counted, describe_near, format_seconds
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest
from headrace.schemas.table_names import is_among, model_of
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    OnlyModel,
    OnlyTables,
    ProgressBar,
    ServerFlag,
    option,
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
    problem: str | None = None  # why the table cannot be compared
    differing: list[int] | None = None  # buckets; None if nothing was compared
    row_ids: list[int] = field(default_factory=list)  # the first rows that differ, if both sides are servers

    @property
    def is_equal(self) -> bool:
        return self.problem is None and not self.differing


@with_server_flags
def verify(
    *,
    server: ServerFlag = None,
    against: Annotated[
        str | None, option("Compare with another server, or with saved digests.", "HOST:PORT|FILE")
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
    """Compute digests of all rows of a server, and compare them with another server's, or with saved ones.

    A digest covers each row's id, weights and optimizer states, but not its version. To compare a running trainer with
    its server, call `streamer.audit()`, a replica `replica.audit()`. The exit code is 1 if something differs.
    """
    if save is not None and not os.access(save if save.exists() else save.absolute().parent, os.W_OK):
        raise ConfigError(f"--save {save}: cannot be written")
    reached = access(server, timeout_s=timeout_s)
    saved = _load(Path(against)) if against is not None and Path(against).is_file() else None
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
            await progress.add(reader, table)
            if against is None or saved is not None:
                return await _digest_all(reader, table, model, saved, progress)
            try:
                second = await connect(against)
            except (ConfigError, UnavailableError) as exc:
                what = "" if ":" in against else "no such file, nor a server of that name: "
                raise type(exc)(f"--against {against}: {what}{exc}") from exc
            async with second:
                if places := {link.address for link in reader.links} & {link.address for link in second.links}:
                    raise ConfigError(
                        f"--against {against}: leads to {min(places)}, as --server does: both are the same server. One "
                        "that has handed its shards over answers no more; compare with a follower or with a saved file"
                    )
                await progress.add(second, table)
                return await _compare_servers(reader, second, table, model, progress)

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
    return 0 if all(result.is_equal for result in results) else 1


class _Progress:
    """Shows the number of digested rows, and moves the deadline on each report, so that a large store gets its time."""

    def __init__(self, bar: ProgressBar, deadline: asyncio.Timeout, timeout_s: float) -> None:
        self._bar, self._deadline, self._timeout_s = bar, deadline, timeout_s
        self._done = self._total = 0

    async def add(self, reader: EmbeddingReader, only: list[str] | None) -> None:
        """Add a server's rows to the total."""
        tables = [table for status in await reader.status() for table in status.tables]
        wanted = [table for table in tables if table.spec.fqn in reader.tables]
        wanted = [table for table in wanted if only is None or is_among(table.spec.fqn, only)]
        self._total += sum(table.num_rows_estimate for table in wanted)

    def __call__(self, num_rows: int) -> None:
        self._done += num_rows
        self._total = max(self._total, self._done)  # the total is an estimate
        self._bar.update(self._done, self._total)
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


async def _digest_all(
    reader: EmbeddingReader,
    only: list[str] | None,
    model: str | None,
    saved: dict[str, _Saved] | None,
    progress: _Progress,
) -> list[_TableResult]:
    async def digest(fqn: str) -> _TableResult:
        result = _TableResult(fqn=fqn)
        if fqn not in reader.tables:
            result.problem = "not on the server"
            return result
        result.digest = await reader.digest(fqn, on_progress=progress)
        result.is_steady = result.digest.is_steady
        if saved is not None:
            _compare_saved(result, result.digest, saved.get(fqn))
        return result

    fqns = _chosen(reader.tables.keys() | (saved or {}).keys(), only, model)
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
    first: EmbeddingReader,
    second: EmbeddingReader,
    only: list[str] | None,
    model: str | None,
    progress: _Progress,
) -> list[_TableResult]:
    async def compare(fqn: str) -> _TableResult:
        result = _TableResult(fqn=fqn)
        for which, reader in (("first", first), ("second", second)):
            if fqn not in reader.tables:
                result.problem = f"not on the {which} server"
                return result
        if difference := first.tables[fqn].describe_difference(second.tables[fqn]):
            result.problem = difference
            return result
        ours, theirs = await asyncio.gather(*(side.digest(fqn, on_progress=progress) for side in (first, second)))
        result.is_steady = ours.is_steady and theirs.is_steady
        result.digest, result.differing = ours, ours.differing_buckets(theirs)
        differing = partial(_differing_in, first, second, fqn)
        result.row_ids = await first_differing_rows(result.differing, differing, limit=_MAX_NAMED)
        return result

    fqns = _chosen(first.tables.keys() | second.tables.keys(), only, model)
    return await for_each_table(fqns, compare, num_rows_of=partial(_num_rows_of, first))


def _num_rows_of(reader: EmbeddingReader, fqn: str) -> int:
    return reader.tables[fqn].num_rows if fqn in reader.tables else 0


async def _differing_in(first: EmbeddingReader, second: EmbeddingReader, fqn: str, bucket: int) -> _Ids:
    """Return the rows of a bucket that differ or that only one server has."""
    first_row, end_row = bucket * BUCKET_ROWS, (bucket + 1) * BUCKET_ROWS

    async def present_rows(reader: EmbeddingReader) -> _Ids:
        digest = await reader.digest(fqn, first_row=first_row, end_row=end_row, with_presence=True)
        return digest.present_rows(bucket)

    async def compare(row_ids: _Ids) -> npt.NDArray[np.bool_]:
        ours, theirs = await asyncio.gather(*(reader.get(fqn, row_ids, with_states=True) for reader in (first, second)))
        return rows_that_differ(_columns(ours), _columns(theirs))

    ours, theirs = await present_rows(first), await present_rows(second)
    in_both = await differing_rows(np.intersect1d(ours, theirs, assume_unique=True), compare)
    return np.union1d(np.setxor1d(ours, theirs, assume_unique=True), in_both)


def _columns(rows: Rows) -> list[npt.NDArray[Any]]:
    return [rows.presence, rows.weights, *rows.states.values()]


def _chosen(fqns: set[str], only: list[str] | None, model: str | None) -> list[str]:
    """Return the tables to compare; raise ConfigError for a name that none has."""
    if not fqns and model is not None:
        raise ConfigError(f"--model {model!r}: has no tables here")
    for name in only or ():
        if not any(is_among(fqn, (name,)) for fqn in fqns):
            raise ConfigError(f"--table {name!r}: no such table here; {describe_near(name, fqns)}")
    return [fqn for fqn in sorted(fqns) if only is None or is_among(fqn, only)]


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
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text + "\n", "utf-8")
        else:
            target = path.resolve()
            write_file(target, f"{text}\n".encode(), aside=target.with_name(f"{target.name}.new"))
    except OSError as exc:
        raise ConfigError(f"--save {path}: {exc.strerror}") from exc


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
        if result.problem is not None:
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
    num_dense = sum(result.digest is not None and result.digest.spec.is_dense for result in results)
    text = f"{counted(num_rows, 'row')} of {counted(len(results) - num_dense, 'table')}"
    text += f" and {counted(num_dense, 'dense tensor')}" if num_dense else ""
    num_different = sum(not result.is_equal for result in results)
    if num_different:
        text += f", {num_different} of them DIFFERENT"
    elif is_compared:
        text += ", equal"
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
                "problem": result.problem,
                "differing_buckets": result.differing,
                "differing_row_ids": result.row_ids,
            }
            for result in results
        ],
    }
