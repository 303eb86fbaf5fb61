"""The headline on several ranks: the store's whole rows equal the tables that all ranks hold together, bit for bit.

Each case trains a TorchRec model on 2 or 4 ranks (processes, gloo) under one sharding and streams it to a real server
of two shards. What it is compared with is TorchRec's own state dict, put together by TorchRec's own metadata.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matrix_training import optimizer_names
from ranks import run_ranks
from sharded_training import BAG_TABLES, Job, everywhere, train_jobs_on_rank, train_on_rank, whole_tables
from stored_rows import read_tables
from torchrec_models import FUSED

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl
from headrace.streamer.resume import digest_of

pytestmark = [pytest.mark.torchrec]

Whole = dict[str, dict[str, npt.NDArray[Any]]]


# ranks, ranks of a node, and the sharding of each table
SHARDINGS: dict[str, tuple[int, int, dict[str, tuple[str, dict[str, Any]]]]] = {
    "table-wise": (2, 2, {"users": ("table_wise", {"rank": 0}), "clicks": ("table_wise", {"rank": 1})}),
    "row-wise": (2, 2, everywhere("row_wise", "users", "films", "shops", "clicks")),
    "row-wise-4": (4, 4, everywhere("row_wise", "users", "films", "clicks")),
    "column-wise": (2, 2, everywhere("column_wise", "users", "films", "clicks", ranks=[0, 1])),
    "column-wise-4": (4, 4, {"users": ("column_wise", {"ranks": [3, 1]}), "films": ("column_wise", {"ranks": [0, 2]})}),
    "table-row-wise": (
        4,
        2,
        {"users": ("table_row_wise", {"host_index": 0}), "films": ("table_row_wise", {"host_index": 1})},
    ),
    "table-column-wise": (
        4,
        2,
        {"users": ("column_wise", {"ranks": [0, 1]}), "films": ("column_wise", {"ranks": [2, 2, 3, 3]})},
    ),
    "grid": (
        4,
        2,
        {"wide": ("grid_shard", {"host_indexes": [0, 1]}), "users": ("grid_shard", {"host_indexes": [1]})},
    ),
    "mixed": (
        4,
        2,
        {
            "wide": ("grid_shard", {"host_indexes": [1, 0]}),
            "users": ("row_wise", {}),
            "films": ("column_wise", {"ranks": [2, 0]}),
            "shops": ("table_wise", {"rank": 3}),
            "clicks": ("row_wise", {}),
        },
    ),
}


def job_of(server: ServerProcess, name: str, sharding: str, **settings: Any) -> tuple[int, int, Job]:
    world_size, local_size, shardings = SHARDINGS[sharding]
    columns = tuple(shardings) if sharding == "table-column-wise" else ()
    job = Job(
        address=server.address,
        run=name,
        module=name.replace(".", "_"),
        shardings=shardings,
        table_column_wise=columns,
        **settings,
    )
    return world_size, local_size, job


def run(world_size: int, local_size: int, job: Job) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(train_on_rank, world_size, job, local_size=local_size)
    return results


def read_all(address: str, fqns: list[str]) -> Whole:
    """Return every row of some tables, each present, with their states; a table's only one is `state`."""
    found: Whole = {}
    for fqn, rows in read_tables(address, fqns, with_states=True).items():
        assert (rows.presence == idl.RowPresence.PRESENT).all(), f"{fqn}: rows are missing"
        # FBGEMM and TorchRec have different names for it.
        states = dict(zip(["state"], rows.states.values(), strict=True)) if len(rows.states) == 1 else rows.states
        found[fqn] = {"weights": rows.weights, **states}
    return found


def check_equal(stored: Whole, trained: Whole) -> None:
    """Compare every row of all columns that the trainer has."""
    for fqn, columns in trained.items():
        assert len(columns) == len(stored[fqn]), f"{fqn}: {list(columns)} and {list(stored[fqn])}"
        for name, values in columns.items():
            found = stored[fqn]["state" if name != "weights" and "state" in stored[fqn] else name]
            assert found.shape == values.shape, f"{fqn} {name}"
            different = (_bits(found) != _bits(values)).any(axis=1).nonzero()[0]
            assert not different.size, f"{fqn} {name}: rows {different[:8].tolist()} differ"


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)


def check_progress(address: str, job: Job, results: list[dict[str, Any]], num_steps: int) -> None:
    """All ranks have counted the same steps, and the store says so of each."""
    assert [result["step"] for result in results] == [num_steps] * len(results)

    async def steps() -> list[list[int]]:
        async with await EmbeddingReader.connect(address) as reader:
            return [[c.step for c in shard.clients if c.run == job.run] for shard in await reader.status()]

    for of_shard in asyncio.run(steps()):
        assert of_shard == [num_steps] * len(results)


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [*((sharding, "row-wise-adagrad") for sharding in SHARDINGS), ("column-wise", "adagrad"), ("mixed", "adagrad")],
)
def test_sharded_tables(server: ServerProcess, sharding: str, optimizer: str) -> None:
    """Whatever the sharding, the store has every row whole: weights and the optimizer's state."""
    world_size, local_size, job = job_of(server, f"{sharding}-{optimizer}", sharding, optimizer=optimizer)
    results = run(world_size, local_size, job)
    trained = whole_tables(results)
    assert len(trained) == len(job.shardings)
    check_equal(read_all(server.address, list(trained)), trained)
    check_progress(server.address, job, results, job.num_steps)


@pytest.mark.parametrize("sharding", ["row-wise", "column-wise-4", "grid"])
def test_rows_that_wait(server: ServerProcess, sharding: str) -> None:
    """Where flushes hold rows back, a flush of each rank sends them; ranks and column shards do so on their own."""
    world_size, local_size, job = job_of(server, f"wait-{sharding}", sharding, optimizer="adagrad")
    results = run(world_size, local_size, dataclasses.replace(job, send_share=0.3))
    assert any(result["num_waiting"] for result in results)
    trained = whole_tables(results)
    check_equal(read_all(server.address, list(trained)), trained)
    check_progress(server.address, job, results, job.num_steps)


@pytest.mark.parametrize("sharding", ["table-wise", "row-wise", "column-wise-4", "grid"])
def test_states_that_wait(server: ServerProcess, sharding: str) -> None:
    """Where flushes alone send states, they are in tables of their own, split by rows and columns as the weights.

    A checkpoint of any rank names the tables of all ranks.
    """
    world_size, local_size, job = job_of(server, f"states-{sharding}", sharding, optimizer="adagrad")
    results = run(world_size, local_size, dataclasses.replace(job, states="on_flush"))
    assert any(result["num_owed"] for result in results)
    assert all(result["is_equal"] for result in results)
    parts = [part for result in results for part in result["parts"]]
    names = {part[0] for part in parts}
    assert len([part for part in parts if "@states." in part[0]]) == len(parts) / 2 > 0
    digests = sorted(map(digest_of, names))
    assert all(result["checkpoint"]["tables"] == digests for result in results)


CELLS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "table-wise": ("table_wise", {"rank": 1}),
        "row-wise": ("row_wise", {}),
        "column-wise": ("column_wise", {"ranks": [1, 0]}),
    },
    4: {
        "table-row-wise": ("table_row_wise", {"host_index": 1}),
        "table-column-wise": ("column_wise", {"ranks": [2, 3]}),
        "grid": ("grid_shard", {"host_indexes": [1, 0]}),
    },
}


@pytest.mark.parametrize("world_size", list(CELLS))
def test_each_fused_optimizer_under_each_sharding(server: ServerProcess, world_size: int) -> None:
    """Every pair of a fused optimizer of the CPU build and a sharding arrives whole; all pairs are in one model."""
    cells = {f"{one}-{optimizer}": (one, optimizer) for one in CELLS[world_size] for optimizer in (*FUSED, "averages")}
    job = Job(
        address=server.address,
        run=f"cells{world_size}",
        module=f"cells{world_size}",
        shardings={name: CELLS[world_size][sharding] for name, (sharding, _) in cells.items()},
        optimizers={name: optimizer for name, (_, optimizer) in cells.items()},
        # A grid's columns are enough for two nodes: TorchRec cuts them by 128.
        bag_tables={name: (101, 256 if sharding == "grid" else 32) for name, (sharding, _) in cells.items()},
        table_column_wise=tuple(name for name, (sharding, _) in cells.items() if sharding == "table-column-wise"),
    )
    trained = whole_tables(run(world_size, 2, job))
    assert {fqn.split(".")[-2] for fqn in trained} == set(cells)
    for fqn, columns in trained.items():
        assert len(columns) == (1 if "sgd" in fqn else 2), fqn
    check_equal(read_all(server.address, list(trained)), trained)


def test_table_and_row_without_state_on_4_ranks(server: ServerProcess) -> None:
    """A table of fewer rows than ranks leaves a rank without rows of it, and arrives whole."""
    job = Job(
        address=server.address,
        run="few-rows",
        module="few",
        shardings=everywhere("row_wise", "shops", "users"),
        optimizer="sgd",
    )
    results = run(4, 4, job)
    assert BAG_TABLES["shops"][0] == 5
    assert sorted(rows for result in results for fqn, _, rows, _, _ in result["parts"] if "shops" in fqn) == [
        0,
        1,
        2,
        2,
    ]
    trained = whole_tables(results)
    check_equal(read_all(server.address, list(trained)), trained)


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_tables_have_one_owner_a_row(server: ServerProcess, world_size: int) -> None:
    """Each row of a data-parallel table is streamed by one rank, and all ranks hold what the store has."""
    job = Job(
        address=server.address,
        run=f"data-parallel-{world_size}",
        module=f"dp{world_size}",
        shardings=everywhere("data_parallel", "users", "films", "shops"),
        optimizer="torch-adagrad",
    )
    results = run(world_size, world_size, job)
    for name in job.shardings:
        owned = sorted(
            (row, row + rows) for result in results for fqn, row, rows, _, _ in result["parts"] if f".{name}." in fqn
        )
        assert [first for first, _ in owned] == [0, *(end for _, end in owned[:-1])]
        assert owned[-1][1] == BAG_TABLES[name][0]
    trained = whole_tables(results)  # asserts that ranks are equal where they overlap, which is everywhere
    check_equal(read_all(server.address, list(trained)), trained)
    check_progress(server.address, job, results, job.num_steps)


def test_data_parallel_tables_with_each_torch_optimizer(server: ServerProcess) -> None:
    """A data-parallel table arrives whole whatever the optimizer; each has a model of its own."""
    jobs = [
        Job(
            address=server.address,
            run=f"data-parallel-{name}",
            module=f"dp_{name}",
            shardings=everywhere("data_parallel", "films"),
            optimizer=f"torch-{name}",
            bag_tables={"films": (101, 32)},
        )
        for name in optimizer_names()
    ]
    for job, results in zip(jobs, zip(*run_ranks(train_jobs_on_rank, 2, jobs), strict=True), strict=True):
        trained = whole_tables(list(results))
        if job.optimizer == "torch-lion":  # the states of an optimizer that is not known are not streamed
            for columns in trained.values():
                del columns["exp_avg"]
        check_equal(read_all(server.address, list(trained)), trained)
        check_progress(server.address, job, list(results), job.num_steps)


@pytest.mark.parametrize("has_dense_optimizer", [False, True])
def test_ranks_count_the_same_steps(server: ServerProcess, has_dense_optimizer: bool) -> None:
    """Ranks without tables, steps without a row, and a flush on one rank alone leave the ranks at one step number."""
    job = Job(
        address=server.address,
        run=f"counting-{has_dense_optimizer}",
        module=f"counting{has_dense_optimizer}",
        shardings={"users": ("table_wise", {"rank": 1})},
        has_dense_optimizer=has_dense_optimizer,
        num_steps=9,
        idle_steps=(2, 3, 7),
        flush_on_rank_0=True,
    )
    results = run(2, 2, job)
    assert [len(result["parts"]) for result in results] == [0, 1]
    check_progress(server.address, job, results, job.num_steps)
    trained = whole_tables(results)
    check_equal(read_all(server.address, list(trained)), trained)


@pytest.mark.parametrize("optimizer", ["row-wise-adagrad", "adagrad"])
def test_other_world_and_sharding_go_on_from_the_store(server: ServerProcess, optimizer: str) -> None:
    """Runs of other sizes and shardings begin with the store's rows, send what they change, and all is whole again."""
    names = ("users", "films", "clicks")
    first = Job(
        address=server.address,
        run=f"resharded-{optimizer}",
        module=f"resharded_{optimizer}",
        shardings=everywhere("column_wise", *names, ranks=[0, 1]),
        optimizer=optimizer,
    )
    plans = [
        (2, first),
        (4, dataclasses.replace(first, shardings=everywhere("row_wise", *names))),
        (1, dataclasses.replace(first, shardings=everywhere("table_wise", *names, rank=0))),
        (2, dataclasses.replace(first, shardings=everywhere("column_wise", *names, ranks=[1, 0, 1, 0]))),
    ]
    stored: Whole | None = None
    for turn, (world_size, job) in enumerate(plans):
        job = dataclasses.replace(job, seed=turn, start=stored, publish="updated" if stored else "all")
        results = run(world_size, world_size, job)
        trained = whole_tables(results)
        fqns = list(trained)
        before, stored = stored, read_all(server.address, fqns)
        if before is not None:
            assert any((before[fqn]["weights"] != stored[fqn]["weights"]).any() for fqn in fqns)
            assert any((before[fqn]["weights"] == stored[fqn]["weights"]).all(axis=1).any() for fqn in fqns)
        check_equal(stored, trained)
