"""Row keys: golden bytes, order, round trips."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.row_keys import KEY_BYTES, META_PREFIX, decode_row_ids, encode_keys, key_prefix
from headrace.schemas.tables import MAX_DIM, ColumnShard

_KEY = struct.Struct(">IHHQ")
table_ids = st.integers(1, 2**32 - 1)
shards = st.builds(ColumnShard, offset=st.integers(0, MAX_DIM), width=st.integers(1, MAX_DIM))
row_ids = st.integers(0, 2**63 - 1)


def test_golden_bytes() -> None:
    """A key's bytes never change: stores on disk have them."""
    keys = encode_keys(7, ColumnShard(offset=64, width=128), np.array([0, 258, 2**63 - 1], np.int64))
    assert [key.hex() for key in keys] == [
        "00000007004000800000000000000000",
        "00000007004000800000000000000102",
        "00000007004000807fffffffffffffff",
    ]
    assert bytes(4) == META_PREFIX


@given(table_ids, shards, st.lists(row_ids, max_size=20))
def test_round_trip(table_id: int, shard: ColumnShard, ids: list[int]) -> None:
    """Decoding a key gives what was encoded, and exact `bytes` of one length are made."""
    keys = encode_keys(table_id, shard, np.array(ids, np.int64).repeat(2)[::2])  # a strided view
    assert all(type(key) is bytes and len(key) == KEY_BYTES for key in keys)
    assert [_KEY.unpack(key) for key in keys] == [(table_id, shard.offset, shard.width, row) for row in ids]
    assert decode_row_ids(keys).tolist() == ids


@given(st.tuples(table_ids, shards, row_ids), st.tuples(table_ids, shards, row_ids))
def test_keys_sort_by_table_shard_row(a: tuple[int, ColumnShard, int], b: tuple[int, ColumnShard, int]) -> None:
    """Bytewise order is the order of (table, column shard, row id)."""
    key_a, key_b = (encode_keys(t, s, np.array([r], np.int64))[0] for t, s, r in (a, b))
    assert (key_a < key_b) == (a < b)


@given(table_ids, shards, row_ids)
def test_prefixes(table_id: int, shard: ColumnShard, row: int) -> None:
    """Every key begins with its table's and its column shard's prefix, and none with that of metadata."""
    key = encode_keys(table_id, shard, np.array([row], np.int64))[0]
    assert key.startswith(key_prefix(table_id))
    assert key.startswith(key_prefix(table_id, shard))
    assert not key.startswith(META_PREFIX)
