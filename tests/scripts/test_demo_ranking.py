"""What is ranked against what: the same in two processes, nothing from the future, and no hit by accident of ties."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.demo_data import EventLog
from headrace.scripts.demo_ranking import NUM_PARTS, NUM_RIVALS, TOP, Replay, is_hit, pair_with_random_items


def make_log(items: list[int], num_users: int = 3) -> EventLog:
    """Return a log of these item rows, which must be numbered as they appear."""
    rows = np.array(items, np.int64)
    return EventLog(
        timestamps=np.arange(rows.size),
        users=np.arange(rows.size) % num_users,
        items=rows,
        user_ids=np.arange(num_users),
        item_ids=np.arange(rows.max() + 1),
    )


def make_replay(num_events: int = 1000, num_items: int = 150, batch_events: int = 32, seed: int = 0) -> Replay:
    rng = np.random.default_rng(7)
    items = [i if i < num_items else int(rng.integers(num_items)) for i in range(num_events)]
    return Replay(log=make_log(items), batch_events=batch_events, seed=seed)


def test_batches_cover_the_log_once_and_in_order() -> None:
    """Every event is in exactly one batch; only the last may be shorter."""
    replay = make_replay(num_events=1000, batch_events=32)
    slices = [replay.events_of(batch) for batch in range(replay.num_batches)]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(1000))
    assert {s.stop - s.start for s in slices[:-1]} == {32}


def test_parts_start_at_batches_and_are_of_like_size() -> None:
    """The log is cut into ten parts at batch borders, the first at batch 0."""
    replay = make_replay()
    assert len(replay.part_starts) == NUM_PARTS
    assert replay.part_starts[0] == 0
    lengths = np.diff([*replay.part_starts, replay.num_batches])
    assert lengths.min() >= 1
    assert lengths.max() - lengths.min() <= 1


def test_candidates_are_the_own_item_and_others_seen_so_far() -> None:
    """The own item comes first and is no rival, and no rival appears only later in the log."""
    replay = make_replay()
    log = replay.log
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        candidates = replay.candidates(batch)
        assert candidates.shape == (events.stop - events.start, 1 + NUM_RIVALS)
        for event, row in zip(range(events.start, events.stop), candidates, strict=True):
            seen = set(log.items[: event + 1].tolist())
            assert row[0] == log.items[event]
            assert set(row[1:].tolist()) <= (seen - {int(row[0])} if event else {0})


def test_every_other_seen_item_can_be_drawn() -> None:
    """No item but the own one is left out, neither the first nor the last."""
    rng = np.random.default_rng(3)
    drawn = pair_with_random_items(rng, np.array([0, 2, 4]), np.array([5, 5, 5]), 500)[:, 1:]
    assert [set(row.tolist()) for row in drawn] == [{1, 2, 3, 4}, {0, 1, 3, 4}, {0, 1, 2, 3}]


def test_two_processes_draw_alike_and_two_seeds_do_not() -> None:
    """The candidates follow from log, batch size, batch and seed alone."""
    first, again, other = make_replay(seed=1), make_replay(seed=1), make_replay(seed=2)
    again.candidates(4)  # the order of calls has no part in it
    assert np.array_equal(first.candidates(9), again.candidates(9))
    assert not np.array_equal(first.candidates(9), other.candidates(9))
    assert not np.array_equal(first.candidates(9)[:, 1:], first.candidates(10)[:, 1:])


def rank_rows(num_better: int, num_equal: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of one event with so many rivals above it and level with it."""
    scores = np.zeros(1 + NUM_RIVALS, np.float32)
    scores[0] = 1
    scores[1 : 1 + num_better] = 2
    scores[1 + num_better : 1 + num_better + num_equal] = 1
    return np.ones((1, 1), np.float32), scores[None, :, None]


@pytest.mark.parametrize(
    ("num_better", "num_equal", "expected"),
    [(0, 0, True), (TOP - 1, 0, True), (TOP, 0, False), (0, TOP - 1, True), (0, TOP, False), (5, 5, False)],
)
def test_hit_is_a_place_among_the_top(num_better: int, num_equal: int, expected: bool) -> None:
    """An event is a hit exactly when fewer than ten rivals score as high as its item; ties count against it."""
    assert is_hit(*rank_rows(num_better, num_equal)).tolist() == [expected]


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_rows_that_say_nothing_are_no_hit(value: float) -> None:
    """Missing rows, read as zeros, and rows of NaN rank nothing."""
    users, items = np.full((2, 4), value, np.float32), np.full((2, 1 + NUM_RIVALS, 4), value, np.float32)
    assert not is_hit(users, items).any()


def test_score_is_the_dot_product_of_each_event_with_its_own_candidates() -> None:
    """Events of a batch do not mix."""
    rng = np.random.default_rng(5)
    users = rng.standard_normal((20, 8)).astype(np.float32)
    items = rng.standard_normal((20, 1 + NUM_RIVALS, 8)).astype(np.float32)
    expected = [int((row[1:] @ user >= row[0] @ user).sum()) < TOP for user, row in zip(users, items, strict=True)]
    assert is_hit(users, items).tolist() == expected
    assert 0 < sum(expected) < 20


def test_too_few_batches_or_items_are_refused() -> None:
    """A log that makes no ten batches, or has no 99 rivals, is a clear error."""
    with pytest.raises(
        ConfigError, match=r"1000 events in 8 batches of 128; the demo needs 10 batches or more: .* --batch-e"
    ):
        make_replay(batch_events=128)
    with pytest.raises(
        ConfigError, match=r"99 different items; ranking one among 99 others needs 100 or more: .* --events"
    ):
        make_replay(num_items=99)
    with pytest.raises(ConfigError, match="1 event in 1 batch of 32;"):
        make_replay(num_events=1, num_items=1)
    assert make_replay(num_items=100).num_batches == 32
    with pytest.raises(ConfigError, match="a batch of 0 events"):
        make_replay(batch_events=0)
