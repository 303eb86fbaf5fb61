"""Copies of a table on several ranks: an audit says equal only if all are, and training warns of some that drift."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from drifting_training import NUM_ROWS, drift_of_dtensor_on_rank, drift_on_rank, thaw_on_rank
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer.copies import CopyWatch
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.world import SoloWorld

LOGGER = "headrace.streamer.copies"


def test_copies_under_data_parallel_that_drift(server: ServerProcess) -> None:
    """Where a loop calls the module inside the wrapper, a rank soon warns, and the audit names table, ranks, rows."""
    found = run_ranks(drift_on_rank, 2, server.address)
    for drift in found:
        assert drift.equal
        assert not drift.drifted
        ((fqn, ranks, differing, rows),) = drift.copies
        assert (fqn, ranks, differing) == ("t.weight", (0, 1), (1,))
        assert rows[0] >= 1_000
        assert len(rows) == 20
        assert list(rows) == sorted(set(rows))
        assert "ranks 0, 1 should have the same rows, and rank 1 has not those of rank 0" in drift.text
    warned = [line for drift in found for line in drift.warnings]
    assert warned
    assert all("table t.weight: the copies on ranks" in line for line in warned)
    assert all(len(drift.warnings) <= 1 for drift in found)


def test_copies_of_a_dtensor(server: ServerProcess) -> None:
    """Ranks that replicate a shard are compared with one another: one changed value is found, to the row."""
    found = run_ranks(drift_of_dtensor_on_rank, 4, server.address)
    row = NUM_ROWS // 2 + 7
    for drift in found:
        assert drift.equal
        assert not drift.drifted
        assert drift.copies == [("t.weight", (1, 3), (3,), (row,))]


def test_a_frozen_table_under_data_parallel(server: ServerProcess) -> None:
    """A table that was frozen when its copies were made is not streamed once it is trained, and no audit says equal."""
    for unstreamed, is_equal in run_ranks(thaw_on_rank, 2, server.address):
        assert unstreamed == ["b.t.weight"]
        assert not is_equal


class Notes(SoloWorld):
    """Rank 0 of two; the other one leaves the notes that a test puts here."""

    size = 2

    def __init__(self) -> None:
        self.own: list[dict[str, Any]] = []
        self.other: str | None = None
        self.is_gone = False

    def leave_note(self, name: str, text: str) -> list[str | None]:
        if self.is_gone:
            raise RuntimeError("connection reset")
        self.own.append(json.loads(text))
        return [text, self.other]


def copy_of(rows: torch.Tensor) -> TableCopy:
    return TableCopy(fqn="m: t.weight", ranks=(0, 1), runs=((0, len(rows)),), tensors=lambda: [rows])


@pytest.mark.parametrize("num_rows", [10, 100_000])
def test_a_watch_compares_what_both_had_at_a_step(num_rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """Notes of a step that this rank has not had are passed over; a difference is told once, and ends the watch."""
    caplog.set_level(logging.WARNING, LOGGER)
    world, rows = Notes(), torch.arange(num_rows * 2, dtype=torch.float32).view(num_rows, 2)
    watch = CopyWatch(world, "run")
    for step in range(1, 5):
        watch.on_step(step, lambda: [copy_of(rows)])
    assert [note["step"] for note in world.own] == [1, 2, 4]
    assert len({str(note["sample"]) for note in world.own}) == (1 if num_rows == 10 else 3)
    world.other = json.dumps(world.own[1])  # some steps behind, and equal
    watch.on_step(8, lambda: [copy_of(rows)])
    world.other = json.dumps({"step": 512, "sample": {"m: t.weight ((0, 1), 0, 0)": 1}})  # ahead
    watch.on_step(16, lambda: [copy_of(rows)])
    assert not caplog.messages
    world.other = json.dumps({"step": 16, "sample": {"m: t.weight ((0, 1), 0, 0)": 1}})
    watch.on_step(32, lambda: [copy_of(rows)])
    watch.on_step(64, lambda: [copy_of(rows)])
    assert len(caplog.messages) == 1
    assert "table m: t.weight: the copies on ranks 0 and 1 differ" in caplog.messages[0]
    assert [note["step"] for note in world.own][-1] == 32


def test_a_watch_ends_with_the_place_for_notes(caplog: pytest.LogCaptureFixture) -> None:
    """When the store of the process group is gone, training goes on, and audits alone compare."""
    caplog.set_level(logging.INFO, LOGGER)
    world = Notes()
    world.is_gone = True
    watch = CopyWatch(world, "run")
    watch.on_step(1, lambda: [copy_of(torch.zeros(3, 1))])
    watch.on_step(2, lambda: pytest.fail("nothing is compared any more"))
    assert caplog.messages == ["copies of tables are compared in audits only: connection reset"]


def test_no_copies_cost_no_note() -> None:
    """A rank without copies leaves no note, and a run of one rank looks for none."""
    world = Notes()
    CopyWatch(world, "run").on_step(1, list)
    CopyWatch(SoloWorld(), "run").on_step(1, lambda: pytest.fail("one rank has no copies"))
    assert not world.own


def test_rows_of_several_runs_have_global_ids() -> None:
    """A copy of a strided shard names rows by their place in the whole table."""
    copy = TableCopy(fqn="t", ranks=(0,), runs=((10, 2), (30, 3)), tensors=list)
    assert copy.num_rows == 5
    assert copy.row_ids(range(1, 4)).tolist() == [11, 30, 31]
    assert copy.row_ids(range(0, 0)).dtype == np.int64
