"""A move at its destination, which drives it: copy, follow, verify, seal, ready, activate, purge.

`DestinationMove.run` goes on from wherever the destination's log and the source's answers say that the move is. So
whoever runs it may be killed between any two lines; the next run repeats at most what changes nothing. No coordinator
takes part: it only begins a move, and may ask for an abort, which is granted until the source has released.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from headrace.paramserver.ingest.moves import MoveProgress
from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.reshard.source_moves import Copied, FollowedRecord, MoveSource
from headrace.schemas.errors import CorruptionError, GoneError, RequestError
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position

__all__ = ["DestinationMove", "DestinationShard"]


class DestinationShard(Protocol):
    """What a move needs of the shard that is its destination."""

    @property
    def partitions(self) -> ShardPartitions:
        """The shard's maps and moves, up to the last record that has a place in its log."""

    async def append(self, record: MoveRecord) -> Position:
        """As `SourceShard.append`."""

    async def import_records(self, move: Move, records: Sequence[FollowedRecord]) -> None:
        """Append an `ImportRecord` for each, in order, as `append` does; return once all are durable."""

    @property
    def copying(self) -> AbstractAsyncContextManager[object]:
        """Held by one move at a time, while it copies."""

    async def load(self, move: Move, copied: Copied) -> None:
        """Append a `LoadRecord` for each piece of what was copied, as `append` does; return once all are durable."""

    async def digest_incoming(self, move: Move, like: bytes) -> bytes:
        """Return the digest of what the store has of the partitions, all imports included, as the source's `like`.

        What means nothing below the source's floors does not count, even if the shard's own floors are higher.
        """

    async def wait_safe(self, move: Move) -> None:
        """Return once all that the log has now survives what the source's log survives: a lost disk, with an archive.

        Raises:
            UnavailableError: It is not safe yet.
            GoneError: What the move has copied never will be: copy anew.
        """

    def is_aborted(self, move: Move) -> bool:
        """Return whether somebody asks to give the move up."""


class DestinationMove:
    """One move at its destination."""

    def __init__(self, move: Move, shard: DestinationShard, source: MoveSource) -> None:
        self._move, self._shard, self._source = move, shard, source
        self._followed: Position | None = None  # the source's log is imported up to here

    async def run(self) -> bool:
        """Take the move to its end; return whether the destination has the partitions.

        Cancellation: harmless; run it again.

        Raises:
            UnavailableError: Run it again later.
            RequestError: Ownership forbids the move: it was never begun, or is left to `abort`.
            CorruptionError: What was copied differs from what the source has; the move was given up.
        """
        progress = self._shard.partitions.moves.find_same(self._move)
        if progress is None or progress.step is MoveStep.COPY:
            if not await self._bring_in(progress):
                return False
        elif progress.step is MoveStep.PURGE:
            return False
        await self._shard.wait_safe(self._move)
        await self._source.purge(self._move)
        return True

    async def _bring_in(self, progress: MoveProgress | None) -> bool:
        """Copy, follow, and take the partitions; return False if the move was given up."""
        verified = False
        if progress is not None and progress.is_loaded:
            self._followed = progress.imported
        while True:
            if self._shard.is_aborted(self._move) and await self._give_up():
                return False
            if self._followed is None:
                verified = False
                await self._copy()
            elif not verified:
                verified = await self._verify()
            elif (sealed := await self._source.seal(self._move)) is None:
                await self._purge()
                return False
            elif not await self._follow(sealed.seq):
                continue
            elif not await self._source.release(self._move, sealed):
                continue  # the seal has lapsed, or the move was given up: `seal` tells
            else:
                await self._shard.append(MoveRecord(step=MoveStep.ACTIVATE, move=self._move, position=sealed))
                return True

    async def _copy(self) -> None:
        async with self._shard.copying:
            copied = await self._source.copy(self._move)
            await self._shard.append(MoveRecord(step=MoveStep.COPY, move=self._move, position=copied.position))
            await self._shard.load(self._move, copied)
        self._followed = copied.position

    async def _verify(self) -> bool:
        """Compare with the source at one position; return False if it was set back, or what is here is not safe."""
        try:
            await self._shard.wait_safe(self._move)  # before writes pause
        except GoneError:
            self._followed = None
            return False
        position, digest = await self._source.digest(self._move)
        if not await self._follow(position.seq):
            return False
        if self._followed != position:
            # It is behind us, if the answer is an old one: ask again.
            return False
        if await self._shard.digest_incoming(self._move, digest) != digest:
            await self._give_up()
            raise CorruptionError(f"move {self._move.move_id!r}: the copy differs from the source at {position}")
        return True

    async def _follow(self, seq: int) -> bool:
        """Import the source's records up to one; return False if the source has lost its place: then copy anew."""
        assert self._followed is not None
        while True:
            # Ask at least once, even if we are there: the source may have been set back, and gone on otherwise.
            tail = await self._source.follow(self._move, self._followed, seq)
            if tail is None:
                self._followed = None
                return False
            await self._shard.import_records(self._move, tail.records)
            self._followed = tail.position
            if self._followed.seq >= seq:
                return True

    async def _give_up(self) -> bool:
        """Give the move up, unless the source has released."""
        if not await self._source.unseal(self._move):
            return False
        await self._purge()
        return True

    async def _purge(self) -> None:
        progress = self._shard.partitions.moves.find_same(self._move)
        if progress is not None and progress.step is not MoveStep.PURGE:
            if progress.step is not MoveStep.COPY:
                raise RequestError(f"move {self._move.move_id!r} cannot be given up behind {progress.step}")
            await self._shard.append(MoveRecord(step=MoveStep.PURGE, move=self._move))
