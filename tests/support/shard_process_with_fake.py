"""The real shard process around a shard that behaves as its first argument says."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from headrace.paramserver.shard import process, service
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    LogFencedError,
    StorageError,
    UnavailableError,
)

BEHAVIOUR = sys.argv[1]


class _Shard:
    sampler = SimpleNamespace()
    was_taken_over = BEHAVIOUR == "taken over"

    async def wait_failed(self) -> HeadraceError:
        if BEHAVIOUR == "fails":
            return CorruptionError("log record 7 is rotten")
        if BEHAVIOUR == "full":
            return StorageError("no room", is_disk_full=True)
        if BEHAVIOUR in ("fenced", "taken over"):
            return LogFencedError("another process has the log")
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def disconnected(self, peer: Any) -> None:
        pass

    def begin_drain(self) -> None:
        pass


@contextlib.asynccontextmanager
async def open_shard(config: Any, **_: Any) -> AsyncIterator[_Shard]:
    print("opening", flush=True)
    if BEHAVIOUR == "never opens":
        await asyncio.get_running_loop().create_future()
    errors = {
        "wrong": ConfigError("no such policy"),
        "away": UnavailableError("try again"),
        "bug": ZeroDivisionError("by zero"),
    }
    if BEHAVIOUR in errors:
        raise errors[BEHAVIOUR]
    yield _Shard()
    print("closed", flush=True)


service.open_shard = open_shard  # type: ignore[assignment]
sys.exit(process.main())
