"""The command `headrace replica`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.config.process_flags import (
    ReadyFileFlag,
    WatchStdinFlag,
    config_option,
    settings_sources,
)
from headrace.paramserver.config.setting_flags import with_setting_flags
from headrace.paramserver.process.log_format import configure_logging
from headrace.paramserver.process.log_repeats import limit_repeats
from headrace.paramserver.process.open_files import allow_open_files
from headrace.paramserver.process.ready_file import ReadyFile
from headrace.paramserver.process.short_pauses import shorten_pauses
from headrace.paramserver.replica.endpoint_config import ENV_PREFIX, EndpointConfig
from headrace.paramserver.replica.endpoint_process import ReplicaProcess

__all__ = ["replica"]


@with_setting_flags(
    EndpointConfig,
    panel_of=lambda name: "The server that is followed" if name.startswith("server") else "Replica",
)
def replica(
    *,
    config: Annotated[Path | None, config_option(ENV_PREFIX, example="port: 7701")] = None,
    ready_file: ReadyFileFlag = None,
    watch_stdin: WatchStdinFlag = False,
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
    environ, file = settings_sources(ENV_PREFIX, config, os.environ)
    settings = EndpointConfig.load(flags=flags, environ=environ, file=file)
    ready = None if ready_file is None else ReadyFile(ready_file)
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    limit_repeats()
    shorten_pauses()
    settings = dataclasses.replace(settings, max_connections=allow_open_files(settings.max_connections))
    return asyncio.run(_run(settings, environ, ready, watch_stdin))


async def _run(config: EndpointConfig, environ: dict[str, str], ready_file: ReadyFile | None, watch_stdin: bool) -> int:
    return await ReplicaProcess(config, environ=environ, ready_file=ready_file, watch_stdin=watch_stdin).run()
