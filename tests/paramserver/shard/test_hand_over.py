"""Hand-overs: one writer at most, nothing acked lost, whoever ends in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hellos import hello_of_writer
from machines import SERVER_ID, SPEC, Machine, Machines, Writer, listening, machines_in, promote, rows_at
from scripted_follower import ScriptedFollower, notes_of, offer
from waiting import WAIT_S, until

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.shard_places import STANDBY
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.hand_over import READS_S
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import HeadraceError, OverloadedError, RequestError, UnavailableError
from headrace.schemas.idl import idl

OPEN, ACCEPTED, DECLINED = idl.OfferState.OPEN, idl.OfferState.ACCEPTED, idl.OfferState.DECLINED


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    """Return what makes servers, which are stopped at the end."""
    async with machines_in(tmp_path) as make:
        yield make


async def leads_on(machine: Machine) -> bool:
    """Return whether a server tells readers that the shard is elsewhere."""
    return bool((await machine.hello()).shard == STANDBY)


async def _refused(machine: Machine) -> Any:
    """Return the error by which an owner refuses a writer."""
    async with await ParamServerClient.connect("127.0.0.1", machine.port) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.hello(hello_of_writer(SPEC, epoch=2, takes_over=True))
        return caught.value


async def test_only_who_is_there_and_follows_is_offered_the_shard(machines: Machines) -> None:
    """An owner that cannot hear its follower, or of which nobody is one, goes on taking updates."""
    owner = await machines("a").start()
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        for change in ({"state": DECLINED}, {"state": None}, {"server_id": "another"}):
            for name, value in change.items():
                was = getattr(follower, name)
                setattr(follower, name, value)
                with pytest.raises(HeadraceError):
                    await owner.ask(to=follower.address, hold_ms=1000)
                setattr(follower, name, was)
    for nobody in (follower.address, owner.address):
        with pytest.raises((UnavailableError, RequestError)):
            await owner.ask(to=nobody, hold_ms=1000)
    writer = Writer(owner)
    await writer.write([1], 1.0)
    assert notes_of(owner.shard) == [] and not writer.num_refused
    await writer.close()


async def test_an_owner_answers_rows_only_while_nobody_can_have_taken_over(machines: Machines) -> None:
    """Each answer that the offer is open is good for a second or so; the owner goes on once the offer is declined."""
    owner = await machines("a").start()
    writer = Writer(owner)
    await writer.write([1], 1.0)
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        await offer(owner, follower)
        assert (await _refused(owner)).moves_to.port == follower.port
        with pytest.raises(OverloadedError):
            await owner.ask(to=follower.address, hold_ms=1000)

        async def answers(expected: bool = True) -> bool:
            with contextlib.suppress(UnavailableError):
                return (await rows_at(owner, [1]) == [1.0]) is expected
            return not expected

        await until(answers)
        follower.state = None
        await until(lambda: answers(False))
        async with owner.client() as client:  # its log says the same, and how old that may be
            reply = await client.fetch_updates(
                idl.FetchUpdatesRequest(server_id=SERVER_ID, from_seq=1, max_bytes=1 << 20, wait_ms=0)
            )
            assert len(reply.records) == owner.owner.log.last_seq and reply.knowledge_age_ms >= 1000
        with pytest.raises(UnavailableError, match="--force"):
            await owner.ask(aborts=True)
        follower.state = idl.OfferState.OPENING
        with pytest.raises(UnavailableError, match="just now"):  # it lives, and nobody's word counts for more
            await owner.ask(aborts=True, forces=True)
        follower.state = DECLINED
        await until(answers)
        await writer.write([1], 2.0)
        with pytest.raises(RequestError):
            await owner.ask(aborts=True)
    assert notes_of(owner.shard) == ["offer", "withdrawal"]
    await owner.stop()
    await owner.start()
    await writer.close()
    await writer.write([2], 2.0)
    await writer.close()


async def test_an_offer_outlives_its_owner(machines: Machines) -> None:
    """An owner that is started again takes nothing until its follower answers, or an operator says that it is lost."""
    owner = await machines("a").start()
    writer = Writer(owner)
    await writer.write([1], 1.0)
    await writer.close()
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        await offer(owner, follower)
    await owner.stop()
    await owner.start()
    await _refused(owner)
    with pytest.raises(UnavailableError):
        await rows_at(owner, [1])
    await owner.ask(aborts=True, forces=True)
    await writer.write([1], 2.0)
    await writer.close()
    async with listening(follower, follower.port):
        await offer(owner, follower)
        await owner.stop()
        # Whatever is there by now, it knows an owner of a later term.
        follower.state, follower.term, follower.offers = OPEN, 7, []
        await owner.start()
        await until(lambda: leads_on(owner))
        assert not follower.offers
        with pytest.raises(RequestError):
            await owner.ask(aborts=True, forces=True)


async def test_who_waits_for_records_hears_at_once_where_they_are(machines: Machines) -> None:
    """A long poll at an owner ends when the shard is taken over, and the next one says where it is."""
    owner = await machines("a").start()
    follower = ScriptedFollower()
    async with listening(follower, follower.port), owner.client() as client:
        await offer(owner, follower)
        request = idl.FetchUpdatesRequest(
            server_id=SERVER_ID, from_seq=owner.owner.log.last_seq + 1, max_bytes=1 << 20, wait_ms=60_000
        )
        waiting = asyncio.create_task(client.fetch_updates(request))
        await until(lambda: owner.owner.feed.num_waiting)
        follower.state = ACCEPTED
        assert not (await waiting).records
        with pytest.raises(UnavailableError) as caught:
            await client.fetch_updates(request)
        assert caught.value.moves_to.port == follower.port


async def test_of_two_offers_at_once_one_counts(machines: Machines) -> None:
    """Others are refused, also while the first is on its way, and several that take it back write one withdrawal."""
    owner = await machines("a").start()
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        asked = [owner.ask(to=follower.address, hold_ms=60_000) for _ in range(3)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert sorted(isinstance(reply, OverloadedError) for reply in told) == [False, True, True]
        taken_back = await asyncio.gather(*(owner.ask(aborts=True) for _ in range(3)), return_exceptions=True)
        assert sum(not isinstance(reply, HeadraceError) for reply in taken_back) >= 1
    assert notes_of(owner.shard) == ["offer", "withdrawal"]


async def test_a_follower_decides_once(machines: Machines) -> None:
    """It never accepts what it has declined, also over a restart, nor what it was not asked about."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    writer = Writer(source, follower)
    await writer.write([1], 1.0)
    await writer.close()

    async def ask(**fields: Any) -> Any:
        return (await follower.ask(offer="one", **fields)).state

    assert await ask() == OPEN
    assert await ask(declines=True) == DECLINED
    assert await ask() == DECLINED
    await follower.stop()
    await follower.start()
    assert await ask() == DECLINED
    await source.owner._ingest.note("offer", to=follower.address, id="one", taker="follower", term="0")
    await follower.has(source)
    # One that it was never asked about is to somebody else, whatever its address.
    await source.owner._ingest.note("offer", to=follower.address, id="two", taker="follower", term="0")
    await follower.has(source)
    assert not isinstance(follower.shard, Shard)
    await source.owner._ingest.note("withdrawal")
    promoted = await promote(follower)
    assert promoted["term"] == 1 and (await ask()) == DECLINED
    await writer.check(follower)


async def test_a_writer_with_nothing_to_send_is_cut_off(machines: Machines) -> None:
    """Its connection ends once the shard was taken over, so that it asks where the shard is while somebody knows."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    async with await ParamServerClient.connect("127.0.0.1", source.port) as client:
        await client.hello(hello_of_writer(SPEC))
        await promote(follower)
        async with asyncio.timeout(WAIT_S):
            await client.wait_closed()


async def test_a_follower_that_ended_after_it_accepted_takes_over_at_its_next_start(machines: Machines) -> None:
    """Between its decision and its record the owner waits; it then takes over with the same offer."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    writer = Writer(source, follower)
    await writer.write([1], 1.0)
    await follower.has(source)
    await follower.ask(offer="one", to=follower.address)
    await follower.stop()
    path = follower.config.directory / "follow.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"accepted": "one"}))
    await source.owner._ingest.note("offer", to=follower.address, id="one", taker="follower", term="0")
    await source.stop()
    await source.start()
    await _refused(source)
    await follower.start()
    await follower.takes_over()
    await writer.write([2], 2.0)
    await writer.check(follower)
    assert not follower.owner._was_forced and follower.owner.term == 1
    assert notes_of(follower.shard) == ["offer", "open"]
    # Ended before it noted that, it finds its own record.
    await follower.stop()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_promoted": False}))
    await writer.close()


async def test_a_follower_is_forced_only_when_nobody_else_can_have_the_shard(machines: Machines) -> None:
    """While its source answers, or whom that offered the shard to, it is refused; trainers may hear of what is lost."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    last = await machines("c", follow=follower.address).start()
    rival = ScriptedFollower()
    writer = Writer(source, follower)
    await writer.write([1], 1.0)
    await writer.close()
    with pytest.raises(RequestError, match="answers"):
        await follower.ask(forces=True)
    async with listening(rival, rival.port):
        await offer(source, rival)
        await last.has(source)
        await source.stop()
        with pytest.raises(RequestError, match="was offered the shard"):
            await follower.ask(forces=True)
        await follower.stop()
        with pytest.raises(RequestError, match="takes no updates itself"):
            await last.ask(forces=True)
        await last.stop()
        await last.start()  # over a restart it knows so still
        with pytest.raises(RequestError, match="takes no updates itself"):
            await last.ask(forces=True)
        await follower.start()
    await follower.ask(forces=True)
    await follower.takes_over()
    await writer.write([2], 2.0)
    await writer.check(follower)
    assert (await follower.hello()).may_be_set_back
    await last.has(follower)
    await writer.check(last)
    await writer.close()


async def test_a_follower_that_was_offered_the_shard_lacks_nothing_when_it_is_forced(machines: Machines) -> None:
    """The offer counts then, and the source, which comes back, finds its follower in place of itself."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    writer = Writer(source, follower)
    await writer.write([1], 1.0)
    await writer.close()
    proxied = ScriptedFollower()
    async with listening(proxied, proxied.port):
        await offer(source, proxied)
        await follower.has(source)
        await follower.ask(offer=proxied.offers[0].offer, to="it")
        await source.stop()
    await follower.ask(forces=True)
    await follower.takes_over()
    assert not (await follower.hello()).may_be_set_back
    assert (await follower.ask(offer=proxied.offers[0].offer)).state == ACCEPTED


async def test_a_follower_opens_once_its_source_answers_no_rows_any_more(machines: Machines) -> None:
    """After it has said that an offer is open, it waits, and says so no more; so no row is read that is stale."""
    source = await machines("a").start()
    follower = await machines("b", follow=source.address).start()
    await source.owner._ingest.note("offer", to=follower.address, id="one", taker="follower", term="0")
    await follower.has(source)
    answered_s = time.monotonic()
    assert (await follower.ask(offer="one")).state == OPEN
    states = set()
    while isinstance(follower.shard, FollowingShard):
        with contextlib.suppress(UnavailableError):
            states.add((await follower.ask(offer="one", to="it")).state)
        await asyncio.sleep(0.05)
    await follower.takes_over()
    assert time.monotonic() >= answered_s + READS_S
    assert states - {OPEN} == {idl.OfferState.OPENING} and (await follower.ask(offer="one")).state == ACCEPTED


async def test_a_server_moves_on_and_back_while_it_is_written(machines: Machines) -> None:
    """Its writer finds the shard wherever it is, no acked row is lost, and who had it before says where, for ever."""
    a = await machines("a").start()
    b = await machines("b", follow=a.address).start()
    c = await machines("c", follow=b.address).start()
    other = await machines("other", follow=f"{a.address},{b.address}").start()
    writer = Writer(a, b, c)
    terms = []
    async with writer.writing():
        await until(lambda: len(writer.rows) == 50)
        for target, source in ((b, a), (c, b)):
            if target is c:  # it follows one that followed another
                assert (await promote(target))["address"] == target.address
            else:
                with pytest.raises(RequestError, match="follows"):
                    await promote(c)
                assert (await promote(target))["address"] == target.address
            terms.append(target.owner.term)
            reply = (await _refused(source)).moves_to
            assert (reply.host, reply.port) == ("127.0.0.1", target.port)
            await until(partial(leads_on, source))
            assert (await source.hello()).shards[0].port == target.port
            await writer.write([1], 1e6)
        # A new directory at the address of the first server, which then takes the shard back.
        await a.stop()
        back = await machines("back", follow=c.address, port=a.port).start()
        await promote(back)
        terms.append(back.owner.term)
        assert terms == [1, 2, 3]
        # Each that had it finds out so at its start, also where its follower is another directory by now.
        await b.stop()
        await b.start()
        await until(lambda: leads_on(b))
        assert (await _refused(b)).moves_to.port == c.port
        await c.stop()
        again = await machines("again", follow=back.address, port=c.port).start()
        await b.stop()
        await b.start()
        await until(lambda: leads_on(b))
        await writer.write([2], 2e6)
    await other.has(back)
    await again.has(back)
    for machine in (back, other, again):
        await writer.check(machine)
    assert notes_of(other.shard) == ["offer", "open"] * 3
