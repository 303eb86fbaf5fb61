"""A whole shard over loopback, with its real log and store."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import Peer
from headrace.paramserver.shard import service as shard_module
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import (
    CorruptionError,
    FencedError,
    NonFiniteError,
    ProtocolMismatchError,
    RequestError,
    RowRangeError,
    SequenceGapError,
    SpecMismatchError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    UnknownTableError,
)
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
MISSING, PRESENT, DELETED = 0, 1, 2


@asynccontextmanager
async def _serving(directory: Path, **changes: Any) -> AsyncIterator[tuple[Shard, ParamServerClient]]:
    opened: list[Shard] = []
    async with (
        serve_shards(directory, 1, opened=opened, server_id="a-server", **changes) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        yield opened[0], client


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ParamServerClient]:
    """Return a connection of a writer in epoch 1 to a new shard."""
    async with _serving(tmp_path) as (_, connection):
        await connection.hello(_hello())
        yield connection


def _hello(epoch: int = 1, *, client: str = "rank0", role: int = 2, **changes: Any) -> Any:
    return hello_of_writer(SPEC, epoch=epoch, client=client, role=role, **changes)


def _set(
    client_seq: int, rows: list[int], value: float, *, epoch: int = 1, step: int | None = None, **more: Any
) -> Any:
    delta = delta_of(SPEC, rows, value, states=value * 2, deleted_row_ids=more.pop("deleted", None))
    step = client_seq * 10 if step is None else step
    return request_of(delta, epoch=epoch, client_seq=client_seq, step=step, time_us=client_seq * 1000, **more)


async def _get(client: ParamServerClient, rows: list[int]) -> dict[str, Any]:
    reply = await client.get_embeddings(
        idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=np.array(rows, "<i8"), with_states=True, with_versions=True)
    )
    weights = np.frombuffer(reply.weights, "<f4").reshape(len(rows), SPEC.dim)
    return {
        "presence": list(bytes(reply.presence)),
        "values": weights[:, 0].tolist(),
        "states": np.frombuffer(reply.states[0].data, "<f4").tolist(),
        "steps": np.frombuffer(reply.steps, "<i8").tolist(),
        "epochs": np.frombuffer(reply.epochs, "<i8").tolist(),
        "seq": reply.seq,
    }


async def test_rows_come_back_with_states_and_versions(client: ParamServerClient) -> None:
    """An acked row has its weights, states and version; an unwritten one is missing and zero."""
    reply = await client.set_embeddings(_set(1, [5, 999], 1.5))
    assert (reply.seq, reply.is_duplicate) == (2, False)  # seq 1 is the hello
    got = await _get(client, [999, 7, 5])
    assert got == {
        "presence": [PRESENT, MISSING, PRESENT],
        "values": [1.5, 0, 1.5],
        "states": [3, 0, 3],
        "steps": [10, 0, 10],
        "epochs": [1, 0, 1],
        "seq": 2,
    }


async def test_a_resend_has_no_effect_and_a_gap_is_refused(client: ParamServerClient) -> None:
    """Batch 1 after batch 2 changes nothing, and batch 4 before 3 is refused."""
    await client.set_embeddings(_set(1, [1], 1.0))
    await client.set_embeddings(_set(2, [1], 2.0))
    assert (await client.set_embeddings(_set(1, [1], 1.0))).is_duplicate
    with pytest.raises(SequenceGapError) as caught:
        await client.set_embeddings(_set(4, [1], 4.0))
    assert caught.value.expected_seq == 3
    assert (await _get(client, [1]))["values"] == [2.0]


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


async def test_many_batches_in_flight_keep_their_order(client: ParamServerClient) -> None:
    """Batches sent without waiting for acks take effect in order."""
    replies = await asyncio.gather(*(client.set_embeddings(_set(i, [i % 7], float(i))) for i in range(1, 101)))
    assert [reply.seq for reply in replies] == list(range(2, 102))
    got = await _get(client, list(range(7)))
    assert got["values"] == [98.0, 99.0, 100.0, 94.0, 95.0, 96.0, 97.0]


async def test_a_newer_epoch_fences_the_older(tmp_path: Path) -> None:
    """After a newer epoch's hello, the older one may neither write nor say hello."""
    async with _serving(tmp_path) as (_, client):
        assert (await client.hello(_hello(0))).highest_epoch == 0
        await client.hello(_hello(1))
        await client.set_embeddings(_set(1, [1], 1.0))
        reply = await client.hello(_hello(2))
        assert (reply.highest_epoch, reply.last_client_seq) == (2, 0)
        with pytest.raises(FencedError) as caught:
            await client.set_embeddings(_set(2, [1], 2.0))
        assert caught.value.epoch == 2
        with pytest.raises(FencedError):
            await client.hello(_hello(1))
        assert (await _get(client, [1]))["values"] == [1.0]


@pytest.mark.parametrize("store_is_lost", [False, True], ids=["clean stop", "store lost"])
async def test_everything_acked_is_there_after_a_restart(tmp_path: Path, store_is_lost: bool) -> None:
    """Rows, tables, sessions and fencing come back from the store or from the log alone."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(3))
        for i in range(1, 6):
            await client.set_embeddings(_set(i, [i, 500], float(i), epoch=3))
    if store_is_lost:
        shutil.rmtree(tmp_path / "shard-0000" / "store")
    async with _serving(tmp_path) as (_, client):
        reply = await client.hello(_hello(3))
        assert (reply.last_client_seq, reply.highest_epoch) == (5, 3)
        assert [table.fqn for table in reply.tables] == [SPEC.fqn]
        got = await _get(client, [1, 5, 500])
        assert (got["values"], got["epochs"]) == ([1.0, 5.0, 5.0], [3, 3, 3])
        assert (await client.set_embeddings(_set(5, [500], 9.0, epoch=3))).is_duplicate
        with pytest.raises(FencedError):
            await client.set_embeddings(_set(6, [500], 9.0, epoch=2))
        await client.set_embeddings(_set(6, [500], 6.0, epoch=3))
        assert (await _get(client, [500]))["values"] == [6.0]


async def test_a_log_that_has_lost_records_stops_the_start(tmp_path: Path) -> None:
    """A store ahead of its log is refused: serving it would forget acked batches."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        await client.set_embeddings(_set(1, [1], 1.0))
    shutil.rmtree(tmp_path / "shard-0000" / "log")
    with pytest.raises(CorruptionError, match="records are lost"):
        async with _serving(tmp_path):
            pass


async def test_a_deleted_row_is_a_tombstone(client: ParamServerClient) -> None:
    """A tombstone has a version and zeros, and a later update brings the row back."""
    await client.set_embeddings(_set(1, [1, 2], 1.0))
    await client.set_embeddings(_set(2, [], 0.0, deleted=np.array([1, 3], "<i8")))
    got = await _get(client, [1, 2, 3])
    assert (got["presence"], got["values"]) == ([DELETED, PRESENT, DELETED], [0, 1.0, 0])
    assert got["steps"] == [20, 10, 20]
    await client.set_embeddings(_set(3, [1], 3.0))
    assert (await _get(client, [1]))["presence"] == [PRESENT]


async def test_imported_rows_never_overwrite_newer_ones(tmp_path: Path) -> None:
    """A batch with its own version writes only rows and tombstones with an older version, applied or not."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(5))
        await client.set_embeddings(_set(1, [1], 1.0, epoch=5))
        await client.set_embeddings(_set(2, [], 0.0, epoch=5, deleted=np.array([3], "<i8")))
        await client.set_embeddings(_set(3, [1, 2, 3], 7.0, epoch=5, step=5, version_epoch=4))
        got = await _get(client, [1, 2, 3])
        assert (got["presence"], got["values"]) == ([PRESENT, PRESENT, DELETED], [1.0, 7.0, 0])
        await client.set_embeddings(_set(4, [1, 2, 3], 8.0, epoch=5, step=5, version_epoch=6))
        got = await _get(client, [1, 2, 3])
        assert (got["values"], got["epochs"]) == ([8.0] * 3, [6] * 3)
        assert (await client.hello(_hello(0))).highest_epoch == 6


@pytest.mark.parametrize(
    ("request_changes", "error", "says"),
    [
        ({"rows": [1000]}, RowRangeError, "1000"),
        ({"epoch": 0}, RequestError, "out of range"),
        ({"step": -1}, RequestError, "out of range"),
        ({"client_seq": 0}, RequestError, "below 1"),
        ({"epoch": 9}, RequestError, "has not said hello in epoch 9"),
        ({"version_epoch": 0}, RequestError, "out of range"),
    ],
)
async def test_a_bad_batch_changes_nothing(
    tmp_path: Path, request_changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """It is refused with the reason, takes no client seq, and the connection stays."""
    changes = {"client_seq": 1, "rows": [1], "value": 9.0} | request_changes
    async with _serving(tmp_path) as (shard, client):
        await client.hello(_hello())
        with pytest.raises(error, match=says):
            await client.set_embeddings(_set(**changes))
        assert (await _get(client, [1]))["presence"] == [MISSING]
        assert (await client.set_embeddings(_set(1, [1], 1.0))).seq == 2
        assert shard is not None


async def test_steps_of_a_client_only_rise(client: ParamServerClient) -> None:
    """A step that goes back would give newer rows an older version."""
    await client.set_embeddings(_set(1, [1], 1.0, step=7))
    with pytest.raises(RequestError, match="step 6 after step 7"):
        await client.set_embeddings(_set(2, [1], 1.0, step=6))
    await client.set_embeddings(_set(2, [1], 2.0, step=7))


async def test_hello_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    """Another protocol version, another table shape and a nameless writer are refused."""
    async with _serving(tmp_path) as (_, client):
        with pytest.raises(ProtocolMismatchError):
            await client.hello(_hello(protocol_version=99))
        await client.hello(_hello())
        with pytest.raises(SpecMismatchError, match="dim 4 ≠ 8"):
            await client.hello(_hello(tables=[spec_to_idl(dataclasses.replace(SPEC, dim=8))]))
        with pytest.raises(RequestError, match="not a writer"):
            await client.hello(_hello(client=""))
        with pytest.raises(UnknownTableError):
            await client.get_embeddings(
                idl.GetEmbeddingsRequest(fqn="no", row_ids=b"", with_states=False, with_versions=False)
            )


async def test_only_a_writer_writes(tmp_path: Path) -> None:
    """A connection that has not said hello as a writer cannot change anything."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(0, role=1, tables=[]))
        with pytest.raises(UnauthorizedError):
            await client.set_embeddings(_set(1, [1], 1.0))


async def test_status_shows_the_state(client: ParamServerClient) -> None:
    """A status has the log, tables and clients as of the calls before."""
    await client.set_embeddings(_set(1, [1, 2, 3], 1.0))
    status = await client.status()
    assert (status.shard, status.num_shards, status.log_seq, status.num_rows_written) == (0, 1, 2, 3)
    assert (status.num_connections, status.num_refused) == (1, 0)
    (table,), (writer,) = status.tables, status.clients
    assert table.spec.fqn == SPEC.fqn
    assert (writer.client, writer.last_client_seq, writer.step, writer.is_connected) == ("rank0", 1, 10, True)


async def test_status_shows_what_a_trainer_tells_of_its_cost(tmp_path: Path) -> None:
    """A connected trainer has the cost that came with its last step; one that is away, or tells nothing, has none."""
    async with _serving(tmp_path) as (shard, client):
        await client.hello(_hello())
        await client.set_embeddings(_set(1, [1], 1.0))
        (writer,) = (await client.status()).clients
        assert (writer.cost_percent, writer.is_cost_bound) == (None, None)
        await client.set_embeddings(_set(2, [1], 1.0, cost_percent=2.5, is_cost_bound=True))
        (writer,), (sampled,) = (await client.status()).clients, (await shard.sampler.sample()).writers
        assert (writer.cost_percent, writer.is_cost_bound) == (2.5, True)
        assert (sampled.cost_percent, sampled.is_cost_bound) == (2.5, True)
        await client.hello(_hello(client="rank1"))
        others = {each.client: each.cost_percent for each in (await client.status()).clients}
        assert others == {"rank0": None, "rank1": None}


async def test_rows_are_not_counted_in_the_event_loop(
    client: ParamServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status asks RocksDB about each of its files in a thread, and once for all tables."""
    asked: list[int] = []

    def estimates(store: RowStore, table_ids: list[int]) -> list[int]:
        asked.append(threading.get_ident())
        return [7] * len(table_ids)

    monkeypatch.setattr(RowStore, "num_rows_estimates", estimates)
    (table,) = (await client.status()).tables
    assert table.num_rows_estimate == 7
    assert len(asked) == 1 and threading.get_ident() not in asked


async def test_an_epoch_is_claimed_once(tmp_path: Path) -> None:
    """The second trainer that claims an epoch is fenced with the highest one."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(4, claims_epoch=True))
        with pytest.raises(FencedError) as caught:
            await client.hello(_hello(4, client="rank0", claims_epoch=True))
        assert caught.value.epoch == 4
        assert (await client.hello(_hello(4))).last_client_seq == 0  # its owner may say hello again
        await client.hello(_hello(5, claims_epoch=True))


async def test_an_absurd_epoch_is_refused(tmp_path: Path) -> None:
    """Neither a hello nor imported rows can use up the epochs of later runs."""
    async with _serving(tmp_path) as (_, client):
        with pytest.raises(RequestError, match="too far above 0"):
            await client.hello(_hello(2**32 - 1, client="fuzzer"))
        await client.hello(_hello(1))
        with pytest.raises(RequestError, match="too far above 1"):
            await client.set_embeddings(_set(1, [1], 1.0, version_epoch=2**32 - 1))
        await client.set_embeddings(_set(1, [1], 1.0))
        highest = (await client.hello(_hello(0))).highest_epoch
        await client.hello(_hello(highest + 1, claims_epoch=True))
        await client.set_embeddings(_set(1, [1], 2.0, epoch=highest + 1))
        assert (highest, (await _get(client, [1]))["values"]) == (1, [2.0])


async def test_a_log_that_fails_while_idle_stops_the_shard(tmp_path: Path) -> None:
    """The failure shows at the next batch, which is refused as retriable."""
    async with _serving(tmp_path) as (shard, client):
        await client.hello(_hello())
        await client.set_embeddings(_set(1, [1], 1.0))
        shard._ingest._log._writer.failed = StorageError("syncing failed: Input/output error (EIO)")  # type: ignore[attr-defined]
        with pytest.raises(UnavailableError, match="EIO"):
            await client.set_embeddings(_set(2, [1], 2.0))
        failure = await asyncio.wait_for(shard.wait_failed(), 10)
        assert isinstance(failure, StorageError)
        assert (await _get(client, [1]))["values"] == [1.0]


async def test_a_client_without_ranks_only_imports_rows(tmp_path: Path) -> None:
    """A client without ranks needs a `version_epoch` in each batch."""
    async with _serving(tmp_path) as (_, client):
        hello = _hello()
        hello.world_size = 0
        await client.hello(hello)
        with pytest.raises(RequestError, match="version_epoch is missing"):
            await client.set_embeddings(_set(1, [1], 1.0))
        await client.set_embeddings(_set(1, [1], 2.0, version_epoch=1))
        assert (await _get(client, [1]))["values"] == [2.0]


async def test_acked_rows_are_recovered_under_stricter_settings(tmp_path: Path) -> None:
    """NaN in the log is applied even if the shard would refuse it now."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        await client.set_embeddings(_set(1, [1], float("nan")))
    shutil.rmtree(tmp_path / "shard-0000" / "store")
    async with _serving(tmp_path, non_finite="reject") as (_, client):
        await client.hello(_hello())
        assert np.isnan((await _get(client, [1]))["values"][0])
        with pytest.raises(NonFiniteError):
            await client.set_embeddings(_set(2, [1], float("nan")))


async def test_a_lost_store_is_noticed_when_its_log_has_been_trimmed(tmp_path: Path) -> None:
    """Records in neither store nor log stop the start for good."""
    for number in (1, 2):  # each start creates a segment
        async with _serving(tmp_path) as (shard, client):
            await client.hello(_hello())
            await client.set_embeddings(_set(number, [1], 1.0))
            await asyncio.to_thread(shard.log.trim, shard.log.last_seq)
    shutil.rmtree(tmp_path / "shard-0000" / "store")
    with pytest.raises(CorruptionError, match=r"seq 1 .* are lost"):
        async with _serving(tmp_path):
            pass


async def test_several_tables_are_read_at_once(tmp_path: Path) -> None:
    """Rows of each table come in the order of the request, from that table alone."""
    others = [dataclasses.replace(SPEC, fqn="b.weight"), dataclasses.replace(SPEC, fqn="c.weight", has_identities=True)]
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello(tables=[spec_to_idl(spec) for spec in (SPEC, *others)]))
        await client.set_embeddings(_set(1, [5, 7], 1.5))
        more = [idl.RowsWanted(fqn=spec.fqn, row_ids=np.array([7], "<i8")) for spec in (others[1], SPEC, others[0])]
        reply = await client.get_embeddings(
            idl.GetEmbeddingsRequest(
                fqn=SPEC.fqn, row_ids=np.array([6, 5], "<i8"), with_states=True, with_versions=False, more=more
            )
        )
        assert [list(bytes(of.presence)) for of in (reply, *reply.more)] == [[0, 1], [0], [1], [0]]
        assert np.frombuffer(reply.more[1].weights, "<f4").tolist() == [1.5] * SPEC.dim
        assert [of.identities is not None for of in reply.more] == [True, False, False]
        assert all(of.states[0].name == SPEC.states[0].name and of.epochs is None for of in reply.more)


async def test_too_large_reads_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose reply is too long, or has too many rows or tables, is refused before any lookup."""
    with_identities = dataclasses.replace(SPEC, fqn="users.weight", has_identities=True)
    async with _serving(tmp_path, max_frame_bytes=1 << 16) as (shard, client):
        await client.hello(_hello(tables=[spec_to_idl(SPEC), spec_to_idl(with_identities)]))
        await client.set_embeddings(_set(1, [1], 1.0))
        assert (await _get(client, [1] * 1000))["values"] == [1.0] * 1000
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
        with pytest.raises(RequestError, match="ask for less at once"):
            await client.find_rows(idl.FindRowsRequest(fqn=with_identities.fqn, identities=np.ones(3000, "<i8")))
        monkeypatch.setattr(shard_module, "MAX_ROWS_READ", 100)
        with pytest.raises(RequestError, match="101 rows with one request"):
            await _get(client, [1] * 101)
        some = idl.RowsWanted(fqn=SPEC.fqn, row_ids=np.ones(51, np.int64).tobytes())
        request = idl.GetEmbeddingsRequest(more=[some], **vars(some), with_states=False, with_versions=False)
        with pytest.raises(RequestError, match="102 rows with one request"):
            await client.get_embeddings(request)
        with pytest.raises(RequestError, match="101 rows with one request"):
            await client.find_rows(idl.FindRowsRequest(fqn=with_identities.fqn, identities=np.ones(101, "<i8")))


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


async def test_a_changed_rank_is_recovered(tmp_path: Path) -> None:
    """A client's new rank and world size survive a restart."""
    async with _serving(tmp_path) as (_, client):
        await client.hello(_hello())
        hello = _hello()
        hello.rank, hello.world_size = 1, 2
        await client.hello(hello)
    shutil.rmtree(tmp_path / "shard-0000" / "store")
    async with _serving(tmp_path) as (_, client):
        (writer,) = (await client.status()).clients
    assert (writer.rank, writer.world_size) == (1, 2)


async def test_a_snapshot_on_disk_needs_all_shards_there(tmp_path: Path) -> None:
    """A shard of a server over several nodes makes and publishes no snapshot on disk, and says what is needed."""
    addresses = (("127.0.0.1", 1), ("127.0.0.1", 2))
    async with _serving(tmp_path, addresses=addresses, local_shards=(0,)) as (_, client):
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
