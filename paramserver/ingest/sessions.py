"""Exactly once, in order: who may write to a shard, and which batch of a client is next.

A *run* groups the ranks of a trainer and its restarts; its epoch only rises, and a client of an older epoch is fenced.
Within (run, client, epoch) batches are numbered 1, 2, 3 …: the next one is accepted, an accepted one is a duplicate,
anything beyond is a gap. The state is a function of the log: each accepted record carries what it changes, so replaying
the log restores it, and the store keeps it in the same atomic batch as the rows.

A session that can write no more, as its run has gone on to a newer epoch, is forgotten; and beyond `MAX_SESSIONS` the
one that nothing has come of for the longest. No trainer begins anew in an epoch up to the highest that was forgotten
so: what is sent again of a forgotten session is refused and not taken for new. Who brings rows in may begin anew: the
rows' versions say what is newer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgpack

from headrace.schemas.errors import CorruptionError, FencedError, RequestError, SequenceGapError
from headrace.schemas.row_records import MAX_EPOCH

__all__ = ["MAX_NAME_BYTES", "MAX_SESSIONS", "Session", "Sessions", "last_epoch_after"]

# ON DISK: never lower it: a log that is replayed may have batches of sessions that would be forgotten by then.
MAX_SESSIONS = 16_384
"""Clients of all runs that a shard remembers."""
MAX_NAME_BYTES = 256
"""Longest name of a run or of a client, in UTF-8."""

# Any epoch up to here is accepted at once, and beyond it those that are so many above the highest.
_FREE_EPOCHS, _EPOCHS_AT_ONCE = 2**31, 2**20
# ON DISK: never rename.
_META_PREFIX = b"session/"
_META_VERSION_EPOCH = b"version_epoch"
_META_FORGOTTEN_EPOCH = b"forgotten_epoch"
# The store removes what has this value.
_REMOVED = b""


def last_epoch_after(highest: int) -> int:
    """Return the highest epoch that a shard accepts which has seen none above `highest`.

    Trainers take one more than the highest epoch. A client that makes one up, by a bug, leaves them half of all; it
    would take thousands of such clients to leave none.
    """
    return min(max(highest, _FREE_EPOCHS) + _EPOCHS_AT_ONCE, MAX_EPOCH)


@dataclass(slots=True)
class Session:
    """What a shard keeps of one client of a run.

    Attributes:
        run: Name of the run.
        client: Name of the client within the run.
        epoch: Highest epoch in which the client has said hello.
        rank: Its rank, 0 to `world_size` - 1.
        world_size: Ranks of the run in that epoch; 0 for a client that is no trainer and brings in rows (a replay).
        last_client_seq: Last batch accepted in this epoch; 0 before the first.
        step: Last step that the client ended here; -1 before the first.
        exact_step: Last step whose cut is exact; -1 before the first.
        time_us: The trainer's wall clock at `step`, microseconds since 1970.
        ended_client_seq: The batch that ended `step`; 0 before the first.
        last_seq: The last record of the log that came of it; 0 where that was not noted yet.
        num_connections: Connections that have said hello as this client.
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
    num_connections: int = 0

    @property
    def is_trainer(self) -> bool:
        """Whether it is part of a run that makes steps; watermarks and cuts do not wait for others."""
        return self.world_size > 0

    @property
    def is_at_exact_cut(self) -> bool:
        """Whether everything up to `step` is here and nothing newer; not before the first step."""
        return 0 <= self.step == self.exact_step and self.ended_client_seq == self.last_client_seq

    def pack(self) -> dict[bytes, bytes]:
        """Return the metadata that keeps this session. ON DISK: the order is fixed."""
        fields = [
            *(self.run, self.client, self.epoch, self.rank, self.world_size),
            *(self.last_client_seq, self.step, self.exact_step, self.time_us, self.ended_client_seq, self.last_seq),
        ]
        return {self.meta_key: msgpack.packb(fields)}

    @property
    def meta_key(self) -> bytes:
        """Under what the store's metadata keeps it. ON DISK."""
        packed: bytes = msgpack.packb([self.run, self.client])
        return _META_PREFIX + packed


@dataclass(slots=True)
class _Run:
    """The epoch that holds a run, and its clients in it."""

    epoch: int
    clients: set[str] = field(default_factory=set)


class Sessions:
    """All sessions of a shard. Not thread-safe: the shard's loop owns it."""

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Read the sessions back from the store's metadata.

        Args:
            meta: All of the store's metadata.

        Raises:
            CorruptionError: An entry cannot be read.
        """
        # In the order in which something has come of them.
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._runs: dict[str, _Run] = {}
        self._ranks: dict[int, list[Session]] | None = None  # trainers by epoch; None after a change
        self._changed: dict[bytes, bytes] = {}  # metadata, besides that of the session which a record came of
        self._version_epoch = int(meta.get(_META_VERSION_EPOCH, b"0"))
        self._forgotten_epoch = int(meta.get(_META_FORGOTTEN_EPOCH, b"0"))
        sessions = []
        for key, value in meta.items():
            if not key.startswith(_META_PREFIX):
                continue
            try:
                sessions.append(Session(*msgpack.unpackb(value)))
            except (ValueError, TypeError) as exc:
                raise CorruptionError(f"store metadata {key!r} is not a session: {exc}") from exc
        for session in sorted(sessions, key=lambda session: session.epoch):
            self._keep(session)
        for session in sorted(self, key=lambda session: session.last_seq):
            self._sessions.move_to_end((session.run, session.client))

    def _keep(self, session: Session) -> None:
        """Add a session of the epoch that holds its run, or of a newer one: then those of the older one go."""
        run = self._runs.setdefault(session.run, _Run(session.epoch))
        if session.epoch > run.epoch:
            older = [self._sessions[session.run, client] for client in run.clients]
            for other in older:
                if other.client != session.client:
                    self._remove(other)
            if not session.is_trainer:  # the epoch that holds the run may go with it, and is none of a trainer's
                self._forget_trainers(older)
            run.epoch = session.epoch
        run.clients.add(session.client)
        self._sessions[session.run, session.client] = session

    def _remove(self, session: Session) -> None:
        del self._sessions[session.run, session.client]
        self._runs[session.run].clients.remove(session.client)
        self._changed[session.meta_key] = _REMOVED

    def _forget_trainers(self, sessions: Iterable[Session]) -> None:
        """Let no trainer begin anew in the epochs of those that are trainers."""
        forgotten = max((session.epoch for session in sessions if session.is_trainer), default=0)
        if forgotten > self._forgotten_epoch:
            self._forgotten_epoch = forgotten
            self._changed[_META_FORGOTTEN_EPOCH] = b"%d" % forgotten

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def highest_epoch(self) -> int:
        """Highest epoch of any run or of any row's version; 0 before the first."""
        return max([self._version_epoch, self._forgotten_epoch, *(run.epoch for run in self._runs.values())])

    def epoch_of(self, run: str) -> int:
        """Return the epoch that holds a run; 0 before its first hello, and when all of it was forgotten."""
        known = self._runs.get(run)
        return 0 if known is None else known.epoch

    @property
    def newest_epoch(self) -> int:
        """Highest epoch of a trainer; 0 before the first."""
        return next(iter(self._ranks_by_epoch()), 0)

    def _ranks_by_epoch(self) -> dict[int, list[Session]]:
        """Return the trainers, by epoch, the newest first. Replicas ask for them after every record."""
        if self._ranks is None:
            self._ranks = {}
            for session in sorted(self, key=lambda session: -session.epoch):
                if session.is_trainer:
                    self._ranks.setdefault(session.epoch, []).append(session)
        return self._ranks

    def find(self, run: str, client: str) -> Session | None:
        """Return a client's session, of whatever epoch; None when it has never said hello."""
        return self._sessions.get((run, client))

    def ranks_of(self, epoch: int) -> list[Session]:
        """Return the sessions of the run that an epoch belongs to, if every rank has said hello; else none."""
        ranks = self._ranks_by_epoch().get(epoch, [])
        return ranks if ranks and len(ranks) >= ranks[0].world_size else []

    def exact_step_of(self, epoch: int) -> int | None:
        """Return the step at which an epoch's run stands exactly: all ranks have ended it, none has sent more."""
        ranks = self.ranks_of(epoch)
        steps = {session.step for session in ranks}
        return steps.pop() if len(steps) == 1 and all(session.is_at_exact_cut for session in ranks) else None

    def watermark_of(self, epoch: int) -> int:
        """Return the step up to which everything of an epoch's run is here: its slowest rank's; -1 before the first."""
        return min((session.step for session in self.ranks_of(epoch)), default=-1)

    def fence(self, run: str, epoch: int) -> None:
        """Check that `epoch` may still write.

        Raises:
            FencedError: A newer epoch holds the run.
        """
        current = self.epoch_of(run)
        if epoch < current:
            raise FencedError(
                f"run {run!r}: epoch {epoch} is fenced off, epoch {current} has taken over; stop this trainer",
                epoch=current,
            )

    def check_epoch(self, epoch: int) -> None:
        """Check that an epoch, of a run or of rows that are brought in, leaves enough of them to later runs.

        Raises:
            RequestError: It is too far above all that were seen.
        """
        if epoch > last_epoch_after(0) and epoch > (last := last_epoch_after(self.highest_epoch)):
            raise RequestError(
                f"epoch {epoch} is too far above {self.highest_epoch}, the highest of this shard, which now takes none "
                f"above {last}; a trainer that starts takes the next one after the highest"
            )

    def check_unclaimed(self, epoch: int) -> None:
        """Check that an epoch is above every one seen: the trainer that takes it is the only one that has it.

        Raises:
            FencedError: It is not; `epoch` is the highest one.
        """
        if epoch <= self.highest_epoch:
            raise FencedError(f"epoch {epoch} has been taken", epoch=self.highest_epoch)

    def check_remembered(self, run: str, client: str, epoch: int, world_size: int) -> None:
        """Check that a trainer which would begin anew is not one that was forgotten.

        Raises:
            FencedError: It may be.
        """
        session = self._sessions.get((run, client))
        is_known = session is not None and session.epoch == epoch and session.is_trainer
        if world_size and not is_known and epoch <= self._forgotten_epoch:
            raise FencedError(
                f"run {run!r}: epoch {epoch} is too old to begin in, as the {MAX_SESSIONS} clients that were heard of "
                "last are remembered and no others; stop this trainer and start it again",
                epoch=self.highest_epoch,
            )

    def open(self, run: str, client: str, epoch: int, rank: int, world_size: int) -> Session:
        """Return the session of a client's hello, begun anew when its epoch is new; `settle` comes next.

        Raises:
            FencedError: A newer epoch holds the run.
        """
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
        """Return whether the client has said this very hello."""
        session = self._sessions.get((run, client))
        return session is not None and (session.epoch, session.rank, session.world_size) == (epoch, rank, world_size)

    def accept(self, run: str, client: str, epoch: int, client_seq: int) -> tuple[Session, bool]:
        """Return (session, whether the batch is new) for a batch that arrived.

        The caller raises `Session.last_client_seq` once the batch is in the log's queue.

        Raises:
            FencedError: A newer epoch holds the run.
            SequenceGapError: An earlier batch is missing.
            RequestError: No hello in this epoch, or a client seq below 1.
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
                f"client {client!r} of run {run!r} sent batch {client_seq}, expected {expected}",
                expected_seq=expected,
            )
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
    ) -> None:
        """Record that a batch has been accepted; `settle` comes next."""
        session.last_client_seq = client_seq
        if ends_step:
            session.step, session.time_us, session.ended_client_seq = step, time_us, client_seq
            if is_exact_cut:
                session.exact_step = step

    def settle(self, session: Session, seq: int) -> dict[bytes, bytes]:
        """Note that a record came of a session, and forget others that are too old; return the metadata that keeps it.

        Args:
            session: Opened or advanced by the record.
            seq: The record's place in the log.
        """
        session.last_seq = seq
        self._sessions.move_to_end((session.run, session.client))
        while len(self._sessions) > MAX_SESSIONS:
            oldest = next(iter(self._sessions.values()))
            self._remove(oldest)
            self._forget_trainers([oldest])
            self._ranks = None
            if not self._runs[oldest.run].clients:
                del self._runs[oldest.run]
        meta = self._changed | session.pack()
        self._changed = {}
        return meta

    def raise_version_epoch(self, epoch: int) -> dict[bytes, bytes]:
        """Record that rows of this epoch have come in from elsewhere; return the metadata that keeps it.

        A trainer that starts later takes a higher epoch, so its rows are newer than the ones brought in.
        """
        self._version_epoch = max(self._version_epoch, epoch)
        return {_META_VERSION_EPOCH: b"%d" % self._version_epoch}
