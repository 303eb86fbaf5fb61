from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from set_embeddings import delta_of, request_of

from headrace.paramserver.log.interface import LogRecord, note_header
from headrace.paramserver.reshard.record_cutter import RecordCutter, cut_tail
from headrace.paramserver.store.catalog import Table
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.move_records import MapRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="items",
    num_rows=0,
    dim=3,
    dtype=DType.FLOAT16,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=2),),
    has_identities=True,
)
MAP = PartitionMap.first(2)
MOVE = Move.of_map(MAP, tuple(range(0, 1024, 8)), move_id="a", destination=1)
ROWS = np.arange(400)
IS_MOVING = np.isin(MAP.partitions_of_rows(SPEC.seed, ROWS), MOVE.partitions)


def cutter_of(*specs: TableSpec) -> RecordCutter:
    return RecordCutter(MOVE, MAP, [Table(number, spec) for number, spec in enumerate(specs or (SPEC,), 1)])


def record_of(seq: int, *deltas: Any, **header: Any) -> LogRecord:
    args = idl.ParameterServer.setEmbeddings_args(request=request_of(*deltas, client_seq=seq, version_epoch=4))
    body = memoryview(b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 1, args)))
    header = {"kind": 1, "run": "run", "client": "rank0", "step": seq, "tables": [d.fqn for d in deltas], **header}
    return LogRecord(seq, 7, header, body)


def request_in(body: bytes) -> Any:
    frame = memoryview(body)
    return decode_struct(idl.ParameterServer.setEmbeddings_args, frame, decode_header(frame).body_offset).request


def full_delta(rows: Any, deleted: Any, **changes: Any) -> Any:
    weights = np.asarray(rows)[:, None] % 100 + np.arange(3)
    return delta_of(
        SPEC,
        rows,
        weights,
        states={"sum": np.asarray(rows)[:, None] * 2.0 + np.arange(2)},
        identities=(np.asarray(rows) + 1000).astype("<i8").tobytes(),
        deleted_row_ids=np.asarray(deleted, "<i8").tobytes(),
        **changes,
    )


def test_a_batch_is_cut_row_by_row() -> None:
    """Rows keep their columns, states, identities, and order; deletions, version and marks stay; nothing else comes."""
    rows, deleted = ROWS[:300][::-1].copy(), ROWS[300:]
    cut = cutter_of().cut(record_of(5, full_delta(rows, deleted), below_floor=["items", "gone"]))
    assert cut is not None
    assert (cut.seq, cut.epoch, cut.header["tables"], cut.header["below_floor"]) == (5, 7, ["items"], ["items"])
    request = request_in(cut.body)
    assert (request.version_epoch, request.step, request.client_seq) == (4, 5, 5)
    (delta,) = request.deltas
    kept = rows[IS_MOVING[rows]]
    expected = full_delta(kept, deleted[IS_MOVING[deleted]])
    for name in ("row_ids", "weights", "identities", "deleted_row_ids"):
        assert bytes(getattr(delta, name)) == bytes(getattr(expected, name)), name
    assert bytes(delta.states[0].data) == bytes(expected.states[0].data)


def test_what_does_not_touch_the_partitions_is_left_out() -> None:
    """So are batches of other rows or dropped tables, maps, steps of other moves and the log's own notes."""
    staying, moving = ROWS[~IS_MOVING], ROWS[IS_MOVING]
    cutter = cutter_of()
    gone = TableSpec(fqn="gone", num_rows=0, dim=3, dtype=DType.FLOAT16)
    assert cutter.cut(record_of(1, full_delta(staying, []))) is None
    assert cutter.cut(record_of(1, delta_of(gone, moving, 1.0))) is None
    assert cutter.cut(LogRecord(1, 1, note_header("heartbeat"), memoryview(b""))) is None
    for record in (MapRecord(partition_map=MAP), MoveRecord(step=MoveStep.SEAL, move=MOVE)):
        assert cutter.cut(LogRecord(1, 1, record.header(), memoryview(b""))) is None
    cut = cutter.cut(record_of(1, full_delta(staying, []), full_delta(moving, []), delta_of(gone, moving, 1.0)))
    assert cut is not None
    assert cut.header["tables"] == ["items"]
    assert len(request_in(cut.body).deltas) == 1


def test_hellos_and_scalars_come_whole() -> None:
    """Scalars are the table's, whichever rows come with them."""
    hello = {"kind": 2, "run": "r", "client": "c", "rank": 0, "world_size": 1, "tables": []}
    cut = cutter_of().cut(LogRecord(3, 9, hello, memoryview(b"")))
    assert cut is not None
    assert (cut.header, cut.body, cut.is_activation) == (hello, b"", False)
    scalar = idl.TableScalar(name="iter", dtype=int(DType.INT64), data=bytes(8))
    cut = cutter_of().cut(record_of(4, full_delta(ROWS[~IS_MOVING], [], scalars=[scalar])))
    assert cut is not None
    (delta,) = request_in(cut.body).deltas
    assert (len(delta.row_ids), len(delta.weights), len(delta.scalars)) == (0, 0, 1)


@pytest.mark.parametrize(
    ("up_to_seq", "max_bytes", "seqs", "end"), [(9, 1 << 20, [1, 3], 3), (9, 1, [1], 1), (2, 1 << 20, [1], 2)]
)
def test_a_tail_is_bounded(up_to_seq: int, max_bytes: int, seqs: list[int], end: int) -> None:
    """By bytes, by the seq that is wanted, and behind an activation; it tells how far it came."""
    activation = MoveRecord(step=MoveStep.ACTIVATE, move=MOVE, position=Position(seq=1, mark=None))
    records = [
        record_of(1, full_delta(ROWS, [])),
        record_of(2, full_delta(ROWS[~IS_MOVING], [])),
        LogRecord(3, 1, activation.header(), memoryview(b"")),
        record_of(4, full_delta(ROWS, [])),
    ]
    found, seq = cut_tail(lambda from_seq: iter(records[from_seq - 1 :]), cutter_of(), 0, up_to_seq, max_bytes)
    assert ([each.seq for each in found], seq) == (seqs, end)
    assert [each.is_activation for each in found] == [each == 3 for each in seqs]
