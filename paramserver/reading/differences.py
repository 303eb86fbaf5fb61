"""Find where two copies of a table differ: compare digests by bucket, then the rows of each bucket that differs.

The trainer's audit, a replica's audit and `headrace verify` share this. They request the digests of several small
tables at once, because a round trip is most of what each costs.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.system.event_loop import task_group

__all__ = [
    "MAX_NAMED",
    "describe_difference",
    "differing_rows",
    "first_differing_rows",
    "for_each_table",
    "rows_that_differ",
    "table_groups",
]

# Limits of one group. A shard digests some hundred thousand rows a second, one table after another, and must answer
# the last request of the group before its deadline.
_MAX_ROWS = 1 << 18
_MAX_TABLES = 16
_ROWS_AT_ONCE = 8192
MAX_NAMED = 20
"""Rows and buckets that a report names for one table."""

_T = TypeVar("_T")
_R = TypeVar("_R")
_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


async def for_each_table(
    tables: Sequence[_T], work: Callable[[_T], Coroutine[Any, Any, _R]], *, num_rows_of: Callable[[_T], int]
) -> list[_R]:
    """Return the result of `work` for each table, in order.

    Args:
        tables: Arguments of `work`.
        work: Requests the digests of one table.
        num_rows_of: Returns a table's number of rows; 0 if unknown.

    Raises:
        HeadraceError: The first error of `work`; it cancels the others.

    Cancellation: passed on.
    """
    results: list[_R] = []
    for group in table_groups(tables, num_rows_of=num_rows_of):
        async with task_group() as tasks:
            working = [tasks.create_task(work(table)) for table in group]
        results += [task.result() for task in working]
    return results


def table_groups(tables: Sequence[_T], *, num_rows_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield the tables, or parts of tables, in order, in groups whose digests are requested at once.

    `num_rows_of` returns the number of rows of one, 0 if unknown.
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


async def first_differing_rows(
    buckets: Iterable[int], find: Callable[[int], Awaitable[_Ids]], *, limit: int = MAX_NAMED
) -> list[int]:
    """Return the first rows, at most `limit`, that differ in buckets whose digests differ.

    Args:
        buckets: Ascending.
        find: Returns the ids of a bucket's differing rows, int64[n]; not called once the limit is reached.
        limit: Number of rows.

    Cancellation: passed on.
    """
    found: list[int] = []
    for bucket in buckets:
        if len(found) >= limit:
            break
        found += (await find(bucket))[: limit - len(found)].tolist()
    return found


async def differing_rows(
    row_ids: _Ids, compare: Callable[[_Ids], Awaitable[_Mask]], *, rows_at_once: int = _ROWS_AT_ONCE
) -> _Ids:
    """Return those of the rows that differ, int64[n], in order, comparing a limited number at once.

    Args:
        row_ids: int64[n].
        compare: Reads some of the rows from both sides and returns which differ, bool[n].
        rows_at_once: Largest number of rows for `compare`.

    Cancellation: passed on.
    """
    found = [np.empty(0, np.int64)]
    for first in range(0, row_ids.size, rows_at_once):
        some = row_ids[first : first + rows_at_once]
        found.append(some[await compare(some)])
    return np.concatenate(found)


def rows_that_differ(ours: Iterable[npt.NDArray[Any]], theirs: Iterable[npt.NDArray[Any]]) -> _Mask:
    """Return which rows differ in any bit of any column, bool[n].

    Bits decide, so NaN equals itself and 0.0 does not equal -0.0. Columns of different widths differ in every row.

    Args:
        ours: At least one column, `[n]` or `[n, width]` of any type.
        theirs: As many columns.
    """
    pairs = [(_bytes_of(one), _bytes_of(other)) for one, other in zip(ours, theirs, strict=True)]
    masks = [
        (one != other).any(axis=1) if one.shape == other.shape else np.ones(len(one), np.bool_) for one, other in pairs
    ]
    differs: _Mask = np.logical_or.reduce(masks)
    return differs


def describe_difference(buckets: Sequence[int], row_ids: Sequence[int]) -> str:
    """Return the part of a table's line that names its differing buckets and rows; empty without any."""
    return f"; DIFFERENT in buckets {_first_of(buckets)}: rows {_first_of(row_ids)}" if buckets else ""


def _first_of(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:MAX_NAMED])) + (", …" if len(numbers) > MAX_NAMED else "")


def _bytes_of(column: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    row_bytes = column.itemsize * math.prod(column.shape[1:])
    return np.ascontiguousarray(column).view(np.uint8).reshape(column.shape[0], row_bytes)
