import json
import math

import pytest

from headrace import cli
from headrace.scripts.benches import bench_ingest, bench_recovery
from headrace.scripts.benches.bench_child import peak_memory_bytes
from headrace.scripts.benches.bench_ingest import IngestConfig, IngestResult
from headrace.scripts.benches.bench_peers import REDIS_HINT, has_redis
from headrace.scripts.benches.bench_recovery import RecoveryConfig
from headrace.scripts.benches.bench_report import say
from headrace.scripts.benches.bench_rows import BenchRows, RowsConfig
from headrace.scripts.benches.bench_writer import WriterProcess

MIB = 2**20


def _ignore(what):
    del what


def test_the_same_settings_make_the_same_rows():
    """Two processes that are told the same write the same batches; each row is in a batch once."""
    for ids in ("uniform", "zipf"):
        first, second = (BenchRows(RowsConfig(ids=ids, num_batches=3)) for _ in range(2))
        assert [batch.tolist() for batch in first.ids] == [batch.tolist() for batch in second.ids]
        assert first.message(2) == second.message(2)
        assert all((batch[1:] > batch[:-1]).all() for batch in first.ids)


def test_zipf_rows_are_hot():
    """With Zipf ids batches share many rows, with uniform ones hardly any."""
    shared = {}
    for ids in ("uniform", "zipf"):
        rows = BenchRows(RowsConfig(ids=ids, num_batches=2))
        shared[ids] = len(set(rows.ids[0].tolist()) & set(rows.ids[1].tolist())) / rows.ids[0].size
    assert shared["uniform"] < 0.01
    assert shared["zipf"] > 0.1


def test_ratios_are_of_medians_and_null_without_a_peer():
    """A ratio is one median over another; without its peer it is None."""
    result = IngestResult()
    for seconds in (1.0, 2.0, 40.0):
        result.add("headrace_zipf", 600, seconds)
        result.add("rocksdb_zipf", 300, seconds)
    figures = result.to_json()
    assert figures["ratio_zipf_vs_rocksdb"] == 2.0
    assert figures["median_rows_per_s"]["headrace_zipf"] == 300
    assert figures["ratio_zipf_vs_redis"] is None


@pytest.mark.slow
def test_a_small_ingest_bench(tmp_path):
    """All keys are there, all figures are positive, and no file is left."""
    config = IngestConfig(num_batches=4, num_acked_batches=2, num_redis_batches=1, num_rounds=1, folder=tmp_path)
    stages = []
    figures = bench_ingest.run(config, on_stage=stages.append).to_json()
    assert len(stages) == config.num_stages
    assert not list(tmp_path.iterdir())
    ratios = ["acked_vs_fsync", "uniform_vs_rocksdb", "zipf_vs_rocksdb", "with_snapshot"]
    if has_redis():
        ratios += ["uniform_vs_redis", "zipf_vs_redis"]
    for name in ratios:
        assert 0 < figures[f"ratio_{name}"] < math.inf
    assert figures["worst_loop_pause_ms"] > 0
    assert figures["peak_memory_bytes"] > 0
    json.dumps(figures)


@pytest.mark.slow
def test_a_small_recovery_bench(tmp_path, capsys):
    """A shard whose store is gone recovers all of its log, and the command writes the ratio to its file."""
    path = tmp_path / "figures.json"
    arguments = ["bench", "recovery", "--rounds=1", "--mebibytes=4", f"--folder={tmp_path}", f"--json={path}"]
    assert cli.main(arguments) == 0
    assert "ratio_recovery_vs_sustained" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert 0 < figures["ratio_recovery_vs_sustained"] < math.inf
    assert figures["log_bytes"] >= 2 * MIB
    assert figures["machine"]["cores"] >= 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_left_out_is_told_as_it_is_typed(capsys):
    """The extra in brackets is no markup of the console's."""
    say(REDIS_HINT)
    assert capsys.readouterr().err == f"{REDIS_HINT}\n"


@pytest.mark.parametrize("option", ["--json=/absent/file", "--folder=/absent"])
@pytest.mark.parametrize("name", ["ingest", "recovery"])
def test_a_path_that_cannot_be_written_is_told_at_once(name, option, capsys):
    """A wrong path costs one line and no bench."""
    assert cli.main(["bench", name, option]) == 1
    assert "/absent" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_bounded_by_the_settings(tmp_path):
    """Under a writer that is faster than the store, a shard stays below the sum that its settings' docstring names."""
    settings = {
        "block_cache_bytes": 32 * MIB,
        "memtable_bytes": 24 * MIB,
        "max_frame_bytes": 4 * MIB,
        "max_client_bytes": 32 * MIB,
        "max_inflight_bytes": 32 * MIB,
        "max_log_pending_bytes": 32 * MIB,
        "max_backlog_bytes": 32 * MIB,
    }
    bound = 300 * MIB + 32 * MIB + 24 * MIB + 2 * 32 * MIB + 32 * MIB + 32 * MIB
    rows = RowsConfig(ids="uniform", num_batches=150)  # 300 MiB: more than all of it together, but for the process
    with WriterProcess(rows) as writer, bench_ingest.serve(tmp_path / "data", **settings) as server:
        writer.write(server.address, num_batches=rows.num_batches)
        peak = peak_memory_bytes(server.shard_pids[0])
        server.kill()
    assert 0 < peak < bound


def test_recovery_counts_its_stages():
    """A round has two stages."""
    assert RecoveryConfig(num_rounds=3).num_stages == 6
    assert bench_recovery.RecoveryConfig().log_bytes == 2**30
