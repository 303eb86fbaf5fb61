"""A replica's process: binds its ports, builds a replica in a thread, answers Thrift and HTTP, drains and ends.

The ports are bound first. So a wrong port is found before anything is loaded, and health is visible from the start:
`/readyz` and `status` say that the replica is starting, and reads are refused as unavailable, so that clients retry.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from headrace.paramserver.replica.copy.array_replica import ArrayReplica
from headrace.paramserver.replica.endpoint.health import Readiness, SelfAudit
from headrace.paramserver.replica.endpoint.lookup_service import ReplicaService
from headrace.paramserver.replica.endpoint.metrics import replica_metrics
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.replica.tables.slot_rows import quantized_rows
from headrace.paramserver.rpc.address import bind_listener, format_address
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.rpc.security import Protection
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.event_loop import background_task, stop_requests
from headrace.paramserver.system.http_server import HttpServer, Page, Reply, Request
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import UnavailableError

__all__ = ["ReplicaProcess"]

_log = logging.getLogger(__name__)

_EXIT_OK, _EXIT_INTERRUPTED = 0, 130
# How often to measure the lag if nobody asks: an update counts as known from the next look on.
_LOOK_INTERVAL_S = 0.25
# Pauses between attempts to begin while the server is away.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class ReplicaProcess:
    """Runs a replica until it is stopped; each object runs once. Thread: the event loop's."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        environ: Mapping[str, str],
        ready_file: ReadyFile | None = None,
        watch_stdin: bool = False,
    ) -> None:
        """Load TLS files and tokens, perhaps from the environment; nothing is bound yet."""
        self._config = config
        self._protection = Protection.load(config, environ)
        self._server_token = config.load_server_token(environ)
        self._server_tls = config.server_tls_context()
        self._ready_file = ready_file
        self._is_announced = False  # as ready, when it had begun
        self._watch_stdin = watch_stdin
        self._readiness = Readiness(max_lag_s=config.max_lag_s)
        self._audit: SelfAudit | None = None
        self._stopping = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code. Errors in settings and of the first copy are raised."""
        config = self._config
        with contextlib.ExitStack() as stack:
            sock = self._bind(config.port, "--port", self._protection.is_complete or config.insecure_bind)
            stack.callback(sock.close)
            health = None if config.metrics_port is None else self._bind(config.metrics_port, "--metrics-port", True)
            if health is not None:
                stack.callback(health.close)
            on_stdin_end = (lambda: self._stop("stdin has ended")) if self._watch_stdin else None
            stack.enter_context(stop_requests(self._on_signal, on_stdin_end))
            if config.precision is not None:
                quantized_rows().use_one_thread()
            executor = stack.enter_context(ThreadPoolExecutor(config.lookup_threads, thread_name_prefix="lookup"))
            return await self._serve(sock, health, executor)

    def _bind(self, port: int, flag: str, is_open: bool) -> socket.socket:
        return bind_listener(self._config.host, port, taker="the replica", flag=flag, is_open=is_open)

    async def _serve(self, sock: socket.socket, health: socket.socket | None, executor: ThreadPoolExecutor) -> int:
        config = self._config
        host, port = config.client_host, sock.getsockname()[1]
        service = ReplicaService(self._readiness, address=(host, port), limits=config.limits, executor=executor)
        server = ThriftServer(
            service, limits=config.limits, ssl_context=self._protection.ssl_context, access=self._protection.access
        )
        service.server = server
        addresses = {"address": format_address(host, port)}
        fact(_log, logging.INFO, "replica starts", server=config.server, pid=os.getpid(), **addresses)
        async with contextlib.AsyncExitStack() as stack:
            if health is not None:
                addresses["health"] = format_address(host, health.getsockname()[1])
                await stack.enter_async_context(HttpServer(health, self._pages()))
            await server.start(sock)
            stack.push_async_callback(server.close, drain_s=config.drain_s)
            await stack.enter_async_context(background_task(self._keep_looking(), name="headrace-readiness"))
            replica = await self._until_stopped(self._begin())
            if replica is None:
                return _EXIT_OK
            try:
                self._readiness.replica = replica
                self._announce(replica, addresses)
                async with self._auditing(replica, service):
                    await self._stopping.wait()
                self._readiness.stop()
                await server.close(drain_s=config.drain_s)  # before the replica: running requests get answers
            finally:
                self._readiness.replica = None
                await asyncio.to_thread(replica.close)
                if self._ready_file is not None:
                    self._ready_file.remove()
        return _EXIT_OK

    @contextlib.asynccontextmanager
    async def _auditing(self, replica: ArrayReplica, service: ReplicaService) -> AsyncIterator[None]:
        """Audit the replica during the block, if the settings say so."""
        if (interval_s := self._config.audit_interval_s) is None:
            yield
            return
        self._audit = service.audit = SelfAudit(replica, interval_s=interval_s)
        async with background_task(self._audit.run(), name="headrace-audit"):
            yield

    def _announce(self, replica: ArrayReplica, addresses: dict[str, str]) -> None:
        state = self._readiness.look()
        self._is_announced = state.is_ready
        if state.is_ready:
            fact(_log, logging.INFO, "replica is ready", tables=len(replica.tables), step=replica.step, **addresses)
        else:
            fact(_log, logging.INFO, "replica has begun, and is not ready", why=state.failure, **addresses)
        if self._ready_file is not None:
            self._ready_file.write({**addresses, "pid": os.getpid()})

    def _pages(self) -> dict[str, Page]:
        async def alive(_: Request) -> Reply:
            return Reply(body=b"alive\n")

        async def ready(_: Request) -> Reply:
            state = self._readiness.look()
            if not state.is_ready:
                return Reply(status=503, body=f"not ready: {state.failure}\n".encode())
            (epoch, step), but = state.visible, "" if state.failure is None else f"; {state.failure}"
            return Reply(body=f"ready: epoch {epoch}, step {step}, {state.lag_s:.3f} s behind{but}\n".encode())

        async def metrics(_: Request) -> Reply:
            replica = self._readiness.replica
            if replica is None:
                return Reply(status=503, body=b"the replica has not begun yet\n")
            page = await asyncio.to_thread(replica_metrics, replica, self._audit)
            return Reply(body=page, content_type=CONTENT_TYPE_LATEST)

        return {"/healthz": alive, "/readyz": ready, "/metrics": metrics}

    async def _keep_looking(self) -> None:
        """Measure the lag regularly, and log when the replica becomes ready or ceases to be."""
        was_ready = was_ever_ready = False
        while True:
            state = self._readiness.look()
            if was_ready and not state.is_ready:
                fact(_log, logging.WARNING, "replica is not ready any more", why=state.failure)
            elif state.is_ready and not was_ready:
                level = logging.DEBUG if self._is_announced else logging.INFO
                message = "replica may be sent lookups"
                if was_ever_ready:  # close the warning that was logged before
                    level, message = logging.WARNING, "replica is ready again"
                fact(_log, level, message, step=state.visible[1])
            was_ready = state.is_ready
            was_ever_ready |= was_ready
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _begin(self) -> ArrayReplica:
        """Return a replica that has caught up; retry while the server is away and there is progress."""
        config, num_attempts = self._config, 1
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        progress_s = time.monotonic()

        def note_progress() -> None:
            nonlocal progress_s
            progress_s = time.monotonic()

        copies = self._readiness.starting = f"starting: it copies the tables of {config.server}"
        while True:
            try:
                return await _in_thread(lambda: self._open(note_progress))
            except UnavailableError as exc:
                trouble, pause_s = self._readiness.reach_log.trouble(), backoff.next_s()
                if time.monotonic() + pause_s > progress_s + config.start_timeout_s:
                    after = format_seconds(config.start_timeout_s)
                    raise UnavailableError(f"given up after {after} (--start-timeout-s): {trouble or exc}") from exc
                num_attempts += 1
                # Show the number: attempts that make progress before they fail never end.
                starting, level = f"{copies}, attempt {num_attempts}", logging.DEBUG
                if trouble is None:  # otherwise the reach log reports it, less often than each attempt
                    starting, level = f"{starting}; the one before failed: {exc}", logging.WARNING
                self._readiness.starting = starting
                fact(_log, level, "replica cannot begin yet", error=str(exc), pause_s=pause_s, attempt=num_attempts)
            await asyncio.sleep(pause_s)

    def _open(self, on_progress: Callable[[], None]) -> ArrayReplica:
        config = self._config
        return ArrayReplica(
            config.server,
            snapshot=config.snapshot,
            config=config.replica_config,
            open_timeout_s=config.start_timeout_s,  # the full time, however late the server came
            ssl_context=self._server_tls,
            server_hostname=config.server_hostname,
            token=self._server_token,
            reach_log=self._readiness.reach_log,
            on_progress=on_progress,
        )

    async def _until_stopped(self, work: Any) -> Any:
        """Return the result of some work; or cancel it and return None if the process stops first."""
        async with (
            background_task(work, name="headrace-begin") as working,
            background_task(self._stopping.wait(), name="headrace-stop") as stopping,
        ):
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            has_ended = working.done()
        # It may also have ended since, with a result that is the caller's to close.
        if working.cancelled() or (not has_ended and working.exception() is not None):
            return None
        return working.result()

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._stop(number.name)
            return
        fact(_log, logging.WARNING, "replica is stopped at once", signal=number.name)
        if self._ready_file is not None:
            self._ready_file.remove()
        os._exit(_EXIT_INTERRUPTED)  # nothing here is worth waiting for: the server has all rows

    def _stop(self, why: str) -> None:
        if not self._stopping.is_set():
            fact(_log, logging.INFO, "replica stops", why=why, drain_s=self._config.drain_s)
            self._stopping.set()


async def _in_thread(make: Callable[[], ArrayReplica]) -> ArrayReplica:
    """Return the replica that a function creates in a daemon thread; after a cancellation, close it."""
    # Not in the loop's executor, whose threads delay the exit: the server may never answer.
    made: concurrent.futures.Future[ArrayReplica] = concurrent.futures.Future()

    def work() -> None:
        try:
            replica = make()
        except BaseException as exc:
            if not made.cancelled():
                made.set_exception(exc)
            return
        if made.set_running_or_notify_cancel():
            made.set_result(replica)
        else:
            replica.close()

    threading.Thread(target=work, name="headrace-replica-begins", daemon=True).start()
    try:
        return await asyncio.shield(asyncio.wrap_future(made))
    except asyncio.CancelledError:
        if not made.cancel() and made.exception() is None:  # made, and not here yet
            await asyncio.to_thread(made.result().close)
        raise
