"""Each wrong setting of a real server is found, and told with what to set."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nats_cluster import SMALL, access_of, nats_cluster, needs_nats_server
from nats_servers import NatsServers

from headrace.paramserver.log.jetstream import engine_checks
from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.engine_checks import check_engine, choose_bound, fit_streams, inspect_engine
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_stream import connect_any, open_engine
from headrace.schemas.errors import ConfigError

pytestmark = needs_nats_server


def _access(servers: NatsServers, num_replicas: int | None = None) -> NatsAccess:
    access = access_of(servers)
    return replace(access, address=replace(access.address, num_replicas=num_replicas or len(servers.servers)))


async def _refusal(access: NatsAccess, monitors: list[str]) -> str:
    """Return why `serve` would refuse; it must be one line that ends with what to do."""
    with pytest.raises(ConfigError) as caught:
        await check_engine(access, monitors=monitors)
    text = str(caught.value)
    assert text.startswith("--log nats://")
    assert "\n" not in text
    return text


def _documented_subjects() -> dict[str, list[str]]:
    """Return what docs/nats.md lets a user with limited permissions publish and subscribe to."""
    page = (Path(__file__).parents[4] / "docs" / "nats.md").read_text("utf-8")
    rows = re.findall(r"^\| (publish|subscribe) \| (.*) \|$", page, re.MULTILINE)
    return {kind: re.findall(r"`([^`]+)`", subjects) for kind, subjects in rows}


async def test_documented_permissions_are_enough(tmp_path: Path) -> None:
    """A user who may do no more than the page says can do all that a log does."""
    allowed = _documented_subjects()
    assert allowed["subscribe"] == ["_INBOX.>"]
    permissions = ", ".join(f"{kind}: {json.dumps(subjects)}" for kind, subjects in allowed.items())
    user = f'authorization {{ users: [ {{ user: "me", password: "right", permissions: {{ {permissions} }} }} ] }}'
    with nats_cluster(tmp_path, num_servers=1, settings=(user,)) as servers:
        access = replace(_access(servers), environ={"NATS_USER": "me", "NATS_PASSWORD": "right"})
        connection = await (await open_engine(access, server_id="s", shard=0, max_bytes=1 << 20)).connect()
        acked: asyncio.Future[PublishReply] = asyncio.get_running_loop().create_future()
        connection.publish([b"a"], expected_last=0, on_reply=acked.set_result)
        assert (await acked).outcome is PublishOutcome.ACKED
        assert (await connection.publish_batch([b"b", b"c"], expected_last=1)).seq == 3
        assert await connection.get(3) is not None
        assert len(await connection.read(1, max_bytes=1 << 20)) == 3
        await connection.purge(2)
        assert (await connection.state()).first_seq == 2
        await connection.close()
        await check_engine(access, monitors=servers.monitors)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("rooms", "num_silent", "num_streams", "wanted", "bound"),
    [
        ([80, 80, 80], 0, 4, 0, 15 * GIB),  # of three quarters of it, each server holds all four
        ([800, 800, 800], 0, 4, 0, 32 * GIB),
        ([80, 80, 8], 0, 1, 0, 6 * GIB),  # the smallest server has to hold one, too
        ([80, 80, 80, 8], 0, 1, 0, 32 * GIB),
        ([80, 80, 80, 80, 80, 80], 0, 4, 0, 30 * GIB),  # two on each
        ([80, 80], 1, 4, 0, 15 * GIB),  # the third one does not say
        ([80, 80], 1, 4, 20 * GIB, 20 * GIB),
        ([80, 80, 80], 0, 4, 20 * GIB, 20 * GIB),
        ([], 3, 4, 0, 32 * GIB),
        ([], 3, 4, 5, 5),
    ],
)
def test_streams_take_what_fits(rooms: list[int], num_silent: int, num_streams: int, wanted: int, bound: int) -> None:
    """By default three quarters of the room are shared by the streams; a given bound is taken while it has a place."""
    named = {f"n{number}": room * GIB for number, room in enumerate(rooms, 1)}
    assert choose_bound(named, num_silent, num_streams=num_streams, num_replicas=3, wanted=wanted) == bound


def test_a_bound_without_room_is_refused_with_one_that_fits() -> None:
    """The message has what would be reserved, what there is, and the flag; the bound that it names is taken."""
    rooms = {"n1": 80 * GIB, "n2": 80 * GIB, "n3": 60 * GIB}
    with pytest.raises(ConfigError) as caught:
        choose_bound(rooms, 0, num_streams=4, num_replicas=3, wanted=32 * GIB)
    assert str(caught.value) == (
        "--log-max-bytes: 32.0 GiB for 4 streams on 3 servers each reserve 384.0 GiB in all, and the servers have too "
        "little left (n1 80.0 GiB, n2 80.0 GiB, n3 60.0 GiB): give --log-max-bytes 15360MiB or less, leave it out for "
        "what fits, or give the servers more disk (max_file)"
    )
    assert choose_bound(rooms, 0, num_streams=4, num_replicas=3, wanted=15 * GIB) == 15 * GIB
    with pytest.raises(ConfigError, match=r"1\.0 MiB for 4 streams .* \(n1 3\.0 MiB\): give the servers more disk"):
        choose_bound({"n1": 3 << 20}, 0, num_streams=4, num_replicas=1, wanted=0)


async def test_streams_fit_the_servers_and_keep_their_bound(tmp_path: Path) -> None:
    """Four streams on servers of 2 GiB are made by default, a fifth takes the same; a bound that cannot be is told."""
    with nats_cluster(tmp_path) as servers:
        access = _access(servers)

        async def fit(num_shards: int, max_bytes: int = 0) -> int:
            how = {"server_id": "s", "num_shards": num_shards, "max_bytes": max_bytes}
            return await fit_streams(access, monitors=servers.monitors, **how)

        with pytest.raises(
            ConfigError, match=r"^--log nats://.*: --log-max-bytes: 1\.0 GiB for 4 streams .* 512MiB or less"
        ):
            await fit(4, GIB)
        bound = await fit(4)
        assert bound == 384 << 20
        for shard in range(4):
            await open_engine(access, server_id="s", shard=shard, max_bytes=bound)
        assert await fit(4) == await fit(5) == bound
        with pytest.raises(ConfigError, match="2 streams"):
            await fit(6)
        with pytest.raises(ConfigError, match=r"reserves 3\.0 GiB on each of 3 servers: lower --log-max-bytes"):
            await open_engine(access, server_id="s", shard=9, max_bytes=3 * GIB)


class TestCheckEngine:
    async def test_fit_engine_passes_until_a_stream_drifts(self, tmp_path: Path) -> None:
        """Three servers that sync are fit, with their streams; one changed stream is named with the change to undo."""
        with nats_cluster(tmp_path) as servers:
            access = _access(servers)
            await open_engine(access, server_id="s", shard=0, max_bytes=1 << 20)
            facts = await inspect_engine(access, monitors=servers.monitors)
            assert (facts.servers, facts.streams, facts.faults) == (("n1", "n2", "n3"), ("headrace-s-0",), ())
            assert re.match(r"2\.\d+\.\d+", facts.version)
            await check_engine(access, monitors=servers.monitors)
            client = await connect_any(access)
            config = (await client.ask("STREAM.INFO", "headrace-s-0"))["config"]
            changed = await client.ask("STREAM.UPDATE", "headrace-s-0", config | {"num_replicas": 1})
            await client.close()
            assert "error" not in changed, changed
            text = await _refusal(access, servers.monitors)
            assert "stream headrace-s-0: num_replicas is 1, must be 3" in text
            assert "jq '.config | .num_replicas = 3'" in text
            # Servers of the cluster that nobody was asked about may be the ones that do not sync.
            text = await _refusal(access, servers.monitors[:2])
            assert "the cluster has n3, whose settings nobody has seen" in text
            assert "--log-monitor" in text

    async def test_lost_server_does_not_keep_shards_from_starting(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """While one server is away the others' word suffices, and is logged; a silent one that lives is refused."""
        with nats_cluster(tmp_path) as servers:
            access, lost = _access(servers), servers.servers[2]
            hidden = [*servers.monitors[:2], "http://127.0.0.1:1"]
            assert "http://127.0.0.1:1 does not answer" in await _refusal(access, hidden)
            lost.kill()
            deadline_s = asyncio.get_running_loop().time() + 60
            while True:
                facts = await inspect_engine(access, monitors=servers.monitors)
                if facts.faults and all(fault.is_away for fault in facts.faults):
                    break
                assert asyncio.get_running_loop().time() < deadline_s, facts.faults
            assert "server n3 is away" in facts.faults[0].text
            await check_engine(access, monitors=servers.monitors)
            assert "server n3 is away" in caplog.text

    async def test_one_server_that_does_not_sync_is_refused(self, tmp_path: Path) -> None:
        """Two of three servers that sync are not enough: each may be the one that has to keep a record."""
        lazy: Callable[[int], Any] = lambda number: SMALL if number != 1 else SMALL[1:]  # noqa: E731
        with nats_cluster(tmp_path, jetstream=lazy) as servers:
            text = await _refusal(_access(servers), servers.monitors)
            assert "server n2 acks before its disk has the message" in text
            assert "set `sync_interval: always`" in text
            assert "n1" not in text

    @pytest.mark.parametrize(
        ("settings", "says", "advice"),
        [
            ({"jetstream": lambda _: None}, "server n1 has no JetStream", "sync_interval: always"),
            ({"settings": ("max_payload: 512KB",)}, "messages of 512.0 KiB", "set `max_payload: 1MB`"),
            ({"num_replicas": 3}, "has 1 of the 3 servers", "lower replicas="),
            ({"min_version": (99, 0)}, "server n1 is nats-server 2.", "update it to 99.0"),
        ],
    )
    async def test_setting_of_a_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str, advice: str
    ) -> None:
        """A server with a wrong setting is refused with the setting."""
        settings = dict(settings)
        monkeypatch.setattr(engine_checks, "MIN_VERSION", settings.pop("min_version", engine_checks.MIN_VERSION))
        num_replicas = settings.pop("num_replicas", 1)
        with nats_cluster(tmp_path, num_servers=1, **settings) as servers:
            text = await _refusal(_access(servers, num_replicas), servers.monitors)
            assert says in text
            assert advice in text

    async def test_server_that_says_nothing_about_itself_is_refused(self, tmp_path: Path) -> None:
        """Without its monitoring nobody knows whether a server syncs; another service on that port is no answer."""
        with nats_cluster(tmp_path, num_servers=1, settings=('authorization { token: "x" }',)) as servers:
            access = replace(_access(servers), environ={"NATS_TOKEN": "x"})
            text = await _refusal(access, ["http://127.0.0.1:1"])
            assert "http://127.0.0.1:1 does not answer (Connection refused)" in text
            assert "http_port: 8222" in text
            client_port = f"http://{servers.servers[0].address}"
            assert f"{client_port} does not answer (this is no monitoring" in await _refusal(access, [client_port])
            assert "refuses our credentials" in await _refusal(_access(servers), servers.monitors)

    async def test_monitor_that_is_no_url(self) -> None:
        """A URL that is none is named with its flag."""
        access = NatsAccess(address=NatsLogAddress.parse("nats://a"))
        for url in ("host1:8222", "ftp://host1", "http://", ""):
            with pytest.raises(ConfigError, match=r"^--log-monitor .*: must be the URL"):
                await check_engine(access, monitors=[url])
