"""Three NATS servers of their own for tests, with links that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats_servers import NatsServers
from tcp_proxy import End, Link, Target, TcpProxy
from waiting import WAIT_S

from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_engine import NatsConnection, NatsEngine
from headrace.schemas.errors import UnavailableError

needs_nats_server = pytest.mark.nats
"""Skip a test, visibly, where there is no nats-server; one process at a time runs such tests, see `conftest.py`."""

_APPEND_S = 60.0

SMALL = ("sync_interval: always", "max_file: 2GB", "max_mem: 16MB")
"""Settings of `jetstream` for tests."""


@contextmanager
def nats_cluster(folder: Path, **settings: Any) -> Iterator[NatsServers]:
    """Run servers with small stores; see `NatsServers`."""
    folder.mkdir(parents=True, exist_ok=True)
    with NatsServers(folder, **{"jetstream": lambda _: SMALL, **settings}) as servers:
        yield servers


def access_of(cluster: NatsServers, **settings: Any) -> NatsAccess:
    """Return how to reach a cluster without credentials."""
    return NatsAccess(address=NatsLogAddress.parse(cluster.url), **settings)


async def append_surely(engine: NatsEngine, message: bytes, expected_last: int) -> None:
    """Publish over new connections until the message is acked at its place, or read back there.

    A refusal counts for nothing: a leader that was cut off counts what it has taken alone.
    """
    async with asyncio.timeout(_APPEND_S):
        while True:
            connection: NatsConnection | None = None
            try:
                connection = await engine.connect()
                reply = await connection.publish_batch([message], expected_last=expected_last)
                if reply == PublishReply(PublishOutcome.ACKED, expected_last + 1):
                    return
                found = await connection.read(expected_last + 1, max_bytes=1)
                if found and found[0].payload == message:
                    return
            except UnavailableError:
                pass
            finally:
                if connection is not None:
                    await connection.close()


async def remove_streams(url: str) -> None:
    """Remove every stream."""
    client = await nats.connect(url.removeprefix("nats://").split(","))
    try:
        streams = client.jetstream()
        for info in await streams.streams_info():
            await streams.delete_stream(info.config.name)
    finally:
        await client.close()


class _NatsLink(Link):
    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        links: Links = self.proxy
        while data := await reader.read(1 << 18):
            async with links.changed:
                await links.changed.wait_for(lambda: self.number not in links.silent)
            if is_reply and self.number in links.deaf:
                continue
            if is_reply and links.reply_bytes_per_s:
                await asyncio.sleep(len(data) / links.reply_bytes_per_s)
            writer.write(data)
            await writer.drain()


class Links(TcpProxy):
    """A TCP proxy before each server, for one client. Use it with `with`.

    Attributes:
        addresses: Where the client finds each server, in the servers' order.
    """

    link_type = _NatsLink

    def __init__(self, servers: Sequence[Target]) -> None:
        super().__init__([End("127.0.0.1", 0, server) for server in servers])
        self.silent: set[int] = set()
        self.deaf: set[int] = set()
        self.reply_bytes_per_s = 0
        self.changed = asyncio.Condition()

    @property
    def url(self) -> str:
        """The log's address through the proxies."""
        return "nats://" + ",".join(f"{host}:{port}" for host, port in self.addresses)

    cut = TcpProxy.block

    def silence(self, *numbers: int) -> None:
        """Pass nothing on to or from these servers, by default all: a network that drops everything."""
        self.do(lambda: self.silent.update(numbers or range(len(self.addresses))))

    def drop_replies(self, *numbers: int) -> None:
        """Drop what these servers, by default all, send from now on."""
        self.do(lambda: self.deaf.update(numbers or range(len(self.addresses))))

    def slow_down(self, reply_bytes_per_s: int) -> None:
        """Pass what each connection gets from its server on no faster than that, from now on."""
        self.reply_bytes_per_s = reply_bytes_per_s

    def mend(self) -> None:
        """Pass everything on again; what was dropped is lost, so its connections are reset."""

        async def do() -> None:
            self._reset(self.deaf)
            for kind in (self._blocked, self.silent, self.deaf):
                kind.clear()
            async with self.changed:
                self.changed.notify_all()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(WAIT_S)
