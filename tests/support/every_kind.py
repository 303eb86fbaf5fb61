"""A shard, a follower and a replica in this process, and a client that calls any method of theirs with anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from followers import following
from hellos import hello_of_nobody, hello_of_writer
from raw_peer import call_frame
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from waiting import WAIT_S, until

from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.replica.endpoint.replica_process import ReplicaProcess
from headrace.paramserver.rpc.security import AccessPolicy, Token
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.system.durable import ReadyFile
from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import error_from_idl, idl
from headrace.schemas.messages import EXCEPTION, decode_header, decode_struct
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

__all__ = ["SERVER_ID", "SPEC", "TOKENS", "AnyClient", "serve_every_kind"]

SPEC = TableSpec(fqn="items.weight", num_rows=100, dim=4, dtype=DType.FLOAT32)
TOKENS = {idl.Role.READER: "reader-" * 4, idl.Role.WRITER: "writer-" * 4, idl.Role.ADMIN: "admin-" * 4}
SERVER_ID = "a-server"


class AnyClient:
    """A connection to a server of any kind. Use it with `async with`."""

    def __init__(self, address: str, *, registers: bool = True) -> None:
        """Writers' hellos register a table, unless not `registers`."""
        self._registers = registers
        host, _, port = address.rpartition(":")
        self._at = host, int(port)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._at)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def call(self, method: str, request: Any = None) -> Any:
        """Return what a method answers; raises `ProtocolError` if the server has no such method, or the error."""
        self._writer.write(call_frame(method, 1, request))
        async with asyncio.timeout(WAIT_S):
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            frame = memoryview(await self._reader.readexactly(length))
        header = decode_header(frame)
        if header.kind == EXCEPTION:
            raise ProtocolError(f"there is no {method}")
        result = decode_struct(getattr(idl.ParameterServer, f"{method}_result"), frame, header.body_offset)
        if result.error is not None:
            raise error_from_idl(result.error)
        return result.success

    async def hello(self, role: int | None, *, epoch: int = 2) -> None:
        """Say hello with the token of a role, as a writer's if that may write; None is a stranger, without a token."""
        known = {"token": TOKENS.get(role)}
        if role in (None, idl.Role.READER) or not self._registers:
            await self.call("hello", hello_of_nobody(role or idl.Role.READER, **known))
        else:
            await self.call("hello", hello_of_writer(SPEC, role=role, client=f"c{role}", epoch=epoch, **known))


@contextlib.asynccontextmanager
async def serve_every_kind(folder: Path) -> AsyncIterator[tuple[dict[str, str], Shard]]:
    """Serve a table that has rows, and a snapshot; yield the address of each kind, and the shard."""
    files = {}
    for role, secret in TOKENS.items():
        files[role] = folder / f"token-{role}"
        files[role].touch(mode=0o600)
        files[role].write_text(secret)
    access = AccessPolicy({role: Token(secret) for role, secret in TOKENS.items()})
    tokens = {"token_file": files[idl.Role.ADMIN], "reader_token_file": files[idl.Role.READER]}
    opened: list[Shard] = []
    async with serve_shards(folder / "data", 1, opened=opened, access=access, server_id=SERVER_ID) as (port,):
        server = f"127.0.0.1:{port}"
        async with AnyClient(server) as writer:
            await writer.hello(idl.Role.ADMIN, epoch=1)
            batch = request_of(delta_of(SPEC, range(10), 1.0), client=f"c{idl.Role.ADMIN}", client_seq=1, step=1)
            await writer.call("setEmbeddings", batch)
            made = await writer.call(
                "createSnapshot", idl.CreateSnapshotRequest(name="one", epoch=0, min_step=-1, wait_ms=0)
            )
            manifest = _manifest_of(made.part)
            await writer.call("finishSnapshot", idl.FinishSnapshotRequest(name="one", manifest=manifest))
        async with (
            following(folder / "follower", server, server_id=SERVER_ID, access=access, **tokens) as follower,
            _replica_of(server, folder / "replica", server_token_file=files[idl.Role.READER], **tokens) as replica,
        ):
            await follower.serves()
            yield {"shard": server, "follower": follower.address, "replica": replica}, opened[0]


def _manifest_of(part: str) -> str:
    """Return the manifest of a snapshot that has one part."""
    return SnapshotManifest(name="one", created_us=1, parts=(ShardPart.decode(part),)).encode().decode()


@contextlib.asynccontextmanager
async def _replica_of(server: str, folder: Path, **settings: Any) -> AsyncIterator[str]:
    ready = ReadyFile(folder.with_name("replica.ready"))
    config = EndpointConfig(server=server, port=0, drain_s=1, **settings)
    process = ReplicaProcess(config, environ={}, ready_file=ready)
    running = asyncio.create_task(process.run())
    try:
        await until(lambda: running.done() or folder.with_name("replica.ready").exists())
        if running.done():
            await running
        yield json.loads(folder.with_name("replica.ready").read_text())["address"]
    finally:
        process._stop("the test is over")
        async with asyncio.timeout(WAIT_S):
            await running
