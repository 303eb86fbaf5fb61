"""Tests of table names."""

from __future__ import annotations

import pytest

from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import (
    DEFAULT_MODEL,
    TableNames,
    check_model,
    has_controls,
    is_among,
    matches,
    model_of,
    name_in,
    path_of,
    table_name,
)


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("ctr", "users.weight", "ctr:users.weight"),
        (DEFAULT_MODEL, "users.weight", "users.weight"),
        ("a", "b:c", "a:b:c"),
    ],
)
def test_a_name_has_its_model_and_its_path(model: str, path: str, name: str) -> None:
    """The form of names is on disk and on the wire; under the default model it is that of releases before models."""
    assert table_name(model, path) == name
    assert (model_of(name), path_of(name)) == (model, path)


@pytest.mark.parametrize("model", ["", "a:b", "a\nb", "x" * 257, "\ud800", 7])
def test_a_name_that_is_no_model_is_refused(model: str) -> None:
    """Whatever could not be told from a path, or not be sent, is refused with the way on."""
    with pytest.raises(ConfigError, match="model"):
        check_model(model)


def test_a_path_finds_the_only_table_that_has_it() -> None:
    """A path is enough while one model has it; then the models are named. With a model, no other's is found."""
    names = TableNames(["users", "a:items", "b:items", "b:users", "b:shops"])
    assert names.find("shops") == "b:shops"
    assert names.find("a:items") == "a:items"
    assert names.find("users") == "users", "the default model's table has just this name"
    assert names.find("nothing") is None
    with pytest.raises(RequestError, match=r"several models have a table 'items' \(a, b\): name one, as in 'a:items'"):
        names.find("items")
    names = TableNames(["users", "a:items", "b:items", "b:users"], model="b")
    assert [names.find(name) for name in ("users", "items", "a:items")] == ["b:users", "b:items", None]
    assert TableNames(["users", "b:users"], model=DEFAULT_MODEL).find("users") == "users"


def test_characters_that_act_on_a_terminal() -> None:
    """What moves the cursor, ends a line or reorders it is a control character; text in any script is not."""
    for control in "\0\n\x1b\x7f\x9b\u2028\u2029\u202a\u202e\u2066\u2069":
        assert has_controls(f"a{control}b")
    assert not has_controls("größe/模型 [x]\\y مرحبا שלום")


def test_tables_are_chosen_by_names_and_patterns() -> None:
    """Names, paths and patterns of either choose a table; a name with brackets chooses itself."""
    assert is_among("a:t", {"t"})
    assert is_among("a:t", {"a:t"})
    assert matches("a:t.weight", "*.weight")
    assert not matches("a:t.weight", "a:u*")
    for wanted in ("a:t.weight", "t.weight", "a:t.*", "t.?eight", "[st].weight"):
        assert is_among("a:t.weight", ["other", wanted])
    assert is_among("tables[0].weight", ["tables[0].weight"])
    assert not is_among("a:t.weight", ["t", "b:*", "T.*"])


@pytest.mark.parametrize(
    ("names", "path", "name"),
    [
        ({}, "a.b.weight", None),
        ({"a": "x"}, "ab.weight", None),
        ({"a": "x", "a.b": "y.z", "a.b.weight.c": "no"}, "a.b.weight", "y.z.weight"),
        ({"a": "x", "a.b.weight": "y"}, "a.b.weight", "y"),
        ({"a": ""}, "a.b.weight", "b.weight"),
        ({"": "net"}, "b.weight", "net.b.weight"),
        ({"": ""}, "weight", "weight"),
    ],
)
def test_the_longest_path_names(names: dict[str, str], path: str, name: str | None) -> None:
    """A module's name is that of all inside of it, and a longer path says otherwise."""
    assert name_in(names, path) == name
