"""Sample a shard's figures by polling, so that the update path keeps no counters for it.

A look every quarter of a second notes what cannot be found out later: how long the store has lacked a record, and how
long syncs took. Everything else is read when somebody asks.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from headrace.paramserver.archive.archiver import Archiver, ArchiveState
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.expiry.expirer import Expirer
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.interface import LogMetrics, ReplicatedLog, UpdateLog
from headrace.paramserver.log.sessions import Session
from headrace.paramserver.observe.sample import (
    ArchiveSample,
    CacheSample,
    ExpirySample,
    FollowerSample,
    FollowingSample,
    HistogramSample,
    LogSample,
    ShardDetail,
    ShardSample,
    SnapshotSample,
    StandbySample,
    TableSample,
    WriterSample,
)
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.shard.disk_room import DiskRoom
from headrace.paramserver.shard.membership import Membership, StandbyView
from headrace.paramserver.shard.retention import LogRetention
from headrace.paramserver.shard.source_copy import SourceCopy
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import LoopProbe, background_task
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl, spec_to_idl

__all__ = [
    "ApplyLag",
    "DurationCounts",
    "FsyncTimes",
    "ShardParts",
    "ShardSampler",
    "block_cache_of",
    "copies_to_idl",
    "owner_to_idl",
]

_VERSION = metadata.version("headrace")  # of what runs here, whatever is installed by now
_LOOK_INTERVAL_S = 0.25
# Positions remembered; beyond that, the last one stands for those that follow.
_MAX_TARGETS = 256
# From 0.1 ms to 6.6 s by doubling: from a fast disk to one in trouble.
_FSYNC_BOUNDS_S = tuple(1e-4 * 2**i for i in range(17))
# The store holds rows back for up to two seconds by design, so shorter bounds would show nothing.
_APPLY_BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
# Counting rows walks RocksDB's list of all its files.
_ROWS_MAX_AGE_S = 10.0
# A server that is away must not make a status late.
_STATE_TIMEOUT_S = 1.0
# Disconnected writers of older epochs: each costs two time series and a line of the status page.
_MAX_PAST_WRITERS = 256
_REFUSAL_REASONS = ("overloaded", "unauthorized", "malformed", "timed_out", "storage")
_CACHE_COUNTS = re.compile(r"^rocksdb\.block\.cache\.(hit|miss) COUNT : (\d+)$", re.MULTILINE)


class DurationCounts:
    """Counts durations by length. Not thread-safe."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Start at zero, with bounds as in `HistogramSample`."""
        self._bounds_s, self._counts, self._sum_s = bounds_s, [0] * (len(bounds_s) + 1), 0.0

    def add(self, duration_s: float, times: int = 1) -> None:
        """Count a duration; one that equals a bound is within it."""
        self._counts[bisect.bisect_left(self._bounds_s, duration_s)] += times
        self._sum_s += duration_s * times

    def sample(self) -> HistogramSample:
        """Return the counts so far."""
        return HistogramSample(bounds_s=self._bounds_s, counts=tuple(self._counts), sum_s=self._sum_s)


class FsyncTimes:
    """A histogram of a log's syncs: exact, but syncs that the log has forgotten since a look get remembered lengths."""

    def __init__(self) -> None:
        self._durations, self._num_seen, self._sum_s = DurationCounts(_FSYNC_BOUNDS_S), 0, 0.0

    def look(self, metrics: LogMetrics) -> None:
        """Count the syncs since the last look."""
        self._sum_s = metrics.commit_s
        num_new, self._num_seen = metrics.num_commits - self._num_seen, metrics.num_commits
        recent = list(metrics.recent_commit_s)
        recent = recent[max(len(recent) - num_new, 0) :]
        if not recent:
            return
        # Spread the forgotten syncs evenly over the remembered ones.
        rounds, rest = divmod(num_new, len(recent))
        for i, duration_s in enumerate(recent):
            self._durations.add(duration_s, rounds + (i < rest))

    def sample(self) -> HistogramSample:
        """Return the counts so far."""
        # The log's own sum includes the syncs that it no longer remembers one by one.
        return dataclasses.replace(self._durations.sample(), sum_s=self._sum_s)


class ApplyLag:
    """Measures how long the store has lacked durable records, and how long each look's records took to reach it."""

    def __init__(self) -> None:
        self._targets: deque[tuple[int, float]] = deque()
        self.delay = DurationCounts(_APPLY_BOUNDS_S)

    def look(self, log_seq: int, applied_seq: int, now_s: float) -> float:
        """Return how long the oldest durable record that is not in the store has been known, seconds; 0 without one."""
        targets = self._targets
        while targets and targets[0][0] <= applied_seq:
            self.delay.add(now_s - targets.popleft()[1])
        newest = targets[-1][0] if targets else applied_seq
        if log_seq > newest:
            if len(targets) < _MAX_TARGETS:
                targets.append((log_seq, now_s))
            else:
                targets[-1] = (log_seq, targets[-1][1])
        return now_s - targets[0][1] if targets else 0.0


@dataclass(frozen=True, slots=True)
class ShardParts:
    """The parts that make up an open shard."""

    config: ShardConfig
    log: UpdateLog
    store: RowStore
    applier: Applier
    ingest: Ingest
    feed: UpdateFeed
    retention: LogRetention
    snapshots: SnapshotFiles
    probe: LoopProbe
    room: DiskRoom
    expirer: Expirer | None = None  # these five only of a shard that takes updates
    membership: Membership | None = None
    uploader: SnapshotUploader | None = None
    archiver: Archiver | None = None
    stream: ReplicatedLog | None = None  # the log, if it is one
    following: SourceCopy | None = None  # of a shard that follows a source


class ShardSampler:
    """Makes samples and status replies of a shard; `server` has its connections, once it serves.

    Thread: the event loop's.
    """

    def __init__(self, parts: ShardParts, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Read the figures of `parts`; `clock_s` is monotonic."""
        self.server: ThriftServer | None = None
        self._parts, self._clock_s = parts, clock_s
        self._started_s = clock_s()
        self._lag, self._fsync = ApplyLag(), FsyncTimes()
        self._rows: dict[int, int] = {}
        self._rows_at_s = float("-inf")

    def looking(self) -> AbstractAsyncContextManager[object]:
        """Look every quarter of a second while the block lasts; samples need it, status replies do not."""
        return background_task(self._keep_looking(), name="headrace-metrics-look")

    async def _keep_looking(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _look(self) -> float:
        """Note what cannot be found out later; return the lag of applying, seconds."""
        self._fsync.look(self._parts.log.metrics)
        return self._lag.look(self._parts.log.last_seq, self._parts.applier.applied_seq, self._clock_s())

    def _figures(self) -> dict[str, Any]:
        """Return the fields that a sample and a status reply have in common."""
        parts, server = self._parts, self.server
        return {
            "server_id": parts.config.server_id,
            "shard": parts.config.shard,
            "num_shards": parts.config.num_shards,
            "version": _VERSION,
            "pid": os.getpid(),
            "uptime_s": self._clock_s() - self._started_s,
            # A standby reads its log before it applies it: whoever copies its rows goes on behind what they have.
            "log_seq": parts.log.last_seq if parts.following is None else parts.ingest.submitted_seq,
            "applied_seq": parts.applier.applied_seq,
            "inflight_bytes": server.inflight_bytes if server else 0,
            "num_connections": server.num_connections if server else 0,
            "num_refused": server.num_refused if server else 0,
            "num_disk_failures": server.stats.num_storage if server else 0,
            "num_rows_written": parts.ingest.num_rows_written,
        }

    async def status(self) -> Any:
        """Return the shard's `idl.StatusReply`, with all writers and fresh row counts. Cancellation: harmless."""
        ingest, tables = self._parts.ingest, list(self._parts.ingest.catalog)
        figures = self._figures()  # tables that come after `log_seq` have a record behind it
        num_rows = await asyncio.to_thread(_count_rows, self._parts.store, tables)
        return idl.StatusReply(
            **figures,
            tables=[_table_status(*each) for each in zip(tables, num_rows, strict=True)],
            clients=[_client_status(session) for session in ingest.sessions],
            accepted_seq=ingest.accepted_seq,
            refused_ago_ms=self.server.refused_ago_ms if self.server else None,
            updates_refusal=self._parts.room.refusal,
            worst_loop_pause_ms=self._parts.probe.worst_pause_s * 1000,
            expiry=None if self._parts.expirer is None else self._parts.expirer.status(),
            upload=None if self._parts.uploader is None else self._parts.uploader.status(),
            archive=None if self._parts.archiver is None else archive_to_idl(self._parts.archiver.state()),
            log=None if (log := await self._sample_log()) is None else log.to_idl(),
            followers=await self._followers(),
            following=None if self._parts.following is None else self._parts.following.status(),
        )

    async def _followers(self) -> list[Any]:
        standbys = self._standbys
        told = [(each.address, each.applied_seq) for each in standbys if each.failure is None and each.applied_seq >= 0]
        return await self._parts.feed.followers_status(told)

    @property
    def _standbys(self) -> Sequence[StandbyView]:
        membership = self._parts.membership
        return () if membership is None else membership.standbys

    @property
    def _term(self) -> int:
        parts = self._parts
        if parts.following is not None:
            return parts.following.term
        return 0 if parts.membership is None else parts.membership.term

    async def _sample_log(self) -> LogSample | None:
        parts = self._parts
        return None if parts.stream is None else await _sample_stream(parts.stream, self._standbys)

    async def sample(self) -> ShardSample:
        """Return the shard's sample; row counts may be ten seconds old. REQUIRES: `server` is set.

        Raises:
            HeadraceError, OSError: The store, or the system, cannot be asked.

        Cancellation: harmless.
        """
        parts = self._parts
        # Those of a shard with several copies are its owner's to report.
        is_standby = parts.following is not None and (parts.config.is_standby or parts.stream is not None)
        tables = [] if is_standby else list(parts.ingest.catalog)
        # In threads: RocksDB's lists of files, the file system and the snapshots may be slow.
        now_s = self._clock_s()
        if now_s - self._rows_at_s >= _ROWS_MAX_AGE_S or any(t.table_id not in self._rows for t in tables):
            rows = await asyncio.to_thread(_count_rows, parts.store, tables)
            self._rows = {table.table_id: num_rows for table, num_rows in zip(tables, rows, strict=True)}
            self._rows_at_s = now_s
        slow = await asyncio.to_thread(_slow_figures, parts)
        lag_s = self._look()
        return ShardSample(
            **self._figures(),
            term=self._term,
            worst_loop_pause_s=parts.probe.worst_pause_s,
            refused_ago_s=_seconds(self.server.refused_ago_ms if self.server else None),
            updates_refusal=parts.room.refusal,
            tables=tuple(
                TableSample.of_table(table.spec, self._rows.get(table.table_id, 0), table.owner, table.filling)
                for table in tables
            ),
            writers=() if is_standby else _writers_of(parts.ingest),
            followers=tuple(FollowerSample(**vars(follower)) for follower in await self._followers()),
            expiry=None if parts.expirer is None else ExpirySample.of_status(parts.expirer.status()),
            archive=None if parts.archiver is None else ArchiveSample(**dataclasses.asdict(parts.archiver.state())),
            log=await self._sample_log(),
            following=None if parts.following is None else FollowingSample.of_status(parts.following.status()),
            detail=self._detail(lag_s, slow),
        )

    def _detail(self, lag_s: float, slow: dict[str, Any]) -> ShardDetail:
        parts, server = self._parts, self.server
        assert server is not None, "samples are made of a shard that serves"
        log, stats = parts.log, server.stats
        return ShardDetail(
            apply_lag_s=lag_s,
            apply_delay=self._lag.delay.sample(),
            fsync=self._fsync.sample(),
            refused={
                "connections": stats.num_connections_refused,
                **{reason: getattr(stats, f"num_{reason}") for reason in _REFUSAL_REASONS},
            },
            num_requests=stats.num_requests,
            num_failed=stats.num_failed,
            inflight_requests=server.inflight_requests,
            log_first_seq=log.first_seq,
            log_size_bytes=log.size_bytes,
            log_pending_bytes=log.pending_bytes,
            backlog_bytes=parts.applier.pending_bytes,
            num_log_records=log.metrics.num_records,
            log_written_bytes=log.metrics.written_bytes,
            num_followers=len(parts.feed.followers),
            num_holds_broken=parts.retention.num_broken,
            disk_reserve_bytes=parts.room.reserve_bytes,
            cpu_s=time.process_time(),
            **slow,
        )


async def _sample_stream(log: ReplicatedLog, standbys: Sequence[StandbyView]) -> LogSample:
    """Return the sample of a replicated log; what its servers do not tell in time is None. Cancellation: harmless."""
    state = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STATE_TIMEOUT_S):
            state = await log.engine_state()
    metrics = log.stream_metrics
    return LogSample(
        is_owner=log.is_owner,
        owner=log.owner,
        leader=None if state is None else state.leader,
        peer_lag=None if state is None else max((peer.lag for peer in state.peers), default=0),
        peers_away=None if state is None else sum(peer.is_offline for peer in state.peers),
        outstanding_bytes=log.outstanding_bytes,
        stalled_s=metrics.stalled_s + log.stalled_s,
        refusals=dict(metrics.num_refusals),
        num_voids=metrics.num_voids,
        num_elections=metrics.num_elections,
        stream_bytes=None if state is None else state.size_bytes,
        stream_max_bytes=None if state is None else state.max_bytes,
        is_full=log.is_full,
        standbys=tuple(
            StandbySample(address=each.address, applied_seq=each.applied_seq, failure=each.failure) for each in standbys
        ),
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _table_status(table: Table, num_rows_estimate: int) -> Any:
    scalars = [
        idl.StoredScalar(
            scalar=idl.TableScalar(name=scalar.name, dtype=int(scalar.dtype), data=scalar.data),
            epoch=scalar.epoch,
            step=scalar.step,
        )
        for scalar in table.scalars.values()
    ]
    filling = table.filling
    return idl.TableStatus(
        spec=spec_to_idl(table.spec),
        num_rows_estimate=num_rows_estimate,
        scalars=scalars,
        owner=owner_to_idl(table),
        earlier_fingerprints=sorted(table.earlier) or None,
        filling=None if filling is None else idl.Filling(**dataclasses.asdict(filling)),
        has_deletes=table.has_deletes or None,
    )


def archive_to_idl(state: ArchiveState) -> Any:
    """Return an archiver's state as an `idl.ArchiveStatus`."""
    return idl.ArchiveStatus(**dataclasses.asdict(state))


def owner_to_idl(table: Table) -> Any:
    """Return a table's `idl.TableOwner`; None if it has no owner."""
    if (owner := table.owner) is None:
        return None
    former_run, former_epoch = owner.former or (None, None)
    return idl.TableOwner(
        fqn=table.spec.fqn,
        run=owner.run,
        epoch=owner.epoch,
        is_backfill=owner.is_backfill,
        has_ended=owner.has_ended,
        former_run=former_run,
        former_epoch=former_epoch,
    )


def copies_to_idl(copies: Iterable[tuple[int, str, int, str]]) -> list[Any]:
    """Return the `idl.ShardAddress` of each of `ShardConfig.copies`."""
    return [idl.ShardAddress(shard=shard, host=host, port=port, node=node) for shard, host, port, node in copies]


def _client_status(session: Session) -> Any:
    return idl.ClientStatus(
        **_writer(session),
        last_client_seq=session.last_client_seq,
        exact_step=session.exact_step,
        ended_client_seq=session.ended_client_seq,
        time_us=session.time_us,
    )


def _writer(session: Session) -> dict[str, Any]:
    fields = {name: getattr(session, name) for name in ("run", "client", "epoch", "step", "rank", "world_size")}
    if is_connected := session.num_connections > 0:
        fields |= {"cost_percent": session.cost_percent, "is_cost_bound": session.is_cost_bound}
        fields["num_unstreamed"] = session.num_unstreamed or None
    if session.has_ended:
        fields["has_ended"] = True
    if session.is_trainer and session.covered_us:
        fields["age_s"] = max(time.time_ns() // 1000 - session.covered_us, 0) / 1e6
    return {**fields, "is_connected": is_connected}


def _writers_of(ingest: Ingest) -> tuple[WriterSample, ...]:
    """Return the writers that matter now, in order of first contact: a shard remembers 16,384.

    These are all that are connected, all of the newest epoch and of the newest that counts, whose absence is a problem,
    and the last of the others.
    """
    sessions = list(ingest.sessions)
    newest = {max((session.epoch for session in sessions), default=0), ingest.sessions.newest_epoch_of(lambda _: True)}
    is_past = [session.num_connections == 0 and session.epoch not in newest for session in sessions]
    num_dropped = max(sum(is_past) - _MAX_PAST_WRITERS, 0)
    num_past = itertools.accumulate(is_past)
    return tuple(
        WriterSample(**_writer(session))
        for session, past, count in zip(sessions, is_past, num_past, strict=True)
        if not past or count > num_dropped
    )


def _count_rows(store: RowStore, tables: Sequence[Table]) -> list[int]:
    """Return about how many rows each table has on a shard. It walks all of RocksDB's files: use a thread."""
    estimates = store.num_rows_estimates([table.table_id for table in tables])
    return [min(estimate, table.spec.num_rows or estimate) for estimate, table in zip(estimates, tables, strict=True)]


def _slow_figures(parts: ShardParts) -> dict[str, Any]:
    """Return the fields of a `ShardDetail` that must not be read on the event loop."""
    files = os.statvfs(parts.config.directory)
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident_pages = int(statm.read().split()[1])
    return {
        "store_bytes": _number(parts.store, "rocksdb.total-sst-files-size"),
        "compaction_bytes": _number(parts.store, "rocksdb.estimate-pending-compaction-bytes"),
        "cache": block_cache_of(parts.store),
        "memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "num_open_files": len(os.listdir("/proc/self/fd")),
        "disk_free_bytes": files.f_bavail * files.f_frsize,
        "disk_bytes": files.f_blocks * files.f_frsize,
        "snapshot": _newest_snapshot(parts),
    }


def _number(store: RowStore, name: str) -> int:
    return int(store.rocksdb_property(name) or 0)


def block_cache_of(store: RowStore) -> CacheSample:
    """Return the size of the block cache, and its hits and misses."""
    counts = dict(_CACHE_COUNTS.findall(store.rocksdb_property("rocksdb.options-statistics")))
    return CacheSample(
        capacity_bytes=_number(store, "rocksdb.block-cache-capacity"),
        used_bytes=_number(store, "rocksdb.block-cache-usage"),
        hits=int(counts["hit"]),
        misses=int(counts["miss"]),
    )


def _newest_snapshot(parts: ShardParts) -> SnapshotSample | None:
    try:
        newest = parts.snapshots.newest(parts.config.server_id)
    except HeadraceError:  # retention logs it; the absent metric shows it here
        return None
    stored = None if parts.uploader is None else parts.uploader.newest
    newest = max(filter(None, (newest, stored)), key=lambda manifest: manifest.created_us, default=None)
    if newest is None:
        return None
    fields = dataclasses.fields(SnapshotSample)
    return SnapshotSample(**{field.name: getattr(newest, field.name) for field in fields})
