"""The figures of benches that are made of what was timed, and settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.scripts.benches import dense_cost, freshness, kernels, restore
from headrace.scripts.benches.harness import Rounds
from headrace.scripts.benches.lookup import LookupConfig, LookupResult, measure_disk
from headrace.scripts.benches.observer import delays_of
from headrace.scripts.benches.table_files import ExportBenchConfig

MS = 1_000_000


def test_restore() -> None:
    """The ratio is of the medians: a restore that takes longer than a read is below one."""
    took_s = Rounds({"scan": [1.0, 9.0, 1.0], "restore": [2.0, 2.0, 0.5]})
    figures = restore.make_figures(restore.RestoreConfig(num_rows=1000), took_s)
    assert figures["restore_vs_scan"] == 0.5
    assert figures["rows_per_s"] == {"scan": 1000, "restore": 500}


def test_dense() -> None:
    """The ratio is the median of the rounds' own ratios, each to the blocks before and after: drift does not count."""
    step_s = Rounds({"dense": [1.1, 6.0, 20.0], "rows": [0.5, 1.5, 8.5, 1.5]})
    figures = dense_cost.make_figures(step_s, [0.1, 0.3, 7.0], 100)
    assert figures["dense_step_ratio"] == 1.2
    assert figures["dense_visible_extra_p50_s"] == 0.3


def test_lookup() -> None:
    """Ratios are of medians, that of the switch of 99th percentiles; without Redis its ratio is None."""
    result = LookupResult()
    result.before_ms, result.during_ms = [1.0] * 100, [1.0] * 90 + [3.0] * 10
    result.disk = {"miss": 2.0, "rocksdb": 4.0}
    for name, seconds in (("headrace", 2.0), ("torch", 1.0), ("headrace_idle", 4.0), ("torch_idle", 1.0)):
        for factor in (1, 1, 9):
            result.add(name, 10, seconds * factor, seconds)
    figures = result.figures(LookupConfig())
    assert figures["ratio_vs_torch"] == 0.5
    assert figures["ratio_idle_vs_torch"] == 0.25
    assert figures["swap_p99_ratio"] == 3.0
    assert figures["miss_ratio_vs_rocksdb"] == 0.5
    assert figures["ratio_vs_redis"] is None


def test_a_table_on_disk_misses_what_was_never_looked_up(tmp_path: Path) -> None:
    """Both sides read the rows."""
    rates = measure_disk(tmp_path, 20_000, 4, num_batches=2)
    assert rates["miss"] > 0 and rates["rocksdb"] > 0


def test_freshness() -> None:
    """The ratio is of the medians, the rate of all blocks."""
    block = {"took_s": 0.5, "num_rows_sent": 100, "num_flushes": 2, "load": 1.0}
    answers = {"ack_p50_ms": 3.0, "histogram_p50_ms": 3.5}
    blocks = [{**block, **answers, "delays_ms": delays_ms} for delays_ms in ([4.0, 4.0], [40.0])]
    figures = freshness.make_figures(freshness.FreshnessConfig(num_steps=2), blocks, [2.0, 2.0, 9.0])
    assert (figures["p50_ms"], figures["floor_p50_ms"], figures["p50_vs_floor"]) == (4.0, 2.0, 2.0)
    assert figures["p99_ms"] > 30
    assert figures["rows_per_s"] == 200
    assert figures["flushes_per_step"] == pytest.approx(4 / 3)
    assert figures["block_p50_ms"] == [4.0, 40.0]
    assert figures["config"]["settings"] == {"freshness_s": 0, "max_cost_percent": 100}
    json.dumps(figures)


def test_the_floor_of_freshness_syncs_what_it_gets(tmp_path: Path) -> None:
    """Each round appends one message to the file before it is answered."""
    with freshness.Floor(tmp_path, 5000) as floor:
        found_ms = floor.measure(4, interval_s=0.001)
        assert len(found_ms) == 4
        assert min(found_ms) > 0
        assert (tmp_path / "floor").read_bytes() == floor._data * 4


def test_a_step_is_visible_with_the_first_that_is_not_below_it() -> None:
    """Steps that become visible together have one moment; each counts from its own update; none is left out."""
    updated_ns = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    seen = [(4, 5 * MS), (5, 13 * MS), (7, 36 * MS), (9, 41 * MS)]
    assert delays_of(range(5, 9), updated_ns, seen) == [3.0, 16.0, 6.0, 1.0]
    assert delays_of([5, 8], [10 * MS, 40 * MS], seen) == [3.0, 1.0]
    assert delays_of([], [], []) == []
    with pytest.raises(ProtocolError, match="the replica has not shown step 6"):
        delays_of([5, 6], [MS, MS], [(5, 2 * MS)])
    with pytest.raises(ProtocolError, match="step 5"):
        delays_of([5], [MS], [])


def test_a_wrong_answer_stops_the_bench_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed whose result differs from plain PyTorch's."""
    monkeypatch.setattr(kernels, "row_digests", lambda row_ids, columns: row_ids)
    config = kernels.KernelsConfig(num_rounds=1, num_rows=10_000, num_steps=1, step_ids=10)
    with pytest.raises(AssertionError, match="row_digests"):
        kernels.measure_cpu(config, lambda stage: None)


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        (ExportBenchConfig, {"format_name": "csv"}, "--format 'csv'"),
        (LookupConfig, {"num_rows": 100}, "--rows: 100"),
        (freshness.FreshnessConfig, {"rows_per_step": 15}, "--rows-per-step 15: must be a multiple of 10"),
        (freshness.FreshnessConfig, {"consistency": "loose"}, "consistency"),
    ],
)
def test_wrong_settings(config: Any, setting: dict[str, Any], message: str) -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match=message):
        config(**setting)


@pytest.mark.parametrize("option", ["--json=/absent/file", "--folder=/absent"])
def test_wrong_paths(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are one line, before anything starts."""
    assert cli.main(["bench", "freshness", option]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/absent" in line
