"""What the supervisor serves on its metrics port: Prometheus' page, the status page, and both as JSON.

One page for all shards: the supervisor asks each over its socket pair when somebody scrapes, and every few seconds for
the page's history.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from headrace.paramserver.metrics.metrics_channel import SampleAsker
from headrace.paramserver.metrics.metrics_families import ShardState, server_families
from headrace.paramserver.metrics.metrics_history import History
from headrace.paramserver.metrics.metrics_http import HttpServer, Page, Reply, Request
from headrace.paramserver.metrics.metrics_problems import find_problems
from headrace.paramserver.metrics.status_document import status_document
from headrace.paramserver.metrics.status_page import PAGE_FILES
from headrace.paramserver.process.log_format import fact
from headrace.paramserver.rpc.address import format_address
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["ServerMonitor", "expose"]

_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0


class _Once:
    """A collector of metrics that are made already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def expose(families: Sequence[Metric], accept: str = "") -> Reply:
    """Return Prometheus' page in the form that a scraper accepts."""
    encode, content_type = choose_encoder(accept)
    return Reply(body=encode(_Once(families)), content_type=content_type)


class ServerMonitor:
    """Asks the shards of one server, and answers on a socket.

    Thread: the event loop's.

    Attributes:
        history: Points of the last half hour.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        interval_s: float = _INTERVAL_S,
        timeout_s: float = 5.0,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Answer nothing yet.

        Args:
            sock: Bound; `serve` closes it.
            interval_s: Between two points of the history, seconds.
            timeout_s: How long a shard may take to answer, seconds.
            clock_s: Wall clock.
        """
        self._sock = sock
        self._address = format_address(*sock.getsockname()[:2])
        self._interval_s, self._timeout_s, self._clock_s = interval_s, timeout_s, clock_s
        self._addresses: Sequence[str] = ()
        self._askers: dict[int, SampleAsker] = {}
        self._num_starts: dict[int, int] = {}
        self.history = History()

    @property
    def address(self) -> str:
        """Host and port that are answered on."""
        return self._address

    @contextlib.asynccontextmanager
    async def serve(self, addresses: Sequence[str]) -> AsyncIterator[None]:
        """Answer while this lasts.

        Args:
            addresses: Host and port of each shard.
        """
        self._addresses = addresses
        pages: dict[str, Page] = {
            "/": _file("index.html"),
            "/status.css": _file("status.css"),
            "/status.js": _file("status.js"),
            "/status.json": self._tell_status,
            "/history.json": self._tell_history,
            "/metrics": self._tell_metrics,
            "/healthz": _tell_alive,
        }
        async with HttpServer(self._sock, pages):
            keeping = asyncio.create_task(self._keep_history(), name="headrace-metrics-history")
            try:
                yield
            finally:
                keeping.cancel()
                await asyncio.wait([keeping])

    @contextlib.asynccontextmanager
    async def asking(self, shard: int) -> AsyncIterator[socket.socket]:
        """Ask a shard's process while this lasts; yield the socket that it inherits, which the caller closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            async with SampleAsker(ours, timeout_s=self._timeout_s) as asker:
                self._askers[shard] = asker
                self._num_starts[shard] = self._num_starts.get(shard, 0) + 1
                try:
                    yield theirs
                finally:
                    del self._askers[shard]

    async def states(self) -> list[ShardState]:
        """Return what each shard tells now."""
        return list(await asyncio.gather(*(self._ask(shard) for shard in range(len(self._addresses)))))

    async def _ask(self, shard: int) -> ShardState:
        sample, error = None, None
        try:
            if (asker := self._askers.get(shard)) is None:
                raise UnavailableError("its process is not running")
            sample = await asker.ask()
        except HeadraceError as exc:
            error = str(exc)
        return ShardState(
            shard=shard,
            address=self._addresses[shard],
            sample=sample,
            error=error,
            num_restarts=max(self._num_starts.get(shard, 0) - 1, 0),
        )

    async def _keep_history(self) -> None:
        while True:
            try:
                self.history.add(await self.states(), self._clock_s())
            except Exception as exc:  # a bug of ours: the server goes on without a page's curves
                fact(_log, logging.ERROR, "no figures for the status page", error=repr(exc))
            await asyncio.sleep(self._interval_s)

    async def _tell_metrics(self, request: Request) -> Reply:
        return expose(list(server_families(await self.states())), request.headers.get("accept", ""))

    async def _tell_status(self, request: Request) -> Reply:
        states = await self.states()
        problems = [problem.to_json() for problem in find_problems(states)]
        history = self.history.to_json(newest_only=True)
        return _json({"time_s": self._clock_s(), "problems": problems, "history": history, **status_document(states)})

    async def _tell_history(self, request: Request) -> Reply:
        return _json(self.history.to_json())


def _file(name: str) -> Page:
    content_type, body = PAGE_FILES[name]

    async def tell(request: Request) -> Reply:
        return Reply(body=body, content_type=content_type)

    return tell


async def _tell_alive(request: Request) -> Reply:
    return Reply(body=b"alive\n")


def _json(value: Any) -> Reply:
    return Reply(body=json.dumps(value).encode(), content_type="application/json")
