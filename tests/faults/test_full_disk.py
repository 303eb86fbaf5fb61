"""A server on a small disk that fills up: reads and replicas go on, a trainer keeps its rows, and all arrives later."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from streamed_bags import StreamedBags
from waiting import WAIT_S, wait_until
from watched_server import get_json, scrape, watched_server

from headrace import EmbeddingReplica
from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.shard.launch import ServerProcess

ROWS, DIM = 20_000, 32
DISK_BYTES = 96 << 20
# Small, so that a disk of a hundred MiB is a large one.
SETTINGS = {"log_segment_bytes": "1MiB", "block_cache_bytes": "8MiB"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of its own."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


class _Ballast:
    """A file that takes room on a disk, as another process's would."""

    def __init__(self, disk: Path) -> None:
        self._disk, self._path = disk, disk / "ballast"

    @property
    def free_bytes(self) -> int:
        files = os.statvfs(self._disk)
        return files.f_bavail * files.f_frsize

    def leave(self, free_bytes: int) -> None:
        """Take all but so many bytes."""
        with open(self._path, "ab") as file:
            missing = self.free_bytes - free_bytes
            if missing > 0:
                os.posix_fallocate(file.fileno(), file.tell(), missing)

    def remove(self) -> None:
        self._path.unlink()


@contextlib.contextmanager
def _trained(disk: Path, **settings: str) -> Iterator[tuple[ServerProcess, str, StreamedBags]]:
    with watched_server(disk / "data", **SETTINGS, **settings) as (server, metrics):
        training = StreamedBags(server.address, ("bag",), num_rows=ROWS, dim=DIM, retry_max_s=0.5)
        try:
            training.train()
            training.streamer.flush(WAIT_S)
            yield server, metrics, training
        finally:
            training.streamer.close(flush=False)


def _read(server: ServerProcess) -> torch.Tensor:
    with BlockingReader(server.address, timeout_s=WAIT_S) as reader:
        return torch.as_tensor(reader.get("bag.weight", list(range(ROWS))).weights)


def test_reads_go_on_and_updates_come_back_by_themselves(disk: Path) -> None:
    """With little room updates are refused and reads, replicas and status go on; with room every row arrives."""
    ballast = _Ballast(disk)
    with (
        _trained(disk, disk_reserve_bytes="24MiB") as (server, metrics, training),
        EmbeddingReplica(server.address) as replica,
    ):
        before = training.weights("bag")
        ballast.leave(16 << 20)
        wait_until(lambda: scrape(metrics)["headrace_updates_refused"][(("shard", "0"),)] == 1)

        def is_refused() -> bool:
            training.train()
            return "takes no updates" in str(training.streamer.stats().last_error)

        wait_until(is_refused)
        error = str(training.streamer.stats().last_error)
        assert f"{disk / 'data'}" in error and "24.0 MiB stay free" in error and "make room" in error
        (problem,) = [p for p in get_json(metrics, "/status.json")["problems"] if p["severity"] == "critical"]
        assert "shard 0 takes no updates" in problem["text"]
        assert torch.equal(_read(server), before)
        training.train(20)
        assert training.streamer.stats().num_dirty_rows > 0
        ballast.remove()
        training.flush_and_check()
        wait_until(lambda: scrape(metrics)["headrace_updates_refused"][(("shard", "0"),)] == 0)
        assert scrape(metrics)["headrace_shard_restarts_total"][(("shard", "0"),)] == 0
        wait_until(lambda: torch.equal(replica.lookup("bag.weight", torch.arange(ROWS)), training.weights("bag")))


def test_a_shard_that_dies_while_its_disk_is_full_comes_back_reading(disk: Path) -> None:
    """With no byte free a shard starts again, reads what it had acked, and goes on with room."""
    ballast = _Ballast(disk)
    with _trained(disk, disk_reserve_bytes="24MiB") as (server, metrics, training):
        before = training.weights("bag")
        ballast.leave(0)
        (pid,) = [shard["pid"] for shard in get_json(metrics, "/status.json")["shards"]]
        os.kill(pid, signal.SIGKILL)
        assert torch.equal(_read(server), before)
        training.train()
        ballast.remove()
        training.flush_and_check()
