"""What a store has of some partitions: copied out of it, loaded into another one, digested, purged.

Copies and digests are of the store as it was at one record of its log: of a checkpoint beside it, whose files are read
without RocksDB. A load and a purge write in the applier's thread, some megabytes at a time, so the shard goes on. Rows
that are loaded, and those that are left to purge, are of partitions that the shard does not own: nothing serves them.

What a store has loaded is in no log. Its metadata says it, so a checkpoint has rows and word of them together.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.move_records import Move

__all__ = ["CopiedChunk", "PartitionContents", "PartitionCopy"]


class _Ingest(Protocol):
    """What is needed of ingest."""

    catalog: Catalog
    partitions: ShardPartitions

    @property
    def accepted_seq(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedChunk:
    """A piece of a copy.

    Attributes:
        data: About a MiB; what `PartitionContents.load` takes.
        num_rows: Rows and tombstones in it, counted once for each column shard.
        is_last: No chunk follows.
    """

    data: bytes
    num_rows: int
    is_last: bool


class PartitionCopy:
    """A copy that is being read. Thread: the loop's; the work is done in a thread.

    Attributes:
        seq: c: the copy has what the records up to here have made of the partitions. They are durable.
    """

    seq: int

    async def chunk(self, number: int) -> CopiedChunk:
        """Return a chunk, from 0: the one after the last, or the last once more.

        Cancellation: repeat the call.

        Raises:
            GoneError: Another chunk than these, or the copy is closed: copy anew.
            StorageError: The disk failed.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End the copy and free its files. Idempotent."""
        raise NotImplementedError


class PartitionContents:
    """Copies, loads, digests and purges partitions of one shard's store. Thread: the loop's, for every method."""

    def __init__(
        self, ingest: _Ingest, applier: Applier, store: RowStore, folder: Path, meta: Mapping[bytes, bytes]
    ) -> None:
        """Work on `store`, whose metadata is `meta`, once the log is recovered.

        `folder` is for checkpoints: on the store's file system, nobody else's. What it holds is removed.
        """
        raise NotImplementedError

    async def copy(self, partitions: Sequence[int]) -> PartitionCopy:
        """Begin a copy of partitions as of the last accepted record (`Ingest.accepted_seq` when this is called).

        Chunks have rows with states, versions and identities, tombstones, and identity claims. What is the whole
        shard's (tables, floors, fences …) is not there: `ingest/shared_state.py` packs it. Pack it when this has
        returned, and put it into the destination's log before the load: it only rises, so later than c is as good.

        Cancellation: nothing is left.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        raise NotImplementedError

    async def load(self, move: Move, copy_seq: int, chunks: AsyncIterable[bytes]) -> None:
        """Put all chunks of a copy into the store, after removing what is there of the move's partitions.

        `copy_seq` is the seq of the COPY record; it and the shared state are durable, and no record behind it writes
        the partitions before this returns. Then everything is durable, and `is_loaded`. Rows of tables that were
        dropped here are left out. One load or purge runs at a time.

        Cancellation, or an error of `chunks`: the next load begins anew.

        Raises:
            CorruptionError: A chunk is damaged, or of a table that was never here.
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        raise NotImplementedError

    def is_loaded(self, move: Move, copy_seq: int) -> bool:
        """Return whether the store has all of the copy that was loaded at record `copy_seq`."""
        raise NotImplementedError

    async def digest(self, partitions: Sequence[int]) -> tuple[int, bytes]:
        """Return the last accepted record, by now durable, and a digest of the partitions as of that record.

        Digests of two stores are equal if and only if (but for chance) rows are, with values, states, versions, times
        and identities, and tombstones that are above their table's floor. Claims follow from the same records; they
        are not compared, because those of other partitions' rows may hide some at one store and not at the other.

        Cancellation, errors: as `copy`.
        """
        raise NotImplementedError

    async def purge(self) -> None:
        """Remove all rows, tombstones and claims of the partitions that are left to purge (`Moves.unpurged`).

        A PURGE record leaves its partitions to purge; the store's metadata keeps that until they are removed. So call
        this after each such record, and at start: it returns at once if nothing is left. In bounded batches; nothing
        in RocksDB or in the log tells later that the rows were there.

        Cancellation: the next call, or the next start, goes on.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        raise NotImplementedError
