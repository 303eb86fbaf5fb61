"""Reading all rows of a snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_snapshot import snapshot_of
from row_batches import SPEC, make_delta
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of, snapshot, values_of

from headrace.paramserver.snapshots import contents
from headrace.paramserver.snapshots.contents import SnapshotReader, merge_sorted
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.coalescing import SortedRun, coalesce
from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.row_reader import read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.sst import table_reader
from headrace.schemas.errors import ConfigError, CorruptionError, SpecMismatchError, UnknownTableError
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest, shard_folder
from headrace.schemas.tables import ColumnShard


def _run_of(ids: list[int], tag: int, shard: ColumnShard | None, deleted: list[int]) -> SortedRun:
    delta = make_delta(sorted(set(ids) - set(deleted)), tag, deleted=deleted, shard=shard)
    batch = Batch(seq=tag, epoch=1, step=tag, time_us=tag, deltas=(delta,))
    return coalesce(1, [Part.of_delta(delta, batch)]).copied()


def _publish(path: Path, store: RowStore) -> Path:
    files = SnapshotFiles(path / "snapshots")
    part = files.new_folder("one") / shard_folder(0)
    part.parent.mkdir(parents=True)
    store.checkpoint(part)
    hashed, seq = hash_folder(part), store.applied_seq
    shard = ShardPart(shard=0, server_id="s", seq=seq, epoch=0, step=-1, tables=(SPEC,), files=hashed)
    files.publish(SnapshotManifest(name="one", created_us=1, parts=(shard,)))
    return files.folder_of("one")


_LEFT, _RIGHT = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
_ROUND = st.tuples(
    st.lists(st.integers(0, 60), min_size=1, max_size=40),
    st.lists(st.integers(0, 60), max_size=5),
    st.sampled_from(["put", "file"]),
    st.booleans(),
)


@pytest.mark.parametrize("shards", [(SPEC.whole,), (_LEFT, _RIGHT), (SPEC.whole, _RIGHT)])
def test_rows_are_those_that_reads_give(shards: tuple[ColumnShard, ...], tmp_path_factory: Any) -> None:
    """After any sequence of writes, flushes and ingests, a snapshot has the rows that reads return."""

    @settings(max_examples=12)
    @given(rounds=st.lists(_ROUND, min_size=1, max_size=6))
    def check(rounds: list[tuple[list[int], list[int], str, bool]]) -> None:
        path = tmp_path_factory.mktemp("stores")
        meta = Catalog({}).add([SPEC])
        stores = {
            way: StoreConfig(block_cache_bytes=1 << 20, file_bytes=0 if way == "file" else 1 << 40)
            for way in ("put", "file")
        }
        store = RowStore.open(path / "store", config=stores["put"])
        for tag, (ids, deleted, way, flushes) in enumerate(rounds, 1):  # every third round removes rows for good
            if tag % 3 == 0:
                for shard in store.layouts(1):
                    store.remove(1, encode_keys(1, shard, np.array(sorted(set(ids)))))
                continue
            store._config = stores[way]
            run = _run_of(ids, tag, shards[tag % len(shards)], sorted(set(deleted)))
            store.write_runs([run], meta=meta, applied_seq=tag)
            if flushes:
                store.flush()
        sources = [ShardSource(RecordLayout(SPEC, shard), None, True) for shard in store.layouts(1)]
        all_ids = np.arange(64, dtype=np.int64)
        expected = read_rows(1, SPEC, sources, all_ids, store.get, seq=1)
        folder = _publish(path, store)
        store.close()
        with SnapshotReader(folder) as reader:
            chunks = list(reader.rows(SPEC.fqn))
        there = np.flatnonzero(expected.presence)
        ids = np.concatenate([there[:0], *(chunk[0] for chunk in chunks)])
        assert ids.tolist() == there.tolist()
        if not chunks:
            return
        records = np.concatenate([chunk[1] for chunk in chunks])
        assert not records["flags"].any()
        weights = np.ascontiguousarray(records["weights"]).view("<f4").reshape(-1, SPEC.dim)
        assert weights.tobytes() == expected.weights[there].tobytes()
        for field, of in (("epoch", expected.epochs), ("step", expected.steps), ("time_us", expected.times_us)):
            assert (records[field] == of[there]).all()
        assert expected.identities is not None
        assert (records["identity"] == expected.identities[there]).all()

    check()


def test_shards_are_merged(tmp_path: Path) -> None:
    """Rows of all shards come in one order, within the requested range."""
    ids = np.flatnonzero(np.arange(500) % 11)
    hashed = np.unique(np.random.default_rng(2).integers(0, 2**62, 700))
    rows = {
        ITEMS: chunk_of(ITEMS, ids),
        USERS: chunk_of(USERS, np.arange(300)),
        VIRTUAL: chunk_of(VIRTUAL, hashed),
    }
    folder = snapshot(tmp_path, rows, num_shards=4)
    with SnapshotReader(folder) as reader:
        assert set(reader.tables.values()) == set(rows)
        for spec, chunk in rows.items():
            chunks = list(reader.rows(spec.fqn))
            assert np.concatenate([ids for ids, _ in chunks]).tolist() == chunk.row_ids.tolist()
            weights = np.concatenate([records["weights"] for _, records in chunks])
            expected = values_of(spec, chunk.row_ids)["weights"].tobytes()
            assert np.ascontiguousarray(weights).tobytes() == expected
        some = np.concatenate([ids for ids, _ in reader.rows(ITEMS.fqn, first_row=100, end_row=200)])
        assert some.tolist() == ids[(ids >= 100) & (ids < 200)].tolist()
        assert list(reader.rows(ITEMS.fqn, first_row=7, end_row=7)) == []
        with pytest.raises(UnknownTableError, match="no table 'nowhere'"):
            next(reader.rows("nowhere"))


def test_files_of_other_kinds_are_read_by_rocksdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with other checksums are read by RocksDB's iterator, with the same rows."""
    rows = {ITEMS: chunk_of(ITEMS, np.arange(0, 500, 3))}
    folder = snapshot(tmp_path, rows)
    with SnapshotReader(folder) as reader:
        expected = [(ids.tolist(), records.tobytes()) for ids, records in reader.rows(ITEMS.fqn, first_row=9)]
        monkeypatch.setattr(table_reader.sst, "CRC32C", 0)
        found = [(ids.tolist(), records.tobytes()) for ids, records in reader.rows(ITEMS.fqn, first_row=9)]
    for part in (found, expected):
        assert [row for ids, _ in part for row in ids] == list(range(9, 500, 3))
    assert b"".join(data for _, data in found) == b"".join(data for _, data in expected)


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a manifest, a missing, truncated or later release's file are errors."""
    with pytest.raises(ConfigError, match=r"no snapshot: there is no manifest\.json"):
        SnapshotReader(tmp_path)
    folder = snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, np.arange(10))}, num_shards=1)
    file = next((folder / "shard-0000").glob("*.sst"))
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(CorruptionError, match="missing"):
        SnapshotReader(folder)
    file.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match="the manifest says"):
        SnapshotReader(folder)
    file.write_bytes(whole)
    with SnapshotReader(folder) as reader:
        assert sum(ids.size for ids, _ in reader.rows(ITEMS.fqn)) == 10
        monkeypatch.setattr(contents, "RECORD_VERSION", 2)
        with pytest.raises(CorruptionError, match=r"\.sst: a row has a record version other than 2"):
            list(reader.rows(ITEMS.fqn))


def _with_table(path: Path, shard: int, meta_of: Any) -> Path:
    """Return the snapshot of two shards one of which has another catalog."""
    data = build(path / "data", {ITEMS: chunk_of(ITEMS, np.arange(10))}, num_shards=2)
    with contextlib.closing(RowStore.open(data / f"shard-000{shard}" / "store")) as store:
        store.write([], [], meta=meta_of(store.read_meta()), applied_seq=store.applied_seq)
    return snapshot_of(data, path / "snapshots")


def test_shards_that_differ_in_a_table_are_refused(tmp_path: Path) -> None:
    """A table with two shapes is not read."""
    other = dataclasses.replace(ITEMS, dim=ITEMS.dim + 1)
    folder = _with_table(tmp_path, 1, lambda _: Catalog({}).add([other]))
    with pytest.raises(SpecMismatchError, match=r"shard-0001.*differs from that of other shards"):
        SnapshotReader(folder)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_table_that_one_shard_has_grown_has_the_larger_spec(tmp_path: Path, shard: int) -> None:
    """A snapshot between the shards' growths is read: all rows, under the larger spec."""
    larger = dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 5)
    with SnapshotReader(_with_table(tmp_path, shard, lambda meta: Catalog(meta).grow(larger))) as reader:
        assert reader.tables == {ITEMS.fqn: larger}
        assert sum(ids.size for ids, _ in reader.rows(ITEMS.fqn)) == 10
        assert reader.manifest.tables == reader.tables


@given(st.lists(st.lists(st.integers(0, 50), max_size=30), max_size=6), st.integers(1, 7))
def test_merging_keeps_the_first_of_each(lists: list[list[int]], step: int) -> None:
    """Each id comes once, in order, with the value of the first cursor that has it, whatever the chunks."""

    def cursor(number: int, ids: list[int]) -> Any:
        for start in range(0, len(ids), step):
            some = np.array(ids[start : start + step], np.int64)
            yield some, some * 10 + number

    ascending = [sorted(set(ids)) for ids in lists]
    merged = list(merge_sorted([cursor(number, ids) for number, ids in enumerate(ascending)]))
    expected: dict[int, int] = {}
    for number, ids in enumerate(ascending):
        for row in ids:
            expected.setdefault(row, row * 10 + number)
    found = [pair for ids, values in merged for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    assert found == sorted(expected.items())
