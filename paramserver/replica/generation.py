"""One whole copy of the tables: what lookups read, and the one place where updates become visible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.replica.identity_map import IdentityMap
from headrace.paramserver.replica.shard_tail import Change, Cut, ShardTail
from headrace.paramserver.replica.table import ReplicaTable
from headrace.paramserver.replica.version_gate import VersionGate
from headrace.schemas.errors import OverloadedError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.near_names import first_of
from headrace.schemas.tables import TableSpec

__all__ = ["Generation"]


class Generation:
    """Tables and the shards' logs that they follow.

    With `is_by_step` nothing of the newest run becomes visible but whole steps: when every shard has come to the same
    step exactly, all that leads there is applied in one write of the gate, so a reader sees all tables before it or
    behind it. What others write while the run stands at a step (a backfill, say) is no part of a step, and is shown
    with the one that is visible. Without, each record is applied when it comes, and a reader sees each whole.

    Thread: one takes updates; any may read through `gate`.

    Attributes:
        server_id: The store that it is a copy of.
        tables: By fqn. Tables are added, never removed.
        identities: By fqn, of tables that have identities.
        tails: By shard.
        gate: Readers look through it.
        visible: (epoch, step) up to which everything is visible; None when it is at no step yet.
        failure: Why an update was applied in part. What is read once it is there is of no one moment.
        is_shown: Lookups see it. Until they do, it may be between steps.
        limits: Last record of each shard that may be shown for now; None where all may be. By step, nothing is shown
            while there are limits.
    """

    def __init__(
        self,
        server_id: str,
        tails: Sequence[ShardTail],
        *,
        is_by_step: bool,
        make_table: Callable[[TableSpec], ReplicaTable | None],
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """Begin with empty tables; load them, then call `advance`.

        Args:
            server_id: Identity of the store.
            tails: One a shard.
            is_by_step: See above.
            make_table: Makes a table, or None for one that is not wanted.
            clock_us: Wall clock, microseconds since 1970.
        """
        self.server_id = server_id
        self.tails = list(tails)
        self.tables: dict[str, ReplicaTable] = {}
        self.identities: dict[str, IdentityMap] = {}
        self.gate = VersionGate()
        self.visible: tuple[int, int] | None = None
        self.failure: Exception | None = None
        self.is_shown = False
        self.limits: Sequence[int] | None = None
        self._is_by_step = is_by_step
        self._make_table = make_table
        self._clock_us = clock_us
        self._unwanted: set[str] = set()
        self.add_tables(table.spec for tail in self.tails for table in tail.catalog)

    def add_tables(self, specs: Iterable[TableSpec]) -> None:
        """Make the tables that are not there yet."""
        # Other dicts: readers of the old ones are not disturbed. Who finds a table finds its identities.
        tables, identities = dict(self.tables), dict(self.identities)
        try:
            for spec in specs:
                if spec.fqn not in tables and spec.fqn not in self._unwanted:
                    table = self._make_table(spec)
                    if table is None:
                        self._unwanted.add(spec.fqn)
                        continue
                    if spec.has_identities:
                        identities[spec.fqn] = IdentityMap(spec)
                    tables[spec.fqn] = table
        finally:  # also those before one that cannot be made, so that they are closed
            self.identities, self.tables = identities, tables

    def table(self, fqn: str) -> ReplicaTable:
        """Return a table.

        Raises:
            UnknownTableError: There is none of that name.
        """
        table = self.tables.get(fqn)
        if table is None:
            raise UnknownTableError(f"no table {fqn!r} in this replica; it has {first_of(sorted(self.tables))}")
        return table

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        tables = sum(table.size_bytes for table in self.tables.values())
        tables += sum(identities.size_bytes for identities in self.identities.values())
        return tables + sum(tail.pending_bytes for tail in self.tails)

    @property
    def is_on_disk(self) -> bool:
        """Whether to take updates is to wait for a disk."""
        return any(isinstance(table, DiskTable) for table in self.tables.values())

    def take(self, shard: int, updates: Sequence[Update], last_seq: int) -> bool:
        """Take records of a shard, and show what can be shown; return whether anything has become visible.

        Raises:
            CorruptionError: A record cannot be applied.
            HeadraceError: There is no room for a new table.
        """
        tail = self.tails[shard]
        for update in updates:
            tail.take(update)
        tail.last_seq = max(last_seq, tail.seq)
        if any(update.kind == idl.UpdateKind.HELLO for update in updates):
            self.add_tables(table.spec for table in tail.catalog)
        return self.advance()

    def advance(self) -> bool:
        """Show what can be shown; return whether anything has become visible."""
        if self._is_by_step:
            return self._show_step()
        return self._show_all()

    def is_waiting(self, shard: int, max_bytes: int) -> bool:
        """Return whether a shard is so far ahead of another that more of it should not be fetched now.

        Never true of all shards, but while there are limits: the one behind brings what the others wait for.
        """
        tail = self.tails[shard]
        if tail.pending_bytes <= max_bytes:
            return False
        if self.limits is not None:
            return True
        cut = tail.newest_cut
        return cut is not None and any(other.newest_cut is None or other.newest_cut < cut for other in self.tails)

    def make_room(self, shard: int, max_bytes: int) -> None:
        """Bound what is pending of a shard, after `take`, where to wait for other shards is of no use.

        A copy that is not shown yet applies all of it: nobody sees that it is between steps then. No step is lost that
        it could have come to. Every other shard has been taken to the last step in there or beyond it, and has none in
        common with it, else that would have been applied.

        Raises:
            OverloadedError: The copy is shown: it cannot go on within the bound.
        """
        tail = self.tails[shard]
        if tail.pending_bytes <= max_bytes or self.is_waiting(shard, max_bytes):
            return
        if self.is_shown:
            raise OverloadedError(
                f"shard {shard}: updates that wait for the end of a step take more than max_pending_bytes, {max_bytes}"
            )
        self.visible = None
        now_us = self._clock_us()
        with self.gate.write():
            while tail.pending:
                change = tail.pending[0]
                self._apply(change)
                tail.shown(change, now_us)

    def close(self) -> None:
        """Free what the tables hold beside memory; nothing is taken or looked up any more. Idempotent.

        Raises:
            StorageError: A file could not be removed.
        """
        for table in self.tables.values():
            table.close()

    def freshness(self) -> list[Freshness]:
        """Return how far behind each shard's part is."""
        found = []
        for tail in self.tails:
            # A hello, or the end of a step without rows, waits for the next step and keeps nothing from lookups.
            has_rows = tail.seq < tail.last_seq or any(change.deltas for change in list(tail.pending))
            is_behind = tail.visible_seq < tail.last_seq and has_rows
            found.append(
                Freshness(
                    shard=tail.shard,
                    visible_seq=tail.visible_seq,
                    last_seq=tail.last_seq,
                    is_behind=is_behind,
                    lag_s=max(self._clock_us() - tail.visible_time_us, 0) / 1e6
                    if is_behind and tail.visible_time_us
                    else 0.0,
                    lag_steps=len({change.step for change in list(tail.pending) if change.deltas}),
                    pending_bytes=tail.pending_bytes,
                    delay=tail.delay,
                )
            )
        return found

    def _show_all(self) -> bool:
        has_changed, limits = False, self.limits  # the loop may lift them while this runs in a thread
        for tail in self.tails:
            while tail.pending and (limits is None or tail.pending[0].seq <= limits[tail.shard]):
                change = tail.pending[0]
                if change.deltas:
                    with self.gate.write():
                        self._apply(change)
                tail.shown(change, self._clock_us())
                has_changed = True
        if any(tail.pending for tail in self.tails):
            return has_changed  # held: the sessions know of steps whose rows nobody sees yet
        epoch = max((tail.epoch for tail in self.tails), default=0)
        visible = (epoch, min((tail.watermark_of(epoch) for tail in self.tails), default=-1))
        has_changed = has_changed or visible != self.visible
        self.visible = visible
        return has_changed

    def _show_step(self) -> bool:
        cut = None if self.limits is not None else self._newest_common_cut()
        if cut is None:
            return False
        is_new = cut[:2] != self.visible
        if not (is_new or any(change.cut == cut for tail in self.tails for change in tail.pending)):
            return False
        with self.gate.write():
            for tail in self.tails:
                self._show_up_to(tail, cut)
            self.visible = cut[:2]
        return True

    def _newest_common_cut(self) -> Cut | None:
        common: set[Cut] | None = None
        for tail in self.tails:
            cuts = {change.cut for change in tail.pending if change.cut is not None}
            if tail.visible_cut is not None:
                cuts.add(tail.visible_cut)
            common = cuts if common is None else common & cuts
            if not common:
                return None
        return max(common or (), default=None)

    def _show_up_to(self, tail: ShardTail, cut: Cut) -> None:
        last = max((change.seq for change in tail.pending if change.cut == cut), default=0)
        now_us = self._clock_us()
        while tail.pending and tail.pending[0].seq <= last:
            change = tail.pending[0]
            self._apply(change)
            tail.shown(change, now_us)

    def _apply(self, change: Change) -> None:
        try:
            self._apply_deltas(change)
        except Exception as exc:  # also no memory, or a bug
            self.failure = exc  # before the gate opens: who has looked meanwhile will know
            raise

    def _apply_deltas(self, change: Change) -> None:
        for delta in change.deltas:
            table = self.tables.get(delta.spec.fqn)
            if table is not None:
                table.apply(delta, epoch=change.epoch, step=change.step, is_conditional=change.is_conditional)
            identities = self.identities.get(delta.spec.fqn)
            if identities is not None:
                identities.apply(delta, epoch=change.epoch, step=change.step, is_conditional=change.is_conditional)
