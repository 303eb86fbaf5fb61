"""A shard's end of snapshots in an object store: its part goes up, a manifest is published, the newest one is known.

A part is uploaded from the copy that `SnapshotMaker` has made, in a thread of low priority. The copy goes when the
snapshot is published or dropped, so shards need no common disk. Log is kept behind the newest snapshot that the store
has, as far as this shard knows: behind all that it has when it has never seen the store, and behind a part that it has
uploaded until it knows whether that was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, Self, TypeVar

from headrace.paramserver.log.leases import LogLease
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.directory import FileIdentity, SnapshotFiles
from headrace.paramserver.system.event_loop import lower_thread_priority
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.object_store import Content, ObjectStore, RateLimit
from headrace.schemas.errors import HeadraceError, OverloadedError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder

__all__ = ["SnapshotUploader"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A snapshot may be removed by anybody. Keeping log longer than needed costs disk within a bound.
_LOOK_INTERVAL_S = 300.0
_RETRY_INTERVAL_S = 30.0
_WANTED_INTERVAL_S = 0.5
# An upload, and a look or a manifest beside it.
_NUM_THREADS = 2


@dataclass(slots=True)
class _Progress:
    """Of the last upload; bytes count when a file is known to be in the store."""

    name: str = ""
    is_running: bool = False
    size_bytes: int = 0
    done_bytes: int = 0
    sent_bytes: int = 0
    failure: str | None = None


class SnapshotUploader:
    """Uploads one shard's part of snapshots, one at a time. Use it with `async with`.

    No failure of the store stops the shard: uploads raise, looks are repeated.

    Attributes:
        newest: The newest snapshot of this server in the store, as of the last look.

    Thread: the event loop's.
    """

    def __init__(
        self,
        objects: ObjectStore,
        files: SnapshotFiles,
        *,
        server_id: str,
        shard: int,
        first_seq: int | None,
        check_claim: Callable[[], None] = lambda: None,
        num_kept: int = 1,
    ) -> None:
        """Upload from `files`; until the store was seen, keep the log from `first_seq` on, if there is one.

        Afterwards the log is kept behind the last `num_kept` snapshots, 1 or 2: a shard whose disk is not where its log
        is comes back from a snapshot, and if that one proves unreadable, from the one before.

        `check_claim` raises `LogFencedError` once another copy of the shard is the right one. It is called in threads
        before and after each upload and before a snapshot is published: an old copy must not add to the store.
        """
        self._objects, self._store, self._files = objects, SnapshotStore(objects), files
        self._uploading = objects.share()  # of the last upload, which may have to end without the rest
        self._server_id, self._shard, self._check_claim = server_id, shard, check_claim
        self._num_kept = num_kept
        self.newest: SnapshotManifest | None = None
        self._contents: dict[FileIdentity, Content] = {}
        self._progress, self._counting = _Progress(), threading.Lock()
        # Until the store was seen, its newest snapshot may be followed by all log that is here.
        self._kept = [] if first_seq is None else [LogLease("the newest stored snapshot", first_seq, math.inf)]
        self._last: LogLease | None = None  # behind the part that went up last, under the snapshot's name
        self._settling: dict[str, LogLease] = {}  # behind parts that may have been published since the last look
        self._look_wanted = asyncio.Event()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "headrace-upload", initializer=lower_thread_priority)
        self._task: asyncio.Task[NoReturn] | None = None

    @classmethod
    def open(
        cls,
        url: str,
        files: SnapshotFiles,
        *,
        bytes_per_s: int,
        server_id: str,
        shard: int,
        first_seq: int | None,
        check_claim: Callable[[], None] = lambda: None,
        num_kept: int = 1,
    ) -> Self:
        """Return the uploader to a URL; `ConfigError` if it is wrong. The store is not asked yet."""
        objects = ObjectStore.of_url(url, rate=RateLimit(bytes_per_s))
        return cls(
            objects,
            files,
            server_id=server_id,
            shard=shard,
            first_seq=first_seq,
            check_claim=check_claim,
            num_kept=num_kept,
        )

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_looking(), name="headrace-stored-snapshots")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop()
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def stop(self) -> None:
        """End what is under way soon, because the shard is about to end; idempotent."""
        self._objects.close()
        self._uploading.close()

    async def upload(self, name: str, part: ShardPart, *, is_wanted: Callable[[], bool]) -> dict[str, str]:
        """Put this shard's part into the store, and read back what was sent; return the object of each file, by path.

        What an interrupted call has sent is not sent again.

        Raises:
            OverloadedError: Another upload is under way.
            LogFencedError: Another copy of the shard is the right one.
            UnavailableError: The store is away, or nobody waits any more (`is_wanted`, called in threads).
            HeadraceError: As `SnapshotStore.upload_files`.

        Cancellation: the upload ends.
        """
        if self._progress.is_running:
            raise OverloadedError("another part is on its way to the object store", retry_after_s=1.0)
        self._progress = _Progress(name=name, is_running=True, size_bytes=part.size_bytes)
        progress, self._uploading = self._progress, self._objects.share()
        uploading = self._uploading
        work = self._in_thread(lambda: self._upload(SnapshotStore(uploading), name, part, is_wanted, progress))
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                await asyncio.wait([working], timeout=_WANTED_INTERVAL_S)
                if not is_wanted():
                    uploading.close()  # it may be waiting for a store that is away
        except asyncio.CancelledError:
            uploading.close()
            raise
        objects = await working
        self._last = LogLease(name, part.seq + 1, math.inf)
        return objects

    def _upload(
        self, store: SnapshotStore, name: str, part: ShardPart, is_wanted: Callable[[], bool], progress: _Progress
    ) -> dict[str, str]:
        def count(num_bytes: int) -> None:
            if not is_wanted():
                raise UnavailableError("the upload ends: nobody waits for it")
            with self._counting:
                progress.done_bytes += num_bytes

        def count_sent(num_bytes: int) -> None:
            with self._counting:
                progress.sent_bytes += num_bytes

        try:
            self._check_claim()
            objects = store.upload_files(
                self._files.new_folder(name),
                {f"{shard_folder(self._shard)}/{file.name}": file for file in part.files},
                server_id=self._server_id,
                contents=self._contents,
                on_progress=count,
                on_sent=count_sent,
            )
            self._check_claim()
            return objects
        except BaseException as exc:
            progress.failure = str(exc) or type(exc).__name__
            raise
        finally:
            progress.is_running = False
            facts = {"name": name, "bytes": progress.done_bytes, "sent_bytes": progress.sent_bytes}
            if progress.failure is None:
                fact(_log, logging.INFO, "a part of a snapshot is in the object store", **facts)
            else:
                fact(_log, logging.WARNING, "a part of a snapshot did not go up", **facts, error=progress.failure)

    async def publish(self, manifest: SnapshotManifest, objects: Mapping[str, str]) -> None:
        """Make a snapshot of what all shards have uploaded; safe to repeat; raises as `SnapshotStore.publish`.

        Cancellation: it is published or not.
        """
        await self._in_thread(lambda: self._publish(manifest, objects))

    def _publish(self, manifest: SnapshotManifest, objects: Mapping[str, str]) -> None:
        self._check_claim()
        self._store.publish(manifest, objects)

    def settle(self, name: str) -> None:
        """Find out whether a snapshot was published, because its copy goes now; keep log for it until that is known."""
        if self._last is not None and self._last.name == name:
            self._settling[name], self._last = self._last, None
            self._look_wanted.set()

    def leases(self) -> list[LogLease]:
        """Return leases on the log behind the newest snapshots in the store, and on what may be behind them."""
        return [*self._settling.values(), *self._kept]

    def status(self) -> Any:
        """Return the `idl.UploadStatus`."""
        with self._counting:
            return idl.UploadStatus(url=self._objects.where, **dataclasses.asdict(self._progress))

    async def _keep_looking(self) -> NoReturn:
        while True:
            self._look_wanted.clear()
            settling, interval_s = list(self._settling), _LOOK_INTERVAL_S
            try:
                kept = await self._in_thread(self._look)
                self.newest = kept[-1] if kept else None
                self._kept = [self._lease_behind(manifest) for manifest in kept]
                for name in settling:
                    del self._settling[name]
            except HeadraceError as exc:
                interval_s = _RETRY_INTERVAL_S
                fact(_log, logging.WARNING, "the object store cannot be read; log is kept for it", error=str(exc))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._look_wanted.wait()

    def _look(self) -> list[SnapshotManifest]:
        """Return the newest snapshots behind which the log is kept, oldest first."""
        newest = [self._store.newest()] if self._num_kept == 1 else self._store.list()[-self._num_kept :]
        return [
            manifest
            for manifest in newest
            if manifest is not None and manifest.server_id == self._server_id and self._shard < len(manifest.parts)
        ]

    def _lease_behind(self, manifest: SnapshotManifest) -> LogLease:
        return LogLease(f"snapshot {manifest.name}", manifest.parts[self._shard].seq + 1, math.inf)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
