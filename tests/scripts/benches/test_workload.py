"""The rows of benches: the same in every process, hot where they should be; and their writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.workload import BenchRows, RowsConfig, WriterProcess, draw_ids

SMALL: dict[str, Any] = {"ids": "uniform", "num_batches": 3, "dim": 4, "num_rows": 10_000, "num_lookups": 100}


def test_the_same_settings_make_the_same_rows() -> None:
    """Two processes with the same settings write the same batches; each row is in a batch once."""
    for ids in ("uniform", "zipf"):
        first, second = (BenchRows(RowsConfig(**SMALL | {"ids": ids})) for _ in range(2))
        assert [batch.tolist() for batch in first.ids] == [batch.tolist() for batch in second.ids]
        assert first.message(2) == second.message(2)
        assert all((batch[1:] > batch[:-1]).all() for batch in first.ids)


def test_hot_rows_are_the_same_for_all_seeds() -> None:
    """Zipf ids of different seeds differ, but a tenth of the rows gets most of both, and it is the same one."""
    draws = [draw_ids(np.random.default_rng(seed), "zipf", 10_000, 100_000) for seed in (1, 2)]
    counts = [np.bincount(ids, minlength=10_000) for ids in draws]
    assert not np.array_equal(*counts)
    hot = [set(np.argsort(count)[-100:].tolist()) for count in counts]
    assert len(hot[0] & hot[1]) > 60
    assert counts[0].max() > 50 * np.median(counts[0])


def test_each_row_is_written_once() -> None:
    """With `each` the batches together are the table, in order."""
    rows = BenchRows(RowsConfig(**SMALL | {"ids": "each", "num_batches": 101}))
    assert np.array_equal(np.concatenate(rows.ids), np.arange(10_000))
    assert max(ids.size for ids in rows.ids) <= 100
    assert len(rows.request(100, client_seq=1).deltas[0].weights) == rows.ids[100].size * 16


def test_a_writer_keeps_its_pace_and_continues(tmp_path: Path) -> None:
    """All batches arrive at the rate that was asked for; a second write continues behind the first."""
    rows = RowsConfig(**SMALL)
    with WriterProcess(rows) as writer, serve(tmp_path / "data") as server:
        first = writer.write(server.address, num_batches=12, rows_per_s=12_000.0)
        second = writer.write(server.address, num_batches=6)
        server.kill()
    assert first.num_rows / 12_000 * 11 / 12 < first.acked_s <= first.applied_s
    assert second.num_rows == first.num_rows // 2
