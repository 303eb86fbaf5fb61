"""Digests of many tables: of small ones several are asked for at once, for a round trip is most of what each costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from headrace.paramserver.process.task_group import task_group

__all__ = ["for_each_table", "table_groups"]

# Of a group. A shard looks at some hundred thousand rows a second, one table after the other, and the last request in
# the line has to be answered before its deadline.
_MAX_ROWS = 1 << 18
_MAX_TABLES = 16

_T = TypeVar("_T")
_R = TypeVar("_R")


async def for_each_table(
    tables: Sequence[_T], work: Callable[[_T], Awaitable[_R]], *, num_rows_of: Callable[[_T], int]
) -> list[_R]:
    """Return what a function gives for each table, in their order.

    Args:
        tables: What the function takes.
        work: Asks for digests of one table.
        num_rows_of: How many rows a table has; 0 for an unknown number.

    Raises:
        HeadraceError: What the function raises first; the others are cancelled.

    Cancellation: passed on.
    """
    results: list[_R] = []
    for group in table_groups(tables, num_rows_of=num_rows_of):
        async with task_group() as tasks:
            working = [tasks.create_task(_awaited(work(table))) for table in group]
        results += [task.result() for task in working]
    return results


def table_groups(tables: Sequence[_T], *, num_rows_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield tables, in their order, that digests are asked for at once.

    Args:
        tables: Whatever they are, parts of them too.
        num_rows_of: How many rows one has; 0 for an unknown number.
    """
    group: list[_T] = []
    num_rows = 0
    for table in tables:
        more = num_rows_of(table) or _MAX_ROWS
        if group and (num_rows + more > _MAX_ROWS or len(group) == _MAX_TABLES):
            yield group
            group, num_rows = [], 0
        group.append(table)
        num_rows += more
    if group:
        yield group


async def _awaited(work: Awaitable[_R]) -> _R:
    return await work
