"""A store as it was at one record of its log: a checkpoint beside it, read without RocksDB and by nobody else.

It keeps its files alive, also those that the store has compacted away since, until it is closed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.snapshots.contents import StoreScan
from headrace.paramserver.store.catalog import Catalog, Table
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import TableSpec

__all__ = ["PartitionFilter", "StoreView"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

# Files are read once from start to end, so a cache would not help.
_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)


class PartitionFilter:
    """Tells rows of some partitions. Thread: any."""

    def __init__(self, partition_map: PartitionMap, partitions: Iterable[int]) -> None:
        self._map = partition_map
        self._is_wanted = np.zeros(partition_map.num_partitions, bool)
        self._is_wanted[list(partitions)] = True

    def has(self, spec: TableSpec, row_ids: _Ids) -> _Mask:
        """Return which rows, int64[n], are in the partitions, bool[n]."""
        is_in: _Mask = self._is_wanted[self._map.partitions_of_rows(spec.seed, row_ids)]
        return is_in


class StoreView:
    """A checkpoint, opened. Thread: any, one at a time; it blocks.

    Attributes:
        tables: In the order of their numbers.
    """

    def __init__(self, path: Path) -> None:
        """Open the checkpoint in a directory, which `close` removes. Raises as `RowStore.open_read_only`."""
        self._path = path
        self._store = RowStore.open_read_only(path, config=_STORE_CONFIG)
        self.tables = sorted(Catalog(self._store.read_meta()), key=lambda table: table.table_id)

    @property
    def size_bytes(self) -> int:
        """Of its files, also of rows in them that others hide."""
        return sum(path.stat().st_size for path in self._path.glob("*.sst"))

    def close(self) -> None:
        """Close and remove it. Idempotent."""
        self._store.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def layouts(self, table: Table) -> list[RecordLayout]:
        """Return the layouts of a table's records, ascending by column shard."""
        return [table.layout_of(shard) for shard in sorted(self._store.layouts(table.table_id))]

    def records(self, table: Table, layout: RecordLayout, wanted: PartitionFilter) -> Iterator[tuple[_Ids, _Array]]:
        """Yield ids, int64[n], and records, `layout.dtype`[n], tombstones too, in the order of their keys.

        Raises:
            CorruptionError, StorageError: A file is damaged or cannot be read.
        """
        keep: Callable[[_Ids], _Mask] = lambda ids: wanted.has(table.spec, ids)  # noqa: E731
        yield from StoreScan(self._store, table).records(layout, keep=keep)
