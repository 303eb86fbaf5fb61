"""The choice of the rows that a trainer sends at first, and how ranks agree on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError, HeadraceError, SpecMismatchError, UnavailableError
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.streamer.delivery.first_rows import Beside, FirstRows, Publish, agree_on_first_rows, choose_first_rows
from headrace.streamer.delivery.rendezvous import Store
from headrace.streamer.world import SoloWorld

SPEC = TableSpec(fqn="a:t", num_rows=10, dim=4, dtype=DType.FLOAT32)


def store(dim: int | None = None, **fields: Any) -> Store:
    """Return a store with a table of this dim, or none."""
    tables = {} if dim is None else {SPEC.fqn: dataclasses.replace(SPEC, dim=dim)}
    return Store(shards=(), highest_epoch=1, tables=tables, **fields)


LACKS, UPDATED = {"filling": frozenset({"a:t"})}, {"updated_only": frozenset({"a:t"})}


@pytest.mark.parametrize(
    ("known", "publish", "filled", "updated_only"),
    [
        (store(), "auto", True, False),
        (store(), "all", True, False),
        (store(), "updated", False, True),
        (store(4), "auto", False, False),
        (store(4, **LACKS), "auto", True, False),
        (store(4, **LACKS), "all", True, False),
        (store(4, **LACKS), "updated", False, True),
        (store(4, **UPDATED), "auto", False, True),
        (store(4, **UPDATED), "all", True, False),
        (store(4, **LACKS, filling_from={"a:t": 6}), "auto", False, False),
    ],
)
def test_an_incomplete_table_is_sent_whole_unless_the_user_says_otherwise(
    known: Store, publish: Publish, filled: bool, updated_only: bool
) -> None:
    """The user's word for updated rows holds until it is taken back; what the server has whole is told."""
    chosen = choose_first_rows([SPEC], known, publish=publish)
    assert (chosen.filled, chosen.updated_only) == tuple({"a:t"} if each else set() for each in (filled, updated_only))
    assert (chosen.names, chosen.complete) == ({"a:t"}, known.tables.keys() - known.filling)


@pytest.mark.parametrize(("publish", "grown"), [("auto", {"a:t": 10}), ("all", {"a:t": 10}), ("updated", {})])
def test_the_new_rows_of_a_grown_table_are_sent(publish: Publish, grown: dict[str, int]) -> None:
    """All ranks hear how many rows the server had."""
    larger = dataclasses.replace(SPEC, num_rows=12)
    assert choose_first_rows([larger], store(4), publish=publish).grown == grown


@pytest.mark.parametrize(("publish", "grown"), [("auto", {"a:t": 6}), ("all", {"a:t": 6}), ("updated", {})])
def test_a_table_that_was_growing_lacks_only_its_new_rows(publish: Publish, grown: dict[str, int]) -> None:
    """The next start sends those again, and any that it has more."""
    known = store(4, **LACKS, filling_from={"a:t": 6})
    for num_rows in (10, 12):
        chosen = choose_first_rows([dataclasses.replace(SPEC, num_rows=num_rows)], known, publish=publish)
        assert (chosen.grown, chosen.filled, chosen.complete) == (grown, frozenset(), frozenset())


def test_new_rows_are_sent_of_a_table_of_updated_rows_only() -> None:
    """Unless the user says so again."""
    larger, known = dataclasses.replace(SPEC, num_rows=12), store(4, **UPDATED)
    assert choose_first_rows([larger], known, publish="auto").grown == {"a:t": 10}
    assert choose_first_rows([larger], known, publish="updated").grown == {}


@pytest.mark.parametrize("publish", ["auto", "updated", "all"])
def test_another_shape_is_refused_before_anything_is_registered(publish: Publish) -> None:
    """One error has all that differ, also one in the place of a dense tensor; the server decides on numbers of rows."""
    with pytest.raises(SpecMismatchError, match=r"a table .*'a:t' \(dim 8 ≠ 4\); a table's shape is fixed"):
        choose_first_rows([SPEC], store(8), publish=publish)
    for num_rows in (3, 30):
        choose_first_rows([dataclasses.replace(SPEC, num_rows=num_rows)], store(4), publish=publish)
    state = StateSpec(name="sum", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)
    with pytest.raises(SpecMismatchError, match=r"'a:t': stored without optimizer states.*restore\(states=False\)"):
        choose_first_rows([dataclasses.replace(SPEC, states=(state,))], store(4), publish=publish)
    dense = TableSpec.of_tensor("a:t", (10, 4), DType.FLOAT32)
    backfilled = Store(shards=(), highest_epoch=1, tables={"a:t": SPEC, "a:u": dataclasses.replace(SPEC, fqn="a:u")})
    beside = Beside(run="a", dense=[dense, dataclasses.replace(dense, fqn="a:u")])
    with pytest.raises(SpecMismatchError, match="headrace table drop a:t a:u"):
        choose_first_rows([], backfilled, publish=publish, beside=beside)
    others = {"a:t": dense, "a:u": dataclasses.replace(SPEC, fqn="a:u", dim=5)}
    specs = [SPEC, dataclasses.replace(SPEC, fqn="a:u"), dataclasses.replace(SPEC, fqn="a:new")]
    with pytest.raises(SpecMismatchError, match=r"2 tables .*'a:t' \(.*shape .*\), 'a:u' \(dim 5 ≠ 4\);"):
        choose_first_rows(specs, Store(shards=(), highest_epoch=1, tables=others), publish=publish)


def test_all_dense_tensors_that_differ_are_listed_and_replaced_if_all_is_to_be_sent() -> None:
    """In shape, type or states; those that are new or as before are not."""
    state = StateSpec(name="sum", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)
    tensors = {
        name: TableSpec.of_tensor(f"a:{name}", (3, 4), DType.FLOAT32) for name in ("shape", "type", "states", "same")
    }
    known = Store(shards=(), highest_epoch=1, tables={spec.fqn: spec for spec in tensors.values()})
    beside = Beside(
        run="a",
        dense=[
            TableSpec.of_tensor("a:shape", (5, 4), DType.FLOAT32),
            TableSpec.of_tensor("a:type", (3, 4), DType.FLOAT16),
            TableSpec.of_tensor("a:states", (3, 4), DType.FLOAT32, states=(state,)),
            *(tensors["same"], TableSpec.of_tensor("a:new", (3, 4), DType.FLOAT32)),
        ],
    )
    for publish in ("auto", "updated"):
        with pytest.raises(SpecMismatchError) as refused:
            choose_first_rows([], known, publish=publish, beside=beside)
        text = str(refused.value)
        assert text.startswith("3 dense tensors of the server differ from the model's (registered ≠ yours): 'a:shape'")
        assert (
            "'a:shape' (shape (3, 4) ≠ (5, 4)), 'a:type' (dtype FLOAT32 ≠ FLOAT16), 'a:states' (states [none]" in text
        )
        assert "attach with publish='all' to replace them" in text and "'a:same'" not in text
        assert "dense_states" not in text
    replaced = choose_first_rows([], known, publish="all", beside=beside).replaced
    assert replaced == {"a:shape", "a:type", "a:states"}
    there = dataclasses.replace(known, tables={"a:states": beside.dense[2]})
    with pytest.raises(SpecMismatchError, match=r"attach with dense_states=True, .*; or attach with publish='all'"):
        choose_first_rows([], there, publish="auto", beside=Beside(run="a", dense=[tensors["states"]]))


def test_a_new_table_may_be_one_under_its_earlier_name() -> None:
    """One of the same rows, dim, type and states that the run owns and the model lacks; of several the most like it."""
    names = ("user.a.weight", "user.b.weight", "item.weight", "gone.weight", "there.weight")
    tables = {f"a:{name}": dataclasses.replace(SPEC, fqn=f"a:{name}") for name in names}
    tables["a:gone.weight"] = dataclasses.replace(tables["a:gone.weight"], dim=8)
    known = Store(shards=(), highest_epoch=1, tables=tables, owners={"a:item.weight": "other"})
    specs = [
        dataclasses.replace(SPEC, fqn=f"a:{name}") for name in ("person.b.weight", "person.a.weight", "new.weight")
    ]
    beside = Beside(run="a", names=frozenset({"a:there.weight", *(spec.fqn for spec in specs)}))
    alike = choose_first_rows(specs, known, publish="auto", beside=beside).alike
    assert alike == {"a:person.a.weight": "a:user.a.weight", "a:person.b.weight": "a:user.b.weight"}


class _Rank(SoloWorld):
    """One of two ranks; the other's report, and what rank 0 shares, are given."""

    size = 2

    def __init__(self, rank: int, other: Any, shared: Any = None) -> None:
        self.rank, self._other, self.shared = rank, other, shared

    def gather(self, value: Any) -> list[Any]:
        return [value, self._other]

    def share(self, value: Any) -> Any:
        self.shared = self.shared if self.rank else value
        return self.shared


def _agree(world: _Rank, find_store: Callable[[], Store]) -> FirstRows:
    return agree_on_first_rows(world, [SPEC], find_store, publish="all", last_step=3)


def test_who_may_write_until_the_tables_are_registered_is_noted() -> None:
    """Runs that own one of the tables, and backfills that have not ended."""
    for more, writers in (
        ({}, set()),
        ({"owners": {"a:t": "a", "a:u": "c"}}, {"a"}),
        ({"owners": {"a:t": "b"}}, {"b"}),
        ({"backfills": {"a:t": "fill"}}, {"fill"}),
        ({"backfills": {"a:u": "fill"}}, set()),
    ):
        there = Store(shards=(), highest_epoch=1, tables={"a:t": SPEC}, **more)
        assert choose_first_rows([SPEC], there, publish="auto", beside=Beside(run="a")).writers == writers


def test_rank_0_chooses_for_all_ranks() -> None:
    """Tables of one rank alone are chosen too, and the latest step that any rank has sent counts."""
    other = dataclasses.replace(SPEC, fqn="a:u")
    leader = _Rank(0, ({"a:u": other}, 5))
    agreed = _agree(leader, lambda: store(4))
    filled, complete = frozenset({"a:u"}), frozenset({"a:t"})
    assert agreed == FirstRows(names=filled | complete, filled=filled, complete=complete, after_step=5)

    def ask() -> Store:
        raise AssertionError("only rank 0 asks")

    assert _agree(_Rank(1, None, leader.shared), ask) == agreed


def test_ranks_that_differ_are_all_refused() -> None:
    """A table that one rank would store rounded, and another not, is an error on each."""
    other = dataclasses.replace(SPEC, dtype=DType.BFLOAT16)
    leader = _Rank(0, ({"a:t": other}, -1))
    words = r"'a:t' differs between ranks .*dtype FLOAT32 ≠ BFLOAT16; give all ranks the same"
    with pytest.raises(ConfigError, match=words):
        _agree(leader, lambda: store(4))
    with pytest.raises(ConfigError, match=words):
        _agree(_Rank(1, None, leader.shared), lambda: store(4))


def test_a_failure_of_rank_0_is_raised_on_all_ranks() -> None:
    """No rank waits for one that has given up."""

    def ask() -> Store:
        raise UnavailableError("no server")

    leader = _Rank(0, ({}, -1))
    for world in (leader, _Rank(1, None, UnavailableError("no server"))):
        with pytest.raises(HeadraceError, match="no server"):
            _agree(world, ask)
    assert isinstance(leader.shared, UnavailableError)
