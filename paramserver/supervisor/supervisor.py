"""The supervisor: one process a shard, kept running.

It holds what must outlive a shard process: the listening sockets, so that a restarted shard takes up the same port and
connections wait meanwhile; and the directory's lock, which it shares with its children. It never touches data.

A child that ends is started again, after a pause that doubles with each quick death in a row. The server is given up
when there are too many of them, or when a child says that a restart is of no use (`EXIT_STORAGE`, `EXIT_CONFIG`). A
child that serves and whose event loop stops running is killed after `hang_timeout_s`, and started again like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.config.server_config import ServerConfig
from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.metrics.metrics_server import ServerMonitor
from headrace.paramserver.process.log_format import fact, resolve_log_format
from headrace.paramserver.process.ready_file import ReadyFile
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.shard.shard_channel import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STORAGE,
    ShardOrder,
)
from headrace.paramserver.supervisor.hang_watch import HangWatch
from headrace.paramserver.supervisor.shard_child import SHARD_COMMAND, ShardChild, describe_exit, run_child
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ConfigError, ProtocolError, StorageError

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# A shard that redoes a long log takes its time to open; say so this often.
_OPENING_NOTICE_S = 10.0
# What a child gets beyond its drain, to close log and store.
_CLOSE_GRACE_S = 5.0
_HOPELESS = {EXIT_CONFIG: EXIT_ERROR, EXIT_STORAGE: EXIT_STORAGE}


class Supervisor:
    """Runs the shard processes of one server.

    Thread: the event loop's.
    """

    def __init__(
        self,
        config: ServerConfig,
        data_dir: DataDir,
        sockets: Sequence[socket.socket],
        *,
        ready_file: ReadyFile | None = None,
        watch_stdin: bool = False,
        command: Sequence[str] = SHARD_COMMAND,
        monitor: ServerMonitor | None = None,
    ) -> None:
        """Prepare to run; nothing is started.

        Args:
            config: The server's configuration.
            data_dir: Prepared directory.
            sockets: Listening socket of each shard. They are closed when the server stops.
            ready_file: Gets address and process ids, each time that all shards are ready.
            watch_stdin: Stop when stdin ends.
            command: Program and arguments of a shard process.
            monitor: Serves metrics, if anything shall.
        """
        self._config = config
        self._data_dir = data_dir
        self._sockets = sockets
        self._ready_file = ready_file
        self._watch_stdin = watch_stdin
        self._command = command
        self._monitor = monitor
        self._log_format = resolve_log_format(config.log_format, sys.stderr)
        self._addresses = tuple((config.client_host, sock.getsockname()[1]) for sock in sockets)
        self._children: dict[int, ShardChild] = {}
        self._ready: set[int] = set()
        self._was_ready = False
        self._stopping = asyncio.Event()
        self._num_signals = 0
        self._exit_code = EXIT_OK

    @property
    def address(self) -> str:
        """Address of shard 0, from which a client finds all."""
        return format_address(*self._addresses[0])

    async def run(self) -> int:
        """Run until told to stop by SIGTERM, SIGINT or the end of stdin, or until a shard is given up.

        Returns:
            The exit code: 0 drained, 1 given up, 3 the storage of a shard failed, 130 killed by a second signal.

        Cancellation: the shard processes are killed.
        """
        num_shards = len(self._sockets)
        fact(_log, logging.INFO, "server starts", shards=num_shards, data=str(self._data_dir.path), pid=os.getpid())
        with self._signals(), contextlib.ExitStack() as stack:
            if self._ready_file is not None:
                stack.callback(self._ready_file.remove)
            async with self._serving_metrics(), asyncio.TaskGroup() as tasks:
                for shard in range(num_shards):
                    tasks.create_task(self._keep(shard), name=f"shard-{shard}")
        fact(_log, logging.INFO, "server has stopped", exit_code=self._exit_code)
        return self._exit_code

    @contextlib.asynccontextmanager
    async def _serving_metrics(self) -> AsyncIterator[None]:
        if self._monitor is None:
            yield
            return
        async with self._monitor.serve([format_address(*address) for address in self._addresses]):
            fact(_log, logging.INFO, "metrics are served", address=self._monitor.address)
            yield

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """Let the shard processes drain and end, and kill those that have not by the deadline; idempotent.

        Args:
            exit_code: What `run` returns; the first call decides.
        """
        if self._stopping.is_set():
            return
        self._exit_code = exit_code
        self._stopping.set()
        # Connections that come now are refused, and go elsewhere or try again.
        for sock in self._sockets:
            sock.close()
        for child in self._children.values():
            child.terminate()
        deadline_s = self._config.drain_s + _CLOSE_GRACE_S
        asyncio.get_running_loop().call_later(deadline_s, self._kill_late, deadline_s)

    def _kill_late(self, deadline_s: float) -> None:
        for shard, child in self._children.items():
            fact(_log, logging.ERROR, "shard has not drained in time and is killed", shard=shard, after_s=deadline_s)
            self._exit_code = self._exit_code or EXIT_ERROR
            child.kill()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        if self._watch_stdin:
            try:
                loop.add_reader(0, self._on_stdin)
            except OSError as exc:
                raise ConfigError("--watch-stdin: stdin is neither a pipe nor a terminal") from exc
        try:
            for number in numbers:
                loop.add_signal_handler(number, self._on_signal, number)
            yield
        finally:
            loop.remove_reader(0)
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            fact(_log, logging.INFO, "server stops", signal=number.name, drain_s=self._config.drain_s)
            self.stop()
        elif self._children:
            fact(_log, logging.WARNING, "server is stopped at once", signal=number.name)
            self._exit_code = self._exit_code or EXIT_INTERRUPTED
            for child in self._children.values():
                child.kill()

    def _on_stdin(self) -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            fact(_log, logging.INFO, "server stops: stdin has ended", drain_s=self._config.drain_s)
            self.stop()

    async def _keep(self, shard: int) -> None:
        """Run a shard's process again and again, until the server stops."""
        num_quick_deaths = 0
        while not self._stopping.is_set():
            exit_code, lived_s, error = await self._run_once(shard, is_restart=num_quick_deaths > 0)
            if self._stopping.is_set():
                return
            died: dict[str, Any] = {"shard": shard, "ended_by": describe_exit(exit_code)}
            if error:
                died["error"] = error
            if exit_code in _HOPELESS:
                fact(_log, logging.CRITICAL, "shard cannot go on; the server stops", **died)
                return self.stop(_HOPELESS[exit_code])
            is_quick = lived_s is None or lived_s < self._config.quick_death_s
            num_quick_deaths = num_quick_deaths + 1 if is_quick else 1
            if num_quick_deaths >= self._config.max_quick_deaths:
                fact(
                    _log,
                    logging.CRITICAL,
                    "shard keeps dying; the server gives up",
                    **died,
                    quick_deaths=num_quick_deaths,
                )
                return self.stop(EXIT_ERROR)
            pause_s = min(_FIRST_PAUSE_S * 2 ** (num_quick_deaths - 1), _LONGEST_PAUSE_S)
            fact(_log, logging.ERROR, "shard has died and is restarted", **died, pause_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, shard: int, *, is_restart: bool) -> tuple[int, float | None, str | None]:
        """Run a shard's process to its end.

        Returns:
            Its exit code; how long it lived after it was ready, seconds, or None; the last error it told.
        """
        try:
            async with self._run_process(shard) as child:
                self._children[shard] = child
                try:
                    if self._stopping.is_set():  # while it was started
                        child.terminate()
                    ready_s, error = await self._follow(shard, child, is_restart=is_restart)
                    exit_code = await child.wait()
                finally:
                    del self._children[shard]
                    self._ready.discard(shard)
        except OSError as exc:
            return EXIT_ERROR, None, f"the process cannot be started: {exc.strerror or exc}"
        return exit_code, None if ready_s is None else time.monotonic() - ready_s, error

    @contextlib.asynccontextmanager
    async def _run_process(self, shard: int) -> AsyncIterator[ShardChild]:
        command, inherit_fds = list(self._command), [self._sockets[shard].fileno(), self._data_dir.lock_fd]
        async with contextlib.AsyncExitStack() as stack:
            told = await stack.enter_async_context(self._monitor.asking(shard)) if self._monitor else None
            if told is not None:
                command += ["--metrics-fd", str(told.fileno())]
                inherit_fds.append(told.fileno())
            pipe = os.pipe()
            running = run_child(self._order(shard, pipe[1]), inherit_fds=inherit_fds, report_pipe=pipe, command=command)
            child = await stack.enter_async_context(running)
            if told is not None:
                told.close()  # the process has the only other end
            yield child

    def _order(self, shard: int, report_fd: int) -> ShardOrder:
        return ShardOrder(
            config=ShardConfig.of_server(
                self._config,
                directory=self._data_dir.shard_path(shard),
                shard=shard,
                server_id=self._data_dir.manifest.server_id,
                addresses=self._addresses,
            ),
            socket_fd=self._sockets[shard].fileno(),
            report_fd=report_fd,
            log_level=self._config.log_level,
            log_format=self._log_format,
        )

    async def _follow(self, shard: int, child: ShardChild, *, is_restart: bool) -> tuple[float | None, str | None]:
        """Take a child's reports until there are no more; return when it was ready and the error it told."""
        started_s = time.monotonic()
        ready_s: float | None = None
        error: str | None = None
        watch = HangWatch(self._config.hang_timeout_s)
        while True:
            try:
                async with asyncio.timeout(_OPENING_NOTICE_S if ready_s is None else watch.interval_s):
                    report = await child.next_report()
            except TimeoutError:
                if ready_s is None:
                    fact(_log, logging.INFO, "shard is still opening", shard=shard, for_s=time.monotonic() - started_s)
                elif watch.look(has_run=child.nudge()) and not self._stopping.is_set():
                    error = self._kill_hung(shard, child, error)
                continue
            except (ProtocolError, ValueError) as exc:
                child.kill()
                return ready_s, str(exc)
            if report is None:
                return ready_s, error
            error = report.error or error
            if report.is_ready and ready_s is None:
                ready_s = time.monotonic()
                await self._on_ready(shard, child, is_restart=is_restart)

    def _kill_hung(self, shard: int, child: ShardChild, error: str | None) -> str:
        """Kill a child whose event loop does not run, and return what its end is to be explained with."""
        timeout_s = self._config.hang_timeout_s
        hung = f"it hung: its event loop had not run for {format_seconds(timeout_s)}"
        message = "shard hangs and is killed" if error != hung else "shard was killed and is not gone yet"
        fact(_log, logging.ERROR, message, shard=shard, pid=child.pid, after_s=timeout_s)
        child.kill()
        return hung

    async def _on_ready(self, shard: int, child: ShardChild, *, is_restart: bool) -> None:
        self._ready.add(shard)
        message = "shard is ready again" if is_restart else "shard is ready"
        fact(_log, logging.INFO, message, shard=shard, address=format_address(*self._addresses[shard]), pid=child.pid)
        if len(self._ready) == len(self._sockets) and not self._stopping.is_set():
            try:
                if self._ready_file is not None:
                    await asyncio.to_thread(self._ready_file.write, self._describe())
            except StorageError as exc:
                fact(_log, logging.CRITICAL, "the ready file cannot be written", error=str(exc))
                return self.stop(EXIT_ERROR)
            if not self._was_ready:
                self._was_ready = True
                fact(_log, logging.INFO, "server is ready", address=self.address, shards=len(self._sockets))

    def _describe(self) -> dict[str, Any]:
        shards = [
            {"shard": shard, "address": format_address(*self._addresses[shard]), "pid": self._children[shard].pid}
            for shard in sorted(self._children)
        ]
        told: dict[str, Any] = {"address": self.address, "pid": os.getpid(), "shards": shards}
        if self._monitor is not None:
            told["metrics"] = self._monitor.address
        return told
