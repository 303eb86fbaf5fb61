"""The command `headrace replay`: from a directory into another, what it says first, and its one-line errors."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from archived_log import archive_in, until
from command_line import CommandLine
from held_ports import hold_ports
from hellos import hello_of_writer
from safetensors.numpy import save_file
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from table_rows import ITEMS, build, chunk_of

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replay.source import ReplaySource, ReplaySummary
from headrace.paramserver.replay.target import ReplayTarget, ServerWriter
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=100, dim=2, dtype=DType.FLOAT32, states=(), has_identities=False)
ROWS = np.arange(40, dtype="<i8")
VALUES = np.arange(80, dtype="<f4").reshape(40, 2)


async def _fill(path: Path, archive: Path | None = None) -> None:
    """Write four batches, with an archive each as a segment of its own."""
    settings: dict[str, Any] = {}
    if archive is not None:
        settings = {"server_id": "s", "object_store": f"file://{archive}", "archive_segment_s": 0.1}
    async with (
        serve_shards(path, 1, **settings) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        who = {"run": "run", "client": "rank0", "epoch": 3}
        await client.hello(hello_of_writer(SPEC, **who))
        for seq in range(1, 5):
            rows = slice(10 * seq - 10, 10 * seq)
            delta = delta_of(SPEC, ROWS[rows], VALUES[rows], deleted_row_ids=np.array([90 + seq], "<i8"))
            time_us = 1_700_000_000_000_000 + seq * 60_000_000
            reply = await client.set_embeddings(
                request_of(delta, **who, client_seq=seq, step=seq * 10, time_us=time_us)
            )
            if archive is not None:
                await until(lambda seq=reply.seq: any(s.last_seq >= seq for s in archive_in(archive).segments()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The directory of a stopped server with four batches of ten rows and one delete each."""
    asyncio.run(_fill(tmp_path / "source"))
    return tmp_path / "source"


async def _read(address: str) -> tuple[list[int], bytes]:
    async with await EmbeddingReader.connect(address) as reader:
        rows = await reader.get(SPEC.fqn, np.arange(100))
        return rows.presence.tolist(), rows.weights[:40].tobytes()


def test_into_a_new_directory(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """A directory of another number of shards is made and holds all rows; the same replay again sends nothing."""
    assert "44 rows sent and durable" in run("replay", source, "--data", tmp_path / "copy", "--shards", 2)
    with ServerProcess.start(tmp_path / "copy") as server:
        presence, weights = asyncio.run(_read(server.address))
        assert presence == [1] * 40 + [0] * 51 + [2] * 4 + [0] * 5
        assert weights == VALUES.tobytes()
        out = run("replay", source, "--server", server.address)
    assert "0 rows sent and durable" in out
    assert "44 rows there from an earlier run of it" in out


@pytest.mark.timeout(300)
def test_into_a_server_whose_partitions_have_moved(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """After a reshard, replay and backfill send each row to its owner, also rows that an earlier run has sent."""
    budgets = {"block_cache_bytes": "32MiB", "memtable_bytes": "16MiB"}
    with ServerProcess.start(tmp_path / "data", shards=2, **budgets):
        pass
    save_file({SPEC.fqn: np.full((100, 2), 7, "<f4")}, tmp_path / "rows.safetensors")
    with ServerProcess.start(tmp_path / "data", shards=3, **budgets) as server:
        to = ("--server", server.address)
        backfill = ("backfill", tmp_path / "rows.safetensors", *to, "--table", SPEC.fqn)
        assert "44 rows sent and durable" in run("replay", source, *to)
        assert run.json(*backfill)["tables"][0]["num_written"] == 56
        assert "All partitions have moved" in run("reshard", "start", *to, "--shards", 3, "--wait")
        assert "44 rows sent and durable" in run("replay", source, *to)
        (table,) = run.json(*backfill)["tables"]
        assert (table["num_written"], table["num_kept"], table["num_earlier"]) == (56, 44, 0)
        presence, weights = asyncio.run(_read(server.address))
    assert presence == [1] * 91 + [2] * 4 + [1] * 5
    assert weights == VALUES.tobytes()


def test_from_an_object_store(tmp_path: Path, run: CommandLine) -> None:
    """The archive of a server whose disk is gone is replayed like its log; behind a gap only, which is said."""
    asyncio.run(_fill(tmp_path / "source", tmp_path / "store"))
    shutil.rmtree(tmp_path / "source")
    url = f"file://{tmp_path}/store"
    out = run("replay", url, "--dry-run")
    assert "5 records" not in out and "4 records" in out and "begins at" not in out
    assert "44 rows sent and durable" in run("replay", url, "--data", tmp_path / "copy")
    with ServerProcess.start(tmp_path / "copy") as server:
        presence, weights = asyncio.run(_read(server.address))
        assert presence == [1] * 40 + [0] * 51 + [2] * 4 + [0] * 5
        assert weights == VALUES.tobytes()
        assert "44 rows there from an earlier run" in run("replay", url, "--server", server.address)
    assert "2 records" in run("replay", url, "--dry-run", "--shard", 0, "--from-seq", 3, "--to-seq", 4)
    for arguments, words in (
        (["--shard", 1], "--shard 1: the server at"),
        (["--from-seq", 90], "shard 0: seq 90 is not in the archive, of 1 to 5"),
        (["--table", "item.weight"], "no such table in the log"),
    ):
        assert words in run.refused("replay", url, "--dry-run", *arguments)
    assert "no server archives its log here" in run.refused("replay", f"file://{tmp_path}/other", "--dry-run")
    assert "--shard goes with a URL" in run.refused("replay", tmp_path, "--dry-run", "--shard", 0)
    assert "not a URL of an object store" in run.refused("replay", "ftp://x", "--dry-run")

    (third,) = [s for s in archive_in(tmp_path / "store").segments() if s.first_seq <= 3 <= s.last_seq]
    (tmp_path / "store" / third.path).unlink()
    # The record that registered the table is before the gap, and no snapshot knows it.
    assert run("replay", url, "--dry-run", code=1) == ""
    assert "the archive has a gap; records before 4 are not sent\n" in run.err
    assert "the spec of table 'items.weight' is neither in the log nor in the store" in run.err


def test_a_log_that_lacks_its_beginning_is_said(tmp_path: Path, run: CommandLine) -> None:
    """Rows that were there before the first record of a log are not replayed, and the summary says so."""
    source = build(tmp_path / "source", {ITEMS: chunk_of(ITEMS, range(5))}, num_shards=1)
    asyncio.run(_fill(source))
    out = run("replay", source, "--dry-run")
    assert f"{source / 'shard-0000' / 'log'} begins at seq 2: what was written before is not in it" in out
    assert ITEMS.fqn not in out
    assert "begins at" not in run("replay", source, "--dry-run", "--from-seq", 4)


def test_dry_run_says_what_it_would_do(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """`--dry-run` counts records, rows, deletes, bytes, epochs and steps of the range, and writes nothing."""
    before = sorted(path.name for path in tmp_path.rglob("*"))
    out = run("replay", source, "--dry-run", "--since", "2023-11-14T22:15:20Z", "--until", 1_700_000_180)
    assert "begins at" not in out
    for words in ("items.weight", "20", "20–30", "2 records", "of 1 log;", "2023-11-14 22:15:20 to"):
        assert words in out
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_target_that_is_not_there_is_told_first(
    source: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the check of a long log to hear of a wrong port; `--dry-run` needs no target."""
    checked: list[Path] = []
    summarize = ReplaySource.summarize

    def note(self: ReplaySource, **settings: Any) -> ReplaySummary:
        checked.append(source)
        return summarize(self, **settings)

    monkeypatch.setattr(ReplaySource, "summarize", note)
    address = f"127.0.0.1:{hold_ports()}"
    assert f"no connection to {address}" in run.refused("replay", source, "--server", address)
    assert not checked
    plain, used = source.parent / "plain", source.parent / "used"
    plain.touch()
    assert run.refused("replay", source, "--data", plain) == f"headrace: error: --data {plain}: not a directory\n"
    with DataDir.claim(used, num_shards=1) as claimed:
        claimed.prepare()
        line = run.refused("replay", source, "--data", used)
        assert f"--data {used}: a server runs in it; name that with --server" in line
    assert not checked
    assert run("replay", source, "--server", address, "--dry-run") and checked


def test_what_the_server_of_a_directory_says_is_told_once(source: Path, run: CommandLine) -> None:
    """A server that does not start is quoted without a front of its own."""
    run("replay", source, "--data", "/proc/nobody-can-make-this", code=1)
    assert "the server ended with exit code 1: --data" in run.err and run.err.count("error: ") == 1


def test_a_target_that_goes_in_the_middle_is_named(
    source: Path, tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one line that says what to do; the same replay then goes on, once the server is back."""
    put = ServerWriter.put
    with ServerProcess.start(tmp_path / "target") as server:

        async def kill_first(self: ServerWriter, deltas: list[Any], **version: int) -> tuple[int, int]:
            if server.is_running:
                await asyncio.to_thread(server.kill)
            return await put(self, deltas, **version)

        monkeypatch.setattr(ServerWriter, "put", kill_first)
        # While it is there, it may take its time to answer.
        monkeypatch.setattr(ReplayTarget, "connect_timeout_s", property(lambda _: 60.0))
        run("replay", source, "--server", server.address, "--timeout-s", 0.5, code=1)
        assert f"{server.address} has accepted nothing for 0.5 s" in run.err and run.err.count("\n") == 1
        assert "start the same command again" in run.err
    monkeypatch.undo()
    with ServerProcess.start(tmp_path / "target") as server:
        run("replay", source, "--server", server.address)
        assert asyncio.run(_read(server.address))[1] == VALUES.tobytes()


def _no_such_host(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{source}"], "say where to: --server HOST:PORT"),
        (["{source}", "--server", "127.0.0.1:1", "--data", "x"], "say where to"),
        (["{source}", "--server", "127.0.0.1:1", "--shards", "2"], "--shards goes with --data"),
        (["{source}", "--server", "127.0.0.1:70000"], "'127.0.0.1:70000' is not an address such as 127.0.0.1:7601"),
        (["{source}", "--server", "no-such-host.invalid"], "no connection to no-such-host.invalid:7601: "),
        (["{source}", "--data", "{source}/copy"], "that is where the log to replay lies"),
        (["{source}", "--dry-run", "--since", "yesterday"], "--since 'yesterday': neither ISO 8601"),
        (["{source}", "--dry-run", "--since", "0001-01-01"], "--since '0001-01-01': too far from 1970"),
        (["{source}", "--dry-run", "--from-seq", "90"], "nothing to replay"),
        (
            ["{source}", "--dry-run", "--table", "item.weight"],
            "no such table in the log; the nearest is 'items",
        ),
        (["{source}/nowhere", "--dry-run"], "not a directory"),
        (["{source}/..", "--dry-run", "--from-step", "9", "--to-step", "8"], "--from-step is above --to-step"),
    ],
)
def test_mistakes_are_one_line(
    source: Path,
    run: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    """A wrong flag, an unknown table, an empty range and a directory without a log each get one line."""
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_host)  # a resolver may take longer than anybody waits
    assert words in run.refused("replay", *(argument.replace("{source}", str(source)) for argument in arguments))
