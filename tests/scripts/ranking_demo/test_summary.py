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
        "rows streamed 868,478 acked when durable on disk",
        "rows/s 43,424 as this small model makes them",
        "lag p50 / p99 4.6 ms / 12.3 ms update → durable on the server",
        "lag p50 / p99 10.0 ms / 50.0 ms update → visible in the replica",
        "hit@10, served model 56.1% from the replica, batch by batch",
        "hit@10, frozen copy 30.1% read at 9 moments of the log",
        "hit@10, live model 57.2% in the trainer, to compare",
    ):
        assert line in shown(make_report())


def test_table_shows_differences() -> None:
    """Rows that differ are counted first."""
    lines = shown(make_report(num_rows_different=17, num_replica_rows_different=18))
    assert lines[1].startswith("trainer = server 17 different") and lines[2].startswith("trainer = replica 18 diff")


def test_report_is_strict_json() -> None:
    """The JSON has every field, and the rate that follows from two of them."""
    content = json.loads(json.dumps(make_report().to_json()), parse_constant=pytest.fail)
    assert content["rows_per_s"] == pytest.approx(43_423.9)
    assert content["ack_lag"] == {"p50_ms": 4.56, "p99_ms": 12.3, "count": 700}
    assert set(DemoReport.__slots__) < set(content)


@pytest.mark.parametrize("rates", [(0.572, 0.561, 0.301), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_plot_can_be_read(replay: Replay, rates: tuple[float, ...], tmp_path: Path) -> None:
    """All text lies inside the picture, and axes, title and legend say what is shown."""
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
    assert axes.get_xlabel() == "events so far (thousands)"
    assert axes.get_ylabel() == "hit@10 (% of events)"
    assert f"{rates[1]:.0%}" in figure.get_suptitle()


def test_plot_draws_each_copy_over_the_whole_log(replay: Replay) -> None:
    """Three curves, in percent and in thousands of events."""
    rates = {"live": 0.75, "streamed": 0.5, "frozen": 0.25}
    figure = make_plot(full_hit_log(replay, rates), make_report(hit_rate=rates), replay)
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 5 * NUM_PARTS]
    # The last batch is a short one, whose share of hits is rounded.
    assert sorted(round(float(line.get_ydata()[-2])) for line in curves) == [25, 50, 75]
    assert all(1.9 < float(line.get_xdata()[-1]) < 2.01 for line in curves)
