"""How tests wait for other processes and threads: the one module of the tests that sleeps.

A wait ends when its condition holds. The deadline is for a condition that never comes, so it is generous, and a busy
machine moves it: it grows with the load, or by `HEADRACE_WAIT_SCALE`. Nothing else may depend on the clock.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["WAIT_S", "pause", "scaled_s", "until", "wait_until"]

_T = TypeVar("_T")
_POLL_S = 0.02


def scaled_s(seconds: float) -> float:
    """Return a deadline in seconds for this machine as it is now."""
    if scale := os.environ.get("HEADRACE_WAIT_SCALE"):
        return seconds * float(scale)
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


WAIT_S = scaled_s(60.0)
"""How long to wait for anything, seconds; for deadlines that others keep."""


def wait_until(
    find: Callable[[], _T],
    what: str | Callable[[], str] = "it",
    *,
    within_s: float = 60.0,
    poll_s: float = _POLL_S,
) -> _T:
    """Return what `find` returns once it is true, in a thread: for what is not announced.

    Args:
        find: Called over and over; may raise when there is nothing to wait for any more.
        what: What has not come, for the failure; a function is called then.
        within_s: The deadline, before it is scaled.
        poll_s: Seconds between two calls.

    Raises:
        AssertionError: It has not become true.
    """
    began_s = time.monotonic()
    while not (found := find()):
        _check(began_s, within_s, what)
        time.sleep(poll_s)
    return found


async def until(
    find: Callable[[], Any], what: str | Callable[[], str] = "it", *, within_s: float = 60.0, poll_s: float = 0.01
) -> Any:
    """`wait_until` on an event loop; `find` may be a coroutine function."""
    began_s = time.monotonic()
    while True:
        found = find()
        if found := await found if inspect.isawaitable(found) else found:
            return found
        _check(began_s, within_s, what)
        await asyncio.sleep(poll_s)


def pause(seconds: float) -> None:
    """Let a fault last: other processes go on meanwhile. No wait, since nothing is expected to be there after it."""
    time.sleep(seconds)


def _check(began_s: float, within_s: float, what: str | Callable[[], str]) -> None:
    if (waited_s := time.monotonic() - began_s) >= scaled_s(within_s):
        raise AssertionError(f"{what if isinstance(what, str) else what()} did not come within {waited_s:.0f} s")
