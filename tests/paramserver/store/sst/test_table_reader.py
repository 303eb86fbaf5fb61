"""Table files read without RocksDB: the same rows, and every kind of damage found, whoever wrote them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocksdict
from crc32c import crc32c
from open_files import files_open_in
from row_batches import SPEC, make_batch, parts_of

from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst import format as sst
from headrace.paramserver.store.sst.format import any_entries, mask_crc, read_handle
from headrace.paramserver.store.sst.table_reader import BlockCheck, TableFileReader
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.schemas.errors import CorruptionError, StorageError
from headrace.schemas.row_records import META_PREFIX, RecordLayout, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard

SHARD = ColumnShard(offset=0, width=4)
RECORD_BYTES, HEADER_BYTES, FOOTER_BYTES = 40, 24, 53
CONFIG = StoreConfig(block_cache_bytes=4 << 20, file_bytes=0)
_ALL = {"first_row": 0, "last_row": 2**63 - 1, "record_bytes": RECORD_BYTES, "header_bytes": HEADER_BYTES}


def _values(ids: np.ndarray[Any, Any]) -> list[bytes]:
    """Return values; every fifth is a deleted row's, a header alone."""
    return [int(i).to_bytes(8, "little", signed=True) * (5 if i % 5 else 3) for i in ids]


def _pairs(table: int, ids: np.ndarray[Any, Any]) -> Iterable[tuple[bytes, bytes]]:
    return zip(encode_keys(table, SHARD, ids), _values(ids), strict=True)


def _key(table: int, row: int) -> bytes:
    return bytes(encode_keys(table, SHARD, np.array([row]))[0])


def _file_of(
    path: Path, pairs: Iterable[tuple[bytes, bytes]], *, options: Any = None, then: Callable[[Any], None] | None = None
) -> Path:
    """Have RocksDB make one file of pairs, and of what `then` does."""
    db = rocksdict.Rdict(str(path), options or rocks_options(CONFIG))
    for key, value in pairs:
        db[key] = value
    if then is not None:
        then(db)
    db.flush()
    (file,) = db.live_files()
    db.close()
    return path / str(file["name"]).lstrip("/")


def _compact(db: Any) -> None:
    db.flush()
    db.compact_range(None, None)


def _make(path: Path, *, options: Any = None, num_rows: int = 4000) -> tuple[Path, Any]:
    """Make a compacted file with metadata and three tables, the second one's rows with gaps."""
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(0, 2**40, num_rows))
    names = ("store/format", "table/1", "session/x")
    pairs = [(META_PREFIX + name.encode(), b"1" * rng.integers(1, 300)) for name in names]
    for table, rows in ((1, np.arange(100)), (2, ids), (3, np.arange(50))):
        pairs += _pairs(table, rows)
    return _file_of(path, pairs, options=options, then=_compact), ids


def _open(path: Path) -> TableFileReader:
    reader = TableFileReader.open(path)
    assert reader is not None
    return reader


def _read(path: Path, table: int, **changes: Any) -> tuple[list[int], list[bytes]]:
    with _open(path) as reader:
        parts = list(reader.read(key_prefix(table, SHARD), **_ALL | changes))
    return (
        [row for ids, _ in parts for row in ids.tolist()],
        [value for _, records in parts for value in records.tolist()],
    )


def _abbreviating() -> Any:
    """Return options of RocksDB with which keys share bytes, as earlier releases had them."""
    table, options = rocksdict.BlockBasedOptions(), rocks_options(CONFIG)
    table.set_block_size(CONFIG.block_bytes)
    table.set_format_version(5)
    table.set_checksum_type(rocksdict.ChecksumType.crc32c())
    options.set_block_based_table_factory(table)
    return options


@pytest.mark.parametrize("has_whole_keys", [True, False])
@pytest.mark.parametrize("region_bytes", [1, 20_000, 1 << 20])
def test_rows_of_a_file_of_rocksdb(tmp_path: Path, region_bytes: int, has_whole_keys: bool) -> None:
    """Every row of a table is read, deleted ones padded, and nothing that lies beside it in the file."""
    path, ids = _make(tmp_path / "db", options=rocks_options(CONFIG) if has_whole_keys else _abbreviating())
    for table, rows in ((1, np.arange(100)), (2, ids), (3, np.arange(50)), (4, np.arange(0))):
        found_ids, found = _read(path, table, region_bytes=region_bytes)
        assert found_ids == rows.tolist()
        assert found == [value.ljust(RECORD_BYTES, b"\0") for value in _values(rows)]
    first, last = int(ids[1234]), int(ids[1300])
    for skipped in (0, 1):  # a range may begin and end amid a block
        settings = {"first_row": first + skipped, "last_row": last - skipped, "region_bytes": region_bytes}
        assert _read(path, 2, **settings)[0] == ids[1234 + skipped : 1301 - skipped].tolist()


def test_blocks_of_a_compaction_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store's files have whole keys, also those that RocksDB has written, so few blocks are decoded step by step."""
    rows = np.arange(4000)
    value = b"v" * RECORD_BYTES
    pairs = zip(encode_keys(1, SHARD, rows), [value] * rows.size, strict=True)
    path = _file_of(tmp_path / "db", pairs, then=_compact)
    num_single = 0

    def count(*args: Any) -> Any:
        nonlocal num_single
        ids, records = any_entries(*args)
        num_single += ids.size
        return ids, records

    monkeypatch.setattr(sst, "any_entries", count)
    assert _read(path, 1) == (rows.tolist(), [value] * rows.size)
    assert num_single < 400


def _make_own(path: Path, num_rows: int) -> Path:
    """Make a file as a store writes it, with rows of two tables; those of the second in two runs, a short one first."""
    rows = range(0, 3 * num_rows, 3)
    batches = [(1, make_batch(1, range(num_rows))), (2, make_batch(2, rows[:50])), (2, make_batch(3, rows[50:]))]
    runs = [coalesce(table, parts_of(batch)).copied() for table, batch in batches]
    TableFileWriter(block_bytes=1024, bloom_bits_per_key=10).write(path, runs)
    return path


def test_each_row_of_a_file_of_our_own(tmp_path: Path) -> None:
    """A single row is found wherever it lies in its block, first and last included."""
    size_bytes = RecordLayout(SPEC, SPEC.whole).size_bytes
    with _open(_make_own(tmp_path / "own.sst", 300)) as reader:
        for row in range(0, 900, 3):
            settings = {"first_row": row, "last_row": row, "record_bytes": size_bytes, "header_bytes": HEADER_BYTES}
            ((ids, records),) = reader.read(key_prefix(2, SPEC.whole), **settings)
            assert ids.tolist() == [row] and len(records) == 1


@pytest.mark.parametrize("region_bytes", [5000, 100_000, 400_000])
def test_all_rows_of_a_file_of_our_own(tmp_path: Path, region_bytes: int) -> None:
    """Equally long blocks are read with others before and after them, and none is left out."""
    num_rows = 12_000
    settings = _ALL | {"record_bytes": RecordLayout(SPEC, SPEC.whole).size_bytes, "region_bytes": region_bytes}
    with _open(_make_own(tmp_path / "own.sst", num_rows)) as reader:
        for table, step in ((1, 1), (2, 3)):
            parts = list(reader.read(key_prefix(table, SPEC.whole), **settings))
            assert np.concatenate([ids for ids, _ in parts]).tolist() == list(range(0, step * num_rows, step))
            assert sum(len(records) for _, records in parts) == num_rows


def test_files_that_cannot_be_used_are_closed(tmp_path: Path) -> None:
    """Another kind of file gives no reader, and a footer that leads astray is damage; neither stays open."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    whole = path.read_bytes()
    body, footer = whole[:-FOOTER_BYTES], whole[-FOOTER_BYTES:]
    meta_end = read_handle(footer, 1)[2]
    index = footer[meta_end : read_handle(footer, meta_end)[2]]
    for at, byte in ((0, 4), (41, 4), (41, 6)):  # another kind of checksum; another version
        path.write_bytes(body + footer[:at] + bytes((byte,)) + footer[at + 1 :])
        assert TableFileReader.open(path) is None
    for damaged in (
        body + (footer[:1] + index + index).ljust(41, b"\0") + footer[41:],
        body + footer[:-1] + b"\0",
        whole[: len(whole) // 2],
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="not a table of RocksDB's"):
            TableFileReader.open(path)
    with pytest.raises(StorageError, match="No such file"):
        TableFileReader.open(tmp_path / "nowhere.sst")
    assert not files_open_in(tmp_path)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path, has_index: bool) -> None:
    """The error says where the file ends."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    with _open(path) as reader:
        if has_index:
            reader.blocks()
        os.truncate(path, 10_000)
        with pytest.raises(CorruptionError, match=r"\.sst: ends at byte"):
            list(reader.read(key_prefix(2, SHARD), **_ALL))


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It is not damage: another attempt may succeed."""
    path, _ = _make(tmp_path / "db", num_rows=1000)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=r"\.sst: Input/output error$"):
        _read(path, 2)


def test_the_first_block_that_is_damaged_is_named(tmp_path: Path) -> None:
    """A block that claims to be compressed, in a file that says it has none, is damage too."""
    path, _ = _make(tmp_path / "db", num_rows=1000)
    with _open(path) as reader:
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
    whole, expected = path.read_bytes(), _read(path, 2)
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
            assert found == expected  # in the filter, or in rows of other tables, which are not read
    row = next(int(row) for row in ids if row % 5)
    at = whole.index(row.to_bytes(8, "little") * 5)
    path.write_bytes(whole[: at + 11] + b"\xff" + whole[at + 12 :])  # in a value
    with pytest.raises(CorruptionError, match="checksum"):
        _read(path, 2)


def test_other_kinds_are_left_to_rocksdb(tmp_path: Path) -> None:
    """Compression, other checksums and other indexes are not read."""
    lz4 = rocks_options(CONFIG)
    lz4.set_compression_type(rocksdict.DBCompressionType.lz4())
    table = rocksdict.BlockBasedOptions()
    table.set_format_version(5)
    table.set_checksum_type(rocksdict.ChecksumType.crc32c())
    table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    two_levels = rocksdict.Options(raw_mode=True)
    two_levels.set_compression_type(rocksdict.DBCompressionType.none())
    two_levels.set_block_based_table_factory(table)
    pairs, plain = [(b"x" * 16, b"y")], rocksdict.Options(raw_mode=True)
    for path in (
        _make(tmp_path / "lz4", options=lz4)[0],
        xxh3 := _file_of(tmp_path / "xxh3", pairs, options=plain),
        _file_of(tmp_path / "levels", pairs, options=two_levels),
    ):
        assert TableFileReader.open(path) is None
    # The kind has no checksum: if others passed the check, damage there would hide the rest.
    with pytest.raises(CorruptionError, match="not a table of the kind that this version writes"):
        BlockCheck.open(xxh3)


@pytest.mark.parametrize(
    ("beside", "then", "removed"),
    [
        ([], lambda db: db.delete(_key(2, 7)), [7]),  # yielded: its value in older files is not the newest
        ([(META_PREFIX + b"session/x", b"y")], lambda db: db.delete(_key(2, 7)), [7]),
        ([*_pairs(3, np.arange(300))], lambda db: db.delete_range(_key(3, 0), _key(4, 0)), []),
        ([], lambda db: db.delete(META_PREFIX + b"session/x"), []),
        ([], lambda db: db.delete(META_PREFIX + b"session/long-ago"), []),
        ([], lambda db: db.delete(META_PREFIX + b"session/1234"), []),
    ],
    ids=["a removed row", "and metadata", "a dropped table", "removed metadata", "of a long name", "of a row's length"],
)
def test_what_is_removed(
    tmp_path: Path, beside: list[tuple[bytes, bytes]], then: Callable[[Any], None], removed: list[int]
) -> None:
    """A removed row has a record of zeros, and other removals beside the rows do not matter; checks pass."""
    path = _file_of(tmp_path / "db", [*_pairs(2, np.arange(300)), *beside], then=then)
    expected = [value.ljust(RECORD_BYTES, b"\0") for value in _values(np.arange(300))]
    for row in removed:
        expected[row] = bytes(RECORD_BYTES)
    assert _read(path, 2) == (list(range(300)), expected)
    _check(path, path.read_bytes(), 1 << 22)


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    """The newest of a store's files comes first, so that its value of a key counts."""
    store = RowStore.open(tmp_path / "store", config=CONFIG)
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
    """Entries of each table in a file are counted, about, also where blocks hold keys of many small tables."""
    path, ids = _make(tmp_path / "db")
    wanted = {bytes(4): 3, key_prefix(1): 100, key_prefix(2): ids.size, key_prefix(3): 50}
    with _open(path) as reader:
        assert reader.count_by_prefix(4) == pytest.approx(wanted, rel=0.02)
    keys = [key for table in range(1, 41) for key in encode_keys(table, SHARD, np.arange(60))]
    with _open(_file_of(tmp_path / "small", [(key, bytes(RECORD_BYTES)) for key in keys])) as reader:
        assert reader.count_by_prefix(4) == pytest.approx({key_prefix(table): 60 for table in range(1, 41)}, rel=0.1)


def _flushed(path: Path) -> Path:
    """Make a file as RocksDB does, with metadata of a long name beside the rows."""
    pairs = [(key, bytes(RECORD_BYTES)) for key in encode_keys(2, SHARD, np.arange(0, 900, 3))]
    return _file_of(path, [*pairs, (META_PREFIX + b"session/" + b"x" * 200, b"1" * 20_000)])


def _ingested(path: Path) -> Path:
    store = RowStore.open(path, config=CONFIG)
    store.write_runs([coalesce(2, parts_of(make_batch(1, range(300)))).copied()], meta={}, applied_seq=1)
    store.close()
    return max(path.glob("*.sst"), key=lambda file: file.stat().st_size)


def _check(path: Path, data: bytes, piece_bytes: int) -> None:
    check = BlockCheck.open(path)
    assert not files_open_in(path)  # a snapshot of thousands of files needs no descriptor for each
    for at in range(0, len(data), piece_bytes):
        check.take(memoryview(data)[at : at + piece_bytes])
    check.finish()


@pytest.mark.parametrize("make", [_flushed, _ingested])
@pytest.mark.parametrize("piece_bytes", [1, 4, 1000, 4096, 1 << 22])
def test_every_block_is_checked(make: Callable[[Path], Path], piece_bytes: int, tmp_path: Path) -> None:
    """A sound file passes, whatever its pieces; a flipped bit of any block, filter and index included, does not."""
    path = make(tmp_path / "store")
    whole = path.read_bytes()
    _check(path, whole, piece_bytes)
    end = len(whole) - FOOTER_BYTES
    # The last blocks, of metadata, are short.
    for at in [*range(0, end, 491), *range(end - 1500, end, 7)] if piece_bytes > 4 else range(0, end, 4999):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError, match=rf"{path.name}: the block at byte \d+ does not match its checksum"):
            _check(path, bytes(damaged), piece_bytes)
    with pytest.raises(CorruptionError, match=r"ends at byte .* before its last block"):
        _check(path, whole[: len(whole) // 2], piece_bytes)


def test_an_index_that_names_blocks_beyond_the_file(tmp_path: Path) -> None:
    """With a right checksum too, an index with false sizes is damage, before there is a buffer of such a size."""
    path = _make_own(tmp_path / "own.sst", 300)
    with _open(path) as reader:
        offsets, sizes = reader.blocks()
    data = bytearray(path.read_bytes())
    for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        if data[at : at + 3] == sst.INDEX_HEAD:
            entries = size // (sst.INDEX_ENTRY.itemsize + 4) * sst.INDEX_ENTRY.itemsize
            data[at + entries - sst.SIZE_DIGITS : at + entries] = b"\xff\xff\xff\x7f"  # of the last block: 2²⁸ - 1
            sealed = int(mask_crc(np.array([crc32c(data[at : at + size + 1])], np.uint32))[0])
            data[at + size + 1 : at + size + sst.TRAILER_BYTES] = sealed.to_bytes(4, "little")
    path.write_bytes(data)
    for use in (BlockCheck.open, lambda path: _read(path, 2)):
        with pytest.raises(CorruptionError, match="overlap, or lie beyond"):
            use(path)


@pytest.mark.parametrize("offset", [0, 2**20, 2**69], ids=["another block's", "beyond the end", "no offset"])
def test_metadata_that_is_named_where_it_is_not(offset: int, tmp_path: Path) -> None:
    """With a right checksum too, a filter among the rows or beyond the file is damage, before its bytes are read."""
    path = _make_own(tmp_path / "own.sst", 300)
    data = bytearray(path.read_bytes())
    begin, size, _ = sst.read_handle(bytes(data[-53:]), 1)
    key, value = next(sst.read_entries(bytes(data[begin : begin + size])))
    handle = sst.varint(offset) + sst.varint(100)
    key = (key + bytes(len(value)))[: len(key) + len(value) - len(handle)]
    entry = bytes([0, len(key), len(handle)]) + key + handle
    data[begin : begin + len(entry)] = entry
    sealed = int(mask_crc(np.array([crc32c(data[begin : begin + size + 1])], np.uint32))[0])
    data[begin + size + 1 : begin + size + sst.TRAILER_BYTES] = sealed.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptionError):
        BlockCheck.open(path)


def test_a_number_without_an_end() -> None:
    """A varint of a million bytes is refused by its tenth: to add up its digits would take minutes."""
    with pytest.raises(ValueError, match="varint"):
        sst.read_varint(b"\xff" * 1_000_000, 0)


@pytest.mark.parametrize("size_bytes", [1, 2, 8])
def test_a_damaged_footer_is_reported(size_bytes: int, tmp_path: Path) -> None:
    """Places outside the file are not read, and the bytes that tell the kind of file may not change."""
    path = _flushed(tmp_path / "store")
    whole = path.read_bytes()
    kind = [len(whole) - FOOTER_BYTES, *range(len(whole) - 12, len(whole))]  # of checksum; version and magic number
    num_reported = 0
    for at in range(len(whole) - FOOTER_BYTES, len(whole) - size_bytes + 1):
        for fill in (b"\xff", b"\x7f", b"\0"):
            damaged = whole[:at] + fill * size_bytes + whole[at + size_bytes :]
            path.write_bytes(damaged)
            try:
                BlockCheck.open(path)
            except CorruptionError as exc:
                assert path.name in str(exc)
                num_reported += 1
            else:
                assert [damaged[byte] for byte in kind] == [whole[byte] for byte in kind]
    assert num_reported > 3 * len(kind)
