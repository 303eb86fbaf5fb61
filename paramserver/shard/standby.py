"""A shard before it owns its replicated log: it follows the log into its store, and opens when it may.

A start never takes a shard from an owner that lives. It opens at once if the last owner was at its own address, which
no other process has; otherwise when the log has been silent for some seconds, though owners write each second. Whoever
wants a shard elsewhere sooner moves it (`headrace promote`): its owner offers it in the log, and answers nobody from
then on; the standby opens when it has read that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from importlib import metadata
from typing import Any

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.interface import ReplicatedLog
from headrace.paramserver.observe.sample import ShardSample
from headrace.paramserver.rpc.address import parse_addresses
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.paramserver.shard.sampler import sample_log
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import CorruptionError, GoneError, HeadraceError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["Standby", "copies_to_idl", "restore_hint", "standby_places"]

_log = logging.getLogger(__name__)

# As long as a log takes refusals for old knowledge.
_VERSION = metadata.version("headrace")  # of what runs here, whatever is installed by now
_REACH_S = 30.0
_RETRY_S = 0.2


class Standby:
    """The service of a shard that another process owns.

    Thread: the event loop's.

    Attributes:
        stands: Set once the shard waits for somebody else's silence, or offer.
    """

    def __init__(self, config: ShardConfig, log: ReplicatedLog, ingest: Ingest, *, above_term: int = 0) -> None:
        """Follow `log` with `ingest`; `own` does the work. The term that it takes is above `above_term`."""
        self._config, self._log, self._ingest, self._above_term = config, log, ingest, above_term
        self.stands = asyncio.Event()
        self._started_s = time.monotonic()

    @property
    def num_behind(self) -> int:
        """Records that are committed, and known here, and not applied."""
        return max(0, self._log.last_seq - self._ingest.submitted_seq)

    async def own(self) -> None:
        """Follow the log until this process owns it and has applied all of it.

        Raises:
            CorruptionError: The store does not belong to the log, or lacks records that the log has removed.
            HeadraceError: The log cannot be followed.

        Cancellation: it may own the log all the same; the next start finds out.
        """
        await self._wait_reached()
        while True:
            is_silent = False
            await self._apply()
            while not self._may_open(is_silent=is_silent):
                self.stands.set()
                seen_seq = self._log.last_seq
                is_silent = await self._wait()
                await self._apply()
                is_silent = is_silent and self._log.last_seq == seen_seq  # its owner may have come back just now
            if await self._take_over():
                break
        await self._log.wait_beyond(self._ingest.submitted_seq)
        await self._apply()  # the record that says so, before anything is served
        fact(_log, logging.INFO, "shard owns its log", term=self._log.term, seq=self._ingest.submitted_seq)

    async def _wait_reached(self) -> None:
        """Wait until the log is known as far as the store has applied it: what a server says may be old."""
        applied_seq = self._ingest.submitted_seq
        while self._log.last_seq < applied_seq:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REACH_S):
                    await self._first_of(self._beyond(applied_seq - 1))
                    return
            state = await self._log.engine_state()
            if state is not None and state.is_healthy and state.last_seq < applied_seq:
                raise CorruptionError(
                    f"the store of shard {self._config.shard} has seq {applied_seq} applied, and its stream ends at "
                    f"seq {state.last_seq}, with all servers well: it is another stream, or has lost records; see "
                    "docs/replicated-log.md"
                )

    async def _take_over(self) -> bool:
        """Return whether this process owns the log now; if not, apply what has come, and look again."""
        applied_seq = self._ingest.submitted_seq
        state = await self._log.engine_state()
        try:
            # To try it interrupts reading.
            if (state is None or state.last_seq <= applied_seq) and await self._log.take_over(
                applied_seq, owner=self._config.address, above_term=self._above_term
            ):
                return True
        except UnavailableError as exc:  # whether it worked shows when the log is read
            fact(_log, logging.WARNING, "shard cannot take its log over yet", error=str(exc))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._log.wait_beyond(applied_seq)
            return False
        # There is another record. Over a slow link, or behind much else, it takes long to come.
        await self._first_of(self._beyond(applied_seq))
        return False

    def _may_open(self, *, is_silent: bool) -> bool:
        """Return whether to take over behind what is applied: then this is the last word about the owner."""
        if self._ingest.submitted_seq < self._log.last_seq:
            return False
        if self._ingest.offer is not None:
            return is_silent or self._ingest.offer.to == self._config.address
        if not self._log.term:
            return not (self._config.is_standby or self._config.waits)
        return is_silent or (self._log.owner == self._config.address and not self._config.waits)

    async def _wait(self) -> bool:
        """Wait for records or for silence; return whether it was silence."""
        silent = asyncio.create_task(self._log.wait_silent(), name="headrace-log-silence")
        await self._first_of(silent, self._beyond(self._ingest.submitted_seq))
        return silent.done() and not silent.cancelled()

    def _beyond(self, seq: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._log.wait_beyond(seq), name="headrace-log-follow")

    async def _first_of(self, *waiting: asyncio.Task[None]) -> None:
        """Wait for one of some tasks, and cancel the others; raise what ends the log, if that comes first."""
        failing = asyncio.create_task(self._log.wait_failed(), name="headrace-log-failed")
        tasks: list[asyncio.Task[Any]] = [*waiting, failing]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise self._named(failing.result())
            for task in waiting:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _named(self, error: HeadraceError) -> HeadraceError:
        """Return an error of log or store with what to do about it."""
        if isinstance(error, GoneError | CorruptionError):
            return CorruptionError(f"{error}; to make this copy of the shard anew: {restore_hint(self._config)}")
        return error

    async def _apply(self) -> None:
        try:
            await self._ingest.recover()
        except (GoneError, CorruptionError) as exc:
            raise self._named(exc) from exc

    # Methods of the service.

    async def hello(self, call: Call, request: Any) -> Any:
        """Tell where shards are to whoever reads that; send everybody else to the owner."""
        if request.epoch or not (request.asks_places or request.role == idl.Role.ADMIN):
            raise UnavailableError(self._elsewhere())
        config = self._config
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=config.server_id,
            shard=-1,
            shards=standby_places(config, self._log).to_idl(),
            limits=config.limits.to_idl(),
            highest_epoch=0,
            last_client_seq=0,
            tables=[],
            standbys=copies_to_idl(config),
        )

    async def status(self, call: Call) -> Any:
        """Return a status without tables and writers, whose `log` says that this is a standby."""
        log = (await sample_log(self._log)).to_idl()
        return idl.StatusReply(**self._figures(), tables=[], clients=[], term=self._log.term or None, log=log)

    def served_by(self, server: ThriftServer) -> contextlib.AbstractAsyncContextManager[None]:
        """Do nothing: a standby reports no figures of its server."""
        return contextlib.nullcontext()

    async def sample(self) -> ShardSample:
        """Return a sample without what only an owner has. Cancellation: harmless."""
        return ShardSample(
            **self._figures(),
            worst_loop_pause_s=0.0,
            tables=(),
            writers=(),
            term=self._log.term,
            log=await sample_log(self._log),
        )

    def _figures(self) -> dict[str, Any]:
        return {
            "server_id": self._config.server_id,
            "shard": self._config.shard,
            "num_shards": self._config.num_shards,
            "version": _VERSION,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_s,
            "log_seq": self._log.last_seq,
            "applied_seq": self._ingest.submitted_seq,
            "inflight_bytes": 0,
            "num_connections": 0,
            "num_refused": 0,
            "num_rows_written": 0,
        }

    def disconnected(self, peer: Peer) -> None:
        """There is nothing to detach."""

    def _elsewhere(self) -> str:
        where = f"its owner is at {self._log.owner}" if self._log.owner else "it has had no owner yet"
        return f"this is a standby of shard {self._config.shard}, {self.num_behind} records behind: {where}"


def copies_to_idl(config: ShardConfig) -> list[Any]:
    """Return the `idl.ShardAddress` of each other place where a shard may be."""
    return [
        idl.ShardAddress(shard=shard, host=host, port=port, node=node)
        for shard, host, port, node in config.other_copies
    ]


def standby_places(config: ShardConfig, log: ReplicatedLog) -> ShardPlaces:
    """Return the places that a standby tells: those of the settings, and that of the owner, of which the log tells."""
    nodes = config.nodes or (None,) * config.num_shards
    places = ShardPlaces(
        config.server_id,
        (ShardPlace(host, port, node=node) for (host, port), node in zip(config.addresses, nodes, strict=True)),
    )
    if log.owner:
        try:
            ((host, port),) = parse_addresses(log.owner)
        except (HeadraceError, ValueError):  # written by somebody else
            return places
        places.merge([(config.shard, ShardPlace(host, port, log.term))])
    return places


def restore_hint(config: ShardConfig) -> str:
    """Return the command that makes a shard's directory anew."""
    store = config.object_store or "URL"
    return f"move {config.directory} away, and headrace restore {store} --shard {config.shard} --data …"
