"""A replica's identity map against a simple model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import SPEC, make_delta

from headrace.paramserver.replica.tables.identity_map import IdentityMap, size_of_identity_map
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.row_records import DELETED, NO_IDENTITY, PRESENT, RecordLayout
from headrace.schemas.tables import RUNTIME_META, ColumnShard, DType, StateKind, StateSpec, TableSpec

VIRTUAL = SPEC
DENSE = dataclasses.replace(SPEC, num_rows=6)
IDENTITIES = [-(2**63), -7, 0, 1, 2**63 - 1]
HALVES = (ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=2))


def delta(identity_of: dict[int, int], deleted: Any = (), *, shard: ColumnShard | None = None) -> RowDelta:
    made = make_delta(identity_of, 0, deleted=sorted(deleted), shard=shard)
    return dataclasses.replace(made, identities=np.array(list(identity_of.values()), np.int64))


def find(identities: IdentityMap, wanted: list[int]) -> list[int]:
    return identities.find(np.array(wanted, np.int64)).tolist()


class Model:
    """The newest claim of each identity, and the present identity of each row."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[tuple[int, int], int]] = {}
        self.claims: dict[int, tuple[tuple[int, int], int]] = {}

    def write(self, row: int, identity: int, version: tuple[int, int]) -> None:
        self.rows[row] = (version, identity)
        if identity != NO_IDENTITY and version >= self.claims.get(identity, ((0, 0), 0))[0]:
            self.claims[identity] = (version, row)

    def find(self, identity: int) -> int:
        _, row = self.claims.get(identity, (None, -1))
        return row if row >= 0 and self.rows[row][1] == identity else -1


writes = st.tuples(
    st.dictionaries(st.integers(0, 5), st.sampled_from([*IDENTITIES, NO_IDENTITY]), max_size=4),
    st.sets(st.integers(0, 5), max_size=2),
    st.tuples(st.integers(1, 2), st.integers(0, 8)),
)


@pytest.mark.parametrize("spec", [DENSE, VIRTUAL], ids=["dense", "virtual"])
@given(st.lists(writes, max_size=12))
@settings(max_examples=60)
def test_follows_the_model(spec: TableSpec, drawn: list[Any]) -> None:
    """After updates in any order each identity is in the row of the model."""
    identities, model = IdentityMap(spec), Model()
    for identity_of, deleted, (epoch, step) in drawn:
        gone = deleted - identity_of.keys()
        identities.apply(delta(identity_of, gone), epoch=epoch, step=step)
        for row, identity in [*identity_of.items(), *((row, NO_IDENTITY) for row in gone)]:
            model.write(row, identity, (epoch, step))
        wanted = [*IDENTITIES, NO_IDENTITY, 99]
        assert find(identities, wanted) == [*map(model.find, IDENTITIES), -1, -1]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(IDENTITIES), st.integers(0, 9)), max_size=6))
@settings(max_examples=60)
def test_loaded_rows_are_told_by_their_versions(rows: list[tuple[int, int, int]]) -> None:
    """Rows loaded in any order lead to the newest row with the identity."""
    identities, model = IdentityMap(DENSE), Model()
    newest = {row: (identity, step) for row, identity, step in rows}
    for row, (identity, step) in newest.items():
        model.write(row, identity, (1, step))
    ids = np.array(list(newest), np.int64)
    columns = np.array(list(newest.values()), np.int64).reshape(-1, 2)
    presence = np.ones(ids.size, np.uint8)
    identities.load(ids, columns[:, 0], presence, np.ones(ids.size, np.int64), columns[:, 1], DENSE.whole)
    assert find(identities, IDENTITIES) == [*map(model.find, IDENTITIES)]


def test_missing_and_deleted_rows_are_not_loaded() -> None:
    """Missing and deleted rows of a store have no identity."""
    identities = IdentityMap(DENSE)
    steps = np.array([1, 2, 3])
    presence = np.array([0, 1, 2], np.uint8)
    identities.load(np.arange(3), np.array([10, 20, 30]), presence, np.ones(3, np.int64), steps, DENSE.whole)
    assert find(identities, [10, 20, 30]) == [-1, 1, -1]


def test_the_newest_column_shard_tells_the_identity() -> None:
    """The newest column shard decides the identity; between equal versions, the first columns."""
    identities = IdentityMap(DENSE)
    for step, (first, second) in enumerate([(10, 10), (10, 11), (12, 11)], 1):
        identities.apply(delta({3: first}, shard=HALVES[0]), epoch=1, step=step)
        identities.apply(delta({3: second}, shard=HALVES[1]), epoch=1, step=step)
        assert find(identities, [first]) == [3]
    identities.apply(delta({3: 14}, shard=HALVES[1]), epoch=1, step=9)
    assert find(identities, [12, 14]) == [-1, 3]


@pytest.mark.parametrize("spec", [DENSE, VIRTUAL], ids=["dense", "virtual"])
def test_identities_that_have_gone_take_no_memory(spec: TableSpec) -> None:
    """The map stays as large as its rows, however many identities come and go."""
    identities = IdentityMap(spec)
    sizes = []
    for step in range(1, 4000):
        of_row = {row: step * 10 + row for row in range(6)}
        identities.apply(delta(of_row), epoch=1, step=step)
        sizes.append(identities.size_bytes)
        if step % 97 == 0:
            assert find(identities, list(of_row.values())) == list(range(6))
            assert find(identities, [(step - 1) * 10 + row for row in range(6)]) == [-1] * 6
    assert max(sizes) == max(sizes[:400])


def test_an_identity_that_moves_between_shards_is_in_its_newest_row() -> None:
    """Each shard's log is in order and the two are not: the newest claim counts, whichever comes first."""
    old = [({1: 10}, [], 5), ({1: 20}, [], 9), ({}, [1], 1)]  # the row gets another identity, and expires
    new = [({2: 10}, [], 8)]
    for order in (old + new, new + old, [*old[:1], *new, *old[1:]], [*old[:2], *new, *old[2:]]):
        identities = IdentityMap(DENSE)
        for identity_of, deleted, step in order:
            identities.apply(delta(identity_of, deleted), epoch=1, step=step)
        assert find(identities, [10, 20]) == [2, -1]


def test_whole_rows_that_are_deleted_lose_the_identities_of_all_columns() -> None:
    """Also those that were loaded as whole rows, whatever the version of the deletion; the next update counts again."""
    identities, ones = IdentityMap(DENSE), np.ones(1, np.int64)
    identities.load(np.array([3]), np.array([10]), np.ones(1, np.uint8), ones, ones * 9, DENSE.whole)
    for shard in HALVES:
        identities.apply(delta({3: 10}, shard=shard), epoch=1, step=9)
    identities.apply(delta({}, [3], shard=DENSE.whole), epoch=1, step=2)
    assert find(identities, [10]) == [-1]
    identities.apply(delta({3: 11}, shard=HALVES[1]), epoch=1, step=10)
    assert find(identities, [10, 11]) == [-1, 3]


def test_rows_of_virtual_ids_grow() -> None:
    """A table of virtual ids takes any row ids, thousands of them."""
    identities = IdentityMap(VIRTUAL)
    rng = np.random.default_rng(3)
    rows = np.unique(rng.integers(0, 2**63 - 1, 20_000))
    for step, some in enumerate(np.array_split(rng.permutation(rows), 9), 1):
        of_row = dict(zip(some.tolist(), (some ^ 12345).tolist(), strict=True))
        identities.apply(delta(of_row), epoch=1, step=step)
    assert (identities.find(rows ^ 12345) == rows).all()


def test_its_size_is_foreseen() -> None:
    """A full table takes no more than planned."""
    spec = dataclasses.replace(SPEC, num_rows=100_000)
    identities = IdentityMap(spec)
    rows = np.arange(spec.num_rows)
    ones, steps = np.ones(rows.size, np.uint8), np.full(rows.size, 3)
    for first in range(0, rows.size, 8192):
        some = slice(first, first + 8192)
        identities.load(rows[some], rows[some] * 7, ones[some], ones[some], steps[some], spec.whole)
    assert identities.size_bytes <= size_of_identity_map(spec)
    assert size_of_identity_map(dataclasses.replace(spec, has_identities=False)) == 0


@pytest.mark.parametrize("num_rows", [6, 0], ids=["dense", "virtual"])
def test_runtime_meta_is_that_of_the_newest_row(num_rows: int) -> None:
    """It comes with updates and loaded rows, follows their versions, and goes with the row."""
    meta = StateSpec(name=RUNTIME_META, kind=StateKind.ROWWISE, dtype=DType.INT64, width=2)
    spec = dataclasses.replace(SPEC, num_rows=num_rows, states=(*SPEC.states, meta), has_identities=True)
    plain = dataclasses.replace(spec, states=SPEC.states)
    target = IdentityMap(spec)
    assert size_of_identity_map(spec) - size_of_identity_map(plain) == 16 * (num_rows or 1024)
    assert target.size_bytes - IdentityMap(plain).size_bytes == 16 * (num_rows or 1024)

    def write(row: int, number: int, step: int, *, shard: ColumnShard = spec.whole) -> None:
        made = delta({row: 10 + row}, shard=shard)
        column = np.array([number, -number]).tobytes()
        made = dataclasses.replace(
            made, layout=RecordLayout(spec, shard), columns=made.columns | {"state:runtime_meta": column}
        )
        target.apply(made, epoch=1, step=step)

    def meta_of(*rows: int) -> list[int]:
        found = target.meta_of(np.array(rows)).view("<i8").reshape(-1, 2)
        assert (found[:, 1] == -found[:, 0]).all()
        return found[:, 0].tolist()

    write(3, 7, 5)
    assert meta_of(3, 4, 3) == [7, 0, 7]
    write(3, 8, 4, shard=HALVES[0])  # of a trainer with other columns, before this one
    write(3, 9, 6, shard=HALVES[1])  # which are not the first
    assert meta_of(3) == [7]
    write(3, 9, 6, shard=HALVES[0])
    assert meta_of(3) == [9]
    numbers = np.array([[1, -1], [2, -2], [3, -3]])
    presence, steps, ones = np.array([0, PRESENT, DELETED], np.uint8), np.full(3, 9), np.ones(3, np.int64)
    target.load(np.array([1, 2, 3]), np.array([5, 6, 7]), presence, ones, steps, spec.whole, numbers)
    assert meta_of(1, 2, 3) == [0, 2, 0]
    target.apply(delta({}, [2], shard=spec.whole), epoch=1, step=10)
    assert meta_of(2) == [0]
    write(4, 6, 5)
    if num_rows:
        target.grow(dataclasses.replace(spec, num_rows=9))
    else:
        for row in range(2000, 4000):
            write(row, row, 5)
    assert meta_of(4, 8) == [6, 0]


def test_a_table_with_a_number_of_rows_grows() -> None:
    """Identities stay, and rows beyond the old end take some."""
    target, larger = IdentityMap(DENSE), dataclasses.replace(DENSE, num_rows=9)
    zeros = np.zeros(1, np.int64)
    for row in (3, 8):
        target.load(np.array([row]), np.array([row * 100]), np.array([PRESENT]), zeros, zeros, larger.whole)
        if row == 3:
            target.grow(larger)
    assert target.find(np.array([300, 800, 5])).tolist() == [3, 8, -1]
    assert target.size_bytes <= size_of_identity_map(larger) + (1 << 20)
