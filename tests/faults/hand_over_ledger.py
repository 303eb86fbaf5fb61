"""What must be true of a shard that is handed over, whatever happens: an independent ledger of a schedule.

It hears what trainers sent and were told, and what readers asked and were answered. It computes by itself what each row
must be, and knows nothing of offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator import Finding

__all__ = ["Account", "HandOverLedger", "Op"]


@dataclass(frozen=True, slots=True)
class Op:
    """What a batch does to a row: its value, or None for a deletion."""

    number: int
    value: float | None


@dataclass(slots=True, eq=False)
class Account:
    """One trainer's.

    Attributes:
        name: Its client's.
        num_sent: Batches that were sent at least once.
        num_acked: Of which it knows that they are durable; all before them are.
        term: The highest that an owner has told it.
        is_unsure: Somebody takes over by force, and it was not told yet what is lost.
    """

    name: str
    num_sent: int = 0
    num_acked: int = 0
    term: int = 0
    is_unsure: bool = False


@dataclass(slots=True, eq=False)
class HandOverLedger:
    """Collects what happened in one schedule; each method raises `Finding` if that must not be.

    Attributes:
        num_forced: How often somebody took over without an offer.
        has_lost: A forced one may have left out what was acked, and the owner before may go on for a while.
        num_reads: Answers that were checked.
    """

    num_forced: int = 0
    has_lost: bool = False
    num_reads: int = 0
    _rows: dict[int, list[Op]] = field(default_factory=dict)
    _of: dict[int, Account] = field(default_factory=dict)
    _places: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # by term and seq

    def note_force(self) -> None:
        """Take that somebody takes over by force from now on."""
        self.num_forced += 1
        self._places.clear()  # of two servers that are forced, each takes the term behind what it knows
        for account in self._of.values():
            account.is_unsure = True

    def note_made(self, account: Account, number: int, ops: Mapping[int, float | None]) -> None:
        """Take what a batch does to rows, which no other trainer has."""
        for row, value in ops.items():
            assert self._of.setdefault(row, account) is account
            self._rows.setdefault(row, []).append(Op(number, value))

    def note_hello(self, account: Account, last: int, *, term: int, may_be_set_back: bool) -> None:
        """Take up to which batch an owner has a trainer's."""
        account.is_unsure = account.is_unsure and not may_be_set_back and term == account.term
        self._check_term(account, term)
        if last > account.num_sent:
            raise Finding(f"{account.name}: the owner has {last} batches, {account.num_sent} were sent")
        if last < account.num_acked:
            if not self.num_forced or not may_be_set_back:
                raise Finding(f"{account.name}: acked batches behind {last} are lost, {account.num_acked} were acked")
            self._places = {key: place for key, place in self._places.items() if place[0] != account.name}
        account.num_acked = last

    def note_ack(self, account: Account, number: int, *, term: int, seq: int, is_duplicate: bool) -> None:
        """Take the ack of a batch."""
        self._check_term(account, term)
        if number > account.num_acked + 1:
            raise Finding(f"{account.name}: batch {number} was acked before batch {account.num_acked + 1}")
        account.num_acked = max(account.num_acked, number)
        if not is_duplicate:
            batch = account.name, number
            if self._places.setdefault((term, seq), batch) != batch:
                raise Finding(f"{batch} and {self._places[term, seq]} were acked at seq {seq} of term {term}")

    def _check_term(self, account: Account, term: int) -> None:
        if term < account.term:
            raise Finding(f"{account.name} was taken in term {term}, after one of term {account.term}")
        account.term = term

    def acked(self) -> dict[str, int]:
        """Return how many batches of each trainer are acked now, if that is known."""
        return {account.name: account.num_acked for account in self._of.values() if not account.is_unsure}

    def check_answer(
        self, where: str, rows: Sequence[int], values: Sequence[float | None], acked: Mapping[str, int]
    ) -> None:
        """Compare an owner's answer with what was acked as it was asked."""
        self.num_reads += 1
        for row, value in zip(rows, values, strict=True):
            if (num_acked := acked.get(self._of[row].name)) is None:
                continue
            ops = self._rows[row]
            known = [op for op in ops if op.number <= num_acked]
            possible = ([known[-1]] if known else [Op(0, None)]) + ops[len(known) :]
            if value not in [op.value for op in possible]:
                told = [op.value for op in possible][:4]
                raise Finding(f"{where} answered {value} for row {row}, not one of {told}: stale, lost or resurrected")

    def cut(self, account: Account, number: int) -> None:
        """Take that a trainer's batches end with one, where another server has taken this one's place."""
        if number < account.num_acked:
            raise Finding(f"{account.name}: {account.num_acked} batches were acked, {number} are in the new server")
        for row, ops in self._rows.items():
            if self._of[row] is account:
                self._rows[row] = [op for op in ops if op.number <= number] or [Op(0, None)]

    def check_end(self, values: Mapping[int, float | None], placed: Mapping[int, tuple[str, int]]) -> None:
        """Compare the rows and the log of the last owner with what was sent: all batches are acked."""
        for row, ops in self._rows.items():
            if values[row] != ops[-1].value:
                raise Finding(f"row {row} is {values[row]} in the end, not {ops[-1].value}")
        for (term, seq), batch in self._places.items():
            if not self.has_lost and placed.get(seq, batch) != batch:
                raise Finding(f"{batch}, acked at seq {seq} of term {term}, is not there: {placed[seq]} is")

    @property
    def rows(self) -> list[int]:
        """All rows that were written."""
        return sorted(self._rows)
