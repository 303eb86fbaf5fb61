"""A `TaskGroup` with one error, or a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.paramserver.process.task_group import task_group
from headrace.schemas.errors import StorageError, UnavailableError


async def _fail() -> None:
    raise UnavailableError("away")


async def _wait() -> None:
    await asyncio.Event().wait()


async def _fail_when_cancelled() -> None:
    try:
        await _wait()
    except asyncio.CancelledError:
        raise UnavailableError("away") from None


async def _run(*works: Callable[[], Awaitable[None]]) -> None:
    async with task_group() as group:
        for work in works:
            group.create_task(work())  # type: ignore[arg-type]
        await _wait()


async def test_what_ends_well() -> None:
    """The block and its tasks are waited for, those too that tasks begin, and nothing is raised."""
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


async def test_one_error() -> None:
    """An error of a task is raised as it is, no group is seen in its traceback, and what else runs is cancelled."""
    with pytest.raises(UnavailableError, match="away") as caught:
        await _run(_wait, _fail)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


async def test_an_error_after_the_block() -> None:
    """A task that outlives the block is waited for, and its error leaves no cancellation behind."""
    with pytest.raises(UnavailableError, match="away"):
        async with task_group() as group:
            group.create_task(_fail())
            waiting = group.create_task(_wait())
    assert waiting.cancelled()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_an_error_of_the_block() -> None:
    """So is one of the block itself."""
    with pytest.raises(StorageError, match="newer"):
        async with task_group() as group:
            group.create_task(_wait())
            raise StorageError("newer")


async def test_the_first() -> None:
    """Of several errors, the one that has ended the others, unless the caller chooses."""

    async def fail_otherwise() -> None:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError, match="the disk is full"):
        await _run(_fail_when_cancelled, fail_otherwise)


async def test_the_gravest() -> None:
    """Of several errors the caller chooses."""
    with pytest.raises(StorageError):
        async with task_group(lambda errors: next(e for e in errors if isinstance(e, StorageError))) as group:
            group.create_task(_fail_when_cancelled())
            await asyncio.sleep(0)
            raise StorageError("newer")


async def test_a_cancellation_stays_one() -> None:
    """A task that fails while it is cancelled does not hide that its owner was."""
    running = asyncio.create_task(_run(_fail_when_cancelled))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_cancellation_after_the_block_stays_one() -> None:
    """So it is where the block has ended, and its tasks are waited for."""

    async def run() -> None:
        async with task_group() as group:
            group.create_task(_fail_when_cancelled())

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_deadline_stays_one() -> None:
    """A deadline around it is told as that, whatever tasks raise when it has come."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await _run(_fail_when_cancelled)


async def test_an_error_amid_an_older_cancellation() -> None:
    """Who cleans up after a cancellation hears of errors as always."""
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
