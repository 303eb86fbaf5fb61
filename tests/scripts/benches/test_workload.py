"""The rows of benches: the same in every process, hot where they should be, and on the right shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.scripts.benches.workload import BenchRows, RowsConfig

SMALL: dict[str, Any] = {"ids": "uniform", "num_batches": 3, "dim": 4, "num_rows": 10_000, "num_lookups": 100}


def test_the_same_settings_make_the_same_rows() -> None:
    """Two processes with the same settings write the same batches; each row is in a batch once."""
    for ids in ("uniform", "zipf"):
        first, second = (BenchRows(RowsConfig(**SMALL | {"ids": ids})) for _ in range(2))
        assert [batch.tolist() for batch in first.ids] == [batch.tolist() for batch in second.ids]
        assert first.message(2) == second.message(2)
        assert all((batch[1:] > batch[:-1]).all() for batch in first.ids)


def test_zipf_rows_are_hot() -> None:
    """With Zipf ids batches share many rows, with uniform ones hardly any."""
    shared = {}
    for ids in ("uniform", "zipf"):
        rows = BenchRows(RowsConfig(ids=ids, num_batches=2, dim=4))
        shared[ids] = len(set(rows.ids[0].tolist()) & set(rows.ids[1].tolist())) / rows.ids[0].size
    assert shared["uniform"] < 0.01
    assert shared["zipf"] > 0.1


def test_requests_of_all_shards_are_the_batch() -> None:
    """Every row goes to its own shard, once, and to the table that its place in the batch gives it."""
    rows = BenchRows(RowsConfig(**SMALL, num_tables=3))
    for spec, ids in zip(rows.specs, np.array_split(rows.ids[1], 3), strict=True):
        found = []
        for shard in range(2):
            request = rows.request(1, client_seq=7, rank=2, shard=shard, num_shards=2)
            assert (request.client, request.client_seq, request.step) == ("rank2", 7, 7)
            (delta,) = [delta for delta in request.deltas if delta.fqn == spec.fqn]
            of_shard = np.frombuffer(delta.row_ids, "<i8")
            assert (shards_of_rows(table_seed(spec.fqn), of_shard, 2) == shard).all()
            assert len(delta.weights) == of_shard.size * 16
            found += of_shard.tolist()
        assert sorted(found) == ids.tolist()
