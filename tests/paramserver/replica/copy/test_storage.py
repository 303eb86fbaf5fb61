"""Where a copy's tables live: by name and pattern, within the planned memory, in a locked directory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from table_rows import chunk_of, snapshot

from headrace.paramserver.replica.api.config import DiskStorage, MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.copy.storage import CopyFolders, CopyStorage, memory_needed
from headrace.paramserver.replica.tables import disk_stores
from headrace.paramserver.replica.tables.identity_map import IdentityMap, size_of_identity_map
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.snapshots.directory import link_or_copy, read_manifest
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.tables import DType, TableSpec

WAIT_S = 10.0
USER = TableSpec(fqn="user.weight", num_rows=1_000_000, dim=64, dtype=DType.FLOAT32)
ITEM = TableSpec(fqn="item.weight", num_rows=0, dim=64, dtype=DType.FLOAT32)
SMALL = TableSpec(fqn="small.weight", num_rows=10, dim=4, dtype=DType.FLOAT32)


def test_a_name_counts_before_patterns() -> None:
    """An exact fqn decides, then the first matching pattern, then memory."""
    one, two, three = MemoryStorage(), DiskStorage(memory_bytes=1000), DiskStorage(memory_bytes=2000)
    config = ReplicaConfig(storage={"user.*": two, "*.weight": three, "user.weight": one})
    assert config.storage_of("user.weight") is one
    assert config.storage_of("user.other") is two
    assert config.storage_of("item.weight") is three
    assert config.storage_of("item.bias") == MemoryStorage()
    assert config.uses_disk and not ReplicaConfig(storage={"*": one}).uses_disk
    assert ReplicaConfig(disk_dir="d", snapshot_dir="s").snapshot_dir == Path("s")  # type: ignore[arg-type]


def test_each_table_is_made_where_it_is_to_live(tmp_path: Path) -> None:
    """Tables on disk share one folder, created with the first; unwanted tables are not created."""
    folders = CopyFolders(tmp_path)
    config = ReplicaConfig(
        storage={"user.*": DiskStorage(memory_bytes=8 << 20)}, tables=frozenset({USER.fqn, ITEM.fqn})
    )
    storage = CopyStorage(config, folders, [USER, ITEM])
    assert storage.make(SMALL) is None and isinstance(storage.make(ITEM), MemoryTable)
    assert not list(tmp_path.glob("copy-*"))
    table = storage.make(USER)
    assert isinstance(table, DiskTable) and not table.is_loaded
    assert len(list(tmp_path.glob("copy-*"))) == 1
    storage.close()
    storage.close()
    assert not list(tmp_path.glob("copy-*"))
    with pytest.raises(UnavailableError, match="closed"):
        storage.make(USER)
    folders.close()


def test_a_copy_that_is_given_up_links_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the storage during linking waits for one file, not for all."""
    path = snapshot(tmp_path, {USER: chunk_of(USER, range(20))}, num_shards=2)
    folders = CopyFolders(tmp_path / "disk")
    storage = CopyStorage(ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 << 20)}), folders, [USER])
    linked: list[Path] = []
    closing = threading.Thread(target=storage.close)

    def link(source: Path, target: Path) -> None:
        linked.append(source)
        link_or_copy(source, target)
        if len(linked) == 2:
            closing.start()
            deadline_s = time.monotonic() + WAIT_S
            while not storage._is_closed:
                assert time.monotonic() < deadline_s
                closing.join(0.001)
            assert closing.is_alive()  # it waits until nothing is linked

    monkeypatch.setattr(disk_stores, "link_or_copy", link)
    with pytest.raises(UnavailableError, match="closed"):
        storage.link(path, read_manifest(path), check_wanted=storage.check_open)
    closing.join()
    assert len(linked) == 2 and not list((tmp_path / "disk").glob("copy-*"))
    folders.close()


def test_memory_of_a_table_on_disk_is_what_was_given_to_it(tmp_path: Path) -> None:
    """The plan counts hot rows and blocks, never more hot rows than exist, and the table agrees."""
    config = ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 << 20, hot_share=0.75)})
    needed = memory_needed(config, [USER], 10 << 30)
    assert 0.97 * (8 << 20) < needed <= (8 << 20) + (128 << 10)
    assert memory_needed(config, [USER, ITEM], 10 << 30) < 17 << 20
    assert memory_needed(config, [SMALL], 0) < 3 << 20
    assert memory_needed(ReplicaConfig(), [USER], 0) > 256_000_000
    assert memory_needed(ReplicaConfig(), [ITEM], 10 << 30) > 10 << 30
    assert memory_needed(ReplicaConfig(tables=frozenset()), [USER], 0) == 0
    folders = CopyFolders(tmp_path)
    storage = CopyStorage(config, folders, [USER])
    made = [storage.make(USER), storage.make(SMALL)]
    assert made[0] is not None and made[0].size_bytes == needed
    assert made[1] is not None and made[1].size_bytes < 1 << 20  # it came later: hot rows only
    storage.close()
    folders.close()


@pytest.mark.parametrize("begins_from", ["nothing", "snapshot"])
def test_stores_get_the_threads_and_the_memory_that_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_from: str
) -> None:
    """The stores share the sum of the tables' memory, and the set number of threads."""
    nums_threads, configs = [], []

    class Threads(ThreadPoolExecutor):
        def __init__(self, max_workers: int, **settings: Any) -> None:
            nums_threads.append(max_workers)
            super().__init__(max_workers, **settings)

    def open_store(path: Path, *, config: StoreConfig) -> RowStore:
        configs.append(config)
        return original(path, config=config)

    path = snapshot(tmp_path, {USER: chunk_of(USER, range(20))}, num_shards=2)
    original = RowStore.open
    monkeypatch.setattr(disk_stores, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(RowStore, "open", open_store)
    disks = {"user.*": DiskStorage(memory_bytes=40 << 20), "item.*": DiskStorage(memory_bytes=24 << 20, hot_share=0.25)}
    folders = CopyFolders(tmp_path / "disk")
    storage = CopyStorage(ReplicaConfig(storage=disks, disk_threads=7), folders, [USER, ITEM, SMALL])
    if begins_from == "snapshot":
        storage.link(path, read_manifest(path), check_wanted=storage.check_open)
    assert [storage.make(spec) is not None for spec in (USER, ITEM)] == [True, True]
    storage.close()
    folders.close()
    assert nums_threads == [7] and len(configs) == (2 if begins_from == "snapshot" else 1)
    given_bytes = sum(config.block_cache_bytes + 3 * config.write_buffer_bytes for config in configs)
    assert given_bytes == (20 << 20) + (18 << 20)


@pytest.mark.parametrize("storage", [{}, {"*": DiskStorage(memory_bytes=8 << 20)}], ids=["memory", "disk"])
def test_memory_of_identities_is_planned(storage: dict[str, DiskStorage]) -> None:
    """The plan counts identity maps, which are in memory wherever the table is."""
    config, plain = ReplicaConfig(storage=storage), [USER, ITEM]
    specs = [dataclasses.replace(spec, has_identities=True) for spec in plain]
    more_bytes = memory_needed(config, specs, 0) - memory_needed(config, plain, 0)
    assert more_bytes == sum(map(size_of_identity_map, specs))
    assert more_bytes > IdentityMap(specs[0]).size_bytes


@pytest.mark.parametrize("settings", [{"memory_bytes": 0}, {"hot_share": 0.0}, {"hot_share": 1.0}])
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    """A wrong setting is an error that names it."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DiskStorage(**settings)  # type: ignore[arg-type]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Old copies are removed at the start, other files stay, and each new copy has its own folder."""
    for name in ("copy-000001/shard-0000", "copy-000017", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x")
    folders = CopyFolders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "mine"]
    assert [folders.new().name, folders.new().name] == ["copy-000001", "copy-000002"]
    folders.close()
    folders.close()
    assert (tmp_path / "mine" / "file").exists()


def test_two_replicas_do_not_share_a_directory(tmp_path: Path) -> None:
    """A second replica is refused, removes nothing, and gets the directory after the first."""
    folders = CopyFolders(tmp_path / "new")
    folders.new().mkdir()
    with pytest.raises(ConfigError, match=r"new is in use by another replica"):
        CopyFolders(tmp_path / "new")
    assert (tmp_path / "new" / "copy-000001").is_dir()
    folders.close()
    CopyFolders(tmp_path / "new").close()


def test_a_child_that_was_forked_keeps_no_directory(tmp_path: Path) -> None:
    """A forked child's open lock file does not keep out the next replica."""
    folders = CopyFolders(tmp_path)
    of_child = os.dup(folders._lock.fd)
    try:
        folders.close()
        CopyFolders(tmp_path).close()
    finally:
        os.close(of_child)


def test_a_temporary_directory_goes_with_its_replica() -> None:
    """A temporary directory is removed by `close`."""
    folders = CopyFolders(None)
    folders.new().mkdir()
    assert folders.path.is_dir()
    folders.close()
    assert not folders.path.exists()


def test_a_temporary_directory_goes_with_its_process(tmp_path: Path) -> None:
    """A temporary directory goes with its process unless it is killed; a forked child removes nothing."""
    program = """if True:
        import os, signal, sys
        from headrace.paramserver.replica.copy.storage import CopyFolders
        for ending in ("", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGINT)"):
            if os.fork():
                os.wait()
                continue
            folders = CopyFolders(None)
            folders.new().mkdir()
            if not os.fork():
                sys.exit()
            os.wait()
            print(sorted(os.listdir(folders.path)), flush=True)
            exec(ending)
            break
    """
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [str(["LOCK", "copy-000001"])] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """A path that cannot be a directory is a one-line error that names the setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="disk_dir"):
        CopyFolders(tmp_path / "file")
