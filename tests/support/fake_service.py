"""A service without a store, for tests of the transport: it counts, echoes, waits on demand and fails on demand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from hellos import hello_of_nobody
from set_embeddings import request_of

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.frames import BufferPool
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.schemas.idl import PROTOCOL_VERSION, idl

WAIT_S = 60.0
"""Deadline of everything a test waits for: long, since it is only reached when the test fails."""
POISON = 0xDD
"""What the pool of a test server fills returned buffers with."""


class FakeService:
    """Answers by the rules of the IDL from a few attributes.

    - `hello` takes anybody.
    - `set_embeddings` notes the client seq, waits for `gate`, and returns the number of batches so far as `seq`. Its
      frame stays held while `holds` is set: `release_all` gives the buffers back.
    - `get_embeddings` waits until `gates[fqn]` is set, if there is one, and returns the row ids as its `weights`, over
      and over to `reply_bytes` when that is set; `errors[fqn]` is raised instead.
    """

    def __init__(self) -> None:
        self.limits = ServerLimits()
        self.term = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, BaseException] = {}
        self.reply_bytes = 0
        self.holds = False
        self.held: list[tuple[memoryview, Callable[[], None]]] = []
        self.begun: list[int] = []
        self.num_bytes = 0
        self.num_running = 0
        self.gone: list[Peer] = []
        self.changed = asyncio.Event()

    async def hello(self, call: Call, request: Any) -> Any:
        """Take the client, whoever it is."""
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id="fake",
            shard=0,
            shards=[],
            limits=self.limits.to_idl(),
            highest_epoch=0,
            last_client_seq=0,
            tables=[],
        )

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        """Count a batch."""
        self.begun.append(request.client_seq)
        self.num_bytes += sum(len(delta.weights) for delta in request.deltas)
        if self.holds:
            self.held.append((call.frame, call.hold()))
        await self._wait(self.gate)
        return idl.SetEmbeddingsReply(seq=len(self.begun), is_duplicate=False)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Give the row ids back."""
        if request.fqn in self.gates:
            await self._wait(self.gates[request.fqn])
        if request.fqn in self.errors:
            raise self.errors[request.fqn]
        data = bytes(request.row_ids)
        if self.reply_bytes:
            data = (data * (self.reply_bytes // len(data) + 1))[: self.reply_bytes]
        return idl.GetEmbeddingsReply(presence=b"", weights=data, states=[], seq=0)

    async def status(self, call: Call) -> Any:
        """Answer with nothing but numbers."""
        return idl.StatusReply(
            server_id="fake",
            shard=0,
            num_shards=1,
            version="0",
            pid=1,
            uptime_s=0.5,
            log_seq=len(self.begun),
            applied_seq=0,
            inflight_bytes=0,
            num_connections=0,
            num_refused=0,
            num_disk_failures=0,
            num_rows_written=0,
            tables=[],
            clients=[],
        )

    def disconnected(self, peer: Peer) -> None:
        """Note who has gone."""
        self.gone.append(peer)
        self.changed.set()

    def release_all(self) -> None:
        """Give back every buffer that is held."""
        held, self.held = self.held, []
        for _, release in held:
            release()

    async def wait_running(self, number: int) -> None:
        """Return when exactly `number` requests wait in the service."""
        await self._wait_until(lambda: self.num_running == number)

    async def wait_gone(self, number: int) -> None:
        """Return when `number` connections have ended."""
        await self._wait_until(lambda: len(self.gone) >= number)

    async def _wait_until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def _wait(self, gate: asyncio.Event) -> None:
        self._step(1)
        try:
            await gate.wait()
        finally:
            self._step(-1)

    def _step(self, change: int) -> None:
        self.num_running += change
        self.changed.set()


class Served:
    """A running server and how to reach it."""

    def __init__(self, server: ThriftServer, service: FakeService, pool: BufferPool, address: tuple[str, int]) -> None:
        self.server = server
        self.service = service
        self.pool = pool
        self.host, self.port = address

    async def connect(self, *, says_hello: bool = True, client: str = "", **settings: Any) -> ParamServerClient:
        """Return a connected client."""
        connected = await ParamServerClient.connect(self.host, self.port, **settings)
        if says_hello:
            await connected.hello(hello_request(client=client))
        return connected

    async def slow_read(self, client: ParamServerClient, **settings: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
        """Return a read that runs in the service, and the event that lets it answer `1`."""
        gate = self.service.gates["slow"] = asyncio.Event()
        reading = asyncio.create_task(client.get_embeddings(read("slow", b"1"), **settings))
        await self.service.wait_running(1)
        return reading, gate


@asynccontextmanager
async def serve(
    service: FakeService | None = None,
    *,
    limits: ServerLimits | None = None,
    host: str = "127.0.0.1",
    **settings: Any,
) -> AsyncIterator[Served]:
    """Run a server on a free port of an address, with a pool that poisons what is given back."""
    service = service or FakeService()
    limits = limits or ServerLimits()
    service.limits = limits
    pool = BufferPool(
        max_buffer_bytes=limits.max_frame_bytes, max_idle_bytes=limits.max_idle_buffer_bytes, poison=POISON
    )
    server = ThriftServer(service, limits=limits, pool=pool, **settings)
    sock = socket.create_server((host, 0))
    address = sock.getsockname()
    await server.start(sock)
    try:
        yield Served(server, service, pool, address)
    finally:
        service.gate.set()
        for gate in service.gates.values():
            gate.set()
        service.release_all()
        await server.close(drain_s=WAIT_S)


def hello_request(*, client: str = "", role: int = idl.Role.WRITER, token: str | None = None) -> Any:
    """Return a hello with nothing in it."""
    return hello_of_nobody(role, run="run" if client else "", client=client, token=token)


def batch(client_seq: int, *, size_bytes: int = 64) -> Any:
    """Return a setEmbeddings request with one table and `size_bytes` of weights."""
    weights = np.full(size_bytes, client_seq % 251, np.uint8)
    delta = idl.TableDelta(
        fqn="t", fingerprint=1, column_offset=0, width=4, row_ids=b"\0" * 8, weights=memoryview(weights), states=[]
    )
    return request_of(delta, client_seq=client_seq)


def read(fqn: str, data: bytes = b"") -> Any:
    """Return a getEmbeddings request whose answer is `data`."""
    return idl.GetEmbeddingsRequest(fqn=fqn, row_ids=data, with_states=False, with_versions=False)
