"""A shard's place in its server: terms in replies, places told and heard, and when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hellos import hello_of_nobody, hello_of_writer
from object_server import Fault, ObjectServer, Request, object_server
from shard_servers import serve_shards
from waiting import WAIT_S, until

from headrace.paramserver.archive import archiver
from headrace.paramserver.log.claims import LateClaimError
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard import membership
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import ConfigError, LogFencedError, UnauthorizedError
from headrace.schemas.idl import idl


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_TELL_S", "_LATE_CLAIM_S"):
        monkeypatch.setattr(membership, name, 0.02)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(membership, "_STORE_DEADLINE_S", 0.2)
    with object_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


@contextlib.asynccontextmanager
async def _client(port: int) -> AsyncIterator[ParamServerClient]:
    async with await ParamServerClient.connect("127.0.0.1", port, timeout_s=WAIT_S) as client:
        yield client


async def _hello(port: int, **fields: Any) -> Any:
    async with _client(port) as client:
        return await client.hello(hello_of_nobody(**fields), timeout_s=WAIT_S)


async def _hellos(port: int) -> AsyncIterator[Any]:
    """Ask a shard again and again where shard 1, or the only one, is; until the test's deadline."""
    async with asyncio.timeout(WAIT_S), _client(port) as client:
        while True:
            yield (await client.hello(hello_of_nobody())).shards[-1]
            await asyncio.sleep(0.01)


async def test_one_machine_says_what_it_always_said(tmp_path: Path) -> None:
    """Without an object store and a cluster there are no terms, no file of claims, and no tasks."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 2, opened=opened) as ports:
        reply = await _hello(ports[1])
        assert reply.term is None
        assert [(place.shard, place.port, place.term) for place in reply.shards] == [
            (0, ports[0], None),
            (1, ports[1], None),
        ]
        assert not [task for shard in opened for task in shard._membership._tasks]
    assert not await asyncio.to_thread(lambda: list(tmp_path.rglob("claim.json")))


async def test_a_second_copy_stops_the_first(tmp_path: Path) -> None:
    """A copy of the directory that is started elsewhere has the higher term; the first finds its claim and stops."""
    url, opened = f"file://{tmp_path}/bucket", list[Shard]()
    async with serve_shards(tmp_path / "data", 1, object_store=url, opened=opened, server_id="s"):
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        async with serve_shards(tmp_path / "copy", 1, object_store=url, opened=opened, server_id="s"):
            async with asyncio.timeout(WAIT_S):
                error = await opened[0].wait_failed()
            assert isinstance(error, LogFencedError) and "taken over: term 2" in str(error)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await opened[1].wait_failed()
    with pytest.raises(LogFencedError, match="another copy of shard 0 is the right one"):
        async with serve_shards(tmp_path / "data", 1, object_store=url, server_id="s"):
            pass


@pytest.mark.parametrize("status", [400, 403, 404])
async def test_a_store_that_refuses_us_stops_no_shard(tmp_path: Path, objects: ObjectServer, status: int) -> None:
    """Credentials that have expired, or a bucket that is gone, end no running shard and no restart; a new one waits."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path / "data", 1, object_store=objects.url, opened=opened):
        looks: list[Request] = []

        def refuse(request: Request) -> Fault:
            if request.query.get("prefix", "").startswith("prefix/claims/"):
                looks.append(request)
            return Fault(status=status)

        objects.fault = refuse
        await until(lambda: len(looks) >= 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await opened[0].wait_failed()
    async with serve_shards(tmp_path / "data", 1, object_store=objects.url) as (port,):
        assert (await _hello(port)).term == 1
    with pytest.raises(ConfigError, match=r"the store refuses us|there is no such bucket"):
        async with serve_shards(tmp_path / "new", 1, object_store=objects.url):
            pass


async def test_a_claim_whose_reply_is_lost_is_no_other_copy(tmp_path: Path, objects: ObjectServer) -> None:
    """The store goes away right after it has taken a claim: the shard starts again, and does not step down for good."""
    async with serve_shards(tmp_path / "data", 1, object_store=objects.url):
        pass
    is_away = False

    def go_away(request: Request) -> Fault | None:
        nonlocal is_away
        if is_away:
            return Fault(status=503)
        is_away = request.method == "PUT" and "/claims/" in request.key
        return Fault(loses_reply=True) if is_away else None

    objects.fault, opened = go_away, list[Shard]()
    async with serve_shards(tmp_path / "data", 1, object_store=objects.url, opened=opened, archive_segment_s=0.01) as (
        port,
    ):
        assert (await _hello(port)).term == 1
        objects.fault = lambda _: None
        async with _client(port) as client:
            await client.hello(hello_of_nobody(role=idl.Role.WRITER, run="run", client="c", epoch=1))
        of_shard = opened[0]._archiver
        assert of_shard is not None
        await until(lambda: "was put while the object store seemed away" in (of_shard.state().error or ""))
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await opened[0].wait_failed(), LateClaimError)
    async with serve_shards(tmp_path / "data", 1, object_store=objects.url) as (port,):
        assert (await _hello(port)).term == 3


async def test_copies_that_start_while_the_store_is_away_do_not_both_stay(
    tmp_path: Path, objects: ObjectServer
) -> None:
    """Both go on in the term that their directory has held; once the store is back, the next start's claim decides."""
    settings: dict[str, Any] = {"object_store": objects.url, "server_id": "s"}
    async with serve_shards(tmp_path / "data", 1, **settings):
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
    objects.fault, opened = lambda _: Fault(status=503), list[Shard]()
    async with (
        serve_shards(tmp_path / "data", 1, opened=opened, **settings) as (one,),
        serve_shards(tmp_path / "copy", 1, opened=opened, **settings) as (other,),
    ):
        assert [(await _hello(port)).term for port in (one, other)] == [1, 1]
        objects.fault = lambda _: None
        async with asyncio.timeout(WAIT_S):
            errors = [await shard.wait_failed() for shard in opened]
        assert [type(error) for error in errors] == [LateClaimError] * 2
    async with serve_shards(tmp_path / "copy", 1, **settings) as (port,):
        assert (await _hello(port)).term == 2
    with pytest.raises(LogFencedError, match="another copy of shard 0 is the right one"):
        async with serve_shards(tmp_path / "data", 1, **settings):
            pass


async def _write(port: int, num_records: int, *, first: int = 1) -> None:
    """Write records that hold no rows: a client's hello in ever higher epochs."""
    async with _client(port) as client:
        for epoch in range(first, first + num_records):
            await client.hello(hello_of_writer(epoch=epoch), timeout_s=WAIT_S)


async def _wait_archived(shard: Shard) -> None:
    of_shard = shard._archiver
    assert of_shard is not None
    await until(lambda: of_shard.state().archived_seq >= shard.log.last_seq)


async def test_a_directory_claims_nothing_before_it_was_compared_with_the_archive(
    tmp_path: Path, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older directory of the same term that cannot see the archive must not void what lies there."""
    monkeypatch.setattr(archiver, "_DEADLINE_S", 0.1)
    settings: dict[str, Any] = {"object_store": objects.url, "server_id": "s", "archive_segment_s": 0.01}
    opened: list[Shard] = []
    async with serve_shards(tmp_path / "data", 1, opened=opened, **settings) as (port,):
        await _write(port, 3)
        shutil.copytree(tmp_path / "data", tmp_path / "older")
        await _write(port, 5, first=4)
        await _wait_archived(opened[0])
    objects.fault = lambda request: Fault(status=503) if "/archive/" in request.query.get("prefix", "") else None
    monkeypatch.setattr(membership, "_LATE_CLAIM_S", WAIT_S)
    async with serve_shards(tmp_path / "older", 1, opened=opened, **settings) as (port,):
        assert (await _hello(port)).term == 1
        objects.fault = lambda _: None
        async with asyncio.timeout(WAIT_S):
            error = await opened[1].wait_failed()
        assert isinstance(error, LogFencedError) and "is an older copy" in str(error)
    async with serve_shards(tmp_path / "data", 1, **settings) as (port,):
        assert (await _hello(port)).term == 2


async def test_only_an_admin_tells_places(tmp_path: Path) -> None:
    """A reader or a writer that tells where shards are is refused; what an admin tells is in the next hello."""
    async with serve_shards(tmp_path, 2) as ports:
        told = [idl.ShardAddress(shard=1, host="elsewhere", port=9, term=3)]
        for role in (idl.Role.READER, idl.Role.WRITER):
            with pytest.raises(UnauthorizedError, match="ADMIN"):
                await _hello(ports[0], role=role, shards=told)
        await _hello(ports[0], role=idl.Role.ADMIN, shards=told)
        place = (await _hello(ports[0])).shards[1]
        assert (place.host, place.port, place.term) == ("elsewhere", 9, 3)


async def test_nodes_tell_each_other(tmp_path: Path) -> None:
    """A node that starts at a new place is known to all others soon, and nothing it says of their own places counts."""
    async with serve_shards(tmp_path / "a", 2, nodes=("a", "a"), server_id="s") as ports:
        first, second = ports
        moved = (("127.0.0.1", first), ("127.0.0.1", 7))
        async with serve_shards(
            tmp_path / "b", 1, nodes=("a", "b"), server_id="s", addresses=moved, shard=1, term=4
        ) as (new,):
            assert (await _hello(new)).term == 4
            place = None
            async for place in _hellos(first):
                if place.term == 4:
                    break
            assert place is not None and (place.port, place.node) == (7, "b")
            assert (await _hello(second)).shards[1].port == second


async def test_a_copy_that_hears_of_a_newer_one_stops(tmp_path: Path) -> None:
    """Without an object store too: the older of two living copies asks where the newer one is said to be, and stops."""
    opened: list[Shard] = []
    async with (
        serve_shards(tmp_path / "new", 1, server_id="s", term=5) as (newer,),
        serve_shards(tmp_path / "old", 1, nodes=("a",), server_id="s", opened=opened) as (older,),
    ):
        nobody = [idl.ShardAddress(shard=0, host="127.0.0.1", port=1, term=9)]
        await _hello(older, role=idl.Role.ADMIN, shards=nobody)
        async for _ in _hellos(older):
            if opened[0]._membership.places.rival is None:  # nobody confirmed it
                break
        told = [idl.ShardAddress(shard=0, host="127.0.0.1", port=newer, term=5)]
        await _hello(older, role=idl.Role.ADMIN, shards=told)
        async with asyncio.timeout(WAIT_S):
            error = await opened[0].wait_failed()
        assert isinstance(error, LogFencedError) and f"at 127.0.0.1:{newer} in term 5" in str(error)
