"""A replica against real servers: equal to the bit, whole steps, restarts, switches, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from torch import nn
from watched_server import wait_until

from headrace.paramserver.launch import ServerProcess
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.config import DiskStorage
from headrace.paramserver.security import Token
from headrace.paramserver.shard_link import Dial
from headrace.paramserver.snapshot_client import create_snapshot
from headrace.paramserver.snapshot_files import verify_snapshot
from headrace.paramserver.store import RowStore
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    RequestError,
    RowRangeError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.streamer import RawEmbeddingStreamer

WAIT_S = 30.0
ROWS = 300
# On disk with place for few of the rows: most lookups read some from there, and push others out.
STORAGE = pytest.mark.parametrize(
    "storage", [{}, {"*": DiskStorage(memory_bytes=4096)}, {"left.*": DiskStorage()}], ids=["memory", "disk", "mixed"]
)


class Training:
    """Two tables whose every row is the step at which it was last updated: all rows, in both, at each step."""

    def __init__(self, address: str, *, run: str = "run") -> None:
        self.model = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=False) for name in ("left", "right")}
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        # Its gradient is one everywhere: each step adds one.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.streamer = RawEmbeddingStreamer(address, run=run)
        self.streamer.attach(self.model, self.optimizer, publish="all")
        self.num_steps = 0

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.num_steps += 1

    def flush(self) -> None:
        self.streamer.flush()

    def close(self) -> None:
        self.streamer.close()


def _snapshot(server: ServerProcess) -> Path:
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)
    manifest = asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=WAIT_S))
    return server.data_dir / "snapshots" / manifest.name


def _assert_equal(replica: EmbeddingReplica, training: Training) -> None:
    for name, bag in training.model.items():
        rows = replica.lookup(f"{name}.weight", torch.arange(ROWS))
        assert torch.equal(rows, bag.weight.detach()), name
        assert replica.num_rows(f"{name}.weight") == ROWS


def _settle(replica: EmbeddingReplica, training: Training) -> None:
    """Return when the replica shows what the trainer has flushed."""
    training.flush()
    replica.wait_for(training.num_steps, WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


@pytest.fixture
def training(server: ServerProcess) -> Iterator[Training]:
    training = Training(server.address)
    yield training
    training.close()


@pytest.mark.parametrize("consistency", ["latest", "step"])
@STORAGE
def test_equals_the_trainer_over_a_restart_of_the_server(tmp_path: Path, storage: Any, consistency: Any) -> None:
    """What the trainer has is looked up bit for bit: at the start, later, and after every shard was killed."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        training = Training(server.address)
        training.step()
        training.flush()
        with EmbeddingReplica(server.address, consistency=consistency, storage=storage, name="test") as replica:
            _assert_equal(replica, training)
            for _ in range(3):
                training.step()
                _settle(replica, training)
                _assert_equal(replica, training)
            for pid in server.shard_pids:
                os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                training.step()
            _settle(replica, training)
            _assert_equal(replica, training)
            assert replica.failure is None and replica.epoch == 1
            for shard in replica.freshness():
                assert shard.visible_seq == shard.last_seq and shard.lag_s == 0 and shard.lag_steps == 0
                assert shard.delay.count > 0 and 0 < shard.delay.percentile(50) <= shard.delay.max_s < WAIT_S
        training.close()


@STORAGE
def test_a_step_is_seen_whole(server: ServerProcess, training: Training, storage: Any) -> None:
    """While the trainer runs, a lookup of both tables has one number in all rows of all shards, and it only rises."""
    training.step()
    training.flush()
    with EmbeddingReplica(server.address, consistency="step", storage=storage) as replica:
        seen: list[list[float]] = [[], []]
        faults: list[object] = []
        is_over = threading.Event()

        def read(seen: list[float]) -> None:
            ids = np.arange(ROWS)
            while not is_over.is_set():
                found = replica.lookup_many({"left.weight": ids, "right.weight": ids})
                numbers = torch.cat([found["left.weight"], found["right.weight"]]).unique()
                if numbers.numel() != 1 or (seen and numbers[0] < seen[-1]):
                    faults.append(numbers)
                seen.append(float(numbers[0]))

        readers = [threading.Thread(target=read, args=(of_reader,)) for of_reader in seen]
        for reader in readers:
            reader.start()
        for _ in range(60):
            training.step()
            if training.num_steps % 4 == 0:
                _settle(replica, training)
        is_over.set()
        for reader in readers:
            reader.join()
        _settle(replica, training)
        _assert_equal(replica, training)
    assert not faults and len({*seen[0], *seen[1]}) > 3


@STORAGE
def test_snapshots_are_switched_under_lookups(
    server: ServerProcess, training: Training, tmp_path: Path, storage: Any
) -> None:
    """A replica that begins from a snapshot catches up; switching to another and back fails no lookup and is equal."""
    training.step()
    training.flush()
    first = _snapshot(server)
    training.step()
    training.flush()
    settings: dict[str, Any] = {"consistency": "step", "storage": storage, "disk_dir": tmp_path / "disk"}
    with EmbeddingReplica(server.address, snapshot=first, **settings) as replica:
        _assert_equal(replica, training)
        failures: list[HeadraceError] = []
        is_over = threading.Event()

        def read() -> None:
            newest = 0.0
            while not is_over.is_set():
                try:
                    row = replica.lookup("left.weight", [7])
                except HeadraceError as exc:
                    failures.append(exc)
                else:
                    assert row[0, 0] >= newest
                    newest = float(row[0, 0])

        reader = threading.Thread(target=read)
        reader.start()
        second = _snapshot(server)
        for _ in range(3):
            training.step()
            replica.load_snapshot(second, timeout_s=WAIT_S)
            _settle(replica, training)
            _assert_equal(replica, training)
            assert len(list(tmp_path.glob("disk/copy-*"))) == (2 if storage else 0)
        training.step()
        replica.roll_back()
        is_over.set()
        reader.join()
        assert not failures
        _settle(replica, training)
        _assert_equal(replica, training)
        with pytest.raises(ConfigError, match="no previous copy"):
            replica.roll_back()
    assert not list(tmp_path.glob("disk/copy-*"))
    verify_snapshot(second)  # what is linked to was not written to


def test_a_bad_snapshot_changes_nothing(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """One that is damaged, is not there, or would not fit in memory is refused, and lookups go on."""
    training.step()
    training.flush()
    folder = _snapshot(server)
    with EmbeddingReplica(server.address) as replica:
        with pytest.raises(ConfigError, match="no snapshot"):
            replica.load_snapshot(tmp_path)
        file = next((folder / "shard-0000").glob("*.sst"))
        data = file.read_bytes()
        file.unlink()  # it is a hard link to the store's own
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptionError, match=file.name):
            replica.load_snapshot(folder)
        _assert_equal(replica, training)
    folder = _snapshot(server)
    with EmbeddingReplica(server.address, max_memory_bytes=30_000) as replica:
        with pytest.raises(ConfigError, match="MiB are free"):
            replica.load_snapshot(folder)
        _assert_equal(replica, training)
    with pytest.raises(ConfigError, match="MiB are free"):
        EmbeddingReplica(server.address, max_memory_bytes=1000)


def _left_behind(folder: Path) -> tuple[EmbeddingReplica, Training, int]:
    """Return a replica whose server, of one step, has gone, what the trainer had, and the server's port."""
    port = hold_ports(2)
    with ServerProcess.start(folder, shards=2, port=port) as server:
        training = Training(server.address)
        training.step()
        training.flush()
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2)
        training.close()
        return replica, training, port


def test_another_store_at_the_address_is_taken_up(tmp_path: Path) -> None:
    """The replica keeps answering from the old store and begins anew with the new one by itself."""
    replica, training, port = _left_behind(tmp_path / "one")
    assert float(replica.lookup("left.weight", 3)[0]) == 1.0
    with replica, ServerProcess.start(tmp_path / "two", shards=1, port=port) as server:
        training = Training(server.address)
        for _ in range(5):
            training.step()
        training.flush()
        replica.wait_for(5, WAIT_S)
        _assert_equal(replica, training)
        training.close()


def test_an_empty_server_at_the_address_takes_nothing_from_lookups(tmp_path: Path) -> None:
    """Started by mistake, it is waited for; when the right one is back the replica goes on with that."""
    replica, training, port = _left_behind(tmp_path / "one")
    with replica:
        with ServerProcess.start(tmp_path / "empty", shards=2, port=port):
            wait_until(lambda: "has no table 'left.weight' yet" in str(replica.failure))
            _assert_equal(replica, training)
        with ServerProcess.start(tmp_path / "one", shards=2, port=port) as server:
            training = Training(server.address)
            for _ in range(3):
                training.step()
            _settle(replica, training)
            _assert_equal(replica, training)
            assert replica.failure is None
            training.close()


def test_a_server_that_was_set_back_is_followed(tmp_path: Path) -> None:
    """After its directory was restored from an older copy, lookups have what the server has, and then what comes."""
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
        assert replica.failure is None


def test_the_last_flush_of_a_step_is_seen(server: ServerProcess, training: Training) -> None:
    """By step, what a second flush of the same step brings is seen without a next one."""
    training.step()
    training.flush()
    with EmbeddingReplica(server.address, consistency="step") as replica:
        training.streamer.evict("left.weight", torch.arange(ROWS))
        training.flush()
        wait_until(lambda: replica.num_rows("left.weight") == 0, "the deletions")
        assert replica.step == 1


def test_a_forked_child_is_told(server: ServerProcess, training: Training) -> None:
    """In a child, where nothing follows the server, lookups raise, and closing leaves the parent's copies alone."""
    training.step()
    training.flush()
    with EmbeddingReplica(server.address, storage={"left.*": DiskStorage()}) as replica:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                try:
                    replica.lookup("right.weight", 1)
                except UnavailableError as exc:
                    code = 0 if "forked child" in str(exc) else 2
                replica.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        _assert_equal(replica, training)


def test_a_closed_replica_answers_nobody(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """Every method says that it is closed, and none waits."""
    training.step()
    training.flush()
    replica = EmbeddingReplica(server.address)
    replica.close()
    replica.close()
    for call in (
        lambda: replica.lookup("left.weight", 1),
        lambda: replica.wait_for(1, WAIT_S),
        lambda: replica.audit(),
        lambda: replica.digest("left.weight"),
        lambda: replica.load_snapshot(tmp_path),
        replica.roll_back,
        replica.freshness,
        lambda: replica.tables,
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_a_copy_whose_disk_failed_is_replaced(
    server: ServerProcess, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half way ends the copy; lookups fail until another has caught up, and show no half step."""
    training.step()
    training.flush()
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
        _assert_equal(replica, training)
        assert replica.failure is None
    assert not list(tmp_path.glob("disk/copy-*"))


def _fail(*_: object, **__: object) -> None:
    raise StorageError("the disk is on fire")


def test_rows_on_disk_are_read_ahead_and_pinned(server: ServerProcess, training: Training) -> None:
    """Announced and pinned rows are answered from memory; what was looked up is counted by table."""
    training.step()
    training.flush()
    storage = {"left.*": DiskStorage()}
    with EmbeddingReplica(server.address, storage=storage) as replica:
        with replica.pinned("left.weight", [1, 2, 2]) as number, replica.pinned("right.weight", [1, 2, 2]) as in_memory:
            assert (number, in_memory) == (2, 2)
            replica.lookup("left.weight", [2, 1])
            assert (replica.hot_rows()["left.weight"].hits, replica.hot_rows()["left.weight"].misses) == (2, 0)
        replica.prefetch("left.weight", torch.arange(4))
        replica.prefetch("right.weight", torch.arange(4))
        replica.lookup("left.weight", [[2, 100]])
        stats = replica.hot_rows()
        assert list(stats) == ["left.weight"] and stats["left.weight"].hits + stats["left.weight"].misses == 4
        with pytest.raises(RowRangeError):
            replica.prefetch("left.weight", [ROWS])
        with pytest.raises(UnknownTableError):
            replica.prefetch("middle.weight", [1])


def test_missing_rows(server: ServerProcess) -> None:
    """They are zeros, the table's default or an error, as set, and are counted."""
    model = nn.ModuleDict({"few": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="few") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        model["few"](torch.tensor([[3, 5]])).sum().backward()
        optimizer.step()
        streamer.flush()
        row = model["few"].weight[3].detach()
    with EmbeddingReplica(server.address) as replica:
        rows = replica.lookup("few.weight", [[3, 4], [4, 4]])
        assert rows.shape == (2, 2, 4) and torch.equal(rows[0, 0], row) and not rows[0, 1].any()
        assert replica.num_missing == {"few.weight": 3}
        with pytest.raises(RowRangeError):
            replica.lookup("few.weight", [50])
        with pytest.raises(UnknownTableError, match=r"few\.weight"):
            replica.lookup("many.weight", [1])
        with pytest.raises(UnavailableError, match="is not visible"):
            replica.wait_for(10**9, 0.01)
    default = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with EmbeddingReplica(server.address, missing="table_default", defaults={"few.weight": default}) as replica:
        assert torch.equal(replica.lookup("few.weight", 4), default)
    with EmbeddingReplica(server.address, missing="error") as replica:
        assert torch.equal(replica.lookup("few.weight", 3), row)
        with pytest.raises(RequestError, match="row 4 is not there"):
            replica.lookup("few.weight", [3, 4])
    with pytest.raises(UnavailableError, match="closed"):
        replica.lookup("few.weight", 3)


def test_tables_come_later_and_only_those_wanted(server: ServerProcess) -> None:
    """A replica of an empty server learns tables when they are registered, and keeps none that it was not asked to."""
    with EmbeddingReplica(server.address, tables=frozenset({"left.weight"})) as replica:
        assert replica.tables == {}
        training = Training(server.address)
        training.step()
        _settle(replica, training)
        assert list(replica.tables) == ["left.weight"]
        assert torch.equal(replica.lookup("left.weight", torch.arange(ROWS)), training.model["left"].weight.detach())
        training.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"consistency": "none"}, "consistency"),
        ({"missing": "none"}, "missing"),
        ({"defaults": {"t": torch.zeros(1)}}, "table_default"),
        ({"lease_s": 0}, "lease_s"),
        ({"disk_threads": 0}, "disk_threads"),
        ({"storage": {"a.*": 1 << 30}}, r"storage of 'a\.\*'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    """A setting that is none is an error that names it, before anything is connected to."""
    with pytest.raises(ConfigError, match=says):
        EmbeddingReplica("127.0.0.1:1", **settings)


def test_a_token_is_shown(tmp_path: Path) -> None:
    """A server that asks for a token lets a replica in that has it, and no other."""
    environ = {**os.environ, "HEADRACE_TOKEN": "a-token-of-some-length"}
    with ServerProcess.start(tmp_path / "data", shards=2, environ=environ) as server:
        with EmbeddingReplica(server.address, token=Token("a-token-of-some-length")) as replica:
            assert replica.tables == {}
        with pytest.raises(UnauthorizedError):
            EmbeddingReplica(server.address)


def test_no_server_is_one_line() -> None:
    """An address where nobody listens is said so, in time, and no thread is left."""
    before = set(threading.enumerate())
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        EmbeddingReplica("127.0.0.1:1", timeout_s=0.5, open_timeout_s=5.0)
    assert "headrace-replica" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_a_server_that_goes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lookups go on while the server is away; `failure`, `wait_for` and one warning say what cannot be reached."""
    port = hold_ports()
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        training = Training(server.address)
        training.step()
        replica = EmbeddingReplica(server.address)
        _settle(replica, training)
        training.close()
        assert replica.failure is None
        server.kill()
    with replica:
        wait_until(lambda: "is tried again" in caplog.text)
        assert "Connection refused" in str(replica.failure)
        assert not replica.is_beginning_anew
        _assert_equal(replica, training)
        with pytest.raises(UnavailableError, match=r"step 9 is not visible within 0\.1 s, .*Connection refused"):
            replica.wait_for(9, 0.1)
        with ServerProcess.start(tmp_path / "data", port=port):
            wait_until(lambda: replica.failure is None)
    assert "is reached again, after" in caplog.text


def test_a_server_that_goes_while_a_copy_is_begun(server: ServerProcess, training: Training) -> None:
    """A copy that does not catch up in time says what it waits for: a shard that is away, or a step."""
    training.close()
    with EmbeddingReplica(server.address, consistency="step") as replica:
        snapshot = _snapshot(server)
        second = Training(server.address)  # a run that has said hello, and has not ended a step
        with pytest.raises(UnavailableError, match="the newest run has not ended a step that all shards have"):
            EmbeddingReplica(server.address, consistency="step", open_timeout_s=1.0)
        second.close()
        server.kill()
        wait_until(lambda: replica.failure is not None)
        with pytest.raises(UnavailableError, match=r"in 0\.5 s: .*Connection refused"):
            replica.load_snapshot(snapshot, timeout_s=0.5)
