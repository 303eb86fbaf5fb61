"""A server's directory made whole from rows that come in order: for a backfill into a place where there is nothing yet.

No update log and no memtable is on the way: each shard's rows go to files of RocksDB's format, which RocksDB takes in
at the end, all at once, at its lowest level. So they are written once, and never compacted until they are updated.

    shard-0000/incoming/000001.sst …   until all rows are in
    shard-0000/store                   then

`new_data_dir.py` has the rest of the directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import rocksdict

from headrace.paramserver.files.direct_file import write_buffer
from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.ingest.sessions import Sessions
from headrace.paramserver.snapshots.new_data_dir import FIRST_SEQ, NewDataDir
from headrace.paramserver.store.catalog import INDEXED_PREFIX, Catalog, Scalar, Table
from headrace.paramserver.store.pending import Run
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.paramserver.store.table_file import TableFileWriter
from headrace.schemas.errors import StorageError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import TableSpec

__all__ = ["StoreBuilder"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
# A file of each shard is written at a time, and 8 bytes of each of its rows stay in memory until it ends.
_ALL_FILES_BYTES, _MIN_FILE_BYTES, _MAX_FILE_BYTES = 2 << 30, 64 << 20, 256 << 20


class StoreBuilder:
    """Makes a server's directory. Use it with `with`: unless `finish` returns, nothing is left.

    Thread: any without an event loop, one at a time; it blocks.

    Attributes:
        num_rows: Rows that were added.
    """

    def __init__(
        self,
        target: Path,
        *,
        num_shards: int,
        specs: Sequence[TableSpec],
        run: str,
        work: str = "backfill",
        file_bytes: int | None = None,
    ) -> None:
        """Begin.

        Args:
            target: The directory to make; not there yet, or empty.
            num_shards: Of the server.
            specs: Its tables, in the order in which their rows will come.
            run: Name of the session that stands for whoever has brought the rows.
            work: What makes the directory, in a word.
            file_bytes: Length of a file of rows, about; a few bytes of memory for each of its rows. None for what
                suits a store of terabytes: each file costs time in many places, and none is long enough to be felt.

        Raises:
            ConfigError: The target is not empty, or is being made by another process.
            StorageError: The disk failed.
        """
        self.num_rows = 0
        self._run = run
        self._catalog = Catalog({})
        self._meta = self._catalog.add(specs)
        self._max_epoch = 1
        self._table: Table | None = None
        self._finished_tables: set[str] = set()
        self._last_row = -1
        self._directory = NewDataDir(target, num_shards=num_shards, work=work)
        default_bytes = min(max(_ALL_FILES_BYTES // num_shards, _MIN_FILE_BYTES), _MAX_FILE_BYTES)
        with self._directory.mapped_errors():
            self._shards = [
                _ShardFiles(self._directory.shard_path(shard), file_bytes or default_bytes)
                for shard in range(num_shards)
            ]

    def add(self, fqn: str, chunk: RowChunk) -> None:
        """Add rows: a table's all before the next one's, ascending.

        Raises:
            RequestError: Rows do not come in order, or an id or a version is out of range.
            StorageError: The disk failed.
        """
        table = self._table
        if table is None or table.spec.fqn != fqn:
            table = self._begin_table(fqn)
        chunk.check(table.spec, after_row=self._last_row)
        if not chunk.row_ids.size:
            return
        self._last_row = int(chunk.row_ids[-1])
        self._put(table, chunk.row_ids, chunk.records(table.layout_of(table.spec.whole)))

    def add_records(self, fqn: str, row_ids: _Ids, records: _Array) -> None:
        """Add rows as a store has them, deleted ones too; otherwise as `add`.

        Args:
            fqn: Table.
            row_ids: int64[n].
            records: `RecordLayout(spec, spec.whole).dtype`[n].

        Raises:
            StorageError: The disk failed.
        """
        table = self._table
        if table is None or table.spec.fqn != fqn:
            table = self._begin_table(fqn)
        if row_ids.size:
            assert int(row_ids[0]) > self._last_row, "rows come in the order of their ids"
            self._last_row = int(row_ids[-1])
            self._put(table, row_ids, records)

    def set_scalars(self, fqn: str, scalars: Iterable[Scalar]) -> None:
        """Keep values that a table has once, on every shard."""
        for scalar in scalars:
            value = (scalar.name, scalar.dtype, scalar.data)
            self._meta |= self._catalog.set_scalars(fqn, [value], scalar.epoch, scalar.step)
            self.raise_epoch(scalar.epoch)

    def raise_epoch(self, epoch: int) -> None:
        """Have trainers take epochs above this one, as above those of all rows."""
        self._max_epoch = max(self._max_epoch, epoch)

    def _put(self, table: Table, row_ids: _Ids, records: _Array) -> None:
        self.raise_epoch(int(np.max(records["epoch"])))
        self.num_rows += row_ids.size
        with self._directory.mapped_errors():
            if len(self._shards) == 1:
                self._shards[0].add(table, row_ids, records)
                return
            shards = shards_of_rows(table_seed(table.spec.fqn), row_ids, len(self._shards))
            for number, files in enumerate(self._shards):
                rows = np.flatnonzero(shards == number)
                if rows.size:
                    files.add(table, row_ids[rows], records[rows])

    def _begin_table(self, fqn: str) -> Table:
        assert fqn not in self._finished_tables, f"rows of {fqn!r} after those of another table"
        if self._table is not None:
            self._finished_tables.add(self._table.spec.fqn)
        self._table, self._last_row = self._catalog.find(fqn), -1
        with self._directory.mapped_errors():
            for files in self._shards:
                files.end_file()
        return self._table

    def finish(self) -> None:
        """Give the directory its name, durably.

        Raises:
            ConfigError: Somebody has made it meanwhile.
            StorageError: The disk failed; it is not there.
        """
        # The index of identities is made by the first start.
        meta = {key: value for key, value in self._meta.items() if not key.startswith(INDEXED_PREFIX)}
        sessions = Sessions({})
        meta |= self._directory.open_session(sessions, self._run).pack()
        meta |= sessions.raise_version_epoch(self._max_epoch)
        with self._directory.mapped_errors():
            for files in self._shards:
                files.finish(list(self._catalog), meta)
        self._directory.publish(self._run, [table.spec for table in self._catalog])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for files in self._shards:
            files.close()
        self._directory.__exit__(kind, exc, traceback)


class _ShardFiles:
    """One shard's rows on their way into files."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path = path
        self._incoming = path / "incoming"
        self._incoming.mkdir()
        self._file_bytes = file_bytes
        self._buffer = write_buffer()
        self._writer: TableFileWriter | None = None
        self._files: list[Path] = []

    def add(self, table: Table, ids: _Ids, records: _Array) -> None:
        """Write rows of the table that the file is of, if there is one."""
        if self._writer is None:
            config = _STORE_CONFIG
            self._writer = TableFileWriter(
                block_bytes=config.block_bytes, bloom_bits_per_key=config.bloom_bits_per_key, buffer=self._buffer
            )
            self._files.append(self._incoming / f"{len(self._files) + 1:06d}.sst")
            self._writer.begin(self._files[-1])
        self._writer.add(Run(table.table_id, table.layout_of(table.spec.whole), ids, records, None))
        if self._writer.size_bytes >= self._file_bytes:
            self.end_file()

    def end_file(self) -> None:
        """Make the file whole; the next rows go to another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.finish()
            finally:
                writer.close()

    def close(self) -> None:
        """Leave the file as it is. Idempotent."""
        if self._writer is not None:
            self._writer.close()

    def finish(self, tables: Sequence[Table], meta: dict[bytes, bytes]) -> None:
        """Make the store of the files."""
        self.end_file()
        store = RowStore.open(self.path / "store", config=_STORE_CONFIG)
        try:
            # Without rows it only learns what column shards there are.
            blanks = [_blank_run(table) for table in tables]
            store.write_runs(blanks, meta=meta, applied_seq=FIRST_SEQ)
        finally:
            store.close()
        if self._files:
            self._take_in()
        shutil.rmtree(self._incoming)
        fsync_path(self.path / "store")

    def _take_in(self) -> None:
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        try:
            db = rocksdict.Rdict(str(self.path / "store"), rocks_options(_STORE_CONFIG))
            try:
                db.ingest_external_file([str(path) for path in self._files], options)
            finally:
                db.close()
        except Exception as exc:  # rocksdict has no class of its own for what RocksDB reports
            raise StorageError(f"{self.path}: RocksDB does not take the rows: {' '.join(str(exc).split())}") from exc


def _blank_run(table: Table) -> Run:
    layout = table.layout_of(table.spec.whole)
    return Run(table.table_id, layout, np.empty(0, np.int64), np.empty(0, layout.dtype), None)
