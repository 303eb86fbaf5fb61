"""The figures of benches that are made of what was timed, and wrong paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import cli
from headrace.schemas.errors import ProtocolError
from headrace.scripts.benches import freshness, kernels
from headrace.scripts.benches.observer import delays_of

MS = 1_000_000


def test_freshness() -> None:
    """The ratio is of the medians, the rate of all blocks."""
    block = {"took_s": 0.5, "num_rows_sent": 100}
    blocks = [{**block, "delays_ms": delays_ms} for delays_ms in ([4.0, 4.0], [40.0])]
    figures = freshness.make_figures(blocks, [2.0, 2.0, 9.0])
    assert (figures["p50_ms"], figures["floor_p50_ms"], figures["p50_vs_floor"]) == (4.0, 2.0, 2.0)
    assert figures["p99_ms"] > 30
    assert figures["rows_per_s"] == 200
    assert figures["block_p50_ms"] == [4.0, 40.0]
    json.dumps(figures)


def test_the_floor_of_freshness_syncs_what_it_gets(tmp_path: Path) -> None:
    """Each round appends one message to the file before it is answered."""
    with freshness.floor(tmp_path, 5000) as round_trip_ms:
        assert min(round_trip_ms() for _ in range(4)) > 0
        assert (tmp_path / "floor").stat().st_size == 4 * 5000


def test_a_step_is_visible_with_the_first_that_is_not_below_it() -> None:
    """Steps that become visible together have one moment; each counts from its own update; none is left out."""
    updated_ns = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    seen = [(4, 5 * MS), (5, 13 * MS), (7, 36 * MS), (9, 41 * MS)]
    assert delays_of(range(5, 9), updated_ns, seen) == [3.0, 16.0, 6.0, 1.0]
    assert delays_of([5, 8], [10 * MS, 40 * MS], seen) == [3.0, 1.0]
    assert delays_of([], [], []) == []
    with pytest.raises(ProtocolError, match="the replica has not shown step 6"):
        delays_of([5, 6], [MS, MS], [(5, 2 * MS)])
    with pytest.raises(ProtocolError, match="step 5"):
        delays_of([5], [MS], [])


SIZES = {"num_rows": 10_000, "num_steps": 1, "step_ids": 10}


def test_kernels() -> None:
    """Each operation has a ratio."""
    figures = kernels.measure(lambda stage: None, num_rounds=1, part=[kernels.Part.CPU], **SIZES)
    assert len(figures["cpu"]["ratios"]) == 12 and min(figures["cpu"]["ratios"].values()) > 0


def test_a_wrong_answer_stops_the_bench_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed whose result differs from plain PyTorch's."""
    monkeypatch.setattr(kernels, "row_digests", lambda row_ids, columns: row_ids)
    with pytest.raises(AssertionError, match="row_digests"):
        kernels.measure(lambda stage: None, num_rounds=1, part=[kernels.Part.CPU], **SIZES)


def test_a_wrong_path(capsys: pytest.CaptureFixture[str]) -> None:
    """It is one line, before anything starts."""
    assert cli.main(["bench", "freshness", "--json=/absent/file"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/absent" in line
