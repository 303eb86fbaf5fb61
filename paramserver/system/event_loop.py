"""Structured tasks, threads that are not left behind, requests to stop, short pauses, and a loop on its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError

__all__ = [
    "NICENESS",
    "LoopProbe",
    "LoopThread",
    "background_task",
    "failure_of",
    "lower_thread_priority",
    "run_bulk_to_end",
    "run_in_thread_to_end",
    "run_to_end",
    "shorten_gc_pauses",
    "stop_requests",
    "task_group",
]

NICENESS = 5
"""How much niceness `lower_thread_priority` adds."""

_HIGHEST_NICENESS = 19
_NUM_BULK_THREADS = 8
_SWITCH_INTERVAL_S = 0.0005
# Requests create many objects and hardly any cycles. With Python's default threshold, collections took a quarter of the
# time of batches with many tables.
_COLLECT_AFTER = 50_000

_STDIN_FD = 0
_PROBE_INTERVAL_S = 0.005
_NUM_BUCKETS = 12

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_ChooseError = Callable[[Sequence[BaseException]], BaseException]


class _TaskGroup(asyncio.TaskGroup):
    """Knows which of its tasks are running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[asyncio.Task[Any]] = set()

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **kwargs)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task


@contextlib.asynccontextmanager
async def task_group(gravest: _ChooseError = lambda errors: errors[0]) -> AsyncIterator[asyncio.TaskGroup]:
    """Open an `asyncio.TaskGroup` that raises one plain error, and never an error in place of a cancellation.

    Args:
        gravest: Chooses one of the errors; they come in the order in which tasks failed, at least one.

    Cancellation: passed on, whatever the tasks raise while they end. Up to Python 3.12 their errors replace the
    cancellation, and a caller that retries after errors would retry for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancelled = task.cancelling()
    try:
        async with _TaskGroup() as group:
            yield group
            # Wait here and not in __aexit__: there Python 3.11 counts the group's own cancellation, and keeps it.
            while group.running:
                await asyncio.wait(group.running)
    except BaseExceptionGroup as errors:
        if task.cancelling() > num_cancelled:
            raise asyncio.CancelledError from errors
        raise gravest(errors.exceptions) from None


async def run_in_thread_to_end(work: Callable[[], _T]) -> _T:
    """Call a function in a thread and return its result; a cancelled caller still waits until it has returned.

    So nobody closes what the function works on. Cancellation: see `run_to_end`.
    """
    return await run_to_end(asyncio.to_thread(work))


async def run_bulk_to_end(work: Callable[[], _T]) -> _T:
    """Call a function as `run_in_thread_to_end` does, in a thread of the lowest priority: it goes through gigabytes.

    A process has eight such threads, and further calls wait for one. Cancellation: see `run_to_end`.
    """
    return await run_to_end(asyncio.get_running_loop().run_in_executor(_bulk_threads, work))


@contextlib.asynccontextmanager
async def background_task(work: Coroutine[Any, Any, _T], *, name: str) -> AsyncIterator[asyncio.Task[_T]]:
    """Run a coroutine in a task while the block lasts; at its end, cancel the task and wait until it is done."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def failure_of(task: asyncio.Task[Any]) -> HeadraceError:
    """Wait for the error that ends a task which runs until it is cancelled, and return it. Cancellation: harmless."""
    try:
        await asyncio.shield(task)
    except HeadraceError as exc:
        return exc
    raise AssertionError(f"{task.get_name()} ended without an error")


async def run_to_end(work: Awaitable[_T]) -> _T:
    """Return what is awaited; a cancelled caller still waits until it has ended.

    Cancellation: waits for the end, however often it comes, and loses the result or error.
    """
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # marks it as retrieved
        raise


@contextlib.contextmanager
def stop_requests(
    on_signal: Callable[[signal.Signals], None],
    on_stdin_end: Callable[[], None] | None,
    *,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[None]:
    """Watch for what asks a process to stop, during the block.

    Args:
        on_signal: Called for each of `signals`.
        on_stdin_end: Called once when stdin has ended; None leaves stdin alone.
        signals: What to watch for.

    Raises:
        ConfigError: Stdin is neither a pipe nor a terminal.

    Thread: the main one.
    """
    loop = asyncio.get_running_loop()

    def read_stdin(on_end: Callable[[], None]) -> None:
        if not os.read(_STDIN_FD, 4096):
            loop.remove_reader(_STDIN_FD)
            on_end()

    if on_stdin_end is not None:
        try:
            loop.add_reader(_STDIN_FD, read_stdin, on_stdin_end)
        except OSError as exc:
            raise ConfigError("--watch-stdin: stdin is neither a pipe nor a terminal") from exc
    try:
        for number in signals:
            loop.add_signal_handler(number, on_signal, number)
        yield
    finally:
        loop.remove_reader(_STDIN_FD)
        for number in signals:
            loop.remove_signal_handler(number)


class LoopProbe:
    """Measure how long the event loop pauses, with a timer every 5 ms. Use it with `async with`.

    A pause is anything that keeps the loop from running: a long callback, another thread that holds the GIL, or a
    core that the system gives to another process. Every client waits at least this long. The probe costs about a
    thousandth of the loop's time.

    Thread: the loop's.
    """

    def __init__(self, *, window_s: float = 60.0) -> None:
        """Create a probe; `worst_pause_s` will look back `window_s` seconds, up to a twelfth more."""
        self._bucket_s = window_s / _NUM_BUCKETS
        self._worst: deque[float] = deque([0.0], maxlen=_NUM_BUCKETS + 1)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._bucket_end_s = self._loop.time() + self._bucket_s
        self._set_timer()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def worst_pause_s(self) -> float:
        """Longest recent pause that is over, seconds."""
        return max(self._worst)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(_PROBE_INTERVAL_S, self._fire, self._loop.time() + _PROBE_INTERVAL_S)

    def _fire(self, due_s: float) -> None:
        now_s = self._loop.time()
        while now_s >= self._bucket_end_s:
            self._worst.append(0.0)
            self._bucket_end_s += self._bucket_s
        self._worst[-1] = max(self._worst[-1], now_s - due_s)
        self._set_timer()


def shorten_gc_pauses() -> None:
    """Make pauses for garbage collection and for the GIL rarer and shorter, in processes of our own.

    Call it when everything is imported: objects that exist now are never scanned again. In a process with torch,
    scanning them takes a tenth of a second.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    # How long a thread that wants the GIL waits for one that runs Python and does not release it.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def lower_thread_priority(by: int = NICENESS) -> None:
    """Let the calling thread, and threads that it starts, yield a busy core to threads that a caller waits for.

    Thread: permanently affects the calling one.
    """
    thread = threading.get_native_id()
    # Relative to how the process was started: most users may not lower their niceness.
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + by
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _HIGHEST_NICENESS))


# Threads begin with the first call. Nobody waits for this work, so it takes only what is left of the cores.
_bulk_threads = ThreadPoolExecutor(_NUM_BULK_THREADS, "headrace-bulk", lambda: lower_thread_priority(_HIGHEST_NICENESS))


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
        self._loop = asyncio.SelectorEventLoop()  # whatever the process prefers: uvloop knows less
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
