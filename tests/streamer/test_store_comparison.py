"""The comparison that tests rely on: it must see a single bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import store_comparison as compare
import torch
from fake_shard import WAIT_S, FakeShard, FakeStore, Row
from store_comparison import Comparison, compare_tables
from trainer_tables import POINTWISE, ROWWISE, Trained

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import ColumnShard, DType


def fill(store: FakeStore, tables: list[Trained], *, leave_out: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Put the trainer's rows into the shards, without any streamer."""
    for table in tables:
        spec, shard = table.tapped.spec, table.tapped.shard
        for fake in store.shards:
            fake.tables[spec.fqn] = spec
        ids = np.arange(table.tapped.num_local_rows, dtype=np.int64) + table.tapped.row_offset
        places = shards_of_rows(table_seed(spec.fqn), ids, store.num_shards)
        for local, (row, place) in enumerate(zip(ids.tolist(), places.tolist(), strict=True)):
            if row in leave_out:
                continue
            columns = {name: _bytes(state[local]) for name, state in table.states.items()}
            rows = store.shards[place].rows.setdefault(spec.fqn, {})
            rows.setdefault(row, {})[shard] = Row(1, 1, 1, _bytes(table.weights[local]), columns)


def _bytes(row: torch.Tensor) -> bytes:
    return row.detach().contiguous().view(torch.uint8).numpy().tobytes()


def flip_one_bit(store: FakeStore, fqn: str, row: int, *, state: str | None = None) -> None:
    shard = next(shard for shard in store.shards if row in shard.rows.get(fqn, {}))
    ((key, value),) = shard.rows[fqn][row].items()
    if state is None:
        shard.rows[fqn][row][key] = dataclasses.replace(value, weights=_flipped(value.weights))
    else:
        value.states[state] = _flipped(value.states[state])


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 0x01])


async def compared(store: FakeStore, tables: list[Trained], *, only_present: bool = False) -> Comparison:
    async with store, await EmbeddingReader.connect(store.address, timeout_s=WAIT_S) as reader:
        return await compare_tables([table.tapped for table in tables], reader, only_present=only_present)


def shards_for(store: FakeStore) -> FakeStore:
    store.shards = [FakeShard(store, shard) for shard in range(store.num_shards)]
    return store


TABLES = [
    lambda: Trained("a.weight", 60, 4, states=(POINTWISE, ROWWISE), seed=1),
    lambda: Trained("b.weight", 30, 3, dtype=DType.BFLOAT16, states=(ROWWISE,), row_offset=100, seed=2),
    lambda: Trained("c.weight", 20, 5, dtype=DType.FLOAT16, seed=3),
]


async def test_equal_tables_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of every table is compared, in pieces, and found equal."""
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 300)
    tables = [make() for make in TABLES]
    store = shards_for(FakeStore(num_shards=3))
    fill(store, tables)
    result = await compared(store, tables)
    assert result.is_equal
    assert (result.num_compared, result.num_different, result.num_missing) == (110, 0, 0)
    assert str(result).splitlines()[0] == "a.weight: 60 rows compared, 0 different, 0 missing"


@pytest.mark.parametrize(
    ("fqn", "row", "state"),
    [("a.weight", 0, None), ("a.weight", 59, "exp_avg"), ("b.weight", 117, "momentum1"), ("c.weight", 19, None)],
)
async def test_one_flipped_bit_is_found(fqn: str, row: int, state: str | None) -> None:
    """One bit in the store, in weights or state, is one different row, named by its global id."""
    tables = [make() for make in TABLES]
    store = shards_for(FakeStore(num_shards=3))
    fill(store, tables)
    flip_one_bit(store, fqn, row, state=state)
    result = await compared(store, tables, only_present=True)
    assert not result.is_equal
    assert result.num_different == 1
    assert {t.fqn: t.different_row_ids for t in result.tables if t.num_different} == {fqn: [row]}
    assert f"1 different (first: {row})" in str(result)


@pytest.mark.parametrize(("ours", "theirs"), [(0.0, -0.0), (float("nan"), 1.0), (1.0, float("nan"))])
async def test_bits_are_compared_not_values(ours: float, theirs: float) -> None:
    """0.0 is not -0.0, and NaN is not a number."""
    trained, stored = Trained(num_rows=1, dim=1), Trained(num_rows=1, dim=1)
    trained.update([0], ours)
    stored.update([0], theirs)
    store = shards_for(FakeStore())
    fill(store, [stored])
    assert (await compared(store, [trained])).num_different == 1


async def test_nan_equals_itself() -> None:
    """The same NaN on both sides is equal."""
    table = Trained(num_rows=1, dim=1)
    table.update([0], float("nan"))
    store = shards_for(FakeStore())
    fill(store, [table])
    assert (await compared(store, [table])).is_equal


async def test_missing_rows_are_a_fault_unless_allowed() -> None:
    """Rows that the store lacks are counted and named, and are no fault with `only_present`."""
    table = Trained("a.weight", 40)
    store = shards_for(FakeStore(num_shards=2))
    fill(store, [table], leave_out=set(range(3, 30)))
    result = await compared(store, [table])
    assert not result.is_equal
    assert (result.num_compared, result.num_missing, result.num_different) == (13, 27, 0)
    assert result.tables[0].missing_row_ids == list(range(3, 13))
    assert (await compared(store, [table], only_present=True)).is_equal


async def test_column_shards_are_compared_by_their_columns() -> None:
    """Each column shard is compared with its part of the stored row; rowwise states of a split table are left out."""
    parts = [
        Trained("a.weight", 20, 8, states=(POINTWISE, ROWWISE), shard=ColumnShard(offset=offset, width=4), seed=offset)
        for offset in (0, 4)
    ]
    store = shards_for(FakeStore(num_shards=2))
    fill(store, parts)
    result = await compared(store, parts)
    assert result.is_equal
    assert result.tables[0].skipped_states == ("momentum1",)
    assert "not compared: momentum1" in str(result)
    with torch.no_grad():
        parts[1].states["exp_avg"][7, 3] += 1
    result = await compared(store, parts)
    assert [table.different_row_ids for table in result.tables] == [[], [7]]


async def test_a_table_without_rows_is_equal() -> None:
    """A rank that holds no row of a table has nothing to compare."""
    store = shards_for(FakeStore(num_shards=2))
    table = Trained(num_rows=0, total_rows=9)
    fill(store, [table])
    result = await compared(store, [table])
    assert (result.is_equal, result.num_compared, result.num_missing) == (True, 0, 0)
