"""The rows of benches: the same in every process, hot where they should be, on the right shard; and their writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.workload import BenchRows, RowsConfig, WriterProcess, draw_ids, due_times_ns

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


def test_each_row_is_written_once_in_any_order() -> None:
    """With `shuffled` the batches together are the table, and each spans all of it."""
    rows = BenchRows(RowsConfig(**SMALL | {"ids": "shuffled", "num_batches": 100}))
    assert np.array_equal(np.sort(np.concatenate(rows.ids)), np.arange(10_000))
    assert all((ids[1:] > ids[:-1]).all() and ids[-1] - ids[0] > 8000 for ids in rows.ids)


def test_only_hot_rows_are_written() -> None:
    """With `hot` the hundredth of the rows that Zipf ids draw most is written, all of it, and the hottest ones most."""
    rows = BenchRows(RowsConfig(**SMALL | {"ids": "hot", "num_batches": 50}))
    counts = np.bincount(np.concatenate(rows.ids), minlength=10_000)
    assert np.count_nonzero(counts) == 100
    drawn = np.bincount(draw_ids(np.random.default_rng(9), "zipf", 10_000, 100_000), minlength=10_000)
    assert set(np.argsort(drawn)[-5:]) <= set(np.argsort(counts)[-20:])


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


def test_a_schedule_is_even_and_begins_at_once() -> None:
    """Batches are due at the rate's interval; rounding does not accumulate."""
    assert due_times_ns(5, 4, 100.0, 1e11) == [5, 6, 7, 8]
    due_ns = due_times_ns(0, 3001, 1000.0, 3e6)
    assert due_ns[3000] == 1_000_000_000


def test_many_clients_to_many_shards_on_a_schedule(tmp_path: Path) -> None:
    """All batches arrive at the rate that was asked for; a second write continues behind the first."""
    rows = RowsConfig(ids="uniform", num_batches=3, dim=4, num_rows=10_000, num_lookups=100)
    with WriterProcess(rows, num_clients=3) as writer, serve(tmp_path / "data", shards=2) as server:
        first = writer.write(server.address, num_batches=12, rows_per_s=12_000.0)
        second = writer.write(server.address, num_batches=6)
        server.kill()
    assert (first.first_step, second.first_step) == (1, 5)
    assert len(first.due_ns) == len(first.ack_delays_ms) == 12
    gaps_ns = np.diff(first.due_ns)
    assert (gaps_ns.max() - gaps_ns.min()) <= 1
    assert first.num_rows / 12_000 * 11 / 12 == pytest.approx((first.due_ns[-1] - first.due_ns[0]) / 1e9)
    assert first.acked_s >= (first.due_ns[-1] - first.due_ns[0]) / 1e9
    assert min(first.ack_delays_ms) > 0
    assert (second.due_ns, second.ack_delays_ms, second.late_ms) == ([], [], 0.0)
    assert second.cpu_s > 0
