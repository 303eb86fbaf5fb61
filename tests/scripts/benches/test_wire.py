"""`headrace bench wire`, with few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.scripts.benches import wire
from headrace.scripts.benches.peers import GRPC_HINT, has_grpc


def test_every_contender_moves_the_same_bytes(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All contenders run; without gRPC its figures are null, and a line says how to get it."""
    monkeypatch.setattr(wire, "has_grpc", lambda: False)
    figures, _ = bench("wire", "--rounds=1", "--writes=4", "--reads=32", "--idle=40")
    for name in ("ratio_vs_loopback", "ratio_vs_thriftpy2", "ratio_small_vs_thriftpy2"):
        assert figures[name] > 0
    assert (figures["ratio_vs_grpc"], figures["ratio_small_vs_grpc"]) == (None, None)
    assert figures["num_idle_connections"] == 40
    assert figures["bytes_per_idle_connection"] is not None
    captured = capsys.readouterr()
    assert GRPC_HINT in captured.err
    assert "ratio_vs_loopback" in captured.out


@pytest.mark.skipif(not has_grpc(), reason="needs grpcio")
def test_grpc_is_a_contender() -> None:
    """gRPC takes writes and reads."""
    with wire.wire_pair("grpc") as pair:
        assert pair.write(4)[0] > 0
        assert pair.read(16) > 0
