"""The contenders of `headrace bench wire`: a server and a client of each, moving the same bytes.

Every server does as little as it can: a write is counted, a read is answered with rows that lie ready. Every client has
one connection, on which it keeps as many calls in flight as it is told; thriftpy2's can have only one.

A contender is a module-level pair `serve_X`, `XClient`; `SERVERS` and `CLIENTS` list them by name.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from thriftpy2.contrib.aio.protocol.binary import TAsyncBinaryProtocolFactory
from thriftpy2.contrib.aio.rpc import make_client, make_server
from thriftpy2.contrib.aio.transport.framed import TAsyncFramedTransportFactory

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.rpc_server import Call, Peer, ThriftServer
from headrace.schemas.idl import PROTOCOL_VERSION, idl
from headrace.schemas.messages import CALL, encode_message, size_of_segments

__all__ = ["CLIENTS", "LONG_WRITE", "SERVERS", "WRITE_BYTES", "Client", "WriteShape", "hello_request"]

_HOST = "127.0.0.1"
_TARGET_BYTES = 4 * 2**20
_DIM, _READ_ROWS = 128, 32
_ACK = b"12345678"


@dataclass(frozen=True, slots=True)
class WriteShape:
    """What a write carries, besides row ids.

    Attributes:
        num_rows: Rows.
        dim: Columns, float32.
    """

    num_rows: int
    dim: int

    @property
    def message_bytes(self) -> int:
        """Bytes of the message, the same for every contender."""
        args = idl.ParameterServer.setEmbeddings_args(request=_write_request(self))
        return size_of_segments(encode_message("setEmbeddings", CALL, 1, args))


LONG_WRITE = WriteShape(_TARGET_BYTES // (8 + 4 * _DIM), _DIM)
"""A write of 4 MiB."""


def _write_request(shape: WriteShape) -> Any:
    """Return a setEmbeddings request: row ids and float32 weights of one table."""
    delta = idl.TableDelta(
        fqn="bench.weight",
        fingerprint=1,
        column_offset=0,
        width=shape.dim,
        row_ids=np.arange(shape.num_rows, dtype="<i8").tobytes(),
        weights=np.random.default_rng(1).standard_normal((shape.num_rows, shape.dim), np.float32).tobytes(),
        states=[],
    )
    return idl.SetEmbeddingsRequest(
        run="bench",
        client="rank0",
        epoch=1,
        client_seq=1,
        step=1,
        time_us=0,
        ends_step=True,
        is_exact_cut=True,
        deltas=[delta],
    )


def _read_request() -> Any:
    row_ids = np.arange(_READ_ROWS, dtype="<i8").tobytes()
    return idl.GetEmbeddingsRequest(fqn="bench.weight", row_ids=row_ids, with_states=False, with_versions=False)


def _read_reply() -> Any:
    weights = np.zeros((_READ_ROWS, _DIM), np.float32).tobytes()
    return idl.GetEmbeddingsReply(presence=b"\1" * _READ_ROWS, weights=weights, states=[], seq=1)


def hello_request(role: int = idl.Role.WRITER) -> Any:
    """Return a hello that registers nothing."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION, role=role, run="", client="", epoch=0, rank=0, world_size=1, tables=[]
    )


WRITE_BYTES = LONG_WRITE.message_bytes
"""Bytes of the message of a write of 4 MiB."""


class Client(Protocol):
    """One connection to a contender's server."""

    async def write(self, num_calls: int, in_flight: int) -> None:
        """Make that many writes, so many at once."""

    async def read(self, num_calls: int, in_flight: int) -> None:
        """Make that many reads, so many at once."""

    async def close(self) -> None:
        """Close."""


async def _repeat(call: Callable[[], Awaitable[Any]], num_calls: int, in_flight: int) -> None:
    """Make calls, `in_flight` of them at once; a number that does not divide is rounded down."""

    async def work() -> None:
        for _ in range(num_calls // in_flight):
            await call()

    await asyncio.gather(*(work() for _ in range(in_flight)))


# Ours.


class _CountingService:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._limits = ServerLimits().to_idl()
        self._reply = _read_reply()

    async def hello(self, call: Call, request: Any) -> Any:
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id="bench",
            shard=0,
            shards=[],
            limits=self._limits,
            highest_epoch=0,
            last_client_seq=0,
            tables=[],
        )

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        self.num_bytes += sum(len(delta.weights) for delta in request.deltas)
        return idl.SetEmbeddingsReply(seq=1, is_duplicate=False)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        return self._reply

    async def status(self, call: Call) -> Any:
        raise NotImplementedError

    def disconnected(self, peer: Peer) -> None:
        pass


async def _serve_ours(shape: WriteShape) -> int:
    server = ThriftServer(_CountingService(), limits=ServerLimits())
    sock = socket.create_server((_HOST, 0), backlog=1024)
    port: int = sock.getsockname()[1]
    await server.start(sock)
    return port


class _OurClient:
    def __init__(self, client: ParamServerClient, shape: WriteShape) -> None:
        self._client = client
        self._request = _write_request(shape)

    @classmethod
    async def connect(cls, port: int, shape: WriteShape) -> _OurClient:
        client = await ParamServerClient.connect(_HOST, port)
        await client.hello(hello_request())
        return cls(client, shape)

    async def write(self, num_calls: int, in_flight: int) -> None:
        await _repeat(lambda: self._client.set_embeddings(self._request), num_calls, in_flight)

    async def read(self, num_calls: int, in_flight: int) -> None:
        request = _read_request()
        await _repeat(lambda: self._client.get_embeddings(request), num_calls, in_flight)

    async def close(self) -> None:
        await self._client.close()


# The limit: asyncio without a protocol. It knows the length, so it parses nothing.


class _LoopbackServer(asyncio.BufferedProtocol):
    def __init__(self, size_bytes: int) -> None:
        self._buffer = memoryview(bytearray(size_bytes))
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._filled = 0
            self._transport.write(_ACK)


async def _serve_loopback(shape: WriteShape) -> int:
    make = functools.partial(_LoopbackServer, shape.message_bytes)
    server = await asyncio.get_running_loop().create_server(make, _HOST, 0)
    return int(server.sockets[0].getsockname()[1])


class _LoopbackClient(asyncio.BufferedProtocol):
    _PIECE_BYTES = 256 * 2**10

    def __init__(self, size_bytes: int) -> None:
        self._message = memoryview(np.random.default_rng(1).bytes(size_bytes))
        self._buffer = memoryview(bytearray(64))
        self._num_acked = 0
        self._acked = asyncio.Event()
        self._drained = asyncio.get_running_loop().create_future()
        self._is_full = False

    @classmethod
    async def connect(cls, port: int, shape: WriteShape) -> _LoopbackClient:
        make = functools.partial(cls, shape.message_bytes)
        _, protocol = await asyncio.get_running_loop().create_connection(make, _HOST, port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._num_acked += nbytes // len(_ACK)  # an ack is never cut: it is written as one, and so few wait
        self._acked.set()

    def pause_writing(self) -> None:
        self._is_full = True
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._is_full = False
        self._drained.set_result(None)

    async def write(self, num_calls: int, in_flight: int) -> None:
        self._num_acked = 0
        for number in range(num_calls):
            await self._wait_acked(number + 1 - in_flight)
            # In pieces, because Python 3.11's transport copies what the kernel does not take at once.
            for start in range(0, len(self._message), self._PIECE_BYTES):
                self._transport.write(self._message[start : start + self._PIECE_BYTES])
                if self._is_full:
                    await self._drained
        await self._wait_acked(num_calls)

    async def _wait_acked(self, number: int) -> None:
        while self._num_acked < number:
            self._acked.clear()
            await self._acked.wait()

    async def read(self, num_calls: int, in_flight: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._transport.close()


# thriftpy2's own asyncio half, framed, as our IDL is spoken.


class _ThriftpyHandler:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._reply = _read_reply()

    async def setEmbeddings(self, request: Any) -> Any:
        self.num_bytes += sum(len(delta.weights) for delta in request.deltas)
        return idl.SetEmbeddingsReply(seq=1, is_duplicate=False)

    async def getEmbeddings(self, request: Any) -> Any:
        return self._reply


def _thriftpy_stack() -> dict[str, Any]:
    protocol: Any = TAsyncBinaryProtocolFactory  # untyped
    return {"trans_factory": TAsyncFramedTransportFactory(), "proto_factory": protocol()}


async def _serve_thriftpy2(shape: WriteShape) -> int:
    with socket.create_server((_HOST, 0)) as sock:  # it takes no port 0
        port: int = sock.getsockname()[1]
    server = make_server(
        idl.ParameterServer,
        _ThriftpyHandler(),
        _HOST,
        port,
        client_timeout=None,
        loop=asyncio.get_running_loop(),
        **_thriftpy_stack(),
    )
    server.trans.listen()
    server.server = await server.trans.accept(server.handle)
    return port


class _ThriftpyClient:
    def __init__(self, client: Any, shape: WriteShape) -> None:
        self._client = client
        self._request = _write_request(shape)

    @classmethod
    async def connect(cls, port: int, shape: WriteShape) -> _ThriftpyClient:
        return cls(await make_client(idl.ParameterServer, _HOST, port, timeout=None, **_thriftpy_stack()), shape)

    # One after the other: it can have only one in flight on a connection.

    async def write(self, num_calls: int, in_flight: int) -> None:
        for _ in range(num_calls):
            await self._client.setEmbeddings(self._request)

    async def read(self, num_calls: int, in_flight: int) -> None:
        request = _read_request()
        for _ in range(num_calls):
            await self._client.getEmbeddings(request)

    async def close(self) -> None:
        self._client.close()


# gRPC, with bytes for messages: its transport without the cost of protobuf.

_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def _serve_grpc(shape: WriteShape) -> int:
    import grpc

    reply, write_bytes = _read_reply().weights, shape.message_bytes

    async def write(request: bytes, context: Any) -> bytes:
        return _ACK if len(request) == write_bytes else b""

    async def read(request: bytes, context: Any) -> bytes:
        return cast(bytes, reply)

    handlers = {name: grpc.unary_unary_rpc_method_handler(f) for name, f in (("write", write), ("read", read))}
    server = grpc.aio.server(options=_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port: int = server.add_insecure_port(f"{_HOST}:0")
    await server.start()
    _KEPT.append(server)
    return port


class _GrpcClient:
    def __init__(self, channel: Any, shape: WriteShape) -> None:
        self._channel = channel
        self._write = channel.unary_unary("/bench/write")
        self._read = channel.unary_unary("/bench/read")
        self._message = np.random.default_rng(1).bytes(shape.message_bytes)

    @classmethod
    async def connect(cls, port: int, shape: WriteShape) -> _GrpcClient:
        import grpc

        channel = grpc.aio.insecure_channel(f"{_HOST}:{port}", options=_GRPC_OPTIONS)
        await channel.channel_ready()
        return cls(channel, shape)

    async def write(self, num_calls: int, in_flight: int) -> None:
        await _repeat(lambda: self._write(self._message), num_calls, in_flight)

    async def read(self, num_calls: int, in_flight: int) -> None:
        request = _read_request().row_ids
        await _repeat(lambda: self._read(request), num_calls, in_flight)

    async def close(self) -> None:
        await self._channel.close()


# Servers that would stop when they are collected.
_KEPT: list[Any] = []

SERVERS: dict[str, Callable[[WriteShape], Awaitable[int]]] = {
    "headrace": _serve_ours,
    "loopback": _serve_loopback,
    "thriftpy2": _serve_thriftpy2,
    "grpc": _serve_grpc,
}
"""By name: starts a server on the running loop and returns its port."""

CLIENTS: dict[str, Callable[[int, WriteShape], Awaitable[Client]]] = {
    "headrace": _OurClient.connect,
    "loopback": _LoopbackClient.connect,
    "thriftpy2": _ThriftpyClient.connect,
    "grpc": _GrpcClient.connect,
}
"""By name: connects to a port of the loopback."""
