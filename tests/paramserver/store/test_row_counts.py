"""How many rows files hold of which RocksDB tells the length alone; with files, in `test_row_store.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rocksdict

from headrace.paramserver.store import row_counts
from headrace.paramserver.store.row_counts import FileRowCounts
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.schemas.identity_claims import CLAIMS_SHARD
from headrace.schemas.row_keys import META_PREFIX, key_prefix


def _file(prefix: bytes, size_bytes: int, num_entries: int, last: bytes | None = None) -> dict[str, Any]:
    return {
        "name": "/none.sst",
        "start_key": prefix + bytes(8),
        "end_key": (prefix if last is None else last) + bytes(8),
        "size": size_bytes,
        "num_entries": num_entries,
    }


def test_a_file_is_as_dense_as_all_that_are_known_of_its_column_shard(tmp_path: Path) -> None:
    """What RocksDB has looked into tells of the rest, and no file is opened for it."""
    one, other = key_prefix(1), key_prefix(2)
    files = [
        _file(one, 1000, 100),
        _file(other, 1000, 1),
        _file(one, 3000, 100),
        _file(one, 2000, 0),
        _file(other, 5000, 0),
    ]
    assert FileRowCounts(tmp_path).count(files) == {1: 300, 2: 6}


def test_a_file_that_cannot_be_told_counts_for_nothing(tmp_path: Path) -> None:
    """One that was compacted away since it was listed, or is empty, stops no count."""
    files = [_file(key_prefix(1), 1000, 0), _file(key_prefix(2), 0, 0), _file(key_prefix(3), 10, 3)]
    assert FileRowCounts(tmp_path).count(files) == {1: 0, 2: 0, 3: 3}


def test_a_file_that_was_looked_into_stands_for_its_column_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is opened for all of which nothing is known, once; it does not outweigh what is known later."""
    one, opened = key_prefix(1), list[str]()

    def look_into(path: Path) -> dict[bytes, int]:
        opened.append(path.name)
        return {one: 100}

    monkeypatch.setattr(row_counts, "_look_into", look_into)
    counts, files = FileRowCounts(tmp_path), [_file(one, 1000, 0), _file(one, 3000, 0)]
    for _ in range(2):
        assert counts.count(files) == {1: 400}
    assert opened == ["none.sst"]
    assert counts.count([*files, _file(one, 1000, 50)]) == {1: 250}


def test_a_file_of_several_tables_tells_nothing_of_others(tmp_path: Path) -> None:
    """How dense it is as a whole is not how dense one table's rows lie."""
    one = key_prefix(1)
    files = [_file(one, 1000, 900, key_prefix(3)), _file(one, 2000, 0)]
    assert FileRowCounts(tmp_path).count(files) == {1: 300, 2: 300, 3: 300}


def test_a_file_of_another_kind_is_shared_out(tmp_path: Path) -> None:
    """One that is there and cannot be read here, as it is compressed, counts as one that cannot be told."""
    options = rocks_options(StoreConfig(block_cache_bytes=4 << 20))
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    db = rocksdict.Rdict(str(tmp_path), options)
    for table_id in (1, 2):
        db[key_prefix(table_id) + bytes(8)] = b"x" * 40
    db.flush()
    files = db.live_files()
    db.close()
    assert FileRowCounts(tmp_path).count(files) == {1: 1, 2: 1}


def test_files_of_claims_or_metadata_hold_no_rows(tmp_path: Path) -> None:
    """Neither is a row, however many there are."""
    files = [_file(key_prefix(1, CLAIMS_SHARD), 1000, 100), _file(META_PREFIX + b"sess", 1000, 100)]
    assert not FileRowCounts(tmp_path).count(files)


def test_a_file_of_several_tables_that_cannot_be_told_is_shared_out(tmp_path: Path) -> None:
    """Its entries count in equal parts for the tables between its first key and its last, metadata left out."""
    assert FileRowCounts(tmp_path).count([_file(META_PREFIX, 1000, 90, key_prefix(3))]) == {1: 30, 2: 30, 3: 30}
