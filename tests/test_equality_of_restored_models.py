"""Models on several ranks, restored from a server or a snapshot, train on with equal losses, bit for bit.

Replicated and cut plain tables, TorchRec's tables that go on in another sharding, and whole trainers with their dense
parameters, on another number of ranks. Losses are those of a trainer of that shape that torch's own means have loaded;
and, where nothing but the process is new, those of the run that went on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equality_matrix import assert_equal_columns, cells_job
from plain_tables import go_on_with_plain_tables_on_rank
from planned_restores import plan_and_restore_on_rank
from ranks import run_ranks
from restored_dense_training import WholeJob, go_on_with_all_on_rank, stream_all_on_rank
from sharded_training import Job, everywhere, go_on_on_rank, stream_on_rank, whole_tables
from stored_rows import read_tables
from torchrec_models import FUSED

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


def snapshot_of(server: ServerProcess) -> str:
    """Make a snapshot of a server, and return its directory."""
    assert main(["snapshot", "create", "--server", server.address, "--name", "one", "--now"]) == 0
    return str(server.data_dir / "snapshots" / "one")


@pytest.mark.parametrize("world_size", [2, 4])
def test_plain_tables_on_ranks(server: ServerProcess, world_size: int) -> None:
    """Each rank reads its own rows, replicas get them from it, and all of them train on as before.

    Under DDP, `fully_shard`, and as DTensors of all placements, with each optimizer whose states are streamed.
    """
    results = run_ranks(go_on_with_plain_tables_on_rank, world_size, server.address, f"plain-{world_size}")
    for result in results:
        for restored, endless in (result["start"], result["losses"], result["end"]):
            assert_same(restored, endless)
        assert result["report"] == results[0]["report"]
    report = results[0]["report"]
    assert report.num_kept == 0
    assert {table.scalars["step"] for table in report.tables if "step" in table.scalars} == {4}


@pytest.mark.parametrize("world_size", [2, 4])
def test_plans_of_all_layouts(server: ServerProcess, world_size: int) -> None:
    """A plan says, for each layout of a DTensor, what a restore then reads, and about how long that takes."""
    num_rows, dim = 20_011, 96
    results = run_ranks(plan_and_restore_on_rank, world_size, server.address, f"plans-{world_size}", (num_rows, dim))
    for layout, found in results[0].items():
        plan = found["plan"]
        assert all(of_rank[layout]["plan"] == plan for of_rank in results)
        assert all(of_rank[layout]["is_untouched"] and of_rank[layout]["is_equal"] for of_rank in results), layout
        assert found["num_restored"] == num_rows
        (table,) = plan.tables
        rows = [row for reads in table.reads for read in reads for row in range(read.first_row, read.end_row)]
        assert sorted(rows) == list(range(num_rows)), layout
        assert sum(plan.bytes_read) == table.bytes_read == num_rows * (24 + 4 * dim)
        assert sum(found["bytes_read"]) == num_rows * (25 + 4 * dim)  # a reply has presence and version
        assert ("copies on ranks" in str(plan)) == ("R" in layout.split("-"))
        # Machines that are busy with other things are slower at one moment than at another.
        assert plan.seconds / 20 < found["seconds"] < plan.seconds * 20 + 5, layout


def test_a_large_restore_measures_first(server: ServerProcess) -> None:
    """Where ranks have much to read, they read about a hundredth of it before, and plan by what that took."""
    shape = (560_000, 96)
    results = run_ranks(plan_and_restore_on_rank, 2, server.address, "large", shape, "S1", timeout_s=400.0)
    least = shape[0] * (25 + 4 * shape[1])
    for found in (of_rank["S1"] for of_rank in results):
        assert found["is_equal"]
        assert least < sum(found["bytes_read"]) < 1.03 * least


@pytest.mark.torchrec
def test_sharded_tables_go_on_wherever(server: ServerProcess) -> None:
    """One run after the other, in other shardings and on other numbers of ranks, goes on from the store.

    Whole tables are the streamed ones, and losses those of a model that was loaded by hand. Then the store has what
    was trained on.
    """
    run = "wherever"

    def job_of(ranks: int, turn: int) -> Job:
        return dataclasses.replace(
            cells_job(run, ranks, FUSED, ("sgd", "adagrad"), turn=turn), has_dense_optimizer=False
        )

    results = run_ranks(stream_on_rank, 2, server.address, job_of(2, 0), local_size=2)
    for ranks, turn in ((2, 0), (4, 1), (3, 0), (1, 2), (2, 3)):
        start, local_size = whole_tables(results), 2 if ranks % 2 == 0 else None
        results = run_ranks(go_on_on_rank, ranks, server.address, job_of(ranks, turn), start, local_size=local_size)
        assert_same(whole_tables(results), start)
        for result in results:
            assert (result["report"].num_kept, result["report"].skipped) == (0, {})
            assert_same({part: result[part] for part in ("losses", "end")}, result["expected"])
        results = [{"shards": result["end"]} for result in results]
        stored = read_tables(server.address, [f"{run}:{fqn}" for fqn in start], with_states=True)
        for fqn, columns in whole_tables(results).items():
            assert_equal_columns(f"{fqn} on {ranks} ranks", columns, stored[f"{run}:{fqn}"])


@pytest.mark.torchrec
def test_a_model_that_does_not_fit_is_refused_on_every_rank(server: ServerProcess) -> None:
    """A table that only one rank has is named on all."""
    shardings: dict[str, Any] = {"users": ("row_wise", {}), "films": ("table_wise", {"rank": 1})}
    job = Job(run="refused", module="core", shardings=shardings)
    run_ranks(stream_on_rank, 2, server.address, job)
    wider = dataclasses.replace(job, bag_tables={"users": (1001, 32), "films": (303, 128)})
    with pytest.raises(AssertionError, match=r"SpecMismatchError: .*films.weight' differs .*: dim 128 ≠ 64"):
        run_ranks(go_on_on_rank, 2, server.address, wider)


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
        job = Job(run="moved", module="core", shardings=shardings, optimizer="adagrad")
        endless = run_ranks(stream_on_rank, world_size, server.address, job, local_size=local_size)
        world_size, local_size, shardings = _LAYOUTS[after]
        other = dataclasses.replace(job, shardings=shardings)
        for snapshot in (snapshot_of(server), None):  # from the server last: it is streamed to then
            address = server.address if snapshot is None else None
            results = run_ranks(go_on_on_rank, world_size, address, other, None, snapshot, local_size=local_size)
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


_TABLES = ("users", "shops")
_MIXED: dict[str, Any] = {"users": ("row_wise", {}), "shops": ("table_wise", {"rank": 0})}
_COLUMNS: dict[str, Any] = {"users": ("column_wise", {"ranks": [1, 0]}), "shops": ("row_wise", {})}
_ALONE, _ROWS = everywhere("table_wise", *_TABLES, rank=0), everywhere("row_wise", *_TABLES)


def check_all(job: WholeJob, world_size: int, endless: list[dict[str, Any]], *, is_same: bool) -> list[dict[str, Any]]:
    """Restore a whole trainer on so many ranks, and compare losses."""
    results = run_ranks(go_on_with_all_on_rank, world_size, job, [each["state"] for each in endless])
    for result in results:
        assert result["losses"] == result["expected_losses"]
        assert (result["report"].num_kept, result["report"].skipped) == (0, {})
        assert not result["report"].dense.without_states
        assert result["warnings"] == []
    if is_same:
        assert [each["losses"] for each in results] == [each["losses"] for each in endless]
    return results


@pytest.mark.parametrize(
    ("before", "num_before", "after", "num_after"),
    [
        *(("ddp", 2, "ddp", 2), ("ddp", 1, "ddp", 2), ("ddp", 2, "fsdp", 1)),
        *(("fsdp", 2, "fsdp", 2), ("fsdp", 1, "fsdp", 2), ("fsdp", 2, "ddp", 1), ("fsdp", 2, "plain", 1)),
    ],
)
def test_wrapped_by_torch(server: ServerProcess, before: str, num_before: int, after: str, num_after: int) -> None:
    """What one wrapper has trained goes on in the same one, in another or in none, on as many ranks, fewer and more."""
    job = WholeJob(address=server.address, name=f"{before}-{num_before}-{after}-{num_after}", kind=before)
    endless = run_ranks(stream_all_on_rank, num_before, job)
    is_same = (before, num_before) == (after, num_after)
    check_all(dataclasses.replace(job, kind=after), num_after, endless, is_same=is_same)


@pytest.mark.torchrec
@pytest.mark.parametrize(
    ("optimizer", "num_before", "before", "num_after", "after"),
    [
        ("adagrad", 2, _MIXED, 2, _MIXED),
        ("row-wise-adagrad", 2, _MIXED, 2, _MIXED),
        ("row-wise-adagrad", 2, _MIXED, 1, _ALONE),
        ("adagrad", 1, _ALONE, 2, _ROWS),
        ("row-wise-adagrad", 2, _MIXED, 2, _COLUMNS),
    ],
    ids=["same", "same-row-wise", "fewer", "more", "columns"],
)
def test_torchrec(
    server: ServerProcess, optimizer: str, num_before: int, before: Any, num_after: int, after: Any, request: Any
) -> None:
    """Under `DistributedModelParallel`, in other shardings, on as many ranks, fewer and more."""
    name = request.node.callspec.id
    job = WholeJob(address=server.address, name=name, kind="dmp", shardings=before, optimizer=optimizer)
    endless = run_ranks(stream_all_on_rank, num_before, job)
    other = dataclasses.replace(job, shardings=after)
    results = run_ranks(go_on_with_all_on_rank, num_after, other, [each["state"] for each in endless])
    for result in results:
        assert result["losses"] == result["expected_losses"]
    if after is before:
        assert [each["losses"] for each in results] == [each["losses"] for each in endless]


@pytest.mark.torchrec
def test_rowwise_states_of_column_shards_are_warned_of(server: ServerProcess) -> None:
    """Each column shard had a state of its own, of which one comes back: losses differ, and a warning says so."""
    for optimizer in ("adagrad", "row-wise-adagrad"):
        job = WholeJob(
            address=server.address,
            name=f"split-{optimizer}",
            kind="dmp",
            shardings=everywhere("column_wise", *_TABLES, ranks=[0, 1]),
            optimizer=optimizer,
        )
        endless = run_ranks(stream_all_on_rank, 2, job)
        if optimizer == "adagrad":
            check_all(job, 2, endless, is_same=True)
            continue
        results = run_ranks(go_on_with_all_on_rank, 2, job, [each["state"] for each in endless])
        losses, endless_losses = ([each["losses"] for each in of_run] for of_run in (results, endless))
        assert [of_rank[0] for of_rank in losses] == [of_rank[0] for of_rank in endless_losses]
        assert losses != endless_losses
        assert {table.repeated_states for table in results[0]["report"].tables} == {("sum",)}
        (warning,) = results[0]["warnings"]
        assert "split by columns, each part gets the rowwise states (sum) of the first columns" in warning
        assert results[1]["warnings"] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("dmp", marks=pytest.mark.torchrec)])
def test_from_a_snapshot(tmp_path: Path, kind: str) -> None:
    """A snapshot brings all of it back on another number of ranks; an object store's URL does on several."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        job = WholeJob(address=server.address, name=kind, kind=kind, shardings=_MIXED)
        endless = run_ranks(stream_all_on_rank, 2, job)
        folder = snapshot_of(server)
    alone = dataclasses.replace(job, address=None, snapshot=folder, shardings=_ALONE)
    check_all(alone, 1, endless, is_same=False)
    if kind == "fsdp":  # the way of the files is the same for all
        url = f"file://{tmp_path}/bucket"
        assert main(["snapshot", "upload", folder, url]) == 0
        check_all(dataclasses.replace(job, address=None, snapshot=url), 2, endless, is_same=True)
