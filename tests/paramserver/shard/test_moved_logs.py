"""A shard's log comes from files into a stream, from a stream into files, and into another stream, by a hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hellos import hello_of_nobody, hello_of_writer
from machines import SERVER_ID, SPEC, Machine, Machines, Writer, listening, machines_in, promote, rows_at
from scripted_follower import ScriptedFollower, notes_of, offer
from scripted_shard_stream import ScriptedShardStream, use_scripted_streams
from waiting import until

from headrace.paramserver.log.jetstream.beginning import StreamBeginning
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.rpc.shard_places import STANDBY
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import HeadraceError, LogFencedError, UnavailableError
from headrace.schemas.idl import idl

ACCEPTED, DECLINED = idl.OfferState.ACCEPTED, idl.OfferState.DECLINED


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScriptedShardStream]:
    return use_scripted_streams(monkeypatch)


@pytest.fixture
async def machines(tmp_path: Path, streams: Any) -> AsyncIterator[Machines]:
    """Return what makes servers, which are stopped at the end."""
    async with machines_in(tmp_path) as make:
        yield make


async def test_a_log_goes_from_files_through_two_streams_into_files(machines: Machines, streams: Any) -> None:
    """A writer loses nothing on the way, nor over restarts; records keep place and mark; former owners lead on."""
    a = await machines("a").start()
    b = machines("b", log="nats://one", follow=a.address)
    c = machines("c", log="nats://two", follow=b.address)
    d = machines("d", follow=c.address)
    writer = Writer(a, b, c, d)
    owner = a
    for follower in (b, c, d):
        async with writer.writing():
            await follower.start()
            await follower.has(owner)
            await promote(follower)
        await until(lambda owner=owner: leads_on(owner))
        facts = {each.seq: (owner.shard.log.nonce_of(each.seq), each.header) for each in owner.shard.log.read(1)}
        taken = follower.owner.log
        offered = owner.owner._ingest.offer
        assert offered is not None and offered.is_taken
        mine = {each.seq: (taken.nonce_of(each.seq), each.header) for each in taken.read(1) if each.seq <= offered.seq}
        assert mine == {seq: fact for seq, fact in facts.items() if seq <= offered.seq}
        await follower.stop()
        await follower.start()
        await follower.takes_over()
        for former in (a, b, c):
            if former.shard is not None and former is not follower:
                await former.stop()
                await former.start()
                await until(lambda former=former: leads_on(former))
        await writer.check(follower)
        owner = follower
    async with writer.writing():
        await until(lambda: bool(writer.rows))
    await writer.check(d)
    await writer.close()


async def leads_on(machine: Machine) -> bool:
    """Return whether a server tells readers that the shard is elsewhere."""
    try:
        return bool((await machine.hello()).shard == STANDBY)
    except HeadraceError:
        return False


async def test_a_stream_that_cannot_be_begun_leaves_the_shard_where_it_is(machines: Machines, streams: Any) -> None:
    """One with records, or sealed, or away: the follower declines, its status says why, and the owner goes on."""
    a = await machines("a").start()
    b = await machines("b", log="nats://one", follow=a.address).start()
    writer = Writer(a, b)
    await writer.write([1], 1.0)
    stream = streams.setdefault("nats://one", ScriptedShardStream("one"))
    other = await machines("other", log="nats://one").start()
    await other.takes_over()
    await other.stop()
    await _is_refused(a, b, "nats stream rm")
    await writer.write([1], 2.0)
    await stream.remove()
    await stream.make(first_seq=1)  # of a start without a log; it is begun anew
    stream.is_sealed = True
    await _is_refused(a, b, "nats stream rm")
    stream.is_sealed, stream.is_away = False, True
    await _is_refused(a, b, None)
    await writer.write([1], 3.0)
    assert notes_of(a.owner) == ["offer", "withdrawal"] * 3
    stream.is_away = False
    await b.has(a)
    await promote(b)
    await writer.write([2], 4.0)
    await writer.check(b)
    await writer.close()


async def _is_refused(source: Machine, follower: Machine, advice: str | None) -> None:
    """Offer the shard to a follower, which declines; its status gives an advice."""
    await follower.has(source)
    await source.ask(to=follower.address, hold_ms=2000)
    await until(lambda: notes_of(source.owner)[-1] == "withdrawal")
    if advice is not None:
        async with follower.client() as client:
            assert advice in (await client.status()).following.failure


@pytest.mark.parametrize("ends_after", ["make", "begin", "take_over"])
async def test_a_follower_that_ends_in_the_middle_goes_on_or_declines(
    machines: Machines, streams: Any, monkeypatch: pytest.MonkeyPatch, ends_after: str
) -> None:
    """Wherever it was killed, its next start finds in the stream whether it has taken over."""
    a = await machines("a").start()
    b = await machines("b", log="nats://one", follow=a.address).start()
    writer = Writer(a, b)
    await writer.write([1], 1.0)
    await b.has(a)
    reached = asyncio.Event()
    kind: Any = JetStreamUpdateLog if ends_after == "take_over" else StreamBeginning
    work = getattr(kind, ends_after)

    async def ends(*args: Any, **kwargs: Any) -> Any:
        found = await work(*args, **kwargs)
        reached.set()
        await asyncio.Event().wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kind, ends_after, ends)
        await a.ask(to=b.address, hold_ms=60_000)
        await reached.wait()
        await b.stop()
    await b.start()
    if ends_after == "make":  # it was asked by nobody since, so it has nothing to accept
        await a.ask(aborts=True)
        await until(lambda: a.owner._ingest.closed is None)
        await writer.write([2], 2.0)
        await b.has(a)
        await promote(b)
    await b.takes_over()
    await until(lambda: leads_on(a))
    await writer.write([3], 3.0)
    await writer.check(b)
    await writer.close()


async def test_a_follower_whose_claim_has_ended_its_source_takes_over_alone(
    machines: Machines, streams: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends between its claim and its first record: no start of the source can have the shard, so it needs none."""
    store = f"file://{tmp_path / 'store'}"
    a = await machines("a", object_store=store).start()
    b = await machines("b", log="nats://one", follow=a.address, object_store=store).start()
    writer = Writer(a, b)
    await writer.write([1], 1.0)
    await writer.close()
    await b.has(a)
    reached = asyncio.Event()

    async def begin(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(StreamBeginning, "begin", begin)
        await a.ask(to=b.address, hold_ms=60_000)
        await reached.wait()
        await b.stop()
    await a.stop()
    with pytest.raises(LogFencedError):
        await a.start()
    await b.start()
    await b.takes_over()
    writer = Writer(b)
    writer._seq = 1
    await writer.write([2], 2.0)
    assert await rows_at(b, [1, 2]) == [1.0, 2.0]
    await writer.close()


async def test_whoever_takes_the_stream_over_asks_the_follower(machines: Machines, streams: Any) -> None:
    """A standby, or a restart, that finds an offer takes nothing and tells no later term before it knows."""
    a = await machines("a", log="nats://one").start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    await writer.close()
    standby = machines("standby", log="nats://one", is_standby=True)
    await standby.start()
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        await offer(a, follower)
        follower.state = None
        term, offered = a.owner.term, a.owner._ingest.offer
        await a.stop()
        await standby.until(lambda: isinstance(standby.shard, Shard))
        with pytest.raises(UnavailableError):
            await _attempt(standby)
        assert (standby.owner.term, standby.owner._ingest.offer) == (term, offered)
        assert standby.owner.log.term == term + 1
        async with standby.client() as client:  # followers get nothing from behind the offer
            reply = await client.fetch_updates(
                idl.FetchUpdatesRequest(server_id=SERVER_ID, from_seq=1, max_bytes=1 << 20, wait_ms=0)
            )
            assert reply.last_seq == offered.seq == reply.records[-1].seq
        follower.state = DECLINED
        await standby.until(lambda: bool(standby.failures))
        await standby.takes_over()
        writer = Writer(standby)
        writer._seq = 1
        await writer.write([2], 2.0)
        await writer.close()
        assert standby.owner.term > term

        await offer(standby, follower)
        follower.state = ACCEPTED
        await until(lambda: leads_on(standby))
        await standby.stop()
    await standby.start()  # it knows without asking
    await until(lambda: leads_on(standby))
    hello = await standby.hello()
    assert hello.shards[0].port == follower.port


async def test_a_standby_of_a_stream_that_was_left_leads_its_readers_on(machines: Machines, streams: Any) -> None:
    """What it has is not fresh while a follower may have the shard, and once one has it, it answers nobody."""
    a = await machines("a", log="nats://one").start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    await writer.close()
    standby = await machines("standby", log="nats://one", is_standby=True).start()
    follower = ScriptedFollower()
    async with listening(follower, follower.port), standby.client() as client:

        async def hello() -> Any:
            return await client.hello(hello_of_nobody(reads_copies=True, asks_places=True))

        async def is_fresh() -> bool:
            return bool((await hello()).knowledge_age_ms < 5000)

        await until(is_fresh)
        follower.state = None
        await offer(a, follower)
        term, offered = a.owner.term, a.owner._ingest.offer
        assert offered is not None
        await until(lambda: standby.shard is not None and standby.shard._ingest.offer == offered)

        async def is_stale() -> bool:
            return bool((await hello()).knowledge_age_ms > 1500)

        await until(is_stale)  # it asks its servers each second
        assert (await hello()).shard == 0
        follower.state = ACCEPTED
        await until(lambda: leads_on(a))
        fetch = idl.FetchUpdatesRequest(server_id=SERVER_ID, from_seq=offered.seq + 1, max_bytes=1 << 20, wait_ms=0)

        async def is_refused() -> bool:
            try:
                await client.fetch_updates(fetch)
            except UnavailableError:
                return True
            return False

        await until(is_refused)
    async with standby.client() as client:
        told = await hello()
        assert (told.shard, told.shards[0].port) == (STANDBY, follower.port)
        assert told.shards[0].term > term >= told.term
        assert follower.address in (await client.status()).following.failure


async def _attempt(machine: Machine) -> None:
    async with machine.client() as client:
        await client.hello(hello_of_writer(SPEC))
