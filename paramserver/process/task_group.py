"""A `TaskGroup` that ends with one error, as it is, and never with one in the place of a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

__all__ = ["task_group"]

_Choose = Callable[[Sequence[BaseException]], BaseException]


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
async def task_group(gravest: _Choose = lambda errors: errors[0]) -> AsyncIterator[asyncio.TaskGroup]:
    """Use it as `asyncio.TaskGroup`, with `async with`.

    Args:
        gravest: Chooses one of the errors, of which there is one at least, in the order in which tasks have failed.

    Raises:
        BaseException: What the block or a task has raised, without a group around it.

    Cancellation: passed on, whatever tasks raise while they end. Up to Python 3.12 their errors take the cancellation's
    place, and who tries again after an error would have tried for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancelled = task.cancelling()
    try:
        async with _TaskGroup() as group:
            yield group
            # Here and not where the block ends: there Python 3.11 counts the group's own cancellation, and keeps it.
            while group.running:
                await asyncio.wait(group.running)
    except BaseExceptionGroup as errors:
        if task.cancelling() > num_cancelled:
            raise asyncio.CancelledError from errors
        raise gravest(errors.exceptions) from None
