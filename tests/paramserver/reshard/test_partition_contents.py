"""Rows of partitions on their way from one real store to another: copied, loaded, digested, purged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from identity_batches import delta_of
from row_batches import SHARDS, SPEC, SPLIT, copy_as_after_crash, make_batch, make_delta

from headrace.paramserver.ingest.partitions import AnyMoveRecord, ShardPartitions
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reshard import partition_contents
from headrace.paramserver.reshard.partition_contents import PartitionContents
from headrace.paramserver.store import copy_chunks
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.copy_chunks import decode_runs, encode_runs, renumbered
from headrace.paramserver.store.deltas import RowDelta
from headrace.paramserver.store.imports import loaded_runs
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.shared_state import catalog_of_shared_state, take_shared_state
from headrace.schemas.errors import CorruptionError, GoneError
from headrace.schemas.move_records import LoadRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_records import META_PREFIX, encode_keys, key_prefix
from headrace.schemas.tables import DType, TableSpec

FIRST = PartitionMap.first(2, 8)
MOVE = Move(move_id="a", source=0, destination=1, partitions=(2, 6), versions=(1, 1))
HALF = TableSpec(fqn="half", num_rows=500, dim=3, dtype=DType.FLOAT16)
SPECS = (SPEC, HALF, SPLIT)
COPY = MoveRecord(step=MoveStep.COPY, move=MOVE, position=Position(seq=1, mark=None))
PURGE = MoveRecord(step=MoveStep.PURGE, move=MOVE)
ROWS = np.arange(200)
Pairs = dict[bytes, bytes]


def partitions_of(spec: TableSpec, rows: Any) -> Any:
    return FIRST.partitions_of_rows(spec.seed, np.asarray(rows, np.int64))


def rows_of(spec: TableSpec, partitions: Sequence[int]) -> list[int]:
    return ROWS[np.isin(partitions_of(spec, ROWS), partitions)].tolist()


class Shard:
    """A store with an applier, and what of ingest its contents need."""

    def __init__(self, path: Path, number: int, config: StoreConfig) -> None:
        self.path, self.number = path, number
        self.store = RowStore.open(path / "store", config=config)
        meta = self.store.read_meta()
        self.catalog, self.sessions = Catalog(meta), Sessions(meta)
        self.partitions = ShardPartitions(meta, shard=number, first=FIRST, durable_seq=lambda: self.accepted_seq)
        self.applier = Applier(self.store)
        self.contents = PartitionContents(self, self.applier, self.store, path / "views")

    @property
    def accepted_seq(self) -> int:
        return self.applier.submitted_seq

    def submit(self, *deltas: RowDelta, **changes: Any) -> int:
        seq = self.accepted_seq + 1
        self.applier.submit(make_batch(seq, deltas=deltas, **changes))
        return seq

    def register(self, *specs: TableSpec) -> None:
        self.submit(meta=self.catalog.add(specs))

    def record(self, record: AnyMoveRecord, meta: dict[bytes, bytes] | None = None, **changes: Any) -> int:
        seq = self.accepted_seq + 1
        return self.submit(meta=(meta or {}) | self.partitions.take(record, seq), **changes)

    async def load(self, chunks: Sequence[bytes], *, until: int | None = None) -> None:
        """Load a copy as a shard with a log does, up to a chunk; see `MovingShard.load`."""
        await self.contents.purge()
        theirs = catalog_of_shared_state(chunks[0])
        here = {table.table_id: self.catalog.table_here(table, theirs) for table in theirs}
        numbers = {number: None if table is None else table.table_id for number, table in here.items()}
        for number, data in enumerate(chunks[1:until], 1):
            self.load_chunk(encode_runs(renumbered(decode_runs(data), numbers)), number, is_last=data is chunks[-1])
        await self.applier.wait_applied(self.accepted_seq)

    def load_chunk(self, body: bytes, number: int, *, is_last: bool) -> None:
        runs = loaded_runs(self.catalog, memoryview(body))
        self.record(LoadRecord(move_id=MOVE.move_id, number=number, is_last=is_last), loaded=runs)

    @property
    def is_loaded(self) -> bool:
        progress = self.partitions.moves.find(MOVE.move_id)
        return progress is not None and progress.is_loaded

    def delta(self, spec: TableSpec, rows: Sequence[int], **changes: Any) -> RowDelta:
        return make_delta(rows, self.accepted_seq + 1, spec=spec, table_id=self.table_id(spec), **changes)

    def table_id(self, spec: TableSpec) -> int:
        return self.catalog.find(spec.fqn).table_id

    async def pairs(self) -> Pairs:
        """Return all that the store has but metadata, with the tables' names for their numbers."""
        await self.applier.wait_applied(self.accepted_seq)
        names = {key_prefix(table.table_id): table.spec.fqn.encode() for table in self.catalog}
        found = {}
        for key, value in self.store.scan(b""):
            if not key.startswith(META_PREFIX):
                size = 0 if key[4:6] == b"\xff\xff" else 24 + 8 * (names[key[:4]] == SPEC.fqn.encode())
                is_tombstone = size and value[0] == 1
                found[names[key[:4]] + key[4:]] = value[:size] if is_tombstone else value
        return found


@contextlib.asynccontextmanager
async def shard_at(path: Path, number: int = 0, **settings: Any) -> AsyncIterator[Shard]:
    config = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20, **settings)
    path.mkdir(exist_ok=True)  # noqa: ASYNC240
    shard = Shard(path, number, config)
    try:
        async with shard.applier:
            yield shard
    finally:
        shard.store.close()


@contextlib.asynccontextmanager
async def two_shards(path: Path, **settings: Any) -> AsyncIterator[tuple[Shard, Shard]]:
    """Lend a source with rows of several tables, and a destination that numbers them otherwise and has rows too."""
    async with shard_at(path / "0", **settings) as source, shard_at(path / "1", 1, **settings) as destination:
        source.register(*SPECS)
        destination.register(HALF)
        fill(source, (0, 2, 4, 6))
        destination.submit(destination.delta(HALF, rows_of(HALF, (1, 3))))
        yield source, destination


def fill(shard: Shard, partitions: Sequence[int]) -> None:
    """Write rows of all tables, overwrite some, and delete some."""
    for round_ in range(3):
        for spec in SPECS:
            rows = rows_of(spec, partitions)[round_ :: round_ + 1]
            for columns in SHARDS[round_ : round_ + 2] if spec is SPLIT else (spec.whole,):
                shard.submit(shard.delta(spec, rows[4:], deleted=rows[:4], shard=columns))
    rows = rows_of(SPEC, MOVE.partitions)
    shard.submit(delta_of({rows[-1]: -7, rows[-2]: 2**62, rows[-3]: -(2**63)}, 5, (), SPEC.whole))


def moving(pairs: Pairs, partitions: Sequence[int] = MOVE.partitions) -> Pairs:
    """Return the rows and tombstones of some partitions."""
    specs = {spec.fqn.encode(): spec for spec in SPECS}
    found = {}
    for key, value in pairs.items():
        row = int.from_bytes(key[-8:], "big")
        if partitions_of(specs[key[:-12]], [row])[0] in partitions:
            found[key] = value
    return found


async def copied(source: Shard, chunk_bytes: int = 4096) -> list[bytes]:
    """Return all chunks of a copy; each is asked for twice, as after a lost reply."""
    copy = await source.contents.copy(MOVE.partitions)
    chunks, number, is_last = [], 0, False
    while not is_last:
        chunk = await copy.chunk(number)
        assert await copy.chunk(number) == chunk
        chunks.append(chunk.data)
        number, is_last = number + 1, chunk.is_last
    for wrong in (number - 2, number):
        with pytest.raises(GoneError):
            await copy.chunk(wrong)
    await copy.close()
    return chunks


def begin(destination: Shard, chunks: Sequence[bytes]) -> None:
    """Let the destination's log have COPY, with the shared state."""
    seq = destination.accepted_seq + 1
    shared = take_shared_state(chunks[0], destination.catalog, destination.sessions, seq, with_steps=False)
    destination.record(COPY, shared)


async def collect(shard: Shard, spec: TableSpec, rows: Sequence[int]) -> None:
    """Remove rows for good, as the collection of tombstones does."""
    await shard.applier.wait_applied(shard.accepted_seq)
    keys = encode_keys(shard.table_id(spec), spec.whole, np.array(rows))
    assert None not in shard.store.get(keys)
    await shard.applier.run_at(shard.accepted_seq, lambda: shard.store.remove(shard.table_id(spec), keys))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks and removals so small that there are many."""
    for name, value in {"_CHUNK_BYTES": 4096, "_PURGE_ROWS": 50, "_ROWS_PER_WRITE": 20}.items():
        monkeypatch.setattr(partition_contents, name, value)


@pytest.mark.parametrize("file_bytes", [0, 1 << 40], ids=["files", "writes"])
async def test_a_loaded_copy_equals_its_source(tmp_path: Path, file_bytes: int) -> None:
    """Rows in any columns and tombstones are there, nothing else changes, and later records win."""
    async with two_shards(tmp_path, file_bytes=file_bytes) as (source, destination):
        before = await destination.pairs()
        chunks = await copied(source)
        assert len(chunks) > 3
        begin(destination, chunks)
        assert not destination.is_loaded
        await destination.load(chunks)
        assert destination.is_loaded

        pairs, expected = await destination.pairs(), moving(await source.pairs())
        assert {spec for spec in SPECS if any(key.startswith(spec.fqn.encode()) for key in expected)} == set(SPECS)
        assert any(value[0] == 1 for value in expected.values())
        assert pairs == before | expected
        _, theirs = await source.contents.digest(MOVE.partitions)
        assert (await destination.contents.digest(MOVE.partitions, like=theirs))[1] == theirs
        assert destination.store.num_rows_estimate(destination.table_id(HALF)) >= len(rows_of(HALF, (1, 3, 2, 6)))
        assert list((tmp_path / "1" / "views").iterdir()) == []

        row = rows_of(SPEC, (2,))[-1]
        destination.submit(destination.delta(SPEC, [row]), version=(1, 99))
        older = destination.delta(SPEC, [row])
        destination.submit(older, version=(1, 98), is_conditional=True)
        read = await destination.applier.read(destination.table_id(SPEC), SPEC, np.array([row]))
        assert (read.epochs[0], read.steps[0]) == (1, 99)


async def test_each_difference_changes_the_digest(tmp_path: Path) -> None:
    """A value, a version, an identity, a tombstone, a row more: each is seen; rows that stay are not."""
    async with two_shards(tmp_path) as (source, destination):
        chunks = await copied(source)
        begin(destination, chunks)
        await destination.load(chunks)
        _, theirs = await source.contents.digest(MOVE.partitions)
        number = destination.table_id(SPEC)
        row, other = rows_of(SPEC, (2,))[-1], rows_of(SPEC, (2,))[4]

        async def is_equal() -> bool:
            return (await destination.contents.digest(MOVE.partitions, like=theirs))[1] == theirs

        read = await source.applier.read(1, SPEC, np.array([other]))
        as_it_is = {"version": (int(read.epochs[0]), int(read.steps[0]))}
        tag = int(read.steps[0])
        same = make_delta([other], tag, spec=SPEC, table_id=number)
        time_us = int(read.times_us[0])
        for delta, version, at_us, equal in (
            (same, as_it_is["version"], time_us, True),
            (make_delta([other], tag + 1, spec=SPEC, table_id=number), as_it_is["version"], time_us, False),
            (same, (1, tag + 1), time_us, False),
            (same, as_it_is["version"], time_us + 1, False),
            (delta_of({other: 5}, tag, (), SPEC.whole), as_it_is["version"], time_us, False),
            (make_delta([], tag, deleted=[other], spec=SPEC, table_id=number), as_it_is["version"], time_us, False),
        ):
            seq = destination.accepted_seq + 1
            batch = make_batch(seq, deltas=(RowDelta(**_fields(delta) | {"table_id": number}),), version=version)
            destination.applier.submit(_at(batch, at_us))
            assert await is_equal() == equal, (delta, version)
        destination.applier.submit(_at(make_batch(destination.accepted_seq + 1, deltas=(same,), **as_it_is), time_us))
        assert await is_equal()
        stays = rows_of(SPEC, (1, 3))[0]
        destination.submit(RowDelta(**_fields(delta_of({stays: row}, 1, (), SPEC.whole)) | {"table_id": number}))
        assert await is_equal()


def _fields(delta: RowDelta) -> dict[str, Any]:
    return {name: getattr(delta, name) for name in delta.__slots__}


def _at(batch: Any, time_us: int) -> Any:
    return dataclasses.replace(batch, time_us=time_us)


async def test_tombstones_below_the_sources_floor_do_not_count(tmp_path: Path) -> None:
    """A tombstone up to the source's floor may be gone at either store; above it, a higher floor here hides none."""
    async with two_shards(tmp_path) as (source, destination):
        chunks = await copied(source)
        begin(destination, chunks)
        await destination.load(chunks)
        destination.submit(meta=destination.catalog.raise_floors({HALF.fqn: (1, 60)}))
        _, theirs = await source.contents.digest(MOVE.partitions)
        assert (await destination.contents.digest(MOVE.partitions, like=theirs))[1] == theirs
        gone = rows_of(HALF, MOVE.partitions)[-1]
        source.submit(source.delta(HALF, [], deleted=[gone]), version=(1, 50))
        _, theirs = await source.contents.digest(MOVE.partitions)
        assert (await destination.contents.digest(MOVE.partitions, like=theirs))[1] != theirs
        source.submit(meta=source.catalog.raise_floors({HALF.fqn: (1, 50)}))
        await collect(destination, HALF, [gone])
        _, theirs = await source.contents.digest(MOVE.partitions)
        assert (await destination.contents.digest(MOVE.partitions, like=theirs))[1] == theirs


async def test_a_copy_that_was_cut_off_begins_anew(tmp_path: Path) -> None:
    """The next COPY record leaves to purge what an earlier one has loaded, also for a store that crashed in between."""
    async with two_shards(tmp_path, file_bytes=0) as (source, destination):
        before = await destination.pairs()
        chunks = await copied(source)
        crashed = []
        for at in (2, 4, len(chunks)):
            begin(destination, chunks)
            await destination.load(chunks, until=at)
            assert destination.is_loaded == (at == len(chunks))
            destination.store.flush()
            crashed.append(tmp_path / f"crash{at}")
            crashed[-1].mkdir()
            await asyncio.to_thread(copy_as_after_crash, destination.store.path, crashed[-1] / "store")
        source.submit(source.delta(SPEC, [], deleted=rows_of(SPEC, (2,))[:9]), version=(1, 70))
        source.submit(source.delta(HALF, rows_of(HALF, (6,))[:9]), version=(1, 71))
        await collect(source, HALF, rows_of(HALF, (2,))[5:9])
        again = await copied(source)  # later than the first, and without some of its rows
        begin(destination, again)
        assert not destination.is_loaded
        await destination.load(again)
        expected = before | moving(await source.pairs())
        assert await destination.pairs() == expected
    for path in crashed:
        async with shard_at(path, 1) as restarted:
            assert moving(await restarted.pairs())
            begin(restarted, again)
            await restarted.load(again)
            assert await restarted.pairs() == expected
        async with shard_at(path, 1) as restarted:
            assert restarted.is_loaded


async def test_a_purge_leaves_all_else_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tombstones of the partitions go, also from a store that crashed between any two batches."""
    async with two_shards(tmp_path, file_bytes=0) as (source, destination):
        before = await destination.pairs()
        chunks = await copied(source)
        begin(destination, chunks)
        await destination.load(chunks)
        everything = await destination.pairs()
        destination.record(PURGE)
        view, stays = destination.contents._view, delta_of({rows_of(SPEC, (1,))[0]: -7}, 3, (), SPEC.whole)

        async def view_and_write() -> Any:  # a row that stays takes an identity while rows are removed
            found = await view()
            destination.submit(RowDelta(**_fields(stays) | {"table_id": destination.table_id(SPEC)}))
            everything.update(await destination.pairs())
            return found

        monkeypatch.setattr(destination.contents, "_view", view_and_write)
        copies: list[Path] = []
        remove, count = destination.store.remove, 0

        def crash_after(table_id: int, keys: Sequence[bytes]) -> None:
            nonlocal count
            remove(table_id, keys)
            count += 1
            if count % 12 == 1:
                destination.store.flush()
                copies.append(tmp_path / f"crash{count}")
                copies[-1].mkdir()
                copy_as_after_crash(destination.store.path, copies[-1] / "store")

        monkeypatch.setattr(destination.store, "remove", crash_after)
        await destination.contents.purge()
        expected = {key: value for key, value in everything.items() if key not in moving(everything)}
        assert before.items() <= expected.items()
        assert await destination.pairs() == expected
        assert not destination.partitions.moves.unpurged and len(copies) > 1
        count = 0
        await destination.contents.purge()
        assert count == 0
        await destination.applier.wait_applied(destination.accepted_seq)
        meta = destination.store.read_meta()
        assert not any(key.startswith((b"reshard/", b"partitions/unpurged")) for key in meta)
    for path in copies:
        async with shard_at(path, 1) as restarted:
            assert restarted.partitions.moves.unpurged == {"a": MOVE.partitions}
            assert moving(await restarted.pairs())
            await restarted.contents.purge()
            assert await restarted.pairs() == expected


async def test_copies_that_do_not_fit(tmp_path: Path) -> None:
    """Damage is found, rows of a table that was dropped here are left out, and a closed copy is gone."""
    async with two_shards(tmp_path) as (source, destination):
        chunks = await copied(source)
        begin(destination, chunks)
        for at in (5, 30, len(chunks[2]) - 1):
            damaged = bytearray(chunks[2])
            damaged[at] ^= 1
            with pytest.raises(CorruptionError, match="damaged"):
                loaded_runs(destination.catalog, memoryview(damaged))
        with pytest.raises(CorruptionError, match="does not name"):
            list(renumbered(decode_runs(chunks[2]), {}))
        number = destination.table_id(HALF)
        destination.submit(meta=destination.catalog.drop([HALF.fqn], 9))
        await destination.load(chunks)
        expected = moving(await source.pairs())
        expected = {key: value for key, value in expected.items() if not key.startswith(HALF.fqn.encode())}
        assert list(destination.store.scan(key_prefix(number)))[len(rows_of(HALF, (1, 3))) :] == []
        assert {k: v for k, v in (await _pairs_without(destination, number)).items()} == expected

        number = destination.table_id(SPLIT)
        destination.record(COPY)
        await destination.load(chunks, until=-2)
        assert [*destination.store.scan(key_prefix(number), limit=1)]
        destination.submit(meta=destination.catalog.drop([SPLIT.fqn], 9), dropped=(number,))
        numbers = {1: destination.table_id(SPEC), 2: None, 3: number}
        body = encode_runs(renumbered(decode_runs(chunks[-1]), numbers))
        destination.load_chunk(body, len(chunks) - 2, is_last=True)
        await destination.applier.wait_applied(destination.accepted_seq)
        assert [*destination.store.scan(key_prefix(number), limit=1)] == []

        copy = await source.contents.copy(MOVE.partitions)
        await copy.close()
        with pytest.raises(GoneError):
            await copy.chunk(0)
        assert list((tmp_path / "0" / "views").iterdir()) == []


async def _pairs_without(shard: Shard, table_id: int) -> Pairs:
    await shard.applier.run_at(shard.accepted_seq, lambda: shard.store.erase([table_id]))
    return await shard.pairs()


async def test_rows_on_their_way_are_not_served(tmp_path: Path) -> None:
    """From COPY on, until they are purged, the store's other rows are known, by the shard and by who has its store."""
    async with two_shards(tmp_path) as (_, destination):
        mine, theirs = rows_of(SPEC, (1, 3)), rows_of(SPEC, (2, 6))
        rows = np.array(sorted(mine + theirs))
        assert destination.partitions.served(SPEC, rows) is None
        assert ShardPartitions.of_store(destination.store.read_meta(), shard=1) is None
        for record in (COPY, PURGE):
            destination.record(record)
            await destination.applier.wait_applied(destination.accepted_seq)
            stored = ShardPartitions.of_store(destination.store.read_meta(), shard=1)
            assert stored is not None
            for partitions in (destination.partitions, stored):
                served = partitions.served(SPEC, rows)
                assert served is not None and rows[served].tolist() == mine


def test_long_runs_are_cut(tmp_path: Path) -> None:
    """Groups of runs keep the order, and none is longer than asked unless a single row is."""
    ids = np.arange(10)
    runs = [copy_chunks.CopyRun(1, SPEC.whole, ids, np.zeros(10, f"V{size}")) for size in (12, 300)]
    groups = list(copy_chunks.grouped(iter(runs), 100))
    assert [sum(run.size_bytes for run in group) for group in groups] == [100, 100] + [308] * 10
    decoded = [run for group in groups for run in copy_chunks.decode_runs(copy_chunks.encode_runs(group))]
    assert np.concatenate([run.ids for run in decoded]).tolist() == [*range(10), *range(10)]
