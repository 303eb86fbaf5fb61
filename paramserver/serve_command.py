"""The command `headrace serve`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.config import ENV_PREFIX, ServerConfig, ShardSettings
from headrace.paramserver.data_dir import DataDir
from headrace.paramserver.listeners import bind_listeners
from headrace.paramserver.log_format import configure_logging
from headrace.paramserver.protection import Protection
from headrace.paramserver.settings import Kind, flag_of, settings_of, show_default
from headrace.paramserver.shard_channel import EXIT_STORAGE
from headrace.paramserver.supervisor import Supervisor
from headrace.schemas.errors import ConfigError, StorageError

__all__ = ["serve"]

_CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


def _with_setting_flags(function: Callable[..., int]) -> Callable[..., int]:
    """Give a function one flag for each setting of `ServerConfig`, beside its own.

    The settings are declared once, with their help; a hand-written list of the same thirty flags would drift from it.
    All flags take text and give None when they are absent, so that `ServerConfig.load` sees what was given and words
    every mistake the same, wherever it was made.
    """
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
    of_shards = {field.name for field, _ in settings_of(ShardSettings)}
    flags = []
    for field, known in sorted(settings_of(ServerConfig), key=lambda item: item[0].name in of_shards):
        default = show_default(field, known)
        option = typer.Option(
            flag_of(field.name),
            metavar=None if known.kind is Kind.SWITCH else "|".join(known.choices) or known.kind.value,
            help=known.help + (f" Default: {default}." if default else ""),
            show_default=False,
            rich_help_panel="Each shard" if field.name in of_shards else "Server",
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


@_with_setting_flags
def serve(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help=f"YAML file with settings, named as the flags are: `port: 7601`. Also {_CONFIG_VARIABLE}.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="For scripts: write address and process ids here, as JSON, when the server is ready.",
        ),
    ] = None,
    watch_stdin: Annotated[
        bool, typer.Option("--watch-stdin", help="For scripts: stop when stdin is closed.", show_default=False)
    ] = False,
    **flags: Any,
) -> int:
    """Run a parameter server: a supervisor and one process a shard, on the store in a directory.

    Each setting can also be given in the environment, as HEADRACE_SERVE_ and its name in capitals, or in a YAML file.
    A flag wins over the environment, the environment over the file. Sizes may have a unit (64MiB), and so may times
    (250ms, 24h).

    The server says on stderr when it is ready, and drains and ends on SIGTERM or SIGINT; a second one ends it at once.

    Returns:
        0 stopped as told, 1 given up, 3 the storage failed, 130 ended by a second signal.

    Raises:
        ConfigError: A setting is wrong, the directory or a port cannot be used; nothing was written.
    """
    environ = dict(os.environ)
    variable = environ.pop(_CONFIG_VARIABLE, None)
    file = config or (Path(variable) if variable else None)
    settings = ServerConfig.load(flags=flags, environ=environ, file=file)
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    try:
        return _run(settings, ready_file, watch_stdin)
    except StorageError as exc:
        print(f"headrace: error: {exc}", file=sys.stderr)
        return EXIT_STORAGE


def _run(config: ServerConfig, ready_file: Path | None, watch_stdin: bool) -> int:
    """Claim the directory, bind the ports, and only then write anything."""
    if ready_file is not None:
        _check_ready_file(ready_file)
    # Each shard loads it again; here for the mistakes in it.
    is_protected = Protection.load(config, os.environ).is_complete
    with (
        DataDir.claim(config.data, num_shards=config.shards) as data_dir,
        bind_listeners(
            config.host,
            config.port,
            data_dir.manifest.num_shards,
            is_protected=is_protected,
            insecure_bind=config.insecure_bind,
        ) as sockets,
    ):
        data_dir.prepare()
        supervisor = Supervisor(config, data_dir, sockets, ready_file=ready_file, watch_stdin=watch_stdin)
        return asyncio.run(supervisor.run())


def _check_ready_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)  # one of an earlier run would lie
    except OSError as exc:
        raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")
