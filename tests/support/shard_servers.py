"""A server's shards in this process: real ones, each with its log, store and socket, without a supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hellos import hello_of_writer

from headrace.paramserver.config.data_dir import MANIFEST_NAME, Manifest
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.claims import hold_term
from headrace.paramserver.log.opening import LogKind
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard.service import Shard, open_shard
from headrace.schemas.tables import TableSpec


def make_manifest(directory: Path, *, server_id: str, num_shards: int, log: LogKind = "file") -> None:
    """Make a server's directory, unless it is there."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / MANIFEST_NAME).exists():
        (directory / MANIFEST_NAME).write_bytes(Manifest(server_id=server_id, num_shards=num_shards, log=log).encode())


@contextlib.asynccontextmanager
async def serve_shards(
    directory: Path,
    num_shards: int,
    *,
    port: int = 0,
    advertise_host: str = "127.0.0.1",
    opened: list[Shard] | None = None,
    access: AccessPolicy | None = None,
    term: int = 0,
    **changes: Any,
) -> AsyncIterator[list[int]]:
    """Serve the shards of a directory laid out as a server's; yield their ports, and put the shards into `opened`.

    The first shard listens at `port`, unless that is 0; the others at any. `access` is what clients must show. Shards
    hold at least a `term`.
    """
    async with contextlib.AsyncExitStack() as stack:
        wanted = [port] + [0] * (num_shards - 1)
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", at))) for at in wanted]
        ports = [sock.getsockname()[1] for sock in sockets]
        make_manifest(directory, server_id=changes.get("server_id", str(directory)), num_shards=num_shards)
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
            hold_term(path, server_id=config.server_id, shard=config.shard, term=term)
            limits = ServerLimits(max_frame_bytes=config.max_frame_bytes)
            shard_opened = await stack.enter_async_context(open_shard(config))
            if opened is not None:
                opened.append(shard_opened)
            server = shard_opened.sampler.server = ThriftServer(shard_opened, limits=limits, access=access)
            await server.start(sock)
            stack.push_async_callback(server.close, drain_s=5)
            stack.callback(shard_opened.begin_drain)
        yield ports


@contextlib.asynccontextmanager
async def serve_to_writer(
    directory: Path, spec: TableSpec
) -> AsyncIterator[tuple[list[Shard], list[int], list[ParamServerClient]]]:
    """Serve two shards; yield them, their ports, and a writer's connection to each, which has registered a table."""
    shards: list[Shard] = []
    async with contextlib.AsyncExitStack() as stack:
        ports = await stack.enter_async_context(serve_shards(directory, 2, opened=shards))
        clients = []
        for port in ports:
            clients.append(await stack.enter_async_context(await ParamServerClient.connect("127.0.0.1", port)))
            await clients[-1].hello(hello_of_writer(spec))
        yield shards, ports, clients
