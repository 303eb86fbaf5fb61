"""The identity index: an identity leads to its row after reassignments, crashes and late batches."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from identity_batches import IdentityModel, assign
from row_batches import SPEC, copy_as_after_crash, make_batch, make_delta

from headrace.paramserver.store import identity_index
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.catalog import INDEXED_PREFIX, Catalog
from headrace.paramserver.store.deltas import Batch
from headrace.paramserver.store.identity_index import FoundRows, index_in_thread, index_stored_rows
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import StorageError
from headrace.schemas.row_records import CLAIMS_SHARD, META_PREFIX, NO_IDENTITY, key_prefix
from headrace.schemas.tables import ColumnShard

SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)
# Every window becomes a file.
BY_FILE = dataclasses.replace(SMALL, file_bytes=0)
HALVES = [ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)]
INDEXED = INDEXED_PREFIX + b"1"
IDENTITIES = [-(2**63), -7, NO_IDENTITY, 0, 1, 2**63 - 1]
ROWS = range(5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    store = RowStore.open(tmp_path / "db", config=SMALL)
    yield store
    store.close()


async def find(applier: Applier, identities: Sequence[int]) -> FoundRows:
    return await applier.find(1, SPEC, np.array(identities, np.int64))


async def store_without_index(store: RowStore, *batches: Batch) -> None:
    """Store batches without indexing their identities."""
    meta = Catalog({}).add([SPEC])
    assert meta.pop(INDEXED) == b"1"
    async with Applier(store) as applier:
        for batch in batches:
            applier.submit(dataclasses.replace(batch, meta=meta))
        await applier.wait_applied(len(batches))
    for key, _ in list(store.scan(key_prefix(1, CLAIMS_SHARD))):
        store._db.raw.delete(key)
    assert num_claims(store) == 0


def num_claims(store: RowStore) -> int:
    return len(list(store.scan(key_prefix(1, CLAIMS_SHARD))))


class IndexMachine(RuleBasedStateMachine):
    """After any order of assignments, evictions, late batches, windows and crashes, lookups match the model."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self.log: list[Batch] = []
        self.model = IdentityModel()
        self.num_stores = 0
        self.has_changed = False  # since the store was opened
        self.applier: Applier | None = None

    @initialize(by_file=st.booleans())
    def start(self, by_file: bool) -> None:
        self.config = BY_FILE if by_file else SMALL
        self.open()

    def open(self) -> None:
        self.store = RowStore.open(self.folder / str(self.num_stores), config=self.config)
        # Batches wait in the memtable until a rule applies them.
        self.applier = Applier(self.store, config=ApplierConfig(window_bytes=350, hold_s=3600.0, quiet_s=3600.0))
        self.runner.run(self.applier.__aenter__())
        for batch in self.log[self.store.applied_seq :]:
            self.submit(batch)
        self.has_changed = False

    def submit(self, batch: Batch) -> None:
        async def submit() -> None:
            assert self.applier is not None
            self.applier.submit(batch)

        self.runner.run(submit())

    @rule(
        identity_of=st.dictionaries(st.sampled_from(ROWS), st.sampled_from(IDENTITIES), max_size=4),
        deleted=st.sets(st.sampled_from(ROWS), max_size=2),
        late=st.none() | st.tuples(st.integers(1, 2), st.integers(0, 12)),
    )
    def write(self, identity_of: dict[int, int], deleted: set[int], late: tuple[int, int] | None) -> None:
        """Write a batch of the run, or with `late` a conditional one of some version."""
        seq = len(self.log) + 1
        gone = sorted(deleted - identity_of.keys())
        version = late or (1, seq)
        batch = assign(seq, identity_of, deleted=gone, version=version, is_conditional=late is not None)
        self.log.append(batch)
        self.submit(batch)
        self.model.apply(batch)
        self.has_changed = True

    @rule()
    def end_window(self) -> None:
        assert self.applier is not None
        self.runner.run(self.applier.wait_applied(len(self.log)))
        self.has_changed = True  # or not: whether it has is a matter of time, on which what is drawn must not hang

    # A restart is most of the time that this takes; right after another one it would find the same files again.
    @precondition(lambda self: self.has_changed)
    @rule(keeps_unflushed=st.booleans())
    def restart(self, keeps_unflushed: bool) -> None:
        """Restart in peace, or from the files that a crash would leave."""
        old, self.num_stores = self.folder / str(self.num_stores), self.num_stores + 1
        if not keeps_unflushed:
            copy_as_after_crash(old, self.folder / str(self.num_stores))
        self.close()
        if keeps_unflushed:
            shutil.move(old, self.folder / str(self.num_stores))
        self.open()

    @invariant()
    def every_identity_is_where_it_should_be(self) -> None:
        if self.applier is not None:
            asked = [*IDENTITIES, 12345, *IDENTITIES[::-1]]
            self.model.check(self.runner.run(find(self.applier, asked)), asked)

    def close(self) -> None:
        assert self.applier is not None
        self.runner.run(self.applier.close())
        self.store.close()

    def teardown(self) -> None:
        if self.applier is not None:
            self.close()
        self.runner.close()
        shutil.rmtree(self.folder)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=20)


async def test_a_row_in_column_shards_has_one_claim(store: RowStore) -> None:
    """The index has one entry for each identity, however many column shards the row has."""
    async with Applier(store) as applier:
        applier.submit(assign(1, {3: 30, 4: 40}, shards=HALVES, version=(1, 1)))
        await applier.wait_applied(1)
        assert (await find(applier, [40, 30, 50])).row_ids.tolist() == [4, 3, -1]
        assert num_claims(store) == 2
        assert store.layouts(1) == tuple(HALVES)
        # One half of the row has been given away, the other follows.
        applier.submit(assign(2, {3: 31}, shards=HALVES[:1], version=(1, 2)))
        assert (await find(applier, [30, 31])).row_ids.tolist() == [-1, 3]


async def test_tables_without_identities_have_no_index(store: RowStore) -> None:
    """No key of the index is written for a table without identities."""
    spec = dataclasses.replace(SPEC, has_identities=False)
    async with Applier(store) as applier:
        applier.submit(make_batch(1, deltas=(make_delta([1, 2], 1, spec=spec),)))
        await applier.wait_applied(1)
        assert num_claims(store) == 0


async def test_of_two_rows_with_one_identity_in_a_batch_the_later_has_it(tmp_path: Path) -> None:
    """Lookups give the later of two rows with one identity, before and after the batch is applied."""
    store = RowStore.open(tmp_path / "db", config=BY_FILE)
    async with Applier(store, config=ApplierConfig(hold_s=3600.0, quiet_s=3600.0)) as applier:
        applier.submit(assign(1, {1: 10, 2: 20, 4: 10, 3: 20}))
        assert (await find(applier, [10, 20])).row_ids.tolist() == [4, 3]
        await applier.wait_applied(1)
        assert (await find(applier, [10, 20])).row_ids.tolist() == [4, 3]
    store.close()


async def test_an_identity_that_moves_while_it_is_looked_up_is_found(store: RowStore) -> None:
    """A lookup follows an identity that moves to another row between reading claim and row."""
    has_read_claims, go_on = threading.Event(), threading.Event()
    get = store.get
    is_first = True

    def held_get(keys: list[bytes]) -> list[bytes | None]:
        nonlocal is_first
        values = get(keys)
        if is_first and keys[0].startswith(key_prefix(1, CLAIMS_SHARD)):
            is_first = False
            has_read_claims.set()
            assert go_on.wait(60)
        return values

    async with Applier(store) as applier:
        applier.submit(assign(1, {1: 10}))
        await applier.wait_applied(1)
        store.get = held_get  # type: ignore[method-assign]
        finding = asyncio.create_task(find(applier, [10, 11]))
        assert await asyncio.to_thread(has_read_claims.wait, 60)
        applier.submit(assign(2, {1: 11, 2: 10}))
        await applier.wait_applied(2)
        go_on.set()
        found = await finding
        assert found.row_ids.tolist()[0] == 2
        assert found.seq == 1


async def test_rows_stored_before_there_was_an_index_get_one(store: RowStore) -> None:
    """A store without the index, of whole rows and column shards, is indexed once; the newest row has an identity."""
    first, last = {1: 10, 2: -20, 3: 30, 4: NO_IDENTITY, 5: 50}, {8: 80, 3: 31}
    second = assign(2, {6: 10, 7: 70}, shards=HALVES)
    await store_without_index(store, assign(1, first), second, assign(3, last, deleted=[5]))
    assert index_stored_rows(store, list(Catalog(store.read_meta()))) == 1
    assert store.read_meta()[INDEXED] == b"1"
    assert num_claims(store) == 5
    assert index_stored_rows(store, list(Catalog(store.read_meta()))) == 0
    async with Applier(store) as applier:
        asked = [10, -20, 30, 31, 50, 70, 80, NO_IDENTITY]
        assert (await find(applier, asked)).row_ids.tolist() == [6, 2, -1, 3, -1, 7, 8, -1]


async def test_an_index_that_is_interrupted_goes_on(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexing goes on where an interrupted start stopped, or it might never finish a billion rows."""
    monkeypatch.setattr(identity_index, "_ROWS_AT_ONCE", 10)
    first, second = ({row: 1000 + row for row in rows} for rows in (range(55), range(55, 100)))
    await store_without_index(store, assign(1, first), assign(2, second, shards=HALVES))
    scanned: list[bytes] = []
    scan = store.scan

    def note(prefix: bytes, *, start: bytes | None = None) -> Any:
        for key, value in scan(prefix, start=start):
            if not key.startswith(META_PREFIX):
                scanned.append(key)
            yield key, value

    monkeypatch.setattr(store, "scan", note)
    num_starts, tables = 0, list(Catalog(store.read_meta()))
    while INDEXED not in store.read_meta():
        left, num_starts = iter([False] * 3), num_starts + 1
        index_stored_rows(store, tables, is_stopping=lambda: next(left, True))  # noqa: B023
        assert num_starts < 9
    assert num_starts == 6 and len(scanned) < 2 * len(set(scanned)) == 2 * (55 + 45 * 2)
    monkeypatch.undo()
    assert num_claims(store) == 100
    assert store.read_meta().keys() & {INDEXED, INDEXED + b"/last_key"} == {INDEXED}
    async with Applier(store) as applier:
        assert (await find(applier, [1000 + row for row in range(100)])).row_ids.tolist() == [*range(100)]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_that_is_cancelled_stops_the_indexing(
    store: RowStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Canceling the indexing waits for its thread, so that the store may be closed; only a failed disk is logged."""
    monkeypatch.setattr(identity_index, "_ROWS_AT_ONCE", 10)
    await store_without_index(store, assign(1, {row: 1000 + row for row in range(55)}))
    is_indexing, go_on = threading.Event(), threading.Event()
    write_runs = store.write_runs

    def held(*args: Any, **kwargs: Any) -> None:
        is_indexing.set()
        assert go_on.wait(60)
        if fails:
            raise StorageError("the disk is gone")
        write_runs(*args, **kwargs)

    monkeypatch.setattr(store, "write_runs", held)
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    indexing = asyncio.create_task(index_in_thread(store))
    assert await asyncio.to_thread(is_indexing.wait, 60)
    indexing.cancel()
    loop.call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await indexing
    del indexing
    await asyncio.sleep(0)  # the loop lets go of the thread's future
    gc.collect()
    assert not told
    assert ("the disk is gone" in caplog.text) == fails
    assert INDEXED not in store.read_meta()
    monkeypatch.undo()
    assert await index_in_thread(store) == 1
    assert INDEXED in store.read_meta()


async def test_nothing_asked_nothing_found(store: RowStore) -> None:
    """Lookups of nothing, or in a table without rows, have answers too."""
    async with Applier(store) as applier:
        assert (await find(applier, [])).row_ids.tolist() == []
        assert (await find(applier, [3, NO_IDENTITY])).row_ids.tolist() == [-1, -1]
