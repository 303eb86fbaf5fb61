"""Prometheus' names of a streamer's figures, and a port of their own in the trainer.

Everything is read from `stats()` when it is scraped, on the thread of the scrape; a training step does no more for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.schemas.errors import ConfigError
from headrace.streamer.config import StreamerConfig
from headrace.streamer.stats import StreamerStats

__all__ = ["MetricsPort", "StreamerCollector", "serve_streamer"]

_GAUGES: tuple[tuple[str, str, Callable[[StreamerStats], float]], ...] = (
    ("step", "Last step that has ended.", lambda s: s.step),
    ("acked_step", "Last step that is durable on every shard; -1 before the first.", lambda s: s.acked_step),
    ("dirty_rows", "Rows changed and in no flush yet.", lambda s: s.num_dirty_rows),
    ("inflight_flushes", "Flushes handed over and not durable on every shard.", lambda s: s.num_inflight_flushes),
    ("inflight_bytes", "Their rows.", lambda s: s.inflight_bytes),
    ("spooled_bytes", "What of them lies in the spool.", lambda s: s.spooled_bytes),
    ("connected_shards", "Shards with an open session.", lambda s: s.num_connected),
    ("failing", "1 while something keeps rows from being acked.", lambda s: s.last_error is not None),
)
_COUNTERS: tuple[tuple[str, str, Callable[[StreamerStats], float]], ...] = (
    ("flushes_total", "Flushes durable on every shard.", lambda s: s.num_flushes),
    ("rows_sent_total", "Their rows.", lambda s: s.num_rows_sent),
    ("reconnects_total", "Connections made anew.", lambda s: s.num_reconnects),
)


class StreamerCollector(Collector):
    """Tells what a streamer knows of itself.

    Thread: any.
    """

    def __init__(self, stats: Callable[[], StreamerStats | None], *, run: str, rank: int, num_shards: int) -> None:
        """Tell of a streamer.

        Args:
            stats: Its `stats`; returns None once it is gone, and then nothing is told.
            run: Name of its run.
            rank: Of the trainer in the run.
            num_shards: Of the store.
        """
        self._stats, self._num_shards = stats, num_shards
        self._labels = {"run": run, "rank": str(rank)}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        stats, names, values = self._stats(), list(self._labels), list(self._labels.values())
        if stats is None:
            return
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(f"headrace_streamer_{name}", text, labels=names)
            gauge.add_metric(values, value_of(stats))
            yield gauge
        shards = GaugeMetricFamily("headrace_streamer_shards", "Shards of the store.", labels=names)
        shards.add_metric(values, self._num_shards)
        yield shards
        for name, text, value_of in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_streamer_{name}", text, labels=names)
            counter.add_metric(values, value_of(stats))
            yield counter
        yield self._lag(stats)

    def _lag(self, stats: StreamerStats) -> Metric:
        # Without sum and count, which a sample of the flushes does not have.
        name = "headrace_streamer_lag_seconds"
        lag = SummaryMetricFamily(name, "From an update to durable on every shard, of all flushes so far.")
        for quantile, lag_s in ((0.5, stats.lag_p50_s), (0.99, stats.lag_p99_s)):
            if lag_s is not None:
                lag.add_sample(name, {**self._labels, "quantile": str(quantile)}, lag_s)
        return lag


class MetricsPort:
    """Serves a collector over HTTP, on daemon threads, until `close`."""

    def __init__(self, collector: Collector, *, host: str, port: int) -> None:
        """Listen.

        Args:
            collector: What is told.
            host: Address to listen on.
            port: TCP port; 0 lets the system choose.

        Raises:
            ConfigError: The port cannot be used.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        self._thread: threading.Thread | None
        try:
            self._server: Any
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as exc:
            raise ConfigError(f"metrics_port: port {port} of {host}: {exc.strerror or exc}; choose another") from exc
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._thread = None


class _Streamer(Protocol):
    """What is needed of a `RawEmbeddingStreamer`."""

    @property
    def num_shards(self) -> int: ...

    def stats(self) -> StreamerStats: ...


def serve_streamer(streamer: _Streamer, config: StreamerConfig, *, run: str, rank: int) -> MetricsPort:
    """Serve a streamer's metrics as its settings say; does not keep it alive.

    Raises:
        ConfigError: The port cannot be used.
    """
    known = weakref.ref(streamer)

    def stats() -> StreamerStats | None:
        alive = known()
        return None if alive is None else alive.stats()

    assert config.metrics_port is not None
    port = config.metrics_port and config.metrics_port + rank
    if port > 65535:
        raise ConfigError(f"metrics_port: rank {rank} would take port {port}, above 65535")
    collector = StreamerCollector(stats, run=run, rank=rank, num_shards=streamer.num_shards)
    return MetricsPort(collector, host=config.metrics_host, port=port)
