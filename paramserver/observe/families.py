"""Prometheus metrics of a server. `docs/metrics.md` lists the names, and a test compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.paramserver.observe.sample import (
    ArchiveSample,
    ExpirySample,
    FollowingSample,
    HistogramSample,
    LogSample,
    ShardDetail,
    ShardSample,
    ShardState,
    SnapshotSample,
    merge_dense,
    merge_writers,
)
from headrace.paramserver.system.text import visible

__all__ = ["server_families"]


# Gauges and counters of a shard: name without prefix, help, value. A counter's name ends in `_total`.
_OF_SAMPLE: tuple[tuple[str, str, Callable[[ShardSample], float]], ...] = (
    ("shard_uptime_seconds", "Since the shard was opened.", lambda s: s.uptime_s),
    ("shard_term", "Term in which the shard runs; 0 where nobody claims shards.", lambda s: s.term),
    ("log_seq", "Last durable record of the update log.", lambda s: s.log_seq),
    ("applied_seq", "Last record whose rows are in the store.", lambda s: s.applied_seq),
    ("inflight_bytes", "Bytes that requests and unwritten replies hold.", lambda s: s.inflight_bytes),
    ("connections", "Open connections.", lambda s: s.num_connections),
    ("rows_written_total", "Rows accepted.", lambda s: s.num_rows_written),
    ("updates_refused", "1 while updates are refused.", lambda s: s.updates_refusal is not None),
    ("loop_pause_seconds", "Longest pause of the event loop in the last minute.", lambda s: s.worst_loop_pause_s),
)
_OF_EXPIRY: tuple[tuple[str, str, Callable[[ExpirySample], float]], ...] = (
    ("expiry_running", "1 while an expiry run is under way.", lambda e: e.is_running),
    ("expiry_runs_total", "Expiry runs that have ended.", lambda e: e.num_runs),
    ("expiry_rows_scanned_total", "Rows that expiry has examined.", lambda e: e.num_rows_scanned),
    ("expiry_rows_expired_total", "Rows that expiry has deleted.", lambda e: e.num_rows_expired),
    ("expiry_failures_total", "Expiry runs that ended in an error.", lambda e: e.num_failed),
    ("expiry_last_run_timestamp_seconds", "When the last run ended; 0 before any.", lambda e: e.last_run_us / 1e6),
)
_OF_ARCHIVE: tuple[tuple[str, str, Callable[[ArchiveSample], float]], ...] = (
    ("archived_seq", "Last record up to which all are archived; -1 until the store answers.", lambda a: a.archived_seq),
    ("archive_behind_seconds", "Age of the oldest durable record not archived.", lambda a: a.behind_s),
    ("archive_behind_bytes", "Durable log that is not archived, about.", lambda a: a.behind_bytes),
    ("archive_failures_total", "Uploads and listings that failed.", lambda a: a.num_failures),
    ("archive_records_lost_total", "Records that were removed before they were archived.", lambda a: a.num_lost),
)
_OF_FOLLOWING: tuple[tuple[str, str, Callable[[FollowingSample], float]], ...] = (
    ("following_lag_seconds", "How long a follower has lacked a record; 0 if it lacks none.", lambda f: f.lag_ms / 1e3),
    (
        "following_knowledge_age_seconds",
        "How long ago a follower heard the writing shard, over all followers between.",
        lambda f: f.knowledge_age_ms / 1e3,
    ),
    ("following_source_seq", "Last durable record that the source has reported.", lambda f: f.source_seq),
    ("following_up", "1 while a follower can follow its source, and write.", lambda f: f.failure is None),
    ("following_restarts_total", "Copies begun anew, because the source lacked the next.", lambda f: f.num_restarts),
)
_OF_LOG: tuple[tuple[str, str, Callable[[LogSample], float]], ...] = (
    ("log_owned", "1 in the process that owns the shard's log, 0 in a standby.", lambda g: g.is_owner),
    ("log_stream_leader", "1 while a server leads the stream.", lambda g: g.leader is not None),
    ("log_stream_peer_lag", "Records that the slowest replica lacks; -1 if unknown.", lambda g: _known(g.peer_lag)),
    ("log_stream_peers_away", "Replicas that are away; -1 if unknown.", lambda g: _known(g.peers_away)),
    ("log_stream_bytes", "Size of the stream; -1 if unknown.", lambda g: _known(g.stream_bytes)),
    ("log_stream_max_bytes", "Bound of the stream; -1 if unknown.", lambda g: _known(g.stream_max_bytes)),
    ("log_stream_full", "1 while the stream has no room for what waits.", lambda g: g.is_full),
    ("log_outstanding_bytes", "Bytes in memory without an ack, or not on this disk.", lambda g: g.outstanding_bytes),
    ("log_stalled_seconds_total", "Time in which records waited for servers that gave no ack.", lambda g: g.stalled_s),
    ("log_voids_total", "Records of earlier owners that do not count.", lambda g: g.num_voids),
    ("log_elections_total", "Changes of the stream's leader that were seen.", lambda g: g.num_elections),
)
_OF_DETAIL: tuple[tuple[str, str, Callable[[ShardDetail], float]], ...] = (
    ("apply_lag_seconds", "Age of the oldest durable record not in the store; 0 when idle.", lambda d: d.apply_lag_s),
    ("inflight_requests", "Requests being read or answered.", lambda d: d.inflight_requests),
    ("requests_total", "Requests begun.", lambda d: d.num_requests),
    ("request_failures_total", "Requests that failed because of a bug.", lambda d: d.num_failed),
    ("log_first_seq", "Oldest record that can be read.", lambda d: d.log_first_seq),
    ("log_size_bytes", "Size of the update log on disk.", lambda d: d.log_size_bytes),
    ("log_pending_bytes", "Bytes on their way to the log's disk.", lambda d: d.log_pending_bytes),
    ("log_records_total", "Records made durable.", lambda d: d.num_log_records),
    ("log_written_bytes_total", "Bytes written to the log.", lambda d: d.log_written_bytes),
    ("backlog_bytes", "Memory of durable rows that are not in the store.", lambda d: d.backlog_bytes),
    ("store_bytes", "Size of RocksDB's files.", lambda d: d.store_bytes),
    ("store_compaction_pending_bytes", "Estimated bytes that RocksDB must compact.", lambda d: d.compaction_bytes),
    ("block_cache_capacity_bytes", "Largest size of the block cache.", lambda d: d.cache.capacity_bytes),
    ("block_cache_used_bytes", "Present size of the block cache.", lambda d: d.cache.used_bytes),
    ("block_cache_hits_total", "Blocks found in the cache.", lambda d: d.cache.hits),
    ("block_cache_misses_total", "Blocks read from files.", lambda d: d.cache.misses),
    ("memory_bytes", "Resident memory of the shard's process.", lambda d: d.memory_bytes),
    ("cpu_seconds_total", "Processor time of the shard's process.", lambda d: d.cpu_s),
    ("open_files", "File descriptors of the shard's process.", lambda d: d.num_open_files),
    ("disk_free_bytes", "Free space in the file system of the shard's directory.", lambda d: d.disk_free_bytes),
    ("disk_size_bytes", "Size of that file system.", lambda d: d.disk_bytes),
    ("disk_reserve_bytes", "Free space there below which updates are refused.", lambda d: d.disk_reserve_bytes),
    ("followers", "Log leases of followers.", lambda d: d.num_followers),
    ("log_holds_broken_total", "Leases and snapshots that have lost their log.", lambda d: d.num_holds_broken),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ShardDetail], HistogramSample]], ...] = (
    ("log_fsync_seconds", "Syncs of the update log.", lambda d: d.fsync),
    ("apply_delay_seconds", "From durable to in the store.", lambda d: d.apply_delay),
)
_OF_SNAPSHOT: tuple[tuple[str, str, Callable[[SnapshotSample], float]], ...] = (
    ("timestamp_seconds", "When the newest snapshot was made.", lambda s: s.created_us / 1e6),
    ("step", "Step of the newest snapshot; -1 if it is at no step.", lambda s: s.step),
    ("bytes", "Size of the newest snapshot.", lambda s: s.size_bytes),
)


def server_families(states: Sequence[ShardState]) -> Iterator[Metric]:
    """Yield the metrics of a server from the states of all its shards, in order."""
    samples = [state.sample for state in states if state.sample is not None]
    details = [(sample, sample.detail) for sample in samples if sample.detail is not None]
    yield from _server(states, samples)
    yield from _numbers(_OF_SAMPLE, [(sample, sample) for sample in samples])
    yield from _numbers(_OF_EXPIRY, [(sample, sample.expiry) for sample in samples if sample.expiry is not None])
    yield from _numbers(_OF_ARCHIVE, [(sample, sample.archive) for sample in samples if sample.archive is not None])
    following = [(sample, sample.following) for sample in samples if sample.following is not None]
    yield from _numbers(_OF_FOLLOWING, following)
    yield from _numbers(_OF_LOG, [(sample, sample.log) for sample in samples if sample.log is not None])
    yield from _numbers(_OF_DETAIL, details)
    for name, text, histogram_of in _HISTOGRAMS:
        family = HistogramMetricFamily(f"headrace_{name}", text, labels=["shard"])
        for sample, detail in details:
            histogram = histogram_of(detail)
            family.add_metric([str(sample.shard)], _cumulative(histogram), histogram.sum_s)
        yield family
    yield from _parts(samples, details)


def _known(value: int | None) -> float:
    return -1 if value is None else value


def _numbers(table: Sequence[tuple[str, str, Any]], sources: Sequence[tuple[ShardSample, Any]]) -> Iterator[Metric]:
    for name, text, value_of in table:
        family = _family(name, text)
        for sample, source in sources:
            family.add_metric([str(sample.shard)], value_of(source))
        yield family


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"headrace_{name}", text, labels=["shard", *labels])


def _cumulative(histogram: HistogramSample) -> list[tuple[str, float]]:
    """Return (bound, number of durations up to it) of each bucket, as Prometheus wants them."""
    total, buckets = 0, []
    for bound_s, count in zip((*histogram.bounds_s, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound_s == float("inf") else f"{bound_s:g}", float(total)))
    return buckets


def _server(states: Sequence[ShardState], samples: Sequence[ShardSample]) -> Iterator[Metric]:
    info = GaugeMetricFamily("headrace_server_info", "Always 1.", labels=["server_id", "version"])
    if samples:
        info.add_metric([samples[0].server_id, samples[0].version], 1)
    yield info
    is_up = _family("shard_up", "1 if the shard answered.")
    restarts = _family("shard_restarts_total", "Restarts of the shard's process.")
    for state in states:
        is_up.add_metric([str(state.shard)], state.sample is not None)
        restarts.add_metric([str(state.shard)], state.num_restarts)
    stopped = _family("shard_stopped", "1 once the shard has stopped for good, until the server is restarted.")
    for state in states:
        stopped.add_metric([str(state.shard)], state.is_stopped)
    yield is_up
    yield stopped
    yield restarts
    steps = GaugeMetricFamily("headrace_writer_step", "Step that every shard has.", labels=["run", "client"])
    connected = GaugeMetricFamily("headrace_writer_connected", "1 while connected.", labels=["run", "client"])
    ages = GaugeMetricFamily(
        "headrace_writer_age_seconds",
        "Every update that is older is on every shard; grows while no step ends.",
        labels=["run", "client"],
    )
    step_of: dict[tuple[str, str], int] = {}
    is_connected: dict[tuple[str, str], bool] = {}
    for writer in merge_writers(samples):  # one for each epoch of a client
        key = (visible(writer.run), visible(writer.client))
        step_of[key] = min(step_of.get(key, writer.step), writer.step)
        is_connected[key] = is_connected.get(key, False) or writer.is_connected
        if writer.is_connected and writer.age_s is not None:
            ages.add_metric(key, writer.age_s)
    for key in sorted(step_of):
        connected.add_metric(key, is_connected[key])
        if is_connected[key]:  # the step of a run that has ended means nothing, and its name would stay for ever
            steps.add_metric(key, step_of[key])
    yield connected
    yield steps
    yield ages


def _parts(samples: Sequence[ShardSample], details: Sequence[tuple[ShardSample, ShardDetail]]) -> Iterator[Metric]:
    rows = _family("table_rows", "Estimated rows of a table on the shard.", "table")
    for sample in samples:
        for table in sample.tables:
            if not table.spec.is_dense:
                rows.add_metric([str(sample.shard), table.spec.fqn], table.num_rows_estimate)
    yield rows
    dense = GaugeMetricFamily("headrace_dense_bytes", "Size of a model's dense part.", labels=["model"])
    for part in merge_dense(samples):
        dense.add_metric([part.model], part.size_bytes)
    yield dense
    refused = _family("refused_total", "Refused requests and connections.", "reason")
    for sample, detail in details:
        for reason, count in detail.refused.items():
            refused.add_metric([str(sample.shard), reason], count)
    yield refused
    log_refused = _family("log_refused_total", "Appends that the log's servers refused.", "reason")
    behind = _family("standby_behind_records", "Records that a standby lacks; -1 before it has told.", "standby")
    away = _family("standby_away", "1 while a standby does not answer its owner.", "standby")
    for sample in samples:
        for reason, count in sorted(sample.log.refusals.items()) if sample.log is not None else ():
            log_refused.add_metric([str(sample.shard), reason], count)
        for standby in sample.log.standbys if sample.log is not None else ():
            lag = max(sample.log_seq - standby.applied_seq, 0) if standby.applied_seq >= 0 else -1
            behind.add_metric([str(sample.shard), standby.address], lag)
            away.add_metric([str(sample.shard), standby.address], standby.failure is not None)
    yield from (log_refused, behind, away)
    snapshot = next((detail.snapshot for _, detail in details if detail.snapshot is not None), None)
    for name, text, of_snapshot in _OF_SNAPSHOT:
        family = GaugeMetricFamily(f"headrace_snapshot_{name}", text)
        if snapshot is not None:
            family.add_metric([], of_snapshot(snapshot))
        yield family
