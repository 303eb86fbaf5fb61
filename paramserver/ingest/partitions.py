"""Which partitions a shard owns: a function of its log, kept in the store's metadata. No I/O.

A shard has two maps. Its *logged* map says what its own records have given to it and taken from it. Its *known* map is
that one, merged with what the shard has heard of moves between others. Both come from records of its log. A row is
served where both maps name this shard. So a shard that was restored from an older copy of itself, and hears that it has
given a partition away, serves none of its rows; and one that hears of its own activation before its log has it waits.

What a record has changed counts for rows at once, and is told to others once the record is durable: a map that was told
can never be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import (
    CorruptionError,
    ProtocolError,
    RequestError,
    UnavailableError,
    WrongRoutingError,
)
from headrace.schemas.move_records import (
    ImportRecord,
    MapRecord,
    Move,
    MoveRecord,
    MoveStep,
    Position,
    decode_move_record,
)
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import TableSpec

__all__ = ["AnyMoveRecord", "OpenMove", "ShardPartitions"]

AnyMoveRecord = MoveRecord | ImportRecord | MapRecord

# ON DISK: never rename. In the store's metadata: the maps' bytes; by move id, seq and header of the move's last
# transition; by move id, seq and mark of the source's record that was imported last. The store deletes empty values.
_META_LOGGED = b"partitions/logged"
_META_KNOWN = b"partitions/known"
_META_MOVE = b"partitions/move/"
_META_IMPORT = b"partitions/import/"

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OpenMove:
    """A move in which the shard takes part, until the rows that it must not keep are purged.

    Attributes:
        record: The last transition in this shard's log: COPY at the destination, SEAL or RELEASE at the source.
        seq: Of that record in this shard's log.
        imported: Position of the source's record that was imported last, at first that of the copy; None at the source.
    """

    record: MoveRecord
    seq: int
    imported: Position | None = None

    @property
    def move(self) -> Move:
        """The move."""
        return self.record.move


@dataclass(frozen=True, slots=True)
class _View:
    """What decides about rows; threads that check large batches read it, so it is replaced as a whole."""

    logged: PartitionMap
    known: PartitionMap
    told: PartitionMap  # `known` before record `seq`
    seq: int
    serves: _Mask  # bool[P]
    takes_writes: _Mask  # bool[P]: serves, and not sealed
    is_first: bool  # nobody has moved anything and nothing is sealed


class ShardPartitions:
    """The partitions of one shard. Thread: the loop's; `check_rows` and `served` any.

    Attributes:
        moves: By id, those in which the shard takes part now.
        num_changes: Rises whenever the served partitions change. A reader who finds it changed checks its rows again.
        places: Returns where the shards are, `idl.ShardAddress` each, for refusals.
    """

    def __init__(
        self,
        meta: Mapping[bytes, bytes],
        *,
        shard: int,
        first: PartitionMap,
        durable_seq: Callable[[], int],
    ) -> None:
        """Restore the maps from `meta`, the store's metadata; those of a store without moves are `first`.

        `durable_seq` returns the last record up to which all are durable.

        Raises:
            CorruptionError: The metadata cannot be read, or is of a server with other partitions.
        """
        self.moves: dict[str, OpenMove] = {}
        self.num_changes = 0
        self.places: Callable[[], Sequence[Any]] = tuple
        self._shard, self._first, self._durable_seq = shard, first, durable_seq
        try:
            logged, known = (
                first.merged(PartitionMap.decode(meta[key])) if key in meta else first
                for key in (_META_LOGGED, _META_KNOWN)
            )
            for key, value in meta.items():
                if key.startswith(_META_MOVE):
                    self._restore_move(key.removeprefix(_META_MOVE).decode(), value, meta)
        except (CorruptionError, ProtocolError, RequestError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"the store's metadata of partitions cannot be read: {exc}") from exc
        self._view = self._make_view(logged, known, told=known, seq=0)

    @property
    def logged(self) -> PartitionMap:
        """The map by this shard's own records."""
        return self._view.logged

    @property
    def known(self) -> PartitionMap:
        """`logged`, merged with what the shard has heard."""
        return self._view.known

    @property
    def told(self) -> PartitionMap:
        """The map to tell others: `known`, or an earlier one while the record of its last change is not durable."""
        view = self._view
        return view.known if self._durable_seq() >= view.seq else view.told

    @property
    def has_moves(self) -> bool:
        """Whether the log has, or had, a record that releases before partitions do not know."""
        return not self._view.is_first or bool(self.moves)

    def heard(self, data: bytes | memoryview) -> MapRecord | None:
        """Return the record to append for a map that another node tells; None if it says nothing new.

        Raises:
            RequestError: It is no map, or one of a server with other partitions.
        """
        try:
            other = PartitionMap.decode(data)
        except ProtocolError as exc:
            raise RequestError(str(exc)) from exc
        merged = self.known.merged(other)
        return None if merged is self.known else MapRecord(partition_map=merged)

    def check_rows(self, spec: TableSpec, row_ids: _Ids, *, is_write: bool = False) -> None:
        """Check that this shard may answer for rows, int64[n], or with `is_write` that it takes them.

        Raises:
            WrongRoutingError: A row belongs to another shard, or with `is_write`, it is about to move there.
            UnavailableError: A row will be here soon, or it is not known yet for good that it has gone.
        """
        view = self._view
        if view.is_first and view.known.first_shards == 1 and not self._shard:
            return
        is_here = self._are_in(view, spec.seed, row_ids, view.takes_writes if is_write else view.serves)
        if is_here.all():
            return
        row_id = row_ids[np.flatnonzero(~is_here)[:1]]
        partition = int(view.known.partitions_of_rows(spec.seed, row_id)[0])
        told, row = self.told, f"table {spec.fqn!r}: row {row_id[0]}"
        owner = int(told.owners[partition])
        if owner != self._shard:
            what = f"{row} belongs to shard {owner}, this is shard {self._shard}"
        elif is_write and view.serves[partition]:
            what = f"{row} is moving away from shard {self._shard}"
        else:
            raise UnavailableError(f"{row} is not on shard {self._shard} at this moment: its partition moves")
        raise WrongRoutingError(what, partitions=told.encode(), shards=self.places())

    def served(self, spec: TableSpec, row_ids: _Ids, *, is_write: bool = False) -> _Mask | None:
        """Return which of its stored rows, int64[n], the shard answers for, or takes, bool[n]; None for all of them."""
        view = self._view
        if view.is_first:
            return None
        return self._are_in(view, spec.seed, row_ids, view.takes_writes if is_write else view.serves)

    @property
    def served_bits(self) -> bytes | None:
        """One bit per partition, lowest first: whether the shard answers for its rows; None while none has moved."""
        view = self._view
        return None if view.is_first else np.packbits(view.serves, bitorder="little").tobytes()

    def check(self, record: AnyMoveRecord) -> None:
        """Check that a record may be appended next.

        Raises:
            RequestError: It contradicts what the log says so far.
        """
        if isinstance(record, MapRecord):
            self.known.merged(record.partition_map)
        elif isinstance(record, ImportRecord):
            self._check_import(record)
        else:
            self._check_step(record)

    def take(self, record: AnyMoveRecord, seq: int) -> dict[bytes, bytes]:
        """Do what record `seq` says, here as in recovery; return the metadata to save with it.

        Raises:
            RequestError: As `check`; nothing is changed.
        """
        self.check(record)
        if isinstance(record, MapRecord):
            return self._set_maps(self.logged, self.known.merged(record.partition_map), seq)
        if isinstance(record, ImportRecord):
            open_move = self.moves[record.move_id]
            self.moves[record.move_id] = replace(open_move, imported=record.position)
            return _import_meta(record.move_id, record.position)
        move_id = record.move.move_id
        if record.step in (MoveStep.UNSEAL, MoveStep.ACTIVATE, MoveStep.PURGE):
            del self.moves[move_id]
            meta = {_META_MOVE + move_id.encode(): b"", _META_IMPORT + move_id.encode(): b""}
        else:
            is_copy = record.step is MoveStep.COPY
            self.moves[move_id] = OpenMove(record, seq, record.position if is_copy else None)
            meta = {_META_MOVE + move_id.encode(): msgpack.packb([seq, record.header()])}
        logged, known = self.logged, self.known
        if record.step in (MoveStep.RELEASE, MoveStep.ACTIVATE):
            logged, known = record.move.apply_to(logged), record.move.apply_to(known)
        return meta | self._set_maps(logged, known, seq)

    def _check_import(self, record: ImportRecord) -> None:
        open_move = self.moves.get(record.move_id)
        if open_move is None or open_move.imported is None:
            raise RequestError(f"move {record.move_id!r}: nothing is imported before its copy or behind its end")
        if record.source != open_move.move.source:
            raise RequestError(
                f"move {record.move_id!r}: an import from shard {record.source}, which is not its source"
            )
        if record.position.seq <= open_move.imported.seq:
            raise RequestError(
                f"move {record.move_id!r}: record {record.position.seq} of the source behind {open_move.imported.seq}"
            )

    def _check_step(self, record: MoveRecord) -> None:
        move, step = record.move, record.step
        if not (self._is_source(move) or move.destination == self._shard):
            self._refuse(record, f"this is shard {self._shard}")
        if move.partitions[-1] >= self._first.num_partitions:
            self._refuse(record, f"there are {self._first.num_partitions} partitions")
        if step in (MoveStep.SEAL, MoveStep.COPY):
            self._check_begin(record)
            return
        open_move = self.moves.get(move.move_id)
        if open_move is None or open_move.move != move:
            self._refuse(record, "no such move is open here")
        before = {
            MoveStep.UNSEAL: (MoveStep.SEAL,),
            MoveStep.RELEASE: (MoveStep.SEAL,),
            MoveStep.ACTIVATE: (MoveStep.COPY,),
            MoveStep.PURGE: (MoveStep.RELEASE, MoveStep.COPY),
        }[step]
        if open_move.record.step not in before:
            self._refuse(record, f"it is behind {open_move.record.step}")
        at, imported = record.position, open_move.imported
        if step is MoveStep.RELEASE and at is not None and at.seq != open_move.seq:
            self._refuse(record, f"its seal is record {open_move.seq}, not {at.seq}")
        if step is MoveStep.ACTIVATE and at is not None and imported is not None and at.seq < imported.seq:
            self._refuse(record, f"the source's record {imported.seq} was imported, which is behind its seal")

    def _check_begin(self, record: MoveRecord) -> None:
        """Refuse to begin a move of partitions that are not where the move says, or of which rows are left to purge."""
        move, known, at = record.move, self.known, np.array(record.move.partitions)
        for other in self.moves.values():
            if other.move.move_id == move.move_id or np.isin(at, other.move.partitions).any():
                self._refuse(record, f"move {other.move.move_id!r} of them is not over here: {other.record.step}")
        versions, owners, wanted = known.versions[at], known.owners[at], np.array(move.versions)
        if record.step is MoveStep.SEAL:
            # A source that was restored from an older copy hears that it has released them, and does so again.
            is_next = (owners == self._shard) & (wanted == versions + 1)
            is_again = (owners == move.destination) & (wanted == versions)
            is_here = self.logged.owners[at] == self._shard
            if not (self._is_source(move) and (is_here & (is_next | is_again)).all()):
                self._refuse(record, "they are not here in the versions before")
            return
        # A destination may have missed moves between others, but what it knows must not speak against this one. One
        # that was restored from an older copy hears that it has the partitions, and needs their rows again.
        is_next = (versions + 1 < wanted) | ((versions + 1 == wanted) & (owners == move.source))
        is_again = (versions == wanted) & (owners == move.destination)
        if self._is_source(move) or not (is_next | is_again).all() or (self.logged.owners[at] == self._shard).any():
            self._refuse(record, "they are not at the source in the versions before")

    def _is_source(self, move: Move) -> bool:
        return move.source == self._shard

    def _refuse(self, record: MoveRecord, why: str) -> NoReturn:
        move = record.move
        raise RequestError(
            f"move {move.move_id!r} of {len(move.partitions)} partitions from shard {move.source} to "
            f"{move.destination}: {record.step} on shard {self._shard}: {why}"
        )

    def _set_maps(self, logged: PartitionMap, known: PartitionMap, seq: int) -> dict[bytes, bytes]:
        """Put maps and seals in force, as of record `seq`; return the metadata of the maps that are new."""
        before = self._view
        meta = {} if logged is before.logged else {_META_LOGGED: logged.encode()}
        meta |= {} if known is before.known else {_META_KNOWN: known.encode()}
        # Of several changes that are not durable, none is told before the last one is.
        told, told_seq = (before.told, before.seq) if known is before.known else (self.told, seq)
        self._view = self._make_view(logged, known, told=told, seq=told_seq)
        self.num_changes += 1
        return meta

    def _make_view(self, logged: PartitionMap, known: PartitionMap, *, told: PartitionMap, seq: int) -> _View:
        serves = (logged.owners == self._shard) & (known.owners == self._shard)
        takes_writes = serves.copy()
        for open_move in self.moves.values():
            if open_move.record.step is MoveStep.SEAL:
                takes_writes[list(open_move.move.partitions)] = False
        is_first = known.is_first and bool((takes_writes == serves).all())
        return _View(logged, known, told, seq, serves, takes_writes, is_first)

    def _are_in(self, view: _View, seed: int, row_ids: _Ids, mask: _Mask) -> _Mask:
        if view.is_first:
            is_in: _Mask = shards_of_rows(seed, row_ids, view.known.first_shards) == self._shard
        else:
            is_in = mask[view.known.partitions_of_rows(seed, row_ids)]
        return is_in

    def _restore_move(self, move_id: str, value: bytes, meta: Mapping[bytes, bytes]) -> None:
        seq, header = msgpack.unpackb(value)
        record = decode_move_record(header)
        if not isinstance(record, MoveRecord):
            raise ValueError(f"move {move_id!r} is not at a transition")
        imported = record.position if record.step is MoveStep.COPY else None
        if (position := meta.get(_META_IMPORT + move_id.encode())) is not None:
            imported_seq, mark = msgpack.unpackb(position)
            imported = Position(seq=imported_seq, mark=mark)
        self.moves[move_id] = OpenMove(record, seq, imported)


def _import_meta(move_id: str, position: Position) -> dict[bytes, bytes]:
    return {_META_IMPORT + move_id.encode(): msgpack.packb([position.seq, position.mark])}
