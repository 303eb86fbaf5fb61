"""Schedules of hand-overs: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hand_over_schedules import ADMIN_DIAL, HandOverSchedule
from host_loop import Host, HostLoop
from simulated_servers import SimulatedServer, World, surroundings
from simulator import PlantedFaults, run_schedules

from headrace.paramserver.log import claims
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.paramserver.shard import following
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.following import Following
from headrace.paramserver.shard.hand_over import HandOver
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import HeadraceError, LogFencedError
from headrace.schemas.idl import idl

pytestmark = pytest.mark.timeout(900)
planted = PlantedFaults(HandOverSchedule, within=300, at_once=10)
_NUM_CORE, _NUM_LONG = 6, 600


def _check(seeds: range) -> None:
    total, findings = run_schedules(HandOverSchedule, seeds)
    assert not findings, "\n".join(findings[:20])
    # The schedules are worth something: the shard moves, batches are acked, and owners answer readers.
    num = len(seeds)
    assert total["promoted"] + total["forced"] > num / 4 and total["acked"] > 20 * num and total["reads"] > 10 * num


def test_no_hand_over_breaks_a_promise() -> None:
    """A shard has one writer, nothing acked is lost, no row is stale, and all copies are equal in the end."""
    _check(range(1, 1 + _NUM_CORE))


def test_no_hand_over_of_many_breaks_a_promise() -> None:
    """As above, in some hundreds."""
    _check(range(1 + _NUM_CORE, 1 + _NUM_LONG))


def _play(script: Callable[..., Coroutine[Any, Any, None]], num_servers: int, *, has_claims: bool) -> None:
    """Run a script for some servers, the first of which is the source of the others, once they follow."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostLoop)
        loop.begin_anew(random.Random(1))
        World()
        servers: list[SimulatedServer] = []
        for port in range(7001, 7001 + num_servers):
            source = servers[0].address if servers else None
            servers.append(SimulatedServer(loop, str(port), port, follow=source, has_claims=has_claims))
            servers[-1].start()
        await asyncio.sleep(5.0)
        await Host(loop, "operator").run(script(loop, *servers))

    with surroundings(), contextlib.closing(HostLoop()) as loop:
        loop.run_alone(play())


async def _ask(server: SimulatedServer, **fields: Any) -> None:
    link = ShardLink(ADMIN_DIAL, "127.0.0.1", server.port)
    await link.refresh()
    await link.promote_shard(idl.PromoteShardRequest(shard=0, **fields))
    await link.close()


def test_an_offer_may_be_declined_while_a_follower_makes_it_durable() -> None:
    """The follower, which has read the offer and then declined it, goes on following."""

    async def script(loop: HostLoop, owner: SimulatedServer, follower: SimulatedServer) -> None:
        World.now.sync_s = (0.2, 0.2)
        await _ask(owner, to=follower.address, hold_ms=5000)
        await asyncio.sleep(0.02)
        await _ask(owner, aborts=True)
        await asyncio.sleep(5.0)
        assert isinstance(owner.shard, Shard) and isinstance(follower.shard, FollowingShard)
        assert follower.shard.log.last_seq == owner.shard.log.last_seq

    _play(script, 2, has_claims=False)


def test_an_owner_whose_shard_somebody_else_has_claimed_does_not_take_its_offer_back() -> None:
    """It ends, as it would without the offer."""

    async def script(loop: HostLoop, owner: SimulatedServer, follower: SimulatedServer, other: SimulatedServer) -> None:
        loop.cuts.add(frozenset((owner.name, other.name)))
        await asyncio.sleep(6.0)  # the owner has just looked for claims when it is asked
        await _ask(other, forces=True)
        await asyncio.sleep(1.0)
        assert isinstance(other.shard, Shard)
        loop.cuts.clear()
        await _ask(owner, to=follower.address, hold_ms=60_000)
        await asyncio.sleep(15.0)
        assert owner.fatal is None
        await _ask(owner, aborts=True)
        await asyncio.sleep(5.0)
        assert isinstance(owner.fatal, LogFencedError) and isinstance(other.shard, Shard)

    _play(script, 3, has_claims=True)


@planted()
def a_seal_that_a_start_forgets(patch: pytest.MonkeyPatch) -> None:
    """An owner that has offered its shard takes nothing, also over a restart."""
    patch.setattr(HandOver, "resume", lambda self, offer: None)


@planted()
def a_follower_that_opens_before_it_has_read_the_seal(patch: pytest.MonkeyPatch) -> None:
    """That an owner asks about an offer does not say that all before it is there."""
    answer = Following.answer

    async def hasty(self: Following, offer: str, **asked: Any) -> Any:
        state = await answer(self, offer, **asked)
        if state == idl.OfferState.OPEN:
            self._forced.set()
        return state

    patch.setattr(Following, "answer", hasty)


@planted()
def a_source_that_reopens_when_its_follower_is_silent(patch: pytest.MonkeyPatch) -> None:
    """Who does not answer may have taken over."""
    ask = HandOver._ask_about

    async def credulous(self: HandOver, offer: Any, **asked: Any) -> Any:
        try:
            return await ask(self, offer, **asked)
        except HeadraceError:
            return idl.OfferState.DECLINED, 0

    patch.setattr(HandOver, "_ask_about", credulous)


@planted()
def a_follower_that_accepts_what_it_has_declined(patch: pytest.MonkeyPatch) -> None:
    """Once the source was told so, it goes on."""
    answer = Following.answer

    async def forgetful(self: Following, offer: str, **asked: Any) -> Any:
        state = await answer(self, offer, **asked)
        self._state = replace(self._state, declined=None)
        return state

    patch.setattr(Following, "answer", forgetful)


@planted("in term")
def records_of_another_term(patch: pytest.MonkeyPatch) -> None:
    """Who knows of a later copy of the shard takes nothing from an earlier one."""
    patch.setattr(ShardPlaces, "check_term", lambda self, shard, term, address: None)


@planted("another log", "has ended")
def positions_in_another_history(patch: pytest.MonkeyPatch) -> None:
    """Where somebody took over by force, an equal position says nothing without its mark."""
    patch.setattr(ShardFollower, "_check_mark", lambda self, seq, taken, present: None)


@planted("stale")
def a_follower_that_opens_while_the_source_answers(patch: pytest.MonkeyPatch) -> None:
    """The source answers rows for a second after it was told that nobody has taken over."""
    patch.setattr(following, "READS_S", 0.0)


@planted("stale")
def a_source_that_always_answers(patch: pytest.MonkeyPatch) -> None:
    """Rows of a shard that is offered are its follower's, once nobody says that it has not taken over."""
    patch.setattr(HandOver, "may_read", True)


@planted()
def a_start_that_ignores_claims(patch: pytest.MonkeyPatch) -> None:
    """With claims, an owner that starts again takes the next term only if no other copy has it."""
    patch.setattr(claims, "_check_known", lambda *args: None)


@pytest.mark.parametrize("fault", planted.names)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger finds an owner, a follower or a client that breaks one of the rules."""
    planted.check_found(fault, monkeypatch)
