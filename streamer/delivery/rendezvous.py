"""Finding the store: from one address to all shards, an epoch for the run, and the hellos that open its sessions."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from headrace.paramserver.rpc.address import Address, format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff, tell_of_waiting
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.security import Token, client_tls, load_token
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlaces
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import FencedError, HeadraceError, ReshardedError, StorageError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl, spec_to_idl
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.table_names import DEFAULT_MODEL, check_model, model_of
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import last_epoch_after
from headrace.streamer.config import StreamerConfig

__all__ = [
    "Connect",
    "Rendezvous",
    "Store",
    "StoreShard",
    "Writer",
    "connector",
    "tls_context",
    "token_of",
]

_T = TypeVar("_T")


Connect = Callable[[str, int], Awaitable[ParamServerClient]]
"""Opens a connection to (host, port) within a deadline of its own, or raises `UnavailableError`."""


def connector(config: StreamerConfig) -> Connect:
    """Return a function that opens connections according to the settings."""
    return partial(
        ParamServerClient.connect,
        timeout_s=config.connect_timeout_s,
        ssl_context=tls_context(config),
        token=token_of(config),
    )


def tls_context(config: StreamerConfig) -> ssl.SSLContext | None:
    """Return the context for TLS, or None without it; raise `ConfigError` if a file cannot be used."""
    return client_tls(
        config.tls, authority=config.tls_authority, certificate=config.tls_certificate, key=config.tls_key
    )


def token_of(config: StreamerConfig) -> Token | None:
    """Return the token to show the server, or None; raise `ConfigError` if its file cannot be used."""
    return load_token(path=config.token_file, environ=os.environ, insecure_token=config.insecure_token)


class _ShardAwayError(UnavailableError):
    """A server answers, but one of the shards that it names does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """One rank of a run, in an epoch, or in 0 before one is acquired. A restart keeps the name `client`.

    `model` is the one that the run's tables belong to, None until it is known.
    """

    run: str
    client: str
    epoch: int
    rank: int
    world_size: int
    model: str | None = None

    def with_epoch(self, epoch: int) -> Writer:
        """Return the same rank in an epoch."""
        return dataclasses.replace(self, epoch=epoch)

    def with_model(self, model: str) -> Writer:
        """Return the same rank with the tables of a model."""
        return dataclasses.replace(self, model=model)

    def hello(
        self,
        tables: Sequence[TableSpec],
        *,
        claims_epoch: bool = False,
        takes_over: bool = False,
        after_step: int | None = None,
        updated_only: Container[str] = (),
        dropped: Sequence[str] = (),
        ends_run: bool = False,
        checks_only: bool = False,
    ) -> Any:
        """Return the `idl.HelloRequest` that opens or resumes the session and registers tables.

        All tables but those of which only updated rows are sent are named as filled: the server forgets what is
        complete, and an empty store in its place does not. `after_step` is the one after which their rows are sent.
        `dropped` are dense tensors to drop, without `tables`. With `ends_run` the rank writes no more. With
        `checks_only` the server checks it and does nothing.
        """
        names = [spec.fqn for spec in tables if not spec.is_dense]
        return idl.HelloRequest(
            fills=[name for name in names if name not in updated_only] or None,
            updated_only=[name for name in names if name in updated_only] or None,
            after_step=after_step,
            dropped_tables=list(dropped) or None,
            checks_only=checks_only or None,
            claims_epoch=claims_epoch or None,
            takes_over=takes_over or None,
            ends_run=ends_run or None,
            protocol_version=PROTOCOL_VERSION,
            role=idl.Role.WRITER,
            run=self.run,
            client=self.client,
            epoch=self.epoch,
            rank=self.rank,
            world_size=self.world_size,
            tables=[spec_to_idl(spec) for spec in tables],
            asks_places=True if not self.epoch else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreShard:
    """One shard as it was found: number `shard` of `num_shards`, with the `server_id` of its data directory."""

    shard: int
    num_shards: int
    host: str
    port: int
    server_id: str
    max_frame_bytes: int

    def __str__(self) -> str:
        return f"shard {self.shard} ({format_address(self.host, self.port)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """A running parameter server as it was found: all shards in order, and the highest epoch that any has seen."""

    shards: tuple[StoreShard, ...]
    highest_epoch: int
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)  # trainer's run by table
    backfills: Mapping[str, str] = field(default_factory=dict)  # the run of a backfill that has not ended, by table
    filling: frozenset[str] = frozenset()  # tables that are not complete on every shard
    # Those of them that lack only the rows by which they have grown: the first such row.
    filling_from: Mapping[str, int] = field(default_factory=dict)
    updated_only: frozenset[str] = frozenset()  # tables that lack rows because only updated ones are sent
    predecessors: tuple[Predecessor, ...] = ()  # all of them

    def predecessor(self, server_ids: Sequence[str], places: Sequence[tuple[int, int]]) -> Predecessor | None:
        """Return the predecessor whose shards have these identities, if there are as many places; else None."""
        for each in self.predecessors:
            if len(each.seqs) == len(server_ids) == len(places) and {*server_ids} == {each.server_id}:
                return each
        return None

    def model_of(self, run: str) -> str:
        """Return the model of a run that names none: the default one, if some of its tables are the run's.

        It is the default one too if some are nobody's and the run has no model of its own yet. So a run goes on with
        tables that were backfilled for it.
        """
        plain = [name for name in self.tables if model_of(name) == DEFAULT_MODEL]
        if any(self.owners.get(name) == run for name in plain):
            return DEFAULT_MODEL
        is_begun = any(model_of(name) == run for name in self.tables)
        if not is_begun and any(name not in self.owners for name in plain):
            return DEFAULT_MODEL
        check_model(run)
        return run

    @property
    def max_frame_bytes(self) -> int:
        """Longest frame that every shard reads."""
        return min(shard.max_frame_bytes for shard in self.shards)


class Rendezvous:
    """Finds a store, acquires epochs and opens sessions. Each call retries until a deadline.

    Each raises `ReshardedError` at once if another server has taken the place of this one.

    Attributes:
        resolver: Finds the store's shards again when they have moved; None before a store was found.
    """

    def __init__(self, connect: Connect, *, timeout_s: float, random: Callable[[], float]) -> None:
        """Try each call for `timeout_s` seconds; `random` returns numbers in [0, 1), for the pauses."""
        self._connect, self._timeout_s, self._random = connect, timeout_s, random
        self.resolver: Resolver | None = None

    async def find_store(self, seeds: Sequence[Address], writer: Writer) -> Store:
        """Return all shards of the server at addresses of any of them; wait until it is up.

        Cancellation: harmless; nothing is changed on the server.

        Raises:
            UnavailableError: A shard could not be reached in time; the message says what to do.
            HeadraceError: The server refuses.
        """
        request = writer.with_epoch(0).hello(())
        where = " or ".join(format_address(*seed) for seed in seeds)
        return await self._until_answered(
            lambda: self._ask_all(seeds, request),
            where=where,
            what=f"no parameter server at {where}",
            advice=f"; start one with `headrace serve --data DIR --port {seeds[0][1]}`, or correct the address",
        )

    async def acquire_epoch(self, store: Store, writer: Writer) -> Writer:
        """Return the writer, rank 0 of the run, in an epoch above all that the store has seen and of no other trainer.

        It fences nobody: `open_session` does.

        Shard 0 alone assigns epochs, so two trainers that start at the same moment get different ones.

        Cancellation: an epoch may be lost; the next one is above it.

        Raises:
            UnavailableError: Shard 0 could not be reached in time.
        """
        first, candidate = store.shards[0], writer.with_epoch(store.highest_epoch + 1)

        async def acquire() -> Writer:
            nonlocal candidate
            while True:
                try:
                    await self._raise_highest_epoch(first, candidate)
                    await self._hello_shard(first, candidate.hello((), claims_epoch=True))
                except FencedError as exc:
                    candidate = writer.with_epoch(exc.epoch + 1)
                else:
                    return candidate

        return await self._until_answered(acquire, where=str(first), what=f"{first} does not answer")

    async def open_session(
        self,
        shards: Sequence[StoreShard],
        writer: Writer,
        tables: Sequence[TableSpec],
        *,
        takes_over: bool = False,
        after_step: int | None = None,
        updated_only: Container[str] = (),
        dropped: Sequence[str] = (),
        checks_only: bool = False,
    ) -> list[Any]:
        """Say hello to every shard, each over its own connection, and register new tables; return the replies.

        This fences older epochs of the run.

        Those that lack rows, but for `updated_only`, lack them until every rank has ended a step after `after_step`. Or
        have `dropped` dense tensors dropped. With `checks_only` nothing is changed: all shards say whether they would.

        Shard 0 goes first: it decides which of two runs owns a table that both name at once.

        Cancellation: some shards may have the session and the tables; repeating is harmless.

        Raises:
            FencedError: A newer epoch holds the run, or a table.
            OwnedError: A table belongs to another run, and this one does not take over.
            SpecMismatchError: A table is registered with another spec.
            UnavailableError: A shard could not be reached in time.
        """
        request = writer.hello(
            tables,
            takes_over=takes_over,
            after_step=after_step,
            updated_only=updated_only,
            dropped=dropped,
            checks_only=checks_only,
        )

        async def say_to(shard: StoreShard) -> Any:
            await self._raise_highest_epoch(shard, writer)
            return await self._hello_shard(shard, request)

        async def say_to_all() -> list[Any]:
            return [await say_to(shards[0]), *await _gather([say_to(shard) for shard in shards[1:]])]

        where = format_address(shards[0].host, shards[0].port)
        return await self._until_answered(say_to_all, where=where, what="a shard does not answer")

    async def end_run(self, shards: Sequence[StoreShard], writer: Writer) -> None:
        """Say to every shard that this rank writes no more; once all ranks have, others may take the run's tables.

        Shard 0 goes last: it answers first who asks for a table, and then all shards know.

        Cancellation: some shards may know; repeating is harmless.

        Raises:
            FencedError: A newer epoch holds the run.
            UnavailableError: A shard could not be reached in time.
        """
        request = writer.hello((), ends_run=True)

        async def say_to_all() -> None:
            await _gather([self._hello_shard(shard, request) for shard in shards[1:]])
            await self._hello_shard(shards[0], request)

        where = format_address(shards[0].host, shards[0].port)
        await self._until_answered(say_to_all, where=where, what="a shard does not answer")

    async def _until_answered(self, ask: Callable[[], Awaitable[_T]], *, where: str, what: str, advice: str = "") -> _T:
        """Return the result of `ask`; repeat it after retriable errors, until the deadline. Tell of a long wait."""
        backoff = Backoff(min_s=0.02, max_s=0.5, random=self._random)
        last_error: HeadraceError | None = None
        try:
            with tell_of_waiting(where, self._timeout_s, lambda: last_error):
                async with asyncio.timeout(self._timeout_s):
                    while True:
                        try:
                            return await ask()
                        except HeadraceError as exc:
                            if not exc.retriable:
                                raise
                            last_error = exc
                        await asyncio.sleep(backoff.next_s())
        except TimeoutError:
            within = format_seconds(self._timeout_s)
            if isinstance(last_error, _ShardAwayError):
                raise UnavailableError(f"{last_error} (tried for {within})") from None
            reason = last_error or "the server hangs, or a firewall is in between"
            raise UnavailableError(f"{what} within {within} ({reason}){advice}") from None

    async def _ask_all(self, seeds: Sequence[Address], request: Any) -> Store:
        first, reply = await self._ask_any(seeds, request)
        resolver = self.resolver
        if (
            resolver is None
            or resolver.places.server_id != reply.server_id
            or len(resolver.places) != len(reply.shards)
        ):

            def ask(host: str, port: int) -> Awaitable[Any]:
                return self._hello(host, port, request)

            places = ShardPlaces.of_hello(reply, *first)
            resolver = self.resolver = Resolver(places, seeds, ask, random=self._random)
        resolver.places.learn(reply, *first)
        places = resolver.places
        replies = await _gather([self._ask_named(shard, places, first, request) for shard in range(len(places))])
        shards = tuple(
            StoreShard(
                shard=shard,
                num_shards=len(places),
                host=places[shard].host,
                port=places[shard].port,
                server_id=reply.server_id,
                max_frame_bytes=reply.limits.max_frame_bytes,
            )
            for shard, reply in enumerate(replies)
        )
        for shard, reply in zip(shards, replies, strict=True):
            if reply.shard != shard.shard or len(reply.shards) != len(shards):
                raise StorageError(f"{shard} says that it is shard {reply.shard} of {len(reply.shards)}")
        owners = replies[0].owners or ()
        return Store(
            shards=shards,
            highest_epoch=max(reply.highest_epoch for reply in replies),
            # Shard 0's last: a table that is growing has more rows there first.
            tables={table.fqn: spec_from_idl(table) for reply in reversed(replies) for table in reply.tables},
            filling=frozenset(name for reply in replies for name in reply.filling or ()),
            filling_from=_first_lacking(replies),
            updated_only=frozenset(name for reply in replies for name in reply.updated_only or ()),
            owners={owner.fqn: owner.run for owner in owners if not owner.is_backfill},
            predecessors=tuple(
                Predecessor(server_id=each.server_id, seqs=tuple(each.seqs)) for each in replies[0].predecessors or ()
            ),
            backfills={owner.fqn: owner.run for owner in owners if owner.is_backfill and not owner.has_ended},
        )

    async def _ask_any(self, seeds: Sequence[Address], request: Any) -> tuple[Address, Any]:
        """Say hello at the first address that answers; return it with the reply. A standby adds the places it knows."""
        known = [] if self.resolver is None else self.resolver.places.addresses
        addresses = list(dict.fromkeys((*seeds, *known)))
        error: HeadraceError | None = None
        for address in addresses:
            try:
                # One that hangs must leave time for the others.
                async with asyncio.timeout(self._timeout_s / 4 if address != addresses[-1] else None):
                    reply = await self._hello(*address, request)
            except (UnavailableError, TimeoutError) as exc:
                error = exc if isinstance(exc, HeadraceError) else error
                continue
            if reply.shard != STANDBY:
                return address, reply
            error = UnavailableError(f"{format_address(*address)} is a standby: the shards are elsewhere")
            addresses += [each for each in ShardPlaces.of_hello(reply, *address).addresses if each not in addresses]
        raise error or UnavailableError("no answer")

    async def _ask_named(self, shard: int, places: ShardPlaces, first: Address, request: Any) -> Any:
        """Say hello at the place that the server at `first` names for a shard; errors say so."""
        timeout_s = self._timeout_s / 2  # with the whole time, the deadline would hide the error
        address = places[shard].address
        try:
            async with asyncio.timeout(timeout_s):
                return await self._hello(*address, request, places)
        except ReshardedError:
            raise
        except (UnavailableError, TimeoutError) as exc:
            places.doubt(shard, address)  # the others may know better, and the next attempt with them
            why = str(exc) or f"no answer within {format_seconds(timeout_s)}"
            there, here = format_address(*address), format_address(*first)
            # If the host is the one that was reached, another --advertise-host would not help.
            is_same_host = address[0] == first[0]
            advice = (
                "" if is_same_host else "; start the server with an --advertise-host that leads there from here too"
            )
            raise _ShardAwayError(
                f"the server at {here} answers, and its shard {shard} at {there} does not: {why}{advice}"
            ) from exc

    async def _raise_highest_epoch(self, shard: StoreShard, writer: Writer) -> None:
        """Raise a shard's highest epoch, if need be in steps, until it accepts the writer's.

        A faulty client that made up an epoch may have told it to one shard only; each adds a step to the others.
        """
        if writer.epoch <= last_epoch_after(0):
            return
        reached = (await self._hello_shard(shard, writer.with_epoch(0).hello(()))).highest_epoch
        while (step := last_epoch_after(reached)) < writer.epoch and step > reached:
            try:
                await self._hello_shard(shard, writer.with_epoch(step).hello((), claims_epoch=True))
                reached = step
            except FencedError as exc:  # another client has raised it meanwhile
                reached = exc.epoch

    async def _hello_shard(self, shard: StoreShard, request: Any) -> Any:
        """Say hello to a shard where it is by now; when it is not there, ask where it is before the next attempt."""
        resolver = self.resolver
        if resolver is None or resolver.places.server_id != shard.server_id:
            return await self._hello(shard.host, shard.port, request)
        address = resolver.places[shard.shard].address
        try:
            return await self._hello(*address, request, resolver.places)
        except ReshardedError:
            raise
        except UnavailableError:
            resolver.lost(shard.shard, address)
            await resolver.refresh()
            raise

    async def _hello(self, host: str, port: int, request: Any, places: ShardPlaces | None = None) -> Any:
        async with await self._connect(host, port) as client:
            client.places = places
            reply = await client.hello(request)
        if reply.shard == STANDBY and places is not None:
            places.learn(reply, host, port)
            raise UnavailableError(f"{format_address(host, port)} is a standby: the shard is elsewhere")
        return reply


async def _gather(calls: list[Any]) -> list[Any]:
    """Return all results, or raise the first error, but only once every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _first_lacking(replies: Iterable[Any]) -> dict[str, int]:
    """Return the first row that any shard lacks, of tables of which no shard lacks all rows."""
    found: dict[str, int] = {}
    for reply in replies:
        names = reply.filling or ()
        for name, row in zip(names, reply.filling_from_rows or [0] * len(names), strict=True):
            found[name] = min(row, found.get(name, row))
    return {name: row for name, row in found.items() if row}
