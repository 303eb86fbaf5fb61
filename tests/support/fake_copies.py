"""Copies of a replica that are made up, and what makes them: a test says where each is and when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.replica.copy.copies import Copies
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import GoneError, HeadraceError
from headrace.schemas.tables import DType, TableSpec

__all__ = ["SPEC", "WAIT_S", "Begun", "FakeBuilder", "FakeCopy", "made", "switch", "turns", "until"]

WAIT_S = 20.0
SPEC = TableSpec(fqn="t", num_rows=9, dim=1, dtype=DType.FLOAT32)


class FakeCopy:
    """A copy that follows nothing: the test says where it is."""

    def __init__(
        self, *, server_id: str = "s", seq: int = 0, target_seq: int = 0, visible: Any = (1, 1), tables: bool = True
    ) -> None:
        self.tail = ShardTail(0, seq=seq, catalog=Catalog({}), sessions=Sessions({}))
        self.table_set = TableSet(server_id, [self.tail], is_by_step=False, make_table=MemoryTable)
        if tables:
            self.table_set.add_tables([SPEC])
        self.table_set.visible = visible
        self.target_seqs = (target_seq,)
        self.lost: HeadraceError | None = None
        self.num_closed = 0
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.beside: list[Any] = []
        self._changed = asyncio.Event()
        self.on_lost: Callable[[Any, HeadraceError], None] = lambda *_: None

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()
            if self.lost is not None:
                raise self.lost

    async def show_when(self, is_so: Callable[[], bool], *, beside: Sequence[Any]) -> None:
        self.beside = list(beside)
        await self.wait_until(is_so)
        self.table_set.is_shown = True

    def move(self, seq: int, visible: Any) -> None:
        self.tail.seq = self.tail.visible_seq = seq
        self.table_set.visible = visible
        self._changed.set()

    def lose(self, why: HeadraceError | None = None) -> None:
        self.lost = why or GoneError("its place is gone")
        self._changed.set()
        self.on_lost(self, self.lost)

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        self.num_closed += 1


class FakeBuilder:
    """Gives the copies, or raises the errors, that the test has put there."""

    def __init__(self, *results: FakeCopy | Exception) -> None:
        self.results = list(results)
        self.given: list[FakeCopy] = []
        self.held_bytes: list[int] = []
        self.num_cleared = 0
        self.on_progress: Callable[[], None] = lambda: None

    async def build(self, snapshot: Path | None, *, held_bytes: int, on_lost: Any, **_: Any) -> LiveCopy:
        self.held_bytes.append(held_bytes)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        result.on_lost = on_lost
        self.given.append(result)
        return cast("LiveCopy", result)

    async def remove_old_snapshots(self) -> None:
        self.num_cleared += 1


Begun = Callable[..., Awaitable[tuple[Copies, FakeBuilder]]]


def made(*results: FakeCopy | Exception) -> tuple[Copies, FakeBuilder]:
    builder = FakeBuilder(*results)
    return Copies(cast("Any", builder)), builder


async def switch(copies: Copies, *, keep_previous: bool = True, timeout_s: float = WAIT_S) -> None:
    await copies.switch(None, keep_previous=keep_previous, timeout_s=timeout_s)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 (what is waited for belongs to the code under test)
            await asyncio.sleep(0)


async def turns(number: int = 10) -> None:
    """Let the loop run for some turns: long enough for what would go on by itself."""
    for _ in range(number):
        await asyncio.sleep(0)
