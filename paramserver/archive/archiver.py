"""Archives a shard's log while it is written: segments of durable records go to the object store, in order.

    log ──▶ excerpt in memory ──▶ up to two uploads, each read back ──▶ archived

An excerpt is closed when it is full, when its first record has waited long enough, or where a segment of the log ends.
Nothing waits for the archive but retention, which keeps what is not archived within `log_hold_bytes`. So a store that
is slow or away delays the archive only. Where the archive ends is found by listing it, so nothing is kept on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from headrace.paramserver.archive.objects import ShardArchive, chain_of
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.claims import HeldClaims, ShardClaim, check_copy
from headrace.paramserver.log.excerpt import LogExcerpt, excerpt_log_id
from headrace.paramserver.log.interface import LogRecord, UpdateLog
from headrace.paramserver.log.leases import LogLease
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.system.direct_file import page_memory
from headrace.paramserver.system.event_loop import lower_thread_priority, task_group
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.object_store import ObjectStore, RateLimit, StoreRefusesError
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, LogFencedError, UnavailableError

__all__ = ["ArchiveState", "Archiver", "ArchiverConfig"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_UPLOADS_AT_ONCE = 2
# Besides the uploads, one collects records and one prunes.
_NUM_THREADS = _UPLOADS_AT_ONCE + 2
# Often enough to find what is new in the log's memory, at any rate of writing: the disk has enough to do.
_LEAST_POLL_S, _LONGEST_POLL_S = 0.01, 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
# For a seal behind a segment that is full.
_SEAL_ROOM_BYTES = 4096
# How long a start waits for the store before it goes on without having compared log and archive. It takes some ten
# requests, and one more for each start of the last days.
_CHECK_S = 60.0
# How long an orderly end tries to archive the rest.
_DRAIN_S = 5.0
_MAX_SAMPLES = 1024
_FIRST_PRUNE_S, _PRUNE_INTERVAL_S = 60.0, 3600.0
# Of one request with its retries: short, because failures are counted and shown, and a stop waits for it.
_DEADLINE_S = 5.0


class _OtherHistoryError(ConfigError):
    """The archive has records that the log lacks, or other ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiverConfig:
    """Settings of an archiver.

    Attributes:
        server_id, shard: Whose log it is.
        is_restored: The shard was restored, and has not claimed a term yet: its claim voids what is archived behind it.
        is_cut: That is what the user wants, who chose the point.
        has_held_term: The shard's directory has claimed a term before.
        segment_bytes: Size at which a segment is closed. Three of them may be in memory.
        segment_s: Longest time that a record waits until its segment is closed, seconds.
        keep_s: How far back a restore to any moment works, seconds; what is older is pruned. 0 keeps all.
        where: The object store, for messages.
    """

    server_id: str
    shard: int
    is_restored: bool = False
    is_cut: bool = False
    has_held_term: bool = False
    segment_bytes: int = 64 << 20
    segment_s: float = 10.0
    keep_s: float = 0.0
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveState:
    """How far the archive is.

    Attributes:
        archived_seq: All records up to here are archived; -1 while the store has not told yet.
        behind_bytes: About how many bytes of durable log are not archived.
        behind_s: How long the oldest of these records has been durable, seconds.
        num_failures: Uploads and listings that have failed since the start.
        num_lost: Records that retention has removed before they were archived.
        error: The present failure; None while all is well.
        segment_s: Longest time that a record waits until its segment is closed, seconds.
    """

    archived_seq: int
    behind_bytes: int
    behind_s: float
    num_failures: int
    num_lost: int
    error: str | None
    segment_s: float


class Archiver:
    """Archives one shard's log. Use it with `async with`; `check` comes before.

    Thread: the event loop's; the store is used in threads.

    Attributes:
        term: Term of this copy of the shard; 0 without claims. To be set between `check` and `async with`.
    """

    def __init__(
        self,
        log: UpdateLog,
        archive: ShardArchive,
        config: ArchiverConfig,
        *,
        check_claim: Callable[[int], None] = lambda term: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to archive `log`; `check_claim` raises `LogFencedError` once another copy has a higher term.

        `check_claim` is called with the term in a thread before every upload; its other errors are retried.
        """
        self._log, self._archive, self._config = log, archive, config
        self._check_claim, self._clock = check_claim, clock
        self._log_id = excerpt_log_id(config.server_id, config.shard)
        self.term = 0
        self._archived_seq: int | None = None
        self._next_seq = 1
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_failures = self._num_lost = 0
        self._errors: dict[str, HeadraceError] = {}  # of what fails now, by "log" and "store"
        # (seq, when it was first seen to be durable, bytes written by then), for how far the archive is behind.
        self._samples: list[tuple[int, float, int]] = []
        self._archived_bytes = 0
        self._backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        self._poll_s = min(max(config.segment_s / 20, _LEAST_POLL_S), _LONGEST_POLL_S)
        # Memory of segments that were sent, while full ones follow each other: the system has to clear new memory.
        self._spare: list[memoryview] = []
        self._memory_bytes, self._is_busy = config.segment_bytes + _SEAL_ROOM_BYTES, False
        # Nobody waits for the archive: it gives way to what acks, applies and answers.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "headrace-archive", initializer=lower_thread_priority)

    async def check(self) -> bool:
        """Compare the archive with the log, and return whether that was possible.

        Call it before the shard claims a term, which voids what is archived behind its log, and claim only if it was
        compared. A copy that has held a term need not wait for the store, and is compared later.

        Raises:
            ConfigError: The archive has records that the log lacks, or other ones, or is another server's.
            LogFencedError: Another copy has claimed the shard.
        """
        config = self._config
        while not config.is_cut:
            try:
                async with asyncio.timeout(_CHECK_S if config.has_held_term else None):
                    await (self._check_grown() if config.is_restored else self._find_end())
                return True
            except TimeoutError:
                fact(_log, logging.WARNING, "the archive does not answer; it is compared later", store=config.where)
            except HeadraceError as exc:
                is_final = isinstance(exc, ConfigError | LogFencedError) and not isinstance(exc, StoreRefusesError)
                if is_final or not (config.has_held_term or isinstance(exc, UnavailableError)):
                    raise
                self._note_failure(exc, "store")
            if config.has_held_term:
                return False
            await asyncio.sleep(self._backoff.next_s())
        return True

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="headrace-archive")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._is_closing.set()
        await asyncio.wait([self._task], timeout=0 if self._errors else _DRAIN_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def wait_failed(self) -> HeadraceError:
        """Wait for an error that ends the shard: another copy has claimed it, or log and archive are of two histories.

        Cancellation: harmless.
        """
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
        except HeadraceError as exc:
            return exc
        await asyncio.Event().wait()  # it has ended in order
        raise AssertionError

    @classmethod
    def of_shard(cls, log: UpdateLog, config: ShardConfig) -> Self | None:
        """Return the archiver of a shard; None without an object store.

        Raises:
            ConfigError: The object store's URL cannot be used.
        """
        if config.object_store is None:
            return None
        rate = RateLimit(config.object_store_rate)
        store = ObjectStore.of_url(config.object_store, rate=rate, deadline_s=_DEADLINE_S)
        owner = SnapshotStore(store)
        archive = ShardArchive(store, config.shard)
        held = HeldClaims.read(config.directory, config.server_id, config.shard)
        is_known = False

        def check(term: int) -> None:
            nonlocal is_known
            if not is_known:
                owner.claim(config.server_id)
                archive.announce(config.num_shards)
                is_known = True
            if term:
                # One that was put while the store seemed away is our own.
                known = HeldClaims.read(config.directory, config.server_id, config.shard).known
                ShardClaim(store=store, shard=config.shard, term=term, unsure=frozenset(known)).check()
            else:  # of another copy's log nothing can be said by comparing it
                check_copy(store, config.directory, server_id=config.server_id, shard=config.shard)

        archiver_config = ArchiverConfig(
            server_id=config.server_id,
            shard=config.shard,
            is_restored=not held.term and bool(held.known),
            is_cut=held.is_cut,
            has_held_term=bool(held.term),
            segment_bytes=config.archive_segment_bytes,
            segment_s=config.archive_segment_s,
            keep_s=config.archive_retention_s,
            where=config.object_store,
        )
        return cls(log, archive, archiver_config, check_claim=check)

    def lease(self) -> LogLease:
        """Return a lease on the log that is not archived."""
        seq = self._log.first_seq if self._archived_seq is None else self._archived_seq + 1
        return LogLease("archive", seq, math.inf)

    def state(self) -> ArchiveState:
        """Return how far the archive is."""
        self._look()
        oldest = self._samples[0] if self._samples else None
        written_bytes = self._log.metrics.written_bytes
        return ArchiveState(
            archived_seq=-1 if self._archived_seq is None else self._archived_seq,
            behind_bytes=max(0, written_bytes - self._archived_bytes) if oldest else 0,
            behind_s=max(0.0, self._clock() - oldest[1]) if oldest else 0.0,
            num_failures=self._num_failures,
            num_lost=self._num_lost,
            error=next(map(str, self._errors.values()), None),
            segment_s=self._config.segment_s,
        )

    async def _run(self) -> None:
        try:
            while self._archived_seq is None:
                await self._retried(self._find_end)
        except _OtherHistoryError as exc:  # this shard must stop, and the others of its server go on
            raise LogFencedError(str(exc)) from exc
        slots = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        previous: asyncio.Task[None] | None = None
        async with task_group() as tasks:
            if self._config.keep_s:
                tasks.create_task(self._keep_pruning())
            while (excerpt := await self._collect()) is not None:
                await slots.acquire()
                previous = tasks.create_task(self._upload(excerpt, previous, slots))

    async def _keep_pruning(self) -> None:
        """Remove what no restore needs any more. The shard does it: it always runs, and has the credentials."""
        snapshots, pause_s = SnapshotStore(self._archive.store), _FIRST_PRUNE_S
        while not await self._is_closed_within(pause_s):
            pause_s = _PRUNE_INTERVAL_S
            try:
                num_gone = await self._in_thread(lambda: self._archive.prune(snapshots.list(), self._config.keep_s))
            except HeadraceError as exc:
                fact(_log, logging.WARNING, "the archive cannot be pruned; it is tried again", error=str(exc))
            else:
                if num_gone:
                    fact(_log, logging.INFO, "old parts of the archive were removed", objects=num_gone)

    async def _is_closed_within(self, pause_s: float) -> bool:
        # `asyncio.wait_for` may swallow a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._is_closing.wait()
        return self._is_closing.is_set()

    async def _find_end(self) -> None:
        end = await self._in_thread(self._compare)
        log = self._log
        num_records = max(1, log.last_seq - log.first_seq + 1)
        # What was written before this start is not counted by the log's metrics.
        self._archived_bytes = -(log.size_bytes * max(0, log.last_seq - end) // num_records)
        self._next_seq, self._archived_seq = end + 1, end
        self._errors.clear()

    async def _check_grown(self) -> None:
        """Check that nothing was archived behind the end of a restored log since: then another copy is alive."""
        last_seq = self._log.last_seq
        await asyncio.to_thread(self._check_claim, self.term)
        pieces = await asyncio.to_thread(self._archive.pieces)
        if chain := chain_of(pieces, last_seq + 1):
            raise _OtherHistoryError(
                f"shard {self._config.shard}: the archive at {self._config.where} has gone on to seq "
                f"{chain[-1].last_seq} since this directory was restored up to seq {last_seq}: another copy of the "
                "shard is or was alive; serve that one, or remove this directory and restore it again. To look at it "
                "beside a living server, serve it without --object-store"
            )

    def _compare(self) -> int:
        """Return the last seq that is archived, without a gap that the log could still fill."""
        self._check_claim(self.term)
        pieces, log = self._archive.pieces(), self._log
        if not pieces:
            return log.first_seq - 1
        newest = max(pieces, key=lambda piece: piece.last_seq)
        here = log.nonce_of(newest.last_seq)
        if newest.last_seq > log.last_seq or here not in (None, newest.segment.mark):
            what = "ends at" if newest.last_seq > log.last_seq else "has other records behind"
            raise _OtherHistoryError(
                f"shard {self._config.shard}: the archive at {self._config.where} has its log up to seq "
                f"{newest.last_seq}, and the log here {what} seq {min(log.last_seq, newest.last_seq)}: this directory "
                "is an older copy, or another; put the newer one back, or move this one away and restore the shard "
                f"from the archive: headrace restore {self._config.where} --shard {self._config.shard} --data DIR"
            )
        end = pieces[0].segment.first_seq - 1  # what came before was removed, or never archived
        for piece in pieces:
            if piece.segment.first_seq > end + 1 >= log.first_seq:
                break  # an upload that was overtaken by a later one and then lost
            end = max(end, piece.last_seq)
        return end

    async def _collect(self) -> LogExcerpt | None:
        """Return the next records, once they make a full segment or have waited long enough; None at the end."""
        excerpt: LogExcerpt | None = None
        began_s = 0.0
        while True:
            self._look()
            is_closing = self._is_closing.is_set()
            if self._log.last_seq >= self._next_seq:
                began_s = self._clock() if excerpt is None else began_s
                fill = partial(self._in_thread, partial(self._fill, excerpt))
                filled = await self._retried(fill, at="log")
                if filled is not None:
                    excerpt, is_full = filled
                    if is_full:
                        self._is_busy = True
                        return excerpt
            is_behind = self._log.last_seq >= self._next_seq
            if excerpt is not None and (is_closing or self._clock() - began_s >= self._config.segment_s):
                self._is_busy = False
                self._spare.clear()
                return excerpt
            if is_closing and not is_behind:
                return None
            await self._is_closed_within(self._poll_s)

    def _fill(self, excerpt: LogExcerpt | None) -> tuple[LogExcerpt | None, bool]:
        """Add the log's next records to an excerpt; return it, and whether it is to be closed. Runs in a thread."""
        try:
            for record in self._log.read(self._next_seq, past_cache=True):
                if excerpt is not None and self._is_full(excerpt, record):
                    return excerpt, True
                if (mark := self._log.nonce_of(record.seq)) is None:
                    raise GoneError("removed just now")
                if excerpt is None:
                    excerpt = LogExcerpt(
                        log_id=self._log_id,
                        mark=mark,
                        first_seq=record.seq,
                        now_us=time.time_ns() // 1000,
                        memory=self._spare.pop() if self._spare else page_memory(self._memory_bytes),
                    )
                excerpt.add(record)
                self._next_seq = record.seq + 1
        except GoneError:
            first_seq = self._log.first_seq
            self._num_lost += first_seq - self._next_seq
            fact(
                _log,
                logging.ERROR,
                "log was removed before it was archived: the archive has a gap until the next snapshot",
                from_seq=self._next_seq,
                first_seq=first_seq,
            )
            self._next_seq = first_seq
            return excerpt, excerpt is not None
        return excerpt, False

    def _is_full(self, excerpt: LogExcerpt, record: LogRecord) -> bool:
        is_too_large = excerpt.size_bytes + record.body.nbytes > self._config.segment_bytes
        return is_too_large or self._log.nonce_of(record.seq) != excerpt.mark

    async def _upload(self, excerpt: LogExcerpt, previous: asyncio.Task[None] | None, slots: asyncio.Semaphore) -> None:
        last_seq, term = excerpt.last_seq, self.term
        segment, data = await self._in_thread(
            lambda: self._archive.seal(excerpt, term=term, now_us=time.time_ns() // 1000)
        )

        def send() -> bool:
            self._check_claim(self.term)
            self._archive.send(segment, data)
            return True

        while not await self._retried(partial(self._in_thread, send)):
            pass
        if previous is not None:
            await asyncio.wait([previous])
        self._archived_seq = last_seq
        while self._samples and self._samples[0][0] <= last_seq:
            self._archived_bytes = self._samples.pop(0)[2]
        if self._is_busy and len(excerpt.memory) == self._memory_bytes:
            self._spare.append(excerpt.memory)
        slots.release()

    async def _retried(self, work: Callable[[], Awaitable[_T]], *, at: str = "store") -> _T | None:
        """Return what `work` returns; None after a failure and a pause. Raises what another attempt would not mend.

        Work `at` the "log" that succeeds says nothing of a "store" that is away, nor the other way round.
        """
        try:
            done = await work()
        except (LogFencedError, _OtherHistoryError):
            raise
        except HeadraceError as exc:  # also one that somebody has to mend at the store, such as credentials
            self._note_failure(exc, at)
        else:
            has_failed = self._errors.pop(at, None) is not None
            if not self._errors:
                self._backoff.reset()
                if has_failed:
                    fact(_log, logging.INFO, "the archive goes on", store=self._config.where)
            return done
        await self._is_closed_within(self._backoff.next_s())
        return None

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _note_failure(self, exc: HeadraceError, at: str) -> None:
        self._num_failures += 1
        if not self._errors:  # once per outage; the status has the rest
            fact(_log, logging.WARNING, "archiving fails; it is tried again", error=str(exc))
        self._errors[at] = exc

    def _look(self) -> None:
        """Note when the newest record was first seen to be durable."""
        last_seq = self._log.last_seq
        known = self._samples[-1][0] if self._samples else (self._archived_seq or 0)
        if last_seq > known:
            self._samples.append((last_seq, self._clock(), self._log.metrics.written_bytes))
            if len(self._samples) > _MAX_SAMPLES:
                del self._samples[1::2]
