"""Work in a thread that is not left behind: whoever asks for it, and is cancelled, goes on only once it has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["finished", "to_its_end"]

_T = TypeVar("_T")


async def to_its_end(work: Callable[[], _T]) -> _T:
    """Call something in a thread and return what it returns.

    Nobody may close what it works on until then. So a cancellation waits for it to end, and so does a second one.

    Cancellation: the work is done, and what it returned or raised is lost.
    """
    return await finished(asyncio.to_thread(work))


async def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine returns, which is not cancelled.

    Cancellation: waits for its end, as of `to_its_end`.
    """
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # nobody asks for it any more
        raise
