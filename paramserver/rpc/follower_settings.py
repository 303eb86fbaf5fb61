"""Settings of every process that follows a server and answers Thrift clients: a replica or a relay."""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from headrace.paramserver.rpc.address import SERVER_ENV, check_hosts, parse_addresses, server_in
from headrace.paramserver.rpc.security import SERVER_TOKEN_ENV, TOKEN_ENV, Token, client_tls, load_token
from headrace.paramserver.rpc.thrift_settings import ThriftSettings
from headrace.paramserver.system.settings import (
    REQUIRED,
    choice_setting,
    count_setting,
    merge,
    path_setting,
    switch_setting,
    text_setting,
)
from headrace.schemas.errors import ConfigError

__all__ = ["FollowerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerSettings(ThriftSettings):
    """Where a process that serves copies listens, what it logs, and how it reaches the server, or relay, it follows."""

    env_prefix: ClassVar[str]

    host: str = text_setting("127.0.0.1", "Address to listen on.")
    advertise_host: str | None = text_setting(
        None, "Host that clients connect to. Needed with a wildcard host.", default_text="the host listened on"
    )
    insecure_bind: bool = switch_setting(
        False, "Listen beyond loopback, though anyone who reaches the port may then read."
    )
    metrics_port: int | None = count_setting(
        None,
        0,
        65535,
        "Port for plain HTTP: GET /healthz, /readyz and /metrics. 0 lets the system choose.",
        default_text="none",
    )
    log_level: str = choice_setting("info", ("debug", "info", "warning", "error"), "Least level of log lines.")
    log_format: str = choice_setting(
        "auto", ("auto", "text", "json"), "How log lines look: auto is text on a terminal and JSON otherwise."
    )
    server: str = text_setting(
        REQUIRED,
        "Any shard of the server to follow, or several with commas. Also HEADRACE_SERVER. Required.",
        short="-s",
    )
    server_hostname: str | None = text_setting(
        None, "With --server-tls: name that the server's certificate has.", default_text="the host connected to"
    )
    server_tls: bool = switch_setting(False, "Speak TLS to the server; implied by the other --server-tls settings.")
    server_tls_authority: Path | None = path_setting(
        None, "PEM file with the authorities to trust the server by, instead of the system's."
    )
    server_tls_certificate: Path | None = path_setting(
        None, "PEM file with the certificate to show the server, for mutual TLS."
    )
    server_tls_key: Path | None = path_setting(None, "PEM file with that certificate's private key.")
    server_token_file: Path | None = path_setting(
        None, "File with the token to show the server. Also HEADRACE_SERVER_TOKEN, or else HEADRACE_TOKEN."
    )
    insecure_token: bool = switch_setting(
        False, "Show the server the token without TLS beyond loopback too, where others may read it on its way."
    )

    def __post_init__(self) -> None:
        # By name: with slots the class is made anew, and `super()` without arguments fails.
        ThriftSettings.__post_init__(self)
        try:
            parse_addresses(self.server)
        except ConfigError as exc:
            raise ConfigError(f"server: {exc}") from exc
        check_hosts(self.host, self.advertise_host)

    @property
    def client_host(self) -> str:
        """Host by which clients reach this process."""
        return self.advertise_host or self.host

    def server_tls_context(self) -> ssl.SSLContext | None:
        """Return the context for connections to the parameter server; None for plain ones."""
        return client_tls(
            self.server_tls,
            authority=self.server_tls_authority,
            certificate=self.server_tls_certificate,
            key=self.server_tls_key,
        )

    def load_server_token(self, environ: Mapping[str, str]) -> Token | None:
        """Return the token to show the server; None if there is none. Raises as `load_token`."""
        return load_token(
            path=self.server_token_file,
            environ=environ,
            insecure_token=self.insecure_token,
            variables=(SERVER_TOKEN_ENV, TOKEN_ENV),
        )

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any],
        environ: Mapping[str, str],
        file: Path | None = None,
        origins: dict[str, str] | None = None,
        may_lack: bool = False,
    ) -> Self:
        """Return the configuration from flags (None where not given), environment and YAML file.

        `origins` gets where each value is from, but for defaults; `may_lack` is as of `merge`.
        """
        origins = {} if origins is None else origins
        defaults = _default_server(environ, origins)
        return merge(
            cls,
            flags=flags,
            environ=environ,
            prefix=cls.env_prefix,
            file=file,
            defaults=defaults,
            origins=origins,
            may_lack=may_lack,
        )


def _default_server(environ: Mapping[str, str], origins: dict[str, str]) -> dict[str, Callable[[], str]]:
    """Return the default of `server` for `merge`: the address in `HEADRACE_SERVER`, if that is set.

    The function is called only where no source of settings names a server. It puts into `origins` where the address is
    from, and raises ConfigError if it is none.
    """

    def server() -> str:
        address = server_in(environ)
        assert address is not None
        origins["server"] = SERVER_ENV
        return address

    return {"server": server} if environ.get(SERVER_ENV) else {}
