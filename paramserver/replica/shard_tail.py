"""What has come of one shard's update log and is not visible yet, decoded, with the steps where the run stands exactly.

Sessions and tables are a function of the log, here as in the shard itself: the same records make the same state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from headrace.paramserver.ingest.deltas import decode_delta
from headrace.paramserver.ingest.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.freshness import Histogram
from headrace.paramserver.store.catalog import Catalog, unpack_spec
from headrace.paramserver.store.pending import RowDelta
from headrace.schemas.errors import CorruptionError, HeadraceError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct

__all__ = ["Change", "Cut", "ShardTail"]

Cut = tuple[int, int, int]
"""(epoch, step, the ranks' clocks when they ended it, added up), as they compare: a step may be ended more than once,
with other rows each time, and what ended it carries the same clock to every shard."""

_BEFORE_ANY: Cut = (0, -1, 0)
# What Python takes for a record that has been decoded, and for each delta in it, about.
_CHANGE_BYTES, _DELTA_BYTES = 512, 1024


@dataclass(frozen=True, slots=True)
class Change:
    """What one record changes.

    Attributes:
        seq: Its position in the shard's log.
        epoch: Version of its rows, first half.
        step: Second half.
        time_us: The trainer's clock, microseconds since 1970; 0 where the record says none.
        deltas: Rows; views of the reply's buffer.
        is_conditional: Rows count only where they are not older.
        cut: At which step the newest run stands exactly behind this record, or None.
        size_bytes: Memory that it holds, about.
    """

    seq: int
    epoch: int
    step: int
    time_us: int
    deltas: tuple[RowDelta, ...]
    is_conditional: bool
    cut: Cut | None
    size_bytes: int


class ShardTail:
    """One shard's log from where a copy was taken.

    Attributes:
        shard: Index.
        seq: Last record that was taken.
        begin_mark: Tells the record behind which the copy began; None when that is not known.
        last_seq: Last durable record, as the shard last told.
        catalog: Tables that the shard knows.
        pending: Taken and not visible.
        pending_bytes: Memory that they hold.
        visible_seq: Last record that lookups see.
        visible_cut: Where the newest run stood exactly there; None when it was between steps.
        newest_cut: The last place that was taken at which it stands exactly, visible or not; None before the first.
        visible_time_us: The trainer's clock at the newest visible batch; 0 before the first.
        delay: From the trainer's clock to being visible.
    """

    def __init__(
        self,
        shard: int,
        *,
        seq: int,
        catalog: Catalog,
        sessions: Sessions,
        exact_from: int = 0,
        mark: int | None = None,
    ) -> None:
        """Go on behind record `seq`.

        Args:
            shard: Index.
            seq: Last record that the copy has.
            catalog: Tables as of there.
            sessions: Writers as of `max(seq, exact_from)`.
            exact_from: The copy may have parts of records up to here: before it, it is at no step.
            mark: Tells record `seq`, see `UpdateLog.mark_of`; None when that is not known.
        """
        self.shard = shard
        self.begin_mark = mark
        self.seq = self.visible_seq = self.last_seq = seq
        self.catalog = catalog
        self.pending: deque[Change] = deque()
        self.pending_bytes = 0
        self.visible_time_us = 0
        self.delay = Histogram()
        self._sessions = sessions
        self._exact_from = exact_from
        self.visible_cut = self.newest_cut = self.cut

    @property
    def cut(self) -> Cut | None:
        """Where the newest run stands exactly, all that was taken included; None when it is between steps."""
        if self.seq < self._exact_from:
            return None
        epoch = self.epoch
        if not epoch:
            return _BEFORE_ANY
        step = self._sessions.exact_step_of(epoch)
        if step is None:
            return None
        return epoch, step, sum(session.time_us for session in self._sessions.ranks_of(epoch))

    @property
    def epoch(self) -> int:
        """Epoch of the newest run; 0 before the first."""
        return self._sessions.newest_epoch

    def watermark_of(self, epoch: int) -> int:
        """Return the step up to which everything of a run was taken; -1 when there is none."""
        return self._sessions.watermark_of(epoch) if self.seq >= self._exact_from else -1

    def take(self, update: Update) -> None:
        """Decode the next record and put it behind the others.

        Raises:
            CorruptionError: It is not the next, or cannot be applied.
        """
        if update.seq != self.seq + 1:
            raise CorruptionError(f"shard {self.shard}: record {update.seq} follows {self.seq}")
        try:
            change = self._decode(update)
        except (HeadraceError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"shard {self.shard}: record {update.seq} cannot be applied: {exc}") from exc
        self.pending.append(change)
        self.pending_bytes += change.size_bytes
        self.newest_cut = change.cut or self.newest_cut

    def shown(self, change: Change, now_us: int) -> None:
        """Note that the oldest pending change is visible now."""
        assert self.pending[0] is change
        self.pending.popleft()
        self.pending_bytes -= change.size_bytes
        self.visible_seq, self.visible_cut = change.seq, change.cut
        if change.time_us:
            self.visible_time_us = change.time_us
            self.delay.add((now_us - change.time_us) / 1e6)

    def _decode(self, update: Update) -> Change:
        if update.kind == idl.UpdateKind.HELLO:
            self._take_hello(update)
            self.seq = update.seq
            return Change(update.seq, update.epoch, 0, 0, (), False, self.cut, _CHANGE_BYTES)
        if update.kind != idl.UpdateKind.BATCH:
            raise ValueError(f"kind {update.kind} is unknown to this version")
        offset = decode_header(update.body).body_offset
        request = decode_struct(idl.ParameterServer.setEmbeddings_args, update.body, offset).request
        is_conditional = request.version_epoch is not None
        deltas = tuple(decode_delta(self.catalog, delta) for delta in request.deltas)
        self._advance(request, update.seq, is_conditional)
        self.seq = update.seq
        return Change(
            seq=update.seq,
            epoch=request.version_epoch if is_conditional else request.epoch,
            step=request.step,
            time_us=0 if is_conditional else request.time_us,
            deltas=deltas,
            is_conditional=is_conditional,
            cut=self.cut,
            size_bytes=update.body.nbytes + _CHANGE_BYTES + _DELTA_BYTES * len(deltas),
        )

    def _take_hello(self, update: Update) -> None:
        header = update.header
        self.catalog.add(unpack_spec(packed) for packed in header["tables"])
        # Sessions may have been learnt as of a later record.
        if update.epoch >= self._sessions.epoch_of(header["run"]):
            place = header["rank"], header["world_size"]
            session = self._sessions.open(header["run"], header["client"], update.epoch, *place)
            self._sessions.settle(session, update.seq)

    def _advance(self, request: Any, seq: int, is_conditional: bool) -> None:
        session = self._sessions.find(request.run, request.client)
        if session is None or session.epoch != request.epoch or request.client_seq <= session.last_client_seq:
            return  # learnt already
        self._sessions.advance(
            session,
            client_seq=request.client_seq,
            step=request.step,
            time_us=request.time_us,
            ends_step=request.ends_step and not is_conditional,
            is_exact_cut=request.is_exact_cut,
        )
        self._sessions.settle(session, seq)
