"""Row chunks: whole rows of one table from a file, on their way into a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import NonFiniteError, RequestError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import MAX_EPOCH

__all__ = ["RowChunk"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowChunk:
    """Some rows of one table, ascending by row id, each once.

    `columns` has `weights` and each `state:NAME`, [n, width], contiguous, of the spec's dtypes (bfloat16 as uint16).
    `epochs`, `steps` and `times_us` (microseconds since 1970) are one number for all rows, or int64[n]. `identities` is
    int64[n] where the table has them.
    """

    row_ids: _Ids
    columns: Mapping[str, _Array]
    epochs: int | _Ids
    steps: int | _Ids
    times_us: int | _Ids
    identities: _Ids | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of ids and columns."""
        return self.row_ids.nbytes + sum(column.nbytes for column in self.columns.values())

    @property
    def newest_version(self) -> tuple[int, int]:
        """(epoch, step) of the newest row; (0, 0) without rows."""
        if not self.row_ids.size:
            return 0, 0
        epochs, steps = (np.broadcast_to(np.asarray(part), self.row_ids.size) for part in (self.epochs, self.steps))
        epoch = int(epochs.max())
        return epoch, int(steps[epochs == epoch].max())

    def check(self, spec: TableSpec, *, after_row: int) -> None:
        """Check ids and versions; `after_row` is the last row of the chunk before, −1 before the first.

        Raises:
            RequestError: An id is out of range or not above the one before it, or a version is out of range.
        """
        spec.check_row_ids(self.row_ids)
        falls = np.flatnonzero(np.diff(self.row_ids, prepend=after_row) <= 0)
        if falls.size:
            at = int(falls[0])
            before = after_row if at == 0 else int(self.row_ids[at - 1])
            raise RequestError(
                f"table {spec.fqn!r}: row {int(self.row_ids[at])} follows row {before}; rows must be ascending"
            )
        epochs, steps = np.asarray(self.epochs), np.asarray(self.steps)
        if np.any(epochs < 1) or np.any(epochs > MAX_EPOCH) or np.any(steps < 0):
            raise RequestError(f"table {spec.fqn!r}: an epoch is not in 1..{MAX_EPOCH}, or a step is below 0")

    def is_finite(self, layout: RecordLayout) -> npt.NDArray[np.bool_]:
        """Return bool[n]: whether all values of a row are finite."""
        finite = np.ones(self.row_ids.size, bool)
        for field, column in self.columns.items():
            dtype = layout.columns[field].dtype
            if not dtype.is_finite(column):
                bad = [at for at in np.flatnonzero(finite).tolist() if not dtype.is_finite(column[at])]
                finite[bad] = False
        return finite

    def check_finite(self, spec: TableSpec, layout: RecordLayout) -> None:
        """Raise NonFiniteError for the first row that has a NaN or infinity."""
        finite = self.is_finite(layout)
        if not finite.all():
            row = int(self.row_ids[np.flatnonzero(~finite)[0]])
            raise NonFiniteError(f"table {spec.fqn!r}: row {row} has a NaN or an infinity")

    def take(self, rows: Any) -> RowChunk:
        """Return a chunk of some rows: intp[m] ascending positions, bool[n], or a slice."""

        def some(values: Any) -> Any:
            return values[rows] if isinstance(values, np.ndarray) else values

        return RowChunk(
            row_ids=self.row_ids[rows],
            columns={field: column[rows] for field, column in self.columns.items()},
            epochs=some(self.epochs),
            steps=some(self.steps),
            times_us=some(self.times_us),
            identities=some(self.identities),
        )

    def records(self, layout: RecordLayout) -> _Array:
        """Return the records of the rows, `layout.dtype`[n], for a layout of whole rows."""
        records = np.zeros(self.row_ids.size, layout.dtype)
        layout.set_header(records, ..., epoch=self.epochs, step=self.steps, time_us=self.times_us)
        if self.identities is not None:
            records["identity"] = self.identities
        for field, column in self.columns.items():
            if column.size:
                records[field] = np.ascontiguousarray(column).view(f"V{layout.columns[field].size_bytes}")[:, 0]
        return records
