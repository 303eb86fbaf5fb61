"""A server's shards in this process: real ones, each with its log, store and socket, without a supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.rpc_server import ThriftServer
from headrace.paramserver.shard.shard import Shard, open_shard


@contextlib.asynccontextmanager
async def serve_shards(
    directory: Path,
    num_shards: int,
    *,
    advertise_host: str = "127.0.0.1",
    opened: list[Shard] | None = None,
    **changes: Any,
) -> AsyncIterator[list[int]]:
    """Serve the shards of a directory laid out as a server's; yield their ports, and put the shards into `opened`."""
    async with contextlib.AsyncExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num_shards)]
        ports = [sock.getsockname()[1] for sock in sockets]
        for shard, sock in enumerate(sockets):
            path = directory / f"shard-{shard:04d}"
            path.mkdir(parents=True, exist_ok=True)
            config = ShardConfig(
                directory=path,
                shard=shard,
                server_id=str(directory),
                addresses=tuple((advertise_host, port) for port in ports),
                block_cache_bytes=32 << 20,
                memtable_bytes=6 << 20,
            )
            config = dataclasses.replace(config, **changes)
            limits = ServerLimits(max_frame_bytes=config.max_frame_bytes)
            shard_opened = await stack.enter_async_context(open_shard(config))
            if opened is not None:
                opened.append(shard_opened)
            server = ThriftServer(shard_opened, limits=limits)
            await server.start(sock)
            stack.push_async_callback(server.close, drain_s=5)
            stack.callback(shard_opened.begin_drain)
        yield ports
