"""The copies of one replica: the one that answers, the one before it, those that are made and those that are closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.paramserver.replica.copy_builder import CopyBuilder
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.rpc.backoff import Backoff
from headrace.schemas.errors import ConfigError, HeadraceError, SetBackError, StorageError, UnavailableError

__all__ = ["Copies"]

_log = logging.getLogger(__name__)

# Between attempts to begin anew after a place in the log was lost. A copy that did not last was no success: on a disk
# that is too small, say, each is lost soon, and reads all of the server to begin.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LASTING_S = 60.0


class Copies:
    """Changes from copy to copy by one reference, and begins anew when the present one is lost.

    Thread: the event loop's; attributes may be read, and `changed` waited for, by any.

    Attributes:
        current: What lookups see; None before the first copy, and once closed.
        failure: Why it is not kept up to date at the moment; None while it is.
        changed: Notified when something has become visible, or lookups see another copy.
    """

    def __init__(self, builder: CopyBuilder, on_progress: Callable[[], None] = lambda: None) -> None:
        """Have no copy yet.

        Args:
            builder: Begins them.
            on_progress: Called, by any thread, whenever a copy that somebody waits for has got on; see `switch`.
        """
        self.current: Generation | None = None
        self.failure: HeadraceError | None = None
        self.changed = threading.Condition()
        self._builder = builder
        self._on_progress = on_progress
        self._followed: list[Followed] = []  # the current one last
        self._dropped: list[Followed] = []  # to be closed
        self._beginning: Followed | None = None  # the last that was begun
        self._rebuilding: asyncio.Task[None] | None = None
        self._switching = asyncio.Lock()
        self._backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        self._changed_s = -math.inf  # when lookups came to see the present copy, on the loop's clock

    @property
    def newest(self) -> Followed:
        """The copy that answers.

        Raises:
            UnavailableError: There is none.
        """
        if not self._followed:
            raise UnavailableError("the replica is closed")
        return self._followed[-1]

    @property
    def addresses(self) -> list[str]:
        """Shards that are followed into the copy that answers; none when there is none.

        Thread: any.
        """
        return [link.address for copy in self._followed[-1:] for link in copy.reader.links]

    @property
    def silence(self) -> str | None:
        """Which shard gives no answer to the copy that answers; see `Followed.silence`. Thread: any."""
        return next((copy.silence for copy in self._followed[-1:]), None)

    def describe_lag(self) -> str:
        """Say what the copy that was begun last has not come to; one line without an end."""
        if self._beginning is None:
            return self._builder.doing
        return _describe_lag(self._beginning)

    async def switch(self, snapshot: Path | None, *, keep_previous: bool, timeout_s: float) -> None:
        """Begin another copy, let it catch up, and have lookups see it.

        Args:
            snapshot: Directory to begin from; None for what the server has.
            keep_previous: Keep the one before it up to date too.
            timeout_s: Give up when the other copy has not got on for so long, seconds. It gets on whenever some
                megabytes of it, or records of the log that it lacks, have come: how many there are is the server's
                affair.

        Raises:
            TimeoutError: It has not; lookups go on in the old one. The same is true of every error.
            HeadraceError: As of `CopyBuilder.build`, or the copy was lost.

        Cancellation: lookups see the one or the other, whole.
        """
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(timeout_s) as deadline:
                await stack.enter_async_context(self._switching)
                with self._extending(deadline, timeout_s):
                    copy = await self._begin(snapshot, has_caught_up)
            await self._change_to(copy, keep_previous=keep_previous)

    @contextlib.contextmanager
    def _extending(self, deadline: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Put a deadline off whenever the copy that is being begun gets on."""
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

    async def roll_back(self) -> None:
        """Have lookups see the copy before the present one, which is dropped.

        Raises:
            ConfigError: There is none.

        Cancellation: as of `switch`.
        """
        if len(self._followed) < 2:
            raise ConfigError("there is no previous copy to roll back to")
        self._dropped.append(self._followed.pop())
        copy, rebuilding = self._followed[-1], self._rebuilding
        self.current, self.failure = copy.generation, None
        self._notify()
        if copy.lost is not None:
            self._on_lost(copy, copy.lost)
        if rebuilding is not None:
            rebuilding.cancel()  # it was in the place of the one that is dropped
            await asyncio.wait([rebuilding])
        await self._end_dropped()

    async def close(self) -> None:
        """Follow nothing any more, and free what the copies hold."""
        self._dropped += self._followed
        self._followed = []  # so that nobody begins anew
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])
        await self._end_dropped()

    async def _begin(
        self, snapshot: Path | None, is_enough: Callable[[Followed, Generation | None, bool], bool]
    ) -> Followed:
        self._beginning = None
        # Before the server is asked how far it is: what lookups see goes on.
        shown_seqs = [] if self.current is None else [tail.visible_seq for tail in self.current.tails]
        copy = await self._builder.build(
            snapshot,
            held_bytes=sum(copy.generation.size_bytes for copy in self._followed),
            on_change=self._notify,
            on_lost=self._on_lost,
        )
        self._beginning = copy
        # Also where the server has overtaken since what lookups see of the time that is gone.
        is_set_back = self._is_lost and isinstance(self.newest.lost, SetBackError)
        is_set_back |= any(seq < shown for seq, shown in zip(copy.target_seqs, shown_seqs, strict=False))
        num_taken = 0

        def is_there() -> bool:
            nonlocal num_taken
            before, num_taken = num_taken, _num_taken(copy, self.current, is_set_back)
            if num_taken > before:
                self._builder.on_progress()
            return is_enough(copy, self.current, is_set_back)

        try:
            await copy.show_when(is_there, beside=self._followed[-1:])
        except BaseException:
            self._dropped.append(copy)
            await self._end_dropped()
            raise
        return copy

    async def _change_to(self, copy: Followed, *, keep_previous: bool) -> None:
        keep = self._followed[-1:] if keep_previous else []
        self._dropped += [old for old in self._followed if old not in keep]
        self._followed = [*keep, copy]
        self.current, self.failure = copy.generation, None
        self._changed_s = asyncio.get_running_loop().time()
        self._notify()
        await self._end_dropped()
        await self._builder.remove_old_snapshots()

    async def _end_dropped(self) -> None:
        """Stop following into copies that nobody needs, and free them; goes on where it was cancelled before."""
        while self._dropped:
            copy = self._dropped[0]
            await copy.close()
            try:
                await asyncio.to_thread(copy.generation.close)
            except StorageError as exc:  # what is left over is removed at the next start
                _log.warning("a copy that is not used any more: %s", exc)
            if copy in self._dropped:
                self._dropped.remove(copy)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _on_lost(self, copy: Followed, error: HeadraceError) -> None:
        if not self._followed or copy is not self._followed[-1]:
            return  # who waits for it is told; the previous one is looked at when it is rolled back to
        self.failure = error
        _log.warning("the replica is not up to date: %s; beginning anew", error)
        self._begin_anew()

    @property
    def _is_lost(self) -> bool:
        """Whether the copy that answers is not followed any more."""
        return bool(self._followed) and self._followed[-1].lost is not None

    def _begin_anew(self, _: object = None) -> None:
        """Begin anew where the copy that answers is lost and nobody does yet, or who did was stopped."""
        if self._is_lost and (self._rebuilding is None or self._rebuilding.done()):
            self._rebuilding = asyncio.create_task(self._rebuild(), name="headrace-replica-rebuild")
            self._rebuilding.add_done_callback(self._begin_anew)

    async def _rebuild(self) -> None:
        """Begin anew until there is a copy that follows; lookups go on in the one that was left behind."""
        if asyncio.get_running_loop().time() - self._changed_s < _LASTING_S:
            await asyncio.sleep(self._backoff.next_s())
        else:
            self._backoff.reset()
        while True:
            try:
                async with self._switching:
                    if self._is_lost:
                        await self._free_what_failed(self.newest.generation)
                        await self._change_to(await self._begin(None, self._can_replace), keep_previous=False)
            except Exception as exc:  # whatever it is, the next attempt may go better
                error = exc if isinstance(exc, HeadraceError) else HeadraceError(f"beginning anew failed: {exc!r}")
                if self._is_lost:  # else the change has come, and what belongs to its end has failed
                    self.failure = error
                _log.warning("the replica could not begin anew: %s", error)
            if not self._is_lost:
                return
            await asyncio.sleep(self._backoff.next_s())

    async def _free_what_failed(self, generation: Generation) -> None:
        """Free the disk of a copy that answers nothing any more: perhaps its being full is what failed."""
        if generation.failure is not None:
            await asyncio.to_thread(generation.close)

    def _can_replace(self, copy: Followed, old: Generation | None, is_set_back: bool) -> bool:
        """Return whether a copy that nobody asked for can take the place of the one that lookups see."""
        lacking = _what_is_lacking(copy.generation, old)
        if lacking is not None:
            self.failure = UnavailableError(
                f"the server is another store than before and has no {lacking} yet: lookups go on in the old copy"
            )
            return False
        return has_caught_up(copy, old, is_set_back)


def has_caught_up(copy: Followed, old: Generation | None, is_set_back: bool) -> bool:
    """Return whether a new copy has what the server had when it began, and shows what the old copy shows.

    Args:
        copy: The new one.
        old: What lookups see.
        is_set_back: The server's log does not have all that they see any more: that is not waited for.
    """
    new = copy.generation
    if new.visible is None or any(tail.seq < seq for tail, seq in zip(new.tails, copy.target_seqs, strict=True)):
        return False
    if old is None or not _has_to_show(new, old, is_set_back):
        return True
    is_behind = old.visible is not None and new.visible < old.visible
    return not is_behind and all(a.visible_seq >= b.visible_seq for a, b in zip(new.tails, old.tails, strict=True))


def _has_to_show(new: Generation, old: Generation, is_set_back: bool) -> bool:
    """Return whether a new copy has to show what the old one does."""
    return old.server_id == new.server_id and len(old.tails) == len(new.tails) and not is_set_back


def _num_taken(copy: Followed, old: Generation | None, is_set_back: bool) -> int:
    """Return how many of the records that a new copy lacks at first it has taken; see `has_caught_up`.

    Those that come after them do not count: they never end, and a step that does not end is waited for no longer.
    """
    new, needed = copy.generation, copy.target_seqs
    if old is not None and _has_to_show(new, old, is_set_back):
        needed = tuple(max(seq, tail.visible_seq) for seq, tail in zip(needed, old.tails, strict=True))
    return sum(min(tail.seq, seq) for tail, seq in zip(new.tails, needed, strict=True))


def _describe_lag(copy: Followed) -> str:
    if copy.generation.visible is None:
        return "the newest run has not ended a step that all shards have"
    for tail, seq in zip(copy.generation.tails, copy.target_seqs, strict=True):
        if tail.seq < seq:
            return f"it is at record {tail.seq} of {seq} of shard {tail.shard}'s log"
    return "it does not show yet what the present copy shows"


def _what_is_lacking(new: Generation, old: Generation | None) -> str | None:
    """Return what another store must have before lookups are sent to it; None when it has all.

    An empty server at the old one's address, by mistake or because its disk is gone, must not take the rows away that
    lookups find. When the trainer fills it, its first step is ended there once all rows are.
    """
    if old is None or old.server_id == new.server_id:
        return None
    absent = sorted(old.tables.keys() - new.tables.keys())
    if absent:
        return f"table {absent[0]!r}"
    has_steps = old.visible is not None and old.visible[1] >= 0
    is_before_any = new.visible is None or (new.visible[0] > 0 and new.visible[1] < 0)
    return "step that is ended" if has_steps and is_before_any else None
