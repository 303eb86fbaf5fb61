"""Stream records: exact bytes, round trips, and no error but the documented one for any bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import CorruptionError
from headrace.schemas.log_records import pack_header
from headrace.schemas.stream_records import (
    STREAM_HEADER_BYTES,
    StreamRecordKind,
    decode_stream_record,
    encode_stream_note,
    encode_stream_record,
)

_MARK = 0x1122334455667788

# The worked example of docs/replicated-log.md: a data record, and the open record behind it.
_GOLDEN_DATA = (
    "a0869fc0 48524d02 0500000000000000 8877665544332211 0700000000000000 03000000 07000000 01 "
    "000000 81a47374657005726f7773"
)
_GOLDEN_OPEN = (
    "970fbf04 48524d02 0600000000000000 feffffffffffffff 0800000000000000 00000000 1f000000 02 "
    "000000 82a56f776e6572a3623a39a870726576696f75739207cf1122334455667788"
)


def _data(**fields: Any) -> bytes:
    values = {"kind": StreamRecordKind.DATA, "term": 5, "mark": _MARK, "seq": 7, "epoch": 3} | fields
    values = {"header": pack_header({"step": 5}), "body": [b"ro", memoryview(b"ws")]} | values
    return encode_stream_record(**values)


def _open() -> bytes:
    return encode_stream_note(StreamRecordKind.OPEN, term=6, mark=-2, seq=8, owner="b:9", previous=(7, _MARK))


def test_golden_bytes() -> None:
    """The bytes of a data record and of an open record are these, and every field comes back."""
    assert (_data().hex(), _open().hex()) == (bytes.fromhex(_GOLDEN_DATA).hex(), bytes.fromhex(_GOLDEN_OPEN).hex())
    data = decode_stream_record(memoryview(bytes.fromhex(_GOLDEN_DATA)), seq=7)
    assert (data.kind, data.term, data.mark, data.seq, data.epoch) == (StreamRecordKind.DATA, 5, _MARK, 7, 3)
    assert (data.header, bytes(data.body), data.owner, data.previous) == ({"step": 5}, b"rows", "", None)
    assert data.body.readonly
    opened = decode_stream_record(memoryview(bytes.fromhex(_GOLDEN_OPEN)), seq=8)
    assert (opened.kind, opened.term, opened.mark, opened.epoch) == (StreamRecordKind.OPEN, 6, -2, 0)
    assert (opened.owner, opened.previous, bytes(opened.body)) == ("b:9", (7, _MARK), b"")
    padding = encode_stream_note(StreamRecordKind.PADDING, term=6, mark=-2, seq=9, owner="host:7071")
    assert len(padding) < STREAM_HEADER_BYTES + 40, "a takeover writes many"
    items = memoryview(bytearray(range(250)) * 4000).cast("H")  # large, and of other items than bytes
    record = decode_stream_record(memoryview(_data(body=[items, b"", b"x"])), seq=7)
    assert bytes(record.body) == bytes(items) + b"x"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_data(), "message 8 holds record 7"),
        (encode_stream_note(StreamRecordKind.OPEN, term=6, mark=-2, seq=8, owner="b:9"), "does not name"),
    ],
)
def test_a_record_at_another_place_or_without_what_is_before_it(data: bytes, words: str) -> None:
    """A record counts only at its own seq, and an open record only with the record before it."""
    with pytest.raises(CorruptionError, match=words):
        decode_stream_record(memoryview(data), seq=8)


@given(
    term=st.integers(1, 2**64 - 1),
    mark=st.integers(-(2**63), 2**63 - 1).filter(bool),
    seq=st.integers(1, 2**64 - 1),
    epoch=st.integers(1, 2**32 - 1),
    body=st.lists(st.binary(max_size=300), max_size=5),
)
def test_round_trip(term: int, mark: int, seq: int, epoch: int, body: list[bytes]) -> None:
    """Any record is read as it was written."""
    data = _data(term=term, mark=mark, seq=seq, epoch=epoch, body=body)
    record = decode_stream_record(memoryview(data), seq=seq)
    assert (record.term, record.mark, record.seq, record.epoch) == (term, mark, seq, epoch)
    assert bytes(record.body) == b"".join(body)


@given(st.binary(max_size=200), st.integers(0, 1000), st.integers(1, 255))
def test_any_bytes_are_refused_by_one_error(data: bytes, at: int, bits: int) -> None:
    """Bytes that are no record raise `CorruptionError`, cut ones too; and no changed byte passes, wherever it is."""
    for tried in (data, _data()[: min(len(data), len(_data()) - 1)], _open()[:-1], _data() + b"x"):
        with pytest.raises(CorruptionError):
            decode_stream_record(memoryview(tried), seq=7)
    for golden, seq in ((_data(), 7), (_open(), 8)):
        changed = bytearray(golden)
        changed[at % len(changed)] ^= bits
        with pytest.raises(CorruptionError):
            decode_stream_record(memoryview(bytes(changed)), seq=seq)
