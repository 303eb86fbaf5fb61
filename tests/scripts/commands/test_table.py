"""`headrace table` against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine
from watched_server import say_hello

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

STATE = StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
USERS = TableSpec(fqn="ctr:user.weight", num_rows=1000, dim=8, dtype=DType.FLOAT16, states=(STATE,))
ITEMS = TableSpec(fqn="ctr:item.weight", num_rows=0, dim=4, dtype=DType.FLOAT32, has_identities=True)
OTHERS = TableSpec(fqn="cvr:user.weight", num_rows=10, dim=4, dtype=DType.FLOAT32)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with ServerProcess.start(tmp_path / "data", shards=2) as started:
        asyncio.run(say_hello(started.address, [USERS, ITEMS, OTHERS]))
        yield started.address


def test_list_and_describe(server: str, run: CommandLine) -> None:
    """Tables are found by name, and by a path that one model has."""
    names = [spec.fqn for spec in (ITEMS, USERS, OTHERS)]
    assert [each["fqn"] for each in run.json("table", "list", "--server", server)] == names
    out = run("table", "list", "--server", server, "--model", "cvr")
    assert "cvr:user.weight" in out and "ctr-v7" in out and "ctr:user" not in out
    assert run("table", "list", "--server", server, "--model", "none") == (
        "No tables of model 'none'; there are 'ctr', 'cvr'.\n"
    )
    out = run("table", "describe", "item.weight", "--server", server)
    assert "rows         virtual ids\n" in out and "identities   yes\n" in out and "states       none\n" in out
    layers = [TableSpec.of_tensor(f"cvr:{n}.weight", (3, 4), DType.FLOAT16, states=()) for n in range(22)]
    asyncio.run(say_hello(server, layers))
    out = run("table", "list", "--server", server, "--model", "cvr")
    assert "cvr:user.weight" in out and "cvr:0.weight" in out and "3 × 4" in out and "cvr:9.weight" not in out
    assert out.endswith("and 2 more dense tensors, 48 B: --dense lists all\n")
    out = run("table", "list", "--server", server, "--dense")
    assert all(spec.fqn in out for spec in layers) and "more" not in out
    assert "shape        3 × 4\n" in run("table", "describe", "cvr:0.weight", "--server", server)
    found = run.json("table", "describe", "ctr:user.weight", "--server", server)
    assert (found["owner"], found["num_rows"], found["states"][0]["kind"]) == ("ctr-v7", 1000, "rowwise")


def test_grow(server: str, run: CommandLine) -> None:
    """Rows are added, never taken away; growing to the present size completes a growth."""
    for _ in range(2):
        assert run("table", "grow", "ctr:user.weight", 1200, "--server", server) == "ctr:user.weight has 1,200 rows\n"
    assert "1,200, has grown 1 time\n" in run("table", "describe", "ctr:user.weight", "--server", server)
    line = run.refused("table", "grow", "ctr:user.weight", 1199, "--server", server)
    assert "'ctr:user.weight' has 1,200 rows and cannot be given 1,199; a table never loses rows\n" in line
    line = run.refused("table", "grow", "item.weight", 5, "--server", server)
    assert line == "headrace: error: table 'ctr:item.weight' has virtual row ids and cannot be given 5\n"


def test_drop(server: str, run: CommandLine) -> None:
    """A drop is asked for, names what goes, and lets a later trainer make the table anew."""
    line = run.refused("table", "drop", "item.weight", "--server", server)
    assert line == "headrace: error: dropping tables cannot be undone: say --yes, as there is no terminal to ask\n"
    line = run.refused("table", "drop", "user.weight", "--yes", "--server", server)
    assert "several models have a table 'user.weight' (ctr, cvr)" in line
    line = run.refused("table", "drop", "item.weigth", "--yes", "--server", server)
    assert "no table 'item.weigth' on this server; " in line and "ctr:item.weight" in line
    assert len(run.json("table", "list", "--server", server)) == 3
    out = run("table", "drop", "item.weight", "ctr:user.weight", "--yes", "--server", server)
    assert out == "dropped ctr:item.weight\ndropped ctr:user.weight\n"
    assert [each["fqn"] for each in run.json("table", "list", "--server", server)] == ["cvr:user.weight"]
    line = run.refused("table", "drop", "ctr:user.weight", "--yes", "--server", server)
    assert "no table 'ctr:user.weight' on this server" in line
    wider = dataclasses.replace(USERS, dim=16)
    with pytest.raises(Exception, match=r"'ctr:user.weight' was dropped in epoch 4; a trainer that starts from now on"):
        asyncio.run(say_hello(server, [wider]))  # its epoch is that of the fixture's hello, 3
    assert "no connection to 127.0.0.1:1" in run.refused("table", "list", "--server", "127.0.0.1:1")
