"""Relays in this process, for tests whose event loop also runs servers and followers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from waiting import WAIT_S, until

from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.runner import RelayProcess
from headrace.paramserver.system.durable import ReadyFile

__all__ = ["relay_of", "until"]


@contextlib.asynccontextmanager
async def relay_of(server: str, data: Path, **settings: Any) -> AsyncIterator[tuple[str, RelayProcess]]:
    """Run a relay; yield its address and process once it has begun on every shard."""
    settings = {"port": 0, "snapshot_interval_s": 1, "drain_s": 1} | settings
    ready = data.with_name(f"{data.name}.ready")
    process = RelayProcess(RelayConfig(server=server, data=data, **settings), environ={}, ready_file=ReadyFile(ready))
    running = asyncio.create_task(process.run())
    try:
        await until(lambda: running.done() or _has_begun(process, ready))
        if running.done():
            await running
        yield json.loads(ready.read_text())["address"], process
    finally:
        process._stop("the test is over")
        async with asyncio.timeout(WAIT_S):
            await running


def _has_begun(process: RelayProcess, ready: Path) -> bool:
    return ready.exists() and all(mirror.log is not None for mirror in process.mirrors)
