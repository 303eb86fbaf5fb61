"""One expiry pass over one table of a shard: read every row, decide, delete.

Reading and deciding happen in a thread, a piece at a time, at a limited rate. Deletions are written one batch at a
time, each durable before the next, and wait like other writes while the store is behind.

A deletion removes whatever the row is by then, so no update may come between the decision and the deletion's place in
the log. Before each batch, rows that accepted batches touch from then on are collected, the candidates are read again
with everything accepted before, and those go of which the version is still the judged one. In the step of the event
loop in which the batch takes its place, the collected rows are left out.

Expiry is a client of its own shard: run `headrace`, client `expiry`, not a trainer. Its batches are numbered and
durable like any other, so replicas, snapshots and recovery treat them alike. It keeps no state: its session, a
function of the log, has its last batch's number, so numbering continues after a crash.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.paramserver.expiry.frequency import FrequencyFile
from headrace.paramserver.expiry.policy import BudgetThreshold, ExpiryPolicy, Horizon, Recency, RowFacts, Verdict, judge
from headrace.paramserver.expiry.scan import Pace, Piece, RowScanner, concatenate
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import run_in_thread_to_end
from headrace.schemas.errors import ConfigError, OverloadedError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.row_records import PRESENT
from headrace.schemas.tables import DType

__all__ = ["PassContext", "TablePass", "TableReport", "check_policy"]

_Ids = npt.NDArray[np.int64]
# ON DISK: in sessions and log records. The epoch never rises: a shard has one expirer and nobody to fence.
_RUN, _CLIENT, _EPOCH = "headrace", "expiry", 1
_MAX_BATCH_ROWS = 8192
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """A shard's environment for its passes; `directory` has a frequency file for each table.

    A table's row budget is divided by `num_shards`. At most `rows_per_s` rows are read in a second; 0 sets no limit.
    `clock_us` is the wall clock, microseconds since 1970.
    """

    ingest: Ingest
    applier: Applier
    store: RowStore
    directory: Path
    num_shards: int
    rows_per_s: int
    clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    piece_rows: int = 8192


@dataclass(kw_only=True, slots=True)
class TableReport:
    """The findings of a pass, so far or in the end.

    `scanned` rows were read in the last scan, and `live` ones of them exist. `expired` rows were deleted, or in a dry
    run would be; `by_policy` counts the rows that each condition selects, also those that were written since. `note`
    says why nothing can go, or is empty.
    """

    fqn: str
    scanned: int = 0
    live: int = 0
    expired: int = 0
    by_policy: Counter[str] = field(default_factory=Counter)
    note: str = ""


def check_policy(table: Table, policy: ExpiryPolicy) -> None:
    """Raise ConfigError when a policy needs the norm of weights that are not floating-point numbers."""
    if policy.min_l2_norm is not None and table.spec.dtype not in _FLOATS:
        raise ConfigError(f"table {table.spec.fqn!r}: min_l2_norm needs floats, not {table.spec.dtype.name}")


class TablePass:
    """One pass over one table. Call `run`; or `begin`, then `scan` and `delete` in turn, then `finish` and `close`.

    A dry run deletes nothing and changes no frequency. `report` has the findings, `num_looked_at` the rows of all
    scans. Thread: the event loop's.
    """

    def __init__(self, context: PassContext, table: Table, policy: ExpiryPolicy, *, is_dry_run: bool = False) -> None:
        check_policy(table, policy)
        self.report = TableReport(fqn=table.spec.fqn)
        self.num_looked_at = 0
        self._context, self._table, self._policy = context, table, policy
        self._is_dry_run = is_dry_run
        self._candidates: list[RowFacts] = []  # at most a batch and a piece
        self._horizon: Horizon | None = None
        self._scanner: RowScanner | None = None
        self._frequencies: FrequencyFile | None = None
        self._threshold: BudgetThreshold | None = None
        self._pace = Pace(context.rows_per_s, context.sleep)

    async def run(self) -> TableReport:
        """Read all rows and delete those that expire.

        Cancellation: deleted rows stay deleted; the rest waits for another pass. Frequencies are as before.

        Raises:
            StorageError: The disk failed, or (CorruptionError) a record cannot be read.
            UnavailableError: The log or the store has stopped.
        """
        try:
            if await self.begin():
                while await self.scan():
                    await self.delete()
                await self.delete(is_last=True)
                await self.finish()
        finally:
            await self.close()
        return self.report

    async def begin(self) -> bool:
        """Fix the horizon and the row budget's threshold; return whether any row may go."""
        context, ingest = self._context, self._context.ingest
        # No await between the two: the sessions are those of this position.
        owner = self._table.owner
        self._horizon = Horizon.of(ingest.sessions, ingest.accepted_seq, owner)
        if not self._horizon.epoch:
            who = "no run owns the table"
            if owner is not None:
                who = f"run {owner.run!r}, which owns the table, has not ended a step on this shard"
            self.report.note = f"{who}, so nothing expires"
            return False
        await context.applier.wait_applied(self._horizon.seq)
        if self._policy.max_rows is not None:
            await self._find_threshold(-(-self._policy.max_rows // context.num_shards))
        self._scanner = self._new_scanner()
        await self._open_frequencies(is_written=not self._is_dry_run)
        self.report.scanned = self.report.live = 0
        return True

    async def scan(self) -> bool:
        """Judge the next rows; return whether there were any."""
        assert self._scanner is not None
        judged = await self._look(self._scanner)
        if judged is None:
            return False
        piece, verdict = judged
        facts, report = piece.facts, self.report
        expired = verdict.expired
        if self._threshold is not None:
            over = self._threshold.take(facts.epochs, facts.steps, verdict.stays)
            report.by_policy["max_rows"] += int(np.count_nonzero(over))
            expired = expired | over
        report.by_policy.update(verdict.by_policy)
        if self._frequencies is not None and not self._is_dry_run:
            await run_in_thread_to_end(lambda: self._keep_frequencies(facts, ~expired))
        if self._is_dry_run:
            report.expired += int(np.count_nonzero(expired))
        elif expired.any():
            self._candidates.append(facts.take(expired))
        return True

    async def delete(self, *, is_last: bool = False) -> None:
        """Delete the rows found so far: whole batches, or with `is_last` all.

        Cancellation: a batch takes effect whole or not at all; the next one is numbered accordingly.
        """
        while self._candidates:
            rows = concatenate(self._candidates)
            if rows.row_ids.size < _MAX_BATCH_ROWS and not is_last:
                self._candidates = [rows]
                return
            try:
                self.report.expired += await self._delete_unchanged(rows.take(slice(_MAX_BATCH_ROWS)))
            except OverloadedError as exc:  # others keep the shard busy: expiry can wait
                await self._context.sleep(max(exc.retry_after_s, 0.1))
                continue
            rows = rows.take(slice(_MAX_BATCH_ROWS, None))
            self._candidates = [rows] if rows.row_ids.size else []

    async def _delete_unchanged(self, rows: RowFacts) -> int:
        """Delete those rows that were not written since they were judged, durably; return how many.

        Raises:
            OverloadedError: The shard has too much to write; nothing changes.
            UnavailableError: The log has failed.
        """
        ingest, table = self._context.ingest, self._table
        await ingest.open_session(_RUN, _CLIENT, _EPOCH, 0, 0, [])
        with ingest.watch(table.table_id) as touched:
            await ingest.wait_durable(ingest.accepted_seq)
            found = await self._context.applier.read(table.table_id, table.spec, rows.row_ids)
            stays = (found.presence != PRESENT) | (found.epochs != rows.epochs) | (found.steps != rows.steps)
            # From here on nothing is awaited until the batch has its place in the log.
            row_ids = rows.row_ids[~stays]
            if touched:
                row_ids = np.setdiff1d(row_ids, np.concatenate(touched), assume_unique=False)
            is_dropped = ingest.catalog.get(table.spec.fqn) is not table  # or was made anew
            if not row_ids.size or is_dropped:
                return 0
            assert self._horizon is not None
            session = ingest.sessions.find(_RUN, _CLIENT)
            assert session is not None, "it has just said hello"
            request = idl.SetEmbeddingsRequest(
                run=_RUN,
                client=_CLIENT,
                epoch=_EPOCH,
                client_seq=session.last_client_seq + 1,
                step=self._horizon.step,
                time_us=self._context.clock_us(),
                ends_step=False,
                is_exact_cut=False,
                deltas=[_deletion(table, row_ids)],
            )
            args = idl.ParameterServer.setEmbeddings_args(request=request)
            # The log keeps requests in wire form, so encode this one as if it came over the wire.
            frame = memoryview(b"".join(bytes(segment) for segment in encode_message("setEmbeddings", CALL, 0, args)))
            decoded = decode_struct(idl.ParameterServer.setEmbeddings_args, frame, decode_header(frame).body_offset)
            append = ingest.place_own(decoded.request, frame)
        await ingest.wait_acked(append)
        return int(row_ids.size)

    async def finish(self) -> None:
        """Keep the frequencies of a pass that has judged every row."""
        if self._frequencies is not None and not self._is_dry_run:
            await run_in_thread_to_end(self._frequencies.save)

    async def close(self) -> None:
        """Close the frequency file. Idempotent."""
        frequencies, self._frequencies = self._frequencies, None
        if frequencies is not None:
            await run_in_thread_to_end(frequencies.close)

    async def _find_threshold(self, budget: int) -> None:
        """Count rows by version until the row budget's threshold is known."""
        recency, within, num_over = Recency(), None, 0
        while True:
            live = expired = 0
            scanner = self._new_scanner()
            try:
                await self._open_frequencies(is_written=False)
                while (judged := await self._look(scanner)) is not None:
                    facts, verdict = judged[0].facts, judged[1]
                    live += facts.row_ids.size
                    expired += int(np.count_nonzero(verdict.expired))
                    recency.add(facts.epochs[verdict.stays], facts.steps[verdict.stays])
            finally:
                await self.close()
            if within is None:
                num_over = live - expired - budget
            # Another scan finds fewer rows if some were updated meanwhile; then fewer expire.
            num_over = min(num_over, recency.num_rows)
            if num_over <= 0:
                return
            threshold, left = recency.threshold(num_over)
            if isinstance(threshold, BudgetThreshold):
                self._threshold = threshold
                return
            assert left is not None
            recency, within, num_over = Recency(threshold), threshold, left

    def _new_scanner(self) -> RowScanner:
        with_norms = self._policy.min_l2_norm is not None
        return RowScanner(self._context.store, self._table, with_norms=with_norms, piece_rows=self._context.piece_rows)

    async def _open_frequencies(self, *, is_written: bool) -> None:
        """Open the table's frequency file, if the policy needs it. Even when canceled, it may be open."""
        if self._policy.min_frequency is None:
            return
        path = self._context.directory / f"{self._table.table_id}.frequencies"
        decay, fingerprint = self._policy.decay, self._table.spec.fingerprint

        def open_file() -> None:  # a cancellation would lose a returned file
            self._frequencies = FrequencyFile(
                path, fingerprint, decay=decay, is_written=is_written, earlier=self._table.earlier
            )

        await run_in_thread_to_end(open_file)

    async def _look(self, scanner: RowScanner) -> tuple[Piece, Verdict] | None:
        """Return the next piece with its verdict, not sooner than the rate allows."""
        await self._pace.wait()
        judged = await run_in_thread_to_end(lambda: self._judge_piece(scanner))
        if judged is not None:
            self.num_looked_at += judged[0].num_rows
            self.report.scanned += judged[0].num_rows
            self.report.live += judged[0].facts.row_ids.size
            self._pace.count(judged[0].num_rows)
        return judged

    def _judge_piece(self, scanner: RowScanner) -> tuple[Piece, Verdict] | None:
        piece = scanner.next_piece()
        if piece is None:
            return None
        facts = piece.facts
        if self._frequencies is not None:
            found = self._frequencies.frequencies_of(facts.row_ids, facts.epochs, facts.steps)
            facts = dataclasses.replace(facts, frequencies=found)
            piece = dataclasses.replace(piece, facts=facts)
        assert self._horizon is not None
        return piece, judge(self._policy, self._horizon, facts, now_us=self._context.clock_us())

    def _keep_frequencies(self, facts: RowFacts, stays: npt.NDArray[np.bool_]) -> None:
        assert self._frequencies is not None and facts.frequencies is not None
        self._frequencies.keep(facts.row_ids[stays], facts.epochs[stays], facts.steps[stays], facts.frequencies[stays])


def _deletion(table: Table, row_ids: _Ids) -> object:
    return idl.TableDelta(
        fqn=table.spec.fqn,
        fingerprint=table.spec.fingerprint,
        column_offset=0,
        width=table.spec.dim,
        row_ids=b"",
        weights=b"",
        states=[],
        deleted_row_ids=row_ids.astype("<i8").tobytes(),
    )
