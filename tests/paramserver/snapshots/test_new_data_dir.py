"""A server's directory that is made aside, and the rows that fill it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_process import run_killed
from open_files import files_open_in
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, values_of

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.new_data_dir import NewDataDir, StoreBuilder, check_target
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.schemas.errors import ConfigError, RequestError, RowRangeError, StorageError
from headrace.schemas.row_records import decode_row_ids, key_prefix
from headrace.scripts.table_io.sending import ask_server
from headrace.scripts.table_io.server_writer import TargetServer


def test_only_one_process_makes_a_directory(tmp_path: Path) -> None:
    """A second process is refused and leaves the first one's work."""
    with NewDataDir(tmp_path / "data", shards=range(1), work="restore") as first:
        (first.shard_path(0) / "a").touch()
        with pytest.raises(ConfigError, match="another restore is making it just now"):
            NewDataDir(tmp_path / "data", shards=range(1), work="restore")
        assert (first.shard_path(0) / "a").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_a_rename_cannot_replace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a mount point and the working directory are refused with advice before any work."""
    target, link, dangling = tmp_path / "data", tmp_path / "link", tmp_path / "dangling"
    target.mkdir()
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (link, dangling):
        with pytest.raises(ConfigError, match=rf"--data {path}: a symbolic link, .*: name its target"):
            check_target(path)
    monkeypatch.chdir(target)
    for path in (target, Path.cwd(), Path(), tmp_path / "data" / ".." / "data"):
        with pytest.raises(ConfigError, match=r"the working directory, .*: name a new directory below it"):
            check_target(path)
    monkeypatch.chdir(tmp_path)
    check_target(target)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_target(target)  # from a directory that was removed
    monkeypatch.setattr(os.path, "ismount", lambda path: path == target)
    with pytest.raises(ConfigError, match=rf"--data {target}: a mount point, .*: name a directory below it"):
        check_target(target)
    assert sorted(tmp_path.iterdir()) == [dangling, target, link]


def test_a_lock_on_a_removed_directory_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last holder has removed the directory, the lock does not cover a new one of that name."""
    lock, aside = fcntl.flock, tmp_path / ".data.restore"

    def remove_first(fd: int, operation: int) -> None:
        aside.rename(tmp_path / "removed")
        (aside / "ready").mkdir(parents=True)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with pytest.raises(ConfigError, match="another restore is making it just now"):
        NewDataDir(tmp_path / "data", shards=range(1), work="restore")
    assert (aside / "ready").is_dir()


def _no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_start_leaves_no_lock_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard's directory cannot be made, everything is removed and unlocked."""
    make = Path.mkdir

    def fail_at_the_second(path: Path, *args: Any, **settings: Any) -> None:
        (_no_space if path.name == "shard-0001" else make)(path, *args, **settings)

    monkeypatch.setattr(Path, "mkdir", fail_at_the_second)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        NewDataDir(tmp_path / "data", shards=range(2), work="restore")
    del caught
    assert list(tmp_path.iterdir()) == []
    assert not files_open_in(tmp_path)
    monkeypatch.undo()
    with NewDataDir(tmp_path / "data", shards=range(2), work="restore"):
        pass


async def test_a_server_starts_on_it(tmp_path: Path) -> None:
    """A server returns every row with its version and identity, and gives trainers a higher epoch."""
    ids = np.flatnonzero(np.arange(500) % 5)
    rows = {ITEMS: chunk_of(ITEMS, ids), USERS: chunk_of(USERS, np.arange(300), epoch=9)}
    await asyncio.to_thread(build, tmp_path / "data", rows, num_shards=2)
    with ServerProcess.start(tmp_path / "data") as server:
        async with await EmbeddingReader.connect(server.address) as reader:
            for spec, chunk in rows.items():
                found: Any = await reader.get(spec.fqn, chunk.row_ids, with_states=True, with_versions=True)
                columns = {"weights": found.weights} | {f"state:{name}": of for name, of in found.states.items()}
                expected = values_of(spec, chunk.row_ids)
                assert {name: of.tobytes() for name, of in columns.items()} == {
                    name: of.tobytes() for name, of in expected.items()
                }
                for column, of in (
                    (found.epochs, chunk.epochs),
                    (found.steps, chunk.steps),
                    (found.times_us, chunk.times_us),
                ):
                    assert (column == of).all()
            assert (await reader.get(ITEMS.fqn, [0, 7])).presence.tolist() == [0, 1]
            assert {link.hello.highest_epoch for link in reader.links} == {9}
            status = await reader.status()
        assert [(shard.log_seq, shard.applied_seq) for shard in status] == [(2, 2)] * 2
        assert {client.world_size for shard in status for client in shard.clients} == {0}
        host, _, port = server.address.rpartition(":")
        facts = await ask_server(TargetServer(host=host, port=int(port)))
        assert facts.tables == {spec.fqn: spec for spec in rows}


def test_a_lost_store_is_noticed(tmp_path: Path) -> None:
    """Without its store the directory is refused, because its log does not have the rows."""
    build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, range(10))}, num_shards=1)
    shutil.rmtree(tmp_path / "data" / "shard-0000" / "store")
    with pytest.raises(Exception, match="seq"):
        ServerProcess.start(tmp_path / "data")


_CALLS = [
    "headrace.paramserver.store.sst.table_writer:TableFileWriter.add",
    "headrace.paramserver.store.sst.table_writer:TableFileWriter.finish",
    "headrace.paramserver.store.rows:RowStore.write_runs",
    "headrace.paramserver.snapshots.new_data_dir:NewDataDir.publish_copy",
    "headrace.paramserver.snapshots.new_data_dir.move_into_place",
]


@pytest.mark.parametrize("at", _CALLS)
def test_a_killed_process_leaves_no_directory(tmp_path: Path, at: str) -> None:
    """After a kill there is nothing that a server starts on, and another attempt succeeds."""
    target = tmp_path / "data"
    work = f"""
from table_rows import ITEMS, build, chunk_of
build(Path({str(target)!r}), {{ITEMS: chunk_of(ITEMS, range(400))}}, num_shards=2)
"""
    assert run_killed(work, at=at)
    assert not target.exists()
    ready = tmp_path / ".data.backfill" / "ready"
    if at != _CALLS[-1]:
        with pytest.raises(ConfigError, match="not a directory of Headrace's"):
            DataDir.claim(ready, num_shards=None)
    build(target, {ITEMS: chunk_of(ITEMS, range(400))}, num_shards=2)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with DataDir.claim(target, num_shards=2) as directory:
        assert directory.manifest.num_shards == 2


def test_a_failed_builder_keeps_no_file_open(tmp_path: Path) -> None:
    """A reference to a failed builder, as from a traceback, keeps no file open."""
    builder = StoreBuilder(tmp_path / "data", num_shards=2, specs=[ITEMS], run="fill")
    with pytest.raises(KeyboardInterrupt), builder:
        builder.add(ITEMS.fqn, chunk_of(ITEMS, range(400)))
        raise KeyboardInterrupt
    assert not files_open_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error that leaves nothing."""
    monkeypatch.setattr(TableFileWriter, "finish", _no_space)
    with pytest.raises(StorageError, match="the disk is full"):
        build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, range(400))})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_shards", "file_mib"), [(8, 256), (16, 128), (64, 64)])
def test_files_are_long_whatever_the_number_of_shards(num_shards: int, file_mib: int, tmp_path: Path) -> None:
    """Files are long, so that stores of terabytes have few, but many shards share the memory."""
    with StoreBuilder(tmp_path / "data", num_shards=num_shards, specs=[ITEMS], run="test") as builder:
        assert {files._file_bytes for files in builder._shards} == {file_mib << 20}


def test_rows_in_pieces_share_files(tmp_path: Path) -> None:
    """A file grows over many additions up to its length, and every row is in one of them."""
    with StoreBuilder(tmp_path / "data", num_shards=2, specs=[ITEMS], run="test", file_bytes=8192) as builder:
        for first in range(0, 500, 5):
            builder.add(ITEMS.fqn, chunk_of(ITEMS, range(first, first + 5)))
        builder.finish()
    found = []
    for shard in ("shard-0000", "shard-0001"):
        store = RowStore.open(tmp_path / "data" / shard / "store")
        ids = decode_row_ids([key for key, _ in store.scan(key_prefix(1))]).tolist()
        assert ids == sorted(ids)
        found += ids
        files = [file for file in store._db.live_files() if file["start_key"][:4] == key_prefix(1)]
        assert 2 < len(files) < 10
        store.close()
    assert sorted(found) == [*range(500)]


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([[3, 3]], RequestError),
        ([[1, 2], [2]], RequestError),
        ([[5], [4]], RequestError),
        ([[500]], RowRangeError),
        ([[-1]], RowRangeError),
    ],
)
def test_rows_out_of_order_are_refused(tmp_path: Path, chunks: list[list[int]], error: type[Exception]) -> None:
    """Repeated, descending and out-of-range row ids are refused, within and between chunks; nothing remains."""
    builder = StoreBuilder(tmp_path / "data", num_shards=2, specs=[ITEMS], run="test")
    with pytest.raises(error, match="row"), builder:
        for ids in chunks:
            builder.add(ITEMS.fqn, chunk_of(ITEMS, ids, step=1))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A non-empty directory and one in the making are refused; an empty one is used."""
    rows = {VIRTUAL: chunk_of(VIRTUAL, [1, 2**62])}
    (tmp_path / "data").mkdir()
    with StoreBuilder(tmp_path / "data", num_shards=1, specs=[VIRTUAL], run="test") as builder:
        with pytest.raises(ConfigError, match="another backfill"):
            StoreBuilder(tmp_path / "data", num_shards=1, specs=[VIRTUAL], run="test")
        builder.add(VIRTUAL.fqn, rows[VIRTUAL])
        builder.finish()
    with pytest.raises(ConfigError, match="not empty"):
        build(tmp_path / "data", rows)
    with pytest.raises(ConfigError, match="there is no directory"):
        build(tmp_path / "nowhere" / "data", rows)
