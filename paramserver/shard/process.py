"""Serve one shard on an inherited socket, as a process of its own.

The supervisor starts it as `python -m headrace.paramserver.shard.process`; see `child.py` for their messages.
It drains and ends on SIGTERM, and when its stdin ends because the supervisor is gone. With `--metrics-fd N` it also
sends samples over an inherited socket; see `observe/sample.py`.
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
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.paramserver.shard.child import (
    EXIT_CONFIG,
    EXIT_DISK_FULL,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_TAKEN_OVER,
    ShardOrder,
    ShardReport,
)
from headrace.paramserver.system.event_loop import background_task, shorten_gc_pauses, stop_requests
from headrace.paramserver.system.limits import allow_open_files
from headrace.paramserver.system.log_lines import configure_logging, fact, limit_repeats
from headrace.schemas.errors import ConfigError, HeadraceError, LogFencedError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from headrace.paramserver.observe.sample import ShardSample
    from headrace.paramserver.shard.follower_service import FollowingShard
    from headrace.paramserver.shard.service import Shard

__all__ = ["main"]

_log = logging.getLogger(__name__)

# How long a drain may exceed `drain_s` before the process ends itself. A living supervisor kills it sooner.
_LAST_GRACE_S = 10.0


def main(*arguments: str) -> int:
    """Run the shard that stdin orders; return the exit code. `arguments` may be `--metrics-fd` and a number."""
    faulthandler.enable()
    metrics_fd = int(arguments[1]) if arguments else None
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return EXIT_OK  # the supervisor was gone before it sent its order
    order = ShardOrder.decode(line)
    configure_logging(level=order.log_level, log_format=order.log_format, always={"shard": order.config.shard})
    limit_repeats()
    max_connections = allow_open_files(order.config.max_connections)
    order = replace(order, config=replace(order.config, max_connections=max_connections))
    process = _ShardProcess(order, metrics_fd)
    try:
        asyncio.run(process.run())
    except HeadraceError as exc:
        # The supervisor logs the error.
        _report(order, ShardReport(error=str(exc)))
        if process.was_taken_over:
            return EXIT_TAKEN_OVER
        if isinstance(exc, LogFencedError):
            return EXIT_FENCED
        if isinstance(exc, StorageError):
            return EXIT_DISK_FULL if exc.is_disk_full else EXIT_STORAGE
        return EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_ERROR
    except Exception as exc:
        _log.critical("unexpected error", exc_info=exc)
        _report(order, ShardReport(error=f"{type(exc).__name__}: {exc}"))
        return EXIT_ERROR
    return EXIT_OK


def _report(order: ShardOrder, report: ShardReport) -> None:
    # A supervisor that is gone does not read; the end of stdin shows that, too.
    with contextlib.suppress(BrokenPipeError):
        os.write(order.report_fd, report.encode())


class _ShardProcess:
    def __init__(self, order: ShardOrder, metrics_fd: int | None = None) -> None:
        self._order, self._metrics_fd = order, metrics_fd
        self.was_taken_over = False
        self._stopping = asyncio.Event()
        self._sample: Callable[[], Awaitable[ShardSample]]
        self._opening: asyncio.Task[None] | None = None

    async def run(self) -> None:
        with stop_requests(
            lambda number: self._stop(number.name),
            lambda: self._stop("the supervisor is gone"),
            signals=[signal.SIGTERM],
        ):
            self._opening = asyncio.current_task()
            try:
                await self._serve()
            except asyncio.CancelledError:
                # Only `_stop` cancels, and only while the shard is opening.
                if not self._stopping.is_set():
                    raise

    async def _serve(self) -> None:
        # Imported late, so that an import error is reported like any other.
        from headrace.paramserver.rpc.security import Protection
        from headrace.paramserver.rpc.server import Service, ThriftServer
        from headrace.paramserver.shard.service import open_shard

        shorten_gc_pauses()
        config = self._order.config
        protection = Protection.load(config, os.environ)

        def server_of(service: Service) -> ThriftServer:
            return ThriftServer(
                service, limits=config.limits, ssl_context=protection.ssl_context, access=protection.access
            )

        @contextlib.asynccontextmanager
        async def stand_by(standby: FollowingShard) -> AsyncIterator[None]:
            server, self._sample = server_of(standby), standby.sample
            await server.start(sock.dup())  # connections that come when this one is closed wait for the shard
            try:
                await sampled.enter_async_context(self._sending_samples())
                async with (
                    standby.served_by(server),
                    background_task(self._tell_standing(standby), name="headrace-standby"),
                ):
                    yield
            finally:
                await server.close(drain_s=0)

        async with contextlib.AsyncExitStack() as sampled:
            sock = sampled.enter_context(socket.socket(fileno=self._order.socket_fd))
            async with open_shard(config, stand_by=stand_by) as shard, contextlib.AsyncExitStack() as stack:
                server = shard.sampler.server = server_of(shard)
                await server.start(sock)
                try:
                    if self._metrics_fd is not None:
                        await stack.enter_async_context(shard.sampler.looking())
                        self._sample = shard.sampler.sample
                        await sampled.enter_async_context(self._sending_samples())
                    self._opening = None
                    _report(self._order, ShardReport(is_ready=True))
                    await self._wait_for_end(shard)
                finally:
                    shard.begin_drain()
                    await server.close(drain_s=config.drain_s)

    @contextlib.asynccontextmanager
    async def _sending_samples(self) -> AsyncIterator[None]:
        """Reply to the supervisor with samples while the block lasts; an inner block adds nothing."""
        from headrace.paramserver.observe.sample import send_samples

        metrics_fd, self._metrics_fd = self._metrics_fd, None
        async with contextlib.AsyncExitStack() as stack:
            if metrics_fd is not None:
                ours = socket.socket(fileno=metrics_fd)
                await stack.enter_async_context(send_samples(ours, lambda: self._sample()))
            yield

    async def _tell_standing(self, standby: FollowingShard) -> None:
        await standby.stands.wait()
        _report(self._order, ShardReport(is_ready=True, is_standby=True))

    async def _wait_for_end(self, shard: Shard) -> None:
        """Wait until the process is told to stop; raise the error if the shard fails."""
        failing = asyncio.create_task(shard.wait_failed())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            failing.cancel()
        if failing.done():
            self.was_taken_over = shard.was_taken_over
            raise failing.result()

    def _stop(self, why: str) -> None:
        if self._stopping.is_set():
            return
        fact(_log, logging.DEBUG, "shard stops", why=why)
        self._stopping.set()
        # Whatever the loop and its threads do then: acked data is on disk, so an end at any moment loses nothing.
        timer = threading.Timer(self._order.config.drain_s + _LAST_GRACE_S, os._exit, (EXIT_ERROR,))
        timer.daemon = True
        timer.start()
        if self._opening is not None:
            self._opening.cancel()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
