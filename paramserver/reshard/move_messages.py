"""Moves and positions as the IDL's structs."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.schemas.errors import RequestError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move, Position

__all__ = ["move_from_idl", "move_to_idl", "position_from_idl", "position_to_idl"]


def move_to_idl(move: Move) -> Any:
    """Return a move as `idl.PartitionMove`."""
    return idl.PartitionMove(
        move_id=move.move_id,
        source=move.source,
        destination=move.destination,
        partitions=np.array(move.partitions, "<u4").tobytes(),
        versions=np.array(move.versions, "<u4").tobytes(),
    )


def move_from_idl(struct: Any) -> Move:
    """Return the move of an `idl.PartitionMove`.

    Raises:
        RequestError: It is none.
    """
    return Move(
        move_id=struct.move_id,
        source=struct.source,
        destination=struct.destination,
        partitions=_numbers(struct.partitions),
        versions=_numbers(struct.versions),
    )


def position_to_idl(position: Position) -> Any:
    """Return a position as `idl.MovePosition`."""
    return idl.MovePosition(seq=position.seq, mark=position.mark)


def position_from_idl(struct: Any) -> Position:
    """Return the position of an `idl.MovePosition`.

    Raises:
        RequestError: It is none.
    """
    if struct is None or struct.seq < 0:
        raise RequestError(f"{struct}: a move's position is needed here, from seq 0 on")
    return Position(seq=struct.seq, mark=struct.mark)


def _numbers(packed: Any) -> tuple[int, ...]:
    if len(packed) % 4:
        raise RequestError(f"{len(packed)} bytes are no list of partitions or versions of a move")
    return tuple(np.frombuffer(packed, "<u4").tolist())
