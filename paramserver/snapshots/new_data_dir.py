"""Make a server's directory aside, whole or not at all; `StoreBuilder` fills it with rows that come in order.

    .NAME.WORK/ready/shard-0000/{log,store}    while it is made; no server starts on it
    .NAME.WORK/ready/headrace.json             when all shards are complete
    NAME                                       is `ready`, renamed

A server needs `headrace.json`. So after a crash, NAME is complete or missing; the next attempt removes `.NAME.WORK`.

Each log begins behind seq 1 with the registration of the tables, which the store has applied. If the store is lost
later, the log shows that something came before, so the loss is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import rocksdict

from headrace.paramserver.config.data_dir import MANIFEST_NAME, Manifest
from headrace.paramserver.log.interface import KIND_HELLO
from headrace.paramserver.log.opening import open_log
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.store.catalog import Catalog, Scalar, Table, pack_spec
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.paramserver.system.direct_file import write_buffer
from headrace.paramserver.system.durable import fsync_path, move_into_place, write_file
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["FIRST_SEQ", "NewDataDir", "StoreBuilder", "check_target"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

FIRST_SEQ = 2
_EPOCH = 1
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
# One file per shard is written at a time; it takes 8 bytes of memory per row until it ends.
_ALL_FILES_BYTES, _MIN_FILE_BYTES, _MAX_FILE_BYTES = 2 << 30, 64 << 20, 256 << 20


class NewDataDir:
    """A server's directory that is being made. Use it with `with`: unless `publish` returns, nothing remains.

    Attributes:
        work: A word for what makes it.

    Thread: any without an event loop, one at a time; it blocks.
    """

    def __init__(self, target: Path, *, shards: Iterable[int], work: str) -> None:
        """Start making a missing or empty directory; `work` is also the log's first client.

        `shards` are those that come to lie there.

        Raises:
            ConfigError: The target is not empty, or another process is making it.
            StorageError: The disk failed.
        """
        self._target, self._shards, self.work = target.absolute(), tuple(shards), work
        self._aside = self._target.parent / f".{self._target.name}.{work}"
        self._ready = self._aside / "ready"
        self._lock: FileLock | None = None
        check_target(self._target)
        try:
            with self.mapped_errors():
                self._aside.mkdir(parents=True, exist_ok=True)
                # The last holder of the lock removes the directory; then the lock is refused, too.
                busy = f"--data {self._target}: another {work} is making it just now"
                self._lock = FileLock.acquire(self._aside, busy=busy, is_directory=True)
                for path in self._aside.iterdir():  # the remains of a killed process
                    shutil.rmtree(path)
                for shard in self._shards:
                    self.shard_path(shard).mkdir(parents=True)
        except BaseException:
            self.close()  # `__exit__` will not be called
            raise

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard; it exists."""
        return self._ready / shard_folder(shard)

    def open_session(self, sessions: Sessions, run: str) -> Session:
        """Return the session of each log's first record; nothing else is ever written in it."""
        return sessions.open(run, self.work, _EPOCH, 0, 0)

    def publish(
        self,
        run: str,
        specs: Iterable[TableSpec],
        *,
        seq: int = FIRST_SEQ,
        predecessors: Sequence[Predecessor] = (),
    ) -> None:
        """Start the logs of all shards, whose stores are complete, and give the directory its name, durably.

        The stores have `seq` applied, which becomes the first record of each log.

        Raises:
            ConfigError: The target exists by now.
            StorageError: The disk failed; the target does not exist.
        """
        tables = [pack_spec(spec) for spec in specs]
        session = {"run": run, "client": self.work, "rank": 0, "world_size": 0}
        header = {"kind": KIND_HELLO, **session, "tables": tables}
        with self.mapped_errors():
            for shard in self._shards:
                asyncio.run(_begin_log(self.shard_path(shard) / "log", header, seq))
                fsync_path(self.shard_path(shard))
        server_id, num_shards = str(uuid.uuid4()), len(self._shards)
        self.publish_copy(Manifest(server_id=server_id, num_shards=num_shards, predecessors=tuple(predecessors)))

    def publish_copy(self, manifest: Manifest) -> None:
        """Give a copy of a server's or a node's shards, complete with logs, the target's name, durably; see `publish`.

        REQUIRES: the shards are those of the manifest.
        """
        with self.mapped_errors():
            write_file(self._ready / MANIFEST_NAME, manifest.encode())
            fsync_path(self._ready)
            check_target(self._target)
            move_into_place(self._ready, self._target)

    def publish_shard(self) -> None:
        """Give the directory of the only shard, which is complete with its log, the target's name; see `publish`."""
        with self.mapped_errors():
            check_target(self._target)
            move_into_place(self.shard_path(self._shards[0]), self._target)

    @contextlib.contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Turn errors of the file system into `ConfigError`, if something is not writable, or `StorageError`."""
        try:
            yield
        except HeadraceError:
            raise
        except PermissionError as exc:
            raise ConfigError(f"{exc.filename or self._aside}: not writable") from exc
        except OSError as exc:
            full = "the disk is full; " if exc.errno in _DISK_FULL else ""
            raise StorageError(f"{self._aside}: {full}{exc.strerror or exc}; nothing was made") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what is not published, and unlock; idempotent."""
        if self._lock is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._lock.release()
            self._lock = None


async def _begin_log(path: Path, header: dict[str, Any], seq: int) -> None:
    log = open_log(path, begin_seq=seq)
    try:
        await log.append(epoch=_EPOCH, header=header, body=[]).durable
    finally:
        await log.close()


def check_target(target: Path) -> None:
    """Check that a directory can be created by a rename.

    Raises:
        ConfigError: It is not empty, its parent is missing, or a rename cannot replace it.
    """
    if target.is_symlink():
        raise ConfigError(f"--data {target}: a symbolic link, which cannot be replaced: name its target")
    if os.path.ismount(target):
        raise ConfigError(f"--data {target}: a mount point, which cannot be replaced: name a directory below it")
    # A rename would pull the working directory from under the shell. By stat: a removed directory has no name.
    if target.is_dir() and target.samefile("."):
        raise ConfigError(f"--data {target}: the working directory, which is in use: name a new directory below it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"--data {target}: not empty; a server's directory is made where nothing is: name another one"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"--data {target}: there is no directory {target.parent}")


class StoreBuilder:
    """Makes a server's directory from rows in order. Use it with `with`: unless `finish` returns, nothing remains.

    Rows pass no update log or memtable. They go to files of RocksDB's format in `shard-0000/incoming`, which RocksDB
    ingests at the end at its lowest level. So they are written once, and not compacted until they are updated.

    Thread: any without an event loop, one at a time; it blocks.
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
        """Start making a directory; see `NewDataDir`, also for errors. `run` stands for the source of the rows.

        `specs` may have a table before and after it grew, in this order.

        `file_bytes` is about the length of a file of rows. None suits stores of terabytes: files should be few, as each
        costs time in many places, but each row of an open file costs memory.
        """
        self.num_rows = 0
        self._run = run
        self.catalog = Catalog({})
        self._meta = self.catalog.add(specs)
        self._max_epoch, self._last_row = 1, -1
        self._layouts: dict[str, list[RecordLayout]] = {}  # of the tables that have come, the present one last
        self.directory = NewDataDir(target, shards=range(num_shards), work=work)
        file_bytes = file_bytes or min(max(_ALL_FILES_BYTES // num_shards, _MIN_FILE_BYTES), _MAX_FILE_BYTES)
        with self.directory.mapped_errors():
            paths = map(self.directory.shard_path, range(num_shards))
            self._shards = [_ShardFiles(path, file_bytes) for path in paths]

    def add(self, fqn: str, chunk: RowChunk) -> None:
        """Add rows in ascending order, all of one table before the next.

        Raises:
            RequestError: The rows are out of order, or an id or a version is out of range.
        """
        table, layout = self._begin(fqn)
        chunk.check(table.spec, after_row=self._last_row)
        if chunk.row_ids.size:
            self._put(table, layout, chunk.row_ids, chunk.records(layout))

    def add_records(self, fqn: str, row_ids: _Ids, records: _Array, shard: ColumnShard) -> None:
        """Add stored records, `RecordLayout(spec, shard).dtype`[n]; otherwise like `add`.

        Column shards of a table come one after the other, by their columns.
        """
        table, layout = self._begin(fqn, shard)
        if row_ids.size:
            assert int(row_ids[0]) > self._last_row, "rows must come in the order of their ids"
            self._put(table, layout, row_ids, records)

    def set_scalars(self, fqn: str, scalars: Iterable[Scalar]) -> None:
        """Store a table's scalars on every shard."""
        for scalar in scalars:
            value = (scalar.name, scalar.dtype, scalar.data)
            self._meta |= self.catalog.set_scalars(fqn, [value], scalar.epoch, scalar.step)
            self.raise_epoch(scalar.epoch)

    def take_history(self, catalog: Catalog) -> None:
        """Keep on every shard which tables one has dropped, so that nothing older brings them back."""
        self._meta |= self.catalog.take_history(catalog)

    def raise_epoch(self, epoch: int) -> None:
        """Make trainers take epochs above this one, and above those of all rows."""
        self._max_epoch = max(self._max_epoch, epoch)

    def _put(self, table: Table, layout: RecordLayout, row_ids: _Ids, records: _Array) -> None:
        self._last_row = int(row_ids[-1])
        self.raise_epoch(int(np.max(records["epoch"])))
        self.num_rows += row_ids.size
        with self.directory.mapped_errors():
            if len(self._shards) == 1:
                self._shards[0].add(table.table_id, layout, row_ids, records)
                return
            shards = shards_of_rows(table.spec.seed, row_ids, len(self._shards))
            for number, files in enumerate(self._shards):
                rows = np.flatnonzero(shards == number)
                if rows.size:
                    files.add(table.table_id, layout, row_ids[rows], records[rows])

    def _begin(self, fqn: str, shard: ColumnShard | None = None) -> tuple[Table, RecordLayout]:
        """Return a table and the layout of its column shard, and start their files unless they are the present ones."""
        table = self.catalog.find(fqn)
        layout = table.layout_of(shard or table.spec.whole)
        layouts = self._layouts.setdefault(fqn, [])
        assert fqn == next(reversed(self._layouts)), f"rows of {fqn!r} after those of another table"
        if layouts and layouts[-1] == layout:
            return table, layout
        assert not layouts or layouts[-1].shard < layout.shard, f"column shards of {fqn!r} are out of order"
        layouts.append(layout)
        self._last_row = -1
        with self.directory.mapped_errors():
            for files in self._shards:
                files.end_file()
        return table, layout

    def finish(self) -> None:
        """Give the directory its name, durably; raises as `NewDataDir.publish` does."""
        sessions = Sessions({})
        meta = self.directory.open_session(sessions, self._run).pack()
        meta |= sessions.raise_epoch(self._max_epoch)
        self.finish_stores(meta)
        self.directory.publish(self._run, [table.spec for table in self.catalog])

    def finish_stores(self, meta: dict[bytes, bytes]) -> None:
        """Make the stores of what was added and of metadata, with `FIRST_SEQ` applied, and publish nothing."""
        layouts = [
            (table.table_id, layout)
            for table in self.catalog
            for layout in self._layouts.get(table.spec.fqn) or [table.layout_of(table.spec.whole)]
        ]
        with self.directory.mapped_errors():
            for files in self._shards:
                files.finish(layouts, self._meta | meta)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for files in self._shards:
            files.close()
        self.directory.close()


class _ShardFiles:
    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path, self._incoming, self._file_bytes = path, path / "incoming", file_bytes
        self._incoming.mkdir()
        self._buffer = write_buffer()
        self._writer: TableFileWriter | None = None
        self._files: list[Path] = []

    def add(self, table_id: int, layout: RecordLayout, ids: _Ids, records: _Array) -> None:
        if self._writer is None:
            config = _STORE_CONFIG
            self._writer = TableFileWriter(
                block_bytes=config.block_bytes, bloom_bits_per_key=config.bloom_bits_per_key, buffer=self._buffer
            )
            self._files.append(self._incoming / f"{len(self._files) + 1:06d}.sst")
            self._writer.begin(self._files[-1])
        self._writer.add(SortedRun(table_id, layout, ids, records))
        if self._writer.size_bytes >= self._file_bytes:
            self.end_file()

    def end_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.finish()
            finally:
                writer.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def finish(self, layouts: Sequence[tuple[int, RecordLayout]], meta: dict[bytes, bytes]) -> None:
        self.end_file()
        store = RowStore.open(self.path / "store", config=_STORE_CONFIG)
        try:
            # Runs without rows only register the column shards.
            runs = [SortedRun(number, of, np.empty(0, np.int64), np.empty(0, of.dtype)) for number, of in layouts]
            store.write_runs(runs, meta=meta, applied_seq=FIRST_SEQ)
        finally:
            store.close()
        if self._files:
            self._ingest_files()
        shutil.rmtree(self._incoming)
        fsync_path(self.path / "store")

    def _ingest_files(self) -> None:
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        try:
            db = rocksdict.Rdict(str(self.path / "store"), rocks_options(_STORE_CONFIG))
            try:
                db.ingest_external_file([str(path) for path in self._files], options)
            finally:
                db.close()
        except Exception as exc:  # rocksdict has no error class of its own
            raise StorageError(f"{self.path}: RocksDB refuses the rows: {' '.join(str(exc).split())}") from exc
