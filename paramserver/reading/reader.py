"""Read rows of a whole server: find all shards from one address, ask each for its rows, order the replies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.dense_parts import DenseAssemblies, DensePart, choose_model, dense_sets
from headrace.paramserver.reading.link import Dial, ShardLink, links_of, retry
from headrace.paramserver.reading.row_query import (
    IDENTITY_BYTES,
    RowPart,
    RowQuery,
    Rows,
    parts_together,
    request_for,
    rows_in_reply,
    scatter_reply,
)
from headrace.paramserver.rpc.address import parse_addresses, server_address
from headrace.paramserver.rpc.outages import Backoff, OutageLog, tell_of_waiting
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.system.event_loop import task_group
from headrace.paramserver.system.text import counted, describe_near, format_seconds
from headrace.schemas.errors import (
    HeadraceError,
    ProtocolError,
    RequestError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest
from headrace.schemas.row_records import NO_IDENTITY, PRESENT
from headrace.schemas.table_names import TableNames, model_of
from headrace.schemas.tables import ColumnShard, DType, TableSpec, row_ids_of

__all__ = ["EmbeddingReader", "Rows", "read_deadline", "scalars_by_table"]

# Between reads of dense tensors whose rows were of two steps.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0

_Int64s = npt.NDArray[np.int64]
_Answered = Callable[[], None]
_Deadline = contextlib.AbstractAsyncContextManager[_Answered]
_OnRows = Callable[[int], None]
_T = TypeVar("_T")


class EmbeddingReader:
    """A reader of all shards of one server. Use it on one event loop; calls may overlap.

    A call retries until its deadline, so a shard that restarts costs time and raises no error. A read of many rows
    takes many replies; the reader's own timeout applies to each next reply. Reads see every batch that was acked
    before the call.

    Cancellation: harmless; nothing is left half done.

    Calls name a table by its fqn, `model:path`, or by its path if only one model has such a table.

    Attributes:
        links: The shards, by index, for following them over the reader's own connections.
        tables: By fqn; updated on `connect` and when a call names an unknown table.
    """

    def __init__(self, shards: list[ShardLink], timeout_s: float, *, model: str | None = None) -> None:
        """Use `connect`."""
        self.links = shards
        self._timeout_s = timeout_s
        self._model = model
        self._update_tables()

    @classmethod
    async def connect(
        cls,
        address: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        waits: bool = True,
        reads_copies: bool = False,
        reach_log: OutageLog | None = None,
    ) -> EmbeddingReader:
        """Find and connect to every shard.

        Args:
            address: `host:port` of any shard, or of several with commas; the default port is 7601. None takes the
                environment's `HEADRACE_SERVER`.
            model: Read this model's tables only; None reads all models'.
            timeout_s: For this call and the default for later ones, seconds.
            ssl_context: For TLS, as `client_tls_context` makes it.
            server_hostname: Name in every shard's certificate; None for each shard's own host.
            token: For a server that requires one.
            waits: Retry while a shard cannot be reached; False raises the first failure.
            reads_copies: The copy of a shard that a standby has will do, which may lack the newest rows.
            reach_log: Logs which shards cannot be reached during retries; None makes one.

        Raises:
            ConfigError: The address is invalid.
            UnavailableError: A shard cannot be reached in time.
            HeadraceError: A shard refuses, or the shards do not belong to one server.

        Cancellation: atomic; nothing stays open.
        """
        dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            # Half, so that one call has time to replace the connection of a shard that does not answer.
            timeout_s=timeout_s / 2,
            reads_copies=reads_copies,
            reach_log=reach_log or OutageLog(),
        )
        address = server_address(address)
        seeds = parse_addresses(address)
        ask = retry if waits else _once
        first = ShardLink(dial, *seeds[0], others=seeds[1:])
        links = [first]
        try:
            # Who gives a log of outages tells of them itself.
            telling = tell_of_waiting(address, timeout_s, lambda: _failure_of(links))
            with contextlib.nullcontext() if reach_log else telling:
                async with asyncio.timeout(timeout_s):
                    hello = await ask(first.refresh)
                    links = links_of(first, dial, seeds)
                    resolver = links[hello.shard].resolver
                    assert resolver is not None
                    first.join(resolver)
                    links[hello.shard] = first  # it is connected already
                    await _gather([ask(link.refresh) for link in links if link is not first])
            return cls(links, timeout_s, model=model)
        except BaseException as exc:
            await _close_all({first, *links})
            if isinstance(exc, TimeoutError):
                message = f"no answer from {address} within {format_seconds(timeout_s)}"
                raise UnavailableError(_with_reason(message, links)) from None
            raise

    def __repr__(self) -> str:
        num_dense = sum(spec.is_dense for spec in self.tables.values())
        parts = [counted(len(self.tables) - num_dense, "table"), counted(num_dense, "dense tensor")]
        parts += [counted(len(self.links), "shard")]
        return f"<{type(self).__name__} of {self.links[0].address}: {', '.join(parts)}>"

    async def get(
        self,
        fqn: str,
        row_ids: npt.ArrayLike,
        *,
        with_states: bool = False,
        with_versions: bool = False,
        timeout_s: float | None = None,
    ) -> Rows:
        """Return rows of one table. Cancellation: harmless.

        Args:
            fqn: Table.
            row_ids: Integers of any shape and order; repeats are allowed.
            with_states: Read optimizer states, too.
            with_versions: Read epoch, step and time of each row's last update, too.
            timeout_s: For the whole call, seconds; None for the reader's own, for each next reply.

        Raises:
            UnknownTableError: No shard knows the table.
            RowRangeError: An id is negative or beyond the table.
            RequestError: The ids are not integers (a mask, fractions).
            UnavailableError: A shard did not answer in time.
            HeadraceError: A shard refused.
        """
        (rows,) = await self.get_many(
            [(fqn, row_ids)],
            with_states=with_states,
            with_versions=with_versions,
            timeout_s=timeout_s,
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
        """Return rows of several tables, each as of its own moment; see `get`. Cancellation: harmless.

        Args:
            wanted: (fqn, int64[n] row ids) of each.
            with_states: See `get`.
            with_versions: See `get`.
            timeout_s: See `get`.
        """
        what = f"answer about {wanted[0][0]!r}" if len(wanted) == 1 else f"answer about {len(wanted)} tables"
        async with self._deadline(what, timeout_s, self._timeout_s) as answered:
            queries: list[tuple[RowQuery, Rows]] = []
            for fqn, row_ids in wanted:
                ids = row_ids_of(row_ids)
                spec = await self._spec_of(fqn, last_row=int(ids.max(initial=0)))
                spec.check_row_ids(ids)
                query = RowQuery(spec=spec, with_states=with_states, with_versions=with_versions)
                queries.append((query, query.allocate(ids)))
            await self._fill(queries, answered)
            return [rows for _, rows in queries]

    async def dense(
        self, model: str | None = None, *, with_states: bool = False, timeout_s: float | None = None
    ) -> DensePart:
        """Return the dense tensors of a model, all of one step. Cancellation: harmless.

        While a trainer publishes a step the rows are of two; they are read again until all are of one.

        Args:
            model: Name of the model; None for the only one that has dense tensors.
            with_states: Read optimizer states, too.
            timeout_s: For the whole call, seconds; None for the reader's own.

        Raises:
            UnknownTableError: The model has no dense tensors.
            RequestError: Several models have some and none is named.
            UnavailableError: The rows were not of one step in time, or a shard did not answer; the message says which
                steps were seen.
            HeadraceError: A shard refused.
        """
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        assemblies, specs = DenseAssemblies(with_states=with_states), dict[str, TableSpec]()

        def late(time: str) -> str:
            seen = assemblies.describe(specs)
            return _with_reason(f"the dense tensors were not of one step within {time}: {seen}", self.links)

        async with read_deadline(self._timeout_s if timeout_s is None else timeout_s, None, late):
            while True:
                sets = dense_sets(
                    (spec_from_idl(table.spec), 0 if table.owner is None else table.owner.epoch)
                    for status in await self.status()
                    for table in status.tables
                    if self._model in (None, model_of(table.spec.fqn))
                )
                specs = sets[choose_model(sets, self._model if model is None else model)]
                queries = [RowQuery(spec=spec, with_states=with_states, with_versions=True) for spec in specs.values()]
                found = [(query, query.allocate(np.arange(query.spec.num_rows))) for query in queries]
                await self._fill(found, lambda: None)
                for query, rows in found:
                    columns = {"weights": rows.weights, **rows.states}
                    assemblies.load(query.spec, rows.row_ids, columns, rows.presence, rows.epochs, rows.steps)
                part = assemblies.whole(specs)
                if part is not None:
                    return part
                await asyncio.sleep(backoff.next_s())

    async def find_rows(self, fqn: str, identities: npt.ArrayLike, *, timeout_s: float | None = None) -> _Int64s:
        """Return the rows that have identities, int64[n]; -1 where there is none. Cancellation: harmless.

        A replica answers, which the reader is connected to; a parameter server has no index of identities. An identity
        belongs to the row last written with it, unless that row was deleted or got another identity since.

        Args:
            fqn: Table with identities.
            identities: int64[n], raw ids in any order; -1 stands for none.
            timeout_s: For the whole call, seconds; None for the reader's own, for each next reply.

        Raises:
            RequestError: The table has no identities, or the argument is not integers.
            UnauthorizedError: A parameter server was asked.
            HeadraceError: As for `get`.
        """
        async with self._deadline(f"answer about {fqn!r}", timeout_s, self._timeout_s) as answered:
            spec = await self._spec_with_identities(fqn)
            return await self._find(spec, row_ids_of(identities, "identities"), answered)

    async def get_by_identity(
        self,
        fqn: str,
        identities: npt.ArrayLike,
        *,
        with_states: bool = False,
        with_versions: bool = False,
        timeout_s: float | None = None,
    ) -> Rows:
        """Return the rows that have identities; see `find_rows` and `get`.

        Each returned row has the requested identity: one that changes between finding and reading is looked up again.
        Where no row has the identity, the row id is -1 and the presence MISSING. Cancellation: harmless.
        """
        async with self._deadline(f"answer about {fqn!r}", timeout_s, self._timeout_s) as answered:
            spec = await self._spec_with_identities(fqn)
            query = RowQuery(spec=spec, with_states=with_states, with_versions=with_versions)
            wanted = row_ids_of(identities, "identities")
            rows = query.allocate(np.full(wanted.size, -1, np.int64))
            for values in (rows.weights, *rows.states.values()):
                values[:] = 0
            left = np.flatnonzero(wanted != NO_IDENTITY)
            while left.size:
                row_ids = await self._find(spec, wanted[left], answered)
                left, row_ids = left[row_ids >= 0], row_ids[row_ids >= 0]
                got = await self._get(query, row_ids, answered)
                agrees = (got.presence == PRESENT) & (got.identities == wanted[left])
                rows.copy_from(got, agrees, left[agrees])
                left = left[~agrees]
            return rows

    def _deadline(self, what: str, total_s: float | None, answer_s: float | None) -> _Deadline:
        return read_deadline(total_s, answer_s, lambda time: _with_reason(f"no {what} within {time}", self.links))

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
        """Return digests of the shards' rows, by bucket; see `schemas/row_digest.py`. Cancellation: harmless.

        Each shard answers as of one position of its log; `TableDigest.is_steady` is False after writes in between.

        Args:
            fqn: Table.
            columns: Columns of weights and pointwise states, without rowwise states; None for whole rows.
            first_row: First row.
            end_row: End of the rows, exclusive; None for the table's end.
            with_presence: Return which rows are present.
            only_weights: Leave out all states, as a replica has none.
            timeout_s: Deadline, seconds; None for none: a shard digests some hundred thousand rows a second.
            on_progress: Called every few seconds with the rows digested since the last call.

        Raises:
            HeadraceError: As for `get`.
        """
        async with self._deadline(f"digests of {fqn!r}", timeout_s, None):
            spec = await self._spec_of(fqn, last_row=0 if end_row is None else end_row - 1)
            columns = spec.whole if columns is None else columns
            span = (first_row, 2**63 - 1 if end_row is None else end_row)
            flags = {"with_presence": with_presence, "only_weights": only_weights or None}
            digest = TableDigest(spec=spec, columns=columns)
            await _gather([self._digest(digest, link, span, flags, on_progress) for link in self.links])
            return digest

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
            digest.add(reply, first_row=first_row, end_row=end_row)
            on_rows(int(np.frombuffer(reply.counts, "<i8").sum()))
            digest.seqs[link.hello.shard] = reply.seq
            digest.is_steady &= seq in (None, reply.seq)
            if reply.next_row <= first_row:
                raise ProtocolError(f"{link.address} goes on at row {reply.next_row} after row {first_row}")
            seq, first_row = reply.seq, reply.next_row

    async def status(self, *, timeout_s: float | None = None) -> list[Any]:
        """Return each shard's `idl.StatusReply`, by index; `UnavailableError` if late. Cancellation: harmless."""
        async with self._deadline("status", timeout_s, self._timeout_s):
            return await _gather([retry(link.status) for link in self.links])

    async def scalars(self, fqn: str, *, timeout_s: float | None = None) -> dict[str, np.generic]:
        """Return a table's newest scalars (an optimizer's step count), by name. Cancellation: harmless."""
        statuses = await self.status(timeout_s=timeout_s)
        return scalars_by_table(statuses).get(self._names.find(fqn) or fqn, {})

    async def close(self) -> None:
        """Close all connections; idempotent. Cancellation: some may stay open until the next call."""
        await _close_all(set(self.links))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _spec_of(self, fqn: str, *, last_row: int = 0) -> TableSpec:
        name = self._names.find(fqn)
        if name is None or last_row >= (self.tables[name].num_rows or math.inf):  # it may be new, or have grown
            await self._refresh()
            name = self._names.find(fqn)
        if name is None:
            where = "on this server" if self._model is None else f"of model {self._model!r} on this server"
            raise UnknownTableError(f"no table {fqn!r} {where}; {describe_near(fqn, self.tables)}")
        return self.tables[name]

    async def _refresh(self) -> None:
        """Ask all shards for their tables."""
        await _gather([retry(link.refresh) for link in self.links])
        self._update_tables()

    def _update_tables(self) -> None:
        tables = _tables_of(self.links)
        self.tables = {name: spec for name, spec in tables.items() if self._model in (None, model_of(name))}
        self._names = TableNames(self.tables)

    async def _spec_with_identities(self, fqn: str) -> TableSpec:
        spec = await self._spec_of(fqn)
        if not spec.has_identities:
            raise RequestError(f"table {fqn!r} has no identities; read its rows by row id")
        return spec

    async def _find(self, spec: TableSpec, identities: _Int64s, answered: _Answered) -> _Int64s:
        link = self.links[0]  # a replica's: shards have no index of identities
        rows = np.empty(identities.size, np.int64)
        for some in _chunks(np.arange(identities.size), rows_in_reply(link.max_reply_bytes, IDENTITY_BYTES)):
            found = await self._find_in(link, spec, identities[some])
            if len(found.row_ids) != 8 * len(some):
                raise ProtocolError(f"{len(found.row_ids)} bytes of row ids for {len(some)} identities")
            answered()
            rows[some] = np.frombuffer(found.row_ids, "<i8")
        return rows

    async def _find_in(self, link: ShardLink, spec: TableSpec, identities: _Int64s) -> Any:
        request = idl.FindRowsRequest(fqn=spec.fqn, identities=identities.data)
        async with link.in_flight:
            return await retry(lambda: link.find_rows(request))

    async def _get(self, query: RowQuery, row_ids: _Int64s, answered: _Answered) -> Rows:
        rows = query.allocate(row_ids)
        await self._fill([(query, rows)], answered)
        return rows

    async def _fill(self, queries: Sequence[tuple[RowQuery, Rows]], answered: _Answered) -> None:
        of_shards: list[list[RowPart]] = [[] for _ in self.links]
        for query, rows in queries:
            shards = shards_of_rows(query.spec.seed, rows.row_ids, len(self.links))
            for shard, (link, parts) in enumerate(zip(self.links, of_shards, strict=True)):
                positions = np.flatnonzero(shards == shard) if len(self.links) > 1 else np.arange(len(rows.row_ids))
                for chunk in _chunks(positions, query.rows_at_once(link.max_reply_bytes)):
                    parts.append(RowPart(query=query, rows=rows, positions=chunk))
        work = [
            self._fill_parts(link, together, answered)
            for link, parts in zip(self.links, of_shards, strict=True)
            for together in parts_together(parts, link.max_reply_bytes)
        ]
        await _gather(work)

    async def _fill_parts(self, link: ShardLink, parts: Sequence[RowPart], answered: _Answered) -> None:
        request = request_for(parts)
        async with link.in_flight:
            reply = await retry(lambda: link.get(request))
        answered()
        scatter_reply(reply, parts)


def scalars_by_table(statuses: Sequence[Any]) -> dict[str, dict[str, np.generic]]:
    """Return the newest scalars of each table, by fqn and name, of all shards' `idl.StatusReply`.

    Raises:
        ProtocolError: A scalar is not one element of a data type.
    """
    newest: dict[str, dict[str, tuple[int, int, np.generic]]] = {}
    for table in [table for status in statuses for table in status.tables]:
        known = newest.setdefault(table.spec.fqn, {})
        for stored in table.scalars or ():
            scalar = stored.scalar
            if scalar.dtype not in set(DType) or len(scalar.data) != DType(scalar.dtype).size_bytes:
                raise ProtocolError(
                    f"table {table.spec.fqn!r}: scalar {scalar.name!r} has {len(scalar.data)} bytes of data type "
                    f"{scalar.dtype}"
                )
            value = np.frombuffer(scalar.data, DType(scalar.dtype).numpy)[0]
            if scalar.name not in known or (stored.epoch, stored.step) > known[scalar.name][:2]:
                known[scalar.name] = (stored.epoch, stored.step, value)
    return {fqn: {name: value for name, (_, _, value) in known.items()} for fqn, known in newest.items()}


@contextlib.asynccontextmanager
async def read_deadline(
    total_s: float | None, answer_s: float | None, describe: Callable[[str], str]
) -> AsyncIterator[_Answered]:
    """Bound a read by a total time or, without one, by the time until each next reply; yield what to call on a reply.

    A read of many rows from a slow disk may take as long as replies keep coming. None means no bound.

    Raises:
        UnavailableError: The deadline has passed; `describe` makes its text from the duration.
    """
    timeout_s = answer_s if total_s is None else total_s

    def answered() -> None:
        # A reply may come at the very moment the deadline expires.
        if total_s is None and timeout_s is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)

    try:
        async with asyncio.timeout(timeout_s) as timeout:
            yield answered
    except TimeoutError as exc:
        assert timeout_s is not None
        raise UnavailableError(describe(format_seconds(timeout_s))) from exc


async def _once(attempt: Callable[[], Awaitable[_T]]) -> _T:
    return await attempt()


def _failure_of(links: list[ShardLink]) -> HeadraceError | None:
    """Return the last failure of the first link that has one."""
    return next((link.failure for link in links if link.failure is not None), None)


def _with_reason(message: str, links: list[ShardLink]) -> str:
    return "; ".join([message, *([str(failure)] if (failure := _failure_of(links)) else [])])


def _tables_of(links: list[ShardLink]) -> dict[str, TableSpec]:
    """Return the tables of all shards together; a new table may not have reached each of them yet."""
    tables: dict[str, TableSpec] = {}
    for link in links:
        for struct in link.hello.tables or ():  # none before its first hello
            spec = spec_from_idl(struct)
            other = tables.setdefault(spec.fqn, spec)
            if spec.is_growth_of(other):
                tables[spec.fqn] = spec  # it has not grown at every shard yet
            elif other != spec and not other.is_growth_of(spec):
                raise ProtocolError(f"table {spec.fqn!r} differs between shards: {other.describe_difference(spec)}")
    return tables


def _chunks(positions: _Int64s, size: int) -> Iterator[_Int64s]:
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


async def _gather(work: list[Any]) -> list[Any]:
    """Run all at once; the first error cancels the others and is raised unchanged."""
    async with task_group() as group:
        tasks = [group.create_task(item) for item in work]
    return [task.result() for task in tasks]


async def _close_all(links: set[ShardLink]) -> None:
    await asyncio.gather(*(link.close() for link in links))
