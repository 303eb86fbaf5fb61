"""How far a shard's moves have come: a function of its log, kept in its store's metadata. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from headrace.schemas.errors import RequestError
from headrace.schemas.move_records import (
    ImportRecord,
    LoadRecord,
    Move,
    MoveRecord,
    MoveStep,
    Position,
    decode_move_record,
)

__all__ = ["MoveProgress", "Moves"]

# ON DISK: never rename. In the store's metadata: by move id, seq and header of the move's last transition; by move id,
# seq and mark of the source's record that was imported last; by move id, the number of the record that was loaded last,
# and whether it is the last of all. The store deletes empty values.
_META_MOVE = b"partitions/move/"
_META_IMPORT = b"partitions/import/"
_META_LOAD = b"partitions/load/"
# By move id, partitions of which the store has yet to remove what a move has left, uint32 each. The store's own, from
# the record on that leaves them.
_META_UNPURGED = b"partitions/unpurged/"
# Moves that are over answer late and repeated requests; so many are remembered, about 4 KB each.
_MAX_ENDED = 256


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """What a shard's log says of one move.

    Attributes:
        record: Its last transition in this log; an import is none.
        seq: Of that record. Of a seal it is q.
        imported: While the shard copies, the position of the source's record that was imported last, at first c.
        num_loads: Records since the last COPY that have rows of the copy.
        is_loaded: They have all of them.
    """

    record: MoveRecord
    seq: int
    imported: Position | None = None
    num_loads: int = 0
    is_loaded: bool = False

    @property
    def move(self) -> Move:
        """The move."""
        return self.record.move

    @property
    def step(self) -> MoveStep:
        """The last transition."""
        return self.record.step

    @property
    def is_open(self) -> bool:
        """The shard has still to decide, or to remove rows: it takes part in no other move of these partitions."""
        return self.step in (MoveStep.COPY, MoveStep.SEAL, MoveStep.RELEASE)


class Moves:
    """The moves in which a shard takes part, and the last ones in which it took part. Not checked here.

    Attributes:
        unpurged: By move id, partitions of which the store has yet to remove what the move has left: behind a PURGE,
            and behind a COPY that is not the first. `purged` takes one out.
    """

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Read them from the store's metadata. Raises one of several errors when an entry cannot be read."""
        self._moves: dict[str, MoveProgress] = {}
        self.unpurged: dict[str, tuple[int, ...]] = {}
        for key, value in meta.items():
            if key.startswith(_META_UNPURGED):
                move_id = key.removeprefix(_META_UNPURGED).decode()
                self.unpurged[move_id] = tuple(np.frombuffer(value, "<u4").tolist())
            if key.startswith(_META_MOVE):
                move_id = key.removeprefix(_META_MOVE).decode()
                name = move_id.encode()
                self._moves[move_id] = _unpack(value, meta.get(_META_IMPORT + name), meta.get(_META_LOAD + name))

    def __iter__(self) -> Iterator[MoveProgress]:
        """Yield them in the order of their last transitions."""
        return iter(sorted(self._moves.values(), key=lambda each: each.seq))

    def find(self, move_id: str) -> MoveProgress | None:
        """Return a move's progress; None where this log has nothing of it, or no longer."""
        return self._moves.get(move_id)

    def find_same(self, move: Move) -> MoveProgress | None:
        """Return a move's progress, as `find`.

        Raises:
            RequestError: There is another move of the same id.
        """
        found = self.find(move.move_id)
        if found is not None and found.move != move:
            raise RequestError(
                f"move {move.move_id!r} of {len(move.partitions)} partitions from shard {move.source} to "
                f"{move.destination}: another move has this id"
            )
        return found

    def take(self, record: MoveRecord | LoadRecord | ImportRecord, seq: int) -> dict[bytes, bytes]:
        """Note record `seq`; return the metadata to save with it."""
        if isinstance(record, LoadRecord):
            before = self._moves[record.move_id]
            self._moves[record.move_id] = replace(before, num_loads=record.number, is_loaded=record.is_last)
            return {_META_LOAD + record.move_id.encode(): msgpack.packb([record.number, record.is_last])}
        if isinstance(record, ImportRecord):
            self._moves[record.move_id] = replace(self._moves[record.move_id], imported=record.position)
            position = msgpack.packb([record.position.seq, record.position.mark])
            return {_META_IMPORT + record.move_id.encode(): position}
        move_id, is_copy = record.move.move_id, record.step is MoveStep.COPY
        is_left = record.step is MoveStep.PURGE or (is_copy and move_id in self._moves)
        self._moves[move_id] = MoveProgress(record, seq, record.position if is_copy else None)
        meta = {_META_MOVE + move_id.encode(): msgpack.packb([seq, record.header()])}
        meta |= {_META_IMPORT + move_id.encode(): b"", _META_LOAD + move_id.encode(): b""}
        if is_left:
            self.unpurged[move_id] = record.move.partitions
            meta[_META_UNPURGED + move_id.encode()] = np.array(record.move.partitions, "<u4").tobytes()
        ended = [each.move.move_id for each in self if not each.is_open]
        for old in ended[:-_MAX_ENDED]:
            del self._moves[old]
            meta[_META_MOVE + old.encode()] = b""
        return meta

    def purged(self, move_id: str) -> dict[bytes, bytes]:
        """Note that the partitions of a move are removed; return the metadata to write behind their rows."""
        self.unpurged.pop(move_id, None)
        return {_META_UNPURGED + move_id.encode(): b""}


def _unpack(value: bytes, imported: bytes | None, loaded: bytes | None) -> MoveProgress:
    seq, header = msgpack.unpackb(value)
    record = decode_move_record(header)
    if not isinstance(record, MoveRecord):
        raise ValueError("a move that is not at a transition")
    num_loads, is_loaded = (0, False) if loaded is None else msgpack.unpackb(loaded)
    position = record.position if record.step is MoveStep.COPY else None
    if imported is not None:
        imported_seq, mark = msgpack.unpackb(imported)
        position = Position(seq=imported_seq, mark=mark)
    return MoveProgress(record, seq, position, num_loads, is_loaded)
