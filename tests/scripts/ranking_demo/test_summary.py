"""The demo's report: rates over the right events, a table that fits a terminal, sound JSON, a plot that can be read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrace.scripts.ranking_demo.events import NUM_PARTS, SAMPLE, Replay, read_events
from headrace.scripts.ranking_demo.summary import COPIES, DemoReport, HitLog, make_plot, make_table


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE, max_events=2010), batch_events=16, seed=0)


def full_hit_log(replay: Replay, rates: dict[str, float], *, first_part_rate: float = 0.0) -> HitLog:
    """Return a log in which each batch has so large a share of hits, and those of the first part another."""
    hits = HitLog(replay)
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        num_events = events.stop - events.start
        is_first = batch < replay.part_starts[1]
        hits.add(**{c: round(num_events * (first_part_rate if is_first else rates[c])) for c in COPIES})
    return hits


def make_report(**changes: Any) -> DemoReport:
    names = {name: 0 for name in DemoReport.__slots__} | {"num_rows_compared": 3_309, "num_rows_streamed": 868_478}
    fields: dict[str, Any] = names | {
        "num_answers_compared": 40,
        "streaming_s": 20.0,
        "ack_lag": {"p50_ms": 4.56, "p99_ms": 12.3, "count": 700},
        "arrival_lag": {"p50_ms": 10.0, "p99_ms": 50.0, "count": 700},
        "hit_rate": {"live": 0.572, "streamed": 0.561, "frozen": 0.301},
    }
    return DemoReport(**(fields | changes))


def shown(report: DemoReport) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    console.print(make_table(report))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_rates_leave_out_the_first_part(replay: Replay) -> None:
    """The rates count the events from the second part on, the shorter last batch by its events; or all, when asked."""
    hits = full_hit_log(replay, {"live": 1.0, "streamed": 0.5, "frozen": 0.0}, first_part_rate=0.0)
    assert hits.rates() == {"live": 1.0, "streamed": 0.5, "frozen": 0.0}
    num_first = replay.part_starts[1] * 16
    assert hits.rates(first_part=0)["live"] == pytest.approx(1 - num_first / 2010)


def test_curve_has_groups_inside_parts_that_cover_every_event_once(replay: Replay) -> None:
    """The points weigh to the whole log's rate, and each part has five of its own."""
    hits = HitLog(replay)
    rng = np.random.default_rng(2)
    num_hits = rng.integers(0, 11, replay.num_batches)
    for count in num_hits.tolist():
        hits.add(live=count, streamed=0, frozen=0)
    events, rate = hits.curve("live")
    assert events.size == rate.size == 5 * NUM_PARTS
    # Each group's middle and the ends before it give its end.
    end, total, starts = 0.0, 0.0, []
    for middle, share in zip(events, rate, strict=True):
        starts.append(round(end))
        width = 2 * (middle - end)
        total, end = total + share * width, end + width
    assert end == pytest.approx(2010)
    assert total == pytest.approx(num_hits.sum())
    assert {start * 16 for start in replay.part_starts} <= set(starts)


def test_table_says_everything_within_eighty_columns() -> None:
    """Each figure stands on one line of a usual terminal."""
    for line in (
        "trainer = server 0 different of 3,309: weights and states",
        "trainer = replica 0 different of 3,309 and the dense part",
        "trained = served 0 different of 40 recorded batches",
        "rows streamed 868,478 acked when durable on disk",
        "rows/s 43,424 as this small model makes them",
        "freshness_s 0 sends each step; default 1",
        "lag p50 / p99 4.6 ms / 12.3 ms update → durable on the server",
        "lag p50 / p99 10.0 ms / 50.0 ms update → visible in the replica",
        "hit@10, served model 56.1% from the replica, batch by batch",
        "hit@10, frozen copy 30.1% read at 9 moments of the log",
        "hit@10, live model 57.2% in the trainer, to compare",
    ):
        assert line in shown(make_report())


def test_report_is_strict_json() -> None:
    """The JSON has every field, and the rate that follows from two of them."""
    content = json.loads(json.dumps(make_report().to_json()), parse_constant=pytest.fail)
    assert content["rows_per_s"] == pytest.approx(43_423.9)
    assert content["ack_lag"] == {"p50_ms": 4.56, "p99_ms": 12.3, "count": 700}
    assert set(DemoReport.__slots__) < set(content)


def test_plot_can_be_read(replay: Replay, tmp_path: Path) -> None:
    """It has three curves over the whole log, and all text lies inside the picture."""
    rates = (0.572, 0.561, 0.301)
    of_copy = dict(zip(COPIES, rates, strict=True))
    figure = make_plot(full_hit_log(replay, of_copy), make_report(hit_rate=of_copy), replay)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    (legend,) = figure.legends
    for text in [*figure.texts, *legend.texts, legend.get_title(), axes.title, axes.xaxis.label, axes.yaxis.label]:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
    assert [text.get_text().rpartition(" ")[2] for text in legend.texts] == [f"{rate:.1%}" for rate in rates]
    curves = [line for line in axes.lines if len(line.get_xdata()) == 5 * NUM_PARTS]
    assert len(curves) == 3 and all(1.9 < float(line.get_xdata()[-1]) < 2.01 for line in curves)
