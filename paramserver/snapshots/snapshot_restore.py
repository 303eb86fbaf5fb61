"""A server's directory made from a snapshot: of its files as they are, or, with another number of shards, of its rows.

What is made is another store than the one that the snapshot was taken of: it has an identity and a log of its own, for
what was acked after the cut is not in it. So replicas begin anew, and a trainer that goes on says so or sends all rows
again (`on_new_store`), from its batch 1 on: that is where the sessions of trainers begin again too. The step that they
stood at is kept, for the rows up to it are here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.paramserver.files.disk_room import check_room
from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.ingest.sessions import Sessions
from headrace.paramserver.snapshots.new_data_dir import FIRST_SEQ, NewDataDir, check_target
from headrace.paramserver.snapshots.snapshot_files import link_or_copy, part_folder, read_manifest, verify_snapshot
from headrace.paramserver.snapshots.snapshot_reader import SnapshotReader
from headrace.paramserver.snapshots.store_builder import StoreBuilder
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.row_records import MAX_EPOCH
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["restore_snapshot"]

_WORK = "restore"
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
# Trainers may have taken epochs after the cut, and one of them may still run. So many are passed over, that none is
# given away a second time.
_EPOCHS_PASSED_OVER = 1000


def restore_snapshot(
    snapshot: Path,
    target: Path,
    *,
    num_shards: int | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_rows: Callable[[int], None] = lambda _: None,
) -> SnapshotManifest:
    """Make a server's directory of a snapshot, whole or not at all; return the snapshot's manifest.

    With the snapshot's own number of shards, its stores are taken as they are. With another one, rows are dealt anew:
    all of them, deleted ones too, with values, states, versions and identities; rows in column shards become whole
    ones, and nobody's session is kept.

    Args:
        snapshot: Directory with `manifest.json`. It is not changed; on one file system, files of rows are hard links.
        target: The directory to make; not there yet, or empty.
        num_shards: Of the new server; None for the snapshot's.
        on_progress: Called with the bytes that have been checked since the last call.
        on_rows: Called with the rows that have been dealt since the last call.

    Raises:
        ConfigError: There is no snapshot, or something at the target.
        CorruptionError: A file of the snapshot is missing or damaged; it is named.
        StorageError: The disk failed, or has no room for it; nothing was made.

    Thread: any without an event loop; it blocks.
    """
    check_target(target.absolute())
    found = read_manifest(snapshot)
    is_linked = (
        num_shards in (None, len(found.parts)) and snapshot.stat().st_dev == target.absolute().parent.stat().st_dev
    )
    if not is_linked:
        check_room(target.absolute().parent, found.size_bytes, what=f"what is made of snapshot {found.name!r}")
    manifest = verify_snapshot(snapshot, on_progress=on_progress)
    if num_shards in (None, len(manifest.parts)):
        _take_files(snapshot, target, manifest)
    else:
        assert num_shards is not None
        _deal_rows(snapshot, target, num_shards, on_rows)
    return manifest


def _take_files(snapshot: Path, target: Path, manifest: SnapshotManifest) -> None:
    run = f"{_WORK}-{manifest.name}"
    with NewDataDir(target, num_shards=len(manifest.parts), work=_WORK) as directory:
        for part in manifest.parts:
            store_path = directory.shard_path(part.shard) / "store"
            with directory.mapped_errors():
                store_path.mkdir()
                for file in part.files:
                    link_or_copy(part_folder(snapshot, part) / file.name, store_path / file.name)
            _begin_store_anew(store_path, directory, run)
            with directory.mapped_errors():
                for path in sorted(store_path.iterdir()):
                    fsync_path(path)
                fsync_path(store_path)
        directory.publish(run, manifest.parts[0].tables)


def _begin_store_anew(path: Path, directory: NewDataDir, run: str) -> None:
    """Have a copied store begin with the new log."""
    store = RowStore.open(path, config=_STORE_CONFIG)
    try:
        sessions = Sessions(store.read_meta())
        changed = sessions.raise_version_epoch(min(sessions.highest_epoch + _EPOCHS_PASSED_OVER, MAX_EPOCH - 1))
        for session in sessions:
            session.last_seq = 0  # places in the log that was mean nothing in the new one
            if session.is_trainer:
                if not session.is_at_exact_cut:
                    session.exact_step = -1
                session.last_client_seq = session.ended_client_seq = 0
            changed |= session.pack()
        changed |= directory.open_session(sessions, run).pack()
        store.write([], [], meta=changed, applied_seq=FIRST_SEQ)
    finally:
        store.close()


def _deal_rows(snapshot: Path, target: Path, num_shards: int, on_rows: Callable[[int], None]) -> None:
    with SnapshotReader(snapshot) as reader:
        specs = [reader.tables[fqn] for fqn in sorted(reader.tables)]
        if not specs:
            raise ConfigError(f"{snapshot}: a snapshot without tables has no rows to deal; leave --shards out")
        run = f"{_WORK}-{reader.manifest.name}"
        with StoreBuilder(target, num_shards=num_shards, specs=specs, run=run, work=_WORK) as builder:
            highest = max(Sessions(store.read_meta()).highest_epoch for store in reader.stores)
            builder.raise_epoch(min(highest + _EPOCHS_PASSED_OVER, MAX_EPOCH - 1))
            for spec in specs:
                builder.set_scalars(spec.fqn, reader.scalars(spec.fqn).values())
                for row_ids, records in reader.rows(spec.fqn):
                    builder.add_records(spec.fqn, row_ids, records)
                    on_rows(row_ids.size)
            builder.finish()
