"""Prometheus metrics of a relay. Values are read when a page is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.paramserver.relay.kept_snapshots import KeptSnapshots
from headrace.paramserver.relay.shard_mirror import ShardMirror

__all__ = ["RelayCollector", "relay_metrics"]

_GAUGES: tuple[tuple[str, str, Callable[[ShardMirror], float]], ...] = (
    ("lag_seconds", "How long a record has been known that is not mirrored; 0 if there is none.", lambda m: m.lag_s),
    ("knowledge_age_seconds", "How long ago the shard was heard, over all relays.", lambda m: m.knowledge_age_s),
    ("last_seq", "Last record that followers get.", lambda m: m.log.last_seq if m.log else 0),
    ("source_seq", "Last durable record that the source has reported.", lambda m: m.source_seq),
    ("log_bytes", "Bytes of the mirrored log.", lambda m: m.log.size_bytes if m.log else 0),
    ("pending_bytes", "Bytes that the relay's disk does not have yet.", lambda m: m.log.pending_bytes if m.log else 0),
    ("followers", "Leases that followers hold.", lambda m: len(m.log.feed.followers) if m.log else 0),
    (
        "up_to_date",
        "1 while the relay can follow its source, and write.",
        lambda m: m.failure is None and m.log is not None,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ShardMirror], float]], ...] = (
    (
        "restarts_total",
        "Mirrors that were begun anew, because the source lacked what comes next.",
        lambda m: m.num_restarts,
    ),
    (
        "log_holds_broken_total",
        "Leases and snapshots that lost their log to --log-hold-bytes, in the present mirror.",
        lambda m: m.log.retention.num_broken if m.log else 0,
    ),
)


class RelayCollector(Collector):
    """Collects a relay's metrics. Thread: the event loop's, as leases are looked at."""

    def __init__(self, mirrors: Sequence[ShardMirror], snapshots: KeptSnapshots) -> None:
        self._mirrors, self._snapshots = mirrors, snapshots

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        for families, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text, value_of in families:
                family = kind(f"headrace_relay_{name}", text, labels=["shard"])
                for shard, mirror in enumerate(self._mirrors):
                    family.add_metric([str(shard)], value_of(mirror))
                yield family
        offered = self._snapshots.offered(self._mirrors)
        text = "1 if the relay offers a snapshot that its log follows."
        yield GaugeMetricFamily("headrace_relay_snapshot_offered", text, value=offered is not None)
        created_s = 0.0 if offered is None else offered.created_us / 1e6
        text = "When the offered snapshot was made; 0 without one."
        yield GaugeMetricFamily("headrace_relay_snapshot_timestamp_seconds", text, value=created_s)


def relay_metrics(mirrors: Sequence[ShardMirror], snapshots: KeptSnapshots) -> bytes:
    """Return the page in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry()
    registry.register(RelayCollector(mirrors, snapshots))
    return generate_latest(registry)
