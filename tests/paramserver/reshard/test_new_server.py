"""A server with another number of shards is built from a running one, and takes its place."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_nobody, hello_of_writer
from resharding import ITEMS, Writers, build, free_port, rows_of
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from waiting import until

from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.config.data_dir import find_manifest
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reshard.remains import find_remains, open_remains
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    RequestError,
    ReshardedError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.snapshot_manifest import shard_folder


def _serve(data: Path, port: int) -> Any:
    """Serve what was built."""
    manifest = find_manifest(data)
    assert manifest is not None
    settings = {"server_id": manifest.server_id, "predecessors": manifest.predecessors}
    return serve_shards(data, manifest.num_shards, port=port, **settings)


async def _error_at(port: int) -> HeadraceError | None:
    """Return what a hello to the shard at a port raises."""
    try:
        async with await ParamServerClient.connect("127.0.0.1", port) as client:
            await client.hello(hello_of_nobody())
    except HeadraceError as exc:
        return exc
    return None


async def _ask(port: int, shard: int, **request: Any) -> None:
    """Send a shard's owner an `idl.PromoteShardRequest`."""
    async with await ParamServerClient.connect("127.0.0.1", port) as client:
        await client.hello(hello_of_nobody(idl.Role.ADMIN))
        await client.promote_shard(idl.PromoteShardRequest(shard=shard, **request))


async def _is_replaced(port: int) -> bool:
    return isinstance(await _error_at(port), ReshardedError)


def _left_in(path: Path) -> list[Path]:
    """Return what is left of a build of `new`."""
    return list(path.glob("*new*"))


def _metas_of(data: Path, num_shards: int) -> list[dict[bytes, bytes]]:
    """Return what the stores of a server that does not run know besides rows."""
    metas = []
    for shard in range(num_shards):
        store = RowStore.open(data / shard_folder(shard) / "store", config=StoreConfig(block_cache_bytes=4 << 20))
        metas.append(store.read_meta())
        store.close()
    return metas


def _compare_meta(old: list[dict[bytes, bytes]], new: list[dict[bytes, bytes]]) -> None:
    """Compare who writes which tables, and in which epochs nobody writes any more."""
    catalogs, highest = list(map(Catalog, old)), max(Sessions(meta).highest_epoch for meta in old)
    for catalog, sessions in [(Catalog(meta), Sessions(meta)) for meta in new]:
        assert sessions.highest_epoch == highest
        assert sessions.epoch_of("run") == max(Sessions(meta).epoch_of("run") for meta in old)
        assert catalog.drop_epochs == catalogs[0].drop_epochs
        for table in catalog:
            owners = [other.owner_of(table.spec.fqn) for other in catalogs]
            assert table.owner == max(filter(None, owners), key=lambda owner: owner.epoch)


async def _rebuild(path: Path, num_old: int, num_new: int, seed: int) -> None:
    """Build a server from another one while that is written to; compare all rows."""
    port = free_port()
    old, new = path / "old", path / "new"
    async with serve_shards(old, num_old) as ports:
        writers = await Writers.connect(ports, seed)
        await writers.some(15)
        building = asyncio.create_task(build(ports, new, num_new, port))
        await writers.until(building)
        predecessor = await building
        await writers.close()
        manifest = find_manifest(new)
        assert manifest is not None and manifest.predecessors == (predecessor,)
    metas = _metas_of(old, num_old)
    _compare_meta(metas, _metas_of(new, num_new))
    found = rows_of(new, path / "new-rows")
    expected = rows_of(old, path / "old-rows")
    drops = [Catalog(meta).drop_epochs for meta in metas]
    for name in {name for known in drops for name in known if known[name] != drops[-1].get(name)}:
        expected.pop(name, None)  # it was being dropped at the end, and the first log that tells so decides
    assert {name: len(rows) for name, rows in found.items()} == {name: len(rows) for name, rows in expected.items()}
    assert found == expected
    assert any(expected.values()), "nothing was compared"


@pytest.mark.parametrize(("num_old", "num_new"), [(2, 3), (3, 1)])
async def test_every_row_is_there(tmp_path: Path, num_old: int, num_new: int) -> None:
    """All rows are equal to the bit, whatever was written, deleted, dropped or grown meanwhile, in any columns."""
    await _rebuild(tmp_path, num_old, num_new, seed=num_old)


async def test_every_row_is_there_whatever_is_done(tmp_path: Path) -> None:
    """The same with other numbers of shards and other schedules."""
    for seed in range(8):
        path = tmp_path / str(seed)
        path.mkdir()
        num_old = seed % 4 + 1
        await _rebuild(path, num_old, (num_old + seed // 4) % 4 + 1, seed)


async def test_old_shards_believe_the_new_server_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once they were taken over, no other server at the address lets them go on, no restart, and no archive."""
    port = free_port()
    old, new, url = tmp_path / "old", tmp_path / "new", f"file://{tmp_path / 'store'}"
    async with serve_shards(old, 2, object_store=url, archive_segment_s=0.1) as ports:
        writers = await Writers.connect(ports, 1)
        await writers.some(3)
        await build(ports, new, 3, port)
        assert "the archive ends with the old server" in caplog.text
        async with serve_shards(tmp_path / "other", 1, port=port):
            for shard, at in enumerate(ports):
                with pytest.raises(UnavailableError):
                    await _ask(at, shard, aborts=True)
        async with _serve(new, port):
            for at in ports:
                await until(partial(_is_replaced, at))
        with find_remains(old) as remains, open_remains(remains, None) as shards:
            assert [shard.offer is not None and shard.offer.is_taken for shard in shards] == [True, True]
        for shard, path in enumerate(sorted(old.glob("shard-*"))):
            archive, last_seq = ShardArchive(ObjectStore.of_url(url), shard), open_source(path / "log").last_seq
            await until(lambda archive=archive, seq=last_seq: archive.pieces()[-1].last_seq >= seq)
        with pytest.raises(ConfigError):
            await asyncio.to_thread(restore_server, ObjectStore.of_url(url), tmp_path / "restored")
        assert not (tmp_path / "restored").exists()
        await writers.close()  # the old server hangs up on them
        with pytest.raises(ReshardedError):
            await Writers.connect(ports, 1)
        with pytest.raises(ReshardedError):
            await build(ports, tmp_path / "again", 1, free_port())
    async with serve_shards(old, 2) as ports:
        assert [await _is_replaced(at) for at in ports] == [True, True], "the new server is away, and nobody is asked"


async def test_one_builder_has_the_server(tmp_path: Path) -> None:
    """What a killed builder was offered is nobody else's, over restarts; the builder itself begins anew."""
    old, new, port = tmp_path / "old", tmp_path / "new", free_port()
    async with serve_shards(old, 2) as ports:
        writers = await Writers.connect(ports, 1)
        await writers.some(3)
        await writers.close()
        await _ask(ports[0], 0, to=f"127.0.0.1:{port}", hold_ms=60_000, shards=3)
    async with serve_shards(old, 2) as ports:
        with pytest.raises(RequestError):
            await build(ports, new, 3, free_port())
        assert not _left_in(tmp_path), "the other builder leaves nothing"
        with pytest.raises(UnavailableError):
            await Writers.connect(ports, 1)
        await _ask(ports[1], 1, to=f"127.0.0.1:{port}", hold_ms=60_000, shards=3)
        await build(ports, new, 3, port)
    assert rows_of(new, tmp_path / "new-rows") == rows_of(old, tmp_path / "old-rows")


async def test_a_stopped_build_leaves_nothing(tmp_path: Path) -> None:
    """The old server goes on, whenever the build is stopped."""
    async with serve_shards(tmp_path / "old", 2) as ports:
        writers = await Writers.connect(ports, 1)
        await writers.some(3)
        building = asyncio.create_task(build(ports, tmp_path / "new", 3, free_port()))
        closed = asyncio.create_task(writers.until(building))
        await closed  # by the offer
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        await writers.begin_anew()
        await writers.some(3)
        await writers.close()
    assert not _left_in(tmp_path)


async def test_no_table_and_one_shard(tmp_path: Path) -> None:
    """A server without tables is built anew, too; one that has as many shards is not."""
    async with serve_shards(tmp_path / "old", 2) as ports:
        with pytest.raises(ConfigError):
            await build(ports, tmp_path / "new", 2, free_port())
        await build(ports, tmp_path / "new", 1, free_port())
    assert rows_of(tmp_path / "new", tmp_path / "rows") == {}


async def test_a_table_that_came_to_one_shard_only(tmp_path: Path) -> None:
    """It is dropped at all shards: who registers it late is refused, and rows of a later one are all taken."""
    async with serve_shards(tmp_path / "old", 2) as ports:
        async with await ParamServerClient.connect("127.0.0.1", ports[0]) as client:
            await client.hello(hello_of_writer(ITEMS))
        for at in ports:
            async with await ParamServerClient.connect("127.0.0.1", at) as client:
                hello = {"run": "admin", "client": "drop", "epoch": 2, "world_size": 0}
                await client.hello(hello_of_nobody(idl.Role.ADMIN, **hello, dropped_tables=[ITEMS.fqn]))
        async with await ParamServerClient.connect("127.0.0.1", ports[1]) as client:
            with pytest.raises(UnknownTableError):
                await client.hello(hello_of_writer(ITEMS))
        for shard, at in enumerate(ports):
            async with await ParamServerClient.connect("127.0.0.1", at) as client:
                await client.hello(hello_of_writer(ITEMS, epoch=3))
                rows = np.arange(ITEMS.num_rows)
                rows = rows[shards_of_rows(ITEMS.seed, rows, 2) == shard]
                await client.set_embeddings(request_of(delta_of(ITEMS, rows, 1.0), epoch=3))
        await build(ports, tmp_path / "new", 3, free_port())
    assert len(rows_of(tmp_path / "new", tmp_path / "rows")[ITEMS.fqn]) == ITEMS.num_rows
