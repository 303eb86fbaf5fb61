"""Task groups with one error, threads that are never left behind, short pauses, and a loop on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from foreign_loops import foreign_loops

from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.event_loop import (
    NICENESS,
    LoopProbe,
    LoopThread,
    run_bulk_to_end,
    run_in_thread_to_end,
    task_group,
)
from headrace.schemas.errors import StorageError, UnavailableError


async def _fail() -> None:
    raise UnavailableError("away")


async def _wait() -> None:
    await asyncio.Event().wait()


async def _nothing() -> None:
    pass


async def _fail_when_cancelled() -> None:
    try:
        await _wait()
    except asyncio.CancelledError:
        raise UnavailableError("away") from None


_Work = Callable[[], Awaitable[None]]


async def _run(*works: _Work) -> None:
    async with task_group() as group:
        for work in works:
            group.create_task(work())  # type: ignore[arg-type]
        await _wait()


async def test_the_group_waits_for_all_tasks() -> None:
    """The block ends when its tasks and those that they started have ended."""
    done: list[str] = []

    async def work(name: str, more: str = "") -> None:
        await asyncio.sleep(0)
        if more:
            group.create_task(work(more))
        done.append(name)

    async with task_group() as group:
        group.create_task(work("first", more="second"))
        group.create_task(work("third"))
    assert sorted(done) == ["first", "second", "third"]


async def _fail_otherwise() -> None:
    raise StorageError("the disk is full")


@pytest.mark.parametrize(
    ("works", "block", "error"),
    [
        ([_wait, _fail], _wait, UnavailableError),  # as it is, without a group in its traceback
        ([_fail, _wait], _nothing, UnavailableError),  # of a task that outlives the block
        ([_wait], _fail_otherwise, StorageError),  # of the block itself
        ([_fail_when_cancelled, _fail_otherwise], _wait, StorageError),  # the first of several
    ],
    ids=["of a task", "after the block", "of the block", "several"],
)
async def test_one_error(works: list[_Work], block: _Work, error: type[Exception]) -> None:
    """The first error is raised as it is, once all other tasks were cancelled, and leaves no cancellation behind."""
    tasks = []
    with pytest.raises(error) as caught:
        async with task_group() as group:
            tasks = [group.create_task(work()) for work in works]  # type: ignore[arg-type]
            await block()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert all(task.done() for task in tasks)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_the_caller_may_choose_another_error() -> None:
    """Of several errors the caller's choice is raised, instead of the first."""
    with pytest.raises(StorageError):
        async with task_group(lambda errors: next(e for e in errors if isinstance(e, StorageError))) as group:
            group.create_task(_fail_when_cancelled())
            await asyncio.sleep(0)
            raise StorageError("newer")


@pytest.mark.parametrize("block_waits", [False, True])
async def test_a_cancellation_stays_one(block_waits: bool) -> None:
    """A task that fails while it is cancelled does not hide the cancellation of its owner."""

    async def run() -> None:
        async with task_group() as group:
            group.create_task(_fail_when_cancelled())
            if block_waits:
                await _wait()

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_deadline_stays_one() -> None:
    """A deadline around the group raises `TimeoutError`, whatever the tasks raise then; code that cleans up after a
    cancellation still gets errors."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await _run(_fail_when_cancelled)
    caught: list[BaseException] = []

    async def clean_up() -> None:
        try:
            await _wait()
        finally:
            try:
                await _run(_fail)
            except UnavailableError as exc:
                caught.append(exc)

    running = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert len(caught) == 1


async def test_work_in_threads() -> None:
    """The caller gets what the work returns or raises; threads of bulk work yield to all others."""
    here = threading.get_native_id()
    assert await run_in_thread_to_end(threading.get_native_id) != here
    assert await run_bulk_to_end(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == 19
    for run in (run_in_thread_to_end, run_bulk_to_end):
        with pytest.raises(ZeroDivisionError):
            await run(lambda: 1 / 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_waits_for_the_thread(fails: bool) -> None:
    """However often the caller is cancelled, it goes on only when the work has ended."""
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
            await run_in_thread_to_end(work)
        finally:
            assert has_ended

    calling = asyncio.create_task(call())
    try:
        await begun.wait()
        for _ in range(3):
            calling.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not calling.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_callback_that_blocks_is_a_pause_of_its_length() -> None:
    """A pause counts until it is older than the window; after its block the probe has no timer."""
    async with LoopProbe(window_s=0.12) as probe, asyncio.timeout(60):
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.3:
            pass
        for is_over in (lambda: probe.worst_pause_s > 0.2, lambda: probe.worst_pause_s < 0.2):
            while not is_over():  # noqa: ASYNC110 (the timer is what the test is about)
                await asyncio.sleep(0)
    assert probe._timer is not None and probe._timer.cancelled()


_PROGRAM = """
import gc, sys
from headrace.paramserver.system.event_loop import shorten_gc_pauses
shorten_gc_pauses()
print(gc.get_freeze_count() > 1000, gc.get_threshold()[0] > 700, sys.getswitchinterval() < 0.005, gc.isenabled())
"""


def test_collections_and_switches_are_set() -> None:
    """Existing objects are frozen, and collections are rare but enabled."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4


def test_background_threads_have_low_priority(server: ServerProcess) -> None:
    """RocksDB's threads yield a busy core to the shard's event loop."""
    process, niceness = server.shard_pids[0], {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # others may end meanwhile
            if (task / "comm").read_text().startswith("rocksdb"):
                niceness[task.name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
    assert niceness
    assert set(niceness.values()) == {os.getpriority(os.PRIO_PROCESS, process) + NICENESS}


@pytest.mark.parametrize(("before", "after"), [(1, 1 + NICENESS), (17, 19)])
def test_niceness_is_relative(before: int, after: int) -> None:
    """A process started with some niceness adds to it, which needs no rights."""
    program = (
        "import os\n"
        "from headrace.paramserver.system.event_loop import lower_thread_priority\n"
        "lower_thread_priority()\n"
        "print(os.nice(0))"
    )
    command = ["nice", "-n", str(before - os.nice(0)), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == after


WAIT_S = 60.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop", owner="the thing")
    yield thread
    thread.close(_nothing, WAIT_S)
    assert not any(other.name == "test-loop" for other in threading.enumerate())


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


def test_thread_runs_on_a_loop_of_its_own_kind() -> None:
    """A process may prefer the loops of another library, which know less than asyncio's."""
    with foreign_loops():
        thread = LoopThread("test-loop", owner="the thing")
    thread.run(_nothing(), late="?", timeout_s=WAIT_S)
    thread.close(_nothing, WAIT_S)


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


def test_interrupts_and_forks(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a call cancels its coroutine; in a forked child calls fail, and closing leaves the parent's thread."""
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
