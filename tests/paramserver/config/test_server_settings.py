"""Settings of a server, rules between them, and the settings that a shard process gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.config.server_settings import ServerConfig, ShardConfig, ShardSettings
from headrace.paramserver.system.limits import machine_memory_bytes
from headrace.paramserver.system.settings import flag_of, settings_of, show_default
from headrace.schemas.errors import ConfigError

ADDRESSES = (("127.0.0.1", 7601), ("127.0.0.1", 7602))


def _shard(config: ServerConfig) -> ShardConfig:
    return ShardConfig.of_server(config, directory=Path("/d/shard-0001"), shard=1, server_id="id", addresses=ADDRESSES)


def test_loads(tmp_path: Path) -> None:
    """Flags, HEADRACE_SERVE_ variables and a YAML file merge; other variables are ignored."""
    file = tmp_path / "server.yaml"
    file.write_text("shards: 4\nnon_finite: reject\n")
    config = ServerConfig.load(
        flags={"data": "/d", "port": None},
        environ={"HEADRACE_SERVE_PORT": "8000", "HEADRACE_SERVICE_HOST": "10.0.0.1", "HEADRACE_DEBUG": "1"},
        file=file,
    )
    assert config == ServerConfig(data=Path("/d"), shards=4, port=8000, non_finite="reject")
    assert config.reject_non_finite
    assert ServerConfig(data=Path("/d"), host="10.1.1.1").client_host == "10.1.1.1"
    assert ServerConfig(data=Path("/d"), host="0.0.0.0", advertise_host="gate").client_host == "gate"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_frame_bytes": 2**30}, "max_client_bytes is less than max_frame_bytes"),
        ({"max_inflight_bytes": 128 * 2**20}, "max_inflight_bytes is less than max_client_bytes"),
        ({"max_log_pending_bytes": 2**20}, "max_log_pending_bytes is less than max_frame_bytes"),
        ({"port": 65535, "shards": 2}, "port: shard 1 would listen on port 65536, above 65535"),
        ({"host": "0.0.0.0"}, "host: 0.0.0.0 is every address of this machine; say with --advertise-host"),
        ({"host": "::"}, "host: :: is every address"),
        ({"host": "[::1]"}, "--host [::1]: give a host's name or address alone, without brackets, scheme or port"),
        ({"advertise_host": "gate:7601"}, "--advertise-host gate:7601: give a host's name or address alone"),
        ({"advertise_host": "a..b"}, "--advertise-host a..b: this is no name or address of a host"),
        ({"advertise_host": "0.0.0.0"}, "--advertise-host 0.0.0.0: to a client that is its own machine"),
        ({"metrics_host": "gate:7690"}, "--metrics-host gate:7690: give a host's name or address alone"),
        ({"block_cache_bytes": 2**20 - 1}, "block_cache_bytes is less than 1MiB; 0 sizes it from the machine"),
        ({"non_finite": "drop"}, "non_finite: 'drop' is not one of accept, reject"),
    ],
)
def test_contradictions(values: dict[str, Any], problem: str) -> None:
    """Contradictory settings are refused."""
    with pytest.raises(ConfigError) as raised:
        ServerConfig(data=Path("/d"), **values)
    assert str(raised.value).startswith(problem)


def test_shard_config_carries_all_shard_settings() -> None:
    """A shard gets the server's value of each setting, unchanged by JSON; caches a quarter of memory by default."""
    config = ServerConfig(
        data=Path("/d"), max_client_requests=7, drain_s=1.5, block_cache_bytes=12345678, tls_key=Path("/k")
    )
    shard = _shard(config)
    assert ShardConfig.from_json(shard.to_json()) == shard
    assert _shard(ServerConfig(data=Path("/d"))).block_cache_bytes == max(machine_memory_bytes() // 8, 32 * 2**20)
    for field in dataclasses.fields(ShardSettings):
        assert getattr(shard, field.name) == getattr(config, field.name)
    assert (shard.shard, shard.num_shards, shard.addresses) == (1, 2, ADDRESSES)


def test_what_is_done_once_is_done_where_the_first_shard_is_a_standby() -> None:
    """With a replicated log no shard relies on another one of its directory to prune their snapshots."""

    def second_of(**settings: Any) -> ShardConfig:
        config = ServerConfig(data=Path("/d"), **settings)
        places = {"shard": 1, "server_id": "id", "addresses": ADDRESSES, "local_shards": (0, 1)}
        return ShardConfig.of_server(config, directory=Path("/d/shard-0001"), **places)

    assert not second_of().is_first_here
    assert second_of(log="nats://n1").is_first_here


def test_documentation_lists_every_setting() -> None:
    """`docs/operations.md` has a row for each setting, equal to the code."""
    assert {field.name for field, _ in settings_of(ServerConfig)} == {f.name for f in dataclasses.fields(ServerConfig)}
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    for field, known in settings_of(ServerConfig):
        value = ", ".join(known.choices) or known.kind.value
        assert f"| `{flag_of(field.name)}` | {value} | {show_default(field, known)} | {known.help} |" in page
