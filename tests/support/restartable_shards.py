"""Moves of partitions between a server's shards, in this process or others, while a trainer writes.

Shards of this process can end and start again at their ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from held_ports import hold_ports
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from waiting import until

from headrace.paramserver.config.data_dir import MANIFEST_NAME, Manifest
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.reshard.move_messages import move_to_idl
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.schemas.errors import UnavailableError, WrongRoutingError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

__all__ = [
    "MOVED_SPEC",
    "ROWS",
    "MapWriter",
    "Places",
    "RestartableShards",
    "ask",
    "check_rows",
    "reach",
    "read_rows",
    "training",
]

MOVED_SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32, has_identities=True)
ROWS = np.arange(300)

Rows = dict[int, tuple[int, float]]
"""By row id, the step in which it was written last, and the value of all its elements."""


class Places:
    """Where the shards of a server are."""

    def __init__(self, server_id: str, ports: list[int]) -> None:
        self.server_id, self.ports = server_id, ports

    async def connect(self, shard: int, hello: Any = None) -> ParamServerClient:
        """Return a connection that has said hello, as an admin unless another hello is given."""
        client = await ParamServerClient.connect("127.0.0.1", self.ports[shard])
        try:
            await client.hello(hello or hello_of_nobody(idl.Role.ADMIN, knows_partitions=True))
        except BaseException:
            await client.close()
            raise
        return client


class RestartableShards(Places):
    """Two shards or more; use it with `async with`."""

    def __init__(self, directory: Path, num_shards: int = 2, **changes: Any) -> None:
        """Lay out a directory; `changes` are settings of all shards."""
        super().__init__(str(directory), [])
        self.shards: dict[int, Shard] = {}
        self._stacks: dict[int, contextlib.AsyncExitStack] = {}
        self._directory, self._num_shards, self._changes = directory, num_shards, changes

    async def __aenter__(self) -> Self:
        manifest = self._directory / MANIFEST_NAME
        if not manifest.exists():
            manifest.write_bytes(Manifest(server_id=self.server_id, num_shards=self._num_shards).encode())
        self.ports = [hold_ports() for _ in range(self._num_shards)]
        sockets = [socket.create_server(("127.0.0.1", port)) for port in self.ports]
        for shard, sock in enumerate(sockets):
            await self._start(shard, sock)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for shard in list(self._stacks):
            await self.stop(shard)

    async def start(self, shard: int) -> None:
        """Start a shard at the port that it had."""
        await self._start(shard, socket.create_server(("127.0.0.1", self.ports[shard])))

    async def stop(self, shard: int) -> None:
        """End a shard."""
        await self._stacks.pop(shard).aclose()
        del self.shards[shard]

    async def _start(self, shard: int, sock: socket.socket) -> None:
        path = self._directory / f"shard-{shard:04d}"
        path.mkdir(exist_ok=True)
        config = ShardConfig(
            directory=path,
            shard=shard,
            server_id=self.server_id,
            addresses=tuple(("127.0.0.1", port) for port in self.ports),
            block_cache_bytes=32 << 20,
            memtable_bytes=6 << 20,
            **self._changes,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(sock.close)
            opened = await stack.enter_async_context(open_shard(config))
            server = opened.sampler.server = ThriftServer(opened, limits=ServerLimits())
            await server.start(sock)
            stack.push_async_callback(server.close, drain_s=5)
            stack.callback(opened.begin_drain)
            self.shards[shard], self._stacks[shard] = opened, stack.pop_all()


class MapWriter:
    """A trainer that writes rows wherever the newest map that it has heard of says; one batch at a time.

    Attributes:
        rows: What is acked.
        map: The newest map.
    """

    def __init__(self, shards: Places) -> None:
        self.rows: Rows = {}
        self.map = PartitionMap.first(2)
        self.step = 0
        self._shards = shards
        self._clients: dict[int, ParamServerClient] = {}
        self._client_seqs: defaultdict[int, int] = defaultdict(int)

    async def write(self, row_ids: npt.NDArray[np.int64]) -> None:
        """Write rows as the next step; return once all are acked by their owners."""
        self.step += 1
        left = row_ids
        while left.size:
            owners = self.map.shards_of_rows(MOVED_SPEC.seed, left)
            shard = int(owners[0])
            part = left[owners == shard]
            try:
                await self._send(shard, part)
            except WrongRoutingError as exc:
                assert exc.partitions is not None
                self.map = self.map.merged(PartitionMap.decode(exc.partitions))
                continue
            except UnavailableError:
                if (client := self._clients.pop(shard, None)) is not None:
                    await client.close()
                continue
            self.rows |= {int(row): (self.step, float(self.step)) for row in part}
            left = np.setdiff1d(left, part)

    async def _send(self, shard: int, row_ids: npt.NDArray[np.int64]) -> None:
        if shard not in self._clients:
            client = await ParamServerClient.connect("127.0.0.1", self._shards.ports[shard])
            self._clients[shard] = client
            reply = await client.hello(hello_of_writer(MOVED_SPEC, knows_partitions=True))
            if reply.last_client_seq > self._client_seqs[shard]:  # it was taken, and the ack was lost
                self._client_seqs[shard] = reply.last_client_seq
                return
        delta = delta_of(MOVED_SPEC, row_ids, float(self.step), identities=row_ids.astype("<i8").tobytes())
        client_seq = self._client_seqs[shard] + 1
        request = request_of(delta, client_seq=client_seq, step=self.step)
        await self._clients[shard].set_embeddings(request)
        self._client_seqs[shard] = client_seq

    async def close(self) -> None:
        """Close its connections."""
        for client in self._clients.values():
            await client.close()


async def read_rows(client: ParamServerClient, row_ids: npt.NDArray[np.int64]) -> Rows:
    """Return those of some rows that a shard has."""
    request = idl.GetEmbeddingsRequest(
        fqn=MOVED_SPEC.fqn, row_ids=row_ids.astype("<i8").tobytes(), with_states=False, with_versions=True
    )
    reply = await client.get_embeddings(request)
    steps = np.frombuffer(reply.steps, "<i8").tolist()
    values = np.frombuffer(reply.weights, "<f4").reshape(row_ids.size, -1)
    assert (values == values[:, :1]).all()
    return {
        int(row): (step, float(value))
        for row, step, value, presence in zip(row_ids, steps, values[:, 0], reply.presence, strict=True)
        if presence == 1
    }


async def ask(shards: Places, move: Move, kind: int) -> Any:
    """Ask a move's destination as a coordinator does."""
    request = idl.MovePartitionsRequest(server_id=shards.server_id, move=move_to_idl(move), kind=kind)
    async with await shards.connect(move.destination) as client:
        return await client.move_partitions(request)


async def reach(shards: Places, move: Move, state: int) -> None:
    """Return once a move is in a state."""

    async def is_reached() -> bool:
        return bool((await ask(shards, move, idl.MoveRequestKind.LOOK)).state == state)

    await until(is_reached, f"state {state} of move {move.move_id}")


@contextlib.asynccontextmanager
async def training(shards: Places) -> AsyncIterator[MapWriter]:
    """Write rows while the block lasts; all of them are acked when it ends."""
    writer, is_over = MapWriter(shards), False

    async def train() -> None:
        rng = np.random.default_rng(1)
        while not is_over:
            await writer.write(np.sort(rng.choice(ROWS, 20, replace=False)))

    await writer.write(ROWS)
    task = asyncio.create_task(train())
    try:
        yield writer
        is_over = True
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await writer.close()


async def check_rows(shards: Places, writer: MapWriter, partition_map: PartitionMap) -> None:
    """Check that each row is as it was acked, where the map says, and nowhere else."""
    owners, counts = partition_map.shards_of_rows(MOVED_SPEC.seed, ROWS), 0
    found: Rows = {}
    for shard in np.unique(owners).tolist():
        async with await shards.connect(shard) as client:
            found |= await read_rows(client, ROWS[owners == shard])
            with pytest.raises(WrongRoutingError) as caught:
                await read_rows(client, ROWS[owners != shard][:1])
            assert caught.value.partitions is not None
            assert PartitionMap.decode(caught.value.partitions) == partition_map
            digest = idl.DigestRowsRequest(MOVED_SPEC.fqn, 0, 2**63 - 1, 0, 4, 256, with_presence=False)
            counts += int(np.frombuffer((await client.digest_rows(digest)).counts, "<i8").sum())
    assert found == writer.rows
    assert counts == ROWS.size
