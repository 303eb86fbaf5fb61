"""What `headrace doctor` checks beyond its machine: a server's clock, the object store, the log's engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import counted
from headrace.schemas.errors import HeadraceError
from headrace.scripts.commands.finding import Finding, note, ok, problem

__all__ = ["check_clock", "check_log_engine", "check_object_store"]

_MAX_CLOCK_S = 1.0
_STORE_DEADLINE_S = 5.0


async def check_clock(dial: Dial, host: str, port: int) -> Finding:
    """Compare a server's clock with this machine's. Raises: HeadraceError: It does not answer."""
    client, _ = await dial.connect(host, port)
    async with client:
        began_s = time.time()
        theirs_us = (await dial.greet(client)).time_us
        ended_s = time.time()
    if theirs_us is None:
        return note("clock", "it does not tell its time, as replicas")
    # The server read its clock between our two readings.
    apart_s = max(began_s - theirs_us / 1e6, theirs_us / 1e6 - ended_s, 0.0)
    text = f"this clock and the server's are at least {apart_s:.3f} s apart, give or take {ended_s - began_s:.3f} s"
    advice = "Lags, expiry and --at time= are told by both: keep them with NTP."
    return problem("clock", text, advice) if apart_s > _MAX_CLOCK_S else ok("clock", text)


def check_object_store(url: str) -> Iterator[Finding]:
    """Check that an object store answers, and keeps an object that is there: puts a small one and deletes it."""
    subject, path = "object store", f"doctor/{secrets.token_hex(8)}"
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
    else:
        yield ok(subject, f"{url} answers, and keeps an object that is there")


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
