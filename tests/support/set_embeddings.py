"""Batches as writers send them: deltas of tables, and `setEmbeddings` requests of such deltas."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.idl import idl
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["delta_of", "request_of"]


def delta_of(
    spec: TableSpec,
    row_ids: Any,
    weights: Any,
    *,
    states: dict[str, Any] | float = 0.0,
    shard: ColumnShard | None = None,
    **changes: Any,
) -> Any:
    """Return the delta of some rows of a table.

    Args:
        spec: The table's.
        row_ids: Of the rows.
        weights: Of the rows, or one value for all elements.
        states: The same for each state by name, or one value for all elements of all states.
        shard: The columns; the whole rows by default.
        changes: Other fields.
    """
    shard = shard or spec.whole
    ids = np.asarray(row_ids, "<i8")

    def column(values: Any, dtype: npt.DTypeLike, width: int) -> npt.NDArray[Any]:
        array = np.ascontiguousarray(values, dtype)
        return array.reshape(ids.size, width) if np.ndim(values) else np.full((ids.size, width), array)

    made = [
        idl.StateColumn(
            name=state.name,
            dtype=int(state.dtype),
            width=state.width_in(shard),
            data=column(
                states[state.name] if isinstance(states, dict) else states, state.dtype.numpy, state.width_in(shard)
            ),
        )
        for state in spec.states
    ]
    fields = {
        "fqn": spec.fqn,
        "fingerprint": spec.fingerprint,
        "column_offset": shard.offset,
        "width": shard.width,
        "row_ids": ids,
        "weights": column(weights, spec.dtype.numpy, shard.width),
        "states": made,
    }
    return idl.TableDelta(**(fields | changes))


def request_of(*deltas: Any, client_seq: int = 1, ends_step: bool = True, **changes: Any) -> Any:
    """Return the next batch of the run's only writer, which ends the step of the same number; or as `changes` say."""
    fields = {
        "run": "run",
        "client": "rank0",
        "epoch": 1,
        "step": client_seq,
        "time_us": 1,
        "is_exact_cut": ends_step,
        "deltas": list(deltas),
    }
    return idl.SetEmbeddingsRequest(client_seq=client_seq, ends_step=ends_step, **(fields | changes))
