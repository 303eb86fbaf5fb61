"""`headrace serve --follow` as its users meet it: commands against a follower, and one line for each mistake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from command_line import CommandLine
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from stored_rows import read_rows
from waiting import WAIT_S, wait_until
from watched_server import get, scrape, watched_server

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t.weight", num_rows=100, dim=4, dtype=DType.FLOAT32)


def _write(server: ServerProcess) -> None:
    """Write all rows, as a trainer that has gone."""

    async def write() -> None:
        async with await ParamServerClient.connect(*parse_address(server.address), timeout_s=WAIT_S) as first:
            shards = (await first.hello(hello_of_writer(SPEC))).shards
        for shard in shards:
            async with await ParamServerClient.connect(shard.host, shard.port, timeout_s=WAIT_S) as client:
                await client.hello(hello_of_writer(SPEC))
                of_shard = shards_of_rows(table_seed(SPEC.fqn), np.arange(100), len(shards)) == shard.shard
                await client.set_embeddings(request_of(delta_of(SPEC, of_shard.nonzero()[0], 3.0)))

    asyncio.run(write())


def test_commands_at_a_follower(tmp_path: Path, run: CommandLine) -> None:
    """Snapshots, audits, exports, tables and status are its own; it serves what it has without its source, too."""
    copy = tmp_path / "copy"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(tmp_path / "data", shards=2))
        _write(server)
        follower, metrics = stack.enter_context(watched_server(copy, follow=server.address))
        at = ("--server", follower.address)
        expected = read_rows(server.address, SPEC.fqn).weights.tolist()
        wait_until(lambda: read_rows(follower.address, SPEC.fqn).weights.tolist() == expected)
        assert SPEC.fqn in run("table", "list", *at)
        run("snapshot", "create", *at)
        assert len(list((copy / "snapshots").iterdir())) == 1
        run("verify", *at, "--against", server.address)
        run("export", "--to", tmp_path / "rows", "--format", "parquet", "--now", *at)
        assert any((tmp_path / "rows").rglob("*.parquet"))
        shards = json.loads(run("status", "--json", *at))["shards"]
        assert [shard["following"]["failure"] for shard in shards] == [None, None]
        assert "Follows" in run("status", *at)
        assert set(scrape(metrics)["headrace_following_up"].values()) == {1.0}
        assert get(metrics, "/status.json")[0] == 200
        server.kill()
        wait_until(lambda: set(scrape(metrics)["headrace_following_up"].values()) == {0.0})
        assert f"{server.address} has not answered for" in run("status", *at, code=None)
        follower.kill()
        with ServerProcess.start(copy, follow=server.address) as again:
            assert read_rows(again.address, SPEC.fqn).weights.tolist() == expected


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """What cannot be a follower ends with exit code 1 and says why; it leaves its directory as it is."""
    own, copy, new = (str(tmp_path / name) for name in ("own", "copy", "new"))
    with ServerProcess.start(tmp_path / "data", shards=1) as server:
        follow = f"--follow={server.address}"
        with ServerProcess.start(tmp_path / "copy", follow=server.address):
            pass
        with ServerProcess.start(tmp_path / "own", shards=1) as other:
            _write(other)
            shutil.copytree(copy, f"{copy}-2")  # so that all can start at once
            cases = {
                "which takes no updates: serve it with --follow": [f"--data={copy}"],
                "choose another --data": [f"--data={copy}-2", f"--follow={other.address}"],
                "--shards 3: the server at": [f"--data={new}", follow, "--shards=3"],
                "a follower keeps its log in files": [f"--data={new}", follow, "--log=nats://127.0.0.1"],
                "--restore: this server begins with": [f"--data={new}", follow, "--restore"],
                "follow: ": [f"--data={new}", "--follow=no:port"],
            }
            _check(cases)
        _check({"a shard with rows of its own": [f"--data={own}", follow]})
    assert not Path(new).exists()


def _check(cases: dict[str, list[str]]) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "--port=0"]
    started = [subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) for flags in cases.values()]
    for says, process in zip(cases, started, strict=True):
        with process:
            _, told = process.communicate(timeout=WAIT_S)
        assert says in told and process.returncode == 1, (says, process.returncode, told)
        assert "Traceback" not in told
