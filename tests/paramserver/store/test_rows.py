"""The store: atomic writes, crashes, estimates, and readable errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocksdict
from instruction_steps import at_each_step_of
from row_batches import SPEC, copy_as_after_crash, make_batch, parts_of

from headrace.paramserver.store import rows as rows_module
from headrace.paramserver.store.coalescing import SortedRun, coalesce
from headrace.paramserver.store.rocksdb import RocksDb, StoreConfig, rocks_options
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.schemas.errors import ConfigError, CorruptionError, InvariantError, StorageError
from headrace.schemas.row_records import META_PREFIX, decode_row_ids, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard

SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20, rows_per_write=10)
FILES = StoreConfig(block_cache_bytes=8 << 20, file_bytes=0)  # each write of rows is a file


def open_store(path: Path, config: StoreConfig = SMALL) -> RowStore:
    return RowStore.open(path, config=config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    store = open_store(tmp_path / "db")
    yield store
    store.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[RowStore]:
    store = open_store(tmp_path / "db", FILES)
    yield store
    store.close()


def run_of(seq: int, rows: range, table_id: int = 1) -> SortedRun:
    return coalesce(table_id, parts_of(make_batch(seq, rows))).copied()


def put(store: RowStore, rows: range, seq: int = 1, **meta: bytes) -> None:
    store.write_runs([run_of(seq, rows)], meta={key.encode(): value for key, value in meta.items()}, applied_seq=seq)


def keys_of(rows: range, table_id: int = 1) -> list[bytes]:
    return encode_keys(table_id, SPEC.whole, np.array(rows, np.int64))


def crash(store: RowStore, to: Path) -> RowStore:
    """Return the store that a crash at this moment would leave."""
    copy_as_after_crash(store.path, to)
    return open_store(to)


def test_writes_are_bounded(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with a few rows share writes, and a long one is split: no other Python thread runs during one."""
    sizes, write = [], store._write
    monkeypatch.setattr(store, "_write", lambda keys, *rest: (sizes.append(len(keys)), write(keys, *rest)))
    runs = [run_of(1, range(size), table_id) for table_id, size in enumerate((3, 4, 17, 1), 1)]
    store.write_runs(runs, meta={}, applied_seq=1)
    assert sizes == [4, 10, 10, 5, 1]  # the tables' column shards, three writes of rows, the log position
    for run in runs:
        assert store.get(keys_of(range(run.row_ids.size), run.table_id)) == run.layout.values_of(run.records)


def test_rows_meta_and_position_come_back(tmp_path: Path) -> None:
    """Pairs and metadata survive a restart, and the store's own metadata is protected."""
    store = open_store(tmp_path / "db")
    assert (store.applied_seq, store.durable_seq, store.read_meta()) == (0, 0, {})
    with pytest.raises(ConfigError, match="store/"):  # the store's own
        store.write([], [], meta={b"store/applied_seq": b"9"}, applied_seq=1)
    store.write([b"\0\0\0\1k"], [b"v"], meta={b"a": b"1", b"": b"empty", b"gone": b"1"}, applied_seq=7)
    store.write([b"\0\0\0\1k"], [b"w"], meta={b"a": b"2", b"gone": b""}, applied_seq=9)
    assert store.get([b"\0\0\0\1k", b"nothing"]) == [b"w", None]
    assert store.applied_seq == 9
    store.close()
    store.close()
    store = open_store(tmp_path / "db")
    assert store.get([b"nothing", b"\0\0\0\1k"]) == [None, b"w"]
    assert (store.applied_seq, store.durable_seq) == (9, 9)
    assert store.read_meta() == {b"a": b"2", b"": b"empty"}
    store.close()


def test_a_crash_leaves_what_was_flushed(tmp_path: Path) -> None:
    """After a crash the position, rows and metadata are those of one moment, at least as new as `durable_seq`."""
    store = open_store(tmp_path / "db")
    copy_as_after_crash(store.path, tmp_path / "before")
    copy = RowStore.open_read_only(tmp_path / "before", config=SMALL)
    assert (copy.applied_seq, copy.layouts(1)) == (0, ())  # before the first flush it is an empty store
    copy.close()
    put(store, range(100), m=b"1")
    store.flush()
    assert store.durable_seq == 1
    put(store, range(200), 2, m=b"2")
    assert store.durable_seq == 1
    after = crash(store, tmp_path / "crashed")
    assert (after.applied_seq, after.durable_seq, after.read_meta()) == (1, 1, {b"m": b"1"})
    assert after.get(keys_of(range(100))) == run_of(1, range(100)).layout.values_of(run_of(1, range(100)).records)
    # What comes from the log once more makes it whole.
    put(after, range(200), 2, m=b"2")
    assert after.get(keys_of(range(200))) == store.get(keys_of(range(200)))
    store.close()
    after.close()


def test_a_crash_after_the_first_file_leaves_a_store(file_store: RowStore, tmp_path: Path) -> None:
    """A crash after ingesting a file into a new store leaves a store that opens."""
    put(file_store, range(2))
    after = crash(file_store, tmp_path / "crashed")
    assert after.applied_seq == 0
    after.close()


def test_a_leftover_name_does_not_lead_into_the_store(file_store: RowStore, tmp_path: Path) -> None:
    """An ingested file that kept its first name as well is not overwritten by the next one."""
    put(file_store, range(100))
    ingested = max((tmp_path / "db").glob("*.sst"))
    (tmp_path / "db" / "incoming-rows").hardlink_to(ingested)
    before = ingested.read_bytes()
    put(file_store, range(200, 300), 2)
    assert ingested.read_bytes() == before


@pytest.mark.parametrize(("errors", "waits"), [("0", 2), ("1", 0)])
def test_files_wait_for_compactions(
    file_store: RowStore, monkeypatch: pytest.MonkeyPatch, errors: str, waits: int
) -> None:
    """No file is added while lookups would pass through too many; if compacting failed, RocksDB says so."""
    levels, slept = ["21", "20", "19"], list[float]()
    monkeypatch.setattr(file_store, "rocksdb_property", lambda name: levels.pop(0) if "level0" in name else errors)
    monkeypatch.setattr(rows_module.time, "sleep", slept.append)
    put(file_store, range(100))
    assert slept == [rows_module.STALL_POLL_S] * waits


def test_no_rows_make_no_file(file_store: RowStore) -> None:
    """Empty runs are skipped, alone or beside others, and the position advances."""
    put(file_store, range(0))
    assert file_store.applied_seq == 1 and not [file for file in file_store._db.live_files() if file["num_entries"]]
    file_store.write_runs([run_of(2, range(0)), run_of(2, range(5), 2)], meta={}, applied_seq=2)
    assert file_store.get(keys_of(range(5), 2)).count(None) == 0
    assert file_store.num_rows_estimates([1, 2]) == [0, 5]


@pytest.mark.parametrize("is_direct", [False, True])
def test_rocksdb_goes_past_the_page_cache_where_files_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """RocksDB uses direct I/O exactly where the file system supports it."""
    asked: list[bool] = []
    monkeypatch.setattr(rows_module, "supports_direct_io", lambda path: is_direct)
    monkeypatch.setattr(
        rows_module, "rocks_options", lambda config, *, is_direct: asked.append(is_direct) or rocks_options(config)
    )
    open_store(tmp_path / "db").close()
    assert asked == [is_direct]


@pytest.mark.parametrize("config", [SMALL, FILES])
def test_an_erased_table_is_gone_and_others_stay(tmp_path: Path, config: StoreConfig) -> None:
    """Rows in memory and in files; after a crash between the rows and the note, erasing again does the rest."""
    store = open_store(tmp_path / "db", config)
    for table_id in (1, 2, 3):
        store.write_runs([run_of(table_id, range(50), table_id)], meta={}, applied_seq=table_id)
    store.flush()
    store.write_runs([run_of(4, range(40, 60), 2)], meta={}, applied_seq=4)
    write, store._write = store._write, lambda *_: store.flush()  # type: ignore[assignment,method-assign]
    store.erase([2])
    copy_as_after_crash(store.path, tmp_path / "crashed")
    store._write = write  # type: ignore[method-assign]
    store.close()
    for path in (tmp_path / "db", tmp_path / "crashed"):
        for _ in range(2):
            store = open_store(path, config)
            store.erase([2])
            assert [len([*store.scan(key_prefix(table_id))]) for table_id in (1, 2, 3)] == [50, 0, 50]
            assert store.layouts(2) == () and store.layouts(3)
            store.close()


def test_scan_and_estimate(store: RowStore) -> None:
    """A scan yields one table's or shard's pairs in order; the estimate counts rows in memory and in files."""
    store.write_runs([run_of(1, range(30)), run_of(1, range(20), table_id=2)], meta={b"x": b"y"}, applied_seq=1)
    assert (store.num_rows_estimate(1), store.num_rows_estimate(2), store.num_rows_estimate(3)) == (30, 20, 0)
    assert store.num_rows_estimates([3, 1, 2]) == [0, 30, 20]
    for _ in range(2):
        assert decode_row_ids([key for key, _ in store.scan(key_prefix(1))]).tolist() == [*range(30)]
        assert len(list(store.scan(key_prefix(2, SPEC.whole)))) == 20
        assert list(store.scan(key_prefix(2, ColumnShard(offset=0, width=3)))) == []
        start = keys_of(range(5, 6))[0]
        assert decode_row_ids([key for key, _ in store.scan(key_prefix(1), start=start, limit=3)]).tolist() == [5, 6, 7]
        store.flush()
    assert store.num_rows_estimates([3, 1, 2]) == [0, 30, 20]  # though one file has both


def test_rows_written_while_a_flush_ends_are_counted(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is missed in the counts, wherever a write interrupts a flush."""
    put(store, range(100))
    flush, is_flushed, num_rows, written_bytes = RocksDb.flush, False, 100, 0

    def flush_and_say(db: RocksDb) -> None:
        nonlocal is_flushed
        flush(db)
        is_flushed = True

    def write() -> None:
        nonlocal num_rows, written_bytes
        if is_flushed:  # what is written before may be flushed and count once more until the next flush
            before = store.unflushed_bytes
            put(store, range(num_rows, num_rows + 1))
            num_rows, written_bytes = num_rows + 1, written_bytes + store.unflushed_bytes - before

    monkeypatch.setattr(RocksDb, "flush", flush_and_say)
    at_each_step_of(store.flush, {"flush", "subtract", "copy"}, write)
    assert num_rows > 105
    assert (store.num_rows_estimate(1), store.unflushed_bytes) == (num_rows, written_bytes)


def test_a_flush_amid_a_write_leaves_only_that_write_to_flush(store: RowStore) -> None:
    """No flushed row counts as unflushed, wherever a flush interrupts a write."""
    num_rows, num_steps, at = 0, 1, 0
    while at < num_steps:
        put(store, range(num_rows, num_rows + 100))
        large, num_steps = store.unflushed_bytes, 0

        def flush(at: int = at) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == at + 1:
                store.flush()

        more = run_of(1, range(num_rows + 100, num_rows + 101))
        at_each_step_of(lambda: store._put([more]), {"_put", "_write"}, flush)  # noqa: B023
        num_rows, at = num_rows + 101, at + 1
        assert store.num_rows_estimate(1) - num_rows in (0, 1)  # the one row may be flushed before it is counted
        assert store.unflushed_bytes < large / 10
        store.flush()
    assert num_steps > 20


def test_rows_are_counted_in_files_that_rocksdb_has_not_read(tmp_path: Path) -> None:
    """A reopened store counts as many rows as before, though RocksDB reads only 20 of its files."""
    (tmp_path / "built").mkdir()
    paths, store = [], open_store(tmp_path / "db", FILES)
    for table_id, num_files in ((1, 30), (2, 3), (3, 1)):
        for number in range(num_files):
            paths.append(tmp_path / "built" / f"{len(paths):03d}.sst")
            run = run_of(1, range(1000 * number, 1000 * number + 100 * table_id), table_id)
            TableFileWriter(block_bytes=4096, bloom_bits_per_key=10).write(paths[-1], [run])
    store._db.raw.ingest_external_file([*map(str, paths)])
    wanted = [3000, 600, 300, 0]
    assert store.num_rows_estimates([1, 2, 3, 4]) == wanted
    store.close()
    store = open_store(tmp_path / "db", FILES)
    assert sum(not file["num_entries"] for file in store._db.live_files()) > 10  # else this tests nothing
    assert store.num_rows_estimates([1, 2, 3, 4]) == wanted
    store.close()


def test_a_store_is_opened_once(store: RowStore) -> None:
    """A directory that is open is refused."""
    with pytest.raises(ConfigError):
        open_store(store.path)


def test_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below a file, a file, or a directory without permission is a ConfigError."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "db"):
        with pytest.raises(ConfigError, match="cannot be made"):
            open_store(path)
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable"):
        open_store(tmp_path / "locked")


def test_a_disk_that_fails_at_the_first_try_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error before RocksDB opens is a StorageError in one line, and nothing stays open."""

    def fail(fd: int, data: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(StorageError, match=rf"^store directory {tmp_path / 'db'}: Input/output error$"):
            open_store(tmp_path / "db")
    open_store(tmp_path / "db").close()


@pytest.mark.parametrize(
    ("pairs", "error", "says"),
    [
        ({b"key": b"value"}, ConfigError, "not Headrace's"),
        ({META_PREFIX + b"store/format": b"2"}, ConfigError, "format 2, this version reads 1"),
        (
            {META_PREFIX + b"store/format": b"1", META_PREFIX + b"store/applied_seq": b"seven"},
            CorruptionError,
            "unreadable metadata",
        ),
    ],
)
def test_foreign_and_newer_stores_are_refused(
    tmp_path: Path, pairs: dict[bytes, bytes], error: type[Exception], says: str
) -> None:
    """A RocksDB of another program, of a later format, or with unreadable metadata is refused."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    db = rocksdict.Rdict(str(tmp_path / "db"), options)
    for key, value in pairs.items():
        db[key] = value
    db.close()
    for _ in range(2):  # the refusal releases the directory
        with pytest.raises(error, match=says):
            open_store(tmp_path / "db")


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    """A row of a damaged block is neither served nor skipped by a scan; a store that lacks a file does not open."""
    store = open_store(tmp_path / "db")
    put(store, range(500))
    store.close()
    (file,) = (tmp_path / "db").glob("*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    store = open_store(tmp_path / "db")
    with pytest.raises(CorruptionError, match=r"\.sst"):
        store.get(keys_of(range(500)))
    with pytest.raises(CorruptionError):
        list(store.scan(key_prefix(1)))
    store.close()
    file.unlink()
    with pytest.raises(CorruptionError, match="is damaged"):
        open_store(tmp_path / "db")


def test_failed_write_raises_storage_error(store: RowStore, tmp_path: Path) -> None:
    """A failure of the disk ends in StorageError, and the position stays."""
    put(store, range(50))
    for file in (tmp_path / "db").iterdir():
        file.unlink()
    (tmp_path / "db").rmdir()
    with pytest.raises(StorageError):
        store.flush()
    assert store.durable_seq == 0
    with pytest.raises(StorageError):
        store.close()


def test_a_row_without_its_record_is_not_written(store: RowStore) -> None:
    """Fewer records than rows are an error, and the log position stays."""
    run = run_of(1, range(500))
    run.records = run.records[:-1]
    with pytest.raises(InvariantError, match=r"keys with .* records to write"):
        store.write_runs([run], meta={}, applied_seq=1)
    assert store.applied_seq == 0
