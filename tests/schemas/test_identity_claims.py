"""Identity claims: golden bytes, and the order of their keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.identity_claims import CLAIMS, CLAIMS_SHARD, in_key_order
from headrace.schemas.row_keys import decode_row_ids, encode_keys, key_prefix
from headrace.schemas.tables import MAX_DIM, ColumnShard

identities = st.integers(-(2**63), 2**63 - 1)


def test_golden_bytes() -> None:
    """A claim's key and value never change: stores on disk have them."""
    keys = encode_keys(7, CLAIMS_SHARD, np.array([0, 258, 2**63 - 1, -(2**63), -2], np.int64))
    assert [key.hex() for key in keys] == [
        "00000007ffff00000000000000000000",
        "00000007ffff00000000000000000102",
        "00000007ffff00007fffffffffffffff",
        "00000007ffff00008000000000000000",
        "00000007ffff0000fffffffffffffffe",
    ]
    claim = np.zeros(1, CLAIMS.dtype)
    CLAIMS.set_header(claim, ..., epoch=3, step=5, time_us=7)
    claim["row"] = 258
    assert CLAIMS.values_of(claim)[0].hex() == (
        "00 01 0000 03000000 0500000000000000 0700000000000000 0201000000000000".replace(" ", "")
    )


def test_no_row_has_such_a_key() -> None:
    """The claims of a table lie behind all its rows, whatever columns these have, and before the next table's."""
    last = encode_keys(7, ColumnShard(offset=MAX_DIM - 1, width=1), np.array([2**63 - 1], np.int64))[0]
    first_claim, last_claim = encode_keys(7, CLAIMS_SHARD, np.array([0, -1], np.int64))
    assert last < first_claim < last_claim < key_prefix(8)


@given(st.lists(identities, unique=True))
def test_keys_ascend(some: list[int]) -> None:
    """Brought in order, the keys of ascending identities ascend, and hold what they were made of."""
    ascending = np.array(sorted(some), np.int64)
    order = in_key_order(ascending)
    ordered = ascending if order is None else ascending[order]
    keys = encode_keys(1, CLAIMS_SHARD, ordered)
    assert keys == sorted(keys)
    assert decode_row_ids(keys).tolist() == ordered.tolist()
    assert sorted(ordered.tolist()) == ascending.tolist()
