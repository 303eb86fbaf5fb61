"""A relay's mirror of one shard: the shard's records and marks, whatever happens to shard, relay and followers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from held_ports import hold_ports
from identity_writer import IdentityWriter
from mirrored_shard import address_of, assert_mirrored, facts_of, following, take, wait_for_seq
from relays import relay_of, until
from served_shard import link_to, serving, values_of
from shard_servers import serve_shards

from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.runner import RelayProcess
from headrace.paramserver.relay.shard_mirror import ShardMirror
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.shard_places import StaleTermError
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import GoneError, SetBackError, UnavailableError
from headrace.schemas.idl import idl

WAIT_S = 60.0


async def test_followers_get_what_the_shard_has(tmp_path: Path) -> None:
    """Records come once, in order and equal, to many followers, also those that arrive later and that wait."""
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(address_of(served), tmp_path / "relay") as (address, relay),
        following(address, wait_s=60.0) as patient,
    ):
        waiting = asyncio.create_task(take(patient, 21))
        for i in range(1, 21):
            await served.write([i, i + 100], float(i))
        updates = await waiting
        assert [values_of(update.body) for update in updates[1:]] == [([i, i + 100], float(i)) for i in range(1, 21)]
        assert_mirrored(relay, served.shard)
        async with following(address, 5, max_bytes=600) as late, following(address_of(served), 5) as direct:
            assert facts_of(await take(late, 21)) == facts_of(await take(direct, 21))
            assert late.mark == direct.mark is not None
            assert late.knowledge_age_s < 30.0
        client, _ = await _client_of(address)
        async with client:
            (status,) = [(await client.status()).relay]
            assert (status.source, status.source_seq) == (address_of(served), 21)
            assert status.first_seq == 1 and status.log_bytes > 0 and status.failure is not None  # it has no snapshot


async def _client_of(address: str) -> tuple[ParamServerClient, Any]:
    link = await link_to(parse_address(address)[1])
    return link._client, link.hello  # type: ignore[return-value]


@pytest.mark.parametrize(("num_rows", "num_batches"), [(20_000, 7), (4000, 40)])
async def test_each_record_has_the_mark_that_it_has_at_the_shard(
    tmp_path: Path, num_rows: int, num_batches: int
) -> None:
    """Where one reply spans several segments of the shard, and several of its lives, the mirror finds every border."""
    data = tmp_path / "shard"
    for life in range(2):
        async with serving(data, client_seq=life * num_batches, log_segment_bytes=1 << 20) as served:
            for i in range(num_batches):
                await served.write(range(i, i + num_rows), 1.0)
    async with serving(data, log_segment_bytes=1 << 20) as served:
        async with relay_of(address_of(served), tmp_path / "relay") as (_, relay):
            await wait_for_seq(relay, served.shard.log.last_seq)
            assert_mirrored(relay, served.shard)
        marks = {served.shard.log.nonce_of(seq) for seq in range(1, served.shard.log.last_seq + 1)}
        assert len(marks) >= 5


async def test_shard_and_relay_may_restart(tmp_path: Path) -> None:
    """Followers of a relay go on when the shard restarts, when the relay does, and get nothing twice."""
    port, relay_port = hold_ports(), hold_ports()
    updates: list[Update] = []
    async with serving(tmp_path / "shard", port=port) as served:
        async with relay_of(address_of(served), tmp_path / "relay", port=relay_port) as (address, _):
            link = await link_to(relay_port)
            follower = ShardFollower(link, from_seq=1, wait_s=1.0)
            await served.write([1], 1.0)
            updates += await take(follower, 2)
        await served.write([2], 2.0)
    # The shard is away: the relay serves what it has, and its age grows.
    async with relay_of(f"127.0.0.1:{port}", tmp_path / "relay", port=relay_port) as (address, relay):
        async with following(address) as late:
            assert facts_of(await take(late, 2)) == facts_of(updates)
        assert relay.mirrors[0].knowledge_age_s == float("inf")
        async with serving(tmp_path / "shard", port=port, client_seq=2) as served:
            await served.write([3], 3.0)
            updates += await take(follower, served.shard.log.last_seq)
            assert_mirrored(relay, served.shard)
            assert [update.seq for update in updates] == list(range(1, served.shard.log.last_seq + 1))
        await link.close()


@pytest.mark.parametrize("num_written", [0, 1, 5], ids=["its log ends before", "at the place", "beyond it"])
async def test_followers_are_told_when_the_shard_was_set_back(tmp_path: Path, num_written: int) -> None:
    """A follower beyond the older copy starts over, however far that has gone on; the mirror equals the shard again."""
    data, older, port, relay_port = tmp_path / "data", tmp_path / "older", hold_ports(), hold_ports()
    async with serving(data) as served:
        for row in (1, 2):
            await served.write([row], 1.0)
    shutil.copytree(data, older)
    async with relay_of_later(port, tmp_path / "relay", relay_port) as start:
        async with serving(data, port=port, client_seq=2) as served:
            _, relay = await start()
            await served.write([3], 1.0)
            taken = served.shard.log.last_seq
            link = await link_to(relay_port)
            follower = ShardFollower(link, from_seq=1, wait_s=0.0)
            await take(follower, taken)
        shutil.rmtree(data)
        shutil.copytree(older, data)
        async with serving(data, port=port, client_seq=2) as served:
            for row in range(num_written):
                await served.write([row + 10], 2.0)
            with pytest.raises(GoneError, match="start over"):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await follower.fetch()
            await wait_for_seq(relay, served.shard.log.last_seq)
            assert_mirrored(relay, served.shard)
            assert relay.mirrors[0].num_restarts == 1
        await link.close()


@asynccontextmanager
async def relay_of_later(port: int, data: Path, relay_port: int) -> AsyncIterator[Any]:
    """Yield a function that starts a relay, which then outlives the shard that it was started beside."""
    async with AsyncExitStack() as stack:

        async def start() -> Any:
            return await stack.enter_async_context(relay_of(f"127.0.0.1:{port}", data, port=relay_port))

        yield start


async def test_a_follower_ahead_of_the_relay_asks_again(tmp_path: Path) -> None:
    """A relay that is behind does not pass for a server that was set back: a follower from elsewhere waits for it."""
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(address_of(served), tmp_path / "relay") as (address, relay),
    ):
        await served.write([1], 1.0)
        await wait_for_seq(relay, 2)
        mirror = relay.mirrors[0]
        copying = [task for task in asyncio.all_tasks() if task.get_name() == "headrace-mirror-0"]
        assert len(copying) == 1
        link = await link_to(parse_address(address)[1])
        request = idl.FetchUpdatesRequest(server_id="a-server", from_seq=5, max_bytes=1, wait_ms=0)
        with pytest.raises(SetBackError):  # nobody has it
            await link.fetch_updates(request)
        # Hold the mirror back, and let the shard go on.
        held, is_held = mirror._link.fetch_updates, asyncio.Event()

        async def hold(asked: Any) -> Any:
            if asked.follower is not None:
                is_held.set()
                await asyncio.Event().wait()  # for ever
            return await held(asked)

        mirror._link.fetch_updates = hold  # type: ignore[method-assign]
        await served.write([1], 2.0)  # answers what the mirror has asked before
        await asyncio.wait_for(is_held.wait(), WAIT_S)
        for row in range(6):
            await served.write([row], 2.0)
        request.from_seq = served.shard.log.last_seq
        with pytest.raises(UnavailableError, match="this relay is behind"):
            await link.fetch_updates(request)
        await link.close()


async def test_a_relay_that_was_away_for_too_long_begins_anew(tmp_path: Path) -> None:
    """When the shard has removed what comes next, the mirror begins again at what it has, and followers start over."""
    port, relay_port = hold_ports(), hold_ports()
    settings: dict[str, Any] = {"log_segment_bytes": 1 << 20, "log_retention_bytes": 1 << 20, "log_hold_bytes": 1 << 20}
    async with serving(tmp_path / "shard", port=port, **settings) as served:
        async with relay_of(address_of(served), tmp_path / "relay", port=relay_port) as (_, relay):
            await wait_for_seq(relay, 1)
        for i in range(8):
            await served.write(range(20_000), float(i))
        await served.shard.applied()
        await asyncio.to_thread(served.shard.store.flush)
        served.shard.log.trim(served.shard.store.durable_seq + 1, max_bytes=1 << 20)
        assert served.shard.log.first_seq > 2
        async with relay_of(address_of(served), tmp_path / "relay", port=relay_port) as (address, relay):
            await until(lambda: relay.mirrors[0].num_restarts > 0 and relay.mirrors[0].log is not None)
            async with following(address, 2) as follower:
                with pytest.raises(GoneError):
                    while True:
                        await follower.fetch()
            await served.write([1], 9.0)
            last_seq = served.shard.log.last_seq
            await wait_for_seq(relay, last_seq)
            assert_mirrored(relay, served.shard, last_seq)
            assert len(list((tmp_path / "relay/shard-0000").glob("log-*"))) == 1


async def test_the_disk_bound_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond --log-hold-bytes the oldest log goes, whoever needs it; its holder is told, and others go on."""
    monkeypatch.setattr("headrace.paramserver.shard.retention._INTERVAL_S", 3600.0)  # when the test says
    settings: dict[str, Any] = {"log_segment_bytes": 1 << 20, "log_retention_bytes": 1 << 20, "log_hold_bytes": 2 << 20}
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(address_of(served), tmp_path / "relay", **settings) as (address, relay),
        following(address, name="slow", copy_id="a") as slow,
        following(address, name="fast", copy_id="b") as fast,
    ):
        await slow.register()
        for i in range(16):
            await served.write(range(20_000), float(i))
        last_seq = served.shard.log.last_seq
        await take(fast, last_seq)
        log = relay.mirrors[0].log
        assert log is not None
        await until(lambda: log.durable_seq == last_seq)  # followers have had it before the disk
        assert log.size_bytes > 4 << 20
        await log.retention.trim()
        assert log.size_bytes <= 2 << 20
        assert log.retention.num_broken == 1
        with pytest.raises(GoneError, match="has been removed: start over"):
            await slow.fetch()
        await served.write([1], 1.0)
        await take(fast, last_seq + 1)


async def test_a_chain_equals_the_shard(tmp_path: Path) -> None:
    """A relay of a relay has the shard's records and marks, names its own source, and adds the ages of both."""
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(address_of(served), tmp_path / "one") as (first, _),
        relay_of(first, tmp_path / "two") as (second, relay),
        following(second) as follower,
    ):
        for i in range(10):
            await served.write([i], float(i))
        await take(follower, 11)
        assert_mirrored(relay, served.shard)
        assert follower.knowledge_age_s < 30
        assert relay.mirrors[0].source == first


async def test_marks_of_another_history_are_given_to_no_record(tmp_path: Path) -> None:
    """A source that is set back while a border is looked for would prove records to followers that it does not have."""
    marks = {seq: 1 if seq <= 4 else 2 for seq in range(1, 9)}
    is_set_back = False

    class Link:
        address = "source"

        async def fetch_updates(self, request: Any) -> Any:
            nonlocal is_set_back
            seq = request.from_seq - 1
            if seq > 1 and is_set_back:
                marks.update(dict.fromkeys(range(3, 9), 9))
            is_set_back = True
            return idl.FetchUpdatesReply(records=[], mark_before=marks[seq])

    async def nothing(*_: Any) -> None:
        return None

    mirror = ShardMirror(
        Link(),  # type: ignore[arg-type]
        RelayConfig(server="source", data=tmp_path),
        shard=0,
        hello=idl.HelloReply(server_id="s", shard=0),
        newest_snapshot=nothing,
        on_hello=nothing,
    )
    updates = [Update(seq, 1, idl.UpdateKind.BATCH, {}, memoryview(b"")) for seq in range(1, 9)]
    with pytest.raises(SetBackError, match="set back while its records were mirrored"):
        await mirror._marks_of(updates, 1, 2)


@pytest.mark.parametrize("restarts", [False, True], ids=["the relay runs on", "the relay restarts"])
@pytest.mark.parametrize("length", [1, 2])
async def test_an_older_copy_of_the_shard_is_not_followed(tmp_path: Path, length: int, restarts: bool) -> None:
    """At its place in a lower term it is refused; the relays serve what they have, and go on with the right copy."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports()
    relay_ports = [hold_ports() for _ in range(length)]
    sources = [f"127.0.0.1:{each}" for each in (port, *relay_ports)]
    async with serving(data, port=port, term=1) as served:
        await served.write([1], 1.0)
    shutil.copytree(data, older)
    async with AsyncExitStack() as stack:

        async def start(stack: AsyncExitStack) -> list[RelayProcess]:
            return [
                (await stack.enter_async_context(relay_of(source, tmp_path / f"relay-{number}", port=relay_port)))[1]
                for number, (source, relay_port) in enumerate(zip(sources[:-1], relay_ports, strict=True))
            ]

        first = await stack.enter_async_context(AsyncExitStack())
        async with serving(data, port=port, client_seq=1, term=2) as served:
            relays = await start(first)
            await served.write([2], 2.0)
            last_seq = served.shard.log.last_seq
            await wait_for_seq(relays[-1], last_seq)
            link = await link_to(relay_ports[-1])
            follower = ShardFollower(link, from_seq=1, wait_s=0.0)
            updates = await take(follower, last_seq)
        if restarts:
            await first.aclose()
        async with serving(older, port=port, client_seq=1, term=1) as served:
            await served.write([9], 9.0)  # as many records as the right copy has
            await served.write([9], 9.0)
            if restarts:
                relays = await start(stack)
            await until(lambda: isinstance(relays[0].mirrors[0]._link.failure, StaleTermError))
            assert await follower.fetch() == []
            assert (await link.refresh()).term == 2
        async with serving(data, port=port, client_seq=2, term=3) as served:
            await served.write([3], 3.0)
            updates += await take(follower, served.shard.log.last_seq)
            assert facts_of(updates) == facts_of(served.shard.log.read(1))
            for relay in relays:
                await wait_for_seq(relay, served.shard.log.last_seq)
                assert_mirrored(relay, served.shard)
                assert relay.mirrors[0].num_restarts == 0
            await until_term(link, 3)
        await link.close()


async def until_term(link: ShardLink, term: int) -> None:
    """Return when a relay tells a term."""

    async def tells_it() -> bool:
        return bool((await link.refresh()).term == term)

    await until(tells_it)


@pytest.mark.parametrize("restarts", [False, True], ids=["the relay runs on", "the relay restarts"])
async def test_a_shard_that_has_moved_is_found(tmp_path: Path, restarts: bool) -> None:
    """A shard at another address is found from the other shard; the relay's followers notice nothing."""
    data, port, relay_port = tmp_path / "data", hold_ports(), hold_ports(2)
    servers: list[Shard] = []
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        async with serve_shards(data, 2, port=port, term=1, nodes=("a", "a")) as old:
            address = f"127.0.0.1:{old[1]},127.0.0.1:{port}"  # the one that moves comes first
            _, relay = await first.enter_async_context(relay_of(address, tmp_path / "relay", port=relay_port))
            writer = await IdentityWriter.connect(old)
            await writer.write({row: 100 + row for row in range(8)})
            await writer.close()
            link = await link_to(relay_port + 1)
            follower = ShardFollower(link, from_seq=1, wait_s=0.2)
            await take(follower, 2)
        if restarts:
            await first.aclose()
        async with serve_shards(data, 2, port=port, term=2, nodes=("a", "a"), opened=servers) as new:
            assert new[1] != old[1]
            if restarts:
                _, relay = await stack.enter_async_context(relay_of(address, tmp_path / "relay", port=relay_port))
            writer = await IdentityWriter.connect(new)
            writer.step = 1
            await writer.write({row: 100 + row for row in range(8)})
            await take(follower, servers[1].log.last_seq)
            assert relay.mirrors[1].source == f"127.0.0.1:{new[1]}"
            await until_term(link, 2)
            await writer.close()
        await link.close()


async def test_a_relay_that_has_moved_is_found(tmp_path: Path) -> None:
    """A relay follows another one that comes back at any of the addresses that it was given."""
    ports = [hold_ports(), hold_ports()]
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with serving(tmp_path / "shard") as served, AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(relay_of(address_of(served), tmp_path / "one", port=ports[0]))
        address, relay = await stack.enter_async_context(relay_of(addresses, tmp_path / "two"))
        follower = await stack.enter_async_context(following(address))
        await served.write([1], 1.0)
        updates = await take(follower, 2)
        await first.aclose()
        await served.write([2], 2.0)
        await stack.enter_async_context(relay_of(address_of(served), tmp_path / "one", port=ports[1]))
        updates += await take(follower, 3)
        assert facts_of(updates) == facts_of(served.shard.log.read(1))
        assert relay.mirrors[0].source == f"127.0.0.1:{ports[1]}"
