"""Row keys and row records: the store's key and value of a row of one column shard.

A key:

    byte  0      4        6       8                16
          table  offset   width   row id
          u32    u16      u16     u64      all big-endian, so that keys sort by table, column shard, row id

Each shard's catalog numbers tables from 1; table 0 is the store's own metadata. A record:

    byte  0      1        2          4      8      16       24 (or 32)
          flags  version  frequency  epoch  step   time_us  [identity]  weights  state 0  state 1 …
          u8     u8       u16        u32    i64    i64      i64         all little-endian

The table, not the row, decides the layout behind the header. A header alone with the flag DELETED is a mark: the row
was deleted in these columns, and older records of other layouts do not count there.
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
    "KEY_BYTES",
    "META_PREFIX",
    "MISSING",
    "NO_IDENTITY",
    "PRESENT",
    "RECORD_VERSION",
    "RecordLayout",
    "decode_row_ids",
    "encode_keys",
    "encode_keys_of",
    "key_prefix",
]

# ON DISK: never renumber.
KEY_BYTES = 16
META_PREFIX = b"\0\0\0\0"
_PREFIX_BYTES = 8
_KEY = np.dtype([("prefix", f"V{_PREFIX_BYTES}"), ("row", ">u8")])
RECORD_VERSION = 1
FLAG_DELETED = 1
MISSING, PRESENT = 0, 1  # ON THE WIRE: never renumber; `RowPresence` in paramserver.thrift
DELETED = 2  # a record that marks its columns as deleted; only inside a process
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


def encode_keys(table_id: int, shard: ColumnShard, row_ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of rows, int64[n], of one column shard of a table, 16 bytes each, in their order."""
    return encode_keys_of([key_prefix(table_id, shard)], [row_ids.size], row_ids)


def encode_keys_of(prefixes: Sequence[bytes], sizes: Sequence[int], row_ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of rows of several column shards, one shard after the other.

    Args:
        prefixes: `key_prefix` of each column shard.
        sizes: Number of rows of each column shard.
        row_ids: int64[n], ≥ 0.
    """
    keys = np.empty(row_ids.size, _KEY)
    keys["prefix"] = np.repeat(np.frombuffer(b"".join(prefixes), f"V{_PREFIX_BYTES}"), sizes)
    keys["row"] = row_ids.view(np.uint64)
    # An unstructured void array becomes a list of `bytes` in one pass, without a Python loop over rows.
    return cast("list[bytes]", keys.view(f"V{KEY_BYTES}").tolist())


def decode_row_ids(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the row ids, int64[n], of keys made by `encode_keys`."""
    return np.frombuffer(b"".join(keys), _KEY)["row"].astype(np.int64)


def key_prefix(table_id: int, shard: ColumnShard | None = None) -> bytes:
    """Return the prefix of all keys of a table, or of one of its column shards."""
    prefix = table_id.to_bytes(4, "big")
    if shard is None:
        return prefix
    return prefix + shard.offset.to_bytes(2, "big") + shard.width.to_bytes(2, "big")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    dtype: DType
    width: int
    size_bytes: int  # of one row; cached, because deltas need it often

    @classmethod
    def of(cls, name: str, dtype: DType, width: int) -> _Column:
        return cls(name, dtype, width, width * dtype.size_bytes)


class RecordLayout:
    """The layout of records of one column shard of one table.

    Arrays of records are structured numpy arrays of `dtype`: the header's fields, `weights`, and one field per state,
    `state:` plus its name. Columns are opaque bytes (`V` types), so gathering or scattering a row is one `memcpy` for
    every element type.

    Attributes:
        shard: Columns of the records.
        dtype: numpy type of a whole record.
        header_dtype: numpy type of the header alone, which is the whole record of a mark.
        columns: Element type and width of `weights` and of each state, by field name.
        fields_of_states: Field name of each state, by state name.
        size_bytes: Size of a whole record.
    """

    def __init__(self, spec: TableSpec, shard: ColumnShard) -> None:
        """Lay out the records of the columns `shard` of a table."""
        columns = {"weights": _Column.of("weights", spec.dtype, shard.width)}
        columns |= {f"state:{s.name}": _Column.of(s.name, s.dtype, s.width_in(shard)) for s in spec.states}
        header = [*HEADER_FIELDS, ("identity", "<i8")] if spec.has_identities else HEADER_FIELDS
        self._lay_out(shard, header, columns, [(field, f"V{column.size_bytes}") for field, column in columns.items()])

    @classmethod
    def without_columns(cls, shard: ColumnShard, fields: Sequence[tuple[str, str]]) -> Self:
        """Return the layout of records that are not rows: the header, then (name, numpy type) fields."""
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
        # Looking the fields up in `dtype` would take a third of the time of `views` for small deltas.
        self._column_dtypes = [(field, self.dtype[field]) for field in columns]

    def views(self, columns: Mapping[str, Any]) -> dict[str, _Array]:
        """Return each column as an array of opaque rows, without a copy.

        Args:
            columns: Contiguous bytes of `n × width` elements for `weights` and each `state:` field.

        Raises:
            ValueError: A column is not a whole number of rows; the caller should have checked.
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
        """Return one value per row: columns as for `views`, header as for `set_header`, identities int64[n] if any."""
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
        """Write the headers of records in place, except for the identity.

        Args:
            records: `dtype[n]` or `header_dtype[n]`.
            at: numpy index of the records to write.
            epoch: Epoch of all rows, or one per row.
            step: Step of all rows, or one per row.
            time_us: Wall clock of all rows, microseconds since 1970, or one per row.
            flags: 0 or FLAG_DELETED, or one per row.
        """
        records["flags"][at] = flags
        records["version"][at] = RECORD_VERSION
        records["frequency"][at] = 0
        records["epoch"][at] = epoch
        records["step"][at] = step
        records["time_us"][at] = time_us

    def values_of(self, records: _Array) -> list[bytes]:
        """Return the stored value of each record, `dtype[n]`, contiguous: of a mark its header, else the whole."""
        # An unstructured void array becomes a list of `bytes` in one pass, without a Python loop over rows.
        values = cast("list[bytes]", records.view(f"V{self.size_bytes}").tolist())
        for row in np.flatnonzero(records["flags"] & FLAG_DELETED).tolist():
            values[row] = values[row][: self.header_dtype.itemsize]
        return values

    def decode(self, values: Sequence[bytes | None]) -> tuple[_Array, npt.NDArray[np.uint8]]:
        """Return (records, presence) of values read from the store.

        Args:
            values: One value per row; None where the store has none.

        Returns:
            Structured `dtype[n]`, zero where missing and zero behind the header where it is a mark; and uint8[n],
            MISSING, PRESENT or DELETED.

        Raises:
            CorruptionError: A value is neither a record of this layout nor a mark.
        """
        size, header_size = self.size_bytes, self.header_dtype.itemsize
        presence = np.fromiter(map(_IS_RECORD, values), np.uint8, len(values))
        blank = bytes(size)
        full = [blank if value is None else value for value in values]
        sizes = set(map(len, full))
        if not sizes <= {size, header_size}:
            odd = min(sizes - {size, header_size})
            raise CorruptionError(f"a stored row has {odd} bytes; its table's records have {size}")
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


# ON THE WIRE: the identity of a row that no raw id is mapped to.
NO_IDENTITY = -1
