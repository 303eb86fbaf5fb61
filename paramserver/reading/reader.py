"""Reads rows of a whole server: finds the shards from one address, asks each for its rows, orders the answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.process.task_group import task_group
from headrace.paramserver.reading.identity_reader import IDENTITY_BYTES, combine, decode_found, read_by_identity
from headrace.paramserver.reading.read_deadline import ReadDeadline
from headrace.paramserver.reading.row_query import (
    RowPart,
    RowQuery,
    Rows,
    parts_together,
    request_for,
    rows_in_reply,
    scatter_reply,
)
from headrace.paramserver.reading.shard_link import Dial, ShardLink, links_of, retry
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.reach_log import ReachLog
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.store.identity_index import FoundRows
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ProtocolError, RequestError, UnavailableError, UnknownTableError
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.near_names import describe_near
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_digest import BUCKET_ROWS
from headrace.schemas.row_ids import row_ids_of
from headrace.schemas.table_digest import TableDigest
from headrace.schemas.tables import ColumnShard, DType, TableSpec

__all__ = ["EmbeddingReader", "Rows"]

_Int64s = npt.NDArray[np.int64]
_OnRows = Callable[[int], None]
_T = TypeVar("_T")


class EmbeddingReader:
    """A reader of all shards of one server. Use it on one event loop; calls may overlap.

    A call retries what can be retried, with growing pauses, until its deadline: a shard that is restarted costs time,
    not an error. A read of many rows takes many answers; the reader's own deadline is for each next one of them. Reads
    see every batch that was acked before they were asked.

    Cancellation: harmless; nothing is left half done.

    Attributes:
        tables: By fqn, as the shards last told: at `connect`, and when a table is asked for that was not known.
    """

    def __init__(self, shards: list[ShardLink], tables: dict[str, TableSpec], timeout_s: float) -> None:
        """Made by `connect`."""
        self.tables = tables
        self._shards = shards
        self._timeout_s = timeout_s

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        waits: bool = True,
        reach_log: ReachLog | None = None,
    ) -> EmbeddingReader:
        """Find and connect to every shard.

        Args:
            address: `host:port` of any shard; port 7601 without one.
            timeout_s: For this call and, unless they say otherwise, each later one, seconds.
            ssl_context: For TLS, as `client_tls_context` makes it.
            server_hostname: Name that every shard's certificate has; each shard's own host when None.
            token: For a server that asks for one.
            waits: Try again while a shard cannot be reached; else the first failure is the answer.
            reach_log: Says which shards cannot be reached while they are tried again; None makes one.

        Raises:
            ConfigError: The address is none.
            UnavailableError: A shard cannot be reached in time.
            HeadraceError: A shard refuses, or the shards are not those of one server.

        Cancellation: atomic; nothing stays open.
        """
        dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            # Half of it, so that a shard that does not answer is left for a new connection within one call.
            timeout_s=timeout_s / 2,
            reach_log=reach_log or ReachLog(),
        )
        host, port = parse_address(address, default_port=DEFAULT_PORT)
        ask = retry if waits else _once
        first = ShardLink(dial, host, port)
        links = [first]
        try:
            async with asyncio.timeout(timeout_s):
                hello = await ask(first.refresh)
                links = links_of(hello, dial, host, port)
                links[hello.shard] = first  # with the connection that is there already
                await _gather([ask(link.refresh) for link in links if link is not first])
            return cls(links, _tables_of(links), timeout_s)
        except BaseException as exc:
            await _close_all({first, *links})
            if isinstance(exc, TimeoutError):
                raise UnavailableError(
                    _why(f"no answer from {address} within {format_seconds(timeout_s)}", links)
                ) from exc
            raise

    async def get(
        self,
        fqn: str,
        row_ids: npt.ArrayLike,
        *,
        with_states: bool = False,
        with_versions: bool = False,
        timeout_s: float | None = None,
    ) -> Rows:
        """Return rows of one table.

        Args:
            fqn: Table.
            row_ids: Integers of any shape, in any order; repeated ids are answered as often.
            with_states: Optimizer states too.
            with_versions: Epoch, step and time of each row's last update too.
            timeout_s: For all of it, seconds; when None the reader's own, for each next answer.

        Raises:
            UnknownTableError: No shard knows the table.
            RowRangeError: An id is negative or beyond the table.
            RequestError: The ids are no integers: a mask, fractions.
            UnavailableError: A shard did not answer in time.
            HeadraceError: A shard refused.

        Cancellation: harmless.
        """
        (rows,) = await self.get_many(
            [(fqn, row_ids)], with_states=with_states, with_versions=with_versions, timeout_s=timeout_s
        )
        return rows

    async def get_many(
        self,
        wanted: Sequence[tuple[str, npt.ArrayLike]],
        *,
        with_states: bool = False,
        with_versions: bool = False,
        timeout_s: float | None = None,
    ) -> list[Rows]:
        """Return rows of several tables, each as of a moment of its own; see `get`.

        Args:
            wanted: (fqn, int64[n] row ids) of each.
            with_states: See `get`.
            with_versions: See `get`.
            timeout_s: For all of them, seconds; when None see `get`.

        Raises:
            HeadraceError: As of `get`.

        Cancellation: harmless.
        """
        what = repr(wanted[0][0]) if len(wanted) == 1 else f"{len(wanted)} tables"
        async with self._deadline(what, timeout_s) as deadline:
            queries: list[tuple[RowQuery, Rows]] = []
            for fqn, row_ids in wanted:
                spec = await self._spec_of(fqn)
                ids = row_ids_of(row_ids)
                spec.check_row_ids(ids)
                query = RowQuery(spec=spec, with_states=with_states, with_versions=with_versions)
                queries.append((query, query.allocate(ids)))
            await self._fill(queries, deadline)
            return [rows for _, rows in queries]

    async def find_rows(self, fqn: str, identities: npt.ArrayLike, *, timeout_s: float | None = None) -> _Int64s:
        """Return the rows that identities are mapped to, int64[n]; -1 where no row has the identity.

        An identity belongs to the row that was last written with it; when that row has another identity by now, or is
        deleted, it has none. The shards are asked at the same time and not at one moment: an identity that moves to
        a row of another shard meanwhile may be in neither answer.

        Args:
            fqn: Table with identities.
            identities: int64[n], raw ids in any order; -1 is none.
            timeout_s: For all of it, seconds; when None the reader's own, for each next answer.

        Raises:
            UnknownTableError: No shard knows the table.
            RequestError: The table has no identities, or those given are no integers.
            UnavailableError: A shard did not answer in time.
            HeadraceError: A shard refused.

        Cancellation: harmless.
        """
        async with self._deadline(repr(fqn), timeout_s) as deadline:
            spec = await self._spec_with_identities(fqn)
            return await self._find(spec, row_ids_of(identities, "identities"), deadline)

    async def get_by_identity(
        self,
        fqn: str,
        identities: npt.ArrayLike,
        *,
        with_states: bool = False,
        with_versions: bool = False,
        timeout_s: float | None = None,
    ) -> Rows:
        """Return the rows that identities are mapped to; see `find_rows` and `get`.

        Each row that is returned has the identity that was asked for: one that changes hands between finding and
        reading it is looked for again.

        Returns:
            In the order of `identities`; where no row has the identity, the row id is -1 and the presence MISSING.

        Raises:
            HeadraceError: As of `find_rows` and `get`.

        Cancellation: harmless.
        """
        async with self._deadline(repr(fqn), timeout_s) as deadline:
            spec = await self._spec_with_identities(fqn)
            query = RowQuery(spec=spec, with_states=with_states, with_versions=with_versions)
            wanted = row_ids_of(identities, "identities")
            rows = query.allocate(np.empty(wanted.size, np.int64))
            await read_by_identity(
                wanted,
                rows,
                lambda ids: self._find(spec, ids, deadline),
                lambda row_ids: self._get(query, row_ids, deadline),
            )
            return rows

    def _deadline(self, what: str, total_s: float | None) -> ReadDeadline:
        return ReadDeadline(
            total_s, self._timeout_s, lambda time: _why(f"no answer about {what} within {time}", self._shards)
        )

    @property
    def links(self) -> list[ShardLink]:
        """The shards, by index; to follow them over the reader's own connections."""
        return self._shards

    async def digest(
        self,
        fqn: str,
        *,
        columns: ColumnShard | None = None,
        first_row: int = 0,
        end_row: int | None = None,
        with_presence: bool = False,
        only_weights: bool = False,
        timeout_s: float | None = None,
        on_progress: _OnRows = lambda _: None,
    ) -> TableDigest:
        """Return digests of the rows that the shards have, by bucket, see `schemas/row_digest.py`.

        Each shard answers for one position of its log; writes in between show in `TableDigest.is_steady`.

        Args:
            fqn: Table.
            columns: Weights and pointwise states are cut to these, and rowwise states left out; None takes whole rows.
            first_row: First row looked at.
            end_row: End of them, exclusive; None for the table's end.
            with_presence: Say which rows are there.
            only_weights: Leave all states out: digests that a replica has too.
            timeout_s: Deadline, seconds; None for none: a shard looks at some hundred thousand rows a second.
            on_progress: Called every some seconds with the number of rows looked at since the last call.

        Raises:
            UnknownTableError: No shard knows the table.
            UnavailableError: A shard did not answer in time.
            HeadraceError: A shard refused.

        Cancellation: harmless.
        """
        try:
            async with asyncio.timeout(timeout_s):
                spec = await self._spec_of(fqn)
                columns = spec.whole if columns is None else columns
                end_row = 2**63 - 1 if end_row is None else end_row
                digest = TableDigest(spec=spec, columns=columns)
                span = (first_row, end_row)
                flags = {"with_presence": with_presence, "only_weights": only_weights or None}
                work = [self._digest(digest, link, span, flags, on_progress) for link in self._shards]
                await _gather(work)
                return digest
        except TimeoutError as exc:
            assert timeout_s is not None
            raise UnavailableError(
                _why(f"no digests of {fqn!r} within {format_seconds(timeout_s)}", self._shards)
            ) from exc

    async def _digest(
        self, digest: TableDigest, link: ShardLink, span: tuple[int, int], flags: dict[str, Any], on_rows: _OnRows
    ) -> None:
        first_row, end_row = span
        seq = None
        max_buckets = max(1, link.max_reply_bytes // 2 // (BUCKET_ROWS // 8 if flags["with_presence"] else 24))
        while first_row < min(end_row, digest.spec.num_rows or end_row):
            request = idl.DigestRowsRequest(
                fqn=digest.spec.fqn,
                first_row=first_row,
                end_row=end_row,
                column_offset=digest.columns.offset,
                width=digest.columns.width,
                max_buckets=max_buckets,
                **flags,
            )
            reply = await retry(lambda: link.digest_rows(request))  # noqa: B023
            digest.add(reply)
            on_rows(int(np.frombuffer(reply.counts, "<i8").sum()))
            digest.seqs[link.hello.shard] = reply.seq
            digest.is_steady &= seq in (None, reply.seq)
            if reply.next_row <= first_row:
                raise ProtocolError(f"{link.address} goes on at row {reply.next_row} after row {first_row}")
            seq, first_row = reply.seq, reply.next_row

    async def status(self, *, timeout_s: float | None = None) -> list[Any]:
        """Return the `idl.StatusReply` of each shard, by its index.

        Raises:
            UnavailableError: A shard did not answer in time.

        Cancellation: harmless.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await _gather([retry(link.status) for link in self._shards])
        except TimeoutError as exc:
            raise UnavailableError(_why(f"no status within {format_seconds(timeout_s)}", self._shards)) from exc

    async def scalars(self, fqn: str, *, timeout_s: float | None = None) -> dict[str, np.generic]:
        """Return the newest values that a table has once (an optimizer's count of steps), by name.

        Raises:
            UnavailableError: A shard did not answer in time.

        Cancellation: harmless.
        """
        newest: dict[str, tuple[int, int, np.generic]] = {}
        for status in await self.status(timeout_s=timeout_s):
            for table in status.tables:
                for stored in (table.scalars or ()) if table.spec.fqn == fqn else ():
                    scalar = stored.scalar
                    value = np.frombuffer(scalar.data, DType(scalar.dtype).numpy)[0]
                    known = newest.get(scalar.name)
                    if known is None or (stored.epoch, stored.step) > known[:2]:
                        newest[scalar.name] = (stored.epoch, stored.step, value)
        return {name: value for name, (_, _, value) in newest.items()}

    async def close(self) -> None:
        """Close all connections. Again is harmless.

        Cancellation: some connections may stay open until it is called again.
        """
        await _close_all(set(self._shards))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _spec_of(self, fqn: str) -> TableSpec:
        if fqn not in self.tables:  # it may have been registered since
            await _gather([retry(link.refresh) for link in self._shards])
            self.tables = _tables_of(self._shards)
        if fqn not in self.tables:
            raise UnknownTableError(f"no table {fqn!r} on this server; {describe_near(fqn, self.tables)}")
        return self.tables[fqn]

    async def _spec_with_identities(self, fqn: str) -> TableSpec:
        spec = await self._spec_of(fqn)
        if not spec.has_identities:
            raise RequestError(f"table {fqn!r} has no identities; its rows are found by their row ids")
        return spec

    async def _find(self, spec: TableSpec, identities: _Int64s, deadline: ReadDeadline) -> _Int64s:
        rows = np.empty(identities.size, np.int64)
        step = rows_in_reply(min(link.max_reply_bytes for link in self._shards), IDENTITY_BYTES)
        for some in _chunks(np.arange(identities.size), step):
            asking = [self._find_in(link, spec, identities[some], deadline) for link in self._shards]
            rows[some] = combine(await _gather(asking))
        return rows

    async def _find_in(
        self, link: ShardLink, spec: TableSpec, identities: _Int64s, deadline: ReadDeadline
    ) -> FoundRows:
        request = idl.FindRowsRequest(fqn=spec.fqn, identities=identities.data)
        async with link.places:
            found = await retry(lambda: link.find_rows(request))
        deadline.answered()
        return decode_found(found, identities.size)

    async def _get(self, query: RowQuery, row_ids: _Int64s, deadline: ReadDeadline) -> Rows:
        rows = query.allocate(row_ids)
        await self._fill([(query, rows)], deadline)
        return rows

    async def _fill(self, queries: Sequence[tuple[RowQuery, Rows]], deadline: ReadDeadline) -> None:
        of_shards: list[list[RowPart]] = [[] for _ in self._shards]
        for query, rows in queries:
            shards = shards_of_rows(table_seed(query.spec.fqn), rows.row_ids, len(self._shards))
            for shard, (link, parts) in enumerate(zip(self._shards, of_shards, strict=True)):
                positions = np.flatnonzero(shards == shard) if len(self._shards) > 1 else np.arange(len(rows.row_ids))
                for chunk in _chunks(positions, query.rows_at_once(link.max_reply_bytes)):
                    parts.append(RowPart(query=query, rows=rows, positions=chunk))
        work = [
            self._fill_parts(link, together, deadline)
            for link, parts in zip(self._shards, of_shards, strict=True)
            for together in parts_together(parts, link.max_reply_bytes)
        ]
        await _gather(work)

    async def _fill_parts(self, link: ShardLink, parts: Sequence[RowPart], deadline: ReadDeadline) -> None:
        request = request_for(parts)
        async with link.places:
            reply = await retry(lambda: link.get(request))
        deadline.answered()
        await _gather([self._fill_parts(link, [part], deadline) for part in scatter_reply(reply, parts)])


async def _once(attempt: Callable[[], Awaitable[_T]]) -> _T:
    return await attempt()


def _why(message: str, links: list[ShardLink]) -> str:
    """Add what went wrong last at the first shard that has trouble."""
    reasons = [str(link.failure) for link in links if link.failure is not None]
    return "; ".join([message, *reasons[:1]])


def _tables_of(links: list[ShardLink]) -> dict[str, TableSpec]:
    """Return what the shards know together: a table may not have reached each of them yet."""
    tables: dict[str, TableSpec] = {}
    for link in links:
        for struct in link.hello.tables:
            spec = spec_from_idl(struct)
            other = tables.setdefault(spec.fqn, spec)
            if other != spec:
                raise ProtocolError(f"table {spec.fqn!r} differs between shards: {other.describe_difference(spec)}")
    return tables


def _chunks(positions: _Int64s, size: int) -> Iterator[_Int64s]:
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


async def _gather(work: list[Any]) -> list[Any]:
    """Run all at once; when one fails, cancel the others and raise its error as it is."""
    async with task_group() as group:
        tasks = [group.create_task(item) for item in work]
    return [task.result() for task in tasks]


async def _close_all(links: set[ShardLink]) -> None:
    await asyncio.gather(*(link.close() for link in links))
