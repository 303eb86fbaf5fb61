"""Where a model is restored from: the shards of a running server, a snapshot's directory, or an object store."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from headrace.paramserver.config.data_dir import MANIFEST_NAME as DATA_DIR_MANIFEST
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.dense_parts import DensePart, dense_sets
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader, Rows, scalars_by_table
from headrace.paramserver.rpc.address import SERVER_ENV, parse_addresses, server_address, server_in
from headrace.paramserver.snapshots.bucket import SnapshotStore, is_object_store_url
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.dense_part import read_dense_part
from headrace.paramserver.snapshots.directory import SnapshotFiles, read_manifest
from headrace.paramserver.snapshots.remote import newest_snapshot
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.snapshot_manifest import MANIFEST_NAME, SnapshotManifest
from headrace.schemas.table_names import model_of, path_of, table_name
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer.config import StreamerConfig, timeout_seconds
from headrace.streamer.delivery.rendezvous import tls_context, token_of
from headrace.streamer.read_plan import RowRead
from headrace.streamer.resume import ask_store

__all__ = ["DenseRead", "RestoreSource", "Scalars", "Step", "StoredTables", "restore_source"]

Scalars = dict[str, float]
Step = int | Literal["newest"]

DenseRead = tuple[DensePart, dict[str, Scalars]]
"""Dense tensors, and their scalars by path."""

_Take = Callable[[RowRead, Rows], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTables:
    """What a source holds.

    Attributes:
        place: Its name in messages.
        specs: All tables, by name.
        scalars: Their scalars, by name.
        owners: Run and epoch of the tables that a trainer owns, by name.
        steps: By run, the step that everything is at exactly, or None if rows of another step are there too.
        folder: Of the chosen snapshot; None for a server.
        newest_snapshot: Name and step of the server's newest one.
    """

    place: str
    specs: dict[str, TableSpec]
    scalars: dict[str, Scalars]
    owners: dict[str, tuple[str, int]]
    steps: dict[str, int | None]
    folder: Path | None = None
    newest_snapshot: tuple[str, int] | None = None

    def dense_of(self, model: str) -> dict[str, TableSpec]:
        """Return a model's dense tensors, by name."""
        owned = [(spec, self.owners.get(name, ("", 0))[1]) for name, spec in self.specs.items()]
        return dense_sets(owned).get(model, {})

    def check_step(self, model: str, step: int) -> None:
        """Raise ConfigError unless a model's tables are exactly at a step of the run that owns them."""
        owners = [owner for name, owner in self.owners.items() if model_of(name) == model]
        run = max(owners, key=lambda owner: owner[1])[0] if owners else None
        if run is not None and self.steps.get(run) == step:
            return
        where = _at_step(self.steps.get(run) if run is not None else None)
        text = f"{self.place} is not exactly at step {step} of model {model!r}: its run {run!r} is {where} there"
        if self.folder is not None:
            raise ConfigError(f"{text}; give the directory of a snapshot of that step, as `headrace snapshot list` has")
        if self.newest_snapshot is None:
            raise ConfigError(f"{text}, and the server has no snapshot; step='newest' takes the rows as they are")
        name, step_there = self.newest_snapshot
        raise ConfigError(
            f"{text}; its newest snapshot, {name!r}, is {_at_step(step_there)}, and `headrace snapshot list` has all: "
            "restore one with snapshot=…, or take the rows as they are with step='newest'"
        )


class RestoreSource(Protocol):
    """Where rows come from.

    Attributes:
        bytes_read: Of rows, so far.
    """

    bytes_read: int

    def describe(self, step: Step) -> StoredTables:
        """Return what is there; of several snapshots, that of a step. Only one rank calls it."""

    def folder(self, stored: StoredTables) -> Path | None:
        """Return the directory of the chosen snapshot on this machine, fetched if need be; None for a server."""

    def close(self) -> None:
        """Remove what was fetched; idempotent."""

    def read(self, stored: StoredTables, reads: Sequence[RowRead], take: _Take, *, with_states: bool) -> None:
        """Make reads, each some megabytes, in order; call `take` once for each.

        Rows come whole and ascending, with versions, and states if asked for; those that are not stored may be left
        out.
        """

    def read_dense(self, stored: StoredTables, model: str, *, with_states: bool) -> DenseRead:
        """Read a model's dense tensors, all of one step, and their scalars by path. Only one rank calls it.

        Raises:
            UnavailableError: A server's are not of one step in time; the message names the steps.
            ConfigError: A snapshot's are not of one step.
        """


def restore_source(
    address: str | None, snapshot: str | os.PathLike[str] | None, timeout_s: float | None, config: StreamerConfig
) -> RestoreSource:
    """Return the server or the snapshot that a user means; ConfigError unless it is one of them."""
    if address is None and snapshot is None:
        address = server_in(os.environ)
    if (address is None) == (snapshot is None):
        raise ConfigError(
            f"say where from: the address of a running server, also by {SERVER_ENV}, or snapshot=… for a snapshot's "
            "directory or an object store's URL"
        )
    if address is None:
        assert snapshot is not None
        if isinstance(snapshot, str) and is_object_store_url(snapshot):
            return _StoredSnapshot(snapshot)
        return _Snapshot(Path(snapshot))
    parse_addresses(server_address(address))
    if timeout_s is not None:
        config = dataclasses.replace(config, request_timeout_s=timeout_seconds(timeout_s))
    return _Server(address, config)


class _Server:
    def __init__(self, address: str, config: StreamerConfig) -> None:
        self.bytes_read = 0
        self._address, self._config = address, config

    def describe(self, step: Step) -> StoredTables:
        async def ask(reader: EmbeddingReader) -> StoredTables:
            statuses = await reader.status()
            if any(status.replica is not None for status in statuses):
                raise ConfigError(
                    f"{self._address} is the address of a replica, which has no optimizer states and versions of rows: "
                    "give the address of the server"
                )
            scalars = scalars_by_table(statuses)
            owners = [table.owner for status in statuses for table in status.tables if table.owner is not None]
            return StoredTables(
                place=f"the server at {self._address}",
                specs=dict(reader.tables),
                scalars={name: _numbers(of_table) for name, of_table in scalars.items()},
                owners={owner.fqn: (owner.run, owner.epoch) for owner in owners if not owner.is_backfill},
                steps=_exact_steps(statuses),
                newest_snapshot=None if step == "newest" else await self._newest_snapshot(),
            )

        return ask_store(self._address, self._config, ask, None)

    def folder(self, stored: StoredTables) -> Path | None:
        return None

    def close(self) -> None:
        pass

    async def _newest_snapshot(self) -> tuple[str, int] | None:
        dial = Dial(
            ssl_context=tls_context(self._config),
            server_hostname=None,
            token=token_of(self._config),
            timeout_s=self._config.request_timeout_s,
        )
        try:
            manifest = await newest_snapshot(self._address, dial=dial)
        except GoneError:
            return None
        return manifest.name, manifest.step

    def read(self, stored: StoredTables, reads: Sequence[RowRead], take: _Take, *, with_states: bool) -> None:
        async def ask(reader: EmbeddingReader) -> None:
            for read in reads:
                row_ids = np.arange(read.first_row, read.end_row)
                rows = await reader.get(read.name, row_ids, with_states=with_states, with_versions=True)
                versions = (rows.epochs, rows.steps, rows.times_us)
                columns = (rows.presence, rows.weights, *rows.states.values(), *versions)
                self.bytes_read += sum(column.nbytes for column in columns if column is not None)
                # The loop has nothing else to do meanwhile: no other read is in flight.
                take(read, rows)

        ask_store(self._address, self._config, ask, None)

    def read_dense(self, stored: StoredTables, model: str, *, with_states: bool) -> DenseRead:
        async def ask(reader: EmbeddingReader) -> DenseRead:
            while True:
                part = await reader.dense(model, with_states=with_states)
                statuses = await reader.status()
                names = {table_name(model, path) for path in part.specs}
                versions = [
                    (scalar.epoch, scalar.step)
                    for status in statuses
                    for table in status.tables
                    if table.spec.fqn in names
                    for scalar in table.scalars or ()
                ]
                # Newer ones are of a part that has come since, and is read instead.
                if max(versions, default=part.version) <= part.version:
                    scalars = scalars_by_table(statuses)
                    return part, {path_of(name): _numbers(scalars.get(name, {})) for name in names}

        return ask_store(self._address, self._config, ask, None)


class _Snapshot:
    def __init__(self, folder: Path) -> None:
        self.bytes_read = 0
        self._folder = folder

    def describe(self, step: Step) -> StoredTables:
        return self._describe(_choose(self._folder, step))

    def folder(self, stored: StoredTables) -> Path | None:
        return stored.folder

    def close(self) -> None:
        pass

    def _describe(self, folder: Path) -> StoredTables:
        with SnapshotReader(folder) as reader:
            scalars = {
                name: {s.name: np.frombuffer(s.data, DType(s.dtype).numpy)[0] for s in reader.scalars(name).values()}
                for name in reader.tables
            }
            epoch = reader.manifest.epoch
            sessions = [session for store in reader.stores for session in Sessions(store.read_meta())]
            return StoredTables(
                place=f"the snapshot {folder}",
                specs=dict(reader.tables),
                scalars={name: _numbers(of_table) for name, of_table in scalars.items()},
                owners={
                    name: (owner.run, owner.epoch) for name, owner in reader.owners().items() if not owner.is_backfill
                },
                steps={each.run: reader.manifest.step for each in sessions if each.is_trainer and each.epoch == epoch},
                folder=folder,
            )

    def read(self, stored: StoredTables, reads: Sequence[RowRead], take: _Take, *, with_states: bool) -> None:
        assert stored.folder is not None
        ends: dict[tuple[str, int], int] = {}  # of reads that follow one another, by their first row
        for read in reversed(reads):
            ends[read.name, read.first_row] = ends.pop((read.name, read.end_row), read.end_row)
        with SnapshotReader(stored.folder) as reader:
            scans: dict[tuple[str, int], _Scan] = {}
            for read in reads:
                if (end_row := ends.get((read.name, read.first_row))) is not None:
                    scan = _Scan(reader, read.name, read.first_row, end_row)
                else:
                    scan = scans.pop((read.name, read.first_row))
                row_ids, records = scan.rows_to(read.end_row)
                scans[read.name, read.end_row] = scan
                self.bytes_read += row_ids.size * scan.layout.size_bytes
                take(read, _decoded(scan.layout, row_ids, records))

    def read_dense(self, stored: StoredTables, model: str, *, with_states: bool) -> DenseRead:
        assert stored.folder is not None
        with SnapshotReader(stored.folder) as reader:
            part = read_dense_part(
                reader,
                stored.dense_of(model),
                with_states=with_states,
                place=stored.place,
                way_on="take a snapshot at a step of its run, or leave them with dense=False",
            )
        return part, {path: stored.scalars.get(table_name(model, path), {}) for path in part.specs}


class _StoredSnapshot(_Snapshot):
    """A snapshot in an object store. Its files are fetched to a temporary directory, once on each machine."""

    def __init__(self, url: str) -> None:
        self.bytes_read = 0
        self._store, self._url = SnapshotStore.of_url(url, creates=False), url
        self._fetched: tempfile.TemporaryDirectory[str] | None = None

    def describe(self, step: Step) -> StoredTables:
        manifest = _at(step, self._store.list(), self._url)
        return dataclasses.replace(
            self._describe(self._fetch(manifest.name)), place=f"the snapshot {manifest.name} of {self._url}"
        )

    def folder(self, stored: StoredTables) -> Path | None:
        assert stored.folder is not None
        if (stored.folder / MANIFEST_NAME).is_file():
            return stored.folder
        return self._fetch(stored.folder.name)

    def close(self) -> None:
        if self._fetched is not None:
            self._fetched.cleanup()

    def _fetch(self, name: str) -> Path:
        if self._fetched is None:
            self._fetched = tempfile.TemporaryDirectory(prefix="headrace-restore-")
        files = SnapshotFiles(Path(self._fetched.name))
        if not files.folder_of(name).exists():
            self._store.fetch(name, files)
        return files.folder_of(name)


def _choose(folder: Path, step: Step) -> Path:
    """Return the directory of a snapshot: this one, or of several in it the newest, or the newest of a step."""
    if (folder / MANIFEST_NAME).is_file():
        manifest = read_manifest(folder)
        if step not in ("newest", manifest.step):
            raise ConfigError(
                f"{folder}: the snapshot is {_at_step(manifest.step)}, not at step {step}: give another, or that step"
            )
        return folder
    files = SnapshotFiles(folder / "snapshots" if (folder / DATA_DIR_MANIFEST).is_file() else folder)
    found, damage = files.list()
    manifests = [manifest for manifest in found if not manifest.lease_s]
    if damage:
        raise CorruptionError(f"{damage[0]}; give the directory of one sound snapshot")
    if not manifests:
        raise ConfigError(
            f"{folder}: no snapshot: there is no {MANIFEST_NAME}, and none in a directory in it: "
            "give the directory of a snapshot, as `headrace snapshot create` makes them"
        )
    return files.folder_of(_at(step, manifests, folder).name)


def _at(step: Step, manifests: Sequence[SnapshotManifest], place: object) -> SnapshotManifest:
    """Return the newest snapshot, or the newest of a step; they are given oldest first."""
    if not manifests:
        raise ConfigError(f"{place}: no snapshots: make one with `headrace snapshot create`")
    fitting = [manifest for manifest in manifests if step in ("newest", manifest.step)]
    if not fitting:
        there = first_of([f"{manifest.name} {_at_step(manifest.step)}" for manifest in reversed(manifests)])
        raise ConfigError(
            f"{place}: no snapshot is at step {step}; there are {there}: give one of these, or step='newest'"
        )
    return fitting[-1]


def _at_step(step: int | None) -> str:
    return "at no step exactly" if step is None or step < 0 else f"at step {step}"


def _exact_steps(statuses: Sequence[Any]) -> dict[str, int | None]:
    """Return by run the step that all ranks have ended on all shards, with nothing behind it; None if they differ."""
    steps: dict[str, set[int | None]] = {}
    for status in statuses:
        trainers = [client for client in status.clients if client.world_size]
        for run in {client.run for client in trainers}:
            epoch = max(client.epoch for client in trainers if client.run == run)
            ranks = [client for client in trainers if (client.run, client.epoch) == (run, epoch)]
            is_exact = all(
                0 <= rank.step == rank.exact_step and rank.ended_client_seq == rank.last_client_seq for rank in ranks
            )
            is_exact &= len(ranks) >= ranks[0].world_size
            steps.setdefault(run, set()).update({rank.step for rank in ranks} if is_exact else {None})
    return {run: found.pop() if len(found) == 1 else None for run, found in steps.items()}


def _numbers(scalars: Mapping[str, np.generic]) -> Scalars:
    return {name: value.item() for name, value in scalars.items()}


class _Scan:
    """Reads a table's rows of a snapshot in order, each file's once, whatever is read of other rows in between."""

    def __init__(self, reader: SnapshotReader, name: str, first_row: int, end_row: int) -> None:
        spec = reader.tables[name]
        self.layout = RecordLayout(spec, spec.whole)
        self._chunks = reader.rows(name, first_row=first_row, end_row=end_row)
        self._held = [(np.empty(0, np.int64), np.empty(0, self.layout.dtype))]

    def rows_to(self, end_row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return the next rows before `end_row` that are there, and their records."""
        held = self._held
        while not (held[-1][0].size and held[-1][0][-1] >= end_row - 1):
            if (chunk := next(self._chunks, None)) is None:
                break
            held.append(chunk)
        row_ids, records = (np.concatenate(parts) for parts in zip(*held, strict=True))
        end = int(np.searchsorted(row_ids, end_row))
        self._held = [(row_ids[end:], records[end:])]
        return row_ids[:end], records[:end]


def _decoded(layout: RecordLayout, row_ids: npt.NDArray[np.int64], records: npt.NDArray[Any]) -> Rows:
    """Return whole rows of a snapshot as a server answers with them."""
    columns = {
        name: np.ascontiguousarray(records[name]).view(column.dtype.numpy).reshape(row_ids.size, column.width)
        for name, column in layout.columns.items()
    }
    return Rows(
        row_ids=row_ids,
        presence=np.full(row_ids.size, PRESENT, np.uint8),
        weights=columns["weights"],
        states={state: columns[name] for state, name in layout.fields_of_states.items()},
        epochs=records["epoch"].astype(np.int64),
        steps=records["step"],
        times_us=None,
        identities=None,
    )
