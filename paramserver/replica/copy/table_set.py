"""The tables of one copy: what lookups read, and the one place where updates become visible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.paramserver.log.interface import is_housekeeping
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import Change, Cut, Freshness, ShardTail
from headrace.paramserver.replica.tables.base import Found, Ids, ReplicaTable, Rows, SeqLock
from headrace.paramserver.replica.tables.dense import DenseTensors
from headrace.paramserver.replica.tables.identity_map import IdentityMap
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.store.deltas import tally_of_deltas
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError, OverloadedError, RequestError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.table_names import TableNames, model_of, path_of
from headrace.schemas.tables import StateSpec, TableSpec
from headrace.schemas.version import Version

__all__ = ["TableSet"]


class TableSet:
    """Tables, and the ends of the shards' logs that they follow.

    With `is_by_step`, the newest run becomes visible in whole steps only. Once all shards have the same consistent cut,
    everything up to it is applied in one write of the seqlock, so a reader sees all tables before it or after it.
    Writes by others while the run stands at a step, such as a backfill, belong to no step and are shown with the
    visible one. Without `is_by_step`, each record is applied when it comes, and a reader sees each whole.

    Dense tensors are no tables here: their rows are put together when they come (`dense`), and become visible as a
    whole, by step with the cut of exactly their step.

    Thread: one thread takes updates; any may read through `seqlock`.
    """

    def __init__(
        self,
        server_id: str,
        tails: Sequence[ShardTail],
        *,
        is_by_step: bool,
        make_table: Callable[[TableSpec], ReplicaTable | None],
        dense: DenseTensors | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """Create empty tables (`make_table` returns None for unwanted ones); load them, then call `advance`.

        `dense` has the rows of dense tensors that are loaded already.
        """
        self.server_id = server_id
        self.tails = list(tails)
        self.tables: dict[str, ReplicaTable] = {}  # tables are added, never removed
        self.identities: dict[str, IdentityMap] = {}
        self.dense = DenseTensors() if dense is None else dense
        self.seqlock = SeqLock()
        self.visible: tuple[int, int] | None = None  # everything up to (epoch, step); None while at no step
        self.failure: Exception | None = None  # why an update was applied in part: reads after it mix moments
        self.is_shown = False  # lookups see these tables; before, they may be between steps
        # Last record of each shard to show during a pause; None without one. By step, a pause shows nothing.
        self.limits: Sequence[int] | None = None
        self.held: Version | None = None  # the recorded step at which lookups stay; see `hold_recorded`
        self._holds_recorded = False
        self._recorded: Version | None = None  # what is visible, if the trainer has a recording of it
        self._is_by_step = is_by_step
        self._make_table = make_table
        self._clock_us = clock_us
        self._unwanted: set[str] = set()
        self._names = TableNames(())
        self._shown: dict[str, ReplicaTable] = {}  # those of `tables` that lookups find
        self._hidden: list[str] = []  # the names of the others
        self._retired: list[DiskTable] = []  # dropped ones, whose files are closed with the others
        self._drop_epochs: dict[str, int] = {}  # of the last drop that a shard has told, by name
        for tail in self.tails:
            self._drop_epochs |= {
                name: max(epoch, self._drop_epochs.get(name, 0)) for name, epoch in tail.catalog.drop_epochs.items()
            }
        self._add_current()
        self._follow_dense()

    def _add_current(self) -> None:
        """Add the tables of all shards, except those that another shard has dropped since."""
        uses: dict[str, str | None] = {}
        for tail in sorted(self.tails, key=lambda tail: tail.heard_epoch):  # the newest trainer's last: its uses count
            specs = [table.spec for table in tail.catalog if not self._is_behind(tail, table.spec.fqn)]
            self.add_tables(specs)
            uses |= {spec.fqn: spec.uses for spec in specs}
        for name, table in self.tables.items():
            if table.spec.uses != (said := uses.get(name, table.spec.uses)):
                table.spec = table.spec.described(said)

    def _is_behind(self, tail: ShardTail, name: str) -> bool:
        """Return whether another shard has dropped the table that a shard has under a name."""
        return tail.catalog.drop_epochs.get(name, 0) < self._drop_epochs.get(name, 0)

    def _drop(self, tail: ShardTail, name: str) -> None:
        """Drop a table as soon as one shard has; what other shards still send of it counts for nothing."""
        epoch = tail.catalog.drop_epochs.get(name, 0)
        if epoch <= self._drop_epochs.get(name, 0):
            return
        self._drop_epochs[name] = epoch
        for each in self.tails:
            each.forget(name)
        with self.seqlock.write():
            if isinstance(table := self.tables.get(name), DiskTable):
                self._retired.append(table)  # lookups may be reading its files
            self.tables = {fqn: each for fqn, each in self.tables.items() if fqn != name}
            self.identities = {fqn: each for fqn, each in self.identities.items() if fqn != name}
            self._update_names()

    def _follow_dense(self) -> None:
        catalogs = [tail.catalog for tail in self.tails]
        self.dense.follow(catalogs, lambda name: self.tails[0].wants(name))

    def add_tables(self, specs: Iterable[TableSpec]) -> None:
        """Create the tables that do not exist yet; grow those that have more rows now."""
        # Replace the dicts: readers may iterate over the old ones. A reader that finds a table finds its identities.
        tables, identities = dict(self.tables), dict(self.identities)
        try:
            for spec in specs:
                known = tables.get(spec.fqn)
                if known is not None and spec.is_growth_of(known.spec):
                    with self.seqlock.write():
                        if spec.has_identities:
                            identities[spec.fqn].grow(spec)
                        known.grow(spec)
                elif known is None and spec.fqn not in self._unwanted and not spec.is_dense:
                    table = self._make_table(spec)
                    if table is None:
                        self._unwanted.add(spec.fqn)
                        continue
                    if spec.has_identities:
                        identities[spec.fqn] = IdentityMap(spec)
                    tables[spec.fqn] = table
        finally:  # also tables before one that failed, so that they are closed
            self.identities, self.tables = identities, tables
            self._update_names()

    def _is_whole(self, name: str) -> bool:
        """Return whether all shards show all rows of a table. Without steps, it is shown with what there is of it."""
        return not self._is_by_step or all(tail.shows_whole(name) for tail in self.tails)

    @property
    def hidden(self) -> list[str]:
        """Tables that lookups do not see yet, because they are incomplete. Thread: any."""
        return sorted(self._hidden)

    @property
    def incomplete(self) -> list[str]:
        """Tables of which the trainer has not sent all rows yet. Thread: any."""
        return [fqn for fqn in sorted(self.tables) if any(tail.is_incomplete(fqn) for tail in self.tails)]

    def _update_names(self) -> None:
        """Let lookups see tables that are whole. Where lookups see it, REQUIRES: the seqlock is being written."""
        # Rows that lookups have found stay, whatever their trainer sends anew.
        shown = {name: table for name, table in self.tables.items() if name in self._shown or self._is_whole(name)}
        self._hidden = [name for name in self.tables if name not in shown]
        self._shown, self._names = shown, TableNames(shown)

    def keep_shown(self, before: TableSet) -> None:
        """Show the tables that a copy before this one shows, also incomplete ones.

        REQUIRES: the seqlock is being written. This copy has all rows that lookups have found there, whatever the
        trainer sends anew.
        """
        kept = {
            name: table
            for name, table in self.tables.items()
            if name in before._shown and before._drop_epochs.get(name) == self._drop_epochs.get(name)
        }
        self._shown = kept | self._shown
        self._update_names()

    def table(self, fqn: str | TableSpec) -> ReplicaTable:
        """Return a table by its name, or by its path if only one model has it; else raise `UnknownTableError`.

        A spec means the table of its name, and raises `ConfigError` if that has another dim or type by now.
        """
        if isinstance(fqn, TableSpec):
            found = self.table(fqn.fqn)
            if not found.spec.has_rows_like(fqn):
                theirs, ours = (f"{spec.dim} × {spec.dtype.name.lower()}" for spec in (found.spec, fqn))
                raise ConfigError(
                    f"table {fqn.fqn!r} is {theirs} now and {ours} in the served model: give the changed model"
                )
            return found
        table = self._shown.get(fqn)
        if table is None:
            name = self._names.find(fqn)
            if name is None and (tensor := self.dense.find(fqn)) is not None:
                raise RequestError(f"{tensor!r} is a dense tensor and no table: read it with dense()")
            dropped = [each for each in self._drop_epochs if _means(fqn, each)]
            unfinished = [each for each in self._hidden if _means(fqn, each)]
            if name is None and unfinished:
                raise UnknownTableError(
                    f"table {unfinished[0]!r} is incomplete: its trainer or backfill has not sent all rows yet, and by "
                    "step it is shown whole"
                )
            if name is None and dropped:
                raise UnknownTableError(f"table {dropped[0]!r} was dropped in epoch {self._drop_epochs[dropped[0]]}")
            if name is None:
                raise UnknownTableError(f"no table {fqn!r} in this replica; {describe_near(fqn, self.tables)}")
            table = self._shown[name]
        return table

    def any_table(self, fqn: str) -> ReplicaTable:
        """Return a table as `table` does, also one that lookups do not see yet."""
        table = self.tables.get(fqn)
        return self.table(fqn) if table is None else table

    def dense_spec(self, name: str) -> TableSpec | None:
        """Return the spec of the dense tensor that a name means, or a path that no table has; None if there is none."""
        fqn = self.dense.find(name)
        if fqn is None or (fqn != name and (name in self._shown or self._names.find(name) is not None)):
            return None
        return self.dense.specs_of(model_of(fqn)).get(fqn)

    def find_rows(self, fqn: str | TableSpec, identities: Ids) -> Ids:
        """Return the row that has each of int64[n] identities; -1 where no row has it. Thread: any.

        Raises:
            UnknownTableError: There is no table of this name.
            RequestError: The table has no identities.
        """
        return self.seqlock.read(lambda: self._identities_of(fqn).find(identities))

    def look_by_identity(
        self, fqn: str, identities: Ids, default_of: Callable[[TableSpec], Rows]
    ) -> tuple[TableSpec, Found]:
        """Return a table's spec, rows `[n, dim]` of int64[n] identities, and bool[n], which have no row; of one moment.

        Identities without a row get the table's default, `[dim]` in its dtype. Errors and threads as for `find_rows`.
        """

        def look() -> tuple[TableSpec, Found]:
            table, of_table = self.table(fqn), self._identities_of(fqn)
            default = default_of(table.spec)
            row_ids = of_table.find(identities)
            is_found = row_ids >= 0
            if is_found.all():
                return table.spec, table.gather(row_ids)
            found, is_gone = table.gather(row_ids[is_found])
            rows = np.repeat(default[None], identities.size, axis=0)
            rows[is_found] = found
            missing = ~is_found
            missing[is_found] = is_gone
            return table.spec, (rows, missing)

        return self.seqlock.read(look)

    def look_up_meta(self, fqn: str, row_ids: Ids) -> tuple[StateSpec, npt.NDArray[np.void]]:
        """Return the state that holds the runtime meta of a table, and that of int64[n] rows, opaque; zeros for -1.

        Thread: any.

        Raises:
            UnknownTableError: There is no table of this name.
            RowRangeError: An id is not a row of the table.
            RequestError: The table has no runtime meta, or no identities, with which it comes.
        """

        def look() -> tuple[StateSpec, npt.NDArray[np.void]]:
            spec = self.table(fqn).spec
            if (state := spec.runtime_meta) is None or not spec.has_identities:
                raise RequestError(f"table {spec.fqn!r} has no runtime meta")
            spec.check_row_ids(row_ids[row_ids != -1])
            return state, self.identities[spec.fqn].meta_of(row_ids)

        return self.seqlock.read(look)

    def _identities_of(self, fqn: str | TableSpec) -> IdentityMap:
        name = self.table(fqn).spec.fqn
        if name not in self.identities:
            raise RequestError(f"table {name!r} has no identities; look its rows up by their row ids")
        return self.identities[name]

    @property
    def size_bytes(self) -> int:
        """Memory of the tables and of pending records."""
        tables = sum(table.size_bytes for table in self.tables.values())
        tables += sum(identities.size_bytes for identities in self.identities.values())
        return tables + self.dense.size_bytes + sum(tail.pending_bytes for tail in self.tails)

    @property
    def is_on_disk(self) -> bool:
        """Whether applying updates waits for a disk."""
        return any(isinstance(table, DiskTable) for table in self.tables.values())

    def take(self, shard: int, updates: Sequence[Update], last_seq: int) -> bool:
        """Take records of a shard and show what can be shown; return whether anything became visible."""
        tail = self.tails[shard]
        for update in updates:
            dense = tail.take(update)
            if update.kind == idl.UpdateKind.HELLO:
                for name in update.header.get("dropped", ()):
                    self._drop(tail, name)
            elif self._drop_epochs:
                self._take_behind(tail)
            if dense:
                change = tail.pending[-1]
                self.dense.take(shard, dense, (change.epoch, change.step))
        tail.last_seq = max(last_seq, tail.seq)
        if any(update.kind == idl.UpdateKind.HELLO and not is_housekeeping(update.header) for update in updates):
            self._add_current()
            self._follow_dense()
        return self.advance()

    def _take_behind(self, tail: ShardTail) -> None:
        """Leave rows of tables that another shard has dropped out of a shard's last record."""
        for name in {delta.spec.fqn for delta in tail.pending[-1].deltas}:
            if self._is_behind(tail, name):
                tail.forget(name)

    def advance(self) -> bool:
        """Show what can be shown; return whether anything became visible."""
        return self._show_step() if self._is_by_step else self._show_all()

    def is_waiting(self, shard: int, max_bytes: int) -> bool:
        """Return whether a shard is so far ahead of another that no more of it should be fetched now.

        Without a pause this is never true of all shards: the shard behind brings what the others wait for.
        """
        if self._has_many_rows(shard, max_bytes):
            return True
        if not self.dense.is_ahead(shard):
            return False
        others = (tail.shard for tail in self.tails)
        return not all(self._has_many_rows(each, max_bytes) or self.dense.is_ahead(each) for each in others)

    def _has_many_rows(self, shard: int, max_bytes: int) -> bool:
        tail = self.tails[shard]
        if tail.pending_bytes <= max_bytes:
            return False
        if self.limits is not None or self.held is not None:
            return True
        cut = tail.newest_cut
        return cut is not None and any(other.newest_cut is None or other.newest_cut < cut for other in self.tails)

    def make_room(self, shard: int, max_bytes: int) -> None:
        """Bound a shard's pending records, after `take`, when waiting for other shards does not help.

        A copy that is not shown yet applies all of them: nobody sees that it is between steps then. This loses no step
        that it could show. Every other shard has been taken to the last cut in there or beyond it, and has no cut in
        common with it; otherwise that cut would have been applied.

        Raises:
            OverloadedError: The copy is shown and cannot continue within the bound.
        """
        tail = self.tails[shard]
        if tail.pending_bytes <= max_bytes or self._has_many_rows(shard, max_bytes):
            return
        if self.is_shown:
            raise OverloadedError(
                f"shard {shard}: updates that wait for the end of a step take more than max_pending_bytes, {max_bytes}"
                ": raise it, or lower dense_interval_s of a trainer that publishes dense parameters"
            )
        self.visible = None
        with self.seqlock.write():
            self._show_pending(tail, tail.seq)

    def close(self) -> None:
        """Free files and threads of the tables; raise `StorageError` if a file stays. Idempotent."""
        for table in (*self.tables.values(), *self._retired):
            table.close()

    def freshness(self) -> list[Freshness]:
        """Return how far behind each shard's part is."""
        return [tail.freshness(self._clock_us()) for tail in self.tails]

    def _show_all(self) -> bool:
        has_changed, limits = False, self.limits  # the loop may lift them while this runs in a thread
        if limits is None and self.dense.has_next(None):
            with self.seqlock.write():
                self.dense.show(None)
            has_changed = True
        for tail in self.tails:
            while tail.pending and (limits is None or tail.pending[0].seq <= limits[tail.shard]):
                change = tail.pending[0]
                if change.deltas:
                    with self.seqlock.write():
                        self._apply(change)
                tail.shown(change, self._clock_us())
                has_changed = True
        if any(tail.pending for tail in self.tails):
            return has_changed  # paused: the sessions know of steps whose rows nobody sees yet
        epoch = max((tail.epoch for tail in self.tails), default=0)
        visible = (epoch, min((tail.watermark_of(epoch) for tail in self.tails), default=-1))
        has_changed = has_changed or visible != self.visible
        self.visible = visible
        return has_changed

    def _show_step(self) -> bool:
        cut = None if self.limits is not None or self.held is not None else self._next_cut()
        if cut is None:
            return False
        is_new = cut[:2] != self.visible
        if not (is_new or any(change.cut == cut for tail in self.tails for change in tail.pending)):
            return False
        is_recorded = cut[:2] in {recorded[:2] for recorded in self._recorded_cuts()}
        with self.seqlock.write():
            for tail in self.tails:
                self._show_pending(tail, max((change.seq for change in tail.pending if change.cut == cut), default=0))
            self.dense.show(cut[:2])
            if any(map(self._is_whole, self._hidden)):
                self._update_names()
            self.visible = cut[:2]
        if is_new or is_recorded:
            self._recorded = cut[:2] if is_recorded else None
        if is_recorded and self._holds_recorded:
            self.held = cut[:2]
        return True

    def hold_recorded(self, is_on: bool, *, goes_on: bool = False) -> None:
        """By step, stay at each step of which the trainer has a recording: the visible one, or with `goes_on` the next.

        It lasts until this is called again. Then call `advance`.
        """
        self._holds_recorded = is_on
        self.held = self._recorded if is_on and not goes_on else None

    def _recorded_cuts(self) -> set[Cut]:
        """Return cuts, not visible yet, at which the trainer has made a recording."""
        changes = (change for tail in self.tails for change in tail.pending)
        return {change.cut for change in changes if change.is_recorded and change.cut is not None}

    def _next_cut(self) -> Cut | None:
        """Return the newest cut that all shards have, or one before it at which lookups have to stay."""
        common: set[Cut] | None = None
        for tail in self.tails:
            cuts = {change.cut for change in tail.pending if change.cut is not None}
            if tail.visible_cut is not None:
                cuts.add(tail.visible_cut)
            common = cuts if common is None else common & cuts
            if not common:
                return None
        shown = [cut for cut in common or () if self.dense.can_show(cut[:2])]
        recorded = self._recorded_cuts().intersection(shown) if self._holds_recorded else ()
        return min(recorded, default=max(shown, default=None))

    def _show_pending(self, tail: ShardTail, last_seq: int) -> None:
        now_us = self._clock_us()
        while tail.pending and tail.pending[0].seq <= last_seq:
            change = tail.pending[0]
            self._apply(change)
            tail.shown(change, now_us)

    def _apply(self, change: Change) -> None:
        version: dict[str, int] = {"epoch": change.epoch, "step": change.step}
        try:
            change.tally.check(tally_of_deltas(change.deltas), f"log record {change.seq} → replica")
            for delta in change.deltas:
                if (table := self.tables.get(delta.spec.fqn)) is not None:
                    table.apply(delta, **version)
                if (identities := self.identities.get(delta.spec.fqn)) is not None:
                    identities.apply(delta, **version)
        except Exception as exc:  # also a lack of memory, or a bug
            self.failure = exc  # before the seqlock opens: a reader that looked meanwhile finds it
            raise


def _means(wanted: str, name: str) -> bool:
    """Return whether a user means a table by its name or path."""
    return wanted in (name, path_of(name))
