"""Builds copies of the tables: from a snapshot's files, or by reading a running server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.paramserver.replica.copy.build_pace import BuildPace
from headrace.paramserver.replica.copy.fetched_snapshots import FetchedSnapshots, snapshot_in_use
from headrace.paramserver.replica.copy.live import CopyLease, LiveCopy, LogLeaseKeeper
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.storage import CopyFolders, CopyStorage, memory_needed
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.base import Ids, ReplicaTable
from headrace.paramserver.replica.tables.dense import DenseTensors
from headrace.paramserver.replica.tables.identity_map import IdentityMap, load_identities
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles, read_manifest, verify_snapshot
from headrace.paramserver.snapshots.remote import fetch_snapshot, newest_snapshot
from headrace.paramserver.store.catalog import Catalog, Filling, Owner
from headrace.paramserver.system.limits import free_memory_bytes
from headrace.paramserver.system.text import format_size
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    ReshardedError,
    SetBackError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import spec_from_idl
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.table_names import model_of
from headrace.schemas.tables import RUNTIME_META, TableSpec

__all__ = ["CopyBuilder", "load_live", "load_snapshot"]

_log = logging.getLogger(__name__)

_MakeTable = Callable[[TableSpec], ReplicaTable | None]
_Wants = Callable[[str], bool]
_TableRows = tuple[TableSpec, Ids]
_StoredRows = tuple[Ids, Any, Any, Any, Any]

_CONNECTING, _READING = "the server has not answered yet", "its tables are being read"
# Size of one request for rows. It counts as progress only once all of it has arrived, so it must cross a slow link well
# within the patience of whoever waits for the copy.
_LIVE_ROWS, _LIVE_BYTES, _LIVE_TABLES = 65_536, 4 << 20, 256
# A request that makes progress may take long, others are repeated; whoever waits for the copy may give up sooner.
_LIVE_TIMEOUT_S = 600.0
_FULL_PACE = BuildPace(100)
# Between attempts to reach a server that has taken the place of another.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class CopyBuilder:
    """Builds the copies of one replica. Thread: the event loop's, except for creating and closing the builder.

    Attributes:
        address: Of the server: that which was given, or that of the server that has taken its place, with another
            number of shards. Thread: any.
    """

    def __init__(self, address: str, dial: Dial, config: ReplicaConfig) -> None:
        """Lock the directory of copies on disk, if the settings need one; raise `ConfigError` if it cannot be used."""
        self.address = address
        self._has_moved = False  # to such a server
        self._dial = dial
        self._config = config
        self._folders = CopyFolders(config.disk_dir) if config.uses_disk else None
        self._model = config.model  # of a copy by step, which shows the steps of one run
        self.doing = _CONNECTING  # what the copy being built waits for, for people
        # Any thread calls it when a few megabytes were fetched, checked or loaded, or a file was linked.
        self.on_progress: Callable[[], None] = lambda: None
        self._fetched: str | None = None  # the snapshot last fetched into `snapshot_dir`

    def close(self) -> None:
        """Release the directory; copies are closed by their owners. Idempotent."""
        if self._folders is not None:
            self._folders.close()

    async def remove_old_snapshots(self) -> None:
        """Remove older snapshots from `snapshot_dir`, once a copy of the newest answers lookups.

        Failures are logged: they cost disk space, and the next switch tries again. Cancellation: begun removals finish.
        """
        directory = self._config.snapshot_dir
        if directory is None or self._fetched is None:
            return
        try:
            await asyncio.to_thread(FetchedSnapshots(directory).remove_others, self._fetched)
        except HeadraceError as exc:
            _log.warning("cannot remove old snapshots: %s", exc)

    async def build(
        self,
        snapshot: Path | None,
        *,
        held_bytes: int,
        on_change: Callable[[], None],
        on_lost: Callable[[LiveCopy, HeadraceError], None],
    ) -> LiveCopy:
        """Return a new copy that has begun to follow the server.

        It starts from the snapshot, or from what the server has if that is None. `held_bytes` is the memory of the
        present copies; the callbacks are those of `LiveCopy`.

        Raises:
            ConfigError: There is no snapshot, not enough memory, or the disk's directory cannot be used.
            CorruptionError: The snapshot is damaged.
            GoneError: A snapshot is needed and there is none, or it belongs to another store.
            StorageError: The disk failed.
            UnavailableError: The server is away.

        Cancellation: nothing of the copy remains.
        """
        self.doing = _CONNECTING
        reader = await self._connect()
        self.doing = _READING
        lease = CopyLease.of(self._config)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(reader.close)
            specs = list(reader.tables.values())
            if self._is_by_step and self._model is None:
                self._model = self._only_model(reader.tables)
            for line in self._config.unmatched(reader.tables) if specs else ():
                _log.warning("replica: %s", line)
            storage = CopyStorage(self._config, self._folders, specs, wants=self._wants)
            pace = BuildPace(self._config.build_percent if held_bytes else 100)  # nothing to leave alone without a copy
            undo.push_async_callback(asyncio.to_thread, storage.close)
            if snapshot is not None:
                with snapshot_in_use(snapshot):
                    tables = await self._load(snapshot, reader, lease, storage, held_bytes, pace)
            elif await self._reads_rows_of(reader) and all(spec.num_rows for spec in specs if self._wants(spec.fqn)):
                self._check_memory(specs, 0, held_bytes)
                tables = await self._load_live(reader, lease, storage, pace)
            else:
                tables = await self._load_newest(reader, lease, storage, held_bytes, pace)
            targets = [status.accepted_seq for status in await reader.status()]
            undo.pop_all()
        return LiveCopy(tables, reader, self._config, lease, target_seqs=targets, on_change=on_change, on_lost=on_lost)

    async def _connect(self) -> EmbeddingReader:
        """Connect to the server, or to that which has taken its place; raises as `EmbeddingReader.connect`."""
        dial, backoff = self._dial, Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        while True:
            try:
                reader = await EmbeddingReader.connect(
                    self.address,
                    timeout_s=dial.timeout_s,
                    ssl_context=dial.ssl_context,
                    server_hostname=dial.server_hostname,
                    token=dial.token,
                    reads_copies=dial.reads_copies,
                    reach_log=dial.reach_log,
                )
            except ReshardedError as exc:
                successor = format_address(*exc.successor)
                if not self.address.startswith(f"{successor},"):  # it has not answered yet
                    _log.warning("%s: the replica goes on at %s", exc, successor)
                    self.address, self._has_moved = f"{successor},{self.address}", True
                await asyncio.sleep(backoff.next_s())
                continue
            if self._has_moved:
                self.address = ",".join(link.address for link in reader.links)
            return reader

    async def _load_live(
        self, reader: EmbeddingReader, lease: CopyLease, storage: CopyStorage, pace: BuildPace
    ) -> TableSet:
        try:
            return await load_live(
                reader,
                is_by_step=self._is_by_step,
                make_table=storage.make,
                wants=self._wants,
                lease=lease,
                on_progress=lambda: self.on_progress(),
                pace=pace,
            )
        except UnknownTableError as exc:  # another shard knows the table: a trainer is just starting
            raise UnavailableError(f"{exc}: it is not registered at every shard yet") from exc

    async def _load(
        self,
        folder: Path,
        reader: EmbeddingReader,
        lease: CopyLease,
        storage: CopyStorage,
        held_bytes: int,
        pace: BuildPace,
    ) -> TableSet:
        manifest: SnapshotManifest = await asyncio.to_thread(read_manifest, folder)
        async with _log_leases(reader, manifest, lease) as keeper:

            def check_wanted() -> None:
                pace.pause()
                storage.check_open()
                keeper.check()
                self.on_progress()

            await asyncio.to_thread(verify_snapshot, folder, on_progress=lambda _: check_wanted())
            self._check_memory(list(manifest.tables.values()), manifest.size_bytes, held_bytes)
            await asyncio.to_thread(storage.link, folder, manifest, check_wanted=check_wanted)
            return await asyncio.to_thread(
                load_snapshot,
                folder,
                manifest,
                is_by_step=self._is_by_step,
                make_table=storage.make,
                wants=self._wants,
                check_wanted=check_wanted,
            )

    async def _load_newest(
        self, reader: EmbeddingReader, lease: CopyLease, storage: CopyStorage, held_bytes: int, pace: BuildPace
    ) -> TableSet:
        async with contextlib.AsyncExitStack() as stack:
            directory = self._config.snapshot_dir
            if directory is None:
                temporary = tempfile.TemporaryDirectory(prefix="headrace-")
                stack.push_async_callback(asyncio.to_thread, temporary.cleanup)  # it may be gigabytes
                directory = Path(temporary.name)
            folder = await self._fetch_newest(FetchedSnapshots(directory), reader, lease, stack)
            return await self._load(folder, reader, lease, storage, held_bytes, pace)

    async def _reads_rows_of(self, reader: EmbeddingReader) -> bool:
        """Return whether a copy may begin with the rows of the shards, not of a snapshot."""
        return self._config.object_store is None or await self._url_of_snapshots(reader) is None

    async def _url_of_snapshots(self, reader: EmbeddingReader) -> str | None:
        """Return the object store with the server's snapshots; None if they are only on its disk."""
        url = self._config.object_store
        if url is None or self._has_moved:  # the one of the settings has the snapshots of the server before
            upload = (await reader.links[0].status()).upload
            url = None if upload is None else upload.url
        return url

    async def _fetch_newest(
        self, fetched: FetchedSnapshots, reader: EmbeddingReader, lease: CopyLease, in_use: contextlib.AsyncExitStack
    ) -> Path:
        """Fetch the newest snapshot, keeping the log after it, and return its folder, marked as in use."""
        tried, source = "", await self._source(reader)
        while True:
            try:
                manifest = await source.newest()
            except GoneError as exc:
                why = "" if self._config.object_store else ", and tables of virtual ids cannot be read without one"
                raise GoneError(f"{exc}{why}: headrace snapshot create") from exc
            try:
                self.doing = f"snapshot {manifest.name!r} is being fetched"
                async with _log_leases(reader, manifest, lease) as keeper, fetched.alone(keeper.check):

                    def check_wanted(keeper: LogLeaseKeeper = keeper) -> None:
                        keeper.check()
                        self.on_progress()

                    await asyncio.to_thread(fetched.prepare, manifest)
                    await source.fetch(manifest.name, fetched.files, check_wanted)
                    folder = fetched.files.folder_of(manifest.name)
                    in_use.enter_context(snapshot_in_use(folder))
                self._fetched, self.doing = manifest.name, _READING
                return folder
            except GoneError as exc:  # the snapshot or its log was removed: there may be a newer one now
                if manifest.name == tried:
                    advice = "headrace snapshot create makes another"
                    if isinstance(exc, SetBackError):  # its position may be beyond that of a newer snapshot
                        advice = f"{source.how_to_remove(tried)}; then {advice}"
                    raise GoneError(f"snapshot {tried!r} cannot be followed from: {exc}; {advice}") from exc
                tried = manifest.name

    async def _source(self, reader: EmbeddingReader) -> _ServerSnapshots | _StoredSnapshots:
        """Return where snapshots come from: an object store, or the server's disk."""
        url = await self._url_of_snapshots(reader)
        if url is None:
            return _ServerSnapshots(self.address, self._dial)
        return _StoredSnapshots(await asyncio.to_thread(SnapshotStore.of_url, url))

    @property
    def _is_by_step(self) -> bool:
        return self._config.consistency == "step"

    def _only_model(self, fqns: Iterable[str]) -> str | None:
        models = sorted({model_of(fqn) for fqn in fqns if self._config.wants(fqn)})
        if len(models) > 1:
            raise ConfigError(
                f"replica: the server has the models {', '.join(models)}, and consistency 'step' shows the steps of "
                "one: name it (model=…)"
            )
        return models[0] if models else None

    def _wants(self, fqn: str) -> bool:
        """Return whether a copy has a table; by step, the first wanted table of a new server decides on the model."""
        if not self._config.wants(fqn):
            return False
        if self._is_by_step and self._model is None:
            self._model = model_of(fqn)
        return self._model in (None, model_of(fqn))

    def _check_memory(self, specs: Collection[TableSpec], snapshot_bytes: int, held_bytes: int) -> None:
        needed = memory_needed(self._config, [spec for spec in specs if self._wants(spec.fqn)], snapshot_bytes)
        limit = self._config.max_memory_bytes
        free = free_memory_bytes() if limit is None else limit - held_bytes
        if needed > free:
            raise ConfigError(
                f"replica: a new copy takes about {format_size(needed)}, {format_size(max(free, 0))} are free "
                f"beside the {format_size(held_bytes)} of the present one"
            )


class _ServerSnapshots:
    """The snapshots that a server has on its disk."""

    def __init__(self, address: str, dial: Dial) -> None:
        self._address, self._dial = address, dial

    async def newest(self) -> SnapshotManifest:
        """Return the newest; `GoneError` if there is none."""
        return await newest_snapshot(self._address, dial=self._dial)

    async def fetch(self, name: str, files: SnapshotFiles, check_wanted: Callable[[], None]) -> None:
        """Copy one, calling `check_wanted` all the time, which may raise to stop."""
        await fetch_snapshot(
            self._address, files.path, dial=self._dial, name=name, on_progress=lambda _done, _total: check_wanted()
        )

    def how_to_remove(self, name: str) -> str:
        """Say how to remove one that counts as newer than it is."""
        return f"remove snapshots/{name} from the server's directory by hand"


class _StoredSnapshots:
    """The snapshots in an object store; see `_ServerSnapshots`."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store

    async def newest(self) -> SnapshotManifest:
        manifest = await asyncio.to_thread(self._store.newest)
        if manifest is None:
            raise GoneError(f"{self._store.where}: there is no snapshot yet")
        return manifest

    async def fetch(self, name: str, files: SnapshotFiles, check_wanted: Callable[[], None]) -> None:
        abandoned = threading.Event()

        def check(_: int) -> None:
            if abandoned.is_set():
                raise UnavailableError("nobody waits for the snapshot any more")
            check_wanted()

        fetching = asyncio.ensure_future(asyncio.to_thread(self._store.fetch, name, files, on_progress=check))
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.wait([fetching])  # nobody else may touch the directory before
            raise

    def how_to_remove(self, name: str) -> str:
        return f"headrace snapshot remove {self._store.where} {name}"


def _log_leases(reader: EmbeddingReader, manifest: SnapshotManifest, lease: CopyLease) -> LogLeaseKeeper:
    """Return a keeper of the log after a snapshot; GoneError if the snapshot belongs to another store."""
    server_id = reader.links[0].hello.server_id
    if manifest.server_id != server_id:
        raise GoneError(f"the snapshot is of store {manifest.server_id}, the server has {server_id}")
    marks = [part.mark for part in manifest.parts]
    return LogLeaseKeeper(reader.links, [part.seq + 1 for part in manifest.parts], lease, marks=marks)


def load_snapshot(
    folder: Path,
    manifest: SnapshotManifest,
    *,
    is_by_step: bool,
    make_table: _MakeTable,
    check_wanted: Callable[[], None],
    wants: _Wants = lambda _: True,
) -> TableSet:
    """Return the tables of a snapshot, whose files match the manifest (`verify_snapshot`). Thread: any; blocks.

    `check_wanted` is called every few megabytes; an exception ends the loading. Nothing else can cancel a thread, and
    the interpreter waits for it on exit. `CorruptionError` if a part does not match the manifest.
    """
    with SnapshotReader(folder) as snapshot:
        tails = []
        for part, store in zip(manifest.parts, snapshot.stores, strict=True):
            if store.applied_seq != part.seq:
                raise CorruptionError(f"{store.path}: at seq {store.applied_seq}, the manifest says {part.seq}")
            meta = store.read_meta()
            tails.append(
                ShardTail(
                    part.shard,
                    seq=part.seq,
                    catalog=Catalog(meta),
                    sessions=Sessions(meta),
                    mark=part.mark,
                    wants=wants,
                )
            )
        table_set = TableSet(manifest.server_id, tails, is_by_step=is_by_step, make_table=make_table)
        for specs in map(table_set.dense.specs_of, table_set.dense.models):
            for spec in specs.values():
                for rows in _stored_rows(snapshot, spec.fqn, check_wanted):
                    table_set.dense.load(spec, *rows)
        for target in table_set.tables.values():
            if not (isinstance(target, DiskTable) and target.is_loaded):
                _load_table(snapshot, target, check_wanted)
        for store, tail in zip(snapshot.stores, tails, strict=True):
            for table in tail.catalog:
                if table.spec.fqn in table_set.identities:
                    load_identities(store, table, table_set.identities[table.spec.fqn], check_wanted=check_wanted)
        table_set.advance()
        return table_set


def _load_table(snapshot: SnapshotReader, target: ReplicaTable, check_wanted: Callable[[], None]) -> None:
    for rows in _stored_rows(snapshot, target.spec.fqn, check_wanted):
        target.load(*rows, target.spec.whole)


def _stored_rows(snapshot: SnapshotReader, fqn: str, check_wanted: Callable[[], None]) -> Iterator[_StoredRows]:
    """Yield ids, weights, presence, epochs and steps, a few megabytes at a time."""
    # In numpy: lookups in the old copy go on meanwhile.
    for ids, records in snapshot.rows(fqn):
        check_wanted()
        presence = np.full(ids.size, PRESENT, np.uint8)
        yield ids, np.ascontiguousarray(records["weights"]), presence, records["epoch"], records["step"]


async def load_live(
    reader: EmbeddingReader,
    *,
    is_by_step: bool,
    make_table: _MakeTable,
    lease: CopyLease,
    wants: _Wants = lambda _: True,
    on_progress: Callable[[], None] = lambda: None,
    pace: BuildPace = _FULL_PACE,
) -> TableSet:
    """Return the tables of a running server, read while it goes on; every table must have a number of rows.

    The positions in the logs are noted before any row is read, so a row may be newer than its shard's position.
    Following the log from there writes it again and ends in the same row. Only then is the copy at a step. Meanwhile
    the lease keeps that log; `GoneError` if it is lost. `on_progress` is called every few megabytes.

    Cancellation: safe; the leases end.
    """
    before = await reader.status()
    seqs = [min(status.log_seq, status.accepted_seq) for status in before]  # what rows have for sure
    for link, seq in zip(reader.links, seqs, strict=True):
        link.least_seq = seq  # it may find the shard at a copy of it, which may lack the last records
    async with LogLeaseKeeper(reader.links, [seq + 1 for seq in seqs], lease) as keeper:
        specs_of = [[spec_from_idl(table.spec) for table in status.tables] for status in before]
        specs = _same_specs(spec for of_shard in specs_of for spec in of_shard)
        dense, dense_specs = DenseTensors(), [spec for spec in specs.values() if spec.is_dense and wants(spec.fqn)]
        of_tables = {fqn: spec for fqn, spec in specs.items() if not spec.is_dense}
        tables = {fqn: table for fqn, spec in of_tables.items() if (table := make_table(spec)) is not None}
        identities = {fqn: IdentityMap(specs[fqn]) for fqn in tables if specs[fqn].has_identities}

        def load(some: Iterable[tuple[_TableRows, Rows]]) -> None:
            with pace.paced():  # each part in another thread
                load_part(some)

        def load_part(some: Iterable[tuple[_TableRows, Rows]]) -> None:
            for (spec, _), rows in some:
                assert rows.epochs is not None
                assert rows.steps is not None
                versions = rows.presence, rows.epochs, rows.steps
                if spec.is_dense:
                    dense.load(spec, rows.row_ids, rows.weights, *versions)
                    continue
                tables[spec.fqn].load(rows.row_ids, rows.weights, *versions, spec.whole)
                if spec.has_identities:
                    assert rows.identities is not None
                    meta = rows.states.get(RUNTIME_META)
                    identities[spec.fqn].load(rows.row_ids, rows.identities, *versions, spec.whole, meta)

        for parts in _live_parts([*(tables[fqn].spec for fqn in tables), *dense_specs]):
            keeper.check()
            wanted = [(spec.fqn, ids) for spec, ids in parts]
            has_meta = any(spec.runtime_meta for spec, _ in parts)
            rows = await reader.get_many(wanted, with_states=has_meta, with_versions=True, timeout_s=_LIVE_TIMEOUT_S)
            await asyncio.to_thread(load, zip(parts, rows, strict=True))
            on_progress()
        after = await reader.status()
        for link, status in zip(reader.links, after, strict=True):
            if status.accepted_seq < link.newest_seq:
                raise UnavailableError(f"{link.address} is a copy of its shard that lacks rows of the one before it")
        each = zip(before, seqs, specs_of, after, keeper.marks, strict=True)
        tails = [_tail_of(*of_shard, wants) for of_shard in each]
        table_set = TableSet(
            after[0].server_id,
            tails,
            is_by_step=is_by_step,
            make_table=lambda spec: tables[spec.fqn] if spec.fqn in tables else make_table(spec),
            dense=dense,
        )
        table_set.identities |= identities
        table_set.advance()
        return table_set


def _same_specs(specs: Iterable[TableSpec]) -> dict[str, TableSpec]:
    """Return the tables of all shards; raise `UnavailableError` if one has not grown at every shard yet."""
    found: dict[str, TableSpec] = {}
    for spec in specs:
        if found.setdefault(spec.fqn, spec) != spec:
            raise UnavailableError(
                f"table {spec.fqn!r} has {found[spec.fqn].num_rows} and {spec.num_rows} rows at two shards: it has not "
                "grown at every shard yet, and does with the next start of its trainer"
            )
    return found


def _live_parts(specs: Iterable[TableSpec]) -> Iterator[list[_TableRows]]:
    """Yield what to read with each request: some rows of one table, or all rows of several small tables."""
    part: list[_TableRows] = []
    num_rows = num_bytes = 0
    for spec in specs:
        assert spec.num_rows, "a table of virtual ids cannot be read by id"
        row_bytes = spec.dim * spec.dtype.size_bytes
        if spec.runtime_meta:  # read with all states
            row_bytes = RecordLayout(spec, spec.whole).size_bytes
        most = min(_LIVE_ROWS, _LIVE_BYTES // row_bytes)
        for first in range(0, spec.num_rows, most):
            ids = np.arange(first, min(first + most, spec.num_rows), dtype=np.int64)
            num_rows, num_bytes = num_rows + ids.size, num_bytes + ids.size * row_bytes
            is_full = num_rows > _LIVE_ROWS or num_bytes > _LIVE_BYTES
            if part and (is_full or len(part) == _LIVE_TABLES):
                yield part
                part, num_rows, num_bytes = [], ids.size, ids.size * row_bytes
            part.append((spec, ids))
    if part:
        yield part


def _tail_of(
    before: Any, seq: int, specs: Sequence[TableSpec], after: Any, mark: int | None, wants: _Wants
) -> ShardTail:
    catalog = Catalog({})
    catalog.add(specs)
    for table in before.tables:
        catalog.find(table.spec.fqn).earlier |= set(table.earlier_fingerprints or ())
        if table.owner is not None:
            told = table.owner
            former = None if told.former_run is None else (told.former_run, told.former_epoch)
            owner = Owner(told.run, told.epoch, is_backfill=bool(told.is_backfill), former=former)
            catalog.claim([told.fqn], owner)
        if (filling := table.filling) is not None:
            known = Filling(filling.epoch, filling.after_step, filling.from_row or 0, bool(filling.updated_only))
            catalog.begin_filling({table.spec.fqn: known})
    sessions = Sessions({})
    for client in sorted(after.clients, key=lambda client: client.epoch):
        if client.epoch >= sessions.epoch_of(client.run):
            _learn(sessions.open(client.run, client.client, client.epoch, client.rank, client.world_size), client)
    for client in after.clients:  # in the order in which the shard learned of them, and would forget them
        session = sessions.find(client.run, client.client)
        if session is not None and session.epoch == client.epoch:
            sessions.settle(session, seq)
    return ShardTail(
        before.shard,
        seq=seq,
        catalog=catalog,
        sessions=sessions,
        exact_from=after.accepted_seq,
        mark=mark,
        wants=wants,
    )


def _learn(session: Session, client: Any) -> None:
    session.last_client_seq, session.step = client.last_client_seq, client.step
    session.exact_step, session.ended_client_seq = client.exact_step, client.ended_client_seq
    session.time_us = session.covered_us = client.time_us or 0
