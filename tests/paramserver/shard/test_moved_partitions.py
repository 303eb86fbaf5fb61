"""Shards whose partitions move: what clients of the shards get, and what is on disk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from empty_loads import LOAD_NOTHING, NOTHING
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_to_writer

from headrace.paramserver.replay.source import ReplayRange, ReplaySource
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.store.copy_chunks import CopyRun, encode_runs
from headrace.schemas.errors import ProtocolMismatchError, RequestError, UnauthorizedError, WrongRoutingError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.move_records import ImportRecord, LoadRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32, has_identities=True)
FIRST = PartitionMap.first(2)
ROWS = np.arange(400)
PARTITIONS = FIRST.partitions_of_rows(SPEC.seed, ROWS)
AT_SOURCE = ROWS[np.equal(PARTITIONS % 2, 0)]
MOVE = Move.of_map(FIRST, tuple(range(0, 1024, 4)), move_id="a", destination=1)
MOVED_MAP = MOVE.apply_to(FIRST)
MOVING = ROWS[np.isin(PARTITIONS, MOVE.partitions)]
STAYING = np.setdiff1d(AT_SOURCE, MOVING)


class _Served:
    """Two shards; clients that know partitions, each the run's only writer there."""

    def __init__(self, shards: list[Shard], ports: list[int], clients: list[ParamServerClient]) -> None:
        self.shards, self.ports, self.clients = shards, ports, clients
        self._client_seqs = [0, 0]

    async def write(self, shard: int, row_ids: Any) -> None:
        identities = np.asarray(row_ids, "<i8").tobytes()
        delta = delta_of(SPEC, row_ids, 1.0, identities=identities)
        client_seq = self._client_seqs[shard] + 1
        await self.clients[shard].set_embeddings(request_of(delta, client_seq=client_seq))
        self._client_seqs[shard] = client_seq

    async def read(self, shard: int, row_ids: Any) -> list[int]:
        """Return the presence of rows."""
        data = np.asarray(row_ids, "<i8").tobytes()
        request = idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=data, with_states=False, with_versions=False)
        return list((await self.clients[shard].get_embeddings(request)).presence)

    async def move(self, shard: int, *records: Any) -> list[int]:
        partitions = self.shards[shard]._ingest
        return [await partitions.write_move(record) for record in records]

    async def release(self) -> int:
        """Move MOVE's partitions away from shard 0, whose log then has a SEAL and a RELEASE; return the seal's seq."""
        (seal,) = await self.move(0, MoveRecord(step=MoveStep.SEAL, move=MOVE))
        position = Position(seq=seal, mark=None)
        await self.move(0, MoveRecord(step=MoveStep.RELEASE, move=MOVE, position=position))
        return seal


@asynccontextmanager
async def _serving(path: Path, *, knows_partitions: bool = True) -> AsyncIterator[_Served]:
    async with serve_to_writer(path, SPEC, knows_partitions=knows_partitions) as parts:
        yield _Served(*parts)


async def _tell(port: int, partitions: bytes, *, role: int = idl.Role.ADMIN) -> Any:
    async with await ParamServerClient.connect("127.0.0.1", port) as node:
        return await node.hello(hello_of_nobody(role, knows_partitions=True, partitions=partitions))


async def test_released_rows_are_refused_with_the_map(tmp_path: Path) -> None:
    """Writes and reads of rows that were given away name the new owner; nobody gets zeros for them."""
    async with _serving(tmp_path) as served:
        await served.write(0, AT_SOURCE)
        digest = idl.DigestRowsRequest(SPEC.fqn, 0, 2**63 - 1, 0, 4, 256, with_presence=False)
        assert sum(np.frombuffer((await served.clients[0].digest_rows(digest)).counts, "<i8")) == AT_SOURCE.size
        await served.release()
        for refused in (served.write(0, MOVING[:1]), served.read(0, [*STAYING, MOVING[0]])):
            with pytest.raises(
                WrongRoutingError, match=rf"row {MOVING[0]} belongs to shard 1, this is shard 0"
            ) as caught:
                await refused
            assert PartitionMap.decode(caught.value.partitions) == MOVED_MAP
            assert [(place.shard, place.port) for place in caught.value.shards] == [*enumerate(served.ports)]
        await served.write(0, STAYING)
        assert set(await served.read(0, STAYING)) == {PRESENT}

        counted = await served.clients[0].digest_rows(digest)
        assert sum(np.frombuffer(counted.counts, "<i8")) == STAYING.size
        bits = np.packbits(MOVED_MAP.owners == 0, bitorder="little")
        assert counted.served == bits.tobytes()


async def test_maps_are_told_and_heard_and_outlive_a_restart(tmp_path: Path) -> None:
    """Hello and status tell the map; a node's newer one is taken over in the log, and only from an ADMIN."""
    async with _serving(tmp_path) as served:
        for client in served.clients:
            assert PartitionMap.decode((await client.status()).partitions) == FIRST
        await served.release()
        reply = await _tell(served.ports[0], FIRST.encode())
        assert PartitionMap.decode(reply.partitions) == MOVED_MAP
        with pytest.raises(UnauthorizedError):
            await _tell(served.ports[1], reply.partitions, role=idl.Role.WRITER)
        with pytest.raises(RequestError):
            await _tell(served.ports[1], PartitionMap.first(3).encode())
        for _ in range(2):
            assert (await _tell(served.ports[1], reply.partitions)).partitions == reply.partitions
        seq = served.shards[1].log.last_seq
        assert (await _tell(served.ports[1], FIRST.encode())).partitions == reply.partitions
        assert served.shards[1].log.last_seq == seq
        assert served.shards[1]._ingest.partitions.logged == FIRST
    async with _serving(tmp_path) as served:
        for client in served.clients:
            assert PartitionMap.decode((await client.status()).partitions) == MOVED_MAP
        with pytest.raises(WrongRoutingError):
            await served.read(0, MOVING)


async def test_clients_without_maps_get_errors_once_a_partition_has_moved(tmp_path: Path) -> None:
    """All calls of such a client are refused then, its hello too; before, status names it."""
    async with _serving(tmp_path, knows_partitions=False) as served:
        status = await served.clients[0].status()
        assert list(status.without_partitions) == ["run/rank0"]
        await served.read(0, AT_SOURCE)
        await served.release()
        for refused in (
            served.read(0, STAYING),
            served.write(0, STAYING),
            served.clients[0].hello(hello_of_writer(SPEC)),
            served.clients[0].hello(hello_of_nobody()),
        ):
            with pytest.raises(ProtocolMismatchError, match="does not know partitions"):
                await refused
        await served.clients[0].hello(hello_of_writer(SPEC, knows_partitions=True))
        assert not (await served.clients[0].status()).without_partitions
        await served.write(0, STAYING)


async def test_the_directory_is_marked_before_the_first_move(tmp_path: Path) -> None:
    """Earlier releases open a directory until a record is written that they do not know, and refuse it then."""
    manifest = tmp_path / "headrace.json"
    async with _serving(tmp_path) as served:
        await served.write(0, AT_SOURCE)
        before = json.loads(manifest.read_bytes())
        with pytest.raises(RequestError):  # marked before it is checked: harmless
            await served.move(0, MoveRecord(step=MoveStep.UNSEAL, move=MOVE))
        after = json.loads(manifest.read_bytes())
        assert after == before | {"format_version": 4, "num_partitions": 1024}
        await served.release()
    manifest.write_bytes(json.dumps(before).encode())  # as after a restore of logs
    async with _serving(tmp_path):
        assert json.loads(manifest.read_bytes()) == after


async def test_an_import_below_the_floor_counts_for_rows_that_are_loaded(tmp_path: Path) -> None:
    """It counts only where its rows are present, and rows that came right before it are, though RocksDB waits."""
    row = MOVING[:1]
    delta = delta_of(SPEC, row, 5.0, identities=np.asarray(row, "<i8").tobytes())
    request = request_of(delta, client_seq=1, step=3, version_epoch=1, ends_step=False)
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    body = memoryview(b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 1, args)))
    header = {"kind": 1, "run": "run", "client": "rank0", "client_seq": 1, "tables": [SPEC.fqn], "step": 3}
    header |= {"time_us": 1, "ends_step": False, "below_floor": [SPEC.fqn]}
    record = ImportRecord(move_id="a", source=0, position=Position(seq=2, mark=None), record=header)
    layout = RecordLayout(SPEC, SPEC.whole)
    loaded = np.zeros(1, layout.dtype)
    layout.set_header(loaded, ..., epoch=1, step=2, time_us=1)
    async with _serving(tmp_path) as served:
        ingest = served.shards[1]._ingest
        run = CopyRun(ingest.catalog.find(SPEC.fqn).table_id, SPEC.whole, row, loaded.view(f"V{loaded.itemsize}"))
        last = LoadRecord(move_id="a", number=1, is_last=True)
        await served.move(1, MoveRecord(step=MoveStep.COPY, move=MOVE, position=Position(seq=1, mark=None)))
        await ingest.write_imports([(last, 1, memoryview(encode_runs([run]))), (record, 1, body)])
        assert ingest.num_rows_ignored == 0
        await served.move(1, MoveRecord(step=MoveStep.ACTIVATE, move=MOVE, position=Position(seq=2, mark=None)))
        data = row.astype("<i8").tobytes()
        wanted = idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=data, with_states=False, with_versions=True)
        reply = await served.clients[1].get_embeddings(wanted)
        assert np.frombuffer(reply.steps, "<i8").tolist() == [3]


async def test_imported_records_are_applied_and_not_served(tmp_path: Path) -> None:
    """Records of the source become the destination's: their rows show from the activation on, also after a crash."""
    copy = MoveRecord(step=MoveStep.COPY, move=MOVE, position=Position(seq=1, mark=None))
    delta = delta_of(SPEC, MOVING, 1.0, identities=np.asarray(MOVING, "<i8").tobytes())
    request = request_of(delta, client_seq=7)
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    body = memoryview(b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 1, args)))
    batch = {"kind": 1, "run": "run", "client": "rank0", "client_seq": 7, "tables": [SPEC.fqn]}
    batch |= {"step": 7, "time_us": 1, "ends_step": True}
    record = ImportRecord(move_id="a", source=0, position=Position(seq=2, mark=None), record=batch)
    async with _serving(tmp_path) as served:
        ingest = served.shards[1]._ingest
        with pytest.raises(RequestError, match="before its copy"):
            await ingest.write_imports([(record, 1, body)])
        await served.move(1, copy)
        with pytest.raises(RequestError, match="before all of its copy is loaded"):
            await ingest.write_imports([(record, 1, body)])
        await ingest.write_imports([(LOAD_NOTHING, 1, NOTHING), (record, 1, body)])
        with pytest.raises(WrongRoutingError):
            await served.read(1, MOVING)
        assert ingest.sessions.find("run", "rank0").last_client_seq == 0
    async with _serving(tmp_path) as served:
        position = Position(seq=2, mark=None)
        assert served.shards[1]._ingest.partitions.moves.find("a").imported == position
        await served.move(1, MoveRecord(step=MoveStep.ACTIVATE, move=MOVE, position=position))
        assert set(await served.read(1, MOVING)) == {PRESENT}
        await served.write(1, MOVING)

    source = ReplaySource(tmp_path / "shard-0001", ReplayRange())
    assert source.summarize().num_rows == 2 * MOVING.size
    rows = [np.frombuffer(batch.deltas[0].row_ids, "<i8").tolist() for batch in source.batches(source.logs[0])]
    assert rows == [MOVING.tolist()] * 2
