"""A replica against real servers: equality, whole steps, restarts, switches and refusals."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counted_training import ROWS, STORAGE, WAIT_S, Training, assert_equal, settle
from held_ports import hold_ports
from torch import nn
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage, MemoryStorage, ReplicaConfig
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import (
    ConfigError,
    RequestError,
    RowRangeError,
    UnavailableError,
    UnknownTableError,
)
from headrace.streamer import RawEmbeddingStreamer


@pytest.mark.parametrize("consistency", ["latest", "step"])
@STORAGE
def test_equals_the_trainer_over_a_restart_of_the_server(tmp_path: Path, storage: Any, consistency: Any) -> None:
    """Lookups equal the trainer's rows bit for bit at the start, later, and after all shards were killed."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        training = Training(server.address)
        training.step()
        training.flush()
        with EmbeddingReplica(server.address, consistency=consistency, storage=storage, name="test") as replica:
            assert_equal(replica, training)
            for _ in range(3):
                training.step()
                settle(replica, training)
                assert_equal(replica, training)
            for pid in server.shard_pids:
                os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                training.step()
            settle(replica, training)
            assert_equal(replica, training)
            assert replica.failure is None and replica.epoch == 1
            for shard in replica.freshness():
                assert shard.visible_seq == shard.last_seq and shard.lag_s == 0 and shard.lag_steps == 0
                assert shard.delay.count > 0 and 0 < shard.delay.percentile(50) <= shard.delay.max_s < WAIT_S
        training.close()


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_freshness_counts_from_the_update(own_server: ServerProcess, consistency: Any) -> None:
    """Rows that wait in the trainer age in the replica, and their delay is no less than what a reader measures."""
    training = Training(own_server.address, freshness_s=3600)
    training.flush()
    with EmbeddingReplica(own_server.address, consistency=consistency) as replica:

        def oldest_s() -> float:
            return max(shard.age_s or 0.0 for shard in replica.freshness())

        training.step()
        updated_s, age_s = time.monotonic(), oldest_s()
        wait_until(lambda: oldest_s() > age_s + 0.5)  # nothing is sent, and nothing is behind
        assert not any(shard.is_behind for shard in replica.freshness())
        settle(replica, training)
        assert_equal(replica, training)
        for shard in replica.freshness():
            assert shard.delay.max_s >= 0.5
            assert (shard.age_s or 0.0) < time.monotonic() - updated_s
    training.close()


@STORAGE
def test_a_step_is_seen_whole(training: Training, storage: Any) -> None:
    """During training, a lookup of both tables finds one step number in all rows, and it only rises."""
    with training.replica(consistency="step", storage=storage) as replica:
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
        try:
            for _ in range(60):
                training.step()
                if training.num_steps % 4 == 0:
                    settle(replica, training)
                    # However late a reader's thread gets a processor, each of these steps is seen.
                    wait_until(lambda: any(of[-1:] == [training.num_steps] for of in seen), "a look at the step")
        finally:
            is_over.set()
            for reader in readers:
                reader.join()
        settle(replica, training)
        assert_equal(replica, training)
    assert not faults and len({*seen[0], *seen[1]}) > 3


def test_the_last_flush_of_a_step_is_seen(training: Training) -> None:
    """By step, a second flush of the same step becomes visible without a later step."""
    with training.replica(consistency="step") as replica:
        training.streamer.evict("left.weight", torch.arange(ROWS))
        training.flush()
        wait_until(lambda: replica.num_rows("left.weight") == 0, "the deletions")
        assert replica.step == 1


def test_a_forked_child_is_told(training: Training) -> None:
    """In a forked child lookups raise, and `close` leaves the parent's copies alone."""
    with training.replica(storage={"left.*": DiskStorage()}) as replica:
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
        assert_equal(replica, training)


def test_no_pickle_is_made(training: Training) -> None:
    """Pickling a replica is an error that says what to do, and the replica goes on."""
    with training.replica() as replica:
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="make one in each worker"):
                make(replica)
        assert_equal(replica, training)


def test_a_closed_replica_answers_nobody(server: ServerProcess, training: Training, tmp_path: Path) -> None:
    """Every method of a closed replica raises at once."""
    replica = training.replica()
    assert repr(replica).startswith(f"<EmbeddingReplica of {server.address}: ")
    assert f"<td>{training.name}:left.weight</td>" in replica._repr_html_()
    replica.close()
    replica.close()
    assert repr(replica).endswith(": closed>")
    for call in (
        lambda: replica.lookup("left.weight", 1),
        lambda: replica.wait_for(1, WAIT_S),
        lambda: replica.audit(),
        lambda: replica.digest("left.weight"),
        lambda: replica.load_snapshot(tmp_path),
        replica.freshness,
        lambda: replica.tables,
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_rows_on_disk_are_read_ahead_and_pinned(training: Training) -> None:
    """Prefetched and pinned rows are answered from memory, and lookups are counted by table."""
    storage, fqn = {"left.*": DiskStorage()}, f"{training.name}:left.weight"
    with training.replica(storage=storage) as replica:
        with replica.pinned("left.weight", [1, 2, 2]) as number, replica.pinned("right.weight", [1, 2, 2]) as in_memory:
            assert (number, in_memory) == (2, 2)
            replica.lookup("left.weight", [2, 1])
            (stats,) = replica.hot_rows().values()
            assert (stats.hits, stats.misses) == (2, 0)
        replica.prefetch("left.weight", torch.tensor([[3, 100], [100, 7]]))
        replica.prefetch("right.weight", torch.arange(4))
        wait_until(lambda: replica.hot_rows()[fqn].admitted == 5)
        assert replica.lookup("left.weight", [[3, 100], [2, 7]]).eq(1.0).all()
        assert (replica.hot_rows()[fqn].hits, replica.hot_rows()[fqn].misses) == (6, 0)
        with pytest.raises(RowRangeError):
            replica.prefetch("left.weight", [ROWS])
        with pytest.raises(UnknownTableError):
            replica.prefetch("middle.weight", [1])


def test_missing_rows(own_server: ServerProcess) -> None:
    """Missing rows read as zeros, as the default or as an error, as set, and are counted."""
    model = nn.ModuleDict({"few": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(own_server.address, run="few") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        model["few"](torch.tensor([[3, 5]])).sum().backward()
        optimizer.step()
        streamer.flush()
        row = model["few"].weight[3].detach()
    with EmbeddingReplica(own_server.address) as replica:
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
    with EmbeddingReplica(own_server.address, missing="table_default", defaults={"few.weight": default}) as replica:
        assert torch.equal(replica.lookup("few.weight", 4), default)
    with EmbeddingReplica(own_server.address, missing="error") as replica:
        assert torch.equal(replica.lookup("few.weight", 3), row)
        with pytest.raises(RequestError, match="row 4 is not there"):
            replica.lookup("few.weight", [3, 4])
    with pytest.raises(UnavailableError, match="closed"):
        replica.lookup("few.weight", 3)


def test_tables_come_later_and_only_those_wanted(own_server: ServerProcess) -> None:
    """A replica of an empty server learns tables when they are registered, but keeps only those it wants."""
    with EmbeddingReplica(own_server.address, tables=frozenset({"left.weight"})) as replica:
        assert replica.tables == {}
        training = Training(own_server.address)
        training.step()
        settle(replica, training)
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
        ({"tables": "left.weight"}, "tables is one string"),
        ({"consistancy": "step"}, "did you mean 'consistency'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    """A wrong setting is named before anything connects."""
    with pytest.raises(ConfigError, match=says):
        EmbeddingReplica("127.0.0.1:1", **settings)


def test_names_that_are_no_tables_are_told(own_server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """A name or storage pattern that matches no table is a warning with the nearest name."""
    training = Training(own_server.address)
    training.step()
    training.close()
    settings: dict[str, Any] = {
        "tables": frozenset({"left.*", "lift.weight"}),
        "storage": {"left.*": MemoryStorage(precision="fp16"), "rihgt.*": DiskStorage(memory_bytes=1 << 20)},
        "missing": "table_default",
        "defaults": {"left.weight": torch.ones(training.model["left"].weight.shape[1]), "up": torch.ones(4)},
    }
    with EmbeddingReplica(own_server.address, **settings) as replica:
        assert list(replica.tables) == ["left.weight"]
    told = [record.message for record in caplog.records if "no table of the server" in record.message]
    assert [line.split("'")[1] for line in told] == ["lift.weight", "rihgt.*", "up"]
    assert "tables: 'lift.weight' is no table of the server yet; the nearest are 'left.weight'" in told[0]
    told = ReplicaConfig(model="defualt").unmatched(["left.weight"])
    assert told == ["model: 'defualt' has no table on the server yet; the nearest is 'default'"]


def test_a_server_that_takes_its_token_no_more_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed token costs freshness only: the copy keeps its place and continues."""
    port, token = hold_ports(), "a-token-of-some-length"
    environ = {**os.environ, "HEADRACE_TOKEN": token}
    with ServerProcess.start(tmp_path / "data", port=port, environ=environ) as server:
        replica = EmbeddingReplica(server.address, token=Token(token))
    with replica:
        # So long away that the log has said it: that the token is wrong is told beside it, and soon.
        wait_until(lambda: "Connection refused" in caplog.text)
        changed = {**environ, "HEADRACE_TOKEN": token[::-1]}
        with ServerProcess.start(tmp_path / "data", port=port, environ=changed):
            wait_until(lambda: "the token is wrong for role reader: give that role's" in caplog.text)
            assert "the token is wrong" in str(replica.failure)
            assert not replica.is_beginning_anew
        with ServerProcess.start(tmp_path / "data", port=port, environ=environ):
            wait_until(lambda: replica.failure is None)


def test_no_server_is_one_line() -> None:
    """Without a server the error comes in time, and no thread is left."""
    before = set(threading.enumerate())
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        EmbeddingReplica("127.0.0.1:1", timeout_s=0.5, open_timeout_s=5.0)
    assert "headrace-replica" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_a_server_that_goes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the server is away lookups go on; `failure`, `wait_for` and one warning name what is unreachable."""
    port = hold_ports()
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        training = Training(server.address)
        training.step()
        replica = EmbeddingReplica(server.address)
        settle(replica, training)
        training.close()
        assert replica.failure is None
        server.kill()
    with replica:
        # Of an attempt that was on its way when the server ended it is told otherwise, until the next one.
        wait_until(lambda: "is tried again" in caplog.text and "Connection refused" in str(replica.failure))
        assert not replica.is_beginning_anew
        assert_equal(replica, training)
        with pytest.raises(UnavailableError, match=r"step 9 is not visible within 0\.1 s, .*Connection refused"):
            replica.wait_for(9, 0.1)
        with ServerProcess.start(tmp_path / "data", port=port):
            wait_until(lambda: replica.failure is None)
    assert "is reached again, after" in caplog.text
