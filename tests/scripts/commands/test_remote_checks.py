"""`headrace doctor --log`: the engine of a replicated log, as the command line tells of it."""

from __future__ import annotations

from pathlib import Path

from command_line import CommandLine
from nats_cluster import SMALL, nats_cluster, needs_nats_server

pytestmark = needs_nats_server


def test_fit_engine(tmp_path: Path, run: CommandLine) -> None:
    """`doctor --log` says that the servers sync, and that one server alone replicates nothing."""
    with nats_cluster(tmp_path, num_servers=1) as servers:
        monitor = ",".join(servers.monitors)
        told = run.json("doctor", "--log", f"{servers.url}?replicas=1", "--log-monitor", monitor)
        texts = [finding["text"] for finding in told["findings"] if finding["subject"] == "log"]
        assert texts[0] == "replicas=1: the log is on one server alone"
        assert "1 server of version 2." in texts[1]
        assert "sync each message; 0 streams as they must be" in texts[1]


def test_unfit_engine(tmp_path: Path, run: CommandLine) -> None:
    """Each fault is a problem with advice."""
    with nats_cluster(tmp_path, num_servers=1, jetstream=lambda _: SMALL[1:]) as servers:
        monitor = ",".join(servers.monitors)
        told = run.json("doctor", "--log", servers.url, "--log-monitor", monitor, code=1)
        problems = [finding for finding in told["findings"] if finding["level"] == "problem"]
        assert len(problems) == 2
        assert "sync_always is off" in problems[0]["text"]
        assert problems[0]["advice"].startswith("Set `sync_interval: always`")
        assert "1 of the 3 servers" in problems[1]["text"]


def test_wrong_flags(run: CommandLine) -> None:
    """A mistake in a flag is one line."""
    assert "must be nats://" in run.refused("doctor", "--log", "host1")
