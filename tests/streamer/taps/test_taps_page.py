"""The page on what can be streamed names tests; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_exists() -> None:
    """A cell of the tables is backed by a test that is there, under the name that stands there."""
    page = (_ROOT / "docs" / "taps.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 25
    for path, name in named:
        tree = ast.parse((_ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_line_of_the_tables_has_a_test() -> None:
    """No line of a table stands without one."""
    for line in (_ROOT / "docs" / "taps.md").read_text().splitlines():
        if line.startswith("|") and not re.match(
            r"\|[-|]+\|$|\| *(where|sharding|kind)? *\|.*\| test \|$|\| \| test \|$", line
        ):
            assert "::test_" in line, line
