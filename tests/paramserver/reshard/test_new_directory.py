"""The directory of a new server, made of a snapshot: whole or not there; and how trainers and replicas go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from held_ports import hold_ports
from killed_process import run_killed
from offline_snapshot import snapshot_of
from resharding import rows_of
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, snapshot
from torch import nn

from headrace import EmbeddingReplica, RawEmbeddingStreamer
from headrace.cli import main
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.reshard.rebuild import ShardSummary, TableChoice, rebuild
from headrace.paramserver.reshard.remains import find_remains, open_remains
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import verify_snapshot
from headrace.paramserver.store.catalog import Catalog, Scalar
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.schemas.tables import DType
from headrace.schemas.version import MAX_EPOCH

ROWS = {
    ITEMS: chunk_of(ITEMS, range(0, 500, 3)),
    USERS: chunk_of(USERS, range(300), epoch=9),
    VIRTUAL: chunk_of(VIRTUAL, [1, 2**40, 2**62]),
}


def _restore(source: Path, target: Path, num_shards: int = 2, **settings: Any) -> list[ShardSummary]:
    with find_remains(source) as remains, open_remains(remains, None) as shards:
        return rebuild(shards, target, num_shards=num_shards, choice=TableChoice(), **settings)


def _with_meta(path: Path, meta_of: Callable[[dict[bytes, bytes]], dict[bytes, bytes]]) -> Path:
    """Return a snapshot of two shards, of which the second knows something more."""
    data = build(path / "data", ROWS, num_shards=2)
    store = RowStore.open(data / shard_folder(1) / "store", config=StoreConfig(block_cache_bytes=4 << 20))
    store.write([], [], meta=meta_of(store.read_meta()), applied_seq=store.applied_seq)
    store.close()
    return snapshot_of(data, path / "snapshots")


def test_a_source_does_not_change(tmp_path: Path) -> None:
    """All rows come of a snapshot, or of a directory, and are counted; no file of it is touched."""
    source, counted = snapshot(tmp_path, ROWS), [0]

    def files() -> dict[Path, int]:
        paths = [*source.rglob("*"), *(tmp_path / "data").rglob("*")]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = files()
    _restore(source, tmp_path / "new", 4, on_rows=counted.append)
    _restore(tmp_path / "data", tmp_path / "other", 1)
    assert files() == before
    assert sum(counted) == sum(chunk.row_ids.size for chunk in ROWS.values())
    assert rows_of(tmp_path / "new", tmp_path / "again") == rows_of(tmp_path / "data", tmp_path / "first")


@pytest.mark.parametrize(("seen", "highest"), [(5000, 6000), (MAX_EPOCH - 5, MAX_EPOCH - 1)])
def test_an_epoch_seen_by_one_shard_is_not_reused(tmp_path: Path, seen: int, highest: int) -> None:
    """The next epoch is above every shard's, and above those taken since the cut."""
    source = _with_meta(tmp_path, lambda _: Session("run", "rank0", seen, 0, 1).pack())
    _restore(source, tmp_path / "new", 3)
    for shard in range(3):
        store = RowStore.open_read_only(tmp_path / "new" / shard_folder(shard) / "store")
        assert Sessions(store.read_meta()).highest_epoch == highest
        store.close()


def test_scalars_are_kept(tmp_path: Path) -> None:
    """A table's scalars are restored with their version."""
    given = [("step", DType.FLOAT32, b"1234")]
    source = _with_meta(tmp_path, lambda meta: Catalog(meta).set_scalars(ITEMS.fqn, given, 2, 5))
    _restore(source, tmp_path / "new", 3)
    with SnapshotReader(snapshot_of(tmp_path / "new", tmp_path / "again")) as reader:
        assert reader.scalars(ITEMS.fqn) == {"step": Scalar(*given[0], 2, 5)}
        assert reader.scalars(USERS.fqn) == {}


def test_files_are_durable_before_the_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves no directory without all of its stores."""
    source, target, aside = snapshot(tmp_path, ROWS), tmp_path / "new", tmp_path / ".new.restore" / "ready"
    synced: set[Path] = set()

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not target.exists() and path.is_relative_to(aside):
            synced.add(path.relative_to(aside))

    monkeypatch.setattr(os, "fsync", sync)
    _restore(source, target, 3)
    stores = [*target.glob("shard-*/store")]
    paths = {path.relative_to(target) for store in stores for path in (store, *store.iterdir())}
    assert len(stores) == 3 and paths <= synced


def test_damage_is_found(tmp_path: Path) -> None:
    """A flipped byte of any file of a snapshot, and of a row in a stopped server's store, is an error; it is named.

    Nothing is made.
    """
    source = snapshot(tmp_path, ROWS)
    (tmp_path / "copy").mkdir()
    files = sorted(path for path, file in verify_snapshot(source).files().items() if file.size_bytes)
    stored = sorted(path.relative_to(tmp_path / "data") for path in (tmp_path / "data").glob("shard-*/store/*.sst"))
    for original, paths, share in ((source, files, 2), (tmp_path / "data", stored, 16)):
        for path in paths:
            folder = tmp_path / "copy" / "damaged"
            shutil.copytree(original, folder, ignore=shutil.ignore_patterns("snapshots"))
            data = bytearray((folder / path).read_bytes())
            data[len(data) // share] ^= 1
            (folder / path).write_bytes(data)
            with pytest.raises(CorruptionError, match=Path(path).name):
                _restore(folder, tmp_path / "copy" / "new")
            shutil.rmtree(folder)
            assert list((tmp_path / "copy").iterdir()) == []
    assert files and stored


def test_a_target_without_room_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of room, or a target that is none, is found before hours of work, and leaves nothing."""
    source = snapshot(tmp_path, ROWS)
    before = sorted(tmp_path.iterdir())
    for target, text in ((tmp_path, "not empty"), (tmp_path / "nowhere" / "new", "there is no directory")):
        with pytest.raises(ConfigError, match=text):
            _restore(source, target, on_rows=lambda _: pytest.fail("takes rows"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(StorageError, match=r"takes .* KiB, and 100 B are free; nothing was written"):
        _restore(source, tmp_path / "new", on_rows=lambda _: pytest.fail("takes rows"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("at", "nth"),
    [
        ("headrace.paramserver.snapshots.bucket:SnapshotStore.fetch_files", 2),
        ("headrace.paramserver.snapshots.new_data_dir:StoreBuilder.add_records", 2),
        ("headrace.paramserver.store.rows:RowStore.write", 2),
        ("headrace.paramserver.reshard.new_shards:NewShards.finish", 1),
        ("headrace.paramserver.snapshots.new_data_dir:NewDataDir.publish_copy", 1),
        ("headrace.paramserver.snapshots.new_data_dir.move_into_place", 1),
    ],
)
def test_a_killed_process_leaves_no_directory(tmp_path: Path, at: str, nth: int) -> None:
    """After a kill at the n-th call of something, there is no directory, and another attempt succeeds."""
    target, url = tmp_path / "new", f"file://{tmp_path / 'store'}"
    SnapshotStore.of_url(url).upload(snapshot(tmp_path, ROWS))
    arguments = ["restore", url, "--name", "bench", "--data", str(target), "--shards", "2"]
    assert run_killed(f"from headrace.cli import main\nmain({arguments!r})", at=at, nth=nth)
    assert not target.exists()
    assert main(arguments) == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert rows_of(target, tmp_path / "again") == rows_of(tmp_path / "data", tmp_path / "first")


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
    assert main(["restore", str(backup / "one"), "--data", str(data)]) == 0
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
