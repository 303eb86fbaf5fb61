"""A new server is made of what another one has left, whatever that is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from archived_log import archive_in, until
from command_line import CommandLine
from resharding import Writers, rows_of
from shard_servers import serve_shards

from headrace.paramserver.config.data_dir import find_manifest
from headrace.paramserver.log.inspection import find_logs
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.snapshot_manifest import shard_folder

_Rows = dict[str, dict[int, bytes]]


@dataclass(frozen=True)
class Left:
    """What a server has left: its directory, with a snapshot of the end of a step, and its object store.

    Attributes:
        rows_at_step, rows: At the end of the step, and of all.
    """

    path: Path
    num_shards: int
    step: int
    rows_at_step: _Rows
    rows: _Rows

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def url(self) -> str:
        return f"file://{self.path / 'store'}"


async def _write(path: Path, num_shards: int) -> Left:
    settings: dict[str, Any] = {"server_id": "s", "object_store": f"file://{path / 'store'}", "archive_segment_s": 0.1}
    (path / "store").mkdir(parents=True)
    async with serve_shards(path / "data", num_shards, **settings) as ports:
        writers = await Writers.connect(ports, num_shards)
        await writers.some(12)
        step = await writers.end_step()
    rows_at_step = rows_of(path / "data", path / "data" / "snapshots")
    SnapshotStore.of_url(settings["object_store"]).upload(path / "data" / "snapshots" / "bench")
    async with serve_shards(path / "data", num_shards, **settings) as ports:
        await writers.reconnect(ports)
        await writers.some(12)
        await writers.close()
        for shard in range(num_shards):
            last_seq = open_source(path / "data" / shard_folder(shard) / "log").last_seq
            archive = archive_in(path / "store", shard)
            await until(lambda archive=archive, seq=last_seq: any(s.last_seq >= seq for s in archive.segments()))
    return Left(path, num_shards, step, rows_at_step, rows_of(path / "data", path / "again"))


@pytest.fixture(scope="module")
def left_by_two(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Make what a server of two shards has left."""
    return asyncio.run(_write(tmp_path_factory.mktemp("two"), 2))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Commands in this process."""
    return CommandLine(capsys)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is left for a restore.

    Attributes:
        source: Within the directory; None is the object store.
        lost: What the directory and its shards lack.
        is_trimmed: The log lacks what was written before the last start.
        is_to_step, is_at_step: The rows are those at the step; `--at` has to say it.
    """

    source: str | None = ""
    lost: tuple[str, ...] = ()
    is_trimmed: bool = False
    is_to_step: bool = False
    is_at_step: bool = False

    def lay_out(self, left: Left, path: Path) -> Path | str:
        """Make the source of the restore; return it."""
        if self.source is None:
            return left.url
        shutil.copytree(left.data, path)
        for folder in (path, *path.glob("shard-*")):
            for name in self.lost:
                shutil.rmtree(folder / name, ignore_errors=True)
        for log in find_logs(path) if self.is_trimmed else []:
            for segment in sorted(log.glob("*.hrlog"))[:-1]:
                segment.unlink()
        return path / self.source


CASES = {
    "stopped": Case(),
    "logs": Case(lost=("store", "snapshots")),
    "logs at a step": Case(lost=("store", "snapshots"), is_to_step=True, is_at_step=True),
    "snapshot and log": Case(lost=("store",), is_trimmed=True),
    "snapshot and log at a step": Case(is_trimmed=True, is_to_step=True, is_at_step=True),
    "snapshot": Case(source="snapshots/bench", is_to_step=True),
    "archive": Case(source=None),
    "archive at a step": Case(source=None, is_to_step=True, is_at_step=True),
}


def _restore(left: Left, path: Path, run: CommandLine, num_shards: int, name: str) -> None:
    """Make a new server of what is left in a case; compare rows to the bit."""
    case, new = CASES[name], path / name
    source = case.lay_out(left, path / f"{name} of old")
    more = ["--at", f"step={left.step}"] if case.is_at_step else []
    # All tables: without it, the same server goes on if the number of shards is its own.
    more += ["--model", "default"] if case.source is None else []
    out = run("restore", source, "--data", new, "--shards", num_shards, *more)
    expected, found = left.rows_at_step if case.is_to_step else left.rows, rows_of(new, path / f"{name} rows")
    assert {fqn: len(rows) for fqn, rows in found.items()} == {fqn: len(rows) for fqn, rows in expected.items()}, name
    assert found == expected, name
    assert out.count(f"all of step {left.step} of epoch") == (left.num_shards if case.is_to_step else 0), out
    manifest = find_manifest(new)
    assert manifest is not None and manifest.num_shards == num_shards and manifest.server_id != "s"
    for shard in range(num_shards):
        with contextlib.closing(RowStore.open_read_only(new / shard_folder(shard) / "store")) as store:
            assert Sessions(store.read_meta()).highest_epoch > 1000, "an epoch may be given twice"
    assert not [each for each in path.iterdir() if each.name.startswith(".")], "nothing else is left"


@pytest.mark.parametrize("name", ["stopped", "snapshot and log at a step"])
def test_every_row_is_there(left_by_two: Left, tmp_path: Path, run: CommandLine, name: str) -> None:
    """All rows are equal to the bit, whatever was written, deleted, dropped or grown, in any columns."""
    _restore(left_by_two, tmp_path, run, 3, name)


@pytest.mark.parametrize(("num_old", "num_new"), [(2, 3), (3, 2), (3, 3)])
def test_every_row_is_there_whatever_is_left(tmp_path: Path, run: CommandLine, num_old: int, num_new: int) -> None:
    """The same of logs, snapshots and an archive, at their end and at a step."""
    left = asyncio.run(_write(tmp_path / "old", num_old))
    (tmp_path / "new").mkdir()
    for name in CASES:
        _restore(left, tmp_path / "new", run, num_new, name)
