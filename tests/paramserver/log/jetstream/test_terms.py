"""The void rule: which records of a stream count."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT, Terms
from headrace.schemas.stream_records import (
    StreamRecord,
    StreamRecordKind,
    decode_stream_record,
    encode_stream_note,
    encode_stream_record,
)

_OPEN, _DATA, _HEARTBEAT = StreamRecordKind.OPEN, StreamRecordKind.DATA, StreamRecordKind.HEARTBEAT


def _record(seq: int, kind: StreamRecordKind, term: int, mark: int) -> StreamRecord:
    if kind is _DATA:
        data = encode_stream_record(kind=kind, term=term, mark=mark, seq=seq, epoch=1, header=b"\x80", body=[])
    else:
        previous = (seq - 1, 1) if kind is _OPEN else None
        data = encode_stream_note(kind, term=term, mark=mark, seq=seq, owner=f"owner-{mark}", previous=previous)
    return decode_stream_record(memoryview(data), seq=seq)


def _log(*kinds: tuple[StreamRecordKind, int, int]) -> list[StreamRecord]:
    return [_record(seq, *kind) for seq, kind in enumerate(kinds, 1)]


def _naive(records: list[StreamRecord]) -> list[bool]:
    """Return which records are valid, each by itself, from the definition."""
    valid: list[bool] = []
    for index, record in enumerate(records):
        opens = [each for each, is_valid in zip(records[:index], valid, strict=True) if is_valid and each.kind is _OPEN]
        last = max((each.seq for each in opens), default=0)
        term, mark = next(((each.term, each.mark) for each in opens if each.seq == last), (0, 0))
        valid.append(record.term > term if record.kind is _OPEN else (record.term, record.mark) == (term, mark))
    return valid


_kinds = st.tuples(st.sampled_from([_OPEN, _DATA, _HEARTBEAT]), st.integers(1, 5), st.integers(1, 3))


@given(st.lists(_kinds, max_size=30))
@example([(_OPEN, 1, 1), (_DATA, 1, 1), (_OPEN, 2, 2), (_DATA, 1, 1), (_DATA, 2, 2)])
@example([(_OPEN, 2, 1), (_OPEN, 2, 2), (_DATA, 2, 2), (_DATA, 2, 1)])
def test_a_record_is_void_unless_the_last_valid_open_is_of_its_term(
    kinds: list[tuple[StreamRecordKind, int, int]],
) -> None:
    """Any sequence of records is judged as the definition says, and each judgement needs only what came before."""
    records = _log(*kinds)
    terms = Terms()
    assert [terms.take(record) for record in records] == _naive(records)
    valid_opens = [
        each for each, is_valid in zip(records, _naive(records), strict=True) if is_valid and each.kind is _OPEN
    ]
    expected = (valid_opens[-1].term, valid_opens[-1].mark, valid_opens[-1].owner) if valid_opens else (0, 0, "")
    assert (terms.term, terms.mark, terms.owner) == expected
    assert terms.num_voids == _naive(records).count(False)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, MAX_IN_FLIGHT)), min_size=1, max_size=4),
    st.integers(0, 300),
    st.data(),
)
def test_who_begins_in_the_middle_judges_as_who_read_all(
    owners: list[tuple[int, int]], late_begin: int, data: st.DataObject
) -> None:
    """From `MAX_IN_FLIGHT` records on, a reader that began anywhere agrees with one that read from the beginning."""
    kinds: list[tuple[StreamRecordKind, int, int]] = []
    for term, (num_late, num_own) in enumerate(owners, 1):
        kinds.append((_OPEN, term, term))
        # Records of owners before can lie between the owner's, but not farther than they can be in flight.
        places = [(_DATA, term, term)] * num_own + [(_DATA, term - 1, term - 1)] * (num_late if term > 1 else 0)
        kinds += data.draw(st.permutations(places))[:MAX_IN_FLIGHT] + [(_DATA, term, term)] * num_own
    records = _log(*kinds)
    begin = min(late_begin, len(records))
    whole, late = Terms(), Terms(is_beginning=False)
    for record in records[:begin]:
        whole.take(record)
    for index, record in enumerate(records[begin:]):
        was_known = late.is_known
        is_valid, guess = whole.take(record), late.take(record)
        if was_known or late.is_known or index >= MAX_IN_FLIGHT:
            assert guess is is_valid
            assert late.nonce_of(record, is_valid=guess) == whole.nonce_of(record, is_valid=is_valid)
        assert late.is_known or index < MAX_IN_FLIGHT - 1


def test_the_nonce_of_a_void_record_names_both_owners() -> None:
    """Two logs that share a record, void in one and valid in the other, differ in its nonce."""
    terms = Terms()
    first, late = _log((_OPEN, 1, 10), (_DATA, 1, 10))
    assert terms.nonce_of(first, is_valid=terms.take(first)) == 10
    assert terms.nonce_of(late, is_valid=terms.take(late)) == 10
    other = Terms()
    for record in _log((_OPEN, 1, 10), (_OPEN, 2, 20)):
        other.take(record)
    void = _record(3, _DATA, 1, 10)
    assert not other.take(void)
    assert other.nonce_of(void, is_valid=False) not in (0, 10, 20)
