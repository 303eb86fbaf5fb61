"""Models on several ranks, restored from a server or a snapshot, train on with equal losses, bit for bit.

Replicated and cut plain tables on 2 and 4 ranks, and TorchRec tables that go on in another sharding, on another number
of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from replicated_training import PLACEMENTS
from restored_training import (
    go_on_with_plain_tables_on_rank,
    go_on_with_sharded_tables_on_rank,
    stream_sharded_tables_on_rank,
)
from sharded_training import Job, everywhere, whole_tables

from headrace.cli import main
from headrace.paramserver.shard.launch import ServerProcess


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare nested values bit for bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, np.ndarray):
        assert (ours.shape, ours.dtype, ours.tobytes()) == (theirs.shape, theirs.dtype, theirs.tobytes())
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "optimizer", "is_sparse"),
    [
        ("ddp", "Adam", False),
        ("ddp", "SparseAdam", True),
        ("fsdp", "Adam", False),
        *((kind, "Adam", False) for kind in ("S1", "R", "R-S0", "R-R", "strided-0", "strided-R")),
    ],
)
def test_plain_tables_on_ranks(server: ServerProcess, kind: str, optimizer: str, is_sparse: bool) -> None:
    """Each rank reads its own rows, replicas get them from it, and all of them train on as before."""
    # Sums of two gradients have one order. DDP makes its buckets anew after a first step, which changes longer sums.
    world_size = math.prod(PLACEMENTS[kind][0]) if kind in PLACEMENTS else 2
    results = run_ranks(
        go_on_with_plain_tables_on_rank, world_size, server.address, kind, optimizer, is_sparse, timeout_s=200
    )
    for result in results:
        for restored, endless in (result["start"], result["losses"], result["end"]):
            assert_same(restored, endless)
        assert result["report"] == results[0]["report"]
    report = results[0]["report"]
    assert (report.num_kept, report.num_restored) == (0, 56)
    assert all(table.scalars["step"] == 4 for table in report.tables)


FIRST: dict[str, Any] = {
    "users": ("row_wise", {}),
    "films": ("table_wise", {"rank": 1}),
    "clicks": ("table_wise", {"rank": 0}),
}


def stream(server: ServerProcess, name: str, optimizer: str = "row-wise-adagrad") -> tuple[Job, list[dict[str, Any]]]:
    """Stream a TorchRec model of 2 ranks; return the job and its ranks' results."""
    shardings = everywhere("data_parallel", "users", "films", "shops") if optimizer == "torch-adagrad" else FIRST
    job = Job(address=server.address, run=name, module="core", shardings=shardings, optimizer=optimizer, num_steps=3)
    return job, run_ranks(stream_sharded_tables_on_rank, 2, job)


def reference_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whole tables as `Job.start` takes them."""
    found = {}
    for fqn, columns in whole_tables(results).items():
        (state,) = [name for name in columns if name != "weights"]
        found[fqn] = {"weights": columns["weights"], "state": columns[state]}
    return found


@pytest.mark.torchrec
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row-wise-adagrad"])
def test_sharded_tables_go_on(server: ServerProcess, optimizer: str) -> None:
    """On as many ranks in the same sharding, nothing differs from a run that never stopped."""
    job, endless = stream(server, f"same-{optimizer}", optimizer)
    for restored, expected in zip(run_ranks(go_on_with_sharded_tables_on_rank, 2, job), endless, strict=True):
        for part in ("shards", "losses", "end"):
            assert_same(restored[part], expected[part])
        assert (restored["report"].num_kept, restored["report"].skipped) == (0, {})


@pytest.mark.torchrec
@pytest.mark.parametrize(
    ("optimizer", "world_size", "shardings"),
    [
        ("row-wise-adagrad", 3, everywhere("row_wise", *FIRST)),
        ("row-wise-adagrad", 1, everywhere("table_wise", *FIRST, rank=0)),
        ("adagrad", 2, everywhere("column_wise", *FIRST, ranks=[1, 0])),
        ("torch-adagrad", 3, everywhere("data_parallel", "users", "films", "shops")),
    ],
)
def test_another_world_and_sharding(
    server: ServerProcess, optimizer: str, world_size: int, shardings: dict[str, Any]
) -> None:
    """The whole tables are the streamed ones, and losses are those of a model that was loaded by hand."""
    job, endless = stream(server, f"{optimizer}-{world_size}", optimizer)
    other = dataclasses.replace(job, shardings=shardings, start=reference_of(endless))
    results = run_ranks(go_on_with_sharded_tables_on_rank, world_size, other)
    assert_same(whole_tables(results), whole_tables(endless))
    for result in results:
        assert_same(result["losses"], result["expected_losses"])
        assert_same(result["end"], result["expected_end"])


@pytest.mark.torchrec
def test_rowwise_states_of_a_table_split_by_columns_are_named(server: ServerProcess) -> None:
    """The store answers with one of them, which each part gets; the report says so."""
    job, endless = stream(server, "split")
    split = dataclasses.replace(job, shardings=everywhere("column_wise", *FIRST, ranks=[0, 1]))
    results = run_ranks(go_on_with_sharded_tables_on_rank, 2, split)
    assert_same(whole_tables(results), whole_tables(endless))
    assert {table.repeated_states for table in results[0]["report"].tables} == {("sum",)}


@pytest.mark.torchrec
def test_ranks_restore_from_a_snapshot(tmp_path: Path) -> None:
    """Every rank reads its rows from the snapshot's directory."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        job, endless = stream(server, "snapshot")
        assert main(["snapshot", "create", "--server", server.address, "--name", "one", "--now"]) == 0
    folder = str(tmp_path / "data" / "snapshots" / "one")
    results = run_ranks(go_on_with_sharded_tables_on_rank, 2, job, folder)
    for restored, expected in zip(results, endless, strict=True):
        assert_same(restored["losses"], expected["losses"])


@pytest.mark.torchrec
def test_a_model_that_does_not_fit_is_refused_on_every_rank(server: ServerProcess) -> None:
    """A table that only one rank has is named on all."""
    job, _ = stream(server, "refused")
    sizes = {"users": (1001, 32), "films": (303, 128)}
    wider = dataclasses.replace(job, bag_tables=sizes)
    with pytest.raises(AssertionError, match=r"films.weight' differs \(model ≠ stored\): dim 128 ≠ 64") as error:
        run_ranks(go_on_with_sharded_tables_on_rank, 2, wider)
    assert "SpecMismatchError" in str(error.value)


_NAMES = ("users", "films", "wide")
_LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "rows": (2, 2, everywhere("row_wise", *_NAMES)),
    "columns": (2, 2, everywhere("column_wise", *_NAMES, ranks=[1, 0])),
    "columns-4": (
        4,
        4,
        {
            name: ("column_wise", {"ranks": ranks})
            for name, ranks in (("users", [3, 1]), ("films", [0, 2]), ("wide", [0, 1, 2, 3]))
        },
    ),
    "grid": (
        4,
        2,
        {
            "wide": ("grid_shard", {"host_indexes": [0, 1]}),
            "users": ("row_wise", {}),
            "films": ("column_wise", {"ranks": [2, 0]}),
        },
    ),
}


@pytest.mark.torchrec
@pytest.mark.parametrize(
    ("before", "after"), [("rows", "grid"), ("columns", "columns-4"), ("columns-4", "rows"), ("grid", "columns")]
)
def test_no_byte_is_read_twice(tmp_path: Path, before: str, after: str) -> None:
    """From a layout of one world into that of another, by server and snapshot: all is equal, read once, in all."""
    world_size, local_size, shardings = _LAYOUTS[before]
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        job = Job(
            address=server.address, run="moved", module="core", shardings=shardings, optimizer="adagrad", num_steps=3
        )
        endless = run_ranks(stream_sharded_tables_on_rank, world_size, job, local_size=local_size)
        assert main(["snapshot", "create", "--server", server.address, "--name", "one", "--now"]) == 0
        world_size, local_size, shardings = _LAYOUTS[after]
        other = dataclasses.replace(job, shardings=shardings)
        for snapshot in (None, str(tmp_path / "data" / "snapshots" / "one")):
            results = run_ranks(go_on_with_sharded_tables_on_rank, world_size, other, snapshot, local_size=local_size)
            assert_same(whole_tables(results), whole_tables(endless))
            bytes_read = results[0]["report"].bytes_read
            header_bytes = 24 if snapshot is not None else 25  # of a record; of a reply: presence and version
            least = {
                name: values["weights"].shape[0] * (header_bytes + 8 * values["weights"].shape[1])
                for name, values in whole_tables(endless).items()
            }
            assert sum(bytes_read) <= 1.05 * sum(least.values())
            assert len(bytes_read) == world_size
            if after.startswith("columns"):  # those who hold columns of the same rows read as many of them each
                shares = [0.0] * world_size
                for name, size in least.items():
                    _, where = next(shardings[part] for part in name.split(".") if part in shardings)
                    for rank in where["ranks"]:
                        shares[rank] += size / len(where["ranks"])
                assert all(read <= 1.05 * share + 256 for read, share in zip(bytes_read, shares, strict=True))
