"""Followers in this process, and what must be equal in a server and a follower of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from shard_servers import make_manifest
from waiting import until

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.read_service import ReadService
from headrace.paramserver.shard.service import open_shard

__all__ = ["Follower", "assert_same", "follower_config", "following"]


class Follower:
    """The shards of a follower.

    Attributes:
        ports: Of its shards.
        shards: What serves each; None while a shard begins.
        opening: A task a shard, which ends with the error if the shard does.
    """

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.shards: list[FollowingShard | None] = [None] * len(ports)
        self.opening: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def shard(self, number: int = 0) -> FollowingShard:
        """Return what serves a shard now."""
        found = self.shards[number]
        assert found is not None
        return found

    async def status(self, number: int = 0) -> Any:
        """Return the `idl.FollowingStatus` of a shard."""
        return (await self.shard(number).sampler.status()).following

    async def serves(self) -> None:
        """Wait until all shards answer."""
        await self._until(lambda: all(self.shards))

    async def equals(self, sources: Sequence[ReadService]) -> None:
        """Wait until it has all records of the source, then assert that logs and rows are the same."""
        for number, source in enumerate(sources):
            last_seq = source.log.last_seq
            mark = source.log.nonce_of(last_seq)
            await self._until(
                lambda number=number, last_seq=last_seq, mark=mark: (
                    (shard := self.shards[number]) is not None
                    and shard.log.last_seq >= last_seq
                    and shard.log.nonce_of(last_seq) == mark
                )
            )
            await assert_same(source, self.shard(number))

    async def _until(self, find: Any) -> None:
        def found() -> bool:
            for task in self.opening:
                if task.done():
                    task.result()
            return bool(find())

        await until(found)


def follower_config(
    directory: Path, source: str, shard: int, addresses: Sequence[tuple[str, int]], server_id: str = "a-server"
) -> ShardConfig:
    """Make a shard's directory, and return the settings with which it follows a server's."""
    path = directory / f"shard-{shard:04d}"
    (path / "log").mkdir(parents=True, exist_ok=True)
    return ShardConfig(
        directory=path,
        shard=shard,
        server_id=server_id,
        addresses=tuple(addresses),
        block_cache_bytes=32 << 20,
        memtable_bytes=6 << 20,
        follow=source,
    )


@contextlib.asynccontextmanager
async def following(
    directory: Path,
    source: str,
    *,
    num_shards: int = 1,
    port: int = 0,
    server_id: str = "a-server",
    access: AccessPolicy | None = None,
    **changes: Any,
) -> AsyncIterator[Follower]:
    """Follow a server's shards with those of a directory, and serve them as a shard's process does.

    `access` is what clients must show.
    """
    async with contextlib.AsyncExitStack() as stack:
        wanted = [port] + [0] * (num_shards - 1)
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", at))) for at in wanted]
        ports = [sock.getsockname()[1] for sock in sockets]
        make_manifest(directory, server_id=server_id, num_shards=num_shards)
        follower = Follower(ports)
        for shard, sock in enumerate(sockets):
            config = follower_config(directory, source, shard, [("127.0.0.1", port) for port in ports], server_id)
            opening = asyncio.create_task(_open(follower, dataclasses.replace(config, **changes), sock, access))
            follower.opening.append(opening)
        try:
            yield follower
        finally:
            for task in follower.opening:
                task.cancel()
            await asyncio.gather(*follower.opening, return_exceptions=True)


async def _open(follower: Follower, config: ShardConfig, sock: socket.socket, access: AccessPolicy | None) -> None:
    @contextlib.asynccontextmanager
    async def stand_by(shard: Any) -> AsyncIterator[None]:
        server = ThriftServer(shard, limits=ServerLimits(max_frame_bytes=config.max_frame_bytes), access=access)
        await server.start(sock.dup())
        try:
            async with shard.served_by(server):
                follower.shards[config.shard] = shard
                yield
        finally:
            follower.shards[config.shard] = None
            await server.close(drain_s=0)

    async with open_shard(config, stand_by=stand_by):
        raise AssertionError("a follower takes no updates")


def _facts(log: UpdateLog, from_seq: int) -> list[tuple[Any, ...]]:
    return [(log.nonce_of(r.seq), r.seq, r.epoch, r.header, bytes(r.body)) for r in log.read(from_seq)]


async def assert_same(source: ReadService, copy: ReadService) -> None:
    """Assert that a shard's copy has its records with their marks, and all that is in its store, bit for bit."""
    from_seq = max(source.log.first_seq, copy.log.first_seq)
    assert _facts(copy.log, from_seq) == _facts(source.log, from_seq)
    await source.applied()

    async def is_applied() -> bool:  # what is durable is given to the applier a turn of the loop later
        await copy.applied()
        return copy.store.applied_seq >= source.store.applied_seq

    await until(is_applied)
    copied, own = dict(copy.store.scan(b"")), dict(source.store.scan(b""))
    assert {key for key in {*copied, *own} if copied.get(key) != own.get(key)} == set()
