"""Files of RocksDB's, read without RocksDB: the same rows, and damage found, whoever has written them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocksdict

from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.paramserver.store.table_file_reader import TableFileReader
from headrace.schemas.errors import CorruptionError, StorageError
from headrace.schemas.row_keys import META_PREFIX, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard

SHARD = ColumnShard(offset=0, width=4)
RECORD_BYTES, HEADER_BYTES = 40, 24
_ALL = {"first_row": 0, "last_row": 2**63 - 1, "record_bytes": RECORD_BYTES, "header_bytes": HEADER_BYTES}


def _values(ids: np.ndarray[Any, Any]) -> list[bytes]:
    """Return values; every fifth is a deleted row's, a header alone."""
    return [int(i).to_bytes(8, "little") * 5 if i % 5 else int(i).to_bytes(8, "little") * 3 for i in ids]


def _make(path: Path, *, is_compressed: bool = False, num_rows: int = 4000) -> tuple[Path, Any]:
    """Make a store whose one file holds metadata and two tables, the second one's rows with gaps."""
    options = rocks_options(StoreConfig(block_cache_bytes=4 << 20))
    if is_compressed:
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
    db = rocksdict.Rdict(str(path), options)
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(0, 2**40, num_rows))
    for name in ("store/format", "table/1", "session/x"):
        db[b"\0\0\0\0" + name.encode()] = b"1" * rng.integers(1, 300)
    for table, rows in ((1, np.arange(100)), (2, ids), (3, np.arange(50))):
        for key, value in zip(encode_keys(table, SHARD, rows), _values(rows), strict=True):
            db[key] = value
    db.flush()
    db.compact_range(None, None)
    (file,) = db.live_files()
    db.close()
    return path / file["name"].lstrip("/"), ids


def _read(path: Path, table: int, **changes: Any) -> tuple[list[int], list[bytes]]:
    reader = TableFileReader.open(path)
    assert reader is not None
    with reader:
        parts = list(reader.read(key_prefix(table, SHARD), **_ALL | changes))
    return (
        [row for ids, _ in parts for row in ids.tolist()],
        [value for _, records in parts for value in records.tolist()],
    )


@pytest.mark.parametrize("region_bytes", [1, 20_000, 1 << 20])
def test_rows_of_a_compacted_file(tmp_path: Path, region_bytes: int) -> None:
    """Every row of a table is read, deleted ones padded, and nothing of what lies beside it in the file."""
    path, ids = _make(tmp_path / "db")
    for table, rows in ((1, np.arange(100)), (2, ids), (3, np.arange(50)), (4, np.arange(0))):
        found_ids, found = _read(path, table, region_bytes=region_bytes)
        assert found_ids == rows.tolist()
        assert found == [value.ljust(RECORD_BYTES, b"\0") for value in _values(rows)]


def test_a_range_of_rows(tmp_path: Path) -> None:
    """A range ends where it is said to, also amid a block."""
    path, ids = _make(tmp_path / "db")
    first, last = int(ids[1234]), int(ids[1300])
    assert _read(path, 2, first_row=first, last_row=last)[0] == ids[1234:1301].tolist()
    assert _read(path, 2, first_row=first + 1, last_row=last - 1)[0] == ids[1235:1300].tolist()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """A flipped byte among the rows, wherever it is, is an error that names the file."""
    path, ids = _make(tmp_path / "db", num_rows=1000)
    whole = path.read_bytes()
    expected = _read(path, 2)
    assert expected[0] == ids.tolist()
    for at in range(0, len(whole), 997):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x41,)) + whole[at + 1 :])
        try:
            found = _read(path, 2)
        except CorruptionError as exc:
            assert path.name in str(exc)
        except AssertionError:
            continue  # the footer's version: a file of another kind, which RocksDB is asked about
        else:
            # In the filter, or in rows of other tables, which are not looked at.
            assert found == expected
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptionError, match="not a table"):
        TableFileReader.open(path)


def test_a_flipped_byte_of_a_value_is_found(tmp_path: Path) -> None:
    """What stands for a row's value cannot change unseen."""
    path, ids = _make(tmp_path / "db", num_rows=1000)
    row = next(int(row) for row in ids if row % 5)
    whole = path.read_bytes()
    at = whole.index(row.to_bytes(8, "little") * 5)
    path.write_bytes(whole[: at + 11] + b"\xff" + whole[at + 12 :])
    with pytest.raises(CorruptionError, match="checksum"):
        _read(path, 2)


def test_other_kinds_are_left_to_rocksdb(tmp_path: Path) -> None:
    """A compressed file, and one with deletions of ranges, are not read here; one that is not there is an error."""
    path, _ = _make(tmp_path / "lz4", is_compressed=True)
    assert TableFileReader.open(path) is None
    db = rocksdict.Rdict(str(tmp_path / "gone"), rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    db[b"x" * 16] = b"y"
    db.delete_range(b"a", b"b")
    db.flush()
    (file,) = db.live_files()
    db.close()
    assert TableFileReader.open(tmp_path / "gone" / file["name"].lstrip("/")) is None
    with pytest.raises(StorageError, match="No such file"):
        TableFileReader.open(tmp_path / "nowhere.sst")


def _make_with_deletion(path: Path, key: bytes, *, beside: bytes | None = None) -> Path:
    """Make a file of rows and a deletion of a key, with another key beside them or without."""
    db = rocksdict.Rdict(str(path), rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    rows = np.arange(300)
    for row_key, value in zip(encode_keys(2, SHARD, rows), _values(rows), strict=True):
        db[row_key] = value
    if beside is not None:
        db[beside] = b"y"
    del db[key]
    db.flush()
    (file,) = db.live_files()
    db.close()
    return path / file["name"].lstrip("/")


@pytest.mark.parametrize(
    "name", [b"session/x", b"session/long-ago", b"session/1234"], ids=["short", "long", "as a row's"]
)
def test_rows_beside_deleted_metadata(tmp_path: Path, name: bytes) -> None:
    """A file in which metadata is deleted is read as any other, also where its key is as long as a row's."""
    path = _make_with_deletion(tmp_path / "db", META_PREFIX + name)
    assert _read(path, 2) == (list(range(300)), [v.ljust(RECORD_BYTES, b"\0") for v in _values(np.arange(300))])


@pytest.mark.parametrize("beside", [None, META_PREFIX + b"session/x"], ids=["rows alone", "beside metadata"])
def test_a_row_that_rocksdb_has_deleted_is_damage(tmp_path: Path, beside: bytes | None) -> None:
    """No store deletes a row's key: what lies below it in older files must not be taken for its value."""
    key = bytes(encode_keys(2, SHARD, np.array([7]))[0])
    path = _make_with_deletion(tmp_path / "db", key, beside=beside)
    with pytest.raises(CorruptionError, match=r"\.sst: .* a row's entry of type 0, which is no value"):
        _read(path, 2)


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    """Of a store's files the newest comes first, so that its value of a key is the one that counts."""
    store = RowStore.open(tmp_path / "store", config=StoreConfig(block_cache_bytes=4 << 20))
    key = encode_keys(1, SHARD, np.array([7]))[0]
    for number in range(3):  # a fourth file would be compacted, perhaps between the list and the reading
        store.write([key], [bytes((number,)) * RECORD_BYTES])
        store.flush()
    runs = store.sorted_runs(key_prefix(1, SHARD))
    found = [_read(path, 1)[1][0][0] for run in runs for path in run]
    assert found == sorted(found, reverse=True)
    assert found[0] == 2
    assert store.sorted_runs(key_prefix(9)) == []
    store.close()
    assert os.listdir(tmp_path) == ["store"]


def test_entries_are_counted_by_prefix_also_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of each table are counted, about, in a file of several, also where its checksums cannot be made."""
    path, ids = _make(tmp_path / "db")
    wanted = {bytes(4): 3, key_prefix(1): 100, key_prefix(2): ids.size, key_prefix(3): 50}
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert TableFileReader.open(path) is None
    reader = TableFileReader.open(path, is_checked=False)
    assert reader is not None
    with reader:
        assert reader.count_by_prefix(4) == pytest.approx(wanted, rel=0.02)
