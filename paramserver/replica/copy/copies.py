"""The copies of one replica: the one that answers lookups, the one being built and those to close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from headrace.paramserver.replica.copy.builder import CopyBuilder
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import HeadraceError, SetBackError, StorageError, UnavailableError

__all__ = ["Copies"]

_log = logging.getLogger(__name__)

# Pauses between attempts to rebuild a lost copy. A copy that did not last counts as a failed attempt: on a disk that is
# too small, say, each copy is soon lost, and each reads all of the server.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LASTING_S = 60.0


class Copies:
    """Switches from copy to copy by one assignment, and rebuilds the present copy when it is lost.

    Thread: the event loop's; any thread may read the attributes and wait for `changed`.
    """

    def __init__(self, builder: CopyBuilder, on_progress: Callable[[], None] = lambda: None) -> None:
        """Start without a copy; any thread calls `on_progress` when a copy that a caller waits for made progress."""
        self.current: TableSet | None = None  # what lookups see; None before the first copy and after `close`
        self.failure: HeadraceError | None = None  # why it is not kept up to date now
        self.changed = threading.Condition()  # notified when something became visible, or after a switch
        self._builder = builder
        self._on_progress = on_progress
        self._live: LiveCopy | None = None  # the one that lookups see
        self._dropped: list[LiveCopy] = []  # to be closed
        self._beginning: LiveCopy | None = None  # the last copy that was built
        self._rebuilding: asyncio.Task[None] | None = None
        self._switching = asyncio.Lock()
        self._holds_recorded = False
        self._backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        self._switched_s = -math.inf  # when lookups began to see the present copy, on the loop's clock

    @property
    def newest(self) -> LiveCopy:
        """The copy that answers lookups; raises `UnavailableError` if there is none."""
        if self._live is None:
            raise UnavailableError("the replica is closed")
        return self._live

    @property
    def addresses(self) -> list[str]:
        """Addresses of the shards that the present copy follows; empty without a copy. Thread: any."""
        return [] if self._live is None else [link.address for link in self._live.reader.links]

    @property
    def silence(self) -> str | None:
        """The shard that does not answer the present copy; see `LiveCopy.silence`. Thread: any."""
        return None if self._live is None else self._live.silence

    def describe_lag(self) -> str:
        """Return what the last built copy still lacks; one line without a full stop."""
        if self._beginning is None:
            return self._builder.doing
        return _describe_lag(self._beginning)

    async def switch(self, snapshot: Path | None, *, timeout_s: float) -> None:
        """Build another copy, let it catch up, and show it to lookups; after an error they go on in the old one.

        Give up after `timeout_s` without progress: a few megabytes of the copy, or records of the log that it lacks,
        whose number is up to the server.

        Raises:
            TimeoutError: No progress.
            HeadraceError: As for `CopyBuilder.build`, or the copy was lost.

        Cancellation: lookups see one copy or the other, whole.
        """
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(timeout_s) as deadline:
                await stack.enter_async_context(self._switching)
                with self._extending(deadline, timeout_s):
                    copy = await self._begin_until_kept(snapshot)
            await self._change_to(copy)

    async def _begin_until_kept(self, snapshot: Path | None) -> LiveCopy:
        """Build another copy, and again if the server is set back meanwhile, as by a restore."""
        while True:
            try:
                return await self._begin(snapshot, has_caught_up)
            except SetBackError as exc:
                if snapshot is not None:  # it is of a time that is gone
                    raise
                _log.warning("the server was set back while a copy was built: %s; beginning again", exc)
            await asyncio.sleep(self._backoff.next_s())

    @contextlib.contextmanager
    def _extending(self, deadline: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Extend a deadline whenever the copy being built makes progress."""
        loop, is_over = asyncio.get_running_loop(), False

        def extend() -> None:
            if not is_over and not deadline.expired():
                deadline.reschedule(loop.time() + timeout_s)

        def progressed() -> None:
            loop.call_soon_threadsafe(extend)
            self._on_progress()

        self._builder.on_progress = progressed
        try:
            yield
        finally:
            is_over = True
            self._builder.on_progress = lambda: None

    async def hold_recorded(self, is_on: bool, *, goes_on: bool = False) -> None:
        """Let the copy that answers lookups, and later ones, stay at recorded steps; see `LiveCopy.hold_recorded`.

        Cancellation: as there.
        """
        self._holds_recorded = is_on
        if self._live is not None:
            await self._live.hold_recorded(is_on, goes_on=goes_on)

    async def close(self) -> None:
        """Stop following, and close all copies."""
        if self._live is not None:
            self._dropped.append(self._live)
        self._live = None  # so that nothing rebuilds
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])
        await self._close_dropped()

    async def _begin(
        self, snapshot: Path | None, is_enough: Callable[[LiveCopy, TableSet | None, bool], bool]
    ) -> LiveCopy:
        self._beginning = None
        # Read this before asking the server how far it is: what lookups see moves on.
        shown_seqs = [] if self.current is None else [tail.visible_seq for tail in self.current.tails]
        copy = await self._builder.build(
            snapshot,
            held_bytes=0 if self._live is None else self._live.table_set.size_bytes,
            on_change=self._notify,
            on_lost=self._on_lost,
        )
        self._beginning = copy
        # The server may have been set back and since gone beyond what lookups see of the lost updates.
        is_set_back = self._is_lost and isinstance(self.newest.lost, SetBackError)
        is_set_back |= any(seq < shown for seq, shown in zip(copy.target_seqs, shown_seqs, strict=False))
        num_taken = 0

        def is_ready() -> bool:
            nonlocal num_taken
            before, num_taken = num_taken, _num_taken(copy, self.current, is_set_back)
            if num_taken > before:
                self._builder.on_progress()
            return is_enough(copy, self.current, is_set_back)

        try:
            await copy.show_when(is_ready, beside=self._live)
        except BaseException:
            self._dropped.append(copy)
            await self._close_dropped()
            raise
        if self.current is not None and _must_show_all_of(copy.table_set, self.current, is_set_back):
            with copy.table_set.seqlock.write():
                copy.table_set.dense.adopt(self.current.dense)  # within a step, the store has no whole part
                copy.table_set.keep_shown(self.current)
        return copy

    async def _change_to(self, copy: LiveCopy) -> None:
        if self._live is not None:
            self._dropped.append(self._live)
        self._live = copy
        self.current, self.failure = copy.table_set, None
        self._switched_s = asyncio.get_running_loop().time()
        self._notify()
        if self._holds_recorded:
            await self.hold_recorded(True)
        await self._close_dropped()
        await self._builder.remove_old_snapshots()

    async def _close_dropped(self) -> None:
        """Close dropped copies, continuing where a cancelled call stopped."""
        while self._dropped:
            copy = self._dropped[0]
            await copy.close()
            try:
                await asyncio.to_thread(copy.table_set.close)
            except StorageError as exc:  # the next start removes the rest
                _log.warning("cannot remove an old copy: %s", exc)
            if copy in self._dropped:
                self._dropped.remove(copy)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _on_lost(self, copy: LiveCopy, error: HeadraceError) -> None:
        if copy is not self._live:
            return  # a new copy's waiter gets the error
        self.failure = error
        _log.warning("the replica is not up to date: %s; beginning anew", error)
        self._start_rebuilding()

    @property
    def _is_lost(self) -> bool:
        return self._live is not None and self._live.lost is not None

    def _start_rebuilding(self, _: object = None) -> None:
        """Rebuild the present copy if it is lost and no task does so, or the last task was cancelled."""
        if self._is_lost and (self._rebuilding is None or self._rebuilding.done()):
            self._rebuilding = asyncio.create_task(self._rebuild(), name="headrace-replica-rebuild")
            self._rebuilding.add_done_callback(self._start_rebuilding)

    async def _rebuild(self) -> None:
        """Build copies until one follows the server; lookups go on in the lost one meanwhile."""
        if asyncio.get_running_loop().time() - self._switched_s < _LASTING_S:
            await asyncio.sleep(self._backoff.next_s())
        else:
            self._backoff.reset()
        while True:
            try:
                async with self._switching:
                    if self._is_lost:
                        lost = self.newest.table_set
                        if lost.failure is not None:  # it answers nothing; a full disk may be why: free its files
                            await asyncio.to_thread(lost.close)
                        await self._change_to(await self._begin(None, self._can_replace))
            except Exception as exc:  # whatever failed, the next attempt may succeed
                error = exc if isinstance(exc, HeadraceError) else HeadraceError(f"beginning anew failed: {exc!r}")
                if self._is_lost:  # otherwise the switch is done, and only its cleanup failed
                    self.failure = error
                _log.warning("the replica could not begin anew: %s", error)
            if not self._is_lost:
                return
            await asyncio.sleep(self._backoff.next_s())

    def _can_replace(self, copy: LiveCopy, old: TableSet | None, is_set_back: bool) -> bool:
        """Return whether a copy that no caller asked for may replace the one that lookups see."""
        missing = _missing_from(copy.table_set, old)
        if missing is not None:
            self.failure = UnavailableError(
                f"the server is another store than before and has no {missing} yet: lookups go on in the old copy"
            )
            return False
        return has_caught_up(copy, old, is_set_back)


def has_caught_up(copy: LiveCopy, old: TableSet | None, is_set_back: bool) -> bool:
    """Return whether a new copy has what the server had when it began, and shows what the old copy shows.

    After a set back the server's log lacks part of what lookups see, which is not waited for.
    """
    new = copy.table_set
    if new.visible is None or any(tail.seq < seq for tail, seq in zip(new.tails, copy.target_seqs, strict=False)):
        return False
    if old is None or not _must_show_all_of(new, old, is_set_back):
        return True
    is_behind = old.visible is not None and new.visible < old.visible
    if is_behind or len(new.tails) < len(old.tails):  # shards that have appeared come with the moves to them
        return False
    return all(a.visible_seq >= b.visible_seq for a, b in zip(new.tails, old.tails, strict=False))


def _must_show_all_of(new: TableSet, old: TableSet, is_set_back: bool) -> bool:
    return old.server_id == new.server_id and not is_set_back


def _num_taken(copy: LiveCopy, old: TableSet | None, is_set_back: bool) -> int:
    """Return how many of the records that a new copy needs it has taken; see `has_caught_up`.

    Later records do not count: they never end, and a step that does not end must not extend the wait.
    """
    new, needed = copy.table_set, copy.target_seqs
    if old is not None and _must_show_all_of(new, old, is_set_back):
        shown = (tail.visible_seq for tail in old.tails)
        needed = tuple(max(pair) for pair in zip_longest(needed, shown, fillvalue=0))
    return sum(min(tail.seq, seq) for tail, seq in zip(new.tails, needed, strict=False))


def _describe_lag(copy: LiveCopy) -> str:
    if copy.table_set.visible is None:
        names = copy.table_set.incomplete
        incomplete = f", and has not sent all rows of {first_of(names)}" if names else ""
        return f"the newest run has not ended a step that all shards have{incomplete}"
    for tail, seq in zip(copy.table_set.tails, copy.target_seqs, strict=False):
        if tail.seq < seq:
            return f"it is at record {tail.seq} of {seq} of shard {tail.shard}'s log"
    return "it does not show yet what the present copy shows"


def _missing_from(new: TableSet, old: TableSet | None) -> str | None:
    """Return what another store still lacks to replace the old one; None if nothing.

    An empty server at the old address, by mistake or after a disk loss, must not take away rows that lookups find. When
    the trainer fills it, its first step ends there once all rows are.
    """
    if old is None or old.server_id == new.server_id:
        return None
    absent = sorted(old.tables.keys() - new.tables.keys())
    if absent:
        return f"table {absent[0]!r}"
    has_steps = old.visible is not None and old.visible[1] >= 0
    is_before_any = new.visible is None or (new.visible[0] > 0 and new.visible[1] < 0)
    return "step that is ended" if has_steps and is_before_any else None
