"""Settings of the process `headrace relay`.

`RelayConfig.load` merges flags > environment (`HEADRACE_RELAY_…`) > YAML file > defaults, once, at the start.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from headrace.paramserver.rpc.follower_settings import FollowerSettings
from headrace.paramserver.system.settings import (
    REQUIRED,
    count_setting,
    path_setting,
    seconds_setting,
    size_setting,
    text_setting,
)
from headrace.schemas.errors import ConfigError

__all__ = ["DEFAULT_RELAY_PORT", "ENV_PREFIX", "RelayConfig", "ShardRetention"]

DEFAULT_RELAY_PORT = 7801
ENV_PREFIX = "HEADRACE_RELAY_"
_MIB, _GIB = 2**20, 2**30
_MAX_BYTES = 2**50
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig(FollowerSettings):
    """Everything that `headrace relay` can be configured with.

    Each field's `help` says what it does and costs, its `kind` the unit; the help page shows both.
    """

    env_prefix: ClassVar[str] = ENV_PREFIX

    data: Path = path_setting(
        REQUIRED, "Directory for the mirrored logs and snapshots, for this relay alone. Required."
    )
    port: int = count_setting(
        DEFAULT_RELAY_PORT, 0, 65535, "Port of shard 0; shard i gets the i-th one behind it. 0 lets the system choose."
    )
    max_lag_s: float = seconds_setting(
        30.0,
        0,
        30 * _DAY_S,
        "Not ready while it has not heard from a shard, or lacks a known record, for longer; 0: never.",
    )
    log_segment_bytes: int = size_setting(
        64 * _MIB, _MIB, 64 * _GIB, "Size at which a mirrored log begins a new file. Retention removes whole files."
    )
    log_retention_bytes: int = size_setting(
        8 * _GIB,
        _MIB,
        _MAX_BYTES,
        "Disk a shard for log that nobody needs. A follower further behind needs a snapshot.",
    )
    log_retention_s: float = seconds_setting(
        7.0 * _DAY_S, 0, 10 * 365 * _DAY_S, "Log that is older than this may be removed.", default_text="7d"
    )
    log_hold_bytes: int = size_setting(
        16 * _GIB,
        _MIB,
        _MAX_BYTES,
        "Disk a shard for log that a follower or a snapshot needs; beyond it the oldest is removed all the same.",
    )
    snapshot_interval_s: float = seconds_setting(
        60.0, 1, 30 * _DAY_S, "How often to look for a newer snapshot at the source."
    )
    num_snapshots: int = count_setting(
        2, 1, 1000, "Snapshots to keep. With one, a follower that fetches it begins anew when a newer one has come."
    )
    object_store: str | None = text_setting(
        None,
        "Fetch snapshots from this object store, such as s3://bucket/prefix, instead of from the server.",
        default_text="from the server",
    )
    name: str = text_setting("relay", "Register at the server under this name, so that it keeps log for this relay.")
    lease_s: float = seconds_setting(600.0, 1, _DAY_S, "How long the server keeps that log while the relay is away.")
    start_timeout_s: float = seconds_setting(
        600.0, 0.1, _DAY_S, "The first time, give up after this long without the server."
    )

    def __post_init__(self) -> None:
        # By name: with slots the class is made anew, and `super()` without arguments fails.
        FollowerSettings.__post_init__(self)
        if self.log_hold_bytes < 2 * self.log_segment_bytes:
            raise ConfigError(
                "log_hold_bytes: must hold two files of --log-segment-bytes, or nothing could be followed"
            )

    def retention_of(self, shard: int, *, server_id: str) -> ShardRetention:
        """Return the settings of one shard's retention."""
        return ShardRetention(
            directory=self.data / f"shard-{shard:04d}",
            snapshots_path=self.data / "snapshots",
            server_id=server_id,
            shard=shard,
            log_retention_bytes=self.log_retention_bytes,
            log_retention_s=self.log_retention_s,
            log_hold_bytes=self.log_hold_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRetention:
    """What `LogRetention` keeps of one shard's mirror; the fields are those of `RelayConfig` and `ShardConfig`."""

    directory: Path
    snapshots_path: Path
    server_id: str
    shard: int
    log_retention_bytes: int
    log_retention_s: float
    log_hold_bytes: int

    @property
    def is_first_here(self) -> bool:
        """Whether this shard's retention removes what is left of snapshots, which all shards share."""
        return self.shard == 0
