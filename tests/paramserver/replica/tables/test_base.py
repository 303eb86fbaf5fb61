"""Every kind of replica table against a simple model of the store; and the seqlock of their readers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_batches import make_delta

from headrace.kernels.dtypes import TORCH_DTYPES, bits_of
from headrace.paramserver.replica.api.lookups import BagLookup
from headrace.paramserver.replica.tables.base import ReplicaTable, Rows, SeqLock
from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

DENSE = TableSpec(fqn="dense", num_rows=40, dim=4, dtype=DType.FLOAT32)
SPARSE = TableSpec(fqn="sparse", num_rows=0, dim=3, dtype=DType.BFLOAT16)
STATES = TableSpec(
    fqn="states",
    num_rows=0,
    dim=5,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="momentum1", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),),
    has_identities=True,
)
ALL = pytest.mark.parametrize("spec", [DENSE, SPARSE, STATES], ids=lambda spec: spec.fqn)

MakeTable = Callable[..., ReplicaTable]


@pytest.fixture(params=["memory", "disk", "disk-tiny"])
def make_table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTable]:
    """Create a table of one kind; those on disk cache all rows, or eight."""
    made: list[ReplicaTable] = []

    def make(spec: TableSpec, default: Rows | None = None) -> ReplicaTable:
        if request.param == "memory":
            made.append(MemoryTable(spec, default=default))
        else:
            folder = tmp_path / f"copy-{len(made)}"
            stores = DiskStores.create(folder, memory_bytes=4 << 20, num_threads=2)
            hot_bytes = 1 << 20 if request.param == "disk" else 1
            try:
                made.append(DiskTable(spec, stores, hot_bytes=hot_bytes, default=default))
            except BaseException:
                stores.close()
                raise
        return made[-1]

    yield make
    for table in made:
        table.close()
    assert not list(tmp_path.glob("copy-*"))


def _rows(table: ReplicaTable, ids: Any) -> Rows:
    return table.gather(np.asarray(ids, np.int64))[0]


def _as_row(spec: TableSpec, row: torch.Tensor) -> Rows:
    """Return a row as tables take it: in the table's dtype, bfloat16 as uint16."""
    return bits_of(row.to(TORCH_DTYPES[spec.dtype])).view(spec.dtype.numpy)


@ALL
def test_rows_come_and_go_as_in_the_store(make_table: MakeTable, spec: TableSpec) -> None:
    """Random updates and deletions match a dict, bit for bit, whatever their versions."""
    rng = np.random.default_rng(1)
    default_row = _as_row(spec, torch.arange(spec.dim))
    table = make_table(spec, default_row)
    scale = 1 if spec.num_rows else 10**15
    model: dict[int, bytes | None] = {}
    everything = np.arange(40, dtype=np.int64) * scale
    default = default_row.tobytes()
    for step in range(200):
        ids = rng.permutation(40)[: rng.integers(0, 20)] * scale
        cut = int(rng.integers(0, ids.size + 1))
        delta = make_delta(ids[:cut].tolist(), step, deleted=ids[cut:].tolist(), spec=spec)
        table.apply(delta, epoch=1, step=int(rng.integers(0, step + 1)))
        width = spec.dim * spec.dtype.size_bytes
        for i, row in enumerate(ids.tolist()):
            model[row] = bytes(delta.columns["weights"][i * width : (i + 1) * width]) if i < cut else None
        some = rng.choice(everything, 12)  # repeated ones too
        found, missing = table.gather(some)
        expected = [model.get(row) for row in some.tolist()]
        assert found.dtype == spec.dtype.numpy and found.shape == (12, spec.dim)
        assert found.tobytes() == b"".join(data or default for data in expected)
        assert missing.tolist() == [data is None for data in expected]
    missing = table.gather(everything)[1].tolist()
    assert missing == [model.get(row) is None for row in everything.tolist()]
    if isinstance(table, MemoryTable):
        assert table.num_present == missing.count(False)
    else:
        assert table.num_present >= missing.count(False)
    assert table.size_bytes > 0


@ALL
def test_pools_as_torch_does(make_table: MakeTable, spec: TableSpec) -> None:
    """Sums, means and weighted sums, also of empty and repeated bags, equal torch's bit for bit."""
    table, rng = make_table(spec), np.random.default_rng(2)
    everything = np.arange(40)
    weights = torch.from_numpy(rng.random((40, spec.dim))).to(TORCH_DTYPES[spec.dtype])
    data = bits_of(weights).tobytes()
    ones = np.ones(40, np.int64)
    table.load(everything, data, np.ones(40, np.uint8), ones, ones, spec.whole)
    ids = rng.integers(0, 40, 30)
    offsets = torch.tensor([0, 4, 4, 17, 30])
    per_sample = torch.from_numpy(rng.random(30)).to(weights.dtype)
    for mode, by in (("sum", None), ("mean", None), ("sum", per_sample)):
        expected = torch.nn.functional.embedding_bag(
            torch.from_numpy(ids), weights, offsets, mode=mode, per_sample_weights=by, include_last_offset=True
        )
        pooled, missing = BagLookup(offsets, mode, by)(table, ids)  # type: ignore[arg-type]
        assert bits_of(pooled).tobytes() == bits_of(expected).tobytes() and not missing.any()


def test_loaded_rows_give_way_to_any_update(make_table: MakeTable) -> None:
    """Of rows read from a store those are loaded that are present; the log's next records replace them."""
    table = make_table(DENSE)
    ids = np.array([7, 3, 5, 9])
    rows = np.arange(16, dtype="<f4").reshape(4, 4)
    presence = np.array([1, 0, 0, 1], np.uint8)
    epochs, steps = np.array([1, 0, 0, 1]), np.array([5, 0, 0, 7])
    table.load(ids, np.ascontiguousarray(rows), presence, epochs, steps, DENSE.whole)
    found, missing = table.gather(ids)
    assert missing.tolist() == [False, True, True, False] and found[[0, 3]].tobytes() == rows[[0, 3]].tobytes()
    table.apply(make_delta([7, 3], 1, spec=DENSE), epoch=1, step=4)
    found, missing = table.gather(ids)
    assert found[:2].tobytes() == bytes(make_delta([7, 3], 1, spec=DENSE).columns["weights"])
    assert missing.tolist() == [False, False, True, False]


def test_column_shards_make_whole_rows(make_table: MakeTable) -> None:
    """Parts of rows are combined with what is there, in any order of parts and whole rows; one part makes a row."""
    table, ids, expected = make_table(DENSE), [1, 2, 3], np.zeros((3, 4), "<f4")
    left, right = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
    for tag, shard in enumerate((left, right, DENSE.whole, left, right, left, DENSE.whole, right)):
        delta = make_delta(ids, tag, spec=DENSE, shard=shard)
        table.apply(delta, epoch=1, step=tag)
        columns = slice(shard.offset, shard.offset + shard.width)
        expected[:, columns] = np.frombuffer(delta.columns["weights"], "<f4").reshape(3, -1)
        for _ in range(2):  # from the disk, and then as hot rows
            found, missing = table.gather(np.array([*ids, 0]))
            assert found[:3].tobytes() == expected.tobytes() and missing.tolist() == [False] * 3 + [True]


def test_sparse_tables_grow(make_table: MakeTable) -> None:
    """A grown table keeps its rows, and unknown ids read as the default."""
    table = make_table(SPARSE)
    for start in range(0, 5000, 500):
        table.apply(make_delta(range(start, start + 500), 1, spec=SPARSE), epoch=1, step=1)
    delta = make_delta(range(5000), 1, spec=SPARSE)
    assert _rows(table, np.arange(5000)).tobytes() == bytes(delta.columns["weights"])
    assert _rows(table, [9999]).tolist() == [[0, 0, 0]]
    assert table.num_present == 5000


def test_no_ids_are_no_rows(make_table: MakeTable) -> None:
    """Empty lookups, updates and loads work."""
    table = make_table(DENSE)
    table.apply(make_delta([], 1, spec=DENSE), epoch=1, step=1)
    nothing = np.empty(0, np.int64)
    table.load(nothing, b"", nothing.astype(np.uint8), nothing, nothing, DENSE.whole)
    rows, missing = table.gather(nothing)
    assert rows.shape == (0, 4) and missing.shape == (0,)
    pooled, _ = BagLookup(torch.tensor([0, 0]), "sum")(table, nothing)
    assert pooled.tolist() == [[0, 0, 0, 0]]


def test_a_default_must_fit(make_table: MakeTable) -> None:
    """A default row of another dim is refused by name."""
    with pytest.raises(ConfigError, match="dense"):
        make_table(DENSE, np.zeros(5, np.float32))


WAIT_S = 20.0


class _Seen:
    """Two numbers that are equal except during a write; a look may run something in between."""

    def __init__(self, *between: Any) -> None:
        self.left = self.right = 0
        self.num_looks = 0
        self._between = list(between)

    def look(self) -> tuple[int, int]:
        self.num_looks += 1
        left = self.left
        if self._between:
            self._between.pop(0)()
        return left, self.right


def _set(seqlock: SeqLock, seen: _Seen, number: int) -> None:
    with seqlock.write():
        seen.left = seen.right = number


def test_who_reads_alone_looks_once() -> None:
    """Without a concurrent writer a reader looks once, without the lock."""
    seqlock, seen = SeqLock(), _Seen()
    assert seqlock.read(seen.look) == (0, 0)
    _set(seqlock, seen, 1)
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 0)


def test_what_changed_amid_a_look_is_looked_at_again() -> None:
    """A change during a look is seen whole, at the second look."""
    seqlock = SeqLock()
    seen = _Seen(lambda: _set(seqlock, seen, 1))
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 1)


def test_who_comes_amid_a_change_waits_for_its_end() -> None:
    """A reader that comes during a change waits for its end."""
    seqlock, seen = SeqLock(), _Seen()
    has_come, found = threading.Event(), []

    class Lock:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is reader:
                has_come.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    seqlock._lock = Lock()  # type: ignore[assignment]
    reader = threading.Thread(target=lambda: found.append(seqlock.read(seen.look)), daemon=True)
    with seqlock.write():
        seen.left = 1
        reader.start()
        assert has_come.wait(WAIT_S)
        assert seen.num_looks == 0
        seen.right = 1
    reader.join(WAIT_S)
    assert (found, seen.num_looks, seqlock.num_retries) == ([(1, 1)], 1, 1)


def test_a_change_that_fails_lets_readers_in() -> None:
    """A failed change raises for the writer and ends like any other."""
    seqlock, seen = SeqLock(), _Seen()
    with pytest.raises(ZeroDivisionError), seqlock.write():
        raise ZeroDivisionError
    assert seqlock.read(seen.look) == (0, 0)
    assert seqlock.num_retries == 0
    _set(seqlock, seen, 1)
    assert seqlock.read(seen.look) == (1, 1)


def test_an_error_of_a_look_counts_when_nobody_wrote() -> None:
    """An error during a change leads to a second look; otherwise it is the reader's."""
    seqlock = SeqLock()

    def fail(*, writes: bool) -> None:
        if writes:
            _set(seqlock, seen, 1)
        raise KeyError("half")

    seen = _Seen(lambda: fail(writes=True), lambda: None, lambda: fail(writes=False))
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 1)
    with pytest.raises(KeyError):
        seqlock.read(seen.look)
    assert (seen.num_looks, seqlock.num_retries) == (3, 1)


def test_tables_grow_under_a_larger_spec(make_table: MakeTable) -> None:
    """Rows stay, new rows read as the default until they are written, whatever columns were written before."""
    table, larger = make_table(DENSE, np.full(4, 7, np.float32)), dataclasses.replace(DENSE, num_rows=5000)
    table.apply(make_delta([0, 39], 3, spec=DENSE), epoch=1, step=1)
    left = make_delta([5], 4, spec=DENSE, shard=ColumnShard(offset=0, width=2))
    table.apply(left, epoch=1, step=1)
    before = _rows(table, [0, 5, 39])
    table.grow(larger)
    assert table.spec == larger
    found, missing = table.gather(np.array([0, 5, 39, 40, 4999]))
    assert np.array_equal(found, np.concatenate([before, np.full((2, 4), 7.0)])) and missing.tolist() == [0, 0, 0, 1, 1]
    table.apply(make_delta([4999, 40], 5, spec=larger), epoch=1, step=2)
    found, missing = table.gather(np.array([0, 5, 39, 40, 4999]))
    assert np.array_equal(found[:3], before) and not missing.any() and not (found[3:] == 7.0).all()
