"""The command `headrace export`: what other libraries read of it, equal bytes for equal rows, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from command_line import CommandLine
from equality_tables import TorchModel, batch_of
from error_bounds import error_bound
from offline_snapshot import snapshot_of
from safetensors import safe_open
from safetensors.numpy import load_file
from table_rows import ITEMS, USERS, VIRTUAL, chunk_of, snapshot, values_of
from torch import nn

from headrace import RawEmbeddingStreamer, cli, restore
from headrace.kernels.quantization import dequantize_rows
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots import contents as snapshot_reader_module
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.system import file_lock
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.commands import export as export_module
from headrace.scripts.commands.export import work_folder, written_aside
from headrace.scripts.table_io.exported import ExportConfig, file_name_of
from headrace.scripts.table_io.source import BackfillConfig

IDS = np.flatnonzero(np.arange(500) % 9)
FORMATS = ["safetensors", "parquet", "dcp"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A snapshot of two tables on three shards, one with gaps, the other whole."""
    return snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, IDS), USERS: chunk_of(USERS, np.arange(USERS.num_rows))})


def _export(folder: Path, to: Path, name: str, *arguments: str, code: int = 0) -> None:
    assert cli.main(["export", "--snapshot", str(folder), "--to", str(to), "--format", name, *arguments]) == code


def _refused(run: CommandLine, folder: Path, to: Path, name: str, *arguments: str) -> str:
    return run.refused("export", "--snapshot", folder, "--to", to, "--format", name, *arguments)


def _dense(spec: TableSpec, field: str, live: Any) -> Any:
    column = values_of(spec, np.arange(spec.num_rows))[field]
    column[np.setdiff1d(np.arange(spec.num_rows), live)] = 0
    return column


def test_safetensors(folder: Path, tmp_path: Path) -> None:
    """The library reads every tensor; rows that are not there are zeros."""
    _export(folder, tmp_path / "out.safetensors", "safetensors", "--with-states")
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(ITEMS.fqn), torch.from_numpy(_dense(ITEMS, "weights", IDS)))
        momentum = file.get_tensor(f"{ITEMS.fqn}/momentum1")
        assert momentum.shape == (500,)
        assert momentum.numpy().tobytes() == _dense(ITEMS, "state:momentum1", IDS).tobytes()
        assert file.get_tensor(f"{ITEMS.fqn}/exp_avg").shape == (500, 6)
        users = file.get_tensor(USERS.fqn)
        assert users.dtype is torch.bfloat16
        assert users.view(torch.uint16).numpy().tobytes() == values_of(USERS, np.arange(300))["weights"].tobytes()
        assert file.get_tensor(f"{USERS.fqn}/identities:").tolist() == [31 * row + 5 for row in range(300)]


def test_parquet(folder: Path, tmp_path: Path) -> None:
    """Each row that is there comes once, in order, with its version."""
    _export(folder, tmp_path / "out", "parquet")
    table = pq.read_table(tmp_path / "out" / f"{ITEMS.fqn}.parquet")
    assert table.column_names == ["row_id", "epoch", "step", "time_us", "weights"]
    assert table["row_id"].to_pylist() == IDS.tolist()
    assert table["step"].to_pylist() == (IDS % 7).tolist()
    assert np.array(table["weights"].to_pylist()).tolist() == values_of(ITEMS, IDS)["weights"].tolist()
    users = pq.read_table(tmp_path / "out" / f"{USERS.fqn}.parquet")
    assert users["identity"].to_pylist() == [31 * row + 5 for row in range(300)]
    arguments = ("--since-step", "4", "--since-epoch", "3", "--rows", "5:90", "--table", ITEMS.fqn)
    _export(folder, tmp_path / "some", "parquet", *arguments)
    some = pq.read_table(tmp_path / "some" / f"{ITEMS.fqn}.parquet")
    expected = [row for row in IDS.tolist() if 5 <= row < 90 and row % 7 >= 4]
    assert some["row_id"].to_pylist() == expected


def test_since_a_step_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart rows of a later epoch are later, whatever their step; whose the step is can be said."""
    ids = np.arange(500)
    chunk = dataclasses.replace(chunk_of(ITEMS, ids), epochs=np.where(ids < 300, 1, 2), steps=ids % 100)
    folder = snapshot(tmp_path, {ITEMS: chunk})

    def exported(name: str, *arguments: str) -> list[int]:
        _export(folder, tmp_path / name, "parquet", *arguments)
        rows: list[int] = pq.read_table(tmp_path / name / f"{ITEMS.fqn}.parquet")["row_id"].to_pylist()
        return rows

    later = [row for row in range(500) if row >= 300 or row % 100 >= 90]
    assert exported("of-1", "--since-step", "90", "--since-epoch", "1") == later
    assert exported("of-2", "--since-step", "90", "--since-epoch", "2") == [*range(390, 400), *range(490, 500)]
    read = snapshot_reader_module.read_manifest

    def at_a_step(path: Path) -> Any:
        manifest = read(path)
        parts = tuple(dataclasses.replace(part, epoch=2, step=95) for part in manifest.parts)
        return dataclasses.replace(manifest, parts=parts)

    monkeypatch.setattr(snapshot_reader_module, "read_manifest", at_a_step)
    assert exported("of-the-cut", "--since-step", "95") == [*range(395, 400), *range(495, 500)]
    with pytest.raises(
        ConfigError, match=r"--since-step 96: the snapshot is at epoch 2, step 95; say .* --since-epoch"
    ):
        export_module.export_snapshot(folder, tmp_path / "x", "parquet", ExportConfig(since_step=96))


def test_other_types(folder: Path, tmp_path: Path) -> None:
    """Weights come as float32, float16, or int8 with scale and bias as kernels for serving take them."""
    _export(folder, tmp_path / "fp32.safetensors", "safetensors", "--dtype", "fp32")
    _export(folder, tmp_path / "fp16.safetensors", "safetensors", "--dtype", "fp16")
    _export(folder, tmp_path / "int8.safetensors", "safetensors", "--dtype", "int8")
    wide, narrow = load_file(tmp_path / "fp32.safetensors"), load_file(tmp_path / "fp16.safetensors")
    assert wide[USERS.fqn].dtype == np.float32
    bits = values_of(USERS, np.arange(300))["weights"]
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert wide[USERS.fqn].tobytes() == expected.tobytes()
    assert narrow[ITEMS.fqn].tobytes() == _dense(ITEMS, "weights", IDS).astype("<f2").tobytes()
    packed = load_file(tmp_path / "int8.safetensors")
    rows = torch.from_numpy(_dense(ITEMS, "weights", IDS)[IDS])
    found = dequantize_rows(torch.from_numpy(packed[ITEMS.fqn][IDS]), "int8", 6)
    assert bool(((found - rows).abs() <= error_bound(rows, "int8").reshape(-1, 1) + 1e-6).all())


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(folder: Path, tmp_path: Path, name: str) -> None:
    """Exported, brought into a new server of another number of shards and exported again, all bytes are the same.

    In Parquet these have versions and identities.
    """
    _export(folder, tmp_path / f"one.{name}", name, "--with-states")
    _export(folder, tmp_path / f"same.{name}", name, "--with-states")
    assert _bytes(tmp_path / f"one.{name}") == _bytes(tmp_path / f"same.{name}")
    source = ["backfill", str(tmp_path / f"one.{name}"), "--data", str(tmp_path / "new"), "--shards", "2"]
    assert cli.main(source) == 0
    again = snapshot_of(tmp_path / "new", tmp_path / "snapshots-2")
    _export(again, tmp_path / f"two.{name}", name, "--with-states")
    assert _bytes(tmp_path / f"two.{name}") == _bytes(tmp_path / f"one.{name}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_trainer_is_restored_from_an_export(tmp_path: Path, name: str) -> None:
    """Through files and a new server, weights, states and step counts come back bit for bit."""

    def training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = TorchModel(sparse=False)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
        of = [(weight, optimizer.state[weight]) for weight in model.parameters()]
        values = [value for weight, states in of for value in (weight, *(states[key] for key in sorted(states)))]
        return [value.detach().numpy().tobytes() for value in values]

    model, optimizer = training(3)
    generator, settings = torch.Generator().manual_seed(4), {"freshness_s": 0, "max_cost_percent": 100}
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        with RawEmbeddingStreamer(server.address, run="ctr", **settings) as streamer:
            streamer.attach(model, optimizer, publish="all")
            for _ in range(5):
                optimizer.zero_grad()
                model(batch_of(generator)).pow(2).mean().backward()
                optimizer.step()
        to = ["--to", str(tmp_path / f"out.{name}"), "--format", name, "--with-states"]
        assert cli.main(["export", "--server", server.address, *to]) == 0
    assert cli.main(["backfill", str(tmp_path / f"out.{name}"), "--data", str(tmp_path / "new")]) == 0
    again = training(5)
    with ServerProcess.start(tmp_path / "new") as server:
        restore(*again, server.address)
    assert bits(*again) == bits(model, optimizer)
    assert all(optimizer.state[weight]["step"] == 5 for weight in model.parameters())


@pytest.mark.parametrize("name", ["safetensors", "dcp"])
def test_rows_that_are_not_there_have_no_identity(tmp_path: Path, name: str) -> None:
    """In the dense formats rows that are not there are zeros of no identity, also when brought in."""
    ids = np.array([2, 40, 41, 299])
    folder = snapshot(tmp_path, {USERS: chunk_of(USERS, ids)})
    expected = np.full(300, -1, np.int64)
    expected[ids] = ids * 31 + 5
    _export(folder, tmp_path / f"out.{name}", name)
    source = ["backfill", str(tmp_path / f"out.{name}"), "--data", str(tmp_path / "new"), "--table", USERS.fqn]
    assert cli.main(source) == 0
    with SnapshotReader(snapshot_of(tmp_path / "new", tmp_path / "snapshots-2")) as reader:
        assert reader.tables[USERS.fqn].has_identities
        found = [records["identity"] for _, records in reader.rows(USERS.fqn)]
    assert np.concatenate(found).tolist() == expected.tolist()
    if name == "safetensors":
        _export(folder, tmp_path / "some.safetensors", name, "--rows", "30:200")
        with safe_open(tmp_path / "some.safetensors", framework="pt") as file:
            assert file.get_tensor(f"{USERS.fqn}/identities:").tolist() == expected[30:200].tolist()


def _bytes(path: Path) -> dict[str, bytes]:
    return {
        file.name if path.is_dir() else "": file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])
    }


def test_virtual_ids(tmp_path: Path) -> None:
    """Rows of virtual ids go to Parquet and back; a format that would be 2^63 rows long is refused."""
    ids = np.unique(np.random.default_rng(3).integers(0, 2**63 - 1, 400))
    folder = snapshot(tmp_path, {VIRTUAL: chunk_of(VIRTUAL, ids)})
    _export(folder, tmp_path / "out", "parquet")
    assert pq.read_table(tmp_path / "out" / f"{VIRTUAL.fqn}.parquet")["row_id"].to_pylist() == ids.tolist()
    assert cli.main(["backfill", str(tmp_path / "out"), "--data", str(tmp_path / "new")]) == 0
    _export(snapshot_of(tmp_path / "new", tmp_path / "snapshots-2"), tmp_path / "again", "parquet")
    assert _bytes(tmp_path / "again") == _bytes(tmp_path / "out")
    for name in ("safetensors", "dcp"):
        _export(folder, tmp_path / "dense", name, code=1)
    assert not (tmp_path / "dense").exists()


def test_what_is_no_server_is_not_waited_for_as_long_as_a_step(
    tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that never answers is given up after the time for one answer, not after `--timeout-s`."""
    monkeypatch.setattr(export_module, "_ANSWER_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = run.refused("export", "--server", address, "--to", tmp_path / "x", "--format", "safetensors")
    told = f"headrace: error: hello to {address}: no answer within 1 s: what listens there hangs, or is no Headrace"
    assert line == f"{told} server\n"


def test_a_running_server(tmp_path: Path, run: CommandLine) -> None:
    """A server's tables are those of a snapshot that is made for it, and gone afterwards."""
    folder = snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, IDS)})
    _export(folder, tmp_path / "one.safetensors", "safetensors", "--with-states")
    with ServerProcess.start(tmp_path / "data") as server:
        to = ["--to", tmp_path / "two.safetensors", "--format", "safetensors", "--with-states"]
        report = run.json("export", "--server", server.address, *to)
        assert report["tables"] == {ITEMS.fqn: IDS.size}
        assert SnapshotFiles(tmp_path / "data" / "snapshots").list() == ([], [])
        misspelled = ("--format", "dcp", "--table", "itmes")
        refusal = run.refused("export", "--server", server.address, "--to", tmp_path / "three", *misspelled)
        assert "--table 'itmes': no such table in the server" in refusal
    assert _bytes(tmp_path / "one.safetensors") == _bytes(tmp_path / "two.safetensors")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["data", "one.safetensors", "snapshots", "two.safetensors"]


def test_the_snapshot_of_a_killed_export_has_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export could not remove the server does: it is nobody's newest, and counts for nothing in a prune."""
    snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, IDS)})

    async def killed_here(*_: Any, **__: Any) -> None:
        raise UnavailableError("killed here")

    monkeypatch.setattr(export_module, "remove_snapshot", killed_here)
    with ServerProcess.start(tmp_path / "data") as server:
        assert cli.main(["snapshot", "create", "--server", server.address, "--now", "--name", "kept"]) == 0
        to = ["--to", str(tmp_path / "a.safetensors"), "--format", "safetensors"]
        assert cli.main(["export", "--server", server.address, *to]) == 0
    files = SnapshotFiles(tmp_path / "data" / "snapshots")
    assert sorted(manifest.lease_s for manifest in files.list()[0]) == [0, 3600]
    assert cli.main(["snapshot", "prune", str(tmp_path / "data"), "--keep", "1"]) == 0
    assert len(files.list()[0]) == 2
    newest = files.newest()
    assert newest is not None and newest.name == "kept"


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_leaves_nothing(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, run: CommandLine
) -> None:
    """When the disk fills up amid the rows, one line says so, and nothing lies where the file was to be."""
    write = export_module._writer_of(name)

    def fail(path: Path, tables: Any, *, on_rows: Any) -> None:
        calls = 0

        def count(num_rows: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            on_rows(num_rows)

        write(path, tables, on_rows=count)

    monkeypatch.setattr(export_module, "_writer_of", lambda _: fail)
    before = sorted(tmp_path.iterdir())
    assert "the disk is full" in _refused(run, folder, tmp_path / "out", name)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["safetensors", "parquet"])
def test_killed_before_the_last_step_it_is_not_there(folder: Path, tmp_path: Path, name: str) -> None:
    """A process that is killed when all is written but the name leaves none; another attempt succeeds."""
    script = """
        import os, sys
        from headrace import cli
        os.replace = lambda *_: os.kill(os.getpid(), 9)
        cli.main(sys.argv[1:])
    """
    arguments = ["export", "--snapshot", str(folder), "--to", str(tmp_path / "out"), "--format", name]
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.export").exists()
    assert cli.main(arguments) == 0
    assert not (tmp_path / ".out.export").exists()


def test_what_a_kill_has_left_is_in_nobodys_way(folder: Path, tmp_path: Path) -> None:
    """Half a file of an attempt that was killed has another name, and the next attempt removes it."""
    (tmp_path / ".out.safetensors.export").write_bytes(b"half")
    (tmp_path / ".out.export").mkdir()
    (tmp_path / ".out.export" / "half.parquet").write_bytes(b"half")
    _export(folder, tmp_path / "out.safetensors", "safetensors")
    _export(folder, tmp_path / "out", "parquet")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--format", "csv"], "--format 'csv': one of safetensors"),
        (["--format", "safetensors", "--rows", "7"], "not A:B"),
        (["--format", "safetensors", "--rows", "9:9"], "no rows are in there"),
        (["--format", "safetensors", "--rows", "0:501"], "has 500 rows"),
        (["--format", "safetensors", "--rows", f"0:{2**64}"], "row ids end below 2^63"),
        (
            ["--format", "safetensors", "--rows", f"0:{'9' * 5000}"],
            "--rows 0:999999999999999999…: row ids end below 2^63",
        ),
        (["--format", "safetensors", "--table", "nowhere"], "no such table in the snapshot"),
        (["--format", "safetensors", "--dtype", "fp8"], "fp32, fp16 or int8"),
        (["--format", "safetensors", "--since-step", "3"], "goes with --format parquet"),
        (["--format", "dcp", "--dtype", "int8"], "for trainers"),
        (["--format", "parquet", "--since-step", "3"], "the snapshot is at no common step; say with --since-epoch"),
        (["--format", "parquet", "--since-epoch", "3"], "--since-epoch goes with --since-step"),
        (["--format", "safetensors", "--now"], "--now goes with --server"),
        (["--format", "safetensors", "--timeout-s", "5"], "--timeout-s goes with --server"),
        (["--format", "safetensors", "--tls"], "--tls goes with --server"),
        (["--format", "safetensors", "--state-key", "x"], "goes with --format dcp"),
        (["--format", "dcp", "--with-states", "--state-key", "{nothing}"], "can be put in"),
        (["--format", "dcp", "--weights-key", "{fqn.nothing}"], "can be put in"),
        (["--format", "dcp", "--weights-key", "{fqn[nothing]}"], "can be put in"),
        (["--format", "dcp", "--with-states", "--state-key", "one"], "two tensors"),
    ],
)
def test_mistakes_are_one_line(folder: Path, tmp_path: Path, arguments: list[str], text: str, run: CommandLine) -> None:
    """A wrong flag is one line that names it, and nothing is made."""
    before = sorted(tmp_path.iterdir())
    assert text in run.refused("export", "--snapshot", folder, "--to", tmp_path / "out", *arguments)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_written_over(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    """A file that is there stays; so does a damaged snapshot's export that never was."""
    (tmp_path / "out.safetensors").write_text("mine")
    assert "there is something already" in _refused(run, folder, tmp_path / "out.safetensors", "safetensors")
    assert (tmp_path / "out.safetensors").read_text() == "mine"
    line = _refused(run, folder, tmp_path / "nowhere" / "out.safetensors", "safetensors")
    assert "there is no directory" in line
    file = next((folder / "shard-0001").glob("*.sst"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.unlink()  # not the store's own, to which it is a link
    file.write_bytes(data)
    assert "checksum" in _refused(run, folder, tmp_path / "other.safetensors", "safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_two_exports_to_one_place(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    """While one export writes, another one to the same place is refused: neither takes the other's half for its own."""
    with written_aside(tmp_path / "out.safetensors") as aside:
        aside.write_bytes(b"whole")
        line = _refused(run, folder, tmp_path / "out.safetensors", "safetensors")
        assert "another export is making it just now" in line
    assert (tmp_path / "out.safetensors").read_bytes() == b"whole"
    to = tmp_path / "other.safetensors"
    with work_folder(to, "snapshot"):
        line = run.refused("export", "--server", "127.0.0.1:1", "--to", to, "--format", "safetensors")
        assert "another export is making it just now" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out.safetensors", "snapshots"]


def test_a_folder_that_was_removed_while_it_was_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a directory that its last holder has removed meanwhile is no claim to the one that is there now."""
    lock = file_lock.fcntl.flock

    def remove_first(fd: int, operation: int) -> None:
        (tmp_path / ".out.export").rename(tmp_path / "removed")
        (tmp_path / ".out.export").mkdir()
        lock(fd, operation)

    monkeypatch.setattr(file_lock.fcntl, "flock", remove_first)
    with pytest.raises(ConfigError, match="another export"), work_folder(tmp_path / "out", "export"):
        pass
    assert (tmp_path / ".out.export").is_dir()


_STATE = StateSpec(name="x", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)


def test_tensors_of_one_name_are_refused(tmp_path: Path, run: CommandLine) -> None:
    """A table whose tensor has another one's name, or that of the file's own part, is in no file that lacks it."""
    name, own = "safetensors", "__metadata__"
    tables = [
        TableSpec(fqn="a", num_rows=4, dim=2, dtype=DType.FLOAT32, states=(_STATE,)),
        TableSpec(fqn="a/x", num_rows=4, dim=2, dtype=DType.FLOAT32),
        TableSpec(fqn=own, num_rows=4, dim=2, dtype=DType.FLOAT32),
    ]
    folder = snapshot(tmp_path, {spec: chunk_of(spec, range(4)) for spec in tables})
    for fqns, taken in ((["a", "a/x"], "a/x"), ([own], own)):
        chosen = [argument for fqn in fqns for argument in ("--table", fqn)]
        line = _refused(run, folder, tmp_path / "out", name, "--with-states", *chosen)
        assert f"needs the name {taken!r}, which something else" in line
    assert not (tmp_path / "out").exists()
    _export(folder, tmp_path / "out", name, "--table", "a", "--table", "a/x")


_ADAM = tuple(StateSpec(name=name, kind=StateKind.POINTWISE, dtype=DType.FLOAT32) for name in ("exp_avg", "exp_avg_sq"))
TOP = TableSpec.of_tensor("top.weight", (30, 70), DType.FLOAT32, states=_ADAM)
SCALE = TableSpec.of_tensor("scale", (), DType.BFLOAT16)


def _with_dense(path: Path, *, step_of_scale: int = 5) -> Path:
    rows = {ITEMS: chunk_of(ITEMS, IDS), TOP: chunk_of(TOP, np.arange(TOP.num_rows), step=5)}
    return snapshot(path, rows | {SCALE: chunk_of(SCALE, [0], step=step_of_scale)})


def _whole(spec: TableSpec, field: str) -> Any:
    assert spec.shape is not None
    column = values_of(spec, np.arange(spec.num_rows))[field]
    return torch.from_numpy(column.reshape(-1)[: spec.num_elements].reshape(spec.shape))


@pytest.mark.parametrize("name", ["safetensors", "dcp"])
def test_dense_tensors_are_whole(tmp_path: Path, name: str, run: CommandLine) -> None:
    """They have their own shape and type, whatever is asked of tables, and their states on request."""
    folder = _with_dense(tmp_path)
    key = "{}/{}" if name == "safetensors" else "state.{}.{}"
    names = {"weights": TOP.fqn, **{f"state:{s.name}": key.format(TOP.fqn, s.name) for s in _ADAM}}
    found = {SCALE.fqn: torch.empty((), dtype=torch.bfloat16), **{n: torch.empty(30, 70) for n in names.values()}}
    output = run("export", "--snapshot", folder, "--to", tmp_path / "out", "--format", name, "--with-states")
    assert "dense tensors of model default: 2" in output
    if name == "dcp":
        torch.distributed.checkpoint.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    else:
        with safe_open(tmp_path / "out", framework="pt") as file:
            found = {name: file.get_tensor(name) for name in found}
    assert all(torch.equal(found[name], _whole(TOP, field)) for field, name in names.items())
    assert torch.equal(found[SCALE.fqn], _whole(SCALE, "weights").view(torch.bfloat16))
    chosen = ["--table", TOP.fqn, "--table", ITEMS.fqn, "--dtype", "fp16"]
    report = run.json("export", "--snapshot", folder, "--to", tmp_path / "some", "--format", name, *chosen)
    assert (report["tables"], report["dense_tensors"]) == ({ITEMS.fqn: IDS.size}, {"default": 1})
    chosen += ["--no-dense"]
    refusal = _refused(run, folder, tmp_path / "none", name, *chosen)
    assert "--table 'top.weight': a dense tensor that --no-dense leaves out" in refusal


def test_dense_tensors_have_no_place_in_parquet(tmp_path: Path, run: CommandLine) -> None:
    """They are left out and counted; alone they are refused."""
    folder = _with_dense(tmp_path)
    output = run("export", "--snapshot", folder, "--to", tmp_path / "out", "--format", "parquet")
    assert "2 dense tensors left out: take --format safetensors or dcp for them" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == [file_name_of(ITEMS, ".parquet")]
    refusal = _refused(run, folder, tmp_path / "other", "parquet", "--table", TOP.fqn)
    assert "has tables only, and these are dense tensors" in refusal


def test_dense_tensors_of_two_steps_are_not_mixed(tmp_path: Path, run: CommandLine) -> None:
    """The error names the steps, and --no-dense is a way on."""
    folder = _with_dense(tmp_path, step_of_scale=6)
    refusal = _refused(run, folder, tmp_path / "out", "safetensors")
    assert "the dense tensors of model 'default' are not of one step: step 5 of epoch 3 lacks rows" in refusal
    assert "leave them out with --no-dense" in refusal
    assert not (tmp_path / "out").exists()
    _export(folder, tmp_path / "out", "safetensors", "--no-dense")
    assert list(load_file(tmp_path / "out")) == [ITEMS.fqn]


def test_names_of_tables_are_no_paths() -> None:
    """Whatever a table is called, its file lies in the directory that was asked for."""
    for fqn in ("../../etc/passwd", ".hidden", "a/b", "..", "naïve table", "plain.weight"):
        name = file_name_of(TableSpec(fqn=fqn, num_rows=1, dim=1, dtype=DType.FLOAT32), ".parquet")
        assert Path(name).name == name
        assert name[0] != "."
    assert file_name_of(ITEMS, ".parquet") == f"{ITEMS.fqn}.parquet"


def test_tables_of_long_names_have_files(tmp_path: Path) -> None:
    """A name that no file can have is cut, amid no escape, told apart by a hash, and comes back whole."""
    fqns = ["n" * 247, "n" * 248, *(f"{'a' * shift}{'é' * 500}" for shift in range(6)), "é" * 499 + "e"]
    specs = [TableSpec(fqn=fqn, num_rows=4, dim=2, dtype=DType.FLOAT32) for fqn in fqns]
    folder, out = snapshot(tmp_path, {spec: chunk_of(spec, range(4)) for spec in specs}), tmp_path / "out"
    _export(folder, out, "parquet")
    names = sorted(file.name for file in out.iterdir())
    assert len(names) == len(fqns) and "n" * 247 + ".parquet" in names
    assert all(re.fullmatch(r"([an]|%C3|%A9)+(~[0-9a-f]{32})?\.parquet", name) for name in names)
    assert {table.spec.fqn for table in BackfillConfig().open(out, None).tables} == set(fqns)
