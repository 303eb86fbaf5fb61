"""Routing: golden shards, and that rows spread."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.routing import shards_of_rows, table_seed

_MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    """Mix one number, written out in plain integers."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def test_golden_shards() -> None:
    """Where a row lives never changes: stores on disk are split so."""
    # The first outputs of splitmix64 from seed 0, as its authors' program prints them.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    # FNV-1a 64 of the empty string and of "a", from its specification; other letters count as their UTF-8 bytes.
    assert (table_seed(""), table_seed("a")) == (0xCBF29CE484222325, 0xAF63DC4C8601EC8C)
    assert table_seed("é") == 0x0AC21707B7181E01
    ids = np.array([0, 1, 2, 3, 1000, 2**40, 2**63 - 1], np.int64)
    assert shards_of_rows(table_seed("user.weight"), ids, 4).tolist() == [1, 0, 3, 3, 0, 1, 2]


@given(st.text(max_size=20), st.lists(st.integers(0, 2**63 - 1), max_size=20), st.integers(1, 1000))
def test_equals_the_plain_formula(fqn: str, ids: list[int], num_shards: int) -> None:
    """The vectorized hash is splitmix64 of row id xor seed, modulo the shards."""
    seed = table_seed(fqn)
    given_ids = np.array(ids, np.int64)
    shards = shards_of_rows(seed, given_ids, num_shards)
    assert given_ids.tolist() == ids
    assert shards.tolist() == [splitmix64(row ^ seed) % num_shards for row in ids]
