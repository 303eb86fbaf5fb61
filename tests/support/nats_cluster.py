"""Three NATS servers of their own for tests, with links that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from closing_servers import close_servers

from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_engine import NatsConnection, NatsEngine
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.nats_servers import NatsServer, NatsServers

needs_nats_server = pytest.mark.nats
"""Skip a test, visibly, where there is no nats-server; one process at a time runs such tests, see `conftest.py`."""

_APPEND_S = 60.0
# The links' thread may have to wait for a processor.
_LINKS_S = 60.0

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


class Links:
    """A TCP proxy before each server, for one client; runs in a thread of its own. Use it with `with`.

    Attributes:
        addresses: Where the client finds each server, in the servers' order.
    """

    def __init__(self, servers: Sequence[NatsServer]) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._servers = list(servers)
        self._cut: set[int] = set()
        self._silent: set[int] = set()
        self._deaf: set[int] = set()
        self._reply_bytes_per_s = 0  # without a bound
        self._writers: dict[asyncio.StreamWriter, int] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._changed = asyncio.Condition()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> Links:
        self._thread.start()
        assert self._started.wait(_LINKS_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_LINKS_S)
        self._loop.close()

    @property
    def url(self) -> str:
        """The log's address through the proxies."""
        return "nats://" + ",".join(f"{host}:{port}" for host, port in self.addresses)

    def cut(self, *numbers: int) -> None:
        """Reset the connections to these servers, by default all, and refuse new ones."""
        self._set(self._cut, numbers or range(len(self._servers)))

    def silence(self, *numbers: int) -> None:
        """Pass nothing on to or from these servers, by default all: a network that drops everything."""
        self._set(self._silent, numbers or range(len(self._servers)))

    def drop_replies(self, *numbers: int) -> None:
        """Drop what these servers, by default all, send from now on."""
        self._set(self._deaf, numbers or range(len(self._servers)))

    def slow_down(self, reply_bytes_per_s: int) -> None:
        """Pass what each connection gets from its server on no faster than that, from now on."""
        self._reply_bytes_per_s = reply_bytes_per_s

    def mend(self) -> None:
        """Pass everything on again; what was dropped is lost, so its connections are reset."""

        async def do() -> None:
            for number in self._deaf:
                self._reset(number)
            for kind in (self._cut, self._silent, self._deaf):
                kind.clear()
            async with self._changed:
                self._changed.notify_all()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(_LINKS_S)

    def _set(self, kind: set[int], numbers: Sequence[int] | range) -> None:
        async def do() -> None:
            kind.update(numbers)
            for number in self._cut:
                self._reset(number)

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(_LINKS_S)

    def _reset(self, number: int) -> None:
        for writer, of in list(self._writers.items()):
            if of == number:
                writer.transport.abort()

    async def _run(self) -> None:
        listeners = []
        for number in range(len(self._servers)):
            listener = await asyncio.start_server(self._handler_of(number), "127.0.0.1", 0)
            listeners.append(listener)
            self.addresses.append(listener.sockets[0].getsockname()[:2])
        self._started.set()
        await self._stop.wait()
        await close_servers(listeners)
        for writer in list(self._writers):
            writer.transport.abort()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one that was just accepted starts another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _handler_of(self, number: int) -> Any:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server = self._servers[number]
            ends, pumps = [writer], list[asyncio.Future[None]]()
            try:
                if number in self._cut:
                    return
                with contextlib.suppress(OSError):
                    there = await asyncio.open_connection(server.host, server.port)
                    ends.append(there[1])
                    self._writers |= dict.fromkeys(ends, number)
                    pumps += [
                        asyncio.ensure_future(self._pump(number, reader, there[1], is_reply=False)),
                        asyncio.ensure_future(self._pump(number, there[0], writer, is_reply=True)),
                    ]
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    self._writers.pop(end, None)
                    end.transport.abort()
                for pump in pumps:
                    pump.cancel()

        return handle

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                async with self._changed:
                    await self._changed.wait_for(lambda: number not in self._silent)
                if is_reply and number in self._deaf:
                    continue
                if is_reply and self._reply_bytes_per_s:
                    await asyncio.sleep(len(data) / self._reply_bytes_per_s)
                writer.write(data)
                await writer.drain()
