"""Settings of the process `headrace replica`.

`EndpointConfig.load` merges flags > environment (`HEADRACE_REPLICA_…`) > YAML file > defaults, once, at the start.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.replica.api.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.copy.audit import LONGEST_HOLD_S
from headrace.paramserver.replica.tables.slot_rows import PRECISIONS
from headrace.paramserver.rpc.address import SERVER_ENV, check_hosts, parse_addresses, server_in
from headrace.paramserver.rpc.security import SERVER_TOKEN_ENV, TOKEN_ENV, Token, client_tls, load_token
from headrace.paramserver.rpc.thrift_settings import ThriftSettings
from headrace.paramserver.system.settings import (
    REQUIRED,
    choice_setting,
    count_setting,
    merge,
    path_setting,
    seconds_setting,
    size_setting,
    switch_setting,
    text_setting,
)
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import ConfigError

__all__ = ["DEFAULT_REPLICA_PORT", "ENV_PREFIX", "EndpointConfig"]

DEFAULT_REPLICA_PORT = 7701
ENV_PREFIX = "HEADRACE_REPLICA_"
_MIB = 2**20
_MAX_BYTES = 2**50
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig(ThriftSettings):
    """Everything that `headrace replica` can be configured with.

    Each field's `help` says what it does and costs, its `kind` the unit; the help page shows both.
    """

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
    port: int = count_setting(DEFAULT_REPLICA_PORT, 0, 65535, "Port for Thrift clients. 0 lets the system choose.")
    max_lag_s: float = seconds_setting(
        30.0, 0, 30 * _DAY_S, "Not ready while a known update has not become visible for longer; 0 allows any lag."
    )
    consistency: str = choice_setting(
        "latest",
        ("latest", "step"),
        "`latest` shows each update when it arrives, `step` whole steps of all shards and tables.",
    )
    missing: str = choice_setting(
        "zeros", ("zeros", "error"), "What a lookup of a missing row returns: zeros, or an error for the whole request."
    )
    model: str | None = text_setting(
        None, "Model whose tables to keep; with `step`, one is needed if there are several.", default_text="all"
    )
    tables: str | None = text_setting(
        None, "Tables to keep: names, or patterns such as `user.*`, separated by commas.", default_text="all"
    )
    snapshot: Path | None = path_setting(
        None, "Directory of a snapshot to start from; without one, start from what the server has."
    )
    snapshot_dir: Path | None = path_setting(
        None,
        "Directory for snapshots that are fetched; the last one stays.",
        default_text="a temporary one",
    )
    object_store: str | None = text_setting(
        None, "Start from the newest snapshot in the server's object store, at this URL, and not from the shards."
    )
    name: str | None = text_setting(
        None, "Register at the server under this name, so that it keeps log while the replica is away, up to its limit."
    )
    lease_s: float = seconds_setting(600.0, 1, _DAY_S, "How long the server keeps that log, with --name.")
    precision: str | None = choice_setting(
        None,
        PRECISIONS,
        "How rows in memory are kept, which needs torch; lookups return the table's type in any case.",
        default_text="the table's own",
    )
    disk_tables: str | None = text_setting(
        None,
        "Tables on disk, behind hot rows in memory: names, or patterns such as `user.*`, separated by commas.",
        default_text="none",
    )
    disk_table_bytes: int = size_setting(256 * _MIB, _MIB, _MAX_BYTES, "Memory for each table on disk.")
    disk_dir: Path | None = path_setting(
        None, "Directory for tables on disk, for this replica alone.", default_text="a temporary one"
    )
    max_memory_bytes: int | None = size_setting(
        None,
        _MIB,
        _MAX_BYTES,
        "Memory for tables. While the replica builds a new copy, the old one counts too.",
        default_text="what the machine has free",
    )
    build_percent: int = count_setting(
        50, 1, 100, "Percent of one core for building a new copy while the present one answers look-ups."
    )
    max_pending_bytes: int = size_setting(
        256 * _MIB,
        _MIB,
        _MAX_BYTES,
        "With `step`, memory a shard for incomplete steps. Beyond it the replica builds a new copy aside.",
    )
    start_timeout_s: float = seconds_setting(
        600.0, 0.1, _DAY_S, "Give up after this long without the server, or without progress of the copy."
    )
    audit_interval_s: float | None = seconds_setting(
        None,
        1,
        30 * _DAY_S,
        "Compare all rows with the server's this often, by digests: about 1.5 s of a shard's core a million rows.",
        default_text="never",
    )
    lookup_threads: int = count_setting(4, 1, 256, "Lookups that run at the same time; others wait their turn.")

    def __post_init__(self) -> None:
        # By name: with slots the class is made anew, and `super()` without arguments fails.
        ThriftSettings.__post_init__(self)
        try:
            parse_addresses(self.server)
        except ConfigError as exc:
            raise ConfigError(f"server: {exc}") from exc
        check_hosts(self.host, self.advertise_host)
        if self.port and self.port == self.metrics_port:
            raise ConfigError(f"metrics_port: {self.port} is the port for Thrift clients too; choose another")
        if self.audit_interval_s is not None and 0 < self.max_lag_s <= LONGEST_HOLD_S:
            raise ConfigError(
                f"max_lag_s: an audit (--audit-interval-s) may pause the replica for {format_seconds(LONGEST_HOLD_S)}, "
                f"which would not be ready then; give it more than that, or 0"
            )
        for name in ("tables", "disk_tables"):
            if not all(_names_in(getattr(self, name))):
                raise ConfigError(f"{name}: {getattr(self, name)!r} has an empty name between its commas")

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
            prefix=ENV_PREFIX,
            file=file,
            defaults=defaults,
            origins=origins,
            may_lack=may_lack,
        )

    @property
    def replica_config(self) -> ReplicaConfig:
        """Settings of the `ArrayReplica`."""
        on_disk = DiskStorage(memory_bytes=self.disk_table_bytes)
        return ReplicaConfig(
            consistency=self.consistency,  # type: ignore[arg-type]  # `check` knows the choices
            missing=self.missing,  # type: ignore[arg-type]
            storage=dict.fromkeys(_names_in(self.disk_tables), on_disk),
            precision=self.precision,  # type: ignore[arg-type]
            disk_dir=self.disk_dir,
            model=self.model,
            tables=None if self.tables is None else frozenset(_names_in(self.tables)),
            name=self.name,
            lease_s=self.lease_s,
            max_memory_bytes=self.max_memory_bytes,
            build_percent=self.build_percent,
            max_pending_bytes=self.max_pending_bytes,
            snapshot_dir=self.snapshot_dir,
            object_store=self.object_store,
        )


def _names_in(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]


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
