"""The command `headrace backfill`: rows of files in a server and in a new directory, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import CommandLine
from file_modes import open_to_others
from safetensors.numpy import save_file
from stored_rows import read_rows
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, snapshot, values_of

from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.new_data_dir import StoreBuilder
from headrace.schemas.extras import install_command
from headrace.scripts.table_io.sending import RowPace
from headrace.scripts.table_io.server_writer import ServerWriter


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server of two shards with nothing in it."""
    with ServerProcess.start(tmp_path / "server", shards=2) as running:
        yield running


@pytest.fixture
def parquet(tmp_path: Path, run: CommandLine) -> Path:
    """Files of three tables, with versions of epoch 3 and steps 0 to 6."""
    hashed = np.unique(np.random.default_rng(0).integers(0, 2**60, 100))
    rows = {
        ITEMS: chunk_of(ITEMS, np.arange(0, 500, 2)),
        USERS: chunk_of(USERS, np.arange(300)),
        VIRTUAL: chunk_of(VIRTUAL, hashed),
    }
    folder = snapshot(tmp_path, rows)
    run("export", "--snapshot", folder, "--to", tmp_path / "files", "--format", "parquet", "--with-states")
    return tmp_path / "files"


def _read(server: ServerProcess, fqn: str, ids: Any) -> Rows:
    return read_rows(server.address, fqn, ids, with_states=True, with_versions=True)


def _report(run: CommandLine, *arguments: object) -> dict[str, Any]:
    report = run.json("backfill", *arguments)
    return {table.pop("fqn"): table for table in report["tables"]} | {"report": report}


def test_into_a_server(parquet: Path, server: ServerProcess, run: CommandLine) -> None:
    """Every row arrives with values and identity, in one epoch; the same again sends nothing."""
    report = _report(run, parquet, "--server", server.address)
    assert report[ITEMS.fqn] | {"from": ""} == {
        **{"from": "", "num_rows": 250, "num_written": 250, "num_refused": 0, "num_earlier": 0}
    }
    ids = np.arange(0, 500, 2)
    rows = _read(server, ITEMS.fqn, ids)
    assert rows.weights.tobytes() == values_of(ITEMS, ids)["weights"].tobytes()
    assert rows.states["exp_avg"].tobytes() == values_of(ITEMS, ids)["state:exp_avg"].tobytes()
    assert rows.epochs is not None
    assert rows.steps is not None
    assert set(zip(rows.epochs.tolist(), rows.steps.tolist(), strict=True)) == {(1, 0)}
    assert _read(server, ITEMS.fqn, [8, 9, 100]).presence.tolist() == [1, 0, 1]
    assert _read(server, USERS.fqn, [11]).identities == [31 * 11 + 5]
    again = _report(run, parquet, "--server", server.address)
    assert (again[ITEMS.fqn]["num_written"], again[ITEMS.fqn]["num_earlier"]) == (0, 250)
    (shown,) = run.json("table", "list", "--server", server.address)[:1]
    assert (shown["owner"].startswith("backfill-"), shown["has_owner_ended"]) == (True, True)
    assert _report(run, parquet, "--server", server.address, "--again")[ITEMS.fqn]["num_earlier"] == 0
    assert (_read(server, ITEMS.fqn, ids).epochs == 2).all()


def test_tables_that_the_server_does_not_have_are_told(parquet: Path, server: ServerProcess, run: CommandLine) -> None:
    """Beside others a table that is new to the server may be one whose name is misspelled: it is named."""
    arguments = ["backfill", parquet, "--server", server.address]
    run(*arguments, "--table", ITEMS.fqn)
    assert "new to the server" not in run.err
    run(*arguments, "--map", f"{ITEMS.fqn}=sparse.itms.weight", "--table", "sparse.itms.weight")
    assert "headrace: new to the server: sparse.itms.weight\n" in run.err


def test_a_pattern_chooses_tables(tmp_path: Path, run: CommandLine) -> None:
    """Of a file without notes a pattern takes each table that it means, with its states, and nothing else."""
    tensors = {"user.a": (6, 4), "user.a/exp_avg": (6, 4), "user.b": (5, 2), "top.weight": (3, 3)}
    save_file({name: np.ones(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "t.safetensors")
    arguments = ("backfill", tmp_path / "t.safetensors", "--data", tmp_path / "new", "--dry-run")
    assert [each["fqn"] for each in run.json(*arguments, "--table", "user.*")["tables"]] == ["user.a", "user.b"]
    line = run.refused(*arguments, "--table", "user.*", "--table", "usr.*")
    assert "--table 'usr.*': no such table" in line


def test_a_checkpoint_of_a_whole_model(tmp_path: Path, run: CommandLine) -> None:
    """What a rule with `*` matches and is no table, or looks like none, is left out by name; `--table` chooses."""
    shapes = {
        **{"model.user.weight": (50, 8), "model.top.weight": (4, 8), "model.top.bias": (4,)},
        **{"model.mix.in_proj_weight": (24, 8), "model.mix.in_proj_bias": (24,), "model.last.weight": (1, 8)},
        "model.opt.0.state.0.exp_avg": (50, 8),
    }
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "m.safetensors")
    arguments = ("backfill", tmp_path / "m.safetensors", "--data", tmp_path / "new", "--dry-run")
    told = run.json(*arguments, "--map", "model.*=*")
    assert [each["fqn"] for each in told["tables"]] == told["guessed"] == ["last.weight", "user.weight"]
    assert told["left_out"] == ["model.mix.in_proj_bias", "model.top.bias"]
    of_layers = ["model.mix.in_proj_weight", "model.top.weight"]
    assert sorted(told["not_taken"]) == [of_layers[0], "model.opt.0.state.0.exp_avg", of_layers[1]]
    assert "dense tensors model.mix.in_proj_bias, model.top.bias\n" in run.err
    assert all(f"{name}" in run.err for name in (*told["not_taken"], *told["guessed"]))
    told = run.json(*arguments, "--map", "model.*=*", "--map", "model.top.weight=top.weight")
    assert "top.weight" in {each["fqn"] for each in told["tables"]} - set(told["guessed"])
    found = run.json(*arguments, "--map", "model.*=*", "--table", "user.weight")["tables"]
    assert [each["fqn"] for each in found] == ["user.weight"]
    ones = torch.ones(5, 2)
    torch.save({"model": {"user.weight": ones}, "opt": [{"state": {0: {"sum": ones}}}]}, tmp_path / "m.pt")
    of_list = ("--map", "model.*=*", "--map", "opt.0.state.0.*=user.weight/*")
    text = run("backfill", tmp_path / "m.pt", "--data", tmp_path / "new", *of_list, "--dry-run")
    assert "sum:float32" in text
    assert "weights have two dimensions" in run.refused(*arguments, "--map", "model.top.bias=bias")


async def _acked(address: str) -> int:
    async with await EmbeddingReader.connect(address) as reader:
        return sum(client.last_client_seq for shard in await reader.status() for client in shard.clients)


def test_killed_it_goes_on(server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """A backfill that is killed with kill -9 goes on where it was, and in the end every row is there."""
    values = np.arange(400_000 * 4, dtype="<f4").reshape(-1, 4)
    save_file(dict(table=values), tmp_path / "t.safetensors")
    arguments = [str(tmp_path / "t.safetensors"), "--table", "table", "--server", server.address]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "backfill", *arguments, "--rows-per-s", "30000"],
        stdout=subprocess.DEVNULL,
    )

    async def wait() -> None:
        async with asyncio.timeout(60):
            while await _acked(server.address) < 3:
                assert process.poll() is None

    try:
        asyncio.run(wait())
    finally:
        process.kill()
        process.wait()
    report = _report(run, *arguments)
    assert 0 < report["table"]["num_earlier"] < 400_000
    ids = np.arange(0, 400_000, 13)
    assert _read(server, "table", ids).weights.tobytes() == values[ids].tobytes()


def test_another_file_of_that_name_is_sent(server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """A file of the same name, length and time in another directory is another source, not one that is there."""
    for number in (1, 2):
        path = tmp_path / str(number) / "t.safetensors"
        path.parent.mkdir()
        save_file(dict(table=np.full((10, 3), number, "<f4")), path)
        os.utime(path, ns=(0, 0))
        report = _report(run, path, "--server", server.address, "--table", "table")
        assert (report["table"]["num_written"], report["table"]["num_earlier"]) == (10, 0)
    assert (_read(server, "table", np.arange(10)).weights == 2).all()


def test_a_dry_run_changes_nothing(parquet: Path, server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """A dry run says what would go where, finds what is wrong, and writes nothing."""
    report = _report(run, parquet, "--server", server.address, "--dry-run")
    assert report["report"]["is_dry_run"]
    assert report[ITEMS.fqn]["num_rows"] == 250
    assert asyncio.run(_acked(server.address)) == 0
    assert "exp_avg:float32" in run("backfill", parquet, "--data", tmp_path / "new", "--dry-run")
    assert not (tmp_path / "new").exists()


def test_a_directory_that_does_not_fit_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: CommandLine
) -> None:
    """Not when the disk is full of the part that fits."""
    save_file(dict(table=np.ones((1000, 3), np.float32)), tmp_path / "t.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * (24 + 12) - 1))
    line = run.refused("backfill", tmp_path / "t.safetensors", "--table", "table", "--data", tmp_path / "new")
    assert f"{tmp_path}: the store takes 35.2 KiB, and 35.2 KiB are free" in line
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("offline", [True, False])
def test_nan(offline: bool, server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """A NaN is refused before anything is written, or its row left out and counted, or kept: as one says."""
    values = np.ones((50, 3), np.float32)
    values[7, 1], values[9, 0] = np.nan, np.inf
    save_file(dict(table=values), tmp_path / "t.safetensors")

    def arguments(number: int) -> list[str]:
        place = ["--data", str(tmp_path / f"new-{number}")] if offline else ["--server", server.address]
        return [str(tmp_path / "t.safetensors"), "--table", "table", *place]

    assert "row 7 has a NaN" in run.refused("backfill", *arguments(0))
    assert not (tmp_path / "new-0").exists()
    assert asyncio.run(_acked(server.address)) == 0
    report = _report(run, *arguments(1), "--non-finite", "skip")
    assert (report["table"]["num_refused"], report["table"]["num_written"]) == (2, 48)
    if offline:
        assert open_to_others(tmp_path / "new-1") == []
    report = _report(run, *arguments(2), "--non-finite", "keep")
    assert (report["table"]["num_refused"], report["table"]["num_written"]) == (0, 50)
    if not offline:
        assert _read(server, "table", np.arange(50)).weights.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "say where to"),
        (["--data", "{new}", "--server", "127.0.0.1:1"], "say where to"),
        (["--server", "127.0.0.1:1", "--shards", "2"], "--shards goes with --data"),
        (["--data", "{new}", "--rows-per-s", "5"], "--rows-per-s goes with --server"),
        (["--data", "{new}", "--again"], "--again goes with --server"),
        (["--data", "{new}", "--timeout-s", "5"], "--timeout-s goes with --server"),
        (["--data", "{new}", "--tls"], "--tls goes with --server"),
        (["--data", "{new}", "--map", "x"], "--map 'x'"),
        (["--data", "{new}", "--table", "nowhere"], "--table 'nowhere'"),
        (["--data", "{new}", "--non-finite", "maybe"], "--non-finite 'maybe'"),
        (["--data", "{full}"], "not empty"),
        (["--server", "127.0.0.1:1", "--timeout-s", "1"], "no connection to 127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_line(
    parquet: Path, tmp_path: Path, arguments: list[str], text: str, run: CommandLine
) -> None:
    """A wrong flag is one line that names it, and nothing is made."""
    before = sorted(os.listdir(tmp_path))
    filled = [argument.format(new=tmp_path / "new", full=tmp_path) for argument in arguments]
    assert text in run.refused("backfill", parquet, *filled)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", ["nothing.pt", "odd.csv", "empty"])
def test_sources_that_are_none(tmp_path: Path, name: str, run: CommandLine) -> None:
    """A file that is not there, of an unknown kind, and an empty directory are one line each."""
    (tmp_path / "odd.csv").write_text("1,2")
    (tmp_path / "empty").mkdir()
    assert name in run.refused("backfill", tmp_path / name, "--data", tmp_path / "new")


def test_another_table_of_that_name_is_refused(server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """A table that the server knows otherwise is refused with what differs, before anything is sent."""
    save_file(dict(table=np.zeros((10, 3), "<f4")), tmp_path / "a.safetensors")
    save_file(dict(table=np.zeros((11, 3), "<f4")), tmp_path / "b.safetensors")
    _report(run, tmp_path / "a.safetensors", "--server", server.address, "--table", "table")
    assert "num_rows 10 ≠ 11" in run.refused("backfill", tmp_path / "b.safetensors", "--server", server.address)


async def test_a_pace_is_even() -> None:
    """Rows go at the rate that was asked for, the first ones too: their time is waited for, and no longer."""
    now, slept = 100.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 6))
        now += seconds

    pace = RowPace(1000, clock=lambda: now, sleep=sleep)
    for _ in range(3):
        await pace.wait(500)
        now += 0.1
    assert slept == [0.5, 0.4, 0.4]
    now += 10
    await pace.wait(500)
    assert slept == [0.5, 0.4, 0.4]
    await pace.wait(500)
    assert slept == [0.5, 0.4, 0.4, 0.5]
    await RowPace(None, sleep=sleep).wait(10**9)


def test_an_unfinished_directory_is_none(tmp_path: Path) -> None:
    """What a killed backfill has left is no directory that can be exported or served, and stays out of the way."""
    build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, range(5))})
    (tmp_path / "data" / "headrace.json").unlink()
    with pytest.raises(Exception, match="not a directory of Headrace's"):
        ServerProcess.start(tmp_path / "data")


def test_a_file_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: CommandLine) -> None:
    """A source that is written to while it is read makes no directory."""
    path = tmp_path / "t.safetensors"
    save_file(dict(table=np.zeros((10, 3), "<f4")), path)
    original = StoreBuilder.add

    def add(self: StoreBuilder, *arguments: Any) -> None:
        os.utime(path, ns=(1, 1))
        original(self, *arguments)

    monkeypatch.setattr(StoreBuilder, "add", add)
    line = run.refused("backfill", path, "--data", tmp_path / "new", "--table", "table")
    assert "changed while it was read" in line
    assert os.listdir(tmp_path) == ["t.safetensors"]


@pytest.mark.parametrize(
    ("happens", "text"),
    [
        (
            lambda path: os.utime(path, ns=(1, 1)),
            "t.safetensors: changed while it was read; run it again when it is at rest",
        ),
        (lambda path: path.unlink(), "t.safetensors"),
    ],
    ids=["changed", "gone"],
)
def test_a_source_that_is_not_at_rest_is_told(
    tmp_path: Path,
    server: ServerProcess,
    run: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Path], None],
    text: str,
) -> None:
    """A file that is written to or removed while its rows are sent is one line and exit code 1, and no success."""
    path, sent = tmp_path / "t.safetensors", []
    save_file(dict(table=np.zeros((10, 3), "<f4")), path)
    put = ServerWriter.put

    async def put_once_it_happened(self: ServerWriter, deltas: list[Any], **version: int) -> tuple[int, int]:
        if not sent:
            happens(path)
        sent.append(await put(self, deltas, **version))
        return sent[-1]

    monkeypatch.setattr(ServerWriter, "put", put_once_it_happened)
    assert text in run.refused("backfill", path, "--server", server.address, "--table", "table")
    assert sent


@pytest.mark.parametrize(
    ("library", "command", "extra"),
    [
        ("pyarrow", ["backfill", "{0}/x.parquet", "--data", "{0}/new"], "tools"),
        ("safetensors", ["backfill", "{0}/x.safetensors", "--data", "{0}/new"], "tools"),
        ("torch", ["backfill", "{0}/x.pt", "--data", "{0}/new"], "torch"),
        ("pyarrow", ["export", "--snapshot", "{0}", "--to", "{0}/out", "--format", "parquet"], "tools"),
        ("torch", ["export", "--snapshot", "{0}", "--to", "{0}/out", "--format", "dcp"], "torch"),
    ],
)
def test_a_missing_library_is_one_line(tmp_path: Path, library: str, command: list[str], extra: str) -> None:
    """Libraries of formats are loaded when they are needed, and the line says which extra brings one."""
    for ending in ("parquet", "safetensors", "pt"):
        (tmp_path / f"x.{ending}").touch()
    script = f"import sys; sys.modules[{library!r}] = None; from headrace import cli; sys.exit(cli.main(sys.argv[1:]))"
    arguments = [argument.format(tmp_path) for argument in command]
    process = subprocess.run([sys.executable, "-c", script, *arguments], check=False, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1, process.stderr
    assert f"needs {library}: {install_command(extra)}" in process.stderr
