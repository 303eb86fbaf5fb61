"""Log records: what an update log's segments hold, byte by byte. No I/O.

    segment   header (64 bytes), records one after the other, then a seal record or, while it is written, anything
    record    header (48 bytes), msgpack map (`header_bytes` of the payload), body as it came (the rest of the payload)

    segment header                             record header
    byte  0  magic "HEADRACE"                  byte  0  u32 crc32c of bytes 4 to 48
          8  u32 crc32c of bytes 12 to 64            4  u32 payload bytes (msgpack and body)
         12  u32 format version                      8  u64 mark of the segment
         16  16 bytes log id                        16  u64 seq
         32  u64 mark                               24  u64 durable seq
         40  u64 first seq                          32  u32 epoch
         48  i64 created, µs since 1970             36  u32 crc32c of the payload
         56  8 zero bytes                           40  u32 header bytes (msgpack)
                                                    44  u8 kind, 3 zero bytes            all little-endian

The *mark* is drawn at random for each segment: bytes that another segment left on the disk never pass for a record of
this one, and a record can be found again behind damage. The *durable seq* is the last one that was synced when the
record was written: it proves that everything up to there had been acked, which tells damage from a torn tail.

`docs/update-log.md` has a worked example and what this cannot detect.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
from crc32c import crc32c

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.messages import Segment

__all__ = [
    "FORMAT_VERSION",
    "MAX_PAYLOAD_BYTES",
    "RECORD_HEADER_BYTES",
    "SEAL_BYTES",
    "SEGMENT_HEADER_BYTES",
    "RecordHeader",
    "RecordKind",
    "Seal",
    "SegmentHeader",
    "decode_payload",
    "decode_record_header",
    "decode_seal",
    "decode_segment_header",
    "encode_mark",
    "encode_record",
    "encode_seal",
    "encode_segment_header",
    "find_record_header",
    "pack_header",
    "unpack_header",
]

# ON DISK: never renumber.
FORMAT_VERSION = 1
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 48
SEAL_BYTES = 64
MAX_PAYLOAD_BYTES = 2**30
_MAGIC = b"HEADRACE"
_SEGMENT = struct.Struct("<8sII16sQQq8x")
_RECORD = struct.Struct("<IIQQQIIIB3x")
_SEAL_BODY = struct.Struct("<qQ")
_CRC = struct.Struct("<I")
# From here on a checksum is made without the GIL. Below, holding it for some microseconds costs the other threads less
# than giving it up and waiting for it costs this one.
_RELEASE_GIL_BYTES = 256 * 1024
_MARK_AT = 8
_ZEROS = bytes(RECORD_HEADER_BYTES)


class RecordKind(enum.IntEnum):
    """What a record is. ON DISK: never renumber.

    Attributes:
        DATA: A batch: one seq.
        MARK: Nothing but a durable seq, written behind the last record while the log is idle; the next record is
            written over it.
        SEAL: The last record of a segment that is complete: nothing follows it in the file.
    """

    DATA = 1
    MARK = 2
    SEAL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHeader:
    """What a segment begins with.

    Attributes:
        log_id: 16 bytes, random, the same in every segment of one log.
        mark: Random, 1 to 2⁶⁴ − 1, another one in every segment.
        first_seq: Seq of the segment's first record, ≥ 1.
        created_us: Wall clock, microseconds since 1970.
    """

    log_id: bytes
    mark: int
    first_seq: int
    created_us: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record begins with.

    Attributes:
        kind: What the record is.
        seq: Of a DATA record its own; of the others that of the last DATA record before it.
        durable_seq: Last seq that was synced when this record was written.
        epoch: Trainer run of a DATA record, 1 to 2³² − 1; else 0.
        header_bytes: Length of the payload's msgpack map.
        payload_bytes: Length of map and body together.
        payload_crc: crc32c of the payload.
    """

    kind: RecordKind
    seq: int
    durable_seq: int
    epoch: int
    header_bytes: int
    payload_bytes: int
    payload_crc: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole record."""
        return RECORD_HEADER_BYTES + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """What a seal says of its segment.

    Attributes:
        last_seq: Seq of the last record; first seq − 1 of a segment without records.
        num_records: DATA records in the segment.
        sealed_us: Wall clock, microseconds since 1970.
    """

    last_seq: int
    num_records: int
    sealed_us: int


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Return the 64 bytes that a segment begins with."""
    packed = _SEGMENT.pack(_MAGIC, 0, FORMAT_VERSION, header.log_id, header.mark, header.first_seq, header.created_us)
    return packed[:8] + _CRC.pack(crc32c(packed[12:])) + packed[12:]


def decode_segment_header(data: Segment) -> SegmentHeader:
    """Return the header of a segment.

    Args:
        data: The segment's first 64 bytes, or more.

    Raises:
        CorruptionError: Too short, another kind of file, a wrong checksum, or an unknown format version.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise CorruptionError(f"{len(data)} bytes are less than a segment's header")
    magic, crc, version, log_id, mark, first_seq, created_us = _SEGMENT.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptionError(f"not a log segment: it begins with {bytes(data[:8]).hex()}")
    if crc != crc32c(data[12:SEGMENT_HEADER_BYTES]):
        raise CorruptionError("the segment header's checksum is wrong")
    if version != FORMAT_VERSION:
        raise CorruptionError(f"log format version {version}, this build reads {FORMAT_VERSION}")
    if not mark or not first_seq:
        raise CorruptionError("the segment header has a zero where none may be")
    return SegmentHeader(log_id=log_id, mark=mark, first_seq=first_seq, created_us=created_us)


def pack_header(header: dict[str, Any]) -> bytes:
    """Return a record's small header as msgpack.

    Raises:
        TypeError, ValueError, OverflowError: It holds what msgpack cannot.
    """
    return cast("bytes", msgpack.packb(header))


def unpack_header(packed: Segment) -> dict[str, Any]:
    """Return the small header that `pack_header` packed.

    Raises:
        CorruptionError: It is not the msgpack of a map.
    """
    try:
        fields = msgpack.unpackb(packed)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as exc:
        raise CorruptionError(f"not msgpack: {exc}") from exc
    if not isinstance(fields, dict):
        raise CorruptionError("not a map")
    return fields


def encode_record(
    *, mark: int, seq: int, durable_seq: int, epoch: int, header: bytes, body: Sequence[Segment]
) -> bytes:
    """Return what goes before the body of a DATA record: its header and its msgpack map.

    Args:
        mark: Of the segment.
        seq: Of the record, ≥ 1.
        durable_seq: Last seq that was synced before this record is written, < seq.
        epoch: Trainer run, 1 to 2³² − 1.
        header: From `pack_header`.
        body: Contiguous buffers that will be written right behind what is returned. They are read once, for the
            checksum, and large ones without the GIL.

    Raises:
        RequestError: The payload is longer than `MAX_PAYLOAD_BYTES`.
    """
    payload_bytes = len(header)
    crc = crc32c(header)
    for segment in body:
        size_bytes = segment.nbytes if isinstance(segment, memoryview) else len(segment)
        payload_bytes += size_bytes
        crc = crc32c(segment, crc, size_bytes >= _RELEASE_GIL_BYTES)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise RequestError(f"a log record of {payload_bytes} bytes, the most is {MAX_PAYLOAD_BYTES}")
    return _encode_header(RecordKind.DATA, mark, seq, durable_seq, epoch, crc, payload_bytes, len(header)) + header


def encode_mark(*, mark: int, durable_seq: int) -> bytes:
    """Return a whole MARK record.

    Args:
        mark: Of the segment.
        durable_seq: Last seq that is synced.
    """
    return _encode_header(RecordKind.MARK, mark, durable_seq, durable_seq, 0, 0, 0, 0)


def encode_seal(*, mark: int, seal: Seal) -> bytes:
    """Return a whole SEAL record, 64 bytes.

    Args:
        mark: Of the segment.
        seal: What it says.
    """
    body = _SEAL_BODY.pack(seal.sealed_us, seal.num_records)
    last_seq = seal.last_seq
    return _encode_header(RecordKind.SEAL, mark, last_seq, last_seq, 0, crc32c(body), len(body), 0) + body


def _encode_header(
    kind: RecordKind,
    mark: int,
    seq: int,
    durable_seq: int,
    epoch: int,
    payload_crc: int,
    payload_bytes: int,
    header_bytes: int,
) -> bytes:
    packed = _RECORD.pack(0, payload_bytes, mark, seq, durable_seq, epoch, payload_crc, header_bytes, kind)
    return _CRC.pack(crc32c(packed[4:])) + packed[4:]


def decode_record_header(data: Segment, offset: int, *, mark: int) -> RecordHeader | None:
    """Return the record header at an offset, or None where only zeros are.

    Args:
        data: Bytes of a segment, at least 48 from `offset` on.
        offset: Where the record begins in `data`.
        mark: Of the segment.

    Raises:
        CorruptionError: No record of this segment begins there.
    """
    end = offset + RECORD_HEADER_BYTES
    if len(data) < end:
        raise CorruptionError(f"the file ends {max(0, len(data) - offset)} bytes into a record's header")
    fields = _RECORD.unpack_from(data, offset)
    crc, payload_bytes, found_mark, seq, durable_seq, epoch, payload_crc, header_bytes, kind = fields
    if crc != crc32c(data[offset + 4 : end]):
        if data[offset:end] == _ZEROS:
            return None
        raise CorruptionError("a record header's checksum is wrong")
    if found_mark != mark:
        raise CorruptionError("a record of another segment")
    try:
        record_kind = RecordKind(kind)
    except ValueError as exc:
        raise CorruptionError(f"unknown record kind {kind}") from exc
    is_data = record_kind is RecordKind.DATA
    if header_bytes > payload_bytes or payload_bytes > MAX_PAYLOAD_BYTES or is_data == (durable_seq >= seq):
        raise CorruptionError("a record header contradicts itself")
    return RecordHeader(record_kind, seq, durable_seq, epoch, header_bytes, payload_bytes, payload_crc)


def decode_payload(header: RecordHeader, payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return a DATA record's msgpack map and, as a view, its body.

    Args:
        header: Of the record.
        payload: The `header.payload_bytes` bytes behind it.

    Raises:
        CorruptionError: The checksum is wrong, or the map is none.
    """
    if crc32c(payload, 0, len(payload) >= _RELEASE_GIL_BYTES) != header.payload_crc:
        raise CorruptionError(f"the checksum of record {header.seq} is wrong")
    try:
        fields = unpack_header(payload[: header.header_bytes])
    except CorruptionError as exc:
        raise CorruptionError(f"the header of record {header.seq}: {exc}") from exc
    return fields, payload[header.header_bytes :]


def decode_seal(header: RecordHeader, payload: memoryview) -> Seal:
    """Return what a SEAL record says.

    Args:
        header: Of the record.
        payload: The `header.payload_bytes` bytes behind it.

    Raises:
        CorruptionError: It is no seal, or its checksum is wrong.
    """
    if header.kind is not RecordKind.SEAL or len(payload) != _SEAL_BODY.size:
        raise CorruptionError("a segment does not end with its seal")
    if crc32c(payload) != header.payload_crc:
        raise CorruptionError("the checksum of the seal is wrong")
    sealed_us, num_records = _SEAL_BODY.unpack(payload)
    return Seal(header.seq, num_records, sealed_us)


def find_record_header(data: Segment, offset: int, *, mark: int) -> int | None:
    """Return where the next intact record header begins, or None.

    Args:
        data: Bytes of a segment.
        offset: Where to begin the search.
        mark: Of the segment.
    """
    haystack = data if isinstance(data, bytes) else bytes(data)
    needle = mark.to_bytes(8, "little")
    at = haystack.find(needle, offset + _MARK_AT)
    while at >= 0:
        start = at - _MARK_AT
        if start + RECORD_HEADER_BYTES > len(haystack):
            return None
        try:
            if decode_record_header(haystack, start, mark=mark) is not None:
                return start
        except CorruptionError:
            pass  # the mark's eight bytes in a damaged header, or in a body: keep looking
        at = haystack.find(needle, at + 1)
    return None
