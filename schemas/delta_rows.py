"""Some rows of an `idl.TableDelta`, as another delta. No I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.idl import idl

__all__ = ["select_rows"]


def select_rows(delta: Any, rows: npt.NDArray[np.intp], deleted: npt.NDArray[np.intp]) -> Any:
    """Return a copy of some rows of an `idl.TableDelta`.

    Args:
        delta: Its columns are bytes, or views of them.
        rows: int[k], places among its `row_ids`.
        deleted: int[m], places among its `deleted_row_ids`.
    """
    num_rows = len(delta.row_ids) // 8

    def select(data: Any) -> Any:
        if data is None or not num_rows:
            return data
        return np.frombuffer(data, np.uint8).reshape(num_rows, -1)[rows].tobytes()

    return idl.TableDelta(
        fqn=delta.fqn,
        fingerprint=delta.fingerprint,
        column_offset=delta.column_offset,
        width=delta.width,
        row_ids=select(delta.row_ids),
        weights=select(delta.weights),
        states=[
            idl.StateColumn(name=state.name, dtype=state.dtype, width=state.width, data=select(state.data))
            for state in delta.states
        ],
        identities=select(delta.identities),
        deleted_row_ids=np.frombuffer(delta.deleted_row_ids or b"", "<i8")[deleted].tobytes(),
        scalars=delta.scalars,
    )
