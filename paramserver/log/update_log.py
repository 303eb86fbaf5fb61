"""The update log: one append-only sequence of records a shard, the truth that the store is a view of.

`UpdateLog` is the seam: `FileUpdateLog` (files of this machine) is the default; a log replicated over machines can be
another. `tests/paramserver/log/test_update_log.py` holds what all of them promise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.paramserver.files.direct_file import BLOCK_BYTES
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES
from headrace.schemas.messages import Segment
from headrace.schemas.row_records import MAX_EPOCH

__all__ = ["Append", "DurableFuture", "LogMetrics", "LogRecord", "UpdateLog", "UpdateLogConfig", "check_record"]

_MIB = 1 << 20
_NUM_RECENT_FSYNCS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateLogConfig:
    """Settings of a log.

    Attributes:
        segment_bytes: Size at which a segment is sealed and the next begun, ≥ 4096. Default 256 MiB. Retention removes
            whole segments, so it frees space in steps of this size. A larger record gets a segment of its own.
        max_group_bytes: Records that are written and synced together, ≥ 1. Default 16 MiB. More gives a little more
            throughput and longer acks under load. A larger record goes alone.
        max_pending_bytes: Appended and not yet durable, ≥ 1; beyond it `append` raises `OverloadedError`. Default
            256 MiB. It bounds the frames that the log keeps in memory. One record is taken whatever its size when
            nothing is pending.
        allocate_bytes: Blocks are reserved ahead of the writer in steps of this size, which makes syncs cheaper; 0
            turns it off. Default 32 MiB. Costs up to that much disk space a shard while the log is open.
        tail_bytes: Memory for the newest bytes, from which the disk is written and followers read: a multiple of 4096,
            ≥ 8192. Default 32 MiB. Followers that are farther behind read from the disk.
    """

    segment_bytes: int = 256 * _MIB
    max_group_bytes: int = 16 * _MIB
    max_pending_bytes: int = 256 * _MIB
    allocate_bytes: int = 32 * _MIB
    tail_bytes: int = 32 * _MIB

    def __post_init__(self) -> None:
        for name, least in (
            ("segment_bytes", 4096),
            ("max_group_bytes", 1),
            ("max_pending_bytes", 1),
            ("allocate_bytes", 0),
            ("tail_bytes", 2 * BLOCK_BYTES),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"update log: {name} is {value}, the least is {least}")
        if self.tail_bytes % BLOCK_BYTES:
            raise ConfigError(f"update log: tail_bytes is {self.tail_bytes}, no multiple of {BLOCK_BYTES}")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One durable record.

    Attributes:
        seq: Position in the log, ≥ 1, without gaps.
        epoch: Trainer run, 1 to 2³² − 1.
        header: The map that `append` was given.
        body: uint8 view of the body's bytes, read-only; it keeps its buffer, which may hold neighbouring records.
    """

    seq: int
    epoch: int
    header: dict[str, Any]
    body: memoryview


class DurableFuture(asyncio.Future[None]):
    """A future that cannot be cancelled: whether the record is durable is not the waiter's to decide.

    A task that is cancelled while it waits for one gets its `CancelledError` once the future is done. So whoever has
    seen it done, in whatever way, may reuse the buffers that the log was reading from.
    """

    def cancel(self, msg: Any | None = None) -> bool:
        """Do nothing and return False."""
        del msg
        return False


@dataclass(frozen=True, slots=True)
class Append:
    """A record on its way to the disk.

    Attributes:
        seq: Its position in the log.
        durable: Done when the record survives power loss; fails with `StorageError` when it will not. Cancelling a
            task that waits for it takes effect when it is done (`DurableFuture`).
    """

    seq: int
    durable: asyncio.Future[None]


@dataclass(slots=True)
class LogMetrics:
    """Counts since the log was opened. Written by one thread; a reader may see a group half counted.

    Attributes:
        num_records: Durable records.
        num_groups: Groups that were written and synced.
        num_fsyncs: Syncs of any kind.
        fsync_s: Seconds in them together.
        recent_fsync_s: Seconds of each of the last 1024; `num_fsyncs` tells a scraper how many of them are new.
        written_bytes: Bytes of durable records, headers included.
    """

    num_records: int = 0
    num_groups: int = 0
    num_fsyncs: int = 0
    fsync_s: float = 0.0
    recent_fsync_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_FSYNCS))
    written_bytes: int = 0

    def count_fsync(self, duration_s: float) -> None:
        """Count one sync."""
        self.num_fsyncs += 1
        self.fsync_s += duration_s
        self.recent_fsync_s.append(duration_s)


class UpdateLog(Protocol):
    """One shard's log. Appended to from one event loop; read and trimmed from any thread.

    Attributes are read-only to others:
        first_seq: Oldest record that can be read; `last_seq + 1` when there is none.
        last_seq: Last durable record; 0 in a new log.
        failed: Set for good by a failed write or sync; every later append raises it. Reading goes on.
        pending_bytes: Appended and not yet durable. Thread: the loop's.
        size_bytes: Of all that can be read, with what surrounds it.
        metrics: Counts since the log was opened.
    """

    @property
    def first_seq(self) -> int: ...  # noqa: D102 - told above
    @property
    def last_seq(self) -> int: ...  # noqa: D102
    @property
    def failed(self) -> HeadraceError | None: ...  # noqa: D102
    @property
    def pending_bytes(self) -> int: ...  # noqa: D102
    @property
    def size_bytes(self) -> int: ...  # noqa: D102
    @property
    def metrics(self) -> LogMetrics: ...  # noqa: D102

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        """Add a record. Never blocks: no copy and no checksum of the body is made here.

        Args:
            epoch: Trainer run, 1 to 2³² − 1.
            header: Small map of what msgpack knows. `headrace log inspect` shows its `step` and `time_us`.
            body: Contiguous buffers; they must stay unchanged until `durable` is done.

        Returns:
            The seq, given out in the order of the calls, and the future that says when it is durable. Records become
            durable in order.

        Raises:
            OverloadedError: `max_pending_bytes` is reached; nothing was appended.
            RequestError: The record is too large; nothing was appended.
            StorageError: The log has failed.
            UnavailableError: The log is closed.

        Thread: that of the event loop, always the same one.
        """
        ...

    async def wait_failed(self) -> HeadraceError:
        """Return `failed` once it is set, also when it fails while nothing is appended.

        Cancellation: harmless.
        """
        ...

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """Return an iterator over the records from one on to the last that is durable at the time of this call.

        Args:
            from_seq: First seq, ≥ 1. Beyond the last there is nothing to read, which is no error.
            past_cache: Leave the page cache alone: nobody else is about to read the same.

        Raises:
            GoneError: From here, or while iterating: `from_seq`, or what comes next, has been trimmed.
            CorruptionError: While iterating: a record is damaged. It names file and offset.

        Thread: any. It blocks.
        """
        ...

    def mark_of(self, seq: int) -> int | None:
        """Return what tells a durable record from every other that any log may have at its seq; None if it is not here.

        Whoever opens the log draws another one, -2⁶³ to 2⁶³ - 1, before writing. So copies of one log that have the
        same mark at a seq are the same up to there.

        Thread: any. It does no I/O.
        """
        ...

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """Remove the oldest whole segments: retention.

        Without `max_bytes` and `max_age_s` all that lies below the floor goes; with either or both only while one of
        them is exceeded. The newest segment always stays, so that the log knows its last seq.

        Args:
            before_seq: The floor: no record from here on is removed, whatever else is asked for.
            max_bytes: Remove while `size_bytes` is more than this.
            max_age_s: Remove what was written longer ago than this.

        Returns:
            `first_seq` afterwards.

        Raises:
            StorageError: A segment could not be removed. The log itself goes on.

        Thread: any. It blocks.
        """
        ...

    async def close(self) -> None:
        """Refuse new records, wait until the pending ones are durable or have failed, and close the files.

        Idempotent. Cancellation: the close goes on; call again to wait for it.
        """
        ...


def check_record(epoch: int, header: bytes, body: Sequence[Segment]) -> int:
    """Return the payload's size of a record that is about to be appended.

    Args:
        epoch: Of the record.
        header: Its msgpack map.
        body: Its buffers.

    Raises:
        ValueError: An epoch out of range or a buffer that is not contiguous; in the writer it would end the log.
        RequestError: The record is too large.
    """
    if not 1 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epoch {epoch} is not in 1 to {MAX_EPOCH}")
    payload_bytes = len(header)
    for segment in body:
        if isinstance(segment, memoryview):
            if not segment.c_contiguous:
                raise ValueError("a buffer of a log record is not contiguous")
            payload_bytes += segment.nbytes
        else:
            payload_bytes += len(segment)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise RequestError(f"a log record of {payload_bytes} bytes, the most is {MAX_PAYLOAD_BYTES}")
    return payload_bytes
