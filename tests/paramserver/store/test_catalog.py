"""Tables by name: registration, mismatch, and what metadata keeps."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from table_commands import ITEMS, TableCommands
from text_scripts import Script, scripts

from headrace.paramserver.store.catalog import Catalog, Filling, Owner, pack_spec, unpack_spec
from headrace.schemas.errors import CorruptionError, RequestError, UnknownTableError
from headrace.schemas.table_lacks import INCOMPLETE, UPDATED_ONLY, merged_lack, what_lacks
from headrace.schemas.tables import DType, TableSpec
from headrace.schemas.version import MAX_STEP


@scripts(__file__, "catalog")
def test_catalog(script: Script) -> None:
    """Tables are registered, grow and are dropped, and metadata keeps every change."""
    script.run(TableCommands())


@pytest.mark.parametrize("spec", [ITEMS, TableSpec.of_tensor("mlp.0.weight", (30, 70), DType.FLOAT32)])
def test_a_spec_comes_back(spec: TableSpec) -> None:
    """What metadata and log records have of a spec is all of it."""
    assert unpack_spec(pack_spec(spec)) == spec


def test_a_hello_in_golden_bytes() -> None:
    """The metadata of a table that a hello registers, and of which rows are deleted."""
    catalog, users = Catalog({}), dataclasses.replace(ITEMS, fqn="users", states=())
    hello = {"run": "r", "world_size": 1, "tables": [pack_spec(users)], "owned": ["users"]}
    meta = catalog.take_hello(hello, 7) | catalog.note_deletes("users") | catalog.note_deletes("users")
    assert {key: value.hex() for key, value in meta.items()} == {
        b"table/1": "96a5757365727364080290c3",
        b"owner/1": "97a17207c2c2c007ff",
        b"deletes/1": "31",
    }


def test_an_owner_of_release_0_3_0_is_read() -> None:
    """It has no former owner."""
    catalog = Catalog({b"table/1": msgpack.packb(pack_spec(ITEMS)), b"owner/1": msgpack.packb(["r", 7, False, True])})
    assert catalog.owner_of(ITEMS.fqn) == Owner("r", 7, has_ended=True)


_GROWS = "); a table's shape is fixed, except for more rows: give the changed model another name"
_DENSE = TableSpec.of_tensor("top.weight", (4, 3), DType.FLOAT32)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (dataclasses.replace(ITEMS, dim=16), f"dim 8 ≠ 16{_GROWS}"),
        (dataclasses.replace(ITEMS, dtype=DType.FLOAT32), f"dtype FLOAT16 ≠ FLOAT32{_GROWS}"),
        (dataclasses.replace(ITEMS, num_rows=7), f"num_rows 100 ≠ 7{_GROWS}"),
        (dataclasses.replace(ITEMS, states=()), f"≠ [none]{_GROWS}"),
        (dataclasses.replace(ITEMS, has_identities=False), f"has_identities True ≠ False{_GROWS}"),
        (
            TableSpec.of_tensor("top.weight", (5, 3), DType.FLOAT32),
            "shape (4, 3) ≠ (5, 3); remove it with `headrace table drop`",
        ),
        ("item", "registered tables: items.weight, top.weight"),
    ],
)
def test_messages(spec: TableSpec | str, says: str) -> None:
    """The error says which field differs and how, and what to do; for a mistyped name, which tables there are."""
    catalog = Catalog({})
    with pytest.raises(UnknownTableError, match="registered tables: none"):
        catalog.find("item")
    catalog.add([ITEMS, _DENSE])
    with pytest.raises(RequestError) as caught:
        catalog.find(spec) if isinstance(spec, str) else catalog.check([spec])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "values", "what"),
    [
        (b"table/x", [b"\x90"], "a table"),
        (b"table/1", [b"\x93\x01\x02\x03"], "a table"),
        (b"scalars/1", [b"\x91\x93\x01\x02\x03", b"\x91\x01", b"\x01", b"\x91"], "a list of scalars"),
        (b"owner/1", [b"\x91\xa1r", b"\x01"], "an owner"),
        (b"filling/1", [b"\xa1x"], "a table's that lacks rows"),
        (b"earlier/x", [b"1"], "an earlier fingerprint"),
        (b"earlier/5", [b"2", b"one"], "an earlier fingerprint"),
        (b"dropped/2", [b"\x01", b"\x91\x01", b""], "a dropped table"),
    ],
)
def test_damaged_metadata_is_named(key: bytes, values: list[bytes], what: str) -> None:
    """An entry that cannot be read stops the shard with its key."""
    for value in values:
        with pytest.raises(CorruptionError, match=f"{key.decode()}' is not {what}"):
            Catalog(Catalog({}).add([ITEMS]) | {key: value})


def test_a_table_is_complete_once_the_epoch_has_passed_its_step() -> None:
    """One that has all rows is not filled again; of several hellos the newest epoch and its latest step count."""
    second = dataclasses.replace(ITEMS, fqn="users.weight", dim=16)
    catalog = Catalog({})
    meta = catalog.add([ITEMS])
    assert catalog.fills_of([ITEMS.fqn, second.fqn], 4, 7) == {second.fqn: 7}, "of a table that is not there yet"
    meta |= catalog.add([second]) | catalog.begin_filling({second.fqn: Filling(4, 7)})
    assert catalog.fills_of([second.fqn], 4, 6) == {}
    assert catalog.fills_of([second.fqn], 3, 9) == {}
    assert catalog.fills_of([second.fqn], 4, 9) == {second.fqn: 9}
    meta |= catalog.begin_filling({second.fqn: Filling(4, 9)})
    assert catalog.fills_of([second.fqn], 5, -1) == {second.fqn: -1}
    meta |= catalog.begin_filling({second.fqn: Filling(5, -1)})
    catalog = Catalog(meta)
    assert catalog.find(second.fqn).filling == Filling(5, -1)
    assert catalog.end_filling({4: 100, 5: -1}.__getitem__) == ([], {})
    names, changed = catalog.end_filling({5: 0}.__getitem__)
    assert names == [second.fqn]
    assert changed == {b"filling/2": b""}, "the store removes the key"
    assert catalog.fills_of([second.fqn], 6, -1) == {}, "a complete table stays complete"
    assert catalog.fills_of([second.fqn], 6, -1, {second.fqn}) == {second.fqn: -1}, "unless it grows"


def _hello(
    catalog: Catalog, meta: dict[bytes, bytes], epoch: int, *specs: TableSpec, fills: bool, after_step: int = -1
) -> Filling | None:
    """Take a trainer's hello as a shard does, and return what the catalog says then, read again from its metadata."""
    new_specs = catalog.check(specs)
    changed = catalog.with_new_rows(new_specs)
    names = [spec.fqn for spec in specs]
    header = {"tables": [pack_spec(spec) for spec in new_specs], "owned": [], "run": "run", "world_size": 1}
    if fills:
        header["fills"] = catalog.fills_of(names, epoch, after_step, changed)
    else:
        header["updated_only"] = catalog.left_out_of(names, epoch, changed)
    meta |= catalog.take_hello(header, epoch)
    again = Catalog({key: value for key, value in meta.items() if value}).find(ITEMS.fqn).filling
    assert again == catalog.find(ITEMS.fqn).filling
    return again


def test_a_table_lacks_what_its_trainers_have_not_sent() -> None:
    """The first making of a table, its growth, and the user's word that updated rows are enough."""
    meta: dict[bytes, bytes] = {}
    catalog, larger = Catalog({}), dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 10)
    assert _hello(catalog, meta, 1, ITEMS, fills=True) == Filling(1, -1)
    assert _hello(catalog, meta, 2, ITEMS, fills=True, after_step=3) == Filling(2, 3), "the next start sends them all"
    ended, changed = catalog.end_filling({2: 4}.__getitem__)
    assert ended == [ITEMS.fqn]
    meta |= changed
    assert _hello(catalog, meta, 3, ITEMS, fills=False) is None, "all rows are there"
    for uses in ("[1]", None):
        for fills in (True, False):
            assert _hello(catalog, meta, 3, ITEMS.described(uses), fills=fills) is None, "other uses lack no row"
            assert catalog.find(ITEMS.fqn).spec.uses == uses
    assert _hello(catalog, meta, 4, larger, fills=True) == Filling(4, -1, from_row=ITEMS.num_rows)
    assert _hello(catalog, meta, 4, larger, fills=True) == Filling(4, -1, from_row=ITEMS.num_rows), "another rank"
    assert _hello(catalog, meta, 5, larger, fills=True) == Filling(5, -1, from_row=ITEMS.num_rows)
    only = _hello(catalog, meta, 6, larger, fills=False)
    assert only == Filling(6, MAX_STEP, from_row=ITEMS.num_rows, updated_only=True)
    assert catalog.end_filling(lambda _: MAX_STEP)[0] == []
    assert (what_lacks(only), what_lacks(None)) == (UPDATED_ONLY, "")
    assert merged_lack(["", UPDATED_ONLY, INCOMPLETE]) == INCOMPLETE
    assert _hello(catalog, meta, 7, larger, fills=True) == Filling(7, -1, from_row=ITEMS.num_rows), "publish='all'"


def test_the_last_hello_says_how_a_table_is_used() -> None:
    """Other uses are news of a known table, are kept, also by tables that grow, and go when a trainer says none."""
    meta: dict[bytes, bytes] = {}
    catalog = Catalog({})
    for said in (None, "[1]", "[2]", None, "[3]"):
        spec = ITEMS.described(said)
        assert [each.uses for each in catalog.check([spec])] == ([said] if meta else [None])
        meta |= catalog.add([spec])
        assert catalog.check([spec]) == [] and catalog.add([spec]) == {}
        for each in (catalog, Catalog(meta)):
            assert each.find(ITEMS.fqn).spec.uses == said
    # An old log, and a rank that is behind, know less of the table.
    (kept,) = catalog.with_known_uses([ITEMS.described("[1]")])
    assert kept.uses == "[3]"
    grown = dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 1, uses="[4]")
    catalog.add([grown])
    catalog.add([ITEMS.described("[5]")])
    assert (catalog.find(ITEMS.fqn).spec, catalog.find(ITEMS.fqn).spec.uses) == (grown, "[5]")


def test_what_other_shards_know() -> None:
    """A table that has grown at one shard only keeps its older shape's records, and has the newest owner of all."""
    grown = dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 1)
    behind, ahead = Catalog({}), Catalog({})
    for catalog in (behind, ahead):
        catalog.add([ITEMS])
        catalog.claim([ITEMS.fqn], Owner("run", 4))
    ahead.grow(grown)
    behind.end_run("run")
    for others in ([behind, ahead], [ahead, behind]):
        new = Catalog({})
        meta = new.add([grown]) | new.take_from(others)
        again = Catalog({key: value for key, value in meta.items() if value}).find(ITEMS.fqn)
        assert (again.spec, again.earlier) == (grown, frozenset({ITEMS.fingerprint}))
        assert again.owner == Owner("run", 4), "it has ended once it has everywhere"
        ahead.claim([ITEMS.fqn], Owner("run", 5))
        assert new.take_from(others) and new.owner_of(ITEMS.fqn) == Owner("run", 5)
        ahead.claim([ITEMS.fqn], Owner("run", 4))


@pytest.mark.parametrize(
    ("steps", "joined"), [((7, 9), 9), ((9, 7), 9), ((7, -1), -1), ((-1, 7), -1)], ids=["last", "first", "none", "yet"]
)
def test_the_first_step_of_an_owner_is_one_that_all_shards_have(steps: tuple[int, int], joined: int) -> None:
    """A table expires only once its owner has ended a step on every shard."""
    here, there = (Owner("run", 4, first_step=step) for step in steps)
    assert here.joined(there) == Owner("run", 4, first_step=joined)
    assert (
        Owner("run", 5, first_step=3).joined(here)
        == Owner("run", 5, first_step=3)
        == here.joined(Owner("run", 5, first_step=3))
    )
