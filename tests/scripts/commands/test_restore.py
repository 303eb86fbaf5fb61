"""The command `headrace restore`, where it makes a new server: what it takes, what it says, and its one-line errors."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from archived_log import archive_in, until
from command_line import CommandLine
from hellos import hello_of_writer
from log_files import flip
from offline_snapshot import snapshot_of
from resharding import rows_of
from set_embeddings import delta_of, request_of
from shard_servers import make_manifest, serve_shards

from headrace.paramserver.config.data_dir import DataDir, find_manifest
from headrace.paramserver.log.excerpt import end_log
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.tables import DType, TableSpec

ITEMS = TableSpec(fqn="items.weight", num_rows=100, dim=2, dtype=DType.FLOAT32)
OTHER = TableSpec(fqn="ctr:other.weight", num_rows=100, dim=2, dtype=DType.FLOAT32)
_FIRST_US = 1_700_000_000_000_000


async def _write(path: Path) -> None:
    """Write four steps of ten rows and one delete of each table, with an archive each as a segment of its own."""
    settings = {"server_id": "s", "object_store": f"file://{path / 'store'}", "archive_segment_s": 0.1}
    async with (
        serve_shards(path / "data", 1, **settings) as (port,),
        await ParamServerClient.connect("127.0.0.1", port) as client,
    ):
        await client.hello(hello_of_writer(ITEMS, OTHER, epoch=3))
        for step in range(1, 5):
            ids = np.arange(10 * step - 10, 10 * step)
            deltas = [
                delta_of(spec, ids, float(step), deleted_row_ids=np.array([90 + step])) for spec in (ITEMS, OTHER)
            ]
            time_us = _FIRST_US + step * 60_000_000
            reply = await client.set_embeddings(request_of(*deltas, epoch=3, client_seq=step, time_us=time_us))
            archive = archive_in(path / "store")
            await until(lambda archive=archive, seq=reply.seq: any(s.last_seq >= seq for s in archive.segments()))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the directory and the object store of a server lie."""
    path = tmp_path_factory.mktemp("written")
    (path / "store").mkdir()
    asyncio.run(_write(path))
    return path


@pytest.fixture
def source(written: Path, tmp_path: Path) -> Path:
    """A copy of its directory, which the test may change; its log has records 1 (the hello) to 5."""
    return Path(shutil.copytree(written / "data", tmp_path / "source"))


def _num_rows(data: Path, tmp_path: Path) -> dict[str, int]:
    return {fqn: len(rows) for fqn, rows in rows_of(data, tmp_path / f"{data.name} rows").items()}


def test_what_is_said(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """A dry run and the work itself say tables, rows, records, steps and times; the dry run makes nothing."""
    shutil.rmtree(source / "shard-0000" / "store")
    before = sorted(tmp_path.rglob("*"))
    dry, made = run("restore", source, "--dry-run"), run("restore", source, "--data", tmp_path / "new")
    assert [path for path in sorted(tmp_path.rglob("*")) if (tmp_path / "new") not in (path, *path.parents)] == before
    for out in (dry, made):
        for words in (
            "items.weight",
            " 40 ",
            "4 records of the log",
            "; steps 1 to 4, trainer's time 2023-11-14 22:14:20 to",
        ):
            assert words in out
        assert "shard-0000: up to record 5; all of step 4 of epoch 3.\n" in out
    assert f"{tmp_path / 'new'}: a new server of 1 shard. Next: headrace serve --data" in made
    assert "of the base, about" in run("restore", tmp_path / "new", "--dry-run"), "also of what has only a store"


def test_some_tables(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """Those of a name, a path or a model; a name that none has is told, and nothing is made."""
    run("restore", source, "--data", tmp_path / "one", "--table", "items.*", "--shards", 2)
    run("restore", source, "--data", tmp_path / "two", "--model", "ctr")
    assert _num_rows(tmp_path / "one", tmp_path) == {ITEMS.fqn: 40}
    assert _num_rows(tmp_path / "two", tmp_path) == {OTHER.fqn: 40}
    shutil.rmtree(source / "shard-0000" / "store")
    wrong = run.refused("restore", source, "--data", tmp_path / "three", "--table", "item.weight")
    assert "no such table; the nearest are 'items.weight'" in wrong
    assert not [path for path in tmp_path.iterdir() if "three" in path.name]


def test_damage_is_named_and_what_is_before_it_can_be_taken(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """A damaged record is named with file and offset, and nothing is made; `--at seq=N` takes what is before it."""
    shutil.rmtree(source / "shard-0000" / "store")
    (segment,) = (source / "shard-0000" / "log").glob("*.hrlog")
    flip(segment, segment.stat().st_size * 3 // 5)
    for mode in (["--dry-run"], ["--data", tmp_path / "new"]):
        assert f"{segment.name}: damaged at offset " in run.refused("restore", source, *mode)
    assert not (tmp_path / "new").exists()
    run("restore", source / "shard-0000", "--data", tmp_path / "new", "--at", "seq=2")
    assert _num_rows(tmp_path / "new", tmp_path) == {ITEMS.fqn: 10, OTHER.fqn: 10}
    assert "has records up to seq" in run.refused("restore", source, "--dry-run", "--at", "seq=90")


def test_a_server_that_runs_is_left_alone(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """Its directory is refused, also that of a shard or a log of it, and so is a target in the source or in use."""
    with DataDir.claim(source, num_shards=None) as held:
        held.prepare()
        (tmp_path / "link").symlink_to(source / "shard-0000")
        for path in (source, source / "shard-0000", source / "shard-0000" / "log", tmp_path / "link"):
            assert "a server is running there" in run.refused("restore", path, "--data", tmp_path / "new")
    for data in (source, source / "new", source.parent):
        assert "name another directory" in run.refused("restore", source, "--data", data)
    assert "name another directory" in run.refused("restore", source / "shard-0000", "--data", source / "new")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert "not empty" in run.refused("restore", source, "--data", tmp_path / "used")


def test_what_is_missing_is_said(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """A log without its beginning needs a store or a snapshot; no shard and no log is left out without a word."""
    made, log = tmp_path / "made", Path("shard-0000") / "log"
    run("restore", source, "--data", made)
    assert "the log begins at seq 3, and there is neither a store nor a snapshot" in run.refused(
        "restore", made / log, "--dry-run"
    )
    shutil.rmtree(made / "shard-0000" / "log")
    assert "shard-0000 (without its log): up to" in run("restore", made, "--data", tmp_path / "of-store")
    assert _num_rows(tmp_path / "of-store", tmp_path) == {ITEMS.fqn: 40, OTHER.fqn: 40}
    (source / "headrace.json").unlink()
    make_manifest(source, server_id="s", num_shards=2, log="nats")
    (source / "shard-0001").mkdir()
    wrong = run.refused("restore", source, "--dry-run")
    assert "shard-0001: nothing is left there" in wrong and "add --shard 0\n" in wrong
    out = run("restore", source, "--data", tmp_path / "some", "--shard", 0)
    assert "shard-0000 (without its log in NATS): up to record 5" in out and "a new server of 2 shards" in out
    (source / "headrace.json").unlink()
    (source / "shard-0000").rename(source / "shard-0001.old")
    assert "nothing of a server is there" in run.refused("restore", source, "--dry-run"), "a copy of before is no shard"


def test_which_snapshot_is_taken(source: Path, tmp_path: Path, run: CommandLine) -> None:
    """Where there is no log, the newest; none from behind the log's end, as of a time that was given up."""
    snapshot_of(source, source / "snapshots")
    end_log(source / "shard-0000" / "log", 3)
    shutil.rmtree(store := source / "shard-0000" / "store")
    assert "shard-0000: up to record 3;" in run("restore", source, "--dry-run")
    shutil.rmtree(source / "shard-0000" / "log")
    RowStore.open(store).close()
    assert "shard-0000 (without its log): up to record 5;" in run("restore", source, "--dry-run")


def test_from_an_object_store(written: Path, tmp_path: Path, run: CommandLine) -> None:
    """With its own shards it is the same server; with others, or with some tables, a new one; also at a record."""
    url = f"file://{shutil.copytree(written / 'store', tmp_path / 'store')}"
    assert "4 records of the log" in run("restore", url, "--dry-run")
    assert "Takes over from" in run("restore", url, "--data", tmp_path / "same", "--shards", 1)
    run("restore", url, "--data", tmp_path / "other", "--shards", 2)
    run("restore", url, "--data", tmp_path / "some", "--table", ITEMS.fqn, "--at", "seq=3")
    same, other = find_manifest(tmp_path / "same"), find_manifest(tmp_path / "other")
    assert same is not None and other is not None and same.server_id == "s" != other.server_id
    assert _num_rows(tmp_path / "other", tmp_path) == {ITEMS.fqn: 40, OTHER.fqn: 40}
    assert _num_rows(tmp_path / "some", tmp_path) == {ITEMS.fqn: 20}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{source}"], "--data DIR is missing"),
        (["{source}", "--data", "new", "--shard", "1"], "--shard 1: there is no such shard"),
        (["{source}", "--data", "new", "--log", "nats://x"], "--log goes with the same server"),
        (["{source}", "--data", "new", "--name", "one"], "--name goes with a URL"),
        (["{source}", "--dry-run", "--at", "yesterday"], "give seq=N, step=N or time="),
        (["{source}", "--dry-run", "--at", "time=0001-01-01T00:00:00+14:00"], "give seq=N, step=N or time="),
        (["{source}", "--dry-run", "--at", "seq=0"], "no record by --at seq=0: nothing to restore"),
        (["{source}", "--dry-run", "--at", "time=2001-01-01"], "has no step by then that all shards have; the oldest"),
        (["{source}", "--dry-run", "--model", "none"], "--model 'none': no table of it was left"),
        (["{source}/nowhere", "--dry-run"], "not a directory"),
        (["{source}/shard-0000/store", "--dry-run"], "nothing of a server is there: name the directory of"),
        (["file://{source}", "--dry-run"], "no server has snapshots or an archive here"),
        (["file://{source}/nowhere", "--dry-run"], "nowhere: there is no such directory"),
        (["file://{source}", "--name", "a", "--at", "step=1", "--data", "new"], "leave --name out"),
        (["ftp://x", "--dry-run"], "not a URL of an object store"),
    ],
)
def test_mistakes_are_one_line(
    source: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    """A wrong flag, a point that is none, and a place without a server each get one line."""
    monkeypatch.chdir(source.parent)
    assert words in run.refused("restore", *(argument.replace("{source}", str(source)) for argument in arguments))
