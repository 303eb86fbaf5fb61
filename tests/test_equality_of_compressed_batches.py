"""Rows that go out compressed: store and log have the trainer's bits, and the statistics say what was saved."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.stats import StreamerStats

pytest.importorskip("zstandard", reason="needs the extra zstd")


def trained(address: str, **settings: Any) -> StreamerStats:
    """Train and stream a model whose rows are audited in the end; return the statistics."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"t": nn.EmbeddingBag(20_000, 16, mode="sum")})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with RawEmbeddingStreamer(address, run="run", freshness_s=0, max_cost_percent=100, **settings) as streamer:
        streamer.attach(net, optimizer, publish="all")
        for _ in range(5):
            optimizer.zero_grad()
            net["t"](torch.randint(20_000, (200, 9))).square().sum().backward()
            optimizer.step()
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal
        return streamer.stats()


def test_rows_are_the_trainers(tmp_path: Path) -> None:
    """Every bit arrives, over several shards and in messages of several kinds, in fewer bytes."""
    with ServerProcess.start(tmp_path, shards=2) as server:
        stats = trained(server.address, compression="zstd", message_bytes="256KiB")
    # All rows once, with their states, most of which are zeros; only the five steps' marks and few rows follow.
    assert stats.plain_bytes > 20_000 * (8 + 3 * 64)
    assert stats.packed_bytes < 0.7 * stats.plain_bytes


def test_a_server_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets the rows as they are, and the trainer says so in one line."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zstandard'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with ServerProcess.start(tmp_path / "server", shards=2) as server, caplog.at_level(logging.WARNING):
        stats = trained(server.address, compression="zstd")
    assert (stats.plain_bytes, stats.packed_bytes) == (0, 0)
    (line,) = [record.message for record in caplog.records if "compression" in record.message]
    assert line.startswith("compression 'zstd' is not known by every shard")
