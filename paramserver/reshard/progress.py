"""How far a shard's moves have come: a function of its log, kept in its store's metadata. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgpack

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.move_records import (
    ImportRecord,
    Move,
    MoveRecord,
    MoveStep,
    Position,
    decode_move_record,
)

__all__ = ["MoveProgress", "Moves"]

# ON DISK: never rename. Followed by the id of a move.
_META_PREFIX = b"move/"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveProgress:
    """What a shard's log says of one move.

    Attributes:
        move: The move.
        step: Its last transition in this log; an import is none.
        seq: The record of that transition. Of a seal it is q.
        position: The position that the record names: c or q; None where it names none.
        imported: At the destination, the position of the last import since the copy; c if there is none.
        copy_seq: At the destination, the record of the last copy; 0 at the source.
    """

    move: Move
    step: MoveStep
    seq: int
    position: Position | None = None
    imported: Position | None = None
    copy_seq: int = 0

    @property
    def is_over(self) -> bool:
        """The shard has nothing of the move that it must still remove, and nothing to decide."""
        return self.step in (MoveStep.UNSEAL, MoveStep.PURGE)


class Moves:
    """All moves in which a shard takes part, or took."""

    def __init__(self, meta: Mapping[bytes, bytes]) -> None:
        """Read them from the store's metadata. Raises CorruptionError when an entry cannot be read."""
        self._moves: dict[str, MoveProgress] = {}
        for key, value in meta.items():
            if key.startswith(_META_PREFIX):
                self._add(_unpack(key, value))

    def _add(self, progress: MoveProgress) -> None:
        self._moves[progress.move.move_id] = progress

    def __iter__(self) -> Iterator[MoveProgress]:
        return iter(list(self._moves.values()))

    def find(self, move_id: str) -> MoveProgress | None:
        """Return a move's progress; None where this log has nothing of it."""
        return self._moves.get(move_id)

    def find_same(self, move: Move) -> MoveProgress | None:
        """Return a move's progress.

        Raises:
            RequestError: There is another move of the same id.
        """
        known = self.find(move.move_id)
        if known is not None and known.move != move:
            raise RequestError(f"move {move.move_id!r} is another one: {known.move}, not {move}")
        return known

    def unpurged(self, partitions: tuple[int, ...], *, except_id: str = "") -> MoveProgress | None:
        """Return another move that still has some of the partitions, on their way in or not yet removed here."""
        wanted = set(partitions)
        for each in self:
            has_ended_here = each.is_over or each.step is MoveStep.ACTIVATE
            if not has_ended_here and each.move.move_id != except_id and wanted.intersection(each.move.partitions):
                return each
        return None

    def take(self, record: MoveRecord | ImportRecord, seq: int) -> dict[bytes, bytes]:
        """Note a record of the log; return the metadata to save with it."""
        if isinstance(record, ImportRecord):
            known = self._moves[record.move_id]
            progress = replace(known, imported=record.position)
        else:
            before = self.find(record.move.move_id)
            is_copy = record.step is MoveStep.COPY
            progress = MoveProgress(
                move=record.move,
                step=record.step,
                seq=seq,
                position=record.position,
                imported=record.position if is_copy else before.imported if before else None,
                copy_seq=seq if is_copy else before.copy_seq if before else 0,
            )
        self._add(progress)
        return {_META_PREFIX + progress.move.move_id.encode(): _pack(progress)}


def _pack(progress: MoveProgress) -> bytes:
    header = MoveRecord(step=MoveStep.PURGE, move=progress.move).header()  # the move, in the log's own format
    positions = [None if at is None else [at.seq, at.mark] for at in (progress.position, progress.imported)]
    packed: bytes = msgpack.packb([header, str(progress.step), progress.seq, *positions, progress.copy_seq])
    return packed


def _unpack(key: bytes, value: bytes) -> MoveProgress:
    try:
        header, step, seq, position, imported, copy_seq = msgpack.unpackb(value)
        record = decode_move_record(header)
        assert isinstance(record, MoveRecord)
        at, to = (None if each is None else Position(seq=each[0], mark=each[1]) for each in (position, imported))
        return MoveProgress(move=record.move, step=MoveStep(step), seq=seq, position=at, imported=to, copy_seq=copy_seq)
    except (ValueError, TypeError, AssertionError) as exc:
        raise CorruptionError(f"store metadata {key!r} is no move: {exc!r}") from exc
