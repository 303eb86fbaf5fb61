"""Tests of table names."""

from __future__ import annotations

import pytest

from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import (
    DEFAULT_MODEL,
    TableNames,
    check_model,
    check_path,
    generation_of,
    has_controls,
    is_among,
    matches,
    model_of,
    next_generation,
    path_of,
    plain_name,
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


@pytest.mark.parametrize(
    ("name", "plain", "number"),
    [
        ("ctr:users.weight#2", "ctr:users.weight", 2),
        ("users.weight#30", "users.weight", 30),
        ("users.weight", "users.weight", 1),
        *((name, name, 1) for name in ("users#1", "users#0", "users#02", "#2", "users#", "users#²", "users#2b")),
    ],
)
def test_a_name_says_its_generation(name: str, plain: str, number: int) -> None:
    """Only what `next_generation` makes is a later generation; the form is on disk and on the wire."""
    assert (plain_name(name), generation_of(name)) == (plain, number)


def test_the_next_generation_is_after_all_that_exist() -> None:
    """A number is never used twice, whichever of the others exist, and tables of other names do not count."""
    assert next_generation("a:t", ["t", "b:t#4", "a:t2"]) == "a:t"
    assert next_generation("a:t", ["a:t", "t#7"]) == "a:t#2"
    assert next_generation("a:t", ["a:t#3", "a:t"]) == "a:t#4"
    assert next_generation("a:t", ["a:t#3"]) == "a:t#4"


@pytest.mark.parametrize("path", ["t#2", "t#1", "t#007"])
def test_a_path_that_looks_like_a_generation_is_refused(path: str) -> None:
    """A model's table never gets the key of another table's generation."""
    with pytest.raises(ConfigError, match=r"is the number of a table's generation: give the module"):
        check_path(path)
    for good in (path.replace("#", "_"), f"{path}.weight", "#2"):
        check_path(good)


def test_characters_that_act_on_a_terminal() -> None:
    """What moves the cursor, ends a line or reorders it is a control character; text in any script is not."""
    for control in "\0\n\x1b\x7f\x9b\u2028\u2029\u202a\u202e\u2066\u2069":
        assert has_controls(f"a{control}b")
    assert not has_controls("größe/模型 [x]\\y مرحبا שלום")


def test_tables_are_chosen_by_names_and_patterns() -> None:
    """Names, paths and patterns of either choose a table, of any generation; a name with brackets chooses itself."""
    assert is_among("a:t#2", {"t"})
    assert is_among("a:t#2", {"a:t"})
    assert matches("a:t.weight#2", "*.weight")
    assert not matches("a:t.weight#2", "a:u*")
    for wanted in ("a:t.weight", "t.weight", "a:t.*", "t.?eight", "[st].weight"):
        assert is_among("a:t.weight", ["other", wanted])
    assert is_among("tables[0].weight", ["tables[0].weight"])
    assert not is_among("a:t.weight", ["t", "b:*", "T.*"])
