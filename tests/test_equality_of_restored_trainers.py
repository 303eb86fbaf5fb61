"""Tables and dense parameters, restored together into another number of ranks or sharding, train on with equal losses.

Losses are those of a trainer of that shape that torch's own means have loaded; and, where nothing but the process is
new, those of the run that went on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from restored_dense_training import WholeJob, go_on_with_all_on_rank, stream_all_on_rank
from sharded_training import everywhere

from headrace.cli import main
from headrace.paramserver.shard.launch import ServerProcess

_TABLES = ("users", "shops")
_FIRST: dict[str, Any] = {"users": ("row_wise", {}), "shops": ("table_wise", {"rank": 0})}


def check(job: WholeJob, world_size: int, endless: list[dict[str, Any]]) -> None:
    """Restore a run on so many ranks, and compare losses."""
    results = run_ranks(go_on_with_all_on_rank, world_size, job, [each["state"] for each in endless])
    for result in results:
        assert result["losses"] == result["expected_losses"]
        assert (result["report"].num_kept, result["report"].skipped) == (0, {})
        assert not result["report"].dense.without_states
    if world_size == len(endless):
        assert [each["losses"] for each in results] == [each["losses"] for each in endless]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_replicated_and_sharded_by_torch(server: ServerProcess, kind: str, before: int, after: int) -> None:
    """Under DDP and `fully_shard`, on as many ranks, fewer and more."""
    job = WholeJob(address=server.address, name=f"{kind}-{before}-{after}", kind=kind)
    check(job, after, run_ranks(stream_all_on_rank, before, job))


@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "plain")])
def test_wrapped_otherwise(server: ServerProcess, before: str, after: str) -> None:
    """What one wrapper has trained goes on in another one, or in none."""
    job = WholeJob(address=server.address, name=f"{before}-{after}", kind=before)
    endless = run_ranks(stream_all_on_rank, 2, job)
    other = dataclasses.replace(job, kind=after)
    results = run_ranks(go_on_with_all_on_rank, 1, other, [each["state"] for each in endless])
    assert results[0]["losses"] == results[0]["expected_losses"]


@pytest.mark.torchrec
@pytest.mark.parametrize("optimizer", ["adagrad", "row-wise-adagrad"])
@pytest.mark.parametrize(
    ("before", "after", "shardings"),
    [
        (2, 2, _FIRST),
        (2, 1, everywhere("table_wise", *_TABLES, rank=0)),
        (1, 2, everywhere("row_wise", *_TABLES)),
        (2, 2, {"users": ("column_wise", {"ranks": [1, 0]}), "shops": ("row_wise", {})}),
    ],
    ids=["same", "fewer", "more", "columns"],
)
def test_torchrec(
    server: ServerProcess, optimizer: str, before: int, after: int, shardings: dict[str, Any], request: Any
) -> None:
    """Under `DistributedModelParallel`, in other shardings, on as many ranks, fewer and more."""
    first = _FIRST if before == 2 else everywhere("table_wise", *_TABLES, rank=0)
    job = WholeJob(
        address=server.address, name=request.node.callspec.id, kind="dmp", shardings=first, optimizer=optimizer
    )
    endless = run_ranks(stream_all_on_rank, before, job)
    other = dataclasses.replace(job, shardings=shardings)
    results = run_ranks(go_on_with_all_on_rank, after, other, [each["state"] for each in endless])
    for result in results:
        assert result["losses"] == result["expected_losses"]
    if shardings == first:
        assert [each["losses"] for each in results] == [each["losses"] for each in endless]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("dmp", marks=pytest.mark.torchrec)])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2)])
def test_states_that_went_out_with_the_flush(server: ServerProcess, kind: str, before: int, after: int) -> None:
    """From tables of their own, on as many ranks and on more; in TorchRec also in other columns."""
    first = _FIRST if before == 2 else everywhere("table_wise", *_TABLES, rank=0)
    job = WholeJob(address=server.address, name=f"late-{kind}-{before}", kind=kind, shardings=first, states="on_flush")
    endless = run_ranks(stream_all_on_rank, before, job)
    then = job
    if before == 1:
        columns = {"users": ("column_wise", {"ranks": [1, 0]}), "shops": ("row_wise", {})}
        then = dataclasses.replace(job, shardings=columns)
    results = run_ranks(go_on_with_all_on_rank, after, then, [each["state"] for each in endless])
    for result in results:
        assert result["losses"] == result["expected_losses"]
        assert any(table.states is not None and table.states.num_restored for table in result["report"].tables)
        assert result["warnings"] == []


@pytest.mark.torchrec
def test_rowwise_states_of_column_shards_are_warned_of(server: ServerProcess) -> None:
    """Each column shard had a state of its own, of which one comes back: losses differ, and a warning says so."""
    split = everywhere("column_wise", *_TABLES, ranks=[0, 1])
    for optimizer in ("adagrad", "row-wise-adagrad"):
        job = WholeJob(
            address=server.address, name=f"split-{optimizer}", kind="dmp", shardings=split, optimizer=optimizer
        )
        endless = run_ranks(stream_all_on_rank, 2, job)
        results = run_ranks(go_on_with_all_on_rank, 2, job, [each["state"] for each in endless])
        losses, endless_losses = ([each["losses"] for each in of_run] for of_run in (results, endless))
        if optimizer == "adagrad":
            assert losses == endless_losses
            assert results[0]["warnings"] == []
        else:
            assert [of_rank[0] for of_rank in losses] == [of_rank[0] for of_rank in endless_losses]
            assert losses != endless_losses
            (warning,) = results[0]["warnings"]
            assert "split by columns, each part gets the rowwise states (sum) of the first columns" in warning
            assert results[1]["warnings"] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("dmp", marks=pytest.mark.torchrec)])
def test_from_a_snapshot(tmp_path: Path, kind: str) -> None:
    """A snapshot brings all of it back on another number of ranks; an object store's URL does on several."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        job = WholeJob(address=server.address, name=kind, kind=kind, shardings=_FIRST)
        endless = run_ranks(stream_all_on_rank, 2, job)
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
    folder = str(tmp_path / "data" / "snapshots" / "one")
    alone = dataclasses.replace(
        job, address=None, snapshot=folder, shardings=everywhere("table_wise", *_TABLES, rank=0)
    )
    check(alone, 1, endless)
    if kind == "fsdp":  # the way of the files is the same for all
        url = f"file://{tmp_path}/bucket"
        assert main(["snapshot", "upload", folder, url]) == 0
        check(dataclasses.replace(job, address=None, snapshot=url), 2, endless)
