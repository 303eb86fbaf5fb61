"""Reads the records of a stream in order, from any place on, and tells which of them count.

Reading begins `MAX_IN_FLIGHT` messages ahead, so that the term is known; see `terms.py`. Every message is checked: its
place, its checksum, and that an open record names the record before it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.paramserver.log.interface import LogRecord, note_header
from headrace.paramserver.log.jetstream.engine import StoredMessage, StreamConnection
from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT, Terms
from headrace.schemas.errors import CorruptionError, GoneError, UnavailableError
from headrace.schemas.stream_records import StreamRecord, StreamRecordKind, decode_stream_record

__all__ = ["CommittedRecord", "StreamReader"]

_LOOKBACK_BYTES = 4 << 20
_EMPTY = memoryview(b"")


@dataclass(slots=True)
class CommittedRecord:
    """A record as readers of the log see it, and the nonce that identifies the log up to it."""

    record: LogRecord
    nonce: int
    size_bytes: int

    @classmethod
    def of_note(cls, seq: int, nonce: int, what: str, *, offer: str | None = None) -> CommittedRecord:
        """Return what readers see of a record without data; `what` and `offer` as in `note_header`."""
        header = note_header(what) if offer is None else note_header(what, id=offer)
        return cls(LogRecord(seq, 1, header, _EMPTY), nonce, 0)

    @classmethod
    def of(cls, record: StreamRecord, nonce: int, *, is_valid: bool) -> CommittedRecord:
        """Return what readers see of a record of the stream; a void one has nothing to see."""
        if not is_valid:
            return cls.of_note(record.seq, nonce, "void")
        if record.kind is not StreamRecordKind.DATA:
            return cls.of_note(record.seq, nonce, record.kind.name.lower(), offer=record.offer)
        size_bytes = len(record.packed) + len(record.body)
        return cls(LogRecord(record.seq, record.epoch, record.header, record.body), nonce, size_bytes)


class StreamReader:
    """Reads on from a place, over any connections.

    Attributes:
        next_seq: The record that `read` returns first.
        terms: As of the record before it.
        nonce: Of the record before it; None while that is unknown.
    """

    def __init__(self, from_seq: int) -> None:
        """Begin at `from_seq`. `begin` comes next."""
        self.next_seq = from_seq
        self.terms = Terms()
        self.nonce: int | None = None

    async def begin(self, connection: StreamConnection) -> int:
        """Learn the term, and the nonce of the record before; return the stream's first seq.

        Raises:
            UnavailableError: As those of the connection, or it does not have the record before yet.
            GoneError: The records from here on, or those that tell the term, were removed.
            CorruptionError: A message is damaged.
        """
        state = await connection.state()
        from_seq, first_seq = self.next_seq, state.first_seq
        if first_seq > from_seq:
            raise GoneError(f"the stream begins at record {first_seq}, record {from_seq} has been removed")
        at = max(first_seq, from_seq - MAX_IN_FLIGHT)
        self.terms, self.nonce = Terms(is_beginning=from_seq == 1), None
        while at < from_seq:
            try:
                messages = await connection.read(at, max_bytes=_LOOKBACK_BYTES)
            except GoneError as exc:
                raise UnavailableError(f"records were removed meanwhile, or {connection.server} is behind") from exc
            if not messages:
                raise UnavailableError(f"{connection.server} has no record {at} yet")
            for message in messages:
                if at < from_seq:
                    self._take(message, at)
                    at += 1
        is_known = self.terms.is_known
        if first_seq == from_seq and not is_known and state.last_seq >= from_seq:
            # A stream that was made to begin here begins with an open record.
            messages = await connection.read(from_seq, max_bytes=1)
            if not messages:
                raise UnavailableError(f"{connection.server} has no record {from_seq} yet")
            first = decode_stream_record(messages[0].payload, seq=from_seq)
            is_known = first.kind is StreamRecordKind.OPEN
            if first.previous is not None and first.previous[0] == from_seq - 1:
                self.nonce = first.previous[1] or None
        if not is_known and state.last_seq >= first_seq:
            raise GoneError(f"the stream begins at record {first_seq}, too few records before {from_seq} are left")
        self.terms.num_voids = 0
        return first_seq

    async def read(self, connection: StreamConnection, *, max_bytes: int) -> list[CommittedRecord]:
        """Return the next records; empty if this server has none yet.

        Raises:
            UnavailableError: As those of the connection.
            GoneError: They were removed.
            CorruptionError: A message is damaged; those before it are returned first.
        """
        records: list[CommittedRecord] = []
        for message in await connection.read(self.next_seq, max_bytes=max_bytes):
            try:
                records.append(self._take(message, self.next_seq))
            except CorruptionError:
                if records:
                    break
                raise
            self.next_seq += 1
        return records

    def _take(self, message: StoredMessage, seq: int) -> CommittedRecord:
        if message.seq != seq:
            raise CorruptionError(f"the engine returned message {message.seq} where {seq} was expected: a gap")
        record = decode_stream_record(message.payload, seq=seq)
        was_known = self.terms.is_known
        is_checked = record.kind is StreamRecordKind.OPEN and was_known and self.nonce is not None
        if is_checked and record.previous != (seq - 1, self.nonce):
            raise CorruptionError(
                f"the owner of term {record.term} opened behind another record {seq - 1} than the stream has: "
                "the engine has lost data, or the stream was made anew"
            )
        is_valid = self.terms.take(record)
        if not was_known and not self.terms.is_known and seq >= self.next_seq:
            raise GoneError(f"record {seq} comes before any that tells its term: earlier ones have been removed")
        self.nonce = self.terms.nonce_of(record, is_valid=is_valid)
        return CommittedRecord.of(record, self.nonce, is_valid=is_valid)
