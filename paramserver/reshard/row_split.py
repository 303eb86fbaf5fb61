"""Rows of one shard's batches, for the shards of a server with another number of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.routing import shards_of_rows

__all__ = ["split_rows"]


def split_rows(delta: RowDelta, table: Table, num_shards: int) -> dict[int, RowDelta]:
    """Return a delta's rows by their shards of `num_shards`, as rows of `table` in the catalog there.

    Scalars are left out. Columns are copies, unless there is one shard.
    """
    layout = table.layout_at(delta.layout.shard.offset, delta.layout.shard.width)
    delta = replace(delta, table_id=table.table_id, spec=table.spec, layout=layout, scalars=())
    deleted = np.empty(0, np.int64) if delta.deleted_row_ids is None else delta.deleted_row_ids
    if num_shards == 1:
        return {0: delta} if delta.row_ids.size or deleted.size else {}
    shards = shards_of_rows(table.spec.seed, delta.row_ids, num_shards)
    deleted_shards = shards_of_rows(table.spec.seed, deleted, num_shards)
    return {
        int(shard): _rows_of(delta, np.flatnonzero(shards == shard), deleted[deleted_shards == shard])
        for shard in np.union1d(shards, deleted_shards)
    }


def _rows_of(delta: RowDelta, places: npt.NDArray[np.int64], deleted: npt.NDArray[np.int64]) -> RowDelta:
    columns = {
        name: np.frombuffer(data, np.uint8).reshape(delta.row_ids.size, -1)[places].reshape(-1).data
        for name, data in delta.columns.items()
        if places.size
    }
    return replace(
        delta,
        row_ids=delta.row_ids[places],
        columns=columns,
        identities=None if delta.identities is None else delta.identities[places],
        deleted_row_ids=deleted if deleted.size else None,
    )
