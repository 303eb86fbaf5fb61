"""Rows by identity, of a whole server: an identity may be on any shard, so all are asked; the newest answer counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.row_query import Rows
from headrace.paramserver.store.identity_index import FoundRows
from headrace.schemas.errors import ProtocolError
from headrace.schemas.identity_claims import NO_IDENTITY
from headrace.schemas.row_records import PRESENT

__all__ = ["IDENTITY_BYTES", "combine", "decode_found", "read_by_identity"]

# What an answer has for each identity.
IDENTITY_BYTES = 24

_Ids = npt.NDArray[np.int64]


def decode_found(reply: Any, num_identities: int) -> FoundRows:
    """Return what a shard's `idl.FindRowsReply` says.

    Raises:
        ProtocolError: Its columns are not as long as the request's.
    """
    columns = {name: getattr(reply, name) for name in ("row_ids", "epochs", "steps")}
    for name, data in columns.items():
        if len(data) != 8 * num_identities:
            raise ProtocolError(f"{len(data)} bytes of {name} for {num_identities} identities")
    return FoundRows(seq=reply.seq, **{name: np.frombuffer(data, "<i8") for name, data in columns.items()})


def combine(found: Sequence[FoundRows]) -> _Ids:
    """Return the row of each identity, int64[n], -1 where none has it, from the answers of all shards.

    The shard counts that wrote a row with the identity last; of equals one that still has such a row.
    """
    size = found[0].row_ids.size
    rows, epochs, steps = np.full(size, -1, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for one in found:
        is_same = (one.epochs == epochs) & (one.steps == steps)
        is_newer = (one.epochs > epochs) | ((one.epochs == epochs) & (one.steps > steps))
        wins = is_newer | (is_same & (rows < 0))
        rows[wins], epochs[wins], steps[wins] = one.row_ids[wins], one.epochs[wins], one.steps[wins]
    return rows


async def read_by_identity(
    identities: _Ids,
    rows: Rows,
    find: Callable[[_Ids], Awaitable[_Ids]],
    get: Callable[[_Ids], Awaitable[Rows]],
) -> None:
    """Fill rows by identity; a row that is given to another identity between the two reads is looked for again.

    Args:
        identities: int64[n].
        rows: As allocated for n rows, none present; filled in place.
        find: Returns the rows of identities.
        get: Returns rows by row id.

    Cancellation: harmless.
    """
    rows.row_ids[:] = -1
    rows.weights[:] = 0
    for state in rows.states.values():
        state[:] = 0
    left = np.flatnonzero(identities != NO_IDENTITY)
    while left.size:
        row_ids = await find(identities[left])
        left, row_ids = left[row_ids >= 0], row_ids[row_ids >= 0]
        got = await get(row_ids)
        assert got.identities is not None
        agrees = (got.presence == PRESENT) & (got.identities == identities[left])
        _copy(got, agrees, rows, left[agrees])
        left = left[~agrees]


def _copy(source: Rows, which: npt.NDArray[np.bool_], target: Rows, at: _Ids) -> None:
    for name in ("row_ids", "presence", "weights", "epochs", "steps", "times_us", "identities"):
        column = getattr(target, name)
        if column is not None:
            column[at] = getattr(source, name)[which]
    for name, state in target.states.items():
        state[at] = source.states[name][which]
