"""Finding the store: from one address to all shards, and the hello that opens a writer's session."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.paramserver.ingest.sessions import last_epoch_after
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.backoff import Backoff
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.rpc.shard_map import shard_map
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import FencedError, HeadraceError, StorageError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.tables import TableSpec

__all__ = ["Connect", "Store", "StoreShard", "Writer", "claim_epoch", "find_store", "open_session"]

_T = TypeVar("_T")


class _ShardAwayError(UnavailableError):
    """A server answers, and a shard that it names does not."""


Connect = Callable[[str, int], Awaitable[ParamServerClient]]
"""Opens a connection to (host, port) within a deadline of its own, or raises `UnavailableError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Who writes.

    Attributes:
        run: Groups a trainer's ranks and its restarts.
        client: Name within the run, the same after a restart.
        epoch: The run's epoch; 0 while it is asked for.
        rank: 0 to `world_size` - 1.
        world_size: Ranks of the run.
        token: Shown to the server; None shows none.
    """

    run: str
    client: str
    epoch: int
    rank: int
    world_size: int
    token: Token | None = None

    def with_epoch(self, epoch: int) -> Writer:
        """Return the same writer in an epoch."""
        return dataclasses.replace(self, epoch=epoch)

    def hello(self, tables: Sequence[TableSpec], *, claims_epoch: bool = False) -> Any:
        """Return the IDL's `HelloRequest` that opens or resumes the session and registers tables."""
        return idl.HelloRequest(
            claims_epoch=claims_epoch or None,
            protocol_version=PROTOCOL_VERSION,
            role=idl.Role.WRITER,
            run=self.run,
            client=self.client,
            epoch=self.epoch,
            rank=self.rank,
            world_size=self.world_size,
            tables=[spec_to_idl(spec) for spec in tables],
            token=None if self.token is None else self.token.reveal(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreShard:
    """One shard as the rendezvous found it.

    Attributes:
        shard: Its number.
        num_shards: Shards of the store.
        host: Where it listens.
        port: Where it listens.
        server_id: Identity of its data directory.
        max_frame_bytes: Longest frame that it reads.
    """

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
    """A running parameter server.

    Attributes:
        shards: In their order.
        highest_epoch: Highest epoch that any shard has seen.
        table_names: Tables that were registered when it was found.
    """

    shards: tuple[StoreShard, ...]
    highest_epoch: int
    table_names: frozenset[str] = frozenset()

    @property
    def max_frame_bytes(self) -> int:
        """Longest frame that every shard reads."""
        return min(shard.max_frame_bytes for shard in self.shards)


async def find_store(
    host: str, port: int, writer: Writer, connect: Connect, *, timeout_s: float, random: Callable[[], float]
) -> Store:
    """Return all shards of the server at an address, asking again until it is up.

    Args:
        host: Where any shard listens.
        port: Where that shard listens.
        writer: Who asks; its epoch is not looked at.
        connect: Opens connections.
        timeout_s: How long to try, seconds.
        random: Source of numbers in [0, 1), for the pauses.

    Cancellation: harmless; nothing is changed on the server.

    Raises:
        UnavailableError: A shard could not be reached in time; the message says what to do.
        HeadraceError: The server refuses.
    """
    request = writer.with_epoch(0).hello(())
    return await _until_answered(
        lambda: _ask_all(host, port, request, connect, timeout_s / 2),
        timeout_s=timeout_s,
        random=random,
        what=f"no parameter server at {format_address(host, port)}",
        advice=f"; start one with `headrace serve --data DIR --port {port}`, or mend the address",
    )


async def claim_epoch(
    store: Store, writer: Writer, connect: Connect, *, timeout_s: float, random: Callable[[], float]
) -> Writer:
    """Return the writer in an epoch above all that the store has seen and that no other trainer has.

    Shard 0 gives epochs away, so two trainers that start at the same moment get two.

    Args:
        store: Where it writes.
        writer: Rank 0 of the run; its epoch is not looked at.
        connect: Opens connections.
        timeout_s: How long to try, seconds.
        random: Source of numbers in [0, 1), for the pauses.

    Cancellation: an epoch may have been taken for nothing; the next one is above it.

    Raises:
        UnavailableError: Shard 0 could not be reached in time.
    """
    first, epoch = store.shards[0], store.highest_epoch + 1

    async def claim() -> Writer:
        nonlocal epoch
        while True:
            claimant = writer.with_epoch(epoch)
            try:
                await _bring_up(first, claimant, connect)
                await _hello(first.host, first.port, claimant.hello((), claims_epoch=True), connect)
            except FencedError as exc:
                epoch = exc.epoch + 1
            else:
                return claimant

    return await _until_answered(claim, timeout_s=timeout_s, random=random, what=f"{first} does not answer")


async def open_session(
    shards: Sequence[StoreShard],
    writer: Writer,
    tables: Sequence[TableSpec],
    connect: Connect,
    *,
    timeout_s: float,
    random: Callable[[], float],
) -> list[Any]:
    """Say hello as a writer to every shard at once, each over a connection of its own, and return the replies.

    Args:
        shards: Of one store.
        writer: Who writes, in which epoch.
        tables: Registered where they are not known.
        connect: Opens connections.
        timeout_s: How long to try, seconds.
        random: Source of numbers in [0, 1), for the pauses.

    Cancellation: some shards may have the session and the tables; saying hello again is harmless.

    Raises:
        FencedError: A newer epoch holds the run.
        SpecMismatchError: A table is registered with another spec.
        UnavailableError: A shard could not be reached in time.
    """
    request = writer.hello(tables)

    async def say_to(shard: StoreShard) -> Any:
        await _bring_up(shard, writer, connect)
        return await _hello(shard.host, shard.port, request, connect)

    return await _until_answered(
        lambda: _gather([say_to(shard) for shard in shards]),
        timeout_s=timeout_s,
        random=random,
        what="a shard does not answer",
    )


async def _until_answered(
    ask: Callable[[], Awaitable[_T]], *, timeout_s: float, random: Callable[[], float], what: str, advice: str = ""
) -> _T:
    """Return what `ask` returns, asking again after errors that may pass, until the deadline."""
    backoff = Backoff(min_s=0.02, max_s=0.5, random=random)
    last_error: HeadraceError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await ask()
                except HeadraceError as exc:
                    if not exc.retriable:
                        raise
                    last_error = exc
                await asyncio.sleep(backoff.next_s())
    except TimeoutError:
        if isinstance(last_error, _ShardAwayError):
            raise UnavailableError(f"{last_error} (tried for {format_seconds(timeout_s)})") from last_error
        reason = f" ({last_error or 'what is there hangs, or a firewall is in between'})"
        raise UnavailableError(f"{what} within {format_seconds(timeout_s)}{reason}{advice}") from last_error


async def _ask_all(host: str, port: int, request: Any, connect: Connect, named_timeout_s: float) -> Store:
    first = await _hello(host, port, request, connect)
    places = shard_map(first, host, port)
    replies = await _gather(
        [_ask_named(shard, at, (host, port), request, connect, named_timeout_s) for shard, at in enumerate(places)]
    )
    shards = tuple(
        StoreShard(
            shard=shard,
            num_shards=len(places),
            host=name,
            port=at,
            server_id=reply.server_id,
            max_frame_bytes=reply.limits.max_frame_bytes,
        )
        for shard, ((name, at), reply) in enumerate(zip(places, replies, strict=True))
    )
    for shard, reply in zip(shards, replies, strict=True):
        if reply.shard != shard.shard or len(reply.shards) != len(shards):
            raise StorageError(f"{shard} says that it is shard {reply.shard} of {len(reply.shards)}")
    return Store(
        shards=shards,
        highest_epoch=max(reply.highest_epoch for reply in replies),
        table_names=frozenset(table.fqn for reply in replies for table in reply.tables),
    )


async def _ask_named(
    shard: int, at: tuple[str, int], first: tuple[str, int], request: Any, connect: Connect, timeout_s: float
) -> Any:
    """Say hello where the server at `first` says that a shard is; the error tells that this is what failed."""
    try:
        async with asyncio.timeout(timeout_s):  # of less than all the time there is, or nobody would hear of it
            return await _hello(*at, request, connect)
    except (UnavailableError, TimeoutError) as exc:
        why = str(exc) or f"no answer within {format_seconds(timeout_s)}"
        text = (
            f"the server at {format_address(*first)} answers, and its shard {shard} at {format_address(*at)} does not"
        )
        # Where the host is the one that was reached, another would not help.
        advice = "; start the server with an --advertise-host that leads there from here too" * (at[0] != first[0])
        raise _ShardAwayError(f"{text}: {why}{advice}") from exc


async def _bring_up(shard: StoreShard, writer: Writer, connect: Connect) -> None:
    """Have a shard accept the writer's epoch, where only others have seen such high ones.

    A client that made up its epoch may have said it to one shard alone. To the others it is too far away, so they are
    brought there in steps; there are as many as such clients.
    """
    if writer.epoch <= last_epoch_after(0):
        return
    reached = (await _hello(shard.host, shard.port, writer.with_epoch(0).hello(()), connect)).highest_epoch
    while (step := last_epoch_after(reached)) < writer.epoch and step > reached:
        await _hello(shard.host, shard.port, writer.with_epoch(step).hello(()), connect)
        reached = step


async def _hello(host: str, port: int, request: Any, connect: Connect) -> Any:
    async with await connect(host, port) as client:
        return await client.hello(request)


async def _gather(calls: list[Any]) -> list[Any]:
    """Return all results, or raise the first error once every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
