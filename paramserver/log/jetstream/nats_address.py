"""Where the replicated log lies, and how we show who we are: `nats://host1,host2,host3`, TLS files, credentials.

Parsed once, at the top. Secrets are read at each connection, so that they can be changed under a running server; they
appear in no message, log line or `repr`.
"""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

import yaml

from headrace.paramserver.rpc.address import Address, format_address, parse_address
from headrace.paramserver.rpc.security import client_tls_context
from headrace.schemas.errors import ConfigError
from headrace.schemas.extras import install_command

__all__ = ["DEFAULT_MONITOR_PORT", "NatsAccess", "NatsLogAddress", "is_nats_url", "subject_of"]

DEFAULT_MONITOR_PORT = 8222
"""Where a NATS server answers questions about itself, unless it is told otherwise."""

_DEFAULT_PORT = 4222
_SCHEMES = ("nats://", "tls://")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REPLICAS = ("1", "3", "5")
_EXAMPLE = "nats://host1,host2,host3"
# As the `nats` command reads them.
_CREDENTIALS_ENV, _USER_ENV, _PASSWORD_ENV, _TOKEN_ENV = "NATS_CREDS", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN"
_NKEY_SEED = re.compile(r"SU[A-Z2-7]{56}")
_OF_FILE = ({"user", "password"}, {"token"})
_KINDS = "a .creds file, an nkey's seed, or the lines `user: …` and `password: …`, or `token: …`"


def is_nats_url(text: str) -> bool:
    """Return whether a `--log` means a replicated log."""
    return text.startswith(_SCHEMES)


def subject_of(stream: str) -> str:
    """Return the subject of a stream's messages: a token of its own in front lets permissions name all of them."""
    return f"headrace.{stream}"  # ON THE WIRE: never rename


@dataclass(frozen=True, kw_only=True, slots=True)
class NatsLogAddress:
    """The servers of the engine, and what a server's streams are called.

    Attributes:
        servers: Host and port of each.
        has_tls: Every connection must be encrypted, and the server's certificate checked.
        prefix: Of the streams' names.
        num_replicas: Servers that hold each record: 3 or 5. 1 replicates nothing, and is for trying out.
    """

    servers: tuple[Address, ...]
    has_tls: bool = False
    prefix: str = "headrace"
    num_replicas: int = 3

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in `nats://host1,host2:4222,host3?prefix=headrace&replicas=3`, or the same with `tls://`.

        Raises:
            ConfigError: It is none; the message says why, and repeats no password.
        """
        if not is_nats_url(text):
            raise ConfigError(f"--log {text}: must be {_EXAMPLE}, or tls:// in its place")
        scheme, _, rest = text.partition("://")
        hosts, _, query = rest.partition("?")
        if "@" in hosts:
            raise ConfigError(
                f"--log {scheme}://…@…: everybody on this machine can read flags; put user and password into a file "
                f"for --log-credentials, or into {_USER_ENV} and {_PASSWORD_ENV}"
            )
        try:
            servers = [parse_address(part, default_port=_DEFAULT_PORT) for part in hosts.rstrip("/").split(",")]
        except ConfigError as exc:
            raise ConfigError(f"--log {text}: {exc}; the form is {_EXAMPLE}") from exc
        if len(set(servers)) < len(servers):
            raise ConfigError(f"--log {text}: names a server twice")
        options = cls._options(text, query)
        return cls(servers=tuple(servers), has_tls=scheme == "tls", **options)

    @staticmethod
    def _options(text: str, query: str) -> dict[str, Any]:
        given = parse_qsl(query, keep_blank_values=True)
        options: dict[str, Any] = {}
        for name, value in given:
            if name in options or name not in {"prefix", "replicas"}:
                raise ConfigError(f"--log {text}: behind the question mark may stand one prefix= and one replicas=")
            options[name] = value
        prefix, replicas = options.get("prefix", "headrace"), options.get("replicas", "3")
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"--log {text}: prefix={prefix} must be 1 to 64 letters, digits, - or _")
        if replicas not in _REPLICAS:
            raise ConfigError(f"--log {text}: replicas={replicas} must be 3 or 5, or 1 to try it out")
        return {"prefix": prefix, "num_replicas": int(replicas)}

    def stream_name(self, server_id: str, shard: int) -> str:
        """Return what a shard's stream is called."""
        return f"{self.prefix}-{server_id}-{shard}"

    def default_monitors(self) -> tuple[str, ...]:
        """Return the URLs at which the servers answer questions, if nobody says otherwise."""
        return tuple(f"http://{format_address(host, DEFAULT_MONITOR_PORT)}" for host, _ in self.servers)

    def __str__(self) -> str:
        scheme = "tls" if self.has_tls else "nats"
        return f"{scheme}://{','.join(format_address(*server) for server in self.servers)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NatsAccess:
    """How to reach the engine and what to show it.

    Attributes:
        address: Its servers.
        credentials: File with a secret that others may not read: a `.creds` file, an nkey's seed, or YAML with `user`
            and `password`, or `token`. None: the environment has it, or there is none.
        tls_authority: PEM file with the authorities of the servers' certificates; None trusts the system's.
        tls_certificate: PEM file with our certificate, where the servers ask for one.
        tls_key: PEM file with its key.
        environ: May have NATS_CREDS (a file), NATS_USER and NATS_PASSWORD, or NATS_TOKEN.
    """

    address: NatsLogAddress
    credentials: Path | None = None
    tls_authority: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        files = (self.tls_authority, self.tls_certificate, self.tls_key)
        if not self.address.has_tls and any(path is not None for path in files):
            raise ConfigError(f"--log {self.address}: TLS files are given, so say tls:// in place of nats://")

    def check(self) -> None:
        """Read all files, and forget them; look whether the client is installed.

        Raises:
            ConfigError: A file is missing, unfit, or others may read a secret; or there is no client.
        """
        if importlib.util.find_spec("nats") is None:
            raise ConfigError(f"--log {self.address}: this needs {install_command('nats')}")
        self.load_options()

    def load_options(self) -> dict[str, Any]:
        """Return the arguments of nats-py's `connect` that say who we are. Blocks for small files.

        Raises:
            ConfigError: See `check`.
        """
        options = self._load_secret()
        if self.address.has_tls:
            options["tls"] = self._tls_context()
        return options

    def _tls_context(self) -> ssl.SSLContext:
        try:
            return client_tls_context(authority=self.tls_authority, certificate=self.tls_certificate, key=self.tls_key)
        except ConfigError as exc:
            raise ConfigError(f"--log: {exc}") from exc

    def _load_secret(self) -> dict[str, Any]:
        if self.credentials is not None:
            return _secret_of_file(self.credentials, f"--log-credentials {self.credentials}")
        if path := self.environ.get(_CREDENTIALS_ENV):
            return _secret_of_file(Path(path), f"{_CREDENTIALS_ENV}={path}")
        user, password = self.environ.get(_USER_ENV), self.environ.get(_PASSWORD_ENV)
        if bool(user) != bool(password):
            raise ConfigError(f"{_USER_ENV} and {_PASSWORD_ENV} go together; only one of them is set")
        if user and password:
            return {"user": user, "password": password}
        token = self.environ.get(_TOKEN_ENV)
        return {"token": token} if token else {}


def _secret_of_file(path: Path, source: str) -> dict[str, Any]:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{source}: others may read it; chmod 600 {path}")
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{source}: {getattr(exc, 'strerror', None) or 'it is no text'}") from exc
    if "BEGIN NATS USER JWT" in text and "BEGIN USER NKEY SEED" in text:
        from nats.aio.client import RawCredentials

        return {"user_credentials": RawCredentials(text + "\n")}
    if _NKEY_SEED.fullmatch(text):
        return {"nkeys_seed_str": text}
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or set(values) not in _OF_FILE or not all(values.values()):
        raise ConfigError(f"{source}: must be {_KINDS}")
    return {name: str(value) for name, value in values.items()}
