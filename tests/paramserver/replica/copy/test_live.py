"""A copy that follows, lost or not, with its work in threads; and its log leases. Shards and time are fakes."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_logs import Following, Shard, shown_rows
from text_scripts import Script, scripts
from virtual_loop import run_virtual

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading import follower
from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.paramserver.replica.copy.live import CopyLease, LiveCopy, LogLeaseKeeper
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import (
    GoneError,
    HeadraceError,
    OverloadedError,
    StorageError,
)
from headrace.schemas.idl import idl
from headrace.schemas.log_records import pack_header

WAIT_S = 20.0


class Reader:
    """A fake reader of some shards."""

    def __init__(self, links: list[Any]) -> None:
        self.links = links

    async def close(self) -> None:
        pass


class Silent(Reader):
    """A fake shard that notes requests and never answers."""

    def __init__(self) -> None:
        hello = SimpleNamespace(server_id="s")
        link = SimpleNamespace(
            hello=hello, fetch_updates=self._never, address="nowhere", failure=None, moved_s=-math.inf
        )
        super().__init__([link])
        self.asked: asyncio.Queue[Any] = asyncio.Queue()

    async def _never(self, request: object) -> None:
        self.asked.put_nowait(request)
        await asyncio.Event().wait()


async def turns() -> None:
    """Let the loop run for some turns: long enough for what would go on by itself."""
    for _ in range(10):
        await asyncio.sleep(0)


_opened: list[LiveCopy] = []


def live_copy(*, server: Any = None, num_shards: int = 1, **settings: Any) -> tuple[LiveCopy, list[HeadraceError]]:
    tails = [ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({})) for shard in range(num_shards)]
    table_set = TableSet("s", tails, is_by_step=False, make_table=MemoryTable)
    lost: list[HeadraceError] = []
    copy = LiveCopy(
        table_set,
        server or cast("Any", Silent()),
        config := ReplicaConfig(**settings),
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


class Live(Following):
    """A copy that follows shards whose answers the script gives, in virtual time.

    Each command tells what happened by it, and then what lookups see. Requests that renew a lease alone are answered at
    once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[str] = []
        self._calls: dict[str, asyncio.Task[Any]] = {}

    async def follow(
        self, num_shards: int = 1, *, latest: bool = False, mark: int | None = None, **settings: Any
    ) -> str:
        """Begin to follow shards from their first record on."""
        self.shards = [Shard() for _ in range(num_shards)]
        self._answers = [asyncio.Queue[Any]() for _ in self.shards]
        links = [
            SimpleNamespace(
                hello=SimpleNamespace(server_id="s"),
                fetch_updates=functools.partial(self._fetch, number),
                address=f"shard {number}",
                failure=None,
                moved_s=-math.inf,
            )
            for number in range(num_shards)
        ]
        tails = [
            ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({}), mark=mark)
            for shard in range(num_shards)
        ]
        config = ReplicaConfig(consistency="latest" if latest else "step", **settings)
        self._table_set = TableSet("s", tails, is_by_step=not latest, make_table=MemoryTable)
        self._live = LiveCopy(
            self._table_set,
            cast("Any", Reader(links)),
            config,
            CopyLease.of(config),
            target_seqs=[0] * num_shards,
            on_change=lambda: self._events.append("more is visible"),
            on_lost=lambda _, error: self._events.append(f"lost: {error}"),
        )
        return await self.wait(0)

    async def answer(
        self, shard: int, *, num: int | None = None, mark_before: int | None = None, settles: bool = True
    ) -> str | None:
        """Answer a shard's fetch with its next records."""
        updates = self.shards[shard].updates
        records = [
            idl.UpdateRecord(
                seq=update.seq,
                epoch=update.epoch,
                kind=update.kind,
                header=pack_header(update.header),
                body=update.body,
            )
            for update in updates[:num]
        ]
        del updates[:num]
        last_seq = self.shards[shard].seq
        reply = idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=last_seq, mark_before=mark_before)
        self._answers[shard].put_nowait(reply)
        return await self.wait(0) if settles else None

    async def fail(self, shard: int) -> str:
        """Answer a shard's fetch with the loss of the copy's place."""
        self._answers[shard].put_nowait(GoneError("its place is gone"))
        return await self.wait(0)

    async def show(self) -> str:
        return await self._call("show", self._live.show_when(lambda: True, beside=None))

    async def wait_for_more(self) -> str:
        return await self._call("wait_for_more", self._live.wait_until(lambda: False))

    async def pause(self, name: str = "pause") -> str:
        """Hold the copy, until `resume`."""

        async def hold() -> None:
            async with self._live.paused():
                self._events.append(f"{name} holds it")
                await asyncio.Event().wait()

        return await self._call(name, hold())

    async def resume(self, name: str = "pause") -> str:
        self._calls[name].cancel()
        return await self.wait(0)

    async def up_to(self, *seqs: int) -> str:
        return await self._call("up_to", self._live.show_up_to(seqs))

    async def close(self) -> str:
        await self._live.close()
        return await self.wait(0) + f", {len(asyncio.all_tasks()) - 1} tasks are left"

    async def wait(self, duration_s: float) -> str:
        await asyncio.sleep(duration_s)
        for _ in range(30):
            await asyncio.sleep(0)
        for name, call in [*self._calls.items()]:
            if call.done():
                del self._calls[name]
                error = None if call.cancelled() else call.exception()
                said = "is over" if call.cancelled() else f"raises {type(error).__name__}" if error else call.result()
                self._events.append(f"{name}: {said}")
        events, self._events[:] = self._events[:], []
        return "\n".join([*events, f"{self._table_set.visible}, {shown_rows(self._table_set)}"])

    async def _fetch(self, shard: int, request: Any) -> Any:
        who = "" if request.follower is None else f", {request.follower}'s for {request.lease_ms / 1000:g} s"
        is_renewal = (request.max_bytes, request.wait_ms) == (1, 0)
        kind = "renewal" if is_renewal else "fetch"
        self._events.append(f"{kind} of shard {shard} from record {request.from_seq}{who}")
        if is_renewal:
            return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=0)
        answer = await self._answers[shard].get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _call(self, name: str, call: Any) -> str:
        self._calls[name] = asyncio.create_task(call)
        return await self.wait(0)


@scripts(__file__, "live")
def test_following(script: Script) -> None:
    """A copy fetches as much as it has room for, shows what it may, and keeps its log meanwhile."""

    async def run() -> None:
        await script.run_async(Live())

    run_virtual(run())


async def test_what_came_during_a_pause_is_shown_to_the_end_whoever_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither deadline nor end of the replica keeps a thread from it, nor from waiting for its turn."""
    copy, _ = live_copy()
    begun, may_end = threading.Event(), threading.Event()

    def advance() -> bool:
        begun.set()
        assert may_end.wait(WAIT_S) and copy.table_set.limits is None
        return True

    async def pause() -> None:
        async with copy.paused():
            await copy._taking.acquire()  # as one that takes records does
            is_taking.set()

    monkeypatch.setattr(copy.table_set, "advance", advance)
    is_taking = asyncio.Event()
    pausing = asyncio.create_task(pause())
    await is_taking.wait()
    copy._changed.clear()
    for has_turn in (False, True):
        for _ in range(3):
            pausing.cancel()
            await asyncio.sleep(0)
        assert begun.is_set() == has_turn and not pausing.done() and copy._taking.locked()
        if not has_turn:
            copy._taking.release()
            assert await asyncio.to_thread(begun.wait, WAIT_S)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert copy._changed.is_set() and not copy._taking.locked()


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


async def test_a_copy_is_shown_when_nobody_is_changing_it() -> None:
    """The condition is checked again after a thread has applied updates, and so is that the copy is not lost."""
    for is_lost in (False, True):
        copy, _ = live_copy()
        is_so = True
        async with copy._taking:
            showing = asyncio.create_task(copy.show_when(lambda: is_so, beside=None))  # noqa: B023
            await turns()
            is_so = False
        await turns()
        assert not showing.done()
        async with copy._taking:
            is_so = True
            copy._changed.set()
            await turns()
            if is_lost:
                copy._end(GoneError("its place is gone"))
        await asyncio.wait([showing], timeout=WAIT_S)
        assert isinstance(showing.exception(), GoneError if is_lost else type(None))
        assert copy.table_set.is_shown != is_lost


async def test_a_copy_is_shown_when_nobody_is_changing_the_one_before() -> None:
    """The condition also waits for a thread that applies updates to the old copy."""
    (old, _), (new, _) = live_copy(), live_copy()
    async with old._taking:
        showing = asyncio.create_task(new.show_when(lambda: True, beside=old))
        await turns()
        assert not showing.done() and not new.table_set.is_shown
    async with asyncio.timeout(WAIT_S):
        await showing
    assert new.table_set.is_shown
    await old.close()
    await new.close()


async def test_the_silence_of_any_shard_is_the_copy_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch may wait and then has its timeout; progress of a long answer counts, and a closed copy asks nobody."""
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: now_s))
    server, now_s = Silent(), 1000.0
    server.links.append(SimpleNamespace(**vars(server.links[0]) | {"address": "elsewhere"}))
    copy, _ = live_copy(server=server, num_shards=2, fetch_wait_s=40.0, timeout_s=20.0)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            await server.asked.get()
    for now_s, silence in ((1060.0, None), (1061.0, "nowhere has not answered for 61 s")):  # noqa: B007 (it is the clock)
        assert copy.silence == silence
    server.links[0].moved_s = 1002.0
    server.links[1].failure = OverloadedError("too many requests")
    assert copy.silence == "elsewhere has not answered for 61 s: too many requests"
    await copy.close()
    assert copy.silence is None


class Shards:
    """Two fake shards that note lease requests; the log of one may go."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str, str, int]] = []
        self.asked_s: list[float] = []
        self.first_seqs = [1, 1]
        self.away: set[int] = set()
        self.links = cast("Any", [self._link(shard) for shard in range(2)])

    def _link(self, shard: int) -> Any:
        async def fetch(request: Any) -> Any:
            self.asked.append((shard, request.from_seq, request.follower, request.copy_id, request.lease_ms))
            self.asked_s.append(asyncio.get_running_loop().time())
            if shard in self.away:
                await asyncio.get_running_loop().create_future()
            if request.from_seq < self.first_seqs[shard]:
                raise GoneError(f"the log begins at seq {self.first_seqs[shard]}")
            return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=7)

        return SimpleNamespace(hello=SimpleNamespace(server_id="s"), fetch_updates=fetch, address="nowhere")


LEASE = CopyLease.of(ReplicaConfig(name="replica", lease_s=90.0))


def test_leases_are_asked_for_first_and_renewed_in_time() -> None:
    """Each shard is asked before loading, and three times per lease until the end."""

    async def load() -> None:
        shards = Shards()
        expected = [(0, 5, "replica", LEASE.copy_id, 90_000), (1, 8, "replica", LEASE.copy_id, 90_000)]
        async with LogLeaseKeeper(shards.links, [5, 8], LEASE) as keeper:
            assert shards.asked == expected
            await asyncio.sleep(89)
            keeper.check()
        await asyncio.sleep(1000)
        assert shards.asked == 3 * expected
        assert [at_s - shards.asked_s[0] for at_s in shards.asked_s[::2]] == [0, 30, 60]

    run_virtual(load())


def test_a_log_that_has_gone_is_told() -> None:
    """A lost log is an error at the start, or at the next check."""

    async def load() -> None:
        shards = Shards()
        async with LogLeaseKeeper(shards.links, [5, 8], LEASE) as keeper:
            shards.first_seqs[1] = 9
            keeper.check()
            await asyncio.sleep(31)
            with pytest.raises(GoneError):
                keeper.check()
        with pytest.raises(GoneError):
            async with LogLeaseKeeper(shards.links, [5, 8], LEASE):
                pytest.fail("there is nothing to load for")

    run_virtual(load())


def test_a_shard_that_is_away_keeps_no_other_lease_from_being_renewed() -> None:
    """While one shard is away, the leases of the others are renewed."""

    async def load() -> None:
        shards = Shards()
        async with LogLeaseKeeper(shards.links, [5, 8], LEASE):
            shards.away = {0}
            await asyncio.sleep(121)
        assert [shard for shard, *_ in shards.asked[2:]] == [0, 1, 1, 1, 1]

    run_virtual(load())


def test_each_copy_has_a_lease_of_its_own() -> None:
    """Leases of copies differ, also with one name; without a name a lease is short."""
    config = ReplicaConfig(name="replica", lease_s=900.0)
    leases = [CopyLease.of(config) for _ in range(3)]
    assert len({lease.copy_id for lease in leases}) == 3
    assert {(lease.name, lease.lease_s, lease.is_lasting) for lease in leases} == {("replica", 900.0, True)}
    unnamed = CopyLease.of(ReplicaConfig(lease_s=900.0))
    assert (unnamed.lease_s, unnamed.is_lasting) == (60.0, False)
    assert CopyLease.of(ReplicaConfig(lease_s=9.0)).lease_s == 9.0
