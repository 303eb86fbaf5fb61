"""The command `headrace serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.config import ENV_PREFIX, ServerConfig, ShardSettings
from headrace.paramserver.data_dir import DataDir
from headrace.paramserver.listeners import bind_listener, bind_listeners
from headrace.paramserver.log_format import configure_logging
from headrace.paramserver.log_repeats import limit_repeats
from headrace.paramserver.metrics_server import ServerMonitor
from headrace.paramserver.protection import Protection
from headrace.paramserver.setting_flags import with_setting_flags
from headrace.paramserver.settings import settings_of
from headrace.paramserver.shard_channel import EXIT_STORAGE
from headrace.paramserver.supervisor import Supervisor
from headrace.schemas.errors import ConfigError, StorageError

__all__ = ["serve"]

_CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
_OF_SHARDS = frozenset(field.name for field, _ in settings_of(ShardSettings))


@with_setting_flags(ServerConfig, panel_of=lambda name: "Each shard" if name in _OF_SHARDS else "Server")
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
    limit_repeats()
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
        _bind_metrics(config) as monitor,
    ):
        data_dir.prepare()
        supervisor = Supervisor(
            config, data_dir, sockets, ready_file=ready_file, watch_stdin=watch_stdin, monitor=monitor
        )
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


def _check_ready_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)  # one of an earlier run would lie
    except OSError as exc:
        raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")
