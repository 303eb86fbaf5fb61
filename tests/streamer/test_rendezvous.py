"""Finding the store, and taking an epoch that nobody else has."""

from __future__ import annotations

import asyncio
import functools

from fake_shard import FakeStore
from trainer_tables import WRITER

from headrace.paramserver.client import ParamServerClient
from headrace.streamer.rendezvous import claim_epoch, find_store

CONNECT = functools.partial(ParamServerClient.connect, timeout_s=5.0)


async def test_trainers_that_start_together_get_epochs_of_their_own() -> None:
    """All have seen the same highest epoch, and each goes on until it holds one alone."""
    async with FakeStore() as store:
        host, port = "127.0.0.1", store.shards[0].port
        found = await find_store(host, port, WRITER, CONNECT, timeout_s=5.0, random=lambda: 0.5)
        writers = await asyncio.gather(
            *(claim_epoch(found, WRITER.with_epoch(0), CONNECT, timeout_s=5.0, random=lambda: 0.5) for _ in range(5))
        )
    epochs = [writer.epoch for writer in writers]
    assert sorted(epochs) == [found.highest_epoch + i for i in range(1, 6)]
