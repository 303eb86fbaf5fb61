"""The supervisor, with fake shard processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fact_log import FactLog, collect_facts
from waiting import WAIT_S

from headrace.paramserver.config.cluster_file import ClusterFile
from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.rpc.address import bind_listeners
from headrace.paramserver.shard.child import ShardChild
from headrace.paramserver.shard.supervisor import Supervisor
from headrace.paramserver.system.durable import ReadyFile

FAKE = Path(__file__).parents[2] / "support" / "fake_shard_process.py"


@pytest.fixture
async def facts() -> AsyncIterator[FactLog]:
    with contextlib.contextmanager(collect_facts)("headrace.paramserver.shard.supervisor") as log:
        yield log


@contextlib.asynccontextmanager
async def _running(
    tmp_path: Path,
    *behaviour: str,
    num_shards: int = 2,
    program: Sequence[str] = (sys.executable, str(FAKE)),
    of_cluster: bool = False,
    **settings: object,
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    """Run a supervisor of fake shards; at the end check that it leaves no process behind."""
    place: dict[str, Any] = {}
    if of_cluster:
        nodes = {"a": {"host": "127.0.0.1", "shards": [0, 1]}}
        values = {"server_id": str(uuid.uuid4()), "shards": 2, "log": "nats://n", "nodes": nodes}
        (tmp_path / "cluster.yaml").write_text(json.dumps(values))
        cluster = ClusterFile.load(tmp_path / "cluster.yaml")
        place, settings = {"cluster": cluster, "node": cluster.node("a")}, {"log": "nats://n", **settings}
    config = ServerConfig(data=tmp_path / "data", **{"drain_s": 20.0, **settings})  # type: ignore[arg-type]
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # of other tests' libraries
    with (
        DataDir.claim(config.data, num_shards=num_shards) as data_dir,
        bind_listeners(config.host, 0, num_shards) as sockets,
    ):
        data_dir.prepare()
        ready, command = ReadyFile(tmp_path / "ready.json"), (*program, *behaviour)
        supervisor = Supervisor(config, data_dir, sockets, ready_file=ready, command=command, **place)
        running = asyncio.create_task(supervisor.run())
        try:
            yield supervisor, running
        finally:
            running.cancel()
            await asyncio.wait((running,))
            assert {process.pid for process in psutil.Process().children(recursive=True)} <= others


async def _pid_at(address: str) -> int:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return int(line)


async def test_serves_and_drains(tmp_path: Path, facts: FactLog) -> None:
    """Each shard answers at the address in the ready file, and SIGTERM ends the server with 0."""
    async with _running(tmp_path, "serve") as (supervisor, running):
        ready = await facts.next("server is ready")
        ready_file = json.loads((tmp_path / "ready.json").read_text())
        assert ready_file["address"] == ready["address"] == supervisor.address
        assert ready_file["pid"] == os.getpid()
        for shard in ready_file["shards"]:
            assert await _pid_at(shard["address"]) == shard["pid"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
        assert not (tmp_path / "ready.json").exists()
        host, _, port = supervisor.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=10)


async def test_restarts_a_killed_shard_on_the_same_port(tmp_path: Path, facts: FactLog) -> None:
    """A killed shard is replaced; a connection made meanwhile waits and is answered."""
    async with _running(tmp_path, "serve"):
        await facts.next("server is ready")
        shard = json.loads((tmp_path / "ready.json").read_text())["shards"][1]
        os.kill(shard["pid"], signal.SIGKILL)
        died = await facts.next("shard has died and is restarted")
        assert died == {"shard": 1, "ended_by": "killed by SIGKILL", "pause_s": 0.1}
        # Nobody serves the port now.
        assert await _pid_at(shard["address"]) not in (shard["pid"], 0)
        again = await facts.next("shard is ready again")
        assert (again["shard"], again["address"]) == (1, shard["address"])
        assert facts.messages().count("server is ready") == 1


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the process ids of shards that may count as hanging: others may not run for long either, if busy."""
    pids: set[int] = set()
    nudge = ShardChild.nudge
    monkeypatch.setattr(ShardChild, "nudge", lambda child: nudge(child) or child.pid not in pids)
    return pids


async def test_kills_and_restarts_a_shard_that_hangs(tmp_path: Path, facts: FactLog, hung: set[int]) -> None:
    """A shard that does not run is killed after its timeout and replaced; the other continues."""
    async with _running(tmp_path, "serve", hang_timeout_s=0.5):
        await facts.next("server is ready")
        other, shard = json.loads((tmp_path / "ready.json").read_text())["shards"]
        hung.add(shard["pid"])
        os.kill(shard["pid"], signal.SIGSTOP)
        killed = await facts.next("shard hangs and is killed")
        assert killed == {"shard": 1, "pid": shard["pid"], "after_s": 0.5}
        died = await facts.next("shard has died and is restarted")
        assert died["ended_by"] == "killed by SIGKILL"
        assert died["error"] == "it hung: its event loop had not run for 0.5 s"
        assert (await facts.next("shard is ready again"))["shard"] == 1
        assert await _pid_at(shard["address"]) not in (shard["pid"], 0)
        assert await _pid_at(other["address"]) == other["pid"]


async def test_a_shard_that_hangs_while_it_drains(
    tmp_path: Path, facts: FactLog, hung: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draining shard has only the drain's deadline, and is not restarted."""
    monkeypatch.setattr("headrace.paramserver.shard.supervisor._CLOSE_GRACE_S", 0.5)
    async with _running(tmp_path, "stubborn", num_shards=1, hang_timeout_s=0.05, drain_s=0.0) as (supervisor, running):
        await facts.next("server is ready")
        pid = await _pid_at(supervisor.address)
        hung.add(pid)
        os.kill(pid, signal.SIGSTOP)
        supervisor.stop()
        await facts.next("shard has not drained in time and is killed")
        assert await running == 1
        assert "shard hangs and is killed" not in facts.messages()


async def test_gives_up(tmp_path: Path, facts: FactLog) -> None:
    """After too many quick deaths, with growing pauses, the server ends with 1 and the last error."""
    async with _running(tmp_path, "broken", num_shards=1, max_quick_deaths=4) as (_, running):
        pauses = [(await facts.next("shard has died and is restarted"))["pause_s"] for _ in range(3)]
        assert pauses == [0.1, 0.2, 0.4]
        last = await facts.next("shard keeps dying; the server gives up")
        assert last == {"shard": 0, "ended_by": "exit code 1", "error": "the wheel is stuck", "quick_deaths": 4}
        assert await running == 1


async def test_a_shard_without_room_is_started_again(
    tmp_path: Path, facts: FactLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard whose disk is full is started until it has room, however often, and the log says so once."""
    monkeypatch.setattr("headrace.paramserver.shard.supervisor._LONGEST_PAUSE_S", 0.0)
    (path := tmp_path / "full").write_text("x\nx\nx\nx")
    message = "shard's disk is full; the shard is started again until there is room, and the other shards go on"
    async with _running(tmp_path, "full", str(path), max_quick_deaths=2) as (supervisor, running):
        full = await facts.next(message)
        assert (full["shard"], full["error"], full["pause_s"]) == (0, "no room", 0.0)
        assert (await facts.next("server is ready"))["shards"] == 2
        assert facts.messages().count(message) == 1
        supervisor.stop()
        assert await running == 0


async def test_does_not_count_slow_deaths(tmp_path: Path, facts: FactLog) -> None:
    """A shard that lived long enough is always restarted."""
    async with _running(tmp_path, "serve", num_shards=1, max_quick_deaths=2, quick_death_s=0.0) as (supervisor, _):
        await facts.next("server is ready")
        for _ in range(3):
            os.kill(await _pid_at(supervisor.address), signal.SIGKILL)
            assert (await facts.next("shard has died and is restarted"))["pause_s"] == 0.1
            await facts.next("shard is ready again")


_STORAGE = ("storage", "shard's storage has failed; it stops, and the other shards go on", "log record 7 is rotten")
_FENCED = ("fenced", "shard steps down; the other shards go on", "another process has the log")


@pytest.mark.parametrize(
    ("behaviour", "message", "error", "exit_code"), [(*_STORAGE, 3), (*_FENCED, 0)], ids=["storage", "fenced"]
)
async def test_storage_error_stops_its_shard_alone(
    tmp_path: Path, facts: FactLog, behaviour: str, message: str, error: str, exit_code: int
) -> None:
    """A shard whose storage has failed, or whose log was taken over, is not restarted and refuses clients.

    The others serve, and the server's exit code at the end says so.
    """
    async with _running(tmp_path, behaviour, "1") as (supervisor, running):
        stopped = await facts.next(message)
        assert (stopped["shard"], stopped["error"]) == (1, error)
        assert await _pid_at(supervisor.address) == supervisor._children[0].pid
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*supervisor._addresses[1])
        assert "shard has died and is restarted" not in facts.messages()
        supervisor.stop()
        assert await running == exit_code


@pytest.mark.parametrize(("behaviour", "exit_code"), [("storage", 3), ("fenced", 4)])
async def test_server_ends_with_its_last_shard(tmp_path: Path, facts: FactLog, behaviour: str, exit_code: int) -> None:
    """When the storage of all shards has failed, or all have stepped down, the server ends with the code of that."""
    async with _running(tmp_path, behaviour, "0") as (_, running):
        assert await running == exit_code


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ((sys.executable, str(FAKE), "babble"), "not a report of a shard process: b'hello\\n'"),
        (("/absent",), "the process cannot be started: No such file or directory"),
    ],
    ids=["babbles", "absent"],
)
async def test_what_is_no_shard_process_counts_as_dead(
    tmp_path: Path, facts: FactLog, program: tuple[str, ...], error: str
) -> None:
    """A child that reports nonsense is killed; a program that is not there cannot start."""
    async with _running(tmp_path, num_shards=1, max_quick_deaths=2, program=program) as (_, running):
        assert (await facts.next("shard keeps dying; the server gives up"))["error"] == error
        assert await running == 1


async def test_second_signal_kills(tmp_path: Path, facts: FactLog) -> None:
    """The second SIGINT does not wait for the drain."""
    async with _running(tmp_path, "stubborn", drain_s=3600.0) as (_, running):
        await facts.next("server is ready")
        os.kill(os.getpid(), signal.SIGINT)
        await facts.next("server stops")
        assert not running.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 130


async def test_children_share_the_lock(tmp_path: Path, facts: FactLog) -> None:
    """The directory stays locked until the last shard process is gone, even without the supervisor's descriptor."""
    from headrace.schemas.errors import ConfigError

    async with _running(tmp_path, "serve", num_shards=1) as (supervisor, running):
        await facts.next("server is ready")
        supervisor._data_dir.close()
        with pytest.raises(ConfigError, match="in use by another server"):
            DataDir.claim(tmp_path / "data", num_shards=None)
        supervisor.stop()
        assert await running == 0
        DataDir.claim(tmp_path / "data", num_shards=None).close()


async def test_shard_that_was_taken_over_becomes_a_standby(tmp_path: Path, facts: FactLog) -> None:
    """In a cluster it is started again, and waits; one without a place, or with a copy elsewhere, steps down."""
    async with _running(tmp_path, "taken", str(tmp_path / "waited"), of_cluster=True) as (supervisor, running):
        became = await facts.next("shard was taken over; it becomes a standby")
        assert became["error"] == "another process has the log"
        await facts.next("shard stands by")
        assert (tmp_path / "waited").exists()
        supervisor.stop()
        assert await running == 0
    async with _running(tmp_path, "left", "") as (supervisor, running):  # on one machine
        await facts.next("shard steps down; the other shards go on")
        supervisor.stop()
        assert await running == 0
    async with _running(tmp_path, "fenced", "1", of_cluster=True) as (supervisor, running):
        await facts.next("shard steps down; the other shards go on")
        supervisor.stop()
        assert await running == 0


async def test_cancelled(tmp_path: Path, facts: FactLog) -> None:
    """A cancelled supervisor leaves no process, which `_running` checks."""
    async with _running(tmp_path, "stubborn"):
        await facts.next("server is ready")
