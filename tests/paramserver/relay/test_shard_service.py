"""A relay's answers: a replica cannot tell it from the server, and what it refuses it refuses in one clear line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hellos import hello_of_writer
from identity_writer import IdentityWriter, identity_spec, weights_of
from relays import relay_of, until
from replica_of import replica_of
from served_shard import SPEC, link_to, serving
from shard_servers import serve_shards

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import GoneError, ProtocolMismatchError, UnauthorizedError, UnavailableError
from headrace.schemas.idl import idl

FQN = identity_spec().fqn
WAIT_S = 60.0
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S, role=idl.Role.ADMIN)


@pytest.mark.parametrize("consistency", ["latest", "step"])
async def test_virtual_tables_and_identities_come_over_a_relay(tmp_path: Path, consistency: str) -> None:
    """A replica of a table without bounds, with identities, begins from the relay's snapshot and follows its log."""
    async with serve_shards(tmp_path / "data", 2) as ports:
        address = f"127.0.0.1:{ports[0]}"
        writer = await IdentityWriter.connect(ports)
        await writer.write({row: 100 + row for row in range(8)})
        await create_snapshot(address, dial=ADMIN, timeout_s=WAIT_S)
        await writer.write({1: 102, 2: 101, 3: 200}, deleted=[4])
        async with relay_of(address, tmp_path / "relay") as (relay_address, relay):
            await wait_for_snapshot(relay_address)
            settings: dict[str, Any] = {"consistency": consistency, "fetch_wait_s": 0.1}
            async with replica_of(relay_address, **settings) as replica:
                await writer.write({0: 300, 9: 100, 8: 500})
                await asyncio.to_thread(replica.wait_for, writer.step, WAIT_S)
                rows = replica.lookup_by_identity(FQN, [300, 100, 102, 104])
                step = writer.step
                known = [(0, 300, step), (9, 100, step), (1, 102, 2)]
                assert rows.tolist() == [*(weights_of(*each) for each in known), [0.0] * 4]
            assert {mirror.log.first_seq for mirror in relay.mirrors if mirror.log} != {1}  # behind the snapshot
        await writer.close()


async def wait_for_snapshot(address: str) -> None:
    link = await link_to(parse_address(address)[1])

    async def has_snapshot() -> bool:
        return (await link.status()).relay.snapshot is not None

    await until(has_snapshot)
    await link.close()


async def test_hello_names_the_relay_alone(tmp_path: Path) -> None:
    """A client learns the relay's own addresses, the server's identity, tables and owners, and how old they are."""
    async with (
        serve_shards(tmp_path / "data", 2) as ports,
        relay_of(f"127.0.0.1:{ports[0]}", tmp_path / "relay") as (address, relay),
    ):
        writer = await IdentityWriter.connect(ports)
        await writer.write({1: 2})
        await until(lambda: all(mirror.hello.tables for mirror in relay.mirrors))
        reader = await EmbeddingReader.connect(address)
        source = await EmbeddingReader.connect(f"127.0.0.1:{ports[0]}")
        for mine, theirs in zip(reader.links, source.links, strict=True):
            assert mine.port not in ports
            assert (mine.hello.server_id, mine.hello.shard) == (theirs.hello.server_id, theirs.hello.shard)
            assert [vars(owner) for owner in mine.hello.owners] == [vars(owner) for owner in theirs.hello.owners]
            assert mine.hello.highest_epoch == theirs.hello.highest_epoch
            assert 0 <= mine.hello.knowledge_age_ms < 30_000 and theirs.hello.knowledge_age_ms is None
        assert reader.tables == source.tables != {}
        await reader.close()
        await source.close()
        await writer.close()


async def test_writes_and_reads_of_rows_are_refused(tmp_path: Path) -> None:
    """Trainers, administrators and readers of rows get one line that names the server."""
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(f"127.0.0.1:{served.port}", tmp_path / "relay") as (at, _),
    ):
        async with await ParamServerClient.connect(*parse_address(at)) as client:
            with pytest.raises(UnauthorizedError, match=f"a relay of 127.0.0.1:{served.port}.*talk to the server"):
                await client.hello(hello_of_writer(SPEC))
            with pytest.raises(ProtocolMismatchError):
                await client.hello(idl.HelloRequest(**{**vars(hello_of_writer(SPEC)), "protocol_version": 9}))
            assert (await client.status()).relay is not None
        link = await link_to(parse_address(at)[1])
        digest = idl.DigestRowsRequest(
            fqn=SPEC.fqn, first_row=0, end_row=1, column_offset=0, width=4, max_buckets=1, with_presence=False
        )
        get = idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=b"", with_states=False, with_versions=False)
        for work in (link.get(get), link.digest_rows(digest)):
            with pytest.raises(UnauthorizedError, match=f"without rows: .* to the server at 127.0.0.1:{served.port}"):
                await work
        with pytest.raises(GoneError, match="no snapshot yet: make one with headrace snapshot create at the server"):
            await link.fetch_snapshot(idl.FetchSnapshotRequest(name="", path="", offset=0, max_bytes=1))
        await link.close()


async def test_a_replica_says_that_its_relay_has_no_snapshot(tmp_path: Path) -> None:
    """A replica of a relay reads no rows; without a snapshot it says what to do, and may try again."""
    async with (
        serving(tmp_path / "shard") as served,
        relay_of(f"127.0.0.1:{served.port}", tmp_path / "relay") as (at, _),
    ):
        with pytest.raises(UnavailableError, match="this relay has no snapshot yet"):
            async with replica_of(at, open_timeout_s=5):
                pass
