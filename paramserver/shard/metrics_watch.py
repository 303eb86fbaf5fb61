"""Looks at a shard from beside: no counter is kept on the way of an update for it.

A look every quarter of a second notes what cannot be told afterwards: since when the store lacks a record, and how long
syncs took. All else is read when somebody asks for a sample.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Self

from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.expiry.expiry import Expirer
from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.ingest.update_feed import UpdateFeed
from headrace.paramserver.log.update_log import LogMetrics, UpdateLog
from headrace.paramserver.metrics.metrics_sample import (
    CacheSample,
    ExpirySample,
    HistogramSample,
    ShardDetail,
    ShardSample,
    SnapshotSample,
    TableSample,
    WriterSample,
)
from headrace.paramserver.process.loop_probe import LoopProbe
from headrace.paramserver.rpc.rpc_server import ThriftServer
from headrace.paramserver.shard.log_retention import LogRetention
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.errors import HeadraceError

__all__ = ["ApplyLag", "DurationCounts", "FsyncTimes", "ShardWatch", "Watched", "block_cache_of", "count_rows"]

_LOOK_INTERVAL_S = 0.25
# Positions remembered; when there are more, the last one stands for those that follow.
_MAX_TARGETS = 256
# 0.1 ms to 6.6 s by doubling: a sync of a fast disk to one of a disk in trouble.
_FSYNC_BOUNDS_S = tuple(1e-4 * 2**i for i in range(17))
# The store holds rows back for up to two seconds by design, so shorter bounds would tell nothing.
_APPLY_BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
# RocksDB's list of all its files is walked for it.
_ROWS_MAX_AGE_S = 10.0
# Of those that are away and of older epochs: each of thousands would cost two series and a line of the status page.
_MAX_PAST_WRITERS = 256
_CACHE_COUNTS = re.compile(r"^rocksdb\.block\.cache\.(hit|miss) COUNT : (\d+)$", re.MULTILINE)


class DurationCounts:
    """Counts durations by length. Not thread-safe."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Count nothing yet; bounds as in `HistogramSample`."""
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float, times: int = 1) -> None:
        """Count one, or one for several; a duration equal to a bound is within it."""
        self._counts[bisect.bisect_left(self._bounds_s, duration_s)] += times
        self._sum_s += duration_s * times

    def sample(self) -> HistogramSample:
        """Return the counts so far."""
        return HistogramSample(bounds_s=self._bounds_s, counts=tuple(self._counts), sum_s=self._sum_s)


class FsyncTimes:
    """A histogram of a log's syncs, from the last ones that the log remembers.

    Count and sum are exact. When more syncs than the log remembers lie between two looks, those that it remembers stand
    for all of them.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self._durations = DurationCounts(_FSYNC_BOUNDS_S)
        self._num_seen = 0
        self._sum_s = 0.0

    def look(self, metrics: LogMetrics) -> None:
        """Count the syncs since the last look."""
        self._sum_s = metrics.fsync_s
        num_new, self._num_seen = metrics.num_fsyncs - self._num_seen, metrics.num_fsyncs
        recent = list(metrics.recent_fsync_s)
        recent = recent[max(len(recent) - num_new, 0) :]
        if not recent:
            return
        # Spread what is not remembered evenly over what is: every known one counts once or once more for each round.
        rounds, rest = divmod(num_new, len(recent))
        for i, duration_s in enumerate(recent):
            self._durations.add(duration_s, rounds + (i < rest))

    def sample(self) -> HistogramSample:
        """Return the counts so far."""
        # The log's own sum: it has those in it that it does not remember one by one.
        return dataclasses.replace(self._durations.sample(), sum_s=self._sum_s)


class ApplyLag:
    """Since when the store lacks records that are durable, and how long each look's records took to get there."""

    def __init__(self) -> None:
        """Know of none."""
        self._targets: deque[tuple[int, float]] = deque()
        self.delay = DurationCounts(_APPLY_BOUNDS_S)

    def look(self, log_seq: int, applied_seq: int, now_s: float) -> float:
        """Return for how long the oldest record has been known that is not in the store, seconds; 0 without one.

        Args:
            log_seq: Last durable record.
            applied_seq: Last record whose rows are in the store.
            now_s: Monotonic, seconds.
        """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The parts of a shard that are looked at."""

    config: ShardConfig
    log: UpdateLog
    store: RowStore
    applier: Applier
    ingest: Ingest
    feed: UpdateFeed
    retention: LogRetention
    snapshots: SnapshotFiles
    expirer: Expirer
    probe: LoopProbe


class ShardWatch:
    """Makes samples of a shard. Use it with `async with`.

    Thread: the event loop's.
    """

    def __init__(
        self, watched: Watched, server: ThriftServer, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Look at a shard that serves.

        Args:
            watched: Its parts.
            server: Its connections.
            clock_s: Monotonic seconds.
        """
        self._watched, self._server, self._clock_s = watched, server, clock_s
        self._started_s = clock_s()
        self._lag, self._fsync = ApplyLag(), FsyncTimes()
        self._rows: dict[int, int] = {}
        self._rows_at_s = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._keep_looking(), name="headrace-metrics-look")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._looking is not None
        self._looking.cancel()
        await asyncio.wait([self._looking])

    def look(self) -> float:
        """Note what cannot be told afterwards; return the lag of applying, seconds."""
        self._fsync.look(self._watched.log.metrics)
        return self._lag.look(self._watched.log.last_seq, self._watched.applier.applied_seq, self._clock_s())

    async def sample(self) -> ShardSample:
        """Return the shard as it is now; numbers of rows are up to ten seconds old.

        Raises:
            HeadraceError: The store cannot be asked.
            OSError: The system cannot.

        Cancellation: harmless.
        """
        watched, server = self._watched, self._server
        tables = list(watched.ingest.catalog)
        # In a thread: RocksDB's lists of files, the file system and the snapshots may be slow.
        now_s = self._clock_s()
        if now_s - self._rows_at_s >= _ROWS_MAX_AGE_S or any(t.table_id not in self._rows for t in tables):
            rows = await asyncio.to_thread(count_rows, watched.store, tables)
            self._rows = {table.table_id: num_rows for table, num_rows in zip(tables, rows, strict=True)}
            self._rows_at_s = now_s
        slow = await asyncio.to_thread(_slow_part, watched)
        lag_s = self.look()
        config = watched.config
        return ShardSample(
            server_id=config.server_id,
            shard=config.shard,
            num_shards=config.num_shards,
            version=metadata.version("headrace"),
            pid=os.getpid(),
            uptime_s=now_s - self._started_s,
            log_seq=watched.log.last_seq,
            applied_seq=watched.applier.applied_seq,
            inflight_bytes=server.inflight_bytes,
            num_connections=server.num_connections,
            num_refused=server.num_refused,
            num_rows_written=watched.ingest.num_rows_written,
            worst_loop_pause_s=watched.probe.worst_pause_s,
            tables=tuple(TableSample.of_spec(table.spec, self._rows.get(table.table_id, 0)) for table in tables),
            writers=_writers_of(watched.ingest),
            expiry=_expiry_of(watched.expirer),
            detail=self._detail(lag_s, slow),
        )

    def _detail(self, lag_s: float, slow: dict[str, Any]) -> ShardDetail:
        watched, server = self._watched, self._server
        log, stats = watched.log, server.stats
        return ShardDetail(
            apply_lag_s=lag_s,
            apply_delay=self._lag.delay.sample(),
            fsync=self._fsync.sample(),
            refused={
                "connections": stats.num_connections_refused,
                "overloaded": stats.num_overloaded,
                "unauthorized": stats.num_unauthorized,
                "malformed": stats.num_malformed,
                "timed_out": stats.num_timed_out,
                "storage": stats.num_storage,
            },
            num_requests=stats.num_requests,
            num_failed=stats.num_failed,
            inflight_requests=server.inflight_requests,
            log_first_seq=log.first_seq,
            log_size_bytes=log.size_bytes,
            log_pending_bytes=log.pending_bytes,
            backlog_bytes=watched.applier.pending_bytes,
            num_log_records=log.metrics.num_records,
            log_written_bytes=log.metrics.written_bytes,
            num_followers=len(watched.feed.followers),
            num_holds_broken=watched.retention.num_broken,
            cpu_s=time.process_time(),
            **slow,
        )

    async def _keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)


def count_rows(store: RowStore, tables: Sequence[Table]) -> list[int]:
    """Return about how many rows each table has on a shard.

    Thread: any; it goes through all files of RocksDB's.
    """
    estimates = store.num_rows_estimates([table.table_id for table in tables])
    return [min(estimate, table.spec.num_rows or estimate) for estimate, table in zip(estimates, tables, strict=True)]


def _writers_of(ingest: Ingest) -> tuple[WriterSample, ...]:
    """Return the writers that matter now, in the order in which they were heard of: a shard remembers 16,384.

    All that are connected, all of the newest epoch, whose absence is a problem, and the last ones of the others.
    """
    sessions = list(ingest.sessions)
    newest = max((session.epoch for session in sessions), default=0)
    is_past = [session.num_connections == 0 and session.epoch != newest for session in sessions]
    num_left_out = max(sum(is_past) - _MAX_PAST_WRITERS, 0)
    num_past = itertools.accumulate(is_past)
    return tuple(
        WriterSample(
            run=session.run,
            client=session.client,
            epoch=session.epoch,
            step=session.step,
            is_connected=session.num_connections > 0,
            rank=session.rank,
            world_size=session.world_size,
        )
        for session, past, count in zip(sessions, is_past, num_past, strict=True)
        if not past or count > num_left_out
    )


def _expiry_of(expirer: Expirer) -> ExpirySample:
    return ExpirySample(
        is_running=expirer.is_running,
        num_runs=expirer.num_runs,
        num_rows_scanned=expirer.num_rows_scanned,
        num_rows_expired=expirer.num_rows_expired,
        num_failed=expirer.num_failed,
        last_run_us=expirer.last_run_us,
    )


def _slow_part(watched: Watched) -> dict[str, Any]:
    """Return the fields of a `ShardDetail` that are not to be asked for in the event loop."""
    files = os.statvfs(watched.config.directory)
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident_pages = int(statm.read().split()[1])
    store = watched.store
    return {
        "store_bytes": _number(store, "rocksdb.total-sst-files-size"),
        "compaction_bytes": _number(store, "rocksdb.estimate-pending-compaction-bytes"),
        "cache": block_cache_of(store),
        "memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "num_open_files": len(os.listdir("/proc/self/fd")),
        "disk_free_bytes": files.f_bavail * files.f_frsize,
        "disk_bytes": files.f_blocks * files.f_frsize,
        "snapshot": _snapshot_of(watched),
    }


def _number(store: RowStore, name: str) -> int:
    return int(store.rocksdb_property(name) or 0)


def block_cache_of(store: RowStore) -> CacheSample:
    """Return how full the block cache is, and its hits and misses."""
    counts = dict(_CACHE_COUNTS.findall(store.rocksdb_property("rocksdb.options-statistics")))
    return CacheSample(
        capacity_bytes=_number(store, "rocksdb.block-cache-capacity"),
        used_bytes=_number(store, "rocksdb.block-cache-usage"),
        hits=int(counts["hit"]),
        misses=int(counts["miss"]),
    )


def _snapshot_of(watched: Watched) -> SnapshotSample | None:
    try:
        newest = watched.snapshots.newest(watched.config.server_id)
    except HeadraceError:  # retention says so in the log; a metric that is absent says it here
        return None
    if newest is None:
        return None
    return SnapshotSample(
        name=newest.name, step=newest.step, created_us=newest.created_us, size_bytes=newest.size_bytes
    )
