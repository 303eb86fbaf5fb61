"""Calls into a loop on another thread: deadlines, closing, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from headrace.paramserver.system.loop_thread import LoopThread
from headrace.schemas.errors import StorageError, UnavailableError

WAIT_S = 20.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop", owner="the thing")
    yield thread
    thread.close(_nothing, WAIT_S)
    assert not any(other.name == "test-loop" for other in threading.enumerate())


async def _nothing() -> None:
    pass


def test_results_and_errors_come_back(thread: LoopThread) -> None:
    """A call returns the coroutine's result, raises its error, and says in words that it was late."""

    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise StorageError("full")

    async def never() -> None:
        await asyncio.Event().wait()

    assert thread.run(answer(), late="?") == 42
    with pytest.raises(StorageError, match="full"):
        thread.run(fail(), late="?")
    with pytest.raises(UnavailableError, match="it took too long"):
        thread.run(never(), late="it took too long", timeout_s=0.001)


def test_close_fails_waiting_calls(thread: LoopThread) -> None:
    """Waiting callers get an error on close, after their coroutines were cancelled."""
    order: list[str] = []
    has_begun = threading.Event()

    async def never() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            order.append("cancelled")

    def call() -> None:
        try:
            thread.run(never(), late="?")
        except UnavailableError as exc:
            order.append(str(exc))

    async def end() -> None:
        order.append("end")

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert has_begun.wait(WAIT_S)
    thread.close(end, WAIT_S)
    caller.join(WAIT_S)
    assert not caller.is_alive()
    assert sorted(order) == ["cancelled", "end", "the thing was closed meanwhile"]
    assert order.index("cancelled") < order.index("end")
    with pytest.raises(UnavailableError, match="the thing is closed"):
        thread.run(never(), late="?")


def test_an_end_that_fails_or_hangs_ends_the_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends whatever the last coroutine does."""
    has_begun = threading.Event()

    async def fail() -> None:
        raise StorageError("full")

    async def never() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    schedule = asyncio.run_coroutine_threadsafe

    def schedule_and_wait(*args: object) -> object:
        future = schedule(*args)  # type: ignore[arg-type]
        assert has_begun.wait(WAIT_S)  # its time is over while it hangs, not before its thread gets a processor
        return future

    thread = LoopThread("test-loop", owner="the thing")
    with pytest.raises(StorageError, match="full"):
        thread.close(fail, WAIT_S)
    thread.close(fail, WAIT_S)
    thread = LoopThread("test-loop", owner="the thing")
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", schedule_and_wait)
    thread.close(never, 0.01)
    assert "the thing has not closed" in caplog.text
    assert not any(other.name == "test-loop" for other in threading.enumerate())
    gc.collect()  # asyncio remarks on the coroutine that hung: here, and not amid another test


def test_an_interrupted_wait_cancels_the_call(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a call cancels its coroutine."""
    is_cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    schedule = asyncio.run_coroutine_threadsafe

    def interrupted(*args: object) -> object:
        future = schedule(*args)  # type: ignore[arg-type]

        def result() -> None:
            raise KeyboardInterrupt

        future.result = result  # type: ignore[assignment,method-assign]
        return future

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.run(never(), late="?")
    assert is_cancelled.wait(WAIT_S)


def test_a_forked_child(thread: LoopThread) -> None:
    """In a forked child calls fail at once, and closing leaves the parent's thread alone."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                thread.run(_nothing(), late="?")
            except UnavailableError as exc:
                code = 0 if "forked child" in str(exc) else 2
            thread.close(_nothing, WAIT_S)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert thread.run(_nothing(), late="?") is None
