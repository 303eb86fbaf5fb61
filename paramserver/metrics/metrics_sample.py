"""What a shard tells of itself at one moment: plain numbers and names, as JSON between processes.

`ShardSample` has what every client may ask for with `status`; `ShardDetail` what only the supervisor is told, through a
pipe of its own (`metrics_channel.py`). Metrics, the status page, `headrace status` and `headrace top` are made of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import spec_from_idl
from headrace.schemas.tables import TableSpec

__all__ = [
    "CacheSample",
    "ExpirySample",
    "HistogramSample",
    "ShardDetail",
    "ShardSample",
    "SnapshotSample",
    "TableSample",
    "WriterSample",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSample:
    """A table, and about how many rows of it a shard has.

    Attributes:
        fqn: Name, as a user has chosen it: escape it wherever it is shown.
        num_rows: Of the whole table; 0 when any id may come.
        dim: Columns.
        dtype: As `float32`.
        states: As `momentum1 float32[1], exp_avg float32[dim]`; `none` without any.
        num_rows_estimate: Rows on the shard, about.
    """

    fqn: str
    num_rows: int
    dim: int
    dtype: str
    states: str
    num_rows_estimate: int

    @classmethod
    def of_spec(cls, spec: TableSpec, num_rows_estimate: int) -> Self:
        """Return what a table's spec says in short."""
        states = ", ".join(f"{s.name} {s.dtype.name.lower()}[{s.width or 'dim'}]" for s in spec.states) or "none"
        return cls(
            fqn=spec.fqn,
            num_rows=spec.num_rows,
            dim=spec.dim,
            dtype=spec.dtype.name.lower(),
            states=states,
            num_rows_estimate=num_rows_estimate,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterSample:
    """A client that writes. `rank` and `world_size` are None where the shard did not say; `step` is -1 before any."""

    run: str
    client: str
    epoch: int
    step: int
    is_connected: bool
    rank: int | None = None
    world_size: int | None = None


_WRITER_FIELDS = tuple(field.name for field in dataclasses.fields(WriterSample))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpirySample:
    """Expiry of rows since the process began; `last_run_us` is wall clock, microseconds since 1970, 0 before any."""

    is_running: bool = False
    num_runs: int = 0
    num_rows_scanned: int = 0
    num_rows_expired: int = 0
    num_failed: int = 0
    last_run_us: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramSample:
    """Durations counted so far.

    Attributes:
        bounds_s: Upper bounds of the buckets, seconds, ascending; one more bucket has all that is longer.
        counts: Of each bucket alone, one more than there are bounds.
        sum_s: All durations together, seconds.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Durations in all."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSample:
    """RocksDB's block cache; `hits` and `misses` since the store was opened."""

    capacity_bytes: int
    used_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSample:
    """The newest published snapshot; `created_us` is wall clock, microseconds since 1970."""

    name: str
    step: int
    created_us: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDetail:
    """What a shard tells its supervisor beyond its status.

    Attributes:
        apply_lag_s: For how long the oldest durable record has been there that is not in the store, seconds, to a
            quarter of a second; 0 when there is none: an idle shard is not stale.
        apply_delay: From durable to in the store; each quarter of a second in which records came counts once.
        fsync: Syncs of the update log.
        refused: Requests and connections that were refused since the start, by reason.
        num_requests: Requests begun since the start.
        num_failed: Requests that a bug has ended.
        inflight_requests: Requests begun or being read now.
        log_first_seq: Oldest record that can be read.
        log_size_bytes: Of the log on disk.
        log_pending_bytes: On their way to disk.
        backlog_bytes: Memory of rows that are durable and not in the store.
        num_log_records: Records made durable since the start.
        log_written_bytes: Bytes written to the log since the start.
        store_bytes: RocksDB's files.
        compaction_bytes: What RocksDB still has to compact, about.
        cache: RocksDB's block cache.
        memory_bytes: Resident memory of the process.
        cpu_s: Processor time of the process, seconds.
        num_open_files: File descriptors of the process.
        disk_free_bytes: Free to this user where the shard's directory is.
        disk_bytes: Size of that file system.
        num_followers: Leases of followers, whose log is kept.
        num_holds_broken: Leases and snapshots whose log was removed since the start, as the bound for it was reached.
        snapshot: The newest one of the server; None without any.
    """

    apply_lag_s: float
    apply_delay: HistogramSample
    fsync: HistogramSample
    refused: dict[str, int]
    num_requests: int
    num_failed: int
    inflight_requests: int
    log_first_seq: int
    log_size_bytes: int
    log_pending_bytes: int
    backlog_bytes: int
    num_log_records: int
    log_written_bytes: int
    store_bytes: int
    compaction_bytes: int
    cache: CacheSample
    memory_bytes: int
    cpu_s: float
    num_open_files: int
    disk_free_bytes: int
    disk_bytes: int
    num_followers: int
    num_holds_broken: int
    snapshot: SnapshotSample | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSample:
    """A shard at one moment. Fields are those of the IDL's `StatusReply`, in seconds where that has milliseconds."""

    server_id: str
    shard: int
    num_shards: int
    version: str
    pid: int
    uptime_s: float
    log_seq: int
    applied_seq: int
    inflight_bytes: int
    num_connections: int
    num_refused: int
    num_rows_written: int
    worst_loop_pause_s: float
    tables: tuple[TableSample, ...]
    writers: tuple[WriterSample, ...]
    expiry: ExpirySample
    detail: ShardDetail | None = None

    @classmethod
    def of_reply(cls, reply: Any) -> Self:
        """Return what an `idl.StatusReply` says."""
        same = ("server_id", "shard", "num_shards", "version", "pid", "uptime_s", "log_seq", "applied_seq")
        counts = ("inflight_bytes", "num_connections", "num_refused", "num_rows_written")
        expiry = {field.name: getattr(reply.expiry, field.name, None) for field in dataclasses.fields(ExpirySample)}
        return cls(
            **{name: getattr(reply, name) for name in (*same, *counts)},
            worst_loop_pause_s=(reply.worst_loop_pause_ms or 0.0) / 1000,
            tables=tuple(
                TableSample.of_spec(spec_from_idl(table.spec), table.num_rows_estimate) for table in reply.tables
            ),
            writers=tuple(WriterSample(**{name: getattr(c, name) for name in _WRITER_FIELDS}) for c in reply.clients),
            expiry=ExpirySample(**{name: value for name, value in expiry.items() if value is not None}),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a form that `json` can write."""
        # `asdict` takes eight times as long for a writer, of which there may be thousands.
        writers = [{name: getattr(writer, name) for name in _WRITER_FIELDS} for writer in self.writers]
        return dataclasses.asdict(dataclasses.replace(self, writers=())) | {"writers": writers}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return what `to_json` was made of.

        Raises:
            ProtocolError: It is nothing of the kind: the shard is of another version.
        """
        try:
            tables = tuple(TableSample(**table) for table in values["tables"])
            writers = tuple(WriterSample(**writer) for writer in values["writers"])
            detail = values["detail"] and _detail_of(values["detail"])
            parts = {"tables": tables, "writers": writers, "expiry": ExpirySample(**values["expiry"])}
            return cls(**{**values, **parts, "detail": detail})
        except (KeyError, TypeError) as exc:
            raise ProtocolError(f"not a sample of a shard of this version: {exc!r}") from exc


def _detail_of(values: dict[str, Any]) -> ShardDetail:
    def histogram(of: dict[str, Any]) -> HistogramSample:
        return HistogramSample(bounds_s=tuple(of["bounds_s"]), counts=tuple(of["counts"]), sum_s=of["sum_s"])

    parts = {
        "apply_delay": histogram(values["apply_delay"]),
        "fsync": histogram(values["fsync"]),
        "cache": CacheSample(**values["cache"]),
        "snapshot": values["snapshot"] and SnapshotSample(**values["snapshot"]),
    }
    return ShardDetail(**{**values, **parts})
