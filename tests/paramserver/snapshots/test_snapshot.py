"""Snapshots of running shards, from the cut to the fetched copy."""

from __future__ import annotations

import asyncio
import dataclasses
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
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_file, verify_snapshot
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot, newest_snapshot
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, RequestError, StorageError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
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


async def fetch(server: Server, to: Path, **settings: Any) -> SnapshotManifest:
    return await fetch_snapshot(server.address, to, dial=READER, **settings)


def rows_of(folder: Path) -> dict[int, float]:
    """Return the first weight of every row of a snapshot."""
    found: dict[int, float] = {}
    with SnapshotReader(folder) as reader:
        for ids, records in reader.rows(SPEC.fqn):
            weights = np.ascontiguousarray(records["weights"]).view("<f4").reshape(-1, SPEC.dim)
            found |= zip(ids.tolist(), weights[:, 0].tolist(), strict=True)
    return found


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
        assert rows_of(folder) == dict.fromkeys(range(40), float(manifest.step))


async def test_a_snapshot_never_changes(tmp_path: Path) -> None:
    """Later updates, flushes and a restart change nothing, though it shares files with the store; nor does reading."""
    async with serving(tmp_path) as server:
        assert (await server.snapshot(name="empty")).step == -1  # no batch has to come
        trainer = await server.trained()
        manifest = await server.snapshot(name="one")
        assert (manifest.step, manifest.epoch, [part.seq for part in manifest.parts]) == (1, 1, [3, 3])
        with pytest.raises(RequestError, match="already"):
            await server.snapshot(name="one")
        for _ in range(5):
            await trainer.train()
    async with serving(tmp_path) as server:
        for _ in range(2):
            assert verify_snapshot(server.files.folder_of("one")) == manifest
            assert rows_of(server.files.folder_of("one")) == dict.fromkeys(range(40), 1.0)


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
        expected = dict.fromkeys([*range(40), *range(100, 140)], 1.0)
        assert rows_of(server.files.folder_of(manifest.name)) == expected


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


async def test_no_file_is_opened_in_the_event_loop(tmp_path: Path) -> None:
    """During a fetch, neither side opens a file on the event loop's thread."""
    target = tmp_path / "copy"
    async with serving(tmp_path / "server") as server:
        await server.trained()
        manifest = await server.snapshot(name="one")
        folders = (str(target), str(server.files.path))
        with _watched_opens(folders) as opened:
            for _ in range(2):  # fetched, then found
                assert await fetch(server, target) == manifest
        assert verify_snapshot(target / "one") == manifest
        # Into the server's own directory, the snapshot exists already.
        assert await fetch(server, server.files.path, name="one") == manifest
        server.files.remove("one")
        with pytest.raises(GoneError):
            await fetch(server, tmp_path / "other")
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


async def test_an_invalid_manifest_is_refused(tmp_path: Path) -> None:
    """Publishing with invalid bytes is a request error, and nothing is published."""
    async with serving(tmp_path) as server:
        client = server.clients[0]
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        for manifest in ("{", "[" * 100_000, '{"crc32c": 1, "format": "headrace-snapshot"}'):
            with pytest.raises(RequestError, match="not a snapshot manifest"):
                await client.finish_snapshot(idl.FinishSnapshotRequest(name="one", manifest=manifest))
        assert server.files.newest() is None
