"""Plain torch tables on several ranks: one owner a row, and the store's whole rows equal the trained ones, bit for bit.

Replicated tables (DDP), tables under `fully_shard`, and DTensors of all placements over meshes of one and two
dimensions, trained on 2 or 4 processes with gloo and streamed to a real server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matrix_training import NUM_STEPS, PLAIN_KINDS, cells_of, train_plain_cells_on_rank
from ranks import run_ranks
from replicated_training import (
    PlainJob,
    refusal_on_rank,
    train_ddp_on_rank,
    train_dtensor_on_rank,
    train_fsdp_on_rank,
)
from stored_rows import read_tables

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl

ADAGRAD = ("Adagrad", (("lr", 0.1),))
ADAM = ("Adam", (("lr", 0.1),))
MOMENTUM = ("SGD", (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.01)))


def train(function: Callable[..., Any], world_size: int, job: PlainJob) -> list[dict[str, Any]]:
    """Train on ranks, and compare every row of the store with what each rank holds."""
    results: list[dict[str, Any]] = run_ranks(function, world_size, job)
    assert [result["step"] for result in results] == [job.num_steps] * world_size
    _check_owners(results)
    for result in results:  # replicas are equal, so each of them equals the store
        _check_equal(job.address, result["values"])
    return results


def _check_owners(results: list[dict[str, Any]]) -> None:
    """Every cell of every table is streamed by exactly one rank."""
    counts = {fqn: np.zeros(values["weights"].shape, np.int64) for fqn, values in results[0]["values"].items()}
    for result in results:
        for fqn, row, num_rows, column, width in result["parts"]:
            counts[fqn][row : row + num_rows, column : column + width] += 1
    for fqn, count in counts.items():
        assert (count == 1).all(), fqn


def _check_equal(address: str, values: dict[str, dict[str, Any]]) -> None:
    """Compare every row of the store with what a rank holds."""
    stored_rows = read_tables(address, values, with_states=True)
    for fqn, columns in values.items():
        rows = stored_rows[fqn]
        assert (rows.presence == idl.RowPresence.PRESENT).all(), fqn
        assert columns.keys() == {"weights", *rows.states}, fqn
        for name, trained in columns.items():
            stored = rows.weights if name == "weights" else rows.states[name]
            assert stored.shape == trained.shape, f"{fqn} {name}"
            assert stored.tobytes() == np.ascontiguousarray(trained).tobytes(), f"{fqn} {name} differs"


@pytest.mark.parametrize(
    ("world_size", "optimizer", "is_sparse"),
    [(2, ADAGRAD, False), (2, ADAGRAD, True), (2, ADAM, False), (4, MOMENTUM, False), (2, ("SparseAdam", ()), True)],
)
def test_tables_replicated_by_ddp(server: ServerProcess, world_size: int, optimizer: Any, is_sparse: bool) -> None:
    """Under DDP each row is streamed by one rank, and every rank holds what the store has."""
    name = f"ddp_{optimizer[0]}_{is_sparse}"
    job = PlainJob(address=server.address, run=name, optimizer=optimizer[0], settings=optimizer[1], is_sparse=is_sparse)
    results = train(train_ddp_on_rank, world_size, job)
    assert all(result["parts"] for result in results)


@pytest.mark.parametrize("optimizer", [ADAGRAD, ADAM])
def test_tables_under_fully_shard(server: ServerProcess, optimizer: Any) -> None:
    """Tables that `fully_shard` has cut by rows arrive whole."""
    job = PlainJob(address=server.address, run=f"fsdp_{optimizer[0]}", optimizer=optimizer[0], settings=optimizer[1])
    train(train_fsdp_on_rank, 2, job)


@pytest.mark.parametrize("optimizer", [ADAGRAD, MOMENTUM])
def test_dtensors_with_a_gradient_placed_otherwise(server: ServerProcess, optimizer: Any) -> None:
    """A gradient that is whole on each rank is looked at where the table's rows are."""
    job = PlainJob(
        address=server.address,
        run=f"grad_{optimizer[0]}",
        optimizer=optimizer[0],
        settings=optimizer[1],
        placement="S0",
        has_whole_gradient=True,
    )
    train(train_dtensor_on_rank, 2, job)


@pytest.mark.parametrize("world_size", list(PLAIN_KINDS))
def test_each_torch_optimizer_under_each_placement(server: ServerProcess, world_size: int) -> None:
    """Every pair of a torch optimizer and a way to replicate or cut a table arrives whole; all are in one model."""
    results = run_ranks(train_plain_cells_on_rank, world_size, server.address, f"cells{world_size}")
    assert [result["step"] for result in results] == [NUM_STEPS] * world_size
    values = results[0]["values"]
    assert {fqn.split(".")[-2] for fqn in values} == cells_of(world_size).keys()
    _check_owners(results)
    _check_equal(server.address, values)


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("unwrapped", ["nothing keeps its copies equal", "nothing keeps its copies equal"]),
        ("ignored", ["DistributedDataParallel ignores it"] * 2),
        ("part_of_the_ranks", ["mesh of 1 of the 2 ranks", "mesh of 1 of the 2 ranks"]),
        ("ddp_of_some_ranks", ["kept equal on only 1 of the 2 ranks", "kept equal on only 1 of the 2 ranks"]),
        ("rowwise_dtensor", ["rowwise states of a DTensor cut by columns"] * 2),
        ("partial", ["with placement P", "with placement P"]),
        ("flattened", ["inside FullyShardedDataParallel", "inside FullyShardedDataParallel"]),
        ("unknown_name", ["no table is named or matches 'bagg.weight'; the nearest are 'bag.weight'"] * 2),
        ("only_one_rank_refuses", ["rank 1 cannot stream its tables", "max_norm"]),
        ("different_ways_to_count", ["rank 0 was given optimizers and rank 1 none"] * 2),
        ("same_rows_twice", ["row 0 of table 'tbe.t' is on ranks 0 and 1"] * 2),
    ],
)
def test_refused_on_all_ranks(case: str, messages: list[str]) -> None:
    """What cannot have one owner a row, or counts steps differently, is refused with its reason, on every rank."""
    if case in ("same_rows_twice", "different_ways_to_count", "rowwise_dtensor"):
        pytest.importorskip("fbgemm_gpu")
    errors = run_ranks(refusal_on_rank, 2, case)
    for error, message in zip(errors, messages, strict=True):
        assert message in error
