"""Where tables live: by name and pattern, within the memory that was planned."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from table_rows import chunk_of, snapshot

from headrace.paramserver.replica import disk_stores
from headrace.paramserver.replica.config import DiskStorage, MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.copy_folders import CopyFolders
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.identity_map import IdentityMap, size_of_identity_map
from headrace.paramserver.replica.memory_table import MemoryTable
from headrace.paramserver.replica.storage import Storage, memory_needed
from headrace.paramserver.snapshots.snapshot_files import link_or_copy, read_manifest
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.tables import DType, TableSpec

WAIT_S = 10.0
USER = TableSpec(fqn="user.weight", num_rows=1_000_000, dim=64, dtype=DType.FLOAT32)
ITEM = TableSpec(fqn="item.weight", num_rows=0, dim=64, dtype=DType.FLOAT32)
SMALL = TableSpec(fqn="small.weight", num_rows=10, dim=4, dtype=DType.FLOAT32)


def test_a_name_counts_before_patterns() -> None:
    """A table is where its fqn says, else where the first pattern says that matches, else in memory."""
    one, two, three = MemoryStorage(), DiskStorage(memory_bytes=1000), DiskStorage(memory_bytes=2000)
    config = ReplicaConfig(storage={"user.*": two, "*.weight": three, "user.weight": one})
    assert config.storage_of("user.weight") is one
    assert config.storage_of("user.other") is two
    assert config.storage_of("item.weight") is three
    assert config.storage_of("item.bias") == MemoryStorage()
    assert config.uses_disk and not ReplicaConfig(storage={"*": one}).uses_disk


def test_each_table_is_made_where_it_is_to_live(tmp_path: Path) -> None:
    """Tables on disk share one folder, made with the first of them; what is not wanted is not made."""
    folders = CopyFolders(tmp_path)
    config = ReplicaConfig(
        storage={"user.*": DiskStorage(memory_bytes=8 << 20)}, tables=frozenset({USER.fqn, ITEM.fqn})
    )
    storage = Storage(config, folders, [USER, ITEM])
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
    """Who closes the storage while files are linked, which may be copying, waits for one of them and not for all."""
    path = snapshot(tmp_path, {USER: chunk_of(USER, range(20))}, num_shards=2)
    folders = CopyFolders(tmp_path / "disk")
    storage = Storage(ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 << 20)}), folders, [USER])
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
    """A plan counts hot rows and blocks, not rows, and no hot rows that there are none for; the table says the same."""
    config = ReplicaConfig(storage={"*": DiskStorage(memory_bytes=8 << 20, hot_share=0.75)})
    needed = memory_needed(config, [USER], 10 << 30)
    assert 0.97 * (8 << 20) < needed <= (8 << 20) + (128 << 10)
    assert memory_needed(config, [USER, ITEM], 10 << 30) < 17 << 20
    assert memory_needed(config, [SMALL], 0) < 3 << 20
    assert memory_needed(ReplicaConfig(), [USER], 0) > 256 << 20
    assert memory_needed(ReplicaConfig(), [ITEM], 10 << 30) > 10 << 30
    assert memory_needed(ReplicaConfig(tables=frozenset()), [USER], 0) == 0
    folders = CopyFolders(tmp_path)
    storage = Storage(config, folders, [USER])
    made = [storage.make(USER), storage.make(SMALL)]
    assert made[0] is not None and made[0].size_bytes == needed
    assert made[1] is not None and made[1].size_bytes < 1 << 20  # it came later: hot rows only
    storage.close()
    folders.close()


@pytest.mark.parametrize("begins_from", ["nothing", "snapshot"])
def test_stores_get_the_threads_and_the_memory_that_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_from: str
) -> None:
    """The tables' parts of RocksDB's memory are added up and shared by the stores; the threads are those asked for."""
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
    storage = Storage(ReplicaConfig(storage=disks, disk_threads=7), folders, [USER, ITEM, SMALL])
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
    """A plan counts the maps of identities, whose rows are in memory wherever the table is."""
    config, plain = ReplicaConfig(storage=storage), [USER, ITEM]
    specs = [dataclasses.replace(spec, has_identities=True) for spec in plain]
    more_bytes = memory_needed(config, specs, 0) - memory_needed(config, plain, 0)
    assert more_bytes == sum(map(size_of_identity_map, specs))
    assert more_bytes > IdentityMap(specs[0]).size_bytes


@pytest.mark.parametrize("settings", [{"memory_bytes": 0}, {"hot_share": 0.0}, {"hot_share": 1.0}])
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    """A setting that is none is an error that names it."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DiskStorage(**settings)  # type: ignore[arg-type]
