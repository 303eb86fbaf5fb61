"""Import commands, and functions that need an extra's library, only when they are needed."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from headrace.schemas.errors import ConfigError

__all__ = ["LazyCommand", "import_with_extra", "load_command"]

# These sections of a Google docstring are for callers of the function, not for the command's help.
_DOCSTRING_SECTION = re.compile(r"^(Args|Returns|Raises|Cancellation|Thread|Source|Example|Note)s?:", re.MULTILINE)
# Library: the extra that installs it.
_EXTRAS = {"torch": "torch", "pyarrow": "tools", "safetensors": "tools"}


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
    function = _import(target)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    text = _DOCSTRING_SECTION.split(inspect.getdoc(function) or help)[0].strip()
    app = typer.Typer(add_completion=False)
    app.command(name, help=text)(function)
    return typer.main.get_command(app)


def import_with_extra(function: str, *, what: str) -> Callable[..., Any]:
    """Return the function `module:function`.

    Raises:
        ConfigError: A library that an extra installs is missing; `what` needs it.
    """
    try:
        return _import(function)
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        raise ConfigError(f"{what} needs {library}: pip install 'headrace[{_EXTRAS[library]}]'") from exc


def _import(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
