"""A server's directory made of rows: whole or not there, and one that a server and its clients take for their own."""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from open_files import files_open_in
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, values_of

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reading.replay import ReplayTarget
from headrace.paramserver.snapshots.store_builder import StoreBuilder
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.table_file import TableFileWriter
from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError, RowRangeError, StorageError
from headrace.schemas.row_keys import decode_row_ids, key_prefix
from headrace.schemas.tables import TableSpec
from headrace.scripts.backfill_send import ask_server


async def test_a_server_starts_on_it(tmp_path: Path) -> None:
    """Every row is read back with its values and version, identities are found, and a trainer's epoch is higher."""
    ids = np.flatnonzero(np.arange(500) % 5)
    rows = {ITEMS: chunk_of(ITEMS, ids, deleted=[7]), USERS: chunk_of(USERS, np.arange(300), epoch=9)}
    await asyncio.to_thread(build, tmp_path / "data", rows, num_shards=2)
    with ServerProcess.start(tmp_path / "data") as server:
        async with await EmbeddingReader.connect(server.address) as reader:
            for spec, chunk in rows.items():
                await _check(reader, spec, chunk)
            missing = await reader.get(ITEMS.fqn, [0, 7])
            assert missing.presence.tolist() == [0, 2]
            assert (await reader.find_rows(USERS.fqn, [31 * 8 + 5, 4])).tolist() == [8, -1]
            assert {link.hello.highest_epoch for link in reader.links} == {9}
            status = await reader.status()
        assert [(shard.log_seq, shard.applied_seq) for shard in status] == [(2, 2)] * 2
        assert {client.world_size for shard in status for client in shard.clients} == {0}
        host, _, port = server.address.rpartition(":")
        facts = await ask_server(ReplayTarget(host=host, port=int(port)))
        assert facts.tables == {spec.fqn: spec for spec in rows}


async def _check(reader: EmbeddingReader, spec: TableSpec, chunk: RowChunk) -> None:
    live = chunk if chunk.is_deleted is None else chunk.take(~chunk.is_deleted)
    found = await reader.get(spec.fqn, live.row_ids, with_states=True, with_versions=True)
    assert (found.presence == 1).all()
    expected = values_of(spec, live.row_ids)
    assert found.weights.tobytes() == expected["weights"].tobytes()
    for name, column in found.states.items():
        assert column.tobytes() == expected[f"state:{name}"].tobytes()
    assert found.epochs is not None
    assert found.steps is not None
    assert found.times_us is not None
    assert (found.epochs == live.epochs).all()
    assert (found.steps == live.steps).all()
    assert (found.times_us == live.times_us).all()


def test_a_lost_store_is_missed(tmp_path: Path) -> None:
    """Without its store the directory is refused: its log does not claim to hold the rows."""
    build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, range(10))}, num_shards=1)
    shutil.rmtree(tmp_path / "data" / "shard-0000" / "store")
    with pytest.raises(Exception, match="seq"):
        ServerProcess.start(tmp_path / "data")


# Where a process is killed, by the name of what it was about to do.
_POINTS = [
    "TableFileWriter.add",
    "TableFileWriter.finish",
    "RowStore.write_runs",
    "DataDir.prepare",
    "Path.rename",
    "second rename",
]


@pytest.mark.parametrize("point", _POINTS)
def test_killed_at_any_moment_it_is_not_there(tmp_path: Path, point: str) -> None:
    """A process that dies on the way leaves no directory, none that a server starts on; another attempt succeeds."""
    target = tmp_path / "data"
    name = "Path.rename" if point == "second rename" else point
    script = f"""
        import os
        from pathlib import Path
        from headrace.paramserver.config.data_dir import DataDir
        from headrace.paramserver.store.row_store import RowStore
        from headrace.paramserver.store.table_file import TableFileWriter
        from table_rows import ITEMS, build, chunk_of

        original, left = {name}, {2 if point == "second rename" else 1}

        def die(*arguments, **settings):
            global left
            left -= 1
            if not left:
                os.kill(os.getpid(), 9)
            return original(*arguments, **settings)

        {name} = die
        build(Path({str(target)!r}), {{ITEMS: chunk_of(ITEMS, range(400))}}, num_shards=2)
    """
    support = Path(__file__).parents[2] / "support"
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n" + textwrap.dedent(script)],
        check=False,
        capture_output=True,
    )
    assert process.returncode == -9, process.stderr.decode()
    assert not target.exists()
    ready = tmp_path / ".data.backfill" / "ready"
    if point != "second rename":
        # Before its last rename it is none that a server takes.
        with pytest.raises(ConfigError, match="not a directory of Headrace's"):
            DataDir.claim(ready, num_shards=None)
    build(target, {ITEMS: chunk_of(ITEMS, range(400))}, num_shards=2)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with DataDir.claim(target, num_shards=2) as directory:
        assert directory.manifest.num_shards == 2


def test_what_is_given_up_keeps_no_file_open(tmp_path: Path) -> None:
    """Whoever holds on to a builder that failed, as an error's traceback does, holds no file of it."""
    builder = StoreBuilder(tmp_path / "data", num_shards=2, specs=[ITEMS], run="fill")
    with pytest.raises(KeyboardInterrupt), builder:
        builder.add(ITEMS.fqn, chunk_of(ITEMS, range(400)))
        raise KeyboardInterrupt
    assert not files_open_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, one line says so, and nothing is left of what was begun."""

    def fail(self: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TableFileWriter, "finish", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        build(tmp_path / "data", {ITEMS: chunk_of(ITEMS, range(400))})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_shards", "file_mib"), [(1, 256), (8, 256), (16, 128), (1024, 64)])
def test_files_are_long_whatever_the_number_of_shards(num_shards: int, file_mib: int, tmp_path: Path) -> None:
    """A store of terabytes is some thousands of files; those of many shards share what memory they take."""
    with StoreBuilder(tmp_path / "data", num_shards=num_shards, specs=[ITEMS], run="test") as builder:
        assert {files._file_bytes for files in builder._shards} == {file_mib << 20}


def test_rows_that_come_in_pieces_share_files(tmp_path: Path) -> None:
    """A file goes on over many additions up to its length, and every row is found in one of them."""
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


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    """Repeated, falling and foreign row ids are named, within a chunk and from one to the next; nothing is left."""
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([[3, 3]], RequestError, "row 3 follows row 3"),
        ([[1, 2], [2]], RequestError, "row 2 follows row 2"),
        ([[5], [4]], RequestError, "row 4 follows row 5"),
        ([[500]], RowRangeError, "row id 500"),
        ([[-1]], RowRangeError, "row id -1"),
    ]
    for chunks, error, text in cases:
        builder = StoreBuilder(tmp_path / "data", num_shards=2, specs=[ITEMS], run="test")
        with pytest.raises(error, match=text), builder:
            for ids in chunks:
                builder.add(ITEMS.fqn, chunk_of(ITEMS, ids, step=1))
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """A directory with something in it, and one that is being made, are left as they are; an empty one is filled."""
    rows = {VIRTUAL: chunk_of(VIRTUAL, [1, 2**62])}
    (tmp_path / "data").mkdir()
    with StoreBuilder(tmp_path / "data", num_shards=1, specs=[VIRTUAL], run="test") as builder:
        with pytest.raises(ConfigError, match="another backfill"):
            StoreBuilder(tmp_path / "data", num_shards=1, specs=[VIRTUAL], run="test")
        builder.add(VIRTUAL.fqn, rows[VIRTUAL])
        builder.finish()
    with pytest.raises(ConfigError, match="there is something already"):
        build(tmp_path / "data", rows)
    with pytest.raises(ConfigError, match="there is no directory"):
        build(tmp_path / "nowhere" / "data", rows)
