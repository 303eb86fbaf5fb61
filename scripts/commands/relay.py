"""The command `headrace relay`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.relay.options import ENV_PREFIX, RelayConfig
from headrace.paramserver.relay.runner import RelayProcess
from headrace.paramserver.system.durable import ReadyFile, owner_only
from headrace.paramserver.system.event_loop import shorten_gc_pauses
from headrace.paramserver.system.flags import (
    ReadyFileFlag,
    WatchStdinFlag,
    config_option,
    settings_sources,
    with_setting_flags,
)
from headrace.paramserver.system.limits import allow_open_files
from headrace.paramserver.system.log_lines import configure_logging, limit_repeats
from headrace.scripts.commands.terminal import ShowSettings, show_settings

__all__ = ["relay"]


@with_setting_flags(
    RelayConfig, panel_of=lambda name: "The server that is followed" if name.startswith("server") else "Relay"
)
def relay(
    *,
    config: Annotated[Path | None, config_option(ENV_PREFIX, example="port: 7801")] = None,
    ready_file: ReadyFileFlag = None,
    watch_stdin: WatchStdinFlag = False,
    shows_settings: ShowSettings = False,
    **flags: Any,
) -> int:
    """Serve a server's update logs and snapshots to any number of replicas, over one connection a shard.

    Replicas name the relay instead of the server and need no other change. A relay may follow another relay.

    Each setting can also come from the environment (HEADRACE_RELAY_ and its name in capitals) or a YAML file. Flags
    go before the environment, the environment before the file. Sizes and times may have a unit (64MiB, 250ms).

    The relay says on stderr when it is ready. SIGTERM or SIGINT drains and ends it; a second one ends it at once.

    Returns:
        0 if it was stopped, 130 if a second signal ended it.

    Raises:
        ConfigError: A setting is wrong, the directory is another relay's, or a port cannot be used.
        HeadraceError: The server does not come in time, or the disk failed.
    """
    environ, file = settings_sources(ENV_PREFIX, config, os.environ)
    origins: dict[str, str] = {}
    settings = RelayConfig.load(flags=flags, environ=environ, file=file, origins=origins, may_lack=shows_settings)
    if shows_settings:
        show_settings(settings, origins)
        return 0
    ready = None if ready_file is None else ReadyFile(ready_file)
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    limit_repeats()
    shorten_gc_pauses()
    settings = dataclasses.replace(settings, max_connections=allow_open_files(settings.max_connections))
    with owner_only():
        return asyncio.run(_run(settings, environ, ready, watch_stdin))


async def _run(config: RelayConfig, environ: dict[str, str], ready: ReadyFile | None, watch_stdin: bool) -> int:
    return await RelayProcess(config, environ=environ, ready_file=ready, watch_stdin=watch_stdin).run()
