"""Snapshots of running shards: all at one step while a trainer goes on, fetched in pieces, equal row for row."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.paramserver.admission import ServerLimits
from headrace.paramserver.client import ParamServerClient
from headrace.paramserver.rpc_server import ThriftServer
from headrace.paramserver.shard import Shard, open_shard
from headrace.paramserver.shard_config import ShardConfig
from headrace.paramserver.shard_link import Dial
from headrace.paramserver.snapshot_client import create_snapshot, fetch_snapshot
from headrace.paramserver.snapshot_files import SnapshotFiles, verify_snapshot
from headrace.paramserver.store import RowStore
from headrace.paramserver.store_config import StoreConfig
from headrace.schemas.errors import ConfigError, GoneError, RequestError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_keys import decode_key, key_prefix
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)
READER = dataclasses.replace(ADMIN, role=idl.Role.READER)
NUM_SHARDS = 2


def rows_on(shard: int, first: int, end: int) -> Any:
    """Row ids of a range that live on a shard."""
    rows = np.arange(first, end, dtype="<i8")
    return rows[shards_of_rows(table_seed(SPEC.fqn), rows, NUM_SHARDS) == shard]


class Trainer:
    """Writes every row of every shard at each step, in two batches a shard, so that half a step is easy to see."""

    def __init__(self, clients: list[ParamServerClient], *, rank: int = 0, world_size: int = 1) -> None:
        self.step = 0
        self._clients = clients
        self._rank, self._world_size = rank, world_size
        self._client_seq = 0

    async def hello(self) -> None:
        for client in self._clients:
            await client.hello(
                idl.HelloRequest(
                    protocol_version=PROTOCOL_VERSION,
                    role=idl.Role.WRITER,
                    run="run",
                    client=f"rank{self._rank}",
                    epoch=1,
                    rank=self._rank,
                    world_size=self._world_size,
                    tables=[spec_to_idl(SPEC)],
                )
            )

    async def train(self, *, step: int | None = None, ends_step: bool = True) -> None:
        self.step = self.step + 1 if step is None else step
        for half in range(2):
            self._client_seq += 1
            ends = ends_step and half == 1
            batches = [
                self._batch(rows_on(shard, half * 20 + self._rank * 100, half * 20 + 20 + self._rank * 100), ends)
                for shard in range(len(self._clients))
            ]
            pairs = zip(self._clients, batches, strict=True)
            await asyncio.gather(*(client.set_embeddings(batch) for client, batch in pairs))

    def _batch(self, rows: Any, ends: bool) -> Any:
        delta = idl.TableDelta(
            fqn=SPEC.fqn,
            fingerprint=SPEC.fingerprint,
            column_offset=0,
            width=SPEC.dim,
            row_ids=rows,
            weights=np.full((rows.size, SPEC.dim), self.step, "<f4"),
            states=[],
        )
        return idl.SetEmbeddingsRequest(
            run="run",
            client=f"rank{self._rank}",
            epoch=1,
            client_seq=self._client_seq,
            step=self.step,
            time_us=1,
            ends_step=ends,
            is_exact_cut=ends,
            deltas=[delta],
        )


class Server:
    def __init__(self, directory: Path, shards: list[Shard], addresses: list[tuple[str, int]]) -> None:
        self.shards = shards
        self.files = SnapshotFiles(directory / "snapshots")
        self.address = f"{addresses[0][0]}:{addresses[0][1]}"
        self.clients: list[ParamServerClient] = []

    async def snapshot(self, **settings: Any) -> SnapshotManifest:
        return await create_snapshot(self.address, dial=ADMIN, **{"timeout_s": 20.0} | settings)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(NUM_SHARDS)]
        addresses = [sock.getsockname() for sock in sockets]
        shards = []
        for shard, sock in enumerate(sockets):
            folder = directory / f"shard-{shard:04d}"
            folder.mkdir(parents=True, exist_ok=True)
            config = ShardConfig(
                directory=folder,
                shard=shard,
                server_id="a-server",
                addresses=tuple(addresses),
                block_cache_bytes=32 << 20,
                memtable_bytes=6 << 20,
            )
            opened = await stack.enter_async_context(open_shard(config))
            rpc = ThriftServer(opened, limits=ServerLimits())
            await rpc.start(sock)
            stack.push_async_callback(rpc.close, drain_s=5)
            stack.callback(opened.begin_drain)
            shards.append(opened)
        server = Server(directory, shards, addresses)
        for host, port in addresses:
            server.clients.append(await stack.enter_async_context(await ParamServerClient.connect(host, port)))
        yield server


def rows_of(folder: Path, shard: int) -> dict[int, float]:
    """First weight of every row in a shard's part of a snapshot."""
    store = RowStore.open_read_only(folder / f"shard-{shard:04d}", config=StoreConfig(block_cache_bytes=1 << 20))
    layout = RecordLayout(SPEC, SPEC.whole)
    try:
        found = {}
        for key, value in store.scan(key_prefix(1)):
            records, _ = layout.decode([value])
            found[decode_key(key)[2]] = float(np.frombuffer(records["weights"].tobytes(), "<f4")[0])
        return found
    finally:
        store.close()


async def test_a_snapshot_is_one_step_while_the_trainer_goes_on(tmp_path: Path) -> None:
    """Each of several snapshots has every row of all shards at its step, none before and none behind."""
    async with serving(tmp_path) as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        await trainer.train()
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


async def test_a_run_that_stands_still_is_cut_where_it_is(tmp_path: Path) -> None:
    """No batch has to come for it; an empty server has a snapshot too."""
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


async def test_a_run_in_mid_step_has_no_cut(tmp_path: Path) -> None:
    """It is refused in time, nothing is left over, and `at_step=False` cuts all the same and says it is no step."""
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
    """With two ranks the cut waits until both have ended the same step on every shard."""
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


async def test_a_snapshot_is_fetched_and_an_interrupted_fetch_goes_on(tmp_path: Path) -> None:
    """What is there already is kept; a damaged piece of it is found out and fetched again."""
    async with serving(tmp_path / "server") as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        await trainer.train()
        manifest = await server.snapshot(name="one")
        target = SnapshotFiles(tmp_path / "copy")
        first, second, *_ = [path for path, file in manifest.files().items() if file.size_bytes > 100]
        source = server.files.folder_of("one")
        for path, data in ((first, (source / first).read_bytes()[:50]), (second, b"damaged" * 5)):
            (target.new_folder("one") / path).parent.mkdir(parents=True, exist_ok=True)
            (target.new_folder("one") / path).write_bytes(data)
        progress: list[tuple[int, int]] = []
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


async def test_no_file_is_opened_in_the_event_loop(tmp_path: Path) -> None:
    """While a snapshot is fetched, neither side opens a file on the loop's thread: a slow disk holds up nobody."""
    target = tmp_path / "copy"
    async with serving(tmp_path / "server") as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        await trainer.train()
        manifest = await server.snapshot(name="one")
        folders = (str(target), str(server.files.path))
        with _watched_opens(folders) as opened:
            for _ in range(2):  # brought, and found to be there
                assert await fetch_snapshot(server.address, target, dial=READER) == manifest
    assert {Path(path).name for path, _ in opened} >= {"manifest.json", "CURRENT"}
    assert [path for path, thread in opened if thread == threading.get_ident()] == []


_opens: list[tuple[str, int]] | None = None


@contextmanager
def _watched_opens(folders: tuple[str, ...]) -> Iterator[list[tuple[str, int]]]:
    """Yield a list that gets the path and the thread of each file that is opened below some folders."""
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


sys.addaudithook(_on_audit)  # it stays for as long as the process does


async def test_a_snapshot_stays_what_it_is(tmp_path: Path) -> None:
    """Updates, flushes and a restart after it change nothing in it, though it shares files with the store."""
    async with serving(tmp_path) as server:
        trainer = Trainer(server.clients)
        await trainer.hello()
        await trainer.train()
        manifest = await server.snapshot()
        for _ in range(5):
            await trainer.train()
    async with serving(tmp_path) as server:
        folder = server.files.folder_of(manifest.name)
        assert verify_snapshot(folder) == manifest
        assert rows_of(folder, 0) == dict.fromkeys(rows_on(0, 0, 40).tolist(), 1.0)
        assert verify_snapshot(folder) == manifest  # reading it changed nothing either
