"""The front door: what `headrace` prints, with which exit code, and what it does not load."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pytest
import typer

import headrace
from headrace import HeadraceError, __version__, cli
from headrace.cli import load_command
from headrace.schemas.extras import install_command


def _wind(turns: Annotated[int, typer.Option(help="How many turns.", min=1)] = 3) -> None:
    """Wind the gate.

    It takes a while.

    Args:
        turns: Not for the person at the terminal.

    Raises:
        HeadraceError: The gate is stuck.
    """
    if turns == 13:
        raise HeadraceError("gate 4 is stuck:\nfree it first")
    if turns == 14:
        raise KeyboardInterrupt
    if turns == 15:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    if turns == 16:
        raise ModuleNotFoundError("No module named 'headrace.gone'", name="headrace.gone")
    if turns == 17:
        os.stat("g" * 300)
    print(f"wound {turns} turns")


def _count() -> int:
    """Return an exit code."""
    return 7


def _entry(name: str, function: str, extras: tuple[str, ...] = ()) -> cli._Entry:
    return cli._Entry(name=name, target=f"fake_commands:{function}", help="Wind a gate.", extras=extras)


_ENTRIES = (
    _entry("wind", "wind", ("torch",)),
    _entry("count", "count"),
    _entry("bare", "wind"),
    _entry("recommend", "wind", ("torchrec", "bench")),
    cli._Entry(name="absent", target="headrace.not_there:absent", help="Is not there."),
)


# A process with one command of the given body.
_WITH_COMMAND = """
import sys, types
from headrace import HeadraceError, cli
def run():
    {body}
module = sys.modules["fake_commands"] = types.ModuleType("fake_commands")
module.run = run
sys.exit(cli.main(["run"], _entries=[cli._Entry(name="run", target="fake_commands:run", help="Run.")]))
"""
_LONG_OUTPUT = _WITH_COMMAND.format(body="[print('line', line) for line in range(100_000)]")


@pytest.fixture(autouse=True)
def _fake_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of commands that needs nothing else of the system."""
    module = types.ModuleType("fake_commands")
    module.__dict__.update(wind=_wind, count=_count)
    monkeypatch.setitem(sys.modules, "fake_commands", module)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")  # or a narrow terminal breaks the lines that are looked for


def _run(*arguments: str) -> int:
    return cli.main(list(arguments), _entries=_ENTRIES)


def _plain(text: str) -> str:
    """Drop the colours, which some CI machines force on."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["wind", "--turns", "5"], 0, "wound 5 turns\n", ""),
        (["count"], 7, "", ""),
        (["wind", "--turns", "13"], 1, "", "headrace: error: gate 4 is stuck: free it first\n"),
        (["wind", "--turns", "14"], 130, "", ""),
        (["wind", "--turns", "17"], 1, "", f"headrace: error: {'g' * 300}: File name too long\n"),
    ],
)
def test_what_a_command_prints(
    arguments: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is exit code 0, and an integer itself; an error is one line, also of two or a path; Ctrl-C is silent."""
    assert _run(*arguments) == code
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("wind", ["`headrace wind` needs torch, ", install_command("torch")]),
        ("recommend", [install_command("torchrec", "bench"), "pip install --no-deps torchrec"]),
    ],
)
def test_a_missing_extra_is_named(command: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command whose dependency is missing says which extra to install; TorchRec takes a second command."""
    assert _run(command, "--turns", "15") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert all(words in line for words in says)


def test_help_lists_commands_without_loading_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names every command, also one whose module is not there."""
    assert _run("--help") == 0
    out = _plain(capsys.readouterr().out)
    for entry in _ENTRIES:
        assert entry.name in out
        assert entry.help in out


def test_no_arguments_show_help_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help is shown, and the exit code says that nothing was done."""
    assert _run() == 2
    assert "count" in capsys.readouterr().out


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace snapshot` prints its help with exit code 2, as `headrace` does, and no empty error."""
    assert cli.main(["snapshot"]) == 2
    captured = capsys.readouterr()
    assert "create" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'inspect'. Choose from: inspect"),
        (["foo", "d"], "'inspect': 'foo' is not one of 'inspect'"),
    ],
)
def test_a_choice_is_told_in_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is to choose from follows in plain words."""
    assert cli.main(["log", *arguments]) == 2
    assert f"{says} (see headrace log --help)\n" in capsys.readouterr().err


def test_command_help_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`wind --help` shows the function's options and its docstring up to the sections for callers."""
    assert _run("wind", "--help") == 0
    out = _plain(capsys.readouterr().out)
    assert "--turns" in out
    assert "How many turns." in out
    assert "It takes a while." in out
    assert "Not for the person" not in out
    assert "stuck" not in out


def test_commands_that_reach_a_server_have_the_same_flags() -> None:
    """A server, and what to show it, are named by the same flags of every command that reaches one."""
    access = {"--server", "-s", "--tls", "--tls-authority", "--tls-certificate", "--tls-key", "--token-file"}
    found = []
    for entry in cli._COMMANDS:
        if entry.extras or entry.name in ("serve", "replica"):  # its flags are the server's own
            continue
        command = load_command(entry.name, entry.target, entry.help)
        for name, each in getattr(command, "commands", {"": command}).items():
            flags = {flag for parameter in each.params for flag in parameter.opts}
            if flags & access:
                assert flags >= access, (entry.name, name)
                found.append(f"{entry.name} {name}".strip())
    assert sorted(found) == [
        *("backfill", "doctor", "expire", "export", "promote", "snapshot create", "snapshot fetch"),
        *("status", "table describe", "table drop", "table grow", "table list", "verify"),
    ]


def test_no_help_page_shows_the_type_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag is shown as it is typed, `-h, --help` among them, on the page of each command and of the whole."""
    pages = [[]]
    for entry in cli._COMMANDS:
        try:
            command = load_command(entry.name, entry.target, entry.help)
        except ModuleNotFoundError:
            continue  # its extra is not installed
        pages += [[entry.name], *([entry.name, name] for name in getattr(command, "commands", {}))]
    for arguments in pages:
        assert cli.main([*arguments, "-h"]) == 0
        help_page = capsys.readouterr().out
        assert "--help" in help_page
        assert "<bool>" not in help_page, arguments


@pytest.mark.parametrize(
    ("typed", "completed"), [("sta", "status"), ("status --js", "--json"), ("snapshot cr", "create")]
)
def test_bash_completes_commands_and_flags(typed: str, completed: str, tmp_path: Path) -> None:
    """By the line that `headrace --help` shows."""
    script = tmp_path / "headrace"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace "$@"\n')
    script.chmod(0o755)
    words = ["headrace", *typed.split(" ")]
    ask = (
        'eval "$(_HEADRACE_COMPLETE=source_bash headrace)"; '
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        '$(complete -p headrace | sed "s/.*-F //; s/ .*//") headrace; echo "${COMPREPLY[@]}"'
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [completed]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wand"], ["wand", "wind", "headrace --help"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["wind", "--turn", "many"], ["--turn", "headrace wind --help"]),
        (["wind", "--turns", "many"], ["--turns", "integer"]),
        (["wind", "--turns", "0"], ["--turns"]),
        (["wind", "surplus"], ["surplus"]),
    ],
)
def test_usage_error_is_one_line_and_exits_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown command, option or value is one line that names it."""
    assert _run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headrace: error: ") and err.count("\n") == 1
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(errno.EACCES, "Permission denied", Path("gate")), "gate: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", b"gate"), "gate: Read-only file system"),
        (FileNotFoundError(errno.ENOENT, "No such file", "gate"), "gate: No such file"),
    ],
)
def test_errors_of_paths(
    error: OSError, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of path that an error can carry is told."""
    monkeypatch.setitem(sys.modules["fake_commands"].__dict__, "count", lambda: _raise(error))
    assert _run("count") == 1
    assert capsys.readouterr().err == f"headrace: error: {says}\n"


def _raise(error: OSError) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    "arguments", [["log", "inspect"], ["snapshot", "list"], ["restore", "--dry-run"]], ids=" ".join
)
def test_commands_tell_a_path_that_is_too_long(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Real commands, too, end in one line."""
    assert cli.main([*arguments, "g" * 300]) == 1
    assert re.fullmatch(r"headrace: error: .*g{300}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error", "gate"), FileNotFoundError(2, "No such")])
def test_other_errors_of_the_system_stay_tracebacks(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails, or an error that names no path, is not dressed up as the user's mistake."""
    monkeypatch.setitem(sys.modules["fake_commands"].__dict__, "count", lambda: _raise(error))
    with pytest.raises(OSError, match=error.strerror):
        _run("count")


def test_working_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that is run where there is no directory any more says so."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["restore", "monday", "--data", "data"]) == 1
    assert capsys.readouterr().err == "headrace: error: the working directory is gone: change to another one\n"


@pytest.mark.parametrize("arguments", [["expire", "--table", "b\udcff"], ["snapshot", "fetch", "--name=b\udcff"]])
def test_argument_that_is_no_text_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are not UTF-8 are wrong usage, before anything is done."""
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"headrace: error: argument {arguments[-1]!r} is not UTF-8\n")


@pytest.mark.parametrize(("turns", "error"), [("13", HeadraceError), ("14", KeyboardInterrupt), ("17", OSError)])
def test_debug_lets_the_traceback_through(
    turns: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HEADRACE_DEBUG=1 the exception itself comes out."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    with pytest.raises(error):
        _run("wind", "--turns", turns)


@pytest.mark.parametrize("arguments", [("wind", "--turns", "16"), ("bare", "--turns", "15"), ("absent",)])
def test_missing_module_of_ours_stays_a_traceback(arguments: tuple[str, ...]) -> None:
    """A module that no extra would bring is a bug, and is not dressed up as the user's mistake."""
    with pytest.raises(ModuleNotFoundError):
        _run(*arguments)


# With the usual buffer, whatever the environment of the tests says, and without.
_BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
_UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}


def _python(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    # -P: run from tests/, the folder tests/headrace would pass for the package.
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=_BUFFERED, timeout=60)


@pytest.mark.parametrize(
    "code",
    [
        "import headrace; headrace.HeadraceError; headrace.__version__",
        "from headrace.cli import main; main(['--help'])",
        "from headrace.cli import main; main(['--version'])",
    ],
)
def test_torch_is_not_loaded(code: str) -> None:
    """Neither the package nor the front door's own pages load torch, or any command."""
    check = "import sys; sys.exit(bool({'torch', 'numpy', 'headrace.streamer'} & set(sys.modules)))"
    done = _python("-c", f"{code}; {check}")
    assert done.returncode == 0, done.stderr


def test_unknown_public_name() -> None:
    """A name that the package does not have is an AttributeError, as of any module."""
    done = _python("-c", "import headrace; headrace.RawEmbedingStreamer")
    assert done.returncode == 1
    assert "AttributeError: module 'headrace' has no attribute 'RawEmbedingStreamer'" in done.stderr


def test_module_runs_as_the_command() -> None:
    """`python -m headrace` is the command."""
    done = _python("-m", "headrace", "--version")
    first, second = done.stdout.splitlines()
    assert (done.returncode, first) == (0, f"headrace {__version__}")
    root = Path(headrace.__file__).resolve().parents[1]
    assert re.fullmatch(
        rf"Python {platform.python_version()}, (torch \S+|without torch); checkout {re.escape(str(root))}"
        r"( at commit \w+)?",
        second,
    )


@pytest.mark.parametrize(("pid", "ended"), [(1, 143), (2, -signal.SIGTERM)])
def test_sigterm_ends_the_first_process_of_a_container(pid: int, ended: int) -> None:
    """There the kernel drops a SIGTERM without a handler, so there is one; any other process has none."""
    body = "import os, signal; signal.raise_signal(signal.SIGTERM); print('goes on')"
    done = _python("-c", f"import os; os.getpid = lambda: {pid}\n" + _WITH_COMMAND.format(body=body))
    assert (done.returncode, done.stdout) == (ended, ""), done.stderr


def _nobody_reads(arguments: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run Python with the writing end of a pipe as its stdout whose reading end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-P", *arguments], stdout=writer, stderr=subprocess.PIPE, env=environ, timeout=60
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("environ", [_BUFFERED, _UNBUFFERED], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],  # by rich
        ["backfill", "--help"],  # longer than the buffer
        ["doctor", "--json"],  # by print
        ["snapshot", "list", "docs"],
    ],
    ids=" ".join,
)
def test_reader_that_goes_away_is_no_traceback(arguments: list[str], environ: dict[str, str]) -> None:
    """When the reader of the output has gone, a command ends as if by SIGPIPE and says nothing."""
    done = _nobody_reads(["-m", "headrace", *arguments], environ)
    assert (done.returncode, done.stderr) == (141, b"")


def test_reader_that_goes_away_amid_the_output_is_no_traceback() -> None:
    """Of more than a pipe holds, `| head -1` takes the first line, and the rest is dropped in silence."""
    command = f"{shlex.quote(sys.executable)} -P -c {shlex.quote(_LONG_OUTPUT)} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=_BUFFERED, timeout=60)
    assert (done.stdout, done.stderr) == ("line 0\n", "")


@pytest.mark.parametrize(
    ("body", "code", "err"),
    [
        ("print('a line', flush=True)", 141, b""),  # is not tried again when the interpreter ends
        ("print('a line'); raise HeadraceError('gate 4 is stuck')", 1, b"headrace: error: gate 4 is stuck\n"),
    ],
)
def test_a_line_that_nobody_reads(body: str, code: int, err: bytes) -> None:
    """It is dropped, and a command that fails after it still tells why."""
    done = _nobody_reads(["-c", _WITH_COMMAND.format(body=body)], _BUFFERED)
    assert (done.returncode, done.stderr) == (code, err)


def test_a_socket_that_breaks_stays_a_traceback() -> None:
    """A broken pipe that is not the output's is a bug to be seen."""
    done = _python("-c", _WITH_COMMAND.format(body="raise BrokenPipeError(32, 'Broken pipe')"))
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_output_that_cannot_be_written_is_one_line() -> None:
    """On a full disk under a redirected output a command fails with one line."""
    with open("/dev/full", "w") as full:
        done = _python("-m", "headrace", "--version", stdout=full)
    told = "headrace: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_closed_output_is_no_traceback() -> None:
    """With stdout closed, as by `>&-`, a command runs all the same."""
    command = f"{shlex.quote(sys.executable)} -P -m headrace --version >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
