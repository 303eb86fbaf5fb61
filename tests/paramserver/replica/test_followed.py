"""A copy that follows: what is done in threads is done to its end, and an ended one says so."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.paramserver.ingest.sessions import Sessions
from headrace.paramserver.reading import follower
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.log_hold import CopyLease
from headrace.paramserver.replica.memory_table import MemoryTable
from headrace.paramserver.replica.shard_tail import Change, ShardTail
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

WAIT_S = 20.0


class Silent:
    """A server of one shard that notes what it is asked, and never answers."""

    def __init__(self) -> None:
        hello = SimpleNamespace(server_id="s")
        link = SimpleNamespace(
            hello=hello, fetch_updates=self._never, address="nowhere", failure=None, moved_s=-math.inf
        )
        self.links = [link]
        self.asked: asyncio.Queue[Any] = asyncio.Queue()

    async def _never(self, request: object) -> None:
        self.asked.put_nowait(request)
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def followed(
    consistency: Any = "latest", *, server: Any = None, mark: int | None = None, num_shards: int = 1, **settings: Any
) -> tuple[Followed, list[HeadraceError]]:
    tails = [
        ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({}), mark=mark) for shard in range(num_shards)
    ]
    generation = Generation("s", tails, is_by_step=consistency == "step", make_table=MemoryTable)
    lost: list[HeadraceError] = []
    config = ReplicaConfig(consistency=consistency, **settings)
    copy = Followed(
        generation,
        server or cast("Any", Silent()),
        config,
        CopyLease.of(config),
        target_seqs=[0] * num_shards,
        on_change=lambda: None,
        on_lost=lambda _, error: lost.append(error),
    )
    return copy, lost


async def test_a_lost_copy_is_enough_for_nobody() -> None:
    """Who waits for something of a copy that is lost is told, also where it has come true just before."""
    copy, _ = followed()
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
    """A cancelled audit does not let the next records in while its thread still shows the ones before."""
    copy, _ = followed()
    begun, may_end = threading.Event(), threading.Event()

    def advance() -> bool:
        begun.set()
        assert may_end.wait(WAIT_S)
        return False

    monkeypatch.setattr(copy.generation, "advance", advance)

    async def hold() -> None:
        async with copy.held():
            pass

    holding = asyncio.create_task(hold())
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    for _ in range(2):  # a deadline, and then the replica's end
        holding.cancel()
        await asyncio.sleep(0)
    assert not holding.done() and copy._taking.locked()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert not copy._taking.locked()
    await copy.close()


async def test_what_came_while_it_was_held_is_shown_whoever_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that strikes while another thread still takes records leaves none of them unseen."""
    copy, _ = followed()
    shown: list[object] = []

    def advance() -> bool:
        shown.append(copy.generation.limits)
        return False

    monkeypatch.setattr(copy.generation, "advance", advance)

    async def hold() -> None:
        async with copy.held():
            await copy._taking.acquire()  # as one that takes records does
            is_taking.set()

    is_taking = asyncio.Event()
    holding = asyncio.create_task(hold())
    await is_taking.wait()
    copy._changed.clear()
    for _ in range(3):
        holding.cancel()
        await asyncio.sleep(0)
    assert not shown
    copy._taking.release()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert shown == [None] and copy._changed.is_set()
    await copy.close()


async def test_what_is_written_to_disk_in_a_thread_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes a copy frees its tables next: nobody may be writing to them then."""
    copy, _ = followed()
    begun, may_end = threading.Event(), threading.Event()

    def take(*_: object) -> bool:
        begun.set()
        assert may_end.wait(WAIT_S)
        return False

    monkeypatch.setattr(Generation, "is_on_disk", True)
    monkeypatch.setattr(copy.generation, "take", take)
    taking = asyncio.create_task(copy._take(0, [], 0))
    copy._tasks.append(cast("Any", taking))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    closing = asyncio.create_task(copy.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done() and copy._taking.locked()
    may_end.set()
    await closing
    assert taking.cancelled()


async def test_a_copy_is_held_by_one_at_a_time() -> None:
    """Who would hold it too waits: the first one's end shows all that has come."""
    copy, _ = followed()
    is_held = asyncio.Event()

    async def hold() -> None:
        async with copy.held():
            is_held.set()

    async with copy.held():
        holding = asyncio.create_task(hold())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not is_held.is_set()
    await asyncio.wait_for(holding, WAIT_S)
    assert is_held.is_set() and copy.generation.limits is None
    await copy.close()


async def test_a_failure_behind_an_audit_ends_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be applied when holding ends is as fatal as anywhere else: another copy is begun."""
    copy, lost = followed()

    def fail() -> bool:
        raise StorageError("the disk is on fire")

    monkeypatch.setattr(copy.generation, "advance", fail)
    with pytest.raises(StorageError):
        async with copy.held():
            pass
    assert [str(error) for error in lost] == ["the disk is on fire"] and copy.lost is lost[0]
    await copy.close()


async def test_by_step_what_is_held_is_not_waited_for() -> None:
    """Rows that cannot be shown before a record are told at once: they may fill the memory that the record needs."""
    copy, _ = followed("step", max_pending_bytes=1)
    tail = copy.generation.tails[0]
    async with asyncio.timeout(WAIT_S), copy.held():
        tail.pending.append(Change(1, 1, 1, 0, cast("Any", ("rows",)), False, None, 100))
        tail.seq, tail.pending_bytes = 1, 100
        assert copy.generation.is_waiting(0, 1)
        assert not await copy.show_up_to([2])
        tail.pending.clear()
    await copy.close()


async def test_what_is_held_is_shown_record_by_record() -> None:
    """Exactly up to the one that is asked for, of those that have come; when holding ends, the rest."""
    copy, _ = followed()
    tail = copy.generation.tails[0]
    async with asyncio.timeout(WAIT_S), copy.held():
        tail.pending.extend(Change(seq, 1, seq, 0, (), False, None, 0) for seq in (1, 2))
        tail.seq = 2
        assert await copy.show_up_to([1])
        assert tail.visible_seq == 1
    assert tail.visible_seq == 2
    await copy.close()


class Answering(Silent):
    """A server of one shard that answers at once, with nothing new, as often as the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = asyncio.Semaphore(0)

    async def _never(self, request: object) -> Any:
        self.asked.put_nowait(request)
        await self.turns.acquire()
        return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=0, mark_before=8)


async def test_a_server_that_was_set_back_while_a_copy_was_loaded_is_not_followed() -> None:
    """A copy knows behind which record it has begun; a log with another one there is none to follow."""
    server = Answering()
    copy, lost = followed(server=server, mark=7)
    server.turns.release()
    with pytest.raises(SetBackError, match="start over"):
        await asyncio.wait_for(copy.wait_until(lambda: False), WAIT_S)
    assert lost == [copy.lost]
    await copy.close()


async def test_a_copy_that_waits_for_others_keeps_its_log() -> None:
    """While a shard is not fetched from, for however long, its lease is renewed from the place where it stands."""
    server = Silent()
    copy, _ = followed("step", server=server, name="replica", lease_s=0.003, max_pending_bytes=1)
    tail = copy.generation.tails[0]
    tail.pending.append(Change(1, 1, 1, 0, (), False, None, 100))
    tail.seq, tail.pending_bytes = 1, 100
    copy.generation.limits = [0]
    async with asyncio.timeout(WAIT_S):
        request = await server.asked.get()  # it answers the first one never: that is enough
        assert (request.max_bytes, request.wait_ms, request.follower) == (1, 0, "replica")
    assert (request.from_seq, request.lease_ms) == (2, 3)
    await copy.close()


@pytest.mark.parametrize("name", [None, "replica"])
async def test_without_a_name_the_log_is_kept_until_the_copy_is_shown(name: str | None) -> None:
    """Until then a fast writer's log would be gone again and again; afterwards only a name keeps it."""
    server = Answering()
    copy, _ = followed(server=server, name=name)
    async with asyncio.timeout(WAIT_S):
        first = await server.asked.get()
        assert first.follower == (name or "unnamed") and len(first.copy_id) == 16
        await copy.show_when(lambda: True)
        server.turns.release()
        second = await server.asked.get()
    assert (second.follower, second.copy_id) == ((name, first.copy_id) if name else (None, None))
    await copy.close()


async def test_a_shown_copy_without_a_name_may_wait_for_others_for_long() -> None:
    """It has no lease any more, and there is none to renew."""
    server = Answering()
    copy, lost = followed("step", server=server, lease_s=0.003, max_pending_bytes=1)
    tail = copy.generation.tails[0]
    async with asyncio.timeout(WAIT_S):
        await copy.show_when(lambda: True)
        while (await server.asked.get()).follower is not None:
            server.turns.release()
        tail.pending.append(Change(1, 1, 1, 0, (), False, None, 100))
        tail.seq, tail.pending_bytes = 1, 100
        copy.generation.limits = [0]
        server.turns.release()
        ended, _ = await asyncio.wait(copy._tasks, timeout=0.05)  # longer than a lease would last
    assert not ended and not lost
    await copy.close()


async def test_a_copy_that_is_lost_at_the_last_moment_is_not_shown() -> None:
    """Nobody would begin anew for it: who waits for it is the one who is told."""
    copy, _ = followed()
    async with copy._taking:
        showing = asyncio.create_task(copy.show_when(lambda: True))
        for _ in range(5):
            await asyncio.sleep(0)
        copy._end(GoneError("its place is gone"))
    with pytest.raises(GoneError):
        await showing
    assert not copy.generation.is_shown
    await copy.close()


async def test_a_copy_is_shown_when_nobody_is_changing_it() -> None:
    """What is so while a thread applies updates may not be so when it has; it is looked at once more."""
    copy, _ = followed()
    is_so = True
    async with copy._taking:
        showing = asyncio.create_task(copy.show_when(lambda: is_so))
        for _ in range(5):
            await asyncio.sleep(0)
        is_so = False
    for _ in range(5):
        await asyncio.sleep(0)
    assert not showing.done() and not copy.generation.is_shown
    is_so = True
    copy._changed.set()
    async with asyncio.timeout(WAIT_S):
        await showing
    assert copy.generation.is_shown
    await copy.close()


async def test_a_copy_is_shown_when_nobody_is_changing_the_one_before() -> None:
    """A thread that applies updates to the old copy could have it show more than what was compared with the new one."""
    (old, _), (new, _) = followed(), followed()
    async with old._taking:
        showing = asyncio.create_task(new.show_when(lambda: True, beside=[old]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not showing.done() and not new.generation.is_shown
    async with asyncio.timeout(WAIT_S):
        await showing
    assert new.generation.is_shown
    await old.close()
    await new.close()


async def test_who_waits_for_a_copy_that_is_closed_is_told() -> None:
    """An audit of a copy that another one replaces meanwhile ends then, not at its deadline; nobody begins anew."""
    copy, lost = followed()

    async def audit() -> None:
        async with copy.held():
            await copy.show_up_to([5])

    auditing = asyncio.create_task(audit())
    while copy.generation.limits != (5,):  # noqa: ASYNC110 (what is waited for belongs to the code under test)
        await asyncio.sleep(0)
    await copy.close()
    with pytest.raises(UnavailableError, match="not followed any more"):
        await asyncio.wait_for(auditing, WAIT_S)
    assert not lost and copy.generation.limits is None


async def test_a_shard_that_greets_and_gives_no_answer_is_told() -> None:
    """What can be reached and is stuck keeps the copy from what is new, so it is said; not before a fetch may take."""
    server = Silent()
    copy, lost = followed(server=server)
    async with asyncio.timeout(WAIT_S):
        await server.asked.get()
    assert copy.silence is None
    await copy.close()
    assert copy.silence is None  # it is not asked any more
    copy, lost = followed(server=server, fetch_wait_s=0.01, timeout_s=0.01)
    async with asyncio.timeout(WAIT_S):
        while copy.silence is None:  # noqa: ASYNC110 (it becomes so by the clock)
            await asyncio.sleep(0.001)
    assert copy.silence.startswith("nowhere has not answered for ") and not lost
    server.links[0].failure = OverloadedError("too many requests")
    assert copy.silence.endswith("s: too many requests")
    server.links[0].moved_s = math.inf
    assert copy.silence is None  # a long answer is on its way, however slowly
    await copy.close()


async def test_a_shard_is_silent_when_a_fetch_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may wait for something new, and then its answer has its time; any shard's silence is the copy's."""
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(follower, "time", clock)
    server, now_s = Silent(), 1000.0
    server.links.append(SimpleNamespace(**vars(server.links[0]) | {"address": "elsewhere"}))
    copy, _ = followed(server=server, num_shards=2, fetch_wait_s=40.0, timeout_s=20.0)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            await server.asked.get()
    now_s = 1060.0
    assert copy.silence is None
    now_s = 1061.0
    assert copy.silence == "nowhere has not answered for 61 s"
    server.links[0].moved_s = 1002.0
    assert copy.silence == "elsewhere has not answered for 61 s"
    await copy.close()
    assert copy.silence is None  # it is not asked any more


class Ahead(Silent):
    """A server with two records of which each is an answer of its own; to the second it answers what the test says."""

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


def _takes(copy: Followed, server: Silent, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, list[int]]]:
    """Return what will be noted when records are taken: their seqs, the last one told, and what was asked before."""
    taken: list[tuple[list[int], int, list[int]]] = []

    def take(shard: int, updates: Any, last_seq: int) -> bool:
        asked = [server.asked.get_nowait() for _ in range(server.asked.qsize())]
        taken.append(([update.seq for update in updates], last_seq, asked))
        return False

    monkeypatch.setattr(copy.generation, "take", take)
    return taken


async def test_the_next_records_are_on_their_way_while_these_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A far shard that has more is asked for it before its records are applied; who closes the copy ends that too."""
    server = Ahead(None)
    copy, lost = followed(server=server)
    taken = _takes(copy, server, monkeypatch)
    async with asyncio.timeout(WAIT_S):
        while not taken:  # noqa: ASYNC110 (what is waited for belongs to the code under test)
            await asyncio.sleep(0)
    assert taken == [([1], 2, [1, 2])]
    await copy.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [] == lost


async def test_a_copy_that_is_closed_while_others_take_leaves_no_fetch_behind() -> None:
    """What is on its way ends with the copy, also where its records wait for another thread to take what it has."""
    server = Ahead(None)
    copy, _ = followed(server=server)
    async with asyncio.timeout(WAIT_S), copy._taking:
        while await server.asked.get() != 2:
            pass
        await copy.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_was_taken_ahead_of_an_error_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is gone while the records before it are on their way ends the copy behind these, not before."""
    server = Ahead(GoneError("its place is gone"))
    copy, lost = followed(server=server)
    taken = _takes(copy, server, monkeypatch)
    with pytest.raises(GoneError, match="its place"):
        await asyncio.wait_for(copy.wait_until(lambda: False), WAIT_S)
    assert taken[0][:2] == ([1], 2) and len(taken) == 1 and lost == [copy.lost]
    await copy.close()
