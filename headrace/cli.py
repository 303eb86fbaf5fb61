"""The console command `headrace`: the front door, which loads the one command that is asked for.

To add a command, add an entry to `_COMMANDS`. Its target is a plain function whose parameters carry
`typer.Option` or `typer.Argument` in `Annotated`; it returns None, or its exit code. Or it is a `typer.Typer` with
commands of its own.

Exit codes: 0 done, 1 a `HeadraceError` or a path that the system refuses, 2 wrong usage, 130 interrupted, 141 the
reader of the output has gone, as in `headrace status | head -1`, 143 told to end as a container's process 1. A failure
is one line on stderr, the last three are silent. With `HEADRACE_DEBUG=1` in the environment failures and interruptions
end in a traceback instead.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import typer.core

from headrace import __version__
from headrace.schemas.errors import HeadraceError
from headrace.scripts.lazy_command import LazyCommand

__all__ = ["main"]

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
# What a shell shows of a tool that SIGPIPE has ended. The signal itself stays ignored: servers write to sockets.
_EXIT_BROKEN_PIPE = 141
# The same for SIGTERM.
_EXIT_TERMINATED = 143
# What runs in a container without an init is its first process.
_FIRST_PROCESS = 1
# What a path of the user's may meet wherever it is looked at. Any other error of the system is ours to have foreseen.
_PATH_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOENT, errno.ENOTDIR}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One command: `target` is `module:function`, `extras` are the optional dependencies it needs."""

    name: str
    target: str
    help: str
    extras: tuple[str, ...] = ()


# Listed in this order by `headrace --help`. The help stands here, so that the list imports none of them.
_COMMANDS = (
    _Entry(
        name="serve",
        target="headrace.paramserver.supervisor.serve_command:serve",
        help="Run a parameter server: a supervisor and one process a shard.",
    ),
    _Entry(
        name="status",
        target="headrace.paramserver.metrics.status_command:status",
        help="Show what a running server holds.",
    ),
    _Entry(
        name="top",
        target="headrace.scripts.top:top",
        help="Watch a running server: problems, shards, rates.",
    ),
    _Entry(
        name="doctor",
        target="headrace.scripts.doctor:doctor",
        help="Check machine, configuration and a server, and say what to do.",
    ),
    _Entry(
        name="replica",
        target="headrace.paramserver.replica.replica_command:replica",
        help="Serve look-ups from a copy that follows a running server.",
        extras=("torch",),
    ),
    _Entry(
        name="snapshot",
        target="headrace.scripts.snapshot:snapshot",
        help="Make, list, check, fetch, restore and remove snapshots of a server.",
    ),
    _Entry(
        name="expire",
        target="headrace.scripts.expire:expire",
        help="Delete rows of a running server that its policies let go, or say which.",
    ),
    _Entry(
        name="log",
        target="headrace.scripts.log_command:log",
        help="Look into an update log and check it.",
    ),
    _Entry(
        name="replay",
        target="headrace.scripts.replay:replay",
        help="Reapply what update logs hold to a server or a new directory.",
    ),
    _Entry(
        name="backfill",
        target="headrace.scripts.backfill:backfill",
        help="Bring rows of checkpoints and files into a server or a new directory.",
    ),
    _Entry(
        name="export",
        target="headrace.scripts.export:export",
        help="Write a server's tables at one step to files of common formats.",
    ),
    _Entry(
        name="verify",
        target="headrace.scripts.verify:verify",
        help="Compare what a server holds with another server or saved digests.",
    ),
    _Entry(
        name="bench",
        target="headrace.scripts.benches.bench:bench",
        help="Measure Headrace on this machine, beside limits and peers.",
        extras=("torchrec", "bench"),
    ),
    _Entry(
        name="demo",
        target="headrace.scripts.demo:demo",
        help="Train a real model, stream it, and compare every row with the server's.",
        extras=("torchrec", "bench"),
    ),
)

# Modules that come with an extra. Any other missing module is our bug and stays a traceback.
_OPTIONAL_MODULES = frozenset(
    {
        "fbgemm_gpu",
        "grpc",
        "iopath",
        "matplotlib",
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
        print(f"headrace {__version__}")
        raise typer.Exit


def _front_door(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Stream embedding updates from PyTorch trainers to a sharded parameter server."""
    del version  # its callback has done the work
    if context.invoked_subcommand is None:
        text = context.get_help()  # with rich it is printed already, and nothing is left to print
        if text:
            typer.echo(text)
        raise typer.Exit(_EXIT_USAGE)


def _build(entries: Sequence[_Entry]) -> Any:
    """Return the click group of all commands."""
    # No shell completion: its two options would crowd a help page of three commands.
    app = typer.Typer(add_completion=False, invoke_without_command=True)
    app.callback()(_front_door)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for entry in entries:
        group.add_command(LazyCommand(entry.name, entry.target, entry.help))
    return group


def _fail(message: str, exit_code: int) -> int:
    """Print the message as one line on stderr and return the exit code."""
    print(f"headrace: error: {' '.join(line.strip() for line in message.splitlines())}", file=sys.stderr)
    return exit_code


def _missing_dependency(module: str, entry: _Entry) -> str:
    """Return the line that says how to get what the command needs."""
    hint = f"pip install 'headrace[{','.join(entry.extras)}]'"
    if "torchrec" in entry.extras:
        # An extra cannot say --no-deps, and with its dependencies torchrec asks for the CUDA build of fbgemm.
        hint += ", then pip install --no-deps torchrec==1.8.0"
    return f"`headrace {entry.name}` needs {module}, which is not installed: {hint}"


def _path_refused(exc: OSError) -> str | None:
    """Return the line that says which path the system has refused, and why; None of an error that is no path's."""
    if exc.errno in _PATH_ERRORS and isinstance(exc.filename, str | bytes | os.PathLike):
        return f"{os.fsdecode(exc.filename)}: {exc.strerror}"
    if isinstance(exc, FileNotFoundError):  # a path that is relative to what is gone has no name to be told
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory is gone: change to another one"
    return None


def _has_reader_gone() -> bool:
    """Say whether nobody reads our output any more. A broken pipe may also be a socket, and that one must be seen."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups are told unasked
    return bool(poll.poll(0))


def _drop_stdout() -> None:
    """Send to nowhere what is buffered: the interpreter would try again on its way out, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run(arguments: list[str], entries: Sequence[_Entry]) -> int:
    """Parse the arguments and run the command, letting every error through but a missing extra."""
    group = _build(entries)
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
    """Run the command and turn the errors that are no bugs of ours into one line and an exit code."""
    is_debug = os.environ.get("HEADRACE_DEBUG") == "1"
    for argument in arguments:
        # Bytes that are no text come as lone surrogates, which no message, file of ours or request can hold.
        if any("\ud800" <= character <= "\udfff" for character in argument):
            return _fail(f"argument {argument!r} is not UTF-8", _EXIT_USAGE)
    try:
        return _run(arguments, entries)
    except typer.TyperException as exc:
        # Of a value that is none of a choice pydantic says first that there is an error.
        message = exc.format_message().rstrip(".").replace(": Value error, ", ": ", 1)
        if not message:  # a group without a command: its help is printed already
            return exc.exit_code
        context = getattr(exc, "ctx", None)
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
        arguments: What follows the program's name; None takes it from `sys.argv`.

    Returns:
        The exit code.
    """
    _heed_sigterm()
    try:
        exit_code = _run_with_exit_code(list(sys.argv[1:] if arguments is None else arguments), _entries)
    except SystemExit as exc:
        # Rich answers a broken pipe in this way, having sent stdout to nowhere.
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        return _EXIT_BROKEN_PIPE
    except BrokenPipeError:
        if not _has_reader_gone():
            raise
        _drop_stdout()
        return _EXIT_BROKEN_PIPE
    return _flush(exit_code)


def _heed_sigterm() -> None:
    """Have SIGTERM end the first process of a container too, as it does any other.

    The kernel drops a signal to that process as long as no handler is there. Until a server or replica has set its own,
    an order to stop would be lost, and the container be killed at the end of its grace period.
    """
    if os.getpid() == _FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(_EXIT_TERMINATED))


def _flush(exit_code: int) -> int:
    """Write what is buffered, here, where a failure can still be told; return the exit code that comes of it."""
    if sys.stdout is None:  # closed by whoever has started us
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
