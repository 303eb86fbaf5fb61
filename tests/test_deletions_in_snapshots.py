"""What a snapshot becomes lacks rows that were deleted where their table has overlapping layouts of columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from offline_snapshot import snapshot_of
from row_batches import columns_of, make_delta
from table_rows import ITEMS, build, chunk_of, values_of
from torch import nn

from headrace import cli, restore
from headrace.paramserver.replica.copy.builder import load_snapshot
from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import verify_snapshot
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard

LEFT, RIGHT = ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=4)
IDS = np.arange(ITEMS.num_rows)
SHARDS = shards_of_rows(table_seed(ITEMS.fqn), IDS, 2)
GONE = IDS[(SHARDS == 1) | (IDS % 7 == 0)]  # all rows of a shard among them
LIVE = np.setdiff1d(IDS, GONE)
TRAINED = LIVE[LIVE % 3 == 0]  # since the table was sharded by columns; the others have records of whole rows alone


def _write(data: Path, shard: int, ids: Iterable[int], tag: int, *, deleted: Iterable[int] = ()) -> None:
    with contextlib.closing(RowStore.open(data / f"shard-{shard:04}" / "store")) as store:
        for columns in (LEFT, RIGHT):
            delta = make_delta(ids, tag, deleted=list(deleted), spec=ITEMS, shard=columns)
            batch = Batch(seq=tag, epoch=4, step=tag, time_us=tag, deltas=(delta,))
            store.write_runs([coalesce(1, [Part.of_delta(delta, batch)])], meta={}, applied_seq=store.applied_seq)


def _weights() -> Any:
    """Return the weights of the live rows."""
    weights = values_of(ITEMS, IDS)["weights"].copy()
    for columns in (LEFT, RIGHT):
        values = columns_of(RecordLayout(ITEMS, columns), TRAINED, 1)["weights"]
        end = columns.offset + columns.width
        weights[TRAINED, columns.offset : end] = np.frombuffer(values, "<f4").reshape(-1, columns.width)
    return weights[LIVE]


def _rows_of(folder: Path) -> tuple[list[int], bytes]:
    with SnapshotReader(folder) as reader:
        ids, weights = zip(*((ids, records["weights"]) for ids, records in reader.rows(ITEMS.fqn)), strict=True)
    return np.concatenate(ids).tolist(), np.concatenate(weights).tobytes()


def test_deleted_rows_are_absent_from_what_a_snapshot_becomes(tmp_path: Path) -> None:
    """Exports, new directories, models and replicas have the other rows, bit for bit, and no deleted one."""
    data = build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, IDS)}, num_shards=2)
    for shard in range(2):
        mine = IDS[shard == SHARDS]
        _write(data, shard, np.intersect1d(mine, np.union1d(TRAINED, GONE[::2])), 1)
        _write(data, shard, (), 2, deleted=np.intersect1d(mine, GONE).tolist())
    folder, expected = snapshot_of(data, tmp_path / "snapshots"), _weights()

    assert _rows_of(folder) == (LIVE.tolist(), expected.tobytes())
    arguments = ["--snapshot", str(folder), "--to", str(tmp_path / "files"), "--format", "parquet"]
    assert cli.main(["export", *arguments]) == 0
    exported = pq.read_table(tmp_path / "files" / f"{ITEMS.fqn}.parquet")
    assert exported["row_id"].to_pylist() == LIVE.tolist()
    assert np.array(exported["weights"].to_pylist(), "<f4").tobytes() == expected.tobytes()

    assert cli.main(["restore", str(folder), "--data", str(tmp_path / "three"), "--shards", "3"]) == 0
    assert _rows_of(snapshot_of(tmp_path / "three", tmp_path / "of-three")) == (LIVE.tolist(), expected.tobytes())

    model, table = nn.Module(), nn.Embedding(ITEMS.num_rows, ITEMS.dim)
    model.sparse = nn.Module()
    model.sparse.items, weight = table, table.weight
    before = weight.detach().clone()
    restore(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshot=folder, states=False)
    assert weight[LIVE].detach().numpy().tobytes() == expected.tobytes()
    assert torch.equal(weight[GONE], before[GONE])

    manifest = verify_snapshot(folder)
    stores = DiskStores.link(tmp_path / "copy", folder, manifest, memory_bytes=4 << 20, num_threads=1)
    with contextlib.closing(stores):
        for make in (MemoryTable, lambda spec: DiskTable(spec, stores, hot_bytes=1 << 20)):
            loaded = load_snapshot(folder, manifest, is_by_step=False, make_table=make, check_wanted=lambda: None)
            rows, is_missing = loaded.tables[ITEMS.fqn].gather(IDS)
            assert np.flatnonzero(is_missing).tolist() == GONE.tolist()
            assert rows[LIVE].tobytes() == expected.tobytes()
