"""Files written without RocksDB: it reads every row of them and checks every byte."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import rocksdict
from crc32c import crc32c

from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.rocksdb import StoreConfig, rocks_options
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst.table_writer import TableFileWriter, build_filter, hash_keys
from headrace.schemas.errors import CorruptionError, StorageError
from headrace.schemas.row_records import FLAG_DELETED, RecordLayout, encode_keys, key_prefix
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

NARROW = TableSpec(fqn="n", num_rows=0, dim=2, dtype=DType.FLOAT32, states=())
WIDE = TableSpec(
    fqn="w",
    num_rows=0,
    dim=128,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="m", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
ALWAYS_A_FILE = StoreConfig(block_cache_bytes=8 << 20, file_bytes=0)


def make_run(row_ids, *, step=1, table_id=1, spec=WIDE, shard=None, deleted=()):
    """Return a run whose bytes follow from the step and the row's place."""
    layout = RecordLayout(spec, shard or spec.whole)
    ids = np.array(sorted(row_ids), np.int64)
    records = np.zeros(ids.size, layout.dtype)
    records.view(np.uint8)[:] = np.random.default_rng(step).integers(0, 256, records.nbytes, np.uint8)
    layout.set_header(records, ..., epoch=1, step=step, time_us=0)
    for place in np.flatnonzero(np.isin(ids, list(deleted))).tolist():
        records[place : place + 1] = np.zeros(1, layout.dtype)
        layout.set_header(records, slice(place, place + 1), epoch=1, step=step, time_us=0, flags=FLAG_DELETED)
    return SortedRun(table_id, layout, ids, records)


def pairs_of(run):
    records = run.records.view(f"V{run.layout.size_bytes}").tolist()
    return dict(zip(encode_keys(run.table_id, run.layout.shard, run.row_ids), records, strict=True))


def check(store, model, table_ids=(1,)):
    """Check that lookups and scans of the store give exactly the model."""
    keys = sorted(model)
    assert store.get(keys) == [model[key] for key in keys]
    found = [pair for table_id in table_ids for pair in store.scan(key_prefix(table_id))]
    assert found == [(key, model[key]) for key in keys]


def seek(store, key):
    iterator = store._db.raw.iter()
    iterator.seek(key)
    return iterator.key() if iterator.valid() else None


@pytest.fixture
def store(tmp_path):
    store = RowStore.open(tmp_path / "store", config=ALWAYS_A_FILE)
    yield store
    store.close()


# What a table of 8 KiB blocks makes of it: 14 rows of WIDE in one, some 1850 blocks in a chunk of a mebibyte.
@pytest.mark.parametrize("num_rows", [1, 13, 14, 15, 28, 29, 1791, 1792, 1793, 20_000])
def test_rocksdb_reads_every_row_and_no_other(store, num_rows):
    """Lookups, seeks and scans find the rows of a file, before and after a compaction."""
    run = make_run(range(0, 3 * num_rows, 3))
    store.write_runs([run], meta={}, applied_seq=1)
    model = pairs_of(run)
    for _ in range(2):
        check(store, model)
        absent = encode_keys(1, WIDE.whole, run.row_ids + 1)
        assert store.get(absent) == [None] * num_rows
        for row in {0, 1, num_rows // 2, num_rows - 1} & set(range(num_rows)):
            key = encode_keys(1, WIDE.whole, run.row_ids[row : row + 1])[0]
            assert seek(store, key) == key
            assert seek(store, key[:-1] + bytes((key[-1] - 1,))) == key if key[-1] else True
        store._db.raw.compact_range(None, None)


LONG = TableSpec(fqn="x", num_rows=0, dim=700, dtype=DType.FLOAT32, states=())
HALVES = [ColumnShard(offset=0, width=64), ColumnShard(offset=64, width=64)]


@pytest.mark.parametrize(
    ("runs", "block_bytes"),
    [
        (
            [
                *(make_run(range(500), shard=half, step=n) for n, half in enumerate(HALVES, 1)),
                make_run(range(7, 700), table_id=2, spec=NARROW, step=3),
                make_run([2**63 - 1], table_id=3, step=4),
            ],
            8192,
        ),
        ([make_run(range(50), spec=LONG)], 1024),
        ([make_run(range(100), deleted=[0, 57, 99]), make_run(range(5), shard=HALVES[0], step=2)], 8192),
    ],
    ids=["records of other lengths share a file", "rows longer than blocks", "marks of deletions are padded"],
)
def test_files_of_all_kinds(tmp_path, runs, block_bytes):
    """Whatever rows a file has, RocksDB reads them, and decodes them as what they were."""
    store = RowStore.open(tmp_path, config=replace(ALWAYS_A_FILE, block_bytes=block_bytes))
    store.write_runs(runs, meta={}, applied_seq=1)
    check(store, {key: value for run in runs for key, value in pairs_of(run).items()}, (1, 2, 3))
    for run in runs:
        records, presence = run.layout.decode(store.get(encode_keys(run.table_id, run.layout.shard, run.row_ids)))
        assert records.tobytes() == run.records.tobytes()
        assert np.array_equal(presence == 2, run.records["flags"] & FLAG_DELETED != 0)
    store.close()


def test_later_files_and_writes_win(tmp_path):
    """The last write of a row is read, whether it went through a file or the memtable."""
    store = RowStore.open(tmp_path / "s", config=StoreConfig(block_cache_bytes=8 << 20, file_bytes=300 * 540))
    rng = np.random.default_rng(5)
    model = {}
    for seq in range(1, 31):
        run = make_run(set(rng.integers(0, 2000, int(rng.choice([3, 200, 900]))).tolist()), step=seq)
        store.write_runs([run], meta={}, applied_seq=seq)
        model |= pairs_of(run)
        check(store, model) if seq % 10 == 0 else None
    store.close()
    store = RowStore.open(tmp_path / "s", config=ALWAYS_A_FILE)
    assert store.applied_seq == 30
    check(store, model)
    store.close()


def test_rocksdb_checks_every_byte_of_the_rows(tmp_path):
    """A flipped byte in any data block is a corruption, not another row."""
    store = RowStore.open(tmp_path / "s", config=ALWAYS_A_FILE)
    run = make_run(range(64))
    store.write_runs([run], meta={}, applied_seq=1)
    store.close()
    path = next(path for path in (tmp_path / "s").glob("*.sst") if path.stat().st_size > 20_000)
    whole = path.read_bytes()
    data_bytes = 5 * (14 * (1 + 1 + 2 + 24 + 540 + 4) + 4 + 5) - 6 * 572  # four full blocks and one of eight rows
    for at in np.random.default_rng(2).integers(0, data_bytes, 12).tolist():
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x10,)) + whole[at + 1 :])
        with pytest.raises(CorruptionError):  # at the open when it is in the first block, which the metadata end at
            store = RowStore.open(tmp_path / "s", config=ALWAYS_A_FILE)
            list(store.scan(key_prefix(1)))
        store.close()


def test_golden_bytes_of_a_file(tmp_path):
    """One row of a narrow table: its block, and the footer."""
    run = make_run([258], spec=NARROW)
    run.records["weights"] = np.frombuffer(bytes(range(8)), "V8")
    size = TableFileWriter(block_bytes=8192, bloom_bits_per_key=10).write(tmp_path / "file", [run])
    data = (tmp_path / "file").read_bytes()
    assert len(data) == size
    block = (
        "001820"  # shared, not shared, length of the value
        "00000001000000020000000000000102"  # key
        "0100000000000000"  # sequence number 0, a value
        "000100000100000001000000000000000000000000000000"  # record: header
        "0001020304050607"  # and weights
        "0000000001000000"  # restarts, their number
        "00"  # not compressed
    )
    assert data[: len(block) // 2].hex() == block
    crc = crc32c(bytes.fromhex(block))
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert int.from_bytes(data[len(block) // 2 :][:4], "little") == masked
    assert data[-12:].hex() == "05000000f7cff485b741e288"
    assert data[-53] == 1


def test_what_a_crash_has_left_is_removed(tmp_path):
    """A file that was not ingested before a crash is removed at the next start, and nothing of it is read."""
    store = RowStore.open(tmp_path / "s", config=ALWAYS_A_FILE)
    first = make_run(range(100))
    store.write_runs([first], meta={}, applied_seq=1)
    store.close()
    for is_torn in (True, False):
        TableFileWriter(block_bytes=8192, bloom_bits_per_key=10).write(store._incoming, [make_run(range(200), step=2)])
        if is_torn:
            store._incoming.write_bytes(b"torn")
        store = RowStore.open(tmp_path / "s", config=ALWAYS_A_FILE)
        assert not store._incoming.exists()
        assert store.applied_seq == 1
        check(store, pairs_of(first))
        store.close()


def test_a_disk_that_cannot_be_written_is_told(store):
    """A file that cannot be created is a StorageError, and the log position stays."""
    store._incoming.mkdir()
    with pytest.raises(StorageError, match="writing rows"):
        store.write_runs([make_run(range(10))], meta={}, applied_seq=1)
    assert store.applied_seq == 0
    store._incoming.rmdir()


PREFIX = bytes.fromhex("0000000100000080")


@pytest.mark.parametrize("bits_per_key", [1, 5, 10, 17, 30])
@pytest.mark.parametrize("num_rows", [1, 2, 100, 3001])
def test_the_bytes_are_those_that_rocksdb_makes(tmp_path, num_rows, bits_per_key):
    """RocksDB's own file of the same keys contains the same filter."""
    row_ids = np.unique(np.random.default_rng(num_rows).integers(0, 2**63 - 1, num_rows))
    writer = rocksdict.SstFileWriter(rocks_options(StoreConfig(bloom_bits_per_key=bits_per_key)))
    writer.open(str(tmp_path / "file"))
    for row in row_ids.tolist():
        writer[PREFIX + struct.pack(">Q", row)] = b"v"
    writer.finish()
    assert build_filter(hash_keys(PREFIX, row_ids), bits_per_key=bits_per_key) in (tmp_path / "file").read_bytes()


def test_golden_hashes():
    """The hashes of three keys, as RocksDB's filters have them."""
    hashes = hash_keys(PREFIX, np.array([0, 1, 2**63 - 1]))
    assert hashes.tolist() == [0x41AB9622182BC1F4, 0xF84228CD76BDC0C1, 0xEFB0CFE62BEF56D7]
