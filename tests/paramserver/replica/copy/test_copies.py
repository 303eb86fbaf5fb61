"""Which copy answers lookups: switches, losses at any moment, and rebuilding; the copies and time are fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from text_scripts import Script, scripts
from virtual_loop import run_virtual

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.replica.copy.copies import Copies
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, SetBackError, StorageError
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=9, dim=1, dtype=DType.FLOAT32)
LOSSES = {"gone": GoneError("its place is gone"), "set_back": SetBackError("its last record is another")}
FAULTS = {"memory": ConfigError("not enough memory"), "disk": OSError(28, "No space left on device")}


class FakeCopy:
    """A copy that follows nothing: the script says where it is."""

    def __init__(
        self, name: str, told: Callable[[str], None], *, server: str, seq: int, target: int, visible: Any, tables: bool
    ) -> None:
        self.name, self._told = name, told
        self.tail = ShardTail(0, seq=seq, catalog=Catalog({}), sessions=Sessions({}))
        self.table_set = TableSet(server, [self.tail], is_by_step=False, make_table=MemoryTable)
        if tables:
            self.table_set.add_tables([SPEC])
        self.table_set.visible = visible and tuple(visible)
        self.table_set.close = self._free  # type: ignore[method-assign]
        self.target_seqs, self.lost = (target,), cast("HeadraceError | None", None)
        self.may_close, self.is_stuck = asyncio.Event(), False
        self.may_close.set()
        self.changed = asyncio.Event()
        self.on_lost: Callable[[Any, HeadraceError], None] = lambda *_: None

    async def show_when(self, is_so: Callable[[], bool], *, beside: FakeCopy | None) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()
            if self.lost is not None:
                raise self.lost
        self._told(f"{self.name} is shown" + ("" if beside is None else f" beside {beside.name}"))
        self.table_set.is_shown = True

    async def close(self) -> None:
        await self.may_close.wait()
        self._told(f"{self.name} is closed")

    def _free(self) -> None:
        if self.is_stuck:
            raise StorageError("the directory cannot be removed")
        self._told(f"{self.name} is freed")


class Changing:
    """The copies of a replica, and the builder that makes them as the script says.

    Each command tells what happened by it, and then the copy that answers lookups and the replica's failure.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.on_progress: Callable[[], None] = lambda: None
        self.doing = "the server has not answered yet"
        self._events: list[str] = []
        self._coming: list[FakeCopy | Exception] = []
        self._known: dict[str, FakeCopy] = {}
        self._calls: list[tuple[str, asyncio.Task[None]]] = []
        self._caplog, self._cannot_clear = caplog, False
        self._copies = Copies(cast("Any", self), lambda: self._events.append("progress"))

    async def build(self, snapshot: Path | None, *, held_bytes: int, on_lost: Any, **_: Any) -> LiveCopy:
        """Do what `CopyBuilder.build` does."""
        result = self._coming.pop(0)
        if isinstance(result, Exception):
            self._events.append(f"an attempt fails at {asyncio.get_running_loop().time() - 1000:g} s")
            raise result
        held = held_bytes // next(iter(self._known.values())).table_set.size_bytes
        self._events.append(f"{result.name} is built" + (f" with {held} in memory" if held else ""))
        result.on_lost = on_lost
        return cast("LiveCopy", result)

    async def remove_old_snapshots(self) -> None:
        """Do what `CopyBuilder.remove_old_snapshots` does."""
        if self._cannot_clear:
            raise OSError(37, "No locks available")
        self._events.append("old snapshots go")

    def make(
        self,
        *names: str,
        server: str = "s",
        seq: int = 0,
        target: int = 0,
        visible: Sequence[int] | None = (1, 1),
        tables: bool = True,
    ) -> None:
        """Put copies there for the builder to return; one whose `seq` is its `target` has caught up."""
        for name in names:
            self._known[name] = FakeCopy(
                name, self._events.append, server=server, seq=seq, target=target, visible=visible, tables=tables
            )
            self._coming.append(self._known[name])

    def fail(self, what: str, times: int = 1) -> None:
        """Let attempts to build fail."""
        self._coming += [FAULTS[what]] * times

    async def switch(self, *, timeout_s: float = 20.0) -> str:
        return await self._call("switch", self._copies.switch(None, timeout_s=timeout_s))

    async def cancel(self) -> str:
        self._calls[-1][1].cancel()
        return await self.wait(0)

    async def lose(self, name: str, why: str = "gone", *, fails: bool = False) -> str:
        """Lose a copy; one that fails answers nothing any more."""
        copy = self._known[name]
        copy.lost = LOSSES[why]
        copy.table_set.failure = StorageError("no space left on device") if fails else None
        copy.changed.set()
        copy.on_lost(copy, copy.lost)
        return await self.wait(0)

    async def move(self, name: str, seq: int, visible: list[int] | None, *, visible_seq: int | None = None) -> str:
        copy = self._known[name]
        copy.tail.seq, copy.tail.visible_seq = seq, seq if visible_seq is None else visible_seq
        copy.table_set.visible = cast("Any", visible and tuple(visible))
        copy.changed.set()
        return await self.wait(0)

    def learn_table(self, name: str) -> None:
        self._known[name].table_set.add_tables([SPEC])

    async def may_close(self, name: str, is_so: bool) -> str:
        (self._known[name].may_close.set if is_so else self._known[name].may_close.clear)()
        return await self.wait(0)

    def stick(self, name: str) -> None:
        """Let a copy's files not be removed."""
        self._known[name].is_stuck = True

    def stick_snapshots(self) -> None:
        self._cannot_clear = True

    def lag(self) -> str:
        """Say what the last copy that was built still lacks."""
        return self._copies.describe_lag()

    async def close(self) -> str:
        return await self._call("close", self._copies.close())

    async def wait(self, duration_s: float) -> str:
        if duration_s:
            await asyncio.sleep(duration_s)
        for _ in range(30):
            await asyncio.sleep(0)
        for call in [call for call in self._calls if call[1].done()]:
            self._calls.remove(call)
            is_cancelled = call[1].cancelled()
            error = None if is_cancelled else call[1].exception()
            how = "is cancelled" if is_cancelled else "is done" if error is None else f"raises {type(error).__name__}"
            self._events.append(f"{call[0]} {how}")
        self._events += [f"warns: {record.getMessage()}" for record in self._caplog.records]
        self._caplog.clear()
        current = [name for name, copy in self._known.items() if copy.table_set is self._copies.current]
        state = f"{current[0] if current else 'no copy'} answers"
        if self._copies.failure is not None:
            state += f", failure: {self._copies.failure}"
        events, self._events[:] = self._events[:], []
        return "\n".join([*events, state])

    async def _call(self, what: str, call: Any) -> str:
        self._calls.append((what, asyncio.create_task(call)))
        return await self.wait(0)


@scripts(__file__, "copies")
def test_which_copy_answers(script: Script, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that follows the server and has what lookups saw before, as soon as there is one."""
    monkeypatch.setattr(random, "random", lambda: 1.0)  # each pause is its ceiling

    async def run() -> None:
        await script.run_async(Changing(caplog))

    run_virtual(run())


async def test_progress_of_any_thread_starts_a_deadline_again() -> None:
    """Also a thread that has not heard of the end does no harm."""
    copies = Copies(cast("Any", builder := type("Builder", (), {"on_progress": None})()), lambda: None)
    loop, wrong = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    async with asyncio.timeout(1000) as deadline:
        with copies._extending(deadline, 5000):
            await asyncio.to_thread(builder.on_progress)
            while (deadline.when() or 0) <= loop.time() + 4000:  # noqa: ASYNC110 (the deadline is the code's)
                await asyncio.sleep(0)
            late = builder.on_progress
            late()
    late()
    builder.on_progress()
    await asyncio.sleep(0)
    assert not wrong
    await copies.close()
