"""How the proxies of tests stop listening."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

__all__ = ["close_servers"]


async def close_servers(servers: Sequence[asyncio.Server]) -> None:
    """Close servers once all that they have accepted has its handler.

    `close` alone leaves a connection that was accepted in the same turn of the loop to the garbage collector.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for sock in server.sockets:
            loop.remove_reader(sock)
    await asyncio.sleep(0)
    for server in servers:
        server.close()
