"""Command-line flags for settings that are declared in a dataclass, one for each."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from headrace.paramserver.config.settings import Kind, flag_of, settings_of, show_default

__all__ = ["with_setting_flags"]


def with_setting_flags(
    cls: type[Any], *, panel_of: Callable[[str], str] | None = None
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that gives a function one flag for each setting of a dataclass, inherited ones last.

    The settings are declared once, with their help; a hand-written list of the same flags would drift from it. All
    flags take text and give None when they are absent, so that `settings.merge` sees what was given and words every
    mistake the same, wherever it was made.

    Args:
        cls: Dataclass whose fields are made by `setting`.
        panel_of: Heading under which the help page lists a setting, by its name; None puts all under "Options".
    """
    inherited = {
        field.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for field, _ in settings_of(base)
    }

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
        flags = []
        for field, known in sorted(settings_of(cls), key=lambda item: item[0].name in inherited):
            default = show_default(field, known)
            option = typer.Option(
                flag_of(field.name),
                metavar=None if known.kind is Kind.SWITCH else "|".join(known.choices) or known.kind.value,
                help=known.help + (f" Default: {default}." if default else ""),
                show_default=False,
                rich_help_panel=panel_of(field.name) if panel_of else None,
            )
            kind = bool if known.kind is Kind.SWITCH else str
            flags.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
                )
            )
        parameters = [*flags, *own]
        function.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
        return function

    return decorate
