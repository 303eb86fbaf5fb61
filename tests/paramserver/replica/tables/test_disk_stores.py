"""Stores of a copy: opening a snapshot without changing it, and memory limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_batches import make_delta

from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.snapshots.directory import hash_folder, part_folder
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="t",
    num_rows=0,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="momentum1", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),),
    has_identities=True,
)
OTHER = TableSpec(fqn="other", num_rows=5, dim=2, dtype=DType.FLOAT32)
IDS = np.arange(0, 3000, 3)


def _snapshot(folder: Path, *shards: ColumnShard) -> SnapshotManifest:
    """Write a snapshot of two shards, each with every column shard of the table."""
    parts = []
    for number in range(2):
        path = folder / shard_folder(number)
        store = RowStore.open(path, config=StoreConfig(block_cache_bytes=1 << 20))
        meta = Catalog({}).add([SPEC])
        mine = IDS[shards_of_rows(table_seed(SPEC.fqn), IDS, 2) == number]
        batch = Batch(seq=1, epoch=1, step=1, time_us=0)
        runs = [
            coalesce(1, [Part.of_delta(make_delta(mine.tolist(), 1, spec=SPEC, shard=shard), batch)])
            for shard in sorted(shards)
        ]
        store.write_runs(runs, meta=meta, applied_seq=1)
        store.close()
        parts.append(
            ShardPart(
                shard=number, server_id="s", seq=1, epoch=1, step=1, tables=(SPEC,), files=tuple(hash_folder(path))
            )
        )
    return SnapshotManifest(name="snap", created_us=0, parts=tuple(parts))


def _link(tmp_path: Path, manifest: SnapshotManifest) -> DiskStores:
    return DiskStores.link(tmp_path / "copy", tmp_path / "snap", manifest, memory_bytes=4 << 20, num_threads=1)


LEFT, RIGHT = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)


@pytest.mark.parametrize("shards", [(SPEC.whole,), (LEFT, RIGHT)], ids=["whole", "column shards"])
@pytest.mark.parametrize("has_links", [True, False])
def test_a_snapshot_is_opened_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[ColumnShard, ...], has_links: bool
) -> None:
    """A linked snapshot has its rows at once, and later writes change none of its bytes."""
    manifest = _snapshot(tmp_path / "snap", *shards)
    files = {number: hash_folder(part_folder(tmp_path / "snap", part)) for number, part in enumerate(manifest.parts)}
    if not has_links:
        monkeypatch.setattr(os, "link", _refuse)
    stores = _link(tmp_path, manifest)
    linked = [path for path in (tmp_path / "copy").rglob("*.sst") if path.stat().st_nlink > 1]
    assert bool(linked) == has_links
    table = DiskTable(SPEC, stores, hot_bytes=1)
    assert table.is_loaded and table.num_present >= IDS.size
    expected = np.zeros((3000, 4), "<f4")
    for shard in shards:
        data = np.frombuffer(make_delta(IDS.tolist(), 1, spec=SPEC, shard=shard).columns["weights"], "<f4")
        expected[IDS, shard.offset : shard.offset + shard.width] = data.reshape(IDS.size, -1)
    assert table.gather(np.arange(3000))[0].tobytes() == expected.tobytes()
    table.apply(make_delta([0, 1], 9, spec=SPEC, deleted=[3]), epoch=1, step=2)
    expected[[0, 1]] = np.frombuffer(make_delta([0, 1], 9, spec=SPEC).columns["weights"], "<f4").reshape(2, 4)
    expected[3] = 0
    found, missing = table.gather(np.arange(3000))
    assert found.tobytes() == expected.tobytes()
    assert np.flatnonzero(~missing).tolist() == sorted({0, 1, *IDS.tolist()} - {3})
    late = DiskTable(OTHER, stores, hot_bytes=1)
    assert not late.is_loaded
    late.apply(make_delta([4], 2, spec=OTHER), epoch=1, step=2)
    assert late.gather(np.arange(5))[1].tolist() == [True] * 4 + [False]
    for store in stores.stores:
        store.flush()
    table.close()
    assert not (tmp_path / "copy").exists()
    for number, part in enumerate(manifest.parts):
        assert hash_folder(part_folder(tmp_path / "snap", part)) == files[number]


def test_a_part_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    """If a snapshot goes away during linking, the copy's folder is removed too."""
    manifest = _snapshot(tmp_path / "snap", SPEC.whole)
    (tmp_path / "snap" / shard_folder(1)).rename(tmp_path / "away")
    with pytest.raises(StorageError, match="cannot link"):
        _link(tmp_path, manifest)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "error", [StorageError("no space left on device"), ConfigError("read-only file system")], ids=str
)
def test_what_a_disk_does_not_take_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HeadraceError
) -> None:
    """All stores are closed and removed even if the disk refuses their last rows."""
    stores = _link(tmp_path, _snapshot(tmp_path / "snap", SPEC.whole))
    closed, close = [], RowStore.close

    def fail(store: RowStore) -> None:
        close(store)
        closed.append(store)
        raise error

    monkeypatch.setattr(RowStore, "close", fail)
    stores.close()
    assert closed == list(stores.stores) and len(closed) == 2
    assert not (tmp_path / "copy").exists()


def test_a_copy_that_cannot_begin_leaves_nothing_though_a_store_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the part that is damaged, and the copy's folder goes."""
    manifest = _snapshot(tmp_path / "snap", SPEC.whole)
    (tmp_path / "snap" / shard_folder(1) / "CURRENT").write_text("nonsense")
    close = RowStore.close

    def fail(store: RowStore) -> None:
        close(store)
        raise StorageError("no space left on device")

    monkeypatch.setattr(RowStore, "close", fail)
    with pytest.raises(HeadraceError, match="shard-0001"):
        _link(tmp_path, manifest)
    assert not (tmp_path / "copy").exists()


def _refuse(*_: Any) -> None:
    raise OSError("no links here")
