"""The process `headrace relay`: what it refuses, what it says, how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path

import pytest
from command_line import CommandLine
from held_ports import hold_ports
from relays import relay_of
from replica_endpoint import get, relay_endpoint
from served_shard import serving
from watched_server import scrape, wait_until

from headrace.paramserver.relay.runner import hellos_behind
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, CorruptionError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def test_status_metrics_and_health_say_how_far_it_is_behind(tmp_path: Path, run: CommandLine) -> None:
    """They agree while the server runs and when it is gone; SIGTERM ends the relay with 0."""
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        relay_endpoint(tmp_path / "relay", server.address, "--max-lag-s=1") as relay,
    ):
        wait_until(lambda: get(relay.health, "/readyz")[0] == 200, "ready")
        shown = run.json("status", "--server", relay.address)
        assert shown["shards"][0]["relay"]["source"] == server.address
        assert all(shard["relay"]["knowledge_age_ms"] < 30_000 for shard in shown["shards"])
        assert "relay of" in run("status", "--server", relay.address)
        followers = run.json("status", "--server", server.address)["followers"]
        assert {(follower["name"], follower["shard"]) for follower in followers} == {("relay", 0), ("relay", 1)}
        assert shown["followers"] == []
        assert any("no snapshot" in problem["text"] for problem in shown["problems"])
        values = scrape(relay.health)
        assert values["headrace_relay_up_to_date"][("shard", "0"),] == 1
        assert values["headrace_relay_snapshot_offered"][()] == 0
        server.stop()
        wait_until(lambda: get(relay.health, "/readyz")[0] == 503, "not ready")
        assert "without word from its shard" in get(relay.health, "/readyz")[1]
        # Not ready because of either shard: the other one may have been heard a moment later.
        wait_until(lambda: scrape(relay.health)["headrace_relay_knowledge_age_seconds"][("shard", "1"),] > 1, "the age")
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(60) == 0


async def test_a_directory_is_one_servers_and_one_relays(tmp_path: Path) -> None:
    """A second relay, another server, and a damaged file are refused, each in one line that says what to do."""
    async with serving(tmp_path / "a") as served:
        address = f"127.0.0.1:{served.port}"
        async with relay_of(address, tmp_path / "relay"):
            with pytest.raises(ConfigError, match="another relay uses this directory"):
                async with relay_of(address, tmp_path / "relay"):
                    pass
    async with serving(tmp_path / "b", server_id="another") as other:
        with pytest.raises(ConfigError, match=r"is a relay of server a-server, and .* is server another"):
            async with relay_of(f"127.0.0.1:{other.port}", tmp_path / "relay"):
                pass
    identity = tmp_path / "relay" / "relay.json"
    for content in ("{", json.dumps({"format": "headrace-relay", "format_version": 9})):
        identity.write_text(content)
        with pytest.raises(CorruptionError, match=r"relay\.json: .*; remove .*, and the relay begins anew"):
            async with relay_of(address, tmp_path / "relay"):
                pass


async def test_a_server_that_never_comes(tmp_path: Path) -> None:
    """The first start gives up after its time."""
    with pytest.raises(UnavailableError, match=r"given up after 0\.5 s \(--start-timeout-s\)"):
        async with relay_of(f"127.0.0.1:{hold_ports()}", tmp_path / "relay", start_timeout_s=0.5):
            pass


@pytest.mark.parametrize("leftover", ["a new folder", "an old folder", "no folder"])
async def test_a_kill_while_a_mirror_is_replaced_leaves_one(tmp_path: Path, leftover: str) -> None:
    """Whichever folders a kill leaves beside `mirror.json`, the relay starts with the named one, and removes others."""
    data = tmp_path / "relay" / "shard-0000"
    async with serving(tmp_path / "shard") as served:
        address = f"127.0.0.1:{served.port}"
        await served.write([1], 1.0)
        async with relay_of(address, tmp_path / "relay") as (_, relay):
            await asyncio.wait_for(relay.mirrors[0].log.wait_durable(2), 60)  # type: ignore[union-attr]
        if leftover == "a new folder":
            (data / "log-0000000002").mkdir()
        elif leftover == "an old folder":
            shutil.copytree(data / "log-0000000001", data / "log-0000000000")
        else:
            shutil.rmtree(data / "log-0000000001")
        await served.write([2], 2.0)
        async with relay_of(address, tmp_path / "relay") as (_, relay):
            log = relay.mirrors[0].log
            assert log is not None
            await asyncio.wait_for(log.wait_durable(3), 60)
            assert [record.seq for record in log.read(1)] == [1, 2, 3]
        assert [path.name for path in data.glob("log-*")] == ["log-0000000001"]


def place_of(shard: int, term: int | None) -> idl.ShardAddress:
    return idl.ShardAddress(shard=shard, host="127.0.0.1", port=1 + shard, term=term)


def test_what_is_known_of_a_shard_before_it_was_heard() -> None:
    """A relay knows the highest term that a shard has told of itself or of another one."""
    terms: dict[int, int | None] = {0: 5, 1: 2}
    places = [place_of(shard, term) for shard, term in terms.items()]
    hello = idl.HelloReply(
        protocol_version=PROTOCOL_VERSION,
        server_id="a-server",
        shard=0,
        shards=places,
        limits=idl.Limits(max_frame_bytes=1, max_inflight_bytes=1, max_inflight_requests=1),
        highest_epoch=0,
        last_client_seq=0,
        tables=[],
        term=5,
    )
    first = hellos_behind(hello, [])
    assert [(each.shard, each.term) for each in first] == [(0, 5), (1, 2)]
    first[1].term = 7  # what it said itself
    later = hellos_behind(idl.HelloReply(**{**vars(hello), "term": 6}), first)
    assert [(each.shard, each.term) for each in later] == [(0, 6), (1, 7)]
