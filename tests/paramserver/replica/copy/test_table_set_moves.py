"""What a copy shows while partitions move from shard to shard, and when; without a server."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from scripted_logs import SPEC, Copy, Following, Shard
from text_scripts import Script, scripts

from headrace.schemas.move_records import Move, MoveStep
from headrace.schemas.partition_map import PartitionMap

FIRST = PartitionMap.first(2)
ROWS = range(40)
PARTITION_OF = FIRST.partitions_of_rows(SPEC.seed, np.array(ROWS)).tolist()


def _row_of(shard: int) -> int:
    return next(row for row in ROWS if FIRST.owners[PARTITION_OF[row]] == shard)


@scripts(__file__, "moves")
def test_what_is_shown_while_a_partition_moves(script: Script) -> None:
    """Its rows come from the source up to the seal, and then from the destination: none goes back, no step is torn."""
    script.run(Following())


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
