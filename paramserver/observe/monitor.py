"""Serve the supervisor's metrics port: Prometheus metrics, the status page, and the page's data as JSON.

One port covers all shards of this node. The supervisor samples each over its socket pair on every request, and every
few seconds for the page's charts. The page also has the shards of a cluster's other nodes, which are asked when
somebody looks; metrics have not, because Prometheus scrapes each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from headrace.paramserver.observe.families import server_families
from headrace.paramserver.observe.problems import find_problems
from headrace.paramserver.observe.sample import (
    SampleReceiver,
    ShardState,
    TableSample,
    all_followers,
    merge_dense,
    merge_tables,
    merge_writers,
    receive_samples,
)
from headrace.paramserver.observe.status_page import PAGE_FILES
from headrace.paramserver.observe.status_query import OtherNodes
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.http_server import HttpServer, Page, Reply, Request
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["History", "ServerMonitor", "expose"]

_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0
# Figures of a shard at each point of the charts; a shard that did not answer has no row.
_OF_SHARD = ("shard", "log_seq", "applied_seq", "num_rows_written", "num_refused", "inflight_bytes", "num_connections")
_OF_DETAIL = ("apply_lag_s", "num_requests", "log_written_bytes", "backlog_bytes", "memory_bytes", "cpu_s")


def expose(families: Sequence[Metric], accept: str = "") -> Reply:
    """Return Prometheus' text of metrics in the form that a scraper accepts."""
    encode, content_type = choose_encoder(accept)
    return Reply(body=encode(SimpleNamespace(collect=lambda: families)), content_type=content_type)


class History:
    """The last half hour of a server's figures, for the status page's charts. Not thread-safe."""

    def __init__(self, num_points: int = 360) -> None:
        """Keep this many points, dropping the oldest; each costs about 100 bytes a shard."""
        self._points: deque[dict[str, Any]] = deque(maxlen=num_points)

    def add(self, states: Sequence[ShardState], time_s: float) -> None:
        """Add the states of all shards at a wall-clock time, seconds since 1970."""
        samples = [state.sample for state in states if state.sample is not None]
        rows = [
            [*(getattr(s, name) for name in _OF_SHARD), *(getattr(s.detail, name, None) for name in _OF_DETAIL)]
            for s in samples
        ]
        delays = [sample.detail.apply_delay for sample in samples if sample.detail is not None]
        counts = [sum(parts) for parts in zip(*(delay.counts for delay in delays), strict=True)]
        self._points.append({"time_s": round(time_s, 3), "shards": rows, "delay_counts": counts})

    def to_json(self, *, newest_only: bool = False) -> dict[str, Any]:
        """Return all points, or only the newest, in a form for `json`."""
        points = list(self._points)
        return {"columns": (*_OF_SHARD, *_OF_DETAIL), "points": points[-1:] if newest_only else points}


class ServerMonitor:
    """Samples the shards of one server and serves the results over HTTP.

    Thread: the event loop's.

    Attributes:
        address: Host and port of the metrics port.
        history: The last half hour.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        interval_s: float = _INTERVAL_S,
        timeout_s: float = 5.0,
        clock_s: Callable[[], float] = time.time,
        others: OtherNodes | None = None,
    ) -> None:
        """Prepare to serve on a bound socket, which `serve` closes.

        `interval_s` lies between points of the history; a shard that takes longer than `timeout_s` has no sample.
        `others` are the other nodes of a cluster.
        """
        self._sock = sock
        self.address = format_address(*sock.getsockname()[:2])
        self._interval_s, self._timeout_s, self._clock_s = interval_s, timeout_s, clock_s
        self._others, self._addresses = others, dict[int, str]()
        self._receivers: dict[int, SampleReceiver] = {}
        self._num_starts: dict[int, int] = {}
        self._stopped: dict[int, str] = {}
        self._last_errors: dict[int, str] = {}
        self.history = History()

    @contextlib.asynccontextmanager
    async def serve(self, addresses: Mapping[int, str]) -> AsyncIterator[None]:
        """Serve until the block ends; `addresses` are host and port of each shard that runs here."""
        self._addresses = dict(addresses)
        pages: dict[str, Page] = {
            "/": _static(*PAGE_FILES["index.html"]),
            "/status.css": _static(*PAGE_FILES["status.css"]),
            "/status.js": _static(*PAGE_FILES["status.js"]),
            "/status.json": self._status_page,
            "/history.json": self._history_page,
            "/metrics": self._metrics_page,
            "/healthz": _static("text/plain; charset=utf-8", b"alive\n"),
        }
        keeping = background_task(self._keep_history(), name="headrace-metrics-history")
        async with HttpServer(self._sock, pages), keeping:
            yield

    @contextlib.asynccontextmanager
    async def sampling(self, shard: int) -> AsyncIterator[socket.socket]:
        """Sample a shard's process until the block ends; yield the socket that it inherits and the caller closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            async with receive_samples(ours, timeout_s=self._timeout_s) as receiver:
                self._receivers[shard] = receiver
                self._num_starts[shard] = self._num_starts.get(shard, 0) + 1
                self._last_errors.pop(shard, None)
                try:
                    yield theirs
                finally:
                    del self._receivers[shard]

    def note_stopped(self, shard: int, why: str) -> None:
        """Say from now on that a shard has stopped, which nothing but a restart of the server changes, and why."""
        self._stopped[shard] = why

    def note_died(self, shard: int, why: str) -> None:
        """Say why a shard's process has ended, until another one runs."""
        self._last_errors[shard] = why

    async def states(self) -> list[ShardState]:
        """Return the present state of each shard of this node."""
        return list(await asyncio.gather(*(self._state_of(shard) for shard in self._addresses)))

    async def _states_of_all(self) -> list[ShardState]:
        if self._others is None:
            return await self.states()
        own, others = await asyncio.gather(self.states(), self._others.ask())
        return _one_a_shard([*own, *others])

    async def _state_of(self, shard: int) -> ShardState:
        sample, error = None, None
        try:
            if shard in self._stopped:
                raise UnavailableError(f"it has stopped for good: {self._stopped[shard]}")
            if (receiver := self._receivers.get(shard)) is None:
                why = self._last_errors.get(shard)
                raise UnavailableError("its process is not running" + (f": {why}" if why else ""))
            sample = await receiver.ask()
        except HeadraceError as exc:
            error = str(exc)
        return ShardState(
            shard=shard,
            address=self._addresses[shard],
            node=None if self._others is None else self._others.node,
            sample=sample,
            error=error,
            num_restarts=max(self._num_starts.get(shard, 0) - 1, 0),
            is_stopped=shard in self._stopped,
        )

    async def _keep_history(self) -> None:
        while True:
            try:
                self.history.add(await self.states(), self._clock_s())
            except Exception as exc:  # a bug of ours must cost only the charts, not the server
                fact(_log, logging.ERROR, "no figures for the status page", error=repr(exc))
            await asyncio.sleep(self._interval_s)

    async def _metrics_page(self, request: Request) -> Reply:
        return expose(list(server_families(await self.states())), request.headers.get("accept", ""))

    async def _status_page(self, request: Request) -> Reply:
        states = await self._states_of_all()
        problems = [problem.to_json() for problem in find_problems(states)]
        history = self.history.to_json(newest_only=True)
        node = None if self._others is None else self._others.node
        head = {"time_s": self._clock_s(), "node": node, "problems": problems, "history": history}
        return _json({**head, **_status(states)})

    async def _history_page(self, request: Request) -> Reply:
        return _json(self.history.to_json())


def _one_a_shard(states: Sequence[ShardState]) -> list[ShardState]:
    """Return one state of each shard, in order: its owner's; else that of a copy that answers, or any."""

    def rank(state: ShardState) -> int:
        if state.sample is None:
            return 0
        return 1 if state.sample.following is not None else 2

    best: dict[int, ShardState] = {}
    for state in states:
        if state.shard not in best or rank(state) > rank(best[state.shard]):
            best[state.shard] = state
    return [best[shard] for shard in sorted(best)]


def _status(states: Sequence[ShardState]) -> dict[str, Any]:
    samples = [state.sample for state in states if state.sample is not None]
    detail = next((sample.detail for sample in samples if sample.detail is not None), None)
    return {
        "server_id": samples[0].server_id if samples else None,
        "version": samples[0].version if samples else None,
        "shards": [_shard(state) for state in states],
        "tables": [_table(table) for table in merge_tables(samples)],
        "dense": [dataclasses.asdict(part) for part in merge_dense(samples)],
        "writers": [dataclasses.asdict(writer) for writer in merge_writers(samples)],
        "followers": [{"shard": shard, **dataclasses.asdict(each)} for shard, each in all_followers(samples)],
        "snapshot": dataclasses.asdict(detail.snapshot) if detail is not None and detail.snapshot is not None else None,
    }


def _shard(state: ShardState) -> dict[str, Any]:
    figures = state.sample.plain_json() if state.sample is not None else {}
    for name in ("server_id", "version", "num_shards", "shard"):
        figures.pop(name, None)
    if figures.get("expiry"):
        del figures["expiry"]["scanned"]  # the page has never had it
    names = ("shard", "node", "address", "error", "num_restarts")
    return {**{name: getattr(state, name) for name in names}, **figures}


def _table(table: TableSample) -> dict[str, Any]:
    spec = table.spec
    shape = {"fqn": spec.fqn, "num_rows": spec.num_rows, "dim": spec.dim, "dtype": table.dtype}
    rows = {"num_rows_estimate": table.num_rows_estimate, "owner": table.owner, "lacks": table.lacks}
    return {**shape, "states": table.states, **rows}


def _static(content_type: str, body: bytes) -> Page:
    async def page(request: Request) -> Reply:
        return Reply(body=body, content_type=content_type)

    return page


def _json(value: Any) -> Reply:
    return Reply(body=json.dumps(value).encode(), content_type="application/json")
