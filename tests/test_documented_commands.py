"""What the pages show works: the guides run as they stand, and every flag that a page names is there."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest
from documented_blocks import NOT_RUN, Block, DocumentedPage, blocks_of, commands_of, is_run, missing_line

from headrace import cli
from headrace.cli import load_command

ROOT = Path(__file__).resolve().parent.parent
# Pages that are run from top to bottom, and how many blocks and commands of theirs that is at least.
_GUIDES = {
    "docs/tutorial.md": 14,
    "docs/lost-disk.md": 8,
    "docs/another-machine.md": 8,
    "docs/second-region.md": 8,
    "docs/torchrec.md": 6,
    "docs/migrating.md": 3,
    "docs/sources.md": 2,
    "README.md": 2,
}
_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_COMMAND = re.compile(r"\bheadrace (?=[a-z])([^`|#\n]*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Flags of `tests/faults/chaos.py` and of a profiler, which pages name on their own.
_OF_OTHERS = frozenset({"--breakage", "--fault", "--gil", "--nodes", "--follower", "--soak"})


@pytest.mark.torchrec
@pytest.mark.parametrize("page", _GUIDES)
def test_page_runs_as_documented(page: str, tmp_path: Path) -> None:
    """Each command and snippet of a guide succeeds, in order, and prints what stands below it."""
    with DocumentedPage(tmp_path, paths={"/var/lib/headrace": str(tmp_path / "store")}) as running:
        for block in blocks_of((ROOT / page).read_text()):
            running.run(block)
        assert running.num_run >= _GUIDES[page]


@pytest.mark.parametrize("page", [page for page in _PAGES if page != "docs/roadmap.md"])  # which says what is to come
def test_no_page_installs_from_an_index(page: str) -> None:
    """Headrace is on no package index, so pages install a checkout."""
    assert not re.search(r"pip install [^`\n]*(?<![/\w.-])headrace", (ROOT / page).read_text())


def test_what_is_not_run_is_little() -> None:
    """Few commands of the guides are passed over, all of them are known, and no entry of the list is unused."""
    commands = [
        command.text
        for page in _GUIDES
        for block in blocks_of((ROOT / page).read_text())
        if block.language == "console"
        for command in commands_of(block)
    ]
    passed_over = [command for command in commands if not is_run(command)]
    assert len(passed_over) <= 10
    assert all(any(command.startswith(prefix) for command in passed_over) for prefix in NOT_RUN)
    languages = {block.language for page in _GUIDES for block in blocks_of((ROOT / page).read_text())}
    assert languages <= {"console", "python"}  # or a block in `bash` would look run


@functools.cache
def _flags() -> dict[str, frozenset[str]]:
    """Return the flags that the help of each command has, by the command's words, such as `snapshot create`."""
    names = []
    for entry in cli._COMMANDS:
        below = getattr(load_command(entry.name, entry.target, entry.help), "commands", {})
        names += [entry.name, *(f"{entry.name} {name}" for name in below)]
    return {name: frozenset(_FLAG.findall(_help_of(name))) for name in names}


def _help_of(name: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*name.split(), "--help"]) == 0
    return out.getvalue()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a narrow terminal from cutting long flags, and colours from falling between their letters.

    Models are named as for a reader of the page.
    """
    monkeypatch.delenv("HEADRACE_STREAMER_MODEL")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def _wrong(text: str) -> list[str]:
    """Return the commands and flags in a text that are not there."""
    wrong = []
    joined = re.sub(r"\\\n\s*", "", text)
    for line in _COMMAND.findall(joined):
        words = re.split(r"\s+", line.strip())
        name = " ".join(words[:2]) if " ".join(words[:2]) in _flags() else words[0]
        named = _FLAG.findall(line)
        if name not in _flags():
            if named:
                wrong.append(f"headrace {line.strip()}")
        else:
            wrong += [f"headrace {name}: {flag}" for flag in named if flag not in _flags()[name]]
    return wrong


@pytest.mark.torchrec
@pytest.mark.parametrize("page", _PAGES)
def test_commands_have_the_flags_that_a_page_names(page: str) -> None:
    """Each `headrace COMMAND … --flag` names a command and flags that are there; each flag is one of some command."""
    text = (ROOT / page).read_text()
    assert _wrong(text) == []
    every = frozenset[str]().union(*_flags().values())
    # In backticks, a flag on its own; those of other programs stand with their program.
    alone = {flag for span in re.findall(r"`(--[a-z][\w-]*)[^`]*`", text) for flag in _FLAG.findall(span)}
    assert alone - every - _OF_OTHERS == set()


@pytest.mark.torchrec
def test_advice_names_commands_that_there_are() -> None:
    """What the status page and `headrace status` advise has no word behind a command that the command does not know."""
    text = (ROOT / "paramserver/observe/problems.py").read_text()
    named = re.findall(r"`headrace ([a-z][^`]*)`", text)
    assert named
    assert _wrong(text) == []
    assert [line for line in named if re.sub(r" --.*", "", line) not in _flags()] == []


@pytest.mark.torchrec
def test_a_wrong_flag_is_found() -> None:
    """The check reports a flag, also behind a line's end, and a command that are not there."""
    assert _wrong("$ headrace serve --data x \\\n    --shard 2") == ["headrace serve: --shard"]
    assert _wrong("`headrace snapshot create --nwo`") == ["headrace snapshot create: --nwo"]
    assert _wrong("`headrace reply DIR --to X`") == ["headrace reply DIR --to X"]


def test_blocks_and_commands_are_found() -> None:
    """A page's fences, titles, commands over several lines and output come out as they stand."""
    page = 'a\n```console\n$ one \\\n    two\nout\n$ three\n```\n```python title="x.py"\nx = 1\n```\n'
    console, python = blocks_of(page)
    assert [(c.text, c.output) for c in commands_of(console)] == [("one two", ("out",)), ("three", ())]
    assert python == Block(language="python", title="x.py", text="x = 1\n", line=8)


def test_missing_output_is_found() -> None:
    """Lines must come in their order, whatever the spaces; `…` stands for anything."""
    printed = "user  10,000   32\nequal: True\n"
    assert missing_line(("user … 32", "…", "equal: True"), printed) is None
    assert missing_line(("equal: True", "user … 32"), printed) == "user … 32"
    assert missing_line(("equal: False",), printed) == "equal: False"


def test_a_program_is_left_running(tmp_path: Path) -> None:
    """A command with `&` goes on behind what it has printed; `fg` waits for its end, and compares the rest."""
    (tmp_path / "job.sh").write_text("echo one; until [ -e enough ]; do :; done; echo two\n")
    page = "```console\n$ bash job.sh &\none\n$ touch enough\n$ fg\n{}\n```\n"
    for last, problem in (("two", None), ("one", "'one' is not in what it prints")):
        with DocumentedPage(tmp_path) as running:
            (block,) = blocks_of(page.format(last))
            with pytest.raises(AssertionError, match=problem) if problem else contextlib.nullcontext():
                running.run(block)
        assert running.num_run == 3
        (tmp_path / "enough").unlink()
    for text, problem in (("$ false &\none\n", "'one' is not in"), ("$ fg\n", "nothing was left running")):
        with DocumentedPage(tmp_path) as running, pytest.raises(AssertionError, match=problem):
            running.run(Block(language="console", title="", text=text, line=1))


def test_failing_command_and_program_are_told(tmp_path: Path) -> None:
    """An exit code other than 0, output that is not there and a failing assertion fail the page."""
    with DocumentedPage(tmp_path) as running:
        for text in ("$ false\n", "$ echo one\ntwo\n"):
            with pytest.raises(AssertionError):
                running.run(Block(language="console", title="", text=text, line=1))
        with pytest.raises(AssertionError):
            running.run(Block(language="python", title="", text="assert not 1\n", line=1))
