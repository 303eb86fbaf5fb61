"""Read all rows of a snapshot, or of shards' stores, table by table in the order of their ids, from all files.

    files of a store ──▶ newest of each row ──┐
    files of a store ──▶ newest of each row ──┼─▶ merged by row id, some megabytes at a time
    files of a store ──▶ newest of each row ──┘

Memory is bounded, whatever the size of the tables and the number of files and shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace.paramserver.snapshots.directory import part_folder, read_manifest
from headrace.paramserver.store.catalog import Catalog, Owner, Scalar, Table
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.paramserver.store.row_reader import read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst.table_reader import TableFileReader
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import CorruptionError, SpecMismatchError, StorageError, UnknownTableError
from headrace.schemas.row_records import (
    PRESENT,
    RECORD_VERSION,
    RecordLayout,
    decode_row_ids,
    key_prefix,
)
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["SnapshotReader", "StoreReader", "merge_sorted"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_Chunk = tuple[_Ids, _Array]
_Cursor = Iterator[_Chunk]

_ROWS_AT_ONCE = 8192
_LAST_ROW = 2**63 - 1
# Read ahead in all files together; the decoded rows take about three times as much.
_READ_AHEAD_BYTES = 32 << 20
_MIN_REGION_BYTES, _MAX_REGION_BYTES = 128 << 10, 1 << 20
# Each file is read once from start to end, so a cache would not help.
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)


class StoreReader:
    """The rows of some shards of a server, in stores that are open and do not change.

    The first shard that tells of the drop of a table decides: what others still have of it is left out.

    Attributes:
        stores: One of each shard.
        tables: By fqn.

    Thread: any, one at a time; it blocks.
    """

    def __init__(self, stores: Sequence[RowStore]) -> None:
        """Read what tables there are.

        Raises:
            SpecMismatchError: The shards' tables differ.
        """
        self.stores = list(stores)
        self._parts: dict[str, list[tuple[RowStore, Table]]] = {}
        self.tables: dict[str, TableSpec] = {}
        catalogs = [Catalog(store.read_meta()) for store in self.stores]
        drops: dict[str, int] = {}
        for catalog in catalogs:
            drops |= {name: max(epoch, drops.get(name, 0)) for name, epoch in catalog.drop_epochs.items()}
        for store, catalog in zip(self.stores, catalogs, strict=True):
            for table in catalog:
                spec = table.spec
                if catalog.drop_epochs.get(spec.fqn, 0) < drops.get(spec.fqn, 0):
                    continue
                known = self.tables.setdefault(spec.fqn, spec)
                if spec.is_growth_of(known):  # it had not grown at every shard yet
                    self.tables[spec.fqn] = spec
                elif known != spec and not known.is_growth_of(spec):
                    raise SpecMismatchError(f"{store.path}: table {spec.fqn!r} differs from that of other shards")
                self._parts.setdefault(spec.fqn, []).append((store, table))

    def num_rows_estimate(self, fqn: str) -> int:
        """Return about how many rows a table has; some that were deleted may be counted."""
        estimate = sum(store.num_rows_estimate(table.table_id) for store, table in self._parts[fqn])
        return min(estimate, self.tables[fqn].num_rows or estimate)

    def scalars(self, fqn: str) -> dict[str, Scalar]:
        """Return a table's newest scalars, by name."""
        newest: dict[str, Scalar] = {}
        for _, table in self._parts[fqn]:
            for name, scalar in table.scalars.items():
                known = newest.get(name)
                if known is None or (scalar.epoch, scalar.step) > (known.epoch, known.step):
                    newest[name] = scalar
        return dict(sorted(newest.items()))

    def owners(self) -> dict[str, Owner]:
        """Return the newest owner of each table that has one, by fqn."""
        found: dict[str, Owner] = {}
        for fqn, parts in self._parts.items():
            owners = [table.owner for _, table in parts if table.owner is not None]
            if owners:
                found[fqn] = max(owners, key=lambda owner: owner.epoch)
        return found

    def rows(self, fqn: str, *, first_row: int = 0, end_row: int | None = None) -> Iterator[_Chunk]:
        """Yield a table's rows that are present, from `first_row` to `end_row`, exclusive, in order.

        Yields:
            int64[n] row ids, and records `RecordLayout(spec, spec.whole).dtype`[n].

        Raises:
            UnknownTableError: The snapshot has no such table.
            CorruptionError: A file is damaged.
            StorageError: A file cannot be read.
        """
        if fqn not in self.tables:
            raise UnknownTableError(f"no table {fqn!r}; {describe_near(fqn, self.tables)}")
        span = (first_row, _LAST_ROW if end_row is None else end_row - 1)
        if span[0] > span[1]:
            return
        scans = self._scans(fqn, span)
        region_bytes = _region_bytes(scans)
        cursors = [cursor for scan in scans for cursor in scan.cursors(region_bytes)]
        yield from _without_removed(merge_sorted(cursors))

    def layouts(self, fqn: str) -> list[ColumnShard]:
        """Return the column shards in which rows of a table were written, in the order of their keys."""
        return sorted({shard for store, table in self._parts[fqn] for shard in store.layouts(table.table_id)})

    def records(self, fqn: str, shard: ColumnShard) -> Iterator[_Chunk]:
        """Yield the records of one column shard of a table as they are stored, marks of deletions too, by row id.

        Raises:
            CorruptionError: A file is damaged.
            StorageError: A file cannot be read.
        """
        scans = self._scans(fqn, (0, _LAST_ROW))
        region_bytes = _region_bytes(scans)
        cursors = [cursor for scan in scans for cursor in scan.cursors_of(shard, region_bytes)]
        yield from _without_removed(merge_sorted(cursors))

    def _scans(self, fqn: str, span: tuple[int, int]) -> list[_ShardScan]:
        return [_ShardScan(store, table, span) for store, table in self._parts[fqn]]


class SnapshotReader(StoreReader):
    """An open snapshot. Use it with `with`."""

    def __init__(self, folder: Path) -> None:
        """Open a snapshot, checking the lengths of its files; reads verify RocksDB's own checksums.

        Raises:
            ConfigError: It is not a snapshot.
            CorruptionError: A file is missing or has the wrong length.
            SpecMismatchError: The shards' tables differ.
        """
        self.manifest = read_manifest(folder)
        _check_lengths(folder, self.manifest)
        self._closing = ExitStack()
        stores: list[RowStore] = []
        try:
            for part in self.manifest.parts:
                stores.append(RowStore.open_read_only(part_folder(folder, part), config=_STORE_CONFIG))
                self._closing.callback(stores[-1].close)
            super().__init__(stores)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files; idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _ShardScan:
    """Reads a table's rows of one shard.

    Methods raise CorruptionError for damage and StorageError for a file that cannot be read.

    Thread: any, one at a time; it blocks.
    """

    def __init__(self, store: RowStore, table: Table, span: tuple[int, int]) -> None:
        """Read the rows of `span`, first and last."""
        self._store, self._table, self._span = store, table, span
        self._layouts = [table.layout_of(shard) for shard in store.layouts(table.table_id)]
        self._runs = {layout.shard: store.sorted_runs(self._prefix(layout)) for layout in self._layouts}
        self.num_runs = sum(map(len, self._runs.values()))

    def _prefix(self, layout: RecordLayout) -> bytes:
        return key_prefix(self._table.table_id, layout.shard)

    def cursors(self, region_bytes: int) -> list[_Cursor]:
        """Return cursors over whole rows, the newest first; rows that were removed from RocksDB have zeros."""
        spec = self._table.spec
        if [layout.shard for layout in self._layouts] == [spec.whole]:
            return self._cursors_of(self._layouts[0], region_bytes)
        return [self._assembled(region_bytes)] if self._layouts else []

    def cursors_of(self, shard: ColumnShard, region_bytes: int) -> list[_Cursor]:
        """Return cursors over the records of one column shard, otherwise like `cursors`."""
        return self._cursors_of(self._table.layout_of(shard), region_bytes) if shard in self._runs else []

    def _cursors_of(self, layout: RecordLayout, region_bytes: int) -> list[_Cursor]:
        runs = self._runs[layout.shard]
        if not all(_is_readable(path) for run in runs for path in run):
            return [self._scanned(layout)]
        return [self._read_run(run, layout, region_bytes) for run in runs]

    def _read_run(self, run: Sequence[Path], layout: RecordLayout, region_bytes: int) -> _Cursor:
        first_row, last_row = self._span
        for path in run:
            reader = TableFileReader.open(path)
            assert reader is not None, f"{path} has changed"
            with reader:
                for ids, values in reader.read(
                    self._prefix(layout),
                    first_row=first_row,
                    last_row=last_row,
                    record_bytes=layout.dtype.itemsize,
                    header_bytes=layout.header_dtype.itemsize,
                    region_bytes=region_bytes,
                ):
                    records = values.view(layout.dtype)
                    is_odd = records["version"] != RECORD_VERSION
                    if is_odd.any() and np.any(values[is_odd].view(np.uint8)):
                        raise CorruptionError(f"{path}: a row has a record version other than {RECORD_VERSION}")
                    yield ids, records

    def _scanned(self, layout: RecordLayout) -> _Cursor:
        """Yield rows with RocksDB's iterator: several times slower, but it reads files of any kind."""
        prefix, (first_row, last_row) = self._prefix(layout), self._span
        start = prefix + first_row.to_bytes(8, "big")
        for chunk in self._store.scan_chunks(prefix, start=start, sizes=repeat(_ROWS_AT_ONCE)):
            ids = decode_row_ids([key for key, _ in chunk])
            size = int(np.searchsorted(ids, last_row, side="right"))
            if size:
                yield ids[:size], layout.decode([value for _, value in chunk[:size]])[0]
            if size < ids.size:
                return

    def _assembled(self, region_bytes: int) -> _Cursor:
        """Yield rows that were written in column shards, assembled like the server's reads."""
        table, spec = self._table, self._table.spec
        sources = [ShardSource(layout, None, True) for layout in self._layouts]
        whole = table.layout_of(spec.whole)
        keys = [cursor for layout in self._layouts for cursor in self._cursors_of(layout, region_bytes)]
        for ids, _ in merge_sorted([_without_records(cursor) for cursor in keys]):
            for start in range(0, ids.size, _ROWS_AT_ONCE):
                some = ids[start : start + _ROWS_AT_ONCE]
                rows = read_rows(table.table_id, spec, sources, some, self._store.get, seq=self._store.applied_seq)
                is_there = rows.presence == PRESENT  # removed and deleted rows are among the keys
                chunk = RowChunk(
                    row_ids=some,
                    columns={"weights": rows.weights} | {f"state:{name}": data for name, data in rows.states.items()},
                    epochs=rows.epochs,
                    steps=rows.steps,
                    times_us=rows.times_us,
                    identities=rows.identities,
                ).take(is_there)
                if chunk.row_ids.size:  # a merge needs the last id of each chunk
                    yield chunk.row_ids, chunk.records(whole)


def _region_bytes(scans: Sequence[_ShardScan]) -> int:
    """Return how much of each file is read at a time."""
    each_bytes = _READ_AHEAD_BYTES // max(sum(scan.num_runs for scan in scans), 1)
    return min(max(each_bytes, _MIN_REGION_BYTES), _MAX_REGION_BYTES)


def merge_sorted(cursors: Sequence[_Cursor]) -> _Cursor:
    """Yield the entries of several cursors by ascending id, each id once, from the first cursor that has it.

    Args:
        cursors: Each yields ascending ids with an array of their values.
    """
    heads = [next(cursor, None) for cursor in cursors]
    while live := [number for number, head in enumerate(heads) if head is not None]:
        if len(live) == 1:
            head = heads[live[0]]
            assert head is not None
            yield _first_of_each(*head)
            heads[live[0]] = next(cursors[live[0]], None)
            continue
        # Every cursor is complete up to here.
        bound = min(int(head[0][-1]) for head in heads if head is not None)
        parts = []
        for number in live:
            head = heads[number]
            assert head is not None
            ids, values = head
            end = int(np.searchsorted(ids, bound, side="right"))
            if end:
                parts.append((ids[:end], values[:end]))
                heads[number] = (ids[end:], values[end:]) if end < ids.size else next(cursors[number], None)
        yield _merge(parts)


def _merge(parts: list[_Chunk]) -> _Chunk:
    if len(parts) == 1:
        return _first_of_each(*parts[0])
    ids = np.concatenate([ids for ids, _ in parts])
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    is_first = np.ones(ids.size, bool)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    # The target of each entry, -1 if an earlier part has its id, so that values are copied only once.
    place = np.empty(order.size, np.int64)
    place[order] = np.where(is_first, np.cumsum(is_first) - 1, -1)
    merged = np.empty(np.count_nonzero(is_first), parts[0][1].dtype)
    start = 0
    for part, values in parts:
        target = place[start : start + part.size]
        start += part.size
        if (target >= 0).all():
            merged[target] = values
        else:
            merged[target[target >= 0]] = values[target >= 0]
    return ids[is_first], merged


def _first_of_each(ids: _Ids, values: _Array) -> _Chunk:
    repeats = ids[1:] == ids[:-1]
    if not repeats.any():
        return ids, values
    keep = np.append(True, ~repeats)
    return ids[keep], values[keep]


def _without_removed(cursor: _Cursor) -> _Cursor:
    """Leave out the records of zeros: they have hidden what they had to."""
    for ids, records in cursor:
        is_there = records["version"] == RECORD_VERSION
        if is_there.all():
            yield ids, records
        elif is_there.any():
            yield ids[is_there], records[is_there]


def _without_records(cursor: _Cursor) -> _Cursor:
    for ids, _ in cursor:
        yield ids, np.empty(ids.size, "V1")


def _is_readable(path: Path) -> bool:
    reader = TableFileReader.open(path)
    if reader is None:
        return False
    reader.close()
    return True


def _check_lengths(folder: Path, manifest: SnapshotManifest) -> None:
    for path, file in manifest.files().items():
        try:
            size_bytes = (folder / path).stat().st_size
        except FileNotFoundError as exc:
            raise CorruptionError(f"{folder / path}: missing; the snapshot is incomplete") from exc
        except OSError as exc:
            raise StorageError(f"{folder / path}: {exc.strerror}") from exc
        if size_bytes != file.size_bytes:
            raise CorruptionError(f"{folder / path}: {size_bytes} bytes, the manifest says {file.size_bytes}")
