"""The sample of lags, and a trainer's figures on a port of its own."""

from __future__ import annotations

import dataclasses
import gc
import socket
import urllib.request
from pathlib import Path

import pytest
import torch
from held_ports import hold_ports
from prometheus_client.parser import text_string_to_metric_families

from headrace import RawEmbeddingStreamer
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer.config import StreamerConfig
from headrace.streamer.stats import LagReservoir, MetricsPort, StreamerCollector, StreamerStats, describe_stats

STATS = StreamerStats(
    step=9,
    acked_step=7,
    num_dirty_rows=3,
    num_waiting_rows=4,
    dense_step=6,
    dense_bytes=400,
    num_inflight_flushes=2,
    inflight_bytes=100,
    num_flushes=5,
    num_rows_sent=50,
    num_reconnects=1,
    num_connected=2,
    lag_p50_s=0.25,
    lag_p99_s=None,
    cost_percent=2.5,
    is_cost_bound=True,
    last_error=None,
)


class _Streamer:
    num_shards = 2

    def stats(self) -> StreamerStats:
        return STATS


def _values(stats: StreamerStats) -> dict[str, float]:
    collector = StreamerCollector(lambda: (stats, 2), run="ctr", rank=3)
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["rank"]) == ("ctr", "3")
            found[sample.name.removeprefix("headrace_streamer_") + sample.labels.get("quantile", "")] = sample.value
    return found


def _page(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_values() -> None:
    """Each figure of `stats` is told; a lag that is not known is not told."""
    values = _values(STATS)
    assert (values["step"], values["acked_step"], values["dirty_rows"], values["failing"]) == (9, 7, 3, 0)
    assert values["waiting_rows"] == 4
    assert (values["rows_sent_total"], values["shards"], values["connected_shards"]) == (50, 2, 2)
    assert values["lag_seconds0.5"] == 0.25
    assert "lag_seconds0.99" not in values
    assert (values["cost_ratio"], values["cost_bound"]) == (0.025, 1)
    assert values["unstreamed_tables"] == 0
    assert _values(dataclasses.replace(STATS, num_unstreamed=2))["unstreamed_tables"] == 2
    assert _values(dataclasses.replace(STATS, last_error="the server is away"))["failing"] == 1


@pytest.mark.parametrize(("is_cost_bound", "setting"), [(True, "max_cost_percent=3"), (False, "freshness_s=0.5")])
def test_a_line_says_how_fresh_rows_are_and_why(is_cost_bound: bool, setting: str) -> None:
    """The setting that binds stands beside the lag."""
    stats = dataclasses.replace(STATS, is_cost_bound=is_cost_bound)
    assert describe_stats(stats, 2, StreamerConfig(freshness_s=0.5)) == (
        "2 tables, step 9, durable up to step 7, 3 rows to send, 4 rows waiting for at most 60 s, "
        f"an update was durable after 0.25 s (median, at {setting})"
    )


def test_streamer_serves_until_it_is_closed(tmp_path: Path) -> None:
    """What was streamed is on the page; after `close` nobody listens."""
    with ServerProcess.start(tmp_path / "data") as server:
        model = torch.nn.ModuleDict({"user": torch.nn.EmbeddingBag(50, 4, sparse=True)})
        with RawEmbeddingStreamer(server.address, run="ctr", metrics_port=0) as streamer:
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), publish="all")
            streamer.flush()
            port = streamer.metrics_port
            assert port is not None
            assert _page(port)["headrace_streamer_rows_sent_total"] == 50
        with pytest.raises(OSError, match="refused"):
            _page(port)
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="metrics_port: port"):
            RawEmbeddingStreamer(server.address, run="other", metrics_port=taken.getsockname()[1])
        with RawEmbeddingStreamer(server.address, run="third") as without:
            assert without.metrics_port is None


def test_ranks_do_not_collide() -> None:
    """Each rank takes the port that many above, from an earlier streamer of its run too, as when a cell runs again."""
    base = hold_ports()
    port = MetricsPort(_Streamer(), run="ctr", rank=3, host="127.0.0.1", base_port=base - 3)
    assert port.port == base
    with pytest.raises(ConfigError, match="Address already in use"):
        MetricsPort(_Streamer(), run="other", rank=3, host="127.0.0.1", base_port=base - 3)
    again = MetricsPort(_Streamer(), run="ctr", rank=3, host="127.0.0.1", base_port=base - 3)
    assert again.port == base
    for each in (port, again, again):
        each.close()
    with pytest.raises(ConfigError, match="rank 1 would take port 65536"):
        MetricsPort(_Streamer(), run="ctr", rank=1, host="127.0.0.1", base_port=65535)


def test_port_does_not_keep_a_streamer_alive() -> None:
    """A streamer that was dropped without `close` is gone, and its page is empty."""
    streamer = _Streamer()
    port = MetricsPort(streamer, run="ctr", rank=0, host="127.0.0.1", base_port=0)
    try:
        assert _page(port.port)["headrace_streamer_step"] == 9
        del streamer
        gc.collect()
        assert _page(port.port) == {}
    finally:
        port.close()


def test_percentiles_of_few() -> None:
    """Of few lags the percentiles are exact; of none there are none."""
    lags = LagReservoir()
    assert lags.percentile_s(50) is None
    for lag_s in range(1, 101):
        lags.add(float(lag_s))
    assert (lags.percentile_s(0), lags.percentile_s(50), lags.percentile_s(99)) == (1, 51, 100)


def test_sample_is_bounded_and_fair() -> None:
    """Of many lags a bounded sample is kept whose median is near the true one."""
    lags = LagReservoir(max_samples=500, seed=7)
    for number in range(100_000):
        lags.add(float(number))
    assert len(lags._samples) == 500
    median = lags.percentile_s(50)
    assert median is not None
    assert 40_000 < median < 60_000
