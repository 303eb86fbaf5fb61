"""The lookup bench's table, and the process that writes it: all rows once, then updates at a steady pace.

Orders on stdin: first a `TableConfig` and the server's address; then `fill`, which writes every row; then a rate, at
which Zipf rows are written until the next line comes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.benches.bench_child import give_answer, orders
from headrace.scripts.benches.bench_rows import hello_request, zipf_ranks

__all__ = ["BATCH_ROWS", "TableConfig", "ZipfIds"]

BATCH_ROWS = 4096
_FILL_ROWS = 16_384
_WINDOW = 4
_RUN, _CLIENT, _EPOCH = "bench", "rank0", 1
_CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """The table.

    Attributes:
        num_rows: Rows.
        dim: Columns, float32.
    """

    num_rows: int
    dim: int

    @property
    def spec(self) -> TableSpec:
        """What the server is told."""
        return TableSpec(fqn="bench.weight", num_rows=self.num_rows, dim=self.dim, dtype=DType.FLOAT32)


class ZipfIds:
    """Row ids with a Zipf distribution; hot rows lie anywhere in the table."""

    def __init__(self, num_rows: int, seed: int) -> None:
        """Draw none yet."""
        self._rng = np.random.default_rng(seed)
        # The same for every seed: all processes have the same hot rows.
        self._rows = np.random.default_rng(0).permutation(num_rows)

    def draw(self, number: int) -> npt.NDArray[np.int64]:
        """Return int64[number], with repeats."""
        ids: npt.NDArray[np.int64] = self._rows[zipf_ranks(self._rng, self._rows.size, number)]
        return ids


class _Writer:
    def __init__(self, client: ParamServerClient, table: TableConfig) -> None:
        self._client = client
        self._spec = table.spec
        self._values = np.random.default_rng(1).standard_normal((2 * _FILL_ROWS, table.dim), np.float32)
        self._seq = 0
        self._room = asyncio.Semaphore(_WINDOW)

    async def fill(self) -> dict[str, Any]:
        """Write each row once."""
        async with asyncio.TaskGroup() as tasks:
            for first in range(0, self._spec.num_rows, _FILL_ROWS):
                ids = np.arange(first, min(first + _FILL_ROWS, self._spec.num_rows), dtype=np.int64)
                await self._room.acquire()
                tasks.create_task(self._send(self._request(ids)))
        return {"num_rows": self._spec.num_rows}

    async def pace(self, rows_per_s: float, ids: ZipfIds, until: asyncio.Future[Any]) -> dict[str, Any]:
        """Write batches of rows at a rate until told to stop; what cannot be kept up with is not made up for."""
        batches = [np.unique(ids.draw(BATCH_ROWS)) for _ in range(64)]
        num_rows, begin_s = 0, time.perf_counter()
        next_s = begin_s
        async with asyncio.TaskGroup() as tasks:
            while not until.done():
                batch = batches[self._seq % len(batches)]
                await self._room.acquire()
                tasks.create_task(self._send(self._request(batch)))
                num_rows += batch.size
                next_s = max(next_s + batch.size / rows_per_s, time.perf_counter())
                await asyncio.wait([until], timeout=max(next_s - time.perf_counter(), 0.0))
        return {"rows_per_s": num_rows / (time.perf_counter() - begin_s)}

    async def _send(self, request: Any) -> None:
        try:
            await self._client.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
        finally:
            self._room.release()

    def _request(self, ids: npt.NDArray[np.int64]) -> Any:
        first = self._seq * 977 % (self._values.shape[0] - ids.size)
        self._seq += 1
        delta = idl.TableDelta(
            fqn=self._spec.fqn,
            fingerprint=self._spec.fingerprint,
            column_offset=0,
            width=self._spec.dim,
            row_ids=ids.view(np.uint8).data,
            weights=self._values[first : first + ids.size].reshape(-1).view(np.uint8).data,
            states=[],
        )
        return idl.SetEmbeddingsRequest(
            run=_RUN,
            client=_CLIENT,
            epoch=_EPOCH,
            client_seq=self._seq,
            step=self._seq,
            time_us=time.time_ns() // 1000,
            ends_step=True,
            is_exact_cut=True,
            deltas=[delta],
        )


async def _serve() -> None:
    loop = asyncio.get_running_loop()

    given = orders()

    def next_order() -> asyncio.Future[dict[str, Any] | None]:
        return loop.run_in_executor(None, next, given, None)

    first = next(given)
    table = TableConfig(**first["table"])
    host, port = parse_address(first["address"], default_port=DEFAULT_PORT)
    async with await ParamServerClient.connect(host, port) as client:
        await client.hello(hello_request([table.spec]))
        writer, ids = _Writer(client, table), ZipfIds(table.num_rows, seed=1)
        give_answer({})
        while (order := await next_order()) is not None:
            if "fill" in order:
                answer = await writer.fill()
            else:
                give_answer({})  # begun
                answer = await writer.pace(order["rows_per_s"], ids, next_order())
            give_answer(answer)


if __name__ == "__main__":
    asyncio.run(_serve())
