"""Rows that are given to raw ids: what is marked when they are, and what a copied or closed module does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sparse_model import one_rank

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.collisions import Evictions, identities_of
from headrace.streamer.taps.guards.unstreamed_modules import spoiled_at

pytestmark = pytest.mark.torchrec

pytest.importorskip("torchrec")
from collision_training import (  # noqa: E402
    BATCH,
    DIM,
    ROWS,
    collision_model,
    drifting_ids,
    marks_and_changes,
    unsharded_model,
    values_of,
)
from hash_zch import Hours  # noqa: E402


@pytest.fixture(autouse=True)
def hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hours]:
    """Return the clock of evictions, in a process group of one rank."""
    with one_rank():
        yield Hours(monkeypatch)


def hashing_model() -> Any:
    return collision_model("m", True, 3, kind="mpzch", optimizer="row-wise-adagrad")


def zch_of(model: Any) -> Any:
    return model.module.m._managed_collision_collection._managed_collision_modules["users"]


def train(model: Any, hours: Hours, steps: range) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        model(drifting_ids(step, generator)).backward()
        hours.now += 1


def marked(tap: Tap) -> list[int]:
    """Return the marked rows, after a sweep, and unmark them."""
    tap.sweep()
    (table,) = tap.tables
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *table.dirty.parts()]).tolist()
    table.dirty.clear()
    return sorted(rows)


def test_the_emulation_puts_ids_where_the_kernel_finds_them(hours: Hours) -> None:
    """FBGEMM's read-only kernel finds each id that has a row there, and evicted ids have none."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    model = hashing_model()
    train(model, hours, range(12))
    zch = zch_of(model).eval()
    identities = zch._hash_zch_identities.view(-1)
    rows = (identities != -1).nonzero().view(-1)
    assert len(rows) > BATCH
    found = zch({"u": JaggedTensor(values=identities[rows], lengths=torch.ones(len(rows), dtype=torch.int64))})
    assert torch.equal(found["u"].values(), rows)


def test_a_lookup_without_an_update(hours: Hours) -> None:
    """In training mode it gives rows to new ids, so these rows are marked; in evaluation it marks none."""
    model = hashing_model()
    tap = tap_model(model, [], lambda: None)
    (table,) = tap.tables
    before = values_of(table)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(drifting_ids(0, generator))
        num_marked, num_changed = marks_and_changes(table, before)
        assert 0 < num_changed == num_marked
        marked(tap)
        model.eval()
        model(drifting_ids(9, generator))
    assert marked(tap) == []
    tap.close()


def test_a_lookup_of_an_unsharded_table(hours: Hours) -> None:
    """It marks the rows that it gives to new ids in training mode, and none after the close."""
    model = unsharded_model("m", False, 3, kind="mpzch")
    tap = tap_model(model, torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad]), lambda: None)
    (table,) = tap.tables
    before = values_of(table)
    generator = torch.Generator().manual_seed(0)
    model(drifting_ids(0, generator))
    num_marked, num_changed = marks_and_changes(table, before)
    assert 0 < num_changed == num_marked
    marked(tap)
    model.eval()
    model(drifting_ids(9, generator))
    assert marked(tap) == []
    tap.close()
    model.train()
    model(drifting_ids(12, generator))
    assert table.dirty.is_empty
    zch = model.m._managed_collision_collection._managed_collision_modules["users"]
    assert "remap" not in vars(zch)


@pytest.mark.parametrize("is_first", [False, True])
def test_tied_tables_with_raw_ids_are_refused(is_first: bool) -> None:
    """One weight cannot have rows by raw ids and rows by row ids."""
    inner = unsharded_model("m", False, 3, kind="mch")
    tied = torch.nn.Embedding(ROWS["mch"], DIM)
    tied.weight = inner.m._embedding_module.embeddings["users"].weight
    model = torch.nn.ModuleList([inner, tied] if is_first else [tied, inner])
    with pytest.raises(UnsupportedModelError, match="tied weights whose rows are given to raw ids"):
        tap_model(model, torch.optim.SGD([tied.weight]), lambda: None)


def test_unsharded_tables_on_several_ranks_are_refused() -> None:
    """Each rank would give the rows to other ids."""
    module = unsharded_model("m", False, 3, kind="mch").m
    assert spoiled_at("m", module, is_alone=True) is None
    path, reason = spoiled_at("m", module, is_alone=False) or ("", "")
    assert path == "m"
    assert "gives rows to other ids on each rank" in reason


def test_an_eviction_marks_its_rows() -> None:
    """Also rows that are given back to the id that they had, and those that no lookup asks for."""
    model = collision_model("m", True, 3)
    tap = tap_model(model, [], lambda: None)
    model.module.m._evict({"users": torch.tensor([5, 3])})
    assert marked(tap) == [3, 5]
    model.module.m._evict({"users": None})
    assert marked(tap) == []
    tap.close()


def test_an_eviction_that_fails_marks_every_row(hours: Hours, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is not known which rows it has reset, all are sent."""
    model = hashing_model()
    tap = tap_model(model, [], lambda: None)
    train(model, hours, range(12))
    marked(tap)
    train(model, hours, range(20, 21))
    assert len(marked(tap)) <= BATCH

    def fail() -> None:
        raise RuntimeError("no slots")

    monkeypatch.setattr(model.module.m._managed_collision_collection, "open_slots", fail)
    with pytest.raises(RuntimeError, match="no slots"):
        train(model, hours, range(30, 31))
    assert marked(tap) == list(range(ROWS["mpzch"]))
    tap.close()


def test_a_write_before_an_eviction_is_not_taken_for_it(hours: Hours) -> None:
    """A write to the weights that nothing has marked yet marks all rows, also if rows are evicted after it."""
    model = hashing_model()
    tap = tap_model(model, [], lambda: None)
    train(model, hours, range(12))
    tap.end_step()  # otherwise the next forward does, and sweeps
    marked(tap)
    (weights,) = [parameter for name, parameter in model.named_parameters() if name.endswith("users.weight")]
    with torch.no_grad():
        weights[3] = 7.0
    train(model, hours, range(30, 31))
    assert marked(tap) == list(range(ROWS["mpzch"]))
    tap.close()


def test_loaded_identities_mark_every_row() -> None:
    """A checkpoint may give each row to another id."""
    model = hashing_model()
    tap = tap_model(model, [], lambda: None)
    assert marked(tap) == []
    with torch.no_grad():
        zch_of(model)._hash_zch_identities.fill_(5)
    assert marked(tap) == list(range(ROWS["mpzch"]))
    tap.close()


def test_a_write_of_runtime_meta(hours: Hours) -> None:
    """Rows are marked that get other numbers by a look-up, by hand, from a checkpoint; none after the close."""
    model = collision_model("m", True, 3, kind="mpzch-numbers", optimizer="row-wise-adagrad")
    tap = tap_model(model, [], lambda: None)
    zch, (table,) = zch_of(model), tap.tables
    batch = drifting_ids(0, torch.Generator().manual_seed(0), has_numbers=True)
    before = values_of(table)
    with torch.no_grad():
        model(batch)
        num_marked, num_changed = marks_and_changes(table, before)
        assert 0 < num_changed == num_marked
        rows = marked(tap)
        model.eval()
        before = values_of(table)
        batch.weights().add_(1)
        model(batch)
        assert marks_and_changes(table, before)[1] > 0, "a look-up in evaluation writes numbers"
        marked(tap)
        zch.update_runtime_meta(zch._hash_zch_identities[rows[:2]].view(-1), torch.tensor(rows[:2]), torch.ones(2, 4))
        assert marked(tap) == rows[:2]
        zch._hash_zch_runtime_meta.fill_(5)
    assert marked(tap) == list(range(ROWS["mpzch"]))
    tap.close()
    zch.update_runtime_meta(torch.tensor([1]), torch.tensor([1]), torch.ones(1, 4))
    assert table.dirty.is_empty
    assert "update_runtime_meta" not in vars(zch)


def test_copies_and_closed_taps_evict_as_before(hours: Hours) -> None:
    """A copy or pickle of a streamed module has its own method, and so has the module after the close."""
    module = hashing_model().module.m
    stand_in = type(module).__new__(type(module))  # a sharded module has a process group, which nothing can copy
    torch.nn.Module.__init__(stand_in)

    class Listener:
        def before_eviction(self) -> None:
            raise AssertionError("heard of a copy")

        def after_eviction(self, rows: Any) -> None:
            raise AssertionError("heard of a copy")

    evictions, listener = Evictions(stand_in, "m"), Listener()
    evictions.add(listener)
    for other in (copy.deepcopy(stand_in), pickle.loads(pickle.dumps(stand_in))):
        assert other._evict.__self__ is other
        assert other._evict.__func__ is type(module)._evict
    with pytest.raises(AssertionError, match="heard"):
        stand_in._evict({"users": torch.tensor([1])})
    evictions.remove(listener)
    evictions.remove(listener)
    assert "_evict" not in vars(stand_in)


def test_identities_of_another_number_of_rows_are_refused() -> None:
    """The module and its table must have the same rows, and the module must be of a known kind."""
    source = identities_of("t", zch_of(hashing_model()))
    with pytest.raises(UnsupportedModelError, match="40 ids are known for the 41 rows here"):
        source.check("t", 41)
    with pytest.raises(UnsupportedModelError, match="does not say which raw id a row stands for"):
        identities_of("t", torch.nn.Linear(1, 1))
