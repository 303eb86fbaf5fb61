"""Every promise has its test: what the pages name is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def functions_of(file: str) -> set[str]:
    """Return the functions of a file; none if it is not there."""
    path = ROOT / file
    tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that are not there."""
    return [f"{file}::{name}" for file, name in _NAMED.findall(text) if name not in functions_of(file)]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """A page that names a test names one that there is."""
    assert missing_tests(page.read_text("utf-8")) == []


def test_every_guarantee_has_a_test() -> None:
    """Each of the eight guarantees names at least one test."""
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    numbered = [section for section in sections if section[0].isdigit()]
    assert [section[0] for section in numbered] == list("12345678")
    assert all(_NAMED.search(section) for section in numbered)


def test_every_promise_names_a_test() -> None:
    """Each row of a table of promises names the test that holds it."""
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    tables = re.findall(r"^\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert tables
    assert [row for table in tables for row in table.splitlines() if "`tests/" not in row] == []


def test_a_test_that_is_not_there_is_found() -> None:
    """The check reports a wrong file and a wrong name."""
    text = "`tests/test_guarantees.py::test_nothing` and `tests/test_nowhere.py::test_it`"
    assert missing_tests(text) == ["tests/test_guarantees.py::test_nothing", "tests/test_nowhere.py::test_it"]
