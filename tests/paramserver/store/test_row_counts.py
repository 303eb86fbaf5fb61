"""Row estimates for files whose entries RocksDB has not counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rocksdict

from headrace.paramserver.store import row_counts
from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.store.row_counts import FileRowCounts
from headrace.schemas.row_records import META_PREFIX, key_prefix


def _file(prefix: bytes, size_bytes: int, num_entries: int, last: bytes | None = None) -> dict[str, Any]:
    return {
        "name": "/none.sst",
        "start_key": prefix + bytes(8),
        "end_key": (prefix if last is None else last) + bytes(8),
        "size": size_bytes,
        "num_entries": num_entries,
    }


ONE, TWO, THREE = key_prefix(1), key_prefix(2), key_prefix(3)


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        # Files are as dense as the known ones of their column shard, and none is opened for it.
        (
            [
                _file(ONE, 1000, 100),
                _file(TWO, 1000, 1),
                _file(ONE, 3000, 100),
                _file(ONE, 2000, 0),
                _file(TWO, 5000, 0),
            ],
            {1: 300, 2: 6},
        ),
        # A file that was compacted away since it was listed, or is empty, stops no count.
        ([_file(ONE, 1000, 0), _file(TWO, 0, 0), _file(THREE, 10, 3)], {1: 0, 2: 0, 3: 3}),
        # The density of a file of several tables says nothing about one table.
        ([_file(ONE, 1000, 900, THREE), _file(ONE, 2000, 0)], {1: 300, 2: 300, 3: 300}),
        # Metadata are no rows.
        ([_file(META_PREFIX + b"sess", 1000, 100)], {}),
        # Entries that cannot be told apart are shared evenly among the tables of the key range.
        ([_file(META_PREFIX, 1000, 90, THREE)], {1: 30, 2: 30, 3: 30}),
    ],
    ids=["density", "gone", "several tables", "no rows", "shared"],
)
def test_rows_are_estimated(tmp_path: Path, files: list[dict[str, Any]], counts: dict[int, int]) -> None:
    """Estimates come from what RocksDB lists, even without the files."""
    assert FileRowCounts(tmp_path).count(files) == counts


def test_a_file_that_was_looked_into_stands_for_its_column_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unknown file is read for its column shard, once, and gives way to what is known later."""
    opened: list[str] = []

    def look_into(path: Path) -> dict[bytes, int]:
        opened.append(path.name)
        return {ONE: 100}

    monkeypatch.setattr(row_counts, "_look_into", look_into)
    counts, files = FileRowCounts(tmp_path), [_file(ONE, 1000, 0), _file(ONE, 3000, 0)]
    for _ in range(2):
        assert counts.count(files) == {1: 400}
    assert opened == ["none.sst"]
    assert counts.count([*files, _file(ONE, 1000, 50)]) == {1: 250}


def test_a_file_of_another_kind_is_shared_out(tmp_path: Path) -> None:
    """The entries of a compressed file are shared evenly among its tables."""
    options = rocks_options(StoreConfig(block_cache_bytes=4 << 20))
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    db = rocksdict.Rdict(str(tmp_path), options)
    for table_id in (1, 2):
        db[key_prefix(table_id) + bytes(8)] = b"x" * 40
    db.flush()
    files = db.live_files()
    db.close()
    assert FileRowCounts(tmp_path).count(files) == {1: 1, 2: 1}
