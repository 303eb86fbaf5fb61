"""Schedules of moves: none breaks a promise, and each planted fault is found."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from move_replica import Replica
from move_schedules import Batch, Schedule, Writer, run_schedule, run_schedules
from move_shards import ROWS, ModelShard, Rows, partition_of
from virtual_loop import VirtualLoop

from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.reshard.destination import DestinationMove
from headrace.paramserver.reshard.source_moves import SourceMoves
from headrace.schemas.errors import WrongRoutingError
from headrace.schemas.move_records import ImportRecord, Move, MoveRecord, MoveStep

pytestmark = pytest.mark.timeout(600)
_NUM_IN_CI = 300
# A planted fault shows within so many schedules.
_NUM_PLANTED = 200


def test_no_schedule_breaks_a_promise() -> None:
    """Nothing is lost, stale, wrong, resurrected or applied twice, and no replica goes back, whatever fails."""
    total, findings = run_schedules(range(1, 1 + _NUM_IN_CI))
    assert not findings, "\n".join(findings[:20])
    # The schedules are worth something: moves end, are given up and go back, and steps are shown.
    assert total["activate"] > _NUM_IN_CI and total["given up"] > 20 and total["shown"] > 5 * _NUM_IN_CI
    assert total["lapse"] > 10 and total["cuts"] > 20 * _NUM_IN_CI


def test_a_seed_is_a_schedule() -> None:
    """The same seed does the same."""
    assert run_schedules(range(7, 12)) == run_schedules(range(7, 12))


def test_a_schedule_that_fails_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure counts for its own seed: none of its tasks reports it when it is collected later."""
    monkeypatch.setattr(Replica, "take_some", lambda *_: 1 // 0)
    loop, leftovers = VirtualLoop(), list[dict[str, Any]]()
    with pytest.raises(ZeroDivisionError):
        run_schedule(1, loop)
    loop.set_exception_handler(lambda _, context: leftovers.append(context))
    gc.collect()
    loop.close()
    assert not leftovers


def test_nothing_is_sent_again_to_a_shard_that_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer counts the batches of each shard apart, whatever its other shards answer meanwhile."""
    again: list[int] = []
    monkeypatch.setattr(Writer, "_resend", lambda self, shard: again.append(shard))
    monkeypatch.setattr(ModelShard, "lose_tail", lambda shard: None)
    assert not run_schedules(range(1, 21))[1]
    assert not again


def test_a_batch_that_was_sent_keeps_its_number() -> None:
    """A shard that refuses a batch, all of whose rows have moved, may take it late: nothing else gets its number."""
    loop = VirtualLoop()

    async def send() -> None:
        schedule = Schedule(1)
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

    loop.run_alone(send())
    loop.close()


def test_the_end_of_a_step_names_rows_that_move_one_after_the_other() -> None:
    """The end of a step waits for and names all of its rows, also those that move after the others of their batch."""
    loop = VirtualLoop()

    async def cut() -> None:
        schedule = Schedule(1)
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

    loop.run_alone(cut())
    loop.close()


def _found(*about: str) -> None:
    """Assert that the checker finds what was planted; one of `about` is in one of the findings."""
    findings: list[str] = []
    for begin in range(1, _NUM_PLANTED, 10):
        findings += run_schedules(range(begin, begin + 10))[1]
        if any(each in finding for each in about for finding in findings):
            return
    pytest.fail(f"not found in {_NUM_PLANTED} schedules: {findings[:5]}")


def test_an_unconditional_import_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the source ignored because it had newer ones must not count at the destination."""
    init = ImportRecord.__init__

    def unconditional(self: ImportRecord, **fields: Any) -> None:
        record = dict(fields["record"])
        init(self, **fields | {"record": record | ({"conditional": False} if "conditional" in record else {})})

    monkeypatch.setattr(ImportRecord, "__init__", unconditional)
    _found("differs", "rows differ")


def test_a_copy_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of digests, a copy without tombstones resurrects rows."""
    loaded = ModelShard._loaded

    def without_tombstones(self: ModelShard, contents: Rows, move: Any) -> Rows:
        found = loaded(self, contents, move)
        return replace(found, rows={key: row for key, row in found.rows.items() if row.value is not None})

    monkeypatch.setattr(ModelShard, "_loaded", without_tombstones)
    _found("differs", "rows differ")


def test_an_activation_before_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(DestinationMove, "_bring_in", run)
    _found("rows differ", "nothing was sealed", "stale", "lost", "RequestError", "does not serve", "nothing goes on")


def test_a_source_that_purges_before_the_archive_has_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination that loses its disk has neither the rows then, nor a source to copy them from."""

    async def none(self: ModelShard, move: Move) -> None:
        return None

    monkeypatch.setattr(ModelShard, "wait_safe", none)
    _found("lost", "without", "stale", "nothing goes on")


def test_an_end_of_a_step_before_the_destinations_ack_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose rows were cut again must not end at the source before they are acked elsewhere."""
    monkeypatch.setattr(Batch, "is_done", property(lambda self: True))
    _found("the replica shows step")


def test_an_end_that_does_not_name_the_rows_cut_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that is behind at the destination shows a step without rows that were acked before its end."""
    monkeypatch.setattr(Batch, "places", lambda self: [])
    _found("the replica shows step")


def test_a_step_that_stays_a_cut_when_it_ends_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer rows may have come between a step's end and its second end, which says that it is complete, not exact."""
    advance = Sessions.advance

    def keep(self: Sessions, session: Session, **marks: Any) -> None:
        exact_step = session.exact_step
        advance(self, session, **marks)
        session.exact_step = max(exact_step, session.exact_step)

    monkeypatch.setattr(Sessions, "advance", keep)
    _found("makes a cut of step")


def test_a_replica_that_does_not_wait_for_q_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the source that come behind the destination's take it back in time."""

    def hasty(self: Replica, shard: int, seq: int) -> bool:
        return True

    monkeypatch.setattr(Replica, "has_seal", hasty)
    _found("the replica goes back")


def test_a_source_that_gives_a_move_up_by_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination that was silent for some time goes on with the same move, and nobody need begin another."""

    async def expire(self: SourceMoves, move: Move) -> None:
        await self.unseal(move)

    monkeypatch.setattr(SourceMoves, "expire", expire)
    _found("nobody has asked for that")


def test_fences_that_are_not_copied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that was replaced writes old rows where nobody knows the new one."""
    merge = Rows.merge
    monkeypatch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, epochs={})))
    _found("is not fenced")


def test_sessions_that_are_not_copied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard without the trainer's session has ended no step of it."""
    merge = Rows.merge
    monkeypatch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, sessions={})))
    _found("the session of")


def test_floors_that_are_not_copied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a floor, tombstones are gone; who does not know it resurrects rows."""
    merge = Rows.merge
    monkeypatch.setattr(Rows, "merge", lambda self, other: merge(self, replace(other, floors={})))
    _found("the floor of")


def test_claims_that_are_not_copied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity claims move with their rows."""
    loaded = ModelShard._loaded
    monkeypatch.setattr(ModelShard, "_loaded", lambda self, *args: replace(loaded(self, *args), claims={}))
    _found("differs", "rows differ")


def test_a_shard_that_serves_rows_of_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that answers for rows of others answers with old ones, or takes rows that nobody reads."""
    monkeypatch.setattr(ModelShard, "check_rows", lambda self, rows, is_write=False: None)
    _found("stale", "lost", "still has")


def test_a_replica_that_passes_over_an_emptied_shard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard without partitions still ends the trainer's steps: rows that it had refused come behind the others'."""
    build = Replica._build

    def without_emptied(self: Replica) -> None:
        build(self)
        if self._is_built:
            self._counted &= {shard.number for shard in self._schedule.shards if shard.served()}

    monkeypatch.setattr(Replica, "_build", without_emptied)
    _found("shows step")
