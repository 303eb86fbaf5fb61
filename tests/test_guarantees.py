"""Every promise has its test: what the pages name is there, and some of it is quick enough to run after each change."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from long_tests import RECORD, file_of
from text_scripts import cases_of

ROOT = Path(__file__).resolve().parent.parent
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`")
_GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text("utf-8")


@functools.cache
def functions_of(file: str) -> dict[str, list[str]]:
    """Return the functions of a file, each with the scenarios that it runs; none if it is not there."""
    path = ROOT / file
    tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
            names = [ast.literal_eval(call.args[1]) for call in calls if ast.unparse(call.func) == "scripts"]
            found[node.name] = [case for name in names for case in cases_of(path.parent, name)]
    return found


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that are not there. Of a test that runs scenarios it has to name one."""
    missing = []
    for file, name, case in _NAMED.findall(text):
        functions = functions_of(file)
        if name not in functions or case not in (functions[name] or [""]):
            missing.append(f"{file}::{name}" + (f"[{case}]" if case else ""))
    return missing


def promises_in(text: str) -> list[str]:
    """Return the rows of a page's tables of promises."""
    tables = re.findall(r"^\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def only_long(promises: list[str], long_tests: Collection[str]) -> list[str]:
    """Return the promises that only long tests hold, which are recorded by their names, with classes."""
    functions = {(file_of(name), name.rpartition("::")[2]) for name in long_tests}
    return [row for row in promises if functions.issuperset((file, name) for file, name, _ in _NAMED.findall(row))]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """A page that names a test, or a scenario of one, names one that there is."""
    assert missing_tests(page.read_text("utf-8")) == []


def test_every_guarantee_has_a_test() -> None:
    """Each of the eight guarantees names at least one test."""
    sections = re.split(r"^## ", _GUARANTEES, flags=re.MULTILINE)[1:]
    numbered = [section for section in sections if section[0].isdigit()]
    assert [section[0] for section in numbered] == list("12345678")
    assert all(_NAMED.search(section) for section in numbered)


def test_every_promise_names_a_core_test() -> None:
    """Each row of a table of promises names a test of the core part that holds it, or its mechanism."""
    promises = promises_in(_GUARANTEES)
    assert promises
    assert only_long(promises, json.loads(RECORD.read_text())) == []


def test_a_test_that_is_not_there_is_found() -> None:
    """The check reports a wrong file, a wrong name and a wrong scenario, and a test whose scenario is not said."""
    sessions = "tests/paramserver/log/test_sessions.py::test_sessions"
    right, wrong = f"{sessions}[a-batch-takes-effect-once-and-a-gap-changes-nothing]", f"{sessions}[nothing]"
    names = ["tests/test_guarantees.py::test_nothing", "tests/test_nowhere.py::test_it", wrong, sessions]
    assert missing_tests(", ".join(f"`{name}`" for name in [right, *names])) == names


def test_a_promise_that_only_long_tests_hold_is_found() -> None:
    """A row without a test has none of the core either; a long test of a class is known by its function."""
    rows = ["| one | `tests/a.py::test_x`, `tests/a.py::test_y` |", "| two | `tests/a.py::test_x` |", "| three | |"]
    assert only_long(rows, ["tests/a.py::TestIt::test_x", "tests/b.py::test_y"]) == rows[1:]
