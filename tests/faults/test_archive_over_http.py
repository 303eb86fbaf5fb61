"""The archive in an object store that fails or whose users are killed: real servers, HTTP with faults, small disks."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from counted_training import make_snapshot
from object_server import Fault, ObjectServer, Request, object_server
from set_back_training import ROWS, Trainer
from stored_rows import read_rows
from streamed_training import attached
from watched_server import wait_until

from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import HeadraceError, UnavailableError

WAIT_S = 60.0
KILLED = -signal.SIGKILL
NEVER: Callable[[Request], Fault | None] = lambda _: None  # noqa: E731


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


def serve(data: Path, store: ObjectServer, **settings: Any) -> ServerProcess:
    return ServerProcess.start(data, object_store=store.url, archive_segment_s=0.05, **settings)


def status_of(server: ServerProcess) -> Any:
    """Return what shard 0 says; None while it is away."""

    async def ask() -> Any:
        async with await ParamServerClient.connect(*parse_address(server.address), timeout_s=WAIT_S) as client:
            return await client.status()

    try:
        return asyncio.run(ask())
    except HeadraceError:
        return None


def is_archived(server: ServerProcess) -> bool:
    status = status_of(server)
    return status is not None and status.archive.archived_seq >= status.log_seq


class Training:
    """A trainer and the streamer to its server. Each step trains half of the rows, other ones each time."""

    def __init__(self, server: ServerProcess, num_rows: int = ROWS) -> None:
        self.trainer, self._num_rows = Trainer(num_rows=num_rows), num_rows
        self.streamer = attached(server.address, self.trainer, run="run", flush_timeout_s=WAIT_S)
        self._numbers = itertools.count()

    def step(self) -> None:
        """Train, and wait until the rows are acked."""
        half = self._num_rows // 2
        first = next(self._numbers) * 37 % half
        self.trainer.step(first, first + half)
        self.streamer.flush()


def check_rows(server: ServerProcess, trainer: Trainer) -> None:
    """Check that a server has the trainer's rows, bit for bit."""
    weights = trainer.table.weight.detach().numpy()
    rows = read_rows(server.address, trainer.fqn, range(len(weights)))
    present = np.flatnonzero(rows.presence == 1)
    assert present.size >= len(weights) // 2
    assert np.array_equal(rows.weights[present], weights[present])


def check_restored(store: ObjectServer, data: Path, trainer: Trainer) -> None:
    """Check that a server made from the store alone has the trainer's rows."""
    with serve(data, store, restore=True) as server:
        check_rows(server, trainer)


@pytest.fixture
def archived(store: ObjectServer, tmp_path: Path) -> Trainer:
    """A stopped server's trainer; the store has two snapshots and log behind each."""
    with serve(tmp_path / "data", store) as server:
        training = Training(server)
        with training.streamer:
            for _ in range(2):
                training.step()
                make_snapshot(server)
                training.step()
            wait_until(lambda: is_archived(server), "the archive")
    return training.trainer


PASSING = {
    "unavailable": Fault(status=503),
    "slow down": Fault(status=429),
    "reset": Fault(resets=True),
    "lost reply": Fault(loses_reply=True),
    "cut": Fault(cuts=True),
    "truncated": Fault(truncates=True),
    "altered": Fault(alters=True),
}


def test_training_goes_on_whatever_the_store_does(store: ObjectServer, tmp_path: Path) -> None:
    """While the store fails, acks come; once it answers now and then, everything is archived, and restored equal."""
    draws = random.Random(5)
    with serve(tmp_path / "data", store) as server:
        training = Training(server)
        with training.streamer:
            for fault in PASSING.values():
                store.fault = lambda _: fault  # noqa: B023
                training.step()
                wait_until(lambda: bool((status := status_of(server)) and status.archive.error), "a failure that shows")
                store.fault = lambda _: fault if draws.random() < 0.4 else None  # noqa: B023
                training.step()
                wait_until(lambda: is_archived(server), f"the archive over {fault}")
            store.fault = NEVER
            training.step()
            wait_until(lambda: is_archived(server), "the archive")
            assert status_of(server).archive.error is None
            assert not [fact for fact in server.read_log() if "shard has died" in fact.get("message", "")]
    check_restored(store, tmp_path / "bare", training.trainer)


def test_a_slow_store_is_no_failure(store: ObjectServer, tmp_path: Path) -> None:
    """With a second for each request nothing fails: the archive is late by the requests of one segment."""
    with serve(tmp_path / "data", store) as server:
        training = Training(server)
        with training.streamer:
            store.fault = lambda _: Fault(delay_s=1.0)
            training.step()
            wait_until(lambda: is_archived(server), "the archive")
            archive = status_of(server).archive
            assert (archive.num_failures, archive.error, archive.behind_s) == (0, None, 0)
            store.fault = NEVER


def _is_of_segment(method: str) -> Callable[[Request], bool]:
    return lambda request: request.method == method and "/archive/0000/" in request.key


# At which request, whether only a start makes it, and what the store does with it.
KILLS: tuple[tuple[Callable[[Request], bool], bool, Fault], ...] = (
    (_is_of_segment("PUT"), False, Fault(resets=True)),
    (_is_of_segment("PUT"), False, Fault(loses_reply=True)),
    (_is_of_segment("HEAD"), False, Fault(resets=True)),
    (_is_of_segment("GET"), False, Fault(cuts=True)),
    (lambda request: "archive/0000" in request.query.get("prefix", ""), True, Fault(cuts=True)),
    (lambda request: "/claims/" in request.key and request.method == "PUT", True, Fault(loses_reply=True)),
)


def _kill_shard(server: ServerProcess) -> None:
    for child in psutil.Process(server.pid).children():
        child.kill()


def test_a_shard_that_is_killed_amid_an_upload_leaves_no_gap(store: ObjectServer, tmp_path: Path) -> None:
    """Killed before, in and after each kind of request, its restarts archive all; a bare machine gets every row."""
    with serve(tmp_path / "data", store, quick_death_s=0.0, max_quick_deaths=100) as server:
        training = Training(server)
        with training.streamer:
            for matches, is_of_start, fault in KILLS:
                done = threading.Event()

                def kill(request: Request) -> Fault | None:
                    if done.is_set() or not matches(request):  # noqa: B023
                        return None
                    done.set()  # noqa: B023
                    _kill_shard(server)
                    return fault  # noqa: B023

                store.fault = kill
                if is_of_start:
                    _kill_shard(server)
                training.step()
                assert done.wait(WAIT_S)
                wait_until(lambda: is_archived(server), "the archive after a kill")
            store.fault = NEVER
            check_rows(server, training.trainer)
    check_restored(store, tmp_path / "bare", training.trainer)


def _run_killed_at(store: ObjectServer, number: int, fault: Fault, *command: str) -> int:
    """Run a program and kill it at its request of that number; return its exit code."""
    process: subprocess.Popen[bytes] | None = None
    left = itertools.count(1)

    def kill(_: Request) -> Fault | None:
        if process is None or next(left) != number:
            return None
        process.kill()
        return fault

    store.fault = kill
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    try:
        return process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()
        store.fault = NEVER


def test_a_restore_that_is_killed_at_any_request_leaves_no_directory(
    store: ObjectServer, tmp_path: Path, archived: Trainer
) -> None:
    """Wherever it is killed, amid a body too, nothing is there; the next attempt is whole."""
    target, command = tmp_path / "bare", ("-m", "headrace", "restore", store.url, "--data")
    for number in range(1, 1000, 6):
        code = _run_killed_at(store, number, Fault(cuts=True), *command, str(target))
        if code == 0:
            assert number > 12
            break
        assert code == KILLED
        assert not target.exists()
    with serve(target, store) as server:
        check_rows(server, archived)


_PRUNE = """
import sys
from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.system.object_store import ObjectStore
store = ObjectStore.of_url(sys.argv[1])
snapshots = SnapshotStore(store)
ShardArchive(store, 0).prune(snapshots.list(), 0.001)
snapshots.prune()
"""


def test_a_prune_that_is_killed_at_any_request_removes_nothing_that_is_needed(
    store: ObjectServer, tmp_path: Path, archived: Trainer
) -> None:
    """After each kill the snapshot is whole and a restore works; a prune that ends removes what is left."""
    snapshots = SnapshotStore.of_url(store.url)
    first, second = snapshots.names()
    snapshots.remove(first)
    num_before = len(store.keys())
    for folder in ("files/", "archive/0000/"):
        store.age(48, folder)
    for number in range(1, 1000, 3):
        code = _run_killed_at(store, number, Fault(loses_reply=True), "-c", _PRUNE, store.url)
        snapshots.check(second)
        restore_server(ObjectStore.of_url(store.url), tmp_path / "bare")
        shutil.rmtree(tmp_path / "bare")
        if code == 0:
            break
        assert code == KILLED
    assert len(store.keys()) < num_before
    assert snapshots.prune() == 0
    check_restored(store, tmp_path / "bare", archived)


def test_of_two_servers_on_one_prefix_one_is_refused(store: ObjectServer, tmp_path: Path) -> None:
    """Two that start at once on an empty prefix: one serves and archives, the other says why it does not."""

    def start(name: str) -> ServerProcess | str:
        try:
            return serve(tmp_path / name, store, shards=2)
        except UnavailableError as exc:
            return str(exc)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, ("one", "two"))
    running, refused = (first, second) if isinstance(first, ServerProcess) else (second, first)
    assert isinstance(running, ServerProcess) and isinstance(refused, str)
    assert "another server" in refused
    with running as server:
        training = Training(server)
        with training.streamer:
            training.step()
            wait_until(lambda: is_archived(server), "the archive")
    check_restored(store, tmp_path / "bare", training.trainer)


_ON_A_SMALL_DISK = """
import sys
from headrace.cli import main
from headrace.paramserver.archive import recovery
recovery.check_room = lambda *_, **__: None  # the disk fills up later
sys.exit(main(["restore", sys.argv[1], "--data", sys.argv[2]]))
"""


def _restore_onto(disk: Path, size_kib: int, store: ObjectServer) -> tuple[int, str, str]:
    """Restore onto a file system of that size; return exit code, stderr, and the files that are there then."""
    script = f'mount -t tmpfs -o size={size_kib}k tmpfs $0 && $1 -c "$2" $3 $0/data >&2; code=$?; ls -A $0; exit $code'
    command = ["unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, _ON_A_SMALL_DISK, store.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.returncode, done.stderr, done.stdout


def test_a_disk_that_fills_up_while_restoring_is_one_line(store: ObjectServer, tmp_path: Path) -> None:
    """Whatever is written when it is full: one line says so, nothing is left, and the same command works with room."""
    (disk := tmp_path / "disk").mkdir()
    mounts = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(mounts, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    with serve(tmp_path / "data", store) as server:
        training = Training(server, num_rows=20_000)
        with training.streamer:
            training.step()
            make_snapshot(server)
            training.step()
            wait_until(lambda: is_archived(server), "the archive")
    num_full = 0
    for size_kib in range(64, 8192, 160):
        code, error, left = _restore_onto(disk, size_kib, store)
        if code == 0:
            assert left == "data\n"
            break
        assert (code, left) == (1, "")
        assert error.count("\n") == 1 and "No space left on device" in error, error
        num_full += 1
    assert num_full > 3
