"""Snapshots of running shards, from the cut to the fetched copy."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.snapshots import remote
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_file, hash_folder, verify_snapshot
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot, newest_snapshot
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, RequestError, StorageError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import RecordLayout, decode_row_ids, key_prefix
from headrace.schemas.snapshot_manifest import SnapshotFile, SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0, role=idl.Role.ADMIN)
READER = dataclasses.replace(ADMIN, role=idl.Role.READER)
NUM_SHARDS = 2


def rows_on(shard: int, first: int, end: int) -> Any:
    """Return the row ids of a range that live on a shard."""
    rows = np.arange(first, end, dtype="<i8")
    return rows[shards_of_rows(table_seed(SPEC.fqn), rows, NUM_SHARDS) == shard]


class Trainer:
    """Writes every row of every shard at each step, in two batches per shard, so that half a step shows."""

    def __init__(self, clients: list[ParamServerClient], *, rank: int = 0, world_size: int = 1) -> None:
        self.step = 0
        self._clients = clients
        self._rank, self._world_size = rank, world_size
        self._client_seq = 0

    async def hello(self) -> None:
        for client in self._clients:
            rank, world_size = self._rank, self._world_size
            await client.hello(hello_of_writer(SPEC, client=f"rank{rank}", rank=rank, world_size=world_size))

    async def train(self, *, step: int | None = None, ends_step: bool = True, num_rows: int = 20) -> None:
        self.step = self.step + 1 if step is None else step
        for half in range(2):
            self._client_seq += 1
            fields = {"client": f"rank{self._rank}", "client_seq": self._client_seq, "step": self.step}
            first, ends = half * 20 + self._rank * 100, ends_step and half == 1
            writing = []
            for shard, client in enumerate(self._clients):
                delta = delta_of(SPEC, rows_on(shard, first, first + num_rows), self.step)
                writing.append(client.set_embeddings(request_of(delta, **fields, ends_step=ends)))
            await asyncio.gather(*writing)


class Server:
    def __init__(self, directory: Path, shards: list[Shard], port: int, clients: list[ParamServerClient]) -> None:
        self.shards, self.clients = shards, clients
        self.files = SnapshotFiles(directory / "snapshots")
        self.address = f"127.0.0.1:{port}"

    async def trained(self) -> Trainer:
        """Return a trainer after its first step."""
        trainer = Trainer(self.clients)
        await trainer.hello()
        await trainer.train()
        return trainer

    async def snapshot(self, **settings: Any) -> SnapshotManifest:
        return await create_snapshot(self.address, dial=ADMIN, **{"timeout_s": 60.0} | settings)


@asynccontextmanager
async def serving(directory: Path, **changes: Any) -> AsyncIterator[Server]:
    shards: list[Shard] = []
    async with (
        serve_shards(directory, NUM_SHARDS, opened=shards, server_id="a-server", **changes) as ports,
        AsyncExitStack() as stack,
    ):
        connecting = [ParamServerClient.connect("127.0.0.1", port) for port in ports]
        clients = [await stack.enter_async_context(await client) for client in connecting]
        yield Server(directory, shards, ports[0], clients)


def rows_of(folder: Path, shard: int) -> dict[int, float]:
    """Return the first weight of every row in a shard's part of a snapshot."""
    store = RowStore.open_read_only(folder / f"shard-{shard:04d}", config=StoreConfig(block_cache_bytes=1 << 20))
    layout = RecordLayout(SPEC, SPEC.whole)
    try:
        found = {}
        for key, value in store.scan(key_prefix(1)):
            records, _ = layout.decode([value])
            found[int(decode_row_ids([key])[0])] = float(np.frombuffer(records["weights"].tobytes(), "<f4")[0])
        return found
    finally:
        store.close()


async def test_a_snapshot_is_at_one_step_while_the_trainer_continues(tmp_path: Path) -> None:
    """Each snapshot has every row of all shards at exactly its step."""
    async with serving(tmp_path) as server:
        trainer = await server.trained()
        is_enough = asyncio.Event()

        async def train_on() -> None:
            while not is_enough.is_set():
                await trainer.train()

        training = asyncio.create_task(train_on())
        manifests = [await server.snapshot() for _ in range(3)]
        is_enough.set()
        await training
        assert trainer.step > manifests[-1].step
    assert [manifest.step for manifest in manifests] == sorted({manifest.step for manifest in manifests})
    for manifest in manifests:
        folder = server.files.folder_of(manifest.name)
        assert verify_snapshot(folder) == manifest and manifest.tables == {SPEC.fqn: SPEC}
        for shard in range(NUM_SHARDS):
            assert rows_of(folder, shard) == dict.fromkeys(rows_on(shard, 0, 40).tolist(), float(manifest.step))


async def test_a_run_that_stands_still_has_a_snapshot(tmp_path: Path) -> None:
    """No batch has to come; even an empty server has a snapshot."""
    async with serving(tmp_path) as server:
        assert (await server.snapshot(name="empty")).step == -1
        trainer = Trainer(server.clients)
        await trainer.hello()
        for _ in range(3):
            await trainer.train()
        manifest = await server.snapshot(name="still")
        assert (manifest.step, manifest.epoch, [part.seq for part in manifest.parts]) == (3, 1, [7, 7])
        with pytest.raises(RequestError, match="already"):
            await server.snapshot(name="still")


async def test_a_run_in_mid_step_has_no_consistent_cut(tmp_path: Path) -> None:
    """A snapshot is refused and leaves nothing, but `at_step=False` makes one at no step."""
    async with serving(tmp_path) as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        await trainer.train(ends_step=False)
        with pytest.raises(UnavailableError, match="has not stood exactly at a step"):
            await server.snapshot(timeout_s=0.2)
        assert list(server.files.path.iterdir()) == []
        manifest = await server.snapshot(at_step=False)
        assert (manifest.step, manifest.epoch) == (-1, 0)
        with pytest.raises(ConfigError, match="no writer of that run"):
            await server.snapshot(run="another")


async def test_all_ranks_are_at_the_step(tmp_path: Path) -> None:
    """The cut waits until both ranks have ended the same step on every shard."""
    async with serving(tmp_path) as server:
        ranks = [Trainer(server.clients, rank=rank, world_size=2) for rank in range(2)]
        for rank in ranks:
            await rank.hello()
        await ranks[0].train()
        making = asyncio.create_task(server.snapshot())
        await ranks[1].train()
        manifest = await making
        assert manifest.step == 1
        expected = dict.fromkeys([*rows_on(1, 0, 40).tolist(), *rows_on(1, 100, 140).tolist()], 1.0)
        assert rows_of(server.files.folder_of(manifest.name), 1) == expected


@contextmanager
def _paused_hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make shards wait before they hash; yield an event that is set when one waits."""
    hashing, may_hash = threading.Event(), threading.Event()

    def hash_late(folder: Path, **settings: Any) -> Any:
        hashing.set()
        assert may_hash.wait(100)
        return hash_folder(folder, **settings)

    monkeypatch.setattr("headrace.paramserver.snapshots.maker.hash_folder", hash_late)
    try:
        yield hashing
    finally:
        may_hash.set()


async def test_the_log_behind_an_unfinished_snapshot_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention keeps the log behind a snapshot in the making, however much is written."""
    mib = 1 << 20
    async with serving(tmp_path, log_segment_bytes=mib, log_retention_bytes=mib) as server:
        trainer = await server.trained()
        with _paused_hashing(monkeypatch) as hashing:
            making = asyncio.create_task(server.snapshot(name="first"))
            assert await asyncio.to_thread(hashing.wait, 60)
            for _ in range(3):
                await trainer.train(num_rows=60_000)
            for shard in server.shards:
                await shard.applied()
                await asyncio.to_thread(shard.store.flush)
                await shard._retention.trim()
        manifest = await making
        for part, client, shard in zip(manifest.parts, server.clients, server.shards, strict=True):
            assert shard.log.last_seq > part.seq + 4 and shard.log.size_bytes > 2 * mib
            request = idl.FetchUpdatesRequest(
                server_id="a-server", from_seq=part.seq + 1, max_bytes=1, wait_ms=0, follower="replica", lease_ms=1
            )
            assert (await client.fetch_updates(request)).records[0].seq == part.seq + 1


async def test_a_failed_snapshot_keeps_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed part releases the log at once, a published one soon."""

    def fail(folder: Path, **settings: Any) -> Any:
        raise StorageError("the disk is on fire")

    async with serving(tmp_path) as server:
        await server.trained()
        with monkeypatch.context() as patched, pytest.raises(HeadraceError, match="on fire"):
            patched.setattr("headrace.paramserver.snapshots.maker.hash_folder", fail)
            await server.snapshot(name="failed")
        request = idl.CreateSnapshotRequest(name="killed", epoch=0, min_step=-1, wait_ms=0)
        gone: Any = SimpleNamespace(peer=SimpleNamespace(is_connected=False))
        with pytest.raises(UnavailableError, match="nobody waits for it"):
            await server.shards[0].create_snapshot(gone, request)
        assert [shard._retention.snapshot_leases.held() for shard in server.shards] == [[], []]
        manifest = await server.snapshot(name="made")
        for part, shard in zip(manifest.parts, server.shards, strict=True):
            (lease,) = shard._retention.snapshot_leases.held()
            assert (lease.name, lease.seq) == ("snapshot made", part.seq + 1)
            assert lease.expires_s - time.monotonic() <= 60
            assert [held.seq for held in shard._retention._published_leases()] == [part.seq + 1]
        server.shards[0].begin_drain()
        there: Any = SimpleNamespace(peer=SimpleNamespace(is_connected=True))
        with pytest.raises(UnavailableError, match="the shard stops"):
            await server.shards[0].create_snapshot(there, request)


async def test_files_of_the_newest_snapshot_are_not_rehashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot hashes only new files and takes the other checksums from the last manifest."""
    async with serving(tmp_path) as server:
        trainer = await server.trained()
        first = await server.snapshot(name="first")
        await trainer.train()
        read: list[Path] = []

        def note(path: Path, **_: object) -> SnapshotFile:
            read.append(path)
            return hash_file(path)

        monkeypatch.setattr("headrace.paramserver.snapshots.directory.hash_file", note)
        second = await server.snapshot(name="second")
        old, new = (
            {path: file for path, file in manifest.files().items() if path.endswith(".sst")}
            for manifest in (first, second)
        )
        both = old.keys() & new.keys()
        assert both and new.keys() - both
        rows_read = {str(path.relative_to(server.files.new_folder("second"))) for path in read if path.suffix == ".sst"}
        assert rows_read == new.keys() - both
        assert {path: old[path] for path in both} == {path: new[path] for path in both}
        monkeypatch.undo()
        assert verify_snapshot(server.files.folder_of("second")) == second


async def test_the_newest_snapshot_is_this_store_s_by_seq(tmp_path: Path) -> None:
    """Wrong clocks and another store's snapshots do not matter."""
    async with serving(tmp_path / "server") as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        for name in ("first", "second"):
            await trainer.train()
            await server.snapshot(name=name)
        manifest_path = server.files.folder_of("first") / "manifest.json"
        first = dataclasses.replace(server.files.manifest_of("first"), created_us=10**16)
        manifest_path.write_bytes(first.encode())
        assert (await newest_snapshot(server.address, dial=READER)).name == "second"
        server.files.folder_of("second").rename(tmp_path / "elsewhere")
        others = tuple(dataclasses.replace(part, server_id="another") for part in first.parts)
        manifest_path.write_bytes(dataclasses.replace(first, parts=others).encode())
        with pytest.raises(GoneError, match="no snapshot yet"):
            await newest_snapshot(server.address, dial=READER)


async def test_a_snapshot_that_is_removed_during_a_fetch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial copy that cannot be completed is removed."""
    monkeypatch.setattr(remote, "_FILES_AT_ONCE", 1)  # so that some files are not requested yet
    async with serving(tmp_path / "server") as server:
        await server.trained()
        await server.snapshot(name="one")
        progress: list[int] = []

        def remove(done: int, _: int) -> None:
            progress.append(done)
            if len(progress) == 2:
                server.files.remove("one")

        with pytest.raises(GoneError):
            await fetch_snapshot(server.address, tmp_path / "copy", dial=READER, on_progress=remove)
    assert len(progress) == 2 and list((tmp_path / "copy").iterdir()) == []


async def test_an_interrupted_fetch_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial files are kept, damaged ones are fetched again, and a lack of room is refused."""
    async with serving(tmp_path / "server") as server:
        await server.trained()
        manifest = await server.snapshot(name="one")
        target = SnapshotFiles(tmp_path / "copy")
        first, second, *_ = [path for path, file in manifest.files().items() if file.size_bytes > 100]
        source = server.files.folder_of("one")
        for path, data in ((first, (source / first).read_bytes()[:50]), (second, b"damaged" * 5)):
            (target.new_folder("one") / path).parent.mkdir(parents=True, exist_ok=True)
            (target.new_folder("one") / path).write_bytes(data)
        progress: list[tuple[int, int]] = []
        lacking_bytes = manifest.size_bytes - 50 - len(b"damaged" * 5)
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=lacking_bytes - 1))
            with pytest.raises(StorageError, match="the rest of snapshot 'one' takes"):
                await fetch_snapshot(server.address, target.path, dial=READER)
            patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=lacking_bytes))
            got = await fetch_snapshot(
                server.address, target.path, dial=READER, on_progress=lambda *at: progress.append(at)
            )
        assert got == manifest == verify_snapshot(target.folder_of("one"))
        assert progress[-1] == (manifest.size_bytes, manifest.size_bytes)
        assert await fetch_snapshot(server.address, target.path, dial=READER, name="one") == manifest
        assert rows_of(target.folder_of("one"), 0) == dict.fromkeys(rows_on(0, 0, 40).tolist(), 1.0)
        server.files.remove("one")
        with pytest.raises(GoneError):
            await fetch_snapshot(server.address, tmp_path / "other", dial=READER)


async def test_a_fetched_copy_has_no_lease(tmp_path: Path) -> None:
    """A copy of an export's snapshot is never pruned, and not fetched again."""
    async with serving(tmp_path / "server") as server:
        made = await server.snapshot(name="export", at_step=False, lease_s=3600)
        copy = SnapshotFiles(tmp_path / "copy")
        for _ in range(2):
            got = await fetch_snapshot(server.address, copy.path, dial=READER, name="export")
            assert got == dataclasses.replace(made, lease_s=0) == verify_snapshot(copy.folder_of("export"))
        os.utime(copy.folder_of("export"), (0, 0))
        assert copy.prune_abandoned() == () and copy.newest() == got
        # Into the server's own directory, the snapshot exists already.
        assert await fetch_snapshot(server.address, server.files.path, dial=READER, name="export") == made


async def test_another_snapshot_of_that_name_is_refused(tmp_path: Path) -> None:
    """A reused name is an error, and the existing copy stays."""
    async with serving(tmp_path / "server") as server:
        trainer = await server.trained()
        first = await server.snapshot(name="nightly")
        await fetch_snapshot(server.address, tmp_path / "copy", dial=READER)
        server.files.remove("nightly")
        await trainer.train()
        await server.snapshot(name="nightly")
        with pytest.raises(ConfigError, match=r"copy/nightly is another snapshot of that name: remove it, or fetch"):
            await fetch_snapshot(server.address, tmp_path / "copy", dial=READER)
        assert verify_snapshot(tmp_path / "copy" / "nightly") == first


async def test_no_file_is_opened_in_the_event_loop(tmp_path: Path) -> None:
    """During a fetch, neither side opens a file on the event loop's thread."""
    target = tmp_path / "copy"
    async with serving(tmp_path / "server") as server:
        await server.trained()
        manifest = await server.snapshot(name="one")
        folders = (str(target), str(server.files.path))
        with _watched_opens(folders) as opened:
            for _ in range(2):  # fetched, then found
                assert await fetch_snapshot(server.address, target, dial=READER) == manifest
    assert {Path(path).name for path, _ in opened} >= {"manifest.json", "CURRENT"}
    assert [path for path, thread in opened if thread == threading.get_ident()] == []


_opens: list[tuple[str, int]] | None = None


@contextmanager
def _watched_opens(folders: tuple[str, ...]) -> Iterator[list[tuple[str, int]]]:
    """Yield a list that receives path and thread of each file opened below some folders."""
    global _opens
    opened: list[tuple[str, int]] = []
    _opens = opened
    try:
        yield opened
    finally:
        _opens = None
        opened[:] = [(path, thread) for path, thread in opened if path.startswith(folders)]


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opens is not None:
        _opens.append((str(arguments[0]), threading.get_ident()))


sys.addaudithook(_on_audit)  # hooks cannot be removed


async def test_a_snapshot_never_changes(tmp_path: Path) -> None:
    """Later updates, flushes and a restart change nothing, though it shares files with the store."""
    async with serving(tmp_path) as server:
        trainer = await server.trained()
        manifest = await server.snapshot()
        for _ in range(5):
            await trainer.train()
    async with serving(tmp_path) as server:
        folder = server.files.folder_of(manifest.name)
        assert verify_snapshot(folder) == manifest
        assert rows_of(folder, 0) == dict.fromkeys(rows_on(0, 0, 40).tolist(), 1.0)
        assert verify_snapshot(folder) == manifest  # nor did reading it


@pytest.mark.parametrize("manifest", ["{", "[" * 100_000, '{"crc32c": 1, "format": "headrace-snapshot"}'])
async def test_an_invalid_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    """Publishing with invalid bytes is a request error, and nothing is published."""
    async with serving(tmp_path) as server:
        client = server.clients[0]
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        with pytest.raises(RequestError, match="not a snapshot manifest"):
            await client.finish_snapshot(idl.FinishSnapshotRequest(name="one", manifest=manifest))
        assert server.files.newest() is None
