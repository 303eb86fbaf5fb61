"""Change the tables of a running server: list, grow and drop them."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from headrace.paramserver.reading.link import Dial, ShardLink, link_all
from headrace.paramserver.rpc.address import Address, parse_addresses, server_address
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.system.text import describe_near, first_of
from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    OwnedError,
    RequestError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl, spec_to_idl
from headrace.schemas.table_lacks import merged_lack, what_lacks
from headrace.schemas.table_names import (
    TableNames,
)
from headrace.schemas.tables import TableSpec

__all__ = ["TableAdmin", "TableDescription"]

_RUN, _CLIENT = "headrace-tables", "admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDescription:
    """One table of a running server.

    Attributes:
        spec: Its name, shape, type and states.
        num_rows_estimate: About how many rows are stored, at most `spec.num_rows`.
        owner: The run that trains it; None if no trainer has named it.
        owner_epoch: The epoch in which that run started last; 0 without one.
        is_owner_connected: Whether a rank of that run is connected now.
        is_owner_backfill: Whether it is a backfill's, from which trainers take the table.
        has_owner_ended: Whether the run has ended, so that others may take the table.
        num_growths: How often it has got more rows.
        lacks: `incomplete` if its trainer or backfill has not sent all rows to every shard yet, `updated rows only` if
            it is not to; empty if the table lacks nothing.
    """

    spec: TableSpec
    num_rows_estimate: int
    owner: str | None
    owner_epoch: int
    is_owner_connected: bool
    has_owner_ended: bool
    num_growths: int
    lacks: str = ""
    is_owner_backfill: bool = False


class TableAdmin:
    """Changes the tables of a running server. Use it with `async with`, after `connect`.

    A change goes into the log of every shard, and replicas follow. It is not atomic over shards: if one fails in
    between, the error names it, and the same call again completes the change.

    Thread: an event loop's, one call at a time.
    """

    def __init__(self, dial: Dial, links: Sequence[ShardLink]) -> None:
        """Use `connect` instead."""
        self._dial, self._links = dial, links

    @classmethod
    async def connect(
        cls,
        address: str | None = None,
        *,
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
    ) -> Self:
        """Find all shards.

        Args:
            address: `host:port` of any shard; the default port is 7601. None takes `HEADRACE_SERVER`.
            timeout_s: For each answer of a shard, seconds.
            ssl_context: For TLS, as `client_tls_context` makes it.
            server_hostname: Name in every shard's certificate; None for each shard's own host.
            token: For a server that requires one: one of the role ADMIN.

        Raises:
            ConfigError: The address is invalid.
            HeadraceError: A shard cannot be reached, or refuses.

        Cancellation: harmless.
        """
        dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            timeout_s=timeout_s,
            role=idl.Role.ADMIN,
        )
        return await cls.dial(dial, parse_addresses(server_address(address)))

    @classmethod
    async def dial(cls, dial: Dial, seeds: Sequence[Address]) -> Self:
        """Find all shards by connections of a kind; see `connect`. Cancellation: harmless."""
        return cls(dial, await link_all(dial, seeds))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(link.close() for link in self._links))

    async def tables(self, *, with_dense: bool = False) -> list[TableDescription]:
        """Return all tables by name, and with `with_dense` the dense tensors among them. Cancellation: harmless."""
        statuses = await asyncio.gather(*(link.status() for link in self._links))
        connected = {client.run for status in statuses for client in status.clients if client.is_connected}
        found: dict[str, TableDescription] = {}
        for table in [table for status in statuses for table in status.tables]:
            spec, owner = spec_from_idl(table.spec), table.owner
            if spec.is_dense and not with_dense:
                continue
            known = found.get(spec.fqn)
            has_ended = owner is not None and bool(owner.has_ended)
            spec = known.spec if known is not None and known.spec.num_rows > spec.num_rows else spec
            num_rows = table.num_rows_estimate + (0 if known is None else known.num_rows_estimate)
            found[spec.fqn] = TableDescription(
                spec=spec,
                # A row that was written again may count twice until the store has merged its files.
                num_rows_estimate=min(num_rows, spec.num_rows or num_rows),
                owner=None if owner is None else owner.run,
                owner_epoch=0 if owner is None else owner.epoch,
                is_owner_connected=owner is not None and owner.run in connected,
                has_owner_ended=has_ended and (known is None or known.has_owner_ended),
                num_growths=len(table.earlier_fingerprints or ()),
                is_owner_backfill=owner is not None and bool(owner.is_backfill),
                lacks=merged_lack((what_lacks(table.filling), "" if known is None else known.lacks)),
            )
        return [found[name] for name in sorted(found)]

    async def describe(self, name: str) -> TableDescription:
        """Return one table, by its name, or by its path if only one model has it.

        Raises:
            UnknownTableError: There is none; the message has the nearest names.
            RequestError: Several models have the path.

        Cancellation: harmless.
        """
        tables = {table.spec.fqn: table for table in await self.tables(with_dense=True)}
        found = TableNames(tables).find(name)
        if found is None:
            known = [each for each, table in tables.items() if not table.spec.is_dense] or tables
            raise UnknownTableError(f"no table {name!r} on this server; {describe_near(name, known)}")
        return tables[found]

    async def grow(self, name: str, num_rows: int) -> TableSpec:
        """Give a table more rows, which are missing until a trainer writes them; return its new spec.

        Its trainer may go on meanwhile. One that starts later must have as many rows.

        Raises:
            RequestError: The number is not above the table's, or the table has virtual row ids or is a dense tensor.
            HeadraceError: Some shards have not done it: call it again.

        Cancellation: some shards may have done it; call it again.
        """
        spec = (await self.describe(name)).spec
        if spec.is_dense or not 0 < spec.num_rows <= num_rows:
            what = f"has {spec.num_rows:,} rows" if spec.num_rows else "has virtual row ids"
            what = "is a dense tensor" if spec.is_dense else what
            why = "; a table never loses rows" if num_rows < spec.num_rows else ""
            raise RequestError(f"table {spec.fqn!r} {what} and cannot be given {num_rows:,}{why}")
        larger = dataclasses.replace(spec, num_rows=num_rows)
        await self._say("grow", await self._claim_epoch(), tables=[spec_to_idl(larger)])
        return larger

    async def drop(self, names: Iterable[str], *, force: bool = False) -> list[str]:
        """Drop tables with all their rows; return their whole names.

        Nothing brings a row back: no restore, and no backfill and no trainer that runs now. One that starts later may
        make a table of that name anew.

        Args:
            names: Names, or paths that only one model has.
            force: Drop also what a connected trainer trains: that trainer then ends with an error.

        Raises:
            UnknownTableError, RequestError: As for `describe`; nothing was dropped.
            OwnedError: Who writes a table is connected; nothing was dropped.
            HeadraceError: Some shards have not done it: call it again.

        Cancellation: some shards may have done it; call it again.
        """
        tables = [await self.describe(name) for name in dict.fromkeys(names)]
        for table in tables:
            if table.is_owner_connected and not force:
                raise OwnedError(
                    f"table {table.spec.fqn!r} is written by run {table.owner!r}, which is connected: stop it first, "
                    "or drop the table by force, which ends that run with an error"
                )
        dropped = [table.spec.fqn for table in tables]
        await self._say("drop", await self._claim_epoch(), dropped_tables=dropped)
        return dropped

    async def _claim_epoch(self) -> int:
        """Return an epoch above those of all trainers that have started, which is nobody else's."""
        await asyncio.gather(*(link.refresh() for link in self._links))
        epoch: int = 1 + max(link.hello.highest_epoch for link in self._links)
        while True:
            try:
                await self._hello(self._links[0], epoch, claims_epoch=True)
            except FencedError as exc:
                epoch = exc.epoch + 1
            else:
                return epoch

    async def _say(self, verb: str, epoch: int, **what: Any) -> list[Any]:
        """Say hello to every shard; raise an error that names the shards that failed."""
        replies = await asyncio.gather(
            *(self._hello(link, epoch, **what) for link in self._links), return_exceptions=True
        )
        failures: dict[str, HeadraceError] = {}
        for link, reply in zip(self._links, replies, strict=True):
            if isinstance(reply, HeadraceError):
                failures[link.address] = reply
            elif isinstance(reply, BaseException):
                raise reply
        if failures:
            first = next(iter(failures.values()))
            raise UnavailableError(
                f"{len(failures)} of {len(self._links)} shards did not {verb} the tables ({first_of(list(failures))}: "
                f"{first}); do it again when they are up"
            ) from first
        return list(replies)

    async def _hello(self, link: ShardLink, epoch: int, *, tables: Sequence[Any] = (), **what: Any) -> Any:
        request = idl.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            role=idl.Role.ADMIN,
            run=_RUN,
            client=_CLIENT,
            epoch=epoch,
            rank=0,
            world_size=0,
            tables=list(tables),
            **what,
        )
        client, _ = await self._dial.connect(link.host, link.port)
        async with client:
            return await client.hello(request, timeout_s=self._dial.timeout_s)
