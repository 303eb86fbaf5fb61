"""Shard 0 carries out the reshard that it keeps, in the background, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from headrace.paramserver.ingest.partitions import KeptReshard
from headrace.paramserver.reshard.coordinator import Coordinator, Reshard
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl

__all__ = ["ReshardDriver"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


class ReshardDriver:
    """Runs a `Coordinator` whenever a reshard is kept. Thread: the event loop's."""

    def __init__(self, kept: Callable[[], KeptReshard], reach: Callable[[], Awaitable[ServerShards]]) -> None:
        """Prepare to carry out what `kept` returns; `reach` connects to the server's shards."""
        self._kept, self._reach = kept, reach
        self._changed = asyncio.Event()
        self._moved = self._total = 0
        self._failure: str | None = None

    def wake(self) -> None:
        """Note that another reshard is kept, or none."""
        self._changed.set()

    def status(self) -> Any:
        """Return the `idl.ReshardStatus`; None while no reshard is kept."""
        if not (data := self._kept().data):
            return None
        reshard = Reshard.decode(data)
        return idl.ReshardStatus(
            wish=str(reshard.wish),
            num_stages=len(reshard.stages),
            num_moved=self._moved,
            num_partitions=self._total,
            failure=self._failure,
        )

    async def run(self) -> NoReturn:
        """Carry out each reshard; failures are logged and tried again. Cancellation: harmless."""
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        while True:
            self._changed.clear()
            kept, is_over = self._kept(), True
            if not kept.data:  # or the next reshard would show what this one has
                self._moved, self._total, self._failure = 0, 0, None
            else:
                try:
                    async with await self._reach() as shards:
                        await Coordinator(shards, on_progress=lambda *so_far: self._note(shards, *so_far)).run()
                    backoff.reset()
                except HeadraceError as exc:
                    is_over = False
                    self._fail(str(exc))
            # What was paused meanwhile has another number, and wakes.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_over else backoff.next_s()):
                    await self._changed.wait()

    def _note(self, shards: ServerShards, moved: int, total: int) -> None:
        self._moved, self._total = moved, total
        if shards.move_errors:
            self._fail("; ".join(f"move {move_id}: {error}" for move_id, error in sorted(shards.move_errors.items())))
        else:
            self._failure = None

    def _fail(self, why: str) -> None:
        if why != self._failure:
            fact(_log, logging.WARNING, "reshard does not go on at this moment; it is tried again", error=why)
        self._failure = why
