"""Grouping of digest requests."""

from __future__ import annotations

import asyncio

import pytest

from headrace.paramserver.reading.differences import for_each_table
from headrace.schemas.errors import UnknownTableError


async def groups_of(sizes: list[int]) -> list[list[int]]:
    """Return which tables, by index, are requested at once."""
    groups: list[list[int]] = []
    begun: list[int] = []

    async def look(table: int) -> int:
        begun.append(table)
        await asyncio.sleep(0)
        if begun:  # the first one to continue: the whole group has started
            groups.append(begun.copy())
            begun.clear()
        return table * 10

    found = await for_each_table(range(len(sizes)), look, num_rows_of=sizes.__getitem__)
    assert found == [table * 10 for table in range(len(sizes))]
    return groups


async def test_small_tables_go_together() -> None:
    """A group has at most 16 tables and the rows that a shard digests within a deadline."""
    assert [len(group) for group in await groups_of([100] * 40)] == [16, 16, 8]
    assert await groups_of([1 << 17] * 5) == [[0, 1], [2, 3], [4]]


async def test_large_tables_go_alone() -> None:
    """A table with many or an unknown number of rows is requested alone."""
    assert await groups_of([5, 1 << 30, 5, 5, 0, 5]) == [[0], [1], [2, 3], [4], [5]]


async def test_the_first_error_is_raised_as_it_is() -> None:
    """The first error cancels the others and reaches the caller unchanged."""
    cancelled: list[int] = []

    async def look(table: int) -> None:
        if table == 1:
            raise UnknownTableError("no table")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(table)
            raise

    with pytest.raises(UnknownTableError, match="no table"):
        await for_each_table([0, 1, 2], look, num_rows_of=lambda _: 1)
    assert sorted(cancelled) == [0, 2]
