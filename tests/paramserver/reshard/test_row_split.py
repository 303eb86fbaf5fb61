"""Rows of one shard's batches go to the shards of a server with another number of them."""

from __future__ import annotations

import numpy as np
import pytest
from row_batches import ROWS, SPEC, SPLIT, columns_of, make_delta

from headrace.paramserver.reshard.row_split import split_rows
from headrace.paramserver.store.catalog import Table
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import ColumnShard, TableSpec


@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize(
    ("spec", "shard", "rows", "deleted"),
    [
        (SPEC, None, ROWS[:5], ROWS[5:]),
        (SPEC, None, [], ROWS),
        (SPEC, None, ROWS, []),
        (SPLIT, ColumnShard(offset=2, width=4), ROWS[:3], ROWS[3:]),
        (SPEC, None, [], []),
    ],
)
def test_each_row_goes_to_its_shard(
    spec: TableSpec, shard: ColumnShard | None, rows: list[int], deleted: list[int], num_shards: int
) -> None:
    """Every row and every deletion is in the part of its shard alone, with its columns and identity."""
    delta = make_delta(rows, 3, deleted=deleted, spec=spec, shard=shard)
    parts = split_rows(delta, Table(9, spec), num_shards)
    found: dict[int, tuple[bytes, ...]] = {}
    gone: list[int] = []
    for target, part in parts.items():
        assert (part.table_id, part.layout.shard) == (9, delta.layout.shard)
        now_gone = [] if part.deleted_row_ids is None else part.deleted_row_ids.tolist()
        ids = np.array([*part.row_ids.tolist(), *now_gone], np.int64)
        assert ids.size and set(shards_of_rows(spec.seed, ids, num_shards).tolist()) == {target}
        gone += now_gone
        for at, row in enumerate(part.row_ids.tolist()):
            columns = {name: bytes(data) for name, data in part.columns.items()}
            size = {name: len(data) // part.row_ids.size for name, data in columns.items()}
            found[row] = tuple(data[at * size[name] : (at + 1) * size[name]] for name, data in columns.items())
            assert part.identities is None or part.identities[at] == row % 1009 * 1000 + 3
    assert sorted(gone) == sorted(deleted)
    assert found == {row: tuple(map(bytes, columns_of(delta.layout, [row], 3).values())) for row in rows}
