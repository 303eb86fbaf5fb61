"""The stores of a server that is being built, and the rows that come into them from the logs of another one.

Each log is taken as its shard took it, by a `ShardState` of its own. A row is of one shard there, so one log orders it.
A table that was dropped is another one than a later table of the same name: the first log that tells of the drop
decides, and rows that other logs still have from before are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from headrace.paramserver.ingest.shard_state import ShardState
from headrace.paramserver.log.interface import KIND_HELLO, LogRecord, is_housekeeping
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reshard.row_split import split_rows
from headrace.paramserver.snapshots.contents import StoreReader
from headrace.paramserver.snapshots.new_data_dir import FIRST_SEQ, StoreBuilder
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.catalog import Catalog, Table
from headrace.paramserver.store.deltas import Batch, RowDelta
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.durable import fsync_tree
from headrace.paramserver.system.event_loop import run_in_thread_to_end
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.version import MAX_EPOCH

__all__ = ["NewShards", "cut_rows"]

# All stores together: what is applied before it is written, and RocksDB's memtables.
_MAX_BACKLOG_BYTES, _WRITE_BUFFER_BYTES = 512 << 20, 64 << 20
_CACHE_BYTES = 64 << 20
# Python objects of one delta that waits.
_DELTA_BYTES = 2048


def cut_rows(
    reader: StoreReader,
    states: Sequence[ShardState],
    target: Path,
    *,
    num_shards: int,
    work: str,
    is_wanted: Callable[[str], bool] = lambda _: True,
    on_rows: Callable[[int], None] = lambda _: None,
) -> StoreBuilder:
    """Make the stores of a new server of the rows of an old one, for `NewShards`. It blocks.

    Args:
        reader: The rows.
        states: The old shards, those without a store too.
        target: The new directory.
        num_shards: Of the new server.
        work: See `NewDataDir`.
        is_wanted: Returns whether a table is taken, by its name.
        on_rows: Called with the number of rows just taken. What it raises ends the work, and nothing remains.

    Raises:
        ConfigError: The target is not empty.
        CorruptionError: A file is damaged.
        StorageError: A disk failed.
    """
    specs = [reader.tables[fqn] for fqn in sorted(reader.tables) if is_wanted(fqn)]
    with ExitStack() as stack:
        builder = stack.enter_context(StoreBuilder(target, num_shards=num_shards, specs=specs, run=work, work=work))
        for state in states:
            builder.take_history(state.catalog)
        for spec in specs:
            # As they are, not as whole rows: in each column the newest record counts, and some may be to come.
            for shard in reader.layouts(spec.fqn):
                for row_ids, records in reader.records(spec.fqn, shard):
                    builder.add_records(spec.fqn, row_ids, records, shard)
                    on_rows(row_ids.size)
        builder.finish_stores({})
        stack.pop_all()
    return builder


class NewShards:
    """The shards of the new server. Use it with `async with`. Thread: the event loop's.

    Attributes:
        num_rows: Rows that came from logs, deleted ones included.
        is_published: It is decided: the directory has its name.
    """

    def __init__(
        self,
        builder: StoreBuilder,
        states: Sequence[ShardState],
        *,
        num_shards: int,
        num_skipped_epochs: int = 0,
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Go on from what `cut_rows` has made of the old shards' states, and with the same choice of tables.

        `num_skipped_epochs` are those that trainers may have taken since, and no trainer takes here.
        """
        self.num_rows, self.is_published = 0, False
        self._directory, self._catalog, self._states = builder.directory, builder.catalog, states
        self._num_shards, self._num_skipped_epochs, self._is_wanted = num_shards, num_skipped_epochs, is_wanted
        self._meta: dict[bytes, bytes] = {}
        self._stores: list[RowStore] = []
        self._appliers: list[Applier] = []
        self._seqs = [FIRST_SEQ] * num_shards
        self._last_seq = FIRST_SEQ
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        config = StoreConfig(block_cache_bytes=_CACHE_BYTES, write_buffer_bytes=_WRITE_BUFFER_BYTES)
        applier_config = ApplierConfig(window_bytes=_MAX_BACKLOG_BYTES // 2 // self._num_shards)
        async with AsyncExitStack() as stack:
            for shard in range(self._num_shards):
                path = self._directory.shard_path(shard) / "store"
                store = await asyncio.to_thread(RowStore.open, path, config=config)
                stack.push_async_callback(asyncio.to_thread, store.close)
                self._stores.append(store)
                self._appliers.append(await stack.enter_async_context(Applier(store, config=applier_config)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def take(self, shard: int, record: LogRecord) -> Batch:
        """Take the next record of an old shard's log; return its batch.

        Raises:
            CorruptionError: It is not the shard's next record.
        """
        state = self._states[shard]
        batch = state.batch_of_record(record)
        is_hello = record.header.get("kind") == KIND_HELLO and not is_housekeeping(record.header)
        dropped = self._follow_tables(state.catalog) if is_hello else ()
        parts: dict[int, list[RowDelta]] = {}
        for delta in batch.deltas:
            self.num_rows += delta.row_ids.size
            self.num_rows += 0 if delta.deleted_row_ids is None else delta.deleted_row_ids.size
            if (table := self._table_of(state.catalog, delta.spec.fqn)) is not None:
                for target, rows in split_rows(delta, table, self._num_shards).items():
                    parts.setdefault(target, []).append(rows)
        for target in range(self._num_shards) if dropped else parts:
            self._submit(target, batch, parts.get(target, []), dropped)
        return batch

    async def wait_below(self, max_bytes: int = _MAX_BACKLOG_BYTES) -> None:
        """Wait until at most so many bytes of rows wait to be written. Cancellation: harmless."""
        for applier in self._appliers:
            await applier.wait_below(max_bytes // self._num_shards)

    async def finish(self) -> None:
        """Write all that was taken, for `publish`.

        Raises:
            StorageError: The disk failed.

        Cancellation: waits for what has begun.
        """
        for applier, seq in zip(self._appliers, self._seqs, strict=True):
            await applier.wait_applied(seq)
        for applier in self._appliers:
            await applier.close()
        self._last_seq = max(self._seqs) + 1
        meta = self._meta | self._catalog.take_from([state.catalog for state in self._states])
        sessions = Sessions.merged([state.sessions for state in self._states])
        sessions.raise_epoch(min(sessions.highest_epoch + self._num_skipped_epochs, MAX_EPOCH - 1))
        self._directory.open_session(sessions, self._directory.work)
        meta |= sessions.packed()

        def finish(store: RowStore) -> None:
            store.write([], [], meta=meta, applied_seq=self._last_seq)
            store.flush()
            store.close()
            with self._directory.mapped_errors():
                fsync_tree(store.path)

        await asyncio.gather(*(run_in_thread_to_end(partial(finish, store)) for store in self._stores))

    async def publish(self, predecessors: Sequence[Predecessor]) -> None:
        """Give the directory its name: then it is decided. REQUIRES: `finish` has returned.

        Raises:
            ConfigError: The directory exists by now.
            StorageError: The disk failed; there is no new server.

        Cancellation: waits for the end.
        """
        specs = [table.spec for table in self._catalog]

        def publish() -> None:
            try:
                self._directory.publish(self._directory.work, specs, seq=self._last_seq, predecessors=predecessors)
            finally:  # it has been renamed, though its disk may fail just then
                self.is_published = not self._directory.shard_path(0).exists()

        await run_in_thread_to_end(publish)

    def _submit(self, target: int, batch: Batch, deltas: Sequence[RowDelta], dropped: tuple[int, ...]) -> None:
        self._seqs[target] += 1
        self._appliers[target].submit(
            Batch(
                seq=self._seqs[target],
                epoch=batch.epoch,
                step=batch.step,
                time_us=batch.time_us,
                deltas=tuple(deltas),
                size_bytes=sum(sum(map(len, delta.columns.values())) + _DELTA_BYTES for delta in deltas),
                dropped=dropped,
            )
        )

    def _follow_tables(self, source: Catalog) -> tuple[int, ...]:
        """Drop, make and grow tables here as an old shard's log says; return the numbers of those that are dropped."""
        dropped = []
        for name, epoch in source.drop_epochs.items():
            if epoch > self._catalog.drop_epochs.get(name, 0):
                known = self._catalog.get(name)
                dropped += [known.table_id] if known is not None else []
                self._meta |= self._catalog.drop([name], epoch)
        self._meta |= self._catalog.take_history(source)
        for table in source:
            name = table.spec.fqn
            is_same = source.drop_epochs.get(name, 0) == self._catalog.drop_epochs.get(name, 0)
            if is_same and self._is_wanted(name):
                self._meta |= self._catalog.take_table(table)
        return tuple(dropped)

    def _table_of(self, source: Catalog, name: str) -> Table | None:
        """Return the table here whose rows an old shard has sent; None if it was dropped in the meantime."""
        is_same = source.drop_epochs.get(name, 0) == self._catalog.drop_epochs.get(name, 0)
        return self._catalog.get(name) if is_same else None
