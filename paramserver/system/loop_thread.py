"""An event loop on a thread of its own, and calls into it from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.schemas.errors import UnavailableError

__all__ = ["LoopThread"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for callers that block. However the loop ends, no caller is left waiting.

    Thread: any.
    """

    def __init__(self, name: str, *, owner: str) -> None:
        """Start a thread of that name; `owner` names its owner in messages, such as `the replica`."""
        self._owner = owner
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.RLock()  # a signal handler may call `close` while the same thread is in it
        self._is_closed = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that ends without `close` must end.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that has the thread."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raise `UnavailableError` if it is closed, or in a forked child."""
        if self.is_forked:
            raise UnavailableError(f"{self._owner} belongs to the process that made it, and this is a forked child")
        if self._is_closed:
            raise UnavailableError(f"{self._owner} is closed")

    def run(
        self, work: Coroutine[Any, Any, _T], *, late: str | Callable[[], str], timeout_s: float | None = None
    ) -> _T:
        """Run a coroutine on the loop and return its result.

        Args:
            work: The coroutine.
            late: Message for a `TimeoutError`, of the coroutine or of `timeout_s`; or a function that returns it.
            timeout_s: Deadline, seconds; None leaves it to the coroutine.

        Raises:
            UnavailableError: It timed out, or `close` was called before or meanwhile.
        """
        try:
            with self._lock:
                self.check_usable()
                future = asyncio.run_coroutine_threadsafe(self._tracked(work, timeout_s), self._loop)
        except UnavailableError:
            work.close()
            raise
        try:
            return future.result()
        except TimeoutError as exc:
            raise UnavailableError(late if isinstance(late, str) else late()) from exc
        except concurrent.futures.CancelledError as exc:
            raise UnavailableError(f"{self._owner} was closed meanwhile") from exc
        finally:
            future.cancel()  # no effect if it is done; ends the coroutine if an interrupt ended the wait

    def close(self, end: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Cancel every call, run a last coroutine, and end the thread. Idempotent; a second caller waits for the first.

        Args:
            end: Makes the last coroutine.
            timeout_s: Deadline of that coroutine, seconds; the thread ends in any case.
        """
        with self._closing:
            with self._lock:
                if self._is_closed or self.is_forked:  # a child has no such thread, and must not touch its files
                    return
                self._is_closed = True
                ending = asyncio.run_coroutine_threadsafe(self._end(end), self._loop)
            try:
                ending.result(timeout_s)
            except TimeoutError:
                _log.warning("%s has not closed its connections and copies within %g s", self._owner, timeout_s)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        finally:
            self._calls.discard(task)

    async def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        with contextlib.suppress(ValueError):  # no calls
            await asyncio.wait(calls)
        await end()
