"""The index of identities: an identity leads to the row that has it, whatever was re-assigned, crashed or came late."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_batches import SPEC, copy_as_after_crash, make_batch, make_delta

from headrace.paramserver.store import identity_index
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.catalog import INDEXED_PREFIX, Catalog
from headrace.paramserver.store.identity_index import FoundRows, index_in_thread, index_stored_rows
from headrace.paramserver.store.pending import Batch, RowDelta
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import StorageError
from headrace.schemas.identity_claims import CLAIMS_SHARD, NO_IDENTITY
from headrace.schemas.row_keys import META_PREFIX, key_prefix
from headrace.schemas.tables import ColumnShard

SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)
# Every window becomes a file.
BY_FILE = dataclasses.replace(SMALL, file_bytes=0)
IDENTITIES = [-(2**63), -7, NO_IDENTITY, 0, 1, 2**63 - 1]
ROWS = range(5)


def assign(
    seq: int,
    identity_of: dict[int, int],
    *,
    deleted: Sequence[int] = (),
    version: tuple[int, int] | None = None,
    is_conditional: bool = False,
    shards: Sequence[ColumnShard] = (SPEC.whole,),
) -> Batch:
    """Return a batch that writes rows with identities."""
    return make_batch(
        seq,
        version=version,
        is_conditional=is_conditional,
        deltas=tuple(delta_of(identity_of, seq, deleted, shard) for shard in shards),
    )


def delta_of(identity_of: dict[int, int], tag: int, deleted: Sequence[int], shard: ColumnShard) -> RowDelta:
    delta = make_delta(identity_of, tag, deleted=deleted, shard=shard)
    return dataclasses.replace(delta, identities=np.array(list(identity_of.values()), np.int64))


class Model:
    """Who has which identity, in the plainest way."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[tuple[int, int], int | None]] = {}
        self.claims: dict[int, tuple[tuple[int, int], int]] = {}

    def apply(self, batch: Batch) -> None:
        version = (batch.epoch, batch.step)

        def counts(known: tuple[tuple[int, int], Any] | None) -> bool:
            return not batch.is_conditional or known is None or version >= known[0]

        for delta in batch.deltas:
            assert delta.identities is not None
            for row, identity in zip(delta.row_ids.tolist(), delta.identities.tolist(), strict=True):
                if counts(self.rows.get(row)):
                    self.rows[row] = (version, identity)
                if identity != NO_IDENTITY and counts(self.claims.get(identity)):
                    self.claims[identity] = (version, row)
            for row in [] if delta.deleted_row_ids is None else delta.deleted_row_ids.tolist():
                if counts(self.rows.get(row)):
                    self.rows[row] = (version, None)

    def row_of(self, identity: int) -> int:
        _, row = self.claims.get(identity, (None, -1))
        return row if row >= 0 and self.rows[row][1] == identity else -1

    def check(self, found: FoundRows, identities: Sequence[int]) -> None:
        assert found.row_ids.tolist() == [self.row_of(identity) for identity in identities]
        versions = [self.claims.get(identity, ((0, 0), -1))[0] for identity in identities]
        assert list(zip(found.epochs.tolist(), found.steps.tolist(), strict=True)) == versions


async def find(applier: Applier, identities: Sequence[int]) -> FoundRows:
    return await applier.find(1, SPEC, np.array(identities, np.int64))


def num_claims(store: RowStore) -> int:
    return len(list(store.scan(key_prefix(1, CLAIMS_SHARD))))


class IndexMachine(RuleBasedStateMachine):
    """Assign, re-assign, evict, come late, end windows, crash: after each, every identity is where the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self.log: list[Batch] = []
        self.model = Model()
        self.num_stores = 0
        self.has_changed = False  # since the store was opened
        self.applier: Applier | None = None

    @initialize(by_file=st.booleans())
    def start(self, by_file: bool) -> None:
        self.config = BY_FILE if by_file else SMALL
        self.open()

    def open(self) -> None:
        self.store = RowStore.open(self.folder / str(self.num_stores), config=self.config)
        # Batches wait in the overlay until a rule applies them.
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
        """A batch of the run, or with `late` a conditional one of some version."""
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
        """In peace, or from what a crash would have left of the files."""
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


@given(st.lists(st.dictionaries(st.integers(0, 3), st.sampled_from([5, 6, -7]), max_size=3), max_size=6))
@settings(max_examples=30)
def test_a_window_is_as_good_as_many(tmp_path_factory: pytest.TempPathFactory, batches: list[dict[int, int]]) -> None:
    """However batches are coalesced, re-assignments within one window end where they end one by one."""

    async def run(folder: Path, *, together: bool) -> FoundRows:
        store = RowStore.open(folder, config=SMALL)
        hold_s = 3600.0 if together else 0.0
        async with Applier(store, config=ApplierConfig(hold_s=hold_s, quiet_s=hold_s)) as applier:
            for seq, identity_of in enumerate(batches, 1):
                applier.submit(assign(seq, identity_of))
                if not together:
                    await applier.wait_applied(seq)
            await applier.wait_applied(len(batches))
            found = await find(applier, [5, 6, -7])
        store.close()
        return found

    folder, model = tmp_path_factory.mktemp("windows"), Model()
    for seq, identity_of in enumerate(batches, 1):
        model.apply(assign(seq, identity_of))
    for together in (True, False):
        model.check(asyncio.run(run(folder / str(together), together=together)), [5, 6, -7])


async def test_a_row_in_column_shards_has_one_claim(tmp_path: Path) -> None:
    """The index has an entry an identity, not one a column shard, and it is no column shard itself."""
    halves = [ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)]
    store = RowStore.open(tmp_path / "db", config=SMALL)
    async with Applier(store) as applier:
        applier.submit(assign(1, {3: 30, 4: 40}, shards=halves, version=(1, 1)))
        await applier.wait_applied(1)
        assert (await find(applier, [40, 30, 50])).row_ids.tolist() == [4, 3, -1]
        assert num_claims(store) == 2
        assert store.layouts(1) == tuple(halves)
        # One half of the row has been given away, the other follows.
        applier.submit(assign(2, {3: 31}, shards=halves[:1], version=(1, 2)))
        assert (await find(applier, [30, 31])).row_ids.tolist() == [-1, 3]
    store.close()


async def test_tables_without_identities_have_no_index(tmp_path: Path) -> None:
    """They pay nothing: not a key is written for them."""
    spec = dataclasses.replace(SPEC, has_identities=False)
    store = RowStore.open(tmp_path / "db", config=SMALL)
    async with Applier(store) as applier:
        applier.submit(make_batch(1, deltas=(make_delta([1, 2], 1, spec=spec),)))
        await applier.wait_applied(1)
        assert num_claims(store) == 0
    store.close()


async def test_of_two_rows_with_one_identity_in_a_batch_the_later_has_it(tmp_path: Path) -> None:
    """A client that says two rows of one identity gets one answer, before and after it is applied, also in a file."""
    store = RowStore.open(tmp_path / "db", config=BY_FILE)
    async with Applier(store, config=ApplierConfig(hold_s=3600.0, quiet_s=3600.0)) as applier:
        applier.submit(assign(1, {1: 10, 2: 20, 4: 10, 3: 20}))
        assert (await find(applier, [10, 20])).row_ids.tolist() == [4, 3]
        await applier.wait_applied(1)
        assert (await find(applier, [10, 20])).row_ids.tolist() == [4, 3]
    store.close()


async def test_an_identity_that_moves_while_it_is_looked_up_is_found(tmp_path: Path) -> None:
    """Between a claim and its row the identity moves to another row: the look-up goes after it."""
    store = RowStore.open(tmp_path / "db", config=SMALL)
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
    store.close()


async def test_rows_stored_before_there_was_an_index_get_one(tmp_path: Path) -> None:
    """A store without the index, of whole rows and column shards, is indexed once; the newest row has an identity."""
    halves = [ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)]
    store = RowStore.open(tmp_path / "db", config=SMALL)
    meta = Catalog({}).add([SPEC])
    mark = INDEXED_PREFIX + b"1"
    assert meta.pop(mark) == b"1"
    async with Applier(store) as applier:
        applier.submit(dataclasses.replace(assign(1, {1: 10, 2: -20, 3: 30, 4: NO_IDENTITY, 5: 50}), meta=meta))
        applier.submit(assign(2, {6: 10, 7: 70}, shards=halves))
        applier.submit(assign(3, {8: 80, 3: 31}, deleted=[5]))
        await applier.wait_applied(3)
    prefix = key_prefix(1, CLAIMS_SHARD)
    for key, _ in list(store.scan(prefix)):
        store._db.raw.delete(key)
    assert num_claims(store) == 0
    assert index_stored_rows(store, list(Catalog(store.read_meta()))) == 1
    assert store.read_meta()[mark] == b"1"
    assert num_claims(store) == 5
    assert index_stored_rows(store, list(Catalog(store.read_meta()))) == 0
    async with Applier(store) as applier:
        asked = [10, -20, 30, 31, 50, 70, 80, NO_IDENTITY]
        assert (await find(applier, asked)).row_ids.tolist() == [6, 2, -1, 3, -1, 7, 8, -1]
    store.close()


async def test_an_index_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is killed, or told to stop, costs what it was at: of a billion rows a second one might never end."""
    monkeypatch.setattr(identity_index, "_ROWS_AT_ONCE", 10)
    halves = [ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)]
    store = RowStore.open(tmp_path / "db", config=SMALL)
    meta = Catalog({}).add([SPEC])
    meta.pop(mark := INDEXED_PREFIX + b"1")
    async with Applier(store) as applier:
        applier.submit(dataclasses.replace(assign(1, {row: 1000 + row for row in range(55)}), meta=meta))
        applier.submit(assign(2, {row: 1000 + row for row in range(55, 100)}, shards=halves))
        await applier.wait_applied(2)
    for key, _ in list(store.scan(key_prefix(1, CLAIMS_SHARD))):
        store._db.raw.delete(key)
    scanned: list[bytes] = []
    scan = store.scan

    def note(prefix: bytes, *, start: bytes | None = None) -> Any:
        for key, value in scan(prefix, start=start):
            if not key.startswith(META_PREFIX):
                scanned.append(key)
            yield key, value

    monkeypatch.setattr(store, "scan", note)
    num_starts, tables = 0, list(Catalog(store.read_meta()))
    while mark not in store.read_meta():
        left, num_starts = iter([False] * 3), num_starts + 1
        index_stored_rows(store, tables, is_stopping=lambda: next(left, True))  # noqa: B023
        assert num_starts < 9
    assert num_starts == 6 and len(scanned) < 2 * len(set(scanned)) == 2 * (55 + 45 * 2)
    monkeypatch.undo()
    assert num_claims(store) == 100
    assert store.read_meta().keys() & {mark, mark + b"/last_key"} == {mark}
    async with Applier(store) as applier:
        assert (await find(applier, [1000 + row for row in range(100)])).row_ids.tolist() == [*range(100)]
    store.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_that_is_cancelled_stops_the_indexing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """A stop amid the indexing waits for its end, after which the store may be closed; only a failed disk is logged."""
    monkeypatch.setattr(identity_index, "_ROWS_AT_ONCE", 10)
    store = RowStore.open(tmp_path / "db", config=SMALL)
    meta = Catalog({}).add([SPEC])
    meta.pop(mark := INDEXED_PREFIX + b"1")
    async with Applier(store) as applier:
        applier.submit(dataclasses.replace(assign(1, {row: 1000 + row for row in range(55)}), meta=meta))
        await applier.wait_applied(1)
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
    assert mark not in store.read_meta()
    monkeypatch.undo()
    assert await index_in_thread(store) == 1
    assert mark in store.read_meta()
    store.close()


async def test_nothing_asked_nothing_found(tmp_path: Path) -> None:
    """An empty question, and one about a table without rows, have answers too."""
    store = RowStore.open(tmp_path / "db", config=SMALL)
    async with Applier(store) as applier:
        assert (await find(applier, [])).row_ids.tolist() == []
        assert (await find(applier, [3, NO_IDENTITY])).row_ids.tolist() == [-1, -1]
    store.close()
