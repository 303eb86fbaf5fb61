"""Records of moves: exact bytes of their headers, round trips, and one error for whatever is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.log_records import pack_header, unpack_header
from headrace.schemas.move_records import (
    SHARED_STATE,
    ImportRecord,
    LoadRecord,
    MapRecord,
    Move,
    MoveRecord,
    MoveStep,
    Position,
    ReshardRecord,
    decode_move_record,
    step_of,
)
from headrace.schemas.partition_map import PartitionMap

_MOVE = Move(move_id="m1", source=0, destination=2, partitions=(1, 300), versions=(1, 2))
_AT = Position(seq=7, mark=-5)
_RECORDS: dict[str, MoveRecord | LoadRecord | ImportRecord | MapRecord | ReshardRecord] = {
    "copy": MoveRecord(step=MoveStep.COPY, move=_MOVE, position=Position(seq=0, mark=None)),
    "load": LoadRecord(move_id="m1", number=3, is_last=True),
    "import": ImportRecord(move_id="m1", source=0, position=Position(seq=8, mark=None), record={"kind": 1, "step": 5}),
    "seal": MoveRecord(step=MoveStep.SEAL, move=_MOVE),
    "lapse": MoveRecord(step=MoveStep.LAPSE, move=_MOVE),
    "unseal": MoveRecord(step=MoveStep.UNSEAL, move=_MOVE),
    "release": MoveRecord(step=MoveStep.RELEASE, move=_MOVE, position=_AT),
    "activate": MoveRecord(step=MoveStep.ACTIVATE, move=_MOVE, position=_AT),
    "purge": MoveRecord(step=MoveStep.PURGE, move=_MOVE),
    "map": MapRecord(partition_map=PartitionMap.first(3, 12).moved([4], [1], 0)),
    "reshard": ReshardRecord(number=2, reshard=b"plan"),
}

_GOLDEN = {
    "load": "85a46b696e6403aa7472616e736974696f6ea46c6f6164a46d6f7665a26d31a66e756d62657203a769735f6c617374c3",
    "reshard": "84a46b696e6403aa7472616e736974696f6ea772657368617264a66e756d62657202a772657368617264c404706c616e",
    "release": (
        "88a46b696e6403aa7472616e736974696f6ea772656c65617365a46d6f7665a26d31a6736f7572636500ab64657374696e6174696f6e02"
        "aa706172746974696f6e73c408010000002c010000a876657273696f6e73c4080100000002000000a8706f736974696f6e9207fb"
    ),
    "import": (
        "86a46b696e6403aa7472616e736974696f6ea6696d706f7274a46d6f7665a26d31a6736f7572636500a8706f736974696f6e9208c0"
        "a67265636f726482a46b696e6401a47374657005"
    ),
}


def _header(name: str, **changes: Any) -> dict[str, Any]:
    """Return the header of a record with some of its fields changed, or taken out where None is given."""
    header = _RECORDS[name].header() | changes
    return {key: value for key, value in header.items() if value is not None}


@pytest.mark.parametrize("name", _GOLDEN)
def test_golden_headers(name: str) -> None:
    """The bytes of a header are these, in both directions."""
    assert pack_header(_RECORDS[name].header()).hex() == _GOLDEN[name]
    assert decode_move_record(unpack_header(bytes.fromhex(_GOLDEN[name]))) == _RECORDS[name]


@pytest.mark.parametrize("name", _RECORDS)
def test_every_record_comes_back(name: str) -> None:
    """A record is read from its header in the log, and its header says what it is."""
    assert set(_RECORDS) == {str(step) for step in MoveStep}, "the tests here look at all of them"
    header = unpack_header(pack_header(_RECORDS[name].header()))
    assert decode_move_record(header) == _RECORDS[name]
    assert step_of(header) == name
    if isinstance(record := _RECORDS[name], ImportRecord):  # without the field steps are not kept
        kept = dataclasses.replace(record, record=SHARED_STATE, keeps_steps=True)
        assert decode_move_record(unpack_header(pack_header(kept.header()))) == kept
        assert "keeps_steps" in kept.header() and "keeps_steps" not in header


@given(st.sets(st.integers(0, 2**16 - 1), min_size=1, max_size=50), st.data())
def test_any_move_comes_back(partitions: set[int], data: st.DataObject) -> None:
    """Partitions and versions of any number and size are kept."""
    versions = data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=len(partitions), max_size=len(partitions)))
    move = Move(
        move_id="é" * 32,
        source=2**16 - 1,
        destination=0,
        partitions=tuple(sorted(partitions)),
        versions=tuple(versions),
    )
    record = MoveRecord(step=MoveStep.SEAL, move=move)
    assert decode_move_record(unpack_header(pack_header(record.header()))) == record


def test_other_records_are_none_of_a_move() -> None:
    """Batches and hellos have no transition; a release that knows more has one that is refused by name."""
    for header in ({"kind": 1, "transition": "seal"}, {"kind": 2}, {}):
        assert step_of(header) is None
        with pytest.raises(CorruptionError, match="none of a move"):
            decode_move_record(header)
    for name in ("split", 5, None):
        with pytest.raises(CorruptionError, match="unknown transition"):
            step_of(_header("seal", transition=name))


_SENSELESS: dict[str, list[dict[str, Any]]] = {
    "seal": [
        *({"move": value} for value in (5, "", "m" * 65)),
        *({"source": value} for value in (None, 2)),
        *({"destination": value} for value in (-1, 2**16, "2")),
        {"partitions": b"", "versions": b""},
        *({"partitions": value} for value in (b"\1\0\0\0\1\0\0\0", b"\1\0\0\0\1\0\1\0", b"\1\0\0", [1, 300])),
        *({"versions": value} for value in (b"\1\0\0\0\0\0\0\0", b"\1\0\0\0")),
        {"position": [1, 2]},
    ],
    "copy": [{"position": None}],
    "release": [{"position": [7]}, {"position": 7}],
    "activate": [{"position": [-1, 2]}, {"position": [1, "x"]}],
    "import": [{"position": None}, {"record": b""}, {"source": "0"}],
    "map": [{"map": b"x"}, {"map": None}],
}


@pytest.mark.parametrize(("name", "changes"), [(name, each) for name, some in _SENSELESS.items() for each in some])
def test_what_makes_no_sense_is_refused(name: str, changes: dict[str, Any]) -> None:
    """A header that no shard has written is a damaged log, not another exception."""
    with pytest.raises(CorruptionError, match=f"a record of a move, {name}, cannot be understood"):
        decode_move_record(_header(name, **changes))


def test_a_move_of_a_map() -> None:
    """A move takes its source and versions from the map; released, it gives the partitions to the destination."""
    first = PartitionMap.first(2, 8)
    move = Move.of_map(first, (1, 5), move_id="m1", destination=2)
    assert (move.source, move.versions) == (1, (1, 1))
    released = move.apply_to(first)
    assert released.partitions_of(2).tolist() == [1, 5]
    assert move.apply_to(released) is released
    back = Move.of_map(released, (5,), move_id="m2", destination=1)
    assert (back.source, back.versions, back.apply_to(released).owners[5]) == (2, (2,), 1)


@pytest.mark.parametrize(
    ("partitions", "destination"), [((0, 1), 2), ((8,), 2), ((-1,), 2), ((1,), 1), ((5, 1), 2), ((), 2)]
)
def test_moves_that_no_map_allows(partitions: tuple[int, ...], destination: int) -> None:
    """A move has one source, another destination, and partitions of the map in order."""
    with pytest.raises(RequestError, match="move 'm1'"):
        Move.of_map(PartitionMap.first(2, 8), partitions, move_id="m1", destination=destination)
