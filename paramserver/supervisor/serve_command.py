"""The command `headrace serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.config.process_flags import (
    ReadyFileFlag,
    WatchStdinFlag,
    config_option,
    settings_sources,
)
from headrace.paramserver.config.protection import Protection
from headrace.paramserver.config.server_config import ENV_PREFIX, ServerConfig, ShardSettings
from headrace.paramserver.config.setting_flags import with_setting_flags
from headrace.paramserver.config.settings import settings_of
from headrace.paramserver.metrics.metrics_server import ServerMonitor
from headrace.paramserver.process.log_format import configure_logging
from headrace.paramserver.process.log_repeats import limit_repeats
from headrace.paramserver.process.ready_file import ReadyFile
from headrace.paramserver.shard.shard_channel import EXIT_STORAGE
from headrace.paramserver.supervisor.listeners import bind_listener, bind_listeners
from headrace.paramserver.supervisor.supervisor import Supervisor
from headrace.schemas.errors import StorageError

__all__ = ["serve"]

_OF_SHARDS = frozenset(field.name for field, _ in settings_of(ShardSettings))


@with_setting_flags(ServerConfig, panel_of=lambda name: "Each shard" if name in _OF_SHARDS else "Server")
def serve(
    *,
    config: Annotated[Path | None, config_option(ENV_PREFIX, example="port: 7601")] = None,
    ready_file: ReadyFileFlag = None,
    watch_stdin: WatchStdinFlag = False,
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
    environ, file = settings_sources(ENV_PREFIX, config, os.environ)
    settings = ServerConfig.load(flags=flags, environ=environ, file=file)
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    limit_repeats()
    try:
        return _run(settings, ready_file, watch_stdin)
    except StorageError as exc:
        print(f"headrace: error: {exc}", file=sys.stderr)
        return EXIT_STORAGE


def _run(config: ServerConfig, ready_file: Path | None, watch_stdin: bool) -> int:
    """Claim the directory, bind the ports, and only then write anything."""
    ready = None if ready_file is None else ReadyFile(ready_file)
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
        _bind_metrics(config) as monitor,
    ):
        data_dir.prepare()
        supervisor = Supervisor(config, data_dir, sockets, ready_file=ready, watch_stdin=watch_stdin, monitor=monitor)
        return asyncio.run(supervisor.run())


@contextlib.contextmanager
def _bind_metrics(config: ServerConfig) -> Iterator[ServerMonitor | None]:
    if config.metrics_port is None:
        yield None
        return
    # Whoever names another address than loopback has chosen to; there is nothing to protect with.
    with bind_listener(
        config.metrics_host,
        config.metrics_port,
        taker="the metrics page",
        flag="--metrics-port",
        is_open=True,
        host_flag="--metrics-host",
    ) as sock:
        yield ServerMonitor(sock)
