"""Each bench with few rows and rounds: that it measures, with every figure, not what."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nats_cluster import needs_nats_server

from headrace.scripts.benches import wire
from headrace.scripts.benches.kernels_gpu import GPU_FIGURES
from headrace.scripts.benches.peers import GRPC_HINT, has_grpc, has_redis

Bench = Callable[..., tuple[dict[str, Any], int]]


def _assert_positive(figures: dict[str, Any], *names: str) -> None:
    for name in names:
        assert 0 < figures[name] < math.inf, name


def test_restore(bench: Bench) -> None:
    """Every row is restored and read in each round."""
    figures, exit_code = bench("restore", "--rows=1000", "--dim=8", "--rounds=2")
    assert exit_code == (0 if figures["restore_vs_scan"] >= 0.7 else 1)
    assert {kind: len(rounds) for kind, rounds in figures["took_s"].items()} == {"scan": 2, "restore": 2}


@pytest.mark.timeout(400)  # it starts eleven servers
def test_archive(bench: Bench) -> None:
    """Every target has a figure; a restore reads what was sent, and the archive is empty at the end of each block."""
    sizes = ["--rows=20000", "--batches=8", "--hot-batches=4", "--block-s=1", "--rounds=1"]
    figures, exit_code = bench("archive", *sizes)
    assert exit_code in (0, 1)
    ratios = ("restore_vs_get", "restore_vs_get_bounded", "second_snapshot_bytes_ratio")
    _assert_positive(figures, "ingest_with_archive", *ratios)
    for name in ("archive_lag_p99_s", "archive_lag_80_p99_s"):
        assert 0 <= figures[name] < 60, name
    assert 0 <= figures["ingest_archived_share"] <= 1
    assert figures["second_snapshot_bytes"] < figures["first_snapshot_bytes"]
    assert figures["restored_bytes"] > figures["snapshot_size_bytes"] > 20_000 * 64 * 4
    assert set(figures["peak_rss_bytes"]) == {"4000", "20000"}
    kinds = {"get", "restore", "get_bounded", "restore_bounded", "start"}
    assert {kind: len(rounds) for kind, rounds in figures["took_s"].items()} == dict.fromkeys(kinds, 1)


def test_dense(bench: Bench) -> None:
    """Each dense step of each block becomes visible."""
    sizes = ["--layers=1", "--width=64", "--batch=8", "--rows=1000", "--interval-s=0.2", "--rounds=2"]
    figures, exit_code = bench("dense", *sizes, "--intervals=2")
    is_met = figures["dense_step_ratio"] <= 1.01 and figures["dense_visible_extra_p50_s"] <= 0.5
    assert exit_code == (0 if is_met else 1)
    assert len(figures["delays_s"]) == 4 and all(delay > 0 for delay in figures["delays_s"])
    row_ids = 4 + 1 + 4 + 1 + 1 + 1  # a row has up to 1,024 elements
    assert figures["dense_bytes"] == 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 + 1) + 8 * row_ids


@pytest.mark.timeout(400)
@needs_nats_server
def test_replicated(bench: Bench) -> None:
    """Every target has a figure; no lookup fails while shards fail over."""
    figures, exit_code = bench("replicated", "--batches=8", "--lone=4", "--rounds=1", "--failovers=1")
    assert exit_code in (0, 1)
    _assert_positive(figures, "acked_vs_publish", "ack_p50_ms", "publish_p50_ms", "recovery_vs_direct_get")
    assert figures["ack_p50_bound_ms"] == pytest.approx(1.3 * figures["publish_p50_ms"] + 2)
    assert figures["bytes_per_s"].keys() == {"publish", "acked", "applied", "direct_get", "recovery"}
    assert all(len(values) == 1 for values in figures["rounds"].values())
    for name in ("planned", "node", "leader"):
        (took_s,) = figures["failovers_s"][name]
        assert figures[f"failover_{name}_p99_s"] == pytest.approx(took_s)
        assert took_s > 0
    _assert_positive(figures, "step_during_failover_ratio")
    assert figures["num_lookups"] > 100
    assert figures["failed_lookups"] == 0


def test_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has a ratio for each operation, and each figure of a GPU, which is null where there is none."""
    # With a GPU gigabytes would be measured: its sizes do not shrink.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures, _ = bench("kernels", "--small", "--rounds=1")
    assert len(figures["cpu"]["ratios"]) == 12 and min(figures["cpu"]["ratios"].values()) > 0
    assert set(figures["gpu"]) == set(GPU_FIGURES) and not figures["gpu_failures"]
    assert set(figures["gpu"].values()) == {None}


def test_backfill(bench: Bench) -> None:
    """The directory is made, and RocksDB gets the same rows."""
    figures, _ = bench("backfill", "--rows=5000")
    _assert_positive(figures, "offline_vs_rocksdb")
    assert set(figures["peak_rss_bytes"]) == {"1000", "5000"}
    assert set(figures["rows_per_s"]) == {"backfill", "rocksdb"}


@pytest.mark.parametrize("format_name", ["safetensors", "dcp"])
def test_export(bench: Bench, format_name: str) -> None:
    """The snapshot is exported in the format that was asked for, and the disk gets as many bytes."""
    figures, _ = bench("export", "--rows=1000", f"--format={format_name}")
    _assert_positive(figures, "export_vs_disk")
    assert figures["size_bytes"] >= 1000 * 260
    assert set(figures["peak_rss_bytes"]) == {"200", "1000"}


def test_wire(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All contenders run; without gRPC its figures are null, and a line says how to get it."""
    monkeypatch.setattr(wire, "has_grpc", lambda: False)
    figures, _ = bench("wire", "--rounds=1", "--writes=4", "--reads=32", "--idle=40")
    _assert_positive(figures, "ratio_vs_loopback", "ratio_vs_thriftpy2", "ratio_small_vs_thriftpy2")
    assert (figures["ratio_vs_grpc"], figures["ratio_small_vs_grpc"]) == (None, None)
    assert figures["num_idle_connections"] == 40
    assert figures["bytes_per_idle_connection"] is not None
    captured = capsys.readouterr()
    assert GRPC_HINT in captured.err
    assert "ratio_vs_loopback" in captured.out


@pytest.mark.skipif(not has_grpc(), reason="needs grpcio")
def test_grpc_is_a_contender_of_wire() -> None:
    """gRPC takes writes and reads."""
    with wire.wire_pair("grpc") as pair:
        assert pair.write(4)[0] > 0
        assert pair.read(16) > 0


def test_lookup(bench: Bench) -> None:
    """All figures are there, no lookup failed, no row was missing, and updates came."""
    sizes = ["--rows=20000", "--dim=8", "--redis-rows=5000", "--disk-rows=8192", "--lookups=20", "--rounds=1"]
    figures, _ = bench("lookup", *sizes)
    ratios = ("ratio_vs_torch", "swap_p99_ratio", "miss_ratio_vs_rocksdb", "ratio_cpu_vs_torch", "ratio_idle_vs_torch")
    _assert_positive(figures, *ratios, "updates_rows_per_s")
    assert (figures["ratio_vs_redis"] is not None) == has_redis()
    assert figures["failed_lookups"] == figures["missing_ids"] == 0
    assert figures["config"]["num_rows"] == 20_000


def test_ingest(bench: Bench) -> None:
    """All keys are there, and all figures are positive."""
    figures, _ = bench("ingest", "--batches=4", "--rounds=1")
    of_redis = [f"ratio_{name}_vs_redis" for name in ("uniform", "zipf")]
    if not has_redis():
        assert [figures[name] for name in of_redis] == [None, None]
    ratios = [f"ratio_{name}" for name in ("acked_vs_fsync", "uniform_vs_rocksdb", "zipf_vs_rocksdb", "with_snapshot")]
    _assert_positive(figures, *ratios, *(of_redis if has_redis() else []), "worst_loop_pause_ms", "peak_memory_bytes")


def test_recovery(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard whose store is gone recovers all of its log, and the command prints the ratio."""
    figures, _ = bench("recovery", "--rounds=1", "--mebibytes=4")
    assert "ratio_recovery_vs_sustained" in capsys.readouterr().out
    _assert_positive(figures, "ratio_recovery_vs_sustained")
    assert figures["log_bytes"] >= 2 << 20


def test_freshness(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step is seen in the replica, and the exit code tells whether the bound held."""
    sizes = ["--rounds=1", "--steps=20", "--rows=1000", "--rows-per-step=100", "--rows-per-s=10000", "--dim=8"]
    figures, exit_code = bench("freshness", *sizes, "--consistency=step")
    assert exit_code == (0 if figures["p50_vs_floor"] <= 5 else 1)
    assert ("MISSED" in capsys.readouterr().out) == bool(exit_code)
    assert (figures["num_steps"], figures["step_bytes"]) == (20, 100 * 40)
    names = ("p50_ms", "p99_ms", "p50_vs_floor", "floor_p50_ms", "rows_per_s", "update_to_acked_p50_ms")
    _assert_positive(figures, *names)
    assert figures["p50_ms"] <= figures["p99_ms"]
    # Two clocks and two ways: the replica's own histogram, whose buckets are a fifth wide, counts other warm steps,
    # which may be the slow ones of a busy machine.
    assert figures["replica_histogram_p50_ms"] < 10 * figures["p99_ms"] + 50
    assert figures["rows_per_s"] <= 10_500
