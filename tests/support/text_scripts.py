"""Tests as text: scripts of commands, with the expected output below each, in `testdata/` beside the test.

A file has several scenarios, each a test of its own:

    ## A batch takes effect once.
    hello rank0 5
    send rank0 1,1,3
      new
      duplicate
      SequenceGapError expected_seq=2

`## ` names a scenario, `# ` begins a comment. A command is the name of a method of the object that the test runs the
script on, then its arguments: words in order, and `name=value` by name. `7` is a number, `1,2,5..8` a list, `yes` and
`no` are booleans, `none` is None; quotes keep anything else together. Commands that belong together share a line:
`write 1; write 2`. What a method returns, or the class of the error of ours that it raises with the error's fields,
stands below the line, two spaces to the right. Where several commands share a line, an error names its command.

`HEADRACE_REWRITE=1 pytest tests/x/test_y.py` writes into the files what comes out. Review that as a diff.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import HeadraceError

__all__ = ["Script", "cases_of", "runs", "scripts"]

_WORDS: dict[str, Any] = {"yes": True, "no": False, "none": None}
_OPTION = re.compile(r"([a-z_]\w*)=(.*)", re.DOTALL)
_NUMBERS = re.compile(r"-?\d+(\.\.-?\d+)?(,-?\d+(\.\.-?\d+)?)*,?")
_FLOAT = re.compile(r"-?\d+\.\d+|-?\d+e\d+")


@dataclass(frozen=True, slots=True)
class Script:
    """One scenario of a file; `line` is the number of its title, and `text` the lines below that."""

    path: Path
    line: int
    title: str
    text: tuple[str, ...]

    def run(self, world: object) -> None:
        """Call methods of `world` as the script says, and compare what they return. No event loop runs for them."""
        running = self.run_async(world)
        try:
            running.send(None)
        except StopIteration:
            return
        running.close()
        raise AssertionError(f"{self.path}: a command waits, so the test needs run_async")

    async def run_async(self, world: object) -> None:
        """Do the same with methods some of which are coroutines."""
        found: list[str] = []
        for number, line in enumerate(self.text, self.line + 1):
            if line.startswith("  "):
                continue
            found.append(line)
            commands = line.split("; ") if line and not line.startswith("#") else []
            for command in commands:
                try:
                    result = _call(world, command)
                    result = await result if inspect.isawaitable(result) else result
                except HeadraceError as exc:
                    result = _told(exc) if len(commands) == 1 else f"{command.partition(' ')[0]}: {_told(exc)}"
                except Exception as exc:
                    exc.add_note(f"in {self.path.name}:{number}: {command}")
                    raise
                lines = result.splitlines() if isinstance(result, str) else [] if result is None else map(str, result)
                found += [f"  {line}" for line in lines]
        if found == [*self.text]:
            return
        if os.environ.get("HEADRACE_REWRITE"):
            _rewrite(self.path, self.title, found)
            return
        diff = difflib.unified_diff(self.text, found, "expected", "found", lineterm="", n=4)
        pytest.fail(f"{self.path}:{self.line}: {self.title}\n" + "\n".join([*diff][2:]), pytrace=False)


def scripts(test_file: str, name: str) -> pytest.MarkDecorator:
    """Return what runs a test once for each scenario of `testdata/<name>.txt` beside it, as its argument `script`."""
    folder = Path(test_file).parent
    cases = cases_of(folder, name)
    assert len(set(cases)) == len(cases), f"{name}.txt in {folder} has two scenarios of one name"
    return pytest.mark.parametrize("script", _read(folder, name), ids=cases)


def cases_of(folder: Path, name: str) -> list[str]:
    """Return the names that the scenarios of `testdata/<name>.txt` in a folder have as cases of their test."""
    return [re.sub(r"\W+", "-", script.title.lower()).strip("-") for script in _read(folder, name)]


def runs(numbers: Iterable[int]) -> str:
    """Return ascending numbers as a script writes them: `1 2 5..8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return " ".join("..".join(map(str, part)) for part in parts)


def _read(folder: Path, name: str) -> list[Script]:
    """Return the scenarios of a file. Above the first there are comments only."""
    path = folder / "testdata" / f"{name}.txt"
    lines = path.read_text("utf-8").splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("## ")]
    for number, line in enumerate(lines, 1):
        in_scenario = bool(starts) and number > starts[0]
        assert in_scenario or not line or re.match("##? ", line), f"{path}:{number}: a command above the first scenario"
        assert not re.match("##[^ ]", line), f"{path}:{number}: a title begins with '## '"
    return [
        Script(path, start + 1, lines[start][3:], tuple(lines[start + 1 : end]))
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def _rewrite(path: Path, title: str, found: Iterable[str]) -> None:
    """Put a scenario's text in its place: other scenarios of the file may have changed since it was read."""
    lines = path.read_text("utf-8").splitlines()
    start = lines.index(f"## {title}") + 1
    end = next((at for at in range(start, len(lines)) if lines[at].startswith("## ")), len(lines))
    lines[start:end] = found
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _parsed(text: str) -> Any:
    """Return the value that a word of a command stands for."""
    if text in _WORDS:
        return _WORDS[text]
    if _FLOAT.fullmatch(text):
        return float(text)
    if not _NUMBERS.fullmatch(text):
        return text
    if "," not in text and ".." not in text:
        return int(text)
    numbers: list[int] = []
    for part in text.rstrip(",").split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _call(world: object, command: str) -> Any:
    name, *words = shlex.split(command)
    method = getattr(world, name, None)
    assert callable(method) and not name.startswith("_"), f"no command {name!r}"
    options = {match[1]: _parsed(match[2]) for word in words if (match := _OPTION.fullmatch(word))}
    return method(*(_parsed(word) for word in words if not _OPTION.fullmatch(word)), **options)


def _told(exc: HeadraceError) -> str:
    """Return the error's class, and its fields that are numbers."""
    fields = [f"{name}={value}" for name, value in vars(exc).items() if type(value) is int]
    return " ".join([type(exc).__name__, *fields])
