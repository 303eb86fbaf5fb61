"""Work in a thread: what it comes to, and that whoever is cancelled does not leave it behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.paramserver.process.whole_work import to_its_end


async def test_what_it_comes_to() -> None:
    """What the work returns or raises is its caller's."""
    here = threading.get_ident()
    assert await to_its_end(threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await to_its_end(lambda: 1 / 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_again_and_again_it_has_ended(fails: bool) -> None:
    """However often the caller is cancelled, it hears of it when the work is over, whatever that came to."""
    loop, begun, may_end, has_ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), False

    def work() -> None:
        nonlocal has_ended
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        has_ended = True
        if fails:
            raise OSError("of no use to anybody")

    async def call() -> None:
        try:
            await to_its_end(work)
        finally:
            assert has_ended

    calling = asyncio.create_task(call())
    try:
        await begun.wait()
        for _ in range(3):
            calling.cancel()
            # Nothing but the loop's own turns is waited for: the task has had its say when these are over.
            for _ in range(5):
                await asyncio.sleep(0)
            assert not calling.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
