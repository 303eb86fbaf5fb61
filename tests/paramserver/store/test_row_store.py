"""The store: atomic writes, what survives a crash, and errors that a user can read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import rocksdict
from row_batches import SPEC, copy_as_after_crash, make_batch

from headrace.paramserver.store import row_store
from headrace.paramserver.store.pending import Part, Run, coalesce
from headrace.paramserver.store.rocks_db import RocksDb
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig, rocks_options
from headrace.paramserver.store.table_file import TableFileWriter
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError, UnavailableError
from headrace.schemas.identity_claims import CLAIMS
from headrace.schemas.row_keys import META_PREFIX, decode_row_ids, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard

SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20, rows_per_write=10)
FILES = StoreConfig(block_cache_bytes=8 << 20, file_bytes=0)  # each write of rows is a file


def open_store(path: Path, config: StoreConfig = SMALL) -> RowStore:
    return RowStore.open(path, config=config)


def run_of(seq: int, rows: range, table_id: int = 1) -> Run:
    batch = make_batch(seq, rows)
    return coalesce(table_id, [Part.of_delta(batch.deltas[0], batch)]).copied()


def claims_of(identities: range, table_id: int = 1) -> Run:
    records = np.zeros(len(identities), CLAIMS.dtype)
    records["row"] = np.arange(len(identities))
    return Run(table_id, CLAIMS, np.array(identities, np.int64), records, None)


def keys_of(rows: range, table_id: int = 1) -> list[bytes]:
    return encode_keys(table_id, SPEC.whole, np.array(rows, np.int64))


def crash(store: RowStore, to: Path) -> RowStore:
    """Return the store as it is found after a crash at this moment: without what was only in memory."""
    copy_as_after_crash(store.path, to)
    return open_store(to)


def test_a_write_takes_rows_of_several_tables_and_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables with a few rows share writes, and a long one is split: no other Python thread runs during one."""
    store, sizes = open_store(tmp_path / "db"), []
    write = store._write
    monkeypatch.setattr(store, "_write", lambda keys, *rest: (sizes.append(len(keys)), write(keys, *rest)))
    runs = [run_of(1, range(size), table_id) for table_id, size in enumerate((3, 4, 17, 1), 1)]
    store.write_runs(runs, meta={}, applied_seq=1)
    assert sizes == [4, 10, 10, 5, 1]  # the tables' column shards, three writes of rows, the log position
    for run in runs:
        assert store.get(keys_of(range(run.row_ids.size), run.table_id)) == run.layout.values_of(run.records)
    store.close()


def test_rows_meta_and_position_come_back(tmp_path: Path) -> None:
    """What was written is there after a restart, the callers' metadata apart from the store's own."""
    store = open_store(tmp_path / "db")
    assert (store.applied_seq, store.durable_seq, store.read_meta()) == (0, 0, {})
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


def test_runs_come_back_with_their_layouts(tmp_path: Path) -> None:
    """Coalesced rows of several tables are found by key, and the column shards of each table are remembered."""
    store = open_store(tmp_path / "db")
    runs = [run_of(1, range(100)), run_of(1, range(50, 75), table_id=2)]
    store.write_runs(runs, meta={b"m": b"1"}, applied_seq=1)
    store.write_runs([run_of(2, range(10))], meta={}, applied_seq=2)
    store.close()
    store = open_store(tmp_path / "db")
    assert store.layouts(1) == (SPEC.whole,) == store.layouts(2)
    assert store.layouts(3) == ()
    values = store.get(keys_of(range(110)))
    assert values[10:100] == runs[0].layout.values_of(runs[0].records)[10:]
    assert values[100:] == [None] * 10
    assert None not in store.get(keys_of(range(50, 75), table_id=2))
    assert store.applied_seq == 2
    store.close()


def test_a_crash_leaves_what_was_flushed(tmp_path: Path) -> None:
    """After a crash the position, rows and metadata are those of one moment, at least as new as `durable_seq`."""
    store = open_store(tmp_path / "db")
    store.write_runs([run_of(1, range(100))], meta={b"m": b"1"}, applied_seq=1)
    store.flush()
    assert store.durable_seq == 1
    store.write_runs([run_of(2, range(200))], meta={b"m": b"2"}, applied_seq=2)
    assert store.durable_seq == 1
    after = crash(store, tmp_path / "crashed")
    assert (after.applied_seq, after.durable_seq, after.read_meta()) == (1, 1, {b"m": b"1"})
    assert after.get(keys_of(range(100))) == run_of(1, range(100)).layout.values_of(run_of(1, range(100)).records)
    # What comes from the log once more makes it whole.
    after.write_runs([run_of(2, range(200))], meta={b"m": b"2"}, applied_seq=2)
    assert after.get(keys_of(range(200))) == store.get(keys_of(range(200)))
    store.close()
    after.close()


def test_a_flush_amid_a_write_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a flush has made durable while rows were written is not counted as unflushed, and not flushed again."""
    store = open_store(tmp_path / "db")
    store.write_runs([run_of(1, range(100))], meta={}, applied_seq=1)
    write = store._db.write

    def write_while_flushed(*pairs: list[bytes]) -> int:
        size_bytes = write(*pairs)
        store.flush()
        return size_bytes

    monkeypatch.setattr(store._db, "write", write_while_flushed)
    before = store.unflushed_bytes
    store.write(keys_of(range(1)), [b"v"])
    assert 0 < store.unflushed_bytes < before
    store.close()


def test_a_crash_after_the_first_file_leaves_a_store(tmp_path: Path) -> None:
    """Rows that went in as a file before anything was flushed do not make the store another's."""
    store = open_store(tmp_path / "db", FILES)
    store.write_runs([run_of(1, range(2))], meta={}, applied_seq=1)
    after = crash(store, tmp_path / "crashed")
    assert after.applied_seq == 0
    after.close()
    store.close()


def test_a_name_that_stayed_behind_is_no_way_into_the_store(tmp_path: Path) -> None:
    """A file that was taken in and kept its first name as well is not written over by the next one."""
    store = open_store(tmp_path / "db", FILES)
    store.write_runs([run_of(1, range(100))], meta={}, applied_seq=1)
    taken_in = max((tmp_path / "db").glob("*.sst"))
    (tmp_path / "db" / "incoming-rows").hardlink_to(taken_in)
    before = taken_in.read_bytes()
    store.write_runs([run_of(2, range(200, 300))], meta={}, applied_seq=2)
    assert taken_in.read_bytes() == before
    store.close()


@pytest.mark.parametrize(("errors", "waits"), [("0", 2), ("1", 0)])
def test_files_wait_for_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: str, waits: int) -> None:
    """While lookups would pass through too many files there is no more; if compacting failed, RocksDB will say so."""
    store, levels, slept = open_store(tmp_path / "db", FILES), ["21", "20", "19"], list[float]()
    monkeypatch.setattr(store, "rocksdb_property", lambda name: levels.pop(0) if "level0" in name else errors)
    monkeypatch.setattr(row_store.time, "sleep", slept.append)
    store.write_runs([run_of(1, range(100))], meta={}, applied_seq=1)
    assert slept == [row_store.STALL_POLL_S] * waits
    store.close()


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    """A run that is empty is passed over, alone or beside others, and the position goes on."""
    store = open_store(tmp_path / "db", FILES)
    store.write_runs([run_of(1, range(0))], meta={}, applied_seq=1)
    assert store.applied_seq == 1 and not [file for file in store._db.live_files() if file["num_entries"]]
    store.write_runs([run_of(2, range(0), 1), run_of(2, range(5), 2)], meta={}, applied_seq=2)
    assert store.get(keys_of(range(5), 2)).count(None) == 0
    assert store.num_rows_estimates([1, 2]) == [0, 5]
    store.close()


@pytest.mark.parametrize("is_direct", [False, True])
def test_rocksdb_goes_past_the_page_cache_where_files_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """Where the file system refuses, RocksDB would refuse to open too; where it can, compactions spare the cache."""
    asked: list[bool] = []

    def options(config: StoreConfig, *, is_direct: bool) -> Any:
        asked.append(is_direct)
        return rocks_options(config)

    monkeypatch.setattr(row_store, "supports_direct_io", lambda path: is_direct)
    monkeypatch.setattr(row_store, "rocks_options", options)
    open_store(tmp_path / "db").close()
    assert asked == [is_direct]


def test_position_never_runs_ahead_of_rows(tmp_path: Path) -> None:
    """At whatever moment a crash comes, all rows of the position found are there: memtables fill by themselves."""
    store = open_store(tmp_path / "db", StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 16))
    found = []
    for seq in range(1, 60):
        store.write_runs([run_of(seq, range(seq * 40))], meta={}, applied_seq=seq)
        if seq == 25:
            store.flush()
        if seq % 10 == 0:
            after = crash(store, tmp_path / f"crashed{seq}")
            found.append(after.applied_seq)
            rows = range(after.applied_seq * 40)
            records, presence = run_of(1, range(1)).layout.decode(after.get(keys_of(rows)))
            assert (presence == 1).all()
            assert (records["step"] >= after.applied_seq).all()
            after.close()
    assert 25 <= found[-1] <= 59
    store.close()


def test_scan_and_estimate(tmp_path: Path) -> None:
    """A scan yields one table's or shard's pairs in order; the estimate counts rows in memory and in files."""
    store = open_store(tmp_path / "db")
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
    store.close()


@pytest.mark.parametrize("file_bytes", [0, 1 << 30])
def test_claims_of_identities_are_not_counted_as_rows(tmp_path: Path, file_bytes: int) -> None:
    """A thousand rows with identities are a thousand: in memory, in files, merged and reopened."""
    config = StoreConfig(block_cache_bytes=8 << 20, file_bytes=file_bytes)
    store, wanted = open_store(tmp_path / "db", config), [1000, 0, 3000]
    claims = claims_of(range(5000, 6000))
    store.write_runs(
        [run_of(1, range(1000)), run_of(1, range(3000), table_id=3)], claims=[claims], meta={b"x": b"y"}, applied_seq=1
    )
    assert store.num_rows_estimates([1, 2, 3]) == wanted
    store.flush()
    assert store.num_rows_estimates([1, 2, 3]) == wanted
    store._db.raw.compact_range(None, None)
    assert store.num_rows_estimates([1, 2, 3]) == pytest.approx(wanted, rel=0.02)
    store.close()
    store = open_store(tmp_path / "db", config)
    assert store.num_rows_estimates([1, 2, 3]) == pytest.approx(wanted, rel=0.02)
    store.close()


def at_each_step_of(call: Callable[[], None], names: set[str], between: Callable[[], None]) -> None:
    """Run something between any two instructions of functions that a call runs, as another thread might."""

    def step(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            between()
        return step

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name not in names:
            return None
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)


def test_rows_written_while_a_flush_ends_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the thread that flushes is interrupted by the one that writes, no row is forgotten."""
    store, flush = open_store(tmp_path / "db"), RocksDb.flush
    store.write_runs([run_of(1, range(100))], meta={}, applied_seq=1)
    is_flushed, num_rows, written_bytes = False, 100, 0

    def flush_and_say(db: RocksDb) -> None:
        nonlocal is_flushed
        flush(db)
        is_flushed = True

    def write() -> None:
        nonlocal num_rows, written_bytes
        if is_flushed:  # what is written before may be flushed and count once more until the next flush
            before = store.unflushed_bytes
            store.write_runs([run_of(1, range(num_rows, num_rows + 1))], meta={}, applied_seq=2)
            num_rows, written_bytes = num_rows + 1, written_bytes + store.unflushed_bytes - before

    monkeypatch.setattr(RocksDb, "flush", flush_and_say)
    at_each_step_of(store.flush, {"flush", "subtract", "copy"}, write)
    assert num_rows > 105
    assert (store.num_rows_estimate(1), store.unflushed_bytes) == (num_rows, written_bytes)
    store.close()


def test_a_flush_amid_a_write_leaves_nothing_to_flush_but_that_write(tmp_path: Path) -> None:
    """Whenever the thread that writes is interrupted by one that flushes, nothing flushed counts as not."""
    store, num_rows, num_steps, at = open_store(tmp_path / "db"), 0, 1, 0
    while at < num_steps:
        store.write_runs([run_of(1, range(num_rows, num_rows + 100))], meta={}, applied_seq=1)
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
    store.close()


def test_rows_are_counted_in_files_of_which_rocksdb_does_not_know_how_many_they_hold(tmp_path: Path) -> None:
    """A store that is opened counts as many rows as before, though RocksDB looks into 20 of its files only."""
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


def test_own_metadata_is_refused(tmp_path: Path) -> None:
    """A caller cannot write over the store's own metadata."""
    store = open_store(tmp_path / "db")
    with pytest.raises(ConfigError, match="store/"):
        store.write([], [], meta={b"store/applied_seq": b"9"}, applied_seq=1)
    assert store.applied_seq == 0
    store.close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    """A directory that a running process has open is refused in one line."""
    code = (
        "import sys; from pathlib import Path; from headrace.paramserver.store.row_store import RowStore\n"
        "store = RowStore.open(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    args = [sys.executable, "-c", code, str(tmp_path / "db")]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="in use by another process") as caught:
            open_store(tmp_path / "db")
        assert "\n" not in str(caught.value)
        other.communicate("")
    open_store(tmp_path / "db").close()


def test_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below a file, a file, or a directory without permission is the user's mistake."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "db"):
        with pytest.raises(ConfigError, match="cannot be made"):
            open_store(path)
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable"):
        open_store(tmp_path / "locked")


def test_a_disk_that_fails_when_it_is_tried_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found out before RocksDB is begun is the disk's error too, in one line, and nothing stays open."""

    def fail(fd: int, data: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(StorageError, match=rf"^store directory {tmp_path / 'db'}: Input/output error$"):
            open_store(tmp_path / "db")
    open_store(tmp_path / "db").close()


def test_foreign_and_newer_stores_are_refused(tmp_path: Path) -> None:
    """A RocksDB that is not ours, or of a later format, is left alone."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    foreign = rocksdict.Rdict(str(tmp_path / "foreign"), options)
    foreign[b"key"] = b"value"
    foreign.close()
    with pytest.raises(ConfigError, match="not Headrace's"):
        open_store(tmp_path / "foreign")
    newer = rocksdict.Rdict(str(tmp_path / "newer"), options)
    newer[META_PREFIX + b"store/format"] = b"2"
    newer.close()
    for _ in range(2):  # the refusal lets go of the directory
        with pytest.raises(ConfigError, match="format 2, this version reads 1"):
            open_store(tmp_path / "newer")


def damaged(tmp_path: Path) -> tuple[Path, Path]:
    store = open_store(tmp_path / "db")
    store.write_runs([run_of(1, range(500))], meta={}, applied_seq=1)
    store.close()
    (file,) = (tmp_path / "db").glob("*.sst")
    return tmp_path / "db", file


def test_flipped_byte_is_reported(tmp_path: Path) -> None:
    """A row whose block does not match its checksum is not served, and neither is it skipped by a scan."""
    path, file = damaged(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    store = open_store(path)
    with pytest.raises(CorruptionError, match=r"\.sst"):
        store.get(keys_of(range(500)))
    with pytest.raises(CorruptionError):
        list(store.scan(key_prefix(1)))
    store.close()


def test_missing_file_is_reported(tmp_path: Path) -> None:
    """A store that lacks a file does not open."""
    path, file = damaged(tmp_path)
    file.unlink()
    with pytest.raises(CorruptionError, match="is damaged"):
        open_store(path)


def test_unreadable_metadata_is_reported(tmp_path: Path) -> None:
    """Metadata that is not what this version writes is corruption, not a traceback."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    db = rocksdict.Rdict(str(tmp_path / "db"), options)
    db[META_PREFIX + b"store/format"] = b"1"
    db[META_PREFIX + b"store/applied_seq"] = b"seven"
    db.close()
    with pytest.raises(CorruptionError, match="unreadable metadata"):
        open_store(tmp_path / "db")


def test_closed_store_says_so(tmp_path: Path) -> None:
    """Every method of a closed store fails with one clear error."""
    store = open_store(tmp_path / "db")
    store.close()
    for call in (
        lambda: store.get([b"k"]),
        lambda: store.write([b"k"], [b"v"]),
        store.flush,
        store.read_meta,
        lambda: store.num_rows_estimate(1),
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_failed_write_raises_storage_error(tmp_path: Path) -> None:
    """A failure of the disk ends in StorageError, and the position stays."""
    store = open_store(tmp_path / "db")
    store.write_runs([run_of(1, range(50))], meta={}, applied_seq=1)
    for file in (tmp_path / "db").iterdir():
        file.unlink()
    (tmp_path / "db").rmdir()
    with pytest.raises(StorageError):
        store.flush()
    assert store.durable_seq == 0
    with pytest.raises(StorageError):
        store.close()


def test_a_copy_from_before_the_first_flush_is_an_empty_store(tmp_path: Path) -> None:
    """What a crash leaves of a new store can be looked at: it is at position 0."""
    store = open_store(tmp_path / "db")
    copy_as_after_crash(store.path, tmp_path / "copy")
    copy = RowStore.open_read_only(tmp_path / "copy", config=SMALL)
    assert (copy.applied_seq, copy.layouts(1)) == (0, ())
    copy.close()
    store.close()
