"""What `headrace doctor` checks beyond its machine: other nodes, their clocks, the object store, the log's engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.archive.objects import shards_of
from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.log.claims import check_copy, highest_claim
from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import counted
from headrace.schemas.errors import GoneError, HeadraceError, UnavailableError
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.scripts.commands.finding import Finding, note, ok, problem

__all__ = ["MAX_CLOCK_S", "check_claims", "check_log_engine", "check_nodes", "check_object_store"]

MAX_CLOCK_S = 1.0
"""Clocks that are further apart are a problem."""
# The shortest of a few round trips has the least error.
_NUM_ROUNDS = 3
_STORE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Clock:
    """How far a clock is ahead of this machine's, and by how much that may be wrong, seconds."""

    ahead_s: float
    error_s: float


def check_nodes(cluster: ClusterFile, node: ClusterNode, dial: Dial) -> Iterator[Finding]:
    """Ask the other nodes' shards who they are, and compare the clocks.

    A name that is not known, a firewall, certificates that do not fit and another server are found.
    """
    for line in cluster.unknown_hosts():
        yield problem("cluster", line, "Clients and the other nodes look it up, too: correct it, or the name service.")
    others = [shard for shard in range(cluster.num_shards) if shard not in node.shards]
    answers = asyncio.run(_ask_all([cluster.addresses[shard] for shard in others], dial))
    num_found, clocks = 0, dict[str, list[_Clock]]()
    for shard, answer in zip(others, answers, strict=True):
        name, where = cluster.node_of(shard).name, format_address(*cluster.addresses[shard])
        if isinstance(answer, UnavailableError):
            yield note("cluster", f"node {name}, shard {shard}: {answer}", "Fine while that node is not started.")
            continue
        if isinstance(answer, HeadraceError):
            advice = "The nodes cannot tell each other where shards are: see docs/security.md, Several hosts."
            yield problem("cluster", f"node {name}, shard {shard}: {answer}", advice)
            continue
        reply, clock = answer
        if (reply.server_id, reply.shard) != (cluster.server_id, shard):
            text = (
                f"node {name}: {where} is shard {reply.shard} of server {reply.server_id}, not this one's shard {shard}"
            )
            yield problem("cluster", text, "Give all nodes the same cluster file, and each a port of its own.")
            continue
        num_found += 1
        if clock is not None:
            clocks.setdefault(name, []).append(clock)
    if others and num_found == len(others):
        yield ok("cluster", f"the other nodes' {counted(num_found, 'shard')} answer{'s' * (num_found == 1)}")
    for name, of_node in clocks.items():
        yield _judge_clock(name, min(of_node, key=lambda clock: clock.error_s))


async def _ask_all(addresses: Sequence[tuple[str, int]], dial: Dial) -> list[Any]:
    """Return of each shard its hello and clock, or the error."""

    async def ask(host: str, port: int) -> Any:
        try:
            return await _ask(dial, host, port)
        except HeadraceError as exc:
            return exc

    return list(await asyncio.gather(*(ask(*address) for address in addresses)))


async def _ask(dial: Dial, host: str, port: int) -> tuple[Any, _Clock | None]:
    client, reply = await dial.connect(host, port)
    best: _Clock | None = None
    async with client:
        for _ in range(_NUM_ROUNDS if reply.time_us is not None else 0):  # not of an earlier release
            began_s, began = time.time(), time.monotonic()
            reply = await dial.greet(client)
            half_s = (time.monotonic() - began) / 2
            clock = _Clock(reply.time_us / 1e6 - (began_s + half_s), half_s)
            best = clock if best is None or clock.error_s < best.error_s else best
    return reply, best


def _judge_clock(name: str, clock: _Clock) -> Finding:
    apart_s, error_s = abs(clock.ahead_s), clock.error_s
    side = "ahead of" if clock.ahead_s > 0 else "behind"
    digits = 3 if error_s < 1 else 0
    text = f"node {name}'s clock is {apart_s:.{digits}f} s {side} this one, give or take {error_s:.{digits}f} s"
    if apart_s - error_s > MAX_CLOCK_S:
        return problem("clock", text, "Lags, expiry and --at time= are told by all of them: keep them with NTP.")
    return ok("clock", text)


def check_object_store(url: str) -> Iterator[Finding]:
    """Check that an object store answers, and that it keeps an object that is there: claims and snapshots need that.

    Puts one small object and deletes it.
    """
    subject, path = "object store", f"doctor/{secrets.token_hex(8)}"
    began_s = time.monotonic()
    try:
        store = ObjectStore.of_url(url, deadline_s=_STORE_DEADLINE_S)
        try:
            store.put_if_absent(path, b"first")
            found = store.put_if_absent(path, b"second")
        finally:
            with contextlib.suppress(HeadraceError):  # the first error says more
                store.delete(path)
    except HeadraceError as exc:
        advice = "Credentials, the URL, the network; without it no new shard starts, and nothing is archived."
        yield problem(subject, str(exc), advice)
        return
    if found != b"first":
        text = f"{url}: a put that must not replace an object has replaced it"
        yield problem(subject, text, "Take one with conditional puts (If-None-Match): two copies of a shard may run.")
        return
    took_s = time.monotonic() - began_s
    yield ok(subject, f"{url} answers, and keeps an object that is there; four requests took {took_s:.2f} s")


def check_claims(url: str, cluster: ClusterFile, node: ClusterNode, data: Path) -> Iterator[Finding]:
    """Compare who has claimed the shards with the cluster file and with the directory of this node."""
    subject = "claims"
    num_claimed, has_problem = 0, False
    try:
        store = ObjectStore.of_url(url, deadline_s=_STORE_DEADLINE_S)
        with contextlib.suppress(GoneError):
            if (made_with := shards_of(store)[1]) != cluster.first_shards:
                made = counted(made_with, "shard")
                text = f"{url} has a server made with {made}, and {cluster.path} has {cluster.first_shards}"
                yield problem(subject, text, "Each server needs a prefix of its own.")
                return
        for shard in range(cluster.num_shards):
            try:
                claim = highest_claim(store, shard)
                if shard in node.shards:
                    check_copy(store, data / shard_folder(shard), server_id=cluster.server_id, shard=shard)
            except (UnavailableError, GoneError):
                raise
            except HeadraceError as exc:
                has_problem = True
                yield problem(subject, f"shard {shard}: {exc}", "`headrace serve` would not start.")
                continue
            if claim is None:
                continue
            num_claimed += 1
            owner = cluster.node_of(shard)
            if claim.server_id != cluster.server_id:
                has_problem = True
                text = f"{url} has shard {shard} of server {claim.server_id}, and {cluster.path} is of another server"
                yield problem(subject, text, "Each server needs a prefix of its own.")
            elif claim.owner != f"node {owner.name} ({format_address(*owner.addresses[shard])})":
                text = f"shard {shard}, of node {owner.name} in {cluster.path}, is in {claim}"
                yield note(subject, text, "Fine while it is being moved; otherwise a node runs by another file.")
    except HeadraceError as exc:
        yield problem(subject, str(exc), "Who may run which shard is not known until the object store answers.")
        return
    if not has_problem:
        shards = counted(cluster.num_shards, "shard")
        yield ok(subject, f"{num_claimed} of {shards} claimed, and this node may start its own")


def check_log_engine(access: NatsAccess, monitors: Sequence[str]) -> Iterator[Finding]:
    """Check the servers of a replicated log and its streams, as `headrace serve` does. Nothing is made or changed.

    Args:
        access: How to reach them.
        monitors: URLs of all servers' monitoring; empty takes the default port.
    """
    subject = "log"
    try:
        access.check()
        from headrace.paramserver.log.jetstream.engine_checks import inspect_engine

        facts = asyncio.run(inspect_engine(access, monitors=monitors))
    except HeadraceError as exc:
        yield problem(subject, str(exc), "`headrace serve` would not start.")
        return
    for fault in facts.faults:
        yield problem(subject, fault.text, fault.advice)
    if not facts.faults:
        servers = f"{counted(len(facts.servers), 'server')} of version {facts.version} or newer"
        streams = counted(len(facts.streams), "stream")
        yield ok(subject, f"{access.address}: {servers} sync each message; {streams} as they must be")
        if access.address.num_replicas == 1:
            yield note(subject, "replicas=1: the log is on one server alone", "To survive its loss: three servers.")
