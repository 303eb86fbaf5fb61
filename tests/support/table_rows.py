"""Tables whose every byte follows from the row, directories of servers that hold them, and snapshots of those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from offline_snapshot import snapshot_of

from headrace.paramserver.snapshots.new_data_dir import StoreBuilder
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

ITEMS = TableSpec(
    fqn="sparse.items.weight",
    num_rows=500,
    dim=6,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),
    ),
)
USERS = TableSpec(
    fqn="sparse.users.weight",
    num_rows=300,
    dim=4,
    dtype=DType.BFLOAT16,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=2),),
    has_identities=True,
)
VIRTUAL = TableSpec(fqn="sparse.hashed.weight", num_rows=0, dim=3, dtype=DType.FLOAT16)


def values_of(spec: TableSpec, ids: Any) -> dict[str, Any]:
    """Return finite columns whose elements follow from row, column and field."""
    columns = {}
    for number, (field, column) in enumerate(RecordLayout(spec, spec.whole).columns.items()):
        numbers = (np.asarray(ids, np.int64)[:, None] % 1000 + number) + np.arange(column.width) / 8
        if column.dtype is DType.BFLOAT16:
            columns[field] = (numbers.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            columns[field] = numbers.astype(column.dtype.numpy)
    return columns


def chunk_of(spec: TableSpec, ids: Any, *, epoch: int = 3, step: Any = None) -> RowChunk:
    """Return rows; the step of each is its id modulo 7 unless it is given."""
    ids = np.asarray(ids, np.int64)
    return RowChunk(
        row_ids=ids,
        columns=values_of(spec, ids),
        epochs=np.full(ids.size, epoch, np.int64),
        steps=ids % 7 if step is None else np.full(ids.size, step, np.int64),
        times_us=ids * 1000,
        identities=ids * 31 + 5 if spec.has_identities else None,
    )


def build(path: Path, rows: dict[TableSpec, RowChunk], *, num_shards: int = 3) -> Path:
    """Make the directory of a server."""
    with StoreBuilder(path, num_shards=num_shards, specs=list(rows), run="test") as builder:
        for spec, chunk in rows.items():
            builder.add(spec.fqn, chunk)
        builder.finish()
    return path


def snapshot(path: Path, rows: dict[TableSpec, RowChunk], *, num_shards: int = 3) -> Path:
    """Return the directory of a snapshot of a server that holds some rows."""
    return snapshot_of(build(path / "data", rows, num_shards=num_shards), path / "snapshots")
