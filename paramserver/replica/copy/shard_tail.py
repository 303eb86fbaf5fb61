"""The end of one shard's update log: what a copy has fetched and does not show yet, and how fresh the copy is.

Sessions and tables are a function of the log, here as in the shard: the same records make the same state.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from headrace.paramserver.log.interface import is_housekeeping
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.deltas import RowDelta, decode_delta, tally_of_deltas
from headrace.schemas.errors import CorruptionError, HeadraceError, InvariantError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.row_tally import RowTally

__all__ = ["Change", "Cut", "DelayHistogram", "Freshness", "ShardTail"]

Cut = tuple[int, int, int]
"""A consistent cut: (epoch, step, sum of the ranks' clocks when they ended the step). Greater cuts are later ones.

A step may be ended more than once, with other rows each time; all shards get the same clocks with it."""

_NO_ROWS = RowTally()
_BEFORE_ANY: Cut = (0, -1, 0)
# Approximate memory of Python's objects for a decoded record, and for each delta in it.
_CHANGE_BYTES, _DELTA_BYTES = 512, 1024
# Histogram buckets from 0.1 ms, four per doubling, up to 13 days.
_FIRST_S = 1e-4
_PER_DOUBLING = 4
_NUM_BUCKETS = 136
# The doublings that metrics export: 0.8 ms to 210 s.
_EXPORTED_DOUBLINGS = range(3, 22)


class DelayHistogram:
    """A histogram of how old updates are when they become visible; of fixed size.

    Thread: one thread adds; others may read and see counts that are about right.
    """

    def __init__(self) -> None:
        self.count, self.sum_s, self.max_s = 0, 0.0, 0.0
        self._buckets = [0] * _NUM_BUCKETS

    def add(self, duration_s: float, weight: int = 1) -> None:
        """Count a duration `weight` times; a negative one, from another machine's clock, counts as zero."""
        duration_s = max(duration_s, 0.0)
        place = 0 if duration_s <= _FIRST_S else math.ceil(_PER_DOUBLING * math.log2(duration_s / _FIRST_S))
        self._buckets[min(place, _NUM_BUCKETS - 1)] += weight
        self.count += weight
        self.sum_s += duration_s * weight
        self.max_s = max(self.max_s, duration_s)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound in seconds, number of durations up to it): doublings from 0.8 ms to 210 s, then infinity."""
        sums = [0, *accumulate(self._buckets)]
        bounds = [(_FIRST_S * 2**doubling, sums[_PER_DOUBLING * doubling + 1]) for doubling in _EXPORTED_DOUBLINGS]
        return [*bounds, (math.inf, sums[-1])]

    def __repr__(self) -> str:
        return f"<DelayHistogram of {self.count:,}: p50 {self.percentile(50):.3g} s, p99 {self.percentile(99):.3g} s>"

    def percentile(self, percent: float) -> float:
        """Return a percentile in seconds, up to a fifth too high; 0 if empty."""
        wanted = self.count * percent / 100
        seen = 0
        for place, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                return min(_FIRST_S * 2 ** (place / _PER_DOUBLING), self.max_s)
        return self.max_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Freshness:
    """How far one shard's part of a replica is behind."""

    shard: int
    visible_seq: int  # last record of the shard's log that lookups see
    last_seq: int  # last durable record that the shard has reported
    is_behind: bool  # the shard has rows that lookups do not see yet
    # Every update of a row older than this is visible, seconds by the clocks of trainer and replica. It grows while no
    # step ends: the trainer may be idle, silent, or keep rows. None before the first record.
    age_s: float | None
    lag_s: float  # the same while `is_behind`; else 0
    lag_steps: int  # steps that were fetched from this shard and are not visible
    delay: DelayHistogram  # from the oldest update in a record, by the trainer's clock, until visible; per record
    pending_bytes: int = 0  # memory of records that were fetched from this shard and are not visible


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of one record."""

    seq: int
    epoch: int  # with `step`, the version of the rows
    step: int
    oldest_us: int  # the trainer's clock at its oldest update, since 1970; 0 if the record has none
    covered_us: int  # all updates before this are in here and in earlier records; 0 if that is not known
    deltas: tuple[RowDelta, ...]  # of embedding tables; views of the reply's buffer
    cut: Cut | None  # the newest run's consistent cut right after this record; None between cuts
    size_bytes: int  # approximate memory
    tally: RowTally = _NO_ROWS  # of the rows in `deltas`, as the record has them
    is_recorded: bool = False  # the trainer has a recording of the step that this record ends


class ShardTail:
    """One shard's log from where a copy began."""

    def __init__(
        self,
        shard: int,
        *,
        seq: int,
        catalog: Catalog,
        sessions: Sessions,
        exact_from: int = 0,
        mark: int | None = None,
        wants: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Continue after record `seq`.

        Args:
            shard: Shard index.
            seq: Last record that the copy has.
            catalog: Tables as of that record.
            sessions: Writers as of `max(seq, exact_from)`.
            exact_from: The copy may have parts of the records up to this one; before it, the copy is at no step.
            mark: Nonce of record `seq`, see `UpdateLog.nonce_of`; None if unknown.
            wants: Returns whether the copy has a table. The steps are those of the run that owns its tables.
        """
        self.shard = shard
        self.begin_mark = mark
        self.seq = seq  # last record that was taken
        self.visible_seq = seq  # last record that lookups see
        self.last_seq = seq  # last durable record that the shard has reported
        self.catalog = catalog
        self.pending: deque[Change] = deque()  # taken and not visible yet
        self.pending_bytes = 0
        self.delay = DelayHistogram()
        self._sessions = sessions
        self._exact_from = exact_from
        self.wants = wants
        self._whole_from: dict[int, int] = {}  # by table number, the record with which it became complete
        self._note_whole()
        self._find_runs()
        self.visible_cut = self.cut  # at `visible_seq`; None between cuts
        self.visible_us = self._covered_us  # all updates before this are visible, by the trainer's clock; 0 if unknown
        self.newest_cut = self.visible_cut  # the last one taken, visible or not; None before the first

    def _find_runs(self) -> None:
        """Note whose steps count: the newest trainer's of the copy's tables; without one, those of runs without tables.

        An older owner may keep a table that has left the model, and train another one by now. A backfill has no steps:
        those of the trainer before it go on. Until a trainer has begun, those of the one before it stay.
        """
        owned = [(table.spec.fqn, table.owner) for table in self.catalog if table.owner is not None]
        runs: dict[tuple[int, str], float] = {}
        for owner in (owner for name, owner in owned if self.wants(name)):
            if not owner.is_backfill:
                runs[owner.epoch, owner.run] = math.inf
            if owner.former is not None:
                former_run, former_epoch = owner.former
                # In epochs after its successor's, the former owner trains other tables, and its cuts would hide theirs.
                end = math.inf if owner.is_backfill else owner.epoch
                runs[former_epoch, former_run] = max(end, runs.get((former_epoch, former_run), 0))
        self._runs = [(run, runs[epoch, run]) for epoch, run in sorted(runs, reverse=True)]
        self._has_former = any(owner.former is not None for name, owner in owned if self.wants(name))
        self._other_runs = frozenset(owner.run for _, owner in owned if not owner.is_backfill)

    @property
    def cut(self) -> Cut | None:
        """The newest run's consistent cut after all taken records; None between cuts."""
        if self.seq < self._exact_from:
            return None
        epoch = self.epoch
        if not epoch:
            # An owner that has sent nothing yet, over what another may have left in the midst of a step.
            is_torn = self._has_former and self.heard_epoch and self._sessions.newest_epoch_of(lambda _: True)
            return None if is_torn else _BEFORE_ANY
        step = self._sessions.exact_step_of(epoch)
        if step is None:
            return None
        return epoch, step, sum(session.time_us for session in self._sessions.ranks_of(epoch))

    @property
    def _covered_us(self) -> int:
        return self._sessions.covered_us_of(self.epoch) if self.seq >= self._exact_from else 0

    @property
    def epoch(self) -> int:
        """Epoch of the newest run that trains the copy's tables and has sent a batch; 0 if there is none."""
        if not self._runs:
            return self._sessions.newest_epoch_of(lambda run: run not in self._other_runs)
        found = ((self._sessions.newest_epoch_of(run.__eq__), end) for run, end in self._runs)
        return next((epoch for epoch, end in found if 0 < epoch < end), 0)

    @property
    def heard_epoch(self) -> int:
        """`epoch`, or that of a newer start which has sent nothing yet."""
        if not self._runs:
            return self._sessions.newest_epoch_of(lambda run: run not in self._other_runs, has_begun=False)
        return self._sessions.newest_epoch_of(self._runs[0][0].__eq__, has_begun=False)

    def watermark_of(self, epoch: int) -> int:
        """Return the step of a run up to which everything was taken; -1 if there is none."""
        return self._sessions.watermark_of(epoch) if self.seq >= self._exact_from else -1

    def shows_whole(self, fqn: str) -> bool:
        """Return whether lookups see all rows that this shard is to have of a table, but for those it has grown by."""
        table = self.catalog.get(fqn)
        if table is None:
            return False
        lacks_rows = (filling := table.filling) is not None and not filling.updated_only and not filling.from_row
        return not lacks_rows and self.visible_seq >= self._whole_from.get(table.table_id, 0)

    def is_incomplete(self, fqn: str) -> bool:
        """Return whether the trainer has not sent all rows of a table to this shard yet. Thread: any."""
        table = self.catalog.get(fqn)
        return table is not None and (filling := table.filling) is not None and not filling.updated_only

    def _note_whole(self) -> None:
        names, _ = self.catalog.end_filling(self.watermark_of)
        self._whole_from |= {self.catalog.find(name).table_id: self.seq for name in names}

    def take(self, update: Update) -> tuple[RowDelta, ...]:
        """Decode the next record and append it to `pending`; raise `CorruptionError` if it cannot be applied.

        Return its rows of dense tensors, which do not wait with the others: they are views of the reply's buffer.
        """
        if update.seq != self.seq + 1:
            raise CorruptionError(f"shard {self.shard}: record {update.seq} follows {self.seq}")
        try:
            change, dense = self._decode(update)
        except (HeadraceError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"shard {self.shard}: record {update.seq} cannot be applied: {exc}") from exc
        self._note_whole()
        self.pending.append(change)
        self.pending_bytes += change.size_bytes
        self.newest_cut = change.cut or self.newest_cut
        return dense

    def forget(self, fqn: str) -> None:
        """Leave a table's rows out of what is pending."""
        kept = [tuple(delta for delta in change.deltas if delta.spec.fqn != fqn) for change in self.pending]
        self.pending = deque(
            change
            if len(deltas) == len(change.deltas)
            else dataclasses.replace(change, deltas=deltas, tally=tally_of_deltas(deltas))
            for change, deltas in zip(self.pending, kept, strict=True)
        )

    def shown(self, change: Change, now_us: int) -> None:
        """Record that the oldest pending change is visible now."""
        assert self.pending[0] is change
        self.pending.popleft()
        self.pending_bytes -= change.size_bytes
        self.visible_seq, self.visible_cut = change.seq, change.cut
        # A trainer that has just begun has ended no step: what the one before has covered still holds. Without any, the
        # first record has the oldest update that may be missing.
        self.visible_us = change.covered_us or self.visible_us or change.oldest_us
        if change.oldest_us:
            self.delay.add((now_us - change.oldest_us) / 1e6)

    def freshness(self, now_us: int) -> Freshness:
        """Return how far this shard's part is behind, given the wall clock in microseconds since 1970."""
        # A hello, or the end of a step without rows, waits for the next step and hides nothing from lookups.
        has_rows = self.seq < self.last_seq or any(change.deltas for change in list(self.pending))
        is_behind = self.visible_seq < self.last_seq and has_rows
        age_s = max(now_us - self.visible_us, 0) / 1e6 if self.visible_us else None
        return Freshness(
            shard=self.shard,
            visible_seq=self.visible_seq,
            last_seq=self.last_seq,
            is_behind=is_behind,
            age_s=age_s,
            lag_s=(age_s or 0.0) if is_behind else 0.0,
            lag_steps=len({change.step for change in list(self.pending) if change.deltas}),
            pending_bytes=self.pending_bytes,
            delay=self.delay,
        )

    def _decode(self, update: Update) -> tuple[Change, tuple[RowDelta, ...]]:
        if update.kind == idl.UpdateKind.HELLO:
            self._take_hello(update)
            self.seq = update.seq
            return self._empty(update), ()
        if update.kind != idl.UpdateKind.BATCH:
            raise ValueError(f"kind {update.kind} is unknown to this version")
        offset = decode_header(update.body).body_offset
        request = decode_struct(idl.ParameterServer.setEmbeddings_args, update.body, offset).request
        wanted = tuple(decode_delta(self.catalog, delta) for delta in request.deltas if self.wants(delta.fqn))
        deltas = tuple(delta for delta in wanted if not delta.spec.is_dense)
        dense = tuple(delta for delta in wanted if delta.spec.is_dense)
        self._advance(request, update.seq)
        self.seq = update.seq
        body_bytes = update.body.nbytes - sum(len(column) for delta in dense for column in delta.columns.values())
        change = Change(
            seq=update.seq,
            epoch=request.epoch,
            step=request.step,
            oldest_us=request.oldest_us or request.time_us,
            covered_us=self._covered_us,
            deltas=deltas,
            cut=self.cut,
            size_bytes=(body_bytes if deltas else 0) + _CHANGE_BYTES + _DELTA_BYTES * len(deltas),
            is_recorded=bool(request.is_exact_cut and request.is_recorded),
            tally=self._tally_of(request),
        )
        return change, dense

    def _tally_of(self, request: Any) -> RowTally:
        """Return the tally of the rows that become visible with a record, from its columns as they came."""
        columns = []
        for delta in request.deltas:
            if self.wants(delta.fqn) and not self.catalog.find(delta.fqn).spec.is_dense:
                columns += [delta.row_ids, delta.deleted_row_ids]
        return RowTally.of(columns)

    def _empty(self, update: Update) -> Change:
        covered_us, cut = self._covered_us, self.cut
        return Change(update.seq, update.epoch, 0, 0, covered_us, (), cut, _CHANGE_BYTES)

    def _take_hello(self, update: Update) -> None:
        header = update.header
        if is_housekeeping(header):
            return
        self.catalog.take_hello(header, update.epoch)
        self._whole_from |= {self.catalog.find(name).table_id: update.seq for name in header.get("complete", ())}
        self._find_runs()
        # The sessions may come from a later record.
        if update.epoch >= self._sessions.epoch_of(header["run"]):
            place = header["rank"], header["world_size"]
            session = self._sessions.open(header["run"], header["client"], update.epoch, *place)
            self._sessions.settle(session, update.seq)

    def _advance(self, request: Any, seq: int) -> None:
        session = self._sessions.find(request.run, request.client)
        if session is None or session.epoch != request.epoch or request.client_seq <= session.last_client_seq:
            return  # the sessions have this record already
        if request.step < session.step:
            raise InvariantError(f"{request.client!r} of {request.run!r} sent step {request.step} after {session.step}")
        self._sessions.advance(
            session,
            client_seq=request.client_seq,
            step=request.step,
            time_us=request.time_us,
            ends_step=request.ends_step,
            is_exact_cut=request.is_exact_cut,
        )
        self._sessions.settle(session, seq)
