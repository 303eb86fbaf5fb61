"""The contenders of `headrace bench wire`: a server and a client of each, which move the same bytes.

Every server does as little as it can: it acks a write, and replies to a read with rows that are ready. Every client
has one connection with as many calls in flight as asked for; thriftpy2's can have only one.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
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

__all__ = ["CONTENDERS", "WRITE_BYTES", "Contender"]

_HOST = "127.0.0.1"
_DIM, _READ_ROWS = 128, 32
_WRITE_ROWS = 4 * 2**20 // (8 + 4 * _DIM)
_ACK = b"12345678"

_Calls = dict[str, Callable[[int, int], Awaitable[Any]]]  # by name; takes the number of calls, and of those in flight


class Contender(NamedTuple):
    """A server and a client."""

    serve: Callable[[], Awaitable[int]]  # starts a server on the running loop and returns its port
    connect: Callable[[int], Awaitable[_Calls]]  # connects to a port; returns the calls `write` and `read`


def _write_request() -> Any:
    """Return a setEmbeddings request of 4 MiB: row ids and float32 weights of one table."""
    spec = TableSpec(fqn="bench.weight", num_rows=_WRITE_ROWS, dim=_DIM, dtype=DType.FLOAT32)
    weights = np.random.default_rng(1).standard_normal((_WRITE_ROWS, _DIM), np.float32).tobytes()
    return make_request([make_delta(spec, np.arange(_WRITE_ROWS), weights)])


def _read_request() -> Any:
    row_ids = np.arange(_READ_ROWS, dtype="<i8").tobytes()
    return idl.GetEmbeddingsRequest(fqn="bench.weight", row_ids=row_ids, with_states=False, with_versions=False)


def _read_reply() -> Any:
    weights = np.zeros((_READ_ROWS, _DIM), np.float32).tobytes()
    return idl.GetEmbeddingsReply(presence=b"\1" * _READ_ROWS, weights=weights, states=[], seq=1)


_WRITE_ARGS = idl.ParameterServer.setEmbeddings_args(request=_write_request())
WRITE_BYTES = size_of_segments(encode_message("setEmbeddings", CALL, 1, _WRITE_ARGS))
"""Bytes of a write's message, the same for every contender."""


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


class _ReadyService:
    def __init__(self) -> None:
        self._reply = _read_reply()

    async def hello(self, call: Call, request: Any) -> Any:
        facts = {"server_id": "bench", "shard": 0, "shards": [], "highest_epoch": 0, "last_client_seq": 0, "tables": []}
        return idl.HelloReply(protocol_version=PROTOCOL_VERSION, limits=ServerLimits().to_idl(), **facts)

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        return idl.SetEmbeddingsReply(seq=1, is_duplicate=False)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        return self._reply

    async def status(self, call: Call) -> Any:
        raise NotImplementedError

    def disconnected(self, peer: Peer) -> None:
        pass


async def _serve_headrace() -> int:
    server = ThriftServer(_ReadyService(), limits=ServerLimits())
    sock = socket.create_server((_HOST, 0), backlog=1024)
    port: int = sock.getsockname()[1]
    await server.start(sock)
    _KEPT.append(server)
    return port


async def _connect_headrace(port: int) -> _Calls:
    client = await ParamServerClient.connect(_HOST, port)
    await client.hello(hello_request())
    write, read = _write_request(), _read_request()
    return _calls(lambda: client.set_embeddings(write), lambda: client.get_embeddings(read))


# The limit: asyncio and plain sockets. Both ends know the length, so they parse nothing.


async def _serve_loopback() -> int:
    listener = socket.create_server((_HOST, 0))
    listener.setblocking(False)

    async def ack_all() -> None:
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(WRITE_BYTES))
        sock, _ = await loop.sock_accept(listener)
        filled = 0
        while count := await loop.sock_recv_into(sock, buffer[filled:]):
            filled += count
            if filled == WRITE_BYTES:
                filled = 0
                await loop.sock_sendall(sock, _ACK)

    _KEPT.append(asyncio.create_task(ack_all()))
    return int(listener.getsockname()[1])


async def _connect_loopback(port: int) -> _Calls:
    loop, message = asyncio.get_running_loop(), np.random.default_rng(1).bytes(WRITE_BYTES)
    sock = socket.create_connection((_HOST, port))
    sock.setblocking(False)

    async def write(num_calls: int, in_flight: int) -> None:
        window = asyncio.Semaphore(in_flight)

        async def count_acks() -> None:
            for _ in range(num_calls):
                await loop.sock_recv(sock, len(_ACK))  # never split: each is one small write
                window.release()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(count_acks())
            for _ in range(num_calls):
                await window.acquire()
                await loop.sock_sendall(sock, message)

    return {"write": write}


# thriftpy2's own asyncio server and client, framed, with our IDL.


class _ThriftpyHandler:
    def __init__(self) -> None:
        self._reply = _read_reply()

    async def setEmbeddings(self, request: Any) -> Any:
        return idl.SetEmbeddingsReply(seq=1, is_duplicate=False)

    async def getEmbeddings(self, request: Any) -> Any:
        return self._reply


def _thriftpy2_stack() -> dict[str, Any]:
    protocol: Any = TAsyncBinaryProtocolFactory  # untyped
    return {"trans_factory": TAsyncFramedTransportFactory(), "proto_factory": protocol()}


async def _serve_thriftpy2() -> int:
    with socket.create_server((_HOST, 0)) as sock:  # thriftpy2 takes no port 0
        port: int = sock.getsockname()[1]
    stack = _thriftpy2_stack() | {"client_timeout": None, "loop": asyncio.get_running_loop()}
    server = make_server(idl.ParameterServer, _ThriftpyHandler(), _HOST, port, **stack)
    server.trans.listen()
    server.server = await server.trans.accept(server.handle)
    return port


async def _connect_thriftpy2(port: int) -> _Calls:
    client = await make_client(idl.ParameterServer, _HOST, port, timeout=None, **_thriftpy2_stack())
    write, read = _write_request(), _read_request()
    return _calls(lambda: client.setEmbeddings(write), lambda: client.getEmbeddings(read), most=1)


# gRPC with bytes as messages: its transport without the cost of protobuf.

_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def _serve_grpc() -> int:
    import grpc

    reply = _read_reply().weights

    async def write(request: bytes, context: Any) -> bytes:
        return _ACK if len(request) == WRITE_BYTES else b""

    async def read(request: bytes, context: Any) -> bytes:
        return cast(bytes, reply)

    handlers = {name: grpc.unary_unary_rpc_method_handler(f) for name, f in (("write", write), ("read", read))}
    server = grpc.aio.server(options=_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port: int = server.add_insecure_port(f"{_HOST}:0")
    await server.start()
    _KEPT.append(server)
    return port


async def _connect_grpc(port: int) -> _Calls:
    import grpc

    channel = grpc.aio.insecure_channel(f"{_HOST}:{port}", options=_GRPC_OPTIONS)
    await channel.channel_ready()
    write, read = channel.unary_unary("/bench/write"), channel.unary_unary("/bench/read")
    message, ids = np.random.default_rng(1).bytes(WRITE_BYTES), _read_request().row_ids
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
