"""Which records of a stream count: the void rule, as a function of the log alone. No I/O.

An expected sequence is a number, not a predecessor. Behind an open record, a record of the owner before that was on its
way may still fit, and the engine accepts it. It is *void*: its term is not that of the last valid open record before
it. Owners, standbys, mirrors and tools all ask this class, so they all leave out the same records.

Who begins in the middle of a log does not see the open record of its term. Records of an owner before can lie only
`MAX_IN_FLIGHT` places behind an open record, because no owner has more on their way. So reading begins that far ahead.
"""

from __future__ import annotations

from headrace.schemas.stream_records import StreamRecord, StreamRecordKind

__all__ = ["MAX_IN_FLIGHT", "Terms"]

# ON THE WIRE, in effect: an owner sends no more records ahead of its acks, a takeover pads as many places, retention
# keeps as many below its floor, and readers go back by as many. All processes of a shard must agree.
MAX_IN_FLIGHT = 64


class Terms:
    """Fed the records of a log in order, tells which are valid.

    Attributes:
        term: Of the last valid open record; 0 before the first.
        mark: Of its takeover; 0 before the first.
        owner: The address that its owner gave last; empty before the first, and while it is unknown.
        num_voids: Void records so far.
    """

    def __init__(self, *, is_beginning: bool = True) -> None:
        """Begin before the first record of a log; or, without `is_beginning`, anywhere."""
        self.term = self.mark = 0
        self.owner = ""
        self.num_voids = 0
        self._num_until_known = 0 if is_beginning else MAX_IN_FLIGHT

    @property
    def is_known(self) -> bool:
        """Whether `take` is right from now on: always, if this is the log's beginning."""
        return not self._num_until_known

    def take(self, record: StreamRecord) -> bool:
        """Return whether the next record is valid.

        In the middle of a log, what this returns before `is_known` is a guess.
        """
        is_open = record.kind is StreamRecordKind.OPEN
        if record.term > self.term and (is_open or not self.is_known):
            self.term, self.mark, self.owner = record.term, record.mark, record.owner
            if is_open:
                self._num_until_known = 0
        elif is_open or (record.term, record.mark) != (self.term, self.mark):
            self.num_voids += 1
            self._num_until_known = max(0, self._num_until_known - 1)
            return False
        elif record.kind is StreamRecordKind.HEARTBEAT or not self.owner:
            self.owner = record.owner  # of a term that began before reading did
        self._num_until_known = max(0, self._num_until_known - 1)
        return True

    def nonce_of(self, record: StreamRecord, *, is_valid: bool) -> int:
        """Return what identifies the log up to a record that was just taken: never 0, -2⁶³ to 2⁶³ - 1.

        Of a valid record it is its mark. A void one was written behind other records than those that it came to lie
        behind: its own mark would say that they are the same.
        """
        return record.mark if is_valid else (record.mark ^ self.mark) or 1
