"""Prometheus metrics of a replica, for the endpoint and for any process that has a replica.

    from prometheus_client import REGISTRY
    REGISTRY.register(ReplicaCollector(replica))

Values are read when a page is scraped; lookups do no extra work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.paramserver.replica.copy.array_replica import ArrayReplica
from headrace.paramserver.replica.copy.shard_tail import Freshness
from headrace.paramserver.replica.endpoint.health import SelfAudit

__all__ = ["AuditCollector", "ReplicaCollector", "replica_metrics"]

_HOT_ROWS = (
    ("hits_total", "Lookups found among the hot rows."),
    ("misses_total", "Lookups read from the disk."),
    ("admitted_total", "Rows that became hot."),
    ("evicted_total", "Hot rows that made room for others."),
    ("dropped_total", "Ids passed to prefetch and not read, because too many were waiting."),
)


class ReplicaCollector(Collector):
    """Collects a replica's metrics.

    Thread: any.
    """

    def __init__(self, replica: ArrayReplica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        replica = self._replica
        yield _gauge("up_to_date", "1 while the replica can follow the server.", replica.failure is None)
        yield _gauge("epoch", "Run that headrace_replica_step belongs to.", replica.epoch)
        yield _gauge("step", "Step up to which everything is visible; -1 before the first.", replica.step)
        yield from _of_shards(replica.freshness())
        yield from _of_tables(replica)


class AuditCollector(Collector):
    """Collects the metrics of a replica's audits.

    Thread: any.
    """

    def __init__(self, audit: SelfAudit) -> None:
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        audit = self._audit
        counts = (("equal", audit.num_equal), ("different", audit.num_different), ("failed", audit.num_failed))
        yield _labeled("audits_total", "Audits that have ended.", "outcome", counts)
        yield _gauge("audit_interval_seconds", "Time between audits.", audit.interval_s)
        yield _gauge("audit_timestamp_seconds", "When rows were last compared, or audits began.", audit.ended_s)
        if (report := audit.report) is not None:
            yield _gauge("audit_rows", "Rows that the last audit compared.", report.num_rows)
            text = "Ranges of 65536 rows that differed from the server's in the last audit."
            yield _gauge("audit_differing_buckets", text, report.num_differing_buckets)


def replica_metrics(replica: ArrayReplica, audit: SelfAudit | None = None) -> bytes:
    """Return a replica's page of metrics in Prometheus' text format 0.0.4, with those of its audits, if any."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    if audit is not None:
        registry.register(AuditCollector(audit))
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_replica_{name}", text, value=value)


def _labeled(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return a gauge, or a counter if the name ends so, with a value per label."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"headrace_replica_{name}", text, labels=[label])
    for of, value in values:
        family.add_metric([of], value)
    return family


def _of_shards(freshness: list[Freshness]) -> Iterator[Metric]:
    for name, text, attribute in (
        ("age_seconds", "Every update that is older is visible; grows while no step ends.", "age_s"),
        ("lag_seconds", "The same while rows are known that are not visible; else 0.", "lag_s"),
        ("lag_steps", "Steps that arrived and are not visible.", "lag_steps"),
        ("behind", "1 while rows are known that are not visible.", "is_behind"),
        ("pending_bytes", "Memory of records that arrived and are not visible.", "pending_bytes"),
        ("visible_seq", "Last record of the shard's log that is visible.", "visible_seq"),
        ("last_seq", "Last durable record that the shard has reported.", "last_seq"),
    ):
        values = [(str(of.shard), getattr(of, attribute)) for of in freshness]
        yield _labeled(name, text, "shard", [(shard, value) for shard, value in values if value is not None])
    name = "headrace_replica_delay_seconds"
    delays = HistogramMetricFamily(name, "From the oldest update in a record until visible.", labels=["shard"])
    for of in freshness:
        *bounds, (_, total) = of.delay.cumulative()
        buckets = [*((f"{bound_s:.6g}", float(count)) for bound_s, count in bounds), ("+Inf", float(total))]
        delays.add_metric([str(of.shard)], buckets, of.delay.sum_s)
    yield delays


def _of_tables(replica: ArrayReplica) -> Iterator[Metric]:
    rows = [(fqn, replica.num_rows(fqn)) for fqn in sorted(replica.tables)]
    yield _labeled("table_rows", "Rows present; approximate for a table on disk.", "table", rows)
    missing = sorted(replica.num_missing.items())
    yield _labeled("missing_total", "Ids that lookups did not find.", "table", missing)
    stats = sorted(replica.hot_rows().items())
    capacities = [(fqn, of.capacity) for fqn, of in stats]
    yield _labeled("hot_rows_capacity", "Rows that the cache has room for.", "table", capacities)
    for name, text in _HOT_ROWS:
        counts = [(fqn, getattr(of, name.removesuffix("_total"))) for fqn, of in stats]
        yield _labeled(f"hot_rows_{name}", text, "table", counts)
