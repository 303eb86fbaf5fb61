"""Tables by name: registration, mismatch, and what metadata keeps."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.paramserver.store.catalog import Catalog, Filling, Owner, Scalar, pack_spec, unpack_spec
from headrace.schemas.errors import CorruptionError, SpecMismatchError, UnknownTableError
from headrace.schemas.table_lacks import INCOMPLETE, UPDATED_ONLY, merged_lack, what_lacks
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.schemas.version import MAX_STEP

ITEMS = TableSpec(
    fqn="items.weight",
    num_rows=100,
    dim=8,
    dtype=DType.FLOAT16,
    states=(
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),
    ),
    has_identities=True,
)


def test_tables_are_numbered_once_and_come_back_from_metadata() -> None:
    """A table keeps its number over a restart, and registering it again changes nothing."""
    users = dataclasses.replace(ITEMS, fqn="users.weight")
    catalog = Catalog({})
    meta = catalog.add([ITEMS]) | catalog.add([ITEMS, users])
    assert sorted(meta) == [b"identities/1", b"identities/2", b"table/1", b"table/2"]
    assert unpack_spec(pack_spec(ITEMS)) == ITEMS
    dense = TableSpec.of_tensor("mlp.0.weight", (30, 70), DType.FLOAT32)
    assert unpack_spec(pack_spec(dense)) == dense
    restored = Catalog(meta)
    assert [(t.table_id, t.spec) for t in restored] == [(1, ITEMS), (2, users)]
    assert restored.add([users, ITEMS]) == {}


def test_a_table_that_is_given_twice_has_one_number() -> None:
    """No other table gets a number in use, and two specs of one name are refused."""
    catalog = Catalog({})
    users, tags = (dataclasses.replace(ITEMS, fqn=f"{name}.weight") for name in ("users", "tags"))
    catalog.add([ITEMS, users, users, ITEMS])
    catalog.add([tags])
    assert [(table.table_id, table.spec) for table in catalog] == [(1, ITEMS), (2, users), (3, tags)]
    ads = dataclasses.replace(ITEMS, fqn="ads.weight")
    with pytest.raises(SpecMismatchError, match="twice with different specs: dim 8 ≠ 9"):
        catalog.check([ads, dataclasses.replace(ads, dim=9)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dim": 16}, "dim 8 ≠ 16"),
        ({"dtype": DType.FLOAT32}, "dtype FLOAT16 ≠ FLOAT32"),
        ({"num_rows": 7}, "num_rows 100 ≠ 7"),
        ({"states": ()}, "≠ \\[none\\]"),
        ({"has_identities": False}, "has_identities True ≠ False"),
    ],
)
def test_another_spec_of_the_same_name_is_refused(change: dict[str, object], says: str) -> None:
    """Each field counts, and the error says which one differs and how."""
    catalog = Catalog({})
    catalog.add([ITEMS])
    with pytest.raises(
        SpecMismatchError,
        match=says + ".*; .*can get more rows and changes in nothing else: give your model another name",
    ):
        catalog.check([dataclasses.replace(ITEMS, **change)])


def test_a_dense_tensor_of_another_shape_is_refused() -> None:
    """It has no generations, so the error says how to begin anew."""
    catalog = Catalog({})
    catalog.add([TableSpec.of_tensor("top.weight", (4, 3), DType.FLOAT32)])
    with pytest.raises(SpecMismatchError, match=r"shape \(4, 3\) ≠ \(5, 3\); remove it with `headrace table drop`"):
        catalog.check([TableSpec.of_tensor("top.weight", (5, 3), DType.FLOAT32)])


def test_an_unknown_table_is_refused_with_those_that_there_are() -> None:
    """The error lists registered tables, for users who mistyped a name."""
    catalog = Catalog({})
    with pytest.raises(UnknownTableError, match="registered tables: none"):
        catalog.find("item.weight")
    catalog.add([ITEMS])
    with pytest.raises(UnknownTableError, match=r"items\.weight"):
        catalog.find("item.weight")


@pytest.mark.parametrize(
    ("key", "values", "what"),
    [
        (b"table/x", [b"\x90"], "a table"),
        (b"table/1", [b"\x93\x01\x02\x03"], "a table"),
        (b"scalars/1", [b"\x91\x93\x01\x02\x03", b"\x91\x01", b"\x01", b"\x91"], "a list of scalars"),
        (b"owner/1", [b"\x91\xa1r", b"\x01"], "an owner"),
        (b"floor/1", [b"\x91\x01", b"\x05", b"\x92\x01\xa1x"], "a floor"),
        (b"generation/1", [b"\xa1x"], "a table's that lacks rows"),
        (b"earlier/x", [b"1"], "an earlier fingerprint"),
        (b"earlier/5", [b"2", b"one"], "an earlier fingerprint"),
        (b"dropped/2", [b"\x01", b"\x91\x01", b""], "a dropped table"),
        (b"renamed/x", [b"\x01"], "a rename"),
    ],
)
def test_damaged_metadata_is_named(key: bytes, values: list[bytes], what: str) -> None:
    """An entry that cannot be read stops the shard with its key."""
    for value in values:
        with pytest.raises(CorruptionError, match=f"{key.decode()}' is not {what}"):
            Catalog(Catalog({}).add([ITEMS]) | {key: value})


def test_a_floor_only_rises_and_comes_back_from_metadata() -> None:
    """A hello's record raises a floor, in golden bytes; a lower one changes nothing; other tables keep theirs."""
    users = dataclasses.replace(ITEMS, fqn="users.weight")
    catalog = Catalog({})
    meta = catalog.add([ITEMS, users])
    assert catalog.below_floor(["users.weight"], (1, 0)) == []
    hello = {"run": "headrace", "tables": [], "owned": [], "floors": {"users.weight": [3, 500]}}
    raised = catalog.take_hello(hello, 1)
    assert raised == {b"floor/2": bytes.fromhex("9203cd01f4")}
    assert catalog.raise_floors({"users.weight": (3, 499)}) == raised
    restored = Catalog(meta | raised)
    assert [table.floor for table in restored] == [(0, -1), (3, 500)]
    names = ["users.weight", "items.weight", "users.weight"]
    assert restored.below_floor(names, (3, 500)) == ["users.weight"]
    assert restored.below_floor(names, (3, 501)) == []


def test_the_newest_scalar_of_a_name_is_kept() -> None:
    """A scalar of an older (epoch, step) changes nothing, and an equal one replaces; all survive a restart."""

    def value(number: int) -> bytes:
        return number.to_bytes(4, "little")

    catalog = Catalog({})
    meta = catalog.add([ITEMS])
    for epoch, step, number in [(2, 5, 1), (2, 4, 2), (1, 9, 3)]:
        meta |= catalog.set_scalars(ITEMS.fqn, [("step", DType.FLOAT32, value(number))], epoch, step)
    for table in (catalog.find(ITEMS.fqn), Catalog(meta).find(ITEMS.fqn)):
        assert table.scalars == {"step": Scalar("step", DType.FLOAT32, value(1), 2, 5)}
    meta |= catalog.set_scalars(ITEMS.fqn, [("step", DType.FLOAT32, value(4))], 2, 5)
    meta |= catalog.set_scalars(ITEMS.fqn, [("lr", DType.FLOAT32, value(5))], 1, 1)
    assert {name: s.data for name, s in Catalog(meta).find(ITEMS.fqn).scalars.items()} == {
        "step": value(4),
        "lr": value(5),
    }
    meta |= catalog.set_scalars(ITEMS.fqn, [("step", DType.FLOAT32, value(6))], 3, 0)
    assert Catalog(meta).find(ITEMS.fqn).scalars["step"] == Scalar("step", DType.FLOAT32, value(6), 3, 0)


def test_a_grown_table_keeps_its_number_and_earlier_fingerprints() -> None:
    """Growing twice leaves the table's number, and metadata brings back every fingerprint that it had."""
    catalog = Catalog({})
    meta = catalog.add([ITEMS])
    layout = catalog.find(ITEMS.fqn).layout_of(ITEMS.whole)
    larger, largest = (dataclasses.replace(ITEMS, num_rows=num_rows) for num_rows in (101, 5000))
    meta |= catalog.grow(larger)
    assert meta[b"earlier/%d" % ITEMS.fingerprint] == b"1"
    meta |= catalog.grow(largest)
    for table in (catalog.find(ITEMS.fqn), Catalog(meta).find(ITEMS.fqn)):
        assert (table.table_id, table.spec) == (1, largest)
        assert table.earlier == {ITEMS.fingerprint, larger.fingerprint}
    assert catalog.find(ITEMS.fqn).layout_of(ITEMS.whole) is layout


@pytest.mark.parametrize("changes", [{"num_rows": 99}, {}, {"num_rows": 0}, {"num_rows": 200, "dim": 4}])
def test_a_table_grows_in_rows_alone(changes: dict[str, int]) -> None:
    """Fewer rows, virtual ids or another dim are refused, and the table stays as it was."""
    catalog = Catalog({})
    catalog.add([ITEMS])
    with pytest.raises(SpecMismatchError, match="has 100 rows and can only get more"):
        catalog.grow(dataclasses.replace(ITEMS, **changes))
    assert catalog.find(ITEMS.fqn).spec == ITEMS and not catalog.find(ITEMS.fqn).earlier


def test_what_a_log_says_again_changes_nothing() -> None:
    """Records register, grow and repeat: the catalog ends with the most rows, and takes rows of every fingerprint."""
    catalog, larger = Catalog({}), dataclasses.replace(ITEMS, num_rows=200)
    meta = catalog.add([ITEMS]) | catalog.add([larger])
    assert not catalog.add([ITEMS, larger])
    for known in (catalog, Catalog(meta)):
        table = known.find(ITEMS.fqn)
        assert table.spec == larger and table.is_of(ITEMS) and table.is_of(larger)
        assert not table.is_of(dataclasses.replace(ITEMS, num_rows=150))
    with pytest.raises(SpecMismatchError, match="registered with another spec"):
        catalog.add([dataclasses.replace(ITEMS, num_rows=150)])


def test_a_table_is_complete_once_the_epoch_has_passed_its_step() -> None:
    """One that has all rows is not filled again; of several hellos the newest epoch and its latest step count."""
    second = dataclasses.replace(ITEMS, fqn=f"{ITEMS.fqn}#2", dim=16)
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
    assert [table.spec.fqn for table in catalog.generations_of(second.fqn)] == [ITEMS.fqn, second.fqn]
    assert catalog.end_filling({4: 100, 5: -1}.__getitem__) == ([], {})
    names, changed = catalog.end_filling({5: 0}.__getitem__)
    assert names == [second.fqn]
    assert changed == {b"generation/2": b""}, "the store removes the key"
    assert catalog.fills_of([second.fqn], 6, -1) == {}, "a complete table stays complete"
    assert catalog.fills_of([second.fqn], 6, -1, {second.fqn}) == {second.fqn: -1}, "unless it grows"


def _hello(catalog: Catalog, epoch: int, *specs: TableSpec, fills: bool, after_step: int = -1) -> Filling | None:
    """Take a trainer's hello as a shard does, and return what the catalog says then, read again from its metadata."""
    new_specs = catalog.check(specs)
    changed = catalog.with_new_rows(new_specs)
    names = [spec.fqn for spec in specs]
    header = {"tables": [pack_spec(spec) for spec in new_specs], "run": "run"}
    if fills:
        header["fills"] = catalog.fills_of(names, epoch, after_step, changed)
    else:
        header["updated_only"] = catalog.left_out_of(names, epoch, changed)
    catalog.take_hello(header, epoch)
    again = Catalog(catalog.packed()).find(ITEMS.fqn).filling
    assert again == catalog.find(ITEMS.fqn).filling
    return again


def test_a_table_lacks_what_its_trainers_have_not_sent() -> None:
    """The first making of a table, its growth, and the user's word that updated rows are enough."""
    catalog, larger = Catalog({}), dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 10)
    assert _hello(catalog, 1, ITEMS, fills=True) == Filling(1, -1)
    assert _hello(catalog, 2, ITEMS, fills=True, after_step=3) == Filling(2, 3), "the next start sends them all"
    assert catalog.end_filling({2: 4}.__getitem__)[0] == [ITEMS.fqn]
    assert _hello(catalog, 3, ITEMS, fills=False) is None, "all rows are there"
    for uses in ("[1]", None):
        for fills in (True, False):
            assert _hello(catalog, 3, ITEMS.described(uses), fills=fills) is None, "other uses lack no row"
            assert catalog.find(ITEMS.fqn).spec.uses == uses
    assert _hello(catalog, 4, larger, fills=True) == Filling(4, -1, from_row=ITEMS.num_rows)
    assert _hello(catalog, 4, larger, fills=True) == Filling(4, -1, from_row=ITEMS.num_rows), "another rank"
    assert _hello(catalog, 5, larger, fills=True) == Filling(5, -1, from_row=ITEMS.num_rows)
    only = _hello(catalog, 6, larger, fills=False)
    assert only == Filling(6, MAX_STEP, from_row=ITEMS.num_rows, updated_only=True)
    assert catalog.end_filling(lambda _: MAX_STEP)[0] == []
    assert (what_lacks(only), what_lacks(None)) == (UPDATED_ONLY, "")
    assert merged_lack(["", UPDATED_ONLY, INCOMPLETE]) == INCOMPLETE
    assert _hello(catalog, 7, larger, fills=True) == Filling(7, -1, from_row=ITEMS.num_rows), "publish='all'"


def test_a_dropped_table_leaves_its_number_and_epoch() -> None:
    """No number is used twice, what belonged to the table goes with it, and only later clients make it anew."""
    catalog, users = Catalog({}), dataclasses.replace(ITEMS, fqn="users.weight")
    meta = catalog.add([ITEMS, users]) | catalog.grow(dataclasses.replace(users, num_rows=500))
    meta |= catalog.claim([users.fqn], "run", 4) | catalog.raise_floors({users.fqn: (3, 9)})
    dropping = catalog.drop([users.fqn, "absent"], 7)
    assert [key for key, value in dropping.items() if value] == [b"dropped/2"]
    meta = {key: value for key, value in (meta | dropping).items() if value}
    assert set(meta) == set(Catalog({}).add([ITEMS])) | {b"dropped/2"}
    for known in (catalog, Catalog(meta)):
        assert (known.dropped, known.drop_epochs) == ([2], {users.fqn: 7})
        with pytest.raises(UnknownTableError, match=r"'users.weight' was dropped in epoch 7; a trainer"):
            known.find(users.fqn)
        with pytest.raises(UnknownTableError, match="was dropped in epoch 7"):
            known.check([users], epoch=6)
        assert known.check([users], epoch=7) == [users]
        meta_again = known.add([users])
        table = known.find(users.fqn)
        assert (table.table_id, table.owner, table.floor, table.earlier) == (3, None, (6, 2**63 - 1), frozenset())
        assert not known.drop(["absent"], 8)
        assert Catalog(meta | meta_again).find(users.fqn) == table


def test_a_renamed_table_keeps_all_but_its_name() -> None:
    """Number, owner and seed stay; the old name tells the new one, and is free for later clients."""
    catalog = Catalog({})
    meta = catalog.add([ITEMS]) | catalog.claim([ITEMS.fqn], "run", 4)
    meta |= catalog.rename({ITEMS.fqn: "ctr:goods.weight", "absent": "x"}, 7)
    renamed = ITEMS.renamed("ctr:goods.weight")
    assert (renamed.seed, renamed.renamed_seed) == (ITEMS.seed, ITEMS.seed) != (ITEMS.seed, None)
    assert renamed.renamed(ITEMS.fqn) == ITEMS
    for known in (catalog, Catalog({key: value for key, value in meta.items() if value})):
        table = known.find("ctr:goods.weight")
        assert (table.table_id, table.spec, table.earlier) == (1, renamed, {ITEMS.fingerprint})
        assert table.owner == Owner("run", 4)
        with pytest.raises(UnknownTableError, match=r"'items.weight' was renamed to 'ctr:goods.weight' in epoch 7"):
            known.find(ITEMS.fqn)
        with pytest.raises(UnknownTableError, match="was renamed to"):
            known.check([ITEMS], epoch=6)
        assert unpack_spec(pack_spec(renamed)) == renamed
        known.add(known.check([ITEMS], epoch=7))
        assert known.find(ITEMS.fqn).table_id == 2


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
    # A replay of an old log, and a rank that is behind, know less of the table.
    (kept,) = catalog.with_known_uses([ITEMS.described("[1]")])
    assert kept.uses == "[3]"
    grown = dataclasses.replace(ITEMS, num_rows=ITEMS.num_rows + 1, uses="[4]")
    catalog.add([grown])
    catalog.add([ITEMS.described("[5]")])
    assert (catalog.find(ITEMS.fqn).spec, catalog.find(ITEMS.fqn).spec.uses) == (grown, "[5]")


def test_a_shard_takes_no_uses_from_one_that_is_behind() -> None:
    """What an older owner's trainer has said does not replace what the newer one's has."""
    ours, theirs = Catalog({}), Catalog({})
    ours.add([ITEMS.described("[new]")])
    ours.claim([ITEMS.fqn], "run", 2)
    theirs.add([ITEMS.described("[old]")])
    theirs.claim([ITEMS.fqn], "run", 1)
    ours.take_over(theirs)
    theirs.take_over(ours)
    assert ours.find(ITEMS.fqn).spec.uses == theirs.find(ITEMS.fqn).spec.uses == "[new]"
