"""What commands print: names from servers, clients and files cannot act on the terminal."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from command_line import CommandLine
from metric_samples import WRITER

from headrace.paramserver.observe.problems import Problem, Severity
from headrace.paramserver.observe.sample import DenseSample
from headrace.scripts.commands.status import show_dense, show_problem, show_writer
from headrace.scripts.commands.terminal import escape, print_line

ODD = "a\x1b[2Jb\nc\x7fd\x9b31me"
SHOWN = r"a\x1b[2Jb\nc\x7fd\x9b31me"
COMMANDS = Path(__file__).parents[3] / "scripts" / "commands"


def test_control_characters_are_visible(capsys: pytest.CaptureFixture[str], run: CommandLine) -> None:
    """A name with a line break stays one line, and an escape sequence does nothing, also in an error."""
    print_line(f"table {ODD}")
    print_line(ODD, to_stderr=True)
    assert capsys.readouterr() == (f"table {SHOWN}\n", f"{SHOWN}\n")
    assert escape(f"[red]{ODD}") == rf"\[red]{SHOWN}"
    assert r"no\x1b[2Jwhere\x9b: not a directory" in run.refused("snapshot", "list", "no\x1b[2Jwhere\x9b")


def test_lines_of_a_status() -> None:
    """Runs, clients, models and problems are shown so that each keeps to its cell or line."""
    writer = show_writer(dataclasses.replace(WRITER, run=ODD, client=ODD))
    assert writer[:2] == (SHOWN, SHOWN)
    gone = dataclasses.replace(WRITER, is_connected=False)
    assert (show_writer(gone)[-1], show_writer(gone, is_elsewhere=True)[-1]) == ("away", "at the source")
    assert show_dense(DenseSample(model=ODD, num_tensors=1, size_bytes=1, owner=ODD)).count(SHOWN) == 2
    problem = Problem(severity=Severity.WARNING, text=ODD, advice=ODD)
    assert show_problem(problem).count(SHOWN) == 2 and show_problem(problem).count("\n") == 1


def _prints_names(call: ast.Call) -> bool:
    """Return whether a call of `print` has anything but our own words, JSON, or a text that was made for it."""
    (shown,) = call.args
    texts = [shown.body, shown.orelse] if isinstance(shown, ast.IfExp) else [shown]
    if isinstance(shown, ast.Subscript) and isinstance(shown.value, ast.Dict):
        texts = shown.value.values
    is_made = [
        isinstance(text, ast.Constant)
        or (isinstance(text, ast.Call) and isinstance(text.func, ast.Attribute) and text.func.attr in ("dumps", "text"))
        for text in texts
    ]
    return not all(is_made)


@pytest.mark.parametrize("path", sorted(COMMANDS.glob("*.py")), ids=lambda path: path.stem)
def test_commands_show_names_by_way_of_the_terminal(path: Path) -> None:
    """No command prints a name itself, or escapes rich's markup alone."""
    if path.stem in ("terminal", "demo", "bench"):  # the latter two show what they have made themselves
        return
    tree = ast.parse(path.read_text("utf-8"))
    assert "rich.markup" not in {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert [call.lineno for call in prints if _prints_names(call)] == []
