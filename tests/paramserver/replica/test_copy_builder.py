"""How copies begin beside a fast writer, real shards in this process: their log is kept, and memory is bounded."""

from __future__ import annotations

import asyncio
import functools
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hellos import hello_of_writer
from shard_servers import serve_shards

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.replica import EmbeddingReplica, copy_builder, disk_stores, loading, log_hold
from headrace.paramserver.replica.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.copy_builder import CopyBuilder
from headrace.paramserver.replica.fetched_snapshots import FetchedSnapshots
from headrace.paramserver.replica.storage import Storage
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.shard import Shard
from headrace.paramserver.snapshots import snapshot_client
from headrace.paramserver.snapshots.snapshot_client import create_snapshot
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles, link_or_copy, verify_snapshot
from headrace.schemas.errors import GoneError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, TableSpec

WAIT_S = 60.0
MIB = 1 << 20
NUM_SHARDS = 2
VIRTUAL = TableSpec(fqn="virtual.weight", num_rows=0, dim=16, dtype=DType.FLOAT32)
PLAIN = TableSpec(fqn="plain.weight", num_rows=60_000, dim=16, dtype=DType.FLOAT32)
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)


class Writer:
    """A trainer, or with `epoch` 0 one that brings rows in; every value that it writes is the step."""

    def __init__(self, clients: list[ParamServerClient], spec: TableSpec, *, epoch: int) -> None:
        self._clients, self._spec, self._epoch = clients, spec, epoch
        self._client_seq = 0

    async def hello(self) -> None:
        hello = hello_of_writer(
            self._spec,
            run="run" if self._epoch else "fill",
            epoch=self._epoch or 1,
            world_size=1 if self._epoch else 0,
        )
        for client in self._clients:
            await client.hello(hello)

    async def write(self, step: int, rows: range, *, ends: bool = True) -> None:
        self._client_seq += 1
        ids = np.array(rows, "<i8")
        shard_of = shards_of_rows(table_seed(self._spec.fqn), ids, NUM_SHARDS)
        for shard, client in enumerate(self._clients):
            await client.set_embeddings(self._batch(step, ids[shard_of == shard], ends))

    def _batch(self, step: int, ids: Any, ends: bool) -> Any:
        delta = idl.TableDelta(
            fqn=self._spec.fqn,
            fingerprint=self._spec.fingerprint,
            column_offset=0,
            width=self._spec.dim,
            row_ids=ids,
            weights=np.full((ids.size, self._spec.dim), step, "<f4"),
            states=[],
        )
        return idl.SetEmbeddingsRequest(
            run="run" if self._epoch else "fill",
            client="rank0",
            epoch=self._epoch or 1,
            client_seq=self._client_seq,
            step=step,
            time_us=1,
            ends_step=ends,
            is_exact_cut=ends,
            deltas=[delta],
            version_epoch=None if self._epoch else 1,
        )


class Server:
    """Two shards whose log is removed as soon as it may."""

    def __init__(self, directory: Path, ports: list[int], shards: list[Shard], clients: list[Any]) -> None:
        self.files = SnapshotFiles(directory / "snapshots")
        self.address = f"127.0.0.1:{ports[0]}"
        self.clients = clients
        self._shards = shards

    async def writer(self, spec: TableSpec, *, epoch: int = 1) -> Writer:
        writer = Writer(self.clients, spec, epoch=epoch)
        await writer.hello()
        return writer

    async def snapshot(self, name: str) -> None:
        await create_snapshot(self.address, dial=ADMIN, name=name, timeout_s=WAIT_S)

    async def trim(self) -> None:
        for shard in self._shards:
            await shard.applied()
            await asyncio.to_thread(shard._store.flush)
            await shard._retention.trim()


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Server]:
    shards: list[Shard] = []
    settings = {"log_segment_bytes": MIB, "log_retention_bytes": MIB}
    async with serve_shards(directory, NUM_SHARDS, opened=shards, **settings) as ports:
        clients = [await ParamServerClient.connect("127.0.0.1", port) for port in ports]
        try:
            yield Server(directory, ports, shards, clients)
        finally:
            for client in clients:
                await client.close()


async def _looked_up(replica: EmbeddingReplica, fqn: str, rows: range) -> set[float]:
    """Return the values that rows have."""
    found = await asyncio.to_thread(replica.lookup, fqn, list(rows))
    return set(found.flatten().tolist())


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("name", [None, "replica"])
async def test_a_copy_that_loads_for_long_finds_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """A newer snapshot is made meanwhile, the copy's is removed, and the log outgrows retention: it begins once."""
    loading, may_load, loaded = threading.Event(), threading.Event(), []

    def verify_late(folder: Path, **_: Any) -> Any:
        loading.set()
        assert may_load.wait(WAIT_S)
        loaded.append(folder.name)
        return verify_snapshot(folder)

    monkeypatch.setattr(copy_builder, "verify_snapshot", verify_late)
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        beginning = asyncio.create_task(asyncio.to_thread(EmbeddingReplica, server.address, name=name))
        assert await asyncio.to_thread(loading.wait, WAIT_S)
        for step in range(2, 5):
            await trainer.write(step, range(60_000))
        await server.snapshot("two")
        await asyncio.to_thread(server.files.remove, "one")
        await server.trim()
        may_load.set()
        replica = await beginning
        try:
            assert loaded == ["one"]
            await asyncio.to_thread(replica.wait_for, 4, WAIT_S)
            assert await _looked_up(replica, VIRTUAL.fqn, range(0, 60_000, 7)) == {4.0}
        finally:
            await asyncio.to_thread(replica.close)


@pytest.mark.parametrize("kind", ["live", "fetched"])
async def test_who_waits_for_a_copy_hears_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of terabytes a copy takes hours: as long as there is progress no deadline for one that hangs shall end it."""
    told: list[str] = []
    checked: list[int] = []

    def verify(folder: Path, **settings: Any) -> Any:
        before, manifest = len(told), verify_snapshot(folder, **settings)
        checked.append(len(told) - before)
        return manifest

    monkeypatch.setattr(copy_builder, "verify_snapshot", verify)
    monkeypatch.setattr(loading, "_LIVE_ROWS_AT_ONCE", 10_000)
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL if kind == "fetched" else PLAIN)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        builder = CopyBuilder(server.address, ADMIN, ReplicaConfig())
        builder.on_progress = lambda: told.append(builder.doing)
        copy = await builder.build(None, held_bytes=0, on_change=lambda: None, on_lost=lambda *_: None)
        # Each part that has been read; files that are fetched, then checked, and rows.
        if kind == "live":
            assert len(told) == 6
        else:
            num_fetched = told.count("snapshot 'one' is being fetched")
            assert num_fetched > 1
            assert checked[0] > 1
            assert len(told) > num_fetched + checked[0]
        await copy.close()
        await asyncio.to_thread(copy.generation.close)
        heard: list[int] = []
        begin = functools.partial(EmbeddingReplica, server.address, on_progress=lambda: heard.append(1))
        replica = await asyncio.to_thread(begin)
        await asyncio.to_thread(replica.close)
        assert len(heard) >= len(told)


async def test_each_file_that_is_linked_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another file system all of them are copied, which of terabytes takes hours."""
    told, at_files = [], []

    def link(source: Path, target: Path) -> None:
        at_files.append(len(told))
        link_or_copy(source, target)

    monkeypatch.setattr(disk_stores, "link_or_copy", link)
    config = ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 * MIB)}, disk_dir=tmp_path / "disk")
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        builder = CopyBuilder(server.address, ADMIN, config)
        builder.on_progress = lambda: told.append(1)
        copy = await builder.build(None, held_bytes=0, on_change=lambda: None, on_lost=lambda *_: None)
        assert len(at_files) > NUM_SHARDS and len(set(at_files)) == len(at_files)
        await copy.close()
        await asyncio.to_thread(copy.generation.close)
        builder.close()


async def test_a_snapshot_that_is_removed_while_it_is_fetched_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica goes on with the newest that there is then, and leaves nothing of the other."""
    fetched: list[str] = []
    async with serving(tmp_path / "data") as server:
        loop = asyncio.get_running_loop()

        async def fetch(address: str, directory: Path, *, name: str, on_progress: Any, **settings: Any) -> Any:
            fetched.append(name)
            if name == "one":
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.snapshot("two"), loop))
                server.files.remove("one")
            return await original(address, directory, name=name, on_progress=on_progress, **settings)

        original = copy_builder.fetch_snapshot
        monkeypatch.setattr(copy_builder, "fetch_snapshot", fetch)
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        replica = await asyncio.to_thread(EmbeddingReplica, server.address, snapshot_dir=tmp_path / "kept")
        try:
            assert fetched == ["one", "two"] and _names(tmp_path / "kept") == ["two"]
            assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}
        finally:
            await asyncio.to_thread(replica.close)


async def test_a_server_s_snapshot_of_the_time_that_is_gone_is_to_be_removed(tmp_path: Path) -> None:
    """What a server that was set back still has of before is its newest, whatever is made now: what helps is told."""
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
        replica = await asyncio.to_thread(EmbeddingReplica, server.address)
        try:
            assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}
        finally:
            await asyncio.to_thread(replica.close)


async def test_replicas_share_a_directory_of_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once fetch once; one that changes over removes what neither reads, and both go on."""
    kept, pieces = tmp_path / "kept", []
    async with serving(tmp_path / "data") as server:
        original = snapshot_client._piece

        async def piece(link: Any, name: str, path: str, offset: int) -> Any:
            if path:
                pieces.append((name, path, offset))
            return await original(link, name, path, offset)

        monkeypatch.setattr(snapshot_client, "_piece", piece)
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
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


async def test_a_snapshot_that_a_copy_loads_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica of the directory changes over to a newer one meanwhile, and leaves the older one where it is."""
    kept, loading, may_load = tmp_path / "kept", threading.Event(), threading.Event()

    def verify_late(folder: Path, **_: Any) -> Any:
        if folder.name == "one":
            loading.set()
            assert may_load.wait(WAIT_S)
        return verify_snapshot(folder)

    monkeypatch.setattr(copy_builder, "verify_snapshot", verify_late)
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        begin = functools.partial(asyncio.to_thread, EmbeddingReplica, server.address, snapshot_dir=kept)
        slow = asyncio.create_task(begin())
        assert await asyncio.to_thread(loading.wait, WAIT_S)
        await server.snapshot("two")
        quick = await begin()
        assert _names(kept) == ["one", "two"]
        may_load.set()
        replica = await slow
        try:
            assert _names(kept) == ["one"]  # the last that changed over keeps its own
            assert await _looked_up(replica, VIRTUAL.fqn, range(100)) == {1.0}
        finally:
            await asyncio.to_thread(replica.close)
            await asyncio.to_thread(quick.close)


def test_what_a_late_replica_waits_for_is_told(tmp_path: Path) -> None:
    """Something that listens and says nothing is not taken for a server whose tables are being read."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"{address} in 0\.2 s: the server has not answered yet"):
            EmbeddingReplica(address, open_timeout_s=0.2)


class ShortlyAlone(FetchedSnapshots):
    """Whose time is over while it waits for another, however long it has taken to come there."""

    @asynccontextmanager
    async def alone(self, check_wanted: Callable[[], None]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(0.1):
                await stack.enter_async_context(super().alone(check_wanted))
            yield


async def test_another_s_fetch_is_told_as_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that waits until another of its directory has fetched the snapshot says what is waited for."""
    monkeypatch.setattr(copy_builder, "FetchedSnapshots", ShortlyAlone)
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(VIRTUAL)
        await trainer.write(1, range(100))
        await server.snapshot("one")
        async with FetchedSnapshots(tmp_path / "kept").alone(lambda: None):
            with pytest.raises(UnavailableError, match="snapshot 'one' is being fetched"):
                await asyncio.to_thread(EmbeddingReplica, server.address, snapshot_dir=tmp_path / "kept")


async def test_a_step_that_does_not_end_takes_no_memory_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer dies amid a step, others write on: lookups go on, memory is bounded, and the next run is seen."""
    # A replica that comes late to the records would have all of them with one fetch.
    monkeypatch.setattr(log_hold, "ShardFollower", functools.partial(ShardFollower, max_bytes=2 * MIB))
    async with serving(tmp_path / "data") as server:
        trainer = await server.writer(PLAIN)
        await trainer.write(1, range(PLAIN.num_rows))
        replica = await asyncio.to_thread(
            EmbeddingReplica, server.address, consistency="step", max_pending_bytes=2 * MIB
        )
        try:
            await trainer.write(2, range(100), ends=False)  # and there it dies
            backfill = await server.writer(PLAIN, epoch=0)
            most = 0
            async with asyncio.timeout(WAIT_S):
                while replica.failure is None:
                    await backfill.write(5, range(30_000))  # a megabyte for each shard, not newer than what is there
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
        finally:
            await asyncio.to_thread(replica.close)


async def test_a_copy_that_is_given_up_twice_leaves_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline, and then the replica's end while its connections are closed: its stores are closed all the same."""

    class Gone:
        tables: ClassVar[dict[str, TableSpec]] = {}

        async def status(self) -> None:
            raise UnavailableError("the server is gone")

        async def close(self) -> None:
            raise asyncio.CancelledError

    async def connect(*_: object, **__: object) -> Gone:
        return Gone()

    closed: list[Storage] = []
    monkeypatch.setattr(EmbeddingReader, "connect", connect)
    monkeypatch.setattr(Storage, "close", lambda storage: closed.append(storage))
    with pytest.raises(asyncio.CancelledError):
        await CopyBuilder("127.0.0.1:1", ADMIN, ReplicaConfig()).build(
            None, held_bytes=0, on_change=lambda: None, on_lost=lambda *_: None
        )
    assert len(closed) == 1


async def test_a_table_that_one_shard_does_not_have_yet_is_waited_for(tmp_path: Path) -> None:
    """A trainer that is just beginning registers with one shard after the other: no reason to give up."""
    async with serving(tmp_path) as server:
        writer = Writer(server.clients[:1], PLAIN, epoch=1)
        await writer.hello()
        with pytest.raises(UnavailableError, match=r"'plain\.weight'.*not registered at every shard yet"):
            await asyncio.to_thread(EmbeddingReplica, server.address)
        await Writer(server.clients[1:], PLAIN, epoch=1).hello()
        replica = await asyncio.to_thread(EmbeddingReplica, server.address, fetch_wait_s=0.1)
        try:
            assert PLAIN.fqn in replica.tables
        finally:
            await asyncio.to_thread(replica.close)
