"""A server that lies: it passes calls on to a real one, and changes the answers to one method.

with LyingServer(address) as server:
    server.lie("getEmbeddings", seed=1)
    ...  # a client talks to server.address
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

from mutated_structs import Mutator
from thrift_values import example

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, EXCEPTION, REPLY, decode_header, decode_struct, encode_message

__all__ = ["LyingServer"]

_DRIP_S = 0.01
_MIB = 2**20
_Lie = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


class LyingServer:
    """Lies to all clients on a port of the loopback, in a thread. Use it with `with`.

    Attributes:
        address: Where clients find it; redirects of the real server's hellos name it, too.
        lies: What the last lies were, newest last.
    """

    def __init__(self, upstream: tuple[str, int], *, elsewhere: tuple[str, int]) -> None:
        """Lie about the server at `upstream`; redirects lead `elsewhere`."""
        self.address = ""
        self.lies: list[str] = []
        self._upstream, self._elsewhere = upstream, elsewhere
        self._method, self._mutator, self._rate = "", Mutator(0), 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.address = f"127.0.0.1:{self._port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lie(self, method: str, *, seed: int, rate: float = 0.7) -> None:
        """Lie in this share of the answers to a method from now on, and to no other."""
        self.lies.clear()
        texts = (self.address, "lies.weight", "wide.weight")
        self._method, self._mutator, self._rate = method, Mutator(seed, texts=texts), rate

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                of_server, to_server = await asyncio.open_connection(*self._upstream)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_pass_on(reader, to_server))
                        group.create_task(self._answer(of_server, writer))
                except* (OSError, asyncio.IncompleteReadError):
                    pass
                finally:
                    to_server.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            message = await reader.readexactly(length)
            header = decode_header(memoryview(message))
            if header.name == "hello":
                message = self._as_our_own(message)
            if header.name == self._method and self._mutator.random.random() < self._rate:
                lies: list[_Lie] = [self._false_fields] * 8 + [self._false_error] * 3 + [self._false_bytes] * 3
                lies += [self._huge_length, self._endless, self._drip, self._silence, self._unasked, self._false_header]
                await self._mutator.random.choice(lies)(writer, message)
            else:
                writer.write(_framed(message))
            await writer.drain()

    def _as_our_own(self, message: bytes) -> bytes:
        result = _result(message)
        if result.success is not None:
            for place in result.success.shards:
                place.host, place.port = "127.0.0.1", self._port
        return _again(message, result)

    async def _false_fields(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        result = _result(message)
        if result.success is None:
            writer.write(_framed(message))
            return
        if self._method == "hello" and self._mutator.random.random() < 0.3:
            host, port = self._elsewhere
            there = idl.ShardAddress(shard=self._mutator.random.randrange(2), host=host, port=port, term=2**40)
            result.success.shards = [*result.success.shards[: there.shard], there]
            self.lies.append(f"hello: shard {there.shard} is elsewhere")
        else:
            self.lies.append(f"{self._method}: {self._mutator.mutate(result.success)}")
            for spec in _specs(result.success):  # so that clients believe what else they say
                spec.fingerprint = None
        writer.write(_framed(_again(message, result)))

    async def _false_error(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        error = example(idl.ServerError)
        error.code = self._mutator.random.randrange(-1, 18)
        host, port = self._elsewhere
        error.shards = [idl.ShardAddress(shard=0, host=host, port=port, term=2**40)]
        changed = self._mutator.mutate(error)
        self.lies.append(f"{self._method}: error {error.code}, {changed}")
        result = getattr(idl.ParameterServer, f"{self._method}_result")(error=error)
        writer.write(_framed(_again(message, result)))

    async def _false_bytes(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        self.lies.append(f"{self._method}: bytes")
        writer.write(_framed(self._mutator.mutate_bytes(message)))

    async def _huge_length(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        length = self._mutator.random.choice([0, 2**32 - 1, 2**31 - 1, 2**30, 2**26 + 1, 2**26])
        self.lies.append(f"{self._method}: a length of {length}")
        writer.write(struct.pack(">I", length) + message)

    async def _endless(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        """Send bytes as fast as they are taken, behind a length or as frames."""
        self.lies.append(f"{self._method}: bytes without end")
        chunk = bytes(_MIB) if self._mutator.random.random() < 0.5 else _framed(message) * 100
        if not any(chunk):
            writer.write(struct.pack(">I", 2**26))
        while True:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(_DRIP_S)  # the clients of this machine share it

    async def _drip(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        self.lies.append(f"{self._method}: a byte at a time")
        for byte in struct.pack(">I", 2**20) + message * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(_DRIP_S)

    async def _silence(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        self.lies.append(f"{self._method}: silence")

    async def _unasked(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        self.lies.append(f"{self._method}: twice")
        writer.write(_framed(message) * 2)

    async def _false_header(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        header = decode_header(memoryview(message))
        kind = self._mutator.random.choice([CALL, REPLY, EXCEPTION])
        name = self._mutator.random.choice(["status", "hello", header.name])
        seqid = header.seqid + self._mutator.random.choice([0, 0, 1, -1])
        self.lies.append(f"{self._method}: header {name} {kind} {seqid}")
        head = struct.pack(">HxBI", 0x8001, kind, len(name)) + name.encode() + struct.pack(">i", seqid)
        writer.write(_framed(head + message[header.body_offset :]))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_MIB):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("the client has left")


def _framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _specs(value: Any) -> Iterator[Any]:
    """Yield each `idl.TableSpec` of a hello's or status's reply."""
    for table in getattr(value, "tables", None) or ():
        yield getattr(table, "spec", table)


def _result(message: bytes) -> Any:
    """Return the result in a reply; a plain error has none."""
    frame = memoryview(message)
    header = decode_header(frame)
    cls = getattr(idl.ParameterServer, f"{header.name}_result")
    return cls() if header.kind != REPLY else decode_struct(cls, frame, header.body_offset)


def _again(message: bytes, result: Any) -> bytes:
    """Return a reply with another result."""
    header = decode_header(memoryview(message))
    if header.kind != REPLY:
        return message
    try:
        segments = encode_message(header.name, REPLY, header.seqid, result)
    except ProtocolError:  # a value that does not fit, or a text that is too long
        return message
    return b"".join(bytes(segment) for segment in segments)
