"""A question for rows of a table: how it is put to a shard, and where the rows of its answers belong. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.tables import TableSpec

__all__ = [
    "MAX_ROWS_READ",
    "MAX_TABLES_READ",
    "RowPart",
    "RowQuery",
    "Rows",
    "parts_together",
    "request_for",
    "rows_in_reply",
    "scatter_reply",
]

# An answer of this size is long enough to be fast, and short enough to share a connection with others.
_CHUNK_BYTES = 8 * 2**20
# What a message holds besides its columns, of each table, with room for names.
_OVERHEAD_BYTES = 4096
# So that a request's answer is not long in coming, and others get their turn.
_MAX_TABLES = 64
# Likewise: a slow disk reads hundreds of rows a second, and each answer has its own deadline.
_CHUNK_ROWS = 1024
MAX_ROWS_READ = 2**20
"""Rows that one request may ask a shard for: while it looks them up, each takes some 100 bytes besides its columns."""
MAX_TABLES_READ = 1024
"""Tables that a server reads for one request at most: some milliseconds of its event loop."""
_ROW_ID_BYTES = 8
_VERSION_BYTES = 3 * 8

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of one table, in the order in which they were asked for.

    Attributes:
        row_ids: int64[n], as asked.
        presence: uint8[n], `RowPresence`.
        weights: [n, dim] of the table's dtype (bfloat16 as uint16); zeros where the row is not present.
        states: By name, [n, width] of the state's dtype; empty unless asked for.
        epochs: int64[n], with versions: 0 where missing; else None.
        steps: int64[n], likewise.
        times_us: int64[n], microseconds since 1970, likewise.
        identities: int64[n] when the table has them; else None.
    """

    row_ids: _Int64s
    presence: npt.NDArray[np.uint8]
    weights: npt.NDArray[Any]
    states: dict[str, npt.NDArray[Any]]
    epochs: _Int64s | None
    steps: _Int64s | None
    times_us: _Int64s | None
    identities: _Int64s | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuery:
    """What is asked of a table, and how its answers are laid out.

    Attributes:
        spec: The table.
        with_states: Optimizer states are asked for too.
        with_versions: Epoch, step and time of each row's last update are asked for too.
    """

    spec: TableSpec
    with_states: bool = False
    with_versions: bool = False

    @property
    def widths(self) -> dict[str, tuple[int, np.dtype[Any]]]:
        """By state, elements a row and their type."""
        spec = self.spec
        return {s.name: (s.width_in(spec.whole), s.dtype.numpy) for s in spec.states} if self.with_states else {}

    @property
    def row_bytes(self) -> int:
        """What a row takes of a reply, or of its request where that is more."""
        spec = self.spec
        row_bytes = 1 + spec.dim * spec.dtype.size_bytes + sum(w * d.itemsize for w, d in self.widths.values())
        row_bytes += _VERSION_BYTES * self.with_versions + 8 * spec.has_identities
        return max(row_bytes, _ROW_ID_BYTES)

    def rows_at_once(self, max_reply_bytes: int) -> int:
        """Return how many rows fit a reply of that length, and their request, and are read in time by a slow disk."""
        return min(rows_in_reply(max_reply_bytes, self.row_bytes), _CHUNK_ROWS)

    def allocate(self, row_ids: _Int64s) -> Rows:
        """Return rows for answers to be scattered to, none of them present; `row_ids` is kept, not copied."""
        n, spec = len(row_ids), self.spec
        version = [np.zeros(n, np.int64) if self.with_versions else None for _ in range(3)]
        return Rows(
            row_ids=row_ids,
            presence=np.zeros(n, np.uint8),
            weights=np.empty((n, spec.dim), spec.dtype.numpy),
            states={name: np.empty((n, width), dtype) for name, (width, dtype) in self.widths.items()},
            epochs=version[0],
            steps=version[1],
            times_us=version[2],
            identities=np.zeros(n, np.int64) if spec.has_identities else None,
        )

    def scatter(self, reply: Any, rows: Rows, positions: _Int64s) -> None:
        """Copy an answer to where its rows belong.

        Args:
            reply: `idl.GetEmbeddingsReply` or `idl.RowsFound` for some of the rows.
            rows: As allocated; filled in place.
            positions: int64[n], which of them were asked for, in their order.

        Raises:
            ProtocolError: The answer is not what was asked for.
        """
        states = {column.name: column.data for column in reply.states}
        columns = [
            ("presence", reply.presence, rows.presence),
            ("weights", reply.weights, rows.weights),
            ("epochs", reply.epochs, rows.epochs),
            ("steps", reply.steps, rows.steps),
            ("times_us", reply.times_us, rows.times_us),
            ("identities", reply.identities, rows.identities),
            *((f"state {name!r}", states.get(name), target) for name, target in rows.states.items()),
        ]
        for name, data, target in columns:
            if target is not None:
                self._scatter_column(name, data, target, positions)

    def _scatter_column(self, name: str, data: Any, target: npt.NDArray[Any], positions: _Int64s) -> None:
        shape = (len(positions), *target.shape[1:])
        size_bytes = math.prod(shape) * target.itemsize
        if data is None or len(data) != size_bytes:
            found = "nothing" if data is None else f"{len(data)} bytes"
            raise ProtocolError(f"table {self.spec.fqn!r}: {found} of {name} where {size_bytes} bytes were expected")
        target[positions] = np.frombuffer(data, target.dtype).reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPart:
    """Rows of one table that one shard is asked for at once.

    Attributes:
        query: What is asked of the table.
        rows: Where the answer belongs, as allocated.
        positions: int64[n], which of the rows.
    """

    query: RowQuery
    rows: Rows
    positions: _Int64s


def parts_together(parts: Iterable[RowPart], max_reply_bytes: int) -> Iterator[list[RowPart]]:
    """Yield the parts that go into one request each: of small tables several, so that not each costs a round trip.

    Args:
        parts: Each fits a reply; the queries ask for states and versions alike.
        max_reply_bytes: Longest message that the shard sends.
    """
    together: list[RowPart] = []
    left = limit = min(max_reply_bytes, _CHUNK_BYTES)
    num_rows = 0
    for part in parts:
        size_bytes = _OVERHEAD_BYTES + part.positions.size * part.query.row_bytes
        num_rows += part.positions.size
        if together and (size_bytes > left or num_rows > _CHUNK_ROWS or len(together) == _MAX_TABLES):
            yield together
            together, left, num_rows = [], limit, part.positions.size
        together.append(part)
        left -= size_bytes
    if together:
        yield together


def request_for(parts: Sequence[RowPart]) -> Any:
    """Return the `idl.GetEmbeddingsRequest` for parts that go together."""
    first, *more = [{"fqn": part.query.spec.fqn, "row_ids": part.rows.row_ids[part.positions].data} for part in parts]
    query = parts[0].query
    request = idl.GetEmbeddingsRequest(**first, with_states=query.with_states, with_versions=query.with_versions)
    if more:
        request.more = [idl.RowsWanted(**wanted) for wanted in more]
    return request


def scatter_reply(reply: Any, parts: Sequence[RowPart]) -> Sequence[RowPart]:
    """Copy an answer to where it belongs; return the parts that it leaves out: all but the first, by an older server.

    Raises:
        ProtocolError: The answer is not what was asked for.
    """
    first, *more = parts
    first.query.scatter(reply, first.rows, first.positions)
    if not more or reply.more is None:
        return more
    if len(reply.more) != len(more):
        raise ProtocolError(f"rows of {len(reply.more) + 1} tables where {len(parts)} were asked for")
    for found, part in zip(reply.more, more, strict=True):
        part.query.scatter(found, part.rows, part.positions)
    return ()


def rows_in_reply(max_reply_bytes: int, row_bytes: int) -> int:
    """Return how many rows to ask for at once: one at least, and an answer that is short enough.

    Args:
        max_reply_bytes: Longest message that the shard sends.
        row_bytes: What a row takes of the answer, or of the request where that is more.
    """
    return max(min(max_reply_bytes - _OVERHEAD_BYTES, _CHUNK_BYTES) // row_bytes, 1)
