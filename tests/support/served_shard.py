"""A shard in this process with a connected writer, and followers of its log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.tables import DType, TableSpec

__all__ = ["SPEC", "Served", "link_to", "serving", "values_of"]

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)


async def link_to(port: int) -> ShardLink:
    link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0), "127.0.0.1", port)
    await link.refresh()
    return link


class Served:
    """A shard on a port, with a connected writer."""

    def __init__(self, shard: Shard, port: int, client: ParamServerClient, client_seq: int) -> None:
        self.shard, self.port, self.client, self._client_seq = shard, port, client, client_seq

    async def write(self, rows: Iterable[int], value: float) -> None:
        """Write rows as the writer's next batch."""
        self._client_seq += 1
        delta = delta_of(SPEC, list(rows), value)
        await self.client.set_embeddings(request_of(delta, client_seq=self._client_seq))

    @asynccontextmanager
    async def follow(self, from_seq: int = 1, **settings: Any) -> AsyncIterator[ShardFollower]:
        """Yield a follower with a connection of its own."""
        link = await link_to(self.port)
        try:
            yield ShardFollower(link, from_seq=from_seq, **settings)
        finally:
            await link.close()


@asynccontextmanager
async def serving(path: Path, *, port: int = 0, client_seq: int = 0, **changes: Any) -> AsyncIterator[Served]:
    """Serve a shard whose writer has sent so many batches."""
    opened: list[Shard] = []
    async with (
        serve_shards(path, 1, port=port, opened=opened, **({"server_id": "a-server"} | changes)) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        await client.hello(hello_of_writer(SPEC))
        yield Served(opened[0], port, client, client_seq)


def values_of(body: memoryview) -> tuple[list[int], float]:
    """Return row ids and the value of a batch written by `Served.write`."""
    args = decode_struct(idl.ParameterServer.setEmbeddings_args, body, decode_header(body).body_offset)
    (delta,) = args.request.deltas
    return np.frombuffer(delta.row_ids, "<i8").tolist(), float(np.frombuffer(delta.weights, "<f4")[0])
