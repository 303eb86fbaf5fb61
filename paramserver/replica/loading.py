"""How a copy of the tables begins: from a snapshot's files, or from a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.sessions import Session, Sessions
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.identity_loading import load_identities
from headrace.paramserver.replica.identity_map import IdentityMap
from headrace.paramserver.replica.log_hold import CopyLease, LogHold
from headrace.paramserver.replica.shard_tail import ShardTail
from headrace.paramserver.replica.table import ReplicaTable
from headrace.paramserver.snapshots.snapshot_reader import SnapshotReader
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import CorruptionError
from headrace.schemas.idl import spec_from_idl
from headrace.schemas.row_records import DELETED, FLAG_DELETED, PRESENT
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["load_live", "load_snapshot"]

_MakeTable = Callable[[TableSpec], ReplicaTable | None]
# What is asked for at once. It is as good as nothing until all of it is there, so it is no more than comes over a slow
# link well within the time for which who waits for the copy is patient.
_LIVE_ROWS_AT_ONCE, _LIVE_BYTES_AT_ONCE, _LIVE_TABLES_AT_ONCE = 65_536, 4 << 20, 256
# An attempt that moves on is waited for, others are repeated; who waits for the copy may give up sooner.
_LIVE_TIMEOUT_S = 600.0


def load_snapshot(
    folder: Path,
    manifest: SnapshotManifest,
    *,
    is_by_step: bool,
    make_table: _MakeTable,
    check_wanted: Callable[[], None],
) -> Generation:
    """Return a copy as a snapshot has it.

    Args:
        folder: Directory of the snapshot.
        manifest: Its manifest; the files are taken to be what it says (`verify_snapshot`).
        is_by_step: See `Generation`.
        make_table: See `Generation`.
        check_wanted: Called every some megabytes; what it raises ends the loading. A thread cannot be cancelled
            otherwise, and the interpreter's end waits for it.

    Raises:
        ConfigError: A shard's part is not there.
        CorruptionError: A part is not what the manifest says.
        StorageError: A file cannot be read.

    Thread: any; it blocks.
    """
    with SnapshotReader(folder) as snapshot:
        tails = []
        for part, store in zip(manifest.parts, snapshot.stores, strict=True):
            if store.applied_seq != part.seq:
                raise CorruptionError(f"{store.path}: at seq {store.applied_seq}, the manifest says {part.seq}")
            meta = store.read_meta()
            tails.append(
                ShardTail(part.shard, seq=part.seq, catalog=Catalog(meta), sessions=Sessions(meta), mark=part.mark)
            )
        generation = Generation(manifest.server_id, tails, is_by_step=is_by_step, make_table=make_table)
        for target in generation.tables.values():
            if not (isinstance(target, DiskTable) and target.is_loaded):
                _load_table(snapshot, target, check_wanted)
        for store, tail in zip(snapshot.stores, tails, strict=True):
            for table in tail.catalog:
                if table.spec.fqn in generation.identities:
                    load_identities(store, table, generation.identities[table.spec.fqn], check_wanted=check_wanted)
        generation.advance()
        return generation


def _load_table(snapshot: SnapshotReader, target: ReplicaTable, check_wanted: Callable[[], None]) -> None:
    # Some megabytes at a time, in numpy: lookups in the old copy go on meanwhile.
    for ids, records in snapshot.rows(target.spec.fqn):
        check_wanted()
        presence = np.where(records["flags"] & FLAG_DELETED, DELETED, PRESENT)
        weights = np.ascontiguousarray(records["weights"])
        target.load(ids, weights, presence, records["epoch"], records["step"], target.spec.whole)


async def load_live(
    reader: EmbeddingReader,
    *,
    is_by_step: bool,
    make_table: _MakeTable,
    lease: CopyLease,
    on_progress: Callable[[], None] = lambda: None,
) -> Generation:
    """Return a copy of what a running server holds, read while it goes on.

    Rows are read after the logs' positions are noted, so a row may be newer than its shard's position: following from
    there passes over it once more and ends in the same row. Only then is the copy at a step.

    Args:
        reader: Connected to all shards; every table must have a number of rows.
        is_by_step: See `Generation`.
        make_table: See `Generation`.
        lease: The shards keep the log that has to be followed when all is read.
        on_progress: Called whenever some megabytes have been read and loaded.

    Raises:
        UnavailableError: A shard does not answer.
        GoneError: The log that would have to be followed was removed meanwhile.

    Cancellation: harmless.
    """
    before = await reader.status()
    async with LogHold(reader.links, [status.log_seq + 1 for status in before], lease) as hold:
        return await _read_live(
            reader, before, hold, is_by_step=is_by_step, make_table=make_table, on_progress=on_progress
        )


async def _read_live(
    reader: EmbeddingReader,
    before: Sequence[Any],
    hold: LogHold,
    *,
    is_by_step: bool,
    make_table: _MakeTable,
    on_progress: Callable[[], None],
) -> Generation:
    specs_of = [[spec_from_idl(table.spec) for table in status.tables] for status in before]
    specs = {spec.fqn: spec for of_shard in specs_of for spec in of_shard}
    tables = {fqn: table for fqn, spec in specs.items() if (table := make_table(spec)) is not None}
    identities = {fqn: IdentityMap(specs[fqn]) for fqn in tables if specs[fqn].has_identities}

    def load(some: Sequence[tuple[TableSpec, Rows]]) -> None:
        for spec, rows in some:
            assert rows.epochs is not None
            assert rows.steps is not None
            versions = rows.presence, rows.epochs, rows.steps, spec.whole
            tables[spec.fqn].load(rows.row_ids, rows.weights, *versions)
            if spec.has_identities:
                assert rows.identities is not None
                identities[spec.fqn].load(rows.row_ids, rows.identities, *versions)

    for parts in _live_parts(tables[fqn].spec for fqn in tables):
        hold.check()
        rows = await reader.get_many(
            [(spec.fqn, ids) for spec, ids in parts], with_versions=True, timeout_s=_LIVE_TIMEOUT_S
        )
        await asyncio.to_thread(load, [(spec, of_spec) for (spec, _), of_spec in zip(parts, rows, strict=True)])
        on_progress()
    after = await reader.status()
    tails = [_tail_of(*of_shard) for of_shard in zip(before, specs_of, after, hold.marks, strict=True)]
    generation = Generation(
        after[0].server_id,
        tails,
        is_by_step=is_by_step,
        make_table=lambda spec: tables[spec.fqn] if spec.fqn in tables else make_table(spec),
    )
    generation.identities |= identities
    generation.advance()
    return generation


def _live_parts(specs: Iterable[TableSpec]) -> Iterator[list[tuple[TableSpec, npt.NDArray[np.int64]]]]:
    """Yield the rows of tables in parts to be read together: some of one table, or all of several small ones."""
    part: list[tuple[TableSpec, npt.NDArray[np.int64]]] = []
    num_rows = num_bytes = 0
    for spec in specs:
        assert spec.num_rows, "a table of virtual ids cannot be read by id"
        row_bytes = spec.dim * spec.dtype.size_bytes
        most = min(_LIVE_ROWS_AT_ONCE, _LIVE_BYTES_AT_ONCE // row_bytes)
        for first in range(0, spec.num_rows, most):
            ids = np.arange(first, min(first + most, spec.num_rows), dtype=np.int64)
            num_rows, num_bytes = num_rows + ids.size, num_bytes + ids.size * row_bytes
            is_full = num_rows > _LIVE_ROWS_AT_ONCE or num_bytes > _LIVE_BYTES_AT_ONCE
            if part and (is_full or len(part) == _LIVE_TABLES_AT_ONCE):
                yield part
                part, num_rows, num_bytes = [], ids.size, ids.size * row_bytes
            part.append((spec, ids))
    if part:
        yield part


def _tail_of(before: Any, specs: Iterable[TableSpec], after: Any, mark: int | None) -> ShardTail:
    catalog = Catalog({})
    catalog.add(specs)
    sessions = Sessions({})
    for client in sorted(after.clients, key=lambda client: client.epoch):
        if client.epoch < sessions.epoch_of(client.run):
            continue
        _learn(sessions.open(client.run, client.client, client.epoch, client.rank, client.world_size), client)
    for client in after.clients:  # told in the order in which the shard has heard of them, and would forget them
        if (session := sessions.find(client.run, client.client)) is not None:
            sessions.settle(session, before.log_seq)
    return ShardTail(
        before.shard, seq=before.log_seq, catalog=catalog, sessions=sessions, exact_from=after.accepted_seq, mark=mark
    )


def _learn(session: Session, client: Any) -> None:
    session.last_client_seq, session.step = client.last_client_seq, client.step
    session.exact_step, session.ended_client_seq = client.exact_step, client.ended_client_seq
    session.time_us = client.time_us or 0
