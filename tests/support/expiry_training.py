"""A trainer of one table on a running server, for tests of expiry over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="item.weight", num_rows=100_000, dim=4, dtype=DType.FLOAT32)


async def train(address: str, steps: Sequence[tuple[int, Any, float]], *, epoch: int = 1) -> None:
    """Write rows to every shard and end each step there.

    Args:
        address: Of any shard.
        steps: Step, row ids and value of the weights.
        epoch: Of the run; each call must have its own.
    """
    host, port = parse_address(address, default_port=0)
    async with await ParamServerClient.connect(host, port) as first:
        places = (await first.hello(hello_of_nobody())).shards
    for place in places:
        async with await ParamServerClient.connect(place.host, place.port) as client:
            await client.hello(hello_of_writer(SPEC, epoch=epoch))
            for number, (step, rows, value) in enumerate(steps, 1):
                ids = np.asarray(rows, np.int64)
                ids = ids[shards_of_rows(table_seed(SPEC.fqn), ids, len(places)) == place.shard]
                of_step = {"epoch": epoch, "client_seq": number, "step": step, "time_us": step * 1_000_000}
                await client.set_embeddings(request_of(delta_of(SPEC, ids, value), **of_step))
