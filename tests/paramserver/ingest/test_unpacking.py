"""Compressed batches at a real shard: in order with plain ones, within bounds, and plain in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archived_log import until
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.ingest import unpacking
from headrace.paramserver.ingest.unpacking import Unpacker
from headrace.paramserver.rpc.admission import ServerLimits, Ticket
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import OverloadedError, RequestError, UnauthorizedError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.packed_messages import pack_request
from headrace.schemas.tables import DType, TableSpec

pytest.importorskip("zstandard", reason="needs the extra zstd")

SPEC = TableSpec(fqn="t", num_rows=10_000, dim=32, dtype=DType.FLOAT32)
NUM_ROWS = 600


def batch(client_seq: int, num_rows: int = NUM_ROWS) -> Any:
    """Return rows from 0 on, each worth the client seq."""
    return request_of(delta_of(SPEC, np.arange(num_rows), float(client_seq)), client_seq=client_seq)


def packed(client_seq: int, num_rows: int = NUM_ROWS) -> Any:
    compressed, *_ = pack_request(batch(client_seq, num_rows))
    assert compressed is not None
    return compressed


def plain(request: Any) -> bytes:
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    return b"".join(bytes(each) for each in encode_message("setEmbeddings", CALL, 0, args))


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Shard, ParamServerClient]]:
    """Yield a shard and a connection to it that has said hello as a writer."""
    opened: list[Shard] = []
    async with (
        serve_shards(directory, 1, opened=opened) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        reply = await client.hello(hello_of_writer(SPEC))
        assert reply.compressions == ["zstd"]
        yield opened[0], client


async def value_of_row(client: ParamServerClient, row: int) -> float:
    request = idl.GetEmbeddingsRequest(fqn="t", row_ids=np.array([row], "<i8"), with_states=False, with_versions=False)
    reply = await client.get_embeddings(request)
    return float(np.frombuffer(reply.weights, "<f4")[0])


@pytest.mark.parametrize("loop_bytes", [0, 1 << 20])
async def test_batches_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_bytes: int) -> None:
    """Long and short, compressed and plain batches that are sent at once take effect in order, each once."""
    monkeypatch.setattr(unpacking, "_LOOP_BYTES", loop_bytes)
    async with serving(tmp_path) as (shard, client):

        def send(client_seq: int) -> Any:
            num_rows = NUM_ROWS * 6 if client_seq % 5 == 1 else NUM_ROWS
            if client_seq % 3 == 2:
                return client.set_embeddings(batch(client_seq, 3))
            return client.set_packed(packed(client_seq, num_rows))

        replies = await asyncio.gather(*(send(client_seq) for client_seq in range(1, 41)))
        assert [reply.seq for reply in replies] == list(range(2, 42))
        assert not any(reply.is_duplicate for reply in replies)
        assert (await client.set_packed(packed(7))).is_duplicate
        assert [await value_of_row(client, row) for row in (0, 5, 3599)] == [40.0, 40.0, 36.0]
        await shard.applied()
        assert shard._unpacker.size_bytes == 0


async def test_the_log_has_the_message_itself(tmp_path: Path) -> None:
    """Followers read what they would if the batch had come plain."""
    async with serving(tmp_path) as (_, client):
        await client.set_packed(packed(1))
        reply = await client.fetch_updates(
            idl.FetchUpdatesRequest(server_id=str(tmp_path), from_seq=2, max_bytes=1 << 20, wait_ms=0)
        )
        (update,) = reply.records
        assert bytes(update.body) == plain(batch(1))


async def test_a_batch_waits_for_room(tmp_path: Path) -> None:
    """While earlier batches hold the room for messages a batch waits, and is refused in the end; then it fits."""
    size_bytes = len(plain(batch(1)))
    limits = ServerLimits(max_frame_bytes=size_bytes, max_client_bytes=2 * size_bytes, admission_timeout_s=0.05)
    async with serving(tmp_path) as (shard, client):
        shard._unpacker = Unpacker(limits)
        admission = shard._unpacker._admission
        account = admission.open_account(("run", "rank0"))
        held = admission.admit(account, size_bytes + 1, lambda ticket: None)
        assert isinstance(held, Ticket)
        with pytest.raises(OverloadedError, match="no room for the message in a compressed batch"):
            await client.set_packed(packed(1))
        shard._unpacker._limits = ServerLimits()
        sending = asyncio.create_task(client.set_packed(packed(1)))
        await until(lambda: bool(account.waiters))
        assert not sending.done()
        held.release_bytes()
        assert not (await sending).is_duplicate
        await shard.applied()
        assert shard._unpacker.size_bytes == 0


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (b"\0" * 100, "strict binary"),
        (b"".join(encode_message("status", CALL, 0, idl.ParameterServer.status_args())), "a call of 'status'"),
        (plain(batch(1, 3))[:-1], "SetEmbeddings|setEmbeddings"),
        (b"".join(encode_message("setEmbeddings", CALL, 0, idl.ParameterServer.setEmbeddings_args())), "no request"),
    ],
)
async def test_what_is_no_batch(tmp_path: Path, held: bytes, words: str) -> None:
    """It is refused in a line, holds no room, and the next batch is taken."""
    async with serving(tmp_path) as (shard, client):
        part = idl.PackedPart(size_bytes=len(held), element_bytes=0, data=held)
        with pytest.raises(RequestError, match=f"a compressed batch of client 'rank0': .*({words})"):
            await client.set_packed(idl.SetPackedRequest(compression=1, parts=[part]))
        with pytest.raises(RequestError, match="without parts"):
            await client.set_packed(idl.SetPackedRequest(compression=1, parts=[]))
        assert shard._unpacker.size_bytes == 0
        assert not (await client.set_packed(packed(1))).is_duplicate


async def test_only_a_writer_may(tmp_path: Path) -> None:
    """Without a writer's hello nothing is decompressed."""
    async with (
        serve_shards(tmp_path, 1) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        with pytest.raises(UnauthorizedError):
            await client.set_packed(packed(1))
