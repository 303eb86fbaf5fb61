"""Servers of one shard in this process that follow each other and take over, and a writer that finds the shard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from held_ports import hold_ports
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from waiting import WAIT_S, until

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import Service, ThriftServer
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.schemas.errors import ConfigError, HeadraceError, LogFencedError, StorageError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.commands.promote import promote_shard

__all__ = [
    "SERVER_ID",
    "SPEC",
    "Machine",
    "Machines",
    "Writer",
    "admin_dial",
    "listening",
    "machines_in",
    "promote",
    "rows_at",
]

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
SERVER_ID = "a-server"


class Machine:
    """A server of one shard, which is started again after an error as its supervisor would.

    Attributes:
        port: Where it is.
        shard: What serves now; None while nothing does.
        failures: Errors that have ended it, in order.
    """

    def __init__(self, directory: Path, *, follow: str | None = None, port: int = 0, **changes: Any) -> None:
        self.port = port or hold_ports()
        self.shard: Shard | FollowingShard | None = None
        self.failures: list[HeadraceError] = []
        path = directory / "shard-0000"
        (path / "log").mkdir(parents=True, exist_ok=True)
        self.config = ShardConfig(
            **{
                "directory": path,
                "shard": 0,
                "server_id": SERVER_ID,
                "addresses": (("127.0.0.1", self.port),),
                "block_cache_bytes": 32 << 20,
                "memtable_bytes": 6 << 20,
                "follow": follow,
                **changes,
            }
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def owner(self) -> Shard:
        """What serves, which is no follower."""
        assert isinstance(self.shard, Shard), self.failures
        return self.shard

    async def start(self) -> Self:
        """Start it, and wait until something serves."""
        self.sock = socket.create_server(("127.0.0.1", self.port))
        self._task = asyncio.create_task(self._keep_running())
        await self.until(lambda: self.shard is not None)
        return self

    async def stop(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
            self.sock.close()

    async def until(self, find: Any) -> None:
        """Wait for something, and raise what has ended this server for good."""

        def found() -> Any:
            assert self._task is not None
            if self._task.done():
                self._task.result()
            return find()

        await until(found, lambda: f"{self.config.directory} after {self.failures}")

    async def has(self, other: Machine) -> None:
        """Wait until it has all records that another server has."""
        seq = other.shard.log.last_seq if other.shard is not None else 0
        await self.until(lambda: self.shard is not None and self.shard.log.last_seq >= seq)

    async def takes_over(self) -> None:
        """Wait until it takes updates."""
        await self.until(lambda: isinstance(self.shard, Shard))

    async def ask(self, **fields: Any) -> Any:
        """Call `promoteShard` as an admin."""
        async with self.client() as client:
            return await client.promote_shard(idl.PromoteShardRequest(**{"shard": 0, **fields}))

    async def hello(self) -> Any:
        """Return what it says to a reader."""
        async with await ParamServerClient.connect("127.0.0.1", self.port) as client:
            return await client.hello(hello_of_nobody())

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[ParamServerClient]:
        async with await ParamServerClient.connect("127.0.0.1", self.port) as client:
            await client.hello(hello_of_nobody(idl.Role.ADMIN))
            yield client

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._run()
            except (ConfigError, LogFencedError, StorageError) as exc:
                self.failures.append(exc)
                raise
            except HeadraceError as exc:
                self.failures.append(exc)

    async def _run(self) -> None:
        @contextlib.asynccontextmanager
        async def serving(service: Any) -> AsyncIterator[None]:
            server = ThriftServer(service, limits=ServerLimits(max_frame_bytes=self.config.max_frame_bytes))
            await server.start(self.sock.dup())
            self.shard = service
            try:
                yield
            finally:
                self.shard = None
                await server.close(drain_s=0)

        @contextlib.asynccontextmanager
        async def stand_by(service: Any) -> AsyncIterator[None]:
            async with serving(service):
                yield

        async with open_shard(self.config, stand_by=stand_by) as shard, serving(shard):
            try:
                raise await shard.wait_failed()
            finally:
                shard.begin_drain()


@contextlib.asynccontextmanager
async def listening(service: Service, port: int) -> AsyncIterator[None]:
    """Serve what a test has made up at a port."""
    server = ThriftServer(service, limits=ServerLimits())
    await server.start(socket.create_server(("127.0.0.1", port)))
    try:
        yield
    finally:
        await server.close(drain_s=0)


def admin_dial() -> Dial:
    return Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=30.0, role=idl.Role.ADMIN)


async def promote(follower: Machine) -> Any:
    """Promote a follower as the command does, and return what that says."""
    link = ShardLink(admin_dial(), "127.0.0.1", follower.port)
    try:
        await link.refresh()
        return await promote_shard(admin_dial(), link, 0)
    finally:
        await link.close()


class Writer:
    """The only client that writes; it goes to whoever takes its batches, and knows what each row must be.

    Attributes:
        rows: The value of each row by the last batch that was acked, or that the server has said to have.
        num_refused: Batches that were refused or not answered, and sent again.
    """

    def __init__(self, *machines: Machine) -> None:
        self.rows: dict[int, float] = {}
        self.num_refused = 0
        self._machines: Sequence[Machine] = machines
        self._client: ParamServerClient | None = None
        self._seq, self._turn = 0, asyncio.Lock()

    async def write(self, rows: Sequence[int], value: float) -> None:
        """Write a batch until it is acked, wherever the shard is by then."""
        async with self._turn:
            await self._write(rows, value)

    async def _write(self, rows: Sequence[int], value: float) -> None:
        self._seq += 1
        request = request_of(delta_of(SPEC, list(rows), value), client_seq=self._seq)
        async with asyncio.timeout(WAIT_S):
            for attempt in range(1 << 30):
                machine = self._machines[attempt % len(self._machines)]
                try:
                    if self._client is None:
                        client = await ParamServerClient.connect("127.0.0.1", machine.port)
                        hello = await client.hello(hello_of_writer(SPEC))
                        has_seq = hello.last_client_seq
                        if hello.shard != 0:
                            raise UnavailableError("it is elsewhere")
                        self._client = client
                        assert has_seq >= self._seq - 1, f"acked batches behind {has_seq} are lost"
                        if has_seq == self._seq:
                            break
                    await self._client.set_embeddings(request)
                    break
                except UnavailableError:
                    self.num_refused += 1
                    await self.close()
                await asyncio.sleep(0.005)
        self.rows.update(dict.fromkeys(rows, value))

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write all the time while the block lasts."""

        is_ending = False

        async def keep_writing() -> None:
            for value in range(1, 1 << 30):
                await self.write(range(value % 7, 50, 7), float(value))
                if is_ending:
                    return

        task = asyncio.create_task(keep_writing())
        try:
            yield
        finally:
            is_ending = True
            await asyncio.wait([task])  # each batch has its ack, so each row is known
            task.result()

    async def check(self, machine: Machine) -> None:
        """Assert that a server answers with the rows that were acked, once it answers."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(UnavailableError):  # this process paused, and its log has to be asked first
                    assert await rows_at(machine, list(self.rows)) == list(self.rows.values())
                    return
                await asyncio.sleep(0.005)


async def rows_at(machine: Machine, rows: Sequence[int]) -> list[float]:
    """Return the first weight of each row, as a server answers."""
    async with machine.client() as client:
        request = idl.GetEmbeddingsRequest(
            fqn=SPEC.fqn, row_ids=np.asarray(rows, "<i8"), with_states=False, with_versions=False
        )
        reply = await client.get_embeddings(request)
    return [float(value) for value in np.frombuffer(reply.weights, "<f4").reshape(len(rows), SPEC.dim)[:, 0]]


Machines = Callable[..., Machine]


@contextlib.asynccontextmanager
async def machines_in(path: Path, **defaults: Any) -> AsyncIterator[Machines]:
    """Return what makes machines by name and settings, in folders of a path; they are stopped at the end."""
    made: list[Machine] = []

    def make(name: str, **settings: Any) -> Machine:
        made.append(Machine(path / name, **(defaults | settings)))
        return made[-1]

    yield make
    for machine in reversed(made):
        await machine.stop()
