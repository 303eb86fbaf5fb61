"""The command `headrace replica`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.log_format import configure_logging
from headrace.paramserver.replica.endpoint_config import ENV_PREFIX, EndpointConfig
from headrace.paramserver.replica.endpoint_process import ReplicaProcess
from headrace.paramserver.setting_flags import with_setting_flags
from headrace.schemas.errors import ConfigError

__all__ = ["replica"]

_CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


@with_setting_flags(
    EndpointConfig,
    panel_of=lambda name: "The server that is followed" if name.startswith("server") else "Replica",
)
def replica(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help=f"YAML file with settings, named as the flags are: `port: 7701`. Also {_CONFIG_VARIABLE}.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="For scripts: write addresses and process id here, as JSON, when the replica is ready.",
        ),
    ] = None,
    watch_stdin: Annotated[
        bool, typer.Option("--watch-stdin", help="For scripts: stop when stdin is closed.", show_default=False)
    ] = False,
    **flags: Any,
) -> int:
    """Serve look-ups from a copy of the tables that follows a parameter server.

    It speaks the server's own Thrift interface, as a server of one shard that can only be read, so every reader works
    with it unchanged.

    Each setting can also be given in the environment, as HEADRACE_REPLICA_ and its name in capitals, or in a YAML file.
    A flag wins over the environment, the environment over the file. Sizes may have a unit (64MiB), and so may times
    (250ms, 24h).

    The replica says on stderr when it is ready, and drains and ends on SIGTERM or SIGINT; a second one ends it at once.

    Returns:
        0 stopped as told, 130 ended by a second signal.

    Raises:
        ConfigError: A setting is wrong, or a port cannot be used.
        HeadraceError: The server is not there in time, or its tables cannot be copied.
    """
    environ = dict(os.environ)
    variable = environ.pop(_CONFIG_VARIABLE, None)
    file = config or (Path(variable) if variable else None)
    settings = EndpointConfig.load(flags=flags, environ=environ, file=file)
    if ready_file is not None:
        _check_ready_file(ready_file)
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    return asyncio.run(_run(settings, environ, ready_file, watch_stdin))


async def _run(config: EndpointConfig, environ: dict[str, str], ready_file: Path | None, watch_stdin: bool) -> int:
    return await ReplicaProcess(config, environ=environ, ready_file=ready_file, watch_stdin=watch_stdin).run()


def _check_ready_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)  # one of an earlier run would lie
    except OSError as exc:
        raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")
