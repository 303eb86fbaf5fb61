"""The demo's reader, on tables in memory that stand for the replica, and as a process of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.scripts import demo_reader
from headrace.scripts.demo_data import SAMPLE_PATH, EventLog, read_events
from headrace.scripts.demo_ranking import Replay, is_hit
from headrace.scripts.demo_reader import ArrivalProbe, ReaderConfig, Scorer, serve
from headrace.scripts.demo_reader_process import ReaderProcess

USER, ITEM = "model.user.weight", "model.item.weight"
NAMES = {"user_fqn": USER, "item_fqn": ITEM}


@dataclass
class FakeReplica:
    """Two tables in memory, with what the reader uses of an `EmbeddingReplica`."""

    tables: dict[str, np.ndarray]
    missing: dict[str, set[int]] = field(default_factory=dict)
    num_missing: dict[str, int] = field(default_factory=dict)
    failure: HeadraceError | None = None
    step: int = -1
    is_closed: bool = False
    num_waiting: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def of(cls, log: EventLog, dim: int = 4) -> FakeReplica:
        rng = np.random.default_rng(11)
        return cls(
            {
                USER: rng.standard_normal((log.num_users, dim)).astype(np.float32),
                ITEM: rng.standard_normal((log.num_items, dim)).astype(np.float32),
            }
        )

    def lookup_many(self, ids_of: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        found = {}
        for fqn, ids in ids_of.items():
            is_there = np.array([int(i) not in self.missing.get(fqn, ()) for i in ids])
            self.num_missing[fqn] = self.num_missing.get(fqn, 0) + int((~is_there).sum())
            found[fqn] = torch.from_numpy(self.tables[fqn][ids] * is_there[:, None].astype(np.float32))
        return found

    def wait_for(self, step: int, timeout_s: float) -> None:
        with self.changed:
            self.num_waiting += 1
            self.changed.notify_all()
            if self.failure is not None:
                raise self.failure
            if not self.changed.wait_for(lambda: self.is_closed or self.step >= step, timeout_s):
                raise UnavailableError(f"step {step} is not visible within {timeout_s:g} s")

    def show(self, step: int) -> None:
        """Make a step visible."""
        with self.changed:
            self.step = step
            self.changed.notify_all()

    async def somebody_waits(self, number: int) -> None:
        """Return when `wait_for` has been called so often."""

        def wait() -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: self.num_waiting >= number, 60)

        await asyncio.to_thread(wait)

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE_PATH, max_events=3000), batch_events=32, seed=5)


def expected_hits(replay: Replay, tables: dict[str, np.ndarray], batch: int) -> int:
    users = replay.log.users[replay.events_of(batch)]
    return int(is_hit(tables[USER][users], tables[ITEM][replay.candidates(batch)]).sum())


async def test_streamed_copy_is_what_the_replica_holds_and_frozen_copy_is_what_it_held(replay: Replay) -> None:
    """Each batch is scored with present rows, and with those of the moment at which its part began."""
    replica = FakeReplica.of(replay.log)
    scorer = Scorer(replica, replay, **NAMES)
    rng = np.random.default_rng(1)
    frozen: dict[str, np.ndarray] = {}
    differs = False
    for batch in range(replay.num_batches):
        if batch in replay.part_starts:
            frozen = {fqn: rows.copy() for fqn, rows in replica.tables.items()}
        score = await scorer.score(batch)
        assert score.num_streamed_hits == expected_hits(replay, replica.tables, batch)
        assert score.num_frozen_hits == expected_hits(replay, frozen, batch)
        assert score.num_missing_rows == 0
        differs |= score.num_streamed_hits != score.num_frozen_hits
        for rows in replica.tables.values():
            rows += rng.standard_normal(rows.shape).astype(np.float32)
    assert differs


async def test_missing_rows_are_counted_and_scored_as_zeros(replay: Replay) -> None:
    """A user that the replica does not have makes no hit, and is told, once for each batch."""
    replica = FakeReplica.of(replay.log)
    replica.missing[USER] = set(range(replay.log.num_users))
    scorer = Scorer(replica, replay, **NAMES)
    for batch in (0, 1):
        score = await scorer.score(batch)
        users = np.unique(replay.log.users[replay.events_of(batch)])
        assert score.num_missing_rows == users.size
        assert score.num_streamed_hits == 0


async def test_what_is_served_is_saved_to_the_bit(replay: Replay, tmp_path: Path) -> None:
    """The file has every row of both tables as a look-up gives it."""
    replica = FakeReplica.of(replay.log)
    await Scorer(replica, replay, **NAMES).save(tmp_path / "served.npz")
    with np.load(tmp_path / "served.npz", allow_pickle=False) as served:
        assert set(served) == {USER, ITEM}
        assert all(served[fqn].tobytes() == rows.tobytes() for fqn, rows in replica.tables.items())


async def test_lag_ends_when_the_step_is_visible(replay: Replay) -> None:
    """Each step counts from its own update to the moment at which the replica shows it or a later one."""
    clock_s = 100.0
    replica = FakeReplica.of(replay.log)
    probe = ArrivalProbe(replica, monotonic_s=lambda: clock_s)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(probe.run())
        probe.watch(82, 99.5)
        probe.watch(83, 99.75)
        finished = tasks.create_task(probe.finish())
        await replica.somebody_waits(1)
        replica.show(81)
        clock_s = 107.0
        assert not finished.done()
        replica.show(83)
        assert await finished == [7.5, 7.25]
        running.cancel()


async def test_updates_that_never_come_are_an_error(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader does not wait for ever for a lost update."""
    monkeypatch.setattr(demo_reader, "_ARRIVAL_TIMEOUT_S", 0.05)
    probe = ArrivalProbe(FakeReplica.of(replay.log))
    probe.watch(1, 0.0)
    with pytest.raises(UnavailableError, match=r"step 1 is not visible within 0\.05 s"):
        await probe.run()


class Wire:
    """Both ends of what `serve` reads and writes."""

    def __init__(self) -> None:
        self.orders = asyncio.StreamReader()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def send(self, **order: Any) -> None:
        self.orders.feed_data(json.dumps(order).encode() + b"\n")

    def write(self, data: bytes) -> None:
        self.answers.put_nowait(json.loads(data))

    async def drain(self) -> None:
        pass


@pytest.fixture
def connected(replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeReplica, ReaderConfig]:
    """A fake replica that `serve` begins, and the configuration that says so."""
    replica = FakeReplica.of(replay.log)

    def begin(address: str) -> FakeReplica:
        assert address == "fake:1"
        return replica

    monkeypatch.setattr(demo_reader, "EmbeddingReplica", begin)
    replay.log.save(tmp_path / "log.npz")
    config = ReaderConfig(
        address="fake:1", log_path=str(tmp_path / "log.npz"), batch_events=32, seed=5, user_fqn=USER, item_fqn=ITEM
    )
    return replica, config


async def test_orders_are_answered_until_there_are_no_more(
    replay: Replay, connected: tuple[FakeReplica, ReaderConfig], tmp_path: Path
) -> None:
    """Scores, lags and rows come back; at the end of the orders the replica is closed."""
    replica, config = connected
    wire = Wire()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(config, wire.orders, wire))  # type: ignore[arg-type]
        wire.send(do="score", batch=0)
        score = await wire.answers.get()
        assert score["num_streamed_hits"] == expected_hits(replay, replica.tables, 0)
        replica.show(2)
        wire.send(do="watch", step=2, trained_at_s=time.monotonic())
        wire.send(do="finish")
        (lag_s,) = (await wire.answers.get())["lags_s"]
        assert 0 <= lag_s < 60
        wire.send(do="save", path=str(tmp_path / "served.npz"))
        assert await wire.answers.get() == {}
        assert (tmp_path / "served.npz").exists()
        assert not serving.done()
        wire.orders.feed_eof()
    assert replica.is_closed


async def test_failure_of_the_probe_ends_the_reader(connected: tuple[FakeReplica, ReaderConfig]) -> None:
    """An error in the background is not swallowed: it ends the reader while it waits for orders."""
    replica, config = connected
    replica.failure = HeadraceError("the gate is stuck")
    wire = Wire()
    wire.send(do="watch", step=2, trained_at_s=0.0)
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as caught:
            await serve(config, wire.orders, wire)  # type: ignore[arg-type]
    assert caught.group_contains(HeadraceError, match="the gate is stuck")
    assert replica.is_closed


def config_of(tmp_path: Path, address: str) -> ReaderConfig:
    read_events(SAMPLE_PATH, max_events=3000).save(tmp_path / "log.npz")
    return ReaderConfig(
        address=address, log_path=str(tmp_path / "log.npz"), batch_events=32, seed=5, user_fqn=USER, item_fqn=ITEM
    )


def test_process_reports_its_error_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A reader that cannot work says why to the trainer, with no traceback, and ends."""
    with ReaderProcess(config_of(tmp_path, "no address")) as reader:
        with pytest.raises(HeadraceError, match=r"the demo's reader: .*'no address' is not"):
            reader.score(0)
        process = reader._process
    assert process is not None
    assert process.returncode == 1
    assert capfd.readouterr().err == ""


def test_dead_process_is_told(tmp_path: Path) -> None:
    """A reader that was killed is an error at the next order, not a wait without end."""
    with ReaderProcess(config_of(tmp_path, "127.0.0.1:1")) as reader:
        assert reader._process is not None
        reader._process.kill()
        with pytest.raises(UnavailableError, match=rf"the demo's reader, process {reader.pid}, has died"):
            reader.score(0)


async def test_end_of_orders_ends_a_reader_that_waits(
    replay: Replay, connected: tuple[FakeReplica, ReaderConfig]
) -> None:
    """When the trainer is gone, an update that never comes does not keep the reader."""
    replica, config = connected
    wire = Wire()
    wire.send(do="watch", step=2, trained_at_s=0.0)
    wire.send(do="finish")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, wire.orders, wire))  # type: ignore[arg-type]
        await replica.somebody_waits(1)
        wire.orders.feed_eof()
    assert wire.answers.empty()
    assert replica.is_closed
