"""The contenders of `headrace bench wire`: a server and a client of each, which move the same bytes.

Every server does as little as it can: it counts a write, and replies to a read with rows that are ready. Every client
has one connection with as many calls in flight as asked for; thriftpy2's can have only one.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from thriftpy2.contrib.aio.protocol.binary import TAsyncBinaryProtocolFactory
from thriftpy2.contrib.aio.rpc import make_client, make_server
from thriftpy2.contrib.aio.transport.framed import TAsyncFramedTransportFactory

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.schemas.idl import PROTOCOL_VERSION, idl
from headrace.schemas.messages import CALL, encode_message, size_of_segments
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.benches.workload import hello_request, make_delta, make_request

__all__ = ["CONTENDERS", "LONG_WRITE", "WRITE_BYTES", "Contender", "WriteShape"]

_HOST = "127.0.0.1"
_DIM, _READ_ROWS = 128, 32
_ACK = b"12345678"
_PIECE_BYTES = 256 * 2**10

_Calls = dict[str, Callable[[int, int], Awaitable[Any]]]  # by name; takes the number of calls, and of those in flight


@dataclass(frozen=True, slots=True)
class WriteShape:
    """What a write carries besides row ids: rows of `dim` float32."""

    num_rows: int
    dim: int

    @property
    def message_bytes(self) -> int:
        """Bytes of the message, the same for every contender."""
        args = idl.ParameterServer.setEmbeddings_args(request=_write_request(self))
        return size_of_segments(encode_message("setEmbeddings", CALL, 1, args))


class Contender(NamedTuple):
    """A server and a client."""

    serve: Callable[[WriteShape], Awaitable[int]]  # starts a server on the running loop and returns its port
    connect: Callable[[int, WriteShape], Awaitable[_Calls]]  # connects to a port; returns the calls `write` and `read`


def _write_request(shape: WriteShape) -> Any:
    """Return a setEmbeddings request: row ids and float32 weights of one table."""
    spec = TableSpec(fqn="bench.weight", num_rows=shape.num_rows, dim=shape.dim, dtype=DType.FLOAT32)
    weights = np.random.default_rng(1).standard_normal((shape.num_rows, shape.dim), np.float32).tobytes()
    return make_request([make_delta(spec, np.arange(shape.num_rows), weights)])


def _read_request() -> Any:
    row_ids = np.arange(_READ_ROWS, dtype="<i8").tobytes()
    return idl.GetEmbeddingsRequest(fqn="bench.weight", row_ids=row_ids, with_states=False, with_versions=False)


def _read_reply() -> Any:
    weights = np.zeros((_READ_ROWS, _DIM), np.float32).tobytes()
    return idl.GetEmbeddingsReply(presence=b"\1" * _READ_ROWS, weights=weights, states=[], seq=1)


LONG_WRITE = WriteShape(4 * 2**20 // (8 + 4 * _DIM), _DIM)
"""A write of 4 MiB."""
WRITE_BYTES = LONG_WRITE.message_bytes
"""Bytes of its message."""


def _calls(write: Callable[[], Awaitable[Any]], read: Callable[[], Awaitable[Any]], most: int = 2**31) -> _Calls:
    """Return calls that repeat, with at most `most` in flight."""

    async def repeat(call: Callable[[], Awaitable[Any]], num_calls: int, in_flight: int) -> None:
        async def work() -> None:
            for _ in range(num_calls // in_flight):
                await call()

        in_flight = min(in_flight, most)
        await asyncio.gather(*(work() for _ in range(in_flight)))

    return {"write": functools.partial(repeat, write), "read": functools.partial(repeat, read)}


# Headrace.


class _CountingService:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._reply = _read_reply()

    async def hello(self, call: Call, request: Any) -> Any:
        facts = {"server_id": "bench", "shard": 0, "shards": [], "highest_epoch": 0, "last_client_seq": 0, "tables": []}
        return idl.HelloReply(protocol_version=PROTOCOL_VERSION, limits=ServerLimits().to_idl(), **facts)

    async def set_embeddings(self, call: Call | None, request: Any) -> Any:
        self.num_bytes += sum(len(delta.weights) for delta in request.deltas)
        return idl.SetEmbeddingsReply(seq=1, is_duplicate=False)

    async def get_embeddings(self, call: Call | None, request: Any) -> Any:
        return self._reply

    async def status(self, call: Call) -> Any:
        raise NotImplementedError

    def disconnected(self, peer: Peer) -> None:
        pass


async def _serve_headrace(shape: WriteShape) -> int:
    server = ThriftServer(_CountingService(), limits=ServerLimits())
    sock = socket.create_server((_HOST, 0), backlog=1024)
    port: int = sock.getsockname()[1]
    await server.start(sock)
    _KEPT.append(server)
    return port


async def _connect_headrace(port: int, shape: WriteShape) -> _Calls:
    client = await ParamServerClient.connect(_HOST, port)
    await client.hello(hello_request())
    write, read = _write_request(shape), _read_request()
    return _calls(lambda: client.set_embeddings(write), lambda: client.get_embeddings(read))


# The limit: asyncio without a protocol. Both ends know the length, so they parse nothing.


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
    def __init__(self, size_bytes: int) -> None:
        self._message = memoryview(np.random.default_rng(1).bytes(size_bytes))
        self._buffer = memoryview(bytearray(64))
        self._num_acked = 0
        self._acked = asyncio.Event()
        self._drained = asyncio.get_running_loop().create_future()
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._num_acked += nbytes // len(_ACK)  # acks are never split: each is one small write
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
            for start in range(0, len(self._message), _PIECE_BYTES):
                self._transport.write(self._message[start : start + _PIECE_BYTES])
                if self._is_full:
                    await self._drained
        await self._wait_acked(num_calls)

    async def _wait_acked(self, number: int) -> None:
        while self._num_acked < number:
            self._acked.clear()
            await self._acked.wait()


async def _connect_loopback(port: int, shape: WriteShape) -> _Calls:
    make = functools.partial(_LoopbackClient, shape.message_bytes)
    _, client = await asyncio.get_running_loop().create_connection(make, _HOST, port)
    return {"write": client.write}


# thriftpy2's own asyncio server and client, framed, with our IDL.


class _ThriftpyHandler:
    def __init__(self) -> None:
        self._service = _CountingService()

    async def setEmbeddings(self, request: Any) -> Any:
        return await self._service.set_embeddings(None, request)

    async def getEmbeddings(self, request: Any) -> Any:
        return await self._service.get_embeddings(None, request)


def _thriftpy2_stack() -> dict[str, Any]:
    protocol: Any = TAsyncBinaryProtocolFactory  # untyped
    return {"trans_factory": TAsyncFramedTransportFactory(), "proto_factory": protocol()}


async def _serve_thriftpy2(shape: WriteShape) -> int:
    with socket.create_server((_HOST, 0)) as sock:  # thriftpy2 takes no port 0
        port: int = sock.getsockname()[1]
    stack = _thriftpy2_stack() | {"client_timeout": None, "loop": asyncio.get_running_loop()}
    server = make_server(idl.ParameterServer, _ThriftpyHandler(), _HOST, port, **stack)
    server.trans.listen()
    server.server = await server.trans.accept(server.handle)
    return port


async def _connect_thriftpy2(port: int, shape: WriteShape) -> _Calls:
    client = await make_client(idl.ParameterServer, _HOST, port, timeout=None, **_thriftpy2_stack())
    write, read = _write_request(shape), _read_request()
    return _calls(lambda: client.setEmbeddings(write), lambda: client.getEmbeddings(read), most=1)


# gRPC with bytes as messages: its transport without the cost of protobuf.

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


async def _connect_grpc(port: int, shape: WriteShape) -> _Calls:
    import grpc

    channel = grpc.aio.insecure_channel(f"{_HOST}:{port}", options=_GRPC_OPTIONS)
    await channel.channel_ready()
    write, read = channel.unary_unary("/bench/write"), channel.unary_unary("/bench/read")
    message, ids = np.random.default_rng(1).bytes(shape.message_bytes), _read_request().row_ids
    return _calls(lambda: write(message), lambda: read(ids))


# Servers that would stop if they were collected.
_KEPT: list[Any] = []

CONTENDERS = {
    "headrace": Contender(_serve_headrace, _connect_headrace),
    "loopback": Contender(_serve_loopback, _connect_loopback),
    "thriftpy2": Contender(_serve_thriftpy2, _connect_thriftpy2),
    "grpc": Contender(_serve_grpc, _connect_grpc),
}
"""By name."""
