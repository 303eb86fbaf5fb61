"""`headrace serve --metrics-port`: one port for all shards."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from metric_samples import SAMPLE, state
from watched_server import get, get_json, say_hello, scrape, wait_until, watched_server

from headrace.cli import main
from headrace.paramserver.observe import monitor
from headrace.paramserver.observe.monitor import History, ServerMonitor
from headrace.paramserver.observe.sample import ShardSample, ShardState, send_samples
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="user.weight", num_rows=100, dim=4, dtype=DType.FLOAT32, states=())
TOKEN = "a-token-that-nobody-may-see"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    folder = tmp_path_factory.mktemp("metrics")
    with watched_server(folder / "data", shards=2) as (running, address):
        asyncio.run(say_hello(running.address, [SPEC]))
        yield running, address


def test_one_page_has_all_shards(server: tuple[ServerProcess, str]) -> None:
    """One page has the figures of both shards; a scraper that asks for OpenMetrics gets it."""
    _, headers, body = get(server[1], "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text") and body.endswith("# EOF\n")
    values = scrape(server[1])
    assert values["headrace_shard_up"] == {(("shard", "0"),): 1, (("shard", "1"),): 1}
    assert values["headrace_log_seq"] == {(("shard", "0"),): 1, (("shard", "1"),): 1}
    assert values["headrace_table_rows"].keys() == {
        (("shard", shard), ("table", "user.weight")) for shard in ("0", "1")
    }
    assert values["headrace_log_fsync_seconds_count"][("shard", "0"),] >= 1


def test_status_document(server: tuple[ServerProcess, str]) -> None:
    """The status page's JSON has shards, tables, writers and problems, and the history grows."""
    status = get_json(server[1], "/status.json")
    assert [shard["pid"] for shard in status["shards"]] == server[0].shard_pids
    assert [table["fqn"] for table in status["tables"]] == ["user.weight"]
    assert status["writers"][0]["client"] == "rank0"
    of_machine = ("paused for", "of its disk is free")
    assert [p["text"] for p in status["problems"] if not any(words in p["text"] for words in of_machine)] == []
    # Points at which no shard answered have no shards.
    history: dict[str, Any] = {}

    def has_shards() -> bool:
        history.update(get_json(server[1], "/history.json"))
        return any(point["shards"] for point in history["points"])

    wait_until(has_shards, "a point with shards")
    shards = next(point["shards"] for point in history["points"] if point["shards"])
    assert len(shards[0]) == len(history["columns"])


def test_restart_of_a_shard_is_counted(server: tuple[ServerProcess, str]) -> None:
    """A killed shard is down until it is back; its restart is counted, and the other shard stays up."""
    running, address = server
    before = scrape(address)["headrace_shard_restarts_total"][("shard", "1"),]
    os.kill(running.shard_pids[1], signal.SIGKILL)

    def is_back() -> bool:
        values = scrape(address)
        assert values["headrace_shard_up"][("shard", "0"),] == 1
        restarts = values["headrace_shard_restarts_total"][("shard", "1"),]
        return restarts == before + 1 and values["headrace_shard_up"][("shard", "1"),] == 1

    wait_until(is_back, "the shard")
    assert any("was restarted" in problem["text"] for problem in get_json(address, "/status.json")["problems"])


def test_shard_that_hangs(server: tuple[ServerProcess, str]) -> None:
    """A shard that hangs is down, and up again when it continues."""
    running, address = server
    hanging = psutil.Process(running.shard_pids[0])
    hanging.suspend()
    try:
        values = scrape(address)
        assert values["headrace_shard_up"] == {(("shard", "0"),): 0, (("shard", "1"),): 1}
        (problem, *_) = get_json(address, "/status.json")["problems"]
        assert problem["severity"] == "critical"
        assert "shard 0 does not answer" in problem["text"]
    finally:
        hanging.resume()
    wait_until(lambda: scrape(address)["headrace_shard_up"][("shard", "0"),] == 1, "the shard")


def test_no_token_on_any_page(tmp_path: Path) -> None:
    """No page and no log line contains the token."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    with watched_server(tmp_path / "data", token_file=file, log_level="debug") as (running, address):
        assert main(["status", "--server", running.address, "--token-file", str(file)]) == 0
        assert main(["status", "--server", running.address]) == 1  # refused, and logged
        for path in ("/", "/status.js", "/status.json", "/history.json", "/metrics"):
            assert TOKEN not in get(address, path)[2]
        assert TOKEN not in running.log_path.read_text()


def test_port_that_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A port in use is one line that names the flag; nothing is written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--data", str(tmp_path / "data"), "--port", "0", "--metrics-port", str(port)]) == 1
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert f"--metrics-port: port {port} of 127.0.0.1, which the metrics page would take, is in use" in line
    assert not (tmp_path / "data" / "headrace.json").exists()


async def test_history_grows_without_a_shard() -> None:
    """The history takes points on its own, even while a shard has no process; an older death is no reason for that."""
    has_points = asyncio.Event()
    num_points = 0

    def clock_s() -> float:  # called once for each point
        nonlocal num_points
        num_points += 1
        if num_points >= 3:
            has_points.set()
        return float(num_points)

    async def sample() -> ShardSample:
        return SAMPLE

    monitor = ServerMonitor(socket.create_server(("127.0.0.1", 0)), interval_s=0.001, clock_s=clock_s)

    async with asyncio.timeout(60), monitor.serve({0: "127.0.0.1:1", 1: "127.0.0.1:2"}):
        monitor.note_died(0, "its disk was full")
        assert (await monitor.states())[0].error == "its process is not running: its disk was full"
        async with monitor.sampling(0) as theirs, send_samples(theirs.dup(), sample):
            states = await monitor.states()
            assert [state.sample for state in states] == [SAMPLE, None]
            assert states[1].error == "its process is not running"
            await has_points.wait()
        states = await monitor.states()
        assert [state.sample for state in states] == [None, None]
        assert states[0].error == "its process is not running"


def test_history_is_bounded() -> None:
    """The newest point replaces the oldest; delays of all shards are added."""
    history = History(num_points=3)
    both = [ShardState(shard=shard, address="x", sample=SAMPLE) for shard in range(2)]
    for time_s in range(5):
        history.add(both, time_s)
    points = history.to_json()["points"]
    assert [point["time_s"] for point in points] == [2, 3, 4]
    assert points[0]["delay_counts"] == [6, 0, 4]
    assert history.to_json(newest_only=True)["points"] == points[-1:]
    history.add([ShardState(shard=0, address="x", error="gone")], 9)
    assert history.to_json(newest_only=True)["points"] == [{"time_s": 9, "shards": [], "delay_counts": []}]


def test_a_page_shows_one_state_of_a_shard() -> None:
    """That of its owner, wherever it is; else of a standby that answers, or of anything."""
    standby = state()
    assert standby.sample is not None and standby.sample.following is not None
    owner = dataclasses.replace(standby, sample=dataclasses.replace(standby.sample, following=None))
    away = ShardState(shard=0, address="x", error="away")
    other = state(shard=1)
    for states in itertools.permutations((owner, standby, away, other)):
        assert monitor._one_a_shard(states) == [owner, other]
    assert monitor._one_a_shard((away, standby)) == monitor._one_a_shard((standby, away)) == [standby]
    assert monitor._one_a_shard((away,)) == [away]
