"""Batches of rows whose every byte follows from (row, version), and a dict to compare a store with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace.paramserver.store.coalescing import CoalescedRows, SortedRun
from headrace.paramserver.store.deltas import Batch, Part, RowDelta
from headrace.paramserver.store.memtable import PendingRows, ShardSource
from headrace.paramserver.store.row_reader import RowsRead, read_rows
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="user.weight",
    num_rows=0,
    dim=4,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.BFLOAT16),
    ),
    has_identities=True,
)
LAYOUT = RecordLayout(SPEC, SPEC.whole)
ROWS = [0, 1, 2, 3, 5, 8, 2**40, 2**63 - 1]
SPLIT = TableSpec(
    fqn="split",
    num_rows=0,
    dim=6,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp", kind=StateKind.POINTWISE, dtype=DType.FLOAT16),
    ),
)
SHARDS = [ColumnShard(offset=0, width=6), ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=4)]


def columns_of(layout: RecordLayout, row_ids: Any, tag: int) -> dict[str, Any]:
    """Return columns whose bytes follow from the row id, the column's place and `tag`."""
    ids = np.asarray(row_ids, np.int64)
    columns = {}
    for number, (name, column) in enumerate(layout.columns.items()):
        seed = ids[:, None] * 31 + tag * 7 + number * 3 + np.arange(column.width) + layout.shard.offset
        columns[name] = memoryview((seed % 251).astype(column.dtype.numpy).tobytes())
    return columns


def split(is_deleted: Mapping[int, bool]) -> dict[str, list[int]]:
    """Return the arguments of `make_delta` and `make_batch` for rows of which some are deleted."""
    return {
        "row_ids": [row for row, gone in is_deleted.items() if not gone],
        "deleted": [row for row, gone in is_deleted.items() if gone],
    }


VERSIONS = st.tuples(st.integers(1, 2), st.integers(0, 3))
# Rows and whether they are deleted, and the batch's version.
UPDATES = st.tuples(st.dictionaries(st.sampled_from(ROWS), st.booleans(), min_size=1, max_size=6), VERSIONS)


def make_update(seq: int, update: tuple[dict[int, bool], tuple[int, int]], **changes: Any) -> Batch:
    """Return the batch of one of `UPDATES`."""
    rows, version = update
    return make_batch(seq, **split(rows), version=version, **changes)


def make_delta(
    row_ids: Iterable[int],
    tag: int,
    *,
    deleted: Sequence[int] = (),
    spec: TableSpec = SPEC,
    shard: ColumnShard | None = None,
    table_id: int = 1,
) -> RowDelta:
    """Return a delta of `columns_of` values."""
    ids = np.array(list(row_ids), np.int64)
    layout = RecordLayout(spec, shard or spec.whole)
    return RowDelta(
        table_id=table_id,
        spec=spec,
        layout=layout,
        row_ids=ids,
        columns=columns_of(layout, ids, tag),
        identities=ids % 1009 * 1000 + tag if spec.has_identities else None,
        deleted_row_ids=np.array(deleted, np.int64) if deleted else None,
    )


def make_batch(
    seq: int,
    row_ids: Iterable[int] = (),
    *,
    deleted: Sequence[int] = (),
    version: tuple[int, int] | None = None,
    release: Callable[[], None] = lambda: None,
    deltas: tuple[RowDelta, ...] | None = None,
    meta: dict[bytes, bytes] | None = None,
    size_bytes: int = 100,
    dropped: tuple[int, ...] = (),
) -> Batch:
    """Return a batch whose rows are tagged with its seq."""
    epoch, step = version or (1, seq)
    return Batch(
        seq=seq,
        epoch=epoch,
        step=step,
        time_us=seq * 10,
        deltas=(make_delta(row_ids, seq, deleted=deleted),) if deltas is None else deltas,
        meta=meta or {},
        size_bytes=size_bytes,
        dropped=dropped,
        release=release,
    )


def copy_as_after_crash(source: Path, to: Path) -> None:
    """Copy a running store's directory as a crash at some moment of the call would leave it.

    The manifest goes first, before the others are listed: it names no file that is not there yet. One that it names may
    be compacted away meanwhile; then the copy begins anew.
    """
    for _ in range(100):
        to.mkdir()
        try:
            for path in [*source.glob("CURRENT"), *source.glob("MANIFEST-*")]:
                shutil.copyfile(path, to / path.name)
            for path in source.iterdir():
                if path.name != "LOCK" and not (to / path.name).exists():
                    shutil.copyfile(path, to / path.name)
            return
        except FileNotFoundError:
            shutil.rmtree(to)
    raise AssertionError(f"{source} never stood still for as long as a copy takes")


class Model:
    """What a store should say of whole rows of one table: the last batch of each row, in the plainest way."""

    def __init__(self) -> None:
        self.rows: dict[int, Batch] = {}

    def apply(self, batch: Batch) -> None:
        """Apply a batch of deltas of whole rows of table 1."""
        for delta in batch.deltas:
            deleted = [] if delta.deleted_row_ids is None else delta.deleted_row_ids.tolist()
            self.rows |= dict.fromkeys(delta.row_ids.tolist(), batch)
            for row in deleted:
                self.rows.pop(row, None)

    def check(self, row_ids: Sequence[int], read: RowsRead, spec: TableSpec = SPEC) -> None:
        """Compare a read of table 1 with the model, to the bit."""
        layout = RecordLayout(spec, spec.whole)
        assert read.weights.shape == (len(row_ids), spec.dim)
        for i, row in enumerate(row_ids):
            batch = self.rows.get(row)
            version = (0, 0, 0) if batch is None else (batch.epoch, batch.step, batch.time_us)
            assert (read.epochs[i], read.steps[i], read.times_us[i]) == version, f"row {row}"
            assert read.presence[i] == (batch is not None), f"row {row}"
            columns = {"weights": read.weights[i], **{f"state:{name}": col[i] for name, col in read.states.items()}}
            if batch is None:
                expected = {name: bytes(column.size_bytes) for name, column in layout.columns.items()}
                identity = 0
            else:
                expected = {name: bytes(view) for name, view in columns_of(layout, [row], batch.seq).items()}
                identity = row % 1009 * 1000 + batch.seq
            assert {name: column.tobytes() for name, column in columns.items()} == expected, f"row {row}"
            assert read.identities is not None and read.identities[i] == identity


class FakeStore(dict[bytes, bytes]):
    """The part of a store that readers and the applier use."""

    def read(self, keys: list[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write(self, run: SortedRun | CoalescedRows) -> None:
        # In pieces, as the store does.
        for start in range(0, run.row_ids.size, 3):
            end = min(start + 3, run.row_ids.size)
            keys = encode_keys(run.table_id, run.layout.shard, run.row_ids[start:end])
            self.update(zip(keys, run.layout.values_of(run.records_at(slice(start, end))), strict=True))


def parts_of(*batches: Batch) -> list[Part]:
    return [Part.of_delta(delta, batch) for batch in batches for delta in batch.deltas]


def read(pending: PendingRows, store: FakeStore, rows: Sequence[int] = ROWS) -> RowsRead:
    source = ShardSource(LAYOUT, pending.snapshot(), True)
    return read_rows(1, SPEC, [source], np.array(rows, np.int64), store.read, seq=0)
