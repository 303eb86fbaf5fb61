"""Tables whose rows are given to other ids while they train: the store has their values, states and identities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from collision_training import ROWS, Kind, train_collisions_on_rank
from equality_matrix import pairwise
from ranks import run_ranks
from stored_rows import read_rows

from headrace import cli
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl

pytestmark = [pytest.mark.torchrec]


_AXES = {"kind": ("mch", "mpzch"), "ranks": (1, 2), "is_bag": (True, False), "publish": ("all", "updated")}
_AXES["is_sharded"] = (True, False)
# Without a sharding a torch optimizer trains the table, on one rank.
_MATRIX = pairwise(_AXES, lambda ranks, is_sharded, **_: is_sharded or ranks == 1)


@pytest.mark.parametrize("row", _MATRIX, ids=lambda row: "-".join(map(str, row.values())))
def test_rows_states_and_identities(server: ServerProcess, row: dict[str, Any]) -> None:
    """After rows have changed hands, each row of the store has the values and the raw id that it has in training.

    A step sends only the rows that it changes, also when ids are evicted.
    """
    kind, ranks, is_bag, publish, is_sharded = row.values()
    optimizer = "row-wise-adagrad" if kind == "mpzch" and is_sharded else "adagrad"
    name = f"{kind}_{ranks}_{is_bag}_{publish}_{is_sharded}"
    results = run_ranks(
        train_collisions_on_rank, ranks, server.address, name, is_bag, publish, 13, 3, kind, optimizer, is_sharded
    )
    _check(server.address, results, publish)


@pytest.mark.parametrize("kind", ["mpzch-counts", "mpzch-numbers"])
def test_runtime_meta(server: ServerProcess, kind: Kind, tmp_path: Path) -> None:
    """What is kept with each raw id goes with its row: into store, export and replica.

    Numbers of the user's are on one rank: on CPUs, two exchange weights of one number an id only.
    """
    num_ranks = 2 if kind == "mpzch-counts" else 1
    results = run_ranks(
        train_collisions_on_rank, num_ranks, server.address, kind, True, "updated", 13, 3, kind, "row-wise-adagrad"
    )
    _check(server.address, results, "updated")
    fqn, width = results[0]["fqn"], 1 if kind == "mpzch-counts" else 2
    live = np.concatenate([result["states"]["runtime_meta"] for result in results])
    assert live.shape == (ROWS[kind], width)
    assert len(np.unique(live[:, 0])) > 2, "all rows have the same: the test shows nothing"
    rows = read_rows(server.address, fqn)
    is_there = rows.presence == idl.RowPresence.PRESENT
    assert not rows.states, "a read without states has none"
    to = ["--to", str(tmp_path / "out"), "--format", "parquet", "--table", fqn]
    assert cli.main(["export", "--server", server.address, *to, "--with-states"]) == 0
    exported = pq.read_table(tmp_path / "out" / f"{fqn}.parquet")
    assert exported["row_id"].to_pylist() == np.flatnonzero(is_there).tolist()
    meta = np.array(exported["state:runtime_meta"].to_pylist()).reshape(-1, width)
    assert meta.tolist() == live[is_there].tolist()
    everywhere = np.arange(ROWS[kind]).reshape(2, -1)
    with EmbeddingReplica(server.address, tables=frozenset({fqn})) as replica:
        served = replica.lookup_runtime_meta(fqn, everywhere)
    assert served.shape == (*everywhere.shape, width)
    assert served.reshape(-1, width).tolist() == np.where(is_there[:, None], live, 0).tolist()


def _check(address: str, results: list[Any], publish: str) -> None:
    assert [result["step"] for result in results] == [13] * len(results)
    assert any(result["lost_ids"] for result in results), "no row has changed hands: the test shows nothing"
    for result in results:
        num_marked, num_changed = zip(*result["marked"], strict=True)
        assert num_marked == num_changed
        assert max(num_marked[3:]) < len(result["weights"])  # MCH gives all rows to ids in step 3
    rows = read_rows(address, results[0]["fqn"], with_states=True)
    is_there = rows.presence == idl.RowPresence.PRESENT
    assert rows.identities is not None
    assert is_there.all() or publish == "updated"
    for result in results:
        local = slice(result["row_offset"], result["row_offset"] + len(result["weights"]))
        assert _equal_where(is_there[local], rows.weights[local], result["weights"])
        assert rows.states.keys() == result["states"].keys()
        for name, state in result["states"].items():
            assert _equal_where(is_there[local], rows.states[name][local], state)
    rows_of_ids = {raw: row for result in results for raw, row in result["rows_of_ids"].items()}
    stored = {int(raw): row for row, raw in enumerate(rows.identities) if is_there[row] and raw >= 0}
    assert stored == rows_of_ids
    lost = {raw for result in results for raw in result["lost_ids"]}
    assert not lost & stored.keys()
    _check_identities(address, results, rows_of_ids, sorted(lost))


def _check_identities(address: str, results: list[Any], rows_of_ids: dict[int, int], lost: list[int]) -> None:
    """Look up by identity in a replica: each raw id has the trainer's row, and a lost one has none."""
    fqn, wanted = results[0]["fqn"], [*rows_of_ids, *lost]
    weights = np.concatenate([result["weights"] for result in results])
    slots = np.array([*rows_of_ids.values()])
    with EmbeddingReplica(address, tables=frozenset({fqn})) as replica:
        assert replica.find_rows(fqn, wanted).tolist() == [*slots.tolist(), *[-1] * len(lost)]
        served = replica.lookup_by_identity(fqn, wanted).numpy()
        assert replica.num_missing.get(fqn, 0) == len(lost)
    assert served[: slots.size].tobytes() == weights[slots].tobytes()
    assert not served[slots.size :].any()


def _equal_where(is_there: Any, stored: Any, trained: Any) -> bool:
    return bool(is_there.any()) and stored[is_there].tobytes() == trained[is_there].tobytes()
