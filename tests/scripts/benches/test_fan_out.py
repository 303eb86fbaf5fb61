"""`headrace bench relay`, with few followers and batches: that it measures, not what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from headrace import cli
from headrace.scripts.benches.fan_out import Forwarder


async def test_a_forwarder_counts_what_comes_back() -> None:
    """Bytes go both ways unchanged; those of the target are counted, over all connections."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(3 * await reader.readexactly(100_000))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as target:
        port = target.sockets[0].getsockname()[1]
        forwarder = Forwarder(("127.0.0.1", port))
        async with forwarder.listening("127.0.0.2"):
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.2", port)
                writer.write(b"abcde" * 20_000)
                assert await reader.read(-1) == b"abcde" * 60_000
                writer.close()
    assert forwarder.received_bytes == 600_000


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The relay takes about as much as one follower; no process and no file is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (folder := tmp_path / "files").mkdir()
    path = tmp_path / "figures.json"
    sizes = ["--rounds=1", "--batches=10", "--followers=3", "--lookups=50", "--interval-s=0.01"]
    cli.main(["bench", "relay", *sizes, f"--json={path}", f"--folder={folder}"])
    figures = json.loads(path.read_text())
    assert 0.9 < figures["relay_64_upstream_ratio"] < 1.1
    assert figures["num_hops"] == 10
    assert figures["relay_hop_p50_ms"] <= figures["relay_hop_p99_ms"]
    assert figures["relay_fast_hop_p50_ms"] <= figures["relay_fast_hop_p99_ms"]
    assert "relay_64_upstream_ratio" in capsys.readouterr().out
    assert not list(folder.iterdir())
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
