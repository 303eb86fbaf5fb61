"""Checkpoints of TorchRec trainers on two ranks: brought into a server, and made of one for training to go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from offline_snapshot import snapshot_of
from ranks import run_ranks
from sharded_training import whole_tables
from table_rows import build

from headrace import cli
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

pytest.importorskip("torchrec")
from checkpoint_training import resume_on_rank, save_on_rank, start_on_rank

pytestmark = pytest.mark.torchrec


def test_training_goes_on_from_an_export(tmp_path: Path) -> None:
    """A trainer that loads an exported checkpoint goes on with the same losses as the one that never stopped."""
    results = run_ranks(start_on_rank, 2)
    rows = {}
    for fqn, columns in whole_tables(results).items():
        num_rows, dim = columns["weights"].shape
        state = StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
        spec = TableSpec(fqn=fqn, num_rows=num_rows, dim=dim, dtype=DType.FLOAT32, states=(state,))
        rows[spec] = RowChunk(
            row_ids=np.arange(num_rows, dtype=np.int64),
            columns={"weights": columns["weights"], "state:sum": columns["momentum1"]},
            epochs=1,
            steps=4,
            times_us=0,
        )
    assert len(rows) == 2
    folder = snapshot_of(build(tmp_path / "data", rows, num_shards=3), tmp_path / "snapshots")
    to = tmp_path / "checkpoint"
    arguments = ["--snapshot", str(folder), "--to", str(to), "--format", "dcp", "--with-states"]
    assert cli.main(["export", *arguments]) == 0
    resumed = run_ranks(resume_on_rank, 2, str(to))
    assert resumed == [result["losses"] for result in results]
    assert len(set(resumed[0])) > 1


def test_a_sharded_checkpoint_is_brought_in(tmp_path: Path) -> None:
    """Every row and state of a checkpoint that two ranks have saved is in the server, bit for bit."""
    results = run_ranks(save_on_rank, 2, str(tmp_path / "checkpoint"))
    expected = whole_tables(results)
    tables = [argument for fqn in expected for argument in ("--table", fqn)]
    assert cli.main(["backfill", str(tmp_path / "checkpoint"), "--data", str(tmp_path / "data"), *tables]) == 0
    with SnapshotReader(snapshot_of(tmp_path / "data", tmp_path / "snapshots")) as reader:
        for fqn, columns in expected.items():
            spec = reader.tables[fqn]
            assert [state.name for state in spec.states] == ["sum"]
            records = np.concatenate([records for _, records in reader.rows(fqn)])
            for field, name in (("weights", "weights"), ("state:sum", "momentum1")):
                assert np.ascontiguousarray(records[field]).tobytes() == columns[name].tobytes()
    (next((tmp_path / "checkpoint").glob("__1_*.distcp"))).unlink()
    assert cli.main(["backfill", str(tmp_path / "checkpoint"), "--data", str(tmp_path / "again"), *tables]) == 1
