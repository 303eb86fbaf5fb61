"""Figures of a streamer: a snapshot of its state, a sample of its lags, and a port that serves them to Prometheus."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.paramserver.system.text import counted, format_seconds
from headrace.schemas.errors import ConfigError
from headrace.streamer.config import StreamerConfig

__all__ = ["LagReservoir", "MetricsPort", "StreamerCollector", "StreamerStats", "describe_stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamerStats:
    """State of a streamer at one moment.

    Attributes:
        step: Number of the last step that has ended.
        acked_step: Last step of which every change of a row is durable on every shard; -1 before the first.
        num_dirty_rows: Changed rows that are in no flush yet. For tables on a device (`device_pipeline`), the rows that
            the last flush has left, plus one if rows have changed since.
        num_waiting_rows: Rows that were dirty at a flush which held them back (`send_share`), for `max_staleness_s` at
            most; those that have changed since are in `num_dirty_rows` too.
        dense_step: Step of the last dense parameters that were handed over to delivery; -1 before the first.
        dense_bytes: Size of the dense parameters that this rank publishes.
        num_inflight_flushes: Flushes handed over to delivery and not durable on every shard yet.
        inflight_bytes: Size of their rows.
        num_flushes: Flushes that are durable on every shard.
        num_rows_sent: Rows in those flushes.
        num_reconnects: Times that a connection to a shard was replaced.
        num_connected: Shards with an open session; also those that were not asked for one before the first attach.
        lag_p50_s: Median time from an update until it is durable on every shard, seconds, over a sample of the flushes,
            each measured from its oldest change; None before the first flush.
        lag_p99_s: 99th percentile of the same.
        cost_percent: What flushes have taken of the steps' time in the last minute or so, percent; an estimate from
            processor times, see `FlushPace`.
        is_cost_bound: The last flush was later than `freshness_s` wants, because of `max_cost_percent`.
        last_error: Why streaming has stopped, or what keeps a shard from acking; None if all is well.
        num_unstreamed: Tables and modules that are trained here and not streamed, when they were looked for last; not
            those that `attach` was told to leave out.
        num_recordings: Recordings that `record` has made and that are written; of rank 0.
        num_recordings_dropped: Recordings that were due and are missing, because a shard or the folder was away, or
            the writer was behind.
    """

    step: int
    acked_step: int
    num_dirty_rows: int
    num_waiting_rows: int
    dense_step: int
    dense_bytes: int
    num_inflight_flushes: int
    inflight_bytes: int
    num_flushes: int
    num_rows_sent: int
    num_reconnects: int
    num_connected: int
    lag_p50_s: float | None
    lag_p99_s: float | None
    cost_percent: float
    is_cost_bound: bool
    last_error: str | None
    num_unstreamed: int = 0
    num_recordings: int = 0
    num_recordings_dropped: int = 0


def describe_stats(stats: StreamerStats, num_tables: int, config: StreamerConfig) -> str:
    """Return in a line what is streamed, how fresh it is, and which of two settings says so."""
    tables = counted(num_tables, "table")
    acked = "nothing durable yet" if stats.acked_step < 0 else f"durable up to step {stats.acked_step}"
    parts = [tables, f"step {stats.step}", acked, f"{counted(stats.num_dirty_rows, 'row')} to send"]
    if stats.num_waiting_rows:
        parts.append(f"{counted(stats.num_waiting_rows, 'row')} waiting for at most {config.max_staleness_s:g} s")
    if stats.lag_p50_s is not None:
        lag = format_seconds(stats.lag_p50_s)
        bound = (
            f"max_cost_percent={config.max_cost_percent}"
            if stats.is_cost_bound
            else (f"freshness_s={config.freshness_s:g}")
        )
        parts.append(f"an update was durable after {lag} (median, at {bound})")
    if stats.num_unstreamed:
        parts.append(f"{stats.num_unstreamed:,} trained and NOT STREAMED")
    if stats.last_error is not None:
        parts.append(stats.last_error)
    return ", ".join(parts)


class LagReservoir:
    """A uniform sample of bounded size of all added lags. Not thread-safe.

    Source: J. S. Vitter, "Random Sampling with a Reservoir", ACM TOMS 11 (1985), algorithm R.
    """

    def __init__(self, max_samples: int = 4096, *, seed: int = 0) -> None:
        self._max_samples = max_samples
        self._samples: list[float] = []
        self._num_added = 0
        self._random = random.Random(seed)

    def add(self, lag_s: float) -> None:
        """Add a lag, seconds."""
        self._num_added += 1
        if len(self._samples) < self._max_samples:
            self._samples.append(lag_s)
        else:
            place = self._random.randrange(self._num_added)
            if place < self._max_samples:
                self._samples[place] = lag_s

    def percentile_s(self, percent: float) -> float | None:
        """Return the smallest sample that `percent` of the samples do not exceed; None without samples."""
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else None


_GAUGES: tuple[tuple[str, str, Callable[[StreamerStats], float]], ...] = (
    ("step", "Last step that has ended.", lambda s: s.step),
    ("acked_step", "Last step that is durable on every shard; -1 before the first.", lambda s: s.acked_step),
    ("dirty_rows", "Changed rows that are in no flush yet.", lambda s: s.num_dirty_rows),
    ("waiting_rows", "Rows held back by send_share.", lambda s: s.num_waiting_rows),
    ("dense_step", "Step of the last dense parameters handed over; -1 before the first.", lambda s: s.dense_step),
    ("dense_bytes", "Size of the dense parameters that this rank publishes.", lambda s: s.dense_bytes),
    ("inflight_flushes", "Flushes in delivery, not durable on every shard yet.", lambda s: s.num_inflight_flushes),
    ("inflight_bytes", "Size of their rows.", lambda s: s.inflight_bytes),
    ("connected_shards", "Shards with an open session.", lambda s: s.num_connected),
    ("cost_ratio", "What flushes have lately taken of the steps' time, estimated.", lambda s: s.cost_percent / 100),
    (
        "cost_bound",
        "1 if the last flush was later than freshness_s wants, by max_cost_percent.",
        lambda s: s.is_cost_bound,
    ),
    ("unstreamed_tables", "Tables and modules that are trained and not streamed.", lambda s: s.num_unstreamed),
    ("failing", "1 while something keeps rows from being acked.", lambda s: s.last_error is not None),
)
_COUNTERS: tuple[tuple[str, str, Callable[[StreamerStats], float]], ...] = (
    ("flushes_total", "Flushes durable on every shard.", lambda s: s.num_flushes),
    ("rows_sent_total", "Rows in those flushes.", lambda s: s.num_rows_sent),
    ("reconnects_total", "Connections that were replaced.", lambda s: s.num_reconnects),
    ("recordings_total", "Recordings that are written.", lambda s: s.num_recordings),
    ("recordings_dropped_total", "Recordings that were due and are missing.", lambda s: s.num_recordings_dropped),
)


class StreamerCollector(Collector):
    """Turns a streamer's stats into Prometheus metrics, on any thread."""

    def __init__(self, stats: Callable[[], tuple[StreamerStats, int] | None], *, run: str, rank: int) -> None:
        """Label the metrics with run and rank; `stats` returns None once the streamer is gone, else also the shards."""
        self._stats = stats
        self._labels = {"run": run, "rank": str(rank)}

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics; none once the streamer is gone."""
        found, names, values = self._stats(), list(self._labels), list(self._labels.values())
        if found is None:
            return
        stats, num_shards = found
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(f"headrace_streamer_{name}", text, labels=names)
            gauge.add_metric(values, value_of(stats))
            yield gauge
        shards = GaugeMetricFamily("headrace_streamer_shards", "Shards of the store.", labels=names)
        shards.add_metric(values, num_shards)
        yield shards
        for name, text, value_of in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_streamer_{name}", text, labels=names)
            counter.add_metric(values, value_of(stats))
            yield counter
        # No sum and count: a sample of the flushes does not have them.
        name = "headrace_streamer_lag_seconds"
        lag = SummaryMetricFamily(name, "Time from an update until it is durable on every shard, of all flushes.")
        for quantile, lag_s in ((0.5, stats.lag_p50_s), (0.99, stats.lag_p99_s)):
            if lag_s is not None:
                lag.add_sample(name, {**self._labels, "quantile": str(quantile)}, lag_s)
        yield lag


class _Streamer(Protocol):
    @property
    def num_shards(self) -> int: ...

    def stats(self) -> StreamerStats: ...


# By address, so that a notebook's cell that runs again gets its port.
_ports: weakref.WeakValueDictionary[tuple[str, int], MetricsPort] = weakref.WeakValueDictionary()


class MetricsPort:
    """Serves a streamer's metrics over HTTP, on daemon threads, until `close`; does not keep the streamer alive.

    Each scrape reads `stats()` on its own thread, so metrics add nothing to a training step.
    """

    def __init__(self, streamer: _Streamer, *, run: str, rank: int, host: str, base_port: int) -> None:
        """Listen on `base_port` + `rank`, or for 0 on any port; raise ConfigError if that is impossible."""
        port = base_port and base_port + rank
        if port > 65535:
            raise ConfigError(f"metrics_port: rank {rank} would take port {port}, above 65535")
        self._run = run
        if (earlier := _ports.get((host, port))) is not None and earlier._run == run:
            earlier.close()  # of a streamer that this one has fenced
        known = weakref.ref(streamer)

        def stats() -> tuple[StreamerStats, int] | None:
            alive = known()
            return None if alive is None else (alive.stats(), alive.num_shards)

        registry = CollectorRegistry()
        registry.register(StreamerCollector(stats, run=run, rank=rank))
        self._thread: threading.Thread | None
        try:
            self._server: Any
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as exc:
            raise ConfigError(f"metrics_port: port {port} of {host}: {exc.strerror or exc}; choose another") from exc
        self.port = int(self._server.server_port)
        _ports[host, self.port] = self

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._thread = None
