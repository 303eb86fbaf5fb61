"""The bench of rows that wait, on a few hundred events."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

from headrace.scripts.benches import importance
from headrace.scripts.benches.importance import ImportanceConfig, measure

pytestmark = pytest.mark.torchrec


def test_a_small_run() -> None:
    """A smaller share is fewer bytes, a longer wait too; all copies are ranked by the same events."""
    config = ImportanceConfig(
        max_events=800, num_rounds=2, shares=(0.1, 0.5), intervals=(2, 8), staleness_s=(3, 12), batch_events=16
    )
    figures = measure(config, lambda stage: None)
    assert figures["num_events"] == 800 * 9 // 10
    assert len(figures["hit_rate"]["everything"]) == 2
    for name, x in (("rarely", [2, 8]), ("share", [0.1, 0.5]), ("share_of_items", [0.1, 0.5]), ("staleness", [3, 12])):
        curve = figures["curves"][name]
        assert curve["x"] == x
        few, many = curve["bytes_ratio"] if "share" in name else curve["bytes_ratio"][::-1]
        assert max(few) < min(many) < 1
        assert all(len(of_x) == 2 for of_x in curve["loss_points"])
    share, released = figures["curves"]["share"]["bytes_ratio"], figures["curves"]["share"]["released_ratio"]
    assert all(0.1 <= value < 0.2 for value in share[0])
    assert all(value < 0.1 for of_x in released for value in of_x)
    short, long = figures["curves"]["staleness"]["released_ratio"]
    assert min(short) > 2 * max(long)


@pytest.mark.parametrize(
    ("loss_points", "expected"),
    [([[0.5, 0.1], [0.2, 0.2]], 0.1), ([[0.6, 0.1], [0.2, 0.2]], 0.3), ([[0.6, 0.1], [0.9, 0.2]], None)],
)
def test_a_setting_counts_if_no_round_loses_more(loss_points: list[list[float]], expected: float | None) -> None:
    """The figure with a target is that of the least bytes which keep within the loss in every round."""
    curve = {"bytes_ratio": [[0.1, 0.1], [0.3, 0.3]], "loss_points": loss_points}
    assert importance._least_bytes(curve) == expected
