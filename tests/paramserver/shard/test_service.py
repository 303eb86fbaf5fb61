"""A whole shard over loopback, with its real log and store."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from text_scripts import Script, scripts

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import Peer
from headrace.paramserver.shard import read_service
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import RequestError, RowRangeError, StorageError, UnavailableError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="items.weight",
    num_rows=1000,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)


@asynccontextmanager
async def _serving(directory: Path, **changes: Any) -> AsyncIterator[tuple[Shard, ParamServerClient]]:
    opened: list[Shard] = []
    async with (
        serve_shards(directory, 1, opened=opened, server_id="a-server", **changes) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        yield opened[0], client


def _hello(epoch: int = 1, *, client: str = "rank0", role: int = 2, **changes: Any) -> Any:
    return hello_of_writer(SPEC, epoch=epoch, client=client, role=role, **changes)


def _set(
    client_seq: int, rows: list[int], value: float, *, epoch: int = 1, step: int | None = None, **more: Any
) -> Any:
    delta = delta_of(SPEC, rows, value, states=value * 2, deleted_row_ids=more.pop("deleted", None))
    step = client_seq * 10 if step is None else step
    return request_of(delta, epoch=epoch, client_seq=client_seq, step=step, time_us=client_seq * 1000, **more)


async def _get(client: ParamServerClient, rows: list[int], fqn: str = SPEC.fqn) -> list[str]:
    """Return what a read says of rows: value and state, and their version."""
    request = idl.GetEmbeddingsRequest(fqn=fqn, row_ids=np.array(rows, "<i8"), with_states=True, with_versions=True)
    reply = await client.get_embeddings(request)
    values = np.frombuffer(reply.weights, "<f4").reshape(len(rows), -1)[:, 0]
    states = np.frombuffer(reply.states[0].data, "<f4")
    versions = zip(np.frombuffer(reply.epochs, "<i8"), np.frombuffer(reply.steps, "<i8"), strict=True)
    found = zip(rows, bytes(reply.presence), values, states, versions, strict=True)
    names = ["missing", "present"]
    return [f"{row} {names[is_there]} {value:g} {state:g} of {e} {s}" for row, is_there, value, state, (e, s) in found]


class Client:
    """A connection to a shard, whose batches are of the epoch of its last hello."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack, self._epoch = path, AsyncExitStack(), 1

    async def __aenter__(self) -> Client:
        self._shard, self._client = await self._stack.enter_async_context(_serving(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def restart(self, *, lost: str | None = None, **changes: Any) -> None:
        """Restart the shard with other settings, and perhaps without its store or its log."""
        await self._stack.aclose()
        if lost is not None:
            shutil.rmtree(self._path / "shard-0000" / lost)
        self._shard, self._client = await self._stack.enter_async_context(_serving(self._path, **changes))

    async def hello(self, epoch: int, *, dim: int = SPEC.dim, **fields: Any) -> str | None:
        """Say hello; tell what is not as for a new run."""
        if dim != SPEC.dim:
            fields["tables"] = [spec_to_idl(dataclasses.replace(SPEC, dim=dim))]
        if fields.get("claims_epoch"):
            fields["tables"] = []
        reply = await self._client.hello(_hello(epoch, **fields))
        self._epoch = epoch
        is_new = (reply.highest_epoch, reply.last_client_seq) == (epoch, 0)
        tables = " ".join(table.fqn for table in reply.tables) or "no tables"
        return None if is_new else f"highest epoch {reply.highest_epoch}, last batch {reply.last_client_seq}, {tables}"

    async def set(
        self, client_seq: int, rows: Any = (), value: Any = 0.0, *, deleted: Any = None, **more: Any
    ) -> str | None:
        """Write the rows of a batch; tell if it is a duplicate."""
        gone = None if deleted is None else np.array([deleted] if isinstance(deleted, int) else deleted, "<i8")
        batch = {"epoch": self._epoch} | more
        rows = [rows] if isinstance(rows, int) else rows
        reply = await self._client.set_embeddings(_set(client_seq, rows, float(value), deleted=gone, **batch))
        return "duplicate" if reply.is_duplicate else None

    async def get(self, rows: int | list[int], *, fqn: str = SPEC.fqn) -> list[str]:
        return await _get(self._client, [rows] if isinstance(rows, int) else rows, fqn)

    async def trim(self) -> None:
        """Remove the log's segments before the last."""
        await asyncio.to_thread(self._shard.log.trim, self._shard.log.last_seq)

    async def status(self) -> str:
        status = await self._client.status()
        tables = " ".join(table.spec.fqn for table in status.tables)
        shown = f"shard {status.shard} of {status.num_shards}, record {status.log_seq}, {status.num_rows_written} rows"
        return f"{shown}, {status.num_connections} connections, {status.num_refused} refused, tables {tables}"

    async def clients(self) -> list[str]:
        """Return the clients that status and samples show alike."""
        told = (await self._client.status()).clients
        sampled = (await self._shard.sampler.sample()).writers
        assert [(w.client, w.cost_percent, w.is_cost_bound) for w in told] == [
            (w.client, w.cost_percent, w.is_cost_bound) for w in sampled
        ]
        return [
            f"{w.client} rank {w.rank} of {w.world_size}: batch {w.last_client_seq}, step {w.step}, "
            f"{'connected' if w.is_connected else 'away'}, cost {w.cost_percent} {w.is_cost_bound}"
            for w in told
        ]


@scripts(__file__, "service")
async def test_service(script: Script, tmp_path: Path) -> None:
    """What a client of a shard gets, also after restarts with what is left."""
    async with Client(tmp_path) as client:
        await script.run_async(client)


async def test_many_batches_in_flight_keep_their_order(tmp_path: Path) -> None:
    """Batches sent without waiting for acks take effect in order."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        replies = await asyncio.gather(*(client.set_embeddings(_set(i, [i % 7], float(i))) for i in range(1, 101)))
        assert [reply.seq for reply in replies] == list(range(2, 102))
        found = [float(line.split()[2]) for line in await _get(client, list(range(7)))]
        assert found == [98.0, 99.0, 100.0, 94.0, 95.0, 96.0, 97.0]


async def test_a_frame_that_comes_twice_is_acked_first_as_new(tmp_path: Path) -> None:
    """The original is acked first, or the client concludes that another writer exists."""
    async with _serving(tmp_path / "s", max_backlog_bytes=64 << 10) as (_, client):
        await client.hello(_hello())
        acks: dict[int, list[bool]] = {client_seq: [] for client_seq in range(1, 11)}

        async def send(client_seq: int) -> None:
            reply = await client.set_embeddings(_set(client_seq, list(range(client_seq % 2, 1000)), 1.0))
            acks[client_seq].append(reply.is_duplicate)

        async with asyncio.TaskGroup() as group:
            for client_seq in acks:
                for _ in range(3):
                    group.create_task(send(client_seq))
        assert all(replies == [False, True, True] for replies in acks.values()), acks


async def test_a_bad_batch_changes_nothing(tmp_path: Path) -> None:
    """It is refused with the reason, takes no client seq, and the connection stays."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        for changes, error, says in (
            ({"rows": [1000]}, RowRangeError, "1000"),
            ({"epoch": 0}, RequestError, "out of range"),
            ({"step": -1}, RequestError, "out of range"),
            ({"client_seq": 0}, RequestError, "below 1"),
            ({"epoch": 9}, RequestError, "has not said hello in epoch 9"),
        ):
            with pytest.raises(error, match=says):
                await client.set_embeddings(_set(**{"client_seq": 1, "rows": [1], "value": 9.0, **changes}))
        assert await _get(client, [1]) == ["1 missing 0 0 of 0 0"]
        assert (await client.set_embeddings(_set(1, [1], 1.0))).seq == 2


async def test_rows_are_not_counted_in_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status asks RocksDB about each of its files in a thread, and once for all tables."""
    asked: list[int] = []

    def estimates(store: RowStore, table_ids: list[int]) -> list[int]:
        asked.append(threading.get_ident())
        return [7] * len(table_ids)

    monkeypatch.setattr(RowStore, "num_rows_estimates", estimates)
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        (table,) = (await client.status()).tables
    assert table.num_rows_estimate == 7
    assert len(asked) == 1 and threading.get_ident() not in asked


async def test_a_log_that_fails_while_idle_stops_the_shard(tmp_path: Path) -> None:
    """The failure shows at the next batch, which is refused as retriable."""
    async with _serving(tmp_path) as (shard, client):
        await client.hello(_hello())
        await client.set_embeddings(_set(1, [1], 1.0))
        shard._ingest._log._writer.failed = StorageError("syncing failed: Input/output error (EIO)")  # type: ignore[attr-defined]
        with pytest.raises(UnavailableError):
            await client.set_embeddings(_set(2, [1], 2.0))
        failure = await asyncio.wait_for(shard.wait_failed(), 10)
        assert isinstance(failure, StorageError)
        assert await _get(client, [1]) == ["1 present 1 2 of 1 10"]


async def test_several_tables_are_read_at_once(tmp_path: Path) -> None:
    """Rows of each table come in the order of the request, from that table alone."""
    others = [dataclasses.replace(SPEC, fqn="b.weight"), dataclasses.replace(SPEC, fqn="c.weight", has_identities=True)]
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(tables=[spec_to_idl(spec) for spec in (SPEC, *others)]))
        deltas = delta_of(SPEC, [5, 7], 1.5), delta_of(others[0], [6, 7], 2.5)
        await client.set_embeddings(request_of(*deltas))
        more = [idl.RowsWanted(fqn=spec.fqn, row_ids=np.array([7], "<i8")) for spec in (others[1], SPEC, others[0])]
        reply = await client.get_embeddings(
            idl.GetEmbeddingsRequest(
                fqn=SPEC.fqn, row_ids=np.array([6, 5], "<i8"), with_states=True, with_versions=False, more=more
            )
        )
        assert [list(bytes(of.presence)) for of in (reply, *reply.more)] == [[0, 1], [0], [1], [1]]
        for of, value in ((reply.more[1], 1.5), (reply.more[2], 2.5)):
            assert np.frombuffer(of.weights, "<f4").tolist() == [value] * SPEC.dim
        assert [of.identities is not None for of in reply.more] == [True, False, False]
        assert all(of.states[0].name == SPEC.states[0].name and of.epochs is None for of in reply.more)


async def test_too_large_reads_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose reply is too long, or has too many rows or tables, is refused before any lookup."""
    with_identities = dataclasses.replace(SPEC, fqn="users.weight", has_identities=True)
    async with _serving(tmp_path, max_frame_bytes=1 << 16) as (shard, client):
        await client.hello(_hello(tables=[spec_to_idl(SPEC), spec_to_idl(with_identities)]))
        await client.set_embeddings(_set(1, [1], 1.0))
        assert len(await _get(client, [1] * 1000)) == 1000
        await shard._applier.close()  # a lookup would raise UnavailableError now
        with pytest.raises(RequestError, match="ask for less at once"):
            await _get(client, [1] * 2000)
        more = idl.RowsWanted(fqn=SPEC.fqn, row_ids=np.ones(1000, np.int64).tobytes())
        request = idl.GetEmbeddingsRequest(more=[more], **vars(more), with_states=True, with_versions=True)
        with pytest.raises(RequestError, match="ask for less at once"):
            await client.get_embeddings(request)
        none = idl.RowsWanted(fqn=SPEC.fqn, row_ids=b"")
        request = idl.GetEmbeddingsRequest(more=[none] * 1024, **vars(none), with_states=False, with_versions=False)
        with pytest.raises(RequestError, match="rows of 1025 tables with one request"):
            await client.get_embeddings(request)
        monkeypatch.setattr(read_service, "MAX_ROWS_READ", 100)
        with pytest.raises(RequestError, match="101 rows with one request"):
            await _get(client, [1] * 101)
        some = idl.RowsWanted(fqn=SPEC.fqn, row_ids=np.ones(51, np.int64).tobytes())
        request = idl.GetEmbeddingsRequest(more=[some], **vars(some), with_states=False, with_versions=False)
        with pytest.raises(RequestError, match="102 rows with one request"):
            await client.get_embeddings(request)


async def test_a_writer_that_disconnects_during_its_hello_is_away(tmp_path: Path) -> None:
    """A connection that ends while its hello becomes durable does not count."""
    async with _serving(tmp_path) as (shard, client):
        peer = Peer("gone:1")
        call = dataclasses.make_dataclass("FakeCall", ["peer"])(peer)
        saying = asyncio.create_task(shard.hello(call, _hello()))
        await asyncio.sleep(0)  # it waits for the log
        peer.is_connected = False
        shard.disconnected(peer)
        await saying
        (writer,) = (await client.status()).clients
        assert not writer.is_connected


async def test_a_snapshot_on_disk_needs_all_shards_there(tmp_path: Path) -> None:
    """A node makes and publishes no snapshot on disk while others have shards, whatever its standbys, and says why."""
    addresses = (("127.0.0.1", 1), ("127.0.0.1", 2))
    async with _serving(tmp_path, addresses=addresses, nodes=("a", "b"), local_shards=(0, 1)) as (_, client):
        await client.hello(_hello(role=idl.Role.ADMIN))
        create = idl.CreateSnapshotRequest(name="one", epoch=0, min_step=-1, wait_ms=0)
        with pytest.raises(RequestError, match="are on several nodes, so its snapshots go to an object store"):
            await client.create_snapshot(create)
        assert not (tmp_path / "snapshots").exists()
        manifest = SnapshotManifest(
            name="one",
            created_us=1,
            parts=tuple(
                ShardPart(shard=shard, server_id="a-server", seq=1, epoch=0, step=-1, tables=(), files=())
                for shard in range(2)
            ),
        )
        finish = idl.FinishSnapshotRequest(name="one", manifest=manifest.encode().decode())
        with pytest.raises(RequestError, match="are on several nodes, so its snapshots go to an object store"):
            await client.finish_snapshot(finish)
