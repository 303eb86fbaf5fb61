"""Settings of a streamer (`StreamerConfig`), and checks of the arguments of its calls.

`StreamerConfig.load` merges keyword arguments > environment (`HEADRACE_STREAMER_…`) > YAML file > defaults, once.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypedDict, Unpack

from headrace.paramserver.system import settings as fields
from headrace.paramserver.system.settings import Kind, count_setting, path_setting, seconds_setting, size_setting
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import MAX_NAME_BYTES
from headrace.schemas.table_names import check_model

__all__ = [
    "ENV_PREFIX",
    "StreamerConfig",
    "StreamerSettings",
    "check_run",
    "step_number",
    "timeout_seconds",
]

ENV_PREFIX = "HEADRACE_STREAMER_"
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_DAY_S = 86400.0
_FRESHNESS_S, _MAX_COST_PERCENT = 1.0, 3
_MIN_S = 0.001
# Steps are signed 64-bit numbers on the wire, and count on from this one.
_MAX_STEP = 2**62


def _choice(choices: tuple[str, ...], help: str) -> Any:
    return fields.setting(choices[0], kind=Kind.CHOICE, choices=choices, help=help)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamerConfig:
    """Settings of one trainer process.

    Memory, at most: one bit per row of each streamed table, 2 × `staging_bytes`, 8 MiB for the streamer itself (its
    thread, connections, and the ids of the table it gathers), and a few KiB per message in flight. A table with
    virtual ids takes up to 16 bytes for each changed and unsent row instead. Evicted rows that are not used again
    take up to 32 bytes each. With `send_share`, each row takes four bytes and one bit more. Tables on a GPU add 2 ×
    `staging_bytes` of pinned memory, and as much on the device (`device_pipeline`). Dense parameters take their own
    size once more. It uses no disk.

    Each field's `help` says what it does and costs, its `kind` the unit.
    """

    model: str | None = fields.setting(
        None,
        kind=Kind.TEXT,
        help="Model that the tables belong to; on the server they are named `model:table`. Default: the run's name, or "
        "the default model, whose tables have plain names, if the server has tables of it that are this run's or "
        "nobody's.",
    )
    takes_over: bool = fields.setting(
        False,
        kind=Kind.SWITCH,
        help="Take tables of another run that has not ended, and fence that run. Without it, `attach` refuses them.",
    )
    staging_bytes: int = size_setting(
        64 * _MIB,
        64 * _KIB,
        64 * _GIB,
        "Size of each of the two staging buffers. Dirty rows beyond it go out over several steps; a larger buffer "
        "makes one step longer.",
    )
    bitmap_bytes: int = size_setting(
        256 * _MIB,
        0,
        64 * _GIB,
        "Largest bitmap of dirty rows, one bit per row, that a table gets at its start. Longer tables, and those with "
        "virtual ids, keep the ids of dirty rows instead, 8 to 16 bytes each, while that takes less than the bitmap.",
    )
    message_bytes: int = size_setting(
        4 * _MIB,
        4 * _KIB,
        _GIB,
        "Longest message, or one row. Shorter: more round trips; longer: more latency.",
    )
    window_bytes: int = size_setting(
        32 * _MIB, 4 * _KIB, 64 * _GIB, "Unacked bytes per shard, unless the shard allows less."
    )
    window_messages: int = count_setting(64, 1, 100_000, "Unacked messages per shard, unless the shard allows less.")
    flush_interval_s: float = seconds_setting(
        0.0, 0, _DAY_S, "Least time between two flushes. More of it sends hot rows less often, and adds as much lag."
    )
    freshness_s: float = seconds_setting(
        _FRESHNESS_S,
        0,
        _DAY_S,
        "How long after an update it is to be durable on the server. Updates of a row until then go out as one. 0: as "
        "fresh as `max_cost_percent` allows.",
    )
    max_staleness_s: float = seconds_setting(
        60.0,
        _MIN_S,
        _DAY_S,
        "With `attach(send_share=…)`: how long after an update it is to be durable where its row is held back. All "
        "waiting rows then go out together, which completes a step. `max_cost_percent` and a slow server may delay it.",
    )
    max_cost_percent: int = count_setting(
        _MAX_COST_PERCENT,
        1,
        100,
        "Percent of the steps' time that flushes may take, of the training thread and of our other threads; updates "
        "get older where it is too little, though no flush delays the next one by more than 10 s. 100: no limit. Not "
        "for `flush` and `close`, nor for rows of a whole table that was added, or that a shard has lost.",
    )
    dense_interval_s: float = seconds_setting(
        10.0,
        0,
        _DAY_S,
        "With `attach(dense=…)`: how often all dense parameters go out, at most. Each time the training thread copies "
        "them all; `max_cost_percent` limits that too, apart from rows. A replica that shows whole steps is as fresh "
        "as this.",
    )
    policy: str = _choice(
        ("coalesce", "block"),
        "What to do while the server is behind or away: `coalesce` goes on training and sends each row's newest "
        "value later, `block` stops training until a staging buffer is free. Neither loses a row.",
    )
    block_timeout_s: float = seconds_setting(
        600.0, _MIN_S, 30 * _DAY_S, "Under `block`: how long a step waits before it fails and names the slow shard."
    )
    connect_timeout_s: float = seconds_setting(
        10.0,
        _MIN_S,
        _DAY_S,
        "How long the constructor and `attach` wait for all shards; also one later connection try.",
    )
    request_timeout_s: float = seconds_setting(
        60.0, _MIN_S, _DAY_S, "How long a message waits for its ack until its connection is replaced."
    )
    flush_timeout_s: float = seconds_setting(
        300.0, _MIN_S, 30 * _DAY_S, "How long `flush` and `close` wait for durability, unless the call says otherwise."
    )
    retry_min_s: float = seconds_setting(
        0.05, _MIN_S, 3600, "First pause before retrying a shard; doubles, with jitter."
    )
    retry_max_s: float = seconds_setting(5.0, _MIN_S, 3600, "Longest such pause: how late a shard's return is noticed.")
    on_error: str = _choice(
        ("raise", "log"),
        "When streaming cannot go on (fenced off, another store, a refused batch), or a step cannot hand over its "
        "rows (`block_timeout_s` is over, NaN under `reject`): `raise` fails the step, `log` logs it once and goes on "
        "training without streaming. `flush` raises in both cases.",
    )
    on_new_store: str = _choice(
        ("raise", "resync"),
        "When an empty store with as many shards has replaced the old one: `raise` stops streaming, `resync` "
        "sends it all rows.",
    )
    on_set_back: str = _choice(
        ("auto", "raise", "resend"),
        "When a shard has come back from an older copy, or was restored, and lacks rows that it had acked: `raise` "
        "stops streaming, `resend` sends all rows of that shard again, also those that never changed. `auto` is "
        "`resend` where the server archives its log, else `raise`.",
    )
    metrics_port: int | None = count_setting(
        None, 0, 65535, "Port of the Prometheus page /metrics; rank r takes this plus r. Off by default; 0 picks any."
    )
    metrics_host: str = fields.setting(
        "127.0.0.1",
        kind=Kind.TEXT,
        help="Address to serve metrics on. Anyone who can connect sees figures, but no rows and no secrets.",
    )
    recordings: str | None = fields.setting(
        None,
        kind=Kind.TEXT,
        help="Folder, or URL of an object store (`s3://…`, `file:///…`), for what `record` keeps: batches and what the "
        "model answers, for replicas to compare. Needs `headrace[recordings]`.",
    )
    record_every_steps: int = count_setting(
        1000, 1, 10**9, "Steps between two recordings. Each costs a pass of the model and a flush that is not awaited."
    )
    max_recordings: int = count_setting(10, 1, 10_000, "Recordings of the model that are kept, the newest ones.")
    token_file: Path | None = path_setting(None, "File with the server's token. Default: the variable HEADRACE_TOKEN.")
    insecure_token: bool = fields.switch_setting(
        False, "Show the token without TLS beyond loopback too, where others may read it on its way."
    )
    tls: bool = fields.setting(
        False,
        kind=Kind.SWITCH,
        help="Encrypt, and check the server's certificate and name; the files below imply it. Costs processor time for "
        "every byte.",
    )
    tls_authority: Path | None = path_setting(None, "PEM file of trusted authorities. Default: the system's.")
    tls_certificate: Path | None = path_setting(None, "PEM file of the trainer's certificate (mutual TLS).")
    tls_key: Path | None = path_setting(None, "PEM file of the key of `tls_certificate`.")
    device_pipeline: bool | None = fields.setting(
        None,
        kind=Kind.SWITCH,
        help="Mark, drain and pack rows of tables on a CUDA device there, and copy them to the host in the background: "
        "no step waits for the device. Takes 2 × `staging_bytes` of its memory, and as much pinned memory, of which "
        "torch rounds each half up to a power of two. The host gathers what the device cannot, and the log says so. "
        "Default: on, but off with torch for AMD's GPUs, on which it has never run.",
    )
    non_finite: str = _choice(
        ("accept", "reject"),
        "What to do with NaN and Inf. `reject` checks every value of a flush on the training thread.",
    )

    def __post_init__(self) -> None:
        fields.check(self)
        if self.model is not None:
            check_model(self.model)
        if self.retry_max_s < self.retry_min_s:
            raise ConfigError(f"retry_max_s: {self.retry_max_s:g} is less than retry_min_s, {self.retry_min_s:g}")

    @classmethod
    def load(
        cls, *, environ: Mapping[str, str] | None = None, file: Path | None = None, **settings: Unpack[StreamerSettings]
    ) -> StreamerConfig:
        """Return the settings, each from the first source that has it: keyword, environment, file, default.

        Args:
            environ: The environment; None takes the process's.
            file: YAML file: a mapping of field names.
            **settings: Fields by name; None stands for one that is not given.

        Raises:
            ConfigError: A name is unknown or a value is wrong; the message says where it comes from.
        """
        fields.check_names(cls, settings)
        environ = os.environ if environ is None else environ
        return fields.merge(cls, flags=settings, environ=environ, prefix=ENV_PREFIX, file=file, flag=str)


class StreamerSettings(TypedDict, total=False):
    """The fields of `StreamerConfig` as keyword arguments. Sizes and durations may have units, as in "64MiB"."""

    model: str | None
    takes_over: bool
    staging_bytes: int | str
    bitmap_bytes: int | str
    message_bytes: int | str
    window_bytes: int | str
    window_messages: int
    flush_interval_s: float | str
    freshness_s: float | str
    max_staleness_s: float | str
    max_cost_percent: int
    dense_interval_s: float | str
    policy: Literal["coalesce", "block"]
    block_timeout_s: float | str
    connect_timeout_s: float | str
    request_timeout_s: float | str
    flush_timeout_s: float | str
    retry_min_s: float | str
    retry_max_s: float | str
    on_error: Literal["raise", "log"]
    on_new_store: Literal["raise", "resync"]
    on_set_back: Literal["auto", "raise", "resend"]
    metrics_port: int | None
    metrics_host: str
    recordings: str | None
    record_every_steps: int
    max_recordings: int
    token_file: Path | str | None
    insecure_token: bool
    tls: bool
    tls_authority: Path | str | None
    tls_certificate: Path | str | None
    tls_key: Path | str | None
    device_pipeline: bool | None
    non_finite: Literal["accept", "reject"]


def check_run(run: str) -> None:
    """Raise ConfigError if the name of a run is not a printable line, or too long."""
    if not isinstance(run, str):
        raise ConfigError(f"run {run!r} is not text: give the run a name")
    # isprintable() also refuses lone surrogates, which cannot be encoded.
    if not run.isprintable() or not 1 <= len(run.encode()) <= MAX_NAME_BYTES:
        raise ConfigError(f"run {run[:40]!r} is empty, over {MAX_NAME_BYTES} bytes or has control characters")


def step_number(step: SupportsIndex, *, after: int) -> int:
    """Return a step's number, an integer of any kind, as a plain int for messages and checkpoints.

    Raises:
        ConfigError: It is not an integer, is below the last step's number `after`, or too large.
    """
    try:
        number = int(operator.index(step))
    except TypeError as exc:
        raise ConfigError(f"step {step!r} is not a whole number: give an int") from exc
    if not after <= number <= _MAX_STEP:
        raise ConfigError(f"step {number} after step {after}: steps only rise")
    return number


def timeout_seconds(timeout_s: SupportsFloat) -> float:
    """Return a timeout as a float; raise ConfigError if it is not a number or longer than a thread can wait."""
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"timeout_s {timeout_s!r} is not a number: give seconds") from exc
    if not seconds <= threading.TIMEOUT_MAX:  # refuses NaN too
        raise ConfigError(f"timeout_s {timeout_s!r} is longer than a thread can wait: give seconds")
    return seconds
