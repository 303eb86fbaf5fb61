"""The flags that every command has which runs a process: a file of settings, a ready file, an end that stdin tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["ReadyFileFlag", "WatchStdinFlag", "config_option", "settings_sources"]

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


def config_option(env_prefix: str, *, example: str) -> Any:
    """Return the option `--config` of a command.

    Args:
        env_prefix: Of its environment variables; the file may also be named by the one that ends in `CONFIG`.
        example: A line of such a file.
    """
    return typer.Option(
        metavar="FILE",
        show_default=False,
        help=f"YAML file with settings, named as the flags are: `{example}`. Also {env_prefix}CONFIG.",
    )


def settings_sources(
    env_prefix: str, config: Path | None, environ: Mapping[str, str]
) -> tuple[dict[str, str], Path | None]:
    """Return the environment without the variable that names a file of settings, and that file, if there is one.

    Args:
        env_prefix: As of `config_option`.
        config: What `--config` says; it wins.
        environ: The environment.
    """
    left = dict(environ)
    variable = left.pop(env_prefix + "CONFIG", None)
    return left, config or (Path(variable) if variable else None)
