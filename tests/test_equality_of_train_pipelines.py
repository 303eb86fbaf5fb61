"""The headline for TorchRec's own training loops, on two ranks: after a drain, the store's rows are the trainer's."""

from __future__ import annotations

import collision_training
import pytest
from pipelined_training import CASES, ROWS, STEPS, reshard_on_rank, run_cases_on_rank
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess

pytestmark = [pytest.mark.torchrec]

pytest.importorskip("torchrec")


@pytest.fixture(scope="module")
def results(server: ServerProcess) -> list[dict[str, tuple[bool, int, int]]]:
    return run_ranks(run_cases_on_rank, 2, server.address)


@pytest.mark.parametrize("case", list(CASES))
def test_every_row_arrives(results: list[dict[str, tuple[bool, int, int]]], case: str) -> None:
    """Also where one rank has no batches left, and with an evaluation in a pipeline between; steps are counted."""
    num_rows = collision_training.ROWS["mch"] if case == "collisions" else sum(ROWS.values())
    steps = 2 * STEPS if case == "evaluated_between" else STEPS
    assert [result[case] for result in results] == [(True, num_rows, steps)] * 2


def test_a_table_that_moves_to_another_rank_is_told(server: ServerProcess) -> None:
    """After `reshard` the next flush of each rank says so, and a new streamer goes on."""
    for was_equal, told, is_equal in run_ranks(reshard_on_rank, 2, server.address):
        assert was_equal and is_equal
        assert "is not what was attached: the model has another module or parameter in its place" in told
