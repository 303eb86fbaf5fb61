"""The choice of generations, and how ranks agree on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError, HeadraceError, SpecMismatchError, UnavailableError
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.streamer.delivery.generations import (
    Beside,
    Generations,
    Publish,
    agree_on_generations,
    choose_generations,
)
from headrace.streamer.delivery.rendezvous import Store
from headrace.streamer.world import SoloWorld

SPEC = TableSpec(fqn="a:t", num_rows=10, dim=4, dtype=DType.FLOAT32)


def table(number: int, dim: int) -> TableSpec:
    return dataclasses.replace(SPEC, fqn=f"a:t#{number}" if number > 1 else "a:t", dim=dim)


def store(*dims: int, filling: tuple[int, ...] = (), **fields: Any) -> Store:
    """Return a store with generations of these dims, and the numbers of those that lack rows."""
    tables = {spec.fqn: spec for spec in [table(number, dim) for number, dim in enumerate(dims, 1)]}
    names = frozenset(table(number, 4).fqn for number in filling)
    return Store(shards=(), highest_epoch=1, tables=tables, filling=names, **fields)


@pytest.mark.parametrize(
    ("known", "dim", "name", "is_filled"),
    [
        (store(), 4, "a:t", True),
        (store(4, filling=(1,)), 4, "a:t", True),
        (store(4), 4, "a:t", False),
        (store(4, 8, filling=(2,)), 8, "a:t#2", True),
        (store(4, 8, filling=(2,)), 4, "a:t", False),
        (store(4, 8), 8, "a:t#2", False),
        (store(4, 8), 4, "a:t#3", True),
        (store(4, 8, 4), 4, "a:t#3", False),
        (store(4, 8, 8, filling=(2, 3)), 8, "a:t#3", True),
        (store(4, 8, 6, filling=(2,)), 8, "a:t#4", True),
        (store(4, 8, filling=(2,), filling_from={"a:t#2": 10}), 4, "a:t#3", True),
    ],
)
def test_the_newest_generation_that_fits_is_chosen(known: Store, dim: int, name: str, is_filled: bool) -> None:
    """Those before the newest complete one do not count, what is not complete is sent whole, and the server told."""
    chosen = choose_generations([dataclasses.replace(SPEC, dim=dim)], known, publish="all")
    filled, complete = frozenset({name} if is_filled else ()), {name} & known.tables.keys() - known.filling
    assert chosen == Generations(names={"a:t": name}, filled=filled, complete=frozenset(complete), seeds={})


@pytest.mark.parametrize(
    ("known", "publish", "filled", "updated_only"),
    [
        (store(), "auto", True, False),
        (store(), "updated", False, True),
        (store(4), "auto", False, False),
        (store(4, filling=(1,)), "auto", True, False),
        (store(4, filling=(1,)), "updated", False, True),
        (store(4, updated_only=frozenset({"a:t"})), "auto", False, True),
        (store(4, updated_only=frozenset({"a:t"})), "all", True, False),
        (store(4, filling=(1,), filling_from={"a:t": 6}), "auto", False, False),
    ],
)
def test_an_incomplete_table_is_sent_whole_unless_the_user_says_otherwise(
    known: Store, publish: Publish, filled: bool, updated_only: bool
) -> None:
    """The user's word for updated rows holds until it is taken back."""
    chosen = choose_generations([SPEC], known, publish=publish)
    assert (chosen.filled, chosen.updated_only) == tuple({"a:t"} if each else set() for each in (filled, updated_only))


@pytest.mark.parametrize(("publish", "grown"), [("auto", {"a:t": 10}), ("all", {"a:t": 10}), ("updated", {})])
def test_the_new_rows_of_a_grown_table_are_sent(publish: Publish, grown: dict[str, int]) -> None:
    """All ranks hear how many rows the server had."""
    larger = dataclasses.replace(SPEC, num_rows=12)
    assert choose_generations([larger], store(4), publish=publish).grown == grown


@pytest.mark.parametrize(("publish", "grown"), [("auto", {"a:t": 6}), ("all", {"a:t": 6}), ("updated", {})])
def test_a_table_that_was_growing_lacks_only_its_new_rows(publish: Publish, grown: dict[str, int]) -> None:
    """The next start sends those again, and any that it has more."""
    known = store(4, filling=(1,), filling_from={"a:t": 6})
    for num_rows in (10, 12):
        chosen = choose_generations([dataclasses.replace(SPEC, num_rows=num_rows)], known, publish=publish)
        assert (chosen.grown, chosen.filled, chosen.complete) == (grown, frozenset(), frozenset())


def test_new_rows_are_sent_of_a_table_of_updated_rows_only() -> None:
    """Unless the user says so again."""
    larger, known = dataclasses.replace(SPEC, num_rows=12), store(4, updated_only=frozenset({"a:t"}))
    assert choose_generations([larger], known, publish="auto").grown == {"a:t": 10}
    assert choose_generations([larger], known, publish="updated").grown == {}


@pytest.mark.parametrize("num_rows", [3, 30])
def test_the_server_decides_on_the_number_of_rows(num_rows: int) -> None:
    """A growth stays in its generation, and what the server refuses makes none."""
    spec = dataclasses.replace(SPEC, num_rows=num_rows)
    assert choose_generations([spec], store(4), publish="all").names == {"a:t": "a:t"}


def test_a_table_in_the_place_of_a_dense_tensor_makes_no_generation() -> None:
    """The server refuses it, as it does the other way round."""
    dense = TableSpec.of_tensor("a:t", (10, 4), DType.FLOAT32)
    known = Store(shards=(), highest_epoch=1, tables={"a:t": dense})
    assert choose_generations([SPEC], known, publish="all").names == {"a:t": "a:t"}


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
            choose_generations([], known, publish=publish, beside=beside)
        text = str(refused.value)
        assert text.startswith("3 dense tensors of the server differ from the model's (registered ≠ yours): 'a:shape'")
        assert (
            "'a:shape' (shape (3, 4) ≠ (5, 4)), 'a:type' (dtype FLOAT32 ≠ FLOAT16), 'a:states' (states [none]" in text
        )
        assert "attach with publish='all' to replace them" in text and "'a:same'" not in text
    replaced = choose_generations([], known, publish="all", beside=beside).replaced
    assert replaced == {"a:shape", "a:type", "a:states"}


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
    alike = choose_generations(specs, known, publish="auto", beside=beside).alike
    assert alike == {"a:person.a.weight": "a:user.a.weight", "a:person.b.weight": "a:user.b.weight"}


def test_an_old_server_makes_no_generation() -> None:
    """It would show the first one for ever."""
    with pytest.raises(SpecMismatchError, match="dim 8 ≠ 4; the server is of a release that knows no generations"):
        choose_generations([SPEC], store(8, knows_generations=False), publish="all")


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


def _agree(world: _Rank, find_store: Callable[[], Store]) -> Generations:
    return agree_on_generations(world, [SPEC], find_store, publish="all", last_step=3)


def test_rank_0_chooses_for_all_ranks() -> None:
    """Tables of one rank alone are chosen too, and the latest step that any rank has sent counts."""
    other = dataclasses.replace(SPEC, fqn="a:u")
    leader = _Rank(0, ({"a:u": other}, 5))
    agreed = _agree(leader, lambda: store(8))
    names = {"a:t": "a:t#2", "a:u": "a:u"}
    assert agreed == Generations(names=names, filled=frozenset(names.values()), seeds={}, after_step=5)

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
