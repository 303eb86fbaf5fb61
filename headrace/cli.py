"""The console command `headrace`, which imports only the command that is run.

To add a command, add it to `_COMMANDS` and to `scripts/commands/`: a plain function of the same name whose parameters
carry `typer.Option` or `typer.Argument` in `Annotated`, and which returns None or its exit code; or a `typer.Typer`
with commands of its own.

Exit codes: 0 done, 1 a `HeadraceError` or a path that the system refuses, 2 wrong usage, 130 interrupted, 141 the
reader of the output has gone, as in `headrace status | head -1`, 143 terminated as process 1 of a container. A failure
prints one line on stderr; the last three print nothing. With `HEADRACE_DEBUG=1` in the environment, failures and
interruptions end in a traceback instead.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import platform
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.completion
import typer.core

from headrace import __version__
from headrace.paramserver.system.torch_releases import installed_version
from headrace.schemas.errors import HeadraceError

__all__ = ["LazyCommand", "load_command", "main"]

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
# What a shell shows after SIGPIPE and SIGTERM. SIGPIPE itself stays ignored, because servers write to sockets.
_EXIT_BROKEN_PIPE = 141
_EXIT_TERMINATED = 143
# In a container without an init, the command is this process.
_FIRST_PROCESS = 1
# Errors that a user's path can cause anywhere. Any other system error should have been handled where it occurs.
_PATH_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOENT, errno.ENOTDIR}
)

_COMPLETE_VARIABLE = "_HEADRACE_COMPLETE"

# These sections of a Google docstring are for callers of the function, not for the command's help.
_DOCSTRING_SECTION = re.compile(r"^(Args|Returns|Raises|Cancellation|Thread|Source|Example|Note)s?:", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One command: `target` is `module:function`, `extras` are the optional dependencies it needs."""

    name: str
    target: str
    help: str
    extras: tuple[str, ...] = ()


def _command(name: str, help: str, *extras: str) -> _Entry:
    return _Entry(name=name, target=f"headrace.scripts.commands.{name}:{name}", help=help, extras=extras)


# In the order of `headrace --help`. The help texts are here, so that the list imports no command.
_COMMANDS = (
    _command("serve", "Run a parameter server: a supervisor and one process a shard."),
    _command("status", "Show what a running server holds."),
    _command("doctor", "Check machine, configuration and a server, and say what to do."),
    _command("replica", "Serve lookups from a copy that follows a running server."),
    _command("snapshot", "Make, list, check, fetch and remove snapshots of a server."),
    _command("restore", "Make a server of what another one, or its last run, has left."),
    _command("table", "List, describe, grow and drop the tables of a running server."),
    _command("promote", "Let a follower or a standby take a server's updates."),
    _command("expire", "Delete rows of a running server that its policies let go, or say which."),
    _command("log", "Look into an update log and check it."),
    _command("backfill", "Bring rows of checkpoints and files into a server or a new directory."),
    _command("export", "Write a server's tables at one step to files of common formats."),
    _command("verify", "Compare what a server holds with another server or saved digests."),
    _command("bench", "Measure Headrace on this machine, beside limits and peers.", "torchrec", "bench"),
    _command(
        "demo", "Train a real model, stream it, and compare every row with the server's.", "torchrec", "recordings"
    ),
)

# Modules installed by extras. Any other missing module is a bug of ours and stays a traceback.
_OPTIONAL_MODULES = frozenset(
    {
        "fbgemm_gpu",
        "grpc",
        "iopath",
        "pyre_extensions",
        "redis",
        "tensordict",
        "torch",
        "torchmetrics",
        "torchrec",
        "tqdm",
    }
)


def _show_version(wanted: bool) -> None:
    if wanted:
        torch = installed_version("torch")
        print(f"headrace {__version__}")
        print(f"Python {platform.python_version()}, {f'torch {torch}' if torch else 'without torch'}; {_origin()}")
        raise typer.Exit


def _origin() -> str:
    """Return where this copy of Headrace is, with a checkout's commit if git tells it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return f"in {root}"
    try:
        told = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        told = ""
    return f"checkout {root}{told and f' at commit {told}'}"


def _front_door(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of Headrace, Python and torch, and exit.",
        ),
    ] = False,
) -> None:
    """Stream embedding updates from PyTorch trainers to a sharded parameter server."""
    del version  # its callback did the work
    if context.invoked_subcommand is None:
        text = context.get_help()  # empty with rich, which prints it itself
        if text:
            typer.echo(text)
        raise typer.Exit(_EXIT_USAGE)


class LazyCommand(typer.core.TyperCommand):
    """Stands for a command in the list, and imports it to parse its arguments.

    Parsing needs the options first, also for `--help`.
    """

    def __init__(self, name: str, target: str, help: str) -> None:
        """Import nothing yet; see `load_command`."""
        super().__init__(name=name, help=help)
        self._target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and parse its arguments."""
        assert self.name is not None
        assert self.help is not None
        command = load_command(self.name, self._target, self.help)
        return command.make_context(info_name, args, parent=parent, **extra)


def load_command(name: str, target: str, help: str) -> Any:
    """Import a command and return it as a click command.

    Args:
        name: Name on the command line.
        target: `module:function`: a plain function whose parameters carry `typer.Option` or `typer.Argument`, or a
            `typer.Typer` with commands of its own.
        help: Help text if the function has no docstring.
    """
    module, _, name_in_module = target.partition(":")
    function = getattr(importlib.import_module(module), name_in_module)
    if isinstance(function, typer.Typer):
        return _with_bare_flags(typer.main.get_command(function))
    text = _DOCSTRING_SECTION.split(inspect.getdoc(function) or help)[0].strip()
    app = typer.Typer(add_completion=False)
    app.command(name, help=text)(function)
    return _with_bare_flags(typer.main.get_command(app))


def _has_server(command: Any) -> bool:
    return any("--server" in parameter.opts for parameter in command.params)


def _with_bare_flags(command: Any) -> Any:
    """Show the flags of a command, and of the commands in it, as they are typed: without `<bool>`."""
    for parameter in command.params:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    make_help_option = command.get_help_option

    def bare_help_option(context: Any) -> Any:
        option = make_help_option(context)  # the same one each time
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = bare_help_option
    for each in getattr(command, "commands", {}).values():
        _with_bare_flags(each)
    return command


def _build(entries: Sequence[_Entry]) -> Any:
    # Typer's two options for shell completion would crowd the help page; `_run` answers shells.
    app = typer.Typer(
        add_completion=False,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog='Completion of commands and flags: eval "$(_HEADRACE_COMPLETE=source_bash headrace)", or source_zsh or '
        "source_fish.",
    )
    app.callback()(_front_door)
    group = _with_bare_flags(typer.main.get_command(app))
    assert isinstance(group, typer.core.TyperGroup)
    for entry in entries:
        group.add_command(LazyCommand(entry.name, entry.target, entry.help))
    return group


def _fail(message: str, exit_code: int) -> int:
    from headrace.paramserver.system.text import visible

    line = " ".join(line.strip() for line in message.splitlines())
    print(f"headrace: error: {visible(line)}", file=sys.stderr)
    return exit_code


def _missing_dependency(module: str, entry: _Entry) -> str:
    from headrace.schemas.extras import install_command

    hint = install_command(*entry.extras)
    if "torchrec" in entry.extras:
        # An extra cannot use --no-deps, and the dependencies of torchrec include the CUDA build of fbgemm.
        from headrace.paramserver.system.torch_releases import RELEASES, installed_version, release_for

        release = release_for(installed_version("torch") or "") or RELEASES[-1]
        hint += f" fbgemm-gpu-cpu=={release.fbgemm}, then pip install --no-deps torchrec=={release.torchrec}"
    return f"`headrace {entry.name}` needs {module}, which is not installed: {hint}"


def _path_refused(exc: OSError) -> str | None:
    """Return a line with the refused path and the reason; None if the error is not about a path."""
    if exc.errno in _PATH_ERRORS and isinstance(exc.filename, str | bytes | os.PathLike):
        return f"{os.fsdecode(exc.filename)}: {exc.strerror}"
    if isinstance(exc, FileNotFoundError):  # the error of a relative path has no file name then
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory is gone: change to another one"
    return None


def _has_reader_gone() -> bool:
    """Return whether nobody reads stdout any more; a broken pipe may also be a socket, an error to report."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


def _drop_stdout() -> None:
    """Discard buffered output, because the interpreter would try to write it at exit, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run(arguments: list[str], entries: Sequence[_Entry]) -> int:
    """Parse the arguments and run the command; of all errors, map only a missing extra."""
    group = _build(entries)
    if instruction := os.environ.get(_COMPLETE_VARIABLE):  # a shell asks
        typer.completion.completion_init()  # type: ignore[attr-defined]
        try:
            return typer.completion.shell_complete(group, {}, "headrace", _COMPLETE_VARIABLE, instruction)
        except ModuleNotFoundError:  # the flags of a command whose extra is not installed
            return _EXIT_ERROR
    try:
        with group.make_context("headrace", arguments) as context:
            try:
                result = group.invoke(context)
            except ModuleNotFoundError as exc:
                module = (exc.name or "").partition(".")[0]
                entry = next((e for e in entries if e.name == context.invoked_subcommand), None)
                if entry is None or not entry.extras or module not in _OPTIONAL_MODULES:
                    raise
                raise HeadraceError(_missing_dependency(module, entry)) from exc
    except typer.Exit as exc:
        result = exc.exit_code
    return result if isinstance(result, int) else 0


def _run_with_exit_code(arguments: list[str], entries: Sequence[_Entry]) -> int:
    """Run the command, and turn errors that are no bugs of ours into one line and an exit code."""
    is_debug = os.environ.get("HEADRACE_DEBUG") == "1"
    for argument in arguments:
        # Bytes that are no text arrive as lone surrogates, which messages, our files and requests cannot hold.
        if any("\ud800" <= character <= "\udfff" for character in argument):
            return _fail(f"argument {argument!r} is not UTF-8", _EXIT_USAGE)
    try:
        return _run(arguments, entries)
    except typer.TyperException as exc:
        # For a value outside of a choice, pydantic adds this prefix.
        message = exc.format_message().rstrip(".").replace(": Value error, ", ": ", 1)
        if not message:  # a group without a command has printed its help
            return exc.exit_code
        context = getattr(exc, "ctx", None)
        if context is not None and message.startswith("Got unexpected extra argument"):
            # Most likely an address.
            message += "; a server's address goes with --server" if _has_server(context.command) else ""
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return _fail(message + hint, exc.exit_code)
    except HeadraceError as exc:
        if is_debug:
            raise
        return _fail(str(exc), _EXIT_ERROR)
    except OSError as exc:
        refused = _path_refused(exc)
        if is_debug or refused is None:
            raise
        return _fail(refused, _EXIT_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        if is_debug:
            raise
        return _EXIT_INTERRUPTED


def main(arguments: Sequence[str] | None = None, *, _entries: Sequence[_Entry] = _COMMANDS) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; None takes them from `sys.argv`.

    Returns:
        The exit code.
    """
    _handle_sigterm()
    try:
        exit_code = _run_with_exit_code(list(sys.argv[1:] if arguments is None else arguments), _entries)
    except SystemExit as exc:
        # Rich raises it after a broken pipe, and has discarded stdout.
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        return _EXIT_BROKEN_PIPE
    except BrokenPipeError:
        if not _has_reader_gone():
            raise
        _drop_stdout()
        return _EXIT_BROKEN_PIPE
    return _flush(exit_code)


def _handle_sigterm() -> None:
    """Make SIGTERM end the first process of a container, too.

    The kernel drops a signal to that process without a handler. Until a server or replica sets its own, an order to
    stop would be lost, and the container killed at the end of its grace period.
    """
    if os.getpid() == _FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(_EXIT_TERMINATED))


def _flush(exit_code: int) -> int:
    """Flush stdout while a failure can still be reported, and return the exit code."""
    if sys.stdout is None:  # closed by the parent process
        return exit_code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return exit_code or _EXIT_BROKEN_PIPE
    except OSError as exc:
        _drop_stdout()
        return _fail(f"the output cannot be written: {exc.strerror}", _EXIT_ERROR)
    return exit_code
