"""Records of the update log by which partitions move from one shard to another. No I/O.

A *move* takes some partitions of a *source* to a *destination*. Each of its transitions is a record in the log of one
of the two. So the move goes on whoever dies, and whoever reads the logs later sees the same. A record repeats the whole
move, because those before it may have been removed.

    step       log           what it says                                                    position
    copy       destination   rows of the partitions come, as of the position, and then       of the copy
                             the source's records behind it; nothing of them is served
    load       destination   some of the rows that were copied                               none
    import     destination   one record of the source's log, cut to the partitions           of that record
    seal       source        no batch behind this record writes the partitions; the record   none
                             itself is at q
    lapse      source        the destination was silent: the source goes on, and may seal    none
                             again for the same move
    unseal     source        the move is given up, before `release`; the source goes on      none
    release    source        the decision: the destination owns the partitions               of the seal, q
    activate   destination   it has read `release` and has the source's log up to q;         of the seal, q
                             from here on it serves the partitions
    purge      either        all rows of the partitions are removed, without tombstones:     none
               one           at the source when the destination keeps them safely, at the
                             destination when the move was given up

A *position* is seq and mark of a record in the source's log. A shard that has not purged partitions takes part in no
further move of them. Besides, a shard keeps in its log what it hears of moves between others, as a whole map, and shard
0 the plan by which partitions move.

Every record has a msgpack map as its header, like those of batches and hellos, with `kind` 3. Releases before
partitions do not know this kind and stop at it, so it is written only once all nodes and clients do.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.schemas.errors import CorruptionError, ProtocolError, RequestError
from headrace.schemas.partition_map import MAX_OWNER, MAX_PARTITIONS, MAX_VERSION, PartitionMap

__all__ = [
    "KIND_MOVE",
    "MAX_MOVE_ID_BYTES",
    "SHARED_STATE",
    "ImportRecord",
    "LoadRecord",
    "MapRecord",
    "Move",
    "MoveRecord",
    "MoveStep",
    "Position",
    "ReshardRecord",
    "decode_move_record",
    "step_of",
]

# ON DISK and ON THE WIRE (`UpdateKind`): never renumber. The field `kind` of the header.
KIND_MOVE = 3
MAX_MOVE_ID_BYTES = 64
"""Longest id of a move, in bytes of UTF-8."""

# ON DISK: never rename. Fields of the header; those of a position are an array of seq and mark.
_STEP, _MOVE, _SOURCE, _DESTINATION = "transition", "move", "source", "destination"
_PARTITIONS, _VERSIONS, _POSITION, _RECORD, _MAP = "partitions", "versions", "position", "record", "map"
_NUMBER, _RESHARD, _IS_LAST, _KEEPS_STEPS = "number", "reshard", "is_last", "keeps_steps"


class MoveStep(enum.StrEnum):
    """What a record of a move says; the module has the table. ON DISK: never rename."""

    COPY = "copy"
    LOAD = "load"
    IMPORT = "import"
    SEAL = "seal"
    LAPSE = "lapse"
    UNSEAL = "unseal"
    RELEASE = "release"
    ACTIVATE = "activate"
    PURGE = "purge"
    MAP = "map"
    RESHARD = "reshard"


# ON DISK: in place of a source's record in an import.
SHARED_STATE = {"kind": KIND_MOVE, _STEP: str(MoveStep.ACTIVATE)}
_WITH_POSITION = frozenset({MoveStep.COPY, MoveStep.RELEASE, MoveStep.ACTIVATE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A record in the log of the source.

    Attributes:
        seq: Its seq; 0 for the place before the first record.
        mark: Its mark (`UpdateLog.nonce_of`); None where it is not known.
    """

    seq: int
    mark: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Partitions on their way from a shard to another.

    Attributes:
        move_id: Chosen by whoever plans the move, and of no other move: a repeated request changes nothing.
        source: The shard that owns the partitions.
        destination: The shard that shall own them.
        partitions: Ascending.
        versions: Of each partition, the version that it has at the destination: one more than at the source.
    """

    move_id: str
    source: int
    destination: int
    partitions: tuple[int, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.move_id.encode()) <= MAX_MOVE_ID_BYTES:
            raise RequestError(f"move {self.move_id[:MAX_MOVE_ID_BYTES]!r}: its id has 1 to {MAX_MOVE_ID_BYTES} bytes")
        if self.source == self.destination or not all(
            0 <= each <= MAX_OWNER for each in (self.source, self.destination)
        ):
            raise RequestError(f"move {self.move_id!r}: from shard {self.source} to shard {self.destination}")
        at = self.partitions
        if not at or at[0] < 0 or at[-1] >= MAX_PARTITIONS or any(a >= b for a, b in pairwise(at)):
            raise RequestError(f"move {self.move_id!r}: its partitions are none, out of range or not ascending")
        if len(self.versions) != len(at) or not all(1 <= each <= MAX_VERSION for each in self.versions):
            raise RequestError(f"move {self.move_id!r}: {len(at)} partitions with {len(self.versions)} versions, ≥ 1")

    @classmethod
    def of_map(
        cls, partition_map: PartitionMap, partitions: tuple[int, ...], *, move_id: str, destination: int
    ) -> Move:
        """Return the move of some partitions, ascending, to a shard.

        Raises:
            RequestError: They have several owners, or are not in the map; or as `Move`.
        """
        if not all(0 <= each < partition_map.num_partitions for each in partitions):
            raise RequestError(f"move {move_id!r}: there are {partition_map.num_partitions} partitions")
        owners = {int(partition_map.owners[each]) for each in partitions}
        if len(owners) != 1:
            raise RequestError(f"move {move_id!r}: its partitions are of shards {sorted(owners)}: only one may be")
        versions = tuple(int(partition_map.versions[each]) + 1 for each in partitions)
        return cls(
            move_id=move_id,
            source=owners.pop(),
            destination=destination,
            partitions=partitions,
            versions=versions,
        )

    def apply_to(self, partition_map: PartitionMap) -> PartitionMap:
        """Return the map as it is once the move is released; the same object if it says so already.

        Raises:
            RequestError: The move's partitions are not in the map.
        """
        return partition_map.moved(self.partitions, self.versions, self.destination)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRecord:
    """A transition of a move, in the log of its source or its destination.

    Attributes:
        step: Any but LOAD, IMPORT, MAP and RESHARD.
        move: The whole move.
        position: As in the module's table; None where that says none.
    """

    step: MoveStep
    move: Move
    position: Position | None = None

    def __post_init__(self) -> None:
        is_other = self.step in (MoveStep.LOAD, MoveStep.IMPORT, MoveStep.MAP, MoveStep.RESHARD)
        if is_other or (self.position is None) == (self.step in _WITH_POSITION):
            raise RequestError(f"move {self.move.move_id!r}: {self.step} with position {self.position}")

    def header(self) -> dict[str, Any]:
        """Return the header of the record, which has no body."""
        move = self.move
        header = {
            **{"kind": KIND_MOVE, _STEP: str(self.step), _MOVE: move.move_id},
            **{_SOURCE: move.source, _DESTINATION: move.destination},
            **{_PARTITIONS: _pack(move.partitions), _VERSIONS: _pack(move.versions)},
        }
        return header if self.position is None else header | {_POSITION: [self.position.seq, self.position.mark]}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRecord:
    """Some of the rows that a move has copied, in the destination's log; its body is a chunk of them.

    Attributes:
        move_id: Of the move.
        number: From 1, in order, after the move's last COPY record.
        is_last: All of the copy is in the log up to here.
    """

    move_id: str
    number: int
    is_last: bool

    def header(self) -> dict[str, Any]:
        """Return the header of the record."""
        return {
            **{"kind": KIND_MOVE, _STEP: str(MoveStep.LOAD), _MOVE: self.move_id},
            **{_NUMBER: self.number, _IS_LAST: self.is_last},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRecord:
    """A record of the source's log, cut to the moving partitions, in the destination's log.

    The record's epoch is that of the source's record, and its body the source's, cut. Versions of rows are in there,
    and whether they are conditional. Imports of a move come in the order of their positions; only records that have
    nothing for the partitions are left out. The position takes the place of a client seq.

    Attributes:
        move_id: Of the move.
        source: The shard whose record it is.
        position: Of the source's record.
        record: Header of the source's record: of a batch, with the tables that are left, or of a hello. Or
            `SHARED_STATE`: then the body is what is the whole source's, and no partition's, as it was when it had
            copied, or when other partitions had come to it.
        keeps_steps: Of shared state: its sessions keep the steps that their clients have ended at the source, see
            `ShardPartitions.can_keep_steps`.
    """

    move_id: str
    source: int
    position: Position
    record: Mapping[str, Any]
    keeps_steps: bool = False

    @property
    def is_shared_state(self) -> bool:
        """Whether the body is the source's shared state (`store/shared_state.py`)."""
        return step_of(self.record) is MoveStep.ACTIVATE

    def header(self) -> dict[str, Any]:
        """Return the header of the record."""
        return {
            **{"kind": KIND_MOVE, _STEP: str(MoveStep.IMPORT), _MOVE: self.move_id, _SOURCE: self.source},
            **{_POSITION: [self.position.seq, self.position.mark], _RECORD: dict(self.record)},
            **({_KEEPS_STEPS: True} if self.keeps_steps else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MapRecord:
    """What a shard has heard of moves between other shards.

    Attributes:
        partition_map: The shard's map, merged with what it has heard.
    """

    partition_map: PartitionMap

    def header(self) -> dict[str, Any]:
        """Return the header of the record, which has no body."""
        return {"kind": KIND_MOVE, _STEP: str(MoveStep.MAP), _MAP: self.partition_map.encode()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardRecord:
    """The reshard that is under way, in the log of shard 0.

    Attributes:
        number: 1 for the first such record, and one more for each: who has not seen the last one changes nothing.
        reshard: Its bytes, as `reshard/coordinator.py` makes them; empty when none is under way any more.
    """

    number: int
    reshard: bytes

    def header(self) -> dict[str, Any]:
        """Return the header of the record, which has no body."""
        return {"kind": KIND_MOVE, _STEP: str(MoveStep.RESHARD), _NUMBER: self.number, _RESHARD: self.reshard}


def step_of(header: Mapping[str, Any]) -> MoveStep | None:
    """Return what a record of a move says, by its header; None for any other record.

    Raises:
        CorruptionError: A step that this version does not know.
    """
    if header.get("kind") != KIND_MOVE:
        return None
    try:
        return MoveStep(header[_STEP])
    except (KeyError, ValueError) as exc:
        raise CorruptionError(f"a record of a move has an unknown transition: {exc!r}") from exc


def decode_move_record(
    header: Mapping[str, Any],
) -> MoveRecord | LoadRecord | ImportRecord | MapRecord | ReshardRecord:
    """Return the record whose `header` this is.

    Raises:
        CorruptionError: It is no record of a move, or cannot be understood.
    """
    step = step_of(header)
    if step is None:
        raise CorruptionError(f"a record of kind {header.get('kind')!r} is none of a move")
    try:
        if step is MoveStep.MAP:
            return MapRecord(partition_map=PartitionMap.decode(_typed(header[_MAP], bytes)))
        if step is MoveStep.RESHARD:
            return ReshardRecord(number=_typed(header[_NUMBER], int), reshard=_typed(header[_RESHARD], bytes))
        move_id = _typed(header[_MOVE], str)
        if step is MoveStep.LOAD:
            number, is_last = _typed(header[_NUMBER], int), _typed(header[_IS_LAST], bool)
            return LoadRecord(move_id=move_id, number=number, is_last=is_last)
        source = _typed(header[_SOURCE], int)
        position = None if _POSITION not in header else _position(header[_POSITION])
        if step is MoveStep.IMPORT:
            if position is None:
                raise ValueError("an import without a position")
            record = _typed(header[_RECORD], dict)
            keeps_steps = _typed(header.get(_KEEPS_STEPS, False), bool)
            return ImportRecord(
                move_id=move_id, source=source, position=position, record=record, keeps_steps=keeps_steps
            )
        move = Move(
            move_id=move_id,
            source=source,
            destination=_typed(header[_DESTINATION], int),
            partitions=_unpack(header[_PARTITIONS]),
            versions=_unpack(header[_VERSIONS]),
        )
        return MoveRecord(step=step, move=move, position=position)
    except (KeyError, TypeError, ValueError, ProtocolError, RequestError) as exc:
        raise CorruptionError(f"a record of a move, {step}, cannot be understood: {exc!r}") from exc


def _pack(values: tuple[int, ...]) -> bytes:
    return np.array(values, "<u4").tobytes()


def _unpack(packed: Any) -> tuple[int, ...]:
    return tuple(np.frombuffer(_typed(packed, bytes), "<u4").tolist())


def _position(values: Any) -> Position:
    seq, mark = values
    if type(seq) is not int or seq < 0 or type(mark) not in (int, type(None)):
        raise ValueError(f"position {values!r}")
    return Position(seq=seq, mark=mark)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} was expected")
    return value
