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


@pytest.mark.timeout(400)
def test_follow(bench: Bench) -> None:
    """A follower, promotions and builds are measured."""
    figures, exit_code = bench("follow", "--batches=8", "--promotions=1", "--rounds=1")
    assert exit_code in (0, 1)
    _assert_positive(figures, "acked_with_follower_ratio", "promote_pause_p99_s", "reshard_pause_p99_s")
    _assert_positive(figures, "build_vs_scan_and_load")
    assert figures["follower_lag_p99_ms"] >= figures["follower_lag_p50_ms"] >= 0


@pytest.mark.timeout(400)
@needs_nats_server
def test_replicated(bench: Bench) -> None:
    """Shard and bare loops send and read the same messages through three servers."""
    figures, exit_code = bench("replicated", "--batches=8", "--lone=4", "--rounds=1")
    assert exit_code in (0, 1)
    _assert_positive(figures, "acked_vs_publish", "ack_p50_ms", "publish_p50_ms", "recovery_vs_direct_get")
    assert figures["ack_p50_bound_ms"] == pytest.approx(1.3 * figures["publish_p50_ms"] + 2)
    assert all(len(values) == 1 for values in figures["rounds"].values())


def test_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has a ratio for each operation, and each figure of a GPU, which is null where there is none."""
    # With a GPU gigabytes would be measured: its sizes do not shrink.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures, exit_code = bench("kernels", "--rounds=1", "--part=kernels")
    assert (exit_code, figures["cpu"], figures["num_gpu_failures"]) == (0, {}, 0)
    assert set(figures["gpu"]) == set(GPU_FIGURES) and set(figures["gpu"].values()) == {None}


def test_wire(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All contenders run; without gRPC its figures are null, and a line says how to get it."""
    monkeypatch.setattr(wire, "has_grpc", lambda: False)
    figures, _ = bench("wire", "--rounds=1", "--writes=4", "--reads=32")
    _assert_positive(figures, "ratio_vs_loopback", "ratio_vs_thriftpy2", "ratio_small_vs_thriftpy2")
    assert (figures["ratio_vs_grpc"], figures["ratio_small_vs_grpc"]) == (None, None)
    captured = capsys.readouterr()
    assert GRPC_HINT in captured.err
    assert "ratio_vs_loopback" in captured.out


@pytest.mark.skipif(not has_grpc(), reason="needs grpcio")
def test_grpc_is_a_contender_of_wire() -> None:
    """gRPC takes writes and reads."""
    with wire.wire_client("grpc") as client:
        for call, num_calls in (("write", 4), ("read", 16)):
            assert client.ask(call=call, num_calls=num_calls)["seconds"] > 0


def test_lookup(bench: Bench) -> None:
    """All figures are there; a lookup that fails or misses a row would end the bench."""
    figures, _ = bench("lookup", "--rows=20000", "--dim=8", "--lookups=20", "--rounds=1")
    _assert_positive(figures, "ratio_vs_torch", "swap_p99_ratio", "p99_before_ms")
    assert (figures["ratio_vs_redis"] is not None) == has_redis()
    assert figures["options"]["num_rows"] == 20_000


def test_ingest(bench: Bench) -> None:
    """All figures are positive; a shard whose store is gone recovers all of its log."""
    figures, _ = bench("ingest", "--batches=4", "--rounds=1")
    of_redis = [f"ratio_{name}_vs_redis" for name in ("uniform", "zipf")]
    if not has_redis():
        assert [figures[name] for name in of_redis] == [None, None]
    names = ("acked_vs_fsync", "uniform_vs_rocksdb", "zipf_vs_rocksdb", "recovery_vs_sustained")
    ratios = [f"ratio_{name}" for name in names]
    _assert_positive(figures, *ratios, *(of_redis if has_redis() else []), "worst_loop_pause_ms", "peak_memory_bytes")


def test_freshness(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step is seen in the replica, and the exit code tells whether the bound held."""
    figures, exit_code = bench("freshness", "--rounds=1", "--steps=20")
    assert exit_code == (0 if figures["p50_vs_floor"] <= 5 else 1)
    assert ("MISSED" in capsys.readouterr().out) == bool(exit_code)
    assert figures["num_steps"] == 20
    _assert_positive(figures, "p50_ms", "p99_ms", "floor_p50_ms", "rows_per_s")
    assert figures["p50_ms"] <= figures["p99_ms"]
    assert figures["rows_per_s"] <= 105_000
