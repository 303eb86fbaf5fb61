"""The demo's reader: another process, which serves from the parameter server and has never seen the trainer's memory.

It answers two questions by what it reads over the network. How good are the rows that the server holds right now? Each
batch of events is scored before the trainer trains on it. And how late do rows arrive? After the trainer has trained on
a batch, the reader polls that batch's rows until it sees versions that are new enough.

It runs as `python -m headrace.scripts.demo_reader FD`, on one end of a socket pair. The other end, `ReaderProcess` in
the trainer, sends orders as lines of JSON; `score` and `finish` are answered with one line each. When the other end is
gone, the reader ends.
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

from headrace.paramserver.reader import EmbeddingReader
from headrace.schemas.errors import HeadraceError, ProtocolError, UnavailableError
from headrace.scripts.demo_data import EventLog
from headrace.scripts.demo_ranking import Replay, is_hit

__all__ = ["ArrivalProbe", "BatchScore", "ReaderConfig", "RowSource", "Scorer", "main", "serve"]

_Ids = npt.NDArray[np.int64]
_Rows = npt.NDArray[Any]

# Between two looks at rows that have not arrived; it bounds how exact the measured lag is.
_POLL_INTERVAL_S = 0.001
# Far above any lag that is worth plotting: rows this late are lost.
_ARRIVAL_TIMEOUT_S = 60.0


class RowSource(Protocol):
    """What the reader needs of an `EmbeddingReader`."""

    async def get(self, fqn: str, row_ids: _Ids, *, with_versions: bool = False) -> Any:
        """Return the `Rows` of a table's rows `row_ids`, int64[n], in their order."""


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
    """How a batch of events was ranked by what the server holds.

    Attributes:
        batch: Number of the batch.
        num_streamed_hits: Events that the streamed copy ranks as a hit.
        num_frozen_hits: Events that the frozen copy ranks as a hit.
        num_missing_rows: Rows that the server did not have; they were scored as zeros.
        read_s: How long the reads took, seconds.
    """

    batch: int
    num_streamed_hits: int
    num_frozen_hits: int
    num_missing_rows: int
    read_s: float


class Scorer:
    """Scores batches with rows read from the server, and with a copy of them frozen at the start of each part."""

    def __init__(self, source: RowSource, replay: Replay, *, user_fqn: str, item_fqn: str) -> None:
        """Begin with no frozen copy; batch 0 makes one."""
        self._source, self._replay = source, replay
        self._user_fqn, self._item_fqn = user_fqn, item_fqn
        self._frozen_users: _Rows = np.zeros((0, 0))
        self._frozen_items: _Rows = np.zeros((0, 0))

    async def score(self, batch: int) -> BatchScore:
        """Score one batch with what the server holds now; at the start of a part, freeze a new copy first.

        Cancellation: resumable.
        """
        log = self._replay.log
        if batch in self._replay.part_starts:
            self._frozen_users = (await self._source.get(self._user_fqn, np.arange(log.num_users))).weights
            self._frozen_items = (await self._source.get(self._item_fqn, np.arange(log.num_items))).weights
        users = log.users[self._replay.events_of(batch)]
        candidates = self._replay.candidates(batch)
        user_ids, user_at = np.unique(users, return_inverse=True)
        item_ids, item_at = np.unique(candidates, return_inverse=True)
        started_s = time.monotonic()
        user_rows, item_rows = await asyncio.gather(
            self._source.get(self._user_fqn, user_ids), self._source.get(self._item_fqn, item_ids)
        )
        read_s = time.monotonic() - started_s
        streamed = is_hit(user_rows.weights[user_at], item_rows.weights[item_at.reshape(candidates.shape)])
        frozen = is_hit(self._frozen_users[users], self._frozen_items[candidates])
        return BatchScore(
            batch=batch,
            num_streamed_hits=int(streamed.sum()),
            num_frozen_hits=int(frozen.sum()),
            num_missing_rows=int((user_rows.presence != 1).sum() + (item_rows.presence != 1).sum()),
            read_s=read_s,
        )


class ArrivalProbe:
    """Measures how long after the trainer's update the rows of a batch can be read.

    One batch is watched at a time. One that is trained on meanwhile waits, so its lag can come out too long, never too
    short; so do the intervals between two looks.
    """

    def __init__(
        self,
        source: RowSource,
        replay: Replay,
        *,
        user_fqn: str,
        item_fqn: str,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to watch."""
        self._source, self._replay, self._monotonic_s = source, replay, monotonic_s
        self._user_fqn, self._item_fqn = user_fqn, item_fqn
        # Bounded by the log: the trainer adds one a batch, and waits for the reader's score before the next.
        self._trained: asyncio.Queue[tuple[int, int, float]] = asyncio.Queue()
        self._lags_s: list[float] = []

    def watch(self, batch: int, step: int, trained_at_s: float) -> None:
        """Wait for a batch's rows to arrive.

        Args:
            batch: Number of the batch.
            step: Version that its rows have, or a later one, once the batch's updates are there.
            trained_at_s: `time.monotonic()` when the updates were done; the clock is the machine's, not the process's.
        """
        self._trained.put_nowait((batch, step, trained_at_s))

    async def run(self) -> None:
        """Watch, until cancelled.

        Raises:
            UnavailableError: A batch's rows have not arrived in a minute.

        Cancellation: atomic; a batch that has not been seen is not counted.
        """
        while True:
            batch, step, trained_at_s = await self._trained.get()
            events = self._replay.events_of(batch)
            log = self._replay.log
            user_ids, item_ids = np.unique(log.users[events]), np.unique(log.items[events])
            try:
                async with asyncio.timeout(_ARRIVAL_TIMEOUT_S):
                    await self._wait_for(self._user_fqn, user_ids, step)
                    await self._wait_for(self._item_fqn, item_ids, step)
            except TimeoutError as exc:
                raise UnavailableError(
                    f"rows of step {step} have not arrived at the server within {_ARRIVAL_TIMEOUT_S:g} s"
                ) from exc
            self._lags_s.append(self._monotonic_s() - trained_at_s)
            self._trained.task_done()

    async def finish(self) -> list[float]:
        """Return the lags of all watched batches, seconds, when the last of them has arrived."""
        await self._trained.join()
        return self._lags_s

    async def _wait_for(self, fqn: str, row_ids: _Ids, step: int) -> None:
        while True:
            rows = await self._source.get(fqn, row_ids, with_versions=True)
            row_ids = row_ids[(rows.presence != 1) | (rows.steps < step)]
            if not row_ids.size:
                return
            await asyncio.sleep(_POLL_INTERVAL_S)


async def serve(config: ReaderConfig, orders: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    """Carry out orders, one after the other, until there can be no more; one that is under way then is dropped.

    Raises:
        HeadraceError: The server cannot be read, or an order is unknown; perhaps in a group.
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
    """Connect to the server and carry out orders, until cancelled."""
    log = await asyncio.to_thread(EventLog.load, Path(config.log_path))
    replay = Replay(log=log, batch_events=config.batch_events, seed=config.seed)
    user_fqn, item_fqn = config.user_fqn, config.item_fqn
    source = await EmbeddingReader.connect(config.address)
    try:
        scorer = Scorer(source, replay, user_fqn=user_fqn, item_fqn=item_fqn)
        probe = ArrivalProbe(source, replay, user_fqn=user_fqn, item_fqn=item_fqn)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(probe.run(), name="arrival probe")
            while True:
                await _carry_out(await received.get(), scorer, probe, answers)
    finally:
        await source.close()


async def _carry_out(order: dict[str, Any], scorer: Scorer, probe: ArrivalProbe, answers: asyncio.StreamWriter) -> None:
    if order["do"] == "score":
        await _answer(answers, asdict(await scorer.score(order["batch"])))
    elif order["do"] == "watch":
        probe.watch(order["batch"], order["step"], order["trained_at_s"])
    elif order["do"] == "finish":
        await _answer(answers, {"lags_s": await probe.finish()})
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
    return asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
