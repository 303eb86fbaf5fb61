"""Stream records: the bytes of one message of a replicated log. No I/O.

    message   header (44 bytes), msgpack map (`header_bytes`), body (the rest)

    byte  0  u32 crc32c of all bytes behind it
          4  3 bytes magic "HRM", u8 format version
          8  u64 term of the owner that wrote it, ≥ 1
         16  i64 mark of that takeover, not 0
         24  u64 seq: the sequence of the message in its stream
         32  u32 epoch of a data record, else 0
         36  u32 header bytes (msgpack)
         40  u8 kind, 3 zero bytes                                             all little-endian

The map of a data record is its writer's. That of the others has `owner`, the address of who wrote it; an open record's
has `previous` too: seq and mark of the record before it, as its writer knows them; and `id`, the offer by which its
writer took the shard over, if that came from another log.

`docs/replicated-log.md` says what the fields are for.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crc32c import crc32c

from headrace.schemas.errors import CorruptionError
from headrace.schemas.log_records import pack_header, unpack_header
from headrace.schemas.messages import Segment

__all__ = [
    "STREAM_HEADER_BYTES",
    "StreamRecord",
    "StreamRecordKind",
    "decode_stream_record",
    "encode_stream_note",
    "encode_stream_record",
]

# ON THE WIRE, and in the stream for as long as it is: never renumber.
STREAM_HEADER_BYTES = 44
_MAGIC = b"HRM"
_VERSION = 2
_HEADER = struct.Struct("<I3sBQqQIIB3x")
_CRC = struct.Struct("<I")
_OWNER = "owner"
_PREVIOUS = "previous"
_OFFER = "id"
# See `log_records`: shorter checksums keep the GIL.
_RELEASE_GIL_BYTES = 256 * 1024


class StreamRecordKind(enum.IntEnum):
    """The kind of a record. ON THE WIRE: never renumber.

    Attributes:
        DATA: A record that was appended to the log.
        OPEN: The first record of a term.
        PADDING: It takes a place that a record of the owner before could still take.
        HEARTBEAT: It says that the owner of an idle log lives.
    """

    DATA = 1
    OPEN = 2
    PADDING = 3
    HEARTBEAT = 4


_KINDS = {int(kind): kind for kind in StreamRecordKind}


@dataclass(slots=True)
class StreamRecord:
    """A record as it came from the stream. Not frozen, which would cost half of decoding; nobody changes it.

    Attributes:
        kind: See `StreamRecordKind`.
        term: Term of its owner.
        mark: Mark of the takeover.
        seq: Its place in the stream.
        epoch: Epoch of a data record, else 0.
        packed: The msgpack map.
        body: A read-only view of the message.
    """

    kind: StreamRecordKind
    term: int
    mark: int
    seq: int
    epoch: int
    packed: memoryview
    body: memoryview

    @property
    def header(self) -> dict[str, Any]:
        """The map, decoded. Raises `CorruptionError` if it is none."""
        return unpack_header(self.packed)

    @property
    def owner(self) -> str:
        """The address of the owner; empty in a data record."""
        return "" if self.kind is StreamRecordKind.DATA else str(self.header.get(_OWNER, ""))

    @property
    def previous(self) -> tuple[int, int] | None:
        """Seq and mark of the record before an open record, as its writer knew them; None in another."""
        if self.kind is not StreamRecordKind.OPEN:
            return None
        seq, mark = self.header[_PREVIOUS]
        return seq, mark

    @property
    def offer(self) -> str | None:
        """The offer by which its writer took the shard over from another log; None in most records."""
        offer = None if self.kind is not StreamRecordKind.OPEN else self.header.get(_OFFER)
        return None if offer is None else str(offer)


def encode_stream_record(
    *,
    kind: StreamRecordKind,
    term: int,
    mark: int,
    seq: int,
    epoch: int,
    header: bytes,
    body: Sequence[Segment],
) -> bytes:
    """Return a whole message, a copy of the body included; `header` is from `pack_header`."""
    fields = _HEADER.pack(0, _MAGIC, _VERSION, term, mark, seq, epoch, len(header), kind)
    crc = crc32c(header, crc32c(fields[_CRC.size :]))
    for segment in body:
        size_bytes = segment.nbytes if isinstance(segment, memoryview) else len(segment)
        crc = crc32c(segment, crc, size_bytes >= _RELEASE_GIL_BYTES)
    return b"".join((_CRC.pack(crc), fields[_CRC.size :], header, *body))


def encode_stream_note(
    kind: StreamRecordKind,
    *,
    term: int,
    mark: int,
    seq: int,
    owner: str,
    previous: tuple[int, int] | None = None,
    offer: str | None = None,
) -> bytes:
    """Return a whole message without data: an open record, with `previous`; padding; or a heartbeat."""
    header: dict[str, Any] = {_OWNER: owner} | ({_PREVIOUS: list(previous)} if previous is not None else {})
    header |= {} if offer is None else {_OFFER: offer}
    return encode_stream_record(kind=kind, term=term, mark=mark, seq=seq, epoch=0, header=pack_header(header), body=())


def decode_stream_record(message: memoryview, *, seq: int) -> StreamRecord:
    """Return the record that the message at `seq` holds; `message` is read-only.

    Raises:
        CorruptionError: It holds none, a damaged one, or one of another seq.
    """
    if len(message) < STREAM_HEADER_BYTES:
        raise CorruptionError(f"message {seq} has {len(message)} bytes, less than a record's header")
    crc, magic, version, term, mark, own_seq, epoch, header_bytes, kind = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise CorruptionError(f"message {seq} is not a record of a log: it begins with {bytes(message[:8]).hex()}")
    if crc != crc32c(message[_CRC.size :], 0, len(message) >= _RELEASE_GIL_BYTES):
        raise CorruptionError(f"the checksum of message {seq} is wrong")
    if version != _VERSION:
        raise CorruptionError(f"message {seq} has format version {version}, this build reads {_VERSION}")
    if own_seq != seq:
        raise CorruptionError(f"message {seq} holds record {own_seq}")
    if (known := _KINDS.get(kind)) is None:
        raise CorruptionError(f"message {seq} has the unknown kind {kind}")
    if not term or not mark or header_bytes > len(message) - STREAM_HEADER_BYTES:
        raise CorruptionError(f"the header of message {seq} contradicts itself")
    body_at = STREAM_HEADER_BYTES + header_bytes
    packed, body = message[STREAM_HEADER_BYTES:body_at], message[body_at:].toreadonly()
    record = StreamRecord(known, term, mark, own_seq, epoch, packed, body)
    if known is StreamRecordKind.OPEN:
        _check_open(record)
    return record


def _check_open(record: StreamRecord) -> None:
    previous = record.header.get(_PREVIOUS)
    if not (isinstance(previous, list) and len(previous) == 2 and all(isinstance(each, int) for each in previous)):
        raise CorruptionError(f"open record {record.seq} does not name the record before it")
