"""Keep one process per shard running.

The supervisor owns what must outlive a shard process: the listening sockets, so that a restarted shard has the same
port and connections wait meanwhile; and the directory's lock, which its children share. It never touches data.

It restarts a child that ends, after a pause that doubles with each quick death in a row. It gives the server up after
too many of them, or when a child reports that the settings cannot work (`EXIT_CONFIG`). A shard whose storage has
failed (`EXIT_STORAGE`), or of which another copy is the right one (`EXIT_FENCED`), stops alone, for good; the server
ends with its last shard. But a shard that had no room on its disk is started again and again until it has, and a shard
of a cluster whose replicated log another process has taken over is started again, as a standby. It kills a serving
child whose event loop has not run for `hang_timeout_s`, and restarts it like any other.
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
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.config.server_settings import ServerConfig, ShardConfig
from headrace.paramserver.observe.monitor import ServerMonitor
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.shard.child import (
    EXIT_CONFIG,
    EXIT_DISK_FULL,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_TAKEN_OVER,
    SHARD_COMMAND,
    HangDetector,
    ShardChild,
    ShardOrder,
    ShardReport,
    describe_exit,
    run_child,
)
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.event_loop import stop_requests
from headrace.paramserver.system.log_lines import fact, resolve_log_format
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import ProtocolError, StorageError

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# Opening takes long if there is much log to replay; log that this often.
_OPENING_NOTICE_S = 10.0
# Extra time for a child after its drain, to close log and store.
_CLOSE_GRACE_S = 5.0
_DISK_IS_FULL = "shard's disk is full; the shard is started again until there is room, and the other shards go on"
# What is said of a shard that stops for good while the others go on, by its exit code.
_STOPS_ALONE = {
    EXIT_STORAGE: (logging.CRITICAL, "shard's storage has failed; it stops, and the other shards go on"),
    EXIT_FENCED: (logging.ERROR, "shard steps down; the other shards go on"),
}


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
        cluster: ClusterFile | None = None,
        node: ClusterNode | None = None,
    ) -> None:
        """Prepare to run a server in a prepared directory; `command` starts a shard process.

        `sockets` has the listening socket of each shard; `stop` closes them. `ready_file` receives address and process
        ids whenever all shards are ready. `watch_stdin` stops the server when stdin ends. Of a `cluster`'s server this
        runs the shards of one `node`, to which `sockets` belong in the order of its list.
        """
        self._config, self._data_dir, self._cluster, self._node = config, data_dir, cluster, node
        self._sockets = dict(zip(range(len(sockets)) if node is None else node.copies, sockets, strict=True))
        self._ready_file, self._monitor = ready_file, monitor
        self._watch_stdin, self._command = watch_stdin, command
        self._log_format = resolve_log_format(config.log_format, sys.stderr)
        ours = {shard: (config.client_host, sock.getsockname()[1]) for shard, sock in self._sockets.items()}
        addresses = ours if cluster is None else dict(enumerate(cluster.addresses)) | ours
        self._addresses = tuple(addresses[shard] for shard in sorted(addresses))
        self._following: set[int] = set()  # shards that were taken over, and wait for their owners' silence
        self._children: dict[int, ShardChild] = {}
        self._ready: set[int] = set()
        self._stopped: dict[int, int] = {}  # exit code of each shard that has stopped alone
        self._was_ready, self._num_signals, self._exit_code = False, 0, EXIT_OK
        self._stopping = asyncio.Event()

    @property
    def address(self) -> str:
        """Address of the first shard here, from which a client finds all shards."""
        own = self._sockets if self._node is None else self._node.shards or self._node.standbys
        return format_address(*self._addresses[min(own)])

    async def run(self) -> int:
        """Run until SIGTERM, SIGINT or the end of stdin, or until no shard is left.

        Returns the exit code: 0 drained, 1 gave up, 3 the storage of at least one shard has failed, 4 all shards have
        stepped down, 130 killed by a second signal.
        Cancellation: the shard processes are killed.
        """
        started: dict[str, Any] = {"shards": len(self._sockets), "data": str(self._data_dir.path), "pid": os.getpid()}
        if self._node is not None:
            started |= {"node": self._node.name, "of_shards": len(self._addresses)}
        fact(_log, logging.INFO, "server starts", **started)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(stop_requests(self._on_signal, self._on_stdin_end if self._watch_stdin else None))
            if self._ready_file is not None:
                stack.callback(self._ready_file.remove)
            if self._monitor is not None:
                addresses = {shard: format_address(*self._addresses[shard]) for shard in sorted(self._sockets)}
                await stack.enter_async_context(self._monitor.serve(addresses))
                fact(_log, logging.INFO, "metrics are served", address=self._monitor.address)
            async with asyncio.TaskGroup() as tasks:
                for shard in self._sockets:
                    tasks.create_task(self._keep_running(shard), name=f"shard-{shard}")
        if EXIT_STORAGE in self._stopped.values():
            self._exit_code = self._exit_code or EXIT_STORAGE
        elif not self._stopping.is_set():
            self._exit_code = EXIT_FENCED
        fact(_log, logging.INFO, "server has stopped", exit_code=self._exit_code)
        return self._exit_code

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """Let the shard processes drain, and kill those that are late; the first call sets the result of `run`."""
        if self._stopping.is_set():
            return
        self._exit_code = exit_code
        self._stopping.set()
        # New connections are refused now; clients go elsewhere or retry.
        for sock in self._sockets.values():
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

    def _on_stdin_end(self) -> None:
        fact(_log, logging.INFO, "server stops: stdin has ended", drain_s=self._config.drain_s)
        self.stop()

    async def _keep_running(self, shard: int) -> None:
        num_quick_deaths, is_restart, was_full = 0, False, False
        while not self._stopping.is_set():
            exit_code, lived_s, error = await self._run_once(shard, is_restart=is_restart)
            if self._stopping.is_set():
                return
            died: dict[str, Any] = {"shard": shard, "ended_by": describe_exit(exit_code)}
            if error:
                died["error"] = error
            if exit_code == EXIT_CONFIG:
                fact(_log, logging.CRITICAL, "shard cannot go on; the server stops", **died)
                return self.stop(EXIT_ERROR)
            if exit_code == EXIT_TAKEN_OVER and self._can_follow:
                fact(_log, logging.WARNING, "shard was taken over; it becomes a standby", **died)
                self._following.add(shard)
                num_quick_deaths, is_restart = 0, False
                continue
            exit_code = EXIT_FENCED if exit_code == EXIT_TAKEN_OVER else exit_code
            if exit_code in _STOPS_ALONE:
                fact(_log, *_STOPS_ALONE[exit_code], **died)
                return await self._stop_alone(shard, exit_code, error or describe_exit(exit_code))
            is_restart, is_full = True, exit_code == EXIT_DISK_FULL
            is_quick = lived_s is None or lived_s < self._config.quick_death_s
            if is_full:
                num_quick_deaths, pause_s = 0, _LONGEST_PAUSE_S
                # It may be full for days: say so once.
                is_news = not (was_full and is_quick)
                level, message = (logging.CRITICAL, _DISK_IS_FULL) if is_news else (logging.DEBUG, "disk is still full")
                fact(_log, level, message, **died, pause_s=pause_s)
            else:
                num_quick_deaths = num_quick_deaths + 1 if is_quick else 1
                if num_quick_deaths >= self._config.max_quick_deaths:
                    message = "shard keeps dying; the server gives up"
                    fact(_log, logging.CRITICAL, message, **died, quick_deaths=num_quick_deaths)
                    return self.stop(EXIT_ERROR)
                pause_s = min(_FIRST_PAUSE_S * 2 ** (num_quick_deaths - 1), _LONGEST_PAUSE_S)
                fact(_log, logging.ERROR, "shard has died and is restarted", **died, pause_s=pause_s)
            was_full = is_full
            if self._monitor is not None:
                self._monitor.note_died(shard, error or describe_exit(exit_code))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    @property
    def _can_follow(self) -> bool:
        """Whether a shard that was taken over can be of use where it is."""
        return self._config.log is not None and self._node is not None

    async def _stop_alone(self, shard: int, exit_code: int, why: str) -> None:
        """Let a shard be away for good."""
        self._stopped[shard] = exit_code
        self._sockets[shard].close()  # refuse its clients, so that they ask elsewhere
        if self._monitor is not None:
            self._monitor.note_stopped(shard, why)
        await self._check_ready()

    async def _run_once(self, shard: int, *, is_restart: bool) -> tuple[int, float | None, str | None]:
        """Run a shard's process once; return (exit code, seconds it was ready or None, last error it reported)."""
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
            metrics = await stack.enter_async_context(self._monitor.sampling(shard)) if self._monitor else None
            if metrics is not None:
                command += ["--metrics-fd", str(metrics.fileno())]
                inherit_fds.append(metrics.fileno())
            pipe = os.pipe()
            running = run_child(self._order(shard, pipe[1]), inherit_fds=inherit_fds, report_pipe=pipe, command=command)
            child = await stack.enter_async_context(running)
            if metrics is not None:
                metrics.close()  # now only the process has it
            yield child

    def _order(self, shard: int, report_fd: int) -> ShardOrder:
        return ShardOrder(
            config=ShardConfig.of_server(
                replace(self._config, follow=self._source_of(shard)),
                directory=self._data_dir.shard_path(shard),
                shard=shard,
                server_id=self._data_dir.manifest.server_id,
                local_shards=None if self._node is None else tuple(sorted(self._sockets)),
                is_standby=self._node is not None and shard in self._node.standbys,
                waits=self._config.standby or shard in self._following,
                predecessors=self._data_dir.manifest.predecessors,
                **self._places_of(shard),
            ),
            socket_fd=self._sockets[shard].fileno(),
            report_fd=report_fd,
            log_level=self._config.log_level,
            log_format=self._log_format,
        )

    def _source_of(self, shard: int) -> str | None:
        """Return whom a shard follows; a standby of a log in files follows its owner, wherever that is."""
        cluster, node = self._cluster, self._node
        if cluster is None or node is None:
            return self._config.follow
        follows = cluster.follow is not None or (cluster.log is None and shard in node.standbys)
        return cluster.sources_of(node, shard) if follows else None

    def _places_of(self, shard: int) -> dict[str, Any]:
        """Return what a shard's process is told of places: its own is here, also where the file has a standby."""
        cluster, node = self._cluster, self._node
        if cluster is None or node is None:
            return {"addresses": self._addresses}
        here = node.addresses[shard]
        addresses = (*cluster.addresses[:shard], here, *cluster.addresses[shard + 1 :])
        nodes = (*cluster.nodes_of_shards[:shard], node.name, *cluster.nodes_of_shards[shard + 1 :])
        return {"addresses": addresses, "nodes": nodes, "copies": cluster.copies}

    async def _follow(self, shard: int, child: ShardChild, *, is_restart: bool) -> tuple[float | None, str | None]:
        """Follow a child's reports to the last; return when it was ready, monotonic, and its last error."""
        started_s = time.monotonic()
        ready_s: float | None = None
        error: str | None = None
        detector = HangDetector(self._config.hang_timeout_s)
        while True:
            try:
                async with asyncio.timeout(_OPENING_NOTICE_S if ready_s is None else detector.interval_s):
                    report = await child.next_report()
            except TimeoutError:
                if ready_s is None:
                    fact(_log, logging.INFO, "shard is still opening", shard=shard, for_s=time.monotonic() - started_s)
                elif detector.look(has_run=child.nudge()) and not self._stopping.is_set():
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
                await self._on_ready(shard, child, report, is_restart=is_restart)

    def _kill_hung(self, shard: int, child: ShardChild, error: str | None) -> str:
        """Kill a child whose event loop does not run; return the explanation of its end."""
        timeout_s = self._config.hang_timeout_s
        hung = f"it hung: its event loop had not run for {format_seconds(timeout_s)}"
        message = "shard hangs and is killed" if error != hung else "shard was killed and is not gone yet"
        fact(_log, logging.ERROR, message, shard=shard, pid=child.pid, after_s=timeout_s)
        child.kill()
        return hung

    async def _on_ready(self, shard: int, child: ShardChild, report: ShardReport, *, is_restart: bool) -> None:
        self._ready.add(shard)
        message = "shard is ready again" if is_restart else "shard is ready"
        if report.is_standby:
            message = "shard stands by"
        fact(_log, logging.INFO, message, shard=shard, address=format_address(*self._addresses[shard]), pid=child.pid)
        await self._check_ready()

    async def _check_ready(self) -> None:
        """Say that the server is ready once all shards are that have not stopped for good."""
        # A standby that begins waits for another node, whose start may be waiting for this one.
        waited = self._sockets if self._node is None or self._config.log is not None else self._node.shards
        if not self._ready or self._stopping.is_set() or not self._ready | self._stopped.keys() >= set(waited):
            return
        try:
            if self._ready_file is not None:
                await asyncio.to_thread(self._ready_file.write, self._describe())
        except StorageError as exc:
            fact(_log, logging.CRITICAL, "the ready file cannot be written", error=str(exc))
            return self.stop(EXIT_ERROR)
        if not self._was_ready:
            self._was_ready = True
            fact(_log, logging.INFO, "server is ready", address=self.address, shards=len(self._ready))

    def _describe(self) -> dict[str, Any]:
        shards = [
            {"shard": shard, "address": format_address(*self._addresses[shard]), "pid": self._children[shard].pid}
            for shard in sorted(self._children)
        ]
        server: dict[str, Any] = {"address": self.address, "pid": os.getpid(), "shards": shards}
        if self._monitor is not None:
            server["metrics"] = self._monitor.address
        return server
