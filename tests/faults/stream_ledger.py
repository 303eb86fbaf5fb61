"""What must be true of a log in a stream, whatever happened to it: an independent ledger of a schedule, and its check.

The ledger hears of appends, acks, reads and leases from the outside, and of commits from the engine. It computes by
itself which records count. It uses the codec of records, and nothing else of the log.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripted_stream import ScriptedStream
from simulator import Finding

from headrace.paramserver.log.interface import LogRecord
from headrace.schemas.errors import HeadraceError, LogFencedError
from headrace.schemas.stream_records import StreamRecord, StreamRecordKind, decode_stream_record

__all__ = ["Owner", "StreamLedger"]

# Timers of virtual time are exact but for rounding.
_ROUNDING_S = 1e-6


@dataclass(slots=True, eq=False)
class Owner:
    """One process in one term: what it appended, in order, and how many of these were acked.

    Attributes:
        name: Unique; the bodies of its records are `name:0`, `name:1` and so on.
        bodies: All that it appended.
        seqs: Their seqs.
        num_acked: How many were acked.
        owned_s: When `check_owned` passed.
        is_over: It was fenced.
    """

    name: str
    bodies: list[bytes] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    num_acked: int = 0
    owned_s: list[float] = field(default_factory=list)
    is_over: bool = False


class StreamLedger:
    """Collects what happened in one schedule; `check` raises `Finding`.

    Attributes:
        num_acked: Records of all owners that were acked.
        num_voids: Void records in the log; known after `check`.
    """

    def __init__(self, stream: ScriptedStream, *, lease_s: float) -> None:
        self.num_acked = self.num_voids = 0
        self._stream, self._lease_s = stream, lease_s
        self._owners: list[Owner] = []
        self._opened: list[tuple[float, int]] = []  # when, and at which seq
        self._reads: list[tuple[str, int, list[tuple[int, bytes, str]]]] = []
        stream.on_commit = self._note_commit

    def _note_commit(self, seq: int, payload: bytes) -> None:
        if payload[40] == StreamRecordKind.OPEN:
            self._opened.append((self._stream.loop.time(), seq))

    @property
    def num_takeovers(self) -> int:
        """Open records that were committed."""
        return len(self._opened)

    def add_owner(self, name: str) -> Owner:
        """Begin the account of an owner."""
        self._owners.append(Owner(name))
        return self._owners[-1]

    def note_ack(self, owner: Owner, number: int) -> None:
        """Take the ack of an owner's record; it must be the next one, and not come behind the owner's end."""
        if owner.is_over:
            raise Finding(f"{owner.name} got an ack of record {number} after it was fenced")
        if number != owner.num_acked:
            raise Finding(f"{owner.name} got an ack of record {number}, the oldest without one is {owner.num_acked}")
        owner.num_acked += 1
        self.num_acked += 1

    def note_failure(self, what: str, error: HeadraceError | None) -> None:
        """Take the end of a log: the engine of a schedule keeps its promises, so only fencing may end one."""
        if error is not None and not isinstance(error, LogFencedError):
            raise Finding(f"{what} failed: {error!r}")

    def note_read(self, reader: str, from_seq: int, records: Sequence[LogRecord]) -> None:
        """Take what a reader was told from a seq on."""
        seen = [(each.seq, bytes(each.body), each.header.get("note", "data")) for each in records]
        self._reads.append((reader, from_seq, seen))

    def check(self, *, may_have_voids: bool) -> None:
        """Compare everything with what the engine committed."""
        stream = self._stream
        if stream.num_rewritten or stream.num_moved:
            raise Finding(f"{stream.num_rewritten} messages rewritten, the last seq moved {stream.num_moved} times")
        if stream.num_sent_after_loss:
            raise Finding(f"{stream.num_sent_after_loss} publishes left over a connection that had been lost")
        log = self._judged()
        if self.num_voids and not may_have_voids:
            raise Finding(f"{self.num_voids} void records, though takeovers pad the window of the owner before")
        self._check_owners(log)
        for reader, from_seq, seen in self._reads:
            expected = [log[seq] for seq in range(from_seq, from_seq + len(seen))]
            if seen != expected:
                first = next(pair for pair in zip(seen, expected, strict=True) if pair[0] != pair[1])
                raise Finding(f"{reader} read {first[0]} where the log has {first[1]}")
        self._check_leases(log)

    def _judged(self) -> dict[int, tuple[int, bytes, str]]:
        """Return seq, body and kind of every record of the log, as the definition of void has it."""
        judged: dict[int, tuple[int, bytes, str]] = {}
        term, mark = 0, 0
        for seq in sorted(self._stream.history):
            record: StreamRecord = decode_stream_record(memoryview(self._stream.history[seq]), seq=seq)
            if record.kind is StreamRecordKind.OPEN and record.term > term:
                term, mark = record.term, record.mark
                judged[seq] = seq, b"", "open"
            elif record.kind is StreamRecordKind.OPEN or (record.term, record.mark) != (term, mark):
                self.num_voids += 1
                judged[seq] = seq, b"", "void"
            elif record.kind is StreamRecordKind.DATA:
                judged[seq] = seq, bytes(record.body), "data"
            else:
                judged[seq] = seq, b"", record.kind.name.lower()
        if sorted(judged) != list(range(min(judged, default=1), min(judged, default=1) + len(judged))):
            raise Finding("the log has a gap")
        return judged

    def _check_owners(self, log: dict[int, tuple[int, bytes, str]]) -> None:
        places: dict[bytes, int] = {}
        for seq, body, what in log.values():
            if what == "data":
                if body in places:
                    raise Finding(f"{body!r} counts twice, at {places[body]} and {seq}")
                places[body] = seq
        for owner in self._owners:
            found = [places.get(body) for body in owner.bodies]
            for number in range(owner.num_acked):
                if found[number] != owner.seqs[number]:
                    raise Finding(
                        f"record {number} of {owner.name}, acked at {owner.seqs[number]}, counts at {found[number]}"
                    )
            counted = [seq for seq in found if seq is not None]
            if found[: len(counted)] != counted or counted != sorted(counted):
                raise Finding(f"records of {owner.name} count at {found}: a gap, or out of order")

    def _check_leases(self, log: dict[int, tuple[int, bytes, str]]) -> None:
        """No owner passed for one for longer than the lease after it sent its last record that counts.

        So none did for longer than that after another one had opened, either.
        """
        sent_s: dict[tuple[int, int], list[float]] = {}  # by term and mark
        for seq, payload in self._stream.history.items():
            if log[seq][2] != "void":
                sent_s.setdefault(_key_of(payload), []).extend(self._stream.sends.get(payload, ()))
        for owner in self._owners:
            counted = next((seq for seq, body, what in log.values() if what == "data" and body in owner.bodies), None)
            if counted is None:
                continue
            times = sent_s[_key_of(self._stream.history[counted])]
            for owned_s in owner.owned_s:
                last_s = max((each for each in times if each <= owned_s), default=0.0)
                if owned_s - last_s >= self._lease_s + _ROUNDING_S:
                    raise Finding(
                        f"{owner.name} passed for the owner at {owned_s}, its last record was sent at {last_s}"
                    )
            for opened_s, seq in self._opened:
                if (
                    seq > counted
                    and log[seq][2] == "open"
                    and max(owner.owned_s, default=0.0) >= opened_s + self._lease_s
                ):
                    raise Finding(f"{owner.name} passed for the owner long after another had opened at {opened_s}")


def _key_of(payload: bytes) -> tuple[int, int]:
    """Return term and mark of a message."""
    return struct.unpack_from("<Qq", payload, 8)
