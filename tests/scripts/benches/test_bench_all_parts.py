"""The parts of `headrace bench all`: how the scale makes them smaller, and that each can be made ready."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from headrace.scripts.benches import bench_all_parts
from headrace.scripts.benches.bench_all_parts import PARTS, Plan, missing_peers
from headrace.scripts.benches.bench_peers import REDIS_HINT


def test_amounts() -> None:
    """Amounts shrink to a least one, and sweeps at a very small scale have two points."""
    plan = Plan(scale=0.1, rounds=3, folder=Path("/x"))
    assert (plan.amount(960, 4), plan.amount(20, 4)) == (96, 4)
    assert plan.settings == {"num_rounds": 3, "folder": Path("/x")}
    assert plan.some((1, 2, 4)) == (1, 2, 4)
    assert Plan(scale=0.01, rounds=1, folder=None).some((1, 2, 4)) == (1, 4)


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.001])
@pytest.mark.torchrec
def test_every_part_can_be_made_ready(scale: float) -> None:
    """No scale gives a configuration that its bench refuses."""
    for part in PARTS:
        assert part.prepare(Plan(scale=scale, rounds=1, folder=None)).num_stages > 0, part.name


def test_expected_time_grows_with_scale_and_rounds() -> None:
    """At full scale and its own rounds a part takes its full time; what starts at any scale does not shrink."""
    part = PARTS[0]
    assert part.expected_s(Plan(scale=1, rounds=part.rounds, folder=None)) == part.full_s
    assert part.expected_s(Plan(scale=1, rounds=2 * part.rounds, folder=None)) == 2 * part.full_s - part.least_s
    assert part.least_s < part.expected_s(Plan(scale=0.01, rounds=1, folder=None)) < part.least_s * 1.2


def test_missing_peers_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer that is not installed has a line."""
    monkeypatch.setattr(bench_all_parts, "has_redis", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_peers() == [REDIS_HINT, "gRPC is left out: pip install 'headrace[bench]'"]
    monkeypatch.setattr(bench_all_parts, "has_redis", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert missing_peers() == []
