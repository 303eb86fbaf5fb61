"""Streams of shards: how they are made, and each way in which an existing one is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from nats_cluster import access_of, nats_cluster, needs_nats_server

from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_stream import StreamConfig, connect_any, find_drift, open_engine
from headrace.schemas.errors import ConfigError, UnavailableError

pytestmark = needs_nats_server
MAX_BYTES = 4 << 20
_shards = itertools.count()


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsAccess]:
    """One server, which is enough for configurations."""
    with nats_cluster(tmp_path_factory.mktemp("nats"), num_servers=1) as servers:
        of_cluster = access_of(servers)
        yield replace(of_cluster, address=replace(of_cluster.address, num_replicas=1))


async def test_stream_is_made_once_and_found_again(access: NatsAccess) -> None:
    """A new stream begins where its log does; opening it again changes nothing."""
    shard = next(_shards)
    for first_seq in (1000, 1):
        engine = await open_engine(access, server_id="s", shard=shard, max_bytes=MAX_BYTES, first_seq=first_seq)
        connection = await engine.connect()
        state = await connection.state()
        await connection.close()
        assert (state.first_seq, state.last_seq, state.max_bytes) == (1000, 999, MAX_BYTES)
        assert engine.stream == f"headrace-s-{shard}"


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        ({"storage": "memory"}, "storage", "cannot be changed"),
        ({"retention": "interest"}, "retention", "cannot be changed"),
        ({"discard": "old"}, "discard", '.discard = "new"'),
        ({"max_age": 10**12}, "max_age", ".max_age = 0"),
        ({"max_msgs": 1000}, "max_msgs", ".max_msgs = -1"),
        ({"max_msgs_per_subject": 1000}, "max_msgs_per_subject", ".max_msgs_per_subject = -1"),
        ({"max_msg_size": 1000}, "max_msg_size", ".max_msg_size = -1"),
        ({"max_bytes": MAX_BYTES - 1}, "max_bytes", f".max_bytes = {MAX_BYTES}"),
        ({"deny_delete": False}, "deny_delete", ".deny_delete = true"),
        ({"deny_purge": True}, "deny_purge", "cannot be changed"),
        ({"allow_atomic": False}, "allow_atomic", ".allow_atomic = true"),
        ({"allow_direct": False}, "allow_direct", ".allow_direct = true"),
        ({"allow_rollup_hdrs": True}, "allow_rollup_hdrs", ".allow_rollup_hdrs = false"),
        ({"allow_msg_ttl": True}, "allow_msg_ttl", "cannot be changed"),
        ({"subjects": ["a-*.x"]}, "subjects", ".subjects = "),
        ({"sources": [{"name": "other"}]}, "sources", "del(.sources)"),
        ({"subject_transform": {"src": ">", "dest": "x.>"}}, "subject_transform", "del(.subject_transform)"),
    ],
)
async def test_drift_is_refused(access: NatsAccess, changes: dict[str, Any], field: str, advice: str) -> None:
    """A stream that differs in one field is refused with the field, both values, and what to do."""
    shard = next(_shards)
    name = access.address.stream_name("s", shard)
    order = StreamConfig(name=name, num_replicas=1, max_bytes=MAX_BYTES).order() | changes
    client = await connect_any(access)
    try:
        answer = await client.ask("STREAM.CREATE", name, order)
    finally:
        await client.close()
    assert "error" not in answer, answer
    with pytest.raises(ConfigError) as caught:
        await open_engine(access, server_id="s", shard=shard, max_bytes=MAX_BYTES)
    text = str(caught.value)
    assert f"stream {name}: {field} is " in text
    assert advice in text
    assert "\n" not in text


def test_drift_of_what_one_server_cannot_have() -> None:
    """Replicas, a mirror and lazy persistence are found too; a larger bound and other fields are the operator's."""
    config = StreamConfig(name="n", num_replicas=3, max_bytes=MAX_BYTES)
    good = config.order()
    assert list(find_drift(config, good)) == []
    assert list(find_drift(config, {**good, "max_bytes": MAX_BYTES * 2, "compression": "s2", "placement": {}})) == []
    for changes in (
        {"num_replicas": 1},
        {"mirror": {"name": "x"}},
        {"persist_mode": "async"},
        {"max_bytes": -1},
        {"sealed": True, "deny_purge": True},
    ):
        (drift,) = find_drift(config, {**good, **changes})
        assert changes[drift.field] == drift.value


async def test_engine_without_room_refuses_the_stream(access: NatsAccess) -> None:
    """A bound beyond the servers' room is a mistake in settings, told with the server's words."""
    with pytest.raises(ConfigError, match=r"refuses stream headrace-s-\d+: .*(storage|resources)"):
        await open_engine(access, server_id="s", shard=next(_shards), max_bytes=1 << 40)


@pytest.mark.parametrize(
    ("reasons", "is_made"), [("peer offline", True), ("peer offline, insufficient storage", False)]
)
async def test_stream_is_made_once_servers_are_online(
    access: NatsAccess, monkeypatch: pytest.MonkeyPatch, reasons: str, is_made: bool
) -> None:
    """Where there is no place only because servers are offline, it is tried again; other reasons are mistakes."""
    refusals = [{"code": 400, "err_code": 10005, "description": f"no suitable peers for placement, {reasons}"}]
    ask = NatsClient.ask

    async def ask_or_refuse(client: NatsClient, what: str, *args: Any, **options: Any) -> Any:
        if what == "STREAM.CREATE" and refusals:
            return {"error": refusals.pop()}
        return await ask(client, what, *args, **options)

    monkeypatch.setattr(NatsClient, "ask", ask_or_refuse)
    opening = open_engine(access, server_id="s", shard=next(_shards), max_bytes=MAX_BYTES)
    if is_made:
        await opening
    else:
        with pytest.raises(ConfigError, match=reasons):
            await opening
    assert refusals == []


async def test_engine_that_is_away_is_unavailable(access: NatsAccess) -> None:
    """Without a server nothing is known, and the attempt may be repeated."""
    away = replace(access, address=replace(access.address, servers=(("127.0.0.1", 1),)))
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await open_engine(away, server_id="s", shard=0, max_bytes=MAX_BYTES, timeout_s=0)


@pytest.mark.parametrize("settings", [{"name": "a.b"}, {"name": ""}, {"max_bytes": 1000}])
def test_bounds_of_a_stream(settings: dict[str, Any]) -> None:
    """A name that is a subject with dots, and a bound without room for a record, are refused."""
    with pytest.raises(ConfigError):
        StreamConfig(**{"name": "a", "num_replicas": 3, "max_bytes": MAX_BYTES, **settings})
