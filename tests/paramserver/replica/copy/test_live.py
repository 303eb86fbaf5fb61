"""A copy that follows, lost or not, with its work in threads; and its log leases. Shards and time are fakes."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_copies import turns, until

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading import follower
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.paramserver.replica.copy.live import CopyLease, LiveCopy, LogLeaseKeeper
from headrace.paramserver.replica.copy.shard_tail import Change, ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import (
    GoneError,
    HeadraceError,
    OverloadedError,
    SetBackError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position

WAIT_S = 20.0


class Silent:
    """A fake shard that notes requests and never answers."""

    def __init__(self) -> None:
        hello = SimpleNamespace(server_id="s")
        link = SimpleNamespace(
            hello=hello, fetch_updates=self._never, address="nowhere", failure=None, moved_s=-math.inf
        )
        self.links = [link]
        self.asked: asyncio.Queue[Any] = asyncio.Queue()

    async def link_to(self, shard: int) -> Any:
        return self.links[shard]

    async def _never(self, request: object) -> None:
        self.asked.put_nowait(request)
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def keep_waiting(copy: LiveCopy) -> None:
    """Fill a copy's memory with a record that is not shown, so that no more is fetched."""
    tail = copy.table_set.tails[0]
    tail.pending.append(Change(1, 1, 1, 0, 0, (), False, None, 100))
    tail.seq, tail.pending_bytes = 1, 100
    copy.table_set.limits = [0]


_opened: list[LiveCopy] = []


def live_copy(
    consistency: Any = "latest", *, server: Any = None, mark: int | None = None, num_shards: int = 1, **settings: Any
) -> tuple[LiveCopy, list[HeadraceError]]:
    tails = [
        ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({}), mark=mark) for shard in range(num_shards)
    ]
    table_set = TableSet("s", tails, is_by_step=consistency == "step", make_table=MemoryTable)
    lost: list[HeadraceError] = []
    config = ReplicaConfig(consistency=consistency, **settings)
    copy = LiveCopy(
        table_set,
        server or cast("Any", Silent()),
        config,
        CopyLease.of(config),
        target_seqs=[0] * num_shards,
        on_change=lambda: None,
        on_lost=lambda _, error: lost.append(error),
    )
    _opened.append(copy)
    return copy, lost


@pytest.fixture(autouse=True)
async def _close() -> AsyncIterator[None]:
    yield
    while _opened:
        await _opened.pop().close()


async def test_a_lost_copy_is_enough_for_nobody() -> None:
    """Waiting for a lost copy fails, even if the condition has just become true."""
    copy, _ = live_copy()
    waiting = asyncio.create_task(copy.wait_until(lambda: False))
    await asyncio.sleep(0)
    copy._end(GoneError("its place is gone"))
    with pytest.raises(GoneError, match="its place"):
        await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(GoneError, match="its place"):
        await copy.wait_until(lambda: True)
    done, _ = await asyncio.wait(copy._tasks, timeout=WAIT_S)
    assert len(done) == 1  # nor is any shard followed on, and its log kept
    await copy.close()
    with pytest.raises(GoneError, match="its place"):  # that it is closed too is not why
        await copy.wait_until(lambda: True)


async def test_what_is_shown_in_a_thread_is_shown_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled audit admits no new records while its thread still shows earlier ones."""
    copy, _ = live_copy()
    begun, may_end = threading.Event(), threading.Event()

    def advance() -> bool:
        begun.set()
        assert may_end.wait(WAIT_S)
        return False

    monkeypatch.setattr(copy.table_set, "advance", advance)

    async def pause() -> None:
        async with copy.paused():
            pass

    pausing = asyncio.create_task(pause())
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    for _ in range(2):  # a deadline, and then the replica's end
        pausing.cancel()
        await asyncio.sleep(0)
    assert not pausing.done() and copy._taking.locked()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not copy._taking.locked()


async def test_what_came_while_it_was_held_is_shown_whoever_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that strikes while a thread takes records leaves none of them hidden."""
    copy, _ = live_copy()
    shown: list[object] = []

    def advance() -> bool:
        shown.append(copy.table_set.limits)
        return False

    monkeypatch.setattr(copy.table_set, "advance", advance)

    async def pause() -> None:
        async with copy.paused():
            await copy._taking.acquire()  # as one that takes records does
            is_taking.set()

    is_taking = asyncio.Event()
    pausing = asyncio.create_task(pause())
    await is_taking.wait()
    copy._changed.clear()
    for _ in range(3):
        pausing.cancel()
        await asyncio.sleep(0)
    assert not shown
    copy._taking.release()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert shown == [None] and copy._changed.is_set()


async def test_what_is_written_to_disk_in_a_thread_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a copy waits for a thread that still writes its tables."""
    copy, _ = live_copy()
    begun, may_end = threading.Event(), threading.Event()

    def take(*_: object) -> bool:
        begun.set()
        assert may_end.wait(WAIT_S)
        return False

    monkeypatch.setattr(TableSet, "is_on_disk", True)
    monkeypatch.setattr(copy.table_set, "take", take)
    taking = asyncio.create_task(copy._take(0, [], 0))
    copy._tasks.append(cast("Any", taking))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    closing = asyncio.create_task(copy.close())
    await turns()
    assert not closing.done() and copy._taking.locked()
    may_end.set()
    await closing
    assert taking.cancelled()


async def test_a_copy_is_held_by_one_at_a_time() -> None:
    """A second pause waits for the first, whose end shows all that came."""
    copy, _ = live_copy()
    is_held = asyncio.Event()

    async def pause() -> None:
        async with copy.paused():
            is_held.set()

    async with copy.paused():
        pausing = asyncio.create_task(pause())
        await turns()
        assert not is_held.is_set()
    await asyncio.wait_for(pausing, WAIT_S)
    assert is_held.is_set() and copy.table_set.limits is None


async def test_a_failure_behind_an_audit_ends_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at the end of a pause loses the copy, as anywhere else."""
    copy, lost = live_copy()

    def fail() -> bool:
        raise StorageError("the disk is on fire")

    monkeypatch.setattr(copy.table_set, "advance", fail)
    with pytest.raises(StorageError):
        async with copy.paused():
            pass
    assert [str(error) for error in lost] == ["the disk is on fire"] and copy.lost is lost[0]


async def test_by_step_what_is_held_is_not_waited_for() -> None:
    """By step, pending rows before the record end the wait: they may fill the memory that it needs."""
    copy, _ = live_copy("step", max_pending_bytes=1)
    tail = copy.table_set.tails[0]
    async with asyncio.timeout(WAIT_S), copy.paused():
        tail.pending.append(Change(1, 1, 1, 0, 0, cast("Any", ("rows",)), False, None, 100))
        tail.seq, tail.pending_bytes = 1, 100
        assert copy.table_set.is_waiting(0, 1)
        assert not await copy.show_up_to([2])
        tail.pending.clear()


async def test_what_is_held_is_shown_record_by_record() -> None:
    """During a pause exactly the requested records are shown, and the rest at its end."""
    copy, _ = live_copy()
    tail = copy.table_set.tails[0]
    async with asyncio.timeout(WAIT_S), copy.paused():
        tail.pending.extend(Change(seq, 1, seq, 0, 0, (), False, None, 0) for seq in (1, 2))
        tail.seq = 2
        assert await copy.show_up_to([1])
        assert tail.visible_seq == 1
    assert tail.visible_seq == 2


class Answering(Silent):
    """A fake shard that answers with nothing new, as often as the test allows."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = asyncio.Semaphore(0)

    async def _never(self, request: object) -> Any:
        self.asked.put_nowait(request)
        await self.turns.acquire()
        return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=0, mark_before=8)


async def test_a_server_that_was_set_back_while_a_copy_was_loaded_is_not_followed() -> None:
    """A log with another record at the copy's start is not followed."""
    server = Answering()
    copy, lost = live_copy(server=server, mark=7)
    server.turns.release()
    with pytest.raises(SetBackError, match="start over"):
        await asyncio.wait_for(copy.wait_until(lambda: False), WAIT_S)
    assert lost == [copy.lost]


async def test_a_copy_that_waits_for_others_keeps_its_log() -> None:
    """A shard that is not fetched from keeps its lease, from its present position."""
    server = Silent()
    copy, _ = live_copy("step", server=server, name="replica", lease_s=0.003, max_pending_bytes=1)
    keep_waiting(copy)
    async with asyncio.timeout(WAIT_S):
        request = await server.asked.get()  # it answers the first one never: that is enough
        assert (request.max_bytes, request.wait_ms, request.follower) == (1, 0, "replica")
    assert (request.from_seq, request.lease_ms) == (2, 3)


@pytest.mark.parametrize("name", [None, "replica"])
async def test_without_a_name_the_log_is_kept_until_the_copy_is_shown(name: str | None) -> None:
    """Without a name the lease lasts until the copy is shown."""
    server = Answering()
    copy, _ = live_copy(server=server, name=name)
    async with asyncio.timeout(WAIT_S):
        first = await server.asked.get()
        assert first.follower == (name or "unnamed") and len(first.copy_id) == 16
        await copy.show_when(lambda: True)
        server.turns.release()
        second = await server.asked.get()
    assert (second.follower, second.copy_id) == ((name, first.copy_id) if name else (None, None))


async def test_a_shown_copy_without_a_name_may_wait_for_others_for_long() -> None:
    """A shown copy without a name has no lease to renew."""
    server = Answering()
    copy, lost = live_copy("step", server=server, lease_s=0.003, max_pending_bytes=1)
    async with asyncio.timeout(WAIT_S):
        await copy.show_when(lambda: True)
        while (await server.asked.get()).follower is not None:
            server.turns.release()
        keep_waiting(copy)
        server.turns.release()
        ended, _ = await asyncio.wait(copy._tasks, timeout=0.05)  # longer than a lease would last
    assert not ended and not lost


async def test_a_copy_that_is_lost_at_the_last_moment_is_not_shown() -> None:
    """A copy lost at the last moment is not shown: nothing would rebuild it."""
    copy, _ = live_copy()
    async with copy._taking:
        showing = asyncio.create_task(copy.show_when(lambda: True))
        await turns()
        copy._end(GoneError("its place is gone"))
    with pytest.raises(GoneError):
        await showing
    assert not copy.table_set.is_shown


async def test_a_copy_is_shown_when_nobody_is_changing_it() -> None:
    """The condition is checked again after a thread has applied updates."""
    copy, _ = live_copy()
    is_so = True
    async with copy._taking:
        showing = asyncio.create_task(copy.show_when(lambda: is_so))
        await turns()
        is_so = False
    await turns()
    assert not showing.done() and not copy.table_set.is_shown
    is_so = True
    copy._changed.set()
    async with asyncio.timeout(WAIT_S):
        await showing
    assert copy.table_set.is_shown


async def test_a_copy_is_shown_when_nobody_is_changing_the_one_before() -> None:
    """The condition also waits for a thread that applies updates to the old copy."""
    (old, _), (new, _) = live_copy(), live_copy()
    async with old._taking:
        showing = asyncio.create_task(new.show_when(lambda: True, beside=[old]))
        await turns()
        assert not showing.done() and not new.table_set.is_shown
    async with asyncio.timeout(WAIT_S):
        await showing
    assert new.table_set.is_shown
    await old.close()
    await new.close()


async def test_who_waits_for_a_copy_that_is_closed_is_told() -> None:
    """An audit of a replaced copy ends at once, and nothing is rebuilt."""
    copy, lost = live_copy()

    async def audit() -> None:
        async with copy.paused():
            await copy.show_up_to([5])

    auditing = asyncio.create_task(audit())
    await until(lambda: copy.table_set.limits == (5,))
    await copy.close()
    with pytest.raises(UnavailableError, match="not followed any more"):
        await asyncio.wait_for(auditing, WAIT_S)
    assert not lost and copy.table_set.limits is None


async def test_a_shard_is_silent_when_a_fetch_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch may wait and then has its timeout; the silence of any shard is the copy's."""
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(follower, "time", clock)
    server, now_s = Silent(), 1000.0
    server.links.append(SimpleNamespace(**vars(server.links[0]) | {"address": "elsewhere"}))
    copy, lost = live_copy(server=server, num_shards=2, fetch_wait_s=40.0, timeout_s=20.0)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            await server.asked.get()
    now_s = 1060.0
    assert copy.silence is None
    now_s = 1061.0
    assert copy.silence == "nowhere has not answered for 61 s"
    server.links[0].moved_s = 1002.0
    assert copy.silence == "elsewhere has not answered for 61 s"
    server.links[1].failure = OverloadedError("too many requests")
    assert copy.silence == "elsewhere has not answered for 61 s: too many requests"
    server.links[1].moved_s = math.inf
    assert copy.silence is None and not lost  # a long answer is on its way, however slowly
    await copy.close()
    assert copy.silence is None  # it is not asked any more


async def test_a_shard_that_another_waits_for_is_fetched_whatever_is_pending() -> None:
    """Otherwise an activation, and the release that it waits for, could each wait for room that the other makes."""
    server = Silent()
    server.links *= 2
    copy, _ = live_copy(server=server, num_shards=2, max_pending_bytes=10)
    keep_waiting(copy)
    unregistered = cast("Any", SimpleNamespace(is_registered=False))
    room = asyncio.create_task(copy._wait_for_room(0, unregistered))
    await turns()
    assert not room.done()
    move = Move(move_id="a", source=0, destination=1, partitions=(0,), versions=(1,))
    header = MoveRecord(step=MoveStep.ACTIVATE, move=move, position=Position(seq=1, mark=None)).header()
    activation = Update(1, 1, idl.UpdateKind.MOVE, header, memoryview(b""))
    taking = asyncio.create_task(copy._take_in_order(1, [activation], 1, unregistered))
    await asyncio.wait_for(room, WAIT_S)
    assert not taking.done() and copy.table_set.tails[1].seq == 0
    taking.cancel()
    await asyncio.wait([taking])


class Ahead(Silent):
    """A fake server with two records in one reply each; the test decides the second reply."""

    def __init__(self, second: Any) -> None:
        super().__init__()
        self.links[0].fetch_updates = self._answer
        self._second = second

    async def _answer(self, request: Any) -> Any:
        self.asked.put_nowait(request.from_seq)
        if request.from_seq == 2 and self._second is not None:
            await asyncio.sleep(0)
            raise self._second
        if request.from_seq > 1:
            await asyncio.Event().wait()
        record = idl.UpdateRecord(seq=1, epoch=1, kind=1, header=b"\x80", body=memoryview(b""))
        return idl.FetchUpdatesReply(records=[record], first_seq=1, last_seq=2)


def _takes(copy: LiveCopy, server: Silent, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, list[int]]]:
    """Collect (seqs, last seq, requests before) of each take."""
    taken: list[tuple[list[int], int, list[int]]] = []

    def take(shard: int, updates: Any, last_seq: int) -> bool:
        asked = [server.asked.get_nowait() for _ in range(server.asked.qsize())]
        taken.append(([update.seq for update in updates], last_seq, asked))
        return False

    monkeypatch.setattr(copy.table_set, "take", take)
    return taken


async def test_the_next_records_are_on_their_way_while_these_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fetch starts before records are applied, and ends when the copy closes."""
    server = Ahead(None)
    copy, lost = live_copy(server=server)
    taken = _takes(copy, server, monkeypatch)
    await until(lambda: bool(taken))
    assert taken == [([1], 2, [1, 2])]
    await copy.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [] == lost


async def test_a_copy_that_is_closed_while_others_take_leaves_no_fetch_behind() -> None:
    """A prefetch ends with the copy, even while its records wait for another thread."""
    server = Ahead(None)
    copy, _ = live_copy(server=server)
    async with asyncio.timeout(WAIT_S), copy._taking:
        while await server.asked.get() != 2:
            pass
        await copy.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_was_taken_ahead_of_an_error_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a prefetched reply fails, the records before it are applied first."""
    server = Ahead(GoneError("its place is gone"))
    copy, lost = live_copy(server=server)
    taken = _takes(copy, server, monkeypatch)
    with pytest.raises(GoneError, match="its place"):
        await asyncio.wait_for(copy.wait_until(lambda: False), WAIT_S)
    assert taken[0][:2] == ([1], 2) and len(taken) == 1 and lost == [copy.lost]


class Shards:
    """Two fake shards that note lease requests; the log of one may go."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str, str, int]] = []
        self.first_seqs = [1, 1]
        self.away: set[int] = set()
        self.links = cast("Any", [self._link(shard) for shard in range(2)])
        self.slept_s: list[float] = []
        self._sleepers: list[asyncio.Future[None]] = []
        self._has_moved = asyncio.Event()

    def _link(self, shard: int) -> Any:
        async def fetch(request: Any) -> Any:
            self.asked.append((shard, request.from_seq, request.follower, request.copy_id, request.lease_ms))
            self._has_moved.set()
            if shard in self.away:
                await asyncio.get_running_loop().create_future()
            if request.from_seq < self.first_seqs[shard]:
                raise GoneError(f"the log begins at seq {self.first_seqs[shard]}")
            return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=7)

        return SimpleNamespace(hello=SimpleNamespace(server_id="s"), fetch_updates=fetch, address="nowhere")

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self._sleepers.append(asyncio.get_running_loop().create_future())
        self._has_moved.set()
        await self._sleepers[-1]

    async def pass_time(self, num_asleep: int = 2) -> None:
        """Return when so many leases, which wait for it now or soon, have been asked for once more."""
        await self._until(lambda: len(self._sleepers) == num_asleep)
        num_asked = len(self.asked) + num_asleep
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.set_result(None)
        await self._until(lambda: len(self.asked) == num_asked)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self._has_moved.clear()
                await self._has_moved.wait()


async def test_leases_are_asked_for_first_and_renewed_in_time() -> None:
    """Each shard is asked before loading, and three times per lease until the end."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica", lease_s=90.0))
    expected = [(0, 5, "replica", lease.copy_id, 90_000), (1, 8, "replica", lease.copy_id, 90_000)]
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep) as keeper:
        assert shards.asked == expected
        for _ in range(2):
            await shards.pass_time()
        keeper.check()
    assert shards.asked == 3 * expected and set(shards.slept_s) == {30.0}
    assert [task.get_name() for task in asyncio.all_tasks() if "log-lease" in task.get_name()] == []


async def test_a_log_that_has_gone_is_told() -> None:
    """A lost log is an error at the start, or at the next check."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica"))
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep) as keeper:
        shards.first_seqs[1] = 9
        keeper.check()
        await shards.pass_time()
        await asyncio.wait(keeper._tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(GoneError, match="begins at seq 9"):
            keeper.check()
    with pytest.raises(GoneError):
        async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep):
            pytest.fail("there is nothing to load for")


async def test_a_shard_that_is_away_keeps_no_other_lease_from_being_renewed() -> None:
    """While one shard is away, the leases of the others are renewed."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica"))
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep):
        shards.away = {0}
        await shards.pass_time()
        del shards.asked[:]
        for _ in range(3):
            await shards.pass_time(num_asleep=1)
    assert [shard for shard, *_ in shards.asked] == [1, 1, 1]


def test_each_copy_has_a_lease_of_its_own() -> None:
    """Leases of copies differ, also with one name; without a name a lease is short."""
    config = ReplicaConfig(name="replica", lease_s=900.0)
    leases = [CopyLease.of(config) for _ in range(3)]
    assert len({lease.copy_id for lease in leases}) == 3
    assert {(lease.name, lease.lease_s, lease.is_lasting) for lease in leases} == {("replica", 900.0, True)}
    unnamed = CopyLease.of(ReplicaConfig(lease_s=900.0))
    assert (unnamed.lease_s, unnamed.is_lasting) == (60.0, False)
    assert CopyLease.of(ReplicaConfig(lease_s=9.0)).lease_s == 9.0
