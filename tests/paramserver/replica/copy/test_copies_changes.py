"""Switches from copy to copy against real servers."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_training import STORAGE, WAIT_S, Training, assert_equal, make_snapshot, settle
from held_ports import hold_ports
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.tables.base import Found, ReplicaTable
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.directory import verify_snapshot
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, StorageError, UnavailableError


@STORAGE
def test_snapshots_are_switched_under_lookups(
    server: ServerProcess, training: Training, tmp_path: Path, storage: Any
) -> None:
    """Switching to another snapshot and back fails no lookup, and the rows are equal."""
    first = make_snapshot(server)
    training.step()
    training.flush()
    settings: dict[str, Any] = {"consistency": "step", "storage": storage, "disk_dir": tmp_path / "disk"}
    with EmbeddingReplica(server.address, snapshot=first, **settings) as replica:
        assert_equal(replica, training)
        failures: list[object] = []
        may_go_back, is_over = threading.Event(), threading.Event()

        def read() -> None:
            newest = 0.0
            while not is_over.is_set() and not failures:
                try:
                    value = float(replica.lookup("left.weight", [7])[0, 0])
                except HeadraceError as exc:
                    failures.append(exc)
                else:
                    # The copy before may be an update behind the one that is dropped.
                    if value < newest and not may_go_back.is_set():
                        failures.append((value, newest))
                    newest = value

        reader = threading.Thread(target=read)
        reader.start()
        try:
            second = make_snapshot(server)
            for _ in range(3):
                training.step()
                replica.load_snapshot(second, timeout_s=WAIT_S)
                settle(replica, training)
                assert_equal(replica, training)
                assert len(list(tmp_path.glob("disk/copy-*"))) == (2 if storage else 0)
            training.step()
            may_go_back.set()
            replica.roll_back()
        finally:
            is_over.set()
            reader.join()
        assert not failures
        settle(replica, training)
        assert_equal(replica, training)
        with pytest.raises(ConfigError, match="no previous copy"):
            replica.roll_back()
    assert not list(tmp_path.glob("disk/copy-*"))
    verify_snapshot(second)  # what is linked to was not written to


def test_directories_may_be_strings(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """Directories may be given as strings."""
    snapshot, kept = str(make_snapshot(server)), str(tmp_path / "kept")
    settings: dict[str, Any] = {
        "storage": {"*": DiskStorage()},
        "disk_dir": str(tmp_path / "disk"),
        "snapshot_dir": kept,
    }
    with EmbeddingReplica(server.address, snapshot=snapshot, **settings) as replica:
        replica.load_snapshot(snapshot, timeout_s=WAIT_S)
        assert_equal(replica, training)
    assert ReplicaConfig(**settings).snapshot_dir == Path(kept)


def test_a_bad_snapshot_changes_nothing(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """A damaged, missing or too large snapshot is refused, and lookups go on."""
    folder = make_snapshot(server)
    with EmbeddingReplica(server.address) as replica:
        with pytest.raises(ConfigError, match="no snapshot"):
            replica.load_snapshot(tmp_path)
        file = next((folder / "shard-0000").glob("*.sst"))
        data = file.read_bytes()
        file.unlink()  # it is a hard link to the store's own
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptionError, match=file.name):
            replica.load_snapshot(folder)
        assert_equal(replica, training)
    folder = make_snapshot(server)
    with EmbeddingReplica(server.address, max_memory_bytes=30_000) as replica:
        with pytest.raises(ConfigError, match=r"KiB, .*B are free"):
            replica.load_snapshot(folder)
        assert_equal(replica, training)
    with pytest.raises(ConfigError, match=r"KiB, .*B are free"):
        EmbeddingReplica(server.address, max_memory_bytes=1000)


def _left_behind(folder: Path) -> tuple[EmbeddingReplica, Training, int]:
    """Return a replica whose server, of one step, is gone, the trainer's rows, and the server's port."""
    port = hold_ports(2)
    with ServerProcess.start(folder, shards=2, port=port) as server:
        training = Training(server.address)
        training.step()
        training.flush()
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2)
        training.close()
        return replica, training, port


def test_another_store_at_the_address_is_taken_up(tmp_path: Path) -> None:
    """The replica answers from the old store until it has copied the new one."""
    replica, training, port = _left_behind(tmp_path / "one")
    assert float(replica.lookup("left.weight", 3)[0]) == 1.0
    with replica, ServerProcess.start(tmp_path / "two", shards=1, port=port) as server:
        training = Training(server.address)
        for _ in range(5):
            training.step()
        training.flush()
        replica.wait_for(5, WAIT_S)
        assert_equal(replica, training)
        training.close()


def test_an_empty_server_at_the_address_takes_nothing_from_lookups(tmp_path: Path) -> None:
    """An empty server started by mistake takes nothing away, and the right one is followed again."""
    replica, training, port = _left_behind(tmp_path / "one")
    with replica:
        with ServerProcess.start(tmp_path / "empty", shards=2, port=port):
            wait_until(lambda: "has no table 'left.weight' yet" in str(replica.failure))
            assert_equal(replica, training)
        with ServerProcess.start(tmp_path / "one", shards=2, port=port) as server:
            training = Training(server.address)
            for _ in range(3):
                training.step()
            settle(replica, training)
            assert_equal(replica, training)
            assert replica.failure is None
            training.close()


def test_a_server_that_was_set_back_is_followed(tmp_path: Path) -> None:
    """After a restore of an older copy, lookups show what the server has, and then its updates."""
    port = hold_ports(2)
    with ServerProcess.start(tmp_path / "data", shards=2, port=port) as server:
        training = Training(server.address)
        training.step()
        training.close()
    shutil.copytree(tmp_path / "data", tmp_path / "older")
    with ServerProcess.start(tmp_path / "data", shards=2, port=port) as server:
        training = Training(server.address)
        for _ in range(5):
            training.step()
            training.flush()
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2)
        assert float(replica.lookup("left.weight", 3)[0]) == 5.0
        training.close()
    with replica, ServerProcess.start(tmp_path / "older", shards=2, port=port):
        wait_until(lambda: float(replica.lookup("left.weight", 3)[0]) == 1.0, "the older copy")
        wait_until(lambda: replica.failure is None)


def test_a_copy_whose_disk_failed_is_replaced(
    server: ServerProcess, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a torn write lookups fail until another copy has caught up, and show no partial step."""
    storage = {"right.*": DiskStorage()}
    (tmp_path / "disk" / "copy-000009").mkdir(parents=True)  # of a replica that was killed
    with EmbeddingReplica(server.address, consistency="step", storage=storage, disk_dir=tmp_path / "disk") as replica:
        with monkeypatch.context() as patch:
            patch.setattr(RowStore, "write_runs", _fail)
            training.step()
            training.flush()
            deadline = time.monotonic() + WAIT_S
            for name in ("left.weight", "right.weight"):  # also of the table in memory, which may be a step ahead
                with pytest.raises(StorageError, match="not whole any more: the disk is on fire"):
                    while time.monotonic() < deadline:
                        assert replica.lookup(name, [1])[0, 0] == 1.0
        replica.wait_for(training.num_steps, WAIT_S)
        assert_equal(replica, training)
        assert replica.failure is None
    assert not list(tmp_path.glob("disk/copy-*"))


def _fail(*_: object, **__: object) -> None:
    raise StorageError("the disk is on fire")


def test_a_server_that_goes_while_a_copy_is_begun(
    server: ServerProcess, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that does not catch up in time names what it waits for."""
    show_when = LiveCopy.show_when

    async def wait_shortly(copy: LiveCopy, *args: Any, **kwargs: Any) -> None:
        # The time is over while it waits for a step, however long it has taken to come there.
        async with asyncio.timeout(0.2):
            await show_when(copy, *args, **kwargs)

    training.close()
    with EmbeddingReplica(server.address, consistency="step") as replica:
        snapshot = make_snapshot(server)
        second = Training(server.address)  # a run that has said hello, and has not ended a step
        with monkeypatch.context() as patch:
            patch.setattr(LiveCopy, "show_when", wait_shortly)
            with pytest.raises(UnavailableError, match="the newest run has not ended a step that all shards have"):
                EmbeddingReplica(server.address, consistency="step")
        second.close()
        server.kill()
        # Of an attempt that was on its way when the server ended it is told otherwise, until the next one.
        wait_until(lambda: "Connection refused" in str(replica.failure))
        with pytest.raises(UnavailableError, match=r"in 0\.5 s: .*Connection refused"):
            replica.load_snapshot(snapshot, timeout_s=0.5)


def test_a_lookup_that_ends_in_an_old_copy_is_made_again(server: ServerProcess, training: Training) -> None:
    """A lookup that ends in a replaced copy is repeated, or the next one could see older rows."""
    looked_at: list[ReplicaTable] = []
    with EmbeddingReplica(server.address) as replica:

        def gather(table: ReplicaTable, ids: Any) -> Found:
            if not looked_at:
                replica.load_snapshot(make_snapshot(server))
            looked_at.append(table)
            return table.gather(ids)

        replica.look([("left.weight", np.arange(3), gather)])
        present = replica._table_set.tables["left.weight"]
    assert looked_at[0] is not present and looked_at[-1] is present
