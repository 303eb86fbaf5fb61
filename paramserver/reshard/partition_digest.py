"""Digests of partitions: whether two stores have the same rows and tombstones, however they came.

A digest is a sum of row digests (`schemas/row_digest.py`) of whole records, for each table and column shard. With it go
the tables' names and floors: the destination's floors may be higher, and what is below a floor comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.paramserver.reshard.store_view import PartitionFilter, StoreView
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.shared_state import pack_meta, unpack_meta
from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.row_digest import digest_rows
from headrace.schemas.row_records import FLAG_DELETED
from headrace.schemas.version import NO_FLOOR, Version, is_newer

__all__ = ["PartitionDigest"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_Chunk = tuple[_Ids, _Array]


class PartitionDigest:
    """Adds up one view. Thread: any, one at a time."""

    def __init__(self, catalog: Catalog, like: bytes | None = None) -> None:
        """Digest tables of `catalog`, which nobody changes meanwhile, or what they are for the digest `like`.

        Raises:
            RequestError: `like` is no digest.
        """
        self._sums: dict[int, list[list[int]]] = {}
        self._theirs: dict[int, list[list[int]]] = {}
        self._packed = pack_meta(catalog.packed())
        self._tables = {table.table_id: (table.table_id, table.floor) for table in catalog}
        self._left_out: list[int] = []
        if like is None:
            return
        try:
            self._packed, sums = msgpack.unpackb(like)
            self._theirs = dict(sums)
            other = Catalog(unpack_meta(self._packed))
        except (ValueError, TypeError, CorruptionError) as exc:
            raise RequestError(f"{len(like)} bytes are no digest of partitions: {exc}") from exc
        # A table that only one of the shards has dropped is not compared.
        self._tables = {}
        for table in other:
            if (mine := catalog.table_here(table, other)) is None:
                self._left_out.append(table.table_id)
            else:
                self._tables[mine.table_id] = table.table_id, table.floor

    def add_view(self, view: StoreView, wanted: PartitionFilter) -> None:
        """Add the rows of a store; it blocks. Raises as `StoreView.records`."""
        for table in view.tables:
            number, floor = self._tables.get(table.table_id, (-table.table_id, NO_FLOOR))
            layouts = view.layouts(table)
            sums = []
            totals = [[0, 0] for _ in layouts]
            for at, ids, records in _counting([view.records(table, each, wanted) for each in layouts], floor):
                totals[at][0] = (totals[at][0] + int(digest_rows(ids, _columns(records)).sum())) % 2**64
                totals[at][1] += ids.size
            sums = [
                [layout.shard.offset, layout.shard.width, total, count]
                for layout, (total, count) in zip(layouts, totals, strict=True)
                if count
            ]
            if sums:
                self._sums[number] = sums

    def encode(self) -> bytes:
        """Return the digest's bytes."""
        sums = self._sums | {number: self._theirs[number] for number in self._left_out if number in self._theirs}
        encoded: bytes = msgpack.packb([self._packed, sorted(sums.items())])
        return encoded


def _counting(shards: Sequence[Iterator[_Chunk]], floor: Version) -> Iterator[tuple[int, _Ids, _Array]]:
    """Yield (number of the column shard, ids, records), without rows of which only tombstones up to a floor are left.

    Such a tombstone of a row that has other records stays: it may hide one (`expiry/collection.py`).
    """
    heads = [next(shard, None) for shard in shards]
    while live := [(at, head) for at, head in enumerate(heads) if head is not None]:
        bound = min(int(ids[-1]) for _, (ids, _) in live)  # every column shard is complete up to here
        parts = []
        for at, (ids, records) in live:
            end = int(np.searchsorted(ids, bound, side="right"))
            parts.append((at, ids[:end], records[:end]))
            heads[at] = (ids[end:], records[end:]) if end < ids.size else next(shards[at], None)
        all_ids = parts[0][1] if len(parts) == 1 else np.unique(np.concatenate([ids for _, ids, _ in parts]))
        counts = np.zeros(all_ids.size, bool)
        for _, ids, records in parts:
            counts[np.searchsorted(all_ids, ids)] |= ~_is_low_tombstone(records, floor)
        for at, ids, records in parts:
            keep = counts[np.searchsorted(all_ids, ids)]
            if keep.all():
                yield at, ids, records
            else:
                yield at, ids[keep], records[keep]


def _is_low_tombstone(records: _Array, floor: Version) -> _Mask:
    is_deleted = (records["flags"] & FLAG_DELETED) != 0
    is_low: _Mask = is_deleted & ~is_newer(records["epoch"].astype(np.int64), records["step"], *floor)
    return is_low


def _columns(records: _Array) -> list[_Array]:
    """Return the records' bytes as two columns, of which the first, [n, 4k], can be read four bytes at a time."""
    data = np.ascontiguousarray(records).view(np.uint8).reshape(records.size, records.itemsize)
    end = records.itemsize // 4 * 4
    return [data[:, :end], data[:, end:]] if end < records.itemsize else [data]
