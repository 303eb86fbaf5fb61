"""What a served collection of TorchRec returns is what the trained one does: keys, their order, types and all bits."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from served_outputs import CASES, Case, Table, compare_on_rank, follow_on_rank

from headrace.paramserver.shard.launch import ServerProcess

pytestmark = pytest.mark.torchrec


@pytest.fixture(scope="module")
def found(server: ServerProcess) -> dict[str, str]:
    """Return by case what differs: all of one number of ranks in one run, because ranks take seconds to begin."""
    problems: dict[str, str] = {}
    for world_size in (1, 2):
        cases = {name: case for name, case in CASES.items() if case.world_size == world_size}
        for of_rank in run_ranks(compare_on_rank, world_size, cases, server.address, timeout_s=300.0):
            problems |= {name: problem for name, problem in of_rank.items() if problem}
    return problems


@pytest.mark.parametrize("name", CASES)
def test_served_is_what_was_trained(found: dict[str, str], name: str) -> None:
    """The plain model and the sharded one, given to `serve_model`, return what the trained module returns."""
    assert name not in found, found[name]


def test_a_served_model_follows_the_next_start(server: ServerProcess) -> None:
    """When the trainer starts with another sharding, a served model returns what that returns from then on."""
    dims = {"a": 4, "b": 8, "c": 4}
    cases = [
        Case(world_size=1, tables={name: Table(dims[name], (kind, {})) for name, kind in kinds.items()})
        for kinds in (
            {"a": "row_wise", "b": "data_parallel", "c": "row_wise"},
            {"a": "data_parallel", "b": "row_wise", "c": "data_parallel"},
            {"a": "row_wise", "b": "row_wise", "c": "row_wise"},
        )
    ]
    (problems,) = run_ranks(follow_on_rank, 1, cases, server.address)
    assert problems == ["", "", ""]
