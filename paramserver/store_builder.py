"""A server's directory made whole from rows that come in order: for a backfill into a place where there is nothing yet.

No update log and no memtable is on the way: each shard's rows go to files of RocksDB's format, which RocksDB takes in
at the end, all at once, at its lowest level. So they are written once, and never compacted until they are updated.

    .NAME.backfill/ready/shard-0000/incoming/000001.sst …   while it is made; counts for nothing
    .NAME.backfill/ready/shard-0000/{log,store}             when all rows are in
    .NAME.backfill/ready/headrace.json                      then
    NAME                                                    is `ready`, renamed

A directory without `headrace.json` is none that a server starts on. So after a crash NAME is there whole or not at all;
what lies in `.NAME.backfill` the next attempt removes.

The log begins at seq 2, with the tables' registration, and the store says that it has applied it. A store that is lost
is then missed: the log says that something came before.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import rocksdict

from headrace.paramserver.catalog import INDEXED_PREFIX, Catalog, Table, pack_spec
from headrace.paramserver.data_dir import MANIFEST_NAME, DataDir
from headrace.paramserver.file_update_log import FileUpdateLog
from headrace.paramserver.ingest import KIND_HELLO
from headrace.paramserver.pending import Run
from headrace.paramserver.row_chunk import RowChunk
from headrace.paramserver.sessions import Sessions
from headrace.paramserver.snapshot_files import fsync_path
from headrace.paramserver.store import RowStore, StoreConfig, rocks_options
from headrace.paramserver.table_file import TableFileWriter
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import TableSpec

__all__ = ["StoreBuilder", "check_target"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_EPOCH, _CLIENT = 1, "backfill"
_FIRST_SEQ = 2
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20)
# Rows of all shards that wait to be written, about; each file is a shard's part of it.
_BUFFER_BYTES = 128 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StoreBuilder:
    """Makes a server's directory. Use it with `with`: unless `finish` returns, nothing is left.

    Thread: any without an event loop, one at a time; it blocks.

    Attributes:
        num_rows: Rows that were added.
    """

    def __init__(
        self, target: Path, *, num_shards: int, specs: Sequence[TableSpec], run: str, buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        """Begin.

        Args:
            target: The directory to make; not there yet, or empty.
            num_shards: Of the server.
            specs: Its tables, in the order in which their rows will come.
            run: Name of the session that stands for whoever has brought the rows.
            buffer_bytes: Memory for rows that are not written yet, about; they take twice as much while they are.

        Raises:
            ConfigError: The target is not empty, or is being made by another process.
            StorageError: The disk failed.
        """
        self.num_rows = 0
        self._target = target.absolute()
        self._aside = self._target.parent / f".{self._target.name}.backfill"
        self._ready = self._aside / "ready"
        self._run = run
        self._catalog = Catalog({})
        self._meta = self._catalog.add(specs)
        self._max_epoch = 1
        self._table: Table | None = None
        self._finished_tables: set[str] = set()
        self._last_row = -1
        check_target(self._target)
        self._lock_fd = -1
        with _mapped_errors(self._aside):
            self._claim()
            self._shards = [
                _ShardFiles(self._ready / f"shard-{shard:04d}", buffer_bytes // num_shards)
                for shard in range(num_shards)
            ]

    def _claim(self) -> None:
        self._aside.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise ConfigError(f"--data {self._target}: another backfill is making it just now") from exc
        for path in self._aside.iterdir():  # of one that was killed
            shutil.rmtree(path)

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
        self._max_epoch = max(self._max_epoch, int(np.max(chunk.epochs)))
        records = chunk.records(table.layout_of(table.spec.whole))
        self.num_rows += chunk.row_ids.size
        with _mapped_errors(self._aside):
            if len(self._shards) == 1:
                self._shards[0].add(table, chunk.row_ids, records)
                return
            shards = shards_of_rows(table_seed(fqn), chunk.row_ids, len(self._shards))
            for number, files in enumerate(self._shards):
                rows = np.flatnonzero(shards == number)
                if rows.size:
                    files.add(table, chunk.row_ids[rows], records[rows])

    def _begin_table(self, fqn: str) -> Table:
        assert fqn not in self._finished_tables, f"rows of {fqn!r} after those of another table"
        if self._table is not None:
            self._finished_tables.add(self._table.spec.fqn)
        self._table, self._last_row = self._catalog.find(fqn), -1
        with _mapped_errors(self._aside):
            for files in self._shards:
                files.flush()
        return self._table

    def finish(self) -> None:
        """Give the directory its name, durably.

        Raises:
            ConfigError: Somebody has made it meanwhile.
            StorageError: The disk failed; it is not there.
        """
        header = {
            **{"kind": KIND_HELLO, "run": self._run, "client": _CLIENT, "rank": 0, "world_size": 0},
            "tables": [pack_spec(table.spec) for table in self._catalog],
        }
        # The index of identities is made by the first start.
        meta = {key: value for key, value in self._meta.items() if not key.startswith(INDEXED_PREFIX)}
        sessions = Sessions({})
        meta |= sessions.open(self._run, _CLIENT, _EPOCH, 0, 0).pack() | sessions.raise_version_epoch(self._max_epoch)
        with _mapped_errors(self._aside):
            for files in self._shards:
                files.finish(list(self._catalog), meta)
                asyncio.run(_write_log(files.path / "log", header))
                fsync_path(files.path)
            skeleton = self._aside / "skeleton"
            with DataDir.claim(skeleton, num_shards=len(self._shards)) as directory:
                directory.prepare()
            (skeleton / MANIFEST_NAME).rename(self._ready / MANIFEST_NAME)
            fsync_path(self._ready)
            check_target(self._target)
            self._ready.rename(self._target)
            fsync_path(self._target.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock_fd >= 0:
            shutil.rmtree(self._aside, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


class _ShardFiles:
    """One shard's rows on their way into files."""

    def __init__(self, path: Path, buffer_bytes: int) -> None:
        self.path = path
        self._incoming = path / "incoming"
        self._incoming.mkdir(parents=True)
        self._buffer_bytes = buffer_bytes
        self._table: Table | None = None
        self._waiting: list[tuple[_Ids, _Array]] = []
        self._waiting_bytes = 0
        self._files: list[Path] = []

    def add(self, table: Table, ids: _Ids, records: _Array) -> None:
        self._table = table
        self._waiting.append((ids, records))
        self._waiting_bytes += records.nbytes
        if self._waiting_bytes >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what waits to a file of its own."""
        if not self._waiting:
            return
        table, waiting = self._table, self._waiting
        assert table is not None
        layout = table.layout_of(table.spec.whole)
        runs = [Run(table.table_id, layout, ids, records, None) for ids, records in waiting]
        path = self._incoming / f"{len(self._files) + 1:06d}.sst"
        config = _STORE_CONFIG
        writer = TableFileWriter(block_bytes=config.block_bytes, bloom_bits_per_key=config.bloom_bits_per_key)
        writer.write(path, runs)
        self._files.append(path)
        self._waiting, self._waiting_bytes = [], 0

    def finish(self, tables: Sequence[Table], meta: dict[bytes, bytes]) -> None:
        """Make the store of the files."""
        self.flush()
        store = RowStore.open(self.path / "store", config=_STORE_CONFIG)
        try:
            # Without rows it only learns what column shards there are.
            blanks = [_blank_run(table) for table in tables]
            store.write_runs(blanks, meta=meta, applied_seq=_FIRST_SEQ)
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


async def _write_log(path: Path, header: dict[str, Any]) -> None:
    """Make a log that begins at `_FIRST_SEQ`."""
    for seq in range(1, _FIRST_SEQ + 1):
        # Each opening begins a new segment, so that the ones before can be removed.
        log = FileUpdateLog.open(path)
        try:
            await log.append(epoch=_EPOCH, header=header, body=[]).durable
            if seq == _FIRST_SEQ:
                log.trim(_FIRST_SEQ)
                assert (log.first_seq, log.last_seq) == (_FIRST_SEQ, _FIRST_SEQ)
        finally:
            await log.close()


def check_target(target: Path) -> None:
    """Check that a directory can be made whole in one step.

    Raises:
        ConfigError: There is something already.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"--data {target}: there is something already; a directory is backfilled only when it is new, a server "
            "with --server"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"--data {target}: there is no directory {target.parent}")


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except HeadraceError:
        raise
    except PermissionError as exc:
        raise ConfigError(f"{exc.filename or path}: not writable") from exc
    except OSError as exc:
        full = "the disk is full; " if exc.errno in _FULL else ""
        raise StorageError(f"{path}: {full}{exc.strerror or exc}; nothing was made") from exc
