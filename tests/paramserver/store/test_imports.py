from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from set_embeddings import delta_of, request_of

from headrace.paramserver.store.catalog import Catalog, Owner, pack_spec
from headrace.paramserver.store.imports import known_deltas, known_hello
from headrace.schemas.errors import SpecMismatchError
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items", num_rows=10, dim=2, dtype=DType.FLOAT32)
OTHER = dataclasses.replace(SPEC, dim=3)
GROWN = dataclasses.replace(SPEC, num_rows=20)


def catalog_of(*specs: TableSpec) -> Catalog:
    catalog = Catalog({})
    catalog.add(specs)
    return catalog


def hello(*specs: TableSpec, **fields: Any) -> dict[str, Any]:
    header = {"kind": 2, "run": "run", "client": "rank0", "rank": 0, "world_size": 1}
    return header | {"tables": [pack_spec(spec) for spec in specs], "owned": []} | fields


def names_of(catalog: Catalog, spec: TableSpec) -> list[str]:
    return [delta.fqn for delta in known_deltas(catalog, request_of(delta_of(spec, [1], 1.0)))]


def test_what_was_dropped_here_stays_dropped() -> None:
    """A hello and rows of the source from before the drop make nothing anew; a table that was made since stays."""
    catalog = catalog_of(SPEC)
    catalog.drop(["items"], 5)
    assert known_hello(catalog, hello(SPEC), 3)["tables"] == []
    assert names_of(catalog, SPEC) == []
    assert known_hello(catalog, hello(SPEC), 6)["tables"] == [pack_spec(SPEC)]
    catalog.add([OTHER])
    assert known_hello(catalog, hello(SPEC), 3)["tables"] == []
    assert known_hello(catalog, hello(dropped=["items"]), 5)["dropped"] == []
    assert known_hello(catalog, hello(dropped=["items"]), 6)["dropped"] == ["items"]
    assert names_of(catalog, SPEC) == []
    assert names_of(catalog, OTHER) == ["items"]


def test_what_a_hello_says_of_unknown_tables_is_left_out() -> None:
    """Floors, fillings, owners and drops of tables that were dropped here are none; new tables count."""
    catalog = catalog_of(SPEC)
    said = {"floors": {"items": [1, 2], "gone": [1, 2]}, "fills": {"users": 3, "lost": 3}}
    second = dataclasses.replace(SPEC, fqn="users")
    header = known_hello(catalog, hello(second, owned=["items", "gone"], complete=["lost", "users"], **said), 3)
    assert header["floors"] == {"items": [1, 2]}
    assert header["fills"] == {"users": 3}
    assert (header["owned"], header["complete"]) == (["items"], ["users"])
    catalog.take_hello(header, 3)


def test_an_older_owner_takes_no_table_over() -> None:
    """A run that took a table over here keeps it, whatever the source said before."""
    catalog = catalog_of(SPEC)
    catalog.claim(["items"], Owner("newer", 7))
    assert known_hello(catalog, hello(owned=["items"]), 6)["owned"] == []
    assert known_hello(catalog, hello(owned=["items"]), 8)["owned"] == ["items"]


def test_tables_grow_and_do_not_change() -> None:
    """A growth is taken, a spec from before one is known, another table of the name is an error."""
    catalog = catalog_of(SPEC)
    assert known_hello(catalog, hello(GROWN), 3)["tables"] == [pack_spec(GROWN)]
    catalog.grow(GROWN)
    assert known_hello(catalog, hello(SPEC), 3)["tables"] == []
    assert names_of(catalog, SPEC) == ["items"]
    with pytest.raises(SpecMismatchError):
        known_hello(catalog, hello(OTHER), 3)
