"""A shard's half of a snapshot: finds the cut, copies RocksDB there, and hashes the copy.

The cut is decided while records get their places in the log: when the run stands exactly at a step, every record up to
now is in and none behind it is. At that seq the applier stops for as long as the copy takes, some milliseconds besides
a flush; acks go on meanwhile. Hashing comes afterwards, in a thread: hours of it for the first snapshot of a store of
terabytes. So what has been hashed is remembered for the next attempt, and nothing is hashed for nobody.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.log.log_leases import MAX_LEASE_S, LogLeases
from headrace.paramserver.log.update_log import UpdateLog
from headrace.paramserver.snapshots.snapshot_files import FileIdentity, SnapshotFiles, hash_folder
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import CorruptionError, OverloadedError, RequestError, StorageError, UnavailableError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["SnapshotMaker"]

_MAX_WAIT_S = 3600.0
# Who removes log looks for published snapshots first and then for leases: one that is published in between has both.
_LET_GO_S = 60.0


@dataclass(frozen=True, slots=True)
class _Cut:
    seq: int
    step: int
    tables: tuple[TableSpec, ...]
    copied: asyncio.Future[None]


class SnapshotMaker:
    """Makes one shard's part of snapshots, one at a time.

    Thread: the event loop's.
    """

    def __init__(
        self,
        log: UpdateLog,
        ingest: Ingest,
        applier: Applier,
        store: RowStore,
        files: SnapshotFiles,
        cuts: LogLeases,
        *,
        server_id: str,
        shard: int,
    ) -> None:
        """Copy `store` into `files`; `cuts` keeps the log behind a cut until its snapshot can be published."""
        self._cuts = cuts
        self._log = log
        self._ingest = ingest
        self._applier = applier
        self._store = store
        self._files = files
        self._server_id = server_id
        self._shard = shard
        self._is_busy = False
        self._is_stopping = False
        self._hashed: dict[FileIdentity, SnapshotFile] = {}  # files of rows of the last attempt

    def stop(self) -> None:
        """Hash no more: the shard is about to end. Idempotent."""
        self._is_stopping = True

    def let_go(self, name: str) -> None:
        """Keep no log for a snapshot any more, soon: it is published or dropped, or nobody has begun it."""
        for lease in self._cuts.held():
            if lease.name == _lease_of(name):
                self._cuts.renew(lease.name, lease.seq, _LET_GO_S)

    async def create(self, request: Any, *, is_wanted: Callable[[], bool] = lambda: True) -> ShardPart:
        """Answer a `CreateSnapshotRequest`: wait for the cut, copy, hash.

        Args:
            request: What is asked for.
            is_wanted: Says whether the caller still waits; asked by a thread, while files are hashed.

        Raises:
            UnavailableError: The run did not come to such a step in time, or nobody waits for the part any more.
            OverloadedError: Another snapshot is being made.
            CorruptionError: A file of the store is damaged; it is named.
            StorageError: The disk failed.

        Cancellation: what was copied stays until it is swept; the shard goes on. Hashing ends, and what has been hashed
        is not read again by the next attempt.
        """
        if request.epoch < 0 or request.wait_ms < 0:
            raise RequestError(f"epoch {request.epoch} or a wait of {request.wait_ms} ms is out of range")
        folder = self._files.new_folder(request.name) / shard_folder(self._shard)
        if self._files.folder_of(request.name).exists():
            raise RequestError(f"there is a snapshot {request.name!r} already")
        if self._is_busy:
            raise OverloadedError("another snapshot is being made", retry_after_s=1.0)
        self._is_busy = True
        abandoned = threading.Event()
        try:
            await asyncio.to_thread(_make_place, folder)
            # Now, so that there is little left to flush while the applier stands.
            await asyncio.to_thread(self._store.flush)
            cut = await self._wait_for_cut(request, folder)
            await cut.copied
            hashed = await asyncio.to_thread(self._hash, folder, lambda: is_wanted() and not abandoned.is_set())
            # Others may hash for as long as a call takes. `let_go` is told of the end, unless the caller was killed.
            self._cuts.renew(_lease_of(request.name), cut.seq + 1, MAX_LEASE_S)
        except BaseException:
            self._cuts.renew(_lease_of(request.name), 1, 0)
            raise
        finally:
            abandoned.set()
            self._is_busy = False
        return ShardPart(
            shard=self._shard,
            server_id=self._server_id,
            seq=cut.seq,
            epoch=request.epoch,
            step=cut.step,
            tables=cut.tables,
            files=hashed,
            mark=self._log.mark_of(cut.seq),
        )

    def _hash(self, folder: Path, is_wanted: Callable[[], bool]) -> tuple[SnapshotFile, ...]:
        def check_wanted(_: int) -> None:
            if self._is_stopping or not is_wanted():
                raise UnavailableError("the snapshot is not made: the shard stops, or nobody waits for it any more")

        # Once the copy has its links: until then an inode may be given to another file.
        known = self._hashed | self._files.row_files_of_newest(self._server_id)
        self._hashed = known
        try:
            hashed = hash_folder(folder, known=known, is_checked=True, on_progress=check_wanted)
        except CorruptionError as exc:
            what = str(exc).replace(str(folder), str(self._store.path))
            raise CorruptionError(
                f"shard {self._shard}: {what}; no snapshot is made of a damaged store: "
                '"A damaged store" in docs/operations.md says how to mend it'
            ) from exc
        sizes = {(file.size_bytes, file.crc32c) for file in hashed}  # those of files that have gone are of no use
        self._hashed = {key: file for key, file in known.items() if (file.size_bytes, file.crc32c) in sizes}
        return hashed

    async def _wait_for_cut(self, request: Any, folder: Path) -> _Cut:
        cut = self._cut_here(request, folder)
        if cut is not None:
            return cut
        found: asyncio.Future[_Cut] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if found.done():
                return
            here = self._cut_here(request, folder)
            if here is not None:
                found.set_result(here)

        self._ingest.on_accepted = look
        try:
            async with asyncio.timeout(min(request.wait_ms / 1000, _MAX_WAIT_S)):
                return await found
        except TimeoutError as exc:
            watermark = self._ingest.sessions.watermark_of(request.epoch)
            raise UnavailableError(
                f"epoch {request.epoch} has not stood exactly at a step from {request.min_step} on within "
                f"{format_seconds(request.wait_ms / 1000)}; its watermark on shard {self._shard} is {watermark}: "
                "a rank of it is amid a step or has gone; wait, name another --run, or cut --now, at no step"
            ) from exc
        finally:
            self._ingest.on_accepted = None

    def _cut_here(self, request: Any, folder: Path) -> _Cut | None:
        """Order the copy at the last record that has its place, if the run stands exactly at a good step there."""
        step = self._ingest.sessions.exact_step_of(request.epoch) if request.epoch else -1
        if step is None or (request.epoch and step < request.min_step):
            return None
        seq = self._ingest.accepted_seq
        copied = self._applier.run_at(seq, lambda: self._store.checkpoint(folder))
        tables = tuple(table.spec for table in self._ingest.catalog)
        self._cuts.renew(_lease_of(request.name), seq + 1, MAX_LEASE_S)
        return _Cut(seq, step, tables, copied)


def _lease_of(name: str) -> str:
    return f"snapshot {name}"


def _make_place(folder: Path) -> None:
    """Make the directory in which `folder` will be, without what an attempt that was killed has left in it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as exc:
        raise StorageError(f"{folder}: {exc.strerror or exc}") from exc
