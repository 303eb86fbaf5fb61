"""Addresses of a replicated log, and the secrets that are shown to it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress, is_nats_url
from headrace.schemas.errors import ConfigError
from headrace.schemas.extras import install_command

ADDRESS = NatsLogAddress.parse("nats://a,b,c")
SEED = "SU" + "A" * 56


def test_parse_gives_servers_and_options() -> None:
    """Hosts are separated by commas; ports, prefix and replicas have defaults."""
    address = NatsLogAddress.parse("nats://host1,[::1]:4333,10.0.0.3")
    assert address.servers == (("host1", 4222), ("::1", 4333), ("10.0.0.3", 4222))
    assert (address.has_tls, address.prefix, address.num_replicas) == (False, "headrace", 3)
    assert str(address) == "nats://host1:4222,[::1]:4333,10.0.0.3:4222"
    other = NatsLogAddress.parse("tls://a:1?prefix=ads_1&replicas=5")
    assert (other.has_tls, other.prefix, other.num_replicas) == (True, "ads_1", 5)
    assert other.stream_name("f3", 7) == "ads_1-f3-7"
    assert address.default_monitors()[:2] == ("http://host1:8222", "http://[::1]:8222")


def test_nats_urls_are_told_from_others() -> None:
    """A replicated log's address begins with its scheme."""
    assert [is_nats_url(text) for text in ("nats://a", "tls://a", "file", "a,b")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host1,host2", "must be nats://host1"),
        ("http://host1", "must be nats://host1"),
        ("nats://", "is not an address"),
        ("nats://a,,b", "is not an address"),
        ("nats://a:99999", "ports end at 65535"),
        ("nats://a,b,a:4222", "names a server twice"),
        ("nats://me:secret@a", "everybody on this machine can read flags"),
        ("nats://a?replicas=2", "replicas=2 must be 3 or 5"),
        ("nats://a?replicas=", "replicas= must be 3 or 5"),
        ("nats://a?prefix=a.b", "prefix=a.b must be"),
        ("nats://a?prefix=", "prefix= must be"),
        ("nats://a?stream=x", "one prefix= and one replicas="),
        ("nats://a?prefix=a&prefix=b", "one prefix= and one replicas="),
    ],
)
def test_each_mistake_is_one_clear_line(text: str, says: str) -> None:
    """A wrong address is refused with what is wrong; a password in it is not repeated."""
    with pytest.raises(ConfigError) as caught:
        NatsLogAddress.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def _file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


CREDS = "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\nSU\n"


def test_kinds_of_secrets_are_told_apart(tmp_path: Path) -> None:
    """A file may hold an nkey's seed, user and password, a token, or a JWT and a seed."""
    for text, options in (
        (f"{SEED}\n", {"nkeys_seed_str": SEED}),
        ("user: me\npassword: pass word\n", {"user": "me", "password": "pass word"}),
        ("token: 12345\n", {"token": "12345"}),
        (CREDS, {"user_credentials": CREDS}),
    ):
        found = NatsAccess(address=ADDRESS, credentials=_file(tmp_path, text)).load_options()
        assert {name: str(value) for name, value in found.items()} == options


def test_environment_may_have_the_secret(tmp_path: Path) -> None:
    """The variables are those of the `nats` command; a file of --log-credentials goes before; `repr` shows none."""
    path = _file(tmp_path, "token: one")
    environs: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {}),
        ({"NATS_USER": "me", "NATS_PASSWORD": "secret"}, {"user": "me", "password": "secret"}),
        ({"NATS_TOKEN": "secret"}, {"token": "secret"}),
        ({"NATS_CREDS": str(path)}, {"token": "one"}),
    ]
    for environ, options in environs:
        access = NatsAccess(address=ADDRESS, environ=environ)
        assert access.load_options() == options
        assert "environ" not in repr(access)
    access = NatsAccess(address=ADDRESS, credentials=path, environ={"NATS_CREDS": "/nowhere"})
    assert access.load_options() == {"token": "one"}


@pytest.mark.parametrize("text", ["", "hello", "user: me", "token: ", "user: me\ntoken: x", "a: [", "- token"])
def test_file_without_a_secret_is_refused(tmp_path: Path, text: str) -> None:
    """What is no secret is refused with the kinds that there are, and not repeated."""
    with pytest.raises(ConfigError, match=r"--log-credentials .*: must be a \.creds file") as caught:
        NatsAccess(address=ADDRESS, credentials=_file(tmp_path, text)).load_options()
    assert "hello" not in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """A missing file, one that others may read, and half of user and password are refused."""
    with pytest.raises(ConfigError, match="No such file"):
        NatsAccess(address=ADDRESS, credentials=tmp_path / "none").load_options()
    with pytest.raises(ConfigError, match="chmod 600"):
        NatsAccess(address=ADDRESS, credentials=_file(tmp_path, "token: x", 0o644)).load_options()
    with pytest.raises(ConfigError, match="go together"):
        NatsAccess(address=ADDRESS, environ={"NATS_USER": "me"}).load_options()
    with pytest.raises(ConfigError, match="say tls://"):
        NatsAccess(address=ADDRESS, tls_authority=tmp_path / "ca.pem")
    encrypted = NatsLogAddress.parse("tls://a")
    with pytest.raises(ConfigError, match=r"--log: TLS authority .*No such file"):
        NatsAccess(address=encrypted, tls_authority=tmp_path / "ca.pem").load_options()


def test_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nats-py the message says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("nats"))):
        NatsAccess(address=ADDRESS).check()
