"""A writer in a process of its own: one pipelined connection to a shard, as fast as it is acked.

`WriterProcess` is the parent's end. The process reads one JSON object a line on stdin, does it, and answers with one on
stdout; it ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from headrace.paramserver.address import parse_address
from headrace.paramserver.client import ParamServerClient
from headrace.paramserver.config import DEFAULT_PORT
from headrace.scripts.bench_child import BenchChild
from headrace.scripts.bench_rows import WIRE_ROW_BYTES, BenchRows, RowsConfig, hello_request

__all__ = ["WriteResult", "WriterProcess"]

_CALL_TIMEOUT_S = 120.0
_POLL_S = 0.01
# 32 MiB, what a streamer has in flight by default.
_WINDOW_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What a writer has seen. Times are seconds since its first byte.

    Attributes:
        num_rows: Rows written.
        wire_bytes: Their bytes.
        acked_s: When the last batch was acked: it is on disk.
        applied_s: When the store had all of them too.
        worst_loop_pause_ms: Of the shard meanwhile.
    """

    num_rows: int
    wire_bytes: int
    acked_s: float
    applied_s: float
    worst_loop_pause_ms: float


class WriterProcess(BenchChild):
    """The process that writes; use it with `with`."""

    def __init__(self, rows: RowsConfig) -> None:
        """Start it and have it make its rows ready.

        Raises:
            UnavailableError: It has ended.
        """
        super().__init__(__name__, "writer")
        try:
            self.ask(asdict(rows))
        except BaseException:
            self.close()
            raise

    def write(self, address: str, *, num_batches: int) -> WriteResult:
        """Write batches to the shard at an address, and wait until it has applied them.

        Args:
            address: Of a shard that has none of them.
            num_batches: The first so many.

        Raises:
            UnavailableError: The process has ended.
        """
        return WriteResult(**self.ask({"address": address, "num_batches": num_batches}))


async def _write(rows: BenchRows, address: str, num_batches: int) -> WriteResult:
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    num_rows = sum(ids.size for ids in rows.ids[:num_batches])
    async with await ParamServerClient.connect(host, port) as client, asyncio.TaskGroup() as tasks:
        limits = (await client.hello(hello_request())).limits
        room = asyncio.Semaphore(min(_WINDOW_BATCHES, limits.max_inflight_requests))
        requests = [rows.request(number, client_seq=number + 1) for number in range(num_batches)]

        async def send(request: Any) -> int:
            reply = await client.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
            room.release()
            seq: int = reply.seq
            return seq

        begin_s = time.perf_counter()
        sending = []
        for request in requests:
            await room.acquire()
            sending.append(tasks.create_task(send(request)))
        last_seq = max([await task for task in sending])
        acked_s = time.perf_counter() - begin_s
        while (status := await client.status()).applied_seq < last_seq:  # noqa: ASYNC110 (it is far away)
            await asyncio.sleep(_POLL_S)
        return WriteResult(
            num_rows=num_rows,
            wire_bytes=num_rows * WIRE_ROW_BYTES,
            acked_s=acked_s,
            applied_s=time.perf_counter() - begin_s,
            worst_loop_pause_ms=status.worst_loop_pause_ms,
        )


def _main() -> None:
    rows = BenchRows(RowsConfig(**json.loads(sys.stdin.readline())))
    print("{}", flush=True)  # ready
    while line := sys.stdin.readline():
        print(json.dumps(asdict(asyncio.run(_write(rows, **json.loads(line))))), flush=True)


if __name__ == "__main__":
    _main()
