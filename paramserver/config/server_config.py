"""What a server can be told: `ShardSettings`, which each shard process gets, and `ServerConfig`, the whole.

`ServerConfig.load` merges flags > environment (`HEADRACE_SERVE_…`) > YAML file > defaults, once, at the start.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.config.settings import REQUIRED, Kind, check, flag_of, merge, setting
from headrace.paramserver.expiry.expiry_policy import ExpiryRules
from headrace.paramserver.rpc.address import is_wildcard, problem_of_host
from headrace.schemas.errors import ConfigError

__all__ = ["DEFAULT_PORT", "ENV_PREFIX", "MAX_SHARDS", "ServerConfig", "ShardSettings"]

DEFAULT_PORT = 7601
# With the command's name in it: a Kubernetes service called `headrace` puts HEADRACE_PORT=tcp://… into every container.
ENV_PREFIX = "HEADRACE_SERVE_"
MAX_SHARDS = 1024
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_MAX_BYTES = 2**50


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """What holds for each shard; a budget is one shard's, so N shards may use N times as much.

    Memory of a shard, at most: `block_cache_bytes` + `memtable_bytes` + 2 × `max_inflight_bytes` (requests, and replies
    on their way) + `max_log_pending_bytes` + `max_backlog_bytes`; some 600 MiB for the process, its idle buffers, the
    log's tail, short requests and clients before their hello (`ServerLimits` counts them); and for each connection
    4 KiB while it is idle, 48 KiB while it is made to wait, 384 KiB while its peer does not read.

    Each field's `help` says what it does and costs, its `kind` the unit; a help page is made of them.
    """

    max_frame_bytes: int = setting(
        64 * _MIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=_GIB,
        help="Longest request or reply. A connection may hold a buffer of this size.",
    )
    max_client_bytes: int = setting(
        256 * _MIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=_MAX_BYTES,
        help="Bytes of requests that one client may have unanswered.",
    )
    max_client_requests: int = setting(
        256,
        kind=Kind.COUNT,
        minimum=1,
        maximum=8192,
        help="Requests that one client may have unanswered.",
    )
    max_connections: int = setting(
        12_000,
        kind=Kind.COUNT,
        minimum=1,
        maximum=1_000_000,
        help="Open connections a shard. An idle one costs a file descriptor and some KiB.",
    )
    max_inflight_bytes: int = setting(
        _GIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=_MAX_BYTES,
        help="Memory a shard for requests of all clients that are read and not answered.",
    )
    idle_timeout_s: float = setting(
        600.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=30 * 86400,
        help="Close a connection that has been without a request this long; 0 never does.",
    )
    max_log_pending_bytes: int = setting(
        256 * _MIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=_MAX_BYTES,
        help="Memory a shard for batches on their way to disk; more are refused as overloaded.",
    )
    max_backlog_bytes: int = setting(
        512 * _MIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=_MAX_BYTES,
        help="Memory a shard for durable rows on their way to the store; acks wait beyond it. More of it writes less.",
    )
    log_segment_bytes: int = setting(
        256 * _MIB,
        kind=Kind.BYTES,
        minimum=_MIB,
        maximum=64 * _GIB,
        help="Size at which the update log begins a new file. Retention removes whole files.",
    )
    log_retention_bytes: int = setting(
        8 * _GIB,
        kind=Kind.BYTES,
        minimum=_MIB,
        maximum=_MAX_BYTES,
        help="Disk a shard for log that is applied already. A follower further behind needs a snapshot.",
    )
    log_retention_s: float = setting(
        7 * 86400.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=10 * 365 * 86400,
        default_text="7d",
        help="Log that is applied and older than this may be removed.",
    )
    log_hold_bytes: int = setting(
        16 * _GIB,
        kind=Kind.BYTES,
        minimum=_MIB,
        maximum=_MAX_BYTES,
        help="Disk a shard for log that a follower or a snapshot needs; beyond it the oldest goes all the same.",
    )
    block_cache_bytes: int = setting(
        0,
        kind=Kind.BYTES,
        minimum=0,
        maximum=_MAX_BYTES,
        default_text="a quarter of the machine's memory, divided by the shards",
        help="Memory a shard for RocksDB's block cache, which point reads live on.",
    )
    memtable_bytes: int = setting(
        192 * _MIB,
        kind=Kind.BYTES,
        minimum=3 * _MIB,
        maximum=64 * _GIB,
        help="Memory a shard for rows not yet in a file of RocksDB's. More of it writes less, and recovers longer.",
    )
    non_finite: str = setting(
        "accept",
        kind=Kind.CHOICE,
        choices=("accept", "reject"),
        help="What becomes of a batch with NaN or Inf. To reject it, every value is looked at.",
    )
    expiry: str | None = setting(
        None,
        kind=Kind.RULES,
        help="Rows that expire, by table: `user.*: ttl_s=30d, interval_s=1h; *: max_rows=1000000`. See docs/expiry.md.",
    )
    expiry_rows_per_s: int = setting(
        100_000,
        kind=Kind.COUNT,
        minimum=0,
        maximum=1_000_000_000,
        help="Rows that expiry looks at in a second. Each costs about 2 µs of a core. 0 sets no bound.",
    )
    drain_s: float = setting(
        10.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=3600,
        help="How long a server that was told to stop goes on answering what it has begun.",
    )

    tls_certificate: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="PEM file with the server's certificate chain; with it, the server speaks only TLS.",
    )
    tls_key: Path | None = setting(None, kind=Kind.PATH, help="PEM file with the certificate's private key.")
    tls_client_authority: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="PEM file with authorities; every client must show a certificate of theirs (mutual TLS).",
    )
    token_file: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="File with the token that clients must show, readable by its owner alone. Also HEADRACE_TOKEN.",
    )
    writer_token_file: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="File with a second token, for trainers and readers: who shows it may not snapshot or expire.",
    )
    reader_token_file: Path | None = setting(
        None, kind=Kind.PATH, help="File with another token, for readers: who shows it may not write."
    )

    @property
    def reject_non_finite(self) -> bool:
        """Whether a batch with NaN or Inf is refused."""
        return self.non_finite == "reject"

    def __post_init__(self) -> None:
        check(self)
        ExpiryRules.parse(self.expiry or "")
        if 0 < self.block_cache_bytes < _MIB:
            raise ConfigError("block_cache_bytes is less than 1MiB; 0 sizes it from the machine")
        ordered = ("max_frame_bytes", "max_client_bytes", "max_inflight_bytes")
        for smaller, larger in (*itertools.pairwise(ordered), ("max_frame_bytes", "max_log_pending_bytes")):
            if getattr(self, smaller) > getattr(self, larger):
                raise ConfigError(f"{larger} is less than {smaller}: no request of the largest size would fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(ShardSettings):
    """Everything that `headrace serve` can be told.

    Each field's `help` says what it does and costs, its `kind` the unit; a help page is made of them.
    """

    data: Path = setting(
        REQUIRED, kind=Kind.PATH, help="Directory of the store: an existing one, or one to be made. Required."
    )
    shards: int | None = setting(
        None,
        kind=Kind.COUNT,
        minimum=1,
        maximum=MAX_SHARDS,
        default_text="what the directory has; 1 in a new one",
        help="Number of shards, fixed when the directory is made. Each is a process with its own budgets.",
    )
    host: str = setting(
        "127.0.0.1", kind=Kind.TEXT, help="Name or address to listen on; `::` is every address, IPv4 and IPv6."
    )
    port: int = setting(
        DEFAULT_PORT,
        kind=Kind.COUNT,
        minimum=0,
        maximum=65535,
        help="Port of shard 0; shard i listens on PORT + i. 0 lets the system choose each.",
    )
    advertise_host: str | None = setting(
        None,
        kind=Kind.TEXT,
        default_text="the host listened on",
        help="Host that clients are told to connect to. Needed with a wildcard host.",
    )
    insecure_bind: bool = setting(
        False,
        kind=Kind.SWITCH,
        help="Listen beyond loopback, though anyone who reaches the port may then read and write.",
    )
    metrics_port: int | None = setting(
        None,
        kind=Kind.COUNT,
        minimum=0,
        maximum=65535,
        help="Port of the status page and of Prometheus' /metrics, one for all shards. Off without it; 0 lets the "
        "system choose.",
    )
    metrics_host: str = setting(
        "127.0.0.1",
        kind=Kind.TEXT,
        help="Address to serve metrics on. They tell names and figures, no rows and no secrets, to anyone who asks.",
    )
    max_quick_deaths: int = setting(
        5,
        kind=Kind.COUNT,
        minimum=1,
        maximum=1000,
        help="Give the server up when a shard process ends this often in a row soon after its start.",
    )
    quick_death_s: float = setting(
        10.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=3600,
        help="How soon after it was ready the end of a shard process is a quick one.",
    )
    hang_timeout_s: float = setting(
        300.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=30 * 86400,
        help="Kill and restart a shard process whose event loop has not run for this long; 0 never does.",
    )
    log_level: str = setting(
        "info", kind=Kind.CHOICE, choices=("debug", "info", "warning", "error"), help="Least level of log lines."
    )
    log_format: str = setting(
        "auto",
        kind=Kind.CHOICE,
        choices=("auto", "text", "json"),
        help="How log lines look: auto is text on a terminal and JSON otherwise.",
    )

    def __post_init__(self) -> None:
        # By name: `super()` without arguments is lost when slots make the class anew.
        ShardSettings.__post_init__(self)
        last_port = self.port + (self.shards or 1) - 1
        if self.port and last_port > 65535:
            raise ConfigError(f"port: shard {(self.shards or 1) - 1} would listen on port {last_port}, above 65535")
        for name in ("host", "advertise_host", "metrics_host"):
            host = getattr(self, name)
            problem = None if host is None else problem_of_host(host)
            if problem:
                raise ConfigError(f"{flag_of(name)} {host}: {problem}")
        if self.advertise_host is None and is_wildcard(self.host):
            raise ConfigError(
                f"host: {self.host} is every address of this machine; say with --advertise-host which name or "
                "address clients shall use"
            )
        if self.advertise_host is not None and is_wildcard(self.advertise_host):
            raise ConfigError(
                f"--advertise-host {self.advertise_host}: to a client that is its own machine; give the name or "
                "address that clients shall use"
            )

    @property
    def client_host(self) -> str:
        """Host by which clients reach this server."""
        return self.advertise_host or self.host

    @classmethod
    def load(cls, *, flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> ServerConfig:
        """Return the configuration that flags, environment and file make together.

        Args:
            flags: Values by field name, None where a flag was not given.
            environ: Environment variables.
            file: YAML file.

        Raises:
            ConfigError: A key is unknown, or a value is missing or wrong.
        """
        return merge(cls, flags=flags, environ=environ, prefix=ENV_PREFIX, file=file)
