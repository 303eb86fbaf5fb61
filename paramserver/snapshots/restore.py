"""Make a server's directory from a snapshot: from its files or, with another number of shards, from its rows.

The result is a new store with its own server id and log, because it lacks what was acked after the cut. So replicas
start over, and a trainer that continues either says so or sends all rows again (`on_new_store`), from its batch 1 on,
where its sessions start again too. Sessions keep their step, because the rows up to it are here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.paramserver.ingest.pipeline import META_MARK
from headrace.paramserver.ingest.shard_state import META_OFFER
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import (
    SnapshotFiles,
    link_or_copy,
    part_folder,
    read_manifest,
    verify_snapshot,
)
from headrace.paramserver.snapshots.new_data_dir import FIRST_SEQ, NewDataDir, StoreBuilder, check_target
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.durable import fsync_tree
from headrace.paramserver.system.limits import check_room
from headrace.schemas.errors import ConfigError
from headrace.schemas.snapshot_manifest import SnapshotManifest, shard_folder
from headrace.schemas.version import MAX_EPOCH

__all__ = ["restore_snapshot", "restore_stored_snapshot"]

_WORK = "restore"
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
# Trainers may have taken epochs after the cut, and one may still run. Skip this many, so that none is taken twice.
_NUM_SKIPPED_EPOCHS = 1000


def restore_snapshot(
    snapshot: Path,
    target: Path,
    *,
    num_shards: int | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_rows: Callable[[int], None] = lambda _: None,
) -> SnapshotManifest:
    """Make a server's directory from a snapshot, whole or not at all; return the snapshot's manifest.

    With the snapshot's own number of shards, the new stores have its files. With another number, all rows are
    distributed anew, with values, states, versions and identities; rows in column shards become whole
    rows, and no session is kept.

    The snapshot does not change; on one file system, its files of rows are hard links. `on_progress` gets the number of
    bytes checked since its last call, and `on_rows` the number of rows distributed.

    Raises:
        ConfigError: The snapshot does not exist, or the target is not empty.
        CorruptionError: A file of the snapshot is missing or damaged; the message names it.
        StorageError: The disk failed or lacks room; nothing was made.

    Thread: any without an event loop; it blocks.
    """
    check_target(target.absolute())
    found = read_manifest(snapshot)
    parent = target.absolute().parent
    is_linked = num_shards in (None, len(found.parts)) and snapshot.stat().st_dev == parent.stat().st_dev
    if not is_linked:
        check_room(parent, found.size_bytes, what=f"the copy of snapshot {found.name!r}")
    manifest = verify_snapshot(snapshot, on_progress=on_progress)
    if num_shards in (None, len(manifest.parts)):

        def link(directory: NewDataDir) -> None:
            for part in manifest.parts:
                for file in part.files:
                    target = _store_path(directory, part.shard) / file.name
                    link_or_copy(part_folder(snapshot, part) / file.name, target)

        _restore_files(target, manifest, link)
    else:
        assert num_shards is not None
        _distribute_rows(snapshot, target, num_shards, on_rows)
    return manifest


def restore_stored_snapshot(
    store: SnapshotStore,
    name: str,
    target: Path,
    *,
    num_shards: int | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_rows: Callable[[int], None] = lambda _: None,
) -> SnapshotManifest:
    """Make a server's directory from a snapshot in an object store, as `restore_snapshot` does from a directory.

    Files go from the store to their place, checked on the way. With another number of shards they are fetched beside
    `target` first. `on_progress` is called in several threads.

    Raises:
        GoneError: There is no such snapshot.
        UnavailableError: The store is away; otherwise as `restore_snapshot`.
    """
    check_target(target.absolute())
    manifest, parent = store.manifest_of(name), target.absolute().parent
    check_room(parent, manifest.size_bytes, what=f"snapshot {name!r}")
    if num_shards not in (None, len(manifest.parts)):
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=parent) as folder:
            files = SnapshotFiles(Path(folder))
            store.fetch(name, files, on_progress=on_progress)
            assert num_shards is not None
            _distribute_rows(files.folder_of(name), target, num_shards, on_rows)
        return manifest

    def fetch(directory: NewDataDir) -> None:
        places = {
            f"{shard_folder(part.shard)}/{file.name}": _store_path(directory, part.shard) / file.name
            for part in manifest.parts
            for file in part.files
        }
        store.fetch_files(name, places.__getitem__, on_progress=on_progress)

    _restore_files(target, manifest, fetch)
    return manifest


def _restore_files(target: Path, manifest: SnapshotManifest, place_files: Callable[[NewDataDir], None]) -> None:
    run = f"{_WORK}-{manifest.name}"
    with NewDataDir(target, shards=range(len(manifest.parts)), work=_WORK) as directory:
        with directory.mapped_errors():
            for part in manifest.parts:
                _store_path(directory, part.shard).mkdir()
            place_files(directory)
        for part in manifest.parts:
            store_path = _store_path(directory, part.shard)
            _reset_store(store_path, directory, run)
            with directory.mapped_errors():
                fsync_tree(store_path)
        directory.publish(run, manifest.parts[0].tables)


def _store_path(directory: NewDataDir, shard: int) -> Path:
    return directory.shard_path(shard) / "store"


def _reset_store(path: Path, directory: NewDataDir, run: str) -> None:
    """Make a copied store start with the new log."""
    store = RowStore.open(path, config=_STORE_CONFIG)
    try:
        sessions = Sessions(store.read_meta())
        changed = sessions.raise_epoch(min(sessions.highest_epoch + _NUM_SKIPPED_EPOCHS, MAX_EPOCH - 1))
        for session in sessions:
            session.last_seq = 0  # positions in the old log mean nothing in the new one
            if session.is_trainer:
                if not session.is_at_exact_cut:
                    session.exact_step = -1
                session.last_client_seq = session.ended_client_seq = 0
        directory.open_session(sessions, run)
        changed |= sessions.packed()
        changed[META_MARK] = changed[META_OFFER] = b""  # of the old log
        store.write([], [], meta=changed, applied_seq=FIRST_SEQ)
    finally:
        store.close()


def _distribute_rows(snapshot: Path, target: Path, num_shards: int, on_rows: Callable[[int], None]) -> None:
    with SnapshotReader(snapshot) as reader:
        specs = [reader.tables[fqn] for fqn in sorted(reader.tables)]
        if not specs:
            raise ConfigError(f"{snapshot}: a snapshot without tables has no rows to distribute; omit --shards")
        run = f"{_WORK}-{reader.manifest.name}"
        with StoreBuilder(target, num_shards=num_shards, specs=specs, run=run, work=_WORK) as builder:
            highest = max(Sessions(store.read_meta()).highest_epoch for store in reader.stores)
            builder.raise_epoch(min(highest + _NUM_SKIPPED_EPOCHS, MAX_EPOCH - 1))
            catalogs = [Catalog(store.read_meta()) for store in reader.stores]
            builder.take_from(catalogs)
            for spec in specs:
                for row_ids, records in reader.rows(spec.fqn):
                    builder.add_records(spec.fqn, row_ids, records)
                    on_rows(row_ids.size)
            builder.finish()
