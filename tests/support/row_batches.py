"""Batches of rows whose every byte follows from (row, version), and a dict to compare a store with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.paramserver.store.pending import Batch, RowDelta
from headrace.paramserver.store.row_reader import RowsRead
from headrace.schemas.row_records import RecordLayout
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


def columns_of(layout: RecordLayout, row_ids: Any, tag: int) -> dict[str, Any]:
    """Return columns whose bytes follow from the row id, the column's place and `tag`."""
    ids = np.asarray(row_ids, np.int64)
    columns = {}
    for number, (name, column) in enumerate(layout.columns.items()):
        seed = ids[:, None] * 31 + tag * 7 + number * 3 + np.arange(column.width) + layout.shard.offset
        columns[name] = memoryview((seed % 251).astype(column.dtype.numpy).tobytes())
    return columns


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
    is_conditional: bool = False,
    deltas: tuple[RowDelta, ...] | None = None,
    meta: dict[bytes, bytes] | None = None,
    size_bytes: int = 100,
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
        release=release,
        is_conditional=is_conditional,
    )


def copy_as_after_crash(source: Path, to: Path) -> None:
    """Copy a running store's directory as a crash at some moment of the call would leave it.

    The manifest goes first: it names no file that is not there yet. One that it names may be compacted away meanwhile;
    then the copy begins anew.
    """
    for _ in range(100):
        to.mkdir()
        names = sorted(source.iterdir(), key=lambda path: not path.name.startswith(("CURRENT", "MANIFEST")))
        try:
            for path in names:
                if path.name != "LOCK":
                    shutil.copyfile(path, to / path.name)
            return
        except FileNotFoundError:
            shutil.rmtree(to)
    raise AssertionError(f"{source} never stood still for as long as a copy takes")


class Model:
    """What a store should say of whole rows of one table: the newest batch of each row, in the plainest way."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Batch, bool]] = {}

    def apply(self, batch: Batch) -> None:
        """Apply a batch of deltas of whole rows of table 1."""
        for delta in batch.deltas:
            deleted = [] if delta.deleted_row_ids is None else delta.deleted_row_ids.tolist()
            for ids, is_deleted in ((delta.row_ids.tolist(), False), (deleted, True)):
                for row in ids:
                    before = self.rows.get(row)
                    version = (0, 0) if before is None else (before[0].epoch, before[0].step)
                    if not batch.is_conditional or (batch.epoch, batch.step) >= version:
                        self.rows[row] = (batch, is_deleted)

    def check(self, row_ids: Sequence[int], read: RowsRead, spec: TableSpec = SPEC) -> None:
        """Compare a read of table 1 with the model, to the bit."""
        layout = RecordLayout(spec, spec.whole)
        assert read.weights.shape == (len(row_ids), spec.dim)
        for i, row in enumerate(row_ids):
            batch, is_deleted = self.rows.get(row, (None, False))
            version = (0, 0, 0) if batch is None else (batch.epoch, batch.step, batch.time_us)
            assert (read.epochs[i], read.steps[i], read.times_us[i]) == version, f"row {row}"
            assert read.presence[i] == (0 if batch is None else 2 if is_deleted else 1), f"row {row}"
            columns = {"weights": read.weights[i], **{f"state:{name}": col[i] for name, col in read.states.items()}}
            if batch is None or is_deleted:
                expected = {name: bytes(column.size_bytes) for name, column in layout.columns.items()}
                identity = 0
            else:
                expected = {name: bytes(view) for name, view in columns_of(layout, [row], batch.seq).items()}
                identity = row % 1009 * 1000 + batch.seq
            assert {name: column.tobytes() for name, column in columns.items()} == expected, f"row {row}"
            assert read.identities is not None and read.identities[i] == identity
