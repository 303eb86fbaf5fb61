"""The demo's reader, on a table in memory that stands for the server, and as a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.scripts import demo_reader
from headrace.scripts.demo_data import SAMPLE_PATH, EventLog, read_events
from headrace.scripts.demo_ranking import Replay, is_hit
from headrace.scripts.demo_reader import ArrivalProbe, ReaderConfig, Scorer, serve
from headrace.scripts.demo_reader_process import ReaderProcess

USER, ITEM = "model.user.weight", "model.item.weight"
NAMES = {"user_fqn": USER, "item_fqn": ITEM}


@dataclass
class FakeRows:
    presence: np.ndarray
    weights: np.ndarray
    steps: np.ndarray


@dataclass
class FakeServer:
    """Two tables in memory, with the `get` of an `EmbeddingReader`."""

    tables: dict[str, np.ndarray]
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    missing: dict[str, set[int]] = field(default_factory=dict)
    failure: HeadraceError | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_gets: int = 0
    is_closed: bool = False

    @classmethod
    def of(cls, log: EventLog, dim: int = 4) -> FakeServer:
        rng = np.random.default_rng(11)
        tables = {
            USER: rng.standard_normal((log.num_users, dim)).astype(np.float32),
            ITEM: rng.standard_normal((log.num_items, dim)).astype(np.float32),
        }
        return cls(tables, {fqn: np.zeros(len(rows), np.int64) for fqn, rows in tables.items()})

    async def get(self, fqn: str, row_ids: np.ndarray, *, with_versions: bool = False) -> Any:
        if self.failure is not None:
            raise self.failure
        is_there = np.array([int(i) not in self.missing.get(fqn, ()) for i in row_ids])
        weights = self.tables[fqn][row_ids] * is_there[:, None]
        async with self.changed:
            self.num_gets += 1
            self.changed.notify_all()
        return FakeRows(is_there.astype(np.uint8), weights, self.steps[fqn][row_ids])

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE_PATH, max_events=3000), batch_events=32, seed=5)


def expected_hits(replay: Replay, tables: dict[str, np.ndarray], batch: int) -> int:
    users = replay.log.users[replay.events_of(batch)]
    return int(is_hit(tables[USER][users], tables[ITEM][replay.candidates(batch)]).sum())


async def test_streamed_copy_is_what_the_server_holds_and_frozen_copy_is_what_it_held(replay: Replay) -> None:
    """Each batch is scored with present rows, and with those of the moment at which its part began."""
    server = FakeServer.of(replay.log)
    scorer = Scorer(server, replay, **NAMES)
    rng = np.random.default_rng(1)
    frozen: dict[str, np.ndarray] = {}
    differs = False
    for batch in range(replay.num_batches):
        if batch in replay.part_starts:
            frozen = {fqn: rows.copy() for fqn, rows in server.tables.items()}
        score = await scorer.score(batch)
        assert score.num_streamed_hits == expected_hits(replay, server.tables, batch)
        assert score.num_frozen_hits == expected_hits(replay, frozen, batch)
        assert score.num_missing_rows == 0
        differs |= score.num_streamed_hits != score.num_frozen_hits
        for rows in server.tables.values():
            rows += rng.standard_normal(rows.shape).astype(np.float32)
    assert differs


async def test_missing_rows_are_counted_and_scored_as_zeros(replay: Replay) -> None:
    """A user that the server does not have makes no hit, and is told."""
    server = FakeServer.of(replay.log)
    server.missing[USER] = set(range(replay.log.num_users))
    score = await Scorer(server, replay, **NAMES).score(0)
    users = np.unique(replay.log.users[replay.events_of(0)])
    assert score.num_missing_rows == users.size
    assert score.num_streamed_hits == 0


async def test_lag_ends_when_the_last_row_of_the_batch_is_new_enough(replay: Replay) -> None:
    """A batch counts as arrived only when each of its users and items has the step of its update or a later one."""
    clock_s = 100.0
    server = FakeServer.of(replay.log)
    probe = ArrivalProbe(server, replay, **NAMES, monotonic_s=lambda: clock_s)
    events = replay.events_of(40)
    users, items = np.unique(replay.log.users[events]), np.unique(replay.log.items[events])
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(probe.run())
        probe.watch(40, 82, 99.5)
        finished = tasks.create_task(probe.finish())
        # One row after the other arrives; while one is old, the probe goes on looking.
        arrivals = [(USER, users), (ITEM, items)]
        for fqn, row_ids in arrivals:
            for row_id in row_ids:
                clock_s += 1.0
                async with server.changed:
                    num_gets = server.num_gets
                    await server.changed.wait_for(lambda at_least=num_gets + 2: server.num_gets >= at_least)
                assert not finished.done()
                server.steps[fqn][row_id] = 82 + row_id % 2
        assert await finished == [pytest.approx(users.size + items.size + 0.5)]
        running.cancel()


async def test_rows_that_never_arrive_are_an_error(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader does not wait for ever for a lost row."""
    monkeypatch.setattr(demo_reader, "_ARRIVAL_TIMEOUT_S", 0.05)
    probe = ArrivalProbe(FakeServer.of(replay.log), replay, **NAMES)
    probe.watch(0, 1, 0.0)
    with pytest.raises(UnavailableError, match="rows of step 1 have not arrived at the server within"):
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
def connected(replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeServer, ReaderConfig]:
    """A fake server that `serve` connects to, and the configuration that says so."""
    server = FakeServer.of(replay.log)

    async def connect(address: str) -> FakeServer:
        assert address == "fake:1"
        return server

    monkeypatch.setattr(demo_reader.EmbeddingReader, "connect", connect)
    replay.log.save(tmp_path / "log.npz")
    config = ReaderConfig(
        address="fake:1", log_path=str(tmp_path / "log.npz"), batch_events=32, seed=5, user_fqn=USER, item_fqn=ITEM
    )
    return server, config


async def test_orders_are_answered_until_there_are_no_more(
    replay: Replay, connected: tuple[FakeServer, ReaderConfig]
) -> None:
    """Scores and lags come back; at the end of the orders the connection to the server is closed."""
    server, config = connected
    wire = Wire()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(config, wire.orders, wire))  # type: ignore[arg-type]
        wire.send(do="score", batch=0)
        score = await wire.answers.get()
        assert score["num_streamed_hits"] == expected_hits(replay, server.tables, 0)
        for fqn in (USER, ITEM):
            server.steps[fqn][:] = 2
        wire.send(do="watch", batch=0, step=2, trained_at_s=time.monotonic())
        wire.send(do="finish")
        (lag_s,) = (await wire.answers.get())["lags_s"]
        assert 0 <= lag_s < 20
        assert not serving.done()
        wire.orders.feed_eof()
    assert server.is_closed


async def test_failure_of_the_probe_ends_the_reader(connected: tuple[FakeServer, ReaderConfig]) -> None:
    """An error in the background is not swallowed: it ends the reader while it waits for orders."""
    server, config = connected
    server.failure = HeadraceError("the gate is stuck")
    wire = Wire()
    wire.send(do="watch", batch=0, step=2, trained_at_s=0.0)
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as caught:
            await serve(config, wire.orders, wire)  # type: ignore[arg-type]
    assert caught.group_contains(HeadraceError, match="the gate is stuck")
    assert server.is_closed


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


def test_reader_loads_without_torch() -> None:
    """The reader is a serving process: it starts without torch."""
    code = "import headrace.scripts.demo_reader, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


async def test_end_of_orders_ends_a_reader_that_waits(
    replay: Replay, connected: tuple[FakeServer, ReaderConfig]
) -> None:
    """When the trainer is gone, rows that never arrive do not keep the reader."""
    server, config = connected
    wire = Wire()
    wire.send(do="watch", batch=0, step=2, trained_at_s=0.0)
    wire.send(do="finish")
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, wire.orders, wire))  # type: ignore[arg-type]
        async with server.changed:
            await server.changed.wait_for(lambda: server.num_gets > 2)
        wire.orders.feed_eof()
    assert wire.answers.empty()
    assert server.is_closed
