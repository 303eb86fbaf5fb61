"""Whether rows that a move has loaded, which are in no log, survive what the shard's log survives."""

from __future__ import annotations

import asyncio

from headrace.paramserver.archive.archiver import Archiver
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.reshard.destination import NoSnapshotError
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import UnavailableError

__all__ = ["PartKeeper"]

# The archive is some seconds behind.
_ARCHIVE_S, _POLL_S = 60.0, 0.2


class PartKeeper:
    """Answers for one shard. Thread: the loop's."""

    def __init__(
        self,
        ingest: Ingest,
        applier: Applier,
        store: RowStore,
        shard: int,
        uploader: SnapshotUploader | None,
        archiver: Archiver | None,
    ) -> None:
        """Without an uploader, what is durable on this disk is as safe as the log is."""
        self._ingest, self._applier, self._store, self._shard = ingest, applier, store, shard
        self._uploader, self._archiver = uploader, archiver

    async def wait_safe(self, loaded_seq: int, seq: int) -> None:
        """Wait until loads that ended before record `loaded_seq`, and the log up to `seq`, are safe.

        On a server with an object store that is once its newest snapshot there, which was read back when it went up,
        has the loads, and the archive the log. Whoever has planned the move makes it, see `ReshardDriver`.

        Cancellation: harmless.

        Raises:
            NoSnapshotError: They wait for a snapshot.
            UnavailableError: They are not safe yet.
            StorageError: The disk failed.
        """
        await self._ingest.wait_durable(seq)
        await self._applier.wait_applied(seq)
        if self._store.durable_seq < seq:
            await asyncio.to_thread(self._store.flush)
        if self._uploader is None:
            return
        newest = self._uploader.newest
        if newest is None or newest.parts[self._shard].seq < loaded_seq:
            self._uploader.look_soon()
            raise NoSnapshotError(
                f"rows that came to shard {self._shard} with partitions, before seq {loaded_seq}, are in no snapshot "
                "of the object store yet",
                from_seq=loaded_seq,
            )
        if self._archiver is None:
            return
        try:
            async with asyncio.timeout(_ARCHIVE_S):
                while self._archiver.state().archived_seq < seq:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as exc:
            raise UnavailableError(f"shard {self._shard} waits for its archive, up to seq {seq}") from exc
