"""Reading interaction logs strictly, and replaying them: the same in two processes, nothing from the future."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import ConfigError
from headrace.scripts.ranking_demo.events import NUM_PARTS, NUM_RIVALS, SAMPLE, TOP, EventLog, Replay, draw, is_hit
from headrace.scripts.ranking_demo.events import read_events as read

HEADER = "timestamp,user_id,item_id\n"
INT64_MAX = 2**63 - 1


def write(folder: Path, text: str | bytes, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def numbers_of(log: EventLog) -> list[tuple[int, int, int]]:
    """Return the events with the file's own ids."""
    columns = log.timestamps, log.user_ids[log.users], log.item_ids[log.items]
    return [(int(t), int(u), int(i)) for t, u, i in zip(*columns, strict=True)]


def test_sample_is_whole() -> None:
    """The sample in the repository reads: 23 466 events of 549 users and 2 760 items."""
    log = read(SAMPLE)
    assert (log.users.size, log.user_ids.size, log.item_ids.size) == (23_466, 549, 2_760)
    assert np.all(np.diff(log.timestamps) >= 0)


def test_unsorted_times_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """Events come out by time; two of one time as they stood. A limit keeps the earliest."""
    path = write(tmp_path, HEADER + "30,1,5\n10,9,5\n30,2,6\n20,1,7\n10,8,5\n")
    events = [(10, 9, 5), (10, 8, 5), (20, 1, 7), (30, 1, 5), (30, 2, 6)]
    assert numbers_of(read(path)) == events
    log = read(path, max_events=2)
    assert numbers_of(log) == events[:2]
    assert (log.user_ids.size, log.item_ids.size) == (2, 1)


def test_rows_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    """The rows of what has appeared up to an event are the lowest ones."""
    log = read(write(tmp_path, HEADER + f"1,{INT64_MAX},40\n2,7,40\n3,0,9\n4,7,12\n"))
    assert log.users.tolist() == [0, 1, 2, 1]
    assert log.items.tolist() == [0, 0, 1, 2]
    assert log.user_ids.tolist() == [INT64_MAX, 7, 0]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEADER + "1,2,3\n4,5,6\n",
        HEADER.replace("\n", "\r\n") + "1,2,3\r\n4,5,6\r\n",
        "timestamp, user_id, item_id\n 1, 2, 3\n4 ,5 ,6",
        HEADER + '"1","2","3"\n\n4,5,6\n\n\n',
        HEADER + "01,002,3\n4,5,6\n",
    ],
    ids=["byte order mark", "CRLF", "spaces, no last newline", "quotes, empty lines", "leading zeros"],
)
def test_dialects(tmp_path: Path, text: str) -> None:
    """What spreadsheets and databases write is read alike, plain and gzipped, whatever the file's name."""
    for data in (text.encode(), gzip.compress(text.encode())):
        assert numbers_of(read(write(tmp_path, data, "log.txt"))) == [(1, 2, 3), (4, 5, 6)]


def test_extreme_values(tmp_path: Path) -> None:
    """Ids up to 2⁶³ - 1 and times before 1970 are valid."""
    log = read(write(tmp_path, HEADER + f"-5,{INT64_MAX},{INT64_MAX}\n{INT64_MAX},0,0\n{-(2**63)},1,1\n"))
    assert numbers_of(log) == [(-(2**63), 1, 1), (-5, INT64_MAX, INT64_MAX), (INT64_MAX, 0, 0)]


def test_pipe(tmp_path: Path) -> None:
    """A log that comes through a pipe, as from a shell's `<(…)`, is read."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(f"{HEADER}1,2,3\n".encode()),))
    writer.start()
    try:
        assert numbers_of(read(path)) == [(1, 2, 3)]
    finally:
        writer.join()


GOOD = HEADER.encode() + b"1,2,3\n"
LINES = [
    ("1,2", "2 fields where timestamp,user_id,item_id are 3"),
    ("1,2,3,4", "4 fields where timestamp,user_id,item_id are 3"),
    (HEADER.strip(), "the header again, as in files that were joined; remove this line"),
    ("x,2,3", "timestamp 'x' is not an integer"),
    ("1.5,2,3", "timestamp '1.5' is not an integer"),
    ("1,,3", "user_id '' is not an integer"),
    ("1,2,1_000", "item_id '1_000' is not an integer"),
    ("1,2,1e3", "item_id '1e3' is not an integer"),
    ("1,2,٣", "item_id '٣' is not an integer"),
    ("1,-2,3", "user_id -2 is negative"),
    (f"1,{2**63},3", "user_id '9223372036854775808' does not fit 64 bits"),
    (f"1,2,{'9' * 5000}", f"item_id '{'9' * 37}…' does not fit 64 bits"),
    (f"{-(2**63) - 1},2,3", "timestamp '-9223372036854775809' does not fit 64 bits"),
]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((GOOD + f"\n{line}\n4,5,6\n".encode(), f"4: {reason}") for line, reason in LINES),
        (b"", "1: the file is empty; its first line must be timestamp,user_id,item_id"),
        (HEADER.encode(), "1: no events follow the header"),
        (b"1,2,3\n", "1: the first line must be timestamp,user_id,item_id, not '1,2,3'"),
        (b"\n1,2,3\n", "1: the first line must be timestamp,user_id,item_id, not ''"),
        (GOOD + b"1,\xff\xfe,3\n", r"3: user_id '\\xff\\xfe' is not an integer"),
        ((HEADER + "1,2,3\n").encode("utf-16"), "1: the first line must be timestamp,user_id,item_id, not "),
        (GOOD + b'1,"2,3\n', "3: not CSV: "),
        (gzip.compress(HEADER.encode() + b"1,2,3\n" * 99, mtime=0)[:-9], "101 or soon after: damaged gzip data: "),
        (b"\x1f\x8b" + b"no gzip at all", "1 or soon after: damaged gzip data: "),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    """A file or line that is not valid is refused in one line with the place and the reason."""
    path = write(tmp_path, data)
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:{reason}")


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    """A path that is no file is one line with the path and the system's reason."""
    path = tmp_path / name
    with pytest.raises(ConfigError, match=r"(No such file|Is a directory)") as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


@given(data=st.binary(max_size=300))
def test_any_bytes_give_a_log_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No content of a file raises anything but a `ConfigError`."""
    folder = tmp_path_factory.mktemp("any")
    for content in (data, HEADER.encode() + data, b"\x1f\x8b\x08\x00" + data):
        try:
            log = read(write(folder, content))
        except ConfigError:
            continue
        assert log.users.size >= 1


def make_replay(num_events: int = 1000, num_items: int = 150, batch_events: int = 32, seed: int = 0) -> Replay:
    rng = np.random.default_rng(7)
    items = np.array([i if i < num_items else int(rng.integers(num_items)) for i in range(num_events)], np.int64)
    times, users = np.arange(num_events), np.arange(num_events) % 3
    ids = {"user_ids": np.arange(3), "item_ids": np.arange(items.max() + 1)}
    log = EventLog(timestamps=times, users=users, items=items, **ids)
    return Replay(log=log, batch_events=batch_events, seed=seed)


def test_batches_and_parts_cover_the_log() -> None:
    """Every event is in exactly one batch, only the last may be shorter; ten parts of like size start at batches."""
    replay = make_replay(num_events=1000, batch_events=32)
    slices = [replay.events_of(batch) for batch in range(replay.num_batches)]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(1000))
    assert {s.stop - s.start for s in slices[:-1]} == {32}
    assert len(replay.part_starts) == NUM_PARTS
    lengths = np.diff([*replay.part_starts, replay.num_batches])
    assert replay.part_starts[0] == 0 and lengths.min() >= 1 and lengths.max() - lengths.min() <= 1


def test_candidates_are_the_own_item_and_others_seen_so_far() -> None:
    """The own item comes first and is no rival, and no rival appears only later in the log."""
    replay = make_replay()
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        candidates = replay.candidates(batch)
        assert candidates.shape == (events.stop - events.start, 1 + NUM_RIVALS)
        for event, row in zip(range(events.start, events.stop), candidates, strict=True):
            seen = set(replay.log.items[: event + 1].tolist())
            assert row[0] == replay.log.items[event]
            assert set(row[1:].tolist()) <= (seen - {int(row[0])} if event else {0})


def test_every_other_seen_item_can_be_drawn() -> None:
    """Only the own item is left out."""
    drawn = draw(np.random.default_rng(3), np.array([0, 2, 4]), np.array([5, 5, 5]), 500)[:, 1:]
    assert [set(row.tolist()) for row in drawn] == [{1, 2, 3, 4}, {0, 1, 3, 4}, {0, 1, 2, 3}]


def test_two_processes_draw_alike_and_two_seeds_do_not() -> None:
    """The candidates follow from log, batch size, batch and seed alone."""
    first, again, other = make_replay(seed=1), make_replay(seed=1), make_replay(seed=2)
    again.candidates(4)  # the order of calls makes no difference
    assert np.array_equal(first.candidates(9), again.candidates(9))
    assert not np.array_equal(first.candidates(9), other.candidates(9))
    assert not np.array_equal(first.candidates(9)[:, 1:], first.candidates(10)[:, 1:])


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


def test_too_few_batches_or_items_are_refused() -> None:
    """A log that makes no ten batches, or has no 99 rivals, is a clear error."""
    with pytest.raises(ConfigError, match=r"1000 events in 8 batches of 128; the demo needs 10 .* --batch-e"):
        make_replay(batch_events=128)
    with pytest.raises(ConfigError, match=r"99 different items; ranking one among 99 others needs 100 .* --events"):
        make_replay(num_items=99)
    assert make_replay(num_items=100).num_batches == 32
