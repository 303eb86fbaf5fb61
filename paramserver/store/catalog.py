"""The catalog: a shard's tables with their numbers, specs, record layouts, scalars and owners."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import CorruptionError, SpecMismatchError, UnknownTableError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec, mismatch
from headrace.schemas.version import MAX_EPOCH, MAX_STEP

__all__ = ["Catalog", "Filling", "Owner", "Scalar", "Table", "pack_spec", "unpack_spec"]

# ON DISK: never rename.
_META_PREFIX = b"table/"
_SCALARS_PREFIX = b"scalars/"
_OWNER_PREFIX = b"owner/"
# Of a table of which rows were deleted.
_DELETES_PREFIX = b"deletes/"
# Followed by a fingerprint that a table had before it grew; the value is the table's number.
_EARLIER_PREFIX = b"earlier/"
# Of a table that lacks rows.
_FILLING_PREFIX = b"filling/"
# The store deletes keys with this value.
_REMOVED = b""
# Followed by the number of a dropped table, which no other table gets; the value is its name and the drop's epoch.
_DROPPED_PREFIX = b"dropped/"


@dataclass(frozen=True, slots=True)
class Scalar:
    """An optimizer value that a table has once, such as a step count: its version, and one element of `dtype`."""

    name: str
    dtype: DType
    data: bytes
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that may write a table, and the epoch in which it named the table first.

    Attributes:
        is_backfill: The run is a backfill, which makes no steps.
        has_ended: The run writes no more.
        former: Run and epoch of the last trainer that owned the table before this run; None if there was none.
        since: The epoch in which the run took the table; rows of earlier ones are of others, with steps of their own.
        first_step: The first step that all ranks of the run have ended since; -1 before.
    """

    run: str
    epoch: int
    is_backfill: bool = False
    has_ended: bool = False
    former: tuple[str, int] | None = None
    since: int = 0
    first_step: int = -1

    def after(self, known: Owner | None) -> Owner:
        """Return this new owner with what it takes over of the known one."""
        if known is None:
            return dataclasses.replace(self, since=self.epoch)
        if known.run == self.run:
            return dataclasses.replace(self, former=known.former, since=known.since, first_step=known.first_step)
        former = known.former if known.is_backfill else (known.run, known.epoch)
        return dataclasses.replace(self, former=former, since=self.epoch)

    def joined(self, other: Owner | None) -> Owner:
        """Return the owner of a table of which two shards know these: it has done what it has done at both."""
        if other is None or self.epoch != other.epoch:
            return self if other is None or self.epoch > other.epoch else other
        steps = self.first_step, other.first_step
        return dataclasses.replace(
            self, has_ended=self.has_ended and other.has_ended, first_step=-1 if -1 in steps else max(steps)
        )

    def pack(self) -> bytes:
        """Return it as the store's metadata has it. ON DISK: the order is fixed."""
        state = [self.run, self.epoch, self.is_backfill, self.has_ended, self.former, self.since, self.first_step]
        packed: bytes = msgpack.packb(state)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Owner:
        """Return the owner that `pack` packed; raise ValueError or TypeError if it is none."""
        run, epoch, is_backfill, has_ended, *more = msgpack.unpackb(packed)
        if not more:  # of release 0.3.0
            return cls(run, epoch, is_backfill, has_ended)
        former, since, first_step = more
        return cls(run, epoch, is_backfill, has_ended, None if former is None else tuple(former), since, first_step)


@dataclass(frozen=True, slots=True)
class Filling:
    """A table lacks rows until every rank of an epoch has ended a step after this one.

    Attributes:
        epoch: That of the trainer that sends all rows, or of whoever else brings them in.
        after_step: The highest step that any of its ranks may have ended before it sent them.
        from_row: Only rows from this one on are lacking: the table was whole before it grew.
        updated_only: The trainer sends updated rows only, by its user's word: the table lacks rows until a trainer
            sends all of them.
    """

    epoch: int
    after_step: int
    from_row: int = 0
    updated_only: bool = False

    def pack(self) -> bytes:
        """Return it as the store's metadata has it. ON DISK: the order is fixed."""
        packed: bytes = msgpack.packb([self.epoch, self.after_step, self.from_row, self.updated_only])
        return packed


@dataclass(slots=True)
class Table:
    """A registered table.

    Attributes:
        table_id: Its number in this shard's row keys, from 1.
        spec: What it looks like.
        scalars: Its newest scalars, by name.
        owner: None until a trainer or a backfill names it.
        has_deletes: Rows of it were deleted: nothing tells which of those that are not there.
        earlier: Fingerprints from before the table grew. Old records of the log, and ranks that are behind, have them.
        filling: None if a trainer has sent all rows, or none has said that it sends them.
    """

    table_id: int
    spec: TableSpec
    scalars: dict[str, Scalar] = field(default_factory=dict)
    owner: Owner | None = None
    has_deletes: bool = False
    earlier: frozenset[int] = frozenset()
    filling: Filling | None = None
    _layouts: dict[tuple[int, int], RecordLayout] = field(default_factory=dict)

    def is_of(self, spec: TableSpec) -> bool:
        """Return whether a spec is the table's, or was before it grew. Thread: any."""
        # In this order: a table that grows meanwhile has the fingerprint among its earlier ones first.
        return spec.fingerprint == self.spec.fingerprint or spec.fingerprint in self.earlier

    def layout_of(self, shard: ColumnShard) -> RecordLayout:
        """Return the record layout of a column shard."""
        return self.layout_at(shard.offset, shard.width)

    def layout_at(self, offset: int, width: int) -> RecordLayout:
        """Return the record layout of some columns. Raises SpecMismatchError when the table has no such columns."""
        layout = self._layouts.get((offset, width))
        if layout is None:
            fqn, dim = self.spec.fqn, self.spec.dim
            if offset < 0 or width < 1 or offset + width > dim:
                raise SpecMismatchError(f"table {fqn!r}: columns {offset}..{offset + width - 1} of a dim of {dim}")
            layout = RecordLayout(self.spec, ColumnShard(offset=offset, width=width))
            self._layouts[offset, width] = layout
        return layout


class Catalog:
    """The tables by name. Registrations are kept in the update log and, once applied, in the store's metadata.

    Attributes:
        drop_epochs: Of each name of which a table was dropped, the epoch of the last drop.
    """

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Read the tables from the store's metadata. Raises CorruptionError when an entry cannot be read."""
        self._tables: dict[str, Table] = {}
        self._filling: dict[int, Table] = {}  # those that lack rows, by number
        self._starting: dict[int, Table] = {}  # those of trainers without a first step, by number
        self._dropped: dict[int, tuple[str, int]] = {}  # name and the drop's epoch, by number
        self.drop_epochs: dict[str, int] = {}
        for key, value in meta.items():
            if key.startswith(_META_PREFIX):
                with _reading(key, "a table"):
                    self._add(int(key[len(_META_PREFIX) :]), unpack_spec(msgpack.unpackb(value)))
            elif key.startswith(_DROPPED_PREFIX):
                with _reading(key, "a dropped table"):
                    name, epoch = msgpack.unpackb(value)
                    self._note_drop(int(key[len(_DROPPED_PREFIX) :]), name, epoch)
        by_number = {b"%d" % table.table_id: table for table in self}
        for key, value in meta.items():
            if key.startswith(_EARLIER_PREFIX):
                with _reading(key, "an earlier fingerprint"):
                    by_number[value].earlier |= {int(key[len(_EARLIER_PREFIX) :])}
        for number, table in by_number.items():
            if (key := _SCALARS_PREFIX + number) in meta:
                with _reading(key, "a list of scalars"):
                    for name, dtype, data, epoch, step in msgpack.unpackb(meta[key]):
                        table.scalars[name] = Scalar(name, DType(dtype), data, epoch, step)
            if (key := _OWNER_PREFIX + number) in meta:
                with _reading(key, "an owner"):
                    self._set_owner(table, Owner.unpack(meta[key]))
            table.has_deletes = _DELETES_PREFIX + number in meta
            if (key := _FILLING_PREFIX + number) in meta:
                with _reading(key, "a table's that lacks rows"):
                    table.filling = Filling(*msgpack.unpackb(meta[key]))
                    self._filling[table.table_id] = table

    def __iter__(self) -> Iterator[Table]:
        return iter(list(self._tables.values()))

    def find(self, fqn: str) -> Table:
        """Return a table by its fqn. Raises UnknownTableError, whose message lists some tables that exist."""
        table = self._tables.get(fqn)
        if table is None and fqn in self.drop_epochs:
            raise self._dropped_error(fqn)
        if table is None:
            known = first_of(sorted(self._tables))  # not the nearest names: searching thousands would block the loop
            raise UnknownTableError(f"no table {fqn!r} here; registered tables: {known}")
        return table

    def get(self, fqn: str) -> Table | None:
        """Return a table by its fqn; None if there is none."""
        return self._tables.get(fqn)

    @property
    def dropped(self) -> list[int]:
        """Numbers of the tables that were dropped."""
        return sorted(self._dropped)

    def check(
        self, specs: Iterable[TableSpec], *, epoch: int = MAX_EPOCH, knows_outgrown: bool = False
    ) -> list[TableSpec]:
        """Return the specs that are not registered yet, give a table more rows or say other uses of it, each once.

        `epoch` is the client's; `knows_outgrown` accepts a spec that a table had before it grew.

        Raises:
            UnknownTableError: The table was dropped in a later epoch.
            SpecMismatchError: A table of that name is registered, or given twice, with another spec.
        """
        new: dict[str, TableSpec] = {}
        changed: list[tuple[TableSpec, TableSpec]] = []
        for spec in specs:
            known = self._tables.get(spec.fqn)
            if known is not None:
                if known.spec == spec or (knows_outgrown and known.is_of(spec)):
                    if known.spec.uses != spec.uses:
                        new[spec.fqn] = known.spec.described(spec.uses)
                    continue
                if not spec.is_growth_of(known.spec):
                    if known.spec.is_dense and spec.is_dense:
                        raise SpecMismatchError(
                            f"dense tensor {spec.fqn!r} is registered with another spec (registered ≠ yours): "
                            f"{known.spec.describe_difference(spec)}; remove it with `headrace table drop`, with all "
                            "other dense tensors that have changed, or give your model another name (model=…)"
                        )
                    changed.append((known.spec, spec))
                    continue
            elif self.drop_epochs.get(spec.fqn, 0) > epoch:
                raise self._dropped_error(spec.fqn)
            other = new.setdefault(spec.fqn, spec)
            if other != spec:
                raise SpecMismatchError(
                    f"table {spec.fqn!r} is given twice with different specs: {other.describe_difference(spec)}"
                )
        if changed:
            raise mismatch(changed)
        return list(new.values())

    def with_new_rows(self, specs: Iterable[TableSpec]) -> set[str]:
        """Return the names of specs of `check` that register a table or give it rows; other uses lack no row."""
        there = {table.spec.fqn: table.spec.num_rows for table in self}
        return {spec.fqn for spec in specs if spec.num_rows > there.get(spec.fqn, -1)}

    def with_known_uses(self, specs: Iterable[TableSpec]) -> list[TableSpec]:
        """Return specs with the uses that are known of their tables, in the place of their own."""
        found = []
        for spec in specs:
            known = self._tables.get(spec.fqn)
            found.append(spec if known is None or known.spec.uses is None else spec.described(known.spec.uses))
        return found

    def take_hello(self, header: Mapping[str, Any], epoch: int) -> dict[bytes, bytes]:
        """Do what a hello's record in the log says about tables, here as in the shard; return the metadata to save.

        Raises:
            KeyError, ValueError, TypeError: The header is not a hello's.
            HeadraceError: The tables contradict the known ones.
        """
        there = {
            table.spec.fqn: table.spec.num_rows if table.filling is None else table.filling.from_row for table in self
        }
        meta = self.add(unpack_spec(packed) for packed in header["tables"])
        owner = Owner(header["run"], epoch, is_backfill=not header["world_size"])
        for name in header.get("owned", ()):
            meta |= self.claim([name], owner.after(self.find(name).owner))
        fills = {name: Filling(epoch, step, there.get(name, 0)) for name, step in header.get("fills", {}).items()}
        for name in header.get("updated_only", ()):
            fills[name] = Filling(epoch, MAX_STEP, there.get(name, 0), updated_only=True)
        meta |= self.begin_filling(fills)
        meta |= self.complete(header.get("complete", ()))
        meta |= self.drop(header.get("dropped", ()), epoch)
        return meta

    def add(self, specs: Iterable[TableSpec]) -> dict[bytes, bytes]:
        """Register tables in order, grow those that got rows, and take their uses; return the metadata that keeps it.

        The specs are those of a log's records or of other shards: one from before a table grew is known.

        Raises:
            SpecMismatchError: A table of that name has another spec.
        """
        meta: dict[bytes, bytes] = {}
        for spec in specs:
            if not (new := self.check([spec], knows_outgrown=True)):
                continue
            if (known := self._tables.get(spec.fqn)) is not None and new[0] == known.spec:
                known.spec = new[0]
                meta[_META_PREFIX + b"%d" % known.table_id] = msgpack.packb(pack_spec(known.spec))
                continue
            if known is not None:
                meta |= self.grow(spec)
                continue
            numbers = (*self._dropped, *(table.table_id for table in self._tables.values()))
            table = self._add(max(numbers, default=0) + 1, spec)
            meta[_META_PREFIX + b"%d" % table.table_id] = msgpack.packb(pack_spec(spec))
        return meta

    def drop(self, names: Iterable[str], epoch: int) -> dict[bytes, bytes]:
        """Forget tables, those of them that exist; return the metadata, in which an empty value removes a key.

        A client may register such a name again in this epoch or a later one, as a new table.
        """
        meta: dict[bytes, bytes] = {}
        for name in names:
            if (table := self._tables.pop(name, None)) is None:
                meta |= self._take_drop(name, epoch)
                continue
            self._filling.pop(table.table_id, None)
            self._starting.pop(table.table_id, None)
            number = b"%d" % table.table_id
            prefixes = (_META_PREFIX, _SCALARS_PREFIX, _OWNER_PREFIX, _DELETES_PREFIX, _FILLING_PREFIX)
            meta |= {prefix + number: _REMOVED for prefix in prefixes}
            meta |= {_EARLIER_PREFIX + b"%d" % fingerprint: _REMOVED for fingerprint in table.earlier}
            meta[_DROPPED_PREFIX + number] = msgpack.packb([name, epoch])
            self._note_drop(table.table_id, name, epoch)
        return meta

    def drops(self, name: str, epoch: int) -> bool:
        """Return whether dropping a table of this name in an epoch changes anything."""
        return name in self._tables or self.drop_epochs.get(name, 0) < epoch

    def _dropped_error(self, name: str) -> UnknownTableError:
        return UnknownTableError(
            f"table {name!r} was dropped in epoch {self.drop_epochs[name]}; a trainer that starts from now on can make "
            "it anew"
        )

    def _note_drop(self, table_id: int, name: str, epoch: int) -> None:
        self._dropped[table_id] = name, epoch
        self.drop_epochs[name] = max(self.drop_epochs.get(name, 0), epoch)

    def take_history(self, other: Catalog) -> dict[bytes, bytes]:
        """Take the drops of a catalog whose tables this one has; return the metadata that keeps them."""
        meta: dict[bytes, bytes] = {}
        for name, epoch in other.drop_epochs.items():
            meta |= self._take_drop(name, epoch)
        return meta

    def _take_drop(self, name: str, epoch: int) -> dict[bytes, bytes]:
        """Note the drop of a table that was not here; return the metadata that keeps it, if that is new."""
        if epoch <= self.drop_epochs.get(name, 0):
            return {}
        number = 1 + max((*self._dropped, *(table.table_id for table in self)), default=0)
        self._note_drop(number, name, epoch)
        return {_DROPPED_PREFIX + b"%d" % number: msgpack.packb([name, epoch])}

    def take_table(self, other: Table) -> dict[bytes, bytes]:
        """Take another shard's spec of a table, which may have grown here or there; return the metadata to save.

        Raises:
            SpecMismatchError: A table of that name has another spec.
        """
        known = self.get(other.spec.fqn)
        if known is None:
            meta = self.add([other.spec])
            known = self.find(other.spec.fqn)
        elif known.spec.is_growth_of(other.spec):
            known.earlier |= {other.spec.fingerprint}
            meta = {_EARLIER_PREFIX + b"%d" % other.spec.fingerprint: b"%d" % known.table_id}
        else:
            meta = self.add([other.spec])
        known.earlier |= other.earlier
        return meta | {_EARLIER_PREFIX + b"%d" % each: b"%d" % known.table_id for each in other.earlier}

    def take_from(self, others: Iterable[Catalog]) -> dict[bytes, bytes]:
        """Take what other shards' catalogs know of the tables here; return the metadata that keeps it.

        Of owners and scalars the newest count. A table lacks rows if it does anywhere. Tables of a name that was
        dropped, here or there, and not in the other place are left out.
        """
        others = list(others)
        meta: dict[bytes, bytes] = {}
        for catalog in others:
            meta |= self.take_history(catalog)
        for there, table in [(other, table) for other in others for table in other]:
            name = table.spec.fqn
            known = self.get(name)
            if known is None or there.drop_epochs.get(name, 0) != self.drop_epochs.get(name, 0):
                continue
            meta |= self.take_table(table)
            for scalar in table.scalars.values():
                value = (scalar.name, scalar.dtype, scalar.data)
                meta |= self.set_scalars(name, [value], scalar.epoch, scalar.step)
            if table.owner is not None:
                meta |= self.claim([name], table.owner.joined(known.owner))
            if table.filling is not None:
                meta |= self.begin_filling({name: table.filling})
            if table.has_deletes:
                meta |= self.note_deletes(name)
        return meta

    def grow(self, spec: TableSpec) -> dict[bytes, bytes]:
        """Give a table more rows; it keeps its number and accepts its earlier fingerprints. Return the metadata.

        Raises:
            UnknownTableError: There is no table of that name.
            SpecMismatchError: The spec is not the table's with more rows; nothing is changed.
        """
        table = self.find(spec.fqn)
        if not spec.is_growth_of(table.spec):
            raise SpecMismatchError(
                f"table {spec.fqn!r} has {table.spec.num_rows} rows and can only get more, with nothing else changed: "
                f"{table.spec.describe_difference(spec) or 'the spec is the same'} (registered ≠ yours)"
            )
        fingerprint = table.spec.fingerprint
        table.earlier |= {fingerprint}
        table.spec = spec  # the layouts stay: they do not depend on the rows
        # ON DISK: never change.
        return {
            _META_PREFIX + b"%d" % table.table_id: msgpack.packb(pack_spec(spec)),
            _EARLIER_PREFIX + b"%d" % fingerprint: b"%d" % table.table_id,
        }

    def fills_of(
        self, names: Iterable[str], epoch: int, after_step: int, changed: Container[str] = ()
    ) -> dict[str, int]:
        """Return for which of some tables a hello begins or changes the filling, as the record says it.

        Those that have all rows stay as they are, unless the hello gives them more: `changed` are `with_new_rows`.
        """
        fills = {}
        for name in names:
            table = self._tables.get(name)
            known = None if table is None else table.filling
            if known is None:
                is_changed = table is None or name in changed
            else:
                is_changed = known != _later(known, Filling(epoch, after_step, known.from_row))
            if is_changed:
                fills[name] = after_step
        return fills

    def left_out_of(self, names: Iterable[str], epoch: int, changed: Container[str] = ()) -> list[str]:
        """Return which of some tables lack rows from a hello on that says that only updated ones are sent."""
        found = []
        for name in dict.fromkeys(names):
            table = self._tables.get(name)
            filling = None if table is None else table.filling
            if table is None or name in changed or not (filling is None or filling.updated_only):
                found.append(name)
        return found

    def begin_filling(self, fills: Mapping[str, Filling]) -> dict[bytes, bytes]:
        """Note what tables lack, as far as it is not known better; return the metadata that keeps it."""
        meta = {}
        for name, filling in fills.items():
            table = self.find(name)
            table.filling = filling = _later(table.filling, filling)
            self._filling[table.table_id] = table
            meta[_FILLING_PREFIX + b"%d" % table.table_id] = filling.pack()
        return meta

    def begun_by(self, names: Iterable[str], epoch: int) -> list[str]:
        """Return those of some tables that a client that is no trainer has begun, for it to complete."""
        ended = Filling(epoch, MAX_STEP)
        return [name for name in dict.fromkeys(names) if name in self._tables and self._tables[name].filling == ended]

    def complete(self, names: Iterable[str]) -> dict[bytes, bytes]:
        """Note that tables lack no rows; return the metadata that keeps it."""
        meta = {}
        for name in names:
            table = self.find(name)
            table.filling = None
            self._filling.pop(table.table_id, None)
            meta[_FILLING_PREFIX + b"%d" % table.table_id] = _REMOVED
        return meta

    def end_filling(self, watermark_of: Callable[[int], int]) -> tuple[list[str], dict[bytes, bytes]]:
        """Return the tables that an epoch's watermark makes complete, and the metadata that keeps it."""
        fillings = [(table.spec.fqn, table.filling) for table in self._filling.values() if table.filling is not None]
        names = [name for name, filling in fillings if watermark_of(filling.epoch) > filling.after_step]
        return names, self.complete(names)

    def owner_of(self, name: str) -> Owner | None:
        """Return a table's owner; None if it has none or does not exist."""
        table = self._tables.get(name)
        return None if table is None else table.owner

    def are_owned(self, specs: Iterable[TableSpec], run: str, epoch: int) -> bool:
        """Return whether a trainer's run owns all tables of these names, since this epoch of it."""
        owners = [self.owner_of(spec.fqn) for spec in specs]
        return all(owner is not None and (owner.run, owner.epoch) == (run, epoch) for owner in owners)

    def claim(self, names: Iterable[str], owner: Owner) -> dict[bytes, bytes]:
        """Give tables an owner; return the metadata that keeps it."""
        meta = {}
        for name in names:
            table = self.find(name)
            self._set_owner(table, owner)
            meta[_OWNER_PREFIX + b"%d" % table.table_id] = owner.pack()
        return meta

    def _set_owner(self, table: Table, owner: Owner) -> None:
        table.owner = owner
        if owner.is_backfill or owner.first_step >= 0:
            self._starting.pop(table.table_id, None)
        else:
            self._starting[table.table_id] = table

    def note_first_steps(self, watermark_of: Callable[[int], int]) -> dict[bytes, bytes]:
        """Note the first step of owners of which an epoch's watermark tells one; return the metadata that keeps it."""
        meta: dict[bytes, bytes] = {}
        for table in list(self._starting.values()):
            if table.owner is not None and (step := watermark_of(table.owner.epoch)) >= 0:
                meta |= self.claim([table.spec.fqn], dataclasses.replace(table.owner, first_step=step))
        return meta

    def end_run(self, run: str) -> dict[bytes, bytes]:
        """Note that a run writes none of its tables any more; return the metadata that keeps it."""
        meta: dict[bytes, bytes] = {}
        for table in self:
            if table.owner is not None and table.owner.run == run and not table.owner.has_ended:
                meta |= self.claim([table.spec.fqn], dataclasses.replace(table.owner, has_ended=True))
        return meta

    def note_deletes(self, name: str) -> dict[bytes, bytes]:
        """Note that rows of a table are deleted; return the metadata that keeps it, if that is new."""
        table = self.find(name)
        if table.has_deletes:
            return {}
        table.has_deletes = True
        return {_DELETES_PREFIX + b"%d" % table.table_id: b"1"}

    def set_scalars(
        self, fqn: str, scalars: Iterable[tuple[str, DType, bytes]], epoch: int, step: int
    ) -> dict[bytes, bytes]:
        """Keep those scalars of a table that are not older than the known ones; return the metadata to store."""
        table = self.find(fqn)
        for name, dtype, data in scalars:
            known = table.scalars.get(name)
            if known is None or (epoch, step) >= (known.epoch, known.step):
                table.scalars[name] = Scalar(name, dtype, data, epoch, step)
        return {_SCALARS_PREFIX + b"%d" % table.table_id: _pack_scalars(table)}

    def _add(self, table_id: int, spec: TableSpec) -> Table:
        self._tables[spec.fqn] = table = Table(table_id, spec)
        return table


@contextlib.contextmanager
def _reading(key: bytes, what: str) -> Iterator[None]:
    """Report an entry of the store's metadata that cannot be read."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as exc:
        raise CorruptionError(f"store metadata {key!r} is not {what}: {exc}") from exc


def _pack_scalars(table: Table) -> bytes:
    # ON DISK: the order is fixed.
    packed: bytes = msgpack.packb([[s.name, int(s.dtype), s.data, s.epoch, s.step] for s in table.scalars.values()])
    return packed


def _later(known: Filling | None, new: Filling) -> Filling:
    """Return what counts of two hellos: the newer epoch's, and of one epoch the later step; all rows lacking in any."""
    if known is None:
        return new
    from_row = min(known.from_row, new.from_row)
    if known.epoch != new.epoch:
        return dataclasses.replace(max(known, new, key=lambda filling: filling.epoch), from_row=from_row)
    if known.updated_only != new.updated_only:
        return dataclasses.replace(new, from_row=from_row)
    return dataclasses.replace(new, from_row=from_row, after_step=max(known.after_step, new.after_step))


def pack_spec(spec: TableSpec) -> list[Any]:
    """Return a spec as the plain list of metadata and log records. ON DISK: the order is fixed."""
    states = [[state.name, int(state.kind), int(state.dtype), state.width] for state in spec.states]
    packed = [spec.fqn, spec.num_rows, spec.dim, int(spec.dtype), states, spec.has_identities]
    shape = None if spec.shape is None else list(spec.shape)
    if spec.uses is not None:
        return [*packed, shape, spec.uses]
    return packed if shape is None else [*packed, shape]


def unpack_spec(packed: list[Any]) -> TableSpec:
    """Return the spec that `pack_spec` packed.

    Raises:
        ValueError: The list is not a spec.
        RequestError: A field is out of range.
    """
    fqn, num_rows, dim, dtype, states, has_identities, *more = packed
    shape, uses = (*more, None, None)[:2]
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
        shape=None if shape is None else tuple(shape),
        uses=uses,
    )
