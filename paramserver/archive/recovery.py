"""Make shards of a server again from its object store: a snapshot's parts, and the archived log behind them.

The log is put back as it was, up to the end of the archive or to an earlier point. Opening the shard applies it, as
after a crash. So a restored shard is the same store as before: clients continue where they find it, or notice that it
lacks what they had acked. It begins a new mark, skips 1,000 epochs, and its first start claims a higher term.

    .NAME.recover/ready/…     while it is made; the last step is a rename
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.paramserver.archive.objects import Piece, ShardArchive, chain_of, num_shards_of
from headrace.paramserver.archive.points import PointFinder, RestorePoint, StepPoint, common_point
from headrace.paramserver.config.data_dir import find_manifest
from headrace.paramserver.log.claims import note_restored
from headrace.paramserver.log.excerpt import begin_log_at, end_log, excerpt_log_id, write_excerpt
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.new_data_dir import NewDataDir
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.durable import fsync_path, fsync_tree
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder
from headrace.schemas.version import MAX_EPOCH

__all__ = ["RestoredShard", "has_server", "restore_server"]

_WORK = "recover"
_SEGMENTS_AT_ONCE = 4
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
# As for a restored snapshot: none may be given twice.
_NUM_SKIPPED_EPOCHS = 1000

_Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredShard:
    """One restored shard.

    Attributes:
        shard: Its index.
        snapshot: Name of the snapshot that its rows come from; None where all of its log was archived.
        seq: Last record that it has.
        point: Step at which it was cut; None for a cut at the end of the archive or at a seq.
    """

    shard: int
    snapshot: str | None
    seq: int
    point: StepPoint | None


@dataclass(kw_only=True, slots=True)
class _Plan:
    """What a shard is made of."""

    shard: int
    archive: ShardArchive
    part: ShardPart | None
    chain: list[Piece]
    last_seq: int
    point: StepPoint | None = None

    @property
    def first_seq(self) -> int:
        """The first record that the store lacks."""
        return self.part.seq + 1 if self.part is not None else 1

    @property
    def size_bytes(self) -> int:
        return (self.part.size_bytes if self.part else 0) + sum(p.segment.content.size_bytes for p in self.chain)


def has_server(store: ObjectStore) -> bool:
    """Return whether there is anything to restore a server from."""
    if SnapshotStore(store).names():
        return True
    try:
        num_shards = num_shards_of(store)
    except GoneError:
        return False
    return any(ShardArchive(store, shard).segments() for shard in range(num_shards))


def restore_server(
    store: ObjectStore,
    data: Path,
    *,
    at: RestorePoint | None = None,
    shards: Collection[int] | None = None,
    on_size: Callable[[int], None] = lambda _: None,
    on_progress: _Progress = lambda _: None,
) -> list[RestoredShard]:
    """Make a server's directory, or some of its shards, from its object store, whole or not at all.

    Args:
        store: The prefix of one server.
        data: Directory of the server. For some `shards` it has the others, or is made.
        at: Where to cut; None takes all that was archived.
        shards: Which; None takes all.
        on_size: Called once with the bytes that are to be fetched.
        on_progress: Called with the bytes fetched since its last call, from threads.

    Raises:
        ConfigError: There is no server, no such point, or the directory is in the way.
        CorruptionError: An object is damaged, or a part of the log is missing.
        StorageError: The disk failed or lacks room; nothing was made.
        UnavailableError: The store is away.

    Thread: any without an event loop; it blocks.
    """
    data = data.absolute()
    server_id, manifests, num_shards = _find_server(store)
    wanted = sorted(range(num_shards) if shards is None else set(shards))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < num_shards:
        raise ConfigError(f"--shard {wanted[-1]}: the server at {store.where} has shards 0 to {num_shards - 1}")
    if at is not None and at.seq is not None and len(wanted) != 1:
        raise ConfigError(f"--at {at}: a seq is of one shard: give --shard, or step=N or time=… for all")
    is_partial = len(wanted) < num_shards
    if is_partial:
        _check_others(data, server_id, num_shards, store)
    plans = _plan(store, manifests, wanted, at)
    size_bytes = sum(plan.size_bytes for plan in plans)
    check_room(data.parent, size_bytes, what="what is restored")
    on_size(size_bytes)
    if is_partial:
        directories = [NewDataDir(data / shard_folder(shard), num_shards=1, work=_WORK) for shard in wanted]
        places = [directory.shard_path(0) for directory in directories]
    else:
        directories = [NewDataDir(data, num_shards=num_shards, work=_WORK)]
        places = [directories[0].shard_path(shard) for shard in wanted]
    try:
        epochs = []
        for plan, path in zip(plans, places, strict=True):
            with directories[0].mapped_errors():
                epochs.append(_fetch(store, manifests, plan, path, server_id, on_progress))
        if at is not None and at.seq is None:
            _cut_at(at, plans, places, store.where)
        for plan, path, epoch in zip(plans, places, epochs, strict=True):
            with directories[0].mapped_errors():
                _settle(plan, path, server_id, epoch)
                note_restored(store, path, server_id=server_id, shard=plan.shard)
                fsync_tree(path)
        if is_partial:
            for directory in directories:
                directory.publish_shard()
        else:
            directories[0].publish_copy(server_id)
    finally:
        for directory in directories:
            directory.close()
    name_of = {id(part): manifest.name for manifest in manifests for part in manifest.parts}
    return [
        RestoredShard(
            shard=plan.shard,
            snapshot=None if plan.part is None else name_of[id(plan.part)],
            seq=plan.last_seq,
            point=plan.point,
        )
        for plan in plans
    ]


def _find_server(store: ObjectStore) -> tuple[str, list[SnapshotManifest], int]:
    """Return the server's id, its snapshots, oldest first, and its number of shards."""
    snapshots = SnapshotStore(store)
    try:
        server_id = snapshots.server_id()
    except GoneError as exc:
        raise ConfigError(f"{store.where}: no server has snapshots or an archive here") from exc
    manifests = [manifest for manifest in snapshots.list() if manifest.server_id == server_id]
    if manifests:
        return server_id, manifests, len(manifests[-1].parts)
    try:
        return server_id, [], num_shards_of(store)
    except GoneError as exc:
        raise ConfigError(f"{store.where}: the server has neither a snapshot nor an archive here") from exc


def _check_others(data: Path, server_id: str, num_shards: int, store: ObjectStore) -> None:
    """Check that some shards belong into a server's directory."""
    manifest = find_manifest(data)
    if manifest is None:
        raise ConfigError(f"--data {data}: not a server's directory; restore all shards, or name the one of the others")
    if (manifest.server_id, manifest.num_shards) != (server_id, num_shards):
        raise ConfigError(f"--data {data}: the directory of another server than {store.where}")


def _plan(
    store: ObjectStore, manifests: Sequence[SnapshotManifest], shards: Sequence[int], at: RestorePoint | None
) -> list[_Plan]:
    """Choose the newest snapshot before the point, and the archived segments that follow it."""
    archives = {shard: ShardArchive(store, shard) for shard in shards}
    pieces = {shard: archive.pieces() for shard, archive in archives.items()}
    usable = [manifest for manifest in manifests if _is_before(manifest, at, shards)]
    plans = []
    for shard in shards:
        part = usable[-1].parts[shard] if usable else None
        plan = _Plan(shard=shard, archive=archives[shard], part=part, chain=[], last_seq=part.seq if part else 0)
        plan.chain = [
            piece
            for piece in chain_of(pieces[shard], plan.first_seq)
            if at is None or at.seq is None or piece.segment.first_seq <= at.seq
        ]
        if plan.chain:
            plan.last_seq = plan.chain[-1].last_seq
        elif part is None:
            found = f"begins at seq {pieces[shard][0].segment.first_seq}" if pieces[shard] else "is empty"
            before = "" if at is None else f" from before --at {at}"
            raise ConfigError(f"shard {shard}: {store.where} has no snapshot{before}, and the archive {found}")
        if at is not None and at.seq is not None:
            if at.seq > plan.last_seq:
                raise ConfigError(f"--at {at}: shard {shard} is archived up to seq {plan.last_seq}")
            plan.last_seq = at.seq
        _check_mark(plan, store.where)
        plans.append(plan)
    return plans


def _is_before(manifest: SnapshotManifest, at: RestorePoint | None, shards: Sequence[int]) -> bool:
    if at is None:
        return True
    if at.seq is not None:
        return all(manifest.parts[shard].seq <= at.seq for shard in shards)
    if at.step is not None:
        return 0 <= manifest.step <= at.step
    assert at.time_us is not None
    return manifest.created_us <= at.time_us


def _check_mark(plan: _Plan, where: str) -> None:
    """Check that snapshot and archive are of one history."""
    part = plan.part
    if part is None or part.mark is None:
        return
    for piece in plan.chain:
        if piece.segment.first_seq <= part.seq <= piece.last_seq and piece.segment.mark != part.mark:
            raise CorruptionError(
                f"shard {plan.shard}: record {part.seq} in the archive at {where} is another than in the snapshot: "
                "restore from an older snapshot, or remove the archive of this shard"
            )


def _fetch(
    store: ObjectStore,
    manifests: Sequence[SnapshotManifest],
    plan: _Plan,
    path: Path,
    server_id: str,
    on_progress: _Progress,
) -> int:
    """Fetch a shard's files and log; return the highest epoch in the log."""
    store_path, log_path = path / "store", path / "log"
    store_path.mkdir()
    log_path.mkdir()
    if plan.part is not None:
        folder = shard_folder(plan.shard)

        def place(name: str) -> Path | None:
            shard, _, file = name.partition("/")
            return store_path / file if shard == folder else None

        name = next(m.name for m in manifests if any(part is plan.part for part in m.parts))
        SnapshotStore(store).fetch_files(name, place, on_progress=on_progress)

    def write(number: int) -> int:
        segment = plan.chain[number].segment
        following = plan.chain[number + 1].segment.first_seq - 1 if number + 1 < len(plan.chain) else plan.last_seq

        def chunks() -> Iterator[bytes]:
            for chunk in plan.archive.read(segment):
                on_progress(len(chunk))
                yield chunk

        return write_excerpt(
            log_path, segment.first_seq, chunks(), last_seq=min(plan.chain[number].last_seq, following)
        )

    with ThreadPoolExecutor(_SEGMENTS_AT_ONCE, "headrace-restore") as pool:
        epochs = list(pool.map(write, range(len(plan.chain))))
    if not plan.chain:
        log_id = excerpt_log_id(server_id, plan.shard)
        begin_log_at(log_path, plan.first_seq, log_id=log_id, now_us=time.time_ns() // 1000)
    return max(epochs, default=0)


def _cut_at(at: RestorePoint, plans: Sequence[_Plan], places: Sequence[Path], where: str) -> None:
    """Find the point that all shards have, and end their logs there."""
    found = []
    for plan, path in zip(plans, places, strict=True):
        store = RowStore.open_read_only(path / "store", config=_STORE_CONFIG) if plan.part is not None else None
        try:
            finder = PointFinder({} if store is None else store.read_meta(), seq=plan.first_seq - 1)
        finally:
            if store is not None:
                store.close()
        if plan.chain:
            for record in open_source(path / "log").read(plan.first_seq):
                finder.take(record)
        found.append(finder.points)
    key = common_point(at, found)
    if key is None:
        steps = sorted(set(found[0]).intersection(*found[1:]))
        oldest = f"the oldest is step {steps[0][1]} of epoch {steps[0][0]}" if steps else "there is none"
        raise ConfigError(f"--at {at}: {where} has no step by then that all shards have; {oldest}")
    for plan, path, points in zip(plans, places, found, strict=True):
        plan.point, plan.last_seq = points[key], points[key].seq
        if plan.chain:
            end_log(path / "log", plan.last_seq)


def _settle(plan: _Plan, path: Path, server_id: str, log_epoch: int) -> None:
    """Raise the epochs of a shard, and check that store and log go together."""
    store = RowStore.open(path / "store", config=_STORE_CONFIG)
    try:
        sessions = Sessions(store.read_meta())
        epoch = max(sessions.highest_epoch, log_epoch) + _NUM_SKIPPED_EPOCHS
        meta = sessions.raise_version_epoch(min(epoch, MAX_EPOCH - 1))
        applied_seq = plan.first_seq - 1
        if store.applied_seq != applied_seq:
            raise CorruptionError(f"shard {plan.shard}: the snapshot ends at {store.applied_seq}, not at {applied_seq}")
        store.write([], [], meta=meta, applied_seq=applied_seq)
    finally:
        store.close()
    log = open_source(path / "log")
    if log.last_seq != plan.last_seq:
        raise CorruptionError(f"shard {plan.shard}: its log ends at seq {log.last_seq}, not at {plan.last_seq}")
    fsync_path(path)
