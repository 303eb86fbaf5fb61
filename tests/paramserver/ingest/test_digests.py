"""Digests of a shard's rows: how much they read, and how long scans are answered. See also `test_verify.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.paramserver.ingest.digests import _Query, _Scan, _Stream
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.rocksdb import RocksDb, StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import CorruptionError
from headrace.schemas.row_digest import BUCKET_ROWS
from headrace.schemas.row_records import FLAG_DELETED, RecordLayout, encode_keys, key_prefix
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=100_000, dim=1, dtype=DType.FLOAT32)
SOURCE = ShardSource(RecordLayout(SPEC, SPEC.whole), None, True)


@pytest.mark.parametrize(
    ("num_rows", "end_row", "most"), [(10, 100, 64), (0, 100, 64), (64, 100, 192), (5000, 3000, 4032)]
)
def test_little_is_read_for_nothing(tmp_path: Path, num_rows: int, end_row: int, most: int) -> None:
    """A stream returns every row of the table up to the requested end, and reads few rows after it."""
    keys = [
        bytes(key)
        for table in (1, 2)
        for key in encode_keys(table, SPEC.whole, np.arange(num_rows if table == 1 else 9000))
    ]
    num_read = 0

    def pairs() -> Iterator[tuple[bytes, bytes]]:
        nonlocal num_read
        for key in keys:
            num_read += 1
            yield key, b""

    store = RocksDb(tmp_path, SimpleNamespace(items=lambda from_key: pairs()))
    stream = _Stream(cast("Any", store), key_prefix(1, SPEC.whole), 0, end_row, SOURCE)
    found: list[int] = []
    while stream.fill():
        ids, held = stream.take_up_to(stream.last_row)
        assert len(held) == ids.size
        found += ids.tolist()
    assert found == list(range(min(num_rows, end_row)))
    assert num_read <= most


@pytest.mark.parametrize("read_s", [15.0, 25.0], ids=["second read is late", "first read is late"])
@pytest.mark.parametrize("live", [BUCKET_ROWS, BUCKET_ROWS // 50, 97], ids=["all", "few", "the last"])
def test_a_scan_that_takes_long_is_answered_in_parts(live: int, read_s: float, tmp_path: Path) -> None:
    """A long scan is answered in parts, because auditors have deadlines; each part continues, and all add up."""
    spec = TableSpec(fqn="t", num_rows=8 * BUCKET_ROWS, dim=1, dtype=DType.FLOAT32)
    table = Table(1, spec)
    layout = table.layout_of(SPEC.whole)
    rows = np.arange(0, 8 * BUCKET_ROWS, 97)
    records = np.zeros(rows.size, layout.dtype)
    is_deleted = rows % BUCKET_ROWS < BUCKET_ROWS - live
    layout.set_header(records, ..., epoch=1, step=rows, time_us=0, flags=np.where(is_deleted, FLAG_DELETED, 0))
    store = RowStore.open(tmp_path)
    store.write_runs([SortedRun(1, layout, rows, records)], meta={}, applied_seq=1)

    def scan(first_row: int, clock: Callable[[], float]) -> Any:
        query = _Query(table, SPEC.whole, first_row, 8 * BUCKET_ROWS, 256, False, False)
        return _Scan(store, query, clock=clock).run(1)

    whole, parts, next_row = scan(0, lambda: 0.0), [], 0
    while next_row < 8 * BUCKET_ROWS:
        parts.append(scan(next_row, itertools.count(0.0, read_s).__next__))
        assert parts[-1].next_row > next_row
        next_row = parts[-1].next_row
    assert len(parts) > 2
    assert whole.next_row == 8 * BUCKET_ROWS
    for column in ("buckets", "digests", "counts"):
        assert b"".join(getattr(part, column) for part in parts) == getattr(whole, column)
    assert np.frombuffer(whole.counts, "<i8").sum() == np.count_nonzero(~is_deleted)
    store.close()


def test_rows_behind_a_damaged_block_are_missed(tmp_path: Path) -> None:
    """A block with a wrong checksum ends rocksdict's iterator, but does not pass for the end of the table."""
    keys = [bytes(key) for key in encode_keys(1, SPEC.whole, np.arange(5000))]
    store = RowStore.open(tmp_path, config=StoreConfig(block_cache_bytes=1 << 20))
    store.write(keys, [bytes(100)] * len(keys), applied_seq=1)
    store.close()
    (file,) = tmp_path.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    store = RowStore.open(tmp_path, config=StoreConfig(block_cache_bytes=1 << 20))
    num_damaged = 0
    for first in (0, *range(2400, 2700)):  # the second range holds each row of the block
        stream, num_rows = _Stream(store, key_prefix(1, SPEC.whole), first, 5000, SOURCE), 0
        try:
            while stream.fill():
                num_rows += stream.take_up_to(stream.last_row)[0].size
        except CorruptionError as exc:
            assert ".sst" in str(exc)
            num_damaged += 1
        else:
            assert num_rows == 5000 - first
    store.close()
    assert 1 < num_damaged < 301
