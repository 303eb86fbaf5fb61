"""Switches from copy to copy against real servers."""

from __future__ import annotations

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
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.replica.tables.base import Found, ReplicaTable
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.directory import verify_snapshot
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, StorageError


@STORAGE
def test_snapshots_are_switched_under_lookups(
    server: ServerProcess, training: Training, tmp_path: Path, storage: Any
) -> None:
    """Switching to another snapshot and back fails no lookup, and the rows are equal."""
    first = make_snapshot(server)
    training.step()
    training.flush()
    settings: dict[str, Any] = {"consistency": "step", "storage": storage, "disk_dir": tmp_path / "disk"}
    with training.replica(snapshot=first, **settings) as replica:
        assert_equal(replica, training)
        failures: list[object] = []
        is_over = threading.Event()

        def read() -> None:
            newest = 0.0
            while not is_over.is_set() and not failures:
                try:
                    value = float(replica.lookup("left.weight", [7])[0, 0])
                except HeadraceError as exc:
                    failures.append(exc)
                else:
                    if value < newest:
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
                assert len(list(tmp_path.glob("disk/copy-*"))) == (1 if storage else 0)
        finally:
            is_over.set()
            reader.join()
        assert not failures
    assert not list(tmp_path.glob("disk/copy-*"))
    verify_snapshot(second)  # what is linked to was not written to


def test_a_bad_snapshot_changes_nothing(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """A damaged, missing or too large snapshot is refused, and lookups go on."""
    folder = make_snapshot(server)
    with training.replica() as replica:
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
    with training.replica(max_memory_bytes=15_000) as replica:
        with pytest.raises(ConfigError, match=r"KiB, .*B are free"):
            replica.load_snapshot(folder)
        assert_equal(replica, training)
    with pytest.raises(ConfigError, match=r"KiB, .*B are free"):
        training.replica(max_memory_bytes=1000)


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


def test_a_copy_whose_disk_failed_is_replaced(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a torn write lookups fail until another copy has caught up, and show no partial step."""
    storage = {"right.*": DiskStorage()}
    (tmp_path / "disk" / "copy-000009").mkdir(parents=True)  # of a replica that was killed
    with training.replica(consistency="step", storage=storage, disk_dir=tmp_path / "disk") as replica:
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


def test_a_lookup_that_ends_in_an_old_copy_is_made_again(server: ServerProcess, training: Training) -> None:
    """A lookup that ends in a replaced copy is repeated, or the next one could see older rows."""
    looked_at: list[ReplicaTable] = []
    with training.replica() as replica:

        def gather(table: ReplicaTable, ids: Any) -> Found:
            if not looked_at:
                replica.load_snapshot(make_snapshot(server))
            looked_at.append(table)
            return table.gather(ids)

        replica.look([("left.weight", np.arange(3), gather)])
        present = replica._table_set.table("left.weight")
    assert looked_at[0] is not present and looked_at[-1] is present
