"""Restoring a server from a snapshot, and how trainers and replicas continue."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from offline_snapshot import snapshot_of
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, snapshot
from torch import nn

from headrace import EmbeddingReplica, RawEmbeddingStreamer
from headrace.cli import main
from headrace.paramserver.ingest.pipeline import META_MARK
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import verify_snapshot
from headrace.paramserver.snapshots.restore import restore_snapshot
from headrace.paramserver.store.catalog import Catalog, Scalar
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.tables import DType
from headrace.schemas.version import MAX_EPOCH
from headrace.streamer.compare import compare_with_store

ROWS = {
    ITEMS: chunk_of(ITEMS, range(0, 500, 3), deleted=[9, 300]),
    USERS: chunk_of(USERS, range(300), epoch=9),
    VIRTUAL: chunk_of(VIRTUAL, [1, 2**40, 2**62]),
}


def _rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the bytes of every row of a snapshot, by table, including deleted ones."""
    with SnapshotReader(folder) as reader:
        return {
            fqn: {
                row: record.tobytes()
                for ids, records in reader.rows(fqn)
                for row, record in zip(ids.tolist(), records, strict=True)
            }
            for fqn in sorted(reader.tables)
        }


def _meta_of(store: Path) -> dict[bytes, bytes]:
    opened = RowStore.open(store, config=StoreConfig(block_cache_bytes=4 << 20))
    try:
        return opened.read_meta()
    finally:
        opened.close()


def _write_meta(shard: Path, meta_of: Callable[[dict[bytes, bytes]], dict[bytes, bytes]]) -> None:
    """Add metadata to a shard's store, made from what it has."""
    store = RowStore.open(shard / "store", config=StoreConfig(block_cache_bytes=4 << 20))
    store.write([], [], meta=meta_of(store.read_meta()), applied_seq=store.applied_seq)
    store.close()


@pytest.mark.parametrize("num_shards", [None, 1, 4])
def test_every_row_is_there(tmp_path: Path, num_shards: int | None) -> None:
    """All rows keep their bytes, whatever the number of shards, and the snapshot does not change."""
    source = snapshot(tmp_path, ROWS)
    checked, distributed = [0], [0]
    manifest = restore_snapshot(
        source, tmp_path / "restored", num_shards=num_shards, on_progress=checked.append, on_rows=distributed.append
    )
    assert sum(checked) == manifest.size_bytes  # the command shows a bar of both
    num_rows = 0 if num_shards in (None, len(manifest.parts)) else sum(map(len, _rows_of(source).values()))
    assert sum(distributed) == num_rows
    assert verify_snapshot(source) == manifest
    with ServerProcess.start(tmp_path / "restored", shards=num_shards or 3):
        pass  # a server starts on the directory
    assert _rows_of(snapshot_of(tmp_path / "restored", tmp_path / "again")) == _rows_of(source)
    assert verify_snapshot(source) == manifest  # the server has not changed it either
    meta = _meta_of(tmp_path / "restored" / "shard-0000" / "store")
    assert Sessions(meta).highest_epoch > 9 + 100  # epochs taken after the cut are not reused


def test_sessions_restart_but_keep_their_step(tmp_path: Path) -> None:
    """Batches and seqs start from 1 again; a trainer in mid-step has no exact step."""
    amid = Session("run", "rank0", 3, 0, 2, last_client_seq=9, step=5, exact_step=5, time_us=1, ended_client_seq=7)
    at_step = Session("run", "rank1", 3, 1, 2, last_client_seq=7, step=5, exact_step=5, time_us=1, ended_client_seq=7)
    data = build(tmp_path / "data", ROWS, num_shards=1)
    bringer = Session("fill", "log", 1, 0, 0, last_client_seq=4, last_seq=1002)
    amid.last_seq, at_step.last_seq = 1000, 1001
    _write_meta(data / "shard-0000", lambda _: amid.pack() | at_step.pack() | bringer.pack())
    restore_snapshot(snapshot_of(data, tmp_path / "snapshots"), tmp_path / "restored")
    sessions = Sessions(_meta_of(tmp_path / "restored" / "shard-0000" / "store"))
    assert max(session.last_seq for session in sessions) <= 1, "or new sessions would be forgotten first"
    found = [sessions.find("run", client) for client in ("rank0", "rank1")]
    assert [(s.last_client_seq, s.ended_client_seq, s.step) for s in found if s] == [(0, 0, 5)] * 2
    assert [(s.exact_step, s.is_at_exact_cut) for s in found if s] == [(-1, False), (5, True)]


@pytest.mark.parametrize("num_shards", [None, 3])
@pytest.mark.parametrize(("seen", "highest"), [(5000, 6000), (MAX_EPOCH - 5, MAX_EPOCH - 1)])
def test_an_epoch_seen_by_one_shard_is_not_reused(
    tmp_path: Path, seen: int, highest: int, num_shards: int | None
) -> None:
    """The next epoch is above every shard's, and above those taken since the cut."""
    data = build(tmp_path / "data", ROWS, num_shards=2)
    _write_meta(data / "shard-0001", lambda _: Session("run", "rank0", seen, 0, 1).pack())
    restore_snapshot(snapshot_of(data, tmp_path / "snapshots"), tmp_path / "restored", num_shards=num_shards)
    stores = [*(tmp_path / "restored").glob("shard-*/store")]
    assert len(stores) == (num_shards or 2)
    assert max(Sessions(_meta_of(store)).highest_epoch for store in stores) == highest


def test_the_mark_of_the_old_log_is_dropped(tmp_path: Path) -> None:
    """A restored store begins with a new log, so it keeps no mark of a record of the old one."""
    data = build(tmp_path / "data", ROWS, num_shards=1)
    _write_meta(data / "shard-0000", lambda _: {META_MARK: b"2 77"})
    restore_snapshot(snapshot_of(data, tmp_path / "snapshots"), tmp_path / "restored")
    assert META_MARK not in _meta_of(tmp_path / "restored" / "shard-0000" / "store")


@pytest.mark.parametrize("num_shards", [None, 3])
def test_scalars_are_kept(tmp_path: Path, num_shards: int | None) -> None:
    """A table's scalars are restored with their version."""
    data = build(tmp_path / "data", ROWS, num_shards=1)
    given = [("step", DType.FLOAT32, np.float32(7).tobytes())]
    _write_meta(data / "shard-0000", lambda meta: Catalog(meta).set_scalars(ITEMS.fqn, given, 2, 5))
    restore_snapshot(snapshot_of(data, tmp_path / "snapshots"), tmp_path / "restored", num_shards=num_shards)
    with SnapshotReader(snapshot_of(tmp_path / "restored", tmp_path / "again")) as reader:
        assert reader.scalars(ITEMS.fqn) == {"step": Scalar(*given[0], 2, 5)}
        assert reader.scalars(USERS.fqn) == {}


def test_files_are_durable_before_the_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves no directory without all of its stores."""
    source, target, aside = snapshot(tmp_path, ROWS), tmp_path / "restored", tmp_path / ".restored.restore" / "ready"
    synced: set[Path] = set()

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not target.exists() and path.is_relative_to(aside):
            synced.add(path.relative_to(aside))

    monkeypatch.setattr(os, "fsync", sync)
    restore_snapshot(source, target)
    stores = [*target.glob("shard-*/store")]
    paths = {path.relative_to(target) for store in stores for path in (store, *store.iterdir())}
    assert len(stores) == 3 and paths <= synced


def test_a_snapshot_without_tables_has_no_rows_to_distribute(tmp_path: Path) -> None:
    """It can be restored only with its own number of shards."""
    source = snapshot(tmp_path, {}, num_shards=2)
    with pytest.raises(ConfigError, match="without tables has no rows to distribute; omit --shards"):
        restore_snapshot(source, tmp_path / "other", num_shards=3)
    assert not (tmp_path / "other").exists()
    restore_snapshot(source, tmp_path / "restored")
    assert (tmp_path / "restored" / "headrace.json").is_file()


def test_damage_is_found(tmp_path: Path) -> None:
    """A flipped byte of any file is an error that names it, and nothing is made."""
    source = snapshot(tmp_path, ROWS)
    (tmp_path / "copy").mkdir()
    for path in sorted(path for path, file in verify_snapshot(source).files().items() if file.size_bytes):
        folder = tmp_path / "copy" / "damaged"
        shutil.copytree(source, folder)
        data = bytearray((folder / path).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / path).write_bytes(data)
        with pytest.raises(CorruptionError, match=Path(path).name):
            restore_snapshot(folder, tmp_path / "copy" / "restored")
        shutil.rmtree(folder)
        assert list((tmp_path / "copy").iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A non-empty directory is refused and unchanged; an empty one is used."""
    source = snapshot(tmp_path, ROWS)
    target = tmp_path / "restored"
    target.mkdir()
    (target / "mine").write_text("mine")
    for num_shards in (None, 2):
        with pytest.raises(ConfigError, match="not empty"):
            restore_snapshot(source, target, num_shards=num_shards)
    assert [path.name for path in target.iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="there is no directory"):
        restore_snapshot(source, tmp_path / "nowhere" / "restored")
    (target / "mine").unlink()
    restore_snapshot(source, target)
    assert (target / "headrace.json").is_file()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error that leaves nothing."""
    source = snapshot(tmp_path, ROWS)
    before = sorted(tmp_path.iterdir())

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        restore_snapshot(source, tmp_path / "restored")
    assert sorted(tmp_path.iterdir()) == before


def test_too_little_room_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of room is found before hours of work; hard links need none."""
    source = snapshot(tmp_path, ROWS)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(StorageError, match=r"takes .* KiB, and 100 B are free; nothing was written"):
        restore_snapshot(source, tmp_path / "restored", num_shards=7, on_progress=lambda _: pytest.fail("checks"))
    restore_snapshot(source, tmp_path / "restored")


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy between file systems has the same rows."""
    source = snapshot(tmp_path, ROWS)

    def fail(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fail)
        restore_snapshot(source, tmp_path / "restored")
    assert {path.stat().st_nlink for path in (tmp_path / "restored").rglob("*.sst")} == {1}
    assert _rows_of(snapshot_of(tmp_path / "restored", tmp_path / "again")) == _rows_of(source)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("shutil.copyfile", 1),
        ("RowStore.write", 2),
        ("DataDir.prepare", 1),
        ("Path.rename", 1),
        ("new_data_dir.move_into_place", 1),
    ],
)
def test_a_killed_process_leaves_no_directory(tmp_path: Path, name: str, times: int) -> None:
    """After a kill at the n-th call of something, there is no directory, and another attempt succeeds."""
    source, target = snapshot(tmp_path, ROWS), tmp_path / "restored"
    script = f"""
        import os, shutil
        from pathlib import Path
        from headrace.paramserver.config.data_dir import DataDir
        from headrace.paramserver.store.rows import RowStore
        from headrace.paramserver.snapshots import new_data_dir
        from headrace.paramserver.snapshots.restore import restore_snapshot

        original, left = {name}, {times}

        def die(*arguments, **settings):
            global left
            left -= 1
            if not left:
                os.kill(os.getpid(), 9)
            return original(*arguments, **settings)

        {name} = die
        restore_snapshot(Path({str(source)!r}), Path({str(target)!r}))
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True)
    assert process.returncode == -9, process.stderr.decode()
    assert not target.exists()
    manifest = restore_snapshot(source, target)
    assert not (tmp_path / ".restored.restore").exists()
    assert verify_snapshot(source) == manifest
    assert _rows_of(snapshot_of(target, tmp_path / "again")) == _rows_of(source)


class _Training:
    """Two tables under sparse Adagrad."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = nn.ModuleDict(
            {name: nn.Embedding(rows, 8, sparse=True) for name, rows in (("films", 200), ("users", 90))}
        )
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        losses = [table(torch.randint(0, table.num_embeddings, (20,))).square().sum() for table in self.model.values()]
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()


@pytest.fixture
def training() -> Iterator[_Training]:
    with torch.random.fork_rng():
        yield _Training()


def _lose_and_restore(data: Path, snapshot_folder: Path) -> int:
    """Replace a lost directory; return the exit code."""
    shutil.rmtree(data)
    return main(["snapshot", "restore", str(snapshot_folder), "--data", str(data)])


def test_after_a_restore_trainers_and_replicas_continue(
    tmp_path: Path, training: _Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer with newer acked rows sends all rows again, also from its checkpoint, and a replica ends up equal."""
    data, backup, port = tmp_path / "data", tmp_path / "backup", hold_ports(2)
    with ServerProcess.start(data, shards=2, port=port) as server:
        streamer = RawEmbeddingStreamer(server.address, run="r", on_new_store="resync", connect_timeout_s=60)
        streamer.attach(training.model, training.optimizer, publish="updated")
        for _ in range(3):
            training.step()
        streamer.flush()
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
        assert main(["snapshot", "fetch", "--server", server.address, "--to", str(backup)]) == 0
        for _ in range(3):
            training.step()
        streamer.flush()  # acked, but in no snapshot
        checkpoint = streamer.state_dict()
        replica = EmbeddingReplica(server.address)
        server.kill()
    assert _lose_and_restore(data, backup / "one") == 0
    assert f"Next: headrace serve --data {data}" in capsys.readouterr().out
    with ServerProcess.start(data, port=port) as server:
        training.step()
        streamer.flush(timeout_s=60)
        assert compare_with_store(streamer.tables, server.address).is_equal
        replica.wait_for(streamer.stats().step, 60.0, epoch=streamer.epoch)
        for name, table in training.model.items():
            assert torch.equal(replica.lookup(f"{name}.weight", torch.arange(table.num_embeddings)), table.weight)
        replica.close()
        streamer.close()
        with RawEmbeddingStreamer(server.address, run="r", connect_timeout_s=60) as resumed:
            assert resumed.epoch > streamer.epoch + 100
            resumed.attach(training.model, training.optimizer, publish="updated")
            resumed.load_state_dict(checkpoint)
            training.step()
            resumed.flush()
            assert compare_with_store(resumed.tables, server.address).is_equal


def test_a_trainer_that_may_not_resync_stops(tmp_path: Path, training: _Training) -> None:
    """A trainer whose acked rows are missing stops with advice and sends nothing."""
    data, port = tmp_path / "data", hold_ports()
    with ServerProcess.start(data, port=port) as server:
        streamer = RawEmbeddingStreamer(server.address, run="r", connect_timeout_s=60)
        streamer.attach(training.model, training.optimizer, publish="updated")
        training.step()
        streamer.flush()
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
        server.kill()
    backup = tmp_path / "one"
    (data / "snapshots" / "one").rename(backup)
    assert _lose_and_restore(data, backup) == 0
    with ServerProcess.start(data, port=port) as server:
        training.step()
        with pytest.raises(StorageError, match=r"another store than before .* set on_new_store to resync"):
            streamer.flush(timeout_s=60)
        streamer.close(flush=False)
        with EmbeddingReplica(server.address) as replica:
            assert (replica.epoch, replica.step) == (1, 1)  # as in the snapshot
