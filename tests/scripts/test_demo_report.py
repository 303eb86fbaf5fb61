"""The demo's report: rates over the right events, a table that fits a terminal, sound JSON, a plot that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrace.scripts.demo_data import SAMPLE_PATH, read_events
from headrace.scripts.demo_ranking import NUM_PARTS, Replay
from headrace.scripts.demo_report import COPIES, DemoReport, HitLog, Lag, make_plot, make_table, write_report


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE_PATH, max_events=2010), batch_events=16, seed=0)


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
    fields: dict[str, Any] = {
        "num_events": 23_466,
        "num_users": 549,
        "num_items": 2_760,
        "num_batches": 734,
        "num_shards": 2,
        "seed": 0,
        "num_rows_compared": 3_309,
        "num_rows_different": 0,
        "num_replica_rows_different": 0,
        "num_rows_streamed": 868_478,
        "streaming_s": 20.0,
        "ack_lag": Lag(p50_ms=4.56, p99_ms=12.3, count=700),
        "arrival_lag": Lag(p50_ms=10.0, p99_ms=50.0, count=700),
        "num_missing_rows": 0,
        "hit_rate": {"live": 0.572, "streamed": 0.561, "frozen": 0.301},
        "hit_rate_whole_log": {"live": 0.55, "streamed": 0.54, "frozen": 0.28},
        "duration_s": 33.0,
    }
    return DemoReport(**(fields | changes))


def shown(report: DemoReport) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # the console's to keep
    with console.file:
        console.print(make_table(report))
        return console.export_text()


def test_rates_leave_out_the_first_part(replay: Replay) -> None:
    """The rates count the events from the second part on, the shorter last batch by its events; or all, when asked."""
    hits = full_hit_log(replay, {"live": 1.0, "streamed": 0.5, "frozen": 0.0}, first_part_rate=0.0)
    assert hits.rates() == {"live": 1.0, "streamed": 0.5, "frozen": 0.0}
    num_first = replay.part_starts[1] * 16
    assert hits.rates(first_part=0)["live"] == pytest.approx(1 - num_first / 2010)


def test_rate_before_any_event_is_nan(replay: Replay) -> None:
    """A rate of nothing is not 0, and no error."""
    assert np.isnan(HitLog(replay).rate("live"))


def test_curve_has_groups_inside_parts_that_cover_every_event_once(replay: Replay) -> None:
    """The points weigh to the whole log's rate, and each part has five of its own."""
    hits = HitLog(replay)
    rng = np.random.default_rng(2)
    num_hits = rng.integers(0, 11, replay.num_batches)
    for count in num_hits.tolist():
        hits.add(live=count, streamed=0, frozen=0)
    events, rate = hits.curve("live")
    assert events.size == rate.size == 5 * NUM_PARTS
    assert np.all(np.diff(events) > 0)
    # Each group's middle and the ends before it give its end.
    end, total = 0.0, 0.0
    starts = []
    for middle, share in zip(events, rate, strict=True):
        starts.append(end)
        width = 2 * (middle - end)
        total += share * width
        end += width
    assert end == pytest.approx(2010)
    assert total == pytest.approx(num_hits.sum())
    assert {start * 16 for start in replay.part_starts} <= {round(start) for start in starts}


def test_lag_percentiles() -> None:
    """Lags given in seconds come out as percentiles in milliseconds."""
    lag = Lag.of([i / 1000 for i in range(101)])
    assert (lag.p50_ms, lag.p99_ms, lag.count) == (pytest.approx(50), pytest.approx(99), 101)
    assert str(lag) == "50.0 ms / 99.0 ms"


def test_table_says_everything_within_eighty_columns() -> None:
    """Each figure stands on one line of a usual terminal."""
    text = shown(make_report())
    for line in (
        "trainer = server 0 different of 3,309: weights and states",
        "trainer = replica 0 different of 3,309: weights, as served",
        "rows streamed 868,478 acked when durable on disk",
        "rows/s 43,424 as this small model makes them",
        "lag p50 / p99 4.6 ms / 12.3 ms update → durable on the server",
        "lag p50 / p99 10.0 ms / 50.0 ms update → visible in the replica",
        "hit@10, streamed copy 56.1% from the replica, batch by batch",
        "hit@10, frozen copy 30.1% read at 9 moments of the log",
        "hit@10, live tables 57.2% in the trainer, to compare",
    ):
        assert line in [" ".join(shown_line.split()) for shown_line in text.splitlines()]


def test_table_tells_of_differences() -> None:
    """Rows that differ are counted where the eye begins."""
    assert "17 different" in shown(make_report(num_rows_different=17))
    assert "18 different" in shown(make_report(num_replica_rows_different=18))


def test_report_is_strict_json(tmp_path: Path) -> None:
    """The file has every field, and the rate that follows from two of them."""
    report = make_report()
    write_report(report, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert content["rows_per_s"] == pytest.approx(43_423.9)
    assert content["ack_lag"] == {"p50_ms": 4.56, "p99_ms": 12.3, "count": 700}
    assert set(DemoReport.__slots__) < set(content)


@pytest.mark.parametrize(
    "rates",
    [
        {"live": 0.572, "streamed": 0.561, "frozen": 0.301},
        {"live": 1.0, "streamed": 1.0, "frozen": 1.0},
        {"live": 0.0, "streamed": 0.0, "frozen": 0.0},
        {"live": 0.5, "streamed": 0.5, "frozen": 0.49},
    ],
    ids=["usual", "all hits", "no hits", "alike"],
)
def test_plot_can_be_read(replay: Replay, rates: dict[str, float], tmp_path: Path) -> None:
    """All text lies inside the picture, labels do not overlap, and axes and title say what is shown."""
    figure = make_plot(full_hit_log(replay, rates), make_report(hit_rate=rates), replay)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    labels = [text for text in axes.texts if "\n" in text.get_text()]
    for text in [*figure.texts, *axes.texts, axes.xaxis.label, axes.yaxis.label]:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert axes.get_xlabel() == "events so far (thousands)"
    assert axes.get_ylabel() == "hit@10 (% of events)"
    assert f"{rates['streamed']:.0%}" in figure.texts[0].get_text()


def test_plot_draws_each_copy_over_the_whole_log(replay: Replay) -> None:
    """Three curves, in percent and in thousands of events."""
    rates = {"live": 0.75, "streamed": 0.5, "frozen": 0.25}
    figure = make_plot(full_hit_log(replay, rates), make_report(hit_rate=rates), replay)
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 5 * NUM_PARTS]
    # The last batch is a short one, whose share of hits is rounded.
    assert sorted(round(float(line.get_ydata()[-2])) for line in curves) == [25, 50, 75]
    assert all(1.9 < float(line.get_xdata()[-1]) < 2.01 for line in curves)
