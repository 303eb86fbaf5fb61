from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.scripts.benches import bench_wire

SMALL = ["--rounds", "1", "--writes", "4", "--reads", "32", "--idle", "40"]


def test_every_contender_moves_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs all of them in processes of their own, and its JSON has every ratio."""
    file = tmp_path / "wire.json"
    assert main(["bench", "wire", *SMALL, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    for name in ("ratio_vs_loopback", "ratio_vs_thriftpy2", "ratio_small_vs_thriftpy2"):
        assert figures[name] > 0
    assert figures["num_idle_connections"] == 40
    assert figures["bytes_per_idle_connection"] is not None
    assert figures["machine"]["cores"] >= 1
    assert "ratio_vs_loopback" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without gRPC its figures are null, and one line says how to get it."""
    monkeypatch.setattr(bench_wire, "has_grpc", lambda: False)
    file = tmp_path / "wire.json"
    assert main(["bench", "wire", *SMALL, "--json", str(file)]) == 0
    assert bench_wire.GRPC_HINT in capsys.readouterr().err
    figures = json.loads(file.read_text())
    assert (figures["ratio_vs_grpc"], figures["ratio_small_vs_grpc"]) == (None, None)
    assert figures["ratio_vs_loopback"] > 0
