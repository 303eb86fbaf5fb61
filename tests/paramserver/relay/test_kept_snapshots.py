"""A relay's snapshots: from the server or an object store, once for all replicas, which never go to a shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forwarder import Forwarder
from relays import relay_of, until
from replica_of import replica_of
from served_shard import SPEC, Served, link_to, serving

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl

WAIT_S = 60.0
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=WAIT_S, role=idl.Role.ADMIN)
# The shard tells this address, at which a forwarder counts what it sends; the relay's own is another.
COUNTED_HOST = "127.0.0.2"
NUM_ROWS, NUM_REPLICAS = 100_000, 6


def url_of(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'bucket'}"


@asynccontextmanager
async def counted_shard(data: Path, **settings: Any) -> AsyncIterator[tuple[Served, Forwarder, str]]:
    """Serve a shard with rows behind a forwarder; yield both, and the address at which the forwarder listens."""
    async with serving(data, advertise_host=COUNTED_HOST, **settings) as served:
        forwarder = Forwarder(("127.0.0.1", served.port))
        async with forwarder.listening(COUNTED_HOST):
            await served.write(range(NUM_ROWS), 1.0)
            yield served, forwarder, f"{COUNTED_HOST}:{served.port}"


async def status_where(address: str, is_so: Callable[[Any], bool]) -> Any:
    """Wait until a relay's status is as wanted, and return it."""
    link = await link_to(parse_address(address)[1])

    async def find() -> Any:
        status = (await link.status()).relay
        return status if is_so(status) else None

    status = await until(find)
    await link.close()
    return status


@pytest.mark.parametrize("relay_from", ["server", "object store", "object store of the server"])
@pytest.mark.parametrize("replicas_from", ["relay", "object store"])
async def test_replicas_that_start_at_once_take_nothing_from_a_shard(
    tmp_path: Path, relay_from: str, replicas_from: str
) -> None:
    """Their rows come from the relay or the object store: the shard sends the same few bytes as without them."""
    url = url_of(tmp_path)
    # Each replica that opens keeps a thread; shard and relay need some, too.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * NUM_REPLICAS))
    settings = {"object_store": url} if relay_from == "object store of the server" else {}
    async with counted_shard(tmp_path / "data", **settings) as (served, forwarder, address), AsyncExitStack() as stack:
        manifest = await create_snapshot(f"127.0.0.1:{served.port}", dial=ADMIN, timeout_s=WAIT_S)
        assert manifest.size_bytes > 1 << 20
        if not settings:
            folder = tmp_path / "data" / "snapshots" / manifest.name
            await asyncio.to_thread(SnapshotStore.of_url(url).upload, folder)
        # The relay looks for newer snapshots once: each look takes some bytes from the shard, and is none of replicas'.
        of_relay: dict[str, Any] = {"snapshot_interval_s": 600}
        of_relay |= {"object_store": url} if relay_from == "object store" else {}
        relay_address, relay = await stack.enter_async_context(relay_of(address, tmp_path / "relay", **of_relay))
        await status_where(relay_address, lambda status: status.snapshot == manifest.name)
        # The relay itself takes the snapshot from a server only if the server has it.
        assert (forwarder.received_bytes < 1 << 17) == (relay_from != "server")
        before_bytes = forwarder.received_bytes
        of_replicas = {"object_store": url} if replicas_from == "object store" else {}
        replicas = [replica_of(relay_address, fetch_wait_s=0.2, **of_replicas) for _ in range(NUM_REPLICAS)]
        started = await asyncio.gather(*(stack.enter_async_context(replica) for replica in replicas))
        assert forwarder.received_bytes - before_bytes < 1 << 16
        await served.write([1, 2], 3.0)
        seq = served.shard.log.last_seq
        wanted = np.repeat([[1.0], [3.0], [3.0], [1.0]], SPEC.dim, axis=1)
        for replica in started:
            await until(lambda replica=replica: replica.freshness()[0].visible_seq >= seq)
            rows = await asyncio.to_thread(replica.lookup, SPEC.fqn, [0, 1, 2, NUM_ROWS - 1])
            assert (rows.numpy() == wanted).all()
        assert forwarder.received_bytes - before_bytes < 1 << 16
        assert relay.mirrors[0].failure is None


async def test_the_prefix_of_another_server_is_refused(tmp_path: Path) -> None:
    """A relay whose object store has the snapshots of another server ends with one line that names both."""
    url = url_of(tmp_path)
    async with serving(tmp_path / "other", server_id="another", object_store=url) as other:
        await other.write([1], 1.0)
        await create_snapshot(f"127.0.0.1:{other.port}", dial=ADMIN, timeout_s=WAIT_S)
    async with serving(tmp_path / "data") as served:
        with pytest.raises(
            ConfigError, match=r"has the snapshots of server another, .* relay of server a-server: name"
        ):
            async with relay_of(f"127.0.0.1:{served.port}", tmp_path / "relay", object_store=url):
                pass


async def test_an_object_store_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """The relay mirrors all the same, says what is wrong, and offers a snapshot once the object store is back."""
    url, bucket, hidden = url_of(tmp_path), tmp_path / "bucket", tmp_path / "hidden"
    async with serving(tmp_path / "data", object_store=url) as served:
        await served.write([1], 1.0)
        address = f"127.0.0.1:{served.port}"
        async with relay_of(address, tmp_path / "relay") as (relay_address, relay):
            bucket.rename(hidden)
            bucket.touch()  # the store is no directory any more
            await status_where(relay_address, lambda status: "no newer snapshot could be fetched" in status.failure)
            await served.write([2], 2.0)
            await until(lambda: relay.mirrors[0].log is not None and relay.mirrors[0].log.last_seq == 3)
            bucket.unlink()
            hidden.rename(bucket)
            manifest = await create_snapshot(address, dial=ADMIN, timeout_s=WAIT_S)
            # It offers the snapshot before it has tidied up, and until then says why it had none.
            await status_where(relay_address, lambda status: (status.snapshot, status.failure) == (manifest.name, None))
