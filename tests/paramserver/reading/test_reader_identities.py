"""Lookups by identity over the wire, at a replica."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_service import WAIT_S, FakeService

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.server import Call, ThriftServer
from headrace.schemas.errors import ProtocolError, RequestError, UnknownTableError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.row_records import MISSING, PRESENT
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="users.weight", num_rows=64, dim=2, dtype=DType.FLOAT32, has_identities=True)
PLAIN = TableSpec(fqn="items.weight", num_rows=64, dim=2, dtype=DType.FLOAT32)


class _Replica(FakeService):
    """A replica whose row i has identity `identities[i]`.

    Attributes:
        moves: After each search, what is next in `identities`.
        asked: Number of identities of each search.
        surplus: Bytes too many in its answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.identities: dict[int, int] = {row: row + 1 for row in range(64)}
        self.moves: list[dict[int, int]] = []
        self.asked: list[int] = []
        self.surplus = 0
        self.port = 0

    async def hello(self, call: Call, request: Any) -> Any:
        reply = await super().hello(call, request)
        reply.shards = [idl.ShardAddress(shard=0, host="127.0.0.1", port=self.port)]
        reply.tables = [spec_to_idl(SPEC), spec_to_idl(PLAIN)]
        return reply

    async def find_rows(self, call: Call, request: Any) -> Any:
        wanted = np.frombuffer(request.identities, "<i8")
        self.asked.append(wanted.size)
        row_of = {identity: row for row, identity in self.identities.items()}
        rows = np.array([row_of.get(identity, -1) for identity in wanted.tolist()], "<i8").tobytes()
        if self.moves:
            self.identities = self.moves.pop(0)
        return idl.FindRowsReply(row_ids=rows + bytes(self.surplus), seq=1)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        rows = np.frombuffer(request.row_ids, "<i8")
        identities = np.array([self.identities.get(row, -1) for row in rows.tolist()], "<i8")
        weights = np.repeat(identities, SPEC.dim).astype(np.float32)
        return idl.GetEmbeddingsReply(
            presence=np.ones(rows.size, np.uint8), weights=weights, states=[], seq=1, identities=identities
        )


@asynccontextmanager
async def reading(service: _Replica) -> AsyncIterator[EmbeddingReader]:
    server = ThriftServer(service, limits=service.limits)
    listener = socket.create_server(("127.0.0.1", 0))
    service.port = listener.getsockname()[1]
    await server.start(listener)
    try:
        async with await EmbeddingReader.connect(f"127.0.0.1:{service.port}", timeout_s=WAIT_S) as reader:
            yield reader
    finally:
        await server.close(drain_s=0)


async def test_a_row_that_changes_hands_while_it_is_read() -> None:
    """An identity whose row gets another one after it was found is looked for again."""
    replica = _Replica()
    replica.moves = [{1: 70, 0: 71}, {1: 70, 0: 71}]
    replica.identities = {0: 70}
    async with reading(replica) as reader:
        rows = await reader.get_by_identity(SPEC.fqn, [70, 72, -1])
        assert rows.row_ids.tolist() == [1, -1, -1]
        assert rows.presence.tolist() == [PRESENT, MISSING, MISSING]
        assert rows.weights.tolist() == [[70, 70], [0, 0], [0, 0]]
        assert replica.asked == [2, 1]


async def test_many_identities_are_asked_in_pieces() -> None:
    """More identities than one reply holds are found, in any order, with repeats."""
    replica = _Replica()
    async with reading(replica) as reader:
        for link in reader.links:
            link.hello.limits.max_frame_bytes = 8192
        asked = np.random.default_rng(1).integers(0, 70, 3000)
        found = await asyncio.wait_for(reader.find_rows(SPEC.fqn, asked), WAIT_S)
        assert found.tolist() == [i - 1 if 1 <= i <= 64 else -1 for i in asked.tolist()]
        assert len(replica.asked) > 3 and sum(replica.asked) == asked.size
        assert (await reader.find_rows(SPEC.fqn, [])).tolist() == []


async def test_what_is_refused() -> None:
    """A table without identities, an unknown one, and an answer of another length are errors."""
    replica = _Replica()
    async with reading(replica) as reader:
        for call in (reader.find_rows, reader.get_by_identity):
            with pytest.raises(RequestError):
                await call(PLAIN.fqn, [1])
            with pytest.raises(UnknownTableError):
                await call("no.such", [1])
        replica.surplus = 8
        with pytest.raises(ProtocolError):
            await reader.find_rows(SPEC.fqn, [1])
