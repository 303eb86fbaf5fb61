"""A follower's shard: the records and rows of its source, whatever happens to either, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from followers import Follower, follower_config, following
from held_ports import hold_ports
from hellos import hello_of_nobody, hello_of_writer
from identity_writer import identity_spec, weights_of
from served_shard import SPEC, Served, link_to, serving
from set_embeddings import delta_of, request_of
from shard_servers import make_manifest, serve_shards
from waiting import WAIT_S, until

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import Dial, ShardLink, link_all, retry
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.following import Following
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import ConfigError, GoneError, RequestError, SetBackError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

DENSE = TableSpec.of_tensor("ctr:top.weight", (4, 4), DType.FLOAT32)
SPECS = (SPEC, identity_spec(), DENSE)
SMALL: dict[str, Any] = {"log_segment_bytes": 1 << 20, "log_retention_bytes": 1 << 20, "log_hold_bytes": 1 << 20}


def address_of(served: Served) -> str:
    return f"127.0.0.1:{served.port}"


async def _write(ports: list[int], *, epoch: int, num_steps: int) -> None:
    """Write rows of several tables to all shards, each step other rows than the one before, and delete some."""
    clients = [await ParamServerClient.connect("127.0.0.1", port) for port in ports]
    for client in clients:
        await client.hello(hello_of_writer(*SPECS, epoch=epoch, takes_over=True))
    for step in range(1, num_steps + 1):
        for shard, client in enumerate(clients):
            deltas = []
            for spec in SPECS:
                rows = np.arange(spec.num_rows or 60, dtype="<i8")
                rows = rows[shards_of_rows(table_seed(spec.fqn), rows, len(ports)) == shard]
                updated, deleted = rows[rows % 7 != step % 7], rows[rows % 7 == step % 7]
                more: dict[str, Any] = {}
                values: Any = float(step)
                if spec.has_identities:
                    identities = updated + 1000 * (1 + updated % 2)
                    values = [
                        weights_of(int(row), int(identity), step)
                        for row, identity in zip(updated, identities, strict=True)
                    ]
                    more["identities"] = identities
                if spec is not DENSE:
                    more["deleted_row_ids"] = deleted
                deltas.append(delta_of(spec, updated, values, states=float(step), **more))
            await client.set_embeddings(request_of(*deltas, epoch=epoch, client_seq=step, step=step))
    for client in clients:
        await client.close()


async def _snapshot(port: int, name: str = "one") -> None:
    """Make a snapshot of a server of one shard."""
    async with await ParamServerClient.connect("127.0.0.1", port) as client:
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        made = await client.create_snapshot(idl.CreateSnapshotRequest(name=name, epoch=0, min_step=-1, wait_ms=0))
        manifest = SnapshotManifest(name=name, created_us=1, parts=(ShardPart.decode(made.part),)).encode().decode()
        await client.finish_snapshot(idl.FinishSnapshotRequest(name=name, manifest=manifest))


async def test_a_chain_of_followers_equals_the_source(tmp_path: Path) -> None:
    """Rows, states, identities, deletions and dense tensors are equal in all shards, over restarts of all."""
    ports = [hold_ports(), hold_ports(), hold_ports()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    for life in (1, 2):
        shards: list[Shard] = []
        async with contextlib.AsyncExitStack() as stack:
            last = following(tmp_path / "two", addresses[1], num_shards=2, port=ports[2])
            if life == 2:  # it serves what it has before its source is there
                two = await stack.enter_async_context(last)
                await two.serves()
            one = following(tmp_path / "one", addresses[0], num_shards=2, port=ports[1])
            one_follower = await stack.enter_async_context(one)
            source = serve_shards(tmp_path / "data", 2, port=ports[0], opened=shards, server_id="a-server")
            source_ports = await stack.enter_async_context(source)
            if life != 2:
                two = await stack.enter_async_context(last)
            await _write(source_ports, epoch=life, num_steps=7)
            await one_follower.equals(shards)
            await two.equals(shards)
            status = await two.status(1)
            assert status.failure is None and status.num_restarts == 0
            assert status.source == f"127.0.0.1:{one_follower.ports[1]}"
            assert status.source_seq == shards[1].log.last_seq


async def test_records_larger_than_a_fetch_and_many_segments(tmp_path: Path) -> None:
    """A record of several fetches comes whole, and each has its source's mark, over all lives of the source."""
    data = tmp_path / "data"
    for life in range(2):
        async with serving(data, client_seq=life * 5, log_segment_bytes=1 << 20) as served:
            await served.write(range(life * 400_000), float(life))
            for row in range(4):
                await served.write(range(row, row + 15_000), float(row))
    async with (
        serving(data, log_segment_bytes=1 << 20) as served,
        # With the least memory for what its disk lacks.
        following(
            tmp_path / "copy", address_of(served), max_frame_bytes=64 << 10, max_log_pending_bytes=64 << 10
        ) as follower,
    ):
        await follower.equals([served.shard])
        marks = {served.shard.log.nonce_of(seq) for seq in range(1, served.shard.log.last_seq + 1)}
        assert len(marks) >= 4


async def _told(take: Any) -> None:
    """Wait until a follower is told to start over."""
    with pytest.raises(GoneError, match="start over"):
        async with asyncio.timeout(WAIT_S):
            while True:
                await take()


@contextlib.asynccontextmanager
async def _reading(follower: Follower, from_seq: int = 1) -> AsyncIterator[ShardFollower]:
    link = await link_to(follower.ports[0])
    try:
        yield ShardFollower(link, from_seq=from_seq, wait_s=0.2)
    finally:
        await link.close()


async def _take(reader: ShardFollower, last_seq: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while reader.next_seq <= last_seq:
            await reader.fetch()


async def test_a_follower_that_was_away_for_too_long_begins_anew(tmp_path: Path) -> None:
    """Without the log that comes next it waits for a snapshot and begins with that, and who follows it starts over."""
    port, own_port = hold_ports(), hold_ports()
    async with serving(tmp_path / "data", port=port, **SMALL) as served:
        await served.write([7], 7.0)
        async with following(tmp_path / "copy", address_of(served), port=own_port) as follower:
            await follower.equals([served.shard])
            reader = await stack_reader(follower)
        for value in range(8):
            await served.write(range(20_000), float(value))
        await served.shard.applied()
        await asyncio.to_thread(served.shard.store.flush)
        served.shard.log.trim(served.shard.store.durable_seq + 1, max_bytes=1 << 20)
        assert served.shard.log.first_seq > 3
        async with following(tmp_path / "copy", address_of(served), port=own_port) as follower:
            await until(lambda: (tmp_path / "copy/shard-0000/log").is_dir() and follower.shards == [None])
            await _snapshot(served.port)
            await follower.equals([served.shard])
            assert (await follower.status()).num_restarts == 1
            await _told(reader.fetch)
            await served.write([1], 9.0)
            await follower.equals([served.shard])
            assert follower.shard().log.first_seq > 3
        # What it has begun with is enough to go on from.
        await served.write([2], 9.0)
        async with following(tmp_path / "copy", address_of(served), port=own_port) as follower:
            await follower.equals([served.shard])
            assert (await follower.status()).num_restarts == 0


async def stack_reader(follower: Follower) -> ShardFollower:
    """Return a reader that has taken all; its link ends with the test's loop."""
    reader = ShardFollower(await link_to(follower.ports[0]), from_seq=1, wait_s=0.2)
    await _take(reader, follower.shard().log.last_seq)
    return reader


@pytest.mark.parametrize("num_written", [0, 1, 5], ids=["its log ends before", "at the place", "beyond it"])
async def test_a_source_that_was_set_back_is_copied_anew(tmp_path: Path, num_written: int) -> None:
    """However far an older copy of the source has gone on: the follower equals it, and who follows that starts over."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports()
    async with serving(data, port=port) as served:
        for row in (1, 2):
            await served.write([row], 1.0)
    shutil.copytree(data, older)
    async with (
        following(tmp_path / "one", f"127.0.0.1:{port}") as one,
        following(tmp_path / "two", one.address) as two,
    ):
        async with serving(data, port=port, client_seq=2) as served:
            await served.write([3], 1.0)
            await two.equals([served.shard])
            readers = [await stack_reader(one), await stack_reader(two)]
        shutil.rmtree(data)
        older.rename(data)
        async with serving(data, port=port, client_seq=2) as served:
            for row in range(num_written):
                await served.write([row + 10], 2.0)
            for reader in readers:
                await _told(reader.fetch)
            await two.equals([served.shard])
            await one.equals([served.shard])
            assert [(await follower.status()).num_restarts for follower in (one, two)] == [1, 1]


async def test_a_copy_without_a_record_notices_a_source_that_was_set_back(tmp_path: Path) -> None:
    """What it has begun with has a mark, too: a source that has another record there is copied anew."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports()
    async with serving(data, port=port) as served:
        await served.write([1], 1.0)
    shutil.copytree(data, older)
    async with serving(data, port=port, client_seq=1) as served:
        await served.write([2], 2.0)
        await _snapshot(port)
        async with following(tmp_path / "copy", address_of(served)) as follower:
            await follower.equals([served.shard])
            assert list((tmp_path / "copy/shard-0000/log").glob("*.hrlog")) == []
    shutil.rmtree(data)
    older.rename(data)
    async with serving(data, port=port, client_seq=1) as served:
        for _ in range(3):
            await served.write([3], 3.0)
        async with following(tmp_path / "copy", address_of(served)) as follower:
            await follower.equals([served.shard])


async def test_the_log_behind_a_beginning_is_held(tmp_path: Path) -> None:
    """A follower that has fetched a snapshot has a lease on the records behind it before it asks for the first."""
    async with serving(tmp_path / "data") as served:
        await served.write([1], 1.0)
        await _snapshot(served.port)
        last_seq = served.shard.log.last_seq
        await served.write([2], 2.0)
        make_manifest(tmp_path / "copy", server_id="a-server", num_shards=1)
        config = follower_config(tmp_path / "copy", address_of(served), 0, [("127.0.0.1", 1)])
        copying = await Following.of_shard(config)
        assert copying is not None
        await copying.begin()
        await copying.close()
        assert [lease.seq for lease in served.shard.feed.followers.held()] == [last_seq + 1]


async def test_a_directory_or_source_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Each mistake ends the shard with one line that says what to do."""
    port = hold_ports()
    async with serve_shards(tmp_path / "own", 1, server_id="a-server") as _:
        pass
    async with serving(tmp_path / "data") as served:
        async with following(tmp_path / "copy", address_of(served)) as follower:
            await follower.equals([served.shard])
        cases = {
            "a shard with rows of its own": following(tmp_path / "own", address_of(served)),
            "is a copy of server": following(tmp_path / "new-1", address_of(served), server_id="other"),
            "of 2 shards, and .* of 1: choose another": following(tmp_path / "new-2", address_of(served), num_shards=2),
            "this is the server itself": following(tmp_path / "copy", f"127.0.0.1:{port}", port=port),
        }
        for why, refused in cases.items():
            async with refused as follower:
                with pytest.raises(ConfigError, match=why):
                    await asyncio.wait_for(follower.opening[0], WAIT_S)
    with pytest.raises(ConfigError, match="--follow HOST:PORT"):
        async with serve_shards(tmp_path / "copy", 1, server_id="a-server"):
            pass


async def test_what_a_follower_answers(tmp_path: Path) -> None:
    """Rows, digests and snapshots are its own; writers get the source's places, and all other calls an error."""
    async with (
        serving(tmp_path / "data") as served,
        following(tmp_path / "copy", address_of(served)) as follower,
    ):
        await served.write(range(10), 3.0)
        await follower.equals([served.shard])
        await _snapshot(follower.ports[0])
        async with await ParamServerClient.connect("127.0.0.1", follower.ports[0]) as client:
            hello = await client.hello(hello_of_nobody())
            assert [(each.host, each.port) for each in hello.shards] == [("127.0.0.1", follower.ports[0])]
            assert hello.knowledge_age_ms < 60_000 and [table.fqn for table in hello.tables] == [SPEC.fqn]
            found = await client.get_embeddings(
                idl.GetEmbeddingsRequest(
                    fqn=SPEC.fqn, row_ids=np.arange(10, dtype="<i8"), with_states=False, with_versions=True
                )
            )
            assert np.frombuffer(found.weights, "<f4").tolist() == [3.0] * 40
            fetched = await client.fetch_snapshot(
                idl.FetchSnapshotRequest(name="", path="", offset=0, max_bytes=1 << 20)
            )
            assert fetched.name == "one"
            writer = await client.hello(hello_of_nobody(idl.Role.WRITER))
            assert [(each.host, each.port) for each in writer.shards] == [("127.0.0.1", served.port)]
            with pytest.raises(UnavailableError, match="which takes the updates"):
                await client.hello(hello_of_writer(SPEC))
            with pytest.raises(RequestError, match=f"this server follows {address_of(served)}"):
                await client.set_embeddings(request_of(delta_of(SPEC, [1], 1.0), client_seq=2))
            # What nobody has, and what only this one lacks.
            with pytest.raises(SetBackError):
                await client.fetch_updates(_request_of(served.shard.log.last_seq + 2))


def _request_of(from_seq: int) -> Any:
    return idl.FetchUpdatesRequest(server_id="a-server", from_seq=from_seq, max_bytes=1, wait_ms=0)


async def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """With little room on its disk a follower answers with what it has, says so, and goes on when there is more."""
    async with serving(tmp_path / "data") as served:
        await served.write([1], 1.0)
        async with following(tmp_path / "copy", address_of(served)) as follower:
            await follower.equals([served.shard])
        before = served.shard.log.last_seq
        await served.write([1], 2.0)
        full = following(tmp_path / "copy", address_of(served), disk_reserve_bytes=1 << 50)
        async with full as follower:
            await follower.serves()

            async def says_so() -> bool:
                return "--disk-reserve-bytes" in ((await follower.status()).failure or "")

            await until(says_so)
            assert follower.shard().log.last_seq == before
            async with _reading(follower, before + 1) as reader:
                assert await reader.fetch() == []
            async with await ParamServerClient.connect("127.0.0.1", follower.ports[0]) as client:
                await client.hello(hello_of_nobody())
                with pytest.raises(UnavailableError, match="this follower is behind"):
                    await client.fetch_updates(_request_of(before + 2))
        async with following(tmp_path / "copy", address_of(served)) as follower:
            await follower.equals([served.shard])


async def test_an_older_copy_of_the_source_is_not_followed(tmp_path: Path) -> None:
    """A follower that knows a term takes nothing from a lower one, also after a restart, and goes on in the next.

    A follower of it hears of that term, too, though its connection stays.
    """
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports()
    async with serving(data, port=port, term=1) as served:
        await served.write([1], 1.0)
    shutil.copytree(data, older)
    copy = tmp_path / "copy"
    async with (
        serving(data, port=port, client_seq=1, term=2) as served,
        following(copy, address_of(served)) as follower,
    ):
        await served.write([2], 2.0)
        await follower.equals([served.shard])
        last_seq = served.shard.log.last_seq
    async with (
        following(copy, f"127.0.0.1:{port}") as follower,
        following(tmp_path / "second", follower.address) as second,
    ):
        await follower.serves()
        assert "has not been reached yet" in ((await follower.status()).failure or "")
        async with serving(older, port=port, client_seq=1, term=1) as served:
            for _ in range(3):
                await served.write([9], 9.0)
            link = await link_to(follower.ports[0])
            assert link.hello.term == 2
            async with _reading(follower, last_seq + 1) as reader:
                for _ in range(5):
                    assert await reader.fetch() == []
            await link.close()
        async with serving(data, port=port, client_seq=2, term=3) as served:
            await served.write([3], 3.0)
            await follower.equals([served.shard])
            assert (await follower.status()).num_restarts == 0
            assert follower.shard().term == 3
            await second.equals([served.shard])
            await until(lambda: second.shard().term == 3)


async def test_a_follower_that_has_moved_is_found(tmp_path: Path) -> None:
    """Who knows its shards in a term finds all of them at another address, from the one that it was given."""
    ports = [hold_ports(), hold_ports()]
    seeds = [("127.0.0.1", port) for port in ports]
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S)
    async with serve_shards(tmp_path / "data", 2, term=3, nodes=("a", "a"), server_id="a-server") as source:
        places = {"source": f"127.0.0.1:{source[0]}", "num_shards": 2}
        async with following(tmp_path / "copy", port=ports[0], **places) as follower:
            await follower.serves()
            links = await retry(lambda: link_all(dial, seeds))
            for link in links:
                await until(lambda link=link: _tells(link, 3))
        async with following(tmp_path / "copy", port=ports[1], **places) as follower:
            for link in links:
                await until(lambda link=link: _tells(link, 3))
            assert [link.port for link in links] == follower.ports
        for link in links:
            await link.close()


async def _tells(link: ShardLink, term: int) -> bool:
    with contextlib.suppress(UnavailableError):
        return bool((await link.refresh()).term == term)
    return False
