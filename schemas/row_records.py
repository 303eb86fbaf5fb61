"""Row records: the value that the store keeps for a row of a column shard.

    byte  0      1        2          4      8      16       24 (or 32)
          flags  version  frequency  epoch  step   time_us  [identity]  weights  state 0  state 1 …
          u8     u8       u16        u32    i64    i64      i64         all little-endian

The layout of what follows the header is the table's, not the row's. A deleted row is the header alone, with the flag
DELETED: its version keeps older updates from bringing the row back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import CorruptionError
from headrace.schemas.tables import ColumnShard, DType, TableSpec

__all__ = [
    "DELETED",
    "FLAG_DELETED",
    "HEADER_FIELDS",
    "MAX_EPOCH",
    "MISSING",
    "PRESENT",
    "RECORD_VERSION",
    "RecordLayout",
]

# ON DISK: never renumber.
RECORD_VERSION = 1
FLAG_DELETED = 1
MISSING, PRESENT, DELETED = 0, 1, 2  # ON THE WIRE: never renumber; `RowPresence` in paramserver.thrift
MAX_EPOCH = 2**32 - 1
HEADER_FIELDS = [
    ("flags", "u1"),
    ("version", "u1"),
    ("frequency", "<u2"),
    ("epoch", "<u4"),
    ("step", "<i8"),
    ("time_us", "<i8"),
]

_Array = npt.NDArray[Any]
_IS_RECORD = functools.partial(operator.is_not, None)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    dtype: DType
    width: int
    size_bytes: int  # of one row; not asked of `dtype` for each delta

    @classmethod
    def of(cls, name: str, dtype: DType, width: int) -> _Column:
        return cls(name, dtype, width, width * dtype.size_bytes)


class RecordLayout:
    """How the records of one column shard of one table are laid out.

    Arrays of records are structured numpy arrays of `dtype`: the fields of the header, `weights`, and one field a state
    named `state:` and the state's name. Columns are opaque bytes (`V` types) in them, so that gathering and scattering
    rows is one `memcpy` a row for every element type.

    Attributes:
        dtype: numpy type of a whole record.
        header_dtype: numpy type of the header alone, which is a whole record for a deleted row.
        columns: Element type and width of `weights` and each state, by field name.
        fields_of_states: Field name of each state, by the state's own.
    """

    def __init__(self, spec: TableSpec, shard: ColumnShard) -> None:
        """Lay out the records of `shard` of the table `spec`."""
        columns = {"weights": _Column.of("weights", spec.dtype, shard.width)}
        columns |= {f"state:{s.name}": _Column.of(s.name, s.dtype, s.width_in(shard)) for s in spec.states}
        header = [*HEADER_FIELDS, ("identity", "<i8")] if spec.has_identities else HEADER_FIELDS
        self._lay_out(shard, header, columns, [(field, f"V{column.size_bytes}") for field, column in columns.items()])

    @classmethod
    def without_columns(cls, shard: ColumnShard, fields: Sequence[tuple[str, str]]) -> Self:
        """Return a layout of records that are no table's rows: the header, then fields with numpy's names of types."""
        layout = cls.__new__(cls)
        layout._lay_out(shard, HEADER_FIELDS, {}, fields)
        return layout

    def _lay_out(
        self,
        shard: ColumnShard,
        header: Sequence[tuple[str, str]],
        columns: dict[str, _Column],
        fields: Sequence[tuple[str, str]],
    ) -> None:
        self.shard = shard
        self.columns = columns
        self.fields_of_states = {column.name: field for field, column in columns.items() if field != "weights"}
        self.header_dtype: np.dtype[Any] = np.dtype([*header])
        self.dtype: np.dtype[Any] = np.dtype([*header, *fields])
        self.size_bytes = self.dtype.itemsize
        # Of small deltas, to ask `dtype` for its fields would be a third of what their views cost.
        self._column_dtypes = [(field, self.dtype[field]) for field in columns]

    def views(self, columns: Mapping[str, Any]) -> dict[str, _Array]:
        """Return each column as an array of opaque rows, without a copy.

        Args:
            columns: For `weights` and each `state:` field, contiguous bytes of `n × width` elements.

        Raises:
            ValueError: A column is not a whole number of rows; its caller should have checked.
        """
        return {
            # `frombuffer` refuses an empty buffer.
            field: np.frombuffer(columns[field], dtype) if len(columns[field]) else np.empty(0, dtype)
            for field, dtype in self._column_dtypes
        }

    def encode(
        self,
        columns: Mapping[str, Any],
        *,
        epoch: int | _Array,
        step: int | _Array,
        time_us: int | _Array,
        identities: npt.NDArray[np.int64] | None = None,
    ) -> list[bytes]:
        """Return one record a row.

        Args:
            columns: For `weights` and each `state:` field, contiguous bytes of `n × width` elements.
            epoch: Epoch of all rows, or uint32[n].
            step: Step of all rows, or int64[n].
            time_us: Wall clock of all rows, microseconds since 1970, or int64[n].
            identities: int64[n] where the table has identities.
        """
        views = self.views(columns)
        records = np.zeros(views["weights"].size, self.dtype)
        self.set_header(records, ..., epoch=epoch, step=step, time_us=time_us)
        if identities is not None:
            records["identity"] = identities
        for field, view in views.items():
            records[field] = view
        return self.values_of(records)

    def set_header(
        self,
        records: _Array,
        at: Any,
        *,
        epoch: int | _Array,
        step: int | _Array,
        time_us: int | _Array,
        flags: int | _Array = 0,
    ) -> None:
        """Write all of the header but the identity of records in place.

        Args:
            records: `dtype[n]` or `header_dtype[n]`.
            at: Index of the records to write, as numpy takes it.
            epoch: Epoch of all rows, or one a row.
            step: Step of all rows, or one a row.
            time_us: Wall clock of all rows, microseconds since 1970, or one a row.
            flags: 0 or FLAG_DELETED, or one a row.
        """
        records["flags"][at] = flags
        records["version"][at] = RECORD_VERSION
        records["frequency"][at] = 0
        records["epoch"][at] = epoch
        records["step"][at] = step
        records["time_us"][at] = time_us

    def values_of(self, records: _Array) -> list[bytes]:
        """Return the values that keep records, in their order: a deleted row's header alone, else all of it.

        Args:
            records: `dtype[n]`, contiguous.
        """
        # An unstructured void array turns into a list of `bytes` in one pass, with no Python loop over rows.
        values = cast("list[bytes]", records.view(f"V{self.size_bytes}").tolist())
        for row in np.flatnonzero(records["flags"] & FLAG_DELETED).tolist():
            values[row] = values[row][: self.header_dtype.itemsize]
        return values

    def decode(self, values: Sequence[bytes | None]) -> tuple[_Array, npt.NDArray[np.uint8]]:
        """Return (records, presence) of values read from the store.

        Args:
            values: One value a row; None where the store has none.

        Returns:
            Structured `dtype[n]`, zero where missing and zero beyond the header where deleted, and `RowPresence`,
            uint8[n].

        Raises:
            CorruptionError: A value is neither a record of this layout nor a deleted row.
        """
        size, header_size = self.size_bytes, self.header_dtype.itemsize
        presence = np.fromiter(map(_IS_RECORD, values), np.uint8, len(values))
        blank = bytes(size)
        full = [blank if value is None else value for value in values]
        sizes = set(map(len, full))
        if not sizes <= {size, header_size}:
            odd = min(sizes - {size, header_size})
            raise CorruptionError(f"a stored row has {odd} bytes where its table's records have {size}")
        is_header = np.zeros(len(full), bool)
        if header_size in sizes:
            is_header = np.fromiter((len(value) == header_size for value in full), bool, len(full))
            padding = bytes(size - header_size)
            full = [value + padding if len(value) == header_size else value for value in full]
        joined = b"".join(full)
        records = np.frombuffer(joined, self.dtype) if joined else np.empty(0, self.dtype)
        if np.any((records["version"] != RECORD_VERSION) & (presence != MISSING)):
            raise CorruptionError(f"a stored row has a record version other than {RECORD_VERSION}")
        is_deleted = (records["flags"] & FLAG_DELETED) != 0
        if np.any(is_header & ~is_deleted):
            raise CorruptionError(f"a stored row has {header_size} bytes and is not marked as deleted")
        presence[is_deleted] = DELETED
        return records, presence
