"""Reshards for the chaos harness: one is under way nearly all the time; and faults that strike those who carry it out.

A task beside the trainer begins a reshard whenever none is under way: to a random number of shards, or of random
partitions to one of them. As an operator does, it aborts a reshard that does not go on by itself: one of which a move
was given up, or which says for a minute why it does not go on, where shards may have lost what they had been told.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from processes import WAIT_S, ChaosError
from waiting import pause, wait_until

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reshard.coordinator import MoveState, Reshard, Wish, change_wish, start
from headrace.paramserver.reshard.inventory import Goal
from headrace.paramserver.reshard.planner import Plan, make_plan
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.reshard.survey import Survey, look_around
from headrace.paramserver.rpc.address import parse_addresses
from headrace.paramserver.snapshots.contents import StoreScan
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import HeadraceError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap

__all__ = ["DIAL", "RESHARD_FAULTS", "OpenMove", "Reshards", "rows_of_others"]

_T = TypeVar("_T")

_POLL_S = 0.2
_TIMEOUT_S = 10.0
_STUCK_S = 60.0
# Of one reshard, on a machine that does much else, with a fault every few seconds.
_LONGEST_S = 3 * WAIT_S
_LINK_BYTES_S = 1e9
_OVER = ("ended", "given up", "done")  # phases of moves

DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=_TIMEOUT_S, role=idl.Role.ADMIN)


class OpenMove(NamedTuple):
    """A move that is under way, as its destination says."""

    source: int
    destination: int
    phase: str


class Reshards:
    """Begins reshards of a running server, and changes them. Every method blocks. Thread: any one.

    Attributes:
        counts: Of reshards that were `begun` and are `over`.
        stuck: Why reshards had to be aborted.
        phases: Of moves at which faults have struck, how often.
    """

    def __init__(self, address: str, num_shards: int, *, seed: int, loses_disks: bool = False) -> None:
        """Prepare for the server at an address, whose shards may lose their disks."""
        self.counts: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.stuck: list[str] = []
        self._address, self._seeds = address, parse_addresses(address)
        self._num_shards, self._loses_disks = num_shards, loses_disks
        self._random = random.Random(seed)
        self._begins = True
        self._since: tuple[str, float] | None = None  # the first move of what is under way, and since when
        self._fails_since_s: float | None = None
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Begin reshards from now on. Idempotent."""
        if not self._thread.is_alive():
            self._thread.start()
            self._call(self._launch())

    def close(self) -> None:
        """Begin nothing any more; what is under way goes on by itself. Idempotent."""
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def check(self) -> None:
        """Raise what has ended the task, or that a reshard takes too long."""
        if self._task is not None and self._task.done():
            raise ChaosError(f"no reshard is begun any more: {self._task.exception()}") from self._task.exception()
        since = self._since
        if since is not None and time.monotonic() - since[1] > _LONGEST_S:
            raise ChaosError(f"a reshard is not over after {_LONGEST_S:g} s: {self._call(self._describe())}")

    def wait_move(self) -> OpenMove:
        """Return a move that is under way; wait until there is one."""

        def find() -> list[OpenMove]:
            self.check()
            return self._call(self._until_answered(_open_moves))

        moves = wait_until(find, lambda: f"a move, of {self._call(self._describe())},", within_s=WAIT_S, poll_s=_POLL_S)
        move = self._random.choice(moves)
        self.phases[move.phase] += 1
        return move

    def change(self, wish: Wish) -> None:
        """Pause, resume or abort the reshard that is under way, if it is not over by now."""
        self._call(self._until_answered(lambda shards: _change(shards, wish)))

    def begin_second(self) -> None:
        """Begin a reshard while one is under way: it must be refused."""

        async def attempt(shards: ServerShards) -> None:
            before = await shards.load()
            plan = self._plan(await look_around(shards, link_bytes_s=_LINK_BYTES_S))
            try:
                made = await start(shards, lambda _: plan)
            except RequestError as exc:
                if "is under way" not in str(exc) and not await _is_outdated(shards, exc):
                    raise ChaosError(f"a second reshard was refused: {exc}") from exc
                return
            if made is None or before is None:
                return
            states = [await shards.state_of(move) for stage in Reshard.decode(before).stages for move in stage]
            if MoveState.UNDER_WAY in states:
                raise ChaosError("a second reshard was begun while moves of the first one are under way")

        self._call(self._until_answered(attempt))

    def finish(self) -> None:
        """Begin no other reshard, and return when none is under way."""
        self._begins = False
        self._wait_over()

    def spread(self) -> None:
        """Spread all partitions over all shards; return when that is over."""

        async def attempt(shards: ServerShards) -> None:
            survey = await look_around(shards, link_bytes_s=_LINK_BYTES_S)
            owner = np.arange(len(survey.loads.owner)) % self._num_shards
            owner = (owner + (survey.loads.owner == owner).all()) % self._num_shards  # so that something moves
            try:
                await start(shards, lambda _: _plan_of(survey, owner))
            except RequestError as exc:  # the answer to an earlier attempt may have been lost
                if not await _is_outdated(shards, exc):
                    raise

        self._call(self._until_answered(attempt))
        self._wait_over()

    def partition_map(self) -> PartitionMap:
        """Return the map that all shards know together."""
        return self._call(self._until_answered(ServerShards.partition_map))

    def _wait_over(self) -> None:

        def is_over() -> bool:
            self.check()
            return self._call(self._until_answered(ServerShards.load)) is None

        wait_until(is_over, lambda: f"the end of {self._call(self._describe())}", within_s=_LONGEST_S, poll_s=_POLL_S)

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * WAIT_S)
        except (HeadraceError, TimeoutError) as exc:
            raise ChaosError(f"a reshard cannot be asked after: {exc}") from exc

    async def _launch(self) -> None:
        self._task = asyncio.create_task(self._keep_one_under_way())

    async def _end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _until_answered(self, ask: Callable[[ServerShards], Awaitable[_T]]) -> _T:
        """Return an answer of the server; ask again while a fault is in the way."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                async with await ServerShards.reach(DIAL, self._seeds) as shards:
                    return await ask(shards)
            except HeadraceError as exc:
                if not exc.retriable or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _keep_one_under_way(self) -> None:
        while True:
            try:
                async with await ServerShards.reach(DIAL, self._seeds) as shards:
                    while True:
                        await self._look(shards)
                        await asyncio.sleep(_POLL_S)
            except HeadraceError as exc:
                if not exc.retriable:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _look(self, shards: ServerShards) -> None:
        kept = await shards.load()
        if kept is None:
            self.counts["over"] += self._since is not None
            self._since = self._fails_since_s = None
            if self._begins:
                await self._begin(shards)
            return
        reshard = Reshard.decode(kept)
        first = reshard.stages[0][0].move_id
        if self._since is None or self._since[0] != first:
            self.counts["over"] += self._since is not None
            self._since, self._fails_since_s = (first, time.monotonic()), None
        found = (await shards.links[0].status()).reshard
        if reshard.wish is Wish.RUN and found is not None and self._is_stuck(found.failure):
            self.stuck.append(found.failure)
            await _change(shards, Wish.ABORT)

    def _is_stuck(self, failure: str | None) -> bool:
        """Return whether a reshard that fails at present does not go on by itself."""
        if failure is None:
            self._fails_since_s = None
            return False
        self._fails_since_s = self._fails_since_s or time.monotonic()
        fails_s = time.monotonic() - self._fails_since_s
        return "was given up" in failure or (self._loses_disks and fails_s > _STUCK_S)

    async def _begin(self, shards: ServerShards) -> None:
        plan = self._plan(await look_around(shards, link_bytes_s=_LINK_BYTES_S))
        try:
            made = await start(shards, lambda _: plan)
        except RequestError as exc:
            if not await _is_outdated(shards, exc):
                raise
            return
        self.counts["begun"] += made is not None

    def _plan(self, survey: Survey) -> Plan:
        owner, rng = survey.loads.owner.copy(), self._random
        if rng.random() < 0.5:
            goal = Goal(shards=tuple(range(rng.randint(1, self._num_shards))))
            return make_plan(survey.cluster, survey.loads, goal)
        some = rng.sample(range(len(owner)), rng.randint(1, len(owner) // 4))
        owner[some] = rng.randrange(self._num_shards)
        return _plan_of(survey, owner)

    async def _describe(self) -> str:
        async def attempt(shards: ServerShards) -> str:
            statuses = await asyncio.gather(*(link.status() for link in shards.links))
            moves = [str(move) for status in statuses for move in status.moves or ()]
            return "; ".join([str(statuses[0].reshard), *moves])

        return await self._until_answered(attempt)


async def _change(shards: ServerShards, wish: Wish) -> None:
    try:
        await change_wish(shards, wish)
    except RequestError:  # it is over, or somebody was faster
        kept = await shards.load()
        if kept is not None and Reshard.decode(kept).wish not in (wish, Wish.ABORT):
            raise


def _plan_of(survey: Survey, owner: Any) -> Plan:
    goal = Goal(shards=tuple(np.unique(owner).tolist()), evens_out=False)
    return make_plan(survey.cluster, survey.loads, goal, owner=owner)


async def _is_outdated(shards: ServerShards, refusal: RequestError) -> bool:
    """Return whether somebody has begun a reshard, or partitions have moved, since a plan was made."""
    return "owns them no more" in str(refusal) or await shards.load() is not None


async def _open_moves(shards: ServerShards) -> list[OpenMove]:
    statuses = await asyncio.gather(*(link.status() for link in shards.links))
    return [
        OpenMove(move.source, move.destination, move.phase or "")
        for status in statuses
        for move in status.moves or ()
        if move.destination == status.shard and move.phase not in _OVER
    ]


def rows_of_others(store_path: Path, shard: int, partition_map: PartitionMap) -> list[str]:
    """Return a line for each table of which the store of a stopped shard has rows that others own."""
    found = []
    store = RowStore.open_read_only(store_path)
    try:
        for table in Catalog(store.read_meta()):
            layouts = [table.layout_of(columns) for columns in store.layouts(table.table_id)]
            for layout in layouts:
                num_others = 0
                for ids, _ in StoreScan(store, table).records(layout):
                    num_others += int((partition_map.shards_of_rows(table.spec.seed, ids) != shard).sum())
                if num_others:
                    what = f"rows of columns {layout.shard} of {table.spec.fqn}"
                    found.append(f"shard {shard} has {num_others} {what} that others own")
    finally:
        store.close()
    return found


# Faults. Each returns when the server is ready again.


def _kill_of_move(chaos: Any, shard_of: Callable[[OpenMove], int]) -> None:
    move = chaos.reshards.wait_move()
    pause(chaos.random.uniform(0, 1))
    chaos.server_of(shard_of(move)).kill_shard(shard_of(move))


def _abort(chaos: Any) -> None:
    """Abort the reshard amid a move; what is decided goes on."""
    chaos.reshards.wait_move()
    pause(chaos.random.uniform(0, 1))
    chaos.reshards.change(Wish.ABORT)


def _pause(chaos: Any) -> None:
    """Pause the reshard, and resume it."""
    chaos.reshards.wait_move()
    chaos.reshards.change(Wish.PAUSE)
    pause(chaos.random.uniform(0, 2))
    chaos.reshards.change(Wish.RUN)


def _begin_second(chaos: Any) -> None:
    """Begin another reshard while one is under way."""
    chaos.reshards.wait_move()
    chaos.reshards.begin_second()


RESHARD_FAULTS: dict[str, Callable[[Any], None]] = {
    "kill_source": lambda chaos: _kill_of_move(chaos, lambda move: move.source),
    "kill_destination": lambda chaos: _kill_of_move(chaos, lambda move: move.destination),
    "kill_coordinator": lambda chaos: _kill_of_move(chaos, lambda _: 0),
    "abort_reshard": _abort,
    "pause_reshard": _pause,
    "second_reshard": _begin_second,
}
