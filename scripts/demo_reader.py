"""The demo's reader: another process, which serves from a replica and has never seen the trainer's memory.

It answers three questions by what its replica has got over the network. How good are the rows that it holds right now?
Each batch of events is scored before the trainer trains on it. How late do updates come? After the trainer has trained
on a batch, the reader waits until that step is visible. And are they the same rows? At the end it saves what it serves.

It runs as `python -m headrace.scripts.demo_reader FD`, on one end of a socket pair. The other end, `ReaderProcess` in
the trainer, sends orders as lines of JSON; all but `watch` are answered with one line each. When the other end is gone,
the reader ends.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.replica import EmbeddingReplica
from headrace.schemas.errors import HeadraceError, ProtocolError
from headrace.scripts.demo_data import EventLog
from headrace.scripts.demo_ranking import Replay, is_hit

__all__ = ["ArrivalProbe", "BatchScore", "ReaderConfig", "RowSource", "Scorer", "main", "serve"]

_Ids = npt.NDArray[np.int64]
_Rows = npt.NDArray[Any]

# Far above any lag that is worth plotting: updates this late are lost.
_ARRIVAL_TIMEOUT_S = 60.0


class RowSource(Protocol):
    """What the reader needs of an `EmbeddingReplica`. Its methods block."""

    @property
    def num_missing(self) -> dict[str, int]:
        """Ids that lookups have not found, by fqn."""

    def lookup_many(self, ids_of: dict[str, _Ids]) -> dict[str, torch.Tensor]:
        """Return rows of several tables, `[n, dim]` each, all as of one moment."""

    def wait_for(self, step: int, timeout_s: float) -> None:
        """Return when every update up to a step is visible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderConfig:
    """What the reader is told at its start, as one line of JSON.

    Attributes:
        address: Address of the parameter server.
        log_path: File written by `EventLog.save`.
        batch_events: As in `Replay`.
        seed: As in `Replay`.
        user_fqn: Table of the users.
        item_fqn: Table of the items.
    """

    address: str
    log_path: str
    batch_events: int
    seed: int
    user_fqn: str
    item_fqn: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScore:
    """How a batch of events was ranked by what the replica holds.

    Attributes:
        batch: Number of the batch.
        num_streamed_hits: Events that the streamed copy ranks as a hit.
        num_frozen_hits: Events that the frozen copy ranks as a hit.
        num_missing_rows: Rows that the replica did not have; they were scored as zeros.
    """

    batch: int
    num_streamed_hits: int
    num_frozen_hits: int
    num_missing_rows: int


class Scorer:
    """Scores batches with rows that the replica serves, and with a copy of them frozen at the start of each part."""

    def __init__(self, source: RowSource, replay: Replay, *, user_fqn: str, item_fqn: str) -> None:
        """Begin with no frozen copy; batch 0 makes one."""
        self._source, self._replay = source, replay
        self._user_fqn, self._item_fqn = user_fqn, item_fqn
        self._frozen_users: _Rows = np.zeros((0, 0))
        self._frozen_items: _Rows = np.zeros((0, 0))

    async def score(self, batch: int) -> BatchScore:
        """Score one batch with what the replica holds now; at the start of a part, freeze a new copy first.

        Cancellation: resumable.
        """
        log = self._replay.log
        if batch in self._replay.part_starts:
            everything = await self._look_up(np.arange(log.num_users), np.arange(log.num_items))
            self._frozen_users, self._frozen_items = everything
        users = log.users[self._replay.events_of(batch)]
        candidates = self._replay.candidates(batch)
        user_ids, user_at = np.unique(users, return_inverse=True)
        item_ids, item_at = np.unique(candidates, return_inverse=True)
        num_missing = sum(self._source.num_missing.values())
        user_rows, item_rows = await self._look_up(user_ids, item_ids)
        streamed = is_hit(user_rows[user_at], item_rows[item_at.reshape(candidates.shape)])
        frozen = is_hit(self._frozen_users[users], self._frozen_items[candidates])
        return BatchScore(
            batch=batch,
            num_streamed_hits=int(streamed.sum()),
            num_frozen_hits=int(frozen.sum()),
            num_missing_rows=sum(self._source.num_missing.values()) - num_missing,
        )

    async def save(self, path: Path) -> None:
        """Write all rows, as they are served now, to a file of numpy's `.npz` format: an array a table, by fqn.

        Cancellation: the file may be there in part.
        """
        log = self._replay.log
        users, items = await self._look_up(np.arange(log.num_users), np.arange(log.num_items))
        arrays: dict[str, Any] = {self._user_fqn: users, self._item_fqn: items}
        await asyncio.to_thread(lambda: np.savez(path, **arrays))

    async def _look_up(self, user_ids: _Ids, item_ids: _Ids) -> tuple[_Rows, _Rows]:
        wanted = {self._user_fqn: user_ids, self._item_fqn: item_ids}
        rows = await asyncio.to_thread(self._source.lookup_many, wanted)
        return rows[self._user_fqn].numpy(), rows[self._item_fqn].numpy()


class ArrivalProbe:
    """Measures how long after the trainer's update a step is visible in the replica.

    It waits for each step and looks at no rows, so that it takes nothing from what it measures.
    """

    def __init__(self, source: RowSource, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing to watch."""
        self._source, self._monotonic_s = source, monotonic_s
        # Bounded by the log: the trainer adds one a batch, and waits for the reader's score before the next.
        self._trained: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._lags_s: list[float] = []

    def watch(self, step: int, trained_at_s: float) -> None:
        """Wait for a step to be visible.

        Args:
            step: Higher than those before.
            trained_at_s: `time.monotonic()` when the updates were done; the clock is the machine's, not the process's.
        """
        self._trained.put_nowait((step, trained_at_s))

    async def run(self) -> None:
        """Watch, until cancelled.

        Raises:
            UnavailableError: A step is not visible in a minute.

        Cancellation: atomic; a step that has not been seen is not counted. A thread waits until the source is closed.
        """
        while True:
            step, trained_at_s = await self._trained.get()
            await asyncio.to_thread(self._source.wait_for, step, _ARRIVAL_TIMEOUT_S)
            self._lags_s.append(self._monotonic_s() - trained_at_s)
            self._trained.task_done()

    async def finish(self) -> list[float]:
        """Return the lags of all watched steps, seconds, when the last of them is visible."""
        await self._trained.join()
        return self._lags_s


async def serve(config: ReaderConfig, orders: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    """Carry out orders, one after the other, until there can be no more; one that is under way then is dropped.

    Raises:
        HeadraceError: The replica cannot begin or has lost an update, or an order is unknown; perhaps in a group.
        ConnectionError: The other end has gone while it was answered; perhaps in a group.
    """
    # Bounded by the other end, which sends two orders a batch and waits for the answer to one of them.
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_work(config, received, answers), name="orders")
        # Reading goes on whatever the work waits for, so that the end is seen at once.
        while line := await _read_line(orders):
            received.put_nowait(json.loads(line))
        work.cancel()


async def _work(config: ReaderConfig, received: asyncio.Queue[dict[str, Any]], answers: asyncio.StreamWriter) -> None:
    """Begin a replica of the server and carry out orders, until cancelled."""
    log = await asyncio.to_thread(EventLog.load, Path(config.log_path))
    replay = Replay(log=log, batch_events=config.batch_events, seed=config.seed)
    source = await asyncio.to_thread(EmbeddingReplica, config.address)
    try:
        scorer = Scorer(source, replay, user_fqn=config.user_fqn, item_fqn=config.item_fqn)
        probe = ArrivalProbe(source)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(probe.run(), name="arrival probe")
            while True:
                await _carry_out(await received.get(), scorer, probe, answers)
    finally:
        source.close()  # at this a thread that waits for a step ends


async def _carry_out(order: dict[str, Any], scorer: Scorer, probe: ArrivalProbe, answers: asyncio.StreamWriter) -> None:
    if order["do"] == "score":
        await _answer(answers, asdict(await scorer.score(order["batch"])))
    elif order["do"] == "watch":
        probe.watch(order["step"], order["trained_at_s"])
    elif order["do"] == "finish":
        await _answer(answers, {"lags_s": await probe.finish()})
    elif order["do"] == "save":
        await scorer.save(Path(order["path"]))
        await _answer(answers, {})
    else:
        raise ProtocolError(f"the reader knows no order {order['do']!r}")


async def _read_line(orders: asyncio.StreamReader) -> bytes:
    """Return the next line; empty when there is none because the other end has gone, however it went."""
    try:
        line = await orders.readline()
    except ConnectionError:
        return b""
    return line if line.endswith(b"\n") else b""


async def _answer(answers: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    await answers.drain()


async def _main(sock: socket.socket) -> int:
    orders, answers = await asyncio.open_connection(sock=sock)
    failure: BaseException | None = None
    try:
        config = await _read_line(orders)
        try:
            if config:
                await serve(ReaderConfig(**json.loads(config)), orders, answers)
        except* HeadraceError as errors:
            failure = errors
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        if failure is not None:
            await _answer(answers, {"error": str(failure)})
    except* ConnectionError as errors:
        failure = errors  # the demo has gone, and with it whoever would read of it
    finally:
        answers.close()
    return 0 if failure is None else 1


def main() -> int:
    """Run the reader on the socket whose number is the only argument, and return its exit code."""
    torch.set_num_threads(1)  # with tables this small a second one costs more than it helps
    return asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
