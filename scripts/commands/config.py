"""The commands `headrace config`: the settings that a process would use, where each is from, and a schema of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from headrace.cli import LazyCommand
from headrace.paramserver.system.json_schema import json_schema
from headrace.paramserver.system.settings import settings_of, show_default, show_value
from headrace.scripts.commands.terminal import escape, number_table, option, output_console

__all__ = ["SchemaFlag", "config", "print_settings"]

SchemaFlag = Annotated[bool, option("Print a JSON schema of the YAML file instead, for editors.", None, "--schema")]


class _Commands(typer.core.TyperGroup):
    # Each stands beside the command that uses the settings, and is imported alone.
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in ("serve", "relay", "replica"):
            target = f"headrace.scripts.commands.{name}:{name}_settings"
            self.add_command(LazyCommand(name, target, f"Show the settings of `headrace {name}`."))


config = typer.Typer(add_completion=False, no_args_is_help=True, cls=_Commands)


@config.callback()
def _front_door() -> None:
    """Show the settings that a process would use and where each is from: a flag, a variable, a file or the default."""


def print_settings(
    command: str, cls: type[Any], load: Callable[[dict[str, str]], Any], *, schema: bool, as_json: bool
) -> None:
    """Print the settings of a command.

    Args:
        command: Its name.
        cls: Dataclass of its settings.
        load: Returns an instance, and puts into its argument where each value is from, but for defaults.
        schema: Print the schema of the YAML file instead; nothing is loaded.
        as_json: Print one JSON object.

    Raises:
        ConfigError: The command would refuse its settings, but for required ones that are missing.
    """
    if schema:
        print(json.dumps(json_schema(cls, f"headrace {command}"), indent=2))
        return
    origins: dict[str, str] = {}
    settings = load(origins)
    if as_json:
        facts = {
            field.name: {
                "value": None if origins.get(field.name) == "required" else getattr(settings, field.name),
                "from": origins.get(field.name, "default"),
            }
            for field, _ in settings_of(cls)
        }
        print(json.dumps(facts, indent=2, default=_path_text))
        return
    table = number_table("setting", "value", "from", box=None, pad_edge=False)
    for field, known in settings_of(cls):
        origin = origins.get(field.name)
        has_value = origin not in (None, "required")
        shown = show_value(known, getattr(settings, field.name)) if has_value else show_default(field, known)
        table.add_row(field.name, escape(shown or "none"), escape(origin or "default"))
    output_console().print(table)


def _path_text(value: Any) -> str:
    assert isinstance(value, Path)
    return str(value)
