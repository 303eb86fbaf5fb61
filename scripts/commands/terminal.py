"""What commands share at the terminal: flags, progress bars and tables."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import rich.markup
import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from headrace.paramserver.observe.status_query import (
    DEFAULT_ADDRESS,
    AuthorityFlag,
    CertificateFlag,
    InsecureTokenFlag,
    KeyFlag,
    StatusAccess,
    TlsFlag,
    TokenFlag,
)
from headrace.paramserver.rpc.address import SERVER_ENV, server_in
from headrace.paramserver.system.settings import settings_of, show_default, show_value
from headrace.paramserver.system.text import visible
from headrace.schemas.errors import ConfigError

__all__ = [
    "Access",
    "AsJson",
    "OnlyModel",
    "OnlyTables",
    "ProgressBar",
    "ServerFlag",
    "ServerOrOtherFlag",
    "ShowSettings",
    "escape",
    "number_table",
    "option",
    "output_console",
    "print_line",
    "refuse_server_flags",
    "server_unless",
    "show_bytes",
    "show_count",
    "show_rows",
    "show_settings",
    "with_server_flags",
]

# Lines of a pipe are as long as they are; only a table's own cells add spaces.
_UNCUT_COLUMNS = 100_000

Access = Callable[..., StatusAccess]
"""Takes a server's address and `timeout_s`; returns a `StatusAccess`, made with the flags and the environment."""


def option(text: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """Return a flag with a help text, and without its default there."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, **settings)


AsJson = Annotated[bool, option("Print one JSON object.", None, "--json")]
ShowSettings = Annotated[bool, option("Print each setting and where it is from, and end.", None, "--show-settings")]
OnlyTables = Annotated[
    list[str] | None,
    option("Only tables of this name or path, or a pattern such as `user.*`; may be repeated.", "PATTERN"),
]
OnlyModel = Annotated[str | None, option("Only this model's tables.", "MODEL")]
_SERVER_HELP = f"Any shard of a running server, or several with commas. Also {SERVER_ENV}."
ServerFlag = Annotated[str | None, option(f"{_SERVER_HELP} Default: {DEFAULT_ADDRESS}.", "HOST:PORT", "--server", "-s")]
"""The server of a command that needs one; None stands for what its help says."""
ServerOrOtherFlag = Annotated[str | None, option(_SERVER_HELP, "HOST:PORT", "--server", "-s")]
"""The server of a command that can do without: see `server_unless`."""

_FLAGS: dict[str, tuple[Any, Any]] = {
    "tls": (TlsFlag, False),
    "tls_authority": (AuthorityFlag, None),
    "tls_certificate": (CertificateFlag, None),
    "tls_key": (KeyFlag, None),
    "token_file": (TokenFlag, None),
    "insecure_token": (InsecureTokenFlag, False),
}


def server_unless(other: object, server: str | None) -> str | None:
    """Return the server of a command: the one given, or that of the environment unless `other` was given instead."""
    return server_in(os.environ) if server is None and other is None else server


def with_server_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags in place of its keyword-only parameter `access`, an `Access`."""

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        flags = {name: given.pop(name, default) for name, (_, default) in _FLAGS.items()}
        return function(*args, access=functools.partial(StatusAccess.load, **flags), **given)

    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "access"]
    for name, (annotation, default) in _FLAGS.items():
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def refuse_server_flags(access: Access, why: str, **flags: Any) -> None:
    """Raise ConfigError for a flag that goes with --server, of these and of `access`, if one was given."""
    for name, value in {**flags, **getattr(access, "keywords", {})}.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --server: {why}")


def escape(text: str) -> str:
    """Return a name as rich's markup shows it: with brackets as they are, and control characters visible."""
    return rich.markup.escape(visible(text))


def print_line(text: str, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Print one line; control characters of names in it are visible, and it stays one line."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=flush)


def output_console() -> Console:
    """Return a console on stdout: as wide as its terminal, and wide enough to cut nothing if it is a pipe or a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_UNCUT_COLUMNS)


def number_table(*columns: str, **style: Any) -> Table:
    """Return an empty table; a column whose name ends in `>` is aligned for numbers."""
    table = Table(**{"box": box.SIMPLE, **style})
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """A bar from `show_bytes` or `show_rows`."""

    _progress: Progress
    _task: TaskID

    def advance(self, count: int) -> None:
        """Advance by `count`."""
        self._progress.advance(self._task, count)

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)


def show_bytes(what: str, total: int | None = None) -> AbstractContextManager[ProgressBar]:
    """Show a bar of bytes for the block, labeled `what`; a `total` of None waits for `update`."""
    return _show(what, total, DownloadColumn(binary_units=True), TransferSpeedColumn())


def show_rows(what: str, total: int | None = None) -> AbstractContextManager[ProgressBar]:
    """Show a bar of rows for the block; see `show_bytes`."""
    return _show(what, total, MofNCompleteColumn(), _RowRate())


def show_count(what: str, total: int | None = None) -> AbstractContextManager[ProgressBar]:
    """Show a bar of things that are counted; see `show_bytes`."""
    return _show(what, total, MofNCompleteColumn())


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def _show(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[ProgressBar]:
    console = Console(stderr=True)
    described = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*described, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, progress.add_task(what, total=total))


def show_settings(settings: Any, origins: Mapping[str, str]) -> None:
    """Print settings as a YAML file may have them; `origins` says where each is from, except for defaults."""
    table = number_table("setting", "value", "from", box=None, pad_edge=False)
    for field, known in settings_of(type(settings)):
        origin = origins.get(field.name, "default")
        is_given = origin not in ("default", "required")
        shown = show_value(known, getattr(settings, field.name)) if is_given else show_default(field, known)
        table.add_row(field.name, escape(shown or "none"), escape(origin))
    output_console().print(table)
