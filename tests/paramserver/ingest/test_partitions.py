"""A shard's partitions: what its log says of moves, what it has heard, and the rows that it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.paramserver.ingest.partitions import AnyMoveRecord, ShardPartitions
from headrace.schemas.errors import CorruptionError, RequestError, UnavailableError, WrongRoutingError
from headrace.schemas.move_records import ImportRecord, LoadRecord, MapRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=0, dim=4, dtype=DType.FLOAT32)
FIRST = PartitionMap.first(2, 8)
ROWS = np.arange(200)
PARTITIONS = FIRST.partitions_of_rows(SPEC.seed, ROWS)
MOVE = Move(move_id="a", source=0, destination=1, partitions=(2, 6), versions=(1, 1))
MOVING = ROWS[np.isin(PARTITIONS, MOVE.partitions)]
STAYING = ROWS[np.isin(PARTITIONS, (0, 4))]
Q = Position(seq=3, mark=7)


def _step(step: MoveStep, move: Move = MOVE, position: Position | None = None) -> MoveRecord:
    return MoveRecord(step=step, move=move, position=position)


COPY = _step(MoveStep.COPY, position=Position(seq=1, mark=7))
SEAL, LAPSE, UNSEAL, PURGE = map(_step, (MoveStep.SEAL, MoveStep.LAPSE, MoveStep.UNSEAL, MoveStep.PURGE))
RELEASE, ACTIVATE = (_step(step, position=Q) for step in (MoveStep.RELEASE, MoveStep.ACTIVATE))
LOAD, LAST = (LoadRecord(move_id="a", number=number, is_last=number == 2) for number in (1, 2))
IMPORT = ImportRecord(move_id="a", source=0, position=Position(seq=2, mark=7), record={"kind": 1})


class _Log:
    """A shard's partitions with the metadata that its store would have; records take seqs 3, 4, …"""

    def __init__(self, shard: int, meta: dict[bytes, bytes] | None = None, first: PartitionMap = FIRST) -> None:
        self.meta = dict(meta or {})
        self.seq = self.durable_seq = 2
        self.partitions = ShardPartitions(self.meta, shard=shard, first=first, durable_seq=lambda: self.durable_seq)

    def take(self, *records: AnyMoveRecord, is_durable: bool = True) -> ShardPartitions:
        for record in records:
            self.seq += 1
            for key, value in self.partitions.take(record, self.seq).items():
                if value:
                    self.meta[key] = value
                else:  # as the store does
                    self.meta.pop(key, None)
            self.durable_seq = self.seq if is_durable else self.durable_seq
        return self.partitions


def _heard(*moves: Move) -> MapRecord:
    known = FIRST
    for move in moves:
        known = move.apply_to(known)
    return MapRecord(partition_map=known)


def _refused(check: Callable[[], Any]) -> PartitionMap:
    """Return the map with which rows are refused."""
    with pytest.raises(WrongRoutingError) as caught:
        check()
    return PartitionMap.decode(caught.value.partitions)


def test_before_any_move_rows_are_where_they_were() -> None:
    """A shard serves rows of its hash, and refuses others with the shard that has them."""
    for shard in (0, 1):
        partitions = _Log(shard).partitions
        is_mine = np.equal(PARTITIONS % 2, shard)
        mine = ROWS[is_mine]
        for is_write in (False, True):
            partitions.check_rows(SPEC, mine, is_write=is_write)
            other = ROWS[~is_mine][:1]
            with pytest.raises(WrongRoutingError, match=rf"row {other[0]} belongs to shard {1 - shard}, this is"):
                partitions.check_rows(SPEC, np.append(mine, other), is_write=is_write)
        assert partitions.served(SPEC, mine) is None
        assert not partitions.has_moves
    _Log(0, first=PartitionMap.first(1)).partitions.check_rows(SPEC, ROWS, is_write=True)
    with pytest.raises(WrongRoutingError):  # a shard that was added and has nothing yet
        _Log(1, first=PartitionMap.first(1)).partitions.check_rows(SPEC, ROWS)


def test_the_source_serves_until_it_releases() -> None:
    """A sealed partition takes no writes and is read; a released one belongs to the destination, rows or not."""
    log = _Log(0)
    partitions = log.take(SEAL)
    partitions.check_rows(SPEC, MOVING)
    partitions.check_rows(SPEC, STAYING, is_write=True)
    assert _refused(lambda: partitions.check_rows(SPEC, MOVING, is_write=True)) == FIRST

    log.take(RELEASE)
    for is_write in (False, True):
        check = partial(partitions.check_rows, SPEC, MOVING, is_write=is_write)
        assert _refused(check) == MOVE.apply_to(FIRST)
    partitions.check_rows(SPEC, STAYING, is_write=True)
    served = partitions.served(SPEC, ROWS)
    assert served is not None
    assert ROWS[served].tolist() == STAYING.tolist()

    assert [each.step for each in partitions.moves] == [MoveStep.RELEASE]
    log.take(PURGE)
    assert not any(each.is_open for each in partitions.moves)
    assert partitions.logged == partitions.known == MOVE.apply_to(FIRST)


def test_a_seal_that_lapses() -> None:
    """The source takes writes, and part in other moves of the partitions; or it seals again for the same move."""
    log = _Log(0)
    log.take(SEAL, LAPSE).check_rows(SPEC, MOVING, is_write=True)
    assert not any(each.is_open for each in log.partitions.moves)
    _Log(0, log.meta).take(_step(MoveStep.SEAL, _AGAIN))
    with pytest.raises(WrongRoutingError):
        log.take(SEAL).check_rows(SPEC, MOVING, is_write=True)
    log.take(_step(MoveStep.RELEASE, position=Position(seq=log.seq, mark=7)))
    assert log.partitions.known == MOVE.apply_to(FIRST)


def test_a_move_that_is_given_up_leaves_everything_as_it_was() -> None:
    """The source takes writes again after UNSEAL, and the destination has nothing once it has purged."""
    source, destination = _Log(0), _Log(1)
    source.take(SEAL, UNSEAL).check_rows(SPEC, MOVING, is_write=True)
    destination.take(COPY, LOAD, LAST, IMPORT, PURGE)
    for log in (source, destination):
        assert log.partitions.known == log.partitions.logged == FIRST
        assert not any(each.is_open for each in log.partitions.moves)
    source.take(_step(MoveStep.SEAL, _AGAIN))
    destination.take(_step(MoveStep.COPY, _AGAIN, COPY.position))


def test_a_copy_that_begins_anew_leaves_the_rows_of_the_one_before() -> None:
    """From the second COPY of a move on, the store is to remove what the first has loaded."""
    log = _Log(1)
    assert not log.take(COPY, LOAD).moves.unpurged
    partitions = log.take(COPY)
    assert partitions.moves.unpurged == {"a": MOVE.partitions}
    partitions.check(LOAD)


def test_the_destination_serves_from_its_activation() -> None:
    """Copied rows are not served; one that hears of the release before it has activated says "unavailable"."""
    log = _Log(1)
    partitions = log.take(COPY, LOAD, LAST, IMPORT)
    assert _refused(lambda: partitions.check_rows(SPEC, MOVING)) == FIRST
    log.take(_heard(MOVE))
    for is_write in (False, True):
        with pytest.raises(UnavailableError, match=rf"row {MOVING[0]} is not on shard 1 at this moment"):
            partitions.check_rows(SPEC, MOVING, is_write=is_write)
    log.take(ACTIVATE).check_rows(SPEC, MOVING, is_write=True)
    assert not any(each.is_open for each in partitions.moves)


def test_a_new_shard_keeps_the_steps_of_the_first_source_that_tells_it() -> None:
    """Not once it has loaded, has got, or may have lost rows of another source: the trainer may send more of those."""
    to_new = dataclasses.replace(MOVE, destination=2)
    other = Move(move_id="b", source=1, destination=2, partitions=(1, 3), versions=(1, 1))
    copy = [_step(MoveStep.COPY, each, Position(seq=1, mark=7)) for each in (to_new, other)]
    activate = _step(MoveStep.ACTIVATE, to_new, Q)
    log = _Log(2)
    assert log.take(*copy, LOAD).can_keep_steps("b")
    partitions = log.take(LAST)
    assert (partitions.can_keep_steps("a"), partitions.can_keep_steps("b")) == (True, False)
    assert not log.take(activate).can_keep_steps("b")
    assert not _Log(2).take(copy[1], _heard(to_new)).can_keep_steps("b")  # it has lost the move, or missed it
    assert not _Log(1).take(COPY).can_keep_steps("a")


def test_a_shard_set_back_serves_nothing_that_it_has_given_away() -> None:
    """An older copy of the source hears of the release; it may then only release again and purge."""
    log = _Log(0)
    partitions = log.take(_heard(MOVE))
    assert partitions.logged == FIRST
    assert _refused(lambda: partitions.check_rows(SPEC, MOVING)) == MOVE.apply_to(FIRST)
    with pytest.raises(RequestError, match="not at the source"):  # its old rows would come back to life
        partitions.check(_step(MoveStep.COPY, _BACK, Q))
    log.take(SEAL, dataclasses.replace(RELEASE, position=Position(seq=log.seq + 1, mark=7)), PURGE)
    log.take(_step(MoveStep.COPY, _BACK, Q))


def test_a_map_is_told_once_its_record_is_durable() -> None:
    """What a release has changed counts for rows at once; whoever asks gets the earlier map until it is on disk."""
    log = _Log(0)
    partitions = log.take(SEAL)
    log.take(RELEASE, is_durable=False)
    assert partitions.told == FIRST
    with pytest.raises(UnavailableError):
        partitions.check_rows(SPEC, MOVING)
    log.take(PURGE, _heard(MOVE), is_durable=False)  # nothing newer in them
    assert partitions.told == FIRST
    log.durable_seq = log.seq
    assert partitions.told == MOVE.apply_to(FIRST)
    other = Move(move_id="b", source=1, destination=0, partitions=(1,), versions=(1,))
    log.take(_heard(other), is_durable=False)
    assert partitions.told == MOVE.apply_to(FIRST)


_AGAIN = dataclasses.replace(MOVE, move_id="again")
LOAD_AGAIN, LAST_AGAIN, IMPORT_AGAIN = (dataclasses.replace(each, move_id="again") for each in (LOAD, LAST, IMPORT))
_LIVES = {
    0: (
        *(SEAL, UNSEAL, _heard(), _step(MoveStep.SEAL, _AGAIN)),
        *(_step(MoveStep.RELEASE, _AGAIN, Position(seq=6, mark=7)), _step(MoveStep.PURGE, _AGAIN)),
    ),
    1: (
        *(COPY, LOAD, PURGE, _step(MoveStep.COPY, _AGAIN, COPY.position), LOAD_AGAIN, LAST_AGAIN, IMPORT_AGAIN),
        *(_step(MoveStep.COPY, _AGAIN, COPY.position), LOAD_AGAIN, LAST_AGAIN, IMPORT_AGAIN, _heard(MOVE)),
        _step(MoveStep.ACTIVATE, _AGAIN, Q),
    ),
}


@pytest.mark.parametrize("shard", _LIVES)
def test_a_crash_after_any_record_changes_nothing(shard: int) -> None:
    """Metadata saved with a record restores maps, moves and imports as they were behind it."""
    through = _Log(shard)
    through.take(*_LIVES[shard])
    for crash in range(len(_LIVES[shard]) + 1):
        before = _Log(shard)
        before.take(*_LIVES[shard][:crash])
        after = _Log(shard, before.meta)
        after.seq = before.seq
        _assert_equal(after, before)
        after.take(*_LIVES[shard][crash:])
        _assert_equal(after, through)


def _assert_equal(one: _Log, other: _Log) -> None:
    assert list(one.partitions.moves) == list(other.partitions.moves)
    for name in ("logged", "known", "has_moves"):
        assert getattr(one.partitions, name) == getattr(other.partitions, name)
    served = [log.partitions.served(SPEC, ROWS) for log in (one, other)]
    assert [None if each is None else each.tolist() for each in served] == [
        None if each is None else each.tolist() for each in served[::-1]
    ]
    assert one.meta == other.meta


_BACK = Move(move_id="b", source=1, destination=0, partitions=(2,), versions=(2,))


def _move(**changes: Any) -> Move:
    return dataclasses.replace(MOVE, **changes)


@pytest.mark.parametrize(
    ("shard", "before", "record"),
    [
        (0, (), _step(MoveStep.SEAL, _move(destination=2, source=3))),  # neither source nor destination
        (1, (), SEAL),
        (0, (), COPY),
        (0, (), _step(MoveStep.SEAL, _move(partitions=(2, 8)))),
        (0, (), _step(MoveStep.SEAL, _move(partitions=(2, 3)))),
        (0, (), _step(MoveStep.SEAL, _move(versions=(1, 2)))),
        (0, (SEAL,), SEAL),
        (0, (SEAL,), _step(MoveStep.SEAL, _move(move_id="b", destination=3, partitions=(6,), versions=(1,)))),
        (0, (SEAL,), PURGE),
        (0, (SEAL,), _step(MoveStep.RELEASE, position=Position(seq=4, mark=7))),  # not of this seal
        (0, (SEAL,), _step(MoveStep.RELEASE, _move(destination=2), Q)),
        (0, (SEAL, RELEASE), UNSEAL),
        (0, (), LAPSE),
        (0, (SEAL, RELEASE), LAPSE),
        (0, (SEAL, LAPSE), RELEASE),
        (0, (SEAL, LAPSE, SEAL), RELEASE),  # of the seal that has lapsed
        (0, (SEAL, LAPSE, UNSEAL), SEAL),
        (0, (SEAL, RELEASE), RELEASE),
        (0, (SEAL, RELEASE), _step(MoveStep.COPY, _BACK, Q)),  # before it has purged
        (0, (), RELEASE),
        (0, (), PURGE),
        (1, (), IMPORT),
        (1, (), ACTIVATE),
        (0, (SEAL, UNSEAL), SEAL),  # given up
        (1, (COPY, PURGE), COPY),
        (1, (), LOAD),
        (1, (COPY,), LAST),  # not the next one
        (1, (COPY, LOAD, LAST), dataclasses.replace(LAST, number=3)),
        (1, (COPY, LOAD), IMPORT),
        (1, (COPY, LOAD, LAST), dataclasses.replace(IMPORT, source=2)),
        (1, (COPY, LOAD, LAST), dataclasses.replace(IMPORT, position=Position(seq=1, mark=7))),
        (1, (COPY, LOAD, LAST, IMPORT), IMPORT),
        (1, (COPY, ACTIVATE), LOAD),
        (1, (COPY, ACTIVATE), IMPORT),
        (1, (COPY, ACTIVATE), PURGE),
        (1, (COPY, ACTIVATE), COPY),
        (1, (_heard(_move(destination=2)),), COPY),  # it has gone elsewhere
        (1, (), MapRecord(partition_map=PartitionMap.first(2, 16))),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_the_log_is_refused(
    shard: int, before: tuple[AnyMoveRecord, ...], record: AnyMoveRecord
) -> None:
    """Neither a repeated nor a late nor a wrong record changes anything."""
    log = _Log(shard)
    log.take(*before)
    meta, moves = dict(log.meta), list(log.partitions.moves)
    with pytest.raises(RequestError):
        log.take(record)
    assert log.meta == meta
    assert list(log.partitions.moves) == moves


def test_hearsay_becomes_a_record_if_it_is_newer() -> None:
    """A map that says nothing new needs no record; one of another server, or no map, is refused."""
    log = _Log(1)
    assert log.partitions.heard(FIRST.encode()) is None
    record = log.partitions.heard(MOVE.apply_to(FIRST).encode())
    assert record == _heard(MOVE)
    log.take(record)
    assert log.partitions.heard(MOVE.apply_to(FIRST).encode()) is None
    for data in (b"", PartitionMap.first(2, 16).encode()):
        with pytest.raises(RequestError):
            log.partitions.heard(data)


@pytest.mark.parametrize(
    "meta",
    [
        {b"partitions/known": b"x"},
        {b"partitions/logged": PartitionMap.first(2, 16).encode()},
        {b"partitions/move/a": b"\x93\x01\x02\x03"},
        {b"partitions/move/a": b"\x92\x01\x80"},
    ],
)
def test_damaged_metadata_is_refused(meta: dict[bytes, bytes]) -> None:
    """A shard does not start with maps that it cannot read, or that are of a server with other partitions."""
    with pytest.raises(CorruptionError, match="metadata of partitions"):
        _Log(0, meta)
