"""A replica's table against the plainest model of what the store keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from row_batches import make_delta

from headrace.paramserver.replica.table import ReplicaTable
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, DType, TableSpec

DENSE = TableSpec(fqn="dense", num_rows=40, dim=4, dtype=DType.FLOAT32)
SPARSE = TableSpec(fqn="sparse", num_rows=0, dim=3, dtype=DType.BFLOAT16)


def _rows(table: ReplicaTable, ids: Any) -> torch.Tensor:
    return table.weights[torch.from_numpy(table.slots_of(np.asarray(ids, np.int64)))]


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("spec", [DENSE, SPARSE])
def test_rows_come_and_go_as_in_the_store(spec: TableSpec) -> None:
    """Random updates, deletions and conditional updates leave what a dict with versions has, to the bit."""
    rng = np.random.default_rng(1)
    table = ReplicaTable(spec, default=torch.arange(spec.dim, dtype=torch.float32))
    scale = 1 if spec.num_rows else 10**15
    model: dict[int, tuple[tuple[int, int], bytes | None]] = {}
    for step in range(200):
        ids = rng.permutation(40)[: rng.integers(0, 20)] * scale
        cut = int(rng.integers(0, ids.size + 1))
        is_conditional = bool(rng.integers(0, 2))
        version = (1, int(rng.integers(0, step + 1))) if is_conditional else (1, step)
        delta = make_delta(ids[:cut].tolist(), step, deleted=ids[cut:].tolist(), spec=spec)
        table.apply(delta, epoch=version[0], step=version[1], is_conditional=is_conditional)
        width = spec.dim * spec.dtype.size_bytes
        for i, row in enumerate(ids.tolist()):
            if not is_conditional or version >= model.get(row, ((0, 0), None))[0]:
                data = bytes(delta.columns["weights"][i * width : (i + 1) * width]) if i < cut else None
                model[row] = (version, data)
    everything = np.arange(40, dtype=np.int64) * scale
    default = bytes(_bits(torch.arange(spec.dim).to(table.weights.dtype)))
    expected = [model.get(row, ((0, 0), None))[1] or default for row in everything.tolist()]
    assert bytes(_bits(_rows(table, everything))) == b"".join(expected)
    missing = table.missing(table.slots_of(everything)).tolist()
    assert missing == [model.get(row, ((0, 0), None))[1] is None for row in everything.tolist()]
    assert table.num_present == missing.count(False)


def test_column_shards_make_whole_rows() -> None:
    """Each part of the columns is written on its own; a row is present when any of them is."""
    table = ReplicaTable(DENSE)
    left, right = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
    first, second = make_delta([3, 5], 7, spec=DENSE, shard=left), make_delta([3], 7, spec=DENSE, shard=right)
    for delta in (first, second):
        table.apply(delta, epoch=1, step=1, is_conditional=False)
    rows = _rows(table, [3, 5]).numpy()
    assert rows[0, :1].tobytes() == bytes(first.columns["weights"][:4])
    assert rows[0, 1:].tobytes() == bytes(second.columns["weights"])
    assert rows[1, 1:].tolist() == [0, 0, 0] and table.num_present == 2


def test_sparse_tables_grow() -> None:
    """Many more rows than it began with stay readable, and unknown ids give the default."""
    table = ReplicaTable(SPARSE)
    for start in range(0, 5000, 500):
        table.apply(make_delta(range(start, start + 500), 1, spec=SPARSE), epoch=1, step=1, is_conditional=False)
    delta = make_delta(range(5000), 1, spec=SPARSE)
    assert bytes(_bits(_rows(table, np.arange(5000)))) == bytes(delta.columns["weights"])
    assert _rows(table, [9999]).tolist() == [[0, 0, 0]]


def test_a_default_must_fit() -> None:
    """A default row of another dim is refused by name."""
    with pytest.raises(ConfigError, match="dense"):
        ReplicaTable(DENSE, default=torch.zeros(5))
