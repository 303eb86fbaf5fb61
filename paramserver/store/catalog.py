"""The tables that a shard knows: their numbers, specs and record layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from headrace.schemas.errors import CorruptionError, SpecMismatchError, UnknownTableError
from headrace.schemas.near_names import first_of
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

__all__ = ["INDEXED_PREFIX", "Catalog", "Scalar", "Table", "pack_spec", "unpack_spec"]

# ON DISK: never rename.
_META_PREFIX = b"table/"
_SCALARS_PREFIX = b"scalars/"
# Of a table whose identities are indexed from its first row on.
INDEXED_PREFIX = b"identities/"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that a table has once, such as an optimizer's count of steps.

    Attributes:
        name: The optimizer's name for it.
        dtype: Element type.
        data: One element.
        epoch: Version of the value, first half.
        step: Second half.
    """

    name: str
    dtype: DType
    data: bytes
    epoch: int
    step: int


@dataclass(slots=True)
class Table:
    """A registered table.

    Attributes:
        table_id: Number in this shard's row keys, from 1.
        spec: What the table is.
        scalars: By name, the newest that have come to this shard.
    """

    table_id: int
    spec: TableSpec
    scalars: dict[str, Scalar] = field(default_factory=dict)
    _layouts: dict[tuple[int, int], RecordLayout] = field(default_factory=dict)

    def layout_of(self, shard: ColumnShard) -> RecordLayout:
        """Return the layout of the records of one column shard."""
        return self.layout_at(shard.offset, shard.width)

    def layout_at(self, offset: int, width: int) -> RecordLayout:
        """Return the layout of the records of some columns.

        Raises:
            SpecMismatchError: The table has no such columns.
        """
        layout = self._layouts.get((offset, width))
        if layout is None:
            fqn, dim = self.spec.fqn, self.spec.dim
            if offset < 0 or width < 1 or offset + width > dim:
                raise SpecMismatchError(f"table {fqn!r}: columns {offset}..{offset + width - 1} of a dim of {dim}")
            layout = RecordLayout(self.spec, ColumnShard(offset=offset, width=width))
            self._layouts[offset, width] = layout
        return layout


class Catalog:
    """Tables by name. Registration is kept in the update log and, once applied, in the store's metadata."""

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Read the tables back from the store's metadata.

        Raises:
            CorruptionError: An entry cannot be read.
        """
        self._tables: dict[str, Table] = {}
        for key, value in meta.items():
            if not key.startswith(_META_PREFIX):
                continue
            try:
                self._add(int(key[len(_META_PREFIX) :]), unpack_spec(msgpack.unpackb(value)))
            except (ValueError, TypeError, KeyError) as exc:
                raise CorruptionError(f"store metadata {key!r} is not a table: {exc}") from exc
        for table in self:
            key = _SCALARS_PREFIX + b"%d" % table.table_id
            try:
                for name, dtype, data, epoch, step in msgpack.unpackb(meta.get(key, b"\x90")):
                    table.scalars[name] = Scalar(name, DType(dtype), data, epoch, step)
            except (ValueError, TypeError) as exc:
                raise CorruptionError(f"store metadata {key!r} is not a list of scalars: {exc}") from exc

    def __iter__(self) -> Iterator[Table]:
        return iter(list(self._tables.values()))

    def find(self, fqn: str) -> Table:
        """Return a table by its fqn.

        Raises:
            UnknownTableError: No such table; the message names those that there are.
        """
        table = self._tables.get(fqn)
        if table is None:
            known = first_of(sorted(self._tables))  # to find the nearest of thousands would hold the shard up
            raise UnknownTableError(f"no table {fqn!r} here; registered tables: {known}")
        return table

    def check(self, specs: Iterable[TableSpec]) -> list[TableSpec]:
        """Return those specs that are not registered yet, each once.

        Raises:
            SpecMismatchError: A table of that name is registered, or given as well, with another spec.
        """
        new: dict[str, TableSpec] = {}
        for spec in specs:
            table = self._tables.get(spec.fqn)
            if table is None:
                other = new.setdefault(spec.fqn, spec)
                if other != spec:
                    raise SpecMismatchError(
                        f"table {spec.fqn!r} is given twice, and not alike: {other.describe_difference(spec)}"
                    )
            elif table.spec != spec:
                raise SpecMismatchError(
                    f"table {spec.fqn!r} is registered otherwise (registered ≠ yours): "
                    f"{table.spec.describe_difference(spec)}; what a table is stays: give yours another name, or serve "
                    f"another directory"
                )
        return list(new.values())

    def add(self, specs: Iterable[TableSpec]) -> dict[bytes, bytes]:
        """Register tables in order and return the metadata that keeps them; known tables are passed over."""
        meta = {}
        for spec in self.check(specs):
            table = self._add(len(self._tables) + 1, spec)
            meta[_META_PREFIX + b"%d" % table.table_id] = msgpack.packb(pack_spec(spec))
            if spec.has_identities:
                meta[INDEXED_PREFIX + b"%d" % table.table_id] = b"1"
        return meta

    def set_scalars(
        self, fqn: str, scalars: Iterable[tuple[str, DType, bytes]], epoch: int, step: int
    ) -> dict[bytes, bytes]:
        """Keep those scalars of a table that are as new as what there is; return the metadata that keeps them."""
        table = self.find(fqn)
        for name, dtype, data in scalars:
            known = table.scalars.get(name)
            if known is None or (epoch, step) >= (known.epoch, known.step):
                table.scalars[name] = Scalar(name, dtype, data, epoch, step)
        # ON DISK: the order is fixed.
        packed = [[s.name, int(s.dtype), s.data, s.epoch, s.step] for s in table.scalars.values()]
        return {_SCALARS_PREFIX + b"%d" % table.table_id: msgpack.packb(packed)}

    def _add(self, table_id: int, spec: TableSpec) -> Table:
        table = self._tables[spec.fqn] = Table(table_id, spec)
        return table


def pack_spec(spec: TableSpec) -> list[Any]:
    """Return a spec as the plain list that metadata and log records hold. ON DISK: the order is fixed."""
    states = [[state.name, int(state.kind), int(state.dtype), state.width] for state in spec.states]
    return [spec.fqn, spec.num_rows, spec.dim, int(spec.dtype), states, spec.has_identities]


def unpack_spec(packed: list[Any]) -> TableSpec:
    """Return the spec of a list made by `pack_spec`.

    Raises:
        ValueError: The list is not one.
        RequestError: A field is out of range.
    """
    fqn, num_rows, dim, dtype, states, has_identities = packed
    return TableSpec(
        fqn=fqn,
        num_rows=num_rows,
        dim=dim,
        dtype=DType(dtype),
        states=tuple(
            StateSpec(name=name, kind=StateKind(kind), dtype=DType(state_dtype), width=width)
            for name, kind, state_dtype, width in states
        ),
        has_identities=has_identities,
    )
