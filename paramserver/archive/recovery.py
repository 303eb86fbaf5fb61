"""Make shards of a server again from its object store: a snapshot's parts, and the archived log behind them.

The log is put back as it was, up to the end of the archive or to an earlier point. Opening the shard applies it, as
after a crash. So a restored shard is the same store as before: clients continue where they find it, or notice that it
lacks what they had acked. It begins a new mark, skips 1,000 epochs, and its first start claims a higher term.

A whole server, the shards of a cluster's node, or single shards are restored alike:

    .NAME.recover/ready/…     while it is made; the last step is a rename

Another server, with other shards or some tables only, is built of the same files, fetched beside it and removed then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from headrace.paramserver.archive.objects import Piece, ShardArchive, chain_of, check_history, num_shards_of
from headrace.paramserver.archive.points import PointFinder, RestorePoint, StepPoint, choose_point
from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.config.data_dir import Manifest, find_manifest
from headrace.paramserver.ingest.shard_state import offer_at
from headrace.paramserver.log.claims import Claim, claims_of, note_restored
from headrace.paramserver.log.excerpt import begin_log_at, end_log, excerpt_log_id, write_excerpt
from headrace.paramserver.log.opening import LogKind, kind_of_log, open_source
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

__all__ = ["NUM_SKIPPED_EPOCHS", "RestoredShard", "fetched_shards", "has_server", "num_shards_at", "restore_server"]

_WORK, _FETCH = "recover", "fetch"
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
_SEGMENTS_AT_ONCE = 4

NUM_SKIPPED_EPOCHS = 1000
"""Trainers may have taken epochs after what is restored. So many are skipped, so that none is given twice."""

_Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredShard:
    """One restored shard.

    Attributes:
        shard: Its index.
        snapshot: Name of the snapshot that its rows come from; None where all of its log was archived.
        seq: Last record that it has.
        point: Step at which it was cut; None for a cut at the end of the archive or at a seq.
        claim: Of the copy from which it takes over at its first start; None if the shard was never claimed.
        archived_at: When the shard last archived anything, by the store's clock; None if it never has.
    """

    shard: int
    snapshot: str | None
    seq: int
    point: StepPoint | None
    claim: Claim | None
    archived_at: datetime | None


class _NoServerError(ConfigError):
    """The object store has no server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    """What an object store knows of its server."""

    server_id: str
    num_shards: int
    manifests: list[SnapshotManifest]  # oldest first

    def directory(
        self, cluster: ClusterFile | None, node: ClusterNode | None, where: str, *, log: LogKind = "file"
    ) -> Manifest:
        """Return the manifest of its directory, or of a node's; `ConfigError` if the file is of another server."""
        if cluster is None or node is None:
            return Manifest(server_id=self.server_id, num_shards=self.num_shards, log=log)
        if cluster.server_id != self.server_id:
            raise ConfigError(
                f"{cluster.path}: server_id: {cluster.server_id}: {where} is of another server, {self.server_id}"
            )
        if cluster.num_shards != self.num_shards:
            raise ConfigError(
                f"{cluster.path}: shards: {cluster.num_shards}: the server at {where} has {self.num_shards} shards"
            )
        # Its standbys come from their owners, or from the log.
        return Manifest.of_node(cluster, replace(node, standbys=()), log=kind_of_log(cluster.log))


@dataclass(kw_only=True, slots=True)
class _Plan:
    """What a shard is made of."""

    shard: int
    archive: ShardArchive
    part: ShardPart | None
    chain: list[Piece]
    last_seq: int
    point: StepPoint | None = None
    archived_at: datetime | None = None
    claim: Claim | None = None

    @property
    def first_seq(self) -> int:
        """The first record that the store lacks."""
        return self.part.seq + 1 if self.part is not None else 1

    @property
    def size_bytes(self) -> int:
        return (self.part.size_bytes if self.part else 0) + sum(p.segment.content.size_bytes for p in self.chain)


def has_server(store: ObjectStore, *, cluster: ClusterFile | None = None, node: ClusterNode | None = None) -> bool:
    """Return whether there is anything to restore a server, or the shards of a cluster's node, from.

    Raises:
        ConfigError: The cluster file is of another server than the store.
        UnavailableError: The store is away.
    """
    try:
        server = _find_server(store)
    except _NoServerError:
        return False
    shards = server.directory(cluster, node, store.where).shards
    return bool(shards and server.manifests) or any(
        ShardArchive(store, shard).segments() or claims_of(store, shard) for shard in shards
    )


def num_shards_at(store: ObjectStore) -> int:
    """Return how many shards the server has that an object store has; raises as `restore_server`."""
    return _find_server(store).num_shards


@contextlib.contextmanager
def fetched_shards(
    store: ObjectStore,
    target: Path,
    *,
    at: RestorePoint | None = None,
    name: str | None = None,
    on_size: Callable[[int], None] = lambda _: None,
    on_progress: _Progress = lambda _: None,
) -> Iterator[list[Path]]:
    """Fetch the store and the log of each shard, beside a new directory, while the block lasts.

    The store is that of a snapshot: the newest from before `at`, or that of a `name`, which has no log behind it.
    Otherwise the log goes up to the end of the archive, or is as long as it takes to find `at`. Raises as
    `restore_server`.

    Yields:
        A directory of each shard, with `store`, which may be empty, and `log`.
    """
    server = _find_server(store)
    manifests = server.manifests if name is None else [SnapshotStore(store).manifest_of(name)]
    num_shards = server.num_shards if name is None else len(manifests[0].parts)
    if at is not None and at.seq is not None and num_shards != 1:
        raise ConfigError(f"--at {at}: a seq is of one shard: give step=N or time=… for all")
    plans = _plan(store, manifests, range(num_shards), at, with_log=name is None)
    size_bytes = sum(plan.size_bytes for plan in plans)
    check_room(target.parent, size_bytes, what="what is fetched")
    on_size(size_bytes)
    with NewDataDir(target, shards=range(num_shards), work=_FETCH) as directory:
        places = [directory.shard_path(plan.shard) for plan in plans]
        for plan, path in zip(plans, places, strict=True):
            with directory.mapped_errors():
                _fetch(store, manifests, plan, path, server.server_id, on_progress)
        yield places


def restore_server(
    store: ObjectStore,
    data: Path,
    *,
    at: RestorePoint | None = None,
    shards: Collection[int] | None = None,
    cluster: ClusterFile | None = None,
    node: ClusterNode | None = None,
    log: LogKind = "file",
    on_size: Callable[[int], None] = lambda _: None,
    on_progress: _Progress = lambda _: None,
) -> list[RestoredShard]:
    """Make the directory of a server or of a node, or some of its shards, from its object store, whole or not at all.

    Args:
        store: The prefix of one server.
        data: Directory of the server or the node. For some `shards` it has others, or a node's is made.
        at: Where to cut; None takes all that was archived.
        shards: Which; None takes all.
        cluster: File of a server on several hosts, of which only the shards of one node are meant.
        node: That node.
        log: Where the log of a server on one host is; the cluster file says it of others. One that is replicated goes
            on behind what is restored.
        on_size: Called once with the bytes that are to be fetched.
        on_progress: Called with the bytes fetched since its last call, from threads.

    Raises:
        ConfigError: There is no server, no such point, or the directory is in the way; or the cluster file is of
            another server, or one with another number of shards has taken the server's place.
        CorruptionError: An object is damaged, or a part of the log is missing.
        StorageError: The disk failed or lacks room; nothing was made.
        UnavailableError: The store is away.

    Thread: any without an event loop; it blocks.
    """
    data = data.absolute()
    server = _find_server(store)
    manifest = server.directory(cluster, node, store.where, log=log)
    if at is not None and manifest.log != "file":
        raise ConfigError(
            f"--at {at}: the server's log is in NATS, and has what came later: it would come back. To go back, restore "
            "without a replicated log (no --log, no log: in the cluster file)"
        )
    wanted = list(manifest.shards) if shards is None else sorted(set(shards))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < server.num_shards:
        raise ConfigError(f"--shard {wanted[-1]}: the server at {store.where} has shards 0 to {server.num_shards - 1}")
    if cluster is not None and (others := sorted(set(wanted) - set(manifest.shards))):
        raise ConfigError(f"--shard {others[0]}: {cluster.path} gives it to node {cluster.node_of(others[0]).name}")
    if at is not None and at.seq is not None and len(wanted) != 1:
        raise ConfigError(f"--at {at}: a seq is of one shard: give --shard, or step=N or time=… for all")
    here = find_manifest(data, node=node)
    is_partial = shards is not None and (here is not None or len(wanted) < len(manifest.shards))
    if is_partial:
        _check_others(data, here, server, wanted, store.where, node)
    else:
        _check_bare(data, here, manifest)
    plans = _plan(store, server.manifests, wanted, at)
    size_bytes = sum(plan.size_bytes for plan in plans)
    check_room(data.parent, size_bytes, what="what is restored")
    on_size(size_bytes)
    if is_partial:
        _make_parent(data)
        directories = [NewDataDir(data / shard_folder(shard), shards=[shard], work=_WORK) for shard in wanted]
        places = [directory.shard_path(shard) for directory, shard in zip(directories, wanted, strict=True)]
    else:
        directories = [NewDataDir(data, shards=wanted, work=_WORK)]
        places = [directories[0].shard_path(shard) for shard in wanted]
    try:
        epochs = []
        for plan, path in zip(plans, places, strict=True):
            with directories[0].mapped_errors():
                epochs.append(_fetch(store, server.manifests, plan, path, server.server_id, on_progress))
        if at is not None and at.seq is None:
            _cut_at(at, plans, places, store.where)
        for plan, path in zip(plans, places, strict=True):
            _check_place(plan, path)
        for plan, path, epoch in zip(plans, places, epochs, strict=True):
            with directories[0].mapped_errors():
                _settle(plan, path, server.server_id, epoch)
                plan.claim = note_restored(
                    store, path, server_id=server.server_id, shard=plan.shard, is_cut=at is not None
                )
                fsync_tree(path)
        if is_partial:
            for directory in directories:
                directory.publish_shard()
        else:
            directories[0].publish_copy(manifest)
    finally:
        for directory in directories:
            directory.close()
    name_of = {id(part): each.name for each in server.manifests for part in each.parts}
    return [
        RestoredShard(
            shard=plan.shard,
            snapshot=None if plan.part is None else name_of[id(plan.part)],
            seq=plan.last_seq,
            point=plan.point,
            claim=plan.claim,
            archived_at=plan.archived_at,
        )
        for plan in plans
    ]


def _find_server(store: ObjectStore) -> _Server:
    snapshots = SnapshotStore(store)
    try:
        server_id = snapshots.server_id()
    except GoneError as exc:
        raise _NoServerError(f"{store.where}: no server has snapshots or an archive here") from exc
    manifests = [manifest for manifest in snapshots.list() if manifest.server_id == server_id]
    try:
        num_shards = num_shards_of(store)
    except GoneError as exc:
        if not manifests:
            raise _NoServerError(f"{store.where}: the server has neither a snapshot nor an archive here") from exc
        num_shards = len(manifests[-1].parts)
    return _Server(server_id=server_id, num_shards=num_shards, manifests=manifests)


def _check_others(
    data: Path, here: Manifest | None, server: _Server, shards: Sequence[int], where: str, node: ClusterNode | None
) -> None:
    """Check that some shards belong into a directory, which has the manifest `here`."""
    if here is None:
        if node is None:
            raise ConfigError(
                f"--data {data}: not a server's directory; restore all shards, name the one of the others, or make "
                "that of a cluster's node with --cluster FILE --node NAME"
            )
        return
    if (here.server_id, here.num_shards) != (server.server_id, server.num_shards):
        raise ConfigError(f"--data {data}: the directory of another server than {where}")
    if node is None and (others := sorted(set(shards) - set(here.shards))):
        raise ConfigError(
            f"--shard {others[0]}: {data} is of a cluster's node that has other shards: to give it this one, change "
            "the cluster file, and name it with --cluster FILE --node NAME"
        )


def _check_bare(data: Path, here: Manifest | None, manifest: Manifest) -> None:
    """Check that a directory, which has the manifest `here`, has no shard; say what it lacks if it has."""
    missing = [shard for shard in manifest.shards if not (data / shard_folder(shard)).exists()]
    if here is None and len(missing) == len(manifest.shards):
        return  # what else may be in the way is found when it is made
    advice = "move it away, or name another one"
    if missing:
        advice = f"restore what it lacks with {' '.join(f'--shard {shard}' for shard in missing)}, or {advice}"
    raise ConfigError(f"--data {data}: not empty: it has shards of a server; {advice}")


def _make_parent(data: Path) -> None:
    """Make the directory of a node, durably, into which single shards come."""
    try:
        if not data.is_dir():
            data.mkdir()
            fsync_path(data.parent)
    except OSError as exc:
        raise ConfigError(f"--data {data}: cannot be made there ({exc.strerror or exc})") from exc


def _plan(
    store: ObjectStore,
    manifests: Sequence[SnapshotManifest],
    shards: Sequence[int],
    at: RestorePoint | None,
    *,
    with_log: bool = True,
) -> list[_Plan]:
    """Choose the newest snapshot before the point, and the archived segments that follow it."""
    archives = {shard: ShardArchive(store, shard) for shard in shards}
    pieces = {shard: archive.pieces() if with_log else [] for shard, archive in archives.items()}
    usable = [manifest for manifest in manifests if _is_before(manifest, at, shards)]
    plans = []
    for shard in shards:
        part = usable[-1].parts[shard] if usable else None
        check_history(pieces[shard], store.where)
        plan = _Plan(shard=shard, archive=archives[shard], part=part, chain=[], last_seq=part.seq if part else 0)
        plan.chain = [
            piece
            for piece in chain_of(pieces[shard], plan.first_seq)
            if at is None or at.seq is None or piece.segment.first_seq <= at.seq
        ]
        plan.archived_at = max((piece.segment.put_at for piece in pieces[shard]), default=None)
        if plan.chain:
            plan.last_seq = plan.chain[-1].last_seq
        elif part is None and not (at is None and _is_new(archives[shard])):
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


def _is_new(archive: ShardArchive) -> bool:
    """Return whether a shard has archived nothing, and no copy of it began with a record: it is restored empty."""
    return not archive.segments() and all(not claim.seq for claim in claims_of(archive.store, archive.shard).values())


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

    epoch = _write_chain(plan.archive, plan.chain, log_path, last_seq=plan.last_seq, on_progress=on_progress)
    if not plan.chain:
        log_id = excerpt_log_id(server_id, plan.shard)
        begin_log_at(log_path, plan.first_seq, log_id=log_id, now_us=time.time_ns() // 1000)
    return epoch


def _write_chain(
    archive: ShardArchive, chain: Sequence[Piece], log_path: Path, *, last_seq: int, on_progress: _Progress
) -> int:
    """Fetch pieces that follow each other into a log's empty directory, up to a record; return the highest epoch.

    Raises:
        CorruptionError: An object is damaged or missing.
        StorageError: The disk failed.
        UnavailableError: The store is away.
    """

    def write(number: int) -> int:
        segment = chain[number].segment
        following = chain[number + 1].segment.first_seq - 1 if number + 1 < len(chain) else last_seq

        def chunks() -> Iterator[memoryview]:
            for chunk in archive.read(segment):
                on_progress(len(chunk))
                yield chunk

        return write_excerpt(log_path, segment.first_seq, chunks(), last_seq=min(chain[number].last_seq, following))

    with ThreadPoolExecutor(_SEGMENTS_AT_ONCE, "headrace-restore") as pool:
        return max(pool.map(write, range(len(chain))), default=0)


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
    for plan, path, point in zip(plans, places, choose_point(at, found, where), strict=True):
        plan.point, plan.last_seq = point, point.seq
        if plan.chain:
            end_log(path / "log", plan.last_seq)


def _check_place(plan: _Plan, path: Path) -> None:
    """Refuse a shard that would answer nothing but where the server is that has taken the place of its own."""
    offer = offer_at(open_source(path / "log"), plan.last_seq)
    if offer is not None and offer.is_taken:
        raise ConfigError(
            f"shard {plan.shard}: the server with {offer.num_shards} shards at {offer.to} has taken the place of this "
            f"one, and has all of its rows. For another new server of them, up to record {plan.last_seq}, add "
            "--table '*'"
        )


def _settle(plan: _Plan, path: Path, server_id: str, log_epoch: int) -> None:
    """Raise the epochs of a shard, and check that store and log go together."""
    store = RowStore.open(path / "store", config=_STORE_CONFIG)
    try:
        sessions = Sessions(store.read_meta())
        epoch = max(sessions.highest_epoch, log_epoch) + NUM_SKIPPED_EPOCHS
        meta = sessions.raise_epoch(min(epoch, MAX_EPOCH - 1))
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
