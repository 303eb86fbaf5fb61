"""Prometheus' names of a replica's figures: for the endpoint, and for whoever holds a replica in a process of theirs.

    from prometheus_client import REGISTRY
    REGISTRY.register(ReplicaCollector(replica))

Everything is read when it is scraped; a look-up does no more for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.paramserver.replica.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.replica.self_audit import SelfAudit

__all__ = ["AuditCollector", "ReplicaCollector", "replica_metrics"]

_HOT_ROWS = (
    ("hits_total", "Look-ups found among the hot rows."),
    ("misses_total", "Look-ups read from the disk."),
    ("admitted_total", "Rows let in."),
    ("evicted_total", "Rows pushed out."),
    ("dropped_total", "Ids announced to prefetch and not read, too many were waiting."),
)


class ReplicaCollector(Collector):
    """Tells what a replica knows of itself.

    Thread: any.
    """

    def __init__(self, replica: EmbeddingReplica) -> None:
        """Tell of a replica for as long as it is open."""
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        replica = self._replica
        yield _gauge("up_to_date", "1 while nothing keeps the replica from following.", replica.failure is None)
        yield _gauge("epoch", "Run whose steps headrace_replica_step counts.", replica.epoch)
        yield _gauge("step", "Step up to which all is visible; -1 before the first.", replica.step)
        yield from _of_shards(replica.freshness())
        yield from _of_tables(replica)


class AuditCollector(Collector):
    """Tells what a replica's audits of itself have found.

    Thread: any.
    """

    def __init__(self, audit: SelfAudit) -> None:
        """Tell of a replica's audits."""
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        audit = self._audit
        counts = (("equal", audit.num_equal), ("different", audit.num_different), ("failed", audit.num_failed))
        audits = CounterMetricFamily("headrace_replica_audits_total", "Audits that have ended.", labels=["outcome"])
        for outcome, count in counts:
            audits.add_metric([outcome], count)
        yield audits
        yield _gauge("audit_interval_seconds", "Between audits.", audit.interval_s)
        yield _gauge("audit_timestamp_seconds", "When rows were compared last, or audits begun.", audit.ended_s)
        if (report := audit.report) is not None:
            yield _gauge("audit_rows", "Rows that the last audit has compared.", report.num_rows)
            text = "Ranges of 65536 rows that differed from the server's in the last audit."
            yield _gauge("audit_differing_buckets", text, report.num_differing_buckets)


def replica_metrics(replica: EmbeddingReplica, audit: SelfAudit | None = None) -> bytes:
    """Return a replica's page of metrics, in Prometheus' text format 0.0.4; with those of its audits, if it has any."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    if audit is not None:
        registry.register(AuditCollector(audit))
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_replica_{name}", text, value=value)


def _of_shards(freshness: list[Freshness]) -> Iterator[Metric]:
    for name, text, values in (
        ("lag_seconds", "Age of the newest visible update while behind; 0 when idle.", [f.lag_s for f in freshness]),
        ("lag_steps", "Steps that have come and are not visible.", [f.lag_steps for f in freshness]),
        ("behind", "1 while rows are known that are not visible.", [f.is_behind for f in freshness]),
        ("pending_bytes", "Memory of what has come and is not visible.", [f.pending_bytes for f in freshness]),
        ("visible_seq", "Last record of the shard's log that is visible.", [f.visible_seq for f in freshness]),
        ("last_seq", "Last durable record, as the shard last told.", [f.last_seq for f in freshness]),
    ):
        gauge = GaugeMetricFamily(f"headrace_replica_{name}", text, labels=["shard"])
        for of, value in zip(freshness, values, strict=True):
            gauge.add_metric([str(of.shard)], value)
        yield gauge
    name = "headrace_replica_delay_seconds"
    delays = HistogramMetricFamily(name, "From the trainer's clock at an update to visible.", labels=["shard"])
    for of in freshness:
        *told, (_, total) = of.delay.cumulative()
        buckets = [*((f"{bound_s:.6g}", float(count)) for bound_s, count in told), ("+Inf", float(total))]
        delays.add_metric([str(of.shard)], buckets, of.delay.sum_s)
    yield delays


def _of_tables(replica: EmbeddingReplica) -> Iterator[Metric]:
    rows = GaugeMetricFamily("headrace_replica_table_rows", "Rows present, of one on disk about.", labels=["table"])
    for fqn in sorted(replica.tables):
        rows.add_metric([fqn], replica.num_rows(fqn))
    yield rows
    missing = CounterMetricFamily("headrace_replica_missing_total", "Ids looked up and absent.", labels=["table"])
    for fqn, count in sorted(replica.num_missing.items()):
        missing.add_metric([fqn], count)
    yield missing
    stats = sorted(replica.hot_rows().items())
    capacity = GaugeMetricFamily("headrace_replica_hot_rows_capacity", "Rows that have place.", labels=["table"])
    for fqn, of in stats:
        capacity.add_metric([fqn], of.capacity)
    yield capacity
    for name, text in _HOT_ROWS:
        counter = CounterMetricFamily(f"headrace_replica_hot_rows_{name}", text, labels=["table"])
        for fqn, of in stats:
            counter.add_metric([fqn], getattr(of, name.removesuffix("_total")))
        yield counter
