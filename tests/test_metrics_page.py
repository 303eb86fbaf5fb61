"""`docs/metrics.md` lists exactly what is exported, and dashboard and alerts use nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from fake_replica import FakeReplica
from metric_samples import state
from prometheus_client.metrics_core import Metric

from headrace.paramserver.observe.families import server_families
from headrace.paramserver.replica.api.recording_check import RecordingReport, recording_families
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport
from headrace.paramserver.replica.endpoint.health import SelfAudit
from headrace.paramserver.replica.endpoint.metrics import AuditCollector, ReplicaCollector
from headrace.streamer.stats import StreamerCollector, StreamerStats

ROOT = Path(__file__).resolve().parent.parent
_LINE = re.compile(r"^\| `(headrace_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"\bheadrace_\w+")


def _exported() -> Iterable[Metric]:
    stats = StreamerStats(**{field.name: 0 for field in dataclasses.fields(StreamerStats)})
    yield from server_families([state()])
    yield from ReplicaCollector(FakeReplica()).collect()  # type: ignore[arg-type]
    audit = SelfAudit(FakeReplica(), interval_s=3600.0)  # type: ignore[arg-type]
    audit.report = ReplicaAuditReport(tables=(), left_out={})
    yield from AuditCollector(audit).collect()
    yield from recording_families({"equal": 1}, 0.0, RecordingReport())
    yield from StreamerCollector(lambda: (stats, 2), run="ctr", rank=0).collect()


def _names() -> set[str]:
    return {sample.name for family in _exported() for sample in family.samples}


def test_page_lists_what_is_exported() -> None:
    """Name, type, labels and meaning of each metric are on the page, and no others."""
    exported = set()
    for family in _exported():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported.add((name, family.type, ", ".join(sorted(labels)), family.documentation))
    assert set(_LINE.findall((ROOT / "docs/metrics.md").read_text())) == exported


def test_names_follow_the_rules() -> None:
    """Every metric begins with the project's name and ends in its unit; each says what it is."""
    for family in _exported():
        assert family.name.startswith("headrace_")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|kb|mb|s)$", family.name)


def _board() -> Any:
    return json.loads((ROOT / "deploy/grafana/headrace.json").read_text())


def _rules() -> list[Any]:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _used_by(board: Any) -> set[str]:
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return {name for panel in panels for target in panel["targets"] for name in _NAME.findall(target["expr"])}


def test_dashboard_uses_what_is_exported() -> None:
    """Each expression of the dashboard is of metrics that exist, and every panel has its own place."""
    board = _board()
    assert _used_by(board) <= _names()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_dashboard_shows_what_is_bounded_and_what_is_held() -> None:
    """Whoever is called by an alert sees its metric, and what keeps the log or fills a replica's memory has a panel."""
    used = _used_by(_board())
    alerted = {name for rule in _rules() for name in _NAME.findall(rule["expr"])}
    held = {"headrace_replica_pending_bytes", "headrace_followers", "headrace_log_first_seq"}
    assert sorted((alerted | held) - used) == []


def test_alerts_use_what_is_exported() -> None:
    """Each alert is of metrics that exist, says how urgent it is and what to do."""
    rules = _rules()
    for rule in rules:
        assert set(_NAME.findall(rule["expr"])) <= _names()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}
    tests = (ROOT / "deploy/prometheus/alerts_test.yml").read_text()
    assert all(rule["alert"] in tests for rule in rules)
