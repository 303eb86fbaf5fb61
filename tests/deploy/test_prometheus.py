"""Prometheus itself reads the alerts, and scrapes a pipeline of trainer, server and replica."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from prometheus import PROMETHEUS, PROMTOOL, running_prometheus
from prometheus_client import CollectorRegistry, start_http_server
from watched_server import watched_server

from headrace import RawEmbeddingStreamer
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.endpoint.metrics import ReplicaCollector

DEPLOY = Path(__file__).resolve().parents[2] / "deploy/prometheus"
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")


def _promtool(*arguments: str, folder: Path = DEPLOY) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@needs_promtool
def test_alerts_and_configuration_are_valid() -> None:
    """Prometheus reads the rules and the example configuration."""
    for arguments in (("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml")):
        done = _promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    """The rules' own tests hold."""
    done = _promtool("test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("old", "new"),
    [("headrace_shard_up == 0", "headrace_shard_up == 1"), ("lag_seconds > 30", "lag_seconds >= 0"), ("0.1\n", "9\n")],
)
def test_tests_of_alerts_can_fail(old: str, new: str, tmp_path: Path) -> None:
    """With a rule made wrong, its tests do not hold."""
    rules = (DEPLOY / "alerts.yml").read_text()
    assert old in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(old, new))
    shutil.copy(DEPLOY / "alerts_test.yml", tmp_path)
    assert _promtool("test", "rules", "alerts_test.yml", folder=tmp_path).returncode != 0


@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus, of Debian's package of that name")
def test_pipeline_is_scraped(tmp_path: Path) -> None:
    """A query returns the lag of every part of a pipeline that streams, and what has been written."""
    model = torch.nn.ModuleDict({"user": torch.nn.EmbeddingBag(1000, 8, sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        watched_server(tmp_path / "data", shards=2) as (server, metrics),
        RawEmbeddingStreamer(server.address, run="ctr", metrics_port=0) as streamer,
    ):
        streamer.attach(model, optimizer, publish="updated")

        def train() -> None:
            optimizer.zero_grad()
            model["user"](torch.randint(0, 1000, (64, 4))).sum().backward()
            optimizer.step()
            streamer.flush()

        train()
        with EmbeddingReplica(server.address) as replica:
            registry = CollectorRegistry()
            registry.register(ReplicaCollector(replica))
            served, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
            targets = {
                "headrace-server": metrics,
                "headrace-trainer": f"127.0.0.1:{streamer.metrics_port}",
                "headrace-replica": f"127.0.0.1:{served.server_port}",
            }
            try:
                with running_prometheus(tmp_path, targets) as prometheus:
                    prometheus.wait_for("up == 1", lambda found: len(found) == 3)
                    train()
                    replica.wait_for(2, 60)
                    two = prometheus.wait_for("headrace_apply_lag_seconds", lambda found: len(found) == 2)
                    assert {part["metric"]["shard"] for part in two} == {"0", "1"}
                    assert all(0 <= float(part["value"][1]) < 30 for part in two)
                    prometheus.wait_for("max(headrace_apply_lag_seconds) == 0")  # idle, so not stale
                    (lag,) = prometheus.wait_for('headrace_streamer_lag_seconds{quantile="0.99", run="ctr"}')
                    assert 0 < float(lag["value"][1]) < 60
                    prometheus.wait_for("count(headrace_replica_lag_seconds == 0) == 2")
                    prometheus.wait_for("sum(headrace_replica_delay_seconds_count) > 0")
                    prometheus.wait_for("headrace_streamer_acked_step == 2")
                    (rows,) = prometheus.wait_for(
                        "sum(headrace_rows_written_total) == sum(headrace_streamer_rows_sent_total)"
                    )
                    assert float(rows["value"][1]) > 0
            finally:
                served.shutdown()
                served.server_close()
                thread.join()
