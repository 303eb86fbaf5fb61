"""Restoring a server from a snapshot, and how trainers and replicas continue."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from killed_process import run_killed
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

ROWS = {
    ITEMS: chunk_of(ITEMS, range(0, 500, 3)),
    USERS: chunk_of(USERS, range(300), epoch=9),
    VIRTUAL: chunk_of(VIRTUAL, [1, 2**40, 2**62]),
}


def _rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the bytes of every row of a snapshot, by table."""
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


def _restored(path: Path, metas: Sequence[Callable[[dict[bytes, bytes]], dict[bytes, bytes]]], **settings: Any) -> Path:
    """Make a server with a shard for each function, which says what is added to the shard's metadata; restore it."""
    data = build(path / "data", ROWS, num_shards=len(metas))
    for shard, meta_of in enumerate(metas):
        store = RowStore.open(data / f"shard-{shard:04d}" / "store", config=StoreConfig(block_cache_bytes=4 << 20))
        store.write([], [], meta=meta_of(store.read_meta()), applied_seq=store.applied_seq)
        store.close()
    restore_snapshot(snapshot_of(data, path / "snapshots"), path / "restored", **settings)
    return path / "restored"


@pytest.mark.parametrize("num_shards", [None, 4])
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
    bringer = Session("fill", "log", 1, 0, 0, last_client_seq=4, last_seq=1002)
    amid.last_seq, at_step.last_seq = 1000, 1001
    meta = amid.pack() | at_step.pack() | bringer.pack() | {META_MARK: b"2 77"}
    restored = _meta_of(_restored(tmp_path, [lambda _: meta]) / "shard-0000" / "store")
    assert META_MARK not in restored, "the mark of a record of the old log"
    sessions = Sessions(restored)
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
    seen_by_one = Session("run", "rank0", seen, 0, 1).pack()
    restored = _restored(tmp_path, [lambda _: {}, lambda _: seen_by_one], num_shards=num_shards)
    stores = [*restored.glob("shard-*/store")]
    assert len(stores) == (num_shards or 2)
    assert max(Sessions(_meta_of(store)).highest_epoch for store in stores) == highest


@pytest.mark.parametrize("num_shards", [None, 3])
def test_scalars_are_kept(tmp_path: Path, num_shards: int | None) -> None:
    """A table's scalars are restored with their version."""
    given = [("step", DType.FLOAT32, np.float32(7).tobytes())]
    restored = _restored(
        tmp_path, [lambda meta: Catalog(meta).set_scalars(ITEMS.fqn, given, 2, 5)], num_shards=num_shards
    )
    with SnapshotReader(snapshot_of(restored, tmp_path / "again")) as reader:
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


def _fail(code: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of room, or a target that is none, is found before hours of work, or on the way, and leaves nothing."""
    source = snapshot(tmp_path, ROWS)
    before = sorted(tmp_path.iterdir())
    for target, text in ((tmp_path, "not empty"), (tmp_path / "nowhere" / "restored", "there is no directory")):
        with pytest.raises(ConfigError, match=text):
            restore_snapshot(source, target, on_progress=lambda _: pytest.fail("checks"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(StorageError, match=r"takes .* KiB, and 100 B are free; nothing was written"):
        restore_snapshot(source, tmp_path / "restored", num_shards=7, on_progress=lambda _: pytest.fail("checks"))
    with monkeypatch.context() as patched, pytest.raises(StorageError, match="the disk is full"):
        patched.setattr(shutil, "copyfile", _fail(errno.ENOSPC))
        restore_snapshot(source, tmp_path / "restored")
    assert sorted(tmp_path.iterdir()) == before
    restore_snapshot(source, tmp_path / "restored")


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy between file systems has the same rows."""
    source = snapshot(tmp_path, ROWS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", _fail(errno.EXDEV))
        restore_snapshot(source, tmp_path / "restored")
    assert {path.stat().st_nlink for path in (tmp_path / "restored").rglob("*.sst")} == {1}
    assert _rows_of(snapshot_of(tmp_path / "restored", tmp_path / "again")) == _rows_of(source)


@pytest.mark.parametrize(
    ("at", "nth"),
    [
        ("shutil.copyfile", 1),
        ("headrace.paramserver.store.rows:RowStore.write", 2),
        ("headrace.paramserver.snapshots.new_data_dir:NewDataDir.publish_copy", 1),
        ("headrace.paramserver.snapshots.new_data_dir.move_into_place", 1),
    ],
)
def test_a_killed_process_leaves_no_directory(tmp_path: Path, at: str, nth: int) -> None:
    """After a kill at the n-th call of something, there is no directory, and another attempt succeeds."""
    source, target = snapshot(tmp_path, ROWS), tmp_path / "restored"
    work = f"""
from headrace.paramserver.snapshots.restore import restore_snapshot
restore_snapshot(Path({str(source)!r}), Path({str(target)!r}))
"""
    assert run_killed(work, at=at, nth=nth)
    assert not target.exists()
    manifest = restore_snapshot(source, target)
    assert not (tmp_path / ".restored.restore").exists()
    assert verify_snapshot(source) == manifest
    assert _rows_of(snapshot_of(target, tmp_path / "again")) == _rows_of(source)


class _Training:
    """Two tables under sparse Adagrad."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)
        self.model = nn.ModuleDict(
            {name: nn.Embedding(rows, 8, sparse=True) for name, rows in (("films", 200), ("users", 90))}
        )
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        losses = []
        for table in self.model.values():
            ids = torch.randint(0, table.num_embeddings, (20,), generator=self.generator)
            losses.append(table(ids).square().sum())
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()


def test_after_a_restore_trainers_and_replicas_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer with newer acked rows sends all rows again, also from its checkpoint, and a replica ends up equal."""
    data, backup, port, training = tmp_path / "data", tmp_path / "backup", hold_ports(2), _Training()
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
    shutil.rmtree(data)
    assert main(["snapshot", "restore", str(backup / "one"), "--data", str(data)]) == 0
    assert f"Next: headrace serve --data {data}" in capsys.readouterr().out
    with ServerProcess.start(data, port=port) as server:
        training.step()
        streamer.flush(timeout_s=60)
        assert streamer.audit().is_equal
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
            assert resumed.audit().is_equal
