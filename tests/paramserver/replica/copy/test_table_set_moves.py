"""What a copy shows while partitions move from shard to shard, and when; without a server."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scripted_logs import SPEC, Copy, Shard

from headrace.paramserver.reading.follower import Update
from headrace.schemas.move_records import Move, MoveStep
from headrace.schemas.partition_map import PartitionMap

FIRST = PartitionMap.first(2)
ROWS = range(40)
PARTITION_OF = FIRST.partitions_of_rows(SPEC.seed, np.array(ROWS)).tolist()


def _row_of(shard: int) -> int:
    return next(row for row in ROWS if FIRST.owners[PARTITION_OF[row]] == shard)


def _move_of(row: int, destination: int) -> Move:
    return Move.of_map(FIRST, (PARTITION_OF[row],), move_id="a", destination=destination)


def _take_all(copy: Copy, shard: int, updates: list[Update]) -> list[Update]:
    """Take records up to an activation that has to wait; return the rest."""
    while updates and copy.table_set.awaited_source(updates[0]) is None:
        copy.take(shard, [updates.pop(0)])
    return updates


@pytest.mark.parametrize("is_by_step", [False, True])
@pytest.mark.parametrize("source", [0, 1])
def test_rows_come_from_the_source_up_to_the_seal_and_then_from_the_destination(source: int, is_by_step: bool) -> None:
    """An activation waits for the release in the source's log; imported rows are not shown; no row goes back."""
    shards, copy, row = [Shard(), Shard()], Copy(2, is_by_step=is_by_step), _row_of(source)
    old, new, move = shards[source], shards[1 - source], _move_of(row, 1 - source)
    old.write(1, 1.0, row=row)
    new.write(1, 1.0, row=_row_of(1 - source))
    for number, shard in enumerate(shards):
        copy.take(number, shard.take())
    assert (copy.table_set.visible, copy.values(row)) == ((1, 1), [1.0])

    new.move(move, MoveStep.COPY, old.seq)
    old.write(2, 2.0, row=row)
    new.bring_in(move, old.updates[-1])
    new.write(2, 2.0, row=_row_of(1 - source))
    seal = old.move(move, MoveStep.SEAL)
    old.move(move, MoveStep.RELEASE, seal)
    new.move(move, MoveStep.ACTIVATE, seal)
    new.write(3, 3.0, row=row)
    old.write(
        3, 3.0, row=next(each for each in ROWS if PARTITION_OF[each] not in (*move.partitions, PARTITION_OF[row]))
    )

    left = _take_all(copy, 1 - source, new.take())
    assert len(left) == 2 and copy.table_set.awaited_source(left[0]) == source
    assert copy.values(row) == [1.0]
    theirs = old.take()
    for update in theirs[:3]:
        assert copy.table_set.awaited_source(left[0]) == source
        copy.take(source, [update])
    assert copy.values(row) == [2.0]
    assert not _take_all(copy, 1 - source, left)
    assert copy.values(row) == [2.0 if is_by_step else 3.0]
    assert copy.table_set.visible == (1, 2)
    copy.take(source, theirs[3:])
    assert (copy.table_set.visible, copy.values(row)) == ((1, 3), [3.0])


def test_a_pause_amid_a_move_keeps_the_order_of_rows() -> None:
    """While it is paused a copy shows nothing behind an activation if it does not show the source's rows before."""
    shards, copy, row = [Shard(), Shard()], Copy(2, is_by_step=False), _row_of(1)
    move = _move_of(row, 0)
    shards[1].write(1, 1.0, row=row)
    for number, shard in enumerate(shards):
        copy.take(number, shard.take())
    copy.table_set.limits = [9, 2]
    shards[1].write(2, 2.0, row=row)
    seal = shards[1].move(move, MoveStep.SEAL)
    shards[1].move(move, MoveStep.RELEASE, seal)
    shards[0].move(move, MoveStep.COPY, 2)
    shards[0].move(move, MoveStep.ACTIVATE, seal)
    shards[0].write(3, 3.0, row=row)
    for number in (1, 0):
        copy.take(number, shards[number].take())
    assert copy.values(row) == [1.0] and [tail.visible_seq for tail in copy.table_set.tails] == [2, 2]
    copy.table_set.limits = None
    assert copy.table_set.advance() and copy.values(row) == [3.0]


def test_a_step_is_not_shown_behind_an_activation_and_before_its_seal() -> None:
    """A cut is passed over that the source has only before the seal and the destination only behind the activation."""
    shards, copy, row = [Shard(), Shard()], Copy(2), _row_of(1)
    move = _move_of(row, 0)
    shards[1].write(1, 1.0, row=row)
    shards[1].write(2, 1.5, row=row, ends=False)
    seal = shards[1].move(move, MoveStep.SEAL)
    shards[1].move(move, MoveStep.RELEASE, seal)
    shards[0].move(move, MoveStep.COPY, 2)
    shards[0].move(move, MoveStep.ACTIVATE, seal)
    shards[0].write(1, 1.0, row=_row_of(0))
    for number in (1, 0):
        copy.take(number, shards[number].take())
    assert copy.table_set.visible == (0, -1)
    for number in (1, 0):
        shards[number].write(2, 2.0, row=(_row_of(0), 100)[number])
        copy.take(number, shards[number].take())
    assert (copy.table_set.visible, copy.values(row, _row_of(0))) == ((1, 2), [1.5, 2.0])


def test_rows_that_move_within_a_step_are_shown_in_order() -> None:
    """A row that both shards have got in one step is as the destination has it, whichever comes first by number."""
    shards, copy, row = [Shard(), Shard()], Copy(2), _row_of(1)
    move = _move_of(row, 0)
    shards[1].write(1, 1.0, row=row, ends=False)
    seal = shards[1].move(move, MoveStep.SEAL)
    shards[1].move(move, MoveStep.RELEASE, seal)
    shards[0].move(move, MoveStep.COPY, 2)
    shards[0].move(move, MoveStep.ACTIVATE, seal)
    shards[0].write(1, 2.0, row=row, ends=False)
    for number in (1, 0):
        shards[number].end(1)
        copy.take(number, shards[number].take())
    assert (copy.table_set.visible, copy.values(row)) == ((1, 1), [2.0])


@pytest.mark.parametrize("is_by_step", [False, True])
def test_a_shard_that_appears_is_followed_from_its_first_record(is_by_step: bool) -> None:
    """From the release on no step is shown without the new shard, and none that was shown is taken back."""
    shards, copy, row = [Shard(), Shard(), Shard()], Copy(2, is_by_step=is_by_step), _row_of(0)
    move = _move_of(row, 2)
    for number in (0, 1):
        shards[number].write(1, 1.0, row=_row_of(number))
        copy.take(number, shards[number].take())
    shards[2].move(move, MoveStep.COPY, 2)
    seal = shards[0].move(move, MoveStep.SEAL)
    shards[0].move(move, MoveStep.RELEASE, seal)
    shards[2].move(move, MoveStep.ACTIVATE, seal)
    assert len(copy.table_set.tails) == 2
    for number in (0, 1):
        shards[number].write(2, 2.0, row=_row_of(1))
        copy.take(number, shards[number].take())
    assert [tail.seq for tail in copy.table_set.tails] == [5, 3, 0]
    assert copy.table_set.visible == (1, 1)
    shards[2].write(2, 2.0, row=row)
    theirs = shards[2].take()
    assert not _take_all(copy, 2, theirs[:-1]) and copy.table_set.visible == (1, 1)
    copy.take(2, theirs[-1:])
    assert (copy.table_set.visible, copy.values(row)) == ((1, 2), [2.0])


class _Trainer:
    """Writes rows to three shards of which the last appears, step by step, while partitions move."""

    def __init__(self) -> None:
        self.shards = [Shard() for _ in range(3)]
        self.map, self.step, self.num_moves = FIRST, 1, 0
        self.values = dict.fromkeys(ROWS, 0.0)
        self.at_step: dict[int, dict[int, float]] = {}
        self.copying: tuple[Move, int] | None = None

    def write(self, row: int) -> None:
        self.values[row] = value = self.values[row] + 1
        shard = self.shards[self.map.owners[PARTITION_OF[row]]]
        shard.write(self.step, value, row=row, ends=False)
        if self.copying is not None and PARTITION_OF[row] in self.copying[0].partitions:
            self.shards[self.copying[0].destination].bring_in(self.copying[0], shard.updates[-1])

    def end(self) -> None:
        for shard in self.shards:
            shard.end(self.step)
        self.at_step[self.step] = dict(self.values)
        self.step += 1

    def begin_move(self, row: int, destination: int) -> None:
        if self.copying is None and self.map.owners[PARTITION_OF[row]] != destination:
            self.num_moves += 1
            move = Move.of_map(self.map, (PARTITION_OF[row],), move_id=str(self.num_moves), destination=destination)
            at = self.shards[move.source].seq
            self.copying = move, at
            self.shards[destination].move(move, MoveStep.COPY, at)

    def end_move(self) -> None:
        if self.copying is not None:
            (move, _), self.copying = self.copying, None
            seal = self.shards[move.source].move(move, MoveStep.SEAL)
            self.shards[move.source].move(move, MoveStep.RELEASE, seal)
            self.map = move.apply_to(self.map)
            self.shards[move.destination].move(move, MoveStep.ACTIVATE, seal)


_FEW = (_row_of(0), _row_of(1), 39)  # so that rows are often written and moved again
_DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(_FEW)),
        st.tuples(st.just("end")),
        st.tuples(st.just("begin_move"), st.sampled_from(_FEW), st.integers(0, 2)),
        st.tuples(st.just("end_move")),
    ),
    max_size=60,
)


@given(deeds=_DEEDS, order=st.randoms(use_true_random=False), is_by_step=st.booleans())
def test_no_row_goes_back_and_every_step_is_whole(deeds: list[Any], order: Any, is_by_step: bool) -> None:
    """Whatever moves and in whatever order the logs come, steps are exact, and the last rows are seen in the end."""
    trainer, copy = _Trainer(), Copy(2, is_by_step=is_by_step)
    for name, *arguments in deeds:
        getattr(trainer, name)(*arguments)
    trainer.end()
    copy.table_set.add_tables([SPEC])
    copy.table_set.is_shown = True
    logs = [shard.take() for shard in trainer.shards]
    shown, seen = dict.fromkeys(ROWS, 0.0), copy.table_set.visible
    while True:
        able = [
            tail.shard
            for tail in copy.table_set.tails
            if logs[tail.shard] and copy.table_set.awaited_source(logs[tail.shard][0]) is None
        ]
        if not able:
            break
        at = order.choice(able)
        copy.take(at, [logs[at].pop(0)])
        now = dict(zip(ROWS, copy.values(*ROWS), strict=True))
        assert all(now[row] >= shown[row] for row in ROWS)
        visible = copy.table_set.visible
        assert seen is None or (visible is not None and visible >= seen)
        shown, seen = now, visible
        if visible is not None and visible[1] > 0:
            expected = trainer.at_step[visible[1]]
            assert now == expected if is_by_step else all(now[row] >= expected[row] for row in ROWS)
    assert not any(logs[tail.shard] for tail in copy.table_set.tails)
    assert (seen, shown) == ((1, trainer.step - 1), trainer.values)
