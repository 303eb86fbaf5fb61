"""`headrace expire` against real servers, and expiry through kills and in replicas."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from expiry_training import SPEC, train
from stored_rows import read_rows

from headrace.cli import main
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl

ROWS = range(1000)
RULES = "item.*: idle_steps=50"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2, expiry=RULES) as started:
        yield started


def _present(address: str, rows: range = ROWS) -> list[int]:
    presence = read_rows(address, SPEC.fqn, rows).presence.tolist()
    return [row for row, found in zip(rows, presence, strict=True) if found == 1]


def test_a_dry_run_and_a_real_one(server: ServerProcess, run: CommandLine) -> None:
    """A dry run counts the rows that would go on all shards; a real one deletes just those; a second one none."""
    asyncio.run(train(server.address, [(1, ROWS, 1.0), (100, range(10), 1.0), (200, [], 0)]))
    for arguments, expired in ((["--dry-run"], 1000), ([], 1000), ([], 0)):
        found = run.json("expire", "--server", server.address, "--table", "item.*", *arguments)
        assert (found["num_expired"], found["is_dry_run"], found["errors"]) == (expired, bool(arguments), [])
        assert found["tables"][0]["by_policy"] == ({"idle_steps": expired} if expired else {})
    assert _present(server.address) == []
    assert "Expired 1,000 rows; last run ended 20" in run("status", "--server", server.address)
    shards = run.json("status", "--server", server.address)["shards"]
    assert sum(shard["expiry"]["num_rows_expired"] for shard in shards) == 1000
    asyncio.run(train(server.address, [(201, [5, 6], 2.0), (300, [], 0)], epoch=2))
    out = run("expire", "--server", server.address, "--dry-run", "--policy", "max_rows=0")
    assert "would go" in out
    assert "max_rows 2" in out
    assert _present(server.address) == [5, 6]


def test_mistakes_are_one_line(server: ServerProcess, run: CommandLine) -> None:
    """A wrong policy or table gives one line and exit code 1."""
    asyncio.run(train(server.address, [(1, ROWS, 1.0)]))
    for arguments, says in (
        (["--policy", "ttl=1"], "--policy: 'ttl=1' is not a policy"),
        (["--table", "user.*"], "--table 'user.*': no such table on this server; "),
    ):
        assert says in run.refused("expire", "--server", server.address, *arguments)
    run("expire", "--server", server.address, "--policy", "max_rows=1")
    assert _present(server.address) == list(ROWS)  # of the only step that there is


def test_a_pass_that_runs_is_waited_for(tmp_path: Path, run: CommandLine) -> None:
    """While another pass runs on a shard the command says so, waits for it, and then does what was asked."""
    with ServerProcess.start(tmp_path / "data", expiry=RULES, expiry_rows_per_s=500) as server:
        asyncio.run(train(server.address, [(1, ROWS, 1.0), (100, range(10), 1.0), (200, [], 0)]))

        async def begin() -> bool:
            link = ShardLink(_DIAL, *parse_address(server.address))
            reply = await link.expire_rows(idl.ExpireRowsRequest(fqn="", is_dry_run=True, wait_ms=0))
            await link.close()
            return bool(reply.is_done)

        assert not asyncio.run(begin())
        assert run.json("expire", "--server", server.address)["num_expired"] == len(ROWS)
        assert run.err == f"waiting for {server.address}: an expiry pass is running on this shard\n"


def test_killed_amid_a_run(tmp_path: Path) -> None:
    """A shard that is killed during a pass loses no batch and repeats none; the next pass does the rest."""
    rows = range(60_000)
    data = tmp_path / "data"
    with ServerProcess.start(data, shards=1, expiry=RULES, expiry_rows_per_s=6000) as server:
        asyncio.run(train(server.address, [(1, rows, 1.0), (99, range(7), 2.0), (100, [], 0)]))
        host, port = server.address.rsplit(":", 1)

        async def begin_and_kill() -> None:
            link = ShardLink(_DIAL, host, int(port))
            request = idl.ExpireRowsRequest(fqn="", is_dry_run=False, wait_ms=50)
            reply = await link.expire_rows(request)
            request.run_number = reply.run_number
            async with asyncio.timeout(60):
                # With the third piece of 8192 rows the first batch is acked; the five behind it take seconds.
                while reply.expired < 20_000:
                    assert not reply.is_done
                    reply = await link.expire_rows(request)
            os.kill(server.shard_pids[0], signal.SIGKILL)
            await link.close()

        asyncio.run(begin_and_kill())
        left = _present(server.address, rows)  # waits for the shard to be back
        assert 7 < len(left) < 60_000
        assert left[:7] == list(range(7))
    with ServerProcess.start(data, expiry=RULES) as server:
        host, port = server.address.rsplit(":", 1)
        assert main(["expire", "--server", server.address, "--policy", "idle_steps=50"]) == 0
        assert _present(server.address, rows) == list(range(7))

        async def clients() -> list[tuple[str, int]]:
            link = ShardLink(_DIAL, host, int(port))
            status = await link.status()
            await link.close()
            return [(client.client, client.last_client_seq) for client in status.clients if client.run == "headrace"]

        ((name, num_batches),) = asyncio.run(clients())
        assert name == "expiry"
        assert 60_000 // 8192 <= num_batches <= 12
    with ServerProcess.start(data) as server:
        assert _present(server.address, rows) == list(range(7))


def test_replicas_agree(server: ServerProcess) -> None:
    """A replica sees expired rows go, and an updated one come back."""
    replica_module = pytest.importorskip("headrace.paramserver.replica")
    asyncio.run(train(server.address, [(1, ROWS, 1.0), (99, range(7), 2.0), (100, [], 0)]))
    with replica_module.EmbeddingReplica(server.address, missing="zeros") as replica:
        assert bool((replica.lookup(SPEC.fqn, list(ROWS))[:, 0] > 0).all())
        assert main(["expire", "--server", server.address]) == 0
        # What is visible at a later step was behind the deletions in every shard's log.
        asyncio.run(train(server.address, [(150, [500], 5.0)], epoch=2))
        replica.wait_for(150, timeout_s=60)
        expected = np.zeros(1000)
        expected[:7], expected[500] = 2.0, 5.0
        assert replica.lookup(SPEC.fqn, list(ROWS))[:, 0].tolist() == expected.tolist()


_DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)
