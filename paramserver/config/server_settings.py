"""Settings of a server (`ServerConfig`), those common to its shards (`ShardSettings`), and one shard's (`ShardConfig`).

`ServerConfig.load` merges flags > environment (`HEADRACE_SERVE_…`) > YAML file > defaults, once, at the start.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.expiry.policy import ExpiryRules
from headrace.paramserver.log.opening import check_log_url
from headrace.paramserver.rpc.address import DEFAULT_PORT, check_hosts, format_address, parse_addresses, problem_of_host
from headrace.paramserver.rpc.thrift_settings import ThriftSettings
from headrace.paramserver.system.limits import machine_memory_bytes
from headrace.paramserver.system.object_store import check_object_store_url
from headrace.paramserver.system.settings import (
    REQUIRED,
    Kind,
    choice_setting,
    count_setting,
    merge,
    path_setting,
    seconds_setting,
    setting,
    settings_of,
    size_setting,
    switch_setting,
    text_setting,
)
from headrace.schemas.errors import ConfigError
from headrace.schemas.predecessors import Predecessor

__all__ = ["ENV_PREFIX", "MAX_SHARDS", "ServerConfig", "ShardConfig", "ShardSettings"]

# With the command's name in it: a Kubernetes service called `headrace` puts HEADRACE_PORT=tcp://… into every container.
ENV_PREFIX = "HEADRACE_SERVE_"
MAX_SHARDS = 1024
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_MAX_BYTES = 2**50
_DAY_S = 86400
_MIN_AUTO_CACHE_BYTES = 32 * _MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings(ThriftSettings):
    """Settings of each shard; budgets are per shard, so N shards may use N times as much.

    Memory of a shard, at most: `block_cache_bytes` + `memtable_bytes` + 2 × `max_inflight_bytes` (requests, and
    replies on their way; 3 × if trainers compress) + `max_log_pending_bytes` + `max_backlog_bytes`; about 600 MiB for
    the process, idle buffers, the log's tail, short requests and clients before their hello (see `ServerLimits`); and
    for each connection 4 KiB idle, 48 KiB while it waits for room, 384 KiB while its peer does not read.

    Each field's `help` says what it does and costs, its `kind` the unit; the help page shows both.
    """

    max_log_pending_bytes: int = size_setting(
        256 * _MIB,
        64 * _KIB,
        _MAX_BYTES,
        "Memory a shard for batches on their way to disk; more are refused as overloaded.",
    )
    max_backlog_bytes: int = size_setting(
        512 * _MIB,
        64 * _KIB,
        _MAX_BYTES,
        "Memory a shard for durable rows on their way to the store; acks wait beyond it. More of it writes less.",
    )
    log_segment_bytes: int = size_setting(
        256 * _MIB, _MIB, 64 * _GIB, "Size at which the update log begins a new file. Retention removes whole files."
    )
    log_retention_bytes: int = size_setting(
        8 * _GIB,
        _MIB,
        _MAX_BYTES,
        "Disk a shard for log that is applied already. A follower further behind needs a snapshot.",
    )
    log_retention_s: float = seconds_setting(
        7.0 * _DAY_S,
        0,
        10 * 365 * _DAY_S,
        "Log that is applied and older than this may be removed.",
        default_text="7d",
    )
    log_hold_bytes: int = size_setting(
        16 * _GIB,
        _MIB,
        _MAX_BYTES,
        "Disk a shard for log that a follower or a snapshot needs; beyond it the oldest is removed all the same.",
    )
    disk_reserve_bytes: int = size_setting(
        0,
        0,
        _MAX_BYTES,
        "Disk a shard that updates leave free for compactions and a restart. While less is free, updates are refused, "
        "and reads go on.",
        default_text="128MiB and what a compaction of the store takes: its size, or 1GiB + 8/3 of `max_backlog_bytes`",
    )
    block_cache_bytes: int = size_setting(
        0,
        0,
        _MAX_BYTES,
        "Memory a shard for RocksDB's block cache, which point reads live on.",
        default_text="a quarter of the machine's memory, divided by the shards",
    )
    memtable_bytes: int = size_setting(
        192 * _MIB,
        3 * _MIB,
        64 * _GIB,
        "Memory a shard for rows not yet in a file of RocksDB's. More of it writes less, and recovers longer.",
    )
    non_finite: str = choice_setting(
        "accept",
        ("accept", "reject"),
        "Whether to accept a batch with NaN or Inf. Rejecting them costs a look at every value.",
    )
    expiry: str | None = setting(
        None,
        kind=Kind.RULES,
        help="Rows that expire, by table: `user.*: ttl_s=30d, interval_s=1h; *: max_rows=1000000`. See docs/expiry.md.",
    )
    expiry_rows_per_s: int = count_setting(
        100_000,
        0,
        1_000_000_000,
        "Rows that expiry looks at in a second. Each costs about 2 µs of a core. 0 sets no bound.",
    )

    log: str | None = text_setting(
        None,
        "Where the update log is, if not in the data directory: nats://HOST,HOST,HOST. An ack then means that a "
        "majority of these servers has the update. See docs/replicated-log.md.",
    )

    log_credentials: Path | None = path_setting(None, "NATS credentials file with which to reach `log`.")
    log_tls_authority: Path | None = path_setting(
        None, "PEM file with the authority of the servers' certificates, for `log` over TLS."
    )
    log_tls_certificate: Path | None = path_setting(None, "Our certificate chain for `log`, where it wants one.")
    log_tls_key: Path | None = path_setting(None, "Our certificate's private key.")
    log_max_bytes: int = size_setting(
        0,
        0,
        _MAX_BYTES,
        "Disk a shard, on each of its servers, for `log`; updates wait while it is full. Give it twice what is "
        "written between two snapshots. 0 takes 32GiB, or less: three quarters of what those servers have room for.",
    )
    log_monitor: str | None = text_setting(
        None,
        "URLs, with commas, at which the servers of `log` tell their settings.",
        default_text="http://HOST:8222 of each of its hosts",
    )

    follow: str | None = text_setting(
        None,
        "Be a copy of the server at this address, or any of several with commas: its rows and its log, for readers, "
        "replicas and further followers.",
        default_text="none",
    )

    object_store: str | None = text_setting(
        None,
        "Where snapshots and the archive of the log go: s3://, gs://, az:// or file:/// and a prefix for this server "
        "alone. Credentials come from the environment. See docs/archive.md.",
    )
    object_store_rate: int = size_setting(
        0, 0, _MAX_BYTES, "Bytes a second between each shard and the object store, both ways. 0 sets no bound."
    )

    archive_segment_bytes: int = size_setting(
        64 * _MIB,
        64 * _KIB,
        _GIB,
        "With `object_store`: size at which a part of the update log is archived. A shard may hold four in memory.",
    )
    archive_segment_s: float = seconds_setting(
        10.0, 0.01, _DAY_S, "With `object_store`: how long a record waits at most until its part is archived."
    )
    archive_retention_s: float = seconds_setting(
        7.0 * _DAY_S,
        0,
        10 * 365 * _DAY_S,
        "How far back a shard can be restored to any moment. Older parts are removed once a later snapshot is there; 0 "
        "keeps all.",
        default_text="7d",
    )

    writer_token_file: Path | None = path_setting(
        None,
        "File with a second token, for trainers and readers: a client that shows it may not snapshot or expire. Also "
        "HEADRACE_WRITER_TOKEN.",
    )
    reader_token_file: Path | None = path_setting(
        None,
        "File with another token, for readers: a client that shows it may not write. Also HEADRACE_READER_TOKEN.",
    )

    tls_peer_authority: Path | None = path_setting(
        None,
        "PEM file with the authorities of certificates of other nodes of a cluster, or of the server to follow.",
        default_text="the system's authorities",
    )

    @property
    def reject_non_finite(self) -> bool:
        """Whether a batch with NaN or Inf is refused."""
        return self.non_finite == "reject"

    def __post_init__(self) -> None:
        # By name: with slots the class is made anew, and `super()` without arguments fails.
        ThriftSettings.__post_init__(self)
        ExpiryRules.parse(self.expiry or "")
        if self.object_store is not None:
            check_object_store_url(self.object_store)
        if self.log is not None:
            check_log_url(self.log)
        if self.follow is not None:
            try:
                parse_addresses(self.follow)
            except ConfigError as exc:
                raise ConfigError(f"follow: {exc}") from exc
        if 0 < self.block_cache_bytes < _MIB:
            raise ConfigError("block_cache_bytes is less than 1MiB; 0 sizes it from the machine")
        self._check_order("max_frame_bytes", "max_log_pending_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(ShardSettings):
    """Everything that `headrace serve` can be configured with.

    Each field's `help` says what it does and costs, its `kind` the unit; the help page shows both.
    """

    data: Path = path_setting(REQUIRED, "Directory of the store: an existing one, or one to be made. Required.")
    shards: int | None = count_setting(
        None,
        1,
        MAX_SHARDS,
        "Number of shards, fixed when the directory is made. Each is a process with its own budgets.",
        default_text="what the directory has; 1 in a new one",
    )
    reshard: str | None = text_setting(
        None,
        "Where `data` is missing: build it with `shards` shards from the running server at this address, and take that "
        "server's place. Trainers and replicas go on here.",
        default_text="none",
    )
    standby: bool = switch_setting(
        False,
        "With `log`: open no shard before it has had no owner for some seconds, not even one that this node had last.",
    )
    host: str = text_setting("127.0.0.1", "Name or address to listen on; `::` is every address, IPv4 and IPv6.")
    port: int = count_setting(
        DEFAULT_PORT, 0, 65535, "Port of shard 0; shard i listens on PORT + i. 0 lets the system choose each."
    )
    advertise_host: str | None = text_setting(
        None, "Host that clients connect to. Needed with a wildcard host.", default_text="the host listened on"
    )
    metrics_port: int | None = count_setting(
        None,
        0,
        65535,
        "Port of the status page and of Prometheus' /metrics, one for all shards. Off without it; 0 lets the system "
        "choose.",
    )
    metrics_host: str = text_setting(
        "127.0.0.1",
        "Address to serve metrics on. Anyone who reaches it sees names and figures, but no rows and no secrets.",
    )
    max_quick_deaths: int = count_setting(
        5, 1, 1000, "Give the server up when a shard process ends this often in a row soon after its start."
    )
    quick_death_s: float = seconds_setting(
        10.0, 0, 3600, "How soon after it was ready the end of a shard process is a quick one."
    )
    hang_timeout_s: float = seconds_setting(
        300.0,
        0,
        30 * _DAY_S,
        "Kill and restart a shard process whose event loop has not run for this long; 0 never does.",
    )
    log_level: str = choice_setting("info", ("debug", "info", "warning", "error"), "Least level of log lines.")
    log_format: str = choice_setting(
        "auto", ("auto", "text", "json"), "How log lines look: auto is text on a terminal and JSON otherwise."
    )

    def __post_init__(self) -> None:
        ShardSettings.__post_init__(self)
        last_port = self.port + (self.shards or 1) - 1
        if self.port and last_port > 65535:
            raise ConfigError(f"port: shard {(self.shards or 1) - 1} would listen on port {last_port}, above 65535")
        check_hosts(self.host, self.advertise_host)
        if self.reshard is not None:
            try:
                parse_addresses(self.reshard)
            except ConfigError as exc:
                raise ConfigError(f"reshard: {exc}") from exc
            if self.shards is None:
                raise ConfigError("--reshard: into how many shards? Give --shards")
            if self.follow is not None or self.log is not None:
                raise ConfigError("--reshard: leave out --follow and --log")
        if self.standby and self.log is None:
            raise ConfigError("--standby: there is nothing to follow without a replicated log: --log nats://…")
        if problem := problem_of_host(self.metrics_host):
            raise ConfigError(f"--metrics-host {self.metrics_host}: {problem}")

    @property
    def client_host(self) -> str:
        """Host by which clients reach this server."""
        return self.advertise_host or self.host

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any],
        environ: Mapping[str, str],
        file: Path | None = None,
        defaults: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
        origins: dict[str, str] | None = None,
        may_lack: bool = False,
    ) -> ServerConfig:
        """Return the configuration that flags (None if absent), environment and YAML file make together; see `merge`.

        A cluster file gives `defaults` for what they leave out, and `fixed` values that they may not give. `origins`
        gets where each value is from, but for defaults; `may_lack` is as of `merge`.

        Raises:
            ConfigError: A key is unknown, or a value is missing or wrong.
        """
        return merge(
            cls,
            flags=flags,
            environ=environ,
            prefix=ENV_PREFIX,
            file=file,
            defaults=defaults or {},
            fixed=fixed or {},
            origins=origins,
            may_lack=may_lack,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig(ShardSettings):
    """One shard's settings and its place in the server; the supervisor sends it to the shard process.

    In one made by `of_server`, `block_cache_bytes` is never 0.
    """

    directory: Path  # the shard's own; it exists
    shard: int  # index, 0 to `num_shards` - 1
    server_id: str  # identity of the data directory
    addresses: tuple[tuple[str, int], ...]  # host and port at which clients reach each shard, by index
    nodes: tuple[str, ...] = ()  # name of each shard's node of a cluster; empty if the whole server is on this machine
    local_shards: tuple[int, ...] | None = None  # those of this directory; None for all
    # Shard, host, port and node of each place where a shard with standbys may be. `addresses` has this one's place.
    copies: tuple[tuple[int, str, int, str], ...] = ()
    is_standby: bool = False  # the cluster file gives the shard to another node
    waits: bool = False  # until the shard's owner is silent, though the owner may have been this very place
    predecessors: tuple[Predecessor, ...] = ()  # see `Manifest`

    @property
    def snapshots_path(self) -> Path:
        """Directory of the snapshots: one for all shards of this machine, on the same file system as theirs."""
        return self.directory.parent / "snapshots"

    @property
    def num_shards(self) -> int:
        """Number of shards of the server."""
        return len(self.addresses)

    @property
    def is_whole_here(self) -> bool:
        """Whether all shards of the server are in one directory, copies of other nodes' shards aside."""
        return len(set(self.nodes)) <= 1

    @property
    def node(self) -> str | None:
        """Name of its node; None without a cluster."""
        return self.nodes[self.shard] if self.nodes else None

    @property
    def address(self) -> str:
        """Host and port at which clients reach this shard."""
        return format_address(*self.addresses[self.shard])

    @property
    def other_copies(self) -> tuple[tuple[int, str, int, str], ...]:
        """`copies` without this place."""
        return tuple(place for place in self.copies if place[:3] != (self.shard, *self.addresses[self.shard]))

    def node_at(self, shard: int, host: str, port: int) -> str | None:
        """Return the node that the cluster file has at a shard's address; None if there is none."""
        return next((node for *place, node in self.copies if place == [shard, host, port]), None)

    @property
    def is_first_here(self) -> bool:
        """Whether it does what is done once for all shards of a directory, and may be done by several.

        Each owner of a replicated log does: the first shard here may be a standby, which does nothing.
        """
        return self.log is not None or self.shard == min(self.local_shards or (0,))

    @classmethod
    def of_server(
        cls,
        server: ServerConfig,
        *,
        directory: Path,
        shard: int,
        server_id: str,
        addresses: tuple[tuple[str, int], ...],
        nodes: tuple[str, ...] = (),
        local_shards: tuple[int, ...] | None = None,
        copies: tuple[tuple[int, str, int, str], ...] = (),
        is_standby: bool = False,
        waits: bool = False,
        predecessors: tuple[Predecessor, ...] = (),
    ) -> ShardConfig:
        """Return the configuration of one shard of a server."""
        settings = {field.name: getattr(server, field.name) for field in dataclasses.fields(ShardSettings)}
        if not settings["block_cache_bytes"]:
            share = machine_memory_bytes() // 4 // len(local_shards or addresses)
            settings["block_cache_bytes"] = max(share, _MIN_AUTO_CACHE_BYTES)
        return cls(
            directory=directory,
            shard=shard,
            server_id=server_id,
            addresses=addresses,
            nodes=nodes,
            local_shards=local_shards,
            copies=copies,
            is_standby=is_standby,
            waits=waits,
            predecessors=predecessors,
            **settings,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a form that `json` can write."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ShardConfig:
        """Return the configuration that `to_json` wrote.

        Raises:
            ConfigError: A setting is out of its bounds.
            TypeError: A key is missing or unknown: the supervisor has another version.
        """
        names = ["directory", *(field.name for field, known in settings_of(cls) if known.kind is Kind.PATH)]
        paths = {name: None if values[name] is None else Path(values[name]) for name in names}
        addresses = tuple((str(host), int(port)) for host, port in values["addresses"])
        local = None if values["local_shards"] is None else tuple(values["local_shards"])
        parsed = {"addresses": addresses, "nodes": tuple(values["nodes"]), "local_shards": local}
        parsed["predecessors"] = tuple(map(Predecessor.from_json, values["predecessors"]))
        parsed["copies"] = tuple((int(shard), host, int(port), node) for shard, host, port, node in values["copies"])
        return cls(**{**values, **paths, **parsed})
