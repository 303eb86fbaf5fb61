"""Replicas of a server whose partitions move, with real shards; the test writes the records of the move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from empty_loads import LOAD_NOTHING, NOTHING
from replica_of import replica_of
from set_embeddings import delta_of, request_of
from shard_servers import serve_to_writer

from headrace.paramserver.log.interface import KIND_BATCH
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import GoneError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.move_records import ImportRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

WAIT_S = 60.0
SPEC = TableSpec(fqn="items.weight", num_rows=200, dim=1, dtype=DType.FLOAT32)
ROWS = np.arange(SPEC.num_rows)
FIRST = PartitionMap.first(2)
MOVE = Move.of_map(FIRST, tuple(range(0, 1024, 4)), move_id="a", destination=1)
PARTITIONS = FIRST.partitions_of_rows(SPEC.seed, ROWS)
MOVING = ROWS[np.isin(PARTITIONS, MOVE.partitions)]
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)


class _Server:
    """Two shards, and the only trainer of their table."""

    def __init__(self, shards: list[Shard], ports: list[int], clients: list[ParamServerClient]) -> None:
        self.address = f"127.0.0.1:{ports[0]}"
        self.map, self.values = FIRST, np.zeros(SPEC.num_rows, np.float32)
        self._shards, self._clients, self._client_seqs = shards, clients, [0, 0]
        self.seal = 0

    async def train(self, step: int, rows: Any = ROWS) -> None:
        """Write rows with the step as their value, and end the step on both shards."""
        self.values[rows] = step
        owners = self.map.shards_of_rows(SPEC.seed, ROWS)
        for shard, client in enumerate(self._clients):
            here = np.intersect1d(rows, ROWS[owners == shard])
            self._client_seqs[shard] += 1
            deltas = [delta_of(SPEC, here, float(step))] if here.size else []
            names = {"client_seq": self._client_seqs[shard], "step": step, "time_us": step}
            await client.set_embeddings(request_of(*deltas, **names))

    async def write_move(self, shard: int, step: MoveStep, position: int | None = None) -> int:
        at = None if position is None else Position(seq=position, mark=None)
        return await self._shards[shard]._ingest.write_move(MoveRecord(step=step, move=MOVE, position=at))

    async def copy(self) -> None:
        """Bring all that the moving rows are to the destination, as one record of the source's."""
        source, destination = (shard._ingest for shard in self._shards)
        await self.write_move(1, MoveStep.COPY, source.accepted_seq - 1)
        args = idl.ParameterServer.setEmbeddings_args(
            request=request_of(delta_of(SPEC, MOVING, self.values[MOVING]), step=int(self.values[MOVING[0]]))
        )
        body = b"".join(encode_message("setEmbeddings", CALL, 1, args))
        position = Position(seq=source.accepted_seq, mark=None)
        header = {"kind": KIND_BATCH, "tables": [SPEC.fqn]}
        record = ImportRecord(move_id="a", source=0, position=position, record=header)
        await destination.write_imports([(LOAD_NOTHING, 1, NOTHING), (record, 1, memoryview(body))])

    async def release(self) -> None:
        self.seal = await self.write_move(0, MoveStep.SEAL)
        await self.write_move(0, MoveStep.RELEASE, self.seal)
        self.map = MOVE.apply_to(self.map)

    async def activate(self) -> None:
        await self.write_move(1, MoveStep.ACTIVATE, self.seal)

    async def shows(self, replica: EmbeddingReplica, step: int) -> None:
        """Wait until a replica is at a step, and check all rows."""
        await asyncio.to_thread(replica.wait_for, step, timeout_s=WAIT_S)
        found = await asyncio.to_thread(replica.lookup, SPEC.fqn, ROWS)
        assert found[:, 0].tolist() == self.values.tolist()


@asynccontextmanager
async def _serving(path: Path) -> AsyncIterator[_Server]:
    async with serve_to_writer(path, SPEC) as parts:
        yield _Server(*parts)


@pytest.mark.parametrize("consistency", ["latest", "step"])
async def test_a_replica_follows_rows_from_shard_to_shard(tmp_path: Path, consistency: str) -> None:
    """It stays equal to what the trainer wrote, and an audit finds it so; one that begins later too."""
    async with _serving(tmp_path) as server:
        await server.train(1)
        async with replica_of(server.address, consistency=consistency, fetch_wait_s=0.2) as replica:
            await server.shows(replica, 1)
            await server.copy()
            await server.train(2, np.setdiff1d(ROWS, MOVING))
            await server.shows(replica, 2)
            await server.release()
            await server.activate()
            await server.train(3, MOVING[::2])
            await server.shows(replica, 3)
            report = await asyncio.to_thread(replica.audit)
            assert report.is_equal and [table.num_rows for table in report.tables] == [ROWS.size]
            assert replica.failure is None
        async with replica_of(server.address, consistency=consistency, fetch_wait_s=0.2) as replica:
            await server.shows(replica, 3)


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_copy_of_a_snapshot_has_each_row_from_its_owner(tmp_path: Path, is_on_disk: bool) -> None:
    """Rows that the source has not purged, and the destination has newer, are read from the destination's part."""
    settings: dict[str, Any] = {"fetch_wait_s": 0.2}
    if is_on_disk:
        settings |= {"storage": {"*": DiskStorage(memory_bytes=4096)}, "disk_dir": tmp_path / "disk"}
    async with _serving(tmp_path / "data") as server:
        await server.train(1)
        await server.copy()
        await server.release()
        for name in ("early", "late"):
            await create_snapshot(server.address, dial=ADMIN, name=name, timeout_s=WAIT_S)
            if name == "early":
                await server.activate()
                await server.train(2)
        for name in ("early", "late"):
            snapshot = tmp_path / "data" / "snapshots" / name
            if name == "early":
                with pytest.raises(GoneError, match="made while partitions moved"):
                    await asyncio.to_thread(lambda: EmbeddingReplica(server.address, snapshot=snapshot, **settings))  # noqa: B023
                continue
            async with replica_of(server.address, snapshot=snapshot, **settings) as replica:
                await server.shows(replica, 2)
                await server.train(3)
                await server.shows(replica, 3)
