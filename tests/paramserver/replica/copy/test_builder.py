"""How copies begin: from snapshots and from running shards in this process, beside a fast writer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from hellos import hello_of_writer
from replica_of import replica_of
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from table_rows import ITEMS, USERS, chunk_of, snapshot

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.copy import builder as builder_module
from headrace.paramserver.replica.copy import live
from headrace.paramserver.replica.copy.builder import CopyBuilder, load_live, load_snapshot
from headrace.paramserver.replica.copy.fetched_snapshots import FetchedSnapshots
from headrace.paramserver.replica.copy.live import CopyLease, LiveCopy
from headrace.paramserver.replica.copy.storage import CopyStorage
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables import disk_stores, identity_map
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.snapshots import remote
from headrace.paramserver.snapshots.directory import SnapshotFiles, link_or_copy, verify_snapshot
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, UnavailableError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

WAIT_S = 60.0
MIB = 1 << 20
NUM_SHARDS = 2
VIRTUAL = TableSpec(fqn="virtual.weight", num_rows=0, dim=16, dtype=DType.FLOAT32)
PLAIN = TableSpec(fqn="plain.weight", num_rows=60_000, dim=16, dtype=DType.FLOAT32)
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)


class Writer:
    """A trainer, or another client with `epoch` 0; every value that it writes is the step."""

    def __init__(self, clients: list[ParamServerClient], spec: TableSpec, *, epoch: int) -> None:
        self._clients, self._spec, self._epoch = clients, spec, epoch
        self._client_seq = 0

    async def hello(self) -> None:
        hello = hello_of_writer(
            self._spec, run="run" if self._epoch else "fill", epoch=self._epoch or 1, world_size=1 if self._epoch else 0
        )
        for client in self._clients:
            await client.hello(hello)

    async def write(self, step: int, rows: Any, *, ends: bool = True, deleted: Any = ()) -> None:
        self._client_seq += 1
        ids, gone = np.array(rows, "<i8"), np.array(deleted, "<i8")
        shards, shards_of_gone = (shards_of_rows(self._spec.seed, some, NUM_SHARDS) for some in (ids, gone))
        for shard, client in enumerate(self._clients):
            delta = delta_of(self._spec, ids[shards == shard], step, deleted_row_ids=gone[shards_of_gone == shard])
            await client.set_embeddings(self._batch(step, delta, ends))

    def _batch(self, step: int, delta: Any, ends: bool) -> Any:
        return request_of(
            delta,
            run="run" if self._epoch else "fill",
            epoch=self._epoch or 1,
            client_seq=self._client_seq,
            step=step,
            ends_step=ends,
        )


class Server:
    """Two shards that remove their log as soon as they may."""

    def __init__(self, directory: Path, ports: list[int], shards: list[Shard], clients: list[Any]) -> None:
        self.files = SnapshotFiles(directory / "snapshots")
        self.address = f"127.0.0.1:{ports[0]}"
        self.clients = clients
        self._shards = shards

    async def writer(self, spec: TableSpec, *, epoch: int = 1) -> Writer:
        writer = Writer(self.clients, spec, epoch=epoch)
        await writer.hello()
        return writer

    async def begin(self, spec: TableSpec = VIRTUAL) -> Writer:
        """Write rows of a first step, and take the snapshot `one` of them."""
        writer = await self.writer(spec)
        await writer.write(1, range(100))
        await self.snapshot("one")
        return writer

    async def snapshot(self, name: str) -> None:
        await create_snapshot(self.address, dial=ADMIN, name=name, timeout_s=WAIT_S)

    async def trim(self) -> None:
        for shard in self._shards:
            await shard.applied()
            await asyncio.to_thread(shard.store.flush)
            await shard._retention.trim()


@asynccontextmanager
async def serving(directory: Path, **more: Any) -> AsyncIterator[Server]:
    shards: list[Shard] = []
    settings = {"log_segment_bytes": MIB, "log_retention_bytes": MIB, **more}
    async with serve_shards(directory, NUM_SHARDS, opened=shards, **settings) as ports:
        clients = [await ParamServerClient.connect("127.0.0.1", port) for port in ports]
        try:
            yield Server(directory, ports, shards, clients)
        finally:
            for client in clients:
                await client.close()


@asynccontextmanager
async def built(builder: CopyBuilder) -> AsyncIterator[LiveCopy]:
    """Build a copy from what the server has, and close it with its tables."""
    copy = await builder.build(None, held_bytes=0, on_change=lambda: None, on_lost=lambda *_: None)
    yield copy
    await copy.close()
    await asyncio.to_thread(copy.table_set.close)


class LateVerification:
    """Stands for `verify_snapshot`: that of one snapshot waits until the test lets it go on."""

    def __init__(self) -> None:
        self.verified: list[str] = []
        self.may_go_on = threading.Event()
        self._has_begun = threading.Event()

    def __call__(self, folder: Path, **_: Any) -> Any:
        if folder.name == "one":
            self._has_begun.set()
            assert self.may_go_on.wait(WAIT_S)
        self.verified.append(folder.name)
        return verify_snapshot(folder)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._has_begun.wait, WAIT_S)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateVerification:
    late = LateVerification()
    monkeypatch.setattr(builder_module, "verify_snapshot", late)
    return late


async def _looked_up(replica: EmbeddingReplica, fqn: str, rows: range) -> set[float]:
    """Return the set of values in some rows."""
    found = await asyncio.to_thread(replica.lookup, fqn, list(rows))
    return set(found.flatten().tolist())


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("name", [None, "replica"])
async def test_a_copy_that_loads_for_long_finds_its_log(
    tmp_path: Path, late: LateVerification, name: str | None
) -> None:
    """A copy is built once, though its snapshot is removed meanwhile and the log outgrows retention."""
    async with serving(tmp_path / "data") as server:
        trainer = await server.begin()
        beginning = asyncio.create_task(asyncio.to_thread(EmbeddingReplica, server.address, name=name))
        await late.begun()
        for step in range(2, 5):
            await trainer.write(step, range(60_000))
        await server.snapshot("two")
        await asyncio.to_thread(server.files.remove, "one")
        await server.trim()
        late.may_go_on.set()
        replica = await beginning
        try:
            assert late.verified == ["one"]
            await asyncio.to_thread(replica.wait_for, 4, WAIT_S)
            assert await _looked_up(replica, VIRTUAL.fqn, range(0, 60_000, 7)) == {4.0}
        finally:
            await asyncio.to_thread(replica.close)


@pytest.mark.parametrize("kind", ["live", "fetched"])
async def test_who_waits_for_a_copy_hears_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Loading reports progress, so that a deadline for hangs does not end a copy that takes hours."""
    told: list[str] = []
    checked: list[int] = []

    def verify(folder: Path, **settings: Any) -> Any:
        before, manifest = len(told), verify_snapshot(folder, **settings)
        checked.append(len(told) - before)
        return manifest

    monkeypatch.setattr(builder_module, "verify_snapshot", verify)
    monkeypatch.setattr(builder_module, "_LIVE_ROWS", 10_000)
    async with serving(tmp_path / "data") as server:
        await server.begin(VIRTUAL if kind == "fetched" else PLAIN)
        builder = CopyBuilder(server.address, ADMIN, ReplicaConfig())
        builder.on_progress = lambda: told.append(builder.doing)
        async with built(builder):
            # Each part that has been read; files that are fetched, then checked, and rows.
            if kind == "live":
                assert len(told) == 6
            else:
                num_fetched = told.count("snapshot 'one' is being fetched")
                assert num_fetched > 1
                assert checked[0] > 1
                assert len(told) > num_fetched + checked[0]
        heard: list[int] = []
        async with replica_of(server.address, on_progress=lambda: heard.append(1)):
            assert len(heard) >= len(told)


async def test_each_file_that_is_linked_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linked file is progress: on another file system it is copied, which takes long."""
    told, at_files = [], []

    def link(source: Path, target: Path) -> None:
        at_files.append(len(told))
        link_or_copy(source, target)

    monkeypatch.setattr(disk_stores, "link_or_copy", link)
    config = ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 * MIB)}, disk_dir=tmp_path / "disk")
    async with serving(tmp_path / "data") as server:
        await server.begin()
        builder = CopyBuilder(server.address, ADMIN, config)
        builder.on_progress = lambda: told.append(1)
        async with built(builder):
            assert len(at_files) > NUM_SHARDS and len(set(at_files)) == len(at_files)
        builder.close()


async def test_a_snapshot_that_is_removed_while_it_is_fetched_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the snapshot is removed during the fetch, the replica fetches the newest one and leaves nothing behind."""
    fetched: list[str] = []
    async with serving(tmp_path / "data") as server:
        loop = asyncio.get_running_loop()

        async def fetch(address: str, directory: Path, *, name: str, on_progress: Any, **settings: Any) -> Any:
            fetched.append(name)
            if name == "one":
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.snapshot("two"), loop))
                server.files.remove("one")
            return await original(address, directory, name=name, on_progress=on_progress, **settings)

        original = builder_module.fetch_snapshot
        monkeypatch.setattr(builder_module, "fetch_snapshot", fetch)
        await server.begin()
        async with replica_of(server.address, snapshot_dir=tmp_path / "kept") as replica:
            assert fetched == ["one", "two"] and _names(tmp_path / "kept") == ["two"]
            assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}


@pytest.mark.parametrize("consistency", ["latest", "step"])
@pytest.mark.parametrize("storage", [{}, {"*": DiskStorage(memory_bytes=40_000)}], ids=["memory", "disk"])
async def test_a_table_of_virtual_ids_begins_from_the_newest_snapshot(
    tmp_path: Path, storage: dict[str, DiskStorage], consistency: str
) -> None:
    """Rows of the snapshot, of the log after it, and deletions are as written; without a snapshot there is no copy."""
    ids = np.unique(np.random.default_rng(1).integers(0, 2**62, 5000))
    settings = {"consistency": consistency, "storage": storage, "snapshot_dir": tmp_path / "kept"}
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, ids)
        with pytest.raises(GoneError):
            await asyncio.to_thread(lambda: EmbeddingReplica(server.address, **settings))
        await server.snapshot("one")
        await trainer.write(2, ids[::3], deleted=ids[1::3])
        async with replica_of(server.address, fetch_wait_s=0.1, **settings) as replica:
            expected = np.ones(ids.size)
            expected[::3], expected[1::3] = 2, 0
            await asyncio.to_thread(replica.wait_for, 2, WAIT_S)
            found = await asyncio.to_thread(replica.lookup, VIRTUAL.fqn, ids)
            assert (found.numpy() == expected[:, None]).all() and replica.num_missing == {VIRTUAL.fqn: ids[1::3].size}
            assert replica.num_rows(VIRTUAL.fqn) == ids.size - ids[1::3].size or storage  # on disk it is an estimate
            await trainer.write(7, range(10_000))
            await asyncio.to_thread(replica.wait_for, 7, WAIT_S)
            assert await _looked_up(replica, VIRTUAL.fqn, range(10_000)) == {7.0}
        assert _names(tmp_path / "kept") == ["one"]


@pytest.mark.parametrize(("spec", "is_set"), [(PLAIN, True), (VIRTUAL, True), (VIRTUAL, False)])
async def test_a_replica_starts_from_the_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TableSpec, is_set: bool
) -> None:
    """Its rows come from there and then from the log, none from a shard's store or snapshot; the server may tell it."""
    url = f"file://{tmp_path}/bucket"
    async with serving(tmp_path / "data", object_store=url) as server:
        trainer = await server.begin(spec)
        await server.trim()
        await trainer.write(2, range(50))
        for name in ("fetch_snapshot", "newest_snapshot", "load_live"):
            monkeypatch.delattr(builder_module, name)
        settings = {"object_store": url} if is_set else {}
        async with replica_of(server.address, snapshot_dir=tmp_path / "kept", **settings) as replica:
            assert _names(tmp_path / "kept") == ["one"]
            assert await _looked_up(replica, spec.fqn, range(50)) == {2.0}
            assert await _looked_up(replica, spec.fqn, range(50, 100)) == {1.0}
        await server.snapshot("two")
        async with replica_of(server.address, snapshot_dir=tmp_path / "kept", **settings):
            assert _names(tmp_path / "kept") == ["two"]


async def test_a_replica_says_that_the_object_store_has_nothing(tmp_path: Path) -> None:
    """Without a snapshot in the store, of another server, or with a URL in place of a directory, the error says so."""
    async with serving(tmp_path / "data") as server:
        await server.writer(PLAIN)
        with pytest.raises(GoneError, match=r"no snapshot yet: headrace snapshot create"):
            await asyncio.to_thread(EmbeddingReplica, server.address, object_store=f"file://{tmp_path}/bucket")
        with pytest.raises(ConfigError, match="object_store="):
            await asyncio.to_thread(EmbeddingReplica, server.address, snapshot=f"file://{tmp_path}/bucket")
        with pytest.raises(ConfigError, match="not a URL"):
            await asyncio.to_thread(EmbeddingReplica, server.address, object_store="bucket")
        async with serving(tmp_path / "other", object_store=f"file://{tmp_path}/bucket") as other:
            await other.begin(PLAIN)
        with pytest.raises(GoneError, match="the snapshot is of store"):
            await asyncio.to_thread(EmbeddingReplica, server.address, object_store=f"file://{tmp_path}/bucket")


async def test_a_server_s_snapshot_of_the_time_that_is_gone_is_to_be_removed(tmp_path: Path) -> None:
    """The error for a snapshot from before a set back says that it must be removed by hand."""
    data, older = tmp_path / "data", tmp_path / "older"
    async with serving(data) as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
    shutil.copytree(data, older)
    async with serving(data) as server:
        trainer = await server.writer(VIRTUAL, epoch=2)
        for step in range(5):
            await trainer.write(step, range(100))
        await server.snapshot("lost")
    shutil.copytree(data / "snapshots", older / "snapshots")
    shutil.rmtree(data)
    older.rename(data)
    async with serving(data) as server:
        await server.snapshot("made-since")
        advice = r"'lost' cannot be followed from: .*; remove snapshots/lost from the server's directory by hand"
        with pytest.raises(GoneError, match=advice):
            await asyncio.to_thread(EmbeddingReplica, server.address)
        shutil.rmtree(data / "snapshots" / "lost")
        async with replica_of(server.address) as replica:
            assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}


async def test_replicas_share_a_directory_of_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas that start together fetch once; a later switch removes only what nobody reads."""
    kept, pieces = tmp_path / "kept", []
    async with serving(tmp_path / "data") as server:
        original = remote._piece

        async def piece(link: Any, name: str, path: str, offset: int) -> Any:
            if path:
                pieces.append((name, path, offset))
            return await original(link, name, path, offset)

        monkeypatch.setattr(remote, "_piece", piece)
        trainer = await server.begin()
        begin = functools.partial(asyncio.to_thread, EmbeddingReplica, server.address, snapshot_dir=kept)
        replicas = await asyncio.gather(begin(), begin())
        try:
            assert pieces and len(pieces) == len(set(pieces)) and _names(kept) == ["one"]
            await trainer.write(2, range(100))
            await server.snapshot("two")
            (kept / ".new-left").mkdir()
            (kept / ".new-left" / ".fetched").touch()
            replicas.append(await begin())
            assert _names(kept) == ["two"]
            for replica in replicas:
                await asyncio.to_thread(replica.wait_for, 2, WAIT_S)
                assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {2.0}
        finally:
            for replica in replicas:
                await asyncio.to_thread(replica.close)


async def test_a_snapshot_that_a_copy_loads_is_not_removed(tmp_path: Path, late: LateVerification) -> None:
    """A replica that switches to a newer snapshot leaves one that another replica loads."""
    kept = tmp_path / "kept"
    async with serving(tmp_path / "data") as server:
        await server.begin()
        slow = asyncio.create_task(asyncio.to_thread(EmbeddingReplica, server.address, snapshot_dir=kept))
        await late.begun()
        await server.snapshot("two")
        async with replica_of(server.address, snapshot_dir=kept):
            assert _names(kept) == ["one", "two"]
            late.may_go_on.set()
            replica = await slow
            try:
                assert _names(kept) == ["one"]  # the last that changed over keeps its own
                assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}
            finally:
                await asyncio.to_thread(replica.close)


def test_what_a_late_replica_waits_for_is_told(tmp_path: Path) -> None:
    """A server that accepts connections and never answers is reported as that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"{address} in 0\.2 s: the server has not answered yet"):
            EmbeddingReplica(address, open_timeout_s=0.2)


class ShortlyAlone(FetchedSnapshots):
    """Times out while waiting for another process, however late it begins to wait."""

    @asynccontextmanager
    async def alone(self, check_wanted: Callable[[], None]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(0.1):
                await stack.enter_async_context(super().alone(check_wanted))
            yield


async def test_another_s_fetch_is_told_as_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that waits for another replica's fetch says so."""
    monkeypatch.setattr(builder_module, "FetchedSnapshots", ShortlyAlone)
    async with serving(tmp_path / "data") as server:
        await server.begin()
        async with FetchedSnapshots(tmp_path / "kept").alone(lambda: None):
            with pytest.raises(UnavailableError, match="snapshot 'one' is being fetched"):
                await asyncio.to_thread(EmbeddingReplica, server.address, snapshot_dir=tmp_path / "kept")


async def test_a_step_that_does_not_end_takes_no_memory_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a trainer dies within a step and others write on, memory is bounded and the next run becomes visible."""
    # A replica that comes late to the records would have all of them with one fetch.
    monkeypatch.setattr(live, "ShardFollower", functools.partial(ShardFollower, max_bytes=2 * MIB))
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(PLAIN)
        await trainer.write(1, range(PLAIN.num_rows))
        async with replica_of(server.address, consistency="step", max_pending_bytes=2 * MIB) as replica:
            await trainer.write(2, range(100), ends=False)  # and there it dies
            backfill = await server.writer(dataclasses.replace(PLAIN, fqn="other.weight"), epoch=0)
            most = 0
            async with asyncio.timeout(WAIT_S):
                while replica.failure is None:
                    await backfill.write(5, range(30_000))  # a megabyte for each shard
                    most = max([most, *(shard.pending_bytes for shard in replica.freshness())])
                    assert most < 12 * MIB  # of each shard: the bound, and what one fetch brings
            assert "take more than max_pending_bytes" in str(replica.failure)
            for _ in range(10):
                await backfill.write(5, range(30_000))
            assert await _looked_up(replica, PLAIN.fqn, range(PLAIN.num_rows)) == {1.0}
            successor = await server.writer(PLAIN, epoch=2)
            await successor.write(1, range(0, PLAIN.num_rows, 2))
            await asyncio.to_thread(replica.wait_for, 1, WAIT_S, epoch=2)
            assert replica.failure is None and replica.epoch == 2
            assert sum(shard.pending_bytes for shard in replica.freshness()) == 0
            report = await asyncio.to_thread(replica.audit)
            assert report.is_equal


async def test_a_copy_that_is_given_up_twice_leaves_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is closed even if closing the connections is cancelled too."""

    class Gone:
        tables: ClassVar[dict[str, TableSpec]] = {}

        async def status(self) -> None:
            raise UnavailableError("the server is gone")

        async def close(self) -> None:
            raise asyncio.CancelledError

    async def connect(*_: object, **__: object) -> Gone:
        return Gone()

    closed: list[CopyStorage] = []
    monkeypatch.setattr(EmbeddingReader, "connect", connect)
    monkeypatch.setattr(CopyStorage, "close", lambda storage: closed.append(storage))
    with pytest.raises(asyncio.CancelledError):
        async with built(CopyBuilder("127.0.0.1:1", ADMIN, ReplicaConfig())):
            pytest.fail("there is no server")
    assert len(closed) == 1


async def test_a_table_that_one_shard_does_not_have_yet_is_waited_for(tmp_path: Path) -> None:
    """A table that not all shards have yet is a retriable error: a trainer is just starting."""
    async with serving(tmp_path) as server:
        writer = Writer(server.clients[:1], PLAIN, epoch=1)
        await writer.hello()
        with pytest.raises(UnavailableError, match=r"'plain\.weight'.*not registered at every shard yet"):
            await asyncio.to_thread(EmbeddingReplica, server.address)
        await Writer(server.clients[1:], PLAIN, epoch=1).hello()
        async with replica_of(server.address, fetch_wait_s=0.1) as replica:
            assert PLAIN.fqn in replica.tables


SPEC = TableSpec(fqn="t", num_rows=40, dim=1, dtype=DType.FLOAT32)


class LiveServer:
    """One fake shard that notes requests; its log may go when a given row is read."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.removed_at = -1
        self.clients: list[Any] = []
        link = {"hello": SimpleNamespace(server_id="s"), "fetch_updates": self.fetch, "address": "nowhere"}
        self.links = [SimpleNamespace(**link, least_seq=0, newest_seq=0)]
        self.newest_seq = 0
        self._gone = asyncio.Event()

    async def status(self) -> list[Any]:
        table = SimpleNamespace(spec=spec_to_idl(SPEC), owner=None, earlier_fingerprints=None, filling=None)
        return [
            SimpleNamespace(
                shard=0,
                server_id="s",
                log_seq=7,
                accepted_seq=7,
                tables=[table],
                clients=self.clients,
            )
        ]

    async def fetch(self, request: Any) -> Any:
        if self.asked and self.asked[-1] == self.removed_at:
            self._gone.set()
            raise GoneError("the log begins at seq 100")
        if request.from_seq == 8 and (request.wait_ms, request.max_bytes) == (0, 1) and "lease" not in self.asked:
            self.asked.append("lease")
        return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=7, mark_before=77)

    async def get_many(self, wanted: Any, *, with_states: bool, with_versions: bool, timeout_s: float) -> Any:
        assert timeout_s >= 600, "a part may be long, and the link slow"
        ((_, ids),) = wanted
        assert self.links[0].least_seq == 7
        self.links[0].newest_seq = self.newest_seq
        self.asked.append(int(ids[0]))
        if self.asked[-1] == self.removed_at:
            await self._gone.wait()
        none = np.zeros(ids.size, np.int64)
        columns = {"weights": np.zeros((ids.size, 1), np.float32), "presence": none.astype(np.uint8)}
        return [SimpleNamespace(row_ids=ids, **columns, epochs=none, steps=none)]

    def load(self) -> TableSet:
        lease = CopyLease(name="replica", copy_id="1", lease_s=0.001, is_lasting=True)
        reader, told = cast("Any", self), lambda: self.asked.append("told")
        return asyncio.run(load_live(reader, is_by_step=False, make_table=MemoryTable, lease=lease, on_progress=told))


def test_the_log_is_kept_while_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log lease, from where the copy will follow, is taken before the first read; each part is progress."""
    monkeypatch.setattr(builder_module, "_LIVE_ROWS", 10)
    server = LiveServer()
    (tail,) = server.load().tails
    assert server.asked == ["lease", 0, "told", 10, "told", 20, "told", 30, "told"]
    assert (tail.seq, tail.begin_mark) == (7, 77)  # as the shard told before the first read


def test_a_log_that_has_gone_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the log to follow is gone, no more rows are read."""
    monkeypatch.setattr(builder_module, "_LIVE_ROWS", 10)
    server = LiveServer()
    server.removed_at = 10
    with pytest.raises(GoneError):
        server.load()
    assert [row for row in server.asked if row != "told"] == ["lease", 0, 10]


def test_rows_of_a_copy_that_was_ahead_of_the_last_one_are_not_taken() -> None:
    """A shard whose owner was lost in the middle is found at a standby: at what step the rows are, nobody knows."""
    server = LiveServer()
    server.newest_seq = 8  # than which the last status is older
    with pytest.raises(UnavailableError):
        server.load()


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        # (dim, rows): small tables share a request, large ones are split.
        ([(64, 3), (64, 3), (64, 4), (64, 20_000), (64, 5)], [[3, 3, 4], [16_384], [3616, 5]]),
        # A request has a few megabytes, whatever a row takes, so that it crosses a slow link soon.
        ([(64, 40_000), (1 << 15, 70), (65_535, 3)], [[16_384], [16_384], [7232], [32], [32], [6, 3]]),
        ([(1, 70_000)], [[65_536], [4464]]),
        ([(1, 1)] * 600, [[1] * 256, [1] * 256, [1] * 88]),
    ],
    ids=["small", "wide", "long", "many"],
)
def test_what_is_read_with_one_request(tables: list[tuple[int, int]], parts: list[list[int]]) -> None:
    """A bounded number of rows, bytes and tables, each row once and in order."""
    specs = [dataclasses.replace(SPEC, fqn=f"t{n}", dim=dim, num_rows=rows) for n, (dim, rows) in enumerate(tables)]
    found = list(builder_module._live_parts(specs))
    assert [[ids.size for _, ids in part] for part in found] == parts
    rows: dict[str, list[int]] = {}
    for spec, ids in (pair for part in found for pair in part):
        rows.setdefault(spec.fqn, []).extend(ids.tolist())
    assert rows == {spec.fqn: list(range(spec.num_rows)) for spec in specs}


def test_writers_are_forgotten_in_the_order_of_the_shard() -> None:
    """A copy forgets writers in the shard's order, whatever their epochs."""
    server = LiveServer()
    columns = {"last_client_seq": 1, "step": 1, "is_connected": True, "rank": 0, "world_size": 1, "exact_step": 1}
    server.clients = [
        idl.ClientStatus(run=run, client="rank0", epoch=epoch, **columns, ended_client_seq=1)
        for run, epoch in (("b", 9), ("c", 4), ("a", 5))
    ]
    (tail,) = server.load().tails
    assert [session.run for session in tail._sessions] == ["b", "c", "a"]


def test_a_snapshot_that_nobody_wants_is_not_loaded_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loading thread checks every few rows and identities whether to go on: a billion take an hour."""
    monkeypatch.setattr(identity_map, "_ROWS_PER_SCAN", 10)
    chunk = chunk_of(USERS, range(40))
    folder = snapshot(tmp_path, {USERS: chunk}, num_shards=1)

    def load(num_checks: int) -> TableSet:
        left = iter(range(num_checks))

        def check() -> None:
            if next(left, None) is None:
                raise UnavailableError("the replica's copy is closed")

        manifest = verify_snapshot(folder)
        return load_snapshot(folder, manifest, is_by_step=False, make_table=MemoryTable, check_wanted=check)

    for num_checks in range(5):
        with pytest.raises(UnavailableError):
            load(num_checks)
    assert chunk.identities is not None
    found = load(1 + 4).identities[USERS.fqn].find(chunk.identities)  # the rows, and ten identities at a time
    assert found.tolist() == list(range(40))


def test_a_part_of_another_place_in_the_log_is_not_followed_from(tmp_path: Path) -> None:
    """A store that is not at its manifest's seq is corrupt: records would be lost or repeated."""
    folder = snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, range(20))}, num_shards=2)
    manifest = verify_snapshot(folder)

    def load(manifest: SnapshotManifest) -> TableSet:
        return load_snapshot(folder, manifest, is_by_step=False, make_table=MemoryTable, check_wanted=lambda: None)

    assert [tail.seq for tail in load(manifest).tails] == [part.seq for part in manifest.parts]
    for off in (-1, 1):
        parts = (manifest.parts[0], dataclasses.replace(manifest.parts[1], seq=manifest.parts[1].seq + off))
        with pytest.raises(CorruptionError, match=r"shard-0001.*the manifest says"):
            load(dataclasses.replace(manifest, parts=parts))
