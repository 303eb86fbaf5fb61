"""The replay of the sample log: the same in two processes, nothing from the future."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.scripts.ranking_demo.events import NUM_PARTS, NUM_RIVALS, TOP, Replay, is_hit


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


def test_sample_is_whole(replay: Replay) -> None:
    """It has 23 466 events of 549 users and 2 760 items; rows are numbered by first appearance."""
    assert (replay.users.size, replay.num_users, replay.num_items) == (23_466, 549, 2_760)
    for rows in (replay.users, replay.items):
        newest = np.maximum.accumulate(rows)
        assert rows[0] == 0 and np.diff(newest).max() == 1
    fewer = Replay(1000)
    assert np.array_equal(fewer.items, replay.items[:1000]) and fewer.num_items == replay.num_items_seen[999]


def test_batches_and_parts_cover_the_log(replay: Replay) -> None:
    """Every event is in exactly one batch, only the last may be shorter; ten parts of like size start at batches."""
    slices = [replay.events_of(batch) for batch in range(replay.num_batches)]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(replay.users.size))
    assert {s.stop - s.start for s in slices[:-1]} == {32}
    lengths = np.diff([*replay.part_starts, replay.num_batches])
    assert replay.part_starts[0] == 0 and len(lengths) == NUM_PARTS and lengths.max() - lengths.min() <= 1


def test_candidates_are_the_own_item_and_others_seen_so_far() -> None:
    """The own item comes first and is no rival, no rival appears only later in the log, and any other may be one."""
    replay, drawn = Replay(600), set[int]()
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        candidates = replay.candidates(batch)
        assert candidates.shape == (events.stop - events.start, 1 + NUM_RIVALS)
        for event, row in zip(range(events.start, events.stop), candidates, strict=True):
            seen = set(replay.items[: event + 1].tolist())
            assert row[0] == replay.items[event]
            assert set(row[1:].tolist()) <= ((seen - {int(row[0])}) or {0})
            drawn |= set(row[1:].tolist())
    assert drawn >= set(range(replay.num_items - 5))


def test_two_processes_draw_alike_and_streams_do_not(replay: Replay) -> None:
    """The candidates follow from batch and stream alone."""
    first, again = replay.candidates(9), Replay().candidates(9)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, replay.candidates(9, stream=1))
    assert not np.array_equal(first[:, 1:], replay.candidates(10)[:, 1:])


@pytest.mark.parametrize(
    ("num_better", "num_equal", "expected"),
    [(0, 0, True), (TOP - 1, 0, True), (TOP, 0, False), (0, TOP - 1, True), (0, TOP, False), (5, 5, False)],
)
def test_hit_is_a_place_among_the_top(num_better: int, num_equal: int, expected: bool) -> None:
    """An event is a hit exactly when fewer than ten rivals score as high as its item; ties count against it."""
    scores = np.zeros(1 + NUM_RIVALS, np.float32)
    scores[1 : 1 + num_better] = 2
    scores[[0, *range(1 + num_better, 1 + num_better + num_equal)]] = 1
    assert is_hit(scores[None]).tolist() == [expected]


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_rows_that_say_nothing_are_no_hit(value: float) -> None:
    """The scores of missing rows, which are zeros, and scores of NaN rank nothing."""
    assert not is_hit(np.full((2, 1 + NUM_RIVALS), value, np.float32)).any()
