"""A replica in a test whose event loop also runs its server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from headrace.paramserver.replica import EmbeddingReplica

__all__ = ["replica_of"]


@contextlib.asynccontextmanager
async def replica_of(address: str, **settings: Any) -> AsyncIterator[EmbeddingReplica]:
    """Open a replica in a thread, and close it in one; the server on this loop must answer meanwhile."""
    replica = await asyncio.to_thread(lambda: EmbeddingReplica(address, **settings))
    try:
        yield replica
    finally:
        await asyncio.to_thread(replica.close)
