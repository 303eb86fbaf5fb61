"""`headrace bench archive`, with a small table: that it measures, not what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(400)  # it starts eleven servers
def test_a_small_run(bench: Callable[..., Any]) -> None:
    """Every target has a figure; a restore reads what was sent, and the archive is empty at the end of each block."""
    sizes = ["--rows=20000", "--batches=8", "--hot-batches=4", "--block-s=1", "--rounds=1"]
    figures, exit_code = bench("archive", *sizes)
    assert exit_code in (0, 1)
    for name in ("ingest_with_archive", "restore_vs_get", "restore_vs_get_bounded", "second_snapshot_bytes_ratio"):
        assert figures[name] > 0, name
    for name in ("archive_lag_p99_s", "archive_lag_80_p99_s"):
        assert 0 <= figures[name] < 60, name
    assert 0 <= figures["ingest_archived_share"] <= 1
    assert figures["second_snapshot_bytes"] < figures["first_snapshot_bytes"]
    assert figures["restored_bytes"] > figures["snapshot_size_bytes"] > 20_000 * 64 * 4
    assert set(figures["peak_rss_bytes"]) == {"4000", "20000"}
    kinds = {"get", "restore", "get_bounded", "restore_bounded", "start"}
    assert {kind: len(rounds) for kind, rounds in figures["took_s"].items()} == dict.fromkeys(kinds, 1)
