"""Scripts of text: what commands get, what a difference shows, and what a rewrite writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from text_scripts import Script, runs, scripts

from headrace.schemas.errors import FencedError, OverloadedError

TEXT = """# Above the first scenario there are comments.

## Words are values.
say 7 -3 1.5 1,2,5..7 4, word "two words" yes no none
  7 -3 1.5 [1, 2, 5, 6, 7] [4] word two words True False None
# A comment, and several commands on a line.
say 1; say name=2; nothing; lines
  1
  name 2
  one
  two
fail

## Errors of ours are told with their numbers.
fence 5
  FencedError epoch=5
nothing; be_busy
  be_busy: OverloadedError
"""


class World:
    def say(self, *words: Any, **named: Any) -> str:
        return " ".join(map(str, (*words, *(part for pair in named.items() for part in pair))))

    def nothing(self) -> None: ...

    async def lines(self) -> list[str]:
        return ["one", "two"]

    def fence(self, epoch: int) -> None:
        raise FencedError("it is over", epoch=epoch)

    def be_busy(self) -> None:
        raise OverloadedError("full", retry_after_s=0.5)

    async def wait(self) -> None:
        await asyncio.sleep(0)

    def fail(self) -> str | None:
        return None


@pytest.fixture
def found(tmp_path: Path) -> list[Script]:
    (tmp_path / "testdata").mkdir()
    (tmp_path / "testdata" / "some.txt").write_text(TEXT)
    mark = scripts(str(tmp_path / "test_some.py"), "some")
    assert mark.kwargs["ids"] == ["words-are-values", "errors-of-ours-are-told-with-their-numbers"]
    return list(mark.args[1])


async def test_scenarios_that_hold(found: list[Script]) -> None:
    """Each is a script of its own; one without coroutines needs no loop."""
    await found[0].run_async(World())
    found[1].run(World())


async def test_a_difference_is_shown_or_written(found: list[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure has the lines around it; with the variable set, the scenario alone is written anew."""

    class Other(World):
        def fail(self) -> str:
            return "new"

    monkeypatch.delenv("HEADRACE_REWRITE", raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"some.txt:3: Words are values\.\n(.*\n)* fail\n\+  new"):
        await found[0].run_async(Other())
    monkeypatch.setenv("HEADRACE_REWRITE", "1")
    await found[0].run_async(Other())
    found[1].run(World())
    assert found[0].path.read_text() == TEXT.replace("fail\n", "fail\n  new\n")


def test_faults_of_a_script_name_their_line(found: list[Script]) -> None:
    """A command that is not there, a bug in one, and a coroutine where none can run fail the test."""
    for text, error in (("no_such 1", AssertionError), ("fence", TypeError), ("wait", AssertionError)):
        with pytest.raises(error):
            Script(found[0].path, 1, "A title.", (text,)).run(World())


@pytest.mark.parametrize("text", ["say 1\n\n## A title.\n", "##No title.\nsay 1\n", "## A title.\n##Another.\nsay 1\n"])
def test_no_line_of_a_file_is_passed_over(tmp_path: Path, text: str) -> None:
    """A command above the first scenario, and a title without a space, are mistakes."""
    (tmp_path / "testdata").mkdir()
    (tmp_path / "testdata" / "some.txt").write_text(text)
    with pytest.raises(AssertionError):
        scripts(str(tmp_path / "test_some.py"), "some")


def test_numbers_in_runs() -> None:
    """Consecutive numbers are told as the script language has them."""
    assert [runs([]), runs([1, 2, 5, 7, 8, 9])] == ["", "1..2 5 7..9"]
