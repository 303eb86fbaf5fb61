"""How a copy of the tables begins: from a snapshot's files, or from a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.catalog import Catalog, Table
from headrace.paramserver.reader import EmbeddingReader
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.shard_tail import ShardTail
from headrace.paramserver.replica.table import ReplicaTable
from headrace.paramserver.row_reader import ShardSource, read_rows
from headrace.paramserver.sessions import Session, Sessions
from headrace.paramserver.snapshot_files import part_folder
from headrace.paramserver.store import RowStore, StoreConfig
from headrace.schemas.errors import CorruptionError
from headrace.schemas.idl import spec_from_idl
from headrace.schemas.row_keys import KEY_BYTES, key_prefix
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["load_live", "load_snapshot"]

_MakeTable = Callable[[TableSpec], ReplicaTable | None]
_ROWS_AT_ONCE = 8192
_LIVE_ROWS_AT_ONCE = 65_536
# Files are read once, from one end to the other: a cache would not help.
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20)


def load_snapshot(folder: Path, manifest: SnapshotManifest, *, is_by_step: bool, make_table: _MakeTable) -> Generation:
    """Return a copy as a snapshot has it.

    Args:
        folder: Directory of the snapshot.
        manifest: Its manifest; the files are taken to be what it says (`verify_snapshot`).
        is_by_step: See `Generation`.
        make_table: See `Generation`.

    Raises:
        ConfigError: A shard's part is not there.
        CorruptionError: A part is not what the manifest says.
        StorageError: A file cannot be read.

    Thread: any; it blocks.
    """
    stores: list[RowStore] = []
    try:
        tails = []
        for part in manifest.parts:
            store = RowStore.open_read_only(part_folder(folder, part), config=_STORE_CONFIG)
            stores.append(store)
            if store.applied_seq != part.seq:
                raise CorruptionError(f"{store.path}: at seq {store.applied_seq}, the manifest says {part.seq}")
            meta = store.read_meta()
            tails.append(ShardTail(part.shard, seq=part.seq, catalog=Catalog(meta), sessions=Sessions(meta)))
        generation = Generation(manifest.server_id, tails, is_by_step=is_by_step, make_table=make_table)
        for store, tail in zip(stores, tails, strict=True):
            for table in tail.catalog:
                target = generation.tables.get(table.spec.fqn)
                if target is not None:
                    _load_table(store, table, target)
        generation.advance()
        return generation
    finally:
        for store in stores:
            store.close()


def _load_table(store: RowStore, table: Table, target: ReplicaTable) -> None:
    shards = store.layouts(table.table_id)
    if len(shards) == 1:
        layout = RecordLayout(table.spec, shards[0])
        for keys, values in _chunks(store.scan(key_prefix(table.table_id, shards[0]))):
            records, presence = layout.decode(values)
            weights = np.ascontiguousarray(records["weights"])
            target.load(_row_ids(keys), weights, presence, records["epoch"], records["step"], shards[0])
        return
    # Rows in several column shards are put together as reads of the server do it.
    sources = [ShardSource(RecordLayout(table.spec, shard), None, True) for shard in shards]
    for shard in shards:
        for keys, _ in _chunks(store.scan(key_prefix(table.table_id, shard))):
            ids = _row_ids(keys)
            rows = read_rows(table.table_id, table.spec, sources, ids, store.get, seq=store.applied_seq)
            target.load(ids, rows.weights, rows.presence, rows.epochs, rows.steps, table.spec.whole)


def _chunks(pairs: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    keys: list[bytes] = []
    values: list[bytes | None] = []
    for key, value in pairs:
        keys.append(key)
        values.append(value)
        if len(keys) == _ROWS_AT_ONCE:
            yield keys, values
            keys, values = [], []
    if keys:
        yield keys, values


def _row_ids(keys: list[bytes]) -> npt.NDArray[np.int64]:
    """Return the row ids, the last half of each key."""
    return np.frombuffer(b"".join(keys), ">i8").reshape(-1, KEY_BYTES // 8)[:, 1].astype(np.int64)


async def load_live(reader: EmbeddingReader, *, is_by_step: bool, make_table: _MakeTable) -> Generation:
    """Return a copy of what a running server holds, read while it goes on.

    Rows are read after the logs' positions are noted, so a row may be newer than its shard's position: following from
    there passes over it once more and ends in the same row. Only then is the copy at a step.

    Args:
        reader: Connected to all shards; every table must have a number of rows.
        is_by_step: See `Generation`.
        make_table: See `Generation`.

    Raises:
        UnavailableError: A shard does not answer.

    Cancellation: harmless.
    """
    before = await reader.status()
    specs = {spec.fqn: spec for status in before for spec in (spec_from_idl(table.spec) for table in status.tables)}
    tables = {fqn: table for fqn, spec in specs.items() if (table := make_table(spec)) is not None}
    for fqn, table in tables.items():
        assert specs[fqn].num_rows, "a table of virtual ids cannot be read by id"
        for first in range(0, specs[fqn].num_rows, _LIVE_ROWS_AT_ONCE):
            ids = np.arange(first, min(first + _LIVE_ROWS_AT_ONCE, specs[fqn].num_rows), dtype=np.int64)
            rows = await reader.get(fqn, ids, with_versions=True)
            assert rows.epochs is not None
            assert rows.steps is not None
            epochs, steps = rows.epochs, rows.steps
            await asyncio.to_thread(table.load, ids, rows.weights, rows.presence, epochs, steps, specs[fqn].whole)
    after = await reader.status()
    tails = [_tail_of(at_first, at_last) for at_first, at_last in zip(before, after, strict=True)]
    generation = Generation(
        after[0].server_id,
        tails,
        is_by_step=is_by_step,
        make_table=lambda spec: tables[spec.fqn] if spec.fqn in tables else make_table(spec),
    )
    generation.advance()
    return generation


def _tail_of(before: Any, after: Any) -> ShardTail:
    catalog = Catalog({})
    catalog.add(spec_from_idl(table.spec) for table in before.tables)
    sessions = Sessions({})
    for client in sorted(after.clients, key=lambda client: client.epoch):
        if client.epoch < sessions.epoch_of(client.run):
            continue
        _learn(sessions.open(client.run, client.client, client.epoch, client.rank, client.world_size), client)
    return ShardTail(
        before.shard, seq=before.log_seq, catalog=catalog, sessions=sessions, exact_from=after.accepted_seq
    )


def _learn(session: Session, client: Any) -> None:
    session.last_client_seq, session.step = client.last_client_seq, client.step
    session.exact_step, session.ended_client_seq = client.exact_step, client.ended_client_seq
