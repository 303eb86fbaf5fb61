"""Command-line flags: one for each setting of a dataclass, and those of every command that runs a process."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.system.settings import Kind, flag_of, settings_of, show_default

__all__ = ["ReadyFileFlag", "WatchStdinFlag", "config_option", "settings_sources", "with_setting_flags"]

ReadyFileFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="For scripts: write addresses and process ids here, as JSON, when it is ready.",
    ),
]
WatchStdinFlag = Annotated[
    bool, typer.Option("--watch-stdin", help="For scripts: stop when stdin is closed.", show_default=False)
]


def with_setting_flags(
    cls: type[Any], *, panel_of: Callable[[str], str] | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Return a decorator that adds a flag to a function for each setting of a dataclass, inherited ones last.

    Settings and their help are declared once; a second list would drift. All flags take text and are None when
    absent, so that `settings.merge` knows what was given and words every mistake the same for all sources.

    Args:
        cls: Dataclass whose fields are made by `setting`.
        panel_of: Returns the help page's heading for a setting's name; None puts all under "Options".
    """
    inherited = {
        field.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for field, _ in settings_of(base)
    }

    def decorate(function: Callable[..., int | None]) -> Callable[..., int | None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
        flags = []
        for field, known in sorted(settings_of(cls), key=lambda item: item[0].name in inherited):
            default = show_default(field, known)
            option = typer.Option(
                *filter(None, (flag_of(field.name), known.short)),
                metavar=None if known.kind is Kind.SWITCH else "|".join(known.choices) or known.kind.value,
                help=known.help + (f" Default: {default}." if default else ""),
                show_default=False,
                rich_help_panel=panel_of(field.name) if panel_of else None,
            )
            kind = bool if known.kind is Kind.SWITCH else str
            annotation: Any = Annotated[kind | None, option]
            flags.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        parameters = [*flags, *own]
        function.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
        return function

    return decorate


def config_option(env_prefix: str, *, example: str) -> Any:
    """Return a command's option `--config`; the environment variable `env_prefix` + `CONFIG` also names the file."""
    return typer.Option(
        metavar="FILE",
        show_default=False,
        help=f"YAML file with settings, named as the flags are: `{example}`. Also {env_prefix}CONFIG.",
    )


def settings_sources(
    env_prefix: str, config: Path | None, environ: Mapping[str, str]
) -> tuple[dict[str, str], Path | None]:
    """Return the environment without the variable that names the settings file, and that file if there is one.

    The path in `config`, from the flag, wins.
    """
    rest = dict(environ)
    variable = rest.pop(env_prefix + "CONFIG", None)
    return rest, config or (Path(variable) if variable else None)
