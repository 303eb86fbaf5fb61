"""A server's shards in this process, each of which can end and start again at its port."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of

from headrace.paramserver.config.data_dir import MANIFEST_NAME, Manifest
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.schemas.errors import UnavailableError, WrongRoutingError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import TableSpec

__all__ = ["MapWriter", "RestartableShards", "Rows", "read_rows"]

Rows = dict[int, tuple[int, float]]
"""By row id, the step in which it was written last, and the value of all its elements."""


class RestartableShards:
    """Two shards or more; use it with `async with`."""

    def __init__(self, directory: Path, num_shards: int = 2, **changes: Any) -> None:
        """Lay out a directory; `changes` are settings of all shards."""
        self.server_id = str(directory)
        self.shards: dict[int, Shard] = {}
        self._stacks: dict[int, contextlib.AsyncExitStack] = {}
        self._directory, self._num_shards, self._changes = directory, num_shards, changes
        self.ports: list[int] = []

    async def __aenter__(self) -> Self:
        manifest = self._directory / MANIFEST_NAME
        if not manifest.exists():
            manifest.write_bytes(Manifest(server_id=self.server_id, num_shards=self._num_shards).encode())
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(self._num_shards)]
        self.ports = [sock.getsockname()[1] for sock in sockets]
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

    async def connect(self, shard: int, hello: Any = None) -> ParamServerClient:
        """Return a connection that has said hello, as an admin unless another hello is given."""
        client = await ParamServerClient.connect("127.0.0.1", self.ports[shard])
        await client.hello(hello or hello_of_nobody(idl.Role.ADMIN, knows_partitions=True))
        return client


class MapWriter:
    """A trainer that writes rows wherever the newest map that it has heard of says; one batch at a time.

    Attributes:
        rows: What is acked.
        map: The newest map.
    """

    def __init__(self, shards: RestartableShards, spec: TableSpec) -> None:
        self.rows: Rows = {}
        self.map = PartitionMap.first(2)
        self.step = 0
        self._shards, self._spec = shards, spec
        self._clients: dict[int, ParamServerClient] = {}
        self._client_seqs = [0, 0]

    async def write(self, row_ids: npt.NDArray[np.int64]) -> None:
        """Write rows as the next step; return once all are acked by their owners."""
        self.step += 1
        left = row_ids
        while left.size:
            owners = self.map.shards_of_rows(self._spec.seed, left)
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
            reply = await client.hello(hello_of_writer(self._spec, knows_partitions=True))
            if reply.last_client_seq > self._client_seqs[shard]:  # it was taken, and the ack was lost
                self._client_seqs[shard] = reply.last_client_seq
                return
        delta = delta_of(self._spec, row_ids, float(self.step), identities=row_ids.astype("<i8").tobytes())
        client_seq = self._client_seqs[shard] + 1
        request = request_of(delta, client_seq=client_seq, step=self.step)
        await self._clients[shard].set_embeddings(request)
        self._client_seqs[shard] = client_seq

    async def close(self) -> None:
        """Close its connections."""
        for client in self._clients.values():
            await client.close()


async def read_rows(client: ParamServerClient, spec: TableSpec, row_ids: npt.NDArray[np.int64]) -> Rows:
    """Return those of some rows that a shard has."""
    request = idl.GetEmbeddingsRequest(
        fqn=spec.fqn, row_ids=row_ids.astype("<i8").tobytes(), with_states=False, with_versions=True
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
