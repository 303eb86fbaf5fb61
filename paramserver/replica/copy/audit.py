"""Compare digests of the weights that lookups see with the store's, at the same position of each shard's log.

The replica pauses while a range of rows is compared, and new updates wait. A shard's digests are of one log position,
which the replica then shows exactly. With consistency by step it sometimes cannot; then the range is repeated until
nothing came in between.
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

from headrace.paramserver.reading.differences import (
    MAX_NAMED,
    describe_difference,
    differing_rows,
    first_differing_rows,
    for_each_table,
    rows_that_differ,
    table_groups,
)
from headrace.paramserver.replica.api.config import MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.tables.base import ReplicaTable
from headrace.paramserver.replica.tables.slot_rows import precision_of
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.schemas.errors import RequestError, UnavailableError
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import is_newer

__all__ = [
    "LONGEST_HOLD_S",
    "ReplicaAuditReport",
    "ReplicaTableAudit",
    "audit_copy",
    "digest_copy",
    "digest_table",
    "skip_reason",
]

_ROWS_AT_ONCE = 4 * BUCKET_ROWS
"""Rows compared during one pause. A shard digests some hundred thousand rows a second."""

# A shard reads and digests some hundred megabytes of records a second.
_BYTES_AT_ONCE = 2**29
_ROWS_IN_CACHE = 4096
_MAX_TABLES_NAMED = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MAX_ATTEMPTS = 0.01, 0.5, 200
LONGEST_HOLD_S = 20.0
"""Longest pause for one range: a stuck shard must not keep the others' updates from lookups."""

_ANSWER_TIMEOUT_S = 15.0

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Rows of a table that are compared at one moment."""

    fqn: str
    first_row: int
    end_row: int
    rows_at_once: int

    def num_rows(self) -> int:
        """Return the number of rows of common width that take as long to digest."""
        return (self.end_row - self.first_row) * (_ROWS_AT_ONCE // self.rows_at_once)


@dataclass(kw_only=True, slots=True)
class ReplicaTableAudit:
    """The result for one table.

    Attributes:
        fqn: The table.
        num_rows: Rows that the replica has.
        digest: Digest of their weights.
        differing_buckets: Buckets (row id / 65536) whose digests differ.
        differing_row_ids: The first rows in which they differ.
    """

    fqn: str
    num_rows: int = 0
    digest: int = 0
    differing_buckets: list[int] = field(default_factory=list)
    differing_row_ids: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        """Describe the result in one line."""
        difference = describe_difference(self.differing_buckets, self.differing_row_ids)
        return f"{self.fqn}: {self.num_rows} rows, digest {self.digest:016x}{difference}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ReplicaAuditReport:
    """The result of an audit of a replica.

    Attributes:
        tables: Ordered by name.
        left_out: Tables that were not compared, with the reason.
        incomplete: Those compared of which the trainer has not sent all rows to the server yet.
    """

    tables: tuple[ReplicaTableAudit, ...]
    left_out: dict[str, str]
    incomplete: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether replica and store have the same rows and weights, whatever the store lacks of the trainer's."""
        return not any(table.differing_buckets for table in self.tables)

    @property
    def num_differing_buckets(self) -> int:
        """Number of differing buckets in all tables."""
        return sum(len(table.differing_buckets) for table in self.tables)

    @property
    def difference(self) -> str:
        """The first tables that differ, with buckets and rows; empty if none does."""
        different = [str(table) for table in self.tables if table.differing_buckets]
        more = len(different) - _MAX_TABLES_NAMED
        return "; ".join(different[:_MAX_TABLES_NAMED]) + (f"; and {more} more tables" if more > 0 else "")

    @property
    def num_rows(self) -> int:
        """Number of rows in all tables."""
        return sum(table.num_rows for table in self.tables)

    def __repr__(self) -> str:
        return f"<ReplicaAuditReport, {'equal' if self.is_equal else 'different'}:\n{self}>"

    def __str__(self) -> str:
        """Describe each table in one line."""
        lines = [f"{table}; incomplete" if table.fqn in self.incomplete else str(table) for table in self.tables]
        lines += [f"{fqn}: left out: {why}" for fqn, why in self.left_out.items()]
        return "\n".join(lines)


def skip_reason(spec: TableSpec, config: ReplicaConfig) -> str | None:
    """Return why a table's weights cannot be compared with the store's; None if they can."""
    if not spec.num_rows:
        return "it has virtual ids, which cannot be gone through in order"
    precision = precision_of(spec, config.precision_of(spec.fqn))
    if precision is not None and isinstance(config.storage_of(spec.fqn), MemoryStorage):
        return f"its rows are kept in {precision} here, and are not the store's"
    return None


def digest_table(
    table: ReplicaTable, *, first_row: int = 0, end_row: int | None = None, with_presence: bool = False
) -> TableDigest:
    """Return digests of the weights of a table's rows, by bucket; see `schemas/row_digest.py`.

    Args:
        table: One with a number of rows. REQUIRES: not written to meanwhile.
        first_row: First row.
        end_row: End of the rows, exclusive; None for the table's end.
        with_presence: Record which rows are present.

    Thread: any; blocks.
    """
    spec = table.spec
    digest = TableDigest(spec=spec, columns=spec.whole)
    for ids in _pieces(first_row, min(spec.num_rows if end_row is None else end_row, spec.num_rows), _ROWS_IN_CACHE):
        rows, missing = table.inspect(ids)
        if missing.any():
            ids, rows = ids[~missing], rows[~missing]
        digest.add_rows(ids, [rows], with_presence=with_presence)
    return digest


async def audit_copy(copy: LiveCopy, config: ReplicaConfig, fqns: Sequence[str] | None) -> ReplicaAuditReport:
    """Compare a copy that follows a server with the server's shards.

    Args:
        copy: REQUIRES: caught up.
        config: Settings of the replica.
        fqns: Tables; None for all that can be compared.

    Raises:
        UnknownTableError: The copy has no such table.
        RequestError: A requested table cannot be compared.
        UnavailableError: A shard does not answer.
        HeadraceError: The copy is not kept up to date any more.

    Cancellation: harmless; the copy continues to follow.
    """
    left_out: dict[str, str] = {}
    if fqns is None:
        specs = {fqn: table.spec for fqn, table in sorted(copy.table_set.tables.items())}
        reasons = {fqn: skip_reason(spec, config) for fqn, spec in specs.items()}
        left_out = {fqn: why for fqn, why in reasons.items() if why is not None}
        fqns = [fqn for fqn in specs if fqn not in left_out]
    else:
        for fqn in fqns:
            _check(copy, config, fqn)
        fqns = [copy.table_set.any_table(fqn).spec.fqn for fqn in fqns]
    results = {fqn: ReplicaTableAudit(fqn=fqn) for fqn in fqns}
    waiting = set(fqns)
    try:
        await _audit_tables(copy, results, waiting)
    except UnavailableError as exc:
        if not any(result.differing_buckets for result in results.values()):
            raise
        # Report the known differences all the same.
        left_out |= {fqn: f"not all of it was compared: {exc}" for fqn in sorted(waiting)}
    tables = tuple(result for fqn, result in results.items() if fqn not in waiting or result.differing_buckets)
    incomplete = tuple(fqn for fqn in copy.table_set.incomplete if fqn in results)
    return ReplicaAuditReport(tables=tables, left_out=left_out, incomplete=incomplete)


async def digest_copy(copy: LiveCopy, config: ReplicaConfig, fqn: str, **rows: Any) -> TableDigest:
    """Return `digest_table` of a copy's table at one moment, with the log positions in `TableDigest.seqs`.

    Args:
        copy: Follows a server.
        config: Settings of the replica.
        fqn: Table.
        **rows: Range of rows, as for `digest_table`.

    Raises:
        UnknownTableError: The copy has no such table.
        RequestError: The table cannot be compared.

    Cancellation: harmless; the copy continues to follow.
    """
    _check(copy, config, fqn)
    async with copy.paused():
        digest = await asyncio.to_thread(digest_table, copy.table_set.any_table(fqn), **rows)
        digest.seqs = {tail.shard: tail.visible_seq for tail in copy.table_set.tails}
        return digest


def _check(copy: LiveCopy, config: ReplicaConfig, fqn: str) -> None:
    if (why := skip_reason(copy.table_set.any_table(fqn).spec, config)) is not None:
        raise RequestError(f"table {fqn!r} cannot be compared: {why}")


async def _audit_tables(copy: LiveCopy, results: Mapping[str, ReplicaTableAudit], waiting: set[str]) -> None:
    """Compare tables, add to each result, and remove each table from `waiting` once all of it was compared."""
    groups = list(table_groups([span for fqn in results for span in _spans(copy, fqn)], num_rows_of=_Span.num_rows))
    for group, following in pairwise([*groups, []]):
        for span in await _audit_spans(copy, group, results):
            await _audit_again(copy, span, results)
        # The last ranges of a table may belong to the next group.
        waiting -= {span.fqn for span in group} - {span.fqn for span in following}
    waiting.clear()  # tables without rows have no range


async def _audit_again(copy: LiveCopy, span: _Span, results: Mapping[str, ReplicaTableAudit]) -> None:
    backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
    for _ in range(_MAX_ATTEMPTS):
        if not await _audit_spans(copy, [span], results):
            return
        await asyncio.sleep(backoff.next_s())
    raise UnavailableError(
        f"rows of {span.fqn!r} were not compared in {_MAX_ATTEMPTS} attempts: each time rows came meanwhile; by step, "
        "an audit needs a moment in which none come"
    )


def _spans(copy: LiveCopy, fqn: str) -> Iterator[_Span]:
    spec = copy.table_set.any_table(fqn).spec
    bucket_bytes = BUCKET_ROWS * RecordLayout(spec, spec.whole).size_bytes
    rows_at_once = min(max(_BYTES_AT_ONCE // bucket_bytes, 1) * BUCKET_ROWS, _ROWS_AT_ONCE)
    for first in range(0, spec.num_rows, rows_at_once):
        end_row = min(first + rows_at_once, spec.num_rows)
        yield _Span(fqn=spec.fqn, first_row=first, end_row=end_row, rows_at_once=rows_at_once)


async def _audit_spans(copy: LiveCopy, spans: Sequence[_Span], results: Mapping[str, ReplicaTableAudit]) -> list[_Span]:
    """Compare some spans; return those whose two sides were not at the same log position.

    Raises:
        UnavailableError: It took longer than the replica may pause.
    """
    try:
        async with asyncio.timeout(LONGEST_HOLD_S), copy.paused():
            done = await _audit_paused(copy, spans, results)
    except TimeoutError as exc:
        time, names = format_seconds(LONGEST_HOLD_S), first_of([repr(span.fqn) for span in spans])
        raise UnavailableError(
            f"rows of {names} were not compared within {time}, in which the replica stands still"
        ) from exc
    return [span for span in spans if span not in done]


async def _audit_paused(copy: LiveCopy, spans: Sequence[_Span], results: Mapping[str, ReplicaTableAudit]) -> set[_Span]:
    """Return the spans that were compared at the same log position. REQUIRES: the copy is paused.

    The shards' digests are requested together, because a round trip is most of what a small table costs. Without writes
    in between they have one position; otherwise the replica is taken from one position to the next.
    """
    tails = copy.table_set.tails
    done: set[_Span] = set()
    theirs = await for_each_table(spans, functools.partial(_stored, copy), num_rows_of=_Span.num_rows)
    by_seqs: dict[tuple[int, ...], dict[_Span, TableDigest]] = {}
    for span, digest in zip(spans, theirs, strict=True):
        if digest.is_steady:
            seqs = tuple(digest.seqs[tail.shard] for tail in tails)
            by_seqs.setdefault(seqs, {})[span] = digest
    # A shard that was set back reports earlier positions. The follower detects that; it is no difference.
    shown = tuple(tail.visible_seq for tail in tails)
    for seqs, digests in sorted(by_seqs.items()):
        if any(map(operator.lt, seqs, shown)) or not await copy.show_up_to(seqs):
            continue  # the span before was at a later position of another shard
        shown = seqs
        ours = await asyncio.to_thread(_digest_spans, copy, list(digests))
        for span, digest in digests.items():
            await _add(copy, span, ours[span], digest, results[span.fqn])
        done |= digests.keys()
    return done


async def _stored(copy: LiveCopy, span: _Span) -> TableDigest:
    return await copy.reader.digest(
        span.fqn, first_row=span.first_row, end_row=span.end_row, only_weights=True, timeout_s=_ANSWER_TIMEOUT_S
    )


def _digest_spans(copy: LiveCopy, spans: Sequence[_Span]) -> dict[_Span, TableDigest]:
    tables = copy.table_set.tables
    return {span: digest_table(tables[span.fqn], first_row=span.first_row, end_row=span.end_row) for span in spans}


async def _add(copy: LiveCopy, span: _Span, ours: TableDigest, theirs: TableDigest, result: ReplicaTableAudit) -> None:
    result.num_rows += ours.num_rows
    result.digest = (result.digest + ours.total) % 2**64
    differing = theirs.differing_buckets(ours)
    result.differing_buckets += differing
    limit = MAX_NAMED - len(result.differing_row_ids)
    found = await first_differing_rows(differing, functools.partial(_differing_in, copy, span), limit=limit)
    result.differing_row_ids += found


async def _differing_in(copy: LiveCopy, span: _Span, bucket: int) -> _Ids:
    """Return the rows of a bucket that differ, except those updated after the step that the replica shows."""
    table, visible = copy.table_set.tables[span.fqn], copy.table_set.visible
    if visible is None:
        raise UnavailableError(f"table {span.fqn!r}: the replica is at no step")

    async def compare(row_ids: _Ids) -> npt.NDArray[np.bool_]:
        theirs = await copy.reader.get(span.fqn, row_ids, with_versions=True)
        assert theirs.epochs is not None
        assert theirs.steps is not None
        rows, missing = await asyncio.to_thread(table.inspect, row_ids)
        is_there = theirs.presence == PRESENT
        differs = rows_that_differ([rows], [theirs.weights])
        differs &= is_there & ~missing
        differs |= is_there == missing
        differs &= ~is_newer(theirs.epochs, theirs.steps, *visible)
        return differs

    row_ids = np.arange(max(span.first_row, bucket * BUCKET_ROWS), min(span.end_row, (bucket + 1) * BUCKET_ROWS))
    return await differing_rows(row_ids, compare, rows_at_once=_ROWS_IN_CACHE)


def _pieces(first: int, end: int, size: int) -> Iterator[_Ids]:
    for start in range(first, end, size):
        yield np.arange(start, min(start + size, end), dtype=np.int64)
