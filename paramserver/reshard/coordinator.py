"""Take a plan through the shards, stage by stage. No I/O of its own.

The shards carry each move out by themselves and decide about it. So the coordinator only begins moves and asks after
them, and any number of coordinators may do so at once, or none: all that they know is a `Reshard`, which is kept where
the shards keep their logs, and moves whose ids and versions were fixed when the plan was made. To begin a move again
changes nothing.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, Self

import msgpack

from headrace.paramserver.reshard.planner import Plan
from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, decode_move_record
from headrace.schemas.partition_map import PartitionMap

__all__ = ["Coordinator", "MoveState", "Reshard", "ReshardShards", "Wish", "change_wish", "start"]

# ON DISK: never renumber.
_FORMAT_VERSION = 1
_POLL_S = 0.5


class MoveState(enum.StrEnum):
    """How far a move is, as its destination says."""

    UNKNOWN = "unknown"  # never begun there, or given up and purged
    UNDER_WAY = "under way"
    DONE = "done"  # it serves the partitions, and the source has removed them


class Wish(enum.StrEnum):
    """What the operator wants of a reshard. ON DISK: never rename."""

    RUN = "run"
    PAUSE = "pause"  # the stage goes to its end, and no other begins
    ABORT = "abort"  # what is not released is given up, and no other stage begins


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshard:
    """A plan that is being carried out.

    Attributes:
        stages: The moves of each, in order. A partition that moves twice is in two stages.
        wish: What the operator wants.
    """

    stages: tuple[tuple[Move, ...], ...]
    wish: Wish = Wish.RUN

    @classmethod
    def of_plan(cls, plan: Plan, partition_map: PartitionMap, *, reshard_id: str) -> Self:
        """Return the reshard of a plan that was made for a map.

        Raises:
            RequestError: The plan is of another map.
        """
        stages = []
        for number, stage in enumerate(plan.stages, 1):
            moves = []
            by_way = sorted(stage.moves, key=lambda move: (move.source, move.destination, move.partition))
            for (source, to), group in groupby(by_way, key=lambda move: (move.source, move.destination)):
                move_id = f"{reshard_id}-{number}-{source}-{to}"
                partitions = tuple(move.partition for move in group)
                if any(partition_map.owners[each] != source for each in partitions):
                    raise RequestError(f"the plan moves partitions from shard {source}, which owns them no more")
                moves.append(Move.of_map(partition_map, partitions, move_id=move_id, destination=to))
            for move in moves:
                partition_map = move.apply_to(partition_map)
            stages.append(tuple(moves))
        return cls(stages=tuple(stages))

    def encode(self) -> bytes:
        """Return its bytes."""
        # The moves in the log's own format, of any transition that has no position.
        stages = [[MoveRecord(step=MoveStep.PURGE, move=move).header() for move in stage] for stage in self.stages]
        packed: bytes = msgpack.packb([_FORMAT_VERSION, str(self.wish), stages])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the reshard that `encode` has made these bytes of.

        Raises:
            CorruptionError: They are none.
        """
        try:
            version, wish, stages = msgpack.unpackb(data)
            if version != _FORMAT_VERSION:
                raise ValueError(f"format version {version}, this build reads {_FORMAT_VERSION}")
            return cls(stages=tuple(tuple(map(_move_of, stage)) for stage in stages), wish=Wish(wish))
        except (ValueError, TypeError, CorruptionError) as exc:
            raise CorruptionError(f"{len(data)} bytes are no reshard: {exc}") from exc

    @classmethod
    def check(cls, data: bytes | memoryview) -> None:
        """Check the bytes that a client wants to be kept.

        Raises:
            RequestError: They are none of a reshard.
        """
        try:
            cls.decode(bytes(data))
        except CorruptionError as exc:
            raise RequestError(str(exc)) from exc


def _move_of(header: Any) -> Move:
    record = decode_move_record(header)
    if not isinstance(record, MoveRecord):
        raise ValueError(f"{record} is not a whole move")
    return record.move


class ReshardShards(Protocol):
    """What a coordinator needs of a server. All methods raise `UnavailableError` while a shard does not answer."""

    async def load(self) -> bytes | None:
        """Return the reshard that is under way; None without one."""

    async def save(self, data: bytes | None, *, instead_of: bytes | None) -> None:
        """Keep another reshard, durably, in place of the one that was loaded; `RequestError` if that has changed."""

    async def partition_map(self) -> PartitionMap:
        """Return the map that the shards know together."""

    async def without_partitions(self) -> list[str]:
        """Return the clients and nodes, by name, that do not know partitions."""

    async def begin(self, move: Move) -> None:
        """Let the destination carry a move out; one that it has begun, or has finished, stays as it is."""

    async def abort(self, move: Move) -> None:
        """Ask the destination to give a move up, unless the source has released it."""

    async def state_of(self, move: Move) -> MoveState:
        """Return how far the destination is."""


async def start(shards: ReshardShards, plan: Callable[[PartitionMap], Plan]) -> Reshard | None:
    """Make a plan for the map as it is, and keep it; return its reshard, None if nothing need move.

    Nothing moves before a `Coordinator` runs.

    Raises:
        RequestError: Another reshard is under way, a client or node does not know partitions, or there is no plan.
        UnavailableError: A shard does not answer.
    """
    if (kept := await shards.load()) is not None:
        under_way = Reshard.decode(kept)
        raise RequestError(
            f"a reshard of {len(under_way.stages)} stages is under way ({under_way.wish}): "
            "see headrace reshard status, and wait for its end or use headrace reshard abort"
        )
    if strangers := await shards.without_partitions():
        raise RequestError(
            f"{', '.join(strangers)}: connected, and of a release that does not know partitions: upgrade"
        )
    partition_map = await shards.partition_map()
    made = Reshard.of_plan(plan(partition_map), partition_map, reshard_id=secrets.token_hex(8))
    if not made.stages:
        return None
    await shards.save(made.encode(), instead_of=None)
    return made


async def change_wish(shards: ReshardShards, wish: Wish) -> Reshard:
    """Pause, resume or abort the reshard that is under way; return it. Repeating a wish changes nothing.

    Raises:
        RequestError: None is under way, it is being aborted already, or somebody else has changed it just now.
        UnavailableError: A shard does not answer.
    """
    kept = await shards.load()
    if kept is None:
        raise RequestError("no reshard is under way")
    reshard = Reshard.decode(kept)
    if reshard.wish is Wish.ABORT and wish is not Wish.ABORT:
        raise RequestError("the reshard is being aborted: what it has not moved stays; start another one")
    changed = replace(reshard, wish=wish)
    if changed != reshard:
        await shards.save(changed.encode(), instead_of=kept)
    return changed


class Coordinator:
    """Carries out the reshard that is kept, wherever it is."""

    def __init__(
        self,
        shards: ReshardShards,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare; `on_progress` is called with the partitions that have moved, and all that shall."""
        self._shards, self._on_progress, self._sleep = shards, on_progress, sleep

    async def run(self) -> Wish | None:
        """Go on until the reshard is over, and return None; or until it is paused or aborted, and return that wish.

        Cancellation: harmless; the shards finish the moves that are begun, and the next run goes on.

        Raises:
            UnavailableError: A shard does not answer; run it again.
            RequestError: A shard refuses a move: ownership is not as the plan has it. `abort` ends the reshard.
        """
        while True:
            kept = await self._shards.load()
            if kept is None:
                return None
            reshard = Reshard.decode(kept)
            states = [await self._states_of(stage) for stage in reshard.stages]
            self._tell(reshard, states)
            present = next((at for at, of in enumerate(states) if any(s is not MoveState.DONE for s in of)), None)
            if present is None:
                await self._end(kept)
                return None
            is_idle = not await self._advance(reshard, reshard.stages[present], states[present])
            if is_idle and reshard.wish is Wish.ABORT:
                await self._end(kept)
            if is_idle:
                return reshard.wish
            await self._sleep(_POLL_S)

    async def _advance(self, reshard: Reshard, stage: Sequence[Move], states: Sequence[MoveState]) -> bool:
        """Begin or give up what the wish says; return False if nothing of the stage is under way any more."""
        is_begun = any(state is not MoveState.UNKNOWN for state in states)
        for move, state in zip(stage, states, strict=True):
            if reshard.wish is Wish.ABORT and state is MoveState.UNDER_WAY:
                await self._shards.abort(move)
            elif state is MoveState.UNKNOWN and (reshard.wish is Wish.RUN or (reshard.wish is Wish.PAUSE and is_begun)):
                await self._shards.begin(move)
        return reshard.wish is Wish.RUN or any(
            state is MoveState.UNDER_WAY or (state is MoveState.UNKNOWN and is_begun and reshard.wish is Wish.PAUSE)
            for state in states
        )

    async def _states_of(self, stage: Sequence[Move]) -> list[MoveState]:
        return list(await asyncio.gather(*map(self._shards.state_of, stage)))

    async def _end(self, kept: bytes) -> None:
        """Forget the reshard; another coordinator may have done so just now, and somebody may have begun the next."""
        try:
            await self._shards.save(None, instead_of=kept)
        except RequestError:
            if await self._shards.load() == kept:
                raise

    def _tell(self, reshard: Reshard, states: Sequence[Sequence[MoveState]]) -> None:
        done = total = 0
        for stage, of_stage in zip(reshard.stages, states, strict=True):
            for move, state in zip(stage, of_stage, strict=True):
                total += len(move.partitions)
                done += len(move.partitions) * (state is MoveState.DONE)
        self._on_progress(done, total)
