"""Row keys and row records: golden bytes, order, round trips, refusals."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import CorruptionError
from headrace.schemas.idl import idl
from headrace.schemas.row_records import (
    FLAG_DELETED,
    KEY_BYTES,
    META_PREFIX,
    MISSING,
    PRESENT,
    RecordLayout,
    decode_row_ids,
    encode_keys,
    key_prefix,
)
from headrace.schemas.tables import MAX_DIM, ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.schemas.version import MAX_EPOCH

SPEC = TableSpec(
    fqn="t",
    num_rows=10,
    dim=2,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
LAYOUT = RecordLayout(SPEC, SPEC.whole)
GOLDEN = bytes.fromhex(
    "00 01 0000 03000000"  # flags, version, frequency, epoch
    "0500000000000000 0700000000000000"  # step, time_us
    "0000803f 00000040"  # weights 1.0, 2.0
    "00004040"  # momentum1 3.0
)


def encode_deleted(layout: RecordLayout = LAYOUT, *, epoch: int = 3, step: int = 5, time_us: int = 7) -> bytes:
    record = np.zeros(1, layout.dtype)
    layout.set_header(record, ..., epoch=epoch, step=step, time_us=time_us, flags=FLAG_DELETED)
    return layout.values_of(record)[0]


def test_golden_bytes() -> None:
    """A record's and a key's bytes never change: stores on disk have them. A table with identities has them behind the
    version."""
    columns = {"weights": np.array([1, 2], "<f4"), "state:momentum1": np.array([3], "<f4")}
    assert LAYOUT.encode(columns, epoch=3, step=5, time_us=7) == [GOLDEN]
    assert encode_deleted() == b"\1" + GOLDEN[1:24]
    spec = TableSpec(fqn="t", num_rows=0, dim=1, dtype=DType.UINT8, has_identities=True)
    layout = RecordLayout(spec, spec.whole)
    (value,) = layout.encode({"weights": b"\xab"}, epoch=1, step=2, time_us=3, identities=np.array([258], np.int64))
    assert value.hex() == "00010000010000000200000000000000030000000000000002010000000000" + "00" + "ab"
    assert len(encode_deleted(layout)) == 32
    # Readers take the bytes of a reply for these numbers.
    presence = idl.RowPresence
    assert (MISSING, PRESENT) == (presence.MISSING, presence.PRESENT) == (0, 1)
    ids = [0, 258, 2**63 - 1]
    keys = encode_keys(7, ColumnShard(offset=64, width=128), np.array(ids, np.int64))
    assert [key.hex() for key in keys] == [f"0000000700400080{row:016x}" for row in ids]
    last = encode_keys(7, ColumnShard(offset=MAX_DIM - 1, width=1), np.array([2**63 - 1], np.int64))[0]
    assert max(keys) < last < key_prefix(8)
    assert bytes(4) == META_PREFIX


specs = st.builds(
    TableSpec,
    fqn=st.just("t"),
    num_rows=st.just(0),
    dim=st.integers(1, 9),
    dtype=st.sampled_from(DType),
    states=st.lists(
        st.one_of(
            st.builds(
                StateSpec, name=st.sampled_from("abc"), kind=st.just(StateKind.POINTWISE), dtype=st.sampled_from(DType)
            ),
            st.builds(
                StateSpec,
                name=st.sampled_from("abc"),
                kind=st.just(StateKind.ROWWISE),
                dtype=st.sampled_from(DType),
                width=st.integers(1, 5),
            ),
        ),
        unique_by=lambda state: state.name,
    ).map(tuple),
    has_identities=st.booleans(),
)


@given(specs, st.integers(0, 5), st.data())
def test_round_trip(spec: TableSpec, n: int, data: st.DataObject) -> None:
    """Decoding gives every byte that was encoded, for every element type and state, with gaps and deleted rows."""
    offset = data.draw(st.integers(0, spec.dim - 1))
    shard = ColumnShard(offset=offset, width=data.draw(st.integers(1, spec.dim - offset)))
    layout = RecordLayout(spec, shard)
    columns = {
        name: data.draw(st.binary(min_size=n * column.size_bytes, max_size=n * column.size_bytes))
        for name, column in layout.columns.items()
    }
    epoch, step = data.draw(st.integers(0, MAX_EPOCH)), data.draw(st.integers(0, 2**63 - 1))
    time_us = data.draw(st.integers(-(2**63), 2**63 - 1))
    identities = np.arange(n, dtype=np.int64) * -3 if spec.has_identities else None
    version: dict[str, Any] = {"epoch": epoch, "step": step, "time_us": time_us}
    given_version = {name: np.array([value] * (n - 1) + [0]) for name, value in version.items()} if n % 2 else version
    values: list[bytes | None] = list(layout.encode(columns, **given_version, identities=identities))
    assert all(len(value) == layout.size_bytes for value in values if value is not None)
    deleted = [encode_deleted(layout, **version)]
    records, presence = layout.decode([*values, None, *deleted])
    assert presence.tolist() == [1] * n + [0, 2]
    for name in columns:
        assert records[name][:n].tobytes() == columns[name]
        assert records[name][n:].tobytes() == bytes(2 * layout.columns[name].size_bytes)
    for name, value in version.items():
        assert records[name].tolist() == [*np.broadcast_to(given_version[name], n).tolist(), 0, value]
    if identities is not None:
        assert records["identity"].tolist() == [*identities.tolist(), 0, 0]
    assert layout.values_of(records[np.flatnonzero(presence)]) == [*values, *deleted]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (b"", "0 bytes"),
        (GOLDEN[:-1], "35 bytes"),
        (GOLDEN + b"\0", "37 bytes"),
        (GOLDEN[:24], "not marked as deleted"),
        (b"\0\2" + GOLDEN[2:], "record version"),
        (b"\1\0" + GOLDEN[2:24], "record version"),
    ],
)
def test_damage_is_refused(value: bytes, match: str) -> None:
    """A value that is no record of the table is reported, alone, among sound ones, and beside one that evens it out."""
    for values in ([value], [GOLDEN, None, value, GOLDEN]):
        with pytest.raises(CorruptionError, match=match):
            LAYOUT.decode(values)
    with pytest.raises(CorruptionError, match="bytes"):
        LAYOUT.decode([GOLDEN[:-1], GOLDEN + b"\0"])


@given(st.lists(st.none() | st.binary(max_size=40) | st.just(GOLDEN), max_size=6))
def test_any_bytes_decode_or_are_refused(values: list[bytes | None]) -> None:
    """Whatever the store holds, decoding ends in records or in CorruptionError."""
    try:
        records, presence = LAYOUT.decode(values)
    except CorruptionError:
        return
    assert len(records) == len(presence) == len(values)
    assert [p == 0 for p in presence.tolist()] == [v is None for v in values]
    assert ((records["flags"] & FLAG_DELETED != 0) == (presence == 2)).all()


_KEY = struct.Struct(">IHHQ")
table_ids = st.integers(1, 2**32 - 1)
shards = st.builds(ColumnShard, offset=st.integers(0, MAX_DIM), width=st.integers(1, MAX_DIM))
row_ids = st.integers(0, 2**63 - 1)


@given(table_ids, shards, st.lists(row_ids, max_size=20), st.tuples(table_ids, shards, row_ids))
def test_keys_round_trip(
    table_id: int, shard: ColumnShard, ids: list[int], other: tuple[int, ColumnShard, int]
) -> None:
    """A key gives what was encoded, begins with its prefixes, and sorts by table, column shard and row id."""
    keys = encode_keys(table_id, shard, np.array(ids, np.int64).repeat(2)[::2])  # a strided view
    assert all(type(key) is bytes and len(key) == KEY_BYTES for key in keys)
    assert [_KEY.unpack(key) for key in keys] == [(table_id, shard.offset, shard.width, row) for row in ids]
    assert decode_row_ids(keys).tolist() == ids
    (its,) = encode_keys(other[0], other[1], np.array(other[2:], np.int64))
    for key, row in zip(keys, ids, strict=True):
        assert (key < its) == ((table_id, shard, row) < other)
        assert key.startswith(key_prefix(table_id)) and key.startswith(key_prefix(table_id, shard))
        assert not key.startswith(META_PREFIX)
