"""A move at its source: what the shard answers to the destination, which drives the move.

Each answer is a function of the source's log and the request, so requests may be late, come twice or come from a
destination that has started again. The source decides only one thing by itself: it lets a seal lapse whose destination
is silent for too long. The move is not over then: whoever drives it seals once more. It is over when the destination
has asked to give it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.paramserver.ingest.moves import MoveProgress
from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.schemas.errors import RequestError
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position

__all__ = ["Copied", "FollowedRecord", "MoveSource", "SourceMoves", "SourceShard", "Tail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What a shard had of some partitions at a position: rows, tombstones; and what is the shard's.

    Attributes:
        position: c, durable.
        contents: As the shard's store makes and loads them; nobody else looks inside.
    """

    position: Position
    contents: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedRecord:
    """A record of the source's log, cut to the partitions of a move.

    Attributes:
        position: Of the record.
        epoch: Of the record.
        header: Of a batch, with the tables that are left, or of a hello.
        body: The batch, cut; none of a hello.
    """

    position: Position
    epoch: int
    header: Mapping[str, Any]
    body: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """Durable records behind a position, in order, of those that touch a move's partitions.

    Attributes:
        records: The records.
        position: The last record of the log that was looked at.
    """

    records: tuple[FollowedRecord, ...]
    position: Position


class MoveSource(Protocol):
    """A source, as the destination calls it.

    Each call raises `UnavailableError` when its outcome is unknown; then it may still take effect later.
    """

    async def copy(self, move: Move) -> Copied:
        """Return what the source has of the partitions.

        Raises:
            RequestError: It does not own the partitions in the version before the move's, and has not released them.
        """

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        """Return some records behind `after`, none behind `up_to_seq`; none at once if `after` is not before that.

        None says that the source's log no longer has that place, or has another record there: copy anew.
        """

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        """Return a digest of rows with versions, tombstones and identities, and the position of which it is."""

    async def seal(self, move: Move) -> Position | None:
        """Seal, unless it is, and return q once that is durable; None if the move was given up.

        Raises:
            RequestError: As `copy`.
        """

    async def release(self, move: Move, at: Position) -> bool:
        """Release the partitions to a destination that is ready at q; False if they are not sealed there any more."""

    async def unseal(self, move: Move) -> bool:
        """Give the move up; False if it was released."""

    async def purge(self, move: Move) -> None:
        """Remove the rows, which a checked part of the destination holds. Raises `RequestError` before the release."""


class SourceShard(Protocol):
    """What a move needs of the shard that is its source."""

    @property
    def partitions(self) -> ShardPartitions:
        """The shard's maps and moves, up to the last record that has a place in its log."""

    async def append(self, record: MoveRecord) -> Position:
        """Check a record, give it a place in the log, take it, and wait until it is durable.

        Others may come first. Raises `RequestError` if ownership forbids it when its turn comes.
        """

    async def durable(self, seq: int) -> Position:
        """Wait until a record that has a place is durable; return its position."""

    async def copy(self, move: Move) -> Copied:
        """Return what the store has of the partitions, at a durable position."""

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        """As `MoveSource.follow`."""

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        """As `MoveSource.digest`."""


class SourceMoves:
    """Answers for a shard as a source; a `MoveSource`. Thread: the loop's.

    Cancellation: each call's record is in the log or is not; repeating the call finds out.
    """

    def __init__(self, shard: SourceShard) -> None:
        self._shard = shard

    async def copy(self, move: Move) -> Copied:
        """As `MoveSource.copy`."""
        self._check_has(move)
        return await self._shard.copy(move)

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        """As `MoveSource.follow`."""
        self._check_has(move)
        return await self._shard.follow(move, after, up_to_seq)

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        """As `MoveSource.digest`."""
        self._check_has(move)
        return await self._shard.digest(move)

    async def seal(self, move: Move) -> Position | None:
        """As `MoveSource.seal`."""
        while (progress := self._find(move)) is None or progress.step is MoveStep.LAPSE:
            if (sealed := await self._append(MoveRecord(step=MoveStep.SEAL, move=move), progress)) is not None:
                return sealed
        if progress.step is MoveStep.UNSEAL:
            await self._shard.durable(progress.seq)
            return None
        return await self._shard.durable(_seal_seq(progress))

    async def release(self, move: Move, at: Position) -> bool:
        """As `MoveSource.release`."""
        progress = self._find(move)
        if progress is not None and progress.step is MoveStep.SEAL and at == await self._shard.durable(progress.seq):
            # Other requests may have come while the seal became durable, and it may have lapsed.
            release = MoveRecord(step=MoveStep.RELEASE, move=move, position=at)
            if self._find(move) == progress and await self._append(release, progress) is not None:
                return True
            progress = self._find(move)
        if progress is None or progress.step is not MoveStep.RELEASE or at != progress.record.position:
            return False
        await self._shard.durable(progress.seq)
        return True

    async def unseal(self, move: Move) -> bool:
        """As `MoveSource.unseal`."""
        while (progress := self._find(move)) is not None and progress.step in (MoveStep.SEAL, MoveStep.LAPSE):
            if self._has_taken(move):
                break
            if await self._append(MoveRecord(step=MoveStep.UNSEAL, move=move), progress) is not None:
                return True
        if progress is None:
            # A request to seal that comes late finds no destination that goes on; `expire` ends that.
            return not self._has_taken(move)
        await self._shard.durable(progress.seq)
        return progress.step is MoveStep.UNSEAL

    async def expire(self, move: Move) -> None:
        """Let the seal of a move lapse whose destination has been silent; do nothing in any other state."""
        progress = self._find(move)
        if progress is not None and progress.step is MoveStep.SEAL and not self._shard.partitions.has_left(move):
            await self._append(MoveRecord(step=MoveStep.LAPSE, move=move), progress)

    def _find(self, move: Move) -> MoveProgress | None:
        return self._shard.partitions.moves.find_same(move)

    async def _append(self, record: MoveRecord, progress: MoveProgress | None) -> Position | None:
        """Append a transition from a progress; return None if another one has come first."""
        try:
            return await self._shard.append(record)
        except RequestError:
            if self._find(record.move) == progress:
                raise
            return None

    async def purge(self, move: Move) -> None:
        """As `MoveSource.purge`."""
        partitions = self._shard.partitions
        progress = partitions.moves.find_same(move)
        if progress is not None and progress.step is MoveStep.PURGE:
            await self._shard.durable(progress.seq)
            return
        if not partitions.has_left(move):
            raise RequestError(f"move {move.move_id!r} is not released: its rows stay")
        if progress is None and not partitions.is_set_back(move):
            return  # purged long ago
        # A shard that was set back to before its release hears of it from the destination, which proves it.
        await self._shard.append(MoveRecord(step=MoveStep.PURGE, move=move))

    def _has_taken(self, move: Move) -> bool:
        """Return whether the map says that the destination has the partitions by this move."""
        known, at = self._shard.partitions.known, list(move.partitions)
        return bool(((known.versions[at] == move.versions) & (known.owners[at] == move.destination)).any())

    def _check_has(self, move: Move) -> None:
        """Raise `RequestError` unless the shard has all rows of the partitions, as owner or until it purges them."""
        progress = self._shard.partitions.moves.find_same(move)
        if progress is None or progress.step not in (MoveStep.SEAL, MoveStep.RELEASE):
            self._shard.partitions.check(MoveRecord(step=MoveStep.SEAL, move=move))


def _seal_seq(progress: MoveProgress) -> int:
    if progress.step is MoveStep.SEAL:
        return progress.seq
    if progress.step is MoveStep.RELEASE and progress.record.position is not None:
        return progress.record.position.seq
    raise RequestError(f"move {progress.move.move_id!r} has no seal: its last step here is {progress.step}")
