"""Files of RocksDB's, read without RocksDB: the same rows, and damage found, whoever has written them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocksdict
from crc32c import crc32c
from open_files import files_open_in
from row_batches import SPEC, make_batch

from headrace.paramserver.store.pending import Part, coalesce
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.paramserver.store.table_file import TableFileWriter
from headrace.paramserver.store.table_file_format import mask_crc, read_handle
from headrace.paramserver.store.table_file_reader import TableFileReader
from headrace.schemas.errors import CorruptionError, StorageError
from headrace.schemas.row_keys import META_PREFIX, encode_keys, key_prefix
from headrace.schemas.row_records import RecordLayout
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


@pytest.mark.parametrize("region_bytes", [1, 1 << 20])
def test_a_range_of_rows(tmp_path: Path, region_bytes: int) -> None:
    """A range ends where it is said to, also amid a block."""
    path, ids = _make(tmp_path / "db")
    first, last = int(ids[1234]), int(ids[1300])
    for skipped in (0, 1):
        settings = {"first_row": first + skipped, "last_row": last - skipped, "region_bytes": region_bytes}
        assert _read(path, 2, **settings)[0] == ids[1234 + skipped : 1301 - skipped].tolist()


def _make_own(path: Path, num_rows: int) -> Path:
    """Make a file as a store writes it, with rows of two tables; those of the second in two runs, a short one first."""
    rows = range(0, 3 * num_rows, 3)
    batches = [(1, make_batch(1, range(num_rows))), (2, make_batch(2, rows[:50])), (2, make_batch(3, rows[50:]))]
    runs = [coalesce(table, [Part.of_delta(batch.deltas[0], batch)]).copied() for table, batch in batches]
    TableFileWriter(block_bytes=1024, bloom_bits_per_key=10).write(path, runs)
    return path


def test_each_row_of_a_file_of_our_own(tmp_path: Path) -> None:
    """A row is found by itself wherever it lies in its block, first and last included."""
    reader = TableFileReader.open(_make_own(tmp_path / "own.sst", 300))
    assert reader is not None
    size_bytes = RecordLayout(SPEC, SPEC.whole).size_bytes
    with reader:
        for row in range(300):
            settings = {"first_row": 3 * row, "last_row": 3 * row, "record_bytes": size_bytes, "header_bytes": 24}
            ((ids, records),) = reader.read(key_prefix(2, SPEC.whole), **settings)
            assert ids.tolist() == [3 * row] and len(records) == 1


@pytest.mark.parametrize("region_bytes", [5000, 100_000, 1 << 20])
def test_all_rows_of_a_file_of_our_own(tmp_path: Path, region_bytes: int) -> None:
    """Blocks of one length are read with those of others before and behind them, and none is left out."""
    num_rows = 30_000
    reader = TableFileReader.open(_make_own(tmp_path / "own.sst", num_rows))
    assert reader is not None
    settings = {"first_row": 0, "last_row": 2**63 - 1, "header_bytes": 24, "region_bytes": region_bytes}
    settings["record_bytes"] = RecordLayout(SPEC, SPEC.whole).size_bytes
    with reader:
        for table, step in ((1, 1), (2, 3)):
            parts = list(reader.read(key_prefix(table, SPEC.whole), **settings))
            assert np.concatenate([ids for ids, _ in parts]).tolist() == list(range(0, step * num_rows, step))
            assert sum(len(records) for _, records in parts) == num_rows


def test_what_cannot_be_used_is_told_and_closed(tmp_path: Path) -> None:
    """A kind that is not read here is none, a footer that leads astray is damage, and neither stays open."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    whole = path.read_bytes()
    body, footer = whole[:-53], whole[-53:]
    meta_end = read_handle(footer, 1)[2]
    index = footer[meta_end : read_handle(footer, meta_end)[2]]
    for at, byte in ((0, 4), (41, 4), (41, 6)):  # another kind of checksum; another version
        path.write_bytes(body + footer[:at] + bytes((byte,)) + footer[at + 1 :])
        assert TableFileReader.open(path) is None
    path.write_bytes(body + (footer[:1] + index + index).ljust(41, b"\0") + footer[41:])
    with pytest.raises(CorruptionError, match="not a table of RocksDB's"):
        TableFileReader.open(path)
    path.write_bytes(body + footer[:-1] + b"\0")
    with pytest.raises(CorruptionError, match="not a table of RocksDB's, or not all of it"):
        TableFileReader.open(path)
    assert not files_open_in(tmp_path)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    """What is not there any more is said with the place where the file ends."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    for has_index in (False, True):
        path, _ = _make(tmp_path / f"db{has_index}", num_rows=1000)
        reader = TableFileReader.open(path)
        assert reader is not None
        with reader:
            if has_index:
                reader.blocks()
            os.truncate(path, 10_000)
            with pytest.raises(CorruptionError, match=r"\.sst: ends at byte"):
                list(reader.read(key_prefix(2, SHARD), **_ALL))


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It is no damage: another attempt may succeed."""
    path, _ = _make(tmp_path / "db", num_rows=1000)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=r"\.sst: Input/output error$"):
        _read(path, 2)


def test_the_first_block_that_is_damaged_is_named(tmp_path: Path) -> None:
    """Of several the one that comes first; a block that is compressed, in a file that says it has none, is damage."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    reader = TableFileReader.open(path)
    assert reader is not None
    with reader:
        offsets, sizes = reader.blocks()
        data = bytearray(path.read_bytes())
        reader.check_blocks(memoryview(data), 0, offsets, sizes)
        end = int(offsets[4] + sizes[4])
        data[end] = 1
        checksum = mask_crc(np.array([crc32c(data[offsets[4] : end + 1])], np.uint32))
        data[end + 1 : end + 5] = checksum.astype("<u4").tobytes()
        for first in (4, 2):
            data[int(offsets[6])] ^= 1
            if first == 2:
                data[int(offsets[2])] ^= 1
            with pytest.raises(CorruptionError, match=rf"the block at byte {offsets[first]} does not match its"):
                reader.check_blocks(memoryview(data), 0, offsets, sizes)


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
    """Compression, other checksums or indexes, deletions of ranges are not read; where no file is, that is an error."""
    path, _ = _make(tmp_path / "lz4", is_compressed=True)
    assert TableFileReader.open(path) is None
    plain = rocksdict.Rdict(str(tmp_path / "xxh3"), rocksdict.Options(raw_mode=True))
    plain[b"x" * 16] = b"y"
    plain.flush()
    (file,) = plain.live_files()
    plain.close()
    assert TableFileReader.open(tmp_path / "xxh3" / file["name"].lstrip("/")) is None
    db = rocksdict.Rdict(str(tmp_path / "gone"), rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    db[b"x" * 16] = b"y"
    db.delete_range(b"a", b"b")
    db.flush()
    (file,) = db.live_files()
    db.close()
    assert TableFileReader.open(tmp_path / "gone" / file["name"].lstrip("/")) is None
    table = rocksdict.BlockBasedOptions()
    table.set_format_version(5)
    table.set_checksum_type(rocksdict.ChecksumType.crc32c())
    table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    options = rocksdict.Options(raw_mode=True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_block_based_table_factory(table)
    levels = rocksdict.Rdict(str(tmp_path / "levels"), options)
    levels[b"x" * 16] = b"y"
    levels.flush()
    (file,) = levels.live_files()
    levels.close()
    assert TableFileReader.open(tmp_path / "levels" / file["name"].lstrip("/")) is None
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


def test_entries_are_counted_by_prefix(tmp_path: Path) -> None:
    """Entries of each table are counted, about, in a file of several."""
    path, ids = _make(tmp_path / "db")
    wanted = {bytes(4): 3, key_prefix(1): 100, key_prefix(2): ids.size, key_prefix(3): 50}
    reader = TableFileReader.open(path)
    assert reader is not None
    with reader:
        assert reader.count_by_prefix(4) == pytest.approx(wanted, rel=0.02)


def test_entries_of_many_small_tables_are_counted_one_by_one(tmp_path: Path) -> None:
    """Where blocks hold keys of several tables, one after the other, none stands for the next."""
    db = rocksdict.Rdict(str(tmp_path / "db"), rocks_options(StoreConfig(block_cache_bytes=4 << 20)))
    for table in range(1, 41):
        for key in encode_keys(table, SHARD, np.arange(60)):
            db[key] = bytes(RECORD_BYTES)
    db.flush()
    (file,) = db.live_files()
    db.close()
    reader = TableFileReader.open(tmp_path / "db" / file["name"].lstrip("/"))
    assert reader is not None
    with reader:
        assert reader.count_by_prefix(4) == pytest.approx({key_prefix(table): 60 for table in range(1, 41)}, rel=0.1)
