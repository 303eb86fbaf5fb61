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
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.moves import Moves
from headrace.schemas.errors import (
    CorruptionError,
    ProtocolError,
    RequestError,
    UnavailableError,
    WrongRoutingError,
)
from headrace.schemas.move_records import (
    ImportRecord,
    LoadRecord,
    MapRecord,
    Move,
    MoveRecord,
    MoveStep,
    ReshardRecord,
)
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import TableSpec

__all__ = ["AnyMoveRecord", "KeptReshard", "ShardPartitions"]

AnyMoveRecord = MoveRecord | LoadRecord | ImportRecord | MapRecord | ReshardRecord

# ON DISK: never rename. In the store's metadata: the maps' bytes; number and bytes of the reshard that is under way.
_META_LOGGED = b"partitions/logged"
_META_KNOWN = b"partitions/known"
_META_RESHARD = b"partitions/reshard"

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KeptReshard:
    """The reshard that shard 0 keeps, as its last `ReshardRecord` says.

    Attributes:
        number: Of that record; 0 before the first.
        data: Its bytes; empty when none is under way.
        seq: Of that record; 0 if an earlier process wrote it.
    """

    number: int = 0
    data: bytes = b""
    seq: int = 0


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
    is_all: bool  # no move has brought or left rows that the shard does not serve


class ShardPartitions:
    """The partitions of one shard. Thread: the loop's; `check_rows` and `served` any.

    Attributes:
        moves: How far the shard's moves have come.
        reshard: What shard 0 keeps for coordinators; durable once its record is.
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
        self.num_changes = 0
        self.places: Callable[[], Sequence[Any]] = tuple
        self._shard, self._first, self._durable_seq = shard, first, durable_seq
        try:
            logged, known = (
                first.merged(PartitionMap.decode(meta[key])) if key in meta else first
                for key in (_META_LOGGED, _META_KNOWN)
            )
            self.moves = Moves(meta)
            self.reshard = (
                KeptReshard(*msgpack.unpackb(meta[_META_RESHARD])) if _META_RESHARD in meta else KeptReshard()
            )
        except (CorruptionError, ProtocolError, RequestError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"the store's metadata of partitions cannot be read: {exc}") from exc
        self._view = self._make_view(logged, known, told=known, seq=0)

    @classmethod
    def of_store(cls, meta: Mapping[bytes, bytes], *, shard: int) -> ShardPartitions | None:
        """Return what a store's metadata says, for whom the store is all; None if it never had rows of others.

        Raises:
            CorruptionError: As the constructor.
        """
        if (data := meta.get(_META_KNOWN)) is None:
            return None
        try:
            known = PartitionMap.decode(data)
        except ProtocolError as exc:
            raise CorruptionError(f"the store's metadata of partitions cannot be read: {exc}") from exc
        first = PartitionMap.first(known.first_shards, known.num_partitions)
        return cls(meta, shard=shard, first=first, durable_seq=lambda: 0)

    @property
    def shard(self) -> int:
        """The shard's number."""
        return self._shard

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
        return not self._view.is_first or any(self.moves) or self.reshard.number > 0

    @property
    def is_needless(self) -> bool:
        """Whether the server can do without this shard: it owns nothing, and takes part in no move."""
        return not (any(each.is_open for each in self.moves) or self._is_owner())

    def can_keep_steps(self, move_id: str) -> bool:
        """Whether this shard lacks no row of the steps that were ended at a move's source when it told its state.

        It would if another source had released partitions to it by then, whose rows the trainer has yet to send here.
        That takes a copy which is loaded, unless this shard has lost that, and hears of the release.
        """
        others = (each for each in self.moves if each.is_open and each.move.move_id != move_id)
        return not (any(each.is_loaded for each in others) or self._is_owner())

    def _is_owner(self) -> bool:
        view = self._view
        return bool(((view.logged.owners == self._shard) | (view.known.owners == self._shard)).any())

    def num_shards_like_it(self) -> Fraction:
        """Return how many shards with as many partitions as this one would have all; at most P."""
        owned = int((self.logged.owners == self._shard).sum())
        return Fraction(self._first.num_partitions, max(owned, 1))

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
        if view.is_all:
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
        elif isinstance(record, ReshardRecord):
            if record.number != self.reshard.number + 1:
                raise RequestError(
                    f"somebody else has changed the reshard meanwhile, {self.reshard.number} times so far"
                )
        elif isinstance(record, LoadRecord):
            self._check_load(record)
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
        if isinstance(record, ReshardRecord):
            self.reshard = KeptReshard(record.number, record.reshard, seq)
            return {_META_RESHARD: msgpack.packb([record.number, record.reshard])}
        meta = self.moves.take(record, seq)
        if isinstance(record, LoadRecord | ImportRecord):
            return meta
        logged, known = self.logged, self.known
        # A source that was restored from before its release purges what it has not released again.
        is_decided = record.step is MoveStep.PURGE and self._is_source(record.move)
        if is_decided or record.step in (MoveStep.RELEASE, MoveStep.ACTIVATE):
            logged, known = record.move.apply_to(logged), record.move.apply_to(known)
        elif record.step is MoveStep.COPY:
            meta |= {_META_KNOWN: known.encode()}  # who reads the store alone must know which rows are not the shard's
        return meta | self._set_maps(logged, known, seq)

    def has_left(self, move: Move) -> bool:
        """Return whether a source knows that a move, or a later one, has taken the partitions away."""
        return bool((self.known.versions[list(move.partitions)] >= move.versions).all())

    def is_set_back(self, move: Move) -> bool:
        """Return whether a source has lost the release, and hears of it."""
        is_before = (self.logged.versions[list(move.partitions)] < move.versions).all()
        return bool(is_before) and self.has_left(move)

    def _check_load(self, record: LoadRecord) -> None:
        progress = self.moves.find(record.move_id)
        if progress is None or progress.step is not MoveStep.COPY or progress.is_loaded:
            raise RequestError(f"move {record.move_id!r}: nothing is loaded before its copy or behind its end")
        if record.number != progress.num_loads + 1:
            raise RequestError(f"move {record.move_id!r}: load {record.number} behind load {progress.num_loads}")

    def _check_import(self, record: ImportRecord) -> None:
        progress = self.moves.find(record.move_id)
        if progress is None or progress.imported is None:
            raise RequestError(f"move {record.move_id!r}: nothing is imported before its copy or behind its end")
        if record.source != progress.move.source:
            raise RequestError(
                f"move {record.move_id!r}: an import from shard {record.source}, which is not its source"
            )
        if not (progress.is_loaded or record.is_shared_state):
            raise RequestError(f"move {record.move_id!r}: nothing is imported before all of its copy is loaded")
        # That of the copy is at its position.
        if record.position.seq <= progress.imported.seq - record.is_shared_state:
            raise RequestError(
                f"move {record.move_id!r}: record {record.position.seq} of the source behind {progress.imported.seq}"
            )

    def _check_step(self, record: MoveRecord) -> None:
        move, step = record.move, record.step
        if not (self._is_source(move) or move.destination == self._shard):
            self._refuse(record, f"this is shard {self._shard}")
        if move.partitions[-1] >= self._first.num_partitions:
            self._refuse(record, f"there are {self._first.num_partitions} partitions")
        progress = self.moves.find_same(move)
        is_purge_of_left = step is MoveStep.PURGE and self._is_source(move) and self.is_set_back(move)
        before: dict[MoveStep, tuple[MoveStep | None, ...]] = {
            MoveStep.SEAL: (None, MoveStep.LAPSE),
            MoveStep.COPY: (None, MoveStep.COPY),  # once more, if the source has lost its place
            MoveStep.LAPSE: (MoveStep.SEAL,),
            MoveStep.UNSEAL: (MoveStep.SEAL, MoveStep.LAPSE),
            MoveStep.RELEASE: (MoveStep.SEAL,),
            MoveStep.ACTIVATE: (MoveStep.COPY,),
            MoveStep.PURGE: (MoveStep.RELEASE, MoveStep.COPY),
        }
        if not is_purge_of_left and (progress and progress.step) not in before[step]:
            self._refuse(record, f"it is behind {progress.step}" if progress else "no such move is open here")
        if step in (MoveStep.SEAL, MoveStep.COPY):
            self._check_begin(record)
        # The position of an activation may be before the last import: behind q, nothing writes the partitions.
        if step is MoveStep.RELEASE and progress and record.position and record.position.seq != progress.seq:
            self._refuse(record, f"its seal is record {progress.seq}, not {record.position.seq}")

    def _check_begin(self, record: MoveRecord) -> None:
        """Refuse to begin a move of partitions that are not where the move says, or of which rows are left to purge."""
        move, known, at = record.move, self.known, np.array(record.move.partitions)
        for other in self.moves:
            is_other = other.is_open and other.move.move_id != move.move_id
            if is_other and np.isin(at, other.move.partitions).any():
                self._refuse(record, f"move {other.move.move_id!r} of them is not over here: {other.step}")
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
        # A version that is known and not logged: the shard has lost that rows went away and came back.
        serves = (logged.owners == self._shard) & (known.owners == self._shard) & (logged.versions == known.versions)
        takes_writes = serves.copy()
        for each in self.moves:
            if each.step is MoveStep.SEAL:
                takes_writes[list(each.move.partitions)] = False
        is_first = known.is_first and bool((takes_writes == serves).all())
        is_all = is_first and not any(self.moves)  # rows may be here that are on their way, or left from a move
        return _View(logged, known, told, seq, serves, takes_writes, is_first, is_all)

    def _are_in(self, view: _View, seed: int, row_ids: _Ids, mask: _Mask) -> _Mask:
        if view.is_first:
            is_in: _Mask = shards_of_rows(seed, row_ids, view.known.first_shards) == self._shard
        else:
            is_in = mask[view.known.partitions_of_rows(seed, row_ids)]
        return is_in
