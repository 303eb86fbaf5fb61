"""Make a shard's part of a snapshot: find the consistent cut, copy RocksDB there, and hash the copy.

The cut is found as records get their positions in the log: when the run stands exactly at a step, the snapshot has
every record up to now and none after. At that seq the applier stops while RocksDB is copied, for some milliseconds
besides a flush; acks continue. Hashing follows in a thread. It takes hours for the first snapshot of a store of
terabytes, so the next attempt reuses its results, and it stops when nobody waits for them.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.log.leases import MAX_LEASE_S, LogLeases
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.snapshots.directory import FileIdentity, SnapshotFiles, hash_folder, mapped_errors
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import CorruptionError, GoneError, OverloadedError, RequestError, UnavailableError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["SnapshotMaker"]

_MAX_WAIT_S = 3600.0
# Retention looks for published snapshots first and then for leases, so a snapshot published in between needs both.
_RELEASE_S = 60.0


class _Ingest(Protocol):
    """What a maker needs of ingest: how far the writers are, and a call when they get further."""

    catalog: Catalog
    sessions: Sessions
    on_accepted: Callable[[], None] | None

    @property
    def accepted_seq(self) -> int: ...


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
        ingest: _Ingest,
        applier: Applier,
        store: RowStore,
        files: SnapshotFiles,
        leases: LogLeases,
        server_id: str,
        shard: int,
        *,
        term: int = 0,
    ) -> None:
        """Copy `store` into `files`; `leases` keep the log behind a cut until its snapshot is published."""
        self._log, self._ingest, self._applier, self._store = log, ingest, applier, store
        self._files, self._leases = files, leases
        self._server_id, self._shard, self._term = server_id, shard, term
        self._is_busy = self._is_stopping = False
        self._hashed: dict[FileIdentity, SnapshotFile] = {}  # files of rows of the last attempt
        self._made: tuple[str, ShardPart] | None = None  # the last part, and its snapshot's name

    def stop(self) -> None:
        """Stop hashing, because the shard is about to end; idempotent."""
        self._is_stopping = True

    def release_log(self, name: str) -> None:
        """End the log lease of a snapshot soon, because it is published or discarded."""
        for lease in self._leases.held():
            if lease.name == _lease_of(name):
                self._leases.renew(lease.name, lease.seq, _RELEASE_S)

    def made(self, name: str) -> ShardPart:
        """Return the part that was made last; `GoneError` if it is of another snapshot, or the shard has restarted."""
        if self._made is None or self._made[0] != name:
            raise GoneError(f"shard {self._shard} has no part of snapshot {name!r}: make the snapshot again")
        return self._made[1]

    async def create(self, request: Any, *, is_wanted: Callable[[], bool] = lambda: True) -> ShardPart:
        """Answer an `idl.CreateSnapshotRequest`: wait for the cut, copy, hash, while `is_wanted`, which threads call.

        Raises:
            UnavailableError: The run did not reach such a step in time, or the caller is gone.
            OverloadedError: Another snapshot is being made.
            CorruptionError: A file of the store is damaged; the message names it.
            StorageError: The disk failed.

        Cancellation: the copy stays until it is pruned. Hashing ends; the next attempt reuses its results.
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
            await asyncio.to_thread(_prepare, folder)
            # Now, so that little is left to flush while the applier stops.
            await asyncio.to_thread(self._store.flush)
            cut = await self._wait_for_cut(request, folder)
            await cut.copied
            hashed = await asyncio.to_thread(self._hash, folder, lambda: is_wanted() and not abandoned.is_set())
            # Other shards may hash for as long as a call takes. Then `release_log` is called, unless the caller dies.
            self._leases.renew(_lease_of(request.name), cut.seq + 1, MAX_LEASE_S)
        except BaseException:
            self._leases.renew(_lease_of(request.name), 1, 0)
            raise
        finally:
            abandoned.set()
            self._is_busy = False
        part = ShardPart(
            shard=self._shard,
            server_id=self._server_id,
            seq=cut.seq,
            epoch=request.epoch,
            step=cut.step,
            tables=cut.tables,
            files=hashed,
            mark=self._log.nonce_of(cut.seq),
            term=self._term,
        )
        self._made = request.name, part
        return part

    def _hash(self, folder: Path, is_wanted: Callable[[], bool]) -> tuple[SnapshotFile, ...]:
        def check_wanted(_: int) -> None:
            if self._is_stopping or not is_wanted():
                raise UnavailableError("the snapshot is not made: the shard stops, or nobody waits for it")

        # Only after the copy has made its links: until then, another file may get an inode.
        known = self._hashed | self._files.row_files_of_newest(self._server_id)
        self._hashed = known
        try:
            hashed = hash_folder(folder, known=known, is_checked=True, on_progress=check_wanted)
        except CorruptionError as exc:
            what = str(exc).replace(str(folder), str(self._store.path))
            raise CorruptionError(
                f"shard {self._shard}: {what}; no snapshot is made of a damaged store: "
                '"A damaged store" in docs/operations.md says how to repair it'
            ) from exc
        sizes = {(file.size_bytes, file.crc32c) for file in hashed}  # forget files that are gone
        self._hashed = {key: file for key, file in known.items() if (file.size_bytes, file.crc32c) in sizes}
        return hashed

    async def _wait_for_cut(self, request: Any, folder: Path) -> _Cut:
        if (cut := self._cut_here(request, folder)) is not None:
            return cut
        found: asyncio.Future[_Cut] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if not found.done() and (here := self._cut_here(request, folder)) is not None:
                found.set_result(here)

        self._ingest.on_accepted = look
        try:
            async with asyncio.timeout(min(request.wait_ms / 1000, _MAX_WAIT_S)):
                return await found
        except TimeoutError as exc:
            watermark = self._ingest.sessions.watermark_of(request.epoch)
            raise UnavailableError(
                f"epoch {request.epoch} has not stood exactly at a step from {request.min_step} on; its watermark on "
                f"shard {self._shard} is {watermark}: a rank is in mid-step, or away; wait, start it again, name "
                "another --run, or use --now, at no step"
            ) from exc
        finally:
            self._ingest.on_accepted = None

    def _cut_here(self, request: Any, folder: Path) -> _Cut | None:
        """Order a copy at the last record with a position, if the run stands exactly at a late enough step there."""
        step = self._ingest.sessions.exact_step_of(request.epoch) if request.epoch else -1
        if step is None or (request.epoch and step < request.min_step):
            return None
        seq = self._ingest.accepted_seq
        copied = self._applier.run_at(seq, lambda: self._store.checkpoint(folder))
        tables = tuple(table.spec for table in self._ingest.catalog)
        self._leases.renew(_lease_of(request.name), seq + 1, MAX_LEASE_S)
        return _Cut(seq, step, tables, copied)


def _lease_of(name: str) -> str:
    return f"snapshot {name}"


def _prepare(folder: Path) -> None:
    """Create the parent of `folder`, and remove what a killed attempt has left in `folder`."""
    with mapped_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
