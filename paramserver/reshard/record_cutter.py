"""The tail of a move: records of the source's log, cut to the partitions. No I/O but reading the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, is_housekeeping
from headrace.paramserver.store.catalog import Table
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.move_records import Move, MoveStep, step_of
from headrace.schemas.partition_map import PartitionMap

__all__ = ["CutRecord", "RecordCutter", "cut_tail"]

# Of one reply: far fewer than a decoder accepts.
_MAX_RECORDS = 4096
# Read for one reply, which may find nothing: the reply says how far it came, and the next one goes on.
_MAX_READ_BYTES = 64 << 20
_RECORD_BYTES = 128  # of a record besides header and body, rounded up

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CutRecord:
    """A record of the source's log, cut to the partitions; `body` is a whole Thrift message, or empty.

    An activation has none: what the shard has of all partitions together is to be put there.
    """

    seq: int
    epoch: int
    header: dict[str, Any]
    body: bytes

    @property
    def is_activation(self) -> bool:
        """Whether other partitions came to the source with this record."""
        return step_of(self.header) is MoveStep.ACTIVATE


class RecordCutter:
    """Cuts records to the partitions of a move. Thread: any."""

    def __init__(self, move: Move, partition_map: PartitionMap, tables: Iterable[Table]) -> None:
        """Use the tables as they are now: they are told by their fingerprints."""
        self._map = partition_map
        self._is_moving = np.zeros(partition_map.num_partitions, np.bool_)
        self._is_moving[list(move.partitions)] = True
        self._seeds = {
            fingerprint: table.spec.seed for table in tables for fingerprint in (table.spec.fingerprint, *table.earlier)
        }

    def cut(self, record: LogRecord) -> CutRecord | None:
        """Return what a record has for the partitions: a hello as it is, an activation; None if nothing."""
        kind = record.header.get("kind")
        if kind == KIND_BATCH:
            return self._cut_batch(record)
        is_hello = kind == KIND_HELLO and not is_housekeeping(record.header)
        if is_hello or step_of(record.header) is MoveStep.ACTIVATE:
            return CutRecord(record.seq, record.epoch, record.header, b"")
        return None

    def _cut_batch(self, record: LogRecord) -> CutRecord | None:
        offset = decode_header(record.body).body_offset
        args = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset)
        request = args.request
        request.deltas = [cut for delta in request.deltas if (cut := self._cut_delta(delta)) is not None]
        if not request.deltas:
            return None
        names = [delta.fqn for delta in request.deltas]
        header = record.header | {"tables": names}
        if below_floor := header.get("below_floor"):
            header["below_floor"] = [name for name in below_floor if name in names]
        body = b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 1, args))
        return CutRecord(record.seq, record.epoch, header, body)

    def _cut_delta(self, delta: Any) -> Any | None:
        """Return a delta with the rows, deletions and scalars that count; None for a table that was dropped since."""
        if (seed := self._seeds.get(delta.fingerprint)) is None:
            return None
        moves = self._are_moving(seed, delta.row_ids)
        if delta.deleted_row_ids is not None:
            delta.deleted_row_ids = _rows_of(delta.deleted_row_ids, self._are_moving(seed, delta.deleted_row_ids))
        if not moves.all():
            delta.row_ids, delta.weights = _rows_of(delta.row_ids, moves), _rows_of(delta.weights, moves)
            for state in delta.states:
                state.data = _rows_of(state.data, moves)
            if delta.identities is not None:
                delta.identities = _rows_of(delta.identities, moves)
        return delta if delta.row_ids or delta.deleted_row_ids or delta.scalars else None

    def _are_moving(self, seed: int, row_ids: Any) -> _Mask:
        return self._is_moving[self._map.partitions_of_rows(seed, np.frombuffer(row_ids, "<i8"))]


def _rows_of(column: Any, keep: _Mask) -> Any:
    """Return those rows of a column of `keep.size` equal rows that are to be kept, bool[n]."""
    if not keep.size or keep.all():
        return column
    return np.frombuffer(column, np.uint8).reshape(keep.size, -1)[keep].tobytes()


def cut_tail(
    read: Callable[[int], Iterator[LogRecord]], cutter: RecordCutter, after_seq: int, up_to_seq: int, max_bytes: int
) -> tuple[list[CutRecord], int]:
    """Return records behind a seq, up to another one, of about `max_bytes`, and the last seq that was looked at.

    An activation is the last of a reply. Thread: any; it blocks.

    Raises:
        GoneError, CorruptionError: As `UpdateLog.read`.
    """
    found: list[CutRecord] = []
    seq, left, unread = after_seq, max_bytes, _MAX_READ_BYTES
    for record in read(after_seq + 1):
        if record.seq > up_to_seq:
            break
        cut = cutter.cut(record)
        if cut is not None:
            size_bytes = len(cut.body) + _RECORD_BYTES * (1 + len(cut.header))
            if found and size_bytes > left:
                break
            found.append(cut)
            left -= size_bytes
        seq, unread = record.seq, unread - record.body.nbytes - _RECORD_BYTES
        if left <= 0 or unread <= 0 or len(found) == _MAX_RECORDS or (cut is not None and cut.is_activation):
            break
    return found, seq
