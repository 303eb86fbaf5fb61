"""The command `headrace replay`: from a directory into another, what it says first, and its one-line errors."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from archived_log import archive_in, until
from command_line import CommandLine
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from table_rows import ITEMS, build, chunk_of

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replay.source import ReplaySource
from headrace.paramserver.replay.target import ServerWriter
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
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
    """A directory of another number of shards is made and holds all rows; nothing else is left."""
    assert "44 rows written" in run("replay", source, "--data", tmp_path / "copy", "--shards", 2)
    with ServerProcess.start(tmp_path / "copy") as server:
        presence, weights = asyncio.run(_read(server.address))
    assert presence == [1] * 40 + [0] * 60
    assert weights == VALUES.tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "source"]


def test_from_an_object_store(tmp_path: Path, run: CommandLine) -> None:
    """The archive of a server whose disk is gone is replayed like its log; behind a gap only, which is said."""
    asyncio.run(_fill(tmp_path / "source", tmp_path / "store"))
    shutil.rmtree(tmp_path / "source")
    url = f"file://{tmp_path}/store"
    out = run("replay", url, "--dry-run")
    assert "5 records" not in out and "4 records" in out and "begins at" not in out
    assert "44 rows written" in run("replay", url, "--data", tmp_path / "copy")
    with ServerProcess.start(tmp_path / "copy") as server:
        presence, weights = asyncio.run(_read(server.address))
        assert presence == [1] * 40 + [0] * 60
        assert weights == VALUES.tobytes()
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


def test_a_target_that_cannot_be_made_is_told_first(
    source: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the check of a long log to hear of a directory that is in use."""

    def check(self: ReplaySource, **settings: Any) -> NoReturn:
        raise AssertionError("the log is checked")

    monkeypatch.setattr(ReplaySource, "summarize", check)
    plain, used = source.parent / "plain", source.parent / "used"
    plain.touch()
    with DataDir.claim(used, num_shards=1) as claimed:
        claimed.prepare()
        for data in (plain, used):
            assert f"--data {data}: not empty" in run.refused("replay", source, "--data", data)


def test_what_the_server_of_a_directory_says_is_told_once(source: Path, run: CommandLine) -> None:
    """A server that does not start is quoted without a front of its own."""
    run("replay", source, "--data", "/proc/nobody-can-make-this", code=1)
    assert "the server ended with exit code 1: --data" in run.err and run.err.count("error: ") == 1


def test_a_replay_that_was_cut_off_goes_on(
    source: Path, tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no directory until it is whole; the same command writes what is missing, another one begins its own."""
    put, copy = ServerWriter.put, tmp_path / "copy"
    num_left = 2

    async def cut_off(self: ServerWriter, deltas: list[Any], **version: int) -> tuple[int, int]:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise UnavailableError("cut off")
        return await put(self, deltas, **version)

    monkeypatch.setattr(ServerWriter, "put", cut_off)
    run("replay", source, "--data", copy, code=1)
    monkeypatch.undo()
    assert "cut off" in run.err and not copy.exists()
    other = run("replay", source, "--data", copy, "--from-step", 40)
    assert "11 rows written" in other and "from an earlier run" not in other
    shutil.rmtree(copy)
    assert "from an earlier run of it" in run("replay", source, "--data", copy)
    with ServerProcess.start(copy) as server:
        assert asyncio.run(_read(server.address))[1] == VALUES.tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{source}"], "say where to: --data DIR"),
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
def test_mistakes_are_one_line(source: Path, run: CommandLine, arguments: list[str], words: str) -> None:
    """A wrong flag, an unknown table, an empty range and a directory without a log each get one line."""
    assert words in run.refused("replay", *(argument.replace("{source}", str(source)) for argument in arguments))
