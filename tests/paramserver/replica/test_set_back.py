"""A server that was set back to an older copy of its directory, and its replicas; with real servers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_training import make_snapshot
from held_ports import hold_ports
from set_back_training import ROWS, Trainer, put_back
from stored_rows import read_rows
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import SetBackError
from headrace.streamer import RawEmbeddingStreamer


def train(address: str, *steps: tuple[int, int]) -> None:
    """Train rows in a run that begins and ends here."""
    trainer = Trainer()
    with RawEmbeddingStreamer(address, run="run") as streamer:
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
        for first, end in steps:
            trainer.step(first, end)
            streamer.flush()


def rows_of(address: str) -> torch.Tensor:
    """Return a server's rows; zeros for missing ones."""
    return torch.from_numpy(read_rows(address, "t.weight", range(ROWS)).weights)


def is_equal(replica: EmbeddingReplica, rows: torch.Tensor) -> bool:
    return torch.equal(replica.lookup("t.weight", torch.arange(ROWS)), rows)


@pytest.fixture
def lost(tmp_path: Path) -> tuple[Path, Path, int]:
    """A directory with rows that the older copy beside it lacks, and a port to serve it at."""
    data, older = tmp_path / "data", tmp_path / "older"
    with ServerProcess.start(data, shards=2) as server:
        train(server.address, (0, 100))
    shutil.copytree(data, older)
    with ServerProcess.start(data) as server:
        train(server.address, (50, 150), (50, 150))
    return data, older, hold_ports(2)


@pytest.mark.parametrize("storage", [{}, {"*": DiskStorage(memory_bytes=4096)}], ids=["memory", "disk"])
def test_a_server_that_was_set_back_and_has_overtaken_is_found_out(
    lost: tuple[Path, Path, int], tmp_path: Path, storage: Any
) -> None:
    """A replica ends equal to a server that has written other rows beyond the replica's place."""
    data, older, port = lost
    with ServerProcess.start(data, port=port) as server:
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2, storage=storage, disk_dir=tmp_path / "disk")
        assert is_equal(replica, rows_of(server.address))
    with replica:
        put_back(older, data)
        with ServerProcess.start(data) as server:  # elsewhere
            train(server.address, *[(200, 250)] * 5)
            expected = rows_of(server.address)
            assert not is_equal(replica, expected)
        with ServerProcess.start(data, port=port) as server:
            wait_until(lambda: is_equal(replica, expected), "what the server has")
            wait_until(lambda: replica.failure is None)
            train(server.address, (250, 300))
            wait_until(lambda: is_equal(replica, rows_of(server.address)), "what came afterwards")
        put_back(older, data)
        with ServerProcess.start(data, port=port) as server:  # whose log ends before the replica's place
            wait_until(lambda: is_equal(replica, rows_of(server.address)), "the older copy")
            wait_until(lambda: replica.failure is None)


def test_a_snapshot_of_the_time_that_is_gone_is_refused(lost: tuple[Path, Path, int], tmp_path: Path) -> None:
    """A snapshot from before the set back is refused; a later one is followed."""
    data, older, _ = lost
    with ServerProcess.start(data) as server:
        shutil.copytree(make_snapshot(server), tmp_path / "brought")
        train(server.address, (150, 160))
    put_back(older, data)
    with ServerProcess.start(data) as server:
        train(server.address, *[(200, 250)] * 5)
        with pytest.raises(SetBackError, match="the server was set back to an older copy of itself"):
            EmbeddingReplica(server.address, snapshot=tmp_path / "brought")
        with EmbeddingReplica(server.address, snapshot=make_snapshot(server)) as replica:
            assert is_equal(replica, rows_of(server.address))
