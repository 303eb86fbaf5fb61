"""Settings of `headrace relay`: every one is a flag and a row of the page, and mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.system.settings import flag_of, settings_of, show_default
from headrace.schemas.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_settings_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    """Flags go before the environment, the environment before the file."""
    (tmp_path / "relay.yaml").write_text("server: file\nport: 1\nmax_lag_s: 1m\ndata: /d\n")
    environ = {"HEADRACE_RELAY_PORT": "2", "HEADRACE_RELAY_NAME": "far"}
    config = RelayConfig.load(flags={"server": "flag"}, environ=environ, file=tmp_path / "relay.yaml")
    assert (config.server, config.port, config.name, config.max_lag_s) == ("flag", 2, "far", 60.0)
    assert config.retention_of(3, server_id="s").directory == Path("/d/shard-0003")


def test_the_server_may_be_the_one_of_all_commands() -> None:
    """HEADRACE_SERVER names what to follow where no setting does; its errors name it."""
    environ = {"HEADRACE_SERVER": "one", "HEADRACE_RELAY_DATA": "/d"}
    assert RelayConfig.load(flags={}, environ=environ).server == "one"
    assert EndpointConfig.load(flags={}, environ={"HEADRACE_SERVER": "one"}).server == "one"
    assert RelayConfig.load(flags={}, environ={**environ, "HEADRACE_RELAY_SERVER": "two"}).server == "two"
    malformed = {**environ, "HEADRACE_SERVER": "x:y"}
    with pytest.raises(ConfigError, match="environment variable HEADRACE_SERVER: 'x:y' is not an address"):
        RelayConfig.load(flags={}, environ=malformed)
    assert RelayConfig.load(flags={"server": "good"}, environ=malformed).server == "good"
    with pytest.raises(ConfigError, match="--server is missing"):
        RelayConfig.load(flags={}, environ={"HEADRACE_RELAY_DATA": "/d"})


def test_documentation_lists_every_setting() -> None:
    """`docs/operations.md` has a row for each setting, or names it among those of the server."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    section = page.partition("## Many replicas: `headrace relay`")[2]
    for field, known in settings_of(RelayConfig):
        value = ", ".join(known.choices) or known.kind.value
        row = f"| `{flag_of(field.name)}` | {value} | {show_default(field, known)} | {known.help} |"
        assert row in page and f"`{flag_of(field.name)}`" in section, field.name
        assert known.help.endswith(".")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "--advertise-host"),
        ({"log_hold_bytes": 1 << 20}, "log_hold_bytes: must hold two files"),
        ({"num_snapshots": 0}, "num-snapshots|num_snapshots"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, object], message: str) -> None:
    """A wrong setting is refused by its name."""
    with pytest.raises(ConfigError, match=message) as caught:
        RelayConfig(**{"server": "h", "data": Path("/d"), **settings})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
