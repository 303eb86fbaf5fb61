"""The update log: one append-only sequence of records per shard, the source of truth that the store is a view of.

`UpdateLog` is the seam. `FileUpdateLog` (files on this machine) is the default; a log replicated over machines could be
another. `tests/paramserver/log/test_interface.py` tests what every implementation promises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.paramserver.system.direct_file import BLOCK_BYTES
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES
from headrace.schemas.messages import Segment
from headrace.schemas.version import MAX_EPOCH

if TYPE_CHECKING:
    from headrace.paramserver.log.jetstream.appender import StreamMetrics
    from headrace.paramserver.log.jetstream.engine import StreamState

__all__ = [
    "KIND_BATCH",
    "KIND_HELLO",
    "Append",
    "CommittedLog",
    "DurableFuture",
    "LogMetrics",
    "LogRecord",
    "LogSource",
    "NextLog",
    "ReplicatedLog",
    "UpdateLog",
    "UpdateLogConfig",
    "check_record",
    "is_housekeeping",
    "note_header",
    "note_of",
]

# ON DISK: never renumber. The field `kind` of a record's header: rows of a writer, or the hello of one.
KIND_BATCH = 1
KIND_HELLO = 2
# ON DISK: never rename. In the header of a record that a replicated log has for itself: what it is, such as `open`.
_NOTE = "note"

_MIB = 1 << 20
_LEAST_BYTES = {"segment_bytes": 4096, "max_group_bytes": 1, "max_pending_bytes": 1, "allocate_bytes": 0}
_LEAST_BYTES["tail_bytes"] = 2 * BLOCK_BYTES
_NUM_RECENT_COMMITS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateLogConfig:
    """Settings of a log.

    Attributes:
        segment_bytes: Size at which a segment is sealed and the next one begins, ≥ 4096. Retention frees space in steps
            of this size. A larger record gets its own segment.
        max_group_bytes: Records written and synced together, ≥ 1. More gives a little more throughput and longer acks
            under load. A larger record goes alone.
        max_pending_bytes: Bytes appended and not yet durable, ≥ 1; `append` raises `OverloadedError` beyond it, unless
            nothing is pending. It bounds the frames that the log keeps in memory.
        allocate_bytes: Step in which blocks are reserved ahead of the writer, which makes syncs cheaper; 0: none. Costs
            up to that much disk space a shard while the log is open.
        tail_bytes: Memory for the newest bytes, a multiple of 4096, ≥ 8192. The disk is written from it, and followers
            that are not farther behind read it.
        gather_s: How long a record waits for others, to be written and synced with them, unless a group is full; 0: not
            at all. For a log that no ack waits for.
    """

    segment_bytes: int = 256 * _MIB
    max_group_bytes: int = 16 * _MIB
    max_pending_bytes: int = 256 * _MIB
    allocate_bytes: int = 32 * _MIB
    tail_bytes: int = 32 * _MIB
    gather_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in _LEAST_BYTES.items():
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"update log: {name} is {value}, the least is {least}")
        if self.tail_bytes % BLOCK_BYTES:
            raise ConfigError(f"update log: tail_bytes is {self.tail_bytes}, must be a multiple of {BLOCK_BYTES}")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One durable record. Seqs begin at 1 and have no gaps.

    `body` is a read-only uint8 view; it keeps a buffer alive that may hold neighboring records.
    """

    seq: int
    epoch: int
    header: dict[str, Any]
    body: memoryview


def note_header(what: str, **more: str) -> dict[str, Any]:
    """Return the header of a record that a log has for itself: it takes a seq and changes nothing that is stored.

    Of a replicated log: `open`, `padding`, `heartbeat` or `void`. Of a log's owner: an `offer` of the shard `to` the
    address of a standby, a follower or a new server, and its `withdrawal`; that the new server has `taken` the place;
    or the `claim` of the record's epoch for a trainer that starts. The first of a follower that has taken over is an
    `open`.
    """
    return {"kind": KIND_HELLO, "run": "", "client": "", "rank": 0, "world_size": 0, "tables": [], _NOTE: what, **more}


def is_housekeeping(header: Mapping[str, Any]) -> bool:
    """Return whether a record, by its header, is one of `note_header`: it is no writer's, and is skipped."""
    return _NOTE in header


def note_of(header: Mapping[str, Any]) -> str | None:
    """Return what a record of `note_header` is; None for any other."""
    note = header.get(_NOTE)
    return note if isinstance(note, str) else None


class DurableFuture(asyncio.Future[None]):
    """A future that cannot be cancelled, because its waiter does not decide whether the record is durable.

    A task that is cancelled while it waits gets its `CancelledError` once the future is done. By then the log has
    stopped reading the buffers, whatever the outcome, and they may be reused.
    """

    def cancel(self, msg: Any | None = None) -> bool:
        """Do nothing and return False."""
        del msg
        return False


@dataclass(frozen=True, slots=True)
class Append:
    """A record on its way to the disk. `durable` is done when it survives power loss, or fails as the log does."""

    seq: int
    durable: asyncio.Future[None]


@dataclass(slots=True)
class LogMetrics:
    """Counts since the log was opened. One thread writes them; readers may see a group half counted.

    Attributes:
        num_records: Durable records.
        num_groups: Groups of them, written and synced together.
        num_commits: Waits until bytes were durable: for a sync of a file, or for another engine's ack.
        commit_s: Seconds in all of them.
        recent_commit_s: Seconds of each of the last 1024; `num_commits` tells how many of them are new.
        written_bytes: Bytes of durable records, headers included.
    """

    num_records: int = 0
    num_groups: int = 0
    num_commits: int = 0
    commit_s: float = 0.0
    recent_commit_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_COMMITS))
    written_bytes: int = 0

    def count_commit(self, duration_s: float) -> None:
        """Count one wait."""
        self.num_commits += 1
        self.commit_s += duration_s
        self.recent_commit_s.append(duration_s)


class CommittedLog(Protocol):
    """What can be read of a log, and removed from it: a shard's own, or a mirror of one. See `UpdateLog`."""

    @property
    def first_seq(self) -> int: ...  # noqa: D102 - documented in `UpdateLog`
    @property
    def last_seq(self) -> int: ...  # noqa: D102
    @property
    def size_bytes(self) -> int: ...  # noqa: D102

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]: ...  # noqa: D102
    def nonce_of(self, seq: int) -> int | None: ...  # noqa: D102
    def trim(  # noqa: D102
        self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None
    ) -> int: ...


class UpdateLog(CommittedLog, Protocol):
    """One shard's log. Appended to from one event loop; read and trimmed from any thread.

    Three conditions stop appends, and the server treats each in its own way:
        stalled: Nothing becomes durable for a while. Acks wait; when `max_pending_bytes` are reached, `append` refuses
            before a record has a seq, so trainers coalesce, and go on by themselves when the log does.
        fenced: `failed` is a `LogFencedError`. Another process owns the log and serves the shard: this one steps down.
        failed: `failed` is a `StorageError`. Acked data may be at risk: the server stops, and nothing restarts it.

    Attributes:
        first_seq: Oldest readable record; `last_seq + 1` if there is none.
        last_seq: Last durable record; 0 in a new log.
        failed: Set for good when the log has failed or is fenced; every later append raises it. Reading continues.
        pending_bytes: Bytes appended and not yet durable. Thread: the loop's.
        size_bytes: Bytes of all readable records and what surrounds them.
        metrics: Counts since the log was opened.
        term: In which this process owns the log; 0 where the log has no terms.
        max_payload_bytes: The most that a record's header and body may take together.
    """

    @property
    def first_seq(self) -> int: ...  # noqa: D102 - documented above
    @property
    def last_seq(self) -> int: ...  # noqa: D102
    @property
    def term(self) -> int: ...  # noqa: D102
    @property
    def max_payload_bytes(self) -> int: ...  # noqa: D102
    @property
    def failed(self) -> HeadraceError | None: ...  # noqa: D102
    @property
    def pending_bytes(self) -> int: ...  # noqa: D102
    @property
    def size_bytes(self) -> int: ...  # noqa: D102
    @property
    def metrics(self) -> LogMetrics: ...  # noqa: D102

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        """Add a record. Never blocks, and neither copies nor checksums the body here. Thread: always the same loop's.

        Seqs are given in the order of calls, and records become durable in that order.

        Args:
            epoch: Epoch of the writer, 1 to 2³² − 1.
            header: Small map of msgpack types. `headrace log inspect` shows its `step` and `time_us`.
            body: Contiguous buffers, unchanged until `durable` is done.

        Raises:
            OverloadedError: `max_pending_bytes` is reached; nothing was appended.
            RequestError: The record is too large; nothing was appended.
            StorageError: The log has failed.
            LogFencedError: Another process has taken over the log.
            UnavailableError: The log is closed.
        """
        ...

    def check_owned(self) -> None:
        """Raise `UnavailableError` unless this process was seen to own the log a moment ago.

        Call it after an answer was computed and before it is sent. A log that one machine locks is always owned.
        """
        ...

    async def wait_failed(self) -> HeadraceError:
        """Return `failed` once it is set, also if the log fails while idle. Cancellation: harmless."""
        ...

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """Return an iterator over the records from `from_seq` to the last one that is durable now. Thread: any; blocks.

        Beyond the last record the iterator is empty. `past_cache` bypasses the page cache, for records that nobody else
        reads soon.

        Raises:
            GoneError: The first or, while iterating, the next record has been trimmed.
            CorruptionError: While iterating: a record is damaged. It names file and offset.
        """
        ...

    def nonce_of(self, seq: int) -> int | None:
        """Return the nonce of the segment with a durable record, -2⁶³ to 2⁶³ - 1; None if the record is not here.

        Each opening of a log draws a new nonce before it writes. So copies of one log that have the same nonce at a seq
        are equal up to there. Thread: any; no I/O.
        """
        ...

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """Remove the oldest whole segments, for retention; return `first_seq` afterwards. Thread: any; blocks.

        Without `max_bytes` and `max_age_s` everything below the floor goes; with them only while one of them is
        exceeded. The newest segment always stays, because it knows the last seq.

        Args:
            before_seq: The floor: records from here on always stay.
            max_bytes: Remove while `size_bytes` is more than this.
            max_age_s: Remove what was written longer ago than this.

        Raises:
            StorageError: A segment could not be removed. The log itself continues.
        """
        ...

    async def close(self) -> None:
        """Refuse new records, wait until pending ones are durable or have failed, and close the files. Idempotent.

        Cancellation: closing continues; call again to wait for it.
        """
        ...


class ReplicatedLog(UpdateLog, Protocol):
    """A log that several machines hold, of which one process at a time is the owner. Others follow it.

    `last_seq` rises by itself while following; `wait_beyond` waits for it. Until `take_over` has
    returned True, `append` raises `UnavailableError`. `term` is that of the last valid owner, also while following.

    Attributes:
        owner: Address that the last owner gave; empty before the first.
        is_owner: Whether this process has taken over, and is not fenced.
        stalled_s: For how long records have been waiting for servers that do not ack; 0 while they do.
        is_full: Whether the servers have no room for what waits.
        outstanding_bytes: Bytes in memory: of records without an ack, and of those that are not on this disk yet.
        stream_metrics: Counts since the log was opened.
    """

    @property
    def owner(self) -> str: ...  # noqa: D102 - documented above
    @property
    def is_owner(self) -> bool: ...  # noqa: D102
    @property
    def stalled_s(self) -> float: ...  # noqa: D102
    @property
    def is_full(self) -> bool: ...  # noqa: D102
    @property
    def outstanding_bytes(self) -> int: ...  # noqa: D102
    @property
    def stream_metrics(self) -> StreamMetrics: ...  # noqa: D102

    async def engine_state(self) -> StreamState | None:
        """Ask what the servers say of the log; None if there is no answer. Cancellation: harmless."""
        ...

    async def wait_beyond(self, seq: int) -> None:
        """Wait until `last_seq` is above a seq. Cancellation: harmless."""
        ...

    async def wait_silent(self) -> None:
        """Wait until the log could have been written to for some seconds, and nobody did. Cancellation: harmless."""
        ...

    async def take_over(self, applied_seq: int, *, owner: str, above_term: int = 0, offer: str | None = None) -> bool:
        """Become the owner directly behind `applied_seq`, in a term above all before it and above `above_term`.

        `offer` is the one by which the shard comes here from another log. Returns whether that worked: False if there
        are records behind `applied_seq`, which are to be applied first.
        Cancellation: it may have become the owner all the same.
        """
        ...


class NextLog(Protocol):
    """The replicated log in which a shard's log in files is to go on. Thread: the event loop's.

    Each coroutine raises `UnavailableError` if its servers are away. Cancellation: it may have been done.
    """

    @property
    def name(self) -> str:
        """What its servers call it."""
        ...

    async def check(self) -> object:
        """Raise `ConfigError` if it has records already, or takes none. The message says what to do."""
        ...

    async def make(self, last_seq: int) -> None:
        """Make it, to begin behind record `last_seq`. Safe to repeat, also with another record. Raises as `check`."""
        ...

    async def offer(self) -> str | None:
        """Return the offer that its first record names, empty if it names none; None if there is no record yet."""
        ...

    async def begin(self, log: UpdateLog) -> ReplicatedLog:
        """Follow it behind a log in files, which becomes its mirror and is closed with it; `take_over` comes next.

        REQUIRES: `make`; and all records of `log` are durable.
        """
        ...


class LogSource(Protocol):
    """A log for tools, as it was when it was opened. Thread: any, one at a time; reading blocks.

    Attributes:
        log_id: Identifies the log, in hex; empty without a record.
        first_seq: Oldest record; `last_seq + 1` if there is none.
        last_seq: Newest record; 0 in a new log.
    """

    @property
    def log_id(self) -> str: ...  # noqa: D102 - documented above
    @property
    def first_seq(self) -> int: ...  # noqa: D102
    @property
    def last_seq(self) -> int: ...  # noqa: D102

    def nonces(self, from_seq: int, to_seq: int) -> list[int]:
        """Return the nonces of a range, oldest first. They differ between logs that share only their beginning."""
        ...

    def read(self, from_seq: int, to_seq: int | None = None) -> Iterator[LogRecord]:
        """Return an iterator over the records from `from_seq` to `to_seq`, or to the last one; see `UpdateLog.read`."""
        ...


def check_record(epoch: int, header: bytes, body: Sequence[Segment]) -> int:
    """Check a record before it is appended; return the size of its payload.

    Raises:
        ValueError: The epoch is out of range or a buffer is not contiguous; in the writer this would end the log.
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
