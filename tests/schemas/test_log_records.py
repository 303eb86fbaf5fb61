"""Log records: exact bytes, round trips, and no error but the documented ones for any bytes."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.log_records import (
    MAX_PAYLOAD_BYTES,
    RECORD_HEADER_BYTES,
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    Seal,
    SegmentHeader,
    decode_payload,
    decode_record_header,
    decode_seal,
    decode_segment_header,
    encode_checkpoint,
    encode_record,
    encode_seal,
    encode_segment_header,
    find_record_header,
    pack_header,
    unpack_header,
)

_NONCE = 0x1122334455667788
_HEADER = SegmentHeader(log_id=bytes(range(16)), nonce=_NONCE, first_seq=7, created_us=1_700_000_000_000_000)
_SEAL = Seal(last_seq=7, num_records=1, sealed_us=1_700_000_000_000_001)

# The worked example of docs/update-log.md: a segment with one record, sealed.
_GOLDEN_SEGMENT = (
    "4845414452414345 a6327466 02000000 000102030405060708090a0b0c0d0e0f"
    "8877665544332211 0700000000000000 00401e18240a0600 0000000000000000"
)
_GOLDEN_RECORD = (
    "42f8f1bb 0b000000 8877665544332211 0700000000000000 0600000000000000 03000000 5ea44986 07000000 01 000000"
    "81a47374657005 726f7773"
)
_GOLDEN_CHECKPOINT = (
    "38e16d5d 00000000 8877665544332211 0700000000000000 0700000000000000 00000000 00000000 00000000 02 000000"
)
_GOLDEN_SEAL = (
    "89581aba 10000000 8877665544332211 0700000000000000 0700000000000000 00000000 0773602a 00000000 03 000000"
    "01401e18240a0600 0100000000000000"
)


def _record(body: list[bytes | memoryview], header: dict[str, Any] | None = None, **fields: int) -> bytes:
    values = {"nonce": _NONCE, "seq": 7, "durable_seq": 6, "epoch": 3} | fields
    head = encode_record(**values, header=pack_header({"step": 5} if header is None else header), body=body)
    return head + b"".join(body)


def _decode(data: bytes, offset: int = 0) -> tuple[RecordHeader, dict[str, Any], bytes]:
    record = decode_record_header(data, offset, nonce=_NONCE)
    assert record is not None
    start = offset + RECORD_HEADER_BYTES
    fields, body = decode_payload(record, memoryview(data)[start : start + record.payload_bytes])
    return record, fields, bytes(body)


def test_golden_bytes() -> None:
    """The four things in a segment are these bytes, and come back; a change here is a new format version.

    Reserved space that was never written is not damage."""
    assert crc32c(b"123456789") == 0xE3069283  # the checksum's own published example
    assert encode_segment_header(_HEADER) == bytes.fromhex(_GOLDEN_SEGMENT)
    assert _record([b"row", b"s"]) == bytes.fromhex(_GOLDEN_RECORD)
    assert encode_checkpoint(nonce=_NONCE, durable_seq=7) == bytes.fromhex(_GOLDEN_CHECKPOINT)
    assert encode_seal(nonce=_NONCE, seal=_SEAL) == bytes.fromhex(_GOLDEN_SEAL)
    sizes = [len(bytes.fromhex(golden)) for golden in (_GOLDEN_SEGMENT, _GOLDEN_CHECKPOINT, _GOLDEN_SEAL)]
    assert sizes == [SEGMENT_HEADER_BYTES, RECORD_HEADER_BYTES, SEAL_BYTES]
    checkpoint = decode_record_header(encode_checkpoint(nonce=_NONCE, durable_seq=9), 0, nonce=_NONCE)
    assert checkpoint == RecordHeader(RecordKind.CHECKPOINT, 9, 9, 0, 0, 0, 0)
    data = encode_seal(nonce=_NONCE, seal=_SEAL)
    record = decode_record_header(data, 0, nonce=_NONCE)
    assert record is not None
    assert decode_seal(record, memoryview(data)[RECORD_HEADER_BYTES:]) == _SEAL
    assert decode_record_header(bytes(100), 3, nonce=_NONCE) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(
    header=st.dictionaries(st.text(max_size=10), _JSON, max_size=6),
    body=st.lists(st.binary(max_size=50), max_size=6),
    seq=st.integers(1, 2**64 - 1),
    epoch=st.integers(1, 2**32 - 1),
    before=st.binary(max_size=9),
    signed=st.integers(-(2**63), 2**63 - 1),
)
def test_round_trips(
    header: dict[str, Any], body: list[bytes], seq: int, epoch: int, before: bytes, signed: int
) -> None:
    """Every record is decoded as it was, wherever it lies, however its body was cut; every segment header too."""
    views: list[bytes | memoryview] = [memoryview(part) for part in body]
    data = before + _record(views, header, seq=seq, durable_seq=seq - 1, epoch=epoch) + b"more"
    record, fields, found = _decode(data, len(before))
    assert (record.kind, record.seq, record.durable_seq, record.epoch) == (RecordKind.DATA, seq, seq - 1, epoch)
    assert (fields, found) == (header, b"".join(body))
    assert len(before) + record.size_bytes + 4 == len(data)
    fields = {"log_id": before.ljust(16, b"x"), "nonce": 2**64 - seq, "first_seq": seq, "created_us": signed}
    segment = SegmentHeader(**fields, source_mark=-1 - signed)
    assert decode_segment_header(encode_segment_header(segment) + b"more") == segment


def test_checksum_runs_over_segments_of_any_size() -> None:
    """Large parts, whose checksum is made without the GIL, and views of other element types count as their bytes."""
    big = memoryview(bytes(range(256)) * 4096)
    data = _record([big[1:300_000], big[300_000:], big[:0], memoryview(bytearray(12)).cast("i", shape=[3, 1])])
    record, _, body = _decode(data)
    assert body == bytes(big[1:]) + bytes(12)
    assert record.payload_crc == crc32c(data[RECORD_HEADER_BYTES:])
    longest: list[bytes | memoryview] = [memoryview(bytes(2**20))] * (MAX_PAYLOAD_BYTES // 2**20)
    with pytest.raises(RequestError, match=str(MAX_PAYLOAD_BYTES)):  # a bound of the format
        encode_record(nonce=_NONCE, seq=2, durable_seq=1, epoch=1, header=b"\x80", body=longest)


def test_every_flipped_bit_is_found() -> None:
    """No bit of a record or of a segment header can change unnoticed."""
    data = _record([b"some rows"])
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            _decode(bytes(flipped))
    header = encode_segment_header(_HEADER)
    for bit in range(len(header) * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            decode_segment_header(bytes(flipped))


def _with_crc(record: bytes) -> bytes:
    return struct.pack("<I", crc32c(record[4:RECORD_HEADER_BYTES])) + record[4:]


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (44, b"\x09", "unknown record kind 9"),
        (4, (2**31).to_bytes(4, "little"), "contradicts"),
        (40, (1000).to_bytes(4, "little"), "contradicts"),
        (24, (7).to_bytes(8, "little"), "contradicts"),
        (8, (_NONCE + 1).to_bytes(8, "little"), "another segment"),
    ],
)
def test_header_that_makes_no_sense_is_refused(at: int, value: bytes, words: str) -> None:
    """A header with a right checksum and impossible fields, or another segment's nonce, is damage too."""
    data = bytearray(_record([b"x"]))
    data[at : at + len(value)] = value
    with pytest.raises(CorruptionError, match=words):
        decode_record_header(_with_crc(bytes(data)), 0, nonce=_NONCE)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (12, 1, "format version 1"),
        (12, 3, "format version 3"),
        (32, 0, "nonce 0 or first seq 0"),
        (40, 0, "nonce 0 or first seq 0"),
    ],
)
def test_segment_header_that_makes_no_sense_is_refused(at: int, value: int, words: str) -> None:
    """A segment of another format is not read as one of this; none has a nonce or a first seq of 0."""
    data = bytearray(encode_segment_header(_HEADER))
    data[at : at + (1 if at == 12 else 8)] = value.to_bytes(1 if at == 12 else 8, "little")
    data[8:12] = struct.pack("<I", crc32c(bytes(data[12:])))
    with pytest.raises(CorruptionError, match=words):
        decode_segment_header(bytes(data))


@pytest.mark.parametrize("packed", [b"\x93\x01\x02\x03", b"\xc1", b"\x81\xa1", b""])
def test_what_is_no_header_or_no_seal_is_refused(packed: bytes) -> None:
    """A right checksum over something else than a msgpack map is damage; only an intact seal ends a segment."""
    data = encode_record(nonce=_NONCE, seq=7, durable_seq=6, epoch=1, header=packed, body=[])
    with pytest.raises(CorruptionError, match=r"msg|not a map"):
        _decode(data)
    for other, words in (
        (_record([b"as long as a body"[:9]]), "does not end with its seal"),
        (encode_checkpoint(nonce=_NONCE, durable_seq=7), "does not end with its seal"),
        (bytes.fromhex(_GOLDEN_SEAL)[:-1] + b"\x01", "checksum of the seal"),
    ):
        record = decode_record_header(other, 0, nonce=_NONCE)
        assert record is not None
        with pytest.raises(CorruptionError, match=words):
            decode_seal(record, memoryview(other)[RECORD_HEADER_BYTES:])


def test_records_are_found_again_behind_damage() -> None:
    """The next intact header is found, wherever the nonce's bytes occur by chance."""
    decoy = _NONCE.to_bytes(8, "little")
    data = b"\xff" * 100 + decoy + b"\xff" * 5 + decoy * 3 + _record([b"abc"]) + decoy
    at = data.index(_record([b"abc"]))
    assert find_record_header(data, 0, nonce=_NONCE) == at
    assert find_record_header(memoryview(data), at, nonce=_NONCE) == at
    assert find_record_header(data, at + 1, nonce=_NONCE) is None
    assert find_record_header(data, 0, nonce=_NONCE + 1) is None


@given(st.binary(max_size=300), st.integers(0, 300))
@example(b"", 0)
def test_any_bytes_give_only_documented_errors(data: bytes, offset: int) -> None:
    """Decoders raise `CorruptionError` and nothing else, whatever they are given."""
    for decode in (
        lambda: decode_segment_header(data),
        lambda: decode_record_header(data, offset, nonce=_NONCE),
        lambda: unpack_header(data),
        lambda: find_record_header(data, offset, nonce=_NONCE),
    ):
        try:
            decode()
        except CorruptionError as exc:
            assert str(exc)


@given(
    packed=st.binary(max_size=60),
    body=st.binary(max_size=30),
    cut=st.integers(0, 20),
    kind=st.integers(0, 255),
    header_bytes=st.integers(0, 2**32 - 1),
)
def test_any_payload_gives_only_documented_errors(
    packed: bytes, body: bytes, cut: int, kind: int, header_bytes: int
) -> None:
    """Right checksums over arbitrary fields and payloads raise `CorruptionError` and nothing else."""
    data = bytearray(encode_record(nonce=_NONCE, seq=7, durable_seq=6, epoch=1, header=packed, body=[body]) + body)
    data[44] = kind
    data[40:44] = header_bytes.to_bytes(4, "little")
    data = bytearray(_with_crc(bytes(data)))
    try:
        record = decode_record_header(data, 0, nonce=_NONCE)
        assert record is not None
        payload = memoryview(bytes(data))[RECORD_HEADER_BYTES : len(data) - cut]
        if record.kind is RecordKind.DATA:
            decode_payload(record, payload)
        else:
            decode_seal(record, payload)
    except CorruptionError as exc:
        assert str(exc)
