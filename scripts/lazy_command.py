"""A command in a list of commands, which is imported when it is asked for."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
import typer.core

__all__ = ["LazyCommand", "load_command"]

# Sections of a Google docstring are for who calls the function, not for who types the command.
_DOCSTRING_SECTION = re.compile(r"^(Args|Returns|Raises|Cancellation|Thread|Source|Example|Note)s?:", re.MULTILINE)


class LazyCommand(typer.core.TyperCommand):
    """Stands for a command in the list; becomes the real one when its arguments are parsed.

    Parsing is the first thing that needs the options, also for `--help`, so the module is imported there.
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
    """Import a command and return it as one of click.

    Args:
        name: What is typed.
        target: `module:function`: a plain function whose parameters carry `typer.Option` or `typer.Argument`, or a
            `typer.Typer` with commands of its own.
        help: Where the function has no docstring.
    """
    module_name, _, function_name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    text = _DOCSTRING_SECTION.split(inspect.getdoc(function) or help)[0].strip()
    app = typer.Typer(add_completion=False)
    app.command(name, help=text)(function)
    return typer.main.get_command(app)
