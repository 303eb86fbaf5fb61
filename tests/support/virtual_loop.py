"""An event loop with virtual time: nothing waits, the clock jumps to the next timer. Same seed, same run."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, TypeVar

__all__ = ["VirtualLoop", "run_virtual", "virtual"]

_T = TypeVar("_T")
_BEGIN_S = 1000.0


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop for coroutines, futures and timers: no files, no threads, no signals.

    Timers of one time fire in the order in which they were set. It is lean, because schedules are run by the thousand.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = _BEGIN_S
        self._num_timers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it to its time."""

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call soon: there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call a function that is meant for a thread at once: there are none."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done

    def _advance(self) -> None:
        """Let time pass until the next timer, which is ready then."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heappop(timers)
        if not timers:
            raise RuntimeError("nothing is ready and no timer is set: everything waits for ever")
        when, _, timer = heappop(timers)
        self._now_s = max(when, self._now_s)
        self._ready.append(timer)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_alone(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine, then cancel what it left behind, and raise what failed in the background."""
        self._now_s, self._num_timers = _BEGIN_S, 0  # as in a new loop: the same seed, the same run
        failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: failures.append(context))
        try:
            result = self.run_until_complete(main)
        finally:
            tasks = asyncio.all_tasks(self)
            for task in tasks:
                task.cancel()
            if tasks:
                self.run_until_complete(asyncio.wait(tasks))
            self._ready.clear()  # type: ignore[attr-defined]
            self._timers.clear()
        for context in failures:
            raise RuntimeError(context["message"]) from context.get("exception")
        return result


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a virtual loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_alone(main)
    finally:
        loop.close()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a virtual loop of its own, for at most an hour of virtual time."""

    def run(**fixtures: Any) -> None:
        run_virtual(asyncio.wait_for(test(**fixtures), 3600))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run
