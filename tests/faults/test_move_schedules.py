"""Schedules of moves: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from move_replica import Replica
from move_schedules import Batch, MoveSchedule, Writer
from move_shards import ROWS, ModelShard, Rows, partition_of
from simulator import PlantedFaults, run_schedules
from virtual_loop import run_virtual

from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.reshard.destination import DestinationMove
from headrace.paramserver.reshard.source_moves import SourceMoves
from headrace.schemas.errors import WrongRoutingError
from headrace.schemas.move_records import ImportRecord, Move, MoveRecord, MoveStep

pytestmark = pytest.mark.timeout(600)
planted = PlantedFaults(MoveSchedule, within=200, at_once=10)
_NUM_CORE, _NUM_LONG = 10, 300


def _check(seeds: range) -> None:
    total, findings = run_schedules(MoveSchedule, seeds)
    assert not findings, "\n".join(findings[:20])
    # The schedules are worth something: moves end, are given up and go back, and steps are shown.
    num = len(seeds)
    assert total["activate"] > num and total["given up"] >= num // 15 and total["shown"] > 5 * num
    assert total["lapse"] >= num // 30 and total["cuts"] > 20 * num


def test_no_schedule_breaks_a_promise() -> None:
    """Nothing is lost, stale, wrong, resurrected or applied twice, and no replica goes back, whatever fails."""
    _check(range(1, 1 + _NUM_CORE))


def test_no_schedule_of_many_breaks_a_promise() -> None:
    """As above, in three hundred."""
    _check(range(1 + _NUM_CORE, 1 + _NUM_LONG))


def test_nothing_is_sent_again_to_a_shard_that_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer counts the batches of each shard apart, whatever its other shards answer meanwhile."""
    again: list[int] = []
    monkeypatch.setattr(Writer, "_resend", lambda self, shard: again.append(shard))
    monkeypatch.setattr(ModelShard, "lose_tail", lambda shard: None)
    assert not run_schedules(MoveSchedule, range(1, 21))[1]
    assert not again


def test_a_batch_that_was_sent_keeps_its_number() -> None:
    """A shard that refuses a batch, all of whose rows have moved, may take it late: nothing else gets its number."""

    async def send() -> None:
        schedule = MoveSchedule(1)
        schedule.network.heal()
        old, new = schedule.shards[:2]
        row = next(row for row in ROWS if schedule.first.owners[partition_of(("b", row))] == 0)
        moved = schedule.first.moved([partition_of(("b", row))], np.array([1]), 1)
        refusal, writes = WrongRoutingError("moved", partitions=moved.encode()), list[tuple[int, int]]()

        async def write(self: ModelShard, header: dict[str, Any], epoch: int, body: Any) -> int:
            writes.append((self.number, header["client_seq"]))
            if self is old and body:
                raise refusal
            return self._put(epoch, header | {"scalars": [], "below_floor": []}, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelShard, "write", write)
            writer = Writer(schedule, "replay", 1, version_epoch=1)
            writer.write({("b", row): (7, 1)})
            await writer.drain()
        assert sorted(writes) == [(0, 1), (0, 1), (1, 1)]
        assert new.state.rows[("b", row)].value == 7 and not old.state.rows

    run_virtual(send())


def test_the_end_of_a_step_names_rows_that_move_one_after_the_other() -> None:
    """The end of a step waits for and names all of its rows, also those that move after the others of their batch."""

    async def cut() -> None:
        schedule = MoveSchedule(1)
        rows = {partition: row for row in ROWS if (partition := partition_of(("a", row))) in (0, 2)}
        writer = Writer(schedule, "train", 2)
        writer.write({("a", row): (7, 1) for row in rows.values()})
        for number, partition in enumerate(rows, 1):
            writer.map = writer.map.moved([partition], np.array([number]), 1)
            writer._recut(0)
        end = next(batch for batch in writer.queues[0] if batch.ends)
        moved = [batch for batch in writer.queues[1] if batch.rows]
        assert end.ends and len(moved) == 2
        for number, batch in enumerate(moved, 1):
            assert not end.is_done
            batch.acked = 1, number
        for batch in writer.queues[0]:
            batch.acked = 0, 1
        assert end.is_done and {(1, 1), (1, 2)} <= set(end.places())

    run_virtual(cut())


@planted("differs", "rows differ")
def an_unconditional_import(patch: pytest.MonkeyPatch) -> None:
    """Rows that the source ignored because it had newer ones must not count at the destination."""
    init = ImportRecord.__init__

    def unconditional(self: ImportRecord, **fields: Any) -> None:
        record = dict(fields["record"])
        init(self, **fields | {"record": record | ({"conditional": False} if "conditional" in record else {})})

    patch.setattr(ImportRecord, "__init__", unconditional)


@planted("differs", "rows differ")
def a_copy_that_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Without the comparison of digests, a copy without tombstones resurrects rows."""
    loaded = ModelShard._loaded

    def without_tombstones(self: ModelShard, contents: Rows, move: Any) -> Rows:
        found = loaded(self, contents, move)
        return replace(found, rows={key: row for key, row in found.rows.items() if row.value is not None})

    patch.setattr(ModelShard, "_loaded", without_tombstones)


@planted("rows differ", "nothing was sealed", "stale", "lost", "RequestError", "does not serve", "nothing goes on")
def an_activation_before_released(patch: pytest.MonkeyPatch) -> None:
    """A destination that serves before the source has released makes two owners, or none."""

    async def run(self: DestinationMove, progress: Any) -> bool:
        # As `_bring_in`, but it activates once it has followed up to the seal.
        if progress is not None and progress.is_loaded:
            self._followed = progress.imported
        else:
            await self._copy()
        sealed = await self._source.seal(self._move)
        if sealed is None:
            await self._purge()
            return False
        if not await self._follow(sealed.seq):
            return await run(self, None)
        await self._shard.append(MoveRecord(step=MoveStep.ACTIVATE, move=self._move, position=sealed))
        await self._source.release(self._move, sealed)
        return True

    patch.setattr(DestinationMove, "_bring_in", run)


@planted("lost", "without", "stale", "nothing goes on")
def a_source_that_purges_before_the_archive_has_the_rows(patch: pytest.MonkeyPatch) -> None:
    """A destination that loses its disk has neither the rows then, nor a source to copy them from."""

    async def none(self: ModelShard, move: Move) -> None:
        return None

    patch.setattr(ModelShard, "wait_safe", none)


@planted("the replica shows step")
def an_end_of_a_step_before_the_destinations_ack(patch: pytest.MonkeyPatch) -> None:
    """A step whose rows were cut again must not end at the source before they are acked elsewhere."""
    patch.setattr(Batch, "is_done", property(lambda self: True))


@planted("the replica shows step")
def an_end_that_does_not_name_the_rows_cut_again(patch: pytest.MonkeyPatch) -> None:
    """A follower that is behind at the destination shows a step without rows that were acked before its end."""
    patch.setattr(Batch, "places", lambda self: [])


@planted("makes a cut of step")
def a_step_that_stays_a_cut_when_it_ends_again(patch: pytest.MonkeyPatch) -> None:
    """Newer rows may have come between a step's end and its second end, which says that it is complete, not exact."""
    advance = Sessions.advance

    def keep(self: Sessions, session: Session, **marks: Any) -> None:
        exact_step = session.exact_step
        advance(self, session, **marks)
        session.exact_step = max(exact_step, session.exact_step)

    patch.setattr(Sessions, "advance", keep)


@planted("the replica goes back")
def a_replica_that_does_not_wait_for_q(patch: pytest.MonkeyPatch) -> None:
    """Rows of the source that come behind the destination's take it back in time."""

    def hasty(self: Replica, shard: int, seq: int) -> bool:
        return True

    patch.setattr(Replica, "has_seal", hasty)


@planted("nobody has asked for that")
def a_source_that_gives_a_move_up_by_itself(patch: pytest.MonkeyPatch) -> None:
    """A destination that was silent for some time goes on with the same move, and nobody need begin another."""

    async def expire(self: SourceMoves, move: Move) -> None:
        await self.unseal(move)

    patch.setattr(SourceMoves, "expire", expire)


@planted("is not fenced")
def fences_that_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A trainer that was replaced writes old rows where nobody knows the new one."""
    merge = Rows.merge
    patch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, epochs={})))


@planted("the session of")
def sessions_that_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A shard without the trainer's session has ended no step of it."""
    merge = Rows.merge
    patch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, sessions={})))


@planted("the floor of")
def floors_that_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Below a floor, tombstones are gone; who does not know it resurrects rows."""
    merge = Rows.merge
    patch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, floors={})))


@planted("differs", "rows differ")
def claims_that_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Identity claims move with their rows."""
    loaded = ModelShard._loaded
    patch.setattr(ModelShard, "_loaded", lambda self, *args: replace(loaded(self, *args), claims={}))


@planted("stale", "lost", "still has")
def a_shard_that_serves_rows_of_others(patch: pytest.MonkeyPatch) -> None:
    """A shard that answers for rows of others answers with old ones, or takes rows that nobody reads."""
    patch.setattr(ModelShard, "check_rows", lambda self, rows, is_write=False: None)


@planted("shows step")
def a_replica_that_passes_over_an_emptied_shard(patch: pytest.MonkeyPatch) -> None:
    """A shard without partitions still ends the trainer's steps: rows that it had refused come behind the others'."""
    build = Replica._build

    def without_emptied(self: Replica) -> None:
        build(self)
        if self._is_built:
            self._counted &= {shard.number for shard in self._schedule.shards if shard.served()}

    patch.setattr(Replica, "_build", without_emptied)


@pytest.mark.parametrize("fault", planted.names)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger finds shards, clients and replicas that break one of the rules of moves."""
    planted.check_found(fault, monkeypatch)
