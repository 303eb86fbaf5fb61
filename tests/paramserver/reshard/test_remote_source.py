"""A copy that is fetched from another shard: in order, some chunks ahead of who takes them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from headrace.paramserver.reshard.remote_source import MoveReport, RemoteCopy
from headrace.schemas.errors import UnavailableError


class Source:
    """Answers with chunks that are their own numbers, up to the last; `fails_at` fails."""

    def __init__(self, *, last: int = 20, fails_at: int | None = None) -> None:
        self.last, self.fails_at = last, fails_at
        self.fetched: list[int] = []
        self.report = MoveReport()

    def copy(self) -> RemoteCopy:
        return RemoteCopy(self.fetch, SimpleNamespace(data=b"shared"), self.report)

    async def fetch(self, number: int) -> SimpleNamespace:
        if number == self.fails_at:
            raise UnavailableError("gone")
        self.fetched.append(number)
        return SimpleNamespace(data=bytes([number]), num_rows=10, is_last=number == self.last)


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_some_chunks_are_fetched_ahead() -> None:
    """The source goes on reading while a chunk is worked on, but not without bound; all come in order."""
    source, found = Source(), []
    copy = source.copy()
    assert copy.shared_state == b"shared"
    async for data in copy.chunks():
        found.append(data)
        await _settle()
        ahead = len(source.fetched) - len(found)
        assert 2 <= ahead <= 8 or source.fetched[-1] == source.last
    assert found == [bytes([number]) for number in range(1, 21)]
    assert (source.report.copied_bytes, source.report.copied_rows) == (len(b"shared") + 20, 200)


async def test_a_failed_fetch_ends_the_copy_behind_the_chunks_before_it() -> None:
    """What was fetched is taken first, then the error is raised."""
    found = []
    with pytest.raises(UnavailableError, match="gone"):
        async for data in Source(fails_at=3).copy().chunks():
            found.append(data)
    assert found == [b"\x01", b"\x02"]


async def test_a_copy_that_is_left_fetches_no_more() -> None:
    """Whoever stops in the middle need not wait for the chunks that were fetched ahead."""
    source = Source()
    async with asyncio.timeout(10), aclosing(source.copy().chunks()) as chunks:
        await anext(chunks)
        await _settle()
    fetched = list(source.fetched)
    await _settle()
    assert source.fetched == fetched and len(fetched) < 20
