"""Snapshots of a directory whose server does not run."""

from __future__ import annotations

from pathlib import Path

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder


def snapshot_of(data_dir: Path, folder: Path) -> Path:
    """Make the snapshot `bench` of a server's directory in a folder on the same file system; return its directory."""
    files, name, parts = SnapshotFiles(folder), "bench", []
    with DataDir.claim(data_dir, num_shards=None) as directory:
        manifest = directory.manifest
        for shard in range(manifest.num_shards):
            part = files.new_folder(name) / shard_folder(shard)
            part.parent.mkdir(parents=True, exist_ok=True)
            store = RowStore.open(directory.shard_path(shard) / "store", config=StoreConfig(block_cache_bytes=4 << 20))
            try:
                store.checkpoint(part)
                tables = tuple(table.spec for table in Catalog(store.read_meta()))
                seq = store.applied_seq
            finally:
                store.close()
            parts.append(
                ShardPart(
                    shard=shard,
                    server_id=manifest.server_id,
                    seq=seq,
                    epoch=0,
                    step=-1,
                    tables=tables,
                    files=hash_folder(part),
                )
            )
        files.publish(SnapshotManifest(name=name, created_us=0, parts=tuple(parts)))
    return files.folder_of(name)
