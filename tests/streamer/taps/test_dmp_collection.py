"""TorchRec's 2D parallel: each row is in several groups of ranks, and one of them streams it."""

from __future__ import annotations

import pytest
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess

pytestmark = pytest.mark.torchrec


def test_rows_in_two_groups(server: ServerProcess) -> None:
    """The first group streams its rows after each step, and all rows after a sync, when both groups have the same."""
    from synced_training import ROWS, train_synced_on_rank

    ranks = run_ranks(train_synced_on_rank, 4, server.address)
    num_rows = ROWS["rows"] + 2 * ROWS["columns"] + ROWS["whole"]
    assert [each.audits for each in ranks] == [[(True, num_rows)] * 3] * 4
    # Copies differ between syncs by design; after one, a changed value on rank 3 is found.
    assert [each.spoiled for each in ranks] == [[("bags.embedding_bags.rows.weight", (2, 3), (55,))]] * 4
    assert [each.step for each in ranks] == [6] * 4
    assert [each.copies for each in ranks] == [(False, True)] * 4
    # Ranks 0 and 2 are the first group; 1 and 3 have copies of their rows.
    first, second, *copies = (sorted(ranks[rank].parts) for rank in (0, 2, 1, 3))
    assert first == ["bags.embedding_bags.columns.weight 0 0", "bags.embedding_bags.rows.weight 0 0"]
    assert second == [
        "bags.embedding_bags.columns.weight 0 4",
        "bags.embedding_bags.rows.weight 51 0",
        "bags.embedding_bags.whole.weight 0 0",
    ]
    assert copies == [[], []]
    for each in ranks:
        assert "attach that, not a part of it" in each.told["part"]
        assert "load its tables from an export" in each.told["restore"]
        assert "FULLY_SHARDED cuts its rows over the groups" in each.told["cut"]
        assert "DMPCollection (2D parallel) writes its rows in sync()" in each.told["install"]
