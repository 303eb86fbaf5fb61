"""What a streamer can be told: `StreamerConfig`.

`StreamerConfig.load` merges keyword arguments > environment (`HEADRACE_STREAMER_…`) > YAML file > defaults, once.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.config.settings import Kind, check, merge, setting
from headrace.schemas.errors import ConfigError

__all__ = ["ENV_PREFIX", "StreamerConfig"]

ENV_PREFIX = "HEADRACE_STREAMER_"
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_MAX_BYTES = 2**50
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamerConfig:
    """Settings of one trainer process.

    Memory, at most: one bit a row of each streamed table, 2 × `staging_bytes`, and some KiB a message in flight. Of a
    table with virtual ids, up to 16 bytes for each row that has changed and not been sent. For rows that were evicted
    and not used since, up to 32 bytes each. With `device_pipeline` 2 × `staging_bytes` of pinned memory more, and as
    much on the device. Disk: nothing, or `spool_bytes` under the policy `spool`.

    Each field's `help` says what it does and costs, its `kind` the unit.
    """

    staging_bytes: int = setting(
        64 * _MIB,
        kind=Kind.BYTES,
        minimum=64 * _KIB,
        maximum=64 * _GIB,
        help="Size of each of the two staging buffers. What is dirty beyond it goes out over several steps; a larger "
        "buffer makes one step longer.",
    )
    bitmap_bytes: int = setting(
        256 * _MIB,
        kind=Kind.BYTES,
        minimum=0,
        maximum=64 * _GIB,
        help="Largest bitmap of changed rows, one bit a row, that a table has from the start. Of longer tables, and of "
        "those with virtual ids, the ids of changed rows are kept instead, 8 to 16 bytes each, as long as that takes "
        "less than the bitmap.",
    )
    message_bytes: int = setting(
        4 * _MIB,
        kind=Kind.BYTES,
        minimum=4 * _KIB,
        maximum=_GIB,
        help="Longest message, as far as a single row fits. Shorter ones cost more round trips, longer ones latency.",
    )
    window_bytes: int = setting(
        32 * _MIB,
        kind=Kind.BYTES,
        minimum=4 * _KIB,
        maximum=64 * _GIB,
        help="Bytes sent to one shard and not acked yet, within what the shard allows.",
    )
    window_messages: int = setting(
        64,
        kind=Kind.COUNT,
        minimum=1,
        maximum=100_000,
        help="Messages sent to one shard and not acked yet, within what the shard allows.",
    )
    flush_interval_s: float = setting(
        0.0,
        kind=Kind.SECONDS,
        minimum=0,
        maximum=_DAY_S,
        help="Least time between two flushes; more of it sends hot rows less often, at the price of that much lag.",
    )
    flush_percent: int = setting(
        1,
        kind=Kind.COUNT,
        minimum=1,
        maximum=100,
        help="Percent of the training thread's time that flushes may take: after one that took 5 ms, the next is not "
        "before 0.5 s at 1. More of it lowers lag. 100 flushes at each step at which a staging buffer is free. Not "
        "heeded while more is dirty than one buffer holds.",
    )
    policy: str = setting(
        "coalesce",
        kind=Kind.CHOICE,
        choices=("coalesce", "block", "spool"),
        help="When the server is behind or away: `coalesce` goes on training and sends each row's newest value later, "
        "`block` stops training until a staging buffer is free, `spool` keeps flushes in a local file, and coalesces "
        "once that is full. None of them loses a row.",
    )
    block_timeout_s: float = setting(
        600.0,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=30 * _DAY_S,
        help="Under the policy `block`: how long a step waits before it fails, naming the shard that is behind.",
    )
    spool_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="Under the policy `spool`: directory on a local disk. Its files have no name, so a crash leaves none.",
    )
    spool_bytes: int = setting(
        4 * _GIB,
        kind=Kind.BYTES,
        minimum=_MIB,
        maximum=_MAX_BYTES,
        help="Under the policy `spool`: disk for flushes that are not acked yet.",
    )
    connect_timeout_s: float = setting(
        10.0,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=_DAY_S,
        help="How long the constructor and `attach` wait for every shard, and one connection attempt later on.",
    )
    request_timeout_s: float = setting(
        60.0,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=_DAY_S,
        help="How long a message waits for its ack before the connection is given up and made anew.",
    )
    flush_timeout_s: float = setting(
        300.0,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=30 * _DAY_S,
        help="How long `flush` and `close` wait until all is durable, when the call does not say.",
    )
    retry_min_s: float = setting(
        0.05,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=3600,
        help="First pause before a shard is tried again; it doubles with each failure, and is jittered.",
    )
    retry_max_s: float = setting(
        5.0,
        kind=Kind.SECONDS,
        minimum=0.001,
        maximum=3600,
        help="Longest pause before a shard is tried again: how late a server's return is noticed.",
    )
    on_error: str = setting(
        "raise",
        kind=Kind.CHOICE,
        choices=("raise", "log"),
        help="When streaming cannot go on (fenced off, another store, a refused batch), or a step cannot hand over its "
        "rows (`block_timeout_s` is over, NaN under `reject`): `raise` fails the step, `log` says so once and lets "
        "training go on without streaming; `flush` raises in both.",
    )
    on_new_store: str = setting(
        "raise",
        kind=Kind.CHOICE,
        choices=("raise", "resync"),
        help="When an empty store of as many shards has taken the old one's place: `raise` stops streaming, `resync` "
        "sends it all rows.",
    )
    metrics_port: int | None = setting(
        None,
        kind=Kind.COUNT,
        minimum=0,
        maximum=65535,
        help="Port of Prometheus' page /metrics; rank r takes this plus r. Off without it; 0 lets the system choose.",
    )
    metrics_host: str = setting(
        "127.0.0.1",
        kind=Kind.TEXT,
        help="Address to serve metrics on. They tell figures, no rows and no secrets, to anyone who asks.",
    )
    token_file: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="File with the token that the server asks for; else the environment variable HEADRACE_TOKEN has it.",
    )
    tls: bool = setting(
        False,
        kind=Kind.SWITCH,
        help="Encrypt, and check the server's certificate and name. Costs processor time for every byte.",
    )
    tls_authority: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="With `tls`: PEM file with the authorities to trust; without it, the system's.",
    )
    tls_certificate: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="With `tls`: PEM file with this trainer's own certificate, for mutual TLS.",
    )
    tls_key: Path | None = setting(
        None,
        kind=Kind.PATH,
        help="With `tls`: PEM file with the key of `tls_certificate`.",
    )
    device_pipeline: bool = setting(
        False,
        kind=Kind.SWITCH,
        help="Mark, cut and pack rows of tables on a CUDA device there, and copy them to the host aside: no step waits "
        "for the device. Takes 2 × `staging_bytes` of its memory, and as much pinned memory, of which torch rounds "
        "each half up to a power of two. Off because it has never run on a GPU; what it cannot do is gathered by the "
        "host, and the log says so.",
    )
    non_finite: str = setting(
        "accept",
        kind=Kind.CHOICE,
        choices=("accept", "reject"),
        help="What becomes of NaN and Inf. To reject them, every value of a flush is looked at on the training thread.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.retry_max_s < self.retry_min_s:
            raise ConfigError(f"retry_max_s: {self.retry_max_s:g} is less than retry_min_s, {self.retry_min_s:g}")
        if self.policy == "spool" and self.spool_dir is None:
            raise ConfigError("spool_dir: the policy `spool` needs a directory on a local disk")
        if not self.tls and (self.tls_authority or self.tls_certificate or self.tls_key):
            raise ConfigError("tls: files for TLS are given, but it is off")

    @classmethod
    def load(
        cls, *, environ: Mapping[str, str] | None = None, file: Path | None = None, **settings: Any
    ) -> StreamerConfig:
        """Return the settings from keyword arguments, environment, file and defaults, the first that has a value.

        Args:
            environ: The environment; None takes the process's own.
            file: YAML file: a mapping of field names.
            **settings: Fields by name; None stands for one that is not given.

        Raises:
            ConfigError: A key is unknown or a value is wrong, naming where it stands.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in settings.keys() - known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"{name!r} is no setting" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
        environ = os.environ if environ is None else environ
        return merge(cls, flags=settings, environ=environ, prefix=ENV_PREFIX, file=file, flag=str)
