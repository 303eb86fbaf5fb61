"""Tables in memory in every precision; `test_base.py` tests what all tables have in common."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from error_bounds import error_bound
from row_batches import make_delta

from headrace.kernels.dtypes import TORCH_DTYPES, bits_of, tensor_of
from headrace.kernels.precisions import PRECISIONS, Precision
from headrace.kernels.quantization import dequantize_rows_reference, quantize_rows_reference
from headrace.paramserver.replica.api.config import MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.api.lookups import BagLookup
from headrace.paramserver.replica.copy.storage import CopyStorage, memory_needed
from headrace.paramserver.replica.tables.in_memory import MemoryTable, size_of_table
from headrace.paramserver.replica.tables.slot_rows import check_precision, precision_of, stored_row_bytes
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, DType, TableSpec

DENSE = TableSpec(fqn="dense", num_rows=40, dim=12, dtype=DType.FLOAT32)
SPARSE = TableSpec(fqn="sparse", num_rows=0, dim=21, dtype=DType.BFLOAT16)
IDS = np.arange(40, dtype=np.int64)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
packed = pytest.mark.parametrize("precision", ["int8", "int4"])


def _write(table: MemoryTable, ids: Any, rows: torch.Tensor, *, version: int, shard: ColumnShard) -> None:
    delta = make_delta(np.asarray(ids).tolist(), 0, spec=table.spec, shard=shard)
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    delta = dataclasses.replace(delta, columns={**delta.columns, "weights": data})
    table.apply(delta, epoch=1, step=version)


def _delete(table: MemoryTable, ids: Any, *, version: int, shard: ColumnShard) -> None:
    delta = make_delta([], 0, deleted=np.asarray(ids).tolist(), spec=table.spec, shard=shard)
    table.apply(delta, epoch=1, step=version)


def _rows(spec: TableSpec, number: int, width: int | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(number, width or spec.dim, generator=generator) * 3 + torch.randn(number, 1, generator=generator)
    return rows.to(TORCH_DTYPES[spec.dtype])


def _stored(rows: torch.Tensor, precision: Precision | None) -> torch.Tensor:
    """Return rows as they read after being kept in a precision."""
    if precision is None:
        return rows
    kept = quantize_rows_reference(rows, precision)
    return dequantize_rows_reference(kept, precision, rows.shape[1]).to(rows.dtype)


def _gather(table: MemoryTable, ids: Any) -> tuple[torch.Tensor, Any]:
    rows, missing = table.gather(np.asarray(ids))
    assert rows.dtype == table.spec.dtype.numpy and rows.flags.c_contiguous
    return tensor_of(rows, table.spec.dtype), missing


def _as_row(spec: TableSpec, row: torch.Tensor) -> Any:
    return bits_of(row.to(TORCH_DTYPES[spec.dtype])).view(spec.dtype.numpy)


@every_precision
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=lambda spec: spec.fqn)
def test_rows_read_in_the_tables_dtype_within_the_bound(spec: TableSpec, precision: Precision) -> None:
    """Lookups have the table's dtype, within the error bound of the precision and its rounding."""
    table, rows = MemoryTable(spec, precision=precision), _rows(spec, 40)
    _write(table, IDS, rows, version=1, shard=spec.whole)
    ids = np.array([7, 3, 3, 39, 0])
    found, missing = _gather(table, ids)
    assert found.dtype == TORCH_DTYPES[spec.dtype] and not missing.any()
    wanted = rows[torch.from_numpy(ids)]
    assert torch.equal(found, _stored(wanted, precision_of(spec, precision)))
    error = (found.double() - wanted.double()).abs().amax(dim=1)
    rounding = 0 if spec.dtype == DType.FLOAT32 else wanted.double().abs().amax(dim=1) * 2**-7
    assert bool((error <= error_bound(wanted, precision) + rounding).all())


@pytest.mark.parametrize("precision", [None, "fp16", "int8", "int4"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_written_does_not_drift(precision: Precision | None, seed: int) -> None:
    """Under writes of all kinds and shards, each column reads as last written, bit for bit."""
    rng, dim = np.random.default_rng(seed), DENSE.dim
    table = MemoryTable(DENSE, precision=precision)
    values = torch.zeros(40, dim)
    is_present, edges = np.zeros((40, dim), bool), {0, dim}
    for step in range(1, 50):
        first, last = sorted(rng.choice([0, 3, 4, 7, dim], 2, replace=False).tolist())
        shard = ColumnShard(offset=first, width=last - first)
        edges |= {first, last}
        ids = rng.permutation(40)[: rng.integers(1, 15)]
        columns = slice(first, last)
        if rng.random() < 0.2:
            _delete(table, ids, version=step, shard=shard)
            values[ids, columns], is_present[ids, columns] = 0, False
        else:
            rows = _rows(DENSE, ids.size, shard.width, seed=1000 * seed + step)
            _write(table, ids, rows, version=int(rng.integers(1, step + 1)), shard=shard)
            cuts = sorted(edge for edge in edges if first <= edge <= last)
            parts = [rows[:, a - first : b - first] for a, b in itertools.pairwise(cuts)]
            stored = torch.cat([_stored(part, precision) for part in parts], dim=1)
            for row, data in zip(ids, stored, strict=True):
                values[row, columns], is_present[row, columns] = data, True
        found, missing = _gather(table, IDS)
        assert torch.equal(found, values)
        assert missing.tolist() == (~is_present.any(axis=1)).tolist()
        assert table.num_present == int((~missing).sum())
    assert len(edges) > 3


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_rows_that_were_loaded_whole_are_deleted_by_column_shards(precision: Precision | None) -> None:
    """A row that was loaded whole is missing once both its column shards are deleted."""
    table, rows = MemoryTable(DENSE, precision=precision), _rows(DENSE, 40)
    ones = np.ones(40, np.int64)
    table.load(IDS, rows.numpy().tobytes(), ones.astype(np.uint8), ones, ones, DENSE.whole)
    for shard in (ColumnShard(offset=0, width=5), ColumnShard(offset=5, width=7)):
        _delete(table, [1, 2], version=2, shard=shard)
    found, missing = _gather(table, IDS)
    assert np.flatnonzero(missing).tolist() == [1, 2] and table.num_present == 38
    assert torch.equal(found[3:], _stored(rows[3:], precision)) and not found[1:3].any()


@every_precision
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=lambda spec: spec.fqn)
def test_missing_rows_are_the_default_itself(spec: TableSpec, precision: Precision) -> None:
    """A default that the precision cannot hold reads exactly, for absent and deleted rows."""
    default = _rows(spec, 1, seed=5)[0] + 0.001
    table = MemoryTable(spec, default=_as_row(spec, default), precision=precision)
    rows = _rows(spec, 20)
    _write(table, IDS[:20], rows, version=1, shard=spec.whole)
    _delete(table, [4], version=2, shard=spec.whole)
    found, missing = _gather(table, IDS)
    is_missing = (IDS == 4) | (IDS >= 20)
    assert missing.tolist() == is_missing.tolist()
    assert all(torch.equal(row, default.to(found.dtype)) for row in found[torch.from_numpy(is_missing)])
    offsets = torch.tensor([0, 3, 3, 30, 40])
    pooled, missing = BagLookup(offsets, "sum")(table, IDS)
    assert missing.tolist() == is_missing.tolist()
    expected = torch.nn.functional.embedding_bag(torch.arange(40), found, offsets, mode="sum", include_last_offset=True)
    assert torch.equal(pooled[2:], expected[2:])  # in these bags are missing rows
    torch.testing.assert_close(pooled, expected)


@every_precision
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=lambda spec: spec.fqn)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_pools_what_lookups_read(spec: TableSpec, precision: Precision, is_sharded: bool) -> None:
    """Pooled rows equal pooled lookups, bit for bit unless rows are packed."""
    table, rows = MemoryTable(spec, precision=precision), _rows(spec, 40)
    cuts = [0, 5, spec.dim] if is_sharded else [0, spec.dim]
    for first, last in itertools.pairwise(cuts):
        _write(table, IDS, rows[:, first:last], version=1, shard=ColumnShard(offset=first, width=last - first))
    ids = np.random.default_rng(1).integers(0, 40, 30)
    offsets = torch.tensor([0, 4, 4, 17, 30])
    found = _gather(table, ids)[0]
    weights = torch.rand(30, generator=torch.Generator().manual_seed(2)).to(found.dtype)
    for mode, by in (("sum", None), ("mean", None), ("sum", weights)):
        expected = torch.nn.functional.embedding_bag(
            torch.arange(30), found, offsets, mode=mode, per_sample_weights=by, include_last_offset=True
        )
        pooled, missing = BagLookup(offsets, mode, by)(table, ids)  # type: ignore[arg-type]
        assert pooled.dtype == found.dtype and not missing.any()
        if precision in ("int8", "int4") and spec.dtype == DType.FLOAT32:
            torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(pooled, expected)


@packed
def test_sparse_tables_grow(precision: Precision) -> None:
    """Packed rows, also in column shards, survive growth, and new slots have the default."""
    spec, ids = SPARSE, np.arange(3000, dtype=np.int64) * 10**12
    table, rows = MemoryTable(spec, default=_as_row(spec, torch.ones(spec.dim)), precision=precision), _rows(spec, 3000)
    left, right = ColumnShard(offset=0, width=8), ColumnShard(offset=8, width=13)
    # 1024 slots to begin with, one of which stands for rows that are not there: each next row may be one too many.
    for some in itertools.starmap(slice, itertools.pairwise([0, 500, 1022, 1023, 1024, 1025, 2000, 3000])):
        for shard in (left, right):
            columns = rows[some, shard.offset : shard.offset + shard.width]
            _write(table, ids[some], columns, version=1, shard=shard)
    found, missing = _gather(table, ids)
    expected = torch.cat([_stored(rows[:, :8], precision), _stored(rows[:, 8:], precision)], dim=1)
    assert torch.equal(found, expected) and not missing.any() and table.num_present == 3000
    assert torch.equal(_gather(table, [7])[0][0].float(), torch.ones(spec.dim))


@every_precision
def test_memory_is_what_was_planned(precision: Precision) -> None:
    """A dense table takes what was planned; packed rows take at most a fourth of float32."""
    spec = TableSpec(fqn="t", num_rows=1000, dim=64, dtype=DType.FLOAT32)
    table = MemoryTable(spec, precision=precision)
    _write(table, np.arange(1000), _rows(spec, 1000), version=1, shard=spec.whole)
    expected = {"fp32": 256, "fp16": 128, "bf16": 128, "int8": 72, "int4": 36}[precision]
    assert stored_row_bytes(spec, precision) == expected
    assert table.size_bytes == size_of_table(spec, precision) == 1000 * (expected + 1)


def test_a_precision_counts_where_it_saves_memory() -> None:
    """Integers, short floats and short rows keep their dtype."""
    whole = TableSpec(fqn="t", num_rows=9, dim=64, dtype=DType.INT32)
    assert [precision_of(whole, precision) for precision in PRECISIONS] == [None] * 5
    short = dataclasses.replace(whole, dtype=DType.BFLOAT16)
    assert [precision_of(short, precision) for precision in PRECISIONS] == [None, None, None, "int8", "int4"]
    narrow = dataclasses.replace(whole, dtype=DType.FLOAT32, dim=1)
    assert [precision_of(narrow, precision) for precision in PRECISIONS] == [None, "fp16", "bf16", None, None]
    wide = dataclasses.replace(whole, dtype=DType.FLOAT64)
    assert [precision_of(wide, precision) for precision in PRECISIONS] == list(PRECISIONS)


def test_a_precision_must_be_known() -> None:
    """An unknown precision is refused with the known names."""
    with pytest.raises(ConfigError, match=r"int5.*bf16"):
        check_precision("int5")


def test_precision_is_set_for_all_tables_and_for_some() -> None:
    """The replica's precision is for all tables in memory; a storage's own overrides it."""
    config = ReplicaConfig(precision="int8", storage={"item.*": MemoryStorage(precision="fp16")})
    specs = [TableSpec(fqn=fqn, num_rows=100, dim=64, dtype=DType.FLOAT32) for fqn in ("user.weight", "item.weight")]
    storage = CopyStorage(config, None, specs)
    tables = [storage.make(spec) for spec in specs]
    assert [table.size_bytes for table in tables if table is not None] == [100 * (72 + 1), 100 * (128 + 1)]
    assert memory_needed(config, specs, 0) == 100 * (72 + 1) + 100 * (128 + 1)
    for make in (ReplicaConfig, MemoryStorage):
        with pytest.raises(ConfigError, match="float8"):
            make(precision="float8")  # type: ignore[arg-type]
