"""Sessions: which client may write to a shard, and which of its batches is next. Exactly once, in order.

A run groups the ranks of a trainer and its restarts. Its epoch only rises, and clients of older epochs are fenced.
Within (run, client, epoch) batches are numbered 1, 2, 3 …: the next one is accepted, an accepted one is a duplicate, a
later one is a gap. The state is a function of the log: each accepted record carries what it changes, so replaying the
log restores it. The store saves it in the same atomic batch as the rows.

A hello in a newer epoch fences the older ones, which can write no more. But it counts as a start of its run only once a
batch of it is accepted: until then nothing of what the ranks before have ended is out of date, and their sessions stay
as *former* ones. A start that is refused, or ends before its first step, takes no step from anybody who waits for one.

A session is forgotten when a newer epoch of its run counts. Beyond `MAX_SESSIONS` the least recently active one is
forgotten too; then no trainer may begin in an epoch up to its own, so its resends are refused
instead of taken for new. Clients that are not trainers may begin again: they write
the same rows again, and only as long as nobody else has the table.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgpack

from headrace.schemas.errors import CorruptionError, FencedError, RequestError, SequenceGapError
from headrace.schemas.version import last_epoch_after

__all__ = ["MAX_SESSIONS", "Session", "Sessions"]

# ON DISK: never lower it; replaying an older log would forget sessions whose batches follow.
MAX_SESSIONS = 16_384
"""Clients of all runs that a shard remembers."""

# ON DISK: never rename.
_META_PREFIX = b"session/"
_FORMER_PREFIX = b"former/"
_META_ROWS_EPOCH = b"rows_epoch"
_META_FORGOTTEN_EPOCH = b"forgotten_epoch"
# ON DISK: never reorder. The saved fields of a session; those of the class begin with them.
_SAVED = "run client epoch rank world_size last_client_seq step exact_step time_us ended_client_seq last_seq has_ended"
_saved_fields = attrgetter(*_SAVED.split())
# The store deletes keys with this value.
_REMOVED = b""


@dataclass(slots=True)
class Session:
    """What a shard keeps of one client of a run.

    Attributes:
        epoch: Highest epoch in which the client said hello.
        world_size: Ranks of the run in that epoch; 0 for a client that is not a trainer, such as a backfill.
        last_client_seq: Last batch accepted in this epoch; 0 before the first.
        step: Last step that the client ended here; -1 before the first.
        exact_step: Last step with a consistent cut; -1 before the first.
        time_us: The trainer's wall clock at `step`, microseconds since 1970; a later one each time that it is ended.
        covered_us: The trainer's wall clock when `step` was first ended: all its updates before are here. 0 before any
            step. It is not saved: `time_us` then.
        ended_client_seq: The batch that ended `step`; 0 before the first.
        last_seq: Its last record in the log; 0 where that is not known.
        has_ended: The client writes no more in this epoch.
        num_connections: Connections that have said hello as this client.
        cost_percent: What streaming takes of the steps' time, percent, as the trainer has told last; None before. It
            is not saved.
        is_cost_bound: With it, whether the cost delays flushes.
        num_unstreamed: What the trainer trains and does not stream, as it has told with the end of `step`. Not saved.
    """

    run: str
    client: str
    epoch: int
    rank: int
    world_size: int
    last_client_seq: int = 0
    step: int = -1
    exact_step: int = -1
    time_us: int = 0
    ended_client_seq: int = 0
    last_seq: int = 0
    has_ended: bool = False
    num_connections: int = 0
    cost_percent: float | None = None
    is_cost_bound: bool | None = None
    num_unstreamed: int = 0
    covered_us: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.covered_us = self.time_us

    @property
    def is_trainer(self) -> bool:
        """Whether the client makes steps; watermarks and cuts do not wait for others."""
        return self.world_size > 0

    @property
    def has_begun(self) -> bool:
        """Whether a batch was accepted in this epoch, here or where the steps come from."""
        return self.last_client_seq > 0 or self.step >= 0

    @property
    def is_at_exact_cut(self) -> bool:
        """Whether everything up to `step` is here and nothing newer; False before the first step."""
        return 0 <= self.step == self.exact_step and self.ended_client_seq == self.last_client_seq

    def pack(self) -> dict[bytes, bytes]:
        """Return the metadata that saves this session."""
        return {self.meta_key: msgpack.packb(_saved_fields(self))}

    @property
    def meta_key(self) -> bytes:
        """Key in the store's metadata. ON DISK."""
        packed: bytes = msgpack.packb([self.run, self.client])
        return _META_PREFIX + packed

    @property
    def former_key(self) -> bytes:
        """Key in the store's metadata of a former session. ON DISK."""
        return _FORMER_PREFIX + self.meta_key.removeprefix(_META_PREFIX)


@dataclass(slots=True)
class _Run:
    epoch: int
    clients: set[str] = field(default_factory=set)
    former: list[Session] = field(default_factory=list)  # of the last epoch that counts, while `epoch` does not yet


class Sessions:
    """All sessions of a shard. Not thread-safe: the shard's loop owns it."""

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Restore the sessions from all of the store's metadata; raise `CorruptionError` if an entry is unreadable."""
        # Least recently active first.
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._runs: dict[str, _Run] = {}
        self._ranks: dict[int, list[Session]] | None = None  # trainers by epoch; None after a change
        self._changed: dict[bytes, bytes] = {}  # metadata to save with the next record
        self._rows_epoch = int(meta.get(_META_ROWS_EPOCH, b"0"))
        self._forgotten_epoch = int(meta.get(_META_FORGOTTEN_EPOCH, b"0"))
        sessions, former = list[Session](), list[Session]()
        for key, value in meta.items():
            if not key.startswith((_META_PREFIX, _FORMER_PREFIX)):
                continue
            try:
                (sessions if key.startswith(_META_PREFIX) else former).append(Session(*msgpack.unpackb(value)))
            except (ValueError, TypeError) as exc:
                raise CorruptionError(f"store metadata {key!r} is not a session: {exc}") from exc
        for session in sorted(sessions, key=lambda session: session.epoch):
            self._keep(session)
        for session in former:
            self._runs.setdefault(session.run, _Run(session.epoch)).former.append(session)
        for session in sorted(self._sessions.values(), key=lambda session: session.last_seq):
            self._sessions.move_to_end((session.run, session.client))

    @classmethod
    def merged(cls, shards: Sequence[Sessions]) -> Sessions:
        """Return the sessions of trainers that all shards of a server have, for a server with other shards.

        They have no batches there. A client keeps its step if all shards stand exactly at it.
        """
        merged = cls({})
        found = {(session.run, session.client): session for shard in shards for session in shard if session.is_trainer}
        for run, client in sorted(found):
            epoch = max(shard.epoch_of(run) for shard in shards)
            known = [session for shard in shards if (session := shard.find(run, client)) and session.epoch == epoch]
            if not known:
                continue
            session = merged.open(run, client, epoch, known[0].rank, known[0].world_size)
            session.has_ended = len(known) == len(shards) and all(each.has_ended for each in known)
            is_exact = len(known) == len(shards) and all(each.is_at_exact_cut for each in known)
            if is_exact and len({each.step for each in known}) == 1:
                session.step = session.exact_step = known[0].step
                session.time_us = max(each.time_us for each in known)
        merged._forgotten_epoch = max(shard._forgotten_epoch for shard in shards)
        merged.raise_epoch(max(shard.highest_epoch for shard in shards))
        return merged

    def _keep(self, session: Session) -> None:
        """Add a session; one of a newer epoch takes its run over, and older ones that count become former ones."""
        run = self._runs.setdefault(session.run, _Run(session.epoch))
        if session.epoch > run.epoch:
            older = [self._sessions[session.run, client] for client in run.clients]
            for other in older:
                if other.client != session.client:
                    self._remove(other)
            if not session.is_trainer:  # forgetting this session would forget the run's epoch
                self._forget_trainers([*older, *run.former])
                self._remove_former(run)
            elif any(other.is_trainer and other.has_begun for other in older):
                run.former = [other for other in older if other.is_trainer]
                self._changed |= {other.former_key: other.pack()[other.meta_key] for other in run.former}
            run.epoch = session.epoch
        run.clients.add(session.client)
        self._sessions[session.run, session.client] = session

    def _remove(self, session: Session) -> None:
        del self._sessions[session.run, session.client]
        self._runs[session.run].clients.remove(session.client)
        self._changed[session.meta_key] = _REMOVED

    def _remove_former(self, run: _Run) -> None:
        self._changed |= {session.former_key: _REMOVED for session in run.former}
        run.former = []
        self._ranks = None

    def _forget_trainers(self, sessions: Iterable[Session]) -> None:
        """Refuse new trainers in the epochs of these sessions and below."""
        forgotten = max((session.epoch for session in sessions if session.is_trainer), default=0)
        if forgotten > self._forgotten_epoch:
            self._forgotten_epoch = forgotten
            self._changed[_META_FORGOTTEN_EPOCH] = b"%d" % forgotten

    def __iter__(self) -> Iterator[Session]:
        """Return all sessions, the former ones first."""
        return iter([*self._former, *self._sessions.values()])

    @property
    def _former(self) -> list[Session]:
        former = [session for run in self._runs.values() for session in run.former]
        return sorted(former, key=lambda session: (session.epoch, session.run, session.client))

    @property
    def highest_epoch(self) -> int:
        """Highest epoch of any run or of any row's version; 0 before the first."""
        return max([self._rows_epoch, self._forgotten_epoch, *(run.epoch for run in self._runs.values())])

    def epoch_of(self, run: str) -> int:
        """Return a run's epoch; 0 before its first hello, and once all of it was forgotten."""
        return self._runs[run].epoch if run in self._runs else 0

    def has_ended(self, run: str) -> bool:
        """Return whether all ranks of a run have said, in its present epoch, that they write no more."""
        sessions = [self._sessions[run, client] for client in self._runs[run].clients] if run in self._runs else []
        is_whole = bool(sessions) and len(sessions) >= sessions[0].world_size
        return is_whole and all(session.has_ended for session in sessions)

    def newest_epoch_of(self, is_wanted: Callable[[str], bool], *, has_begun: bool = True) -> int:
        """Return the highest epoch of a trainer of the wanted runs that counts, or said hello; 0 if there is none."""
        for epoch, ranks in self._ranks_by_epoch().items():
            if is_wanted(ranks[0].run) and (not has_begun or any(session.has_begun for session in ranks)):
                return epoch
        return 0

    def _ranks_by_epoch(self) -> dict[int, list[Session]]:
        """Return the trainers by epoch, newest first. Cached, because replicas need it after every record."""
        if self._ranks is None:
            self._ranks = {}
            for session in sorted(self, key=lambda session: -session.epoch):
                if session.is_trainer:
                    self._ranks.setdefault(session.epoch, []).append(session)
        return self._ranks

    def find(self, run: str, client: str) -> Session | None:
        """Return a client's session of its newest epoch; None if there is none."""
        return self._sessions.get((run, client))

    def ranks_of(self, epoch: int) -> list[Session]:
        """Return the sessions of an epoch's run, if every rank has said hello; else none."""
        ranks = self._ranks_by_epoch().get(epoch, [])
        return ranks if ranks and len(ranks) >= ranks[0].world_size else []

    def exact_step_of(self, epoch: int) -> int | None:
        """Return the step that all ranks of an epoch's run have ended and none has passed; None if there is none."""
        ranks = self.ranks_of(epoch)
        steps = {session.step for session in ranks}
        return steps.pop() if len(steps) == 1 and all(session.is_at_exact_cut for session in ranks) else None

    def watermark_of(self, epoch: int) -> int:
        """Return the step of the slowest rank of an epoch's run: all up to it is here; -1 before the first."""
        return min((session.step for session in self.ranks_of(epoch)), default=-1)

    def covered_us_of(self, epoch: int) -> int:
        """Return the wall clock before which all updates of an epoch's ranks are here; 0 before each ended a step."""
        return min((session.covered_us for session in self.ranks_of(epoch)), default=0)

    def fence(self, run: str, epoch: int) -> None:
        """Raise `FencedError` if a newer epoch holds the run."""
        current = self.epoch_of(run)
        if epoch < current:
            raise FencedError(
                f"run {run!r}: epoch {epoch} is fenced, epoch {current} has taken over; stop this trainer",
                epoch=current,
            )

    def check_epoch(self, epoch: int) -> None:
        """Raise `RequestError` if an epoch is so far above all others that later runs could run out of epochs."""
        if epoch > last_epoch_after(0) and epoch > (last := last_epoch_after(self.highest_epoch)):
            raise RequestError(
                f"epoch {epoch} is too far above {self.highest_epoch}, the highest of this shard, which accepts up to "
                f"{last}; a trainer takes the next one after the highest"
            )

    def check_free(self, epoch: int) -> None:
        """Raise `FencedError`, with the highest epoch, unless this one is above it; so trainers never share one."""
        if epoch <= self.highest_epoch:
            raise FencedError(f"epoch {epoch} has been taken", epoch=self.highest_epoch)

    def check_remembered(self, run: str, client: str, epoch: int, world_size: int) -> None:
        """Raise `FencedError` if a trainer that would begin anew may be one that was forgotten."""
        session = self._sessions.get((run, client))
        is_known = session is not None and session.epoch == epoch and session.is_trainer
        if world_size and not is_known and epoch <= self._forgotten_epoch:
            raise FencedError(
                f"run {run!r}: epoch {epoch} is too old to begin in: only the {MAX_SESSIONS} latest clients are known; "
                "stop this trainer and start it again",
                epoch=self.highest_epoch,
            )

    def open(self, run: str, client: str, epoch: int, rank: int, world_size: int) -> Session:
        """Return the session of a client's hello, a new one for a new epoch. Call `settle` next. Raises as `fence`."""
        self.fence(run, epoch)
        session = self._sessions.get((run, client))
        if session is None or session.epoch != epoch:
            session = Session(run, client, epoch, rank, world_size)
            self._keep(session)
        if not world_size:
            self._forget_trainers([session])
        session.rank, session.world_size = rank, world_size
        self._ranks = None
        return session

    def is_open(self, run: str, client: str, epoch: int, rank: int, world_size: int) -> bool:
        """Return whether the client has said exactly this hello before."""
        session = self._sessions.get((run, client))
        return session is not None and (session.epoch, session.rank, session.world_size) == (epoch, rank, world_size)

    def accept(self, run: str, client: str, epoch: int, client_seq: int) -> tuple[Session, bool]:
        """Return (session, whether the batch is new). `advance` accepts it, once it is in the log's queue.

        Raises:
            FencedError: A newer epoch holds the run.
            SequenceGapError: An earlier batch is missing.
            RequestError: No hello in this epoch, a client seq below 1, or a new batch of a client that has ended.
        """
        self.fence(run, epoch)
        session = self._sessions.get((run, client))
        if session is None or session.epoch != epoch:
            raise RequestError(
                f"client {client!r} of run {run!r} has not said hello in epoch {epoch}, or was forgotten since"
            )
        if client_seq < 1:
            raise RequestError(f"client seq {client_seq} is below 1")
        expected = session.last_client_seq + 1
        if client_seq > expected:
            raise SequenceGapError(
                f"client {client!r} of run {run!r} sent batch {client_seq}, expected {expected}", expected_seq=expected
            )
        if session.has_ended and client_seq == expected:
            raise RequestError(f"client {client!r} of run {run!r} sent batch {client_seq} after it had ended")
        return session, client_seq == expected

    def advance(
        self,
        session: Session,
        *,
        client_seq: int,
        step: int,
        time_us: int,
        ends_step: bool,
        is_exact_cut: bool,
        cost_percent: float | None = None,
        is_cost_bound: bool | None = None,
        num_unstreamed: int | None = None,
    ) -> None:
        """Record that a batch is accepted: from now on the session's epoch counts. Call `settle` next."""
        session.last_client_seq = client_seq
        if (run := self._runs[session.run]).former:
            self._remove_former(run)
        if ends_step:
            if step > session.step:  # ended again, it covers no later update: rows may be dirty since
                session.covered_us = time_us
            session.step, session.time_us, session.ended_client_seq = step, time_us, client_seq
            session.num_unstreamed = num_unstreamed or 0
            if cost_percent is not None and math.isfinite(cost_percent):  # JSON has no other numbers
                session.cost_percent, session.is_cost_bound = cost_percent, bool(is_cost_bound)
            if is_exact_cut:
                session.exact_step = step
            elif session.exact_step == step:  # ended again, after newer rows: now the shard has it no more
                session.exact_step = -1

    def settle(self, session: Session, seq: int) -> dict[bytes, bytes]:
        """Note the record that opened or advanced a session, and forget the oldest; return the metadata to save."""
        session.last_seq = seq
        self._sessions.move_to_end((session.run, session.client))
        while len(self._sessions) > MAX_SESSIONS:
            oldest = next(iter(self._sessions.values()))
            self._remove(oldest)
            self._forget_trainers([oldest])
            self._ranks = None
            if not (run := self._runs[oldest.run]).clients:
                self._remove_former(run)
                del self._runs[oldest.run]
        meta = self._changed | session.pack()
        self._changed = {}
        return meta

    def packed(self) -> dict[bytes, bytes]:
        """Return the metadata of which `Sessions` makes equal sessions."""
        meta = {_META_ROWS_EPOCH: b"%d" % self._rows_epoch, _META_FORGOTTEN_EPOCH: b"%d" % self._forgotten_epoch}
        for session in self._sessions.values():
            meta |= session.pack()
        for session in self._former:
            meta[session.former_key] = session.pack()[session.meta_key]
        return meta

    def raise_epoch(self, epoch: int) -> dict[bytes, bytes]:
        """Record an epoch of rows from elsewhere, above which later trainers begin; return the metadata to save."""
        self._rows_epoch = max(self._rows_epoch, epoch)
        return {_META_ROWS_EPOCH: b"%d" % self._rows_epoch}
