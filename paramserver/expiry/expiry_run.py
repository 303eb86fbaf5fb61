"""One run of expiry over one table of a shard: look at every row, decide, delete.

Scanning and deciding is done in a thread, a piece at a time, no faster than the rate that is set; tombstones are
written one batch at a time, each durable before the next, and wait like everyone's while the store is behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.paramserver.expiry.expiry_budget import BudgetCut, Recency
from headrace.paramserver.expiry.expiry_frequency import FrequencyFile
from headrace.paramserver.expiry.expiry_policy import ExpiryPolicy, Horizon, RowFacts, Verdict, judge
from headrace.paramserver.expiry.expiry_scan import Piece, RowScanner, can_have_norms
from headrace.paramserver.expiry.expiry_writer import MAX_BATCH_ROWS, TombstoneWriter
from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.process.whole_work import to_its_end
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.errors import ConfigError, OverloadedError
from headrace.schemas.tables import ColumnShard

__all__ = ["RunContext", "TableReport", "TableRun", "check_policy"]

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What every run of a shard needs.

    Attributes:
        ingest: Knows how far training has come.
        applier: Brings the store up to there.
        store: Where the rows are.
        writer: Writes tombstones.
        directory: Where frequencies are kept, a file a table.
        num_shards: A table's row budget is divided by it.
        rows_per_s: Rows to look at in a second, at most; 0 for no bound.
        clock_us: Wall clock, microseconds since 1970.
        sleep: Waits so many seconds.
        piece_rows: Rows of a piece.
    """

    ingest: Ingest
    applier: Applier
    store: RowStore
    writer: TombstoneWriter
    directory: Path
    num_shards: int
    rows_per_s: int
    clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    piece_rows: int = 8192


@dataclass(kw_only=True, slots=True)
class TableReport:
    """What a run has found, so far or in the end.

    Attributes:
        fqn: The table.
        scanned: Rows that were looked at in the last pass, deleted ones too.
        live: Of them, rows that were there.
        expired: Rows that were deleted; in a dry run, that would be.
        spared: Rows that the policy names but that training may still be writing: they wait for another run.
        by_policy: Rows that each policy has named and that may go; several may name the same row.
        note: Why nothing can expire; empty otherwise.
    """

    fqn: str
    scanned: int = 0
    live: int = 0
    expired: int = 0
    spared: int = 0
    by_policy: Counter[str] = field(default_factory=Counter)
    note: str = ""


def check_policy(table: Table, policy: ExpiryPolicy) -> None:
    """Check that a policy can be asked of a table.

    Raises:
        ConfigError: It asks for the norm of weights that are no floating-point numbers.
    """
    if policy.min_l2_norm is not None and not can_have_norms(table):
        raise ConfigError(f"table {table.spec.fqn!r}: min_l2_norm of weights of type {table.spec.dtype.name}")


class TableRun:
    """One run over one table. Call `run`; or, a step at a time, `begin`, then `scan` and `delete`.

    Thread: the event loop's.

    Attributes:
        report: What has been found.
        num_looked_at: Rows of all passes so far.
    """

    def __init__(self, context: RunContext, table: Table, policy: ExpiryPolicy, *, is_dry_run: bool = False) -> None:
        """Prepare.

        Args:
            context: Of the shard.
            table: Whose rows.
            policy: By which.
            is_dry_run: Delete nothing, and change no frequency.

        Raises:
            ConfigError: See `check_policy`.
        """
        check_policy(table, policy)
        self.report = TableReport(fqn=table.spec.fqn)
        self.num_looked_at = 0
        self._context, self._table, self._policy = context, table, policy
        self._is_dry_run = is_dry_run
        self._tombstones = _Tombstones()
        self._horizon: Horizon | None = None
        self._scanner: RowScanner | None = None
        self._frequencies: FrequencyFile | None = None
        self._cut: BudgetCut | None = None
        self._num_named = self._num_kept_over = 0  # rows spared: those that policies name, those beyond the budget
        self._due_s = time.monotonic()

    async def run(self) -> TableReport:
        """Look at all rows and delete those that go.

        Cancellation: what was deleted stays so; the rest waits for another run. Frequencies are as before.

        Raises:
            CorruptionError: A record cannot be read.
            StorageError: The disk failed.
            UnavailableError: The log or the store has stopped.
        """
        try:
            if await self.begin():
                while await self.scan():
                    await self.delete()
                await self.delete(is_last=True)
                await self._finish()
        finally:
            await self._close_frequencies()
        return self.report

    async def begin(self) -> bool:
        """Fix by what the rows are judged, and find the cut of the row budget; say whether any row may go."""
        context, ingest = self._context, self._context.ingest
        # No await between the two: the position and what the sessions are at it.
        self._horizon = Horizon.of(ingest.sessions, ingest.accepted_seq)
        if self._horizon.newest is None:
            self.report.note = "no run has ended a step on this shard, so nothing expires"
            return False
        await context.applier.wait_applied(self._horizon.seq)
        if self._policy.max_rows is not None:
            await self._find_cut(-(-self._policy.max_rows // context.num_shards))
        self._scanner = self._new_scanner()
        await self._open_frequencies(is_written=not self._is_dry_run)
        self.report.scanned = self.report.live = 0
        return True

    async def scan(self) -> bool:
        """Look at the next rows; say whether there were any."""
        assert self._scanner is not None
        judged = await self._look(self._scanner)
        if judged is None:
            return False
        piece, verdict = judged
        facts, report = piece.facts, self.report
        expired = verdict.expired
        if self._cut is not None:
            over = self._cut.take(facts.epochs, facts.steps, verdict.may_go & ~expired)
            report.by_policy["max_rows"] += int(np.count_nonzero(over))
            expired = expired | over
        report.by_policy.update(verdict.by_policy)
        report.expired += int(np.count_nonzero(expired))
        self._num_named += int(np.count_nonzero(verdict.named & ~verdict.may_go))
        report.spared = max(self._num_named, self._num_kept_over)  # the same rows may be both
        if self._frequencies is not None and not self._is_dry_run:
            await to_its_end(lambda: self._keep_frequencies(facts, ~expired))
        if not self._is_dry_run:
            self._tombstones.add(piece, expired)
        return True

    async def delete(self, *, is_last: bool = False) -> None:
        """Write what has been found to go: whole batches, or all of it."""
        horizon = self._horizon
        assert horizon is not None
        for epoch, highest_step, rows in self._tombstones.take(is_last=is_last):
            step = horizon.tombstone_step(epoch, highest_step)
            while True:
                try:
                    await self._context.writer.delete(self._table, rows, epoch=epoch, step=step)
                    break
                except OverloadedError as exc:  # by others: expiry can wait
                    await self._context.sleep(max(exc.retry_after_s, 0.1))

    async def _finish(self) -> None:
        if self._frequencies is not None and not self._is_dry_run:
            await to_its_end(self._frequencies.save)

    async def _find_cut(self, budget: int) -> None:
        """Count rows by version until it is known which of them are beyond the budget."""
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
                    stays = verdict.may_go & ~verdict.expired
                    recency.add(facts.epochs[stays], facts.steps[stays])
            finally:
                await self._close_frequencies()
            if within is None:
                num_over = live - expired - budget
                self._num_kept_over = max(0, num_over - recency.num_rows)
            # Another pass finds fewer rows where some have been updated meanwhile; then fewer go.
            num_over = min(num_over, recency.num_rows)
            if num_over <= 0:
                return
            cut, left = recency.cut(num_over)
            if isinstance(cut, BudgetCut):
                self._cut = cut
                return
            assert left is not None
            recency, within, num_over = Recency(cut), cut, left

    def _new_scanner(self) -> RowScanner:
        with_norms = self._policy.min_l2_norm is not None
        return RowScanner(self._context.store, self._table, with_norms=with_norms, piece_rows=self._context.piece_rows)

    async def _open_frequencies(self, *, is_written: bool) -> None:
        """Open the table's file of frequencies, if the policy asks for them.

        Cancellation: it may be open all the same, and `_close_frequencies` closes it.
        """
        if self._policy.min_frequency is None:
            return
        path = self._context.directory / f"{self._table.table_id}.frequencies"
        decay, fingerprint = self._policy.decay, self._table.spec.fingerprint

        def open_file() -> None:  # what it returned would be lost
            self._frequencies = FrequencyFile(path, fingerprint, decay=decay, is_written=is_written)

        await to_its_end(open_file)

    async def _close_frequencies(self) -> None:
        frequencies, self._frequencies = self._frequencies, None
        if frequencies is not None:
            await to_its_end(frequencies.close)

    async def _look(self, scanner: RowScanner) -> tuple[Piece, Verdict] | None:
        """Return the next piece with what is to become of it, not sooner than the rate allows."""
        if (wait_s := self._due_s - time.monotonic()) > 0:
            await self._context.sleep(wait_s)
        judged = await to_its_end(lambda: self._judge_piece(scanner))
        if judged is not None:
            self.num_looked_at += judged[0].num_rows
            self.report.scanned += judged[0].num_rows
            self.report.live += judged[0].facts.row_ids.size
            if self._context.rows_per_s:
                self._due_s = max(self._due_s, time.monotonic() - 1) + judged[0].num_rows / self._context.rows_per_s
        return judged

    def _judge_piece(self, scanner: RowScanner) -> tuple[Piece, Verdict] | None:
        piece = scanner.next_piece()
        if piece is None:
            return None
        facts = piece.facts
        if self._frequencies is not None:
            facts = _with_frequencies(facts, self._frequencies)
            piece = Piece(piece.num_rows, facts, piece.shards)
        assert self._horizon is not None
        return piece, judge(self._policy, self._horizon, facts, now_us=self._context.clock_us())

    def _keep_frequencies(self, facts: RowFacts, stays: npt.NDArray[np.bool_]) -> None:
        assert self._frequencies is not None and facts.frequencies is not None
        self._frequencies.keep(facts.row_ids[stays], facts.epochs[stays], facts.steps[stays], facts.frequencies[stays])


class _Tombstones:
    """Rows that go and are not deleted yet, by epoch: at most two batches and a piece of them."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, dict[ColumnShard, _Ids]]]] = {}
        self._num_rows: Counter[int] = Counter()

    def add(self, piece: Piece, expired: npt.NDArray[np.bool_]) -> None:
        facts = piece.facts
        for epoch in np.unique(facts.epochs[expired]).tolist():
            mask = expired & (facts.epochs == epoch)
            row_ids, highest_step = facts.row_ids[mask], int(facts.steps[mask].max())
            # In every column shard that has a record of the row, so that it goes whole.
            shards = {shard: np.intersect1d(row_ids, ids, assume_unique=True) for shard, ids in piece.shards.items()}
            self._waiting.setdefault(epoch, []).append((highest_step, shards))
            self._num_rows[epoch] += row_ids.size

    def take(self, *, is_last: bool) -> Iterable[tuple[int, int, dict[ColumnShard, _Ids]]]:
        """Yield (epoch, highest step, row ids by column shard) of batches, and forget them."""
        for epoch in list(self._waiting):
            if not is_last and self._num_rows[epoch] < MAX_BATCH_ROWS:
                continue
            del self._num_rows[epoch]
            for highest_step, rows in _batches(self._waiting.pop(epoch)):
                yield epoch, highest_step, rows


def _batches(found: list[tuple[int, dict[ColumnShard, _Ids]]]) -> Iterable[tuple[int, dict[ColumnShard, _Ids]]]:
    """Cut rows into batches by row id, so that all column shards of a row are in one."""
    highest_step = max(step for step, _ in found)
    shards = {
        shard: np.concatenate([rows[shard] for _, rows in found if shard in rows])
        for shard in dict.fromkeys(shard for _, rows in found for shard in rows)
    }
    row_ids = np.unique(np.concatenate(list(shards.values())))
    for start in range(0, row_ids.size, MAX_BATCH_ROWS):
        first, last = row_ids[start], row_ids[min(start + MAX_BATCH_ROWS, row_ids.size) - 1]
        yield highest_step, {shard: ids[(ids >= first) & (ids <= last)] for shard, ids in shards.items()}


def _with_frequencies(facts: RowFacts, frequencies: FrequencyFile) -> RowFacts:
    return RowFacts(
        row_ids=facts.row_ids,
        epochs=facts.epochs,
        steps=facts.steps,
        times_us=facts.times_us,
        norms=facts.norms,
        frequencies=frequencies.frequencies_of(facts.row_ids, facts.epochs, facts.steps),
    )
