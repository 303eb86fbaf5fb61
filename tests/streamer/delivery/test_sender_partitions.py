"""The sender while partitions move between shards, and shards appear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_shard import WAIT_S, FakeShard, FakeStore, Fault, Received, hosted
from sending import NUM_ROWS, Sending
from trainer_tables import WRITER

from headrace.paramserver.rpc.outages import Backoff
from headrace.schemas.errors import UnavailableError
from headrace.schemas.partition_map import PartitionMap
from headrace.streamer.delivery import channel
from headrace.streamer.delivery.outstanding import OutstandingFlush

FIRST = PartitionMap.first(2)


def _moved(before: PartitionMap, owner: int, stride: int) -> PartitionMap:
    """Return the map with some of shard 0's partitions at another shard."""
    partitions = before.partitions_of(0)[::stride]
    return before.moved(partitions, before.versions[partitions] + 1, owner)


MOVED = _moved(FIRST, 1, 2)
GROWN = _moved(FIRST, 2, 2)


class _Sending(Sending):
    """A trainer's table, streamed to a fake store whose shards know partitions."""

    def deliver(self, *steps: int) -> None:
        self.send(*steps)
        self.sender.wait_durable(WAIT_S)
        self.until(lambda: self.pool.num_free == 2)  # a moment later; each step needs a buffer

    def tell(self, partition_map: PartitionMap, *shards: int) -> None:
        def tell() -> None:
            for shard in shards:
                self.store.shards[shard].partition_map = partition_map

        self.store.do(tell)

    def grow(self) -> None:
        async def grow() -> None:
            shard = FakeShard(self.store, len(self.store.shards))
            shard.partition_map = self.store.shards[0].partition_map
            await shard.start()
            self.store.shards.append(shard)

        self.store.do(grow)

    def check(self, step: int, partition_map: PartitionMap) -> None:
        """Check that each row's owner has its value of a step, and that all shards have ended this step as one cut."""
        spec = self.table.tapped.spec
        owners = partition_map.shards_of_rows(spec.seed, np.arange(NUM_ROWS))
        value = np.full(16, float(step), np.float32).tobytes()
        for row, owner in enumerate(owners.tolist()):
            (found,) = self.store.shards[owner].rows[spec.fqn][row].values()
            assert (found.weights, found.step) == (value, step)
        ends = [_ends(shard)[-1] for shard in self.store.shards]
        assert {(end.step, end.time_us, end.is_exact_cut) for end in ends} == {(step, ends[0].time_us, True)}
        for shard, end in zip(self.store.shards, ends, strict=True):
            assert shard.received[-1] is end, "rows behind the cut"


def _ends(shard: FakeShard) -> list[Received]:
    return [batch for batch in shard.received if batch.ends_step]


def _conditional(shard: FakeShard) -> list[int]:
    return [batch.step for batch in shard.received if batch.is_conditional]


@contextmanager
def _sending(*, follows_map: bool = True, **settings: Any) -> Iterator[_Sending]:
    with hosted(FakeStore(num_shards=2)) as store:
        for shard in store.shards:
            shard.partition_map = FIRST
        with _Sending(store, follows_map=follows_map, on_set_back="resend", **settings) as to:
            to.open()
            to.deliver(1)
            to.check(1, FIRST)
            yield to


def test_refused_rows_go_to_their_new_shard() -> None:
    """A step ends where rows were refused only when their new shard has acked them, and ends there again."""
    with _sending() as to:
        source, target = to.store.shards
        to.tell(MOVED, 0, 1)
        to.store.do(target.gate.clear)
        to.send(2)
        to.until(lambda: _conditional(target) == [2] and to.sender._channels[0].num_behind == 0)
        assert [end.step for end in _ends(source)] == [1]
        to.store.do(target.gate.set)
        to.sender.wait_durable(WAIT_S)
        to.check(2, MOVED)
        assert to.sender.stats().acked_step == 2
        to.deliver(3)
        to.check(3, MOVED)
        assert (source.num_refused, _conditional(target)) == (1, [2])


def test_a_flush_is_durable_only_once_its_step_is_to_end_again() -> None:
    """Whoever waits for all flushes waits for that too: else a snapshot could find the shards at different steps."""
    with _sending() as to:
        _, target = to.store.shards
        outstanding, num_left = to.sender._outstanding, list[int]()
        note_durable = outstanding.note_durable

        def note(entry: OutstandingFlush) -> None:
            note_durable(entry)
            num_left.append(len(outstanding))

        outstanding.note_durable = note  # type: ignore[method-assign]
        to.tell(MOVED, 0, 1)
        to.store.do(target.gate.clear)
        to.send(2)
        to.until(lambda: _conditional(target) == [2] and to.sender._channels[0].num_behind == 0)
        to.store.do(target.gate.set)
        to.sender.wait_durable(WAIT_S)
        to.check(2, MOVED)
        to.until(lambda: len(num_left) == 2)
        assert num_left == [1, 0]


def test_waiting_flushes_keep_the_order_of_each_row() -> None:
    """What waits for a shard when partitions leave it comes to the new shard in order, and the newest value wins."""
    with _sending() as to:
        source, target = to.store.shards
        to.store.do(source.stop)
        to.send(2, 3)
        to.tell(MOVED, 0, 1)
        to.store.do(source.start)
        to.sender.wait_durable(WAIT_S)
        to.check(3, MOVED)
        assert _conditional(target) == [2, 3]


def test_flushes_of_an_older_map_are_routed_as_they_come() -> None:
    """Rows that a flush has ordered by the first map reach their shards before its step ends there; none is refused."""
    with _sending(follows_map=False) as to:
        source, target = to.store.shards
        to.tell(MOVED, 0, 1)
        to.deliver(2)
        num_refused = source.num_refused
        to.deliver(3)
        to.check(3, MOVED)
        assert (source.num_refused, _conditional(target)) == (num_refused, [2, 3])


def test_a_sealed_shard_is_asked_again() -> None:
    """A shard that refuses rows and knows no other owner yet gets them again, until it takes them or names one."""
    with _sending() as to:
        source, target = to.store.shards
        for _ in range(3):
            source.faults.append(Fault(error=source.refusal()))
        to.deliver(2)
        to.check(2, FIRST)
        assert not source.faults and not _conditional(target)


def test_rows_whose_new_shard_is_known_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that names the new owner is followed by no pause."""
    monkeypatch.setattr(channel, "_MOVING_S", 3600.0)
    with _sending(retry_min_s=3600.0, retry_max_s=3600.0) as to:
        to.tell(MOVED, 0, 1)
        to.deliver(2)
        to.check(2, MOVED)
        assert to.store.shards[0].num_refused == 1


def test_an_outage_behind_refusals_begins_with_the_shortest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals while rows move, however many, lengthen no pause behind another error."""
    pauses: list[float] = []

    class Recorded(Backoff):
        def next_s(self, **limits: float) -> float:
            pauses.append(super().next_s(**limits))
            return pauses[-1]

    monkeypatch.setattr(channel, "Backoff", Recorded)
    monkeypatch.setattr(channel, "_MOVING_S", 0.002)
    with _sending(retry_min_s=0.001) as to:
        source = to.store.shards[0]
        source.faults += [Fault(error=source.refusal()) for _ in range(10)]
        source.faults.append(Fault(error=UnavailableError("not at this moment")))
        to.deliver(2)
        assert len(pauses) == 11
        assert max(pauses[:-1]) <= 0.002 and pauses[-1] <= 0.001


def test_a_batch_that_is_refused_while_its_rows_are_sealed_stays_as_it_is() -> None:
    """A late copy of the refused batch may be taken after all, so what is sent again has its number and its rows."""
    with _sending() as to:
        source, target = to.store.shards
        source.faults += [Fault(error=source.refusal()), Fault(error=source.refusal(), takes_effect=True)]
        to.deliver(2)
        to.check(2, FIRST)
        offered = [each for each in source.offered if each[0] == 2]
        assert len(offered) == 2 and offered[0] == offered[1]
        assert [batch.step for batch in source.received] == [1, 2] and not _conditional(target)


def test_rows_that_left_a_shard_after_it_had_lost_them_are_sent_again() -> None:
    """A shard that was set back has moved what was left of a partition: all that it ever had goes to the owners."""
    with _sending() as to:
        to.deliver(2)
        source, target = to.store.shards
        owners = [each.shards_of_rows(to.table.tapped.spec.seed, np.arange(NUM_ROWS)) for each in (FIRST, MOVED)]

        def lose() -> None:
            source.rows.clear()
            source.partition_map = target.partition_map = MOVED
            source.set_back(WRITER, last_client_seq=1)

        to.store.do(lose)
        to.flusher.on_step(3)
        to.until(lambda: to.sender.losses == [0] and to.sender.partition_map == MOVED)
        to.flusher.mark_partitions(to.sender.partitions_had_by([0]), num_losses=1)
        to.flusher.on_step(4)
        to.sender.wait_durable(WAIT_S)
        again = {row for batch in to.store.received if batch.step == 4 for row in batch.rows.get("t.weight", ())}
        assert again == set(np.flatnonzero(owners[0] == 0).tolist())
        assert set(target.received[-1].rows["t.weight"]) == set(np.flatnonzero(owners[0] < owners[1]).tolist())
        ends = [_ends(shard)[-1] for shard in to.store.shards]
        assert [(end.step, end.is_exact_cut) for end in ends] == [(4, True)] * 2


def test_shards_appear_amid_training() -> None:
    """A shard that a refusal tells of gets its rows and all later ends; the trainer goes on."""
    with _sending() as to:
        to.grow()
        to.tell(GROWN, 0, 1, 2)
        to.deliver(2)
        to.check(2, GROWN)
        to.deliver(3)
        to.check(3, GROWN)
        assert _conditional(to.store.shards[2]) == [2]


def test_a_shard_without_partitions_ends_steps() -> None:
    """A shard that owns nothing is told of the last step at once, so that all shards have a cut in common."""
    with _sending() as to:
        to.grow()
        to.store.do(to.store.shards[1].drop_connections)  # the next hello tells of it
        to.deliver(2)
        to.until(lambda: all(map(_ends, to.store.shards)))
        to.sender.wait_durable(WAIT_S)
        to.check(2, FIRST)
