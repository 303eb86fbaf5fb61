"""Log records: the bytes of an update log's segments. No I/O.

    segment   header (64 bytes), records, seal record; before the seal is written, anything may follow the records
    record    header (48 bytes), msgpack map (`header_bytes` of the payload), body as received (the rest of the payload)

    segment header                             record header
    byte  0  magic "HEADRACE"                  byte  0  u32 crc32c of bytes 4 to 48
          8  u32 crc32c of bytes 12 to 64            4  u32 payload bytes (msgpack and body)
         12  u32 format version                      8  u64 nonce of the segment
         16  16 bytes log id                        16  u64 seq
         32  u64 nonce                              24  u64 durable seq
         40  u64 first seq                          32  u32 epoch
         48  i64 created, µs since 1970             36  u32 crc32c of the payload
         56  i64 mark of the source, or 0           40  u32 header bytes (msgpack)
                                                    44  u8 kind, 3 zero bytes            all little-endian

Each segment has a random *nonce*. Bytes that another segment left on the disk never pass for a record of this one, and
a reader can find the next record behind damage. The *durable seq* is the last seq that was synced when the record was
written. It proves that everything up to there had been acked, which tells damage from a torn tail.

`docs/update-log.md` has a worked example and lists what this format cannot detect.
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
    "encode_checkpoint",
    "encode_record",
    "encode_seal",
    "encode_segment_header",
    "find_record_header",
    "pack_header",
    "unpack_header",
]

# ON DISK: never renumber.
FORMAT_VERSION = 2
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 48
SEAL_BYTES = 64
MAX_PAYLOAD_BYTES = 2**30
_MAGIC = b"HEADRACE"
_SEGMENT = struct.Struct("<8sII16sQQqq")
_RECORD = struct.Struct("<IIQQQIIIB3x")
_SEAL_BODY = struct.Struct("<qQ")
_CRC = struct.Struct("<I")
# Checksums of at least this many bytes run without the GIL. For shorter ones, holding it for some microseconds costs
# other threads less than releasing it and waiting for it again costs this one.
_RELEASE_GIL_BYTES = 256 * 1024
_NONCE_AT = 8
_ZEROS = bytes(RECORD_HEADER_BYTES)


class RecordKind(enum.IntEnum):
    """The kind of a record. ON DISK: never renumber.

    Attributes:
        DATA: A batch; it takes one seq.
        CHECKPOINT: Only a durable seq. It is written behind the last record while the log is idle, and the next record
            overwrites it.
        SEAL: The last record of a complete segment; nothing follows it in the file.
    """

    DATA = 1
    CHECKPOINT = 2
    SEAL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHeader:
    """The header of a segment.

    Attributes:
        log_id: 16 random bytes, the same in every segment of one log.
        nonce: Random, 1 to 2⁶⁴ − 1, different in every segment.
        first_seq: Seq of the segment's first record, ≥ 1.
        created_us: Wall clock, microseconds since 1970.
        source_mark: In a mirror of another log: the nonce of the source's segment that has these records, -2⁶³ to
            2⁶³ − 1. 0 in a log of its own, and where the source gave none.
    """

    log_id: bytes
    nonce: int
    first_seq: int
    created_us: int
    source_mark: int = 0


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record.

    Attributes:
        kind: DATA, CHECKPOINT or SEAL.
        seq: Its own for a DATA record; for the others, that of the last DATA record before it.
        durable_seq: Last seq that was synced when this record was written.
        epoch: Epoch of a DATA record, 1 to 2³² − 1; else 0.
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
    """The contents of a seal record.

    Attributes:
        last_seq: Seq of the segment's last record; its first seq − 1 if it has none.
        num_records: DATA records in the segment.
        sealed_us: Wall clock, microseconds since 1970.
    """

    last_seq: int
    num_records: int
    sealed_us: int


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Return a segment's header, 64 bytes."""
    fields = (header.log_id, header.nonce, header.first_seq, header.created_us, header.source_mark)
    packed = _SEGMENT.pack(_MAGIC, 0, FORMAT_VERSION, *fields)
    return packed[:8] + _CRC.pack(crc32c(packed[12:])) + packed[12:]


def decode_segment_header(data: Segment) -> SegmentHeader:
    """Return a segment's header from its first 64 bytes or more.

    Raises:
        CorruptionError: Too short, another kind of file, a wrong checksum, or an unknown format version.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise CorruptionError(f"{len(data)} bytes are less than a segment's header")
    magic, crc, version, log_id, nonce, first_seq, created_us, source_mark = _SEGMENT.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptionError(f"not a log segment: it begins with {bytes(data[:8]).hex()}")
    if crc != crc32c(data[12:SEGMENT_HEADER_BYTES]):
        raise CorruptionError("the segment header's checksum is wrong")
    if version != FORMAT_VERSION:
        raise CorruptionError(f"log format version {version}, this build reads {FORMAT_VERSION}")
    if not nonce or not first_seq:
        raise CorruptionError("the segment header has nonce 0 or first seq 0")
    return SegmentHeader(
        log_id=log_id, nonce=nonce, first_seq=first_seq, created_us=created_us, source_mark=source_mark
    )


def pack_header(header: dict[str, Any]) -> bytes:
    """Return a record's small header as msgpack.

    Raises:
        TypeError, ValueError, OverflowError: It holds a value that msgpack cannot store.
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
    *, nonce: int, seq: int, durable_seq: int, epoch: int, header: bytes, body: Sequence[Segment]
) -> bytes:
    """Return the bytes of a DATA record that precede its body: header and msgpack map.

    Args:
        nonce: Nonce of the segment.
        seq: Seq of the record, ≥ 1.
        durable_seq: Last seq that was synced before this record is written, < seq.
        epoch: 1 to 2³² − 1.
        header: From `pack_header`.
        body: Contiguous buffers that the caller writes right behind the result. They are read once, for the checksum,
            large ones without the GIL.

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
        raise RequestError(f"a log record has {payload_bytes} bytes; the maximum is {MAX_PAYLOAD_BYTES}")
    fields = (payload_bytes, nonce, seq, durable_seq, epoch, crc, len(header), RecordKind.DATA)
    return _with_crc(_RECORD.pack(0, *fields)) + header


def encode_checkpoint(*, nonce: int, durable_seq: int) -> bytes:
    """Return a whole CHECKPOINT record for the segment with this nonce."""
    return _with_crc(_RECORD.pack(0, 0, nonce, durable_seq, durable_seq, 0, 0, 0, RecordKind.CHECKPOINT))


def encode_seal(*, nonce: int, seal: Seal) -> bytes:
    """Return a whole SEAL record, 64 bytes, for the segment with this nonce."""
    body = _SEAL_BODY.pack(seal.sealed_us, seal.num_records)
    last_seq, crc = seal.last_seq, crc32c(body)
    return _with_crc(_RECORD.pack(0, len(body), nonce, last_seq, last_seq, 0, crc, 0, RecordKind.SEAL)) + body


def _with_crc(header: bytes) -> bytes:
    return _CRC.pack(crc32c(header[4:])) + header[4:]


def decode_record_header(data: Segment, offset: int, *, nonce: int) -> RecordHeader | None:
    """Return the record header at an offset, or None if there are only zeros.

    Args:
        data: Bytes of a segment, at least 48 from `offset` on.
        offset: Where the record begins in `data`.
        nonce: Nonce of the segment.

    Raises:
        CorruptionError: No record of this segment begins there.
    """
    end = offset + RECORD_HEADER_BYTES
    if len(data) < end:
        raise CorruptionError(f"the file ends {max(0, len(data) - offset)} bytes into a record's header")
    fields = _RECORD.unpack_from(data, offset)
    crc, payload_bytes, found_nonce, seq, durable_seq, epoch, payload_crc, header_bytes, kind = fields
    if crc != crc32c(data[offset + 4 : end]):
        if data[offset:end] == _ZEROS:
            return None
        raise CorruptionError("a record header's checksum is wrong")
    if found_nonce != nonce:
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
    """Return a DATA record's msgpack map and its body, a view into the payload.

    Raises:
        CorruptionError: The checksum is wrong, or the payload does not begin with a map.
    """
    if crc32c(payload, 0, len(payload) >= _RELEASE_GIL_BYTES) != header.payload_crc:
        raise CorruptionError(f"the checksum of record {header.seq} is wrong")
    try:
        fields = unpack_header(payload[: header.header_bytes])
    except CorruptionError as exc:
        raise CorruptionError(f"the header of record {header.seq}: {exc}") from exc
    return fields, payload[header.header_bytes :]


def decode_seal(header: RecordHeader, payload: memoryview) -> Seal:
    """Return the contents of a SEAL record.

    Raises:
        CorruptionError: It is not a seal, or its checksum is wrong.
    """
    if header.kind is not RecordKind.SEAL or len(payload) != _SEAL_BODY.size:
        raise CorruptionError("a segment does not end with its seal")
    if crc32c(payload) != header.payload_crc:
        raise CorruptionError("the checksum of the seal is wrong")
    sealed_us, num_records = _SEAL_BODY.unpack(payload)
    return Seal(header.seq, num_records, sealed_us)


def find_record_header(data: Segment, offset: int, *, nonce: int) -> int | None:
    """Return where the first intact record header at or after `offset` begins; None if there is none."""
    haystack = data if isinstance(data, bytes) else bytes(data)
    needle = nonce.to_bytes(8, "little")
    at = haystack.find(needle, offset + _NONCE_AT)
    while at >= 0:
        start = at - _NONCE_AT
        if start + RECORD_HEADER_BYTES > len(haystack):
            return None
        try:
            if decode_record_header(haystack, start, nonce=nonce) is not None:
                return start
        except CorruptionError:
            pass  # the nonce's eight bytes in a damaged header, or in a body: keep looking
        at = haystack.find(needle, at + 1)
    return None
