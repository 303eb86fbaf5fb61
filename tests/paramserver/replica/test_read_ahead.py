"""Announced rows of a replica: they are in memory before they are looked up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from identity_writer import IdentityWriter, identity_spec, weights_of
from shard_servers import serve_shards
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.config import DiskStorage

FQN = identity_spec().fqn


async def test_announced_rows_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    """A replica has the rows that are announced read, of any shape and each once; their lookup has hits alone."""
    async with serve_shards(tmp_path, 2) as ports:
        writer = await IdentityWriter.connect(ports)
        await writer.write({row: 100 + row for row in range(20)})
        await writer.close()

        def look() -> None:
            # Servers in this process wait for the last answers of those who follow them.
            with EmbeddingReplica(
                f"127.0.0.1:{ports[0]}", storage={FQN: DiskStorage(memory_bytes=8 << 20)}, fetch_wait_s=0.1
            ) as replica:
                assert replica.hot_rows()[FQN].admitted == 0
                replica.prefetch(FQN, torch.tensor([[3, 5], [5, 17]]))
                wait_until(lambda: replica.hot_rows()[FQN].admitted == 3, "the announced rows")
                rows = replica.lookup(FQN, [17, 3, 5])
                assert rows.tolist() == [weights_of(row, 100 + row, 1) for row in (17, 3, 5)]
                assert (replica.hot_rows()[FQN].hits, replica.hot_rows()[FQN].misses) == (3, 0)

        await asyncio.to_thread(look)
