"""A server with rows of two tables, and what is asked of it and of its replica's process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from watched_server import WAIT_S

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

STATE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
SPEC = TableSpec(fqn="user.weight", num_rows=1000, dim=3, dtype=DType.FLOAT32, states=(STATE,), has_identities=True)
HALF = TableSpec(fqn="item.weight", num_rows=50, dim=2, dtype=DType.BFLOAT16)
OTHER = TableSpec(fqn="no.such", num_rows=1, dim=1, dtype=DType.FLOAT32)
IDS = np.arange(0, 1000, 2)


def values(step: int, *, rows: int = IDS.size) -> np.ndarray:
    return (np.arange(3 * rows, dtype=np.float32) + step).reshape(rows, 3)


def write(server: ServerProcess, step: int, *, ends_step: bool = True, deleted: np.ndarray | None = None) -> None:
    """Write every second row of one table, and some of the other; each step is one batch."""

    async def send() -> None:
        async with await connected(server.address) as client:
            await client.hello(hello_of_writer(SPEC, HALF), timeout_s=WAIT_S)
            deltas = (
                delta_of(SPEC, IDS, values(step), identities=IDS + 7, deleted_row_ids=deleted),
                delta_of(HALF, np.arange(4), 0x3F80),
            )
            now_us = time.time_ns() // 1000
            await client.set_embeddings(
                request_of(*deltas, client_seq=step, ends_step=ends_step, time_us=now_us), timeout_s=WAIT_S
            )

    asyncio.run(send())


async def connected(address: str) -> ParamServerClient:
    return await ParamServerClient.connect(*parse_address(address, default_port=0), timeout_s=WAIT_S)


def told(address: str) -> Any:
    """Return the `StatusReply`."""

    async def ask() -> Any:
        async with await EmbeddingReader.connect(address, timeout_s=WAIT_S) as reader:
            return await reader.status()

    return asyncio.run(ask())[0]


def call(address: str, method: str, *arguments: Any, greeting: Any = None) -> Any:
    async def ask() -> Any:
        async with await connected(address) as client:
            reply = await client.hello(greeting or hello_of_nobody(), timeout_s=WAIT_S)
            return await getattr(client, method)(*arguments, timeout_s=WAIT_S) if method else reply

    return asyncio.run(ask())
