"""Prometheus' names of a server's figures. `docs/metrics.md` lists them, and a test compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.paramserver.metrics.metrics_sample import HistogramSample, ShardDetail, ShardSample

__all__ = ["ShardState", "server_families"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """A shard as its supervisor sees it.

    Attributes:
        shard: Index.
        address: Host and port.
        sample: What it told; None when it did not answer.
        error: Why not.
        num_restarts: How often its process was started again.
    """

    shard: int
    address: str
    sample: ShardSample | None = None
    error: str | None = None
    num_restarts: int = 0


# Gauges and counters of a shard: name without prefix, help, value. A counter's name ends in `_total`.
_OF_SAMPLE: tuple[tuple[str, str, Callable[[ShardSample], float]], ...] = (
    ("shard_uptime_seconds", "Since the shard was opened.", lambda s: s.uptime_s),
    ("log_seq", "Last durable record of the update log.", lambda s: s.log_seq),
    ("applied_seq", "Last record whose rows are in the store.", lambda s: s.applied_seq),
    ("inflight_bytes", "Bytes that requests and unwritten replies hold.", lambda s: s.inflight_bytes),
    ("connections", "Open connections.", lambda s: s.num_connections),
    ("rows_written_total", "Rows accepted.", lambda s: s.num_rows_written),
    ("loop_pause_seconds", "Longest pause of the event loop in the last minute.", lambda s: s.worst_loop_pause_s),
    ("expiry_running", "1 while a run of expiry is on its way.", lambda s: s.expiry.is_running),
    ("expiry_runs_total", "Runs of expiry that have ended.", lambda s: s.expiry.num_runs),
    ("expiry_rows_scanned_total", "Rows that expiry has looked at.", lambda s: s.expiry.num_rows_scanned),
    ("expiry_rows_expired_total", "Rows that expiry has deleted.", lambda s: s.expiry.num_rows_expired),
    ("expiry_failures_total", "Runs of expiry that ended in an error.", lambda s: s.expiry.num_failed),
    (
        "expiry_last_run_timestamp_seconds",
        "When the last run ended; 0 before any.",
        lambda s: s.expiry.last_run_us / 1e6,
    ),
)
_OF_DETAIL: tuple[tuple[str, str, Callable[[ShardDetail], float]], ...] = (
    ("apply_lag_seconds", "Age of the oldest durable record not in the store; 0 when idle.", lambda d: d.apply_lag_s),
    ("inflight_requests", "Requests begun or being read.", lambda d: d.inflight_requests),
    ("requests_total", "Requests begun.", lambda d: d.num_requests),
    ("request_failures_total", "Requests that a bug has ended.", lambda d: d.num_failed),
    ("log_first_seq", "Oldest record that can be read.", lambda d: d.log_first_seq),
    ("log_size_bytes", "Size of the update log on disk.", lambda d: d.log_size_bytes),
    ("log_pending_bytes", "Bytes on their way to the log's disk.", lambda d: d.log_pending_bytes),
    ("log_records_total", "Records made durable.", lambda d: d.num_log_records),
    ("log_written_bytes_total", "Bytes written to the log.", lambda d: d.log_written_bytes),
    ("backlog_bytes", "Memory of rows that are durable and not in the store.", lambda d: d.backlog_bytes),
    ("store_bytes", "Size of RocksDB's files.", lambda d: d.store_bytes),
    ("store_compaction_pending_bytes", "What RocksDB still has to compact, about.", lambda d: d.compaction_bytes),
    ("block_cache_capacity_bytes", "Size that the block cache may have.", lambda d: d.cache.capacity_bytes),
    ("block_cache_used_bytes", "Size that the block cache has.", lambda d: d.cache.used_bytes),
    ("block_cache_hits_total", "Blocks found in the cache.", lambda d: d.cache.hits),
    ("block_cache_misses_total", "Blocks read from files.", lambda d: d.cache.misses),
    ("memory_bytes", "Resident memory of the shard's process.", lambda d: d.memory_bytes),
    ("cpu_seconds_total", "Processor time of the shard's process.", lambda d: d.cpu_s),
    ("open_files", "File descriptors of the shard's process.", lambda d: d.num_open_files),
    ("disk_free_bytes", "Free where the shard's directory is.", lambda d: d.disk_free_bytes),
    ("disk_size_bytes", "Size of that file system.", lambda d: d.disk_bytes),
    ("followers", "Leases of followers, whose log is kept.", lambda d: d.num_followers),
    ("log_holds_broken_total", "Leases and snapshots that have lost their log.", lambda d: d.num_holds_broken),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ShardDetail], HistogramSample]], ...] = (
    ("log_fsync_seconds", "Syncs of the update log.", lambda d: d.fsync),
    ("apply_delay_seconds", "From durable to in the store.", lambda d: d.apply_delay),
)


def server_families(states: Sequence[ShardState]) -> Iterator[Metric]:
    """Yield the metrics of a server.

    Args:
        states: Of all its shards, in their order.
    """
    samples = [state.sample for state in states if state.sample is not None]
    details = [(sample, sample.detail) for sample in samples if sample.detail is not None]
    yield from _families_of_server(states, samples)
    for name, text, value_of in _OF_SAMPLE:
        family = _family(name, text)
        for sample in samples:
            family.add_metric([str(sample.shard)], value_of(sample))
        yield family
    for name, text, detail_of in _OF_DETAIL:
        family = _family(name, text)
        for sample, detail in details:
            family.add_metric([str(sample.shard)], detail_of(detail))
        yield family
    for name, text, histogram_of in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"headrace_{name}", text, labels=["shard"])
        for sample, detail in details:
            of = histogram_of(detail)
            histogram.add_metric([str(sample.shard)], _cumulative(of), of.sum_s)
        yield histogram
    yield from _families_of_parts(samples, details)


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"headrace_{name}", text, labels=["shard", *labels])


def _cumulative(histogram: HistogramSample) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus has them: bound, and how many durations are not above it."""
    total, buckets = 0, []
    for bound_s, count in zip((*histogram.bounds_s, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound_s == float("inf") else f"{bound_s:g}", float(total)))
    return buckets


def _families_of_server(states: Sequence[ShardState], samples: Sequence[ShardSample]) -> Iterator[Metric]:
    info = GaugeMetricFamily("headrace_server_info", "Always 1.", labels=["server_id", "version"])
    if samples:
        info.add_metric([samples[0].server_id, samples[0].version], 1)
    yield info
    is_up, restarts = (
        _family("shard_up", "1 when the shard has answered."),
        _family("shard_restarts_total", "Times that the process was started again."),
    )
    for state in states:
        is_up.add_metric([str(state.shard)], state.sample is not None)
        restarts.add_metric([str(state.shard)], state.num_restarts)
    yield is_up
    yield restarts
    steps = GaugeMetricFamily("headrace_writer_step", "Step that every shard has.", labels=["run", "client"])
    connected = GaugeMetricFamily("headrace_writer_connected", "1 while connected.", labels=["run", "client"])
    steps_of: dict[tuple[str, str], int] = {}
    connected_of: dict[tuple[str, str], bool] = {}
    for writer in (writer for sample in samples for writer in sample.writers):
        key = (writer.run, writer.client)
        steps_of[key] = min(steps_of.get(key, writer.step), writer.step)
        connected_of[key] = connected_of.get(key, False) or writer.is_connected
    for key in sorted(steps_of):
        connected.add_metric(key, connected_of[key])
        if connected_of[key]:  # of a run that has ended the step says nothing, and its name would stay for ever
            steps.add_metric(key, steps_of[key])
    yield connected
    yield steps


def _families_of_parts(
    samples: Sequence[ShardSample], details: Sequence[tuple[ShardSample, ShardDetail]]
) -> Iterator[Metric]:
    rows = _family("table_rows", "Rows of a table on the shard, about.", "table")
    for sample in samples:
        for table in sample.tables:
            rows.add_metric([str(sample.shard), table.fqn], table.num_rows_estimate)
    yield rows
    refused = _family("refused_total", "Requests and connections refused.", "reason")
    for sample, detail in details:
        for reason, count in detail.refused.items():
            refused.add_metric([str(sample.shard), reason], count)
    yield refused
    snapshot = next((detail.snapshot for _, detail in details if detail.snapshot is not None), None)
    made = GaugeMetricFamily("headrace_snapshot_timestamp_seconds", "When the newest snapshot was made.")
    step = GaugeMetricFamily("headrace_snapshot_step", "Step of the newest snapshot; -1 at no step.")
    size = GaugeMetricFamily("headrace_snapshot_bytes", "Size of the newest snapshot.")
    if snapshot is not None:
        made.add_metric([], snapshot.created_us / 1e6)
        step.add_metric([], snapshot.step)
        size.add_metric([], snapshot.size_bytes)
    yield from (made, step, size)
