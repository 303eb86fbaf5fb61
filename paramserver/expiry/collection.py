"""Collect the tombstones of a table: raise its floor over those that are old, then drop what is not above it.

From the floor's record on, a deleted row at or below the floor means the same as no row (`schemas/version.py`), so it
does not matter when, or whether, RocksDB still has the tombstone. Before that record it does matter. So tombstones are
dropped only once the store never goes back behind the record after a crash, no lookup compares rows with an older view,
and no follower that may have read rows meanwhile has yet to take it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.expiry.policy import Horizon
from headrace.paramserver.expiry.scan import HeaderScanner, Pace
from headrace.paramserver.expiry.table_pass import PassContext, TableReport
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.system.event_loop import run_in_thread_to_end
from headrace.schemas.row_records import (
    DELETED,
    FLAG_DELETED,
    MISSING,
    RecordLayout,
    encode_keys,
)
from headrace.schemas.version import is_newer

__all__ = ["TombstoneCollection"]

_Ids = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Found = tuple[int, list[bytes]]
"""How many ids, and the keys of their records."""
_Find = Callable[[_Ids], _Found]
# A follower that is up to date takes a new record within milliseconds; the lease under which a replica without a name
# has loaded ends within a minute; one that reads a whole table takes longer.
_FOLLOWERS_WAIT_S, _FOLLOWERS_POLL_S = 70.0, 0.1


class TombstoneCollection:
    """Collects the tombstones of one table of a shard, and counts them in `report`; a dry run only counts.

    Without the report of an expiry pass, it makes one, which counts the rows too. Thread: the event loop's.
    """

    def __init__(
        self, context: PassContext, table: Table, report: TableReport | None = None, *, is_dry_run: bool = False
    ) -> None:
        self.report = report or TableReport(fqn=table.spec.fqn)
        self._counts_rows = report is None
        self._context, self._table, self._is_dry_run = context, table, is_dry_run
        self._pace = Pace(context.rows_per_s, context.sleep)
        self._layouts: list[RecordLayout] = []
        self._floor = table.floor

    async def run(self) -> None:
        """Read all headers, raise the floor, and drop tombstones that are not above it.

        Cancellation: what is dropped stays dropped; the rest waits for another collection.

        Raises:
            StorageError: The disk failed, or (CorruptionError) a record cannot be read.
            UnavailableError: The log or the store has stopped.
        """
        if not await self._find_floor():
            return
        if not self._is_dry_run:
            if self._floor > self._table.floor:
                await self._context.writer.raise_floor(self._table, self._floor)
            if not await self._may_drop():
                return
        for number, layout in enumerate(self._layouts):
            self.report.collected += await self._drop(layout, partial(self._gone_rows, number))

    async def _find_floor(self) -> bool:
        """Find the highest version of an old tombstone below all that training may still send.

        Return whether there may be tombstones to drop.
        """
        context, table = self._context, self._table
        owner = None if table.owner is None else table.owner.run
        horizon = Horizon.of(context.ingest.sessions, context.ingest.accepted_seq, owner=owner)
        await context.applier.wait_applied(horizon.seq)
        self._layouts = [table.layout_of(shard) for shard in context.store.layouts(table.table_id)]
        oldest_kept_us = context.clock_us() - round(context.tombstone_keep_s * 1e6)
        has_any = False
        for layout in self._layouts:
            scanner = self._scanner(layout)
            while (piece := await self._look(scanner)) is not None:
                is_deleted = (piece[1]["flags"] & FLAG_DELETED) != 0
                if self._counts_rows and layout is self._layouts[0]:
                    self.report.scanned += is_deleted.size
                    self.report.live += int(np.count_nonzero(~is_deleted))
                headers = piece[1][is_deleted]
                versions = headers["epoch"].astype(np.int64), headers["step"].astype(np.int64)
                is_old = (headers["time_us"] <= oldest_kept_us) & horizon.may_go(*versions)
                has_any |= bool((is_old | ~is_newer(*versions, *self._floor)).any())
                if is_old.any():
                    order = np.lexsort((versions[1][is_old], versions[0][is_old]))
                    epoch, step = (int(part[is_old][order[-1]]) for part in versions)
                    self._floor = max(self._floor, (epoch, step))
        return has_any

    async def _may_drop(self) -> bool:
        """Wait until the floor is in the store for good and everybody has it; return False when a follower has not."""
        context = self._context
        seq = context.ingest.accepted_seq
        await context.applier.wait_applied(seq)
        await run_in_thread_to_end(context.store.flush)
        assert context.store.durable_seq >= seq, "a crash would apply records from before the floor again"
        waited_s = 0.0
        while behind := next((lease for lease in context.followers.held() if lease.seq <= seq), None):
            if waited_s >= _FOLLOWERS_WAIT_S:
                note = f"follower {behind.name!r} is still at record {behind.seq}, so tombstones wait for another pass"
                self.report.note = "; ".join(filter(None, (self.report.note, note)))
                return False
            await context.sleep(_FOLLOWERS_POLL_S)
            waited_s += _FOLLOWERS_POLL_S
        await context.applier.readers_ended()
        return True

    async def _drop(self, layout: RecordLayout, find: _Find) -> int:
        """Remove what `find` finds among the ids of each piece; return how many ids that were."""
        context, table_id, num_dropped = self._context, self._table.table_id, 0
        scanner = self._scanner(layout)
        while (piece := await self._look(scanner)) is not None:
            ids, headers = piece
            is_low = ~is_newer(headers["epoch"].astype(np.int64), headers["step"], *self._floor)
            is_low &= (headers["flags"] & FLAG_DELETED) != 0
            found = await run_in_thread_to_end(partial(find, ids[is_low]))
            if found[1] and not self._is_dry_run:

                def remove(ids: _Ids = ids[is_low]) -> None:
                    nonlocal found
                    found = find(ids)  # again, because rows may have been written since; now nothing else writes
                    context.store.remove(table_id, found[1])

                await context.applier.run_at(context.ingest.accepted_seq, remove)
            num_dropped += found[0]
        return num_dropped

    def _gone_rows(self, number: int, ids: _Ids) -> _Found:
        """Return the keys of those rows of which only tombstones are left, none above the floor. Thread: any.

        A live record in other columns may be hidden by tombstones, which then must stay. Rows with a record in the
        column shards before `number` were looked at there.
        """
        is_gone, is_seen = np.ones(ids.size, bool), np.zeros(ids.size, bool)
        records: list[tuple[list[bytes], _Bools]] = []
        for other, layout in enumerate(self._layouts):
            keys = encode_keys(self._table.table_id, layout.shard, ids)
            found, presence = layout.decode(self._context.store.get(keys))
            is_low = ~is_newer(found["epoch"].astype(np.int64), found["step"], *self._floor)
            is_gone &= (presence == MISSING) | ((presence == DELETED) & is_low)
            if other < number:
                is_seen |= presence != MISSING
            records.append((keys, presence != MISSING))
        is_gone &= ~is_seen & np.any([is_there for _, is_there in records], axis=0)
        gone = [itertools.compress(keys, is_gone & is_there) for keys, is_there in records]
        return int(np.count_nonzero(is_gone)), list(itertools.chain.from_iterable(gone))

    def _scanner(self, layout: RecordLayout) -> HeaderScanner:
        return HeaderScanner(self._context.store, self._table, layout, piece_rows=self._context.piece_rows)

    async def _look(self, scanner: HeaderScanner) -> tuple[_Ids, npt.NDArray[Any]] | None:
        await self._pace.wait()
        piece = await run_in_thread_to_end(scanner.next_piece)
        if piece is not None:
            self._pace.count(piece[0].size)
        return piece
