"""A TCP proxy that knows frames: it resets, delays, doubles and reorders them, and brings back old ones.

TCP does none of the last three within a connection; the proxy does, because a client seq must make up for all of it: a
middlebox that resends, a peer's bug, or a batch that was sent again over another connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tcp_proxy import End, Link, TcpProxy
from waiting import scaled_s

_FIRST_OWN_SEQID = 0x7000_0000
_METHOD = b"setEmbeddings"
# A frame waits so long for the next one, which is later where trainers are slow.
_HOLD_S = 0.2
_NUM_OLD = 32


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """How likely each frame meets with what. All zero: the proxy only passes on.

    Attributes:
        reset: The connection is reset before, amid or after a request or a reply.
        delay: It, and what comes behind it, is up to `delay_s` late.
        duplicate: A batch arrives twice.
        echo: A batch arrives twice, and both replies reach the client.
        reorder: A batch, or a reply, arrives after the next one.
        old: A batch from before, perhaps from another connection or epoch, arrives again.
        delay_s: Longest delay, seconds.
    """

    reset: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    echo: float = 0.0
    reorder: float = 0.0
    old: float = 0.0
    delay_s: float = 0.05


CALM = Trouble()


class _Target(NamedTuple):
    host: str
    port: int


class Route(NamedTuple):
    """From ports of one host to the same ports of another."""

    listen_host: str
    target_host: str
    ports: Sequence[int]


class FrameProxy(TcpProxy):
    """Listens at one end of each route and passes on to the other.

    Attributes:
        counts: How often each trouble was made, and how many batches were `swapped` with the next one.
        random: Draws what is due.
        old: Of each end, batches that were answered.
    """

    def __init__(self, routes: Sequence[Route], *, seed: int) -> None:
        ends = [(route, port) for route in routes for port in route.ports]
        super().__init__([End(route.listen_host, port, _Target(route.target_host, port)) for route, port in ends])
        self.counts: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.old: list[deque[bytes]] = [deque(maxlen=_NUM_OLD) for _ in ends]
        self._trouble = CALM

    def make(self, trouble: Trouble) -> None:
        """Make trouble from now on."""
        self._trouble = trouble

    @contextlib.contextmanager
    def blocked(self, *hosts: str) -> Iterator[None]:
        """Reset all connections to some hosts, and refuse new ones."""
        self.block(*(number for number, end in enumerate(self._ends) if end.target.host in hosts))
        try:
            yield
        finally:
            self.unblock()

    def forget_old(self) -> None:
        """Bring back no frame from before now: to a shard that has lost acked batches they would be new ones."""
        for old in self.old:
            old.clear()

    def is_due(self, what: str) -> bool:
        """Roll the dice for one kind of trouble, and count it."""
        is_due = self.random.random() < getattr(self._trouble, what)
        self.counts[what] += is_due
        return is_due

    @property
    def delay_s(self) -> float:
        """How long the next delay is, seconds."""
        return self.random.uniform(0, self._trouble.delay_s)


class _FrameLink(Link):
    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._old: deque[bytes] = self.proxy.old[self.number]
        self._own_seqid = _FIRST_OWN_SEQID
        self._unanswered: dict[int, bytes] = {}
        self._echoed: set[int] = set()  # requests that are answered twice: the second answer never comes first

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        frames = _Frames(reader)
        try:
            await self._carry(frames, writer, is_request=not is_reply)
        finally:
            frames.close()

    async def _carry(self, frames: _Frames, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        proxy, held = self.proxy, None
        while True:
            try:
                async with asyncio.timeout(scaled_s(_HOLD_S) if held is not None else None):
                    frame = await frames.next()
            except TimeoutError:
                assert held is not None
                await self._send(writer, [held])
                held = None
                continue
            is_batch = _METHOD in frame[:64]
            if not is_request and _seqid(frame) >= _FIRST_OWN_SEQID:
                continue  # the answer to a frame that the client has not sent
            if not is_request and (answered := self._unanswered.pop(_seqid(frame), None)) is not None:
                # Not before: over another connection it could come before itself, as nothing does over TCP.
                self._old.append(answered)
            if proxy.is_due("reset"):
                # Part of it may get through, or all of it.
                writer.write(frame[: self.proxy.random.choice((0, len(frame) // 2, len(frame)))])
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(writer.drain(), 1)
                return
            if proxy.is_due("delay"):
                await asyncio.sleep(proxy.delay_s)
            if is_batch and held is None and _seqid(frame) not in self._echoed and proxy.is_due("reorder"):
                held = frame
                continue
            out = [frame] if held is None else [frame, held]
            proxy.counts["swapped"] += is_request and held is not None
            held = None
            if is_request and is_batch:
                out = self._double(frame, out)
            await self._send(writer, out)

    def _double(self, frame: bytes, out: list[bytes]) -> list[bytes]:
        proxy = self.proxy
        if proxy.is_due("duplicate"):
            out = [*out, self._as_own(frame)]
        if proxy.is_due("echo"):
            out = [*out, frame]
            self._echoed.add(_seqid(frame))
        if self._old and proxy.is_due("old"):
            out = [self._as_own(self.proxy.random.choice(self._old)), *out]
        self._unanswered[_seqid(frame)] = frame
        return out

    def _as_own(self, frame: bytes) -> bytes:
        """Return a frame as a request of the proxy's: its reply is not for the client."""
        self._own_seqid += 1
        at = _seqid_at(frame)
        return frame[:at] + self._own_seqid.to_bytes(4, "big") + frame[at + 4 :]

    async def _send(self, writer: asyncio.StreamWriter, frames: list[bytes]) -> None:
        writer.write(b"".join(frames))
        await writer.drain()


class _Frames:
    """The frames of a stream; a wait that is given up loses none."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._task: asyncio.Task[bytes] | None = None

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def next(self) -> bytes:
        if self._task is None:
            self._task = asyncio.ensure_future(_read_frame(self._reader))
        frame = await asyncio.shield(self._task)
        self._task = None
        return frame


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "big"))


def _seqid_at(frame: bytes) -> int:
    # Behind the frame's length and the message's version: the length of its name, the name, the seqid.
    return 12 + int.from_bytes(frame[8:12], "big")


def _seqid(frame: bytes) -> int:
    at = _seqid_at(frame)
    return int.from_bytes(frame[at : at + 4], "big")


FrameProxy.link_type = _FrameLink
