"""What a replica's process can be told: `EndpointConfig`.

`EndpointConfig.load` merges flags > environment (`HEADRACE_REPLICA_…`) > YAML file > defaults, once, at the start.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.config.server_config import DEFAULT_PORT, ServerConfig, ShardSettings
from headrace.paramserver.config.settings import REQUIRED, Kind, check, merge, setting
from headrace.paramserver.replica.audit import LONGEST_HOLD_S
from headrace.paramserver.replica.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.precision import PRECISIONS
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.security import client_tls_context
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ConfigError

__all__ = ["DEFAULT_REPLICA_PORT", "ENV_PREFIX", "EndpointConfig"]

DEFAULT_REPLICA_PORT = 7701
ENV_PREFIX = "HEADRACE_REPLICA_"
_MAX_BYTES = 2**50
_DAY_S = 86400.0
_SERVED = {field.name: field for field in dataclasses.fields(ServerConfig)}


def _as_served(name: str) -> Any:
    """Return a setting as `headrace serve` has it: the same bounds, default and help."""
    field = _SERVED[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Everything that `headrace replica` can be told.

    Each field's `help` says what it does and costs, its `kind` the unit; a help page is made of them.
    """

    server: str = setting(
        REQUIRED, kind=Kind.TEXT, help="Host and port of any shard of the parameter server to follow. Required."
    )
    host: str = setting("127.0.0.1", kind=Kind.TEXT, help="Address to listen on.")
    port: int = setting(
        DEFAULT_REPLICA_PORT,
        kind=Kind.COUNT,
        minimum=0,
        maximum=65535,
        help="Port for Thrift clients. 0 lets the system choose.",
    )
    advertise_host: str | None = _as_served("advertise_host")
    insecure_bind: bool = setting(
        False, kind=Kind.SWITCH, help="Listen beyond loopback, though anyone who reaches the port may then read."
    )
    health_port: int | None = setting(
        None,
        kind=Kind.COUNT,
        minimum=0,
        maximum=65535,
        default_text="none",
        help="Port for plain HTTP: GET /healthz, /readyz and /metrics. 0 lets the system choose.",
    )
    max_lag_s: float = setting(
        30.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=30 * _DAY_S,
        help="Not ready while an update has been known for longer that is not visible; 0 for any lag.",
    )
    consistency: str = setting(
        "latest",
        kind=Kind.CHOICE,
        choices=("latest", "step"),
        help="`latest` shows each update when it comes, `step` whole steps of all shards and tables.",
    )
    missing: str = setting(
        "zeros",
        kind=Kind.CHOICE,
        choices=("zeros", "error"),
        help="What a look-up of a row that is not there gives: zeros, or an error for the whole request.",
    )
    tables: str | None = setting(
        None,
        kind=Kind.TEXT,
        default_text="all",
        help="Tables to keep, by name, with commas between them.",
    )
    snapshot: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="Directory of a snapshot to begin from; without one, from what the server has.",
    )
    snapshot_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        default_text="a temporary one",
        help="Directory for snapshots that are fetched from the server; the last one stays.",
    )
    name: str | None = setting(
        None,
        kind=Kind.TEXT,
        help="Registers at the server under this name: it keeps log while the replica is away, within its bound.",
    )
    lease_s: float = setting(
        600.0, kind=Kind.SECONDS, minimum=1, maximum=_DAY_S, help="For how long the server keeps it, with --name."
    )
    precision: str | None = setting(
        None,
        kind=Kind.CHOICE,
        choices=PRECISIONS,
        default_text="the table's own",
        help="What rows in memory are kept in; look-ups give the table's type all the same.",
    )
    disk_tables: str | None = setting(
        None,
        kind=Kind.TEXT,
        default_text="none",
        help="Tables that live on disk behind hot rows in memory: names, or patterns such as `user.*`, with commas.",
    )
    disk_table_bytes: int = setting(
        256 * 2**20, kind=Kind.BYTES, minimum=2**20, maximum=_MAX_BYTES, help="Memory for each table on disk."
    )
    disk_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        default_text="a temporary one",
        help="Directory for tables on disk, of this replica alone.",
    )
    max_memory_bytes: int | None = setting(
        None,
        kind=Kind.BYTES,
        minimum=2**20,
        maximum=_MAX_BYTES,
        default_text="what the machine has free",
        help="Memory for tables. While the replica begins anew, the old copy counts too.",
    )
    max_pending_bytes: int = setting(
        256 * 2**20,
        kind=Kind.BYTES,
        minimum=2**20,
        maximum=_MAX_BYTES,
        help="With `step`, memory a shard for steps that are not whole yet. Beyond it the replica begins anew aside.",
    )
    start_timeout_s: float = setting(
        600.0,
        kind=Kind.SECONDS,
        minimum=0.1,
        maximum=_DAY_S,
        help="Give up when the server is not there, or nothing more of the copy comes, for so long.",
    )
    audit_interval_s: float | None = setting(
        None,
        kind=Kind.SECONDS,
        minimum=1,
        maximum=30 * _DAY_S,
        default_text="never",
        help="Compare all rows with the server's so often, by digests: about 1.5 s of a shard's core a million rows.",
    )
    lookup_threads: int = setting(
        4, kind=Kind.COUNT, minimum=1, maximum=256, help="Look-ups that run at the same time; others wait their turn."
    )
    server_hostname: str | None = setting(
        None,
        kind=Kind.TEXT,
        default_text="the host connected to",
        help="With --server-tls: name that the server's certificate has.",
    )
    server_tls: bool = setting(
        False, kind=Kind.SWITCH, help="Speak TLS to the server; implied by the other --server-tls settings."
    )
    server_tls_authority: Path | None = setting(
        None, kind=Kind.PATH, help="PEM file with the authorities to trust the server by, not the system's."
    )
    server_tls_certificate: Path | None = setting(
        None, kind=Kind.PATH, help="PEM file with the certificate that is shown to the server, for mutual TLS."
    )
    server_tls_key: Path | None = setting(None, kind=Kind.PATH, help="PEM file with that certificate's private key.")
    server_token_file: Path | None = setting(
        None, kind=Kind.PATH, help="File with the token that is shown to the server. Also HEADRACE_TOKEN."
    )
    max_frame_bytes: int = _as_served("max_frame_bytes")
    max_client_bytes: int = _as_served("max_client_bytes")
    max_client_requests: int = _as_served("max_client_requests")
    max_connections: int = _as_served("max_connections")
    max_inflight_bytes: int = _as_served("max_inflight_bytes")
    idle_timeout_s: float = _as_served("idle_timeout_s")
    drain_s: float = _as_served("drain_s")
    tls_certificate: Path | None = _as_served("tls_certificate")
    tls_key: Path | None = _as_served("tls_key")
    tls_client_authority: Path | None = _as_served("tls_client_authority")
    token_file: Path | None = _as_served("token_file")
    log_level: str = _as_served("log_level")
    log_format: str = _as_served("log_format")

    def __post_init__(self) -> None:
        """Check what can be checked without touching anything.

        Raises:
            ConfigError: Naming the setting.
        """
        check(self)
        try:
            parse_address(self.server, default_port=DEFAULT_PORT)
        except ConfigError as exc:
            raise ConfigError(f"server: {exc}") from exc
        if self.port and self.port == self.health_port:
            raise ConfigError(f"health_port: {self.port} is the port for Thrift clients too; choose another")
        if self.audit_interval_s is not None and 0 < self.max_lag_s <= LONGEST_HOLD_S:
            raise ConfigError(
                f"max_lag_s: an audit (--audit-interval-s) may hold the replica for {format_seconds(LONGEST_HOLD_S)}, "
                f"which would not be ready then; give it more than that, or 0"
            )
        for name in ("tables", "disk_tables"):
            if not all(_names_in(getattr(self, name))):
                raise ConfigError(f"{name}: {getattr(self, name)!r} has an empty name between its commas")
        self.protection_settings()  # the bounds that go together, and a wildcard host
        ServerConfig(data=Path(), host=self.host, advertise_host=self.advertise_host)

    @property
    def table_names(self) -> frozenset[str] | None:
        """Tables to keep; None for all."""
        return None if self.tables is None else frozenset(_names_in(self.tables))

    @property
    def client_host(self) -> str:
        """Host by which clients reach this replica."""
        return self.advertise_host or self.host

    @property
    def limits(self) -> ServerLimits:
        """Bounds of the Thrift server."""
        return ServerLimits(
            max_frame_bytes=self.max_frame_bytes,
            max_client_bytes=self.max_client_bytes,
            max_client_requests=self.max_client_requests,
            max_inflight_bytes=self.max_inflight_bytes,
            max_connections=self.max_connections,
            idle_timeout_s=self.idle_timeout_s,
        )

    @property
    def replica_config(self) -> ReplicaConfig:
        """What the `EmbeddingReplica` is told."""
        on_disk = DiskStorage(memory_bytes=self.disk_table_bytes)
        return ReplicaConfig(
            consistency=self.consistency,  # type: ignore[arg-type]  # checked against its choices
            missing=self.missing,  # type: ignore[arg-type]
            storage=dict.fromkeys(_names_in(self.disk_tables), on_disk),
            precision=self.precision,  # type: ignore[arg-type]
            disk_dir=self.disk_dir,
            tables=self.table_names,
            name=self.name,
            lease_s=self.lease_s,
            max_memory_bytes=self.max_memory_bytes,
            max_pending_bytes=self.max_pending_bytes,
            snapshot_dir=self.snapshot_dir,
        )

    def protection_settings(self) -> ShardSettings:
        """Return what of these settings protects a server, in the form that `Protection.load` takes."""
        return ShardSettings(
            max_frame_bytes=self.max_frame_bytes,
            max_client_bytes=self.max_client_bytes,
            max_inflight_bytes=self.max_inflight_bytes,
            max_log_pending_bytes=max(self.max_frame_bytes, 2**20),
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            tls_client_authority=self.tls_client_authority,
            token_file=self.token_file,
        )

    def server_tls_context(self) -> ssl.SSLContext | None:
        """Return the context for connections to the parameter server; None for plain ones.

        Raises:
            ConfigError: A file cannot be used.
        """
        files = (self.server_tls_authority, self.server_tls_certificate, self.server_tls_key)
        if not (self.server_tls or any(files)):
            return None
        return client_tls_context(
            authority=self.server_tls_authority, certificate=self.server_tls_certificate, key=self.server_tls_key
        )

    @classmethod
    def load(cls, *, flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> EndpointConfig:
        """Return the configuration that flags, environment and file make together.

        Args:
            flags: Values by field name, None where a flag was not given.
            environ: Environment variables.
            file: YAML file.

        Raises:
            ConfigError: A key is unknown, or a value is missing or wrong.
        """
        return merge(cls, flags=flags, environ=environ, prefix=ENV_PREFIX, file=file)


def _names_in(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]
