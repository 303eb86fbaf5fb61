"""The failover figures of `headrace bench replicated`: how long a shard with a replicated log is nobody's.

Two nodes own a shard each and stand by for the other's. A trainer streams to them all the time, and a replica answers
lookups. Then a shard is moved by its operator; or its node dies; or its node dies together with the server that leads
the shard's stream. What died comes back before the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from headrace.paramserver.log.jetstream.nats_address import NatsLogAddress
from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl
from headrace.scripts.benches.child import Child
from headrace.scripts.benches.clients import CALM_S, paced_trainer, steady_replica
from headrace.scripts.benches.harness import OnStage, Rounds
from headrace.scripts.benches.nats_servers import NatsServers
from headrace.scripts.commands.shard import move_shard

__all__ = ["measure_failovers"]

_T = TypeVar("_T")

_KINDS = ("planned", "node", "leader")
_NUM_SHARDS = 2
_PORT = 7601
_NUM_ROWS, _DIM, _ROWS_PER_S = 20_000, 32, 10_000
_TIMEOUT_S = 120.0
_ASK_TIMEOUT_S = 1.0
_POLL_S = 0.02


def measure_failovers(folder: Path, num_failovers: int, num_clusters: int, on_stage: OnStage) -> dict[str, Any]:
    """Return `failover_…_p99_s` of each kind, `step_during_failover_ratio` and `failed_lookups`.

    A failover takes from the fault to the first ack of a step that the trainer made later; a planned one is the longest
    time without an ack meanwhile. It is made of waits, so several clusters, each with servers of NATS of its own, may
    have theirs at the same time.
    """
    values, looked = Rounds(), Rounds()
    numbers = iter(range(num_failovers))  # shared

    def run(place: Path) -> None:
        place.mkdir()
        with (
            NatsServers(place) as servers,
            _Cluster(place, servers) as cluster,
            paced_trainer(cluster.address, num_rows=_NUM_ROWS, dim=_DIM, rows_per_s=_ROWS_PER_S) as trainer,
            steady_replica(cluster.address, num_rows=_NUM_ROWS) as replica,
        ):
            for number in numbers:
                for kind in _KINDS:
                    on_stage(f"failover {number + 1} of {num_failovers}: {kind}")
                    began_s, ended_s = _fail_over(values, kind, cluster, trainer)
                    seen = replica.ask(began_s=began_s, ended_s=ended_s, timeout_s=_TIMEOUT_S)
                    for name in ("num_lookups", "num_failed"):
                        looked.add(name, seen[name])

    num_clusters = min(num_clusters, num_failovers)
    with ThreadPoolExecutor(num_clusters, "bench-failover") as pool:
        runs = [pool.submit(run, folder / f"cluster-{number}") for number in range(num_clusters)]
        try:
            for each in as_completed(runs):
                each.result()
        finally:
            list(numbers)  # if one has failed, the others end too
    return {
        **{f"failover_{kind}_p99_s": float(np.percentile(values[kind], 99)) for kind in _KINDS},
        **{f"failover_{kind}_p50_s": median(values[kind]) for kind in _KINDS},
        "step_during_failover_ratio": values.ratio("step_during_s", "step_calm_s"),
        "step_during_failover_ms": median(values["step_during_s"]) * 1000,
        "step_before_failover_ms": median(values["step_calm_s"]) * 1000,
        "failed_lookups": sum(looked["num_failed"]),
        "num_lookups": sum(looked["num_lookups"]),
        "failovers_s": {kind: values[kind] for kind in _KINDS},
    }


def _fail_over(values: Rounds, kind: str, cluster: _Cluster, trainer: Child) -> tuple[float, float]:
    """Make one fault, time it, and bring back what has died; return when it began and was over, monotonic."""
    cluster.wait_whole()
    time.sleep(CALM_S)
    owner = cluster.owner(0)
    leader = cluster.leader(0)
    if kind == "leader":
        leader.kill()
    began_s = time.monotonic()
    if kind == "planned":
        cluster.move(0, owner)
    else:
        cluster.kill(owner)
    # A planned failover is over when the command says so: what is acked before may be the old owner's.
    sure_s = time.monotonic() if kind == "planned" else began_s
    seen = trainer.ask(began_s=began_s, sure_s=sure_s, timeout_s=_TIMEOUT_S)
    values.add(kind, seen["longest_s"] if kind == "planned" else seen["acked_s"] - began_s)
    for name in ("step_during_s", "step_calm_s"):
        for took_s in seen[name]:
            values.add(name, took_s)
    if kind == "leader":
        leader.start()
        leader.wait_ready()
    if kind != "planned":
        cluster.start(owner)
    return began_s, seen["acked_s"]


class _Cluster:
    """Two nodes of a server; use it with `with`.

    Attributes:
        address: One shard of each.
    """

    def __init__(self, folder: Path, servers: NatsServers) -> None:
        self._folder, self._servers, self._server_id = folder, servers, str(uuid.uuid4())
        net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"  # nobody else listens there
        self._hosts = {"a": f"{net}.101", "b": f"{net}.102"}
        self._running: dict[str, ServerProcess] = {}
        self.address = ",".join(format_address(host, _PORT) for host in self._hosts.values())
        nodes = {
            name: {"host": host, "port": _PORT, "shards": [number], "standbys": [1 - number]}
            for number, (name, host) in enumerate(self._hosts.items())
        }
        values = {"server_id": self._server_id, "shards": _NUM_SHARDS, "log": servers.url, "nodes": nodes}
        self._file = folder / "cluster.json"
        self._file.write_text(json.dumps(values))

    def __enter__(self) -> _Cluster:
        try:
            for name in self._hosts:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.ExitStack() as stack:
            for server in self._running.values():
                stack.callback(server.close)

    def start(self, name: str) -> None:
        """Start a node, and return when it owns its shards or stands by for them."""
        self._running[name] = ServerProcess.start(
            self._folder / f"node-{name}",
            port=None,
            cluster=self._file,
            node=name,
            log_monitor=",".join(self._servers.monitors),
            log_max_bytes="512MiB",
            block_cache_bytes="64MiB",
            memtable_bytes="24MiB",
        )

    def kill(self, name: str) -> None:
        """Kill all processes of a node at once."""
        server = self._running.pop(name)
        os.kill(server.pid, signal.SIGSTOP)  # or it would start a shard again while the others are killed
        for pid in server.shard_pids:
            os.kill(pid, signal.SIGKILL)
        server.close()

    def move(self, shard: int, owner: str) -> None:
        """Move a shard to the other node, as an operator does."""
        target = next(name for name in self._hosts if name != owner)
        asyncio.run(move_shard(StatusAccess.load(self.address, timeout_s=10.0), shard, target))

    def leader(self, shard: int) -> Any:
        """Return the server that leads a shard's stream."""
        stream = NatsLogAddress.parse(self._servers.url).stream_name(self._server_id, shard)
        return self._servers.wait_leader(stream)

    def owner(self, shard: int) -> str:
        """Return the name of the node that owns a shard, once there is one."""
        return self._until(lambda: self._copies(shard).get(shard), f"shard {shard} has no owner")

    def wait_whole(self) -> None:
        """Wait until each shard has an owner and a standby: the node that has lost one starts that again."""
        for shard in range(_NUM_SHARDS):
            self._until(partial(self._is_whole, shard), f"shard {shard} has no standby")

    def _is_whole(self, shard: int) -> bool:
        return len(self._copies(shard)) == len(self._hosts)

    def _until(self, find: Callable[[], _T | None], failure: str) -> _T:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not (found := find()):
            if time.monotonic() > deadline_s:
                raise UnavailableError(failure)
            time.sleep(_POLL_S)
        return found

    def _copies(self, shard: int) -> dict[int, str]:
        """Return the nodes of a shard's copies that answer: by the shard's number its owner's, by -1 its standby's."""
        dial = StatusAccess.load(self.address, timeout_s=_ASK_TIMEOUT_S).dial(idl.Role.ADMIN)
        found: dict[int, str] = {}
        for number, (name, host) in enumerate(self._hosts.items()):
            port = _PORT + (shard != number)  # a node's own shard has its first port
            with contextlib.suppress(UnavailableError):
                found[asyncio.run(dial.ask(host, port)).shard] = name
        return found
