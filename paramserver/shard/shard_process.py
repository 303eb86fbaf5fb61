"""A shard process: serves one shard on the socket that it inherits, until it is told to stop.

Started by the supervisor as `python -m headrace.paramserver.shard.shard_process`; `shard_channel` has what they say to
one another. It drains and ends on SIGTERM, and when its stdin ends, which is how it learns that the supervisor is gone.
With `--metrics-fd N` it also answers on an inherited socket pair; `metrics_channel` has how.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.paramserver.process.log_format import configure_logging, fact
from headrace.paramserver.process.log_repeats import limit_repeats
from headrace.paramserver.process.open_files import allow_open_files
from headrace.paramserver.process.short_pauses import shorten_pauses
from headrace.paramserver.shard.shard_channel import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_STORAGE,
    ShardOrder,
    ShardReport,
)
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError

if TYPE_CHECKING:
    from headrace.paramserver.shard.shard import Shard

__all__ = ["main"]

_log = logging.getLogger(__name__)

_STDIN_FD = 0
# What a drain may take beyond `drain_s` before the process ends itself. A supervisor, if there is one, is faster.
_LAST_GRACE_S = 10.0


def main(*arguments: str) -> int:
    """Run the shard that stdin orders; return the exit code.

    Args:
        arguments: None, or `--metrics-fd` and a file descriptor.
    """
    faulthandler.enable()
    metrics_fd = int(arguments[1]) if arguments else None
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return EXIT_OK  # the supervisor was gone before it had said what to do
    order = ShardOrder.decode(line)
    configure_logging(level=order.log_level, log_format=order.log_format, always={"shard": order.config.shard})
    limit_repeats()
    max_connections = allow_open_files(order.config.max_connections)
    order = replace(order, config=replace(order.config, max_connections=max_connections))
    try:
        asyncio.run(_ShardProcess(order, metrics_fd).run())
    except HeadraceError as exc:
        # The supervisor logs what it is told.
        _report(order, ShardReport(error=str(exc)))
        if isinstance(exc, StorageError):
            return EXIT_STORAGE
        return EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_ERROR
    except Exception as exc:
        _log.critical("unexpected error", exc_info=exc)
        _report(order, ShardReport(error=f"{type(exc).__name__}: {exc}"))
        return EXIT_ERROR
    return EXIT_OK


def _report(order: ShardOrder, report: ShardReport) -> None:
    # A supervisor that is gone does not read; the end of stdin has told us, or will.
    with contextlib.suppress(BrokenPipeError):
        os.write(order.report_fd, report.encode())


class _ShardProcess:
    """Opens and serves the shard, heeding the wish to stop."""

    def __init__(self, order: ShardOrder, metrics_fd: int | None = None) -> None:
        self._order = order
        self._metrics_fd = metrics_fd
        self._stopping = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None

    async def run(self) -> None:
        with self._watch():
            self._opening = asyncio.current_task()
            try:
                await self._serve()
            except asyncio.CancelledError:
                # Only `_stop` cancels, and only while the shard is opening.
                if not self._stopping.is_set():
                    raise

    async def _serve(self) -> None:
        # Imported late, so that an error of theirs is reported like any other.
        from headrace.paramserver.config.protection import Protection
        from headrace.paramserver.metrics.metrics_channel import SampleTeller
        from headrace.paramserver.rpc.rpc_server import ThriftServer
        from headrace.paramserver.shard.shard import limits_of, open_shard

        shorten_pauses()
        config = self._order.config
        protection = Protection.load(config, os.environ)
        with socket.socket(fileno=self._order.socket_fd) as sock:
            async with open_shard(config) as shard, contextlib.AsyncExitStack() as telling:
                server = ThriftServer(
                    shard, limits=limits_of(config), ssl_context=protection.ssl_context, access=protection.access
                )
                shard.server = server
                await server.start(sock)
                try:
                    if self._metrics_fd is not None:
                        watch = await telling.enter_async_context(shard.watch(server))
                        ours = socket.socket(fileno=self._metrics_fd)
                        await telling.enter_async_context(SampleTeller(ours, watch.sample))
                    self._opening = None
                    _report(self._order, ShardReport(is_ready=True))
                    await self._wait_for_end(shard)
                finally:
                    shard.begin_drain()
                    await server.close(drain_s=config.drain_s)

    async def _wait_for_end(self, shard: Shard) -> None:
        """Return when the process shall stop; raise the error that has stopped the shard."""
        failing = asyncio.create_task(shard.wait_failed())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            failing.cancel()
        if failing.done():
            raise failing.result()

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop, "SIGTERM")
        loop.add_reader(_STDIN_FD, self._on_stdin)
        try:
            yield
        finally:
            loop.remove_reader(_STDIN_FD)
            loop.remove_signal_handler(signal.SIGTERM)

    def _on_stdin(self) -> None:
        if not os.read(_STDIN_FD, 4096):
            asyncio.get_running_loop().remove_reader(_STDIN_FD)
            self._stop("the supervisor is gone")

    def _stop(self, why: str) -> None:
        if self._stopping.is_set():
            return
        fact(_log, logging.DEBUG, "shard stops", why=why)
        self._stopping.set()
        _end_at_last(self._order.config.drain_s + _LAST_GRACE_S)
        if self._opening is not None:
            self._opening.cancel()


def _end_at_last(after_s: float) -> None:
    """End the process after a time, whatever the loop and its threads are doing then."""
    # What is acked is on disk: an end at any moment loses nothing.
    timer = threading.Timer(after_s, os._exit, (EXIT_ERROR,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
