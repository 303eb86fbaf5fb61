"""A process whose event loops are another library's, as Ray's are uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class _ForeignPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        raise RuntimeError("a thread of ours asks for the loop that the process prefers")


@contextmanager
def foreign_loops() -> Iterator[None]:
    """Refuse, as long as the block lasts, new loops of the kind that the process prefers."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_ForeignPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
