"""A TCP proxy before servers, whose connections can be reset and refused; what it does with bytes is its subclass'."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from waiting import WAIT_S

__all__ = ["End", "Link", "Target", "TcpProxy"]

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target(Protocol):
    """Where a server listens; may be known later than its proxy."""

    host: str
    port: int


class End(NamedTuple):
    """Where the proxy listens, with port 0 for any, and what it passes on to."""

    host: str
    port: int
    target: Target


class Link:
    """One connection from a client to the server behind an end."""

    def __init__(self, proxy: Any, number: int, client: Stream, server: Stream) -> None:
        self.proxy, self.number, self.client, self.server = proxy, number, client, server

    def reset(self) -> None:
        """Reset both of its halves."""
        for _, writer in (self.client, self.server):
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        """Pass one way's bytes on until its end."""
        raise NotImplementedError

    async def run(self) -> None:
        """Carry both ways until one ends."""
        ways = ((self.client, self.server, False), (self.server, self.client, True))
        pumps = [asyncio.ensure_future(self._pump(one[0], other[1], is_reply)) for one, other, is_reply in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.reset()
            for pump in pumps:
                pump.cancel()
            for result in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.carry(reader, writer, is_reply=is_reply)


class TcpProxy:
    """Listens at all ends, in a thread of its own. Use it with `with`. Thread: any.

    Attributes:
        addresses: Where clients find each end.
    """

    link_type: ClassVar[type[Link]]

    def __init__(self, ends: Sequence[End]) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._ends = list(ends)
        self._blocked: set[int] = set()
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        self._loop.close()

    def block(self, *numbers: int) -> None:
        """Reset the connections to these ends, by default all, and refuse new ones."""
        chosen = set(numbers or range(len(self._ends)))
        self._blocked |= chosen
        self.do(lambda: self._reset(chosen))

    def unblock(self) -> None:
        """Refuse nothing any more."""
        self._blocked.clear()

    def reset(self, *numbers: int) -> None:
        """Reset the connections to these ends, by default all."""
        self.do(lambda: self._reset(set(numbers or range(len(self._ends)))))

    def do(self, act: Callable[[], Any]) -> None:
        """Do something in the proxy's thread."""

        async def call() -> None:
            act()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(WAIT_S)

    def _reset(self, numbers: Iterable[int]) -> None:
        for link in [link for link in self._links if link.number in numbers]:
            link.reset()

    async def _run(self) -> None:
        listeners = []
        for number, end in enumerate(self._ends):
            listeners.append(await asyncio.start_server(self._handler_of(number), end.host, end.port))
            self.addresses.append(listeners[-1].sockets[0].getsockname()[:2])
        self._started.set()
        await self._stop.wait()
        for listener in listeners:
            for sock in listener.sockets:
                self._loop.remove_reader(sock)
        # `close` alone leaves a connection that was accepted in this turn of the loop to the garbage collector.
        await asyncio.sleep(0)
        for listener in listeners:
            listener.close()
        self._blocked.update(range(len(self._ends)))
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one that was just accepted starts another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _handler_of(self, number: int) -> Callable[..., Any]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            target = self._ends[number].target
            try:
                if number in self._blocked:
                    raise ConnectionRefusedError
                server = await asyncio.open_connection(target.host, target.port)
            except OSError:
                writer.transport.abort()
                return
            link = self.link_type(self, number, (reader, writer), server)
            self._links.add(link)
            try:
                if number not in self._blocked:  # since it was opened
                    await link.run()
            finally:
                link.reset()
                self._links.discard(link)

        return handle
