"""The replica's audit: digests of the weights that lookups see against the store's, at the same records of each log.

While a range of rows is looked at the replica is held: what comes waits. A shard's digests are of one position of its
log, which the replica then shows exactly; by step, where it cannot, the range is looked at again until nothing came
between.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.torch_dtypes import bits_of
from headrace.paramserver.reading.digest_groups import for_each_table, table_groups
from headrace.paramserver.replica.config import MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.precision import precision_of
from headrace.paramserver.replica.table import ReplicaTable
from headrace.paramserver.rpc.backoff import Backoff
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import RequestError, UnavailableError
from headrace.schemas.near_names import first_of
from headrace.schemas.row_digest import BUCKET_ROWS
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.table_digest import TableDigest
from headrace.schemas.tables import TableSpec

__all__ = [
    "LONGEST_HOLD_S",
    "ROWS_AT_ONCE",
    "ReplicaAuditReport",
    "ReplicaTableAudit",
    "audit_copy",
    "digest_copy",
    "digest_table",
    "why_left_out",
]

ROWS_AT_ONCE = 4 * BUCKET_ROWS
"""Rows that are held up together: a shard looks at some hundred thousand rows a second."""

# A shard reads and digests some hundred megabytes of records a second.
_BYTES_AT_ONCE = 2**29
_ROWS_IN_CACHE = 4096
_MAX_NAMED, _MAX_TABLES_NAMED = 20, 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MAX_ATTEMPTS = 0.01, 0.5, 200
LONGEST_HOLD_S = 20.0
"""For how long a range may hold the replica up: a stuck shard must not keep the others' updates from lookups."""

_ANSWER_TIMEOUT_S = 15.0

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Rows of a table that are looked at as of one moment."""

    fqn: str
    first_row: int
    end_row: int
    rows_at_once: int

    def num_rows(self) -> int:
        """Return how many rows of common width take as long."""
        return (self.end_row - self.first_row) * (ROWS_AT_ONCE // self.rows_at_once)


@dataclass(kw_only=True, slots=True)
class ReplicaTableAudit:
    """What comparing a table of a replica with the store has shown.

    Attributes:
        fqn: The table.
        num_rows: Rows that the replica has.
        digest: Of their weights.
        differing_buckets: Buckets (row id / 65536) whose digests differ.
        differing_row_ids: The first rows in which they differ.
    """

    fqn: str
    num_rows: int = 0
    digest: int = 0
    differing_buckets: list[int] = field(default_factory=list)
    differing_row_ids: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        """Say it in one line."""
        text = f"{self.fqn}: {self.num_rows} rows, digest {self.digest:016x}"
        if self.differing_buckets:
            text += f"; DIFFERENT in buckets {_some(self.differing_buckets)}: rows {_some(self.differing_row_ids)}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAuditReport:
    """What an audit of a replica has shown.

    Attributes:
        tables: In the order of their names.
        left_out: Tables that cannot be compared, and why.
    """

    tables: tuple[ReplicaTableAudit, ...]
    left_out: dict[str, str]

    @property
    def is_equal(self) -> bool:
        """Whether replica and store have the same rows with the same weights."""
        return not any(table.differing_buckets for table in self.tables)

    @property
    def num_differing_buckets(self) -> int:
        """Buckets of all tables that differ."""
        return sum(len(table.differing_buckets) for table in self.tables)

    @property
    def difference(self) -> str:
        """The first tables that differ, and in what; empty when none does."""
        different = [str(table) for table in self.tables if table.differing_buckets]
        more = len(different) - _MAX_TABLES_NAMED
        return "; ".join(different[:_MAX_TABLES_NAMED]) + (f"; and {more} more tables" if more > 0 else "")

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.num_rows for table in self.tables)

    def __str__(self) -> str:
        """Say it in one line a table."""
        lines = [*map(str, self.tables), *(f"{fqn}: left out: {why}" for fqn, why in self.left_out.items())]
        return "\n".join(lines)


def why_left_out(spec: TableSpec, config: ReplicaConfig) -> str | None:
    """Return why the weights of a table cannot be compared with the store's; None when they can."""
    if not spec.num_rows:
        return "it has virtual ids, which cannot be gone through in order"
    precision = precision_of(spec, config.precision_of(spec.fqn))
    if precision is not None and isinstance(config.storage_of(spec.fqn), MemoryStorage):
        return f"its rows are kept in {precision} here, and are not the store's"
    return None


def digest_table(
    table: ReplicaTable, *, first_row: int = 0, end_row: int | None = None, with_presence: bool = False
) -> TableDigest:
    """Return digests of the weights of the rows that a table has, by bucket, see `schemas/row_digest.py`.

    Args:
        table: One with a number of rows; not written to meanwhile.
        first_row: First row looked at.
        end_row: End of them, exclusive; None for the table's end.
        with_presence: Say which rows are there.

    Thread: any; it blocks.
    """
    spec = table.spec
    digest = TableDigest(spec=spec, columns=spec.whole)
    for ids in _pieces(first_row, min(spec.num_rows if end_row is None else end_row, spec.num_rows), _ROWS_IN_CACHE):
        rows, missing = table.inspect(ids)
        if missing.any():
            is_there = ~missing
            ids, rows = ids[is_there], rows[torch.from_numpy(is_there)]
        digest.add_rows(ids, [bits_of(rows)], with_presence=with_presence)
    return digest


async def audit_copy(copy: Followed, config: ReplicaConfig, fqns: Sequence[str] | None) -> ReplicaAuditReport:
    """Compare a copy that follows a server with what the server's shards have.

    Args:
        copy: Caught up.
        config: Settings of the replica.
        fqns: Tables; None for all that can be compared.

    Raises:
        UnknownTableError: The copy has no such table.
        RequestError: A table that was asked for cannot be compared.
        UnavailableError: A shard does not answer.
        HeadraceError: The copy is not kept up to date any more.

    Cancellation: harmless; the copy goes on following.
    """
    left_out: dict[str, str] = {}
    if fqns is None:
        specs = {fqn: table.spec for fqn, table in sorted(copy.generation.tables.items())}
        reasons = {fqn: why_left_out(spec, config) for fqn, spec in specs.items()}
        left_out = {fqn: why for fqn, why in reasons.items() if why is not None}
        fqns = [fqn for fqn in specs if fqn not in left_out]
    for fqn in fqns:
        _check(copy, config, fqn)
    results = {fqn: ReplicaTableAudit(fqn=fqn) for fqn in fqns}
    waiting = set(fqns)
    try:
        await _audit_tables(copy, results, waiting)
    except UnavailableError as exc:
        if not any(result.differing_buckets for result in results.values()):
            raise
        # What differs is told all the same.
        left_out |= {fqn: f"not all of it was compared: {exc}" for fqn in sorted(waiting)}
    tables = tuple(result for fqn, result in results.items() if fqn not in waiting or result.differing_buckets)
    return ReplicaAuditReport(tables=tables, left_out=left_out)


async def digest_copy(copy: Followed, config: ReplicaConfig, fqn: str, **rows: Any) -> TableDigest:
    """Return `digest_table` of a table of a copy, as of one moment, which `TableDigest.seqs` tells.

    Args:
        copy: Follows a server.
        config: Settings of the replica.
        fqn: Table.
        **rows: Which of them, as `digest_table` takes it.

    Raises:
        UnknownTableError: The copy has no such table.
        RequestError: The table cannot be compared.

    Cancellation: harmless; the copy goes on following.
    """
    _check(copy, config, fqn)
    async with copy.held():
        digest = await asyncio.to_thread(digest_table, copy.generation.table(fqn), **rows)
        digest.seqs = {tail.shard: tail.visible_seq for tail in copy.generation.tails}
        return digest


def _check(copy: Followed, config: ReplicaConfig, fqn: str) -> None:
    if (why := why_left_out(copy.generation.table(fqn).spec, config)) is not None:
        raise RequestError(f"table {fqn!r} cannot be compared: {why}")


async def _audit_tables(copy: Followed, results: Mapping[str, ReplicaTableAudit], waiting: set[str]) -> None:
    """Compare tables, note what there is of each, and take it from those that wait when all of it was compared."""
    groups = list(table_groups([span for fqn in results for span in _spans(copy, fqn)], num_rows_of=_Span.num_rows))
    for group, following in pairwise([*groups, []]):
        for span in await _audit_spans(copy, group, results):
            await _audit_again(copy, span, results)
        # Of a table's ranges the last ones may be of the next group.
        waiting -= {span.fqn for span in group} - {span.fqn for span in following}
    waiting.clear()  # tables without rows have no range


async def _audit_again(copy: Followed, span: _Span, results: Mapping[str, ReplicaTableAudit]) -> None:
    backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
    for _ in range(_MAX_ATTEMPTS):
        if not await _audit_spans(copy, [span], results):
            return
        pause_s = backoff.next_s()
        await asyncio.sleep(pause_s)
    raise UnavailableError(
        f"rows of {span.fqn!r} were not compared in {_MAX_ATTEMPTS} attempts: each time rows came meanwhile; by step, "
        "an audit needs a moment in which none come"
    )


def _spans(copy: Followed, fqn: str) -> Iterator[_Span]:
    spec = copy.generation.tables[fqn].spec
    bucket_bytes = BUCKET_ROWS * RecordLayout(spec, spec.whole).size_bytes
    rows_at_once = min(max(_BYTES_AT_ONCE // bucket_bytes, 1) * BUCKET_ROWS, ROWS_AT_ONCE)
    for first in range(0, spec.num_rows, rows_at_once):
        end_row = min(first + rows_at_once, spec.num_rows)
        yield _Span(fqn=fqn, first_row=first, end_row=end_row, rows_at_once=rows_at_once)


async def _audit_spans(copy: Followed, spans: Sequence[_Span], results: Mapping[str, ReplicaTableAudit]) -> list[_Span]:
    """Compare some rows and note what there is; return the spans of which the two were not at the same records.

    Raises:
        UnavailableError: It took so long that the replica would be held up for longer than it may.
    """
    try:
        async with asyncio.timeout(LONGEST_HOLD_S), copy.held():
            done = await _audit_held(copy, spans, results)
    except TimeoutError as exc:
        time, names = format_seconds(LONGEST_HOLD_S), first_of([repr(span.fqn) for span in spans])
        raise UnavailableError(
            f"rows of {names} were not compared within {time}, in which the replica stands still"
        ) from exc
    return [span for span in spans if span not in done]


async def _audit_held(copy: Followed, spans: Sequence[_Span], results: Mapping[str, ReplicaTableAudit]) -> set[_Span]:
    """Return the spans that were compared at the same records, while the copy is held.

    The shards' digests are asked for together: a round trip is most of what a small table costs. With no writes in
    between they are of one position; with some, the replica is taken from one to the next.
    """
    tails = copy.generation.tails
    done: set[_Span] = set()
    theirs = await for_each_table(spans, functools.partial(_stored, copy), num_rows_of=_Span.num_rows)
    by_seqs: dict[tuple[int, ...], dict[_Span, TableDigest]] = {}
    for span, digest in zip(spans, theirs, strict=True):
        if digest.is_steady:
            seqs = tuple(digest.seqs.get(tail.shard, 0) for tail in tails)
            by_seqs.setdefault(seqs, {})[span] = digest
    # A shard that was set back tells of records before these; that is found by following it, and no difference.
    shown = tuple(tail.visible_seq for tail in tails)
    for seqs, digests in sorted(by_seqs.items()):
        if any(map(operator.lt, seqs, shown)) or not await copy.show_up_to(seqs):
            continue  # another shard has been at later records for the span before
        shown = seqs
        ours = await asyncio.to_thread(_digest_spans, copy, list(digests))
        for span, digest in digests.items():
            await _note(copy, span, ours[span], digest, results[span.fqn])
        done |= digests.keys()
    return done


async def _stored(copy: Followed, span: _Span) -> TableDigest:
    return await copy.reader.digest(
        span.fqn, first_row=span.first_row, end_row=span.end_row, only_weights=True, timeout_s=_ANSWER_TIMEOUT_S
    )


def _digest_spans(copy: Followed, spans: Sequence[_Span]) -> dict[_Span, TableDigest]:
    tables = copy.generation.tables
    return {span: digest_table(tables[span.fqn], first_row=span.first_row, end_row=span.end_row) for span in spans}


async def _note(copy: Followed, span: _Span, ours: TableDigest, theirs: TableDigest, result: ReplicaTableAudit) -> None:
    result.num_rows += ours.num_rows
    result.digest = (result.digest + ours.total) % 2**64
    for bucket in theirs.differing_buckets(ours):
        result.differing_buckets.append(bucket)
        if len(result.differing_row_ids) < _MAX_NAMED:
            found = await _differing_rows(copy, span, bucket)
            result.differing_row_ids += found[: _MAX_NAMED - len(result.differing_row_ids)].tolist()


async def _differing_rows(copy: Followed, span: _Span, bucket: int) -> _Ids:
    """Return the rows of a bucket that differ, but for those that have been updated since what the replica shows."""
    table, visible = copy.generation.tables[span.fqn], copy.generation.visible
    if visible is None:
        raise UnavailableError(f"table {span.fqn!r}: the replica is at no step")
    found = [np.empty(0, np.int64)]
    first, end = max(span.first_row, bucket * BUCKET_ROWS), min(span.end_row, (bucket + 1) * BUCKET_ROWS)
    for ids in _pieces(first, end, _ROWS_IN_CACHE):
        theirs = await copy.reader.get(span.fqn, ids, with_versions=True)
        assert theirs.epochs is not None
        assert theirs.steps is not None
        rows, missing = await asyncio.to_thread(table.inspect, ids)
        is_there = theirs.presence == PRESENT
        differs = (_bytes(bits_of(rows)) != _bytes(theirs.weights)).any(axis=1) & is_there & ~missing
        differs |= is_there == missing
        epoch, step = visible
        is_known = (theirs.epochs < epoch) | ((theirs.epochs == epoch) & (theirs.steps <= step))
        found.append(ids[differs & is_known])
    return np.concatenate(found)


def _pieces(first: int, end: int, size: int) -> Iterator[_Ids]:
    for start in range(first, end, size):
        yield np.arange(start, min(start + size, end), dtype=np.int64)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + (", …" if len(numbers) > _MAX_NAMED else "")


def _bytes(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1)
