"""`headrace status`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import CommandLine
from hellos import hello_of_writer
from metric_samples import state
from watched_server import say_hello

from headrace.paramserver.observe.problems import find_problems
from headrace.paramserver.observe.sample import (
    ArchiveSample,
    FollowerSample,
    ShardSample,
    ShardState,
    WriterSample,
    merge_tables,
)
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.commands import status

WAIT_S = 60.0
SPEC = TableSpec(
    fqn="user[red].weight",
    num_rows=1_000_000,
    dim=8,
    dtype=DType.FLOAT16,
    states=(StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("status") / "data", shards=2) as running:
        asyncio.run(_say_hello_as_writer(running.address))
        yield running


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)


async def _say_hello_as_writer(address: str) -> None:
    request = hello_of_writer(SPEC, run="ctr-v7", epoch=3)
    async with await ParamServerClient.connect(*parse_address(address, default_port=0), timeout_s=WAIT_S) as client:
        shards = (await client.hello(request, timeout_s=WAIT_S)).shards
    for shard in shards:
        async with await ParamServerClient.connect(shard.host, shard.port, timeout_s=WAIT_S) as client:
            await client.hello(request, timeout_s=WAIT_S)


def test_json(server: ServerProcess, run: CommandLine) -> None:
    """The JSON object has every shard, table and writer."""
    status = run.json("status", "--server", server.address)
    assert [shard["pid"] for shard in status["shards"]] == server.shard_pids
    assert all(shard["error"] is None and shard["log_seq"] == 1 for shard in status["shards"])
    assert status["tables"] == [
        {
            "fqn": SPEC.fqn,
            "model": "default",
            "path": SPEC.fqn,
            "owner": "ctr-v7",
            "has_owner_ended": False,
            "num_rows": 1_000_000,
            "dim": 8,
            "dtype": "float16",
            "states": [{"name": "momentum1", "kind": "rowwise", "dtype": "float32", "width": 1}],
            "has_identities": False,
            "num_rows_estimate": 0,
            "lacks": None,
        }
    ]
    (writer,) = status["writers"]
    assert (writer["run"], writer["client"], writer["epoch"], writer["step"]) == ("ctr-v7", "rank0", 3, -1)
    assert writer.keys() == {field.name for field in dataclasses.fields(WriterSample)}  # as on the status page


def test_dense_part_is_one_line(tmp_path: Path, run: CommandLine) -> None:
    """All dense tensors of a model are one line and one JSON object, on however many shards; tables stand alone."""
    tensors = [TableSpec.of_tensor(f"ctr:top.{n}.weight", (n, 600), DType.FLOAT32) for n in (1, 2, 3)]
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        asyncio.run(say_hello(server.address, [SPEC, *tensors], run="[b]ctr"))
        status = run.json("status", "--server", server.address)
        size_bytes = (600 + 2 * 1024 + 2 * 1024) * 4
        assert status["dense"] == [{"model": "ctr", "num_tensors": 3, "size_bytes": size_bytes, "owner": "[b]ctr"}]
        assert [table["fqn"] for table in status["tables"]] == [SPEC.fqn]
        text = run("status", "--server", server.address)
        assert "Dense part of ctr: 3 tensors, 18.3 KiB, owner [b]ctr\n" in text
        problems, _, others = text.partition("\nShards")
        assert "3 of 3 tensors have no values" in problems and "top.1.weight" not in others


def test_screen(server: ServerProcess, run: CommandLine) -> None:
    """The screen shows shards, tables with their specs, and writers; names are shown unchanged."""
    text = run("status", "--server", server.address)
    for pid in server.shard_pids:
        assert str(pid) in text
    for word in ("user[red].weight", "1,000,000", "float16", "momentum1 float32[1]", "ctr-v7", "rank0", "2 shards"):
        assert word in text


def test_watched_on_a_terminal(server: ServerProcess, run: CommandLine) -> None:
    """`--watch` fits 80 columns, goes on until Ctrl-C, and leaves the terminal as it was; without one it is refused."""
    assert "--watch: it is for a terminal" in run.refused("status", "--watch", "--server", server.address)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace", "status", "--watch", "--server", server.address]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    # Where a shell runs the suite in the background, processes would inherit that they ignore it.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = termios.tcgetattr(theirs)
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
            try:
                shown = _read_until(ours, "rows/s")
                process.send_signal(signal.SIGINT)
                shown += _read_until(ours, "\x1b[?1049l")
                assert process.wait(WAIT_S) == 130
            finally:
                process.kill()
        assert termios.tcgetattr(theirs) == before
    finally:
        signal.signal(signal.SIGINT, interrupt)
        os.close(ours)
        os.close(theirs)
    assert "Traceback" not in shown
    assert server.address in shown  # on one line
    assert "No room for in flight" in shown


def _read_until(fd: int, word: str) -> str:
    shown, deadline_s = "", time.monotonic() + WAIT_S
    while word not in shown:
        ready, _, _ = select.select([fd], [], [], max(deadline_s - time.monotonic(), 0))
        assert ready, f"{word!r} was not shown, but {shown}"
        shown += os.read(fd, 65536).decode(errors="replace")
    return shown


def _patient_but_with(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every call a long timeout, except a hello at one port: the others may be slow on a busy machine."""
    connect, status = Dial.connect, ParamServerClient.status

    async def dial(self: Dial, host: str, at: int, **more: Any) -> Any:
        return await connect(self if at == port else dataclasses.replace(self, timeout_s=WAIT_S), host, at, **more)

    monkeypatch.setattr(Dial, "connect", dial)
    monkeypatch.setattr(ParamServerClient, "status", lambda client, **_: status(client, timeout_s=WAIT_S))


def test_shard_that_does_not_answer(server: ServerProcess, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that hangs is shown in time, the others normally, and the exit code is 1."""
    status = run.json("status", "--server", server.address)
    _patient_but_with(parse_address(status["shards"][1]["address"], default_port=0)[1], monkeypatch)
    hanging = psutil.Process(server.shard_pids[1])
    hanging.suspend()
    try:
        status = run.json("status", "--server", server.address, "--timeout-s", 0.5, code=1)
        assert status["shards"][0]["error"] is None
        assert "no answer within 0.5 s" in status["shards"][1]["error"]
        assert status["shards"][1]["pid"] is None
        out = run("status", "--server", server.address, "--timeout-s", 0.5, code=1)
        assert "shard 1 does not answer: hello to" in out
    finally:
        hanging.resume()


def test_followers_are_shown_the_oldest_first(monkeypatch: pytest.MonkeyPatch, run: CommandLine) -> None:
    """Each follower of each shard is a line and a JSON object: how far it is behind, or that it is current."""
    shop = FollowerSample(name="shop[red]", address="10.0.0.3:5000", records_behind=2, age_s=1.25)
    other = FollowerSample(name="", address="10.0.0.4:5000", records_behind=0)
    states = [state(followers=(other,)), state(shard=1, followers=(shop,))]

    async def ask(_: Any) -> list[ShardState]:
        return states

    monkeypatch.setattr(status, "ask_shards", ask)
    found = re.search(r"^Followers *\n.*\n(.*)\n(.*)\n", run("status"), re.MULTILINE)
    assert found is not None
    assert found[1].split() == ["shop[red]", "10.0.0.3:5000", "1", "2", "records", "1.2", "s"]
    assert found[2].split() == ["unnamed", "10.0.0.4:5000", "0", "current"]
    assert [
        (told["name"], told["shard"], told["records_behind"], told["age_s"]) for told in run.json("status")["followers"]
    ] == [
        ("shop[red]", 1, 2, 1.25),
        ("", 0, 0, None),
    ]
    states[:] = [state(followers=())]
    assert "No replica, follower or standby is connected." in run("status")


def test_replicated_logs_are_one_line() -> None:
    """Who leads the streams, how many standbys there are and how far they are behind; nothing without such a log."""
    sample = state().sample
    assert sample is not None and sample.log is not None
    ahead = dataclasses.replace(sample, log_seq=1234)
    alone = dataclasses.replace(sample, log=dataclasses.replace(sample.log, leader=None, standbys=()))
    assert status._describe_log([ahead, sample]) == (
        "The log is in NATS, led by n1. 2 standbys, at most 1,225 records behind."
    )
    assert status._describe_log([alone]) == "No server leads the log. No standbys."
    assert status._describe_log([dataclasses.replace(sample, log=None)]) == ""


def test_an_archive_is_behind_once_it_is_late() -> None:
    """A record that waits for its part, however long a part may wait, is no delay; nor is it a problem."""
    sample = state().sample
    assert sample is not None
    for behind_s, segment_s, says in (
        (0.0, 10.0, "All of the log is archived."),
        (6.75, None, "The log is archived but for the newest 2.0 KiB, which the next part brings."),
        (301.0, 300.0, "The log is archived but for the newest 2.0 KiB, which the next part brings."),
        (61.0, None, "The archive is 61 s and 2.0 KiB behind."),
    ):
        archive = ArchiveSample(
            archived_seq=1, behind_bytes=2048 if behind_s else 0, behind_s=behind_s, segment_s=segment_s
        )
        assert status._describe_archive([dataclasses.replace(sample, archive=archive)]) == says
        told = [problem.text for problem in find_problems([state(archive=archive)])]
        assert any("the archive is" in text for text in told) == ("behind" in says), told


def test_no_more_rows_than_a_table_has() -> None:
    """Rows that are counted twice never exceed the table's size; virtual ids have no limit."""
    virtual = dataclasses.replace(SPEC, fqn="virtual", num_rows=0)
    tables = [idl.TableStatus(spec=spec_to_idl(spec), num_rows_estimate=600_000) for spec in (SPEC, virtual)]
    samples = [ShardSample.of_reply(idl.StatusReply(tables=tables, clients=[])) for _ in range(2)]
    assert [table.num_rows_estimate for table in merge_tables(samples)] == [1_000_000, 1_200_000]


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:1", "no connection to 127.0.0.1:1"), ("nonsense:port", "'nonsense:port' is not an address")],
)
def test_nobody_there(address: str, problem: str, run: CommandLine) -> None:
    """An address without a server is one line and exit code 1."""
    assert problem in run.refused("status", "--server", address)


def test_the_server_may_be_in_the_environment(
    server: ServerProcess, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEADRACE_SERVER names the server that no flag names; an error of its value names it."""
    monkeypatch.setenv("HEADRACE_SERVER", server.address)
    assert run.json("status")["shards"][0]["address"] == server.address
    assert "no connection to 127.0.0.1:1" in run.refused("status", "-s", "127.0.0.1:1")
    assert "'' is not an address" in run.refused("status", "--server=")
    monkeypatch.setenv("HEADRACE_SERVER", "nonsense:port")
    assert "environment variable HEADRACE_SERVER: 'nonsense:port' is not an address" in run.refused("status")


@pytest.mark.parametrize("words", [["status"], ["promote"]])
def test_an_address_without_its_flag_is_refused(words: list[str], run: CommandLine) -> None:
    """One line says which flag an address has."""
    assert "(127.0.0.1:1); a server's address goes with --server" in run.refused(*words, "127.0.0.1:1", code=2)


def test_token(tmp_path: Path, run: CommandLine) -> None:
    """A server with a token refuses a client without it, in one line."""
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length\n")
    file.chmod(0o600)
    with ServerProcess.start(tmp_path / "data", token_file=file) as server:
        assert "token is required" in run.refused("status", "--server", server.address)
        text = run("status", "--server", server.address, "--token-file", file)
        assert re.search(r"has refused since its start: 1 requests or connections, the last [0-9.]+ s ago", text)
