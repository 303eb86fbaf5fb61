"""Writers in a process of their own: pipelined connections to a server, as fast as it acks or on a fixed schedule.

A schedule is an *open loop*: each batch has its moment, and its delay counts from there, whether or not the writer
could send then. A writer that waited for the server would leave out just its delays (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.scripts.benches.child import Child, Worker
from headrace.scripts.benches.workload import BenchRows, RowsConfig, hello_request

__all__ = ["WriteResult", "WriterProcess", "due_times_ns"]

_CALL_TIMEOUT_S = 120.0
_POLL_S = 0.01
# 32 MiB, which a streamer has in flight by default.
_WINDOW_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What the writers saw. Seconds count from the first byte, nanoseconds are the machine's monotonic clock."""

    num_rows: int
    wire_bytes: int
    acked_s: float  # the last batch was acked: it is on disk
    applied_s: float  # the stores have all batches too
    worst_loop_pause_ms: float  # of a shard
    cpu_s: float  # processor time of the writers' process
    first_step: int  # step of the first batch
    begin_ns: int  # when the first byte was sent
    # With a schedule:
    due_ns: list[int]  # when each batch was due
    ack_delays_ms: list[float]  # from due to acked, of each batch
    late_ms: float  # the median delay from due to sent


class WriterProcess(Child):
    """The process that writes; use it with `with`."""

    def __init__(self, rows: RowsConfig, *, num_clients: int = 1) -> None:
        """Start the process; `num_clients` take turns with batches, each with one connection to each shard."""
        super().__init__(f"{__name__}:_work", "the bench's writer", rows=asdict(rows), num_clients=num_clients)

    def write(self, address: str, *, num_batches: int, rows_per_s: float | None = None) -> WriteResult:
        """Write batches to a server, beginning again after the last one, and wait until it has applied them.

        `rows_per_s` is the rate of a schedule; without it batches are written as fast as they are acked.
        """
        return WriteResult(**self.ask(address=address, num_batches=num_batches, rows_per_s=rows_per_s))


def _work(rows: dict[str, Any], num_clients: int) -> Worker:
    of_process = BenchRows(RowsConfig(**rows))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        answer = asdict(asyncio.run(_write(of_process, num_clients, **order)))


def due_times_ns(begin_ns: int, num_batches: int, rows_per_batch: float, rows_per_s: float) -> list[int]:
    """Return when each batch of a schedule is due, nanoseconds; rounding does not accumulate."""
    interval_ns = rows_per_batch / rows_per_s * 1e9
    return [begin_ns + round(number * interval_ns) for number in range(num_batches)]


async def _write(
    rows: BenchRows, num_clients: int, address: str, num_batches: int, rows_per_s: float | None
) -> WriteResult:
    async with AsyncExitStack() as stack:
        writers = _Writers(rows, num_clients)
        await writers.connect(address, stack)
        return await writers.write(num_batches, rows_per_s)


class _Writers:
    """Connected clients: `clients[rank][shard]`."""

    def __init__(self, rows: BenchRows, num_clients: int) -> None:
        self._rows, self._num_clients = rows, num_clients
        self._clients: list[list[ParamServerClient]] = []
        self._last_seqs: list[int] = []
        self._max_requests = 0

    async def connect(self, address: str, stack: AsyncExitStack) -> None:
        for rank in range(self._num_clients):
            hello = hello_request(self._rows.specs, rank=rank, world_size=self._num_clients)
            clients: list[ParamServerClient] = []
            addresses, last_seq = [address], 0
            while addresses:
                host, port = parse_address(addresses.pop(0))
                client = await stack.enter_async_context(await ParamServerClient.connect(host, port))
                reply = await client.hello(hello)
                if not clients:
                    addresses = [f"{shard.host}:{shard.port}" for shard in reply.shards[1:]]
                    last_seq = reply.last_client_seq
                clients.append(client)
                self._max_requests = reply.limits.max_inflight_requests
            self._clients.append(clients)
            self._last_seqs.append(last_seq)

    async def write(self, num_batches: int, rows_per_s: float | None) -> WriteResult:
        plan = [self._requests(number) for number in range(num_batches)]
        window = max(_WINDOW_BATCHES // self._num_clients, 1) if rows_per_s is None else self._max_requests
        slots = [asyncio.Semaphore(min(window, self._max_requests)) for _ in self._clients]
        num_rows = sum(self._rows.ids[number % len(self._rows.ids)].size for number in range(num_batches))
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        begin_ns = time.monotonic_ns()
        due_ns = due_times_ns(begin_ns, num_batches, num_rows / num_batches, rows_per_s) if rows_per_s else []
        acked_ns, lates_ns, sending = [0] * num_batches, [], []

        async def send(number: int, rank: int) -> list[int]:
            calls = [
                client.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
                for client, request in zip(self._clients[rank], plan[number], strict=True)
            ]
            replies = await asyncio.gather(*calls)
            acked_ns[number] = time.monotonic_ns()
            slots[rank].release()
            return [reply.seq for reply in replies]

        async with asyncio.TaskGroup() as tasks:
            for number in range(num_batches):
                if due_ns:
                    await asyncio.sleep(max(0, due_ns[number] - time.monotonic_ns()) / 1e9)
                rank = number % self._num_clients
                await slots[rank].acquire()
                if due_ns:
                    lates_ns.append(time.monotonic_ns() - due_ns[number])
                sending.append(tasks.create_task(send(number, rank)))
        acked_s = time.perf_counter() - begin_s
        cpu_s = time.process_time() - begin_cpu_s
        last_seqs = np.max([task.result() for task in sending], axis=0).tolist()
        pauses_ms = [await _wait_applied(*pair) for pair in zip(self._clients[0], last_seqs, strict=True)]
        return WriteResult(
            num_rows=num_rows,
            wire_bytes=num_rows * self._rows.config.row_bytes,
            acked_s=acked_s,
            applied_s=time.perf_counter() - begin_s,
            worst_loop_pause_ms=max(pauses_ms),
            cpu_s=cpu_s,
            first_step=self._last_seqs[0] + 1,
            begin_ns=begin_ns,
            due_ns=due_ns,
            ack_delays_ms=[(acked - due) / 1e6 for acked, due in zip(acked_ns, due_ns, strict=False)],
            late_ms=float(np.median(lates_ns)) / 1e6 if lates_ns else 0.0,
        )

    def _requests(self, number: int) -> list[Any]:
        """Return the request of a batch to each shard."""
        rank, num_shards = number % self._num_clients, len(self._clients[0])
        seq = self._last_seqs[rank] + number // self._num_clients + 1
        batch = number % len(self._rows.ids)
        return [
            self._rows.request(batch, client_seq=seq, rank=rank, shard=shard, num_shards=num_shards)
            for shard in range(num_shards)
        ]


async def _wait_applied(client: ParamServerClient, seq: int) -> float:
    """Wait until a shard's store has a record; return the worst pause of the shard's event loop."""
    while (status := await client.status()).applied_seq < seq:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(_POLL_S)
    pause_ms: float = status.worst_loop_pause_ms
    return pause_ms
