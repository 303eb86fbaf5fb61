"""Settings of `headrace relay`: every one is a flag and a row of the page, and mistakes are one line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.rpc.security import Protection
from headrace.paramserver.system.settings import flag_of, settings_of, show_default
from headrace.schemas.errors import ConfigError, UnauthorizedError
from headrace.schemas.idl import idl

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


@pytest.mark.parametrize("settings", [RelayConfig, EndpointConfig])
def test_what_the_server_is_shown_may_differ_from_what_clients_show(
    settings: type[RelayConfig | EndpointConfig], tmp_path: Path
) -> None:
    """HEADRACE_TOKEN is for both, unless a file or HEADRACE_SERVER_TOKEN has another one for the server."""
    clients, server, filed = "the-token-of-clients", "the-token-for-the-server", "the-token-of-a-file"
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(filed)
    both, one = {"HEADRACE_TOKEN": clients, "HEADRACE_SERVER_TOKEN": server}, {"HEADRACE_TOKEN": clients}
    for flags, environ, shown in (({}, one, clients), ({}, both, server), ({"server_token_file": file}, both, filed)):
        own = {"data": Path("/d")} if settings is RelayConfig else {}
        config = settings.load(flags={"server": "one", **own, **flags}, environ={})
        token = config.load_server_token(environ)
        assert token is not None and token.matches(shown)
        Protection.load(config, environ).access.check_hello(idl.Role.READER, clients)
        with pytest.raises(UnauthorizedError):
            Protection.load(config, environ).access.check_hello(idl.Role.READER, server)


def test_the_server_is_shown_the_token_over_tls_alone_unless_told_otherwise() -> None:
    """`--insecure-token` is for those who follow a server without TLS on another machine."""
    for insecure_token in (True, False):
        config = RelayConfig(server="one", data=Path("/d"), insecure_token=insecure_token)
        token = config.load_server_token({"HEADRACE_TOKEN": "a-token-of-some-length"})
        assert token is not None
        with contextlib.nullcontext() if insecure_token else pytest.raises(UnauthorizedError, match="--insecure-token"):
            token.reveal("one:7601", is_private=False)


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
