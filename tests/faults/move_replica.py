"""A replica for schedules of moves: it follows all shards' logs, and shows steps."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from move_shards import NUM_PARTITIONS, Entry, ModelShard, Rows
from simulator import Finding

from headrace.schemas.move_records import MoveRecord, MoveStep, decode_move_record, step_of
from headrace.schemas.version import Version

__all__ = ["Replica"]


class Replica:
    """A copy of all rows, in which nothing goes back. It begins anew when a shard was set back."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._begin()

    def _begin(self) -> None:
        shards = self._schedule.shards
        self.state = Rows()
        self.applied = [0] * len(shards)
        self._ended: list[Version | None] = [None] * len(shards)
        self._counted = set(range(self._schedule.first.first_shards))  # those that have, or had, partitions
        self._pending: set[str] = set()  # released moves whose activation is not here yet
        self._needs = dict[int, int]()  # of each shard, the least position at which the last ended step is whole
        self._shown: Version = (0, -1)
        self._setbacks = self._schedule.ledger.num_setbacks
        self._is_built = False

    def _build(self) -> None:
        """Take a snapshot of rows from their owners, unless it falls between a seal and its activation."""
        shards = self._schedule.shards
        if any(not each.is_serving or each.durable_seq < len(each.log) for each in shards):
            return
        owned = [each.served() for each in shards]
        if sorted(itertools.chain(*owned)) != list(range(NUM_PARTITIONS)):
            return
        for shard, partitions in zip(shards, owned, strict=True):
            self.state.merge(shard.state.cut(partitions))
            self.applied[shard.number] = shard.durable_seq
            session = shard.state.sessions.get("train")
            self._ended[shard.number] = session.ended if session is not None and session.ended[0] else None
            if partitions or self._ended[shard.number] is not None:
                self._counted.add(shard.number)
        self._is_built = True

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            await asyncio.sleep(self._schedule.rng.uniform(0, 0.1))
            self.take_some(self._schedule.rng.choice(self._schedule.shards), self._schedule.rng.randint(1, 6))

    async def reach_end(self) -> None:
        """Wait until all is applied."""
        while any(self.applied[s.number] < s.durable_seq for s in self._schedule.shards):
            await asyncio.sleep(0.05)
            for shard in self._schedule.shards:
                self.take_some(shard, 1000)

    def take_some(self, shard: ModelShard, count: int) -> None:
        """Apply durable records of a shard."""
        if self._setbacks != self._schedule.ledger.num_setbacks:
            self._begin()
        if not self._is_built:
            self._build()
        while self._is_built and count and self.applied[shard.number] < shard.durable_seq:
            entry = shard.log[self.applied[shard.number]]
            if not self._take(shard, self.applied[shard.number] + 1, entry):
                break
            self.applied[shard.number] += 1
            count -= 1
        self._show()

    def has_reached(self, shard: int, seq: int) -> bool:
        """Return whether a shard's log is applied up to a seq."""
        return self.applied[shard] >= seq

    def has_seal(self, source: int, seq: int) -> bool:
        """Return whether the source's log is applied up to q."""
        return self.has_reached(source, seq)

    def _take(self, shard: ModelShard, seq: int, entry: Entry) -> bool:
        """Apply a record; return False if it must wait for the other shard."""
        if step_of(entry.header) is None:
            self._take_batch(shard.number, entry)
            return True
        record = decode_move_record(entry.header)
        if not isinstance(record, MoveRecord):
            return True
        move = record.move
        if record.step is MoveStep.RELEASE:
            self._pending.add(move.move_id)
        elif record.step is MoveStep.ACTIVATE:
            assert record.position is not None
            # Until the source is here up to q, rows would go back in time.
            if not self.has_seal(move.source, record.position.seq):
                return False
            self._pending.discard(move.move_id)
            self._counted.add(move.destination)
            if self._ended[shard.number] is None:
                self._ended[shard.number] = shard.ended[move.move_id].get("train")
        return True

    def _take_batch(self, shard: int, entry: Entry) -> None:
        if "floors" in entry.header:
            return  # tombstones stay
        before = {tuple(each[:2]): self.state.rows.get(tuple(each[:2])) for each in entry.body or ()}
        self.state.take(entry.header, entry.epoch, entry.body)
        for key, old in before.items():
            row = self.state.rows.get(key)
            self._schedule.ledger.check_row("the replica", key, row)
            is_older = old is not None and (row is None or row.version < old.version)
            if is_older and not entry.header["is_resent"]:
                raise Finding(f"the replica goes back: {key} was {old} and is {row}")
        if entry.header.get("ends_step") and entry.header["trains"]:
            ended = (entry.epoch, entry.header["step"])
            self._ended[shard] = max(ended, self._ended[shard] or ended)
            for other, seq in entry.header["after"]:
                self._needs[other] = max(seq, self._needs.get(other, 0))

    def _show(self) -> None:
        """Show the last step that all shards have ended, if it is whole."""
        if not all(map(self._is_whole, self._schedule.ledger.set_back_to)):
            return
        counted = [ended for shard in self._counted if (ended := self._ended[shard]) is not None]
        is_begun = len(counted) == len(self._counted)  # those end every step, rows or not
        if not is_begun or len({epoch for epoch, _ in counted}) > 1 or self._pending:
            return
        if any(not self.has_reached(shard, seq) for shard, seq in self._needs.items()):
            return
        last = min(counted)
        if last <= self._shown:
            return
        ledger = self._schedule.ledger
        for version, keys in ledger.steps.items():
            if self._shown < version <= last:
                for key in keys:
                    row = self.state.rows.get(key)
                    if row is None and ledger.was_deleted(key, version):
                        continue
                    if row is None or row.version < version:
                        raise Finding(f"the replica shows step {last} without {key} of {version}: {row}")
        self._shown = last
        self._schedule.did["shown"] += 1

    def _is_whole(self, shard: int) -> bool:
        """Return whether a shard that was set back has got again, and ended, what the trainer had acked there."""
        first = self._schedule.ledger.set_back_to[shard]
        for entry in self._schedule.shards[shard].log[first : self.applied[shard]]:
            header = entry.header
            is_first = header.get("client_seq") == 1 and entry.epoch == self._schedule.ledger.epoch
            if header.get("trains") and header["ends_step"] and (header["is_resent"] or is_first):
                return True
        return False
