"""Reading interaction logs: what is accepted, in which order it comes out, and what is refused with file and line."""

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
from headrace.scripts.demo_data import SAMPLE_PATH, EventLog, read_events

HEADER = "timestamp,user_id,item_id\n"
INT64_MAX = 2**63 - 1


def write(folder: Path, text: str | bytes, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> str:
    """Return the one line with which a file is refused, without the path before it."""
    with pytest.raises(ConfigError) as caught:
        read_events(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:")
    return message.removeprefix(f"{path}:")


def events_of(log: EventLog) -> list[tuple[int, int, int]]:
    """Return the events with the file's own ids."""
    columns = log.timestamps, log.user_ids[log.users], log.item_ids[log.items]
    return [(int(t), int(u), int(i)) for t, u, i in zip(*columns, strict=True)]


def test_sample_is_whole() -> None:
    """The sample in the repository reads: 23 466 events of 549 users and 2 760 items."""
    log = read_events(SAMPLE_PATH)
    assert (log.num_events, log.num_users, log.num_items) == (23_466, 549, 2_760)
    assert np.all(np.diff(log.timestamps) >= 0)


def test_unsorted_times_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """Events come out by time; two of one time as they stood."""
    log = read_events(write(tmp_path, HEADER + "30,1,5\n10,9,5\n30,2,6\n20,1,7\n10,8,5\n"))
    assert events_of(log) == [(10, 9, 5), (10, 8, 5), (20, 1, 7), (30, 1, 5), (30, 2, 6)]


def test_rows_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    """The rows of what has appeared up to an event are the lowest ones."""
    log = read_events(write(tmp_path, HEADER + f"1,{INT64_MAX},40\n2,7,40\n3,0,9\n4,7,12\n"))
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
@pytest.mark.parametrize("is_gzip", [False, True])
def test_dialects(tmp_path: Path, text: str, is_gzip: bool) -> None:
    """What spreadsheets and databases write is read alike, plain and gzipped, whatever the file's name."""
    data = gzip.compress(text.encode()) if is_gzip else text.encode()
    assert events_of(read_events(write(tmp_path, data, "log.txt"))) == [(1, 2, 3), (4, 5, 6)]


def test_extreme_values(tmp_path: Path) -> None:
    """Ids up to 2⁶³ - 1 and times before 1970 are sound."""
    log = read_events(write(tmp_path, HEADER + f"-5,{INT64_MAX},{INT64_MAX}\n{INT64_MAX},0,0\n{-(2**63)},1,1\n"))
    assert events_of(log) == [(-(2**63), 1, 1), (-5, INT64_MAX, INT64_MAX), (INT64_MAX, 0, 0)]


def test_max_events_keeps_the_earliest(tmp_path: Path) -> None:
    """A limit cuts after sorting, and what comes later leaves no row."""
    log = read_events(write(tmp_path, HEADER + "3,1,1\n1,2,2\n2,3,3\n"), max_events=2)
    assert events_of(log) == [(1, 2, 2), (2, 3, 3)]
    assert log.num_users == log.num_items == 2


def test_pipe(tmp_path: Path) -> None:
    """A log that comes through a pipe, as from a shell's `<(…)`, is read."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(f"{HEADER}1,2,3\n".encode()),))
    writer.start()
    try:
        assert events_of(read_events(path)) == [(1, 2, 3)]
    finally:
        writer.join()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,2", "2 fields where timestamp,user_id,item_id are 3"),
        ("1,2,3,4", "4 fields where timestamp,user_id,item_id are 3"),
        (HEADER.strip(), "the header again, as in files that were joined; remove this line"),
        ("x,2,3", "timestamp 'x' is not an integer"),
        ("1.5,2,3", "timestamp '1.5' is not an integer"),
        ("1,u2,3", "user_id 'u2' is not an integer"),
        ("1,,3", "user_id '' is not an integer"),
        ("1,2,3.0", "item_id '3.0' is not an integer"),
        ("1,2,1_000", "item_id '1_000' is not an integer"),
        ("1,2,1e3", "item_id '1e3' is not an integer"),
        ("1,2,٣", "item_id '٣' is not an integer"),
        ("1,2,nan", "item_id 'nan' is not an integer"),
        ("1,-2,3", "user_id -2 is negative"),
        ("1,2,-1", "item_id -1 is negative"),
        (f"1,{2**63},3", "user_id '9223372036854775808' does not fit 64 bits"),
        (f"1,2,{'9' * 5000}", f"item_id '{'9' * 37}…' does not fit 64 bits"),
        (f"{-(2**63) - 1},2,3", "timestamp '-9223372036854775809' does not fit 64 bits"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    """A line that is no event is refused with its number and the reason, wherever sound lines are around it."""
    assert refusal(write(tmp_path, f"{HEADER}1,2,3\n\n{line}\n4,5,6\n")) == f"4: {reason}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "1: the file is empty; its first line must be timestamp,user_id,item_id"),
        (HEADER.encode(), "1: no events follow the header"),
        (b"1,2,3\n", "1: the first line must be timestamp,user_id,item_id, not '1,2,3'"),
        (b"\n1,2,3\n", "1: the first line must be timestamp,user_id,item_id, not ''"),
        (b"user_id,item_id,timestamp\n1,2,3\n", "1: the first line must be timestamp,user_id,item_id, not "),
        (HEADER.encode() + b"1,2,3\n1,\xff\xfe,3\n", r"3: user_id '\\xff\\xfe' is not an integer"),
        ((HEADER + "1,2,3\n").encode("utf-16"), "1: the first line must be timestamp,user_id,item_id, not "),
        (HEADER.encode() + b'1,2,3\n1,"2,3\n', "3: not CSV: "),
        (gzip.compress(HEADER.encode() + b"1,2,3\n" * 99)[:-9], "101 or soon after: damaged gzip data: "),
        (b"\x1f\x8b" + b"no gzip at all", "1 or soon after: damaged gzip data: "),
    ],
    ids=[
        "empty",
        "header only",
        "no header",
        "empty line first",
        "columns",
        "not text",
        "UTF-16",
        "open quote",
        "cut",
        "not gzip",
    ],
)
def test_malformed_file_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """A file that is no log is refused with the place and the reason."""
    assert refusal(write(tmp_path, data)).startswith(reason)


def test_damage_in_the_middle_of_gzip_data(tmp_path: Path) -> None:
    """Flipped bytes inside compressed data are an error, never other events."""
    text = HEADER + "".join(f"{i},{i * 7 % 101},{i * 13 % 997}\n" for i in range(5000))
    data = bytearray(gzip.compress(text.encode()))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(ConfigError):
        read_events(write(tmp_path, bytes(data)))


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    """A path that is no file is one line with the path and the system's reason."""
    path = tmp_path / name
    with pytest.raises(ConfigError, match=r"(No such file|Is a directory)") as caught:
        read_events(path)
    assert str(caught.value).startswith(f"{path}: ")


@given(data=st.binary(max_size=300))
def test_any_bytes_give_a_log_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No content of a file raises anything but a `ConfigError`."""
    folder = tmp_path_factory.mktemp("any")
    for content in (data, HEADER.encode() + data, b"\x1f\x8b\x08\x00" + data):
        try:
            log = read_events(write(folder, content))
        except ConfigError:
            continue
        assert log.num_events >= 1


def test_saved_log_is_loaded_alike(tmp_path: Path) -> None:
    """The file that the reader gets holds the same events."""
    log = read_events(write(tmp_path, HEADER + "3,1,9\n1,2,2\n2,1,2\n"))
    log.save(tmp_path / "log.npz")
    assert events_of(EventLog.load(tmp_path / "log.npz")) == events_of(log)
