"""Plan a read of rows: split it into requests to shards, and put the replies where they belong. No I/O."""

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
    "IDENTITY_BYTES",
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

# A reply this long is efficient, and still shares a connection fairly.
_CHUNK_BYTES = 8 * 2**20
# Room in a message for everything but its columns, per table, names included.
_OVERHEAD_BYTES = 4096
# Bound how long one request takes, so that others get their turn: a slow disk reads hundreds of rows a second, and
# each reply has its own deadline.
_MAX_TABLES = 64
_CHUNK_ROWS = 1024
MAX_ROWS_READ = 2**20
"""Most rows that a shard reads for one request; each takes about 100 bytes besides its columns meanwhile."""
MAX_TABLES_READ = 1024
"""Most tables that a server reads for one request; they cost its event loop some milliseconds."""
IDENTITY_BYTES = 8
"""Bytes of a `FindRowsReply` for each identity."""
_ROW_ID_BYTES = 8
_VERSION_BYTES = 3 * 8

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of one table, in the order of the request.

    Attributes:
        row_ids: int64[n], as requested.
        presence: uint8[n], `RowPresence`.
        weights: [n, dim] of the table's dtype (bfloat16 as uint16); zeros where the row is not present.
        states: By name, [n, width] of the state's dtype; empty unless requested.
        epochs: int64[n] if versions were requested, 0 where missing; else None.
        steps: int64[n], likewise.
        times_us: int64[n], microseconds since 1970, likewise.
        identities: int64[n] if the table has them; else None.
    """

    row_ids: _Int64s
    presence: npt.NDArray[np.uint8]
    weights: npt.NDArray[Any]
    states: dict[str, npt.NDArray[Any]]
    epochs: _Int64s | None
    steps: _Int64s | None
    times_us: _Int64s | None
    identities: _Int64s | None

    def copy_from(self, source: Rows, which: npt.NDArray[np.bool_], at: _Int64s) -> None:
        """Copy the chosen rows of `source`, bool[m], to positions of this object, int64[n]."""
        for name in ("row_ids", "presence", "weights", "epochs", "steps", "times_us", "identities"):
            column = getattr(self, name)
            if column is not None:
                column[at] = getattr(source, name)[which]
        for name, state in self.states.items():
            state[at] = source.states[name][which]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuery:
    """The columns to read of one table: optimizer states and versions (epoch, step, time) are optional."""

    spec: TableSpec
    with_states: bool = False
    with_versions: bool = False

    @property
    def widths(self) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Elements per row and their dtype, by state."""
        spec = self.spec
        return {s.name: (s.width_in(spec.whole), s.dtype.numpy) for s in spec.states} if self.with_states else {}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the reply, or in the request if that is more."""
        spec = self.spec
        row_bytes = 1 + spec.dim * spec.dtype.size_bytes + sum(w * d.itemsize for w, d in self.widths.values())
        row_bytes += _VERSION_BYTES * self.with_versions + 8 * spec.has_identities
        return max(row_bytes, _ROW_ID_BYTES)

    def rows_at_once(self, max_reply_bytes: int) -> int:
        """Return how many rows to request at once: they fit a reply, and a slow disk reads them in time."""
        return min(rows_in_reply(max_reply_bytes, self.row_bytes), _CHUNK_ROWS)

    def allocate(self, row_ids: _Int64s) -> Rows:
        """Return rows for replies to be scattered to, none present; keeps `row_ids` without copying."""
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
        """Copy an `idl.GetEmbeddingsReply` or `idl.RowsFound` into rows at `positions`, int64[n], in its order.

        Raises:
            ProtocolError: The reply does not match the request.
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
    """Rows of one table in one request to one shard: `positions`, int64[n], of `rows`, the target of the reply."""

    query: RowQuery
    rows: Rows
    positions: _Int64s


def parts_together(parts: Iterable[RowPart], max_reply_bytes: int) -> Iterator[list[RowPart]]:
    """Yield the parts of each request; small tables share one, so that they share a round trip.

    Each part fits a reply, and all queries agree on states and versions.
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
    """Return the `idl.GetEmbeddingsRequest` for parts that share a request."""
    first, *more = [{"fqn": part.query.spec.fqn, "row_ids": part.rows.row_ids[part.positions].data} for part in parts]
    query = parts[0].query
    request = idl.GetEmbeddingsRequest(**first, with_states=query.with_states, with_versions=query.with_versions)
    if more:
        request.more = [idl.RowsWanted(**wanted) for wanted in more]
    return request


def scatter_reply(reply: Any, parts: Sequence[RowPart]) -> None:
    """Copy a reply into its parts.

    Raises:
        ProtocolError: The reply does not match the request.
    """
    first, *more = parts
    first.query.scatter(reply, first.rows, first.positions)
    answers = reply.more or ()
    if len(answers) != len(more):
        raise ProtocolError(f"rows of {len(answers) + 1} tables where {len(parts)} were asked for")
    for found, part in zip(answers, more, strict=True):
        part.query.scatter(found, part.rows, part.positions)


def rows_in_reply(max_reply_bytes: int, row_bytes: int) -> int:
    """Return how many rows of `row_bytes` to request at once, at least one, so that the reply stays short."""
    return max(min(max_reply_bytes - _OVERHEAD_BYTES, _CHUNK_BYTES) // row_bytes, 1)
