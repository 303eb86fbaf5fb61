"""Tables on disk behind hot rows: against a dict, with races, prefetches and failures."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from row_batches import make_delta

from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.errors import StorageError, UnavailableError
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.tables import ColumnShard, DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=0, dim=4, dtype=DType.FLOAT32)
WAIT_S = 30.0


@contextlib.contextmanager
def open_table(folder: Path, *, hot_bytes: int = 1) -> Iterator[DiskTable]:
    """Open a table with room for few hot rows."""
    stores = DiskStores.create(folder, memory_bytes=4 << 20, num_threads=2)
    table = DiskTable(SPEC, stores, hot_bytes=hot_bytes)
    try:
        yield table
    finally:
        table.close()


def _same(row_ids: np.ndarray, value: float, *, deleted: np.ndarray | None = None) -> RowDelta:
    """Return a delta whose rows are one number everywhere."""
    weights = np.full((row_ids.size, SPEC.dim), value, "<f4")
    layout = RecordLayout(SPEC, SPEC.whole)
    return RowDelta(
        table_id=1,
        spec=SPEC,
        layout=layout,
        row_ids=row_ids,
        columns={"weights": memoryview(weights).cast("B")} if row_ids.size else {"weights": b""},
        deleted_row_ids=deleted,
    )


def _write(table: DiskTable, row_ids: np.ndarray, value: int) -> None:
    table.apply(_same(row_ids, float(value)), epoch=1, step=value)


def test_columns_that_follow_a_read_replace_it(tmp_path: Path) -> None:
    """What a log says of some columns counts, also at the version that the whole row had when it was read."""
    row = np.array([3])
    with open_table(tmp_path / "copy") as table:
        read = np.ones((1, SPEC.dim), "<f4").tobytes()
        table.load(row, read, np.array([PRESENT]), np.array([2]), np.array([9]), SPEC.whole)
        for step, value in ((7, 1.5), (9, 2.0)):
            right = RecordLayout(SPEC, ColumnShard(offset=2, width=2))
            columns = {"weights": memoryview(np.full(2, value, "<f4")).cast("B")}
            delta = RowDelta(table_id=1, spec=SPEC, layout=right, row_ids=row, columns=columns)
            table.apply(delta, epoch=2, step=step)
        assert table.gather(row)[0].tolist() == [[1.0, 1.0, 2.0, 2.0]]


IDS = st.lists(st.integers(0, 40), max_size=24)


class TableMachine(RuleBasedStateMachine):
    """Updates, lookups, evictions, prefetches and pins with sixteen hot rows, against a dict."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stack = contextlib.ExitStack()
        self.table = self.stack.enter_context(open_table(self.folder / "copy", hot_bytes=16 * 60))
        self.pins = contextlib.ExitStack()
        self.pinned: set[int] = set()
        self.model: dict[int, float | None] = {}
        self.step = 0

    @rule(ids=IDS, deleted=IDS, age=st.integers(0, 5))
    def update(self, ids: list[int], deleted: list[int], age: int) -> None:
        self.step += 1
        gone = sorted(set(deleted) - set(ids))
        delta = _same(
            np.array(list(dict.fromkeys(ids)), np.int64),
            float(self.step),
            deleted=np.array(gone, np.int64) if gone else None,
        )
        self.table.apply(delta, epoch=1, step=max(self.step - age, 0))
        for row in {*ids, *gone}:
            self.model[row] = float(self.step) if row in ids else None

    @rule(ids=IDS)
    def look(self, ids: list[int]) -> None:
        rows, missing = self.table.gather(np.array(ids, np.int64))
        for row, found, is_missing in zip(ids, rows.tolist(), missing.tolist(), strict=True):
            value = self.model.get(row)
            assert is_missing == (value is None) and found == [value or 0.0] * SPEC.dim, f"row {row}"

    @rule(ids=IDS)
    def read_ahead(self, ids: list[int]) -> None:
        self.table.prefetch(np.array(ids, np.int64)).result(WAIT_S)

    @rule(ids=st.lists(st.integers(0, 40), min_size=1, max_size=3))
    def pin(self, ids: list[int]) -> None:
        wanted = set(ids) if len(self.pinned | set(ids)) <= 8 else set()
        number = self.pins.enter_context(self.table.pinned(np.array(sorted(wanted), np.int64)))
        # Two sets of eight ways: a set may be full of pins only when eight rows are pinned.
        assert number == len(wanted)
        self.pinned |= wanted
        self.check_pins()

    @rule()
    def unpin(self) -> None:
        self.pins.close()
        self.pinned = set()

    def check_pins(self) -> None:
        before = self.table.stats.misses
        self.look(sorted(self.pinned))
        assert self.table.stats.misses == before, "a pinned row was read from the disk"

    def teardown(self) -> None:
        self.check_pins()
        self.look(list(range(41)))
        self.pins.close()
        self.stack.close()
        shutil.rmtree(self.folder)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=40)


def test_no_reader_sees_an_older_value_after_a_newer_one(tmp_path: Path) -> None:
    """With concurrent readers, prefetches and a writer, versions of a row only rise and rows are whole."""
    num_rows, num_writes = 48, 1500
    faults: list[object] = []
    is_over = threading.Event()
    with open_table(tmp_path / "copy", hot_bytes=16 * 60) as table:

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            newest = np.zeros(num_rows)
            try:
                while not is_over.is_set():
                    ids = rng.integers(0, num_rows, rng.integers(1, 20))
                    if seed == 0:
                        table.prefetch(ids).result(WAIT_S)
                    rows = table.gather(ids)[0]
                    if (rows != rows[:, :1]).any() or (rows[:, 0] < newest[ids]).any():
                        faults.append((ids, rows, newest[ids]))
                    np.maximum.at(newest, ids, rows[:, 0])
            except Exception as exc:
                faults.append(exc)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        rng = np.random.default_rng(9)
        newest = np.zeros(num_rows)
        for version in itertools.count(1):
            ids = np.unique(rng.integers(0, num_rows, rng.integers(1, 20)))
            _write(table, ids, version)
            newest[ids] = version
            # However late the readers' threads get a processor.
            if faults or (version >= num_writes and table.stats.evicted > 100 and table.stats.hits > 100):
                break
        is_over.set()
        for reader in readers:
            reader.join()
        assert not faults, faults[0]
        for _ in range(3):  # from the disk, and then as hot rows
            assert table.gather(np.arange(num_rows))[0][:, 0].tolist() == newest.tolist()


def test_rows_are_read_ahead(tmp_path: Path) -> None:
    """Prefetched rows are hits; hot rows are not read again, and a surplus is dropped and counted."""
    with open_table(tmp_path / "copy", hot_bytes=1 << 20) as table:
        _write(table, np.arange(5000), 1)
        ids = np.array([4000, 7, 7, 3000, 9999])
        assert table.prefetch(ids).result(WAIT_S) == 4
        assert table.prefetch(ids[:2]).result(WAIT_S) == 0
        assert table.gather(ids)[1].tolist() == [False] * 4 + [True]
        assert (table.stats.hits, table.stats.misses) == (5, 0)
        assert table.prefetch(np.zeros((1 << 20) + 1, np.int64)).result(0) == 0
        assert table.stats.dropped == (1 << 20) + 1
        assert table.prefetch(np.arange(5000)).result(WAIT_S) == 5000 - 3


def test_a_failed_read_ahead_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed prefetch is a warning that names the table, and the next one works."""
    with open_table(tmp_path / "copy") as table:
        _write(table, np.arange(5), 1)
        store = table._stores.stores[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "get", _fail)
            assert isinstance(table.prefetch(np.arange(3)).exception(WAIT_S), StorageError)
        assert table.prefetch(np.arange(3)).result(WAIT_S) == 3
    assert "'t'" in caplog.text and "the disk is on fire" in caplog.text


def test_large_misses_are_read_by_several_threads(tmp_path: Path) -> None:
    """A lookup of many rows equals its parts, also while all threads are busy; an error in one part is its error."""
    with open_table(tmp_path / "copy") as table:
        ids = np.arange(20_000)
        delta = make_delta(ids.tolist(), 3, spec=SPEC)
        table.apply(delta, epoch=1, step=1)
        expected = bytes(delta.columns["weights"])
        assert table.gather(ids)[0].tobytes() == expected
        busy = threading.Event()
        blocked = [table._stores.submit(lambda: busy.wait(WAIT_S)) for _ in range(2)]
        assert table.gather(ids)[0].tobytes() == expected
        busy.set()
        assert all(future.result(WAIT_S) for future in blocked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table._stores.stores[0], "get", _fail)
            with pytest.raises(StorageError, match="on fire"):
                table.gather(ids)
        assert table.gather(ids)[0].tobytes() == expected


def test_an_inspection_leaves_no_trace(tmp_path: Path) -> None:
    """An inspection sees what lookups see, and evicts nothing."""
    with open_table(tmp_path / "copy", hot_bytes=64 * 60) as table:
        everything = np.arange(2000)
        _write(table, everything[:1500], 3)
        for _ in range(3):
            table.gather(everything[:32])
        before, is_hot = table.stats, table._hot.has(everything)
        assert before.hits and is_hot[:32].any() and not is_hot.all()
        some_hot = int(np.flatnonzero(is_hot)[0])
        table._hot._rows[table._hot._find(np.array([some_hot]))[0]] = np.zeros(1, table._hot._rows.dtype)
        rows, missing = table.inspect(everything)
        assert missing.tolist() == [False] * 1500 + [True] * 500
        assert rows[some_hot].tolist() == [0.0] * 4, "a hot row that is wrong is seen"
        assert (np.delete(rows[:1500], some_hot, axis=0) == 3).all()
        assert table.stats == before
        assert (table._hot.has(everything) == is_hot).all()


def test_a_failed_write_ends_the_copy(tmp_path: Path) -> None:
    """After a torn write no row is shown, hot or not: it may belong to another step."""
    with open_table(tmp_path / "copy") as table:
        _write(table, np.arange(5), 1)
        table.gather(np.arange(5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table._stores.stores[0], "write_runs", _fail)
            with pytest.raises(StorageError, match="on fire"):
                _write(table, np.arange(5), 2)
        with pytest.raises(StorageError, match="not whole any more"):
            table.gather(np.arange(5))


def test_a_closed_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for readers and is idempotent; later lookups, updates and prefetches are refused."""
    is_reading, is_closing, found = threading.Event(), threading.Event(), []
    with open_table(tmp_path / "copy") as table:
        _write(table, np.arange(5), 1)
        stores, get = table._stores, table._stores.stores[0].get

        def slow_get(keys: list[bytes]) -> list[bytes | None]:
            is_reading.set()
            assert is_closing.wait(WAIT_S)
            return get(keys)

        monkeypatch.setattr(stores.stores[0], "get", slow_get)
        monkeypatch.setattr(stores._threads, "shutdown", lambda **_: is_closing.set())
        reader = threading.Thread(target=lambda: found.append(table.gather(np.arange(5))[0]))
        reader.start()
        assert is_reading.wait(WAIT_S)
        table.close()
        reader.join(WAIT_S)
        assert np.unique(found[0]).tolist() == [1.0]
        table.close()
        assert not (tmp_path / "copy").exists()
        for refused in (lambda: table.gather(np.arange(5)), lambda: _write(table, np.arange(5), 2)):
            with pytest.raises(UnavailableError) as closed:
                refused()
            assert str(tmp_path) not in str(closed.value)  # clients see it
        monkeypatch.undo()
        stores._threads.shutdown()
        with pytest.raises(UnavailableError) as closed:
            table.prefetch(np.arange(5))
        assert str(tmp_path) not in str(closed.value)


def _fail(*_: object, **__: object) -> None:
    raise StorageError("the disk is on fire")
