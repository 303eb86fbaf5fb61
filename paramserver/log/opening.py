"""Open an update log by its settings: the one place that chooses the implementation.

Rooms above `log/` call these functions and use the protocols of `interface.py`; a follower's shard, which copies marks,
uses `FileUpdateLog`. They know nothing of segments, and nothing of NATS, whose client is imported only for a log that
is there.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import LogSource, NextLog, ReplicatedLog, UpdateLogConfig
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.errors import GoneError

if TYPE_CHECKING:
    from headrace.paramserver.log.jetstream.nats_address import NatsAccess

__all__ = [
    "DEFAULT_MAX_BYTES",
    "FileUpdateLog",
    "LogKind",
    "LogSettings",
    "check_log",
    "check_log_url",
    "fit_log",
    "kind_of_log",
    "next_log",
    "open_follower",
    "open_log",
    "open_source",
]

DEFAULT_MAX_BYTES = 32 << 30
"""Bound of a shard's replicated log where its servers have room for it."""

LogKind = Literal["file", "nats"]
"""Where a shard's log is. ON DISK: never rename; in a directory's manifest."""


def kind_of_log(url: str | None) -> LogKind:
    """Return the kind of the log that a setting names; None is a log in the shard's directory."""
    return "file" if url is None else "nats"


def check_log_url(url: str) -> None:
    """Check the setting of a log that is not in the shard's directory; `ConfigError` if it names none."""
    from headrace.paramserver.log.jetstream.nats_address import NatsLogAddress

    NatsLogAddress.parse(url)


def open_log(
    directory: Path, *, begin_seq: int = 1, begin_mark: int | None = None, config: UpdateLogConfig | None = None
) -> FileUpdateLog:
    """Open a shard's log in files to append to; create it if it is missing. Does as `FileUpdateLog.open`."""
    return FileUpdateLog.open(directory, begin_seq=begin_seq, begin_mark=begin_mark, config=config)


class LogSettings(Protocol):
    """Where a replicated log is, and how to reach it; documented in `ShardSettings`."""

    @property
    def log(self) -> str | None: ...  # noqa: D102 - documented there
    @property
    def log_credentials(self) -> Path | None: ...  # noqa: D102
    @property
    def log_tls_authority(self) -> Path | None: ...  # noqa: D102
    @property
    def log_tls_certificate(self) -> Path | None: ...  # noqa: D102
    @property
    def log_tls_key(self) -> Path | None: ...  # noqa: D102
    @property
    def log_max_bytes(self) -> int: ...  # noqa: D102
    @property
    def log_monitor(self) -> str | None: ...  # noqa: D102


async def open_follower(
    settings: LogSettings,
    directory: Path,
    *,
    server_id: str,
    shard: int,
    applied_seq: int,
    config: UpdateLogConfig | None = None,
) -> ReplicatedLog:
    """Follow a shard's replicated log from a seq on, which the store has applied; a new log is made where none is.

    Cancellation: harmless.

    Raises:
        ConfigError: A setting is wrong, or the servers refuse us or have another configuration than the log needs.
        GoneError: The log begins behind the next record.
        UnavailableError: The servers are away.
        StorageError: The mirror in `directory` cannot be written.
    """
    # Here, so that nobody who does not use it imports anything of NATS.
    from headrace.paramserver.log.jetstream.nats_stream import open_engine
    from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog

    access = _access_of(settings)
    await asyncio.to_thread(access.check)
    max_bytes = settings.log_max_bytes or DEFAULT_MAX_BYTES
    engine = await open_engine(access, server_id=server_id, shard=shard, max_bytes=max_bytes)
    try:
        # From the record that is applied on, if it is still there: its mark tells whether it is the same one. A mirror
        # that was restored begins behind it.
        return await JetStreamUpdateLog.open(
            engine, directory, begin_seq=max(applied_seq, 1), needed_seq=applied_seq + 1, config=config
        )
    except GoneError:
        return await JetStreamUpdateLog.open(engine, directory, begin_seq=applied_seq + 1, config=config)


async def check_log(settings: LogSettings) -> None:
    """Check that the servers of a replicated log keep what they ack.

    Raises:
        ConfigError: One does not, or does not say; or a setting is wrong. The message tells what to set.
    """
    access = _access_of(settings)
    await asyncio.to_thread(access.check)
    from headrace.paramserver.log.jetstream.engine_checks import check_engine  # after the check for the client

    await check_engine(access, monitors=_monitors_of(settings))


async def fit_log(settings: LogSettings, *, server_id: str, num_shards: int) -> int:
    """Return the bound of each shard's replicated log: `log_max_bytes`, or with 0 what its servers have room for.

    Raises:
        ConfigError: The servers have no room for the logs; or a setting is wrong. The message tells what to set.
        UnavailableError: The servers are away.
    """
    from headrace.paramserver.log.jetstream.engine_checks import fit_streams

    monitors, max_bytes = _monitors_of(settings), settings.log_max_bytes
    return await fit_streams(
        _access_of(settings), server_id=server_id, num_shards=num_shards, max_bytes=max_bytes, monitors=monitors
    )


def next_log(settings: LogSettings, *, server_id: str, shard: int, config: UpdateLogConfig | None = None) -> NextLog:
    """Return the replicated log in which a shard's log in files will go on.

    Raises:
        ConfigError: A setting is wrong, or a file of ours is unfit.
    """
    from headrace.paramserver.log.jetstream.beginning import NatsShardStream, StreamBeginning

    access = _access_of(settings)
    access.check()
    max_bytes = settings.log_max_bytes or DEFAULT_MAX_BYTES
    stream = NatsShardStream(access, server_id=server_id, shard=shard, max_bytes=max_bytes)
    return StreamBeginning(stream, config=config)


def _monitors_of(settings: LogSettings) -> list[str]:
    return [] if settings.log_monitor is None else [url.strip() for url in settings.log_monitor.split(",")]


def _access_of(settings: LogSettings) -> NatsAccess:
    from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress

    assert settings.log is not None
    return NatsAccess(
        address=NatsLogAddress.parse(settings.log),
        credentials=settings.log_credentials,
        tls_authority=settings.log_tls_authority,
        tls_certificate=settings.log_tls_certificate,
        tls_key=settings.log_tls_key,
        environ=os.environ,
    )


def open_source(directory: Path, *, to_seq: int | None = None) -> LogSource:
    """Open a log to read it as it is now, also beside a running server; ignore damage after `to_seq`.

    Raises:
        CorruptionError: The log is damaged, or a part of it is missing.
        StorageError: A file cannot be read.
    """
    return LogReader(directory, to_seq)
