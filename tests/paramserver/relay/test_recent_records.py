"""The newest records in memory: without a gap, within their bound, and none dropped that the disk lacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.log.interface import LogRecord
from headrace.paramserver.relay.recent_records import RecentRecords


def record(seq: int, size_bytes: int) -> LogRecord:
    return LogRecord(seq, 1, {}, memoryview(bytes(size_bytes)))


@given(
    begin_seq=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 8)), max_size=40),
    max_bytes=st.integers(0, 20_000),
)
def test_it_holds_the_newest_records(begin_seq: int, steps: list[tuple[int, int]], max_bytes: int) -> None:
    """Whatever comes and becomes durable: what is held is the end of all that came, and what is dropped is durable."""
    recent = RecentRecords(begin_seq - 1)
    came: list[LogRecord] = []
    durable_seq = begin_seq - 1
    for size_bytes, num_durable in steps:
        came.append(record(begin_seq + len(came), size_bytes))
        recent.add(came[-1], came[-1].seq * 10)
        durable_seq = min(durable_seq + num_durable, came[-1].seq)
        recent.drop(up_to_seq=durable_seq, max_bytes=max_bytes)
        held = [each for each in came if recent.has(each.seq)]
        assert held == came[len(came) - len(held) :]
        assert all(each.seq <= durable_seq for each in came[: len(came) - len(held)])
        assert recent.size_bytes <= max_bytes or not held or held[0].seq > durable_seq
        assert recent.last_seq == came[-1].seq
        for each in came:
            assert list(recent.since(each.seq)) == (came[each.seq - begin_seq :] if each in held else [])
            assert recent.mark_of(each.seq) == (each.seq * 10 if each in held else None)
    assert list(recent.since(recent.last_seq + 1)) == []


def test_few_records_are_given_all_or_not() -> None:
    """A follower that is not far behind gets all records at once; one that is farther has to read on."""
    recent = RecentRecords(0)
    for seq in range(1, 101):
        recent.add(record(seq, 10), None)
    recent.drop(up_to_seq=80, max_bytes=0)
    first = next(seq for seq in range(1, 101) if recent.few_since(seq))
    assert 80 < first <= 90
    for seq in range(1, 103):
        assert [each.seq for each in recent.few_since(seq)] == (list(range(seq, 101)) if seq >= first else [])
