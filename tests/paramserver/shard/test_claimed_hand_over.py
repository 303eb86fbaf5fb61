"""Hand-overs with an object store: the claim of the next term decides, and the archive goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from machines import Machine, Machines, Writer, listening, machines_in, promote
from scripted_follower import ScriptedFollower, notes_of, offer
from waiting import until

from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.log.claims import LateClaimError
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import UnavailableError


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    """Return what makes servers with one object store, which are stopped at the end."""
    async with machines_in(tmp_path, object_store=f"file://{tmp_path / 'store'}", archive_segment_s=0.05) as make:
        yield make


async def _archived(machine: Machine) -> None:
    """Wait until the archive has all that a server has."""

    async def has_all() -> bool:
        archive = (await machine.owner.sampler.status()).archive
        return bool(archive.archived_seq >= machine.owner.log.last_seq)

    await until(has_all)


async def test_an_archive_goes_on_with_the_server_that_took_over(machines: Machines, tmp_path: Path) -> None:
    """What is restored from it has each acked row, of all owners; who had the shard goes on telling where it is."""
    a = await machines("a").start()
    b = await machines("b", follow=a.address).start()
    c = await machines("c", follow=a.address).start()
    writer = Writer(a, b, c)
    async with writer.writing():
        await until(lambda: len(writer.rows) == 50)
        await promote(b)
        await until(lambda: a.shard is None or b.owner.term == 2)
        await promote(c)
    assert [a.owner.term, b.owner.term, c.owner.term] == [1, 2, 3]
    await _archived(c)
    store = ObjectStore.of_url(f"file://{tmp_path / 'store'}")
    list(restore_server(store, tmp_path / "restored"))
    restored = await machines("restored").start()
    await writer.check(restored)
    assert notes_of(restored.shard)[:2] in (["offer", "open"], [])
    assert restored.owner.log.last_seq == c.owner.log.last_seq
    assert not a.failures and not b.failures


async def _has_failed(follower: Machine) -> bool:
    """Return whether a follower says that it cannot take over."""
    assert isinstance(follower.shard, FollowingShard)
    failure = (await follower.shard.sampler.status()).following.failure
    return failure is not None and "take over" in failure


async def test_a_follower_without_the_sources_store_declines(machines: Machines, tmp_path: Path) -> None:
    """Whoever cannot claim the next term where the source would, leaves the shard to it."""
    a = await machines("a").start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    for name, store in (("none", None), ("other", f"file://{tmp_path / 'other'}")):
        follower = await machines(name, follow=a.address, object_store=store).start()
        await follower.has(a)
        await a.ask(to=follower.address, hold_ms=60_000)
        await until(partial(_has_failed, follower))
        await a.ask(aborts=True)
        await writer.write([2], 2.0)
        assert not isinstance(follower.shard, Shard)
        assert notes_of(a.shard)[-2:] == ["offer", "withdrawal"]
    await writer.close()


async def test_a_start_that_claims_the_next_term_ends_its_offer(machines: Machines) -> None:
    """No follower can claim that term any more, so the owner asks nobody and goes on."""
    a = await machines("a").start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    await writer.close()
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        await offer(a, follower)
    await a.stop()
    await a.start()
    await writer.write([2], 2.0)
    assert a.owner.term == 2 and notes_of(a.shard) == ["offer", "withdrawal"]
    await writer.close()


async def test_an_owner_whose_follower_is_silent_claims_its_shard_again(machines: Machines) -> None:
    """After some seconds it starts again, and the claim of the next term ends its offer."""
    a = await machines("a").start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    follower = ScriptedFollower()
    async with listening(follower, follower.port):
        await offer(a, follower)
    with pytest.raises(UnavailableError, match="object store"):
        await a.ask(aborts=True, forces=True)
    await writer.write([2], 2.0)
    assert a.owner.term == 2 and isinstance(a.failures[0], LateClaimError) and len(a.failures) == 1
    assert notes_of(a.shard) == ["offer", "withdrawal"]
    await writer.close()


async def test_a_follower_that_claims_too_late_begins_anew(machines: Machines, tmp_path: Path) -> None:
    """It has its record, and its source the claim: what it has is void, and it follows its source again."""
    a = await machines("a").start()
    b = await machines("b", follow=a.address).start()
    writer = Writer(a, b)
    await writer.write([1], 1.0)
    await promote(b)
    await writer.close()
    await b.stop()
    await a.stop()
    # As if its claim had come after that of its source.
    (tmp_path / "store" / "claims" / "0000" / f"{2:016d}").unlink()
    for archived in (tmp_path / "store" / "archive" / "0000").glob("*-2-*"):
        archived.unlink()
    path = b.config.directory / "follow.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_promoted": False}))
    await a.start()
    await writer.write([2], 2.0)
    assert a.owner.term >= 2
    await b.start()
    await b.has(a)
    await writer.check(b)
    assert isinstance(b.shard, FollowingShard)
    assert [type(failure) for failure in b.failures] == [UnavailableError]
    await writer.close()


async def test_a_forced_follower_goes_on_where_the_archive_knows_more(machines: Machines) -> None:
    """What the source has archived and the follower lacks is given up, and writers hear that something may be lost."""
    a = await machines("a").start()
    b = await machines("b", follow=a.address).start()
    writer = Writer(a)
    await writer.write([1], 1.0)
    await b.has(a)
    await b.stop()
    await writer.write([1, 2], 2.0)
    await _archived(a)
    await writer.close()
    await a.stop()
    await b.start()
    await b.ask(forces=True)
    await b.takes_over()
    assert b.owner.term == 2 and (await b.hello()).may_be_set_back
    await _archived(b)
