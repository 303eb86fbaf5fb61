"""A scan sees every live row once, whole, whatever column shards it was written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expiry_rig import SPEC, open_rig
from row_batches import make_delta

from headrace.paramserver.expiry import scan
from headrace.paramserver.expiry.policy import RowFacts
from headrace.paramserver.expiry.scan import RowScanner
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import CorruptionError
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import ColumnShard, DType, TableSpec

LEFT, RIGHT = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)


def _written(path: Path, rows: Sequence[int], spec: TableSpec, *, table_id: int = 1, **columns: Any) -> RowStore:
    """Return a store in which a table has rows."""
    store = RowStore.open(path, config=StoreConfig(block_cache_bytes=1 << 20))
    delta = make_delta(rows, 1, spec=spec, table_id=table_id)
    if columns:
        delta = dataclasses.replace(delta, columns=columns)
    run = coalesce(table_id, [Part.of_delta(delta, Batch(seq=1, epoch=1, step=1, time_us=1))])
    store.write_runs([run], meta={}, applied_seq=1)
    return store


def _scan(store: RowStore, table: Table, **options: Any) -> tuple[list[RowFacts], int]:
    scanner, facts, num_rows = RowScanner(store, table, **options), [], 0
    while (piece := scanner.next_piece()) is not None:
        facts.append(piece.facts)
        num_rows += piece.num_rows
    return facts, num_rows


def _ids(facts: list[RowFacts]) -> list[int]:
    return [row for some in facts for row in some.row_ids.tolist()]


@pytest.mark.parametrize("piece_rows", [1, 7, 1024, 5000])
@pytest.mark.parametrize(
    "shards", [(SPEC.whole,), (LEFT, RIGHT), (LEFT, RIGHT, SPEC.whole)], ids=["whole", "split", "both"]
)
async def test_every_live_row_is_seen_once(tmp_path: Path, piece_rows: int, shards: tuple[ColumnShard, ...]) -> None:
    """Live rows come once, in order, with newest version and norm of all columns; marks of deleted ones are counted."""
    rows = [*range(0, 2500, 2), 2**63 - 2, 2**63 - 1]
    async with open_rig(tmp_path) as rig:
        await rig.hello(3)
        for number, shard in enumerate(shards):
            await rig.write(3, 10 + number, rows, value=2.0, shard=shard, ends_step=False)
        for shard in shards:
            await rig.write(3, 20, [4], value=1.0, shard=shard, deleted=[0, 2498])
        await rig.applier.wait_applied(rig.ingest.submitted_seq)
        facts, num_rows = _scan(rig.store, rig.table, with_norms=True, piece_rows=piece_rows)
        expected = rows[1:-3] + rows[-2:]
        assert _ids(facts) == expected
        assert num_rows == len(rows if SPEC.whole in shards[1:] else expected)
        assert await rig.present(rows) == expected
        seen = {
            row: (some.epochs[i], some.steps[i], some.times_us[i], some.norms[i])
            for some in facts
            if some.norms is not None
            for i, row in enumerate(some.row_ids.tolist())
        }
        newest = 10 + len(shards) - 1
        assert seen[4] == (3, 20, 20_000_000, 2.0)
        assert seen[6] == seen[2**63 - 1] == (3, newest, newest * 1_000_000, 4.0)
        assert _ids(_scan(rig.store, rig.table, piece_rows=piece_rows)[0]) == expected


@pytest.mark.parametrize("piece_rows", [1, 2, 3, 7])
async def test_column_shards_that_have_other_rows(tmp_path: Path, piece_rows: int) -> None:
    """A row is judged by all of its column shards, however far behind one of them the records of another reach."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 10, range(0, 40, 3), shard=RIGHT)
        await rig.write(1, 20, range(0, 20), shard=LEFT)
        await rig.write(1, 30, [21, 36], shard=LEFT)
        await rig.applier.wait_applied(rig.ingest.submitted_seq)
        facts, _ = _scan(rig.store, rig.table, piece_rows=piece_rows)
        assert _ids(facts) == await rig.present(range(40))
        seen = {row: step for some in facts for row, step in zip(some.row_ids.tolist(), some.steps, strict=True)}
        in_left = dict.fromkeys(range(20), 20) | {21: 30, 36: 30}
        assert seen == {row: in_left.get(row, 10) for row in _ids(facts)}


async def test_wide_rows_come_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembling rows from column shards takes bounded memory."""
    monkeypatch.setattr(scan, "_PIECE_BYTES", 10 * RecordLayout(SPEC, RIGHT).size_bytes)
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        for shard in (LEFT, RIGHT):
            await rig.write(1, 10, range(100), shard=shard)
        await rig.applier.wait_applied(rig.ingest.submitted_seq)
        facts, num_rows = _scan(rig.store, rig.table)
        assert num_rows == 100 and max(some.row_ids.size for some in facts) <= 11


async def test_neighbouring_tables_and_no_rows(tmp_path: Path) -> None:
    """A scan ends where its table ends, and is empty for a table without rows."""
    specs = [dataclasses.replace(SPEC, fqn=f"t{number}", states=()) for number in range(3)]
    _written(tmp_path / "s", range(5), specs[0]).close()
    store = _written(tmp_path / "s", range(4), specs[2], table_id=3)
    found = [_ids(_scan(store, Table(number, spec), piece_rows=5)[0]) for number, spec in enumerate(specs, 1)]
    store.close()
    assert [len(ids) for ids in found] == [5, 0, 4]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64])
def test_norms_of_every_float(tmp_path: Path, dtype: DType) -> None:
    """Norms are right for every dtype."""
    spec = TableSpec(fqn="t", num_rows=0, dim=2, dtype=dtype)
    raw = np.array([[3, 4], [0, 0.5]], np.float32)
    raw = (raw.view(np.uint32) >> 16).astype("<u2") if dtype is DType.BFLOAT16 else raw.astype(dtype.numpy)
    store = _written(tmp_path / "s", [1, 2], spec, weights=memoryview(raw.tobytes()))
    facts, _ = _scan(store, Table(1, spec), with_norms=True)
    assert RecordLayout(spec, spec.whole).size_bytes == 24 + 2 * dtype.size_bytes
    assert facts[0].norms is not None and facts[0].norms.tolist() == [5.0, 0.5]
    store.close()


def test_rows_behind_a_damaged_block_are_missed(tmp_path: Path) -> None:
    """A damaged block is a corruption, not the end of the table."""
    spec = dataclasses.replace(SPEC, states=())
    _written(tmp_path, range(5000), spec).close()
    (file,) = tmp_path.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    store = RowStore.open(tmp_path, config=StoreConfig(block_cache_bytes=1 << 20))
    with pytest.raises(CorruptionError, match=r"\.sst"):
        _scan(store, Table(1, spec))
    store.close()


@pytest.mark.parametrize("value", [b"", bytes(23), b"\0\2" + bytes(60)])
def test_what_is_no_record_stops_the_scan(tmp_path: Path, value: bytes) -> None:
    """A value that is not a record of the table is a corruption, not a row."""
    spec = dataclasses.replace(SPEC, states=())
    store = _written(tmp_path / "s", [1], spec)
    store.write(encode_keys(1, spec.whole, np.array([2])), [value])
    with pytest.raises(CorruptionError):
        _scan(store, Table(1, spec))
    store.close()
